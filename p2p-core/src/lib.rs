//! One-sided memory transport between peers: regions, slots, flags, and the rings on top of them.
//!
//! A *channel* joins two peers. Each peer owns one slot, and the other peer writes it by put.
//! Monotonic flags on cache lines of their own count published and consumed frames. This crate
//! knows nothing about models, HTTP, or the roles of the peers.
//!
//! | module | contents |
//! |---|---|
//! | [`view`] | bounds-checked windows over memory that a peer may write or read |
//! | [`region`] | owned memory, its local range and its wire form |
//! | [`slot`] | the layout of a slot: frames, control tail |
//! | [`ring`] | the arithmetic of a frame ring: credits, order, desynchronisation |
//! | [`flags`] | the steps at a flag, with their orderings |
//! | [`endpoint`] | the traits of a transport: put, get, add-flag, fence, quiet; batches; progress |
//! | [`channel`] | a pair of slots as two rings, over any endpoint |
//! | [`wait`] | spin briefly, then block |
//! | [`backend`] | transports |
//! | [`transport`] | the endpoint of a connection, over any transport |
//! | [`network`] | the part of the handshake that a transport over a network implements |
//! | [`fabric`] | one-sided operations on registered memory, with completions, for the message engine |
//! | [`device`] | memory of GPUs, exchanged by the handshake beside the slots |
//! | [`counted`] | flags by messages that count the writes before them |
//! | [`copy`], [`pulse`], [`outage`], [`log_limit`] | small helpers that transports share |
//! | [`transports`] | the transports that a process offers |
//! | [`bootstrap`] | handshake over TCP, exchange of slots, liveness |
//! | [`host`] | identity of a host, to tell whether two processes can share memory |
//!
//! The memory model, with every SYNC POINT, is in `docs/explanation/memory-model.md`.

pub mod backend;
#[cfg(not(loom))]
pub mod bootstrap;
pub mod channel;
pub mod copy;
pub mod counted;
#[cfg(not(loom))]
pub mod device;
pub mod endpoint;
#[cfg(not(loom))]
pub mod fabric;
pub mod flags;
pub mod host;
#[cfg(not(loom))]
pub mod network;
#[cfg(not(loom))]
pub mod outage;
#[cfg(not(loom))]
pub mod pulse;
pub mod region;
pub mod ring;
pub mod slot;
pub mod transport;
#[cfg(not(loom))]
pub mod transports;
pub mod view;
pub mod wait;

#[cfg(not(loom))]
pub use bootstrap::{Connection, Liveness, PeerHello, Reject, RejectCode};
pub use channel::{Channel, ChannelError, RxFrame, TxFrame};
pub use endpoint::{Batch, Endpoint, PostError, Progress, QuietError, Transport, TransportKind};
pub use region::{LocalRange, Region, RemoteRange, SlotKey};
pub use slot::{SlotConfig, SlotConfigError, SlotLayout};
pub use transport::AnyEndpoint;
#[cfg(not(loom))]
pub use transports::{OpenNetworks, TransportSpec, Transports};
#[cfg(not(loom))]
pub use trust::log_limit;
pub use view::{OutOfRange, ReadView, WriteView};
pub use wait::{Driver, Kicker, SpinPolicy, WaitSet};
