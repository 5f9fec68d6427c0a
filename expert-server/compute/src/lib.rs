//! The expert compute engine: one merged batch of one MoE layer at a time, on a few threads.
//!
//! For every (token, expert) entry it computes `down(silu(gate(x)) * up(x))` in f32, multiplies
//! by the entry's weight and sums over the entries of a token. Weights stay in the dtype of the
//! checkpoint and are widened in registers or per tile. The engine knows nothing of frames,
//! slots or clients.

mod batch;
mod kernels;
mod machine;
mod plan;
mod pool;
mod store;
mod team;
mod weights;

pub use batch::{ComputeError, ExpertGroup, LayerBatch};
pub use kernels::Isa;
pub use machine::{BandwidthProbe, gemm_rate, read_bandwidth};
pub use pool::{ComputePool, Products};
pub use store::{ExpertStore, LoadError, LoadProgress, Residency};
pub use team::{Pinning, PoolError, pin_current_thread};
pub use weights::{
    ExpertWeights, LayerExperts, SCALE_BLOCK, Weight, WeightBytes, WeightDtype, WeightError,
};
