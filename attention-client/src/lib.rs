//! 

pub mod backend;
pub mod generate;
pub mod model;
pub mod router;
pub mod tokenizer;

pub use backend::{BackendError, ExpertBackend, LocalExperts};
pub use generate::{GenerateError, GenerateOptions, Generation, Generator, TokenEvent};
pub use model::{KvCache, LogitsOf, MoeBlock, MoeObserver, MoeRecord, Qwen3Moe};
pub use router::{Router, RouterWorkspace};
pub use tokenizer::{TokenStream, Tokenizer};
