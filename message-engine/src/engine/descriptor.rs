//! Descriptors of memory for a peer: 64 bytes, which the user sends by any means.

use thiserror::Error;

use crate::fabric::{RemoteSegment, WireRegion};
use p2p_core::bootstrap::wire::{transport_code, transport_of};
use p2p_core::endpoint::TransportKind;

/// Bytes of an encoded [`Descriptor`].
pub const DESCRIPTOR_BYTES: usize = 64;

/// A range of one engine's memory, for one peer over one transport.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Descriptor {
    /// Engine that owns the memory.
    pub engine_id: u64,
    /// Transport that reaches the memory.
    pub transport: TransportKind,
    /// The registration in the transport's terms.
    pub region: WireRegion,
    /// First byte of the range within the registration.
    pub offset: u64,
    /// Bytes of the range.
    pub bytes: u64,
}

/// Error of a descriptor that is malformed or does not fit the connection.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum DescriptorError {
    /// Too few or too many bytes.
    #[error("a descriptor of {found} bytes, expected {DESCRIPTOR_BYTES}")]
    Length {
        /// Bytes found.
        found: usize,
    },
    /// The bytes are no descriptor, or a descriptor of another version.
    #[error("these are not the bytes of a descriptor of version {VERSION}")]
    Foreign,
    /// The range leaves the registration.
    #[error("the descriptor's {bytes} bytes at offset {offset} leave its registration of {limit}")]
    Range {
        /// First byte.
        offset: u64,
        /// Bytes.
        bytes: u64,
        /// Bytes of the registration.
        limit: u64,
    },
    /// The memory does not belong to the engine at the other end of the connection.
    #[error("the descriptor is of engine {found:016x}, the connection leads to {expected:016x}")]
    OtherEngine {
        /// Engine of the descriptor.
        found: u64,
        /// Engine of the connection.
        expected: u64,
    },
    /// The descriptor is for a transport that the connection does not use.
    #[error("the descriptor is for {}, the connection uses {}", .found.name(), .expected.name())]
    OtherTransport {
        /// Transport of the descriptor.
        found: TransportKind,
        /// Transport of the connection.
        expected: TransportKind,
    },
}

impl Descriptor {
    /// Encodes the descriptor for the peer.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; DESCRIPTOR_BYTES] {
        let mut out = [0; DESCRIPTOR_BYTES];
        out[..4].copy_from_slice(&MAGIC);
        out[4] = VERSION;
        out[5] = transport_code(self.transport);
        let words = [
            self.engine_id,
            self.region.address,
            self.region.bytes,
            self.region.key,
            self.offset,
            self.bytes,
        ];
        for (place, word) in out[8..56].chunks_exact_mut(8).zip(words) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        out
    }

    /// Decodes and checks bytes that [`to_bytes`](Self::to_bytes) has encoded.
    ///
    /// # Errors
    /// [`DescriptorError`].
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, DescriptorError> {
        if bytes.len() != DESCRIPTOR_BYTES {
            return Err(DescriptorError::Length { found: bytes.len() });
        }
        let is_ours = bytes[..4] == MAGIC
            && bytes[4] == VERSION
            && bytes[6..8] == [0; 2]
            && bytes[56..] == [0; 8];
        let transport = transport_of(bytes[5]).filter(|_| is_ours);
        let transport = transport.ok_or(DescriptorError::Foreign)?;
        let word = |at: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&bytes[at..at + 8]);
            u64::from_le_bytes(word)
        };
        let region = WireRegion { address: word(16), bytes: word(24), key: word(32) };
        let found =
            Self { engine_id: word(8), transport, region, offset: word(40), bytes: word(48) };
        found.check_range()?;
        Ok(found)
    }

    /// A part of the range.
    ///
    /// # Errors
    /// [`DescriptorError::Range`].
    pub fn sub(&self, offset: u64, bytes: u64) -> Result<Self, DescriptorError> {
        let out_of_range = DescriptorError::Range { offset, bytes, limit: self.bytes };
        match offset.checked_add(bytes) {
            Some(end) if end <= self.bytes => {
                Ok(Self { offset: self.offset + offset, bytes, ..*self })
            }
            _ => Err(out_of_range),
        }
    }

    pub(super) const fn segment(&self) -> RemoteSegment {
        RemoteSegment { region: self.region, offset: self.offset }
    }

    /// Whether it can be used over a connection to `engine_id` by `transport`.
    pub(super) fn check(
        &self,
        engine_id: u64,
        transport: TransportKind,
    ) -> Result<(), DescriptorError> {
        if self.engine_id != engine_id {
            return Err(DescriptorError::OtherEngine {
                found: self.engine_id,
                expected: engine_id,
            });
        }
        if self.transport != transport {
            return Err(DescriptorError::OtherTransport {
                found: self.transport,
                expected: transport,
            });
        }
        self.check_range()
    }

    fn check_range(&self) -> Result<(), DescriptorError> {
        match self.offset.checked_add(self.bytes) {
            Some(end) if end <= self.region.bytes => Ok(()),
            _ => Err(DescriptorError::Range {
                offset: self.offset,
                bytes: self.bytes,
                limit: self.region.bytes,
            }),
        }
    }
}

const MAGIC: [u8; 4] = *b"SYDS";
const VERSION: u8 = 1;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn descriptor() -> Descriptor {
        Descriptor {
            engine_id: 0x1122_3344_5566_7788,
            transport: TransportKind::Tcp,
            region: WireRegion { address: 1 << 40, bytes: 5 << 30, key: 99 },
            offset: 4 << 30,
            bytes: 1 << 30,
        }
    }

    #[test]
    fn the_encoding_is_exact() {
        let there = descriptor();
        assert_eq!(Descriptor::from_bytes(&there.to_bytes()), Ok(there));
        assert_eq!(there.sub(5, 6).unwrap().offset, (4 << 30) + 5);
        assert!(there.sub(1 << 30, 1).is_err() && there.sub(u64::MAX, 2).is_err());
        assert!(there.check(there.engine_id, TransportKind::Tcp).is_ok());
        assert!(there.check(1, TransportKind::Tcp).is_err());
        assert!(there.check(there.engine_id, TransportKind::Cma).is_err());
    }

    #[test]
    fn invalid_descriptors_are_refused() {
        let bytes = descriptor().to_bytes();
        assert_eq!(Descriptor::from_bytes(&bytes[1..]), Err(DescriptorError::Length { found: 63 }));
        for at in [0, 4, 5, 6, 60] {
            let mut bad = bytes;
            bad[at] = 0xee;
            assert_eq!(Descriptor::from_bytes(&bad), Err(DescriptorError::Foreign), "byte {at}");
        }
        let far = Descriptor { bytes: (1 << 30) + 1, ..descriptor() };
        assert!(matches!(
            Descriptor::from_bytes(&far.to_bytes()),
            Err(DescriptorError::Range { .. })
        ));
        let wrapping = Descriptor { offset: u64::MAX, bytes: 2, ..descriptor() };
        assert!(Descriptor::from_bytes(&wrapping.to_bytes()).is_err());
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..100)) {
            let _ = Descriptor::from_bytes(&bytes);
        }

        #[test]
        fn a_decoded_range_lies_within(mut bytes: [u8; 64]) {
            bytes[..8].copy_from_slice(&descriptor().to_bytes()[..8]);
            bytes[56..].fill(0);
            if let Ok(found) = Descriptor::from_bytes(&bytes) {
                prop_assert!(found.offset.checked_add(found.bytes).unwrap() <= found.region.bytes);
                prop_assert_eq!(found.to_bytes(), bytes);
            }
        }
    }
}
