//! Checkpoints of Mixture-of-Experts models in the layout of the Hugging Face Hub.
//!
//! [`Checkpoint::open`] reads `config.json`, maps the safetensors shards into memory and checks every
//! header. Tensors are borrowed from the mapping; only explicit calls copy or convert them.
//! [`make_checkpoint`] writes seeded random weights in the same layout, with the shapes, dtypes and names
//! of well-known models.
//!
//! Supported: Qwen3-MoE, Mixtral, DeepSeek-V2 and DeepSeek-V3 names; a single file or shards with
//! an index; bf16, f16, f32, and fp8-e4m3 with 128×128 block scales (`weight_scale_inv`).
//!
//! ```no_run
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let checkpoint = switchyard_checkpoint::Checkpoint::open("/models/Qwen3-30B-A3B")?;
//! println!("{}: {}", checkpoint.config().architecture, checkpoint.fingerprint());
//! for layer in checkpoint.config().moe_layers() {
//!     let gate = checkpoint.expert(layer, 0)?.gate;
//!     println!("layer {layer}: [{}, {}] {}", gate.rows(), gate.cols(), gate.dtype());
//! }
//! # Ok(())
//! # }
//! ```
//!
//! This crate knows no transports, slots, servers or HTTP. Its only computations are dtype conversions.

mod config;
mod convert;
mod dtype;
mod experts;
mod fingerprint;
mod make;
mod open;
mod shard;
mod tensor;

pub use config::{
    Architecture, AttentionConfig, ConfigError, ModelConfig, RouterConfig, Scoring, TopkMethod,
};
pub use convert::{bf16_to_f32, f8_e4m3_to_f32, f16_to_f32, f32_from_e4m3};
pub use dtype::DType;
pub use experts::{BlockScales, ExpertTensors, RouterTensors, WeightView};
pub use fingerprint::{Fingerprint, ParseFingerprintError};
pub use make::{
    MakeError, MakeOptions, MakeSummary, ParsePresetError, Preset, make_checkpoint, planned_bytes,
};
pub use open::{Checkpoint, OpenError};
pub use shard::{TensorFile, TensorFileError};
pub use tensor::{TensorError, TensorView};

/// Rows and columns of one fp8 scale block (`weight_scale_inv` holds one scale per block).
pub const FP8_BLOCK: [usize; 2] = [128, 128];
