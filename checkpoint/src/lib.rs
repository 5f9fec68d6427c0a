//! Checkpoints of Mixture-of-Experts models in the layout of the Hugging Face Hub.
//!
//! [`Checkpoint::open`] reads `config.json`, maps the safetensors shards into memory and checks every
//! header. Tensors are borrowed from the mapping; only explicit calls copy or convert them.
//! [`make_checkpoint`] writes seeded random weights in the same layout, with the shapes, dtypes and names
//! of well-known models.
//!
//! A model family is a row of [`Family::ALL`]: names, layout, activation, router. Formats are bf16, f16, f32, fp8 with
//! any scales, and the 4- and 8-bit formats of compressed-tensors, GPTQ, AWQ, ModelOpt and gpt-oss, see
//! [`WeightFormat`].
//!
//! ```no_run
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let checkpoint = switchyard_checkpoint::Checkpoint::open("/models/Qwen3-30B-A3B")?;
//! println!("{}: {}", checkpoint.config().family, checkpoint.fingerprint()?);
//! for layer in checkpoint.config().moe_layers() {
//!     let up = checkpoint.expert(layer, 0)?.up;
//!     println!("layer {layer}: [{}, {}] {}", up.rows(), up.cols(), up.format());
//! }
//! # Ok(())
//! # }
//! ```
//!
//! This crate knows no transports, slots, servers or HTTP. Its only computations are dtype conversions.

mod config;
mod convert;
mod digest;
mod dtype;
mod experts;
mod family;
mod gguf;
mod inspect;
mod layout;
mod make;
mod open;
mod router;
mod shard;
mod tensor;
mod truncation;
mod weight;

pub use config::{
    Activation, AttentionConfig, ConfigError, ExpertArithmetic, LanguageConfig, ModelConfig,
    QuantMethod, Quantization,
};
pub use convert::{
    FP4_VALUES, bf16_to_f32, f8_e4m3_to_f32, f16_to_f32, f32_from_e4m3, f32_from_e8m0,
};
pub use digest::{Coverage, Fingerprint, ParseFingerprintError, TensorDigest, TensorDigests};
pub use dtype::DType;
pub use experts::{ExpertBiases, ExpertTensors, RouterTensors};
pub use family::{Family, Weighting};
pub use gguf::{GgufError, GgufSummary};
pub use inspect::{ExpertSummary, ReorderedSummary};
pub use make::{
    MakeError, MakeOptions, MakeSummary, ParsePresetError, Preset, make_checkpoint, planned_bytes,
};
pub use open::{Checkpoint, OpenError};
pub use router::{ChosenBy, GroupScore, Groups, InputNorm, Normalisation, RouterConfig, Scoring};
pub use shard::{TensorFile, TensorFileError};
pub use tensor::{TensorError, TensorView};
pub use truncation::{UNREADABLE_FILE_EXIT_CODE, report_unreadable_files};
pub use weight::{Scales, WeightFormat, WeightView, dequantize};

/// Rows and columns of one fp8 scale block of DeepSeek's checkpoints.
pub const FP8_BLOCK: [usize; 2] = [128, 128];
