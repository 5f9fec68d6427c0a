//! One-sided memory transport between peers: regions, slots, flags, and the rings on top of them.
//!
//! A *channel* joins two peers. Each owns one slot that the other writes by put; monotonic flags on
//! cache lines of their own tell what is published and what is consumed. Nothing in this crate knows
//! about models, HTTP or who talks to whom and why.
//!
//! | module | what it holds |
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
//! | [`transport`] | the endpoint of a connection, whichever transport it is |
//! | [`network`] | what a transport over a network offers to the handshake |
//! | [`fabric`] | one-sided operations on registered memory, by completion: what the message engine needs |
//! | [`device`] | memory of GPUs that the handshake exchanges beside the slots |
//! | [`counted`] | flags by messages that count the writes before them |
//! | [`copy`], [`pulse`], [`outage`] | small parts that transports share |
//! | [`transports`] | which transports a process offers |
//! | [`bootstrap`] | handshake over TCP, slots made and exchanged, liveness |
//! | [`host`] | whether two processes can share memory |
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
pub use view::{OutOfRange, ReadView, WriteView};
pub use wait::{Driver, Kicker, SpinPolicy, WaitSet};
