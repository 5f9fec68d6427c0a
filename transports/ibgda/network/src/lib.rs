//! Slots of GPUs over RDMA that kernels post by themselves: a network of the handshake whose peers are
//! [`ibgda::Peer`]s. **Not yet run on a ConnectX**: see `docs/explanation/ibgda.md`.
//!
//! ```text
//!   kernels ── store ──▶ mirror ◀── read ── NIC ═══════ NIC ── write ──▶ slot ◀── read ── kernels
//!           ── requests, doorbell ────────▶ ┘
//!   host ───── adds, on a queue of its own ─▶ ┘                slots of hosts: another network
//! ```
//!
//! | module | content |
//! |---|---|
//! | [`network`] | the network: both sides opened, described, joined |
//! | [`mod@open`] | the network by the name of a device, and a report of parts that this host lacks |
//! | [`detail`] | descriptions that sides exchange, as bytes |
//! | [`place`] | place of kernels' slots: the GPU's memory, or the host's |
//! | [`heartbeat`] | the host's queue, which shows peers that this side is at work |

pub mod detail;
mod endpoint;
pub mod heartbeat;
pub mod network;
pub mod open;
pub mod place;
mod slots;

pub use network::{DeviceConfig, DeviceNetwork};
pub use open::open;
pub use place::SlotPlace;
