//! Messages between servers that read and servers that hold weights: JSON in notifications of the message engine.
//! `docs/explanation/weights-from-peers.md` describes the exchange.

use control_api::LayerAssignment;
use message_engine::{DESCRIPTOR_BYTES, Descriptor};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use super::manifest::Manifest;
use crate::experts::DevicePlace;
pub(super) use crate::experts::sum_text;

/// From the reader.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(super) enum Request {
    /// The first message of a connection.
    Hello {
        version: u32,
        /// Fingerprint of the model, in hexadecimal digits.
        fingerprint: String,
        /// Digest of the parameters that define the experts, in hexadecimal digits.
        parameters: String,
        /// Form of the experts in the memory of the reader's device, if it has one.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        device: Option<String>,
    },
    /// Asks for one expert. `id` is new for each request of the connection.
    Read {
        id: u64,
        layer: u32,
        expert: u32,
        /// In the memory of the source's device, which the [index](Response::Index) names.
        #[serde(default, skip_serializing_if = "is_false")]
        on_device: bool,
    },
    /// The reader does not use the grant `id` any more.
    Done { id: u64 },
}

/// From the source.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(super) enum Response {
    /// The answer to [`Request::Hello`]: the experts that the source holds.
    Index {
        version: u32,
        experts: Vec<LayerAssignment>,
        /// The text by which the reader's device finds the memory of the source's, if it can.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        device: Option<String>,
    },
    /// The memory of one expert, readable for `lease_ms`.
    Grant {
        id: u64,
        manifest: Manifest,
        /// BLAKE3, in hexadecimal digits.
        digest: String,
        /// Descriptors of the parts, in hexadecimal digits; empty for an empty part.
        parts: Vec<String>,
        lease_ms: u64,
    },
    /// The place of one expert in the memory of the source's device, which stays as it is for `lease_ms`.
    DeviceGrant {
        id: u64,
        place: DevicePlace,
        /// The checksum of `kernels::gpu::Checksum`, in hexadecimal digits.
        checksum: String,
        lease_ms: u64,
    },
    /// The source has reached a limit: ask again after this time.
    Later { id: u64, after_ms: u64 },
    /// The request cannot be granted. Without an `id`, no request of the connection can.
    Refused { id: Option<u64>, reason: String },
}

/// Version of the messages.
pub(super) const VERSION: u32 = 1;

pub(super) fn encode<M: Serialize>(message: &M) -> Vec<u8> {
    // These types have no maps with keys that are no texts, so it cannot fail.
    serde_json::to_vec(message).unwrap_or_default()
}

/// Decodes a peer's message.
///
/// # Errors
/// A text that says what is wrong.
pub(super) fn decode<M: DeserializeOwned>(bytes: &[u8]) -> Result<M, String> {
    serde_json::from_slice(bytes).map_err(|error| format!("a malformed message: {error}"))
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Decodes a device's checksum.
pub(super) fn parse_sum(text: &str) -> Option<[u64; 2]> {
    let bytes = unhex::<16>(text)?;
    let (words, _) = bytes.as_chunks::<8>();
    Some([u64::from_be_bytes(words[0]), u64::from_be_bytes(words[1])])
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "as serde calls it")]
const fn is_false(value: &bool) -> bool {
    !*value
}

/// Decodes exactly `N` bytes.
pub(crate) fn unhex<const N: usize>(text: &str) -> Option<[u8; N]> {
    if text.len() != 2 * N || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return None;
    }
    let mut out = [0; N];
    for (idx, byte) in out.iter_mut().enumerate() {
        *byte = u8::from_str_radix(text.get(2 * idx..2 * idx + 2)?, 16).ok()?;
    }
    Some(out)
}

/// Decodes the descriptor of a part; `None` for an empty part.
///
/// # Errors
/// A text that says what is wrong.
pub(super) fn descriptor(text: &str) -> Result<Option<Descriptor>, String> {
    if text.is_empty() {
        return Ok(None);
    }
    let bytes = unhex::<DESCRIPTOR_BYTES>(text).ok_or("a malformed descriptor")?;
    Descriptor::from_bytes(&bytes).map(Some).map_err(|error| error.to_string())
}
