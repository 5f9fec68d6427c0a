//! The message engine: messages, one-sided reads and writes, and notifications between processes.
//!
//! An [`Engine`] listens, connects, and owns one thread that does all input and output. Users register memory and
//! start transfers on [`Connection`]s:
//!
//! - two-sided ones: [`send`](Connection::send) and [`recv`](Connection::recv), matched in order;
//! - one-sided ones: [`read`](Connection::read) and [`write`](Connection::write) of memory that the peer has
//!   [advertised](Connection::advertise);
//! - [notifications](Connection::notify).
//!
//! Bytes go over the best [`Fabric`](crate::fabric::Fabric) that both sides have.
//!
//! ```
//! use std::time::{Duration, Instant};
//! use switchyard_message_engine::{Access, Engine, EngineConfig};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let soon = || Instant::now() + Duration::from_secs(30);
//! // Both engines run in one process here. Usually another process publishes its metadata.
//! let engine = Engine::start(EngineConfig::local())?;
//! let peer = Engine::start(EngineConfig::local())?;
//! let connection = engine.add_remote_endpoint(&peer.metadata(), soon())?;
//! let memory = engine.alloc(1 << 20, Access::RemoteReadWrite)?;
//! memory.copy_in(0, b"hello")?;
//! connection.send(&memory.span(0, 5)?, soon())?;
//! # Ok(())
//! # }
//! ```
//!
//! - A transfer ends exactly once: as done, or as failed with the reason. A failed one is never reported as done.
//!   Its local buffer is free once it has ended.
//! - Every wait has a deadline. A peer that dies or breaks the protocol loses its own connection and no other.
//! - Nothing is truncated or dropped. A message or notification that the peer does not take stays with the sender,
//!   whose transfer waits until its deadline.
//! - Commands go to the thread through a bounded queue. After warm-up, transfers allocate nothing except the bytes of
//!   notifications.

mod codec;
mod config;
mod connection;
mod deregistration;
mod descriptor;
mod direct;
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
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

pub use config::{ConnectOptions, EngineConfig, default_fabrics, open_fabric};
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

pub use crate::fabric::{Access, DirectWait, DmaBuf};

use self::mailbox::Mailbox;
use self::shared::{Command, ConnShared, Shared, lock};

/// A peer's description of itself, from the handshake of its connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerInfo {
    /// Number of its engine: random, new with every start.
    pub engine_id: u64,
    /// Address of the connection's other end, with the port at which the peer listens.
    pub addr: SocketAddr,
    /// Its GPU.
    pub gpu_index: Option<u32>,
    /// PCI address of that GPU.
    pub pci_bdf: Option<String>,
}

/// A received notification.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Notification {
    /// Number of the connection that carried it.
    pub connection: u64,
    /// Engine that sent it.
    pub engine_id: u64,
    /// Its content.
    pub bytes: Vec<u8>,
}

impl Notification {
    /// Bytes of the sender's window that it occupies.
    const fn cost(&self) -> u64 {
        self.bytes.len() as u64 + link::NOTIFY_OVERHEAD
    }
}

/// Counts of an engine's connections, transfers and rounds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EngineStats {
    /// Established connections.
    pub num_connections: usize,
    /// Transfers whose outcome has not been taken.
    pub num_transfers: usize,
    /// Rounds of the thread so far. In a round it checks commands, sockets, fabrics and connections once.
    pub num_rounds: u64,
    /// Handshakes of peers that were refused: a failed TLS handshake, a wrong secret or ticket, or another reason that
    /// this side has sent to the peer.
    pub num_refused: u64,
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
    /// ```
    /// # use std::time::{Duration, Instant};
    /// # use switchyard_message_engine::{Access, Engine, EngineConfig};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let engine = Engine::start(EngineConfig::local())?;
    /// // Other processes connect with these bytes.
    /// let metadata = engine.metadata();
    /// assert!(metadata.len() < 1024);
    /// assert_eq!(engine.stats().num_connections, 0);
    /// engine.stop()?;
    /// # Ok(())
    /// # }
    /// ```
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

    /// Encoded metadata to publish, so that other processes can connect to this engine; below 1 KiB.
    #[must_use]
    pub fn metadata(&self) -> Vec<u8> {
        self.shared.metadata.encode()
    }

    /// The metadata of this engine, decoded.
    #[must_use]
    pub fn endpoint(&self) -> &EndpointMetadata {
        &self.shared.metadata
    }

    /// Connects to the engine at `addr`. Blocks until the handshake ends, at the latest at `deadline`.
    ///
    /// ```
    /// # use std::time::{Duration, Instant};
    /// # use switchyard_message_engine::{Access, Engine, EngineConfig};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let deadline = Instant::now() + Duration::from_secs(30);
    /// let (here, there) = (Engine::start(EngineConfig::local())?, Engine::start(EngineConfig::local())?);
    /// let out = here.connect(there.endpoint().addr, deadline)?;
    /// let back = there.accept(deadline)?;
    /// assert_eq!(out.peer().engine_id, there.endpoint().engine_id);
    /// assert_eq!(back.peer().engine_id, here.endpoint().engine_id);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`ConnectError`].
    pub fn connect(&self, addr: SocketAddr, deadline: Instant) -> Result<Connection, ConnectError> {
        self.connect_with(addr, ConnectOptions::default(), deadline)
    }

    /// As [`connect`](Self::connect), with options.
    ///
    /// # Errors
    /// [`ConnectError`].
    pub fn connect_with(
        &self,
        addr: SocketAddr,
        options: ConnectOptions,
        deadline: Instant,
    ) -> Result<Connection, ConnectError> {
        let (command, reply) = connect_command(addr, options, deadline);
        let pushed = self.shared.push_until(command, deadline);
        pushed.map_err(|_| ConnectError::Timeout { addr: addr.to_string() })?;
        reply.pop(reply_deadline(deadline)).unwrap_or_else(|error| Err(no_reply(addr, error)))
    }

    /// Awaitable form of [`connect`](Self::connect).
    ///
    /// # Errors
    /// [`ConnectError`].
    pub async fn connect_async(
        &self,
        addr: SocketAddr,
        deadline: Instant,
    ) -> Result<Connection, ConnectError> {
        let (command, reply) = connect_command(addr, ConnectOptions::default(), deadline);
        let pushed = self.shared.push_until_async(command, deadline).await;
        pushed.map_err(|_| ConnectError::Timeout { addr: addr.to_string() })?;
        let popped = reply.pop_async(reply_deadline(deadline)).await;
        popped.unwrap_or_else(|error| Err(no_reply(addr, error)))
    }

    /// Returns the next connection that a peer has made. Blocks until there is one, at the latest at `deadline`. The
    /// peer can use its end before this call.
    ///
    /// # Errors
    /// [`WaitError`].
    pub fn accept(&self, deadline: Instant) -> Result<Connection, WaitError> {
        self.shared.accepted.pop(deadline)
    }

    /// Awaitable form of [`accept`](Self::accept).
    ///
    /// # Errors
    /// [`WaitError`].
    pub async fn accept_async(&self, deadline: Instant) -> Result<Connection, WaitError> {
        self.shared.accepted.pop_async(deadline).await
    }

    /// Returns the connection to the engine that published `metadata`. It reuses an established one, made by either
    /// side, or makes a new one and blocks for that until `deadline`. The engine keeps the connection until
    /// [`remove_remote_endpoint`](Self::remove_remote_endpoint).
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

    /// Awaitable form of [`add_remote_endpoint`](Self::add_remote_endpoint).
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

    /// Closes every connection to the engine that published `metadata`. Returns false if there was none.
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

    /// Returns the status of a transfer by the number that [`into_id`](Transfer::into_id) has returned. A call that
    /// finds it done takes the outcome. A failed transfer stays known until [`take`](Self::take).
    ///
    /// ```
    /// # use std::time::{Duration, Instant};
    /// # use switchyard_message_engine::{Access, Engine, EngineConfig};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let deadline = Instant::now() + Duration::from_secs(30);
    /// # let (here, there) = (Engine::start(EngineConfig::local())?, Engine::start(EngineConfig::local())?);
    /// # let out = here.connect(there.endpoint().addr, deadline)?;
    /// # let back = there.accept(deadline)?;
    ///
    /// # let source = here.alloc(64, Access::Local)?;
    /// # let target = there.alloc(64, Access::RemoteReadWrite)?;
    /// use switchyard_message_engine::TransferStatus;
    ///
    /// let id = back.start_recv(&target.whole(), deadline)?.into_id();
    /// out.send(&source.whole(), deadline)?;
    /// let status = loop {
    ///     match there.poll_async(id)? {
    ///         TransferStatus::Pending => std::thread::yield_now(),
    ///         ended => break ended,
    ///     }
    /// };
    /// assert_eq!(status, TransferStatus::Done { bytes: 64 });
    /// # Ok(())
    /// # }
    /// ```
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

    /// Removes a transfer and returns its last status. A pending one runs on.
    ///
    /// # Errors
    /// [`UnknownTransfer`].
    pub fn take(&self, id: TransferId) -> Result<TransferStatus, UnknownTransfer> {
        let status = self.shared.transfers.status(id)?;
        self.shared.transfers.release(id);
        Ok(status)
    }

    /// Returns the next notification of any peer. Blocks until there is one, at the latest at `deadline`.
    ///
    /// # Errors
    /// [`WaitError`].
    pub fn next_notification(&self, deadline: Instant) -> Result<Notification, WaitError> {
        Ok(self.free_window(self.shared.inbox.pop(deadline)?))
    }

    /// Awaitable form of [`next_notification`](Self::next_notification).
    ///
    /// # Errors
    /// [`WaitError`].
    pub async fn next_notification_async(
        &self,
        deadline: Instant,
    ) -> Result<Notification, WaitError> {
        Ok(self.free_window(self.shared.inbox.pop_async(deadline).await?))
    }

    /// Returns all notifications that have arrived, without blocking.
    #[must_use]
    pub fn take_notifications(&self) -> Vec<Notification> {
        self.shared.inbox.drain().into_iter().map(|taken| self.free_window(taken)).collect()
    }

    /// Returns current counts.
    #[must_use]
    pub fn stats(&self) -> EngineStats {
        EngineStats {
            num_connections: self.connections().count(),
            num_transfers: self.shared.transfers.num_in_use(),
            num_rounds: self.shared.transfers.pulse.num_rounds(),
            num_refused: self.shared.num_refused.load(Ordering::Relaxed),
        }
    }

    /// Ends all connections, fails their transfers, and waits for the end of the thread.
    ///
    /// # Errors
    /// [`StopError`] if the thread makes no progress for [`stuck_timeout`](EngineConfig::stuck_timeout), because a call
    /// into a transport's library does not return.
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

    /// Established connections.
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

    /// Frees the notification's share of the peer's window.
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
            tracing::error!(%error, "the engine's thread could not be stopped");
        }
    }
}

/// A command to connect, and the mailbox of its reply.
fn connect_command(
    addr: SocketAddr,
    options: ConnectOptions,
    deadline: Instant,
) -> (Command, Arc<Mailbox<shared::ConnectReply>>) {
    let reply = Arc::new(Mailbox::default());
    (Command::Connect { addr, options, deadline, reply: Arc::clone(&reply) }, reply)
}

/// Time until which the thread must have answered a command with this deadline.
fn reply_deadline(deadline: Instant) -> Instant {
    deadline.checked_add(GRACE).unwrap_or(deadline)
}

fn no_reply(addr: SocketAddr, error: WaitError) -> ConnectError {
    match error {
        WaitError::Deadline => ConnectError::Timeout { addr: addr.to_string() },
        WaitError::Stopped => ConnectError::Stopped,
    }
}

/// The thread ends handshakes at their deadlines. After this much more time it counts as stuck.
const GRACE: Duration = Duration::from_secs(2);
