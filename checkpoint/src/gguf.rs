//! Headers of GGUF files, for a description only.
//!
//! Format: `docs/gguf.md` of the ggml project, versions 2 and 3. Numbers are little-endian.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufReader, Read};
use std::path::{Path, PathBuf};

/// The description of a GGUF file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GgufSummary {
    /// `general.architecture`, such as `qwen3moe`.
    pub architecture: Option<String>,
    /// `general.name`.
    pub name: Option<String>,
    /// `<architecture>.block_count`.
    pub num_layers: Option<u64>,
    /// `<architecture>.expert_count`; `None` for a model without experts.
    pub num_experts: Option<u64>,
    /// `<architecture>.expert_used_count`.
    pub top_k: Option<u64>,
    /// Tensors by type name, such as `Q4_K`, with their number.
    pub tensor_types: BTreeMap<String, u64>,
    /// Length of the file in bytes.
    pub len_bytes: u64,
}

/// Error of reading a GGUF header.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages name every field")]
pub enum GgufError {
    /// The file cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Read { path: PathBuf, source: io::Error },
    /// The header is invalid.
    #[error("{} is no valid GGUF file: {reason}", path.display())]
    Header { path: PathBuf, reason: String },
}

impl GgufSummary {
    /// Reads the header of a file. Texts are at most 16 MiB each, and few are kept.
    ///
    /// # Errors
    /// [`GgufError`] for a file that cannot be read or whose header breaks the format.
    pub fn read(path: impl AsRef<Path>) -> Result<GgufSummary, GgufError> {
        let path = path.as_ref();
        let read_error = |source| GgufError::Read { path: path.to_owned(), source };
        let file = File::open(path).map_err(read_error)?;
        let len_bytes = file.metadata().map_err(read_error)?.len();
        let mut header = Header { input: BufReader::new(file), left: len_bytes };
        header.summary(len_bytes).map_err(|fault| match fault {
            Fault::Io(source) => read_error(source),
            Fault::Format(reason) => GgufError::Header { path: path.to_owned(), reason },
        })
    }
}

enum Fault {
    Io(io::Error),
    Format(String),
}

struct Header<R> {
    input: R,
    /// Bytes of the file that are left.
    left: u64,
}

enum Value {
    Number(u64),
    Text(String),
    Other,
}

impl<R: Read> Header<R> {
    fn summary(&mut self, len_bytes: u64) -> Result<GgufSummary, Fault> {
        if &self.bytes::<4>()? != b"GGUF" {
            return Err(Fault::Format("it does not start with 'GGUF'".to_owned()));
        }
        let version = u32::from_le_bytes(self.bytes()?);
        if !(2..=3).contains(&version) {
            return Err(Fault::Format(format!("its version is {version}, expected 2 or 3")));
        }
        let (num_tensors, num_pairs) = (self.u64()?, self.u64()?);
        let mut pairs = BTreeMap::new();
        for _ in 0..num_pairs {
            let key = self.text()?;
            let kind = u32::from_le_bytes(self.bytes()?);
            let value = self.value(kind)?;
            let is_needed = key.starts_with("general.")
                || [".block_count", ".expert_count", ".expert_used_count"]
                    .iter()
                    .any(|suffix| key.ends_with(suffix));
            if is_needed && !matches!(value, Value::Other) {
                pairs.insert(key, value);
            }
        }
        let mut tensor_types = BTreeMap::new();
        for _ in 0..num_tensors {
            self.text()?;
            let dims = u32::from_le_bytes(self.bytes()?);
            if dims > MAX_DIMS {
                return Err(Fault::Format(format!("a tensor has {dims} dimensions")));
            }
            self.skip(u64::from(dims) * 8)?;
            let kind = u32::from_le_bytes(self.bytes()?);
            self.skip(8)?;
            *tensor_types.entry(type_name(kind)).or_insert(0) += 1;
        }
        let text = |key: &str| match pairs.get(key) {
            Some(Value::Text(text)) => Some(text.clone()),
            _ => None,
        };
        let architecture = text("general.architecture");
        let number = |key: &str| match pairs.get(&format!("{}.{key}", architecture.as_deref()?)) {
            Some(Value::Number(number)) => Some(*number),
            _ => None,
        };
        Ok(GgufSummary {
            name: text("general.name"),
            num_layers: number("block_count"),
            num_experts: number("expert_count"),
            top_k: number("expert_used_count"),
            architecture,
            tensor_types,
            len_bytes,
        })
    }

    fn value(&mut self, kind: u32) -> Result<Value, Fault> {
        Ok(match kind {
            0 => Value::Number(u64::from(self.bytes::<1>()?[0])),
            2 => Value::Number(u64::from(u16::from_le_bytes(self.bytes()?))),
            4 => Value::Number(u64::from(u32::from_le_bytes(self.bytes()?))),
            10 => Value::Number(self.u64()?),
            8 => Value::Text(self.text()?),
            9 => {
                let element = u32::from_le_bytes(self.bytes()?);
                let len = self.u64()?;
                match fixed_bytes(element) {
                    Some(size) => self.skip(len.saturating_mul(size))?,
                    None if element == 8 => {
                        for _ in 0..len {
                            let bytes = self.u64()?;
                            self.skip(bytes)?;
                        }
                    }
                    None => return Err(Fault::Format(format!("a list of type {element}"))),
                }
                Value::Other
            }
            other => match fixed_bytes(other) {
                Some(size) => {
                    self.skip(size)?;
                    Value::Other
                }
                None => return Err(Fault::Format(format!("a value of the unknown type {other}"))),
            },
        })
    }

    fn bytes<const N: usize>(&mut self) -> Result<[u8; N], Fault> {
        self.take(N as u64)?;
        let mut out = [0; N];
        self.input.read_exact(&mut out).map_err(Fault::Io)?;
        Ok(out)
    }

    fn u64(&mut self) -> Result<u64, Fault> {
        Ok(u64::from_le_bytes(self.bytes()?))
    }

    fn text(&mut self) -> Result<String, Fault> {
        let len = self.u64()?;
        if len > MAX_TEXT_BYTES {
            return Err(Fault::Format(format!("a text of {len} bytes")));
        }
        self.take(len)?;
        let mut out = vec![0; len as usize];
        self.input.read_exact(&mut out).map_err(Fault::Io)?;
        Ok(String::from_utf8_lossy(&out).into_owned())
    }

    fn skip(&mut self, len: u64) -> Result<(), Fault> {
        self.take(len)?;
        io::copy(&mut self.input.by_ref().take(len), &mut io::sink()).map_err(Fault::Io)?;
        Ok(())
    }

    /// Counts bytes before they are read, so that a header never leads beyond the file.
    fn take(&mut self, len: u64) -> Result<(), Fault> {
        self.left = self
            .left
            .checked_sub(len)
            .ok_or_else(|| Fault::Format("its header is longer than the file".to_owned()))?;
        Ok(())
    }
}

/// Bytes of a value of a type with a fixed size.
fn fixed_bytes(kind: u32) -> Option<u64> {
    Some(match kind {
        0 | 1 | 7 => 1,
        2 | 3 => 2,
        4..=6 => 4,
        10..=12 => 8,
        _ => return None,
    })
}

/// The name of a tensor type, `enum ggml_type`.
fn type_name(kind: u32) -> String {
    let names = [
        (0, "F32"),
        (1, "F16"),
        (2, "Q4_0"),
        (3, "Q4_1"),
        (6, "Q5_0"),
        (7, "Q5_1"),
        (8, "Q8_0"),
        (9, "Q8_1"),
        (10, "Q2_K"),
        (11, "Q3_K"),
        (12, "Q4_K"),
        (13, "Q5_K"),
        (14, "Q6_K"),
        (15, "Q8_K"),
        (16, "IQ2_XXS"),
        (17, "IQ2_XS"),
        (18, "IQ3_XXS"),
        (19, "IQ1_S"),
        (20, "IQ4_NL"),
        (21, "IQ3_S"),
        (22, "IQ2_S"),
        (23, "IQ4_XS"),
        (29, "IQ1_M"),
        (30, "BF16"),
        (34, "TQ1_0"),
        (35, "TQ2_0"),
        (39, "MXFP4"),
    ];
    names
        .iter()
        .find(|(known, _)| *known == kind)
        .map_or_else(|| format!("type {kind}"), |(_, name)| (*name).to_owned())
}

/// Above the number of dimensions of any tensor.
const MAX_DIMS: u32 = 8;
/// Above the length of names and texts that a description needs; chat templates are shorter.
const MAX_TEXT_BYTES: u64 = 16 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    fn text(out: &mut Vec<u8>, text: &str) {
        out.extend((text.len() as u64).to_le_bytes());
        out.extend(text.as_bytes());
    }

    fn sample() -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(3u32.to_le_bytes());
        out.extend(2u64.to_le_bytes());
        out.extend(4u64.to_le_bytes());
        text(&mut out, "general.architecture");
        out.extend(8u32.to_le_bytes());
        text(&mut out, "qwen3moe");
        text(&mut out, "qwen3moe.expert_count");
        out.extend(4u32.to_le_bytes());
        out.extend(128u32.to_le_bytes());
        text(&mut out, "tokenizer.ggml.tokens");
        out.extend(9u32.to_le_bytes());
        out.extend(8u32.to_le_bytes());
        out.extend(2u64.to_le_bytes());
        text(&mut out, "a");
        text(&mut out, "bc");
        text(&mut out, "qwen3moe.rope.freq_base");
        out.extend(6u32.to_le_bytes());
        out.extend(1e6f32.to_le_bytes());
        for kind in [12u32, 14] {
            text(&mut out, "blk.0.ffn_up_exps.weight");
            out.extend(3u32.to_le_bytes());
            out.extend([0; 24]);
            out.extend(kind.to_le_bytes());
            out.extend([0; 8]);
        }
        out
    }

    fn read(bytes: &[u8]) -> Result<GgufSummary, GgufError> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("model.gguf");
        std::fs::write(&path, bytes).unwrap();
        GgufSummary::read(&path)
    }

    #[test]
    fn a_header_is_described() {
        let summary = read(&sample()).unwrap();
        assert_eq!(summary.architecture.as_deref(), Some("qwen3moe"));
        assert_eq!((summary.num_experts, summary.top_k), (Some(128), None));
        let types: Vec<_> = summary.tensor_types.into_iter().collect();
        assert_eq!(types, [("Q4_K".to_owned(), 1), ("Q6_K".to_owned(), 1)]);
    }

    #[test]
    fn every_truncation_and_every_changed_byte_is_an_error_or_a_summary() {
        let whole = sample();
        for len in 0..whole.len() {
            assert!(read(&whole[..len]).is_err(), "{len} bytes");
        }
        for at in 0..whole.len() {
            let mut damaged = whole.clone();
            damaged[at] ^= 0xff;
            let _ = read(&damaged);
        }
    }
}
