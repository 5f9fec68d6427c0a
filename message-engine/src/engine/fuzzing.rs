//! Entry points of fuzz targets into the decoders of peers' bytes.

use super::io::hello;
use super::wire::{Frame, Header};
use super::{Descriptor, EndpointMetadata};

/// Encoded messages of the handshake, one of each kind.
#[must_use]
pub fn handshake_samples() -> Vec<Vec<u8>> {
    hello::samples()
}

/// Decodes bytes as each message that a peer sends in a handshake. A decoded one must stay the same when it is encoded
/// and decoded again.
pub fn check_handshake(bytes: &[u8]) {
    if let Some((header, body)) = bytes.split_first_chunk() {
        hello::check(header, body);
    }
    if let Ok(metadata) = EndpointMetadata::decode(bytes) {
        assert_eq!(EndpointMetadata::decode(&metadata.encode()), Ok(metadata));
    }
    if let Ok(descriptor) = Descriptor::from_bytes(bytes) {
        assert_eq!(descriptor.to_bytes(), bytes);
    }
}

/// Decodes bytes as a frame after the handshake, with the same check.
pub fn check_frame(bytes: &[u8]) {
    let Some((head, rest)) = bytes.split_first_chunk() else { return };
    let Ok(header) = Header::decode(head) else { return };
    let Some(body) = rest.get(..header.body_bytes) else { return };
    if let Ok(frame) = Frame::decode(header, body) {
        let mut again = Vec::new();
        frame.encode(&mut again);
        let (head, body) = again.split_first_chunk().expect("a header");
        let header = Header::decode(head).expect("a frame of ours");
        assert_eq!(Frame::decode(header, body), Ok(frame));
    }
}
