//! Experts on CPUs: computes one merged batch of one MoE layer at a time, on a few threads.
//!
//! For every (token, expert) entry the pool computes `down(silu(gate(x)) * up(x))`, or another of the model's
//! [`ExpertArithmetic`], in f32. It multiplies the result by the entry's weight and sums over the entries of a
//! token. Weights stay in the format of the checkpoint, see [`WeightFormat`], and are widened in registers or per
//! tile. The crate excludes frames, slots and clients.
//!
//! # Examples
//! ```
//! use std::sync::Arc;
//!
//! use switchyard_expert_compute::{
//!     ComputePool, ExpertGroup, ExpertWeights, LayerBatch, LayerExperts, Weight, WeightBytes,
//!     WeightFormat,
//! };
//!
//! // One expert with hidden size 2 and intermediate size 1, all weights 1.0 in bf16.
//! let ones = |rows: usize, cols: usize| {
//!     let bytes = WeightBytes::from([0x80, 0x3f].repeat(rows * cols));
//!     Weight::new(WeightFormat::Bf16, rows, cols, bytes, None)
//! };
//! let mut experts = LayerExperts::new(2, 1)?;
//! let (gate, up, down) = (Some(ones(1, 2)?), ones(1, 2)?, ones(2, 1)?);
//! let weights = ExpertWeights { gate, up, down, biases: None };
//! experts.insert(7, Arc::new(weights))?;
//!
//! // One token, routed to expert 7 with weight 0.5.
//! let batch = LayerBatch {
//!     x: &[1.0, 2.0],
//!     groups: &[ExpertGroup { expert: 7, begin: 0, end: 1 }],
//!     entry_token: &[0],
//!     entry_weight: &[0.5],
//! };
//! let mut out = [0.0; 2];
//! ComputePool::new(1, None)?.run(&experts, &batch, &mut out, &mut || {})?;
//! let silu = |v: f32| v / (1.0 + (-v).exp());
//! assert!((out[0] - 0.5 * silu(3.0) * 3.0).abs() < 1e-4);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod batch;
mod kernels;
mod machine;
mod memory;
mod plan;
mod pool;
mod store;
mod team;
mod weights;

pub use checkpoint::{
    Activation, Checkpoint, DType, ExpertArithmetic, ExpertBiases, TensorError, WeightFormat,
    Weighting,
};

pub use batch::{ComputeError, ExpertGroup, LayerBatch};
pub use kernels::{Isa, gemm};
pub use machine::{BandwidthProbe, gemm_rate, read_bandwidth};
pub use memory::WeightMemory;
pub use pool::{ComputePool, Products};
pub use store::{ExpertStore, LoadError, LoadProgress, Residency, map_pages};
pub use team::{Pinning, PoolError, pin_current_thread};
pub use weights::{ExpertWeights, LayerExperts, Weight, WeightBytes, WeightError, WeightScales};
