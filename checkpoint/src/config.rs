//! The parameters of `config.json` that define the experts' arithmetic, and those of a whole text model.

pub(crate) mod keys;
mod language;
mod layers;
mod quantization;
mod router;

use std::fmt;

use crate::family::{ActivationRule, Family, LayerRule, SharedWidth, Weighting};
use crate::router::RouterConfig;
use keys::{Keys, clip, invalid};
pub(crate) use language::token_ids;
pub use language::{AttentionConfig, LanguageConfig};
pub use quantization::{QuantMethod, Quantization};

/// Parameters of a model, independent of how its family names them in `config.json`.
///
/// [`ModelConfig::from_json`] reads what serving the experts needs. It checks that every dimension is at least 1
/// and within limits, and that `top_k` ≤ `num_experts`. The parameters of the router and of the rest of the model
/// are read at the same time. Only [`router`](Self::router) and [`language`](Self::language) report a fault in them,
/// since a server of experts does not need them.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    /// Model family.
    pub family: &'static Family,
    /// Width of the rows that routed experts take and return.
    pub hidden: usize,
    /// Width of a hidden state of the model, which routers and shared experts take. It differs from
    /// [`hidden`](Self::hidden) in models whose experts work at a narrower latent width (Nemotron-H): the inference
    /// engine projects rows before and after them.
    pub model_hidden: usize,
    /// Inner width of one routed expert.
    pub moe_intermediate: usize,
    /// Decoder layers, including dense ones.
    pub num_layers: u32,
    /// Routed experts per MoE layer.
    pub num_experts: u32,
    /// Experts per token.
    pub top_k: usize,
    /// Arithmetic of one expert.
    pub arithmetic: ExpertArithmetic,
    /// Inner width of the MLP that holds the shared experts, or of all of them together; 0 if the model has none.
    pub shared_width: usize,
    /// Shared experts that the router weighs one by one (Inkling); 0 if they are one MLP without factors.
    pub num_weighted_shared: usize,
    /// The block's output is the mean of the routed and the shared experts' outputs, else their sum.
    pub averages_shared: bool,
    /// The declared quantisation of the weights, if they are quantised.
    pub quantization: Option<Quantization>,
    /// Keys of the text model that nothing reads, sorted.
    pub ignored_keys: Vec<String>,
    moe_layers: Vec<u32>,
    router: Result<RouterConfig, ConfigError>,
    language: Result<LanguageConfig, ConfigError>,
}

/// The arithmetic of one expert, apart from its matrices.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ExpertArithmetic {
    /// From the gate's and up's outputs to the input of down.
    pub activation: Activation,
    /// The place where the router's factor is applied.
    pub weighting: Weighting,
}

impl ExpertArithmetic {
    /// SwiGLU with factors on the outputs: the arithmetic of most families.
    pub const SWIGLU: ExpertArithmetic =
        ExpertArithmetic { activation: Activation::SILU, weighting: Weighting::Output };
}

/// From the outputs of the gate and up matrices to the input of the down matrix.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Activation {
    /// `g · σ(alpha · g) · (u + offset)` with `g = min(gate, limit)` and `u = clamp(up, −limit, limit)`.
    Swiglu {
        /// Factor inside of the sigmoid; 1 gives SiLU.
        alpha: f32,
        /// Bound of gate and up; infinite if nothing is clamped.
        limit: f32,
        /// Added to the clamped up.
        offset: f32,
    },
    /// `gelu(gate) · up` with the exact (error function) GELU.
    Gelu,
    /// `gelu(gate) · up` with the GELU that is approximated by tanh.
    GeluTanh,
    /// `relu(gate) · up`.
    Relu,
    /// `relu(up)²`, without a gate matrix.
    Relu2,
}

impl Activation {
    /// `silu(gate) · up`.
    pub const SILU: Activation =
        Activation::Swiglu { alpha: 1.0, limit: f32::INFINITY, offset: 0.0 };

    /// Returns true if the expert has a gate matrix.
    #[must_use]
    pub const fn is_gated(self) -> bool {
        !matches!(self, Activation::Relu2)
    }
}

impl fmt::Display for Activation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Activation::SILU => f.write_str("silu"),
            Activation::Swiglu { alpha, limit, offset } => {
                write!(f, "swiglu(alpha {alpha}, limit {limit}, offset {offset})")
            }
            Activation::Gelu => f.write_str("gelu"),
            Activation::GeluTanh => f.write_str("gelu_tanh"),
            Activation::Relu => f.write_str("relu"),
            Activation::Relu2 => f.write_str("relu2"),
        }
    }
}

impl ModelConfig {
    /// Parses the text of a `config.json` of an old or new transformers version.
    ///
    /// # Errors
    /// [`ConfigError`] if the experts' parameters are missing, invalid or not supported.
    pub fn from_json(json: &str) -> Result<ModelConfig, ConfigError> {
        let keys = Keys::parse(json)?;
        let family = family(&keys)?;
        let model_hidden = keys.dim(&["hidden_size"])?;
        let hidden = match family.latent {
            Some(key) if keys.get(key).is_some() => keys.dim(&[key])?,
            _ => model_hidden,
        };
        let num_layers = num_layers(family, &keys)?;
        let num_experts = keys.count(keys.own_or_any(family.experts, NUM_EXPERTS))?;
        let top_k_keys = keys.own_or_any(family.top_k, TOP_K);
        let top_k = keys.dim(top_k_keys)?;
        if top_k > num_experts as usize {
            let expected = format!("at most the number of experts, {num_experts}");
            return Err(invalid(keys.present_of(top_k_keys), top_k, expected));
        }
        let moe_intermediate = match family.other_width {
            Some((sign, width)) if keys.get(sign).is_some() => keys.dim(&[width])?,
            _ => keys.dim(family.width)?,
        };
        refuse_unsupported(family, &keys)?;
        let arithmetic = ExpertArithmetic {
            activation: activation(family, &keys)?,
            weighting: family.weighting,
        };
        let moe_layers = layers::moe_layers(family, &keys, num_layers, num_experts)?;
        let shared_width = shared_width(family, &keys, moe_intermediate)?;
        let is_stacked = family.shared.as_ref().is_some_and(|shared| shared.stacked.is_some());
        let num_weighted_shared = if is_stacked { shared_width / moe_intermediate } else { 0 };
        let averages_shared = shared_width > 0 && averages_shared(family, &keys)?;
        let quantization = quantization::parse(&keys)?;
        let router = router::parse(family, &keys, num_experts as usize, top_k, num_weighted_shared);
        let has_dense_layers = moe_layers.len() < num_layers as usize;
        let language = language::parse(family, &keys, model_hidden, has_dense_layers);
        Ok(ModelConfig {
            family,
            hidden,
            model_hidden,
            moe_intermediate,
            num_layers,
            num_experts,
            top_k,
            arithmetic,
            shared_width,
            num_weighted_shared,
            averages_shared,
            quantization,
            ignored_keys: keys.unread(),
            moe_layers,
            router,
            language,
        })
    }

    /// The rule of the router.
    ///
    /// # Errors
    /// [`ConfigError`] if a key of the router is invalid, or if this library does not compute the family's rule.
    pub fn router(&self) -> Result<&RouterConfig, ConfigError> {
        self.router.as_ref().map_err(ConfigError::clone)
    }

    /// The parameters of the rest of the text model.
    ///
    /// # Errors
    /// [`ConfigError`] if one of them is missing or invalid.
    pub fn language(&self) -> Result<&LanguageConfig, ConfigError> {
        self.language.as_ref().map_err(ConfigError::clone)
    }

    pub(crate) fn set_eos_ids(&mut self, eos_ids: Vec<u32>) {
        if let Ok(language) = &mut self.language {
            language.eos_ids = eos_ids;
        }
    }

    /// The layers that have routed experts, ascending. Never empty.
    #[must_use]
    pub fn moe_layers(&self) -> Vec<u32> {
        self.moe_layers.clone()
    }

    /// Returns true if the layer has routed experts.
    #[must_use]
    pub fn is_moe_layer(&self, layer: u32) -> bool {
        self.moe_layers.binary_search(&layer).is_ok()
    }

    /// A short form for messages: `0-3`, or `3-60`, or `1, 3, 5, …`.
    #[must_use]
    pub fn moe_layers_text(&self) -> String {
        match self.moe_layers.as_slice() {
            [first, .., last] if (last - first) as usize + 1 == self.moe_layers.len() => {
                format!("{first}-{last}")
            }
            layers => {
                let shown: Vec<String> = layers.iter().take(8).map(u32::to_string).collect();
                let more = if layers.len() > 8 { ", …" } else { "" };
                format!("{}{more}", shown.join(", "))
            }
        }
    }

    /// BLAKE3 of the parameters that define the served experts: sizes, layers, arithmetic. Two programs that exchange
    /// experts compare it.
    #[must_use]
    pub fn parameters_digest(&self) -> [u8; 32] {
        *blake3::hash(self.canonical().as_bytes()).as_bytes()
    }

    /// One line per parameter that defines the served experts, in a fixed order and spelling. Floats are written
    /// as their bits, so that the text does not depend on float formatting.
    pub(crate) fn canonical(&self) -> String {
        use std::fmt::Write;
        let mut s = String::new();
        let mut line = |key: &str, value: &dyn fmt::Display| {
            // Writing to a String cannot fail.
            let _ = writeln!(s, "{key}={value}");
        };
        line("hidden", &self.hidden);
        line("moe_intermediate", &self.moe_intermediate);
        line("num_layers", &self.num_layers);
        line("num_experts", &self.num_experts);
        line("top_k", &self.top_k);
        line("moe_layers", &format_args!("{:?}", self.moe_layers));
        match self.arithmetic.activation {
            Activation::Swiglu { alpha, limit, offset } => {
                let bits = [alpha, limit, offset].map(f32::to_bits);
                line("activation", &format_args!("swiglu {bits:?}"));
            }
            other => line("activation", &other),
        }
        line("weighting", &format_args!("{:?}", self.arithmetic.weighting));
        s
    }
}

/// The family that `model_type` names, as in transformers. The class in `architectures` counts if the type is unknown.
fn family(keys: &Keys) -> Result<&'static Family, ConfigError> {
    let class = keys
        .get_outer("architectures")
        .and_then(|classes| classes.get(0).unwrap_or(classes).as_str());
    let outer = keys.get_outer("model_type").and_then(|t| t.as_str());
    let inner = keys.get("model_type").and_then(|t| t.as_str());
    let by_class = class.and_then(Family::by_class);
    if let (Some(of_class), Some(class), Some(model_type)) = (by_class, class, outer)
        && Family::by_model_type(model_type).is_some_and(|of_type| of_type != of_class)
    {
        return Err(ConfigError::Contradiction {
            first: format!("architectures = '{class}'"),
            second: format!("model_type = '{model_type}'"),
        });
    }
    let known = outer
        .and_then(Family::by_model_type)
        .or(by_class)
        .or_else(|| inner.and_then(Family::by_model_type));
    known.ok_or_else(|| match class.or(inner).or(outer) {
        Some(found) => ConfigError::UnknownArchitecture { found: found.chars().take(80).collect() },
        None => ConfigError::Missing { field: "architectures".to_owned() },
    })
}

fn num_layers(family: &Family, keys: &Keys) -> Result<u32, ConfigError> {
    if family.layers == LayerRule::BlockTypes {
        let number = layers::block_types(keys)?.len();
        let expected = "a block for each layer, 1 to 65536 of them";
        return match u32::try_from(number) {
            Ok(number @ 1..=65_536) => Ok(number),
            _ => Err(invalid("layers_block_type", format!("{number} blocks"), expected)),
        };
    }
    keys.count(&["num_hidden_layers", "num_layers", "n_layers"])
}

fn activation(family: &'static Family, keys: &Keys) -> Result<Activation, ConfigError> {
    let positive = |key: &'static str, default: f32| {
        let value = keys.number(key)?.map_or(default, |value| value as f32);
        if value.is_nan() || value <= 0.0 {
            return Err(invalid(key, value, "a positive number"));
        }
        Ok(value)
    };
    Ok(match family.activation {
        ActivationRule::Silu => Activation::SILU,
        ActivationRule::Gated { key, default } => match keys.text(key)?.unwrap_or(default) {
            "silu" | "swish" => Activation::SILU,
            "gelu" => Activation::Gelu,
            "gelu_pytorch_tanh" | "gelu_new" => Activation::GeluTanh,
            "relu" => Activation::Relu,
            other => {
                let expected = "'silu', 'gelu', 'gelu_pytorch_tanh' or 'relu'";
                return Err(invalid(key, other, expected));
            }
        },
        ActivationRule::Clamped { .. }
            if keys.text("hidden_act")?.is_some_and(|act| !matches!(act, "silu" | "swish")) =>
        {
            let found = keys.text("hidden_act")?.unwrap_or_default();
            return Err(invalid("hidden_act", found, "'silu'"));
        }
        ActivationRule::Clamped { default } => Activation::Swiglu {
            alpha: 1.0,
            limit: positive("swiglu_limit", default)?,
            offset: 0.0,
        },
        ActivationRule::ClampedOffset { alpha, limit } => Activation::Swiglu {
            alpha: positive(alpha.0, alpha.1)?,
            limit: positive(limit.0, limit.1)?,
            offset: 1.0,
        },
        ActivationRule::Relu2 => match keys.text("mlp_hidden_act")? {
            None | Some("relu2") => Activation::Relu2,
            Some(other) => return Err(invalid("mlp_hidden_act", other, "'relu2'")),
        },
    })
}

/// Refuses settings that change the experts' arithmetic and that the family's description does not use.
fn refuse_unsupported(family: &'static Family, keys: &Keys) -> Result<(), ConfigError> {
    let (limit, alpha) = match family.activation {
        ActivationRule::ClampedOffset { .. } => (true, true),
        ActivationRule::Clamped { .. } => (true, false),
        _ => (false, false),
    };
    for (key, is_used) in [("swiglu_limit", limit), ("swiglu_alpha", alpha)] {
        if !is_used && let Some(value) = keys.get(key) {
            return Err(ConfigError::Unsupported { field: key, found: clip(value), family });
        }
    }
    let field = "moe_apply_router_weight_on_input";
    if family.weighting == Weighting::Output && keys.flag(field)? == Some(true) {
        return Err(ConfigError::Unsupported { field, found: "true".to_owned(), family });
    }
    // Experts on rows of another width than the hidden states.
    let field = "moe_latent_size";
    if family.latent.is_none()
        && let Some(value) = keys.get(field)
    {
        return Err(ConfigError::Unsupported { field, found: clip(value), family });
    }
    Ok(())
}

fn shared_width(family: &Family, keys: &Keys, width: usize) -> Result<usize, ConfigError> {
    let Some(shared) = &family.shared else { return Ok(0) };
    match shared.width {
        SharedWidth::Times(spellings, default) => {
            let number = match (keys.first(spellings)?, default) {
                (None, Some(default)) => default as usize,
                (Some((_, value)), _) if keys::as_whole(value) == Some(0) => 0,
                _ => keys.count(spellings)? as usize,
            };
            Ok(number * width)
        }
        SharedWidth::Width(key, default) => match keys.whole(key)? {
            None => Ok(default as usize),
            Some(0) => Ok(0),
            Some(_) => keys.dim(&[key]),
        },
    }
}

fn averages_shared(family: &Family, keys: &Keys) -> Result<bool, ConfigError> {
    let Some(default) = family.shared.as_ref().and_then(|shared| shared.strategy) else {
        return Ok(false);
    };
    let key = "shared_expert_combination_strategy";
    match keys.text(key)?.unwrap_or(default) {
        "average" => Ok(true),
        "sum" => Ok(false),
        other => Err(invalid(key, other, "'average' or 'sum'")),
    }
}

/// Error in a configuration.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages name every field")]
pub enum ConfigError {
    /// Not JSON, or not an object.
    #[error("not a model configuration: {reason}")]
    Json { reason: String },
    /// The architecture is not supported.
    #[error("architecture '{found}' is not supported; supported are {}", supported())]
    UnknownArchitecture { found: String },
    /// A required field is missing.
    #[error("'{field}' is missing")]
    Missing { field: String },
    /// A field has an invalid value.
    #[error("'{field}' is {found}, expected {expected}")]
    Invalid { field: &'static str, found: String, expected: String },
    /// Two fields that mean the same have different values.
    #[error("{first} contradicts {second}; remove the one that is wrong")]
    Contradiction { first: String, second: String },
    /// A setting changes the arithmetic in a way that is not supported for the family.
    #[error(
        "'{field}' is {found}, which {family} does not have: its experts would give wrong results"
    )]
    Unsupported { field: &'static str, found: String, family: &'static Family },
    /// The family's router is not computed here.
    #[error(
        "the router of {family} is not computed by this library; take the choice of experts from the engine"
    )]
    Router { family: &'static Family },
}

fn supported() -> String {
    let names: Vec<&str> = Family::ALL.iter().map(Family::class_name).collect();
    names.join(", ")
}

/// All spellings of the number of routed experts in a layer, for configurations without their family's own.
const NUM_EXPERTS: &[&str] =
    &["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"];
/// All spellings of the number of experts for each token, for configurations without their family's own.
const TOP_K: &[&str] = &[
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_topk",
    "moe_k",
    "top_k_experts",
    "moe_top_k",
];
