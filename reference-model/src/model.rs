//! The attention side of Qwen3-MoE in f32 on the CPU. Experts come from an [`ExpertBackend`].
//!
//! It reads the embedding, attention, norms, gates and dense layers of a checkpoint, but no expert.

mod attention;
mod layers;
mod moe;

use candle_core::{Device, Tensor};
use checkpoint::{
    AttentionConfig, Checkpoint, ConfigError, Family, LanguageConfig, ModelConfig, TensorError,
};
use thiserror::Error;

use self::attention::{Attention, LayerCache};
use self::layers::{Linear, Mlp, RmsNorm, Rope, Rotation, causal_mask, with_values};
pub use self::moe::{MoeBlock, MoeBlockError, MoeObserver, MoeRecord};
use attention_client::router::RouterConfigError;
use attention_client::{BackendError, ExpertBackend};

/// Qwen3-MoE without its experts. Clones share weights.
#[derive(Debug, Clone)]
pub struct Qwen3Moe {
    config: ModelConfig,
    language: LanguageConfig,
    /// `[vocab, hidden]`
    embedding: Tensor,
    layers: Vec<Layer>,
    norm: RmsNorm,
    head: Linear,
    rope: Rope,
}

/// Keys and values of the tokens that a model has seen. A cache belongs to one text and one model.
///
/// A failed forward pass leaves it unchanged, so the same tokens can be tried again.
#[derive(Debug)]
pub struct KvCache {
    layers: Vec<LayerCache>,
    len: usize,
}

/// Positions of a forward pass that get logits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogitsOf {
    /// The last token's only: `[vocab]`.
    Last,
    /// Every token's: `[num_tokens, vocab]`.
    All,
}

/// Failure to load a model.
#[derive(Debug, Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages explain the fields")]
pub enum LoadError {
    /// The checkpoint holds another kind of model.
    #[error(
        "the reference model runs Qwen3MoeForCausalLM only, but the checkpoint is {found}; its MoE layers can be served and checked one by one"
    )]
    Architecture { found: &'static Family },
    /// A key of the configuration is missing or invalid.
    #[error("config.json: {0}")]
    Config(#[from] ConfigError),
    /// A setting that the reference model does not implement.
    #[error("{setting} is {found}, but the reference model implements {expected} only")]
    Unsupported { setting: &'static str, found: String, expected: &'static str },
    /// A tensor is missing, has another shape or another dtype.
    #[error(transparent)]
    Tensor(#[from] TensorError),
    /// The router's settings are invalid.
    #[error("router: {0}")]
    Router(#[from] RouterConfigError),
    /// The tensor library failed.
    #[error("cannot build a tensor: {0}")]
    Library(#[source] Box<candle_core::Error>),
}

/// Failure of a forward pass.
#[derive(Debug, Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages explain the fields")]
pub enum ForwardError {
    /// The experts of a layer could not be computed. The error names the layer.
    #[error(transparent)]
    Backend(#[from] BackendError),
    /// The MoE block of a layer failed for another reason.
    #[error(transparent)]
    MoeBlock(MoeBlockError),
    /// The tokens do not fit the context.
    #[error(
        "{new} tokens after {cached} cached ones make {}, but the context holds {context}",
        cached + new
    )]
    ContextFull { cached: usize, new: usize, context: usize },
    /// A token id that the model does not have.
    #[error("token {position} has id {id}, but the vocabulary has {vocab} entries")]
    TokenOutOfRange { position: usize, id: u32, vocab: usize },
    /// No token was given.
    #[error("no tokens given, expected at least one")]
    NoTokens,
    /// The cache belongs to a model with another number of layers.
    #[error("the cache has {found} layers, expected {expected}: it belongs to another model")]
    ForeignCache { found: usize, expected: usize },
    /// The tensor library failed.
    #[error("{part}: {source}")]
    Library { part: String, source: Box<candle_core::Error> },
}

impl From<candle_core::Error> for LoadError {
    fn from(source: candle_core::Error) -> Self {
        Self::Library(Box::new(source))
    }
}

impl ForwardError {
    fn library(part: impl Into<String>, source: candle_core::Error) -> Self {
        Self::Library { part: part.into(), source: Box::new(source) }
    }
}

#[derive(Debug, Clone)]
struct Layer {
    input_norm: RmsNorm,
    attention: Attention,
    post_norm: RmsNorm,
    ffn: Ffn,
}

#[derive(Debug, Clone)]
enum Ffn {
    Dense(Mlp),
    Moe(Box<MoeBlock>),
}

impl Qwen3Moe {
    /// Loads everything but the experts, widened to f32.
    pub fn load(checkpoint: &Checkpoint) -> Result<Self, LoadError> {
        let config = checkpoint.config().clone();
        let language = config.language()?.clone();
        let attention = supported(&config, &language)?;
        let layers = (0..config.num_layers)
            .map(|layer| Layer::load(checkpoint, layer, &language, attention))
            .collect::<Result<_, _>>()?;
        let vocab_by_hidden = [language.vocab, config.hidden];
        let embedding = layers::load_matrix(checkpoint, "model.embed_tokens", vocab_by_hidden)?;
        let head = if language.tie_word_embeddings {
            Linear::from_matrix(&embedding, &[])?
        } else {
            Linear::load(checkpoint, "lm_head", vocab_by_hidden, false)?
        };
        Ok(Self {
            embedding,
            layers,
            norm: RmsNorm::load(checkpoint, "model.norm.weight", config.hidden)?,
            head,
            rope: Rope::new(attention.rope_theta, attention.head_dim),
            config,
            language,
        })
    }

    /// The configuration of the checkpoint.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The parameters of the checkpoint's attention side.
    pub fn language(&self) -> &LanguageConfig {
        &self.language
    }

    /// An empty cache for one text.
    pub fn new_cache(&self) -> KvCache {
        let layers = self.layers.iter().map(|_| LayerCache::default()).collect();
        KvCache { layers, len: 0 }
    }

    /// Runs `tokens` after the tokens in `cache`, and adds them to it. Returns logits, `[vocab]` or
    /// `[num_tokens, vocab]`. An `observer` sees every MoE block.
    ///
    /// # Errors
    /// [`ForwardError`]; the cache is unchanged then.
    pub fn forward(
        &mut self,
        tokens: &[u32],
        cache: &mut KvCache,
        logits_of: LogitsOf,
        backend: &mut dyn ExpertBackend,
        mut observer: Option<&mut dyn MoeObserver>,
    ) -> Result<Vec<f32>, ForwardError> {
        self.check(tokens, cache)?;
        let (first, num) = (cache.len, tokens.len());
        let at = |part: &'static str| move |e| ForwardError::library(part, e);
        let rotation = self.rope.at(first, num).map_err(at("rotary embedding"))?;
        let mask = if num > 1 { Some(causal_mask(first, num)) } else { None };
        let mask = mask.transpose().map_err(at("causal mask"))?;
        let mut x = self.embed(tokens).map_err(at("embedding"))?;
        for (idx, (layer, cache)) in self.layers.iter_mut().zip(&mut cache.layers).enumerate() {
            let step = Step { first, rotation: &rotation, mask: mask.as_ref() };
            // Not `as_deref_mut`: it cannot shorten the trait object's lifetime.
            let observer = observer.as_mut().map(|o| &mut **o as &mut dyn MoeObserver);
            x = layer.forward(&x, step, cache, backend, observer).map_err(|e| e.at(idx))?;
        }
        let logits = self.logits(&x, logits_of).map_err(at("output head"))?;
        cache.len = first + num;
        Ok(logits)
    }

    fn check(&self, tokens: &[u32], cache: &KvCache) -> Result<(), ForwardError> {
        let (cached, new, context) = (cache.len, tokens.len(), self.language.max_positions);
        if cache.layers.len() != self.layers.len() {
            let (found, expected) = (cache.layers.len(), self.layers.len());
            return Err(ForwardError::ForeignCache { found, expected });
        }
        if new == 0 {
            return Err(ForwardError::NoTokens);
        }
        if cached.saturating_add(new) > context {
            return Err(ForwardError::ContextFull { cached, new, context });
        }
        let vocab = self.language.vocab;
        match tokens.iter().position(|&id| id as usize >= vocab) {
            Some(position) => {
                Err(ForwardError::TokenOutOfRange { position, id: tokens[position], vocab })
            }
            None => Ok(()),
        }
    }

    fn embed(&self, tokens: &[u32]) -> candle_core::Result<Tensor> {
        let ids = Tensor::from_slice(tokens, tokens.len(), &Device::Cpu)?;
        self.embedding.index_select(&ids, 0)
    }

    fn logits(&self, x: &Tensor, logits_of: LogitsOf) -> candle_core::Result<Vec<f32>> {
        let x = match logits_of {
            LogitsOf::All => x.clone(),
            LogitsOf::Last => x.narrow(0, x.dim(0)? - 1, 1)?,
        };
        let logits = self.head.forward(&self.norm.forward(&x)?)?;
        with_values(&logits, <[f32]>::to_vec)
    }
}

impl KvCache {
    /// Number of tokens.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns true if there is no token.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Removes all tokens but the first `len`.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }
}

impl Layer {
    fn load(
        checkpoint: &Checkpoint,
        layer: u32,
        language: &LanguageConfig,
        attention: &AttentionConfig,
    ) -> Result<Self, LoadError> {
        let config = checkpoint.config();
        let prefix = format!("model.layers.{layer}");
        let norm = |name: &str| {
            RmsNorm::load(checkpoint, &format!("{prefix}.{name}.weight"), config.hidden)
        };
        let ffn = match language.dense_intermediate {
            Some(width) if !config.is_moe_layer(layer) => {
                Ffn::Dense(Mlp::load(checkpoint, &format!("{prefix}.mlp"), width)?)
            }
            _ => Ffn::Moe(Box::new(MoeBlock::load(checkpoint, layer)?)),
        };
        Ok(Self {
            input_norm: norm("input_layernorm")?,
            attention: Attention::load(checkpoint, &format!("{prefix}.self_attn"), attention)?,
            post_norm: norm("post_attention_layernorm")?,
            ffn,
        })
    }

    fn forward(
        &mut self,
        x: &Tensor,
        step: Step<'_>,
        cache: &mut LayerCache,
        backend: &mut dyn ExpertBackend,
        observer: Option<&mut dyn MoeObserver>,
    ) -> Result<Tensor, LayerError> {
        let Step { first, rotation, mask } = step;
        let attended =
            self.attention.forward(&self.input_norm.forward(x)?, first, rotation, mask, cache)?;
        let x = (x + attended)?;
        let normed = self.post_norm.forward(&x)?;
        let y = match &mut self.ffn {
            Ffn::Dense(mlp) => mlp.forward(&normed)?,
            Ffn::Moe(block) => {
                let mut out = vec![0.0; normed.elem_count()];
                with_values(&normed, |values| {
                    block.forward_tensor(&normed, values, &mut out, backend, observer)
                })??;
                Tensor::from_vec(out, normed.shape(), &Device::Cpu)?
            }
        };
        Ok((x + y)?)
    }
}

/// Inputs of one forward pass that all layers share.
#[derive(Clone, Copy)]
struct Step<'a> {
    first: usize,
    rotation: &'a Rotation,
    mask: Option<&'a Tensor>,
}

/// A [`ForwardError`] without its layer.
#[derive(Debug, Error)]
enum LayerError {
    #[error(transparent)]
    MoeBlock(#[from] MoeBlockError),
    #[error(transparent)]
    Library(#[from] candle_core::Error),
}

impl LayerError {
    fn at(self, layer: usize) -> ForwardError {
        match self {
            Self::MoeBlock(MoeBlockError::Backend(source)) => ForwardError::Backend(source),
            Self::MoeBlock(source) => ForwardError::MoeBlock(source),
            Self::Library(source) => ForwardError::library(format!("layer {layer}"), source),
        }
    }
}

/// The attention settings of a model, if this module supports it.
fn supported<'a>(
    config: &ModelConfig,
    language: &'a LanguageConfig,
) -> Result<&'a AttentionConfig, LoadError> {
    let found = config.family;
    let attention = match &language.attention {
        Some(attention) if found.model_type == "qwen3_moe" => attention,
        _ => return Err(LoadError::Architecture { found }),
    };
    if attention.rope_type != "default" {
        return Err(LoadError::Unsupported {
            setting: "rope_type",
            found: attention.rope_type.clone(),
            expected: "\"default\"",
        });
    }
    if let Some(window) = attention.sliding_window {
        return Err(LoadError::Unsupported {
            setting: "sliding_window",
            found: window.to_string(),
            expected: "attention to the whole context",
        });
    }
    Ok(attention)
}
