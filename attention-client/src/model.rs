//! The model that a client asks experts of.

use std::time::Duration;

use control_api::{ConfigError, ControlClient, ControlError, ModelDescriptor};
use protocol::ModelShape;
use thiserror::Error;

/// The model that a client asks experts of.
///
/// With a checkpoint at hand, take [`ClientModel::of`] (feature `checkpoint`). An engine that has none asks the
/// control plane with [`ClientModel::fetch`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClientModel {
    /// Sizes and fingerprint. A server refuses a client whose shape differs from its own.
    pub shape: ModelShape,
    /// Architecture name, such as `qwen3_moe`.
    pub architecture: String,
    /// Layers that have experts, strictly ascending.
    pub moe_layers: Vec<u32>,
}

/// The model of a cluster could not be found out.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ModelError {
    /// The control plane's URL or token cannot be used.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The control plane did not answer, or refused.
    #[error(transparent)]
    Control(#[from] ControlError),
    /// The cluster has no model yet.
    #[error("the control plane has no model yet: wait for the first expert server to register")]
    NoModel,
    /// The descriptor's fingerprint is not 64 hexadecimal digits.
    #[error("the model fingerprint is {found:?}, expected {expected} hexadecimal digits")]
    #[allow(missing_docs, reason = "the message explains the fields")]
    Fingerprint { found: String, expected: usize },
    /// The thread that asks the control plane could not be started.
    #[error("cannot start a thread that asks the control plane: {0}")]
    Thread(std::io::Error),
}

impl ClientModel {
    /// The model of a checkpoint.
    #[cfg(feature = "checkpoint")]
    #[must_use]
    pub fn of(checkpoint: &checkpoint::Checkpoint) -> Self {
        let config = checkpoint.config();
        Self {
            shape: ModelShape {
                fingerprint: checkpoint.fingerprint().0,
                hidden: config.hidden as u32,
                num_layers: config.num_layers,
                num_experts: config.num_experts,
                top_k: config.top_k as u32,
            },
            architecture: config.architecture.model_type().to_owned(),
            moe_layers: config.moe_layers(),
        }
    }

    /// The model that `descriptor` describes. `num_layers` counts all layers of the model, dense ones included;
    /// a descriptor lists the MoE layers only.
    ///
    /// # Errors
    /// [`ModelError::Fingerprint`].
    pub fn from_descriptor(
        descriptor: &ModelDescriptor,
        num_layers: u32,
    ) -> Result<Self, ModelError> {
        let fingerprint = parse_fingerprint(&descriptor.fingerprint)?;
        Ok(Self {
            shape: ModelShape {
                fingerprint,
                hidden: descriptor.hidden,
                num_layers,
                num_experts: descriptor.num_experts,
                top_k: descriptor.top_k,
            },
            architecture: descriptor.architecture.clone(),
            moe_layers: descriptor.moe_layers.clone(),
        })
    }

    /// Asks the control plane at `url` (`http://HOST:PORT`) for the model of its cluster. `num_layers` as for
    /// [`from_descriptor`](Self::from_descriptor).
    ///
    /// Blocks for `timeout` at most, on a thread of its own: callers inside an async runtime may use it, but
    /// block their worker meanwhile.
    ///
    /// # Errors
    /// [`ModelError`]. [`ModelError::NoModel`] before the first server has registered.
    pub fn fetch(
        url: &str,
        token: Option<String>,
        num_layers: u32,
        timeout: Duration,
    ) -> Result<Self, ModelError> {
        let control = ControlClient::new(url, token)?.with_timeout(timeout);
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(ModelError::Thread)?;
        let table = std::thread::scope(|scope| {
            let thread = std::thread::Builder::new()
                .name("sy-client-model".to_owned())
                .spawn_scoped(scope, || runtime.block_on(control.placement()))
                .map_err(ModelError::Thread)?;
            match thread.join() {
                Ok(table) => Ok(table?),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        });
        let descriptor = table.and_then(|table| table.model.ok_or(ModelError::NoModel))?;
        Self::from_descriptor(&descriptor, num_layers)
    }

    /// The descriptor of this model, as the control plane writes it.
    #[must_use]
    pub fn descriptor(&self) -> ModelDescriptor {
        let hex = |byte: &u8| format!("{byte:02x}");
        ModelDescriptor {
            fingerprint: self.shape.fingerprint.iter().map(hex).collect(),
            architecture: self.architecture.clone(),
            hidden: self.shape.hidden,
            moe_layers: self.moe_layers.clone(),
            num_experts: self.shape.num_experts,
            top_k: self.shape.top_k,
        }
    }
}

fn parse_fingerprint<const N: usize>(text: &str) -> Result<[u8; N], ModelError> {
    let refused = || ModelError::Fingerprint { found: text.to_owned(), expected: 2 * N };
    if text.len() != 2 * N || !text.is_ascii() {
        return Err(refused());
    }
    let mut bytes = [0; N];
    for (byte, digits) in bytes.iter_mut().zip(text.as_bytes().chunks_exact(2)) {
        let value = |digit: u8| char::from(digit).to_digit(16);
        let (high, low) = (value(digits[0]), value(digits[1]));
        let (Some(high), Some(low)) = (high, low) else { return Err(refused()) };
        *byte = (high << 4 | low) as u8;
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_descriptor_and_its_model_are_the_same() {
        let model = ClientModel {
            shape: ModelShape {
                fingerprint: std::array::from_fn(|idx| (idx * 37) as u8),
                hidden: 64,
                num_layers: 5,
                num_experts: 16,
                top_k: 4,
            },
            architecture: "qwen3_moe".to_owned(),
            moe_layers: vec![1, 2, 4],
        };
        assert_eq!(ClientModel::from_descriptor(&model.descriptor(), 5).unwrap(), model);
        for found in ["", "12", &"é".repeat(32), &"g".repeat(64)] {
            let descriptor =
                ModelDescriptor { fingerprint: found.to_owned(), ..model.descriptor() };
            let error = ClientModel::from_descriptor(&descriptor, 5).unwrap_err();
            assert!(matches!(error, ModelError::Fingerprint { .. }), "{error}");
        }
    }
}
