//! The message engine: messages, one-sided reads and writes, and notifications between processes.
//!
//! An [`Engine`] listens, connects and owns one thread, which does all input and output. Users register
//! memory, and start transfers on [`Connection`]s: two-sided ([`send`](Connection::send) and
//! [`recv`](Connection::recv), matched in order), one-sided ([`read`](Connection::read) and
//! [`write`](Connection::write) of memory that the peer has [advertised](Connection::advertise)), and
//! [notifications](Connection::notify). Bytes go by the best [`Fabric`](crate::fabric::Fabric) that both sides have.
//!
//! ```no_run
//! use std::time::{Duration, Instant};
//! use switchyard_message_engine::{Access, Engine, EngineConfig};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let engine = Engine::start(EngineConfig::local())?;
//! let peer_metadata = std::fs::read("peer.metadata")?;
//! let soon = || Instant::now() + Duration::from_secs(5);
//! let connection = engine.add_remote_endpoint(&peer_metadata, soon())?;
//! let memory = engine.alloc(1 << 20, Access::RemoteReadWrite)?;
//! memory.copy_in(0, b"hello")?;
//! connection.send(&memory.span(0, 5)?, soon())?;
//! # Ok(())
//! # }
//! ```
//!
//! - A transfer ends exactly once: as done, or as failed with the reason. A failed one is never reported
//!   as done, and when it has ended its local buffer is free.
//! - Every wait has a deadline. A peer that dies, or sends what makes no sense, costs its own connection.
//! - Nothing is truncated or dropped: messages and notifications that nobody takes stay with the sender,
//!   whose transfer then waits until its deadline.
//! - Commands go to the thread by a bounded queue; after warm-up transfers allocate nothing, but for the
//!   bytes of notifications.

mod codec;
mod config;
mod connection;
mod deregistration;
mod descriptor;
mod error;
#[cfg(fuzzing)]
pub mod fuzzing;
mod io;
mod link;
mod mailbox;
mod memory;
mod metadata;
mod pending;
mod registration;
mod shared;
mod transfer;
mod wire;

use std::net::SocketAddr;
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

pub use config::{EngineConfig, default_fabrics, open_fabric};
pub use connection::Connection;
pub use descriptor::{DESCRIPTOR_BYTES, Descriptor, DescriptorError};
pub use error::{
    CloseReason, ConnectError, DeregisterError, OpError, RegisterError, StartError, StopError,
    SubmitError, TransferError, UnknownTransfer, WaitError,
};
pub use memory::{MemoryRegion, Span};
pub use metadata::EndpointMetadata;
pub use transfer::{Transfer, TransferId, TransferStatus};
pub use wire::FrameError;

pub use crate::fabric::{Access, DmaBuf};

use self::mailbox::Mailbox;
use self::shared::{Command, ConnShared, Shared, lock};

/// What a peer said of itself when the connection was made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerInfo {
    /// Names its engine.
    pub engine_id: u64,
    /// Where it listens; the address is the one it was met at.
    pub addr: SocketAddr,
    /// Its GPU.
    pub gpu_index: Option<u32>,
    /// PCI address of that GPU.
    pub pci_bdf: Option<String>,
}

/// A notification as it was received.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Notification {
    /// Number of the connection it came by.
    pub connection: u64,
    /// Engine that sent it.
    pub engine_id: u64,
    /// What it says.
    pub bytes: Vec<u8>,
}

impl Notification {
    /// What it takes of the window.
    const fn cost(&self) -> u64 {
        self.bytes.len() as u64 + link::NOTIFY_OVERHEAD
    }
}

/// What an engine holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EngineStats {
    /// Connections that stand.
    pub num_connections: usize,
    /// Transfers whose outcome nobody has taken.
    pub num_transfers: usize,
    /// Rounds of the thread so far: looks at everything that may have something to do.
    pub num_rounds: u64,
}

/// One engine. Dropping it closes its connections and fails their transfers.
#[derive(Debug)]
pub struct Engine {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Engine {
    /// Listens and starts the thread.
    ///
    /// # Errors
    /// [`StartError`].
    pub fn start(config: EngineConfig) -> Result<Self, StartError> {
        let (shared, io) = io::Io::new(config)?;
        let thread = std::thread::Builder::new()
            .name("switchyard-engine".to_owned())
            .spawn(move || io.run())
            .map_err(|source| StartError::System { what: "start a thread".to_owned(), source })?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// What to publish, so that others can reach this engine.
    #[must_use]
    pub fn metadata(&self) -> Vec<u8> {
        self.shared.metadata.encode()
    }

    /// The same, readable.
    #[must_use]
    pub fn endpoint(&self) -> &EndpointMetadata {
        &self.shared.metadata
    }

    /// Connects to the engine at `addr`.
    ///
    /// # Errors
    /// [`ConnectError`].
    pub fn connect(&self, addr: SocketAddr, deadline: Instant) -> Result<Connection, ConnectError> {
        let (command, reply) = connect_command(addr, deadline);
        let pushed = self.shared.push_until(command, deadline);
        pushed.map_err(|_| ConnectError::Timeout { addr: addr.to_string() })?;
        reply.pop(reply_deadline(deadline)).unwrap_or_else(|error| Err(no_reply(addr, error)))
    }

    /// The same for tasks.
    ///
    /// # Errors
    /// [`ConnectError`].
    pub async fn connect_async(
        &self,
        addr: SocketAddr,
        deadline: Instant,
    ) -> Result<Connection, ConnectError> {
        let (command, reply) = connect_command(addr, deadline);
        let pushed = self.shared.push_until_async(command, deadline).await;
        pushed.map_err(|_| ConnectError::Timeout { addr: addr.to_string() })?;
        let popped = reply.pop_async(reply_deadline(deadline)).await;
        popped.unwrap_or_else(|error| Err(no_reply(addr, error)))
    }

    /// The next connection that a peer has made. Peers can use theirs without waiting for this.
    ///
    /// # Errors
    /// [`WaitError`].
    pub fn accept(&self, deadline: Instant) -> Result<Connection, WaitError> {
        self.shared.accepted.pop(deadline)
    }

    /// The same for tasks.
    ///
    /// # Errors
    /// [`WaitError`].
    pub async fn accept_async(&self, deadline: Instant) -> Result<Connection, WaitError> {
        self.shared.accepted.pop_async(deadline).await
    }

    /// The connection to the engine that published `metadata`: one that stands, whoever made it, or a new
    /// one. The engine keeps it until [`remove_remote_endpoint`](Self::remove_remote_endpoint).
    ///
    /// # Errors
    /// [`ConnectError`].
    pub fn add_remote_endpoint(
        &self,
        metadata: &[u8],
        deadline: Instant,
    ) -> Result<Connection, ConnectError> {
        let peer = EndpointMetadata::decode(metadata).map_err(ConnectError::Metadata)?;
        if let Some(known) = self.find_connection(peer.engine_id) {
            return Ok(known);
        }
        let found = self.connect(peer.addr, deadline)?;
        self.retain_endpoint(&peer, found)
    }

    /// The same for tasks.
    ///
    /// # Errors
    /// [`ConnectError`].
    pub async fn add_remote_endpoint_async(
        &self,
        metadata: &[u8],
        deadline: Instant,
    ) -> Result<Connection, ConnectError> {
        let peer = EndpointMetadata::decode(metadata).map_err(ConnectError::Metadata)?;
        if let Some(known) = self.find_connection(peer.engine_id) {
            return Ok(known);
        }
        let found = self.connect_async(peer.addr, deadline).await?;
        self.retain_endpoint(&peer, found)
    }

    /// Closes every connection to the engine that published `metadata`. False: there was none.
    ///
    /// # Errors
    /// [`ConnectError::Metadata`].
    pub fn remove_remote_endpoint(&self, metadata: &[u8]) -> Result<bool, ConnectError> {
        let peer = EndpointMetadata::decode(metadata).map_err(ConnectError::Metadata)?;
        let is_theirs = |connection: &Connection| connection.peer().engine_id == peer.engine_id;
        lock(&self.shared.endpoints).retain(|connection| !is_theirs(connection));
        self.shared.accepted.retain(|connection| !is_theirs(connection));
        let mut num_closed = 0;
        for connection in self.connections().filter(is_theirs) {
            connection.close();
            num_closed += 1;
        }
        Ok(num_closed > 0)
    }

    /// How far a transfer is whose handle was given up for its number. Asking about one that is done
    /// takes its outcome; a failed one stays known until [`take`](Self::take).
    ///
    /// # Errors
    /// [`UnknownTransfer`].
    pub fn poll_async(&self, id: TransferId) -> Result<TransferStatus, UnknownTransfer> {
        let status = self.shared.transfers.status(id)?;
        if matches!(status, TransferStatus::Done { .. }) {
            self.shared.transfers.release(id);
        }
        Ok(status)
    }

    /// Forgets a transfer, and gives how far it was.
    ///
    /// # Errors
    /// [`UnknownTransfer`].
    pub fn take(&self, id: TransferId) -> Result<TransferStatus, UnknownTransfer> {
        let status = self.shared.transfers.status(id)?;
        self.shared.transfers.release(id);
        Ok(status)
    }

    /// The next notification of any peer.
    ///
    /// # Errors
    /// [`WaitError`].
    pub fn next_notification(&self, deadline: Instant) -> Result<Notification, WaitError> {
        Ok(self.free_window(self.shared.inbox.pop(deadline)?))
    }

    /// The same for tasks.
    ///
    /// # Errors
    /// [`WaitError`].
    pub async fn next_notification_async(
        &self,
        deadline: Instant,
    ) -> Result<Notification, WaitError> {
        Ok(self.free_window(self.shared.inbox.pop_async(deadline).await?))
    }

    /// All notifications that are there.
    #[must_use]
    pub fn take_notifications(&self) -> Vec<Notification> {
        self.shared.inbox.drain().into_iter().map(|taken| self.free_window(taken)).collect()
    }

    /// What the engine holds.
    #[must_use]
    pub fn stats(&self) -> EngineStats {
        EngineStats {
            num_connections: self.connections().count(),
            num_transfers: self.shared.transfers.num_in_use(),
            num_rounds: self.shared.transfers.pulse.num_rounds(),
        }
    }

    /// Ends all connections, fails their transfers, and waits for the end of the thread.
    ///
    /// # Errors
    /// [`StopError`] when the thread does not come back from a transport's library.
    pub fn stop(mut self) -> Result<(), StopError> {
        self.end()
    }

    fn end(&mut self) -> Result<(), StopError> {
        let Some(thread) = self.thread.take() else { return Ok(()) };
        let pulse = &self.shared.transfers.pulse;
        let (mut watch, mut looked) = (pulse.watch(), Instant::now());
        let mut is_pushed = self.shared.push(Command::Stop).is_ok();
        lock(&self.shared.endpoints).clear();
        let mut pause = Duration::from_micros(20);
        while !thread.is_finished() {
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(1));
            is_pushed = is_pushed || self.shared.push(Command::Stop).is_ok();
            if looked.elapsed() >= pulse.interval() {
                looked = Instant::now();
                if watch.finds_stuck(pulse) {
                    return Err(StopError);
                }
            }
        }
        // A panic of the thread has been reported already.
        let _ = thread.join();
        self.shared.accepted.drain();
        Ok(())
    }

    /// Connections that stand.
    fn connections(&self) -> impl Iterator<Item = Connection> + use<> {
        let mut connections = lock(&self.shared.connections);
        connections.retain(|weak| weak.strong_count() > 0);
        let found: Vec<_> = connections.iter().filter_map(Weak::upgrade).collect();
        drop(connections);
        found
            .into_iter()
            .filter(|shared| shared.closed.get().is_none())
            .map(|shared| Connection { shared })
    }

    fn find_connection(&self, engine_id: u64) -> Option<Connection> {
        let known = self.connections().find(|found| found.peer().engine_id == engine_id)?;
        let mut endpoints = lock(&self.shared.endpoints);
        endpoints.retain(|connection| connection.closed().is_none());
        if !endpoints.iter().any(|other| other.id() == known.id()) {
            endpoints.push(known.clone());
        }
        Some(known)
    }

    fn retain_endpoint(
        &self,
        peer: &EndpointMetadata,
        found: Connection,
    ) -> Result<Connection, ConnectError> {
        if found.peer().engine_id != peer.engine_id {
            found.close();
            return Err(ConnectError::Foreign {
                addr: peer.addr.to_string(),
                detail: format!(
                    "engine {:016x} answers there, the metadata is of {:016x}: it has been restarted",
                    found.peer().engine_id,
                    peer.engine_id
                ),
            });
        }
        lock(&self.shared.endpoints).push(found.clone());
        Ok(found)
    }

    /// Lets the peer send as much more.
    fn free_window(&self, (from, notification): (Weak<ConnShared>, Notification)) -> Notification {
        let cost = notification.cost();
        self.shared.subtract_untaken(cost);
        if let Some(from) = from.upgrade() {
            from.add_taken(cost);
        }
        notification
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        if let Err(error) = self.end() {
            tracing::error!(%error, "an engine was left behind");
        }
    }
}

/// What asks the thread to connect, and where it answers.
fn connect_command(
    addr: SocketAddr,
    deadline: Instant,
) -> (Command, Arc<Mailbox<shared::ConnectReply>>) {
    let reply = Arc::new(Mailbox::default());
    (Command::Connect { addr, deadline, reply: Arc::clone(&reply) }, reply)
}

/// When the thread must have ended what has this deadline.
fn reply_deadline(deadline: Instant) -> Instant {
    deadline.checked_add(GRACE).unwrap_or(deadline)
}

fn no_reply(addr: SocketAddr, error: WaitError) -> ConnectError {
    match error {
        WaitError::Deadline => ConnectError::Timeout { addr: addr.to_string() },
        WaitError::Stopped => ConnectError::Stopped,
    }
}

/// The thread ends handshakes at their deadlines; this long afterwards it counts as stuck.
const GRACE: Duration = Duration::from_secs(2);
