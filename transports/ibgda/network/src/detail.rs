//! Description of a side beside its host slot: three descriptions behind one another. Specified in
//! `docs/reference/wire-format.md`, "Ibgda".
//!
//! ```text
//!   version 1 | 0 | bytes of the network's, the peer's and the host queue's, u16 each | those bytes
//! ```

use p2p_core::network::MAX_DETAIL_BYTES;
use thiserror::Error;

/// Descriptions of a side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Detail<'a> {
    /// Description of the network underneath.
    pub inner: &'a [u8],
    /// Description of the kernels' queues and the slot, by [`ibgda::OpenPeer::description`].
    pub peer: &'a [u8],
    /// Description of the host's queue.
    pub host: &'a [u8],
}

/// Invalid bytes, or a description that does not fit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the names of the fields say enough")]
pub enum DetailError {
    /// Another version.
    #[error("the detail has version {found}, expected {VERSION}")]
    Version { found: u8 },
    /// A byte that must be 0.
    #[error("byte 1 of the detail is {found}, expected 0")]
    Reserved { found: u8 },
    /// More or fewer bytes than its parts have.
    #[error("the detail has {found} bytes, expected {expected}")]
    Length { found: usize, expected: usize },
    /// More than a handshake carries.
    #[error(
        "a detail of {found} bytes, at most {MAX_DETAIL_BYTES} go into a handshake: fewer queues"
    )]
    TooLong { found: usize },
}

impl<'a> Detail<'a> {
    /// Bytes for the handshake.
    ///
    /// # Errors
    /// [`DetailError::TooLong`].
    pub fn encode(&self) -> Result<Vec<u8>, DetailError> {
        let parts = [self.inner, self.peer, self.host];
        let found = HEAD_BYTES + parts.iter().map(|part| part.len()).sum::<usize>();
        if found > MAX_DETAIL_BYTES {
            return Err(DetailError::TooLong { found });
        }
        let mut bytes = Vec::with_capacity(found);
        bytes.extend([VERSION, 0]);
        for part in parts {
            // At most MAX_DETAIL_BYTES.
            bytes.extend((part.len() as u16).to_le_bytes());
        }
        parts.iter().for_each(|part| bytes.extend(*part));
        Ok(bytes)
    }

    /// The parts of a peer's bytes.
    ///
    /// # Errors
    /// [`DetailError`].
    pub fn decode(bytes: &'a [u8]) -> Result<Self, DetailError> {
        let found = bytes.len();
        if found > MAX_DETAIL_BYTES {
            return Err(DetailError::TooLong { found });
        }
        let short = DetailError::Length { found, expected: HEAD_BYTES };
        let (head, rest) = bytes.split_first_chunk::<HEAD_BYTES>().ok_or(short)?;
        let [version, reserved, a, b, c, d, e, f] = *head;
        if version != VERSION {
            return Err(DetailError::Version { found: version });
        }
        if reserved != 0 {
            return Err(DetailError::Reserved { found: reserved });
        }
        let lens = [[a, b], [c, d], [e, f]].map(|len| usize::from(u16::from_le_bytes(len)));
        let expected = HEAD_BYTES + lens.iter().sum::<usize>();
        let wrong = DetailError::Length { found, expected };
        let (inner, rest) = rest.split_at_checked(lens[0]).ok_or(wrong)?;
        let (peer, rest) = rest.split_at_checked(lens[1]).ok_or(wrong)?;
        let (host, rest) = rest.split_at_checked(lens[2]).ok_or(wrong)?;
        if !rest.is_empty() {
            return Err(wrong);
        }
        Ok(Self { inner, peer, host })
    }
}

const VERSION: u8 = 1;
/// Version, a byte of 0, and three lengths.
pub const HEAD_BYTES: usize = 8;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn parts_come_back(
            inner in proptest::collection::vec(any::<u8>(), 0..300),
            peer in proptest::collection::vec(any::<u8>(), 0..300),
            host in proptest::collection::vec(any::<u8>(), 0..300),
        ) {
            let detail = Detail { inner: &inner, peer: &peer, host: &host };
            let bytes = detail.encode().expect("they fit");
            prop_assert_eq!(Detail::decode(&bytes), Ok(detail));
            for len in 0..bytes.len() {
                prop_assert!(Detail::decode(&bytes[..len]).is_err());
            }
            let longer = [bytes, vec![0]].concat();
            let is_refused = matches!(Detail::decode(&longer), Err(DetailError::Length { .. }));
            prop_assert!(is_refused);
        }

        #[test]
        fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
            if let Ok(detail) = Detail::decode(&bytes) {
                prop_assert_eq!(detail.encode(), Ok(bytes.clone()));
            }
        }
    }

    #[test]
    fn what_no_handshake_carries_is_refused() {
        let part = [0; MAX_DETAIL_BYTES - HEAD_BYTES];
        let fits = Detail { inner: &part, peer: &[], host: &[] };
        assert_eq!(fits.encode().map(|bytes| bytes.len()), Ok(MAX_DETAIL_BYTES));
        let long = Detail { host: &[0], ..fits };
        let too_long = DetailError::TooLong { found: MAX_DETAIL_BYTES + 1 };
        assert_eq!(long.encode(), Err(too_long));
        let mut bytes = fits.encode().expect("it fits");
        bytes.push(0);
        assert_eq!(Detail::decode(&bytes), Err(too_long));
        assert_eq!(Detail::decode(&[2; 8]), Err(DetailError::Version { found: 2 }));
        assert_eq!(
            Detail::decode(&[1, 7, 0, 0, 0, 0, 0, 0]),
            Err(DetailError::Reserved { found: 7 })
        );
    }
}
