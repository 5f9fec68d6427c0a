//! The task that ends the whole server when one part of it ends.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::error::{DataError, ServerError};
use crate::members::{Membership, MembershipEnd};
use crate::plane::{DataPlane, ThreadEnd};

/// How a server ended. The first reader takes the result.
pub(super) type End = Arc<Mutex<Option<Result<(), ServerError>>>>;

/// The parts of a running server that can end.
pub(super) struct Supervision {
    pub(super) data_end: ThreadEnd,
    pub(super) member: Option<Membership>,
    pub(super) listening: JoinHandle<()>,
    pub(super) stop: watch::Sender<bool>,
    pub(super) data: Arc<dyn DataPlane>,
    pub(super) end: watch::Sender<Option<End>>,
}

impl Supervision {
    /// Waits for the first part that ends, and stops the others.
    pub(super) async fn run(self) {
        let Self { data_end, member, mut listening, stop, data, end } = self;
        let mut is_listening = true;
        let vanished = || Err(DataError::Panicked { message: "the thread vanished".to_owned() });
        tokio::pin!(data_end);
        let membership = async {
            match member {
                // A server that leaves by itself stops its data thread, too, and that ends the wait.
                Some(member) => match member.run().await {
                    Ok(()) => std::future::pending().await,
                    Err(end) => end,
                },
                None => std::future::pending().await,
            }
        };
        let result = tokio::select! {
            biased;
            result = &mut data_end => result.unwrap_or_else(|_| vanished()).map_err(ServerError::from),
            end = membership => {
                data.stop();
                let result = (&mut data_end).await.unwrap_or_else(|_| vanished());
                let MembershipEnd { reason, is_name_conflict } = end;
                result
                    .map_err(ServerError::from)
                    .and(Err(ServerError::Membership { reason, is_name_conflict }))
            }
            outcome = &mut listening => {
                is_listening = false;
                let is_stopping = *stop.borrow();
                data.stop();
                let result = (&mut data_end).await.unwrap_or_else(|_| vanished());
                let result = result.map_err(ServerError::from);
                // Connected clients could go on, but none could connect any more: a restart is better.
                if is_stopping {
                    result
                } else {
                    result.and(Err(ServerError::Listener { outcome: outcome.err() }))
                }
            }
        };
        if let Err(error) = &result {
            tracing::error!(%error, "the server ended");
        }
        let _ = stop.send(true);
        // Before the end is published, so that its reader can use the port again.
        if is_listening && tokio::time::timeout(LISTENER_TIMEOUT, listening).await.is_err() {
            tracing::warn!("the listener for clients is slow to close");
        }
        end.send_replace(Some(Arc::new(Mutex::new(Some(result)))));
    }
}

/// Longest wait for the listener to close.
const LISTENER_TIMEOUT: Duration = Duration::from_secs(2);
