//! Blocks of the reference data, padded to sizes that the kernels compute. Padding with zeros changes no result.

use std::fs;
use std::path::Path;

use checkpoint::{DType, TensorFile};

/// Hidden size of the blocks, and of the padded ones.
pub const HIDDEN: [usize; 2] = [48, 128];
/// Width of the blocks' experts, and of the padded ones. Twice the width is no hidden size, because one family tells its
/// layouts apart by shape.
const WIDTH: [usize; 2] = [20, 192];

/// The order of gate and up in a dimension that has both.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GateUp {
    OneAfterTheOther,
    Alternating,
}

/// Writes the checkpoint in `from` to `to`: larger by zeros, in bf16, with the same names and layout.
pub fn pad_block(from: &Path, to: &Path, order: GateUp) {
    let config = fs::read_to_string(from.join("config.json")).expect("a configuration");
    fs::write(to.join("config.json"), pad_config(&config)).expect("written");
    let file = TensorFile::open(from.join("model.safetensors")).expect("a checkpoint");
    let (mut header, mut bytes) = (Vec::new(), Vec::new());
    for name in file.names() {
        let tensor = file.tensor(name).expect("a tensor");
        let begin = bytes.len();
        let (dtype, shape) = if tensor.dtype == DType::F32 {
            let shape: Vec<usize> = tensor.shape.iter().map(|dim| padded_dim(*dim)).collect();
            let values = tensor.to_f32().expect("f32");
            bytes.extend(pad(&values, tensor.shape, &shape, order));
            ("BF16", shape)
        } else {
            assert_eq!(tensor.dtype, DType::I64, "{name}");
            bytes.extend(tensor.data);
            ("I64", tensor.shape.to_vec())
        };
        header.push(format!(
            r#""{name}":{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":[{begin},{}]}}"#,
            bytes.len()
        ));
    }
    let header = format!("{{{}}}", header.join(","));
    let mut content = (header.len() as u64).to_le_bytes().to_vec();
    content.extend(header.as_bytes());
    content.extend(bytes);
    fs::write(to.join("model.safetensors"), content).expect("written");
}

const fn padded_dim(dim: usize) -> usize {
    if dim == HIDDEN[0] {
        HIDDEN[1]
    } else if dim == WIDTH[0] {
        WIDTH[1]
    } else if dim == 2 * WIDTH[0] {
        2 * WIDTH[1]
    } else {
        dim
    }
}

/// Replaces the numbers that are sizes. Each stands alone on its line.
fn pad_config(config: &str) -> String {
    let lines = config.lines().map(|line| {
        let (text, comma) = line.strip_suffix(',').map_or((line, ""), |text| (text, ","));
        match text.rsplit_once(": ").map(|(key, value)| (key, value.parse::<usize>())) {
            Some((key, Ok(size))) => format!("{key}: {}{comma}\n", padded_dim(size)),
            _ => format!("{line}\n"),
        }
    });
    lines.collect()
}

/// The values in bf16 at their places in the larger tensor, and zeros elsewhere.
fn pad(values: &[f32], from: &[usize], to: &[usize], order: GateUp) -> Vec<u8> {
    let mut out = vec![0; to.iter().product::<usize>() * 2];
    for (at, value) in values.iter().enumerate() {
        // From the innermost dimension outwards.
        let (mut rest, mut place, mut stride) = (at, 0, 1);
        for (&from, &to) in from.iter().zip(to).rev() {
            let idx = rest % from;
            let is_up =
                from == 2 * WIDTH[0] && idx >= WIDTH[0] && order == GateUp::OneAfterTheOther;
            place += stride * if is_up { idx - WIDTH[0] + WIDTH[1] } else { idx };
            rest /= from;
            stride *= to;
        }
        let value = half::bf16::from_f32(*value);
        out[place * 2..][..2].copy_from_slice(&value.to_le_bytes());
    }
    out
}
