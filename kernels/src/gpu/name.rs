//! Names of devices, as settings and command lines give them.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

/// Name of a GPU: `cuda:N`, or `cuda` for the first. `emulated:N` is one in software, for tests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DeviceName {
    /// GPU of this index among those of this process.
    Cuda(u32),
    /// GPU in software of this index.
    Emulated(u32),
}

/// A text that names no device.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{text:?} names no GPU: expected `cuda` or `cuda:N`, such as `cuda:0`")]
pub struct DeviceNameError {
    /// The text.
    pub text: String,
}

impl FromStr for DeviceName {
    type Err = DeviceNameError;

    fn from_str(text: &str) -> Result<Self, DeviceNameError> {
        let (kind, ordinal) = text.split_once(':').unwrap_or((text, "0"));
        let is_number = !ordinal.is_empty() && ordinal.bytes().all(|byte| byte.is_ascii_digit());
        let ordinal = ordinal.parse().ok().filter(|_| is_number);
        match (kind, ordinal) {
            ("cuda", Some(ordinal)) => Ok(Self::Cuda(ordinal)),
            ("emulated", Some(ordinal)) => Ok(Self::Emulated(ordinal)),
            _ => Err(DeviceNameError { text: text.into() }),
        }
    }
}

impl fmt::Display for DeviceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
            Self::Emulated(ordinal) => write!(f, "emulated:{ordinal}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_understood_and_others_refused() {
        for (text, name) in [
            ("cuda", DeviceName::Cuda(0)),
            ("cuda:3", DeviceName::Cuda(3)),
            ("emulated:1", DeviceName::Emulated(1)),
        ] {
            let parsed: DeviceName = text.parse().expect("a name");
            assert_eq!(parsed, name);
            assert_eq!(parsed.to_string().parse(), Ok(name));
        }
        for text in
            ["", "cpu", "cuda:", "cuda:x", "cuda:-1", "cuda:+1", "cuda:99999999999", "gpu:0"]
        {
            let error = text.parse::<DeviceName>().unwrap_err();
            assert!(error.to_string().contains("cuda:N"), "{error}");
        }
    }
}
