//! The model that a client asks experts of.

use std::time::Duration;

use control_api::{
    ClientOptions, ConfigError, ControlClient, ControlError, ModelDescriptor, Security,
};
use protocol::ModelShape;
use thiserror::Error;

/// The model that a client asks experts of.
///
/// With a checkpoint at hand, take [`ClientModel::of`] (feature `checkpoint`). An engine that has none asks the
/// control plane with [`ClientModel::fetch`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClientModel {
    /// Sizes and fingerprint. A server refuses a client whose shape differs from its own. With
    /// [`ModelShape::UNKNOWN_FINGERPRINT`] any fleet of these sizes will do.
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
    /// The model of a checkpoint, by its configuration. Reads no weights: the fingerprint stays unknown. The client then
    /// compares sizes and layers with those of its fleet, and stays with the first fingerprint that the control plane
    /// names. [`with_weights_of`](Self::with_weights_of) compares the weights, too.
    #[cfg(feature = "checkpoint")]
    #[must_use]
    pub fn of(checkpoint: &checkpoint::Checkpoint) -> Self {
        let config = checkpoint.config();
        Self {
            shape: ModelShape {
                fingerprint: ModelShape::UNKNOWN_FINGERPRINT,
                hidden: config.hidden as u32,
                num_layers: config.num_layers,
                num_experts: config.num_experts,
                top_k: config.top_k as u32,
            },
            architecture: config.family.model_type.to_owned(),
            moe_layers: config.moe_layers(),
        }
    }

    /// The model of a checkpoint with its fingerprint, so that a fleet with other weights is refused. Reads at least
    /// 64 KiB of each matrix of all experts, on all processors.
    ///
    /// # Errors
    /// [`TensorError`](checkpoint::TensorError) if an expert is missing or cannot be read.
    #[cfg(feature = "checkpoint")]
    pub fn with_weights_of(
        checkpoint: &checkpoint::Checkpoint,
    ) -> Result<Self, checkpoint::TensorError> {
        checkpoint.check_experts()?;
        let mut model = Self::of(checkpoint);
        model.shape.fingerprint = checkpoint.fingerprint()?.0;
        Ok(model)
    }

    /// The model that `descriptor` describes. `num_layers` counts all layers of the model, dense ones included;
    /// a descriptor lists the MoE layers only. [`ModelShape::UNKNOWN_LAYERS`] leaves the number open.
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
        Self::fetch_with(url, token, Security::default(), num_layers, timeout)
    }

    /// As [`fetch`](Self::fetch), with certificates for a control plane at an `https` URL.
    ///
    /// # Errors
    /// As for [`fetch`](Self::fetch).
    pub fn fetch_with(
        url: &str,
        token: Option<String>,
        security: Security,
        num_layers: u32,
        timeout: Duration,
    ) -> Result<Self, ModelError> {
        let mut options = ClientOptions::default();
        (options.timeout, options.security) = (timeout, security);
        let control = ControlClient::with_options(url, token, options)?;
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

    /// The difference between this model and that of a `fleet`, in words; `None` if the client can use the fleet.
    /// Fingerprints count if both are known.
    #[must_use]
    pub fn difference(&self, fleet: &ModelDescriptor) -> Option<String> {
        difference(fleet, &self.descriptor())
    }

    /// The descriptor of this model, as the control plane writes it.
    ///
    /// An unknown fingerprint is all zeros.
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

/// The difference between the model that a fleet serves and the one that a client expects, if there is one.
pub(crate) fn difference(fleet: &ModelDescriptor, expected: &ModelDescriptor) -> Option<String> {
    let are_known = is_known(&fleet.fingerprint) && is_known(&expected.fingerprint);
    if are_known && fleet.fingerprint == expected.fingerprint {
        return None;
    }
    let sizes = [
        ("hidden size", fleet.hidden, expected.hidden),
        ("number of experts", fleet.num_experts, expected.num_experts),
        ("top-k", fleet.top_k, expected.top_k),
    ];
    if let Some((what, found, expected)) = sizes.into_iter().find(|(_, a, b)| a != b) {
        return Some(format!("the {what} is {found}, expected {expected}"));
    }
    if fleet.moe_layers != expected.moe_layers {
        let (found, expected) = (&fleet.moe_layers, &expected.moe_layers);
        return Some(format!("the layers with experts are {found:?}, expected {expected:?}"));
    }
    if are_known {
        return Some(format!(
            "the weights differ: their fingerprint is {}, expected {}",
            fleet.fingerprint, expected.fingerprint
        ));
    }
    None
}

/// Returns true unless the text is that of [`ModelShape::UNKNOWN_FINGERPRINT`].
pub(crate) fn is_known(fingerprint: &str) -> bool {
    fingerprint.bytes().any(|digit| digit != b'0')
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
        let fleet = model.descriptor();
        let expected = ModelDescriptor { fingerprint: "00".repeat(32), ..fleet.clone() };
        assert_eq!(difference(&fleet, &fleet), None);
        assert_eq!(difference(&fleet, &expected), None);
        for (change, word) in [
            (ModelDescriptor { fingerprint: "11".repeat(32), ..fleet.clone() }, "weights"),
            (ModelDescriptor { hidden: 65, ..expected.clone() }, "hidden"),
            (ModelDescriptor { top_k: 3, ..expected.clone() }, "top-k"),
            (ModelDescriptor { moe_layers: vec![1, 2], ..expected.clone() }, "layers"),
        ] {
            let found = difference(&fleet, &change).unwrap();
            assert!(found.contains(word), "{found}");
        }
        for found in ["", "12", &"é".repeat(32), &"g".repeat(64)] {
            let descriptor =
                ModelDescriptor { fingerprint: found.to_owned(), ..model.descriptor() };
            let error = ClientModel::from_descriptor(&descriptor, 5).unwrap_err();
            assert!(matches!(error, ModelError::Fingerprint { .. }), "{error}");
        }
    }
}
