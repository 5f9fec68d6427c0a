//! The handshake of two peers over TCP. It makes and exchanges slots, and leaves a connection that
//! stays open.
//!
//! The connecting side sends a [`PeerHello`] with its slot size and transports, after a ticket if it has one.
//! The listening side checks it. It answers with a transport and its slot, or with a [`Reject`]
//! that gives the reason. Slots are made for this one peer and freed with the connection. The TCP
//! connection stays open as a sign of life ([`Liveness`]).
//!
//! With [`DeviceMemory`] at both ends the handshake also joins [`DeviceSlots`]: slots in the memory
//! of both devices, such as GPUs. The host channel beside them can then be small.
//!
//! Both sides offer transports. The handshake takes the first one of the connecting side's list
//! that the listening side offers too and can open. Offers that failed with a peer are left out for
//! a while ([`Fallback`]).
//!
//! A listener may ask for a ticket ([`TicketCheck`]) or for a shared secret. Both are checked before
//! anything of the listener travels.
//!
//! With certificates ([`ListenerConfig::tls`]) the handshake travels over TLS: secrets, tickets, memory
//! keys and the names of descriptors. Without them it travels unencrypted: a ticket is then worth nothing
//! to an eavesdropper, a secret is. TLS never protects the slots themselves.

mod admission;
mod attempt;
mod background_drop;
mod close;
mod config;
mod connect;
mod error;
mod fallback;
mod listener;
mod liveness;
mod policy;
mod sentry;
mod share;
mod stream;
mod ticket;
pub mod wire;

use std::fmt;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use thiserror::Error;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

pub use background_drop::BackgroundDrop;
pub use close::CloseReason;
pub use config::{ConnectConfig, ListenerConfig};
pub use connect::connect;
pub use error::{BindError, ConnectError};
pub use fallback::{
    ExcludedOffer, FIRST_PAUSE, Fallback, MAX_PAUSE, MAX_USELESS_LINKS, WorkingOffer,
};
pub use listener::{Listener, ListenerStats};
pub use liveness::Liveness;
pub use policy::equal_in_constant_time;
pub use ticket::{HandshakeBinding, ShownTicket, TicketCheck, TicketSource};

use crate::backend::shm::{PageKind, PeerSlot, SharedSlot};
#[cfg(feature = "test-transports")]
use crate::backend::staged::{Disorder, StagedEndpoint};
use crate::channel::{Channel, ChannelError};
use crate::device::{DeviceMemory, DeviceSlotError, DeviceSlots, OpenDeviceSlot};
use crate::endpoint::TransportKind;
use crate::network::Offer;
use crate::region::SlotKey;
use crate::slot::SlotLayout;
use crate::transport::AnyEndpoint;
use stream::Stream;
use wire::{HEADER_BYTES, Header, WireError, decode_header};

/// Longest payload that upper layers can add to the handshake, in bytes.
pub const MAX_PAYLOAD_BYTES: usize = 4096;

/// The connecting side's description of itself.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PeerHello {
    /// Identity of the peer, in the numbering of the upper layers.
    pub peer_id: u64,
    /// Number of this connection of the peer. A higher generation retires the lower ones.
    pub generation: u32,
    /// Opaque to this crate, at most [`MAX_PAYLOAD_BYTES`].
    pub payload: Vec<u8>,
}

/// The listening side's reason to refuse a peer.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{code}: {message}")]
pub struct Reject {
    /// The reason, for programs.
    pub code: RejectCode,
    /// The reason, for people: found and expected values. At most [`wire::MAX_REJECT_BYTES`]
    /// travel.
    pub message: String,
}

impl Reject {
    /// Makes a rejection with `code` and `message`.
    #[must_use]
    pub fn new(code: RejectCode, message: impl Into<String>) -> Self {
        Self { code, message: message.into() }
    }
}

/// Number of a [`Reject`]. Codes from [`RejectCode::UPPER`] on belong to the upper layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RejectCode(pub u16);

impl RejectCode {
    /// The peers speak different protocol versions.
    pub const VERSION: Self = Self(1);
    /// The message was not understood.
    pub const MALFORMED: Self = Self(2);
    /// The shared secret is missing or wrong.
    pub const SECRET: Self = Self(3);
    /// The peers want slots of different size or frames.
    pub const SLOT_MISMATCH: Self = Self(4);
    /// There is no transport that both sides offer and that can work between them.
    pub const NO_TRANSPORT: Self = Self(5);
    /// The largest allowed number of peers is connected.
    pub const FULL: Self = Self(6);
    /// The handshake took too long.
    pub const TIMEOUT: Self = Self(7);
    /// The handshake was evicted for a newer one.
    pub const BUSY: Self = Self(8);
    /// The listening side could not make a slot, or the transport failed.
    pub const TRANSPORT: Self = Self(9);
    /// Only one side wants device slots, or the sides want different ones, or they could not be
    /// made.
    pub const DEVICE: Self = Self(10);
    /// The ticket is missing, wrong, or not for this handshake. Another one may be admitted.
    pub const TICKET: Self = Self(11);
    /// One side speaks TLS, the other does not.
    pub const TLS: Self = Self(12);
    /// First code of the upper layers.
    pub const UPPER: Self = Self(0x100);
}

impl fmt::Display for RejectCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match *self {
            Self::VERSION => "version",
            Self::MALFORMED => "malformed handshake",
            Self::SECRET => "secret",
            Self::TICKET => "ticket",
            Self::SLOT_MISMATCH => "slot mismatch",
            Self::NO_TRANSPORT => "no common transport",
            Self::FULL => "full",
            Self::TIMEOUT => "timeout",
            Self::BUSY => "busy",
            Self::TRANSPORT => "transport",
            Self::DEVICE => "device slots",
            Self::TLS => "TLS",
            Self(code) => return write!(f, "reason {code:#x}"),
        };
        f.write_str(name)
    }
}

/// A connected peer. Dropping it frees this side's slot and tells the peer that this side is gone.
///
/// See [`connect`] for an example.
#[derive(Debug)]
pub struct Connection {
    /// Frames to and from the peer.
    pub channel: Channel<AnyEndpoint>,
    /// Tells whether the peer is still there.
    pub liveness: Liveness,
    /// The connecting side's description of itself; the same on both sides.
    pub peer: PeerHello,
    /// Answer of the listening side's upper layers; the same on both sides.
    pub reply: Vec<u8>,
    /// Transport in use.
    pub transport: Offer,
    /// Offers that the connecting side left out, with reasons, for people. Empty if it left none
    /// out. The same on both sides.
    pub left_out: String,
    /// Pages behind this side's slot.
    pub pages: PageKind,
    /// Device slots beside the channel, if both sides brought device memory.
    pub device: Option<DeviceSlots>,
    /// Address of the other side of the bootstrap connection.
    pub remote_addr: SocketAddr,
}

/// Default limit on the time of a whole handshake.
pub const DEFAULT_HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// Default time after which a host that does not answer counts as gone.
pub const DEFAULT_LIVENESS_TIMEOUT: Duration = Duration::from_secs(8);

/// Raises this process's soft limit on open files to the hard one, and returns the limit in force.
///
/// For binaries: a peer costs three descriptors, or five if threads cannot have their own
/// descriptor tables. The usual soft limit is 1024.
#[must_use]
pub fn raise_descriptor_limit() -> u64 {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    // If the system refuses, the old limit stays in force and is returned.
    let _ = setrlimit(Resource::Nofile, raised);
    descriptor_limit()
}

/// This process's soft limit on open files.
fn descriptor_limit() -> u64 {
    use rustix::process::{Resource, getrlimit};
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

/// Reading a message failed.
#[derive(Debug, Error)]
enum ReadError {
    #[error(transparent)]
    Wire(#[from] WireError),
    #[error("the peer closed the connection")]
    Closed,
    #[error("reading failed: {0}")]
    Io(std::io::Error),
}

/// Reads one message. The caller limits the time; the length is limited by the header.
async fn read_message(stream: &mut Stream) -> Result<(Header, Vec<u8>), ReadError> {
    let io = |e: std::io::Error| match e.kind() {
        std::io::ErrorKind::UnexpectedEof => ReadError::Closed,
        _ => ReadError::Io(e),
    };
    let mut head = [0u8; HEADER_BYTES];
    // Reads the magic first: a peer that speaks another protocol may never send a whole header.
    stream.read_exact(&mut head[..8]).await.map_err(io)?;
    if head[..8] != wire::MAGIC {
        decode_header(&head)?;
    }
    stream.read_exact(&mut head[8..]).await.map_err(io)?;
    let header = decode_header(&head)?;
    let mut body = vec![0; header.body_bytes];
    stream.read_exact(&mut body).await.map_err(io)?;
    Ok((header, body))
}

async fn write_message(stream: &mut Stream, message: &[u8]) -> std::io::Result<()> {
    stream.write_all(message).await?;
    // TLS may hold a part back.
    stream.flush().await
}

/// Runs work that may block for milliseconds on another thread. The error says that it panicked.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, String> {
    tokio::task::spawn_blocking(work).await.map_err(|error| error.to_string())
}

/// Makes this side's device slot. Calls of a device may block, so they run on other threads, and so
/// does their cleanup.
async fn open_device(
    memory: Arc<dyn DeviceMemory>,
) -> Result<BackgroundDrop<Box<dyn OpenDeviceSlot>>, DeviceSlotError> {
    let open = blocking(move || memory.open().map(BackgroundDrop::new)).await;
    open.unwrap_or_else(|panic| Err(DeviceSlotError::new(panic)))
}

/// Maps the peer's device slot.
async fn join_device(
    open: BackgroundDrop<Box<dyn OpenDeviceSlot>>,
    peer: OwnedFd,
) -> Result<BackgroundDrop<DeviceSlots>, DeviceSlotError> {
    let joined = blocking(move || open.into_inner().join(peer).map(BackgroundDrop::new)).await;
    joined.unwrap_or_else(|panic| Err(DeviceSlotError::new(panic)))
}

/// Makes endpoints over the peer's mapped slot.
struct MemoryEndpoint {
    kind: TransportKind,
    #[cfg(feature = "test-transports")]
    disorder: Option<Disorder>,
}

impl MemoryEndpoint {
    /// Makes a channel over the slots of both sides.
    fn join(
        self,
        layout: SlotLayout,
        own: SharedSlot,
        peer: PeerSlot,
    ) -> Result<Channel<AnyEndpoint>, ChannelError> {
        let (mapped, region) = own.join(self.kind, peer);
        let endpoint = match self.kind {
            #[cfg(feature = "test-transports")]
            TransportKind::Staged => {
                AnyEndpoint::Other(Box::new(StagedEndpoint::new(mapped, self.disorder)))
            }
            _ => AnyEndpoint::Mapped(mapped),
        };
        Channel::new(endpoint, layout, region, SlotKey)
    }
}
