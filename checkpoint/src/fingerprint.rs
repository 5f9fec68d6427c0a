//! Identity of a model, which peers compare when they connect.

use std::fmt;
use std::str::FromStr;

use sha2::{Digest, Sha256};

use crate::open::Checkpoint;

/// SHA-256 over the canonical configuration and the sorted tensor index.
///
/// It is independent of the checkpoint's path, its sharding and the formatting of `config.json`. It covers
/// names, dtypes and shapes, not the values of the weights: hashing hundreds of gigabytes at every start
/// would take minutes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Fingerprint(pub [u8; 32]);

impl Checkpoint {
    /// Computes the fingerprint of this model. Store the result: each call computes it again.
    pub fn fingerprint(&self) -> Fingerprint {
        let mut hash = Sha256::new();
        hash.update(DOMAIN);
        hash.update(self.config().canonical());
        for name in self.names() {
            // Every listed name resolves: the index was checked when the checkpoint was opened.
            let Ok(tensor) = self.tensor(name) else { continue };
            // Lengths first, so that two lists of tensors never have the same byte stream.
            hash.update((name.len() as u64).to_le_bytes());
            hash.update(name);
            hash.update((tensor.dtype.name().len() as u64).to_le_bytes());
            hash.update(tensor.dtype.name());
            hash.update((tensor.shape.len() as u64).to_le_bytes());
            for dim in tensor.shape {
                hash.update((*dim as u64).to_le_bytes());
            }
        }
        Fingerprint(hash.finalize().into())
    }
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Fingerprint({self})")
    }
}

impl FromStr for Fingerprint {
    type Err = ParseFingerprintError;

    /// Reads 64 hexadecimal digits.
    fn from_str(text: &str) -> Result<Fingerprint, ParseFingerprintError> {
        let error = || ParseFingerprintError { found: text.chars().take(80).collect() };
        if text.len() != 64 || !text.bytes().all(|b| b.is_ascii_hexdigit()) {
            return Err(error());
        }
        let mut bytes = [0; 32];
        for (i, byte) in bytes.iter_mut().enumerate() {
            let pair = text.get(2 * i..2 * i + 2).ok_or_else(error)?;
            *byte = u8::from_str_radix(pair, 16).map_err(|_| error())?;
        }
        Ok(Fingerprint(bytes))
    }
}

/// Error of parsing a fingerprint.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("'{found}' is not a model fingerprint, which has 64 hexadecimal digits")]
pub struct ParseFingerprintError {
    found: String,
}

/// Change it when the meaning of the hashed bytes changes.
const DOMAIN: &[u8] = b"switchyard model fingerprint 1\n";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_form_round_trips_and_rejects_what_is_not_hex() {
        let fingerprint = Fingerprint(std::array::from_fn(|i| (i * 37 + 5) as u8));
        let text = fingerprint.to_string();
        assert_eq!(text.len(), 64);
        assert_eq!(text.parse::<Fingerprint>().unwrap(), fingerprint);
        assert_eq!(text.to_uppercase().parse::<Fingerprint>().unwrap(), fingerprint);
        let multibyte = "é".repeat(32);
        for bad in ["", &text[1..], &format!("{text}0"), &text.replace('2', "g"), &multibyte] {
            let error = bad.parse::<Fingerprint>().unwrap_err().to_string();
            assert!(error.contains("64 hexadecimal digits"), "{error}");
        }
    }
}
