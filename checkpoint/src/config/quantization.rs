//! The declared quantisation of a checkpoint.
//!
//! The stored tensors tell their format themselves (names, dtypes and shapes). The configuration adds what they
//! cannot tell: block sizes of fp8 scales, and the meaning of GPTQ's stored zero points.

use std::fmt;

use serde_json::{Map, Value};

use super::ConfigError;
use super::keys::{Keys, as_whole, clip, invalid};

/// The declared quantisation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Quantization {
    /// The scheme.
    pub method: QuantMethod,
    /// Rows and columns of one fp8 scale block; `None` if scales are per tensor or per row.
    pub fp8_block: Option<[usize; 2]>,
    /// The scheme quantises activations with stored scales (`activation_scheme: static`). The experts here compute
    /// with f32 activations and do not use these scales.
    pub static_activations: bool,
    /// Columns of a group of integer codes, if the configuration says it.
    pub group_size: Option<usize>,
    /// Integer codes are symmetric, so that every zero point is the middle.
    pub symmetric: bool,
    /// GPTQ's first file format stores zero points less one.
    pub(crate) gptq_zeros_less_one: bool,
}

/// A quantisation scheme, by its name in `quant_method`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum QuantMethod {
    /// fp8-e4m3 with block, row or tensor scales.
    Fp8,
    /// The formats of the compressed-tensors library: integers, fp8, NVFP4, MXFP4.
    CompressedTensors,
    /// GPTQ: 4 or 8 bits, packed along the inputs.
    Gptq,
    /// AWQ: 4 bits, packed along the outputs.
    Awq,
    /// MXFP4: 4-bit floats with one power of two for 32 values.
    Mxfp4,
    /// The formats of the ModelOpt library: fp8, NVFP4.
    ModelOpt,
}

impl fmt::Display for QuantMethod {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            QuantMethod::Fp8 => "fp8",
            QuantMethod::CompressedTensors => "compressed-tensors",
            QuantMethod::Gptq => "gptq",
            QuantMethod::Awq => "awq",
            QuantMethod::Mxfp4 => "mxfp4",
            QuantMethod::ModelOpt => "modelopt",
        })
    }
}

impl fmt::Display for Quantization {
    /// For example `fp8, scale blocks of 128 x 128`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.method)?;
        if let Some([rows, cols]) = self.fp8_block {
            write!(f, ", scale blocks of {rows} x {cols}")?;
        }
        if self.static_activations {
            f.write_str(", static activation scales (not used)")?;
        }
        Ok(())
    }
}

pub(super) fn parse(keys: &Keys) -> Result<Option<Quantization>, ConfigError> {
    let found =
        keys.get_shared("quantization_config").or_else(|| keys.get_shared("compression_config"));
    let Some(value) = found else { return Ok(None) };
    let Value::Object(map) = value else {
        return Err(invalid("quantization_config", clip(value), "an object"));
    };
    let method = method(map)?;
    let text = |key: &str| map.get(key).and_then(Value::as_str);
    if method == QuantMethod::Fp8
        && let Some(fmt) = text("fmt")
        && !matches!(fmt, "e4m3" | "e4m3fn" | "float8_e4m3fn")
    {
        return Err(invalid("quantization_config.fmt", fmt, "'e4m3'"));
    }
    let block = map.get("weight_block_size").filter(|block| !block.is_null());
    let block = block.map(|value| pair("quantization_config.weight_block_size", value));
    let fp8_block = block.or_else(|| group_block(map)).transpose()?;
    for key in ["transform_config", "rotation_config"] {
        let set = map.get(key).filter(|value| {
            !value.is_null() && value.as_object().is_none_or(|object| !object.is_empty())
        });
        if let Some(value) = set {
            let expected = "none: rotations of activations are not supported";
            return Err(invalid("quantization_config.transform_config", clip(value), expected));
        }
    }
    // compressed-tensors has groups of its own. Several of them may differ, so only the tensors tell.
    let gptq_zeros_less_one = match map.get("quant_method").and_then(Value::as_str) {
        Some("auto-round") => auto_round_zeros_less_one(map)?,
        _ => text("checkpoint_format") != Some("gptq_v2"),
    };
    let group_size = map.get("group_size").and_then(as_whole).filter(|size| *size > 0);
    Ok(Some(Quantization {
        method,
        fp8_block,
        static_activations: text("activation_scheme") == Some("static"),
        group_size,
        symmetric: map.get("sym").and_then(Value::as_bool) == Some(true),
        gptq_zeros_less_one,
    }))
}

/// True if a checkpoint of AutoRound stores zero points less one. Its packings share a layout and differ in this
/// (`export/export_to_autoround/export.py` of intel/auto-round): only that of AutoGPTQ does.
fn auto_round_zeros_less_one(map: &Map<String, Value>) -> Result<bool, ConfigError> {
    let packing = map.get("packing_format");
    match packing.and_then(Value::as_str).map(|name| name.trim_start_matches("auto_round:")) {
        Some("auto_gptq") => Ok(true),
        Some("auto_round" | "gptqmodel") => Ok(false),
        _ => {
            let expected = "'auto_round:auto_gptq', 'auto_round:gptqmodel' or 'auto_round'";
            let found = packing.map_or_else(|| "nothing".to_owned(), clip);
            Err(invalid("quantization_config.packing_format", found, expected))
        }
    }
}

fn method(map: &Map<String, Value>) -> Result<QuantMethod, ConfigError> {
    const FIELD: &str = "quantization_config.quant_method";
    let Some(name) = map.get("quant_method").filter(|name| !name.is_null()) else {
        return Err(ConfigError::Missing { field: FIELD.to_owned() });
    };
    Ok(match name.as_str() {
        Some("fp8" | "fbgemm_fp8") => QuantMethod::Fp8,
        Some("compressed-tensors" | "compressed_tensors") => QuantMethod::CompressedTensors,
        Some("gptq" | "gptqmodel" | "auto-round" | "auto-gptq") => QuantMethod::Gptq,
        Some("awq") => QuantMethod::Awq,
        Some("mxfp4") => QuantMethod::Mxfp4,
        Some("modelopt" | "modelopt_fp4" | "nvfp4") => QuantMethod::ModelOpt,
        _ => {
            let expected = "'fp8', 'compressed-tensors', 'gptq', 'awq', 'mxfp4' or 'modelopt', \
                            or no quantization_config for an unquantised checkpoint";
            return Err(invalid(FIELD, clip(name), expected));
        }
    })
}

/// The block size of compressed-tensors' `strategy: block`, from the first group that has one.
fn group_block(map: &Map<String, Value>) -> Option<Result<[usize; 2], ConfigError>> {
    let groups = map.get("config_groups")?.as_object()?;
    let block = groups.values().find_map(|group| {
        group.get("weights")?.get("block_structure").filter(|block| !block.is_null())
    })?;
    Some(pair("quantization_config.config_groups.weights.block_structure", block))
}

/// Two dimensions, as a list or as a text such as `128x128`.
fn pair(field: &'static str, value: &Value) -> Result<[usize; 2], ConfigError> {
    let parts: Vec<Option<usize>> = match value {
        Value::Array(parts) => parts.iter().map(as_whole).collect(),
        Value::String(text) => text.split('x').map(|part| part.trim().parse().ok()).collect(),
        _ => Vec::new(),
    };
    match parts.as_slice() {
        &[Some(rows), Some(cols)] if rows > 0 && cols > 0 && rows.max(cols) <= MAX_BLOCK => {
            Ok([rows, cols])
        }
        _ => Err(invalid(field, clip(value), format!("two whole numbers from 1 to {MAX_BLOCK}"))),
    }
}

/// Above any scale block in use.
const MAX_BLOCK: usize = 1 << 16;
