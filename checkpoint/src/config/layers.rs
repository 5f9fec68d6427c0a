//! The layers that have experts.

use serde_json::Value;

use super::ConfigError;
use super::keys::{Keys, as_whole, clip, invalid};
use crate::family::{Family, LayerRule};

/// The layers with experts, ascending. Never empty.
pub(super) fn moe_layers(
    family: &'static Family,
    keys: &Keys,
    num_layers: u32,
    num_experts: u32,
) -> Result<Vec<u32>, ConfigError> {
    let all = 0..num_layers;
    if family.has_layer_types
        && let Some(types) = keys.list("mlp_layer_types")?
    {
        return not_empty(layers_of_types(types, num_layers)?, num_layers);
    }
    let layers: Vec<u32> = match family.layers {
        LayerRule::All => all.collect(),
        LayerRule::AllIf(flag) => match keys.flag(flag)? {
            Some(true) => all.collect(),
            _ => return Err(invalid(flag, false, "true: without it no layer has experts")),
        },
        LayerRule::Marked => match keys.list("moe_layer_freq")? {
            Some(marks) => marked(marks, num_layers)?,
            None => all.collect(),
        },
        LayerRule::BlockTypes => {
            (0..).zip(block_types(keys)?).filter_map(|(l, has)| has.then_some(l)).collect()
        }
        LayerRule::SparseStep { dense } => {
            let step = positive(keys, "decoder_sparse_step", 1)?;
            let listed = numbers(keys, "mlp_only_layers")?;
            let dense = listed.unwrap_or_else(|| (0..dense).collect());
            all.filter(|l| (l + 1) % step == 0 && !dense.contains(l)).collect()
        }
        LayerRule::AfterDense { key, default, has_frequency } => {
            let found = key.and_then(|key| Some((key, keys.get(key)?)));
            let first = found.map_or(Ok(default), |(key, value)| small(key, value))?;
            match keys.get("moe_layer_freq").filter(|_| has_frequency) {
                None => all.filter(|l| *l >= first).collect(),
                Some(Value::Array(marks)) => {
                    marked(marks, num_layers)?.into_iter().filter(|l| *l >= first).collect()
                }
                Some(_) => {
                    let freq = positive(keys, "moe_layer_freq", 1)?;
                    all.filter(|l| *l >= first && l % freq == 0).collect()
                }
            }
        }
        LayerRule::Period if num_experts < 2 => {
            let key = keys.present_of(family.experts);
            let expected = "at least 2: with one expert every layer is dense";
            return Err(invalid(key, num_experts, expected));
        }
        LayerRule::Period => {
            let period = positive(keys, "expert_layer_period", 2)?;
            let offset = keys
                .get("expert_layer_offset")
                .map_or(Ok(1), |v| small("expert_layer_offset", v))?;
            all.filter(|l| l % period == offset).collect()
        }
        LayerRule::Interleaved => match numbers(keys, "moe_layers")? {
            Some(listed) => all.filter(|l| listed.contains(l)).collect(),
            None => {
                let step = positive(keys, "interleave_moe_layer_step", 1)?;
                all.filter(|l| (l + 1) % step == 0).collect()
            }
        },
        LayerRule::Range => {
            let of = |key, default| {
                keys.get(key).map_or(Ok(default), |v| small_or_last(key, v, num_layers))
            };
            let start = of("moe_layer_start_index", 1)?;
            let end = of("moe_layer_end_index", num_layers - 1)?;
            let interval = positive(keys, "moe_layer_interval", 1)?;
            all.filter(|l| (l + 1) % interval == 0 && (start..=end).contains(l)).collect()
        }
    };
    expect_same_types(family, keys, num_layers, &layers)?;
    not_empty(layers, num_layers)
}

/// Refuses a list `mlp_layer_types` of a family that does not read it, if it asks for other layers: the checkpoint is
/// then written for another reader.
fn expect_same_types(
    family: &'static Family,
    keys: &Keys,
    num_layers: u32,
    layers: &[u32],
) -> Result<(), ConfigError> {
    let types = keys.get("mlp_layer_types").and_then(Value::as_array);
    let asked = types.and_then(|types| layers_of_types(types, num_layers).ok());
    match asked {
        Some(asked) if asked != layers => Err(ConfigError::Contradiction {
            first: format!("mlp_layer_types (layers {asked:?} have experts)"),
            second: format!("the settings that {family} reads (layers {layers:?} have experts)"),
        }),
        _ => Ok(()),
    }
}

/// For each block of a hybrid model (Nemotron-H), true if it has experts. The keys are `layers_block_type` or
/// `layer_types`, or `hybrid_override_pattern` with the letter `E` for experts. The number of blocks is the number of
/// layers.
pub(super) fn block_types(keys: &Keys) -> Result<Vec<bool>, ConfigError> {
    for key in ["layers_block_type", "layer_types"] {
        if let Some(types) = keys.list(key)? {
            return Ok(types.iter().map(|name| name.as_str() == Some("moe")).collect());
        }
    }
    match keys.text("hybrid_override_pattern")? {
        Some(pattern) => Ok(pattern.chars().map(|letter| letter == 'E').collect()),
        None => Err(ConfigError::Missing {
            field: "layers_block_type (or layer_types, hybrid_override_pattern)".to_owned(),
        }),
    }
}

fn not_empty(layers: Vec<u32>, num_layers: u32) -> Result<Vec<u32>, ConfigError> {
    if layers.is_empty() {
        return Err(invalid(
            "num_hidden_layers",
            num_layers,
            "enough layers that at least one has experts (see first_k_dense_replace, moe_layer_freq, \
             decoder_sparse_step, mlp_only_layers and mlp_layer_types)",
        ));
    }
    Ok(layers)
}

fn layers_of_types(types: &[Value], num_layers: u32) -> Result<Vec<u32>, ConfigError> {
    if types.len() != num_layers as usize {
        let expected = format!("one for each of {num_layers} layers");
        return Err(invalid("mlp_layer_types", format!("{} entries", types.len()), expected));
    }
    let mut layers = Vec::new();
    for (layer, name) in (0..).zip(types) {
        match name.as_str() {
            Some("sparse" | "moe" | "hash_moe") => layers.push(layer),
            Some("dense" | "mlp") => {}
            _ => return Err(invalid("mlp_layer_types", clip(name), "'dense' or 'sparse'")),
        }
    }
    Ok(layers)
}

/// The layers that a list of one 0 or 1 for each layer marks.
fn marked(marks: &[Value], num_layers: u32) -> Result<Vec<u32>, ConfigError> {
    if marks.len() != num_layers as usize {
        let expected = format!("a number, or one mark for each of {num_layers} layers");
        return Err(invalid("moe_layer_freq", format!("{} entries", marks.len()), expected));
    }
    let mut layers = Vec::new();
    for (layer, mark) in (0..).zip(marks) {
        match as_whole(mark).or(mark.as_bool().map(usize::from)) {
            Some(0) => {}
            Some(1) => layers.push(layer),
            _ => return Err(invalid("moe_layer_freq", clip(mark), "0 or 1 for each layer")),
        }
    }
    Ok(layers)
}

fn positive(keys: &Keys, key: &'static str, default: u32) -> Result<u32, ConfigError> {
    match keys.get(key) {
        None => Ok(default),
        Some(value) => match small(key, value)? {
            0 => Err(invalid(key, 0, "at least 1")),
            step => Ok(step),
        },
    }
}

fn small(key: &'static str, value: &Value) -> Result<u32, ConfigError> {
    as_whole(value)
        .and_then(|whole| u32::try_from(whole).ok())
        .ok_or_else(|| invalid(key, clip(value), "a whole number of layers"))
}

/// As [`small`], with −1 for the last layer. A list, of multi-modal models, starts with the text model's number.
fn small_or_last(key: &'static str, value: &Value, num_layers: u32) -> Result<u32, ConfigError> {
    let value = value.get(0).unwrap_or(value);
    if value.as_i64() == Some(-1) {
        return Ok(num_layers - 1);
    }
    small(key, value)
}

fn numbers(keys: &Keys, key: &'static str) -> Result<Option<Vec<u32>>, ConfigError> {
    let Some(entries) = keys.list(key)? else { return Ok(None) };
    entries.iter().map(|entry| small(key, entry)).collect::<Result<_, _>>().map(Some)
}
