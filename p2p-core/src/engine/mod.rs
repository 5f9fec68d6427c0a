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
//! use p2p_core::engine::{Access, Engine, EngineConfig};
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

pub mod bench;
mod codec;
mod config;
mod connection;
mod descriptor;
mod error;
mod io;
mod link;
mod mailbox;
mod memory;
mod metadata;
mod shared;
mod transfer;
mod wire;

use std::net::SocketAddr;
use std::ptr::NonNull;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

pub use config::{EngineConfig, default_fabrics, open_fabric};
pub use connection::Connection;
pub use descriptor::{DESCRIPTOR_BYTES, Descriptor, DescriptorError};
pub use error::{
    CloseReason, ConnectError, DeregisterError, OpError, RegisterError, StartError, SubmitError,
    TransferError, UnknownTransfer, WaitError,
};
pub use memory::{MemoryRegion, Span};
pub use metadata::EndpointMetadata;
pub use transfer::{Transfer, TransferId, TransferStatus};
pub use wire::FrameError;

pub use crate::fabric::Access;

use self::mailbox::Mailbox;
use self::memory::Handle;
use self::shared::{Command, ConnShared, Register, Shared, lock};
use crate::region::Region;

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

/// What an engine holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EngineStats {
    /// Connections that stand.
    pub num_connections: usize,
    /// Transfers whose outcome nobody has taken.
    pub num_transfers: usize,
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
        let reply = self.start_connect(addr, deadline)?;
        reply.pop(deadline + GRACE).unwrap_or_else(|error| Err(no_reply(addr, error)))
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
        let reply = self.start_connect(addr, deadline)?;
        let popped = reply.pop_async(deadline + GRACE).await;
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
        if let Some(known) = self.known(peer.engine_id) {
            return Ok(known);
        }
        let found = self.connect(peer.addr, deadline)?;
        self.keep(&peer, found)
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
        if let Some(known) = self.known(peer.engine_id) {
            return Ok(known);
        }
        let found = self.connect_async(peer.addr, deadline).await?;
        self.keep(&peer, found)
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

    /// Zeroed memory of the engine's own, registered. Committed page by page when touched, and freed
    /// when the last handle is dropped and no transfer uses it.
    ///
    /// # Errors
    /// [`RegisterError`].
    pub fn alloc(&self, bytes: usize, access: Access) -> Result<MemoryRegion, RegisterError> {
        let refused = |detail: String| RegisterError::Refused { bytes: bytes as u64, detail };
        let memory = Region::anonymous(bytes).map_err(|error| refused(error.to_string()))?;
        // SAFETY: the registration holds the memory, and the engine deregisters before it lets go.
        unsafe { self.register(memory.as_ptr(), bytes, access, Some(memory.clone())) }
    }

    /// Registers memory. A range within one that is registered with the same rights shares its keys.
    ///
    /// # Safety
    /// `ptr..ptr+bytes` is mapped, and stays so until [`dereg`](Self::dereg) of every region made of it
    /// has succeeded, or the engine was dropped. Nothing holds references to it while transfers use it.
    ///
    /// # Errors
    /// [`RegisterError`].
    pub unsafe fn reg(
        &self,
        ptr: NonNull<u8>,
        bytes: usize,
        access: Access,
    ) -> Result<MemoryRegion, RegisterError> {
        // SAFETY: the caller's promise.
        unsafe { self.register(ptr, bytes, access, None) }
    }

    /// Registers several ranges, all or none.
    ///
    /// # Safety
    /// As for [`reg`](Self::reg), for each.
    ///
    /// # Errors
    /// [`RegisterError`].
    pub unsafe fn regv(
        &self,
        ranges: &[(NonNull<u8>, usize)],
        access: Access,
    ) -> Result<Vec<MemoryRegion>, RegisterError> {
        let register = |(ptr, bytes): &(NonNull<u8>, usize)| {
            // SAFETY: the caller's promise.
            unsafe { self.register(*ptr, *bytes, access, None) }
        };
        ranges.iter().map(register).collect()
    }

    /// Takes memory back. True: its keys are revoked, no peer reaches it any more. False: another region
    /// that covers the same range keeps the keys in force.
    ///
    /// # Errors
    /// [`DeregisterError`] with the region while clones, spans or transfers use it, or when a transport
    /// cannot confirm that peers have let go. The memory must stay mapped then.
    pub fn dereg(&self, region: MemoryRegion) -> Result<bool, DeregisterError> {
        let failed = |detail: String, region| Err(DeregisterError { detail, region });
        if !Arc::ptr_eq(&region.inner.shared, &self.shared) {
            return failed("it is registered with another engine".to_owned(), Some(region));
        }
        let handle = match Arc::try_unwrap(region.inner) {
            Ok(handle) => handle,
            Err(inner) => {
                let detail = "clones, spans or transfers use it".to_owned();
                return failed(detail, Some(MemoryRegion { inner }));
            }
        };
        let reply = Arc::new(Mailbox::default());
        let (idx, is_full) = (handle.keys.idx, handle.is_full());
        let command = Command::Release { idx, is_full, reply: Arc::clone(&reply) };
        let deadline = Instant::now() + COMMAND_TIMEOUT;
        let back = |handle| Some(MemoryRegion { inner: Arc::new(handle) });
        if self.shared.push_until(command, deadline).is_err() {
            return failed("the engine is too busy".to_owned(), back(handle));
        }
        match reply.pop(deadline) {
            Ok(Ok(is_revoked)) => {
                handle.is_returned.store(true, Ordering::Release);
                Ok(is_revoked)
            }
            Ok(Err(detail)) => failed(detail, back(handle)),
            // The thread is gone, and the fabrics with it.
            Err(WaitError::Stopped) => {
                handle.is_returned.store(true, Ordering::Release);
                Ok(true)
            }
            Err(WaitError::Deadline) => {
                // The command will still be carried out.
                handle.is_returned.store(true, Ordering::Release);
                failed("the engine did not answer in time".to_owned(), None)
            }
        }
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
        Ok(self.took(self.shared.inbox.pop(deadline)?))
    }

    /// The same for tasks.
    ///
    /// # Errors
    /// [`WaitError`].
    pub async fn next_notification_async(
        &self,
        deadline: Instant,
    ) -> Result<Notification, WaitError> {
        Ok(self.took(self.shared.inbox.pop_async(deadline).await?))
    }

    /// All notifications that are there.
    #[must_use]
    pub fn take_notifications(&self) -> Vec<Notification> {
        self.shared.inbox.drain().into_iter().map(|taken| self.took(taken)).collect()
    }

    /// What the engine holds.
    #[must_use]
    pub fn stats(&self) -> EngineStats {
        EngineStats {
            num_connections: self.connections().count(),
            num_transfers: self.shared.transfers.num_taken(),
        }
    }

    /// Connections that stand.
    fn connections(&self) -> impl Iterator<Item = Connection> + use<> {
        let mut live = lock(&self.shared.live);
        live.retain(|weak| weak.strong_count() > 0);
        let found: Vec<_> = live.iter().filter_map(Weak::upgrade).collect();
        drop(live);
        found
            .into_iter()
            .filter(|shared| shared.closed.get().is_none())
            .map(|shared| Connection { shared })
    }

    fn known(&self, engine_id: u64) -> Option<Connection> {
        let known = self.connections().find(|found| found.peer().engine_id == engine_id)?;
        let mut endpoints = lock(&self.shared.endpoints);
        endpoints.retain(|connection| connection.closed().is_none());
        if !endpoints.iter().any(|other| other.id() == known.id()) {
            endpoints.push(known.clone());
        }
        Some(known)
    }

    fn keep(&self, peer: &EndpointMetadata, found: Connection) -> Result<Connection, ConnectError> {
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

    fn start_connect(
        &self,
        addr: SocketAddr,
        deadline: Instant,
    ) -> Result<Arc<Mailbox<shared::ConnectReply>>, ConnectError> {
        let reply = Arc::new(Mailbox::default());
        let command = Command::Connect { addr, deadline, reply: Arc::clone(&reply) };
        let pushed = self.shared.push_until(command, deadline);
        pushed.map_err(|_| ConnectError::Timeout { addr: addr.to_string() })?;
        Ok(reply)
    }

    /// # Safety
    /// As for [`reg`](Self::reg), unless `memory` holds it.
    unsafe fn register(
        &self,
        ptr: NonNull<u8>,
        bytes: usize,
        access: Access,
        memory: Option<Region>,
    ) -> Result<MemoryRegion, RegisterError> {
        let reply = Arc::new(Mailbox::default());
        let register = Register { ptr, bytes, access, memory, reply: Arc::clone(&reply) };
        let deadline = Instant::now() + COMMAND_TIMEOUT;
        let pushed = self.shared.push_until(Command::Register(register), deadline);
        pushed.map_err(|_| RegisterError::Stopped)?;
        let keys = reply
            .pop(deadline)
            .map_err(|_| RegisterError::Stopped)?
            .map_err(|detail| RegisterError::Refused { bytes: bytes as u64, detail })?;
        let handle = Handle::new(Arc::clone(&self.shared), keys, ptr, bytes as u64);
        Ok(MemoryRegion { inner: Arc::new(handle) })
    }

    /// Lets the peer send as much more.
    fn took(&self, (from, notification): (Weak<ConnShared>, Notification)) -> Notification {
        let cost = notification.bytes.len() as u64 + link::NOTIFY_OVERHEAD;
        if let Some(from) = from.upgrade() {
            from.taken.fetch_add(cost, Ordering::Relaxed);
        }
        self.shared.has_taken.store(true, Ordering::SeqCst);
        self.shared.kick();
        notification
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        let deadline = Instant::now() + COMMAND_TIMEOUT;
        let is_told = self.shared.push_until(Command::Stop, deadline).is_ok();
        lock(&self.shared.endpoints).clear();
        if let Some(thread) = self.thread.take()
            && is_told
        {
            // A panic of the thread has been reported already.
            let _ = thread.join();
        }
        self.shared.accepted.drain();
    }
}

fn no_reply(addr: SocketAddr, error: WaitError) -> ConnectError {
    match error {
        WaitError::Deadline => ConnectError::Timeout { addr: addr.to_string() },
        WaitError::Stopped => ConnectError::Stopped,
    }
}

/// The thread ends handshakes at their deadlines; this long afterwards it counts as stuck.
const GRACE: Duration = Duration::from_secs(2);
const COMMAND_TIMEOUT: Duration = Duration::from_secs(10);
