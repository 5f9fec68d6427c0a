//! Peers that are connected to read.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use message_engine::Connection;

use crate::peers::wire::{self, Response};

/// A connected peer.
pub(super) struct Reader {
    pub(super) connection: Connection,
    pub(super) is_admitted: bool,
    /// Requests that are being prepared.
    pub(super) preparing: HashSet<u64>,
}

impl Reader {
    pub(super) fn new(connection: Connection) -> Self {
        Self { connection, is_admitted: false, preparing: HashSet::new() }
    }

    /// Sends a response without waiting. A reader that does not take it in time asks elsewhere.
    pub(super) fn send(&self, response: &Response) {
        let deadline = Instant::now() + SEND_TIMEOUT;
        if let Err(error) = self.connection.start_notify(&wire::encode(response), deadline) {
            tracing::debug!(connection = self.connection.id(), %error, "a reader of weights is lost");
            self.connection.close();
        }
    }
}

/// Longest wait for room in a reader's window of notifications.
const SEND_TIMEOUT: Duration = Duration::from_secs(5);
