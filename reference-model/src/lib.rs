//! A reference for Mixture-of-Experts models: it runs a checkpoint on the CPU and favours clarity over speed.
//!
//! * [`Qwen3Moe`] is the model. Its MoE blocks call an [`ExpertBackend`] for the routed experts.
//! * [`LocalExperts`] is the backend that needs no service. It reads the experts from the checkpoint.
//! * [`Generator`] turns a prompt into text with a [`Tokenizer`] and greedy or random sampling.
//!
//! ```no_run
//! use std::sync::Arc;
//! use switchyard_reference_model::{Checkpoint, GenerateOptions, Generator, LocalExperts};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let checkpoint = Arc::new(Checkpoint::open("data/tiny-moe")?);
//! let experts = LocalExperts::new(Arc::clone(&checkpoint));
//! let mut generator = Generator::open(&checkpoint, experts)?;
//! let options = GenerateOptions { max_new_tokens: 16, ..GenerateOptions::default() };
//! let generation = generator.generate("Once upon a time", &options, &mut |event| print!("{}", event.text))?;
//! println!("\n{:?}", generation.finish_reason);
//! # Ok(())
//! # }
//! ```
//!
//! Tests compare the service with [`LocalExperts`]. Engines do not link this crate: they have an attention
//! side of their own and need `switchyard-attention-client` only.

pub mod generate;
pub mod local_experts;
pub mod model;
pub mod tokenizer;

// Types of other crates that occur in this crate's signatures.
pub use attention_client::router::{RouteError, Router, RouterConfigError};
pub use attention_client::{BackendError, ExpertBackend};
pub use candle_core::Error as TensorLibraryError;
pub use checkpoint::{Checkpoint, ConfigError, Family, LanguageConfig, ModelConfig, TensorError};

pub use generate::{GenerateError, GenerateOptions, Generation, Generator, TokenEvent};
pub use local_experts::{LocalExperts, LocalExpertsError};
pub use model::{KvCache, LogitsOf, MoeBlock, MoeObserver, MoeRecord, Qwen3Moe};
pub use tokenizer::{TokenStream, Tokenizer};
