//! A reference for Mixture-of-Experts models: it runs a checkpoint on the CPU and favours clarity over speed.
//!
//! * [`Qwen3Moe`] is the model. Its MoE blocks call an [`ExpertBackend`] for the routed experts.
//! * [`LocalExperts`] is the backend that needs no service. It reads the experts from the checkpoint.
//! * [`Generator`] turns a prompt into text with a [`Tokenizer`] and greedy or random sampling.
//!
//! Tests compare the service with [`LocalExperts`]. Engines do not link this crate: they have an attention
//! side of their own and need `switchyard-attention-client` only.

pub mod generate;
pub mod local_experts;
pub mod model;
pub mod tokenizer;

pub use attention_client::{BackendError, ExpertBackend};
pub use checkpoint::Checkpoint;

pub use generate::{GenerateError, GenerateOptions, Generation, Generator, TokenEvent};
pub use local_experts::{LocalExperts, LocalExpertsError};
pub use model::{KvCache, LogitsOf, MoeBlock, MoeObserver, MoeRecord, Qwen3Moe};
pub use tokenizer::{TokenStream, Tokenizer};
