//! The part of the handshake that describes one side's endpoint, beside its slot.

use thiserror::Error;

use super::fi_endpoint::MAX_ADDRESS_BYTES;
use super::mailbox::{MAILBOX_BYTES, MailboxAddress};

/// One side of a pair.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Detail {
    /// Slot that messages from the peer must name.
    pub(super) slot: u32,
    /// Longest message that this side accepts.
    pub(super) max_message_bytes: u32,
    /// True if this side's provider can notify the target once a write's bytes have arrived.
    pub(super) counts_writes: bool,
    /// Secret that messages from the peer must carry.
    pub(super) token: u64,
    /// Address of this side's mailbox, if it has one.
    pub(super) mail: Option<MailboxAddress>,
    /// Address of the endpoint in the provider's format.
    pub(super) address: Vec<u8>,
}

/// The peer's description is invalid.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
pub(super) enum DetailError {
    #[error("the peer's description has {found} bytes, expected {expected}")]
    Length { found: usize, expected: usize },
    #[error("the peer's description does not begin with `SYLF`")]
    Magic,
    #[error("the peer's description has version {found}, expected {VERSION}")]
    Version { found: u16 },
    #[error("the peer's address has {found} bytes, expected 1 to {MAX_ADDRESS_BYTES}")]
    Address { found: usize },
    #[error("the peer takes messages of {found} bytes, expected at least {MIN_MESSAGE_BYTES}")]
    Message { found: u32 },
    #[error("the peer's description has flags {found:#x}, expected 0 to 3")]
    Flags { found: u16 },
    #[error("the peer's mailbox at {address:#x} has no room for {MAILBOX_BYTES} bytes")]
    Mailbox { address: u64 },
}

impl Detail {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(FIXED_BYTES + self.address.len());
        out.extend(MAGIC);
        out.extend(VERSION.to_le_bytes());
        let flags = u16::from(self.counts_writes) | u16::from(self.mail.is_some()) << 1;
        out.extend(flags.to_le_bytes());
        out.extend(self.slot.to_le_bytes());
        out.extend(self.max_message_bytes.to_le_bytes());
        out.extend(self.token.to_le_bytes());
        out.extend((self.address.len() as u32).to_le_bytes());
        let mail = self.mail.unwrap_or(MailboxAddress { address: 0, key: 0 });
        out.extend(mail.address.to_le_bytes());
        out.extend(mail.key.to_le_bytes());
        out.extend(&self.address);
        out
    }

    pub(super) fn decode(bytes: &[u8]) -> Result<Self, DetailError> {
        let short = DetailError::Length { found: bytes.len(), expected: FIXED_BYTES };
        let (fixed, address) = bytes.split_first_chunk::<FIXED_BYTES>().ok_or(short)?;
        if fixed[..4] != MAGIC {
            return Err(DetailError::Magic);
        }
        let u16_at = |at: usize| u16::from_le_bytes([fixed[at], fixed[at + 1]]);
        let u32_at = |at: usize| u32::from(u16_at(at)) | u32::from(u16_at(at + 2)) << 16;
        let u64_at = |at: usize| u64::from(u32_at(at)) | u64::from(u32_at(at + 4)) << 32;
        let found = u16_at(4);
        if found != VERSION {
            return Err(DetailError::Version { found });
        }
        let flags = u16_at(6);
        if flags > 3 {
            return Err(DetailError::Flags { found: flags });
        }
        let address_bytes = u32_at(24) as usize;
        if address_bytes == 0 || address_bytes > MAX_ADDRESS_BYTES {
            return Err(DetailError::Address { found: address_bytes });
        }
        if address.len() != address_bytes {
            let expected = FIXED_BYTES + address_bytes;
            return Err(DetailError::Length { found: bytes.len(), expected });
        }
        let max_message_bytes = u32_at(12);
        if (max_message_bytes as usize) < MIN_MESSAGE_BYTES {
            return Err(DetailError::Message { found: max_message_bytes });
        }
        let mail =
            (flags & 2 != 0).then(|| MailboxAddress { address: u64_at(28), key: u64_at(36) });
        if let Some(MailboxAddress { address, .. }) = mail
            && address.checked_add(MAILBOX_BYTES as u64).is_none()
        {
            return Err(DetailError::Mailbox { address });
        }
        Ok(Self {
            slot: u32_at(8),
            max_message_bytes,
            counts_writes: flags & 1 != 0,
            token: u64_at(16),
            mail,
            address: address.to_vec(),
        })
    }
}

/// A message must hold a header and one small put.
pub(super) const MIN_MESSAGE_BYTES: usize = 64;
const MAGIC: [u8; 4] = *b"SYLF";
const VERSION: u16 = 2;
const FIXED_BYTES: usize = 44;

#[cfg(test)]
mod tests {
    use rand::rngs::StdRng;
    use rand::{RngExt, SeedableRng};

    use super::*;

    fn detail() -> Detail {
        Detail {
            slot: 0x0102_0304,
            max_message_bytes: 8192,
            counts_writes: true,
            token: 0x1122_3344_5566_7788,
            mail: Some(MailboxAddress { address: 0x99aa_bbcc, key: 0xddee_ff00_1234_5678 }),
            address: (1..=28).collect(),
        }
    }

    #[test]
    fn a_description_survives_the_wire() {
        assert_eq!(Detail::decode(&detail().encode()), Ok(detail()));
        let without = Detail { mail: None, counts_writes: false, ..detail() };
        assert_eq!(Detail::decode(&without.encode()), Ok(without));
    }

    #[test]
    fn every_way_to_be_wrong_is_named() {
        let good = detail().encode();
        let with = |at: usize, byte: u8| {
            let mut bytes = good.clone();
            bytes[at] = byte;
            Detail::decode(&bytes).unwrap_err()
        };
        assert_eq!(with(0, b'X'), DetailError::Magic);
        assert_eq!(with(4, 9), DetailError::Version { found: 9 });
        assert_eq!(with(6, 4), DetailError::Flags { found: 4 });
        assert_eq!(with(13, 0), DetailError::Message { found: 0 });
        assert_eq!(with(24, 0), DetailError::Address { found: 0 });
        assert_eq!(with(26, 1), DetailError::Address { found: 28 | 1 << 16 });
        assert!(matches!(with(24, 27), DetailError::Length { found: 72, expected: 71 }));
        let with_mail_at = |address| {
            let mail = Some(MailboxAddress { address, key: 1 });
            Detail::decode(&Detail { mail, ..detail() }.encode())
        };
        let (last, beyond) = (u64::MAX - MAILBOX_BYTES as u64, u64::MAX - 100);
        assert!(with_mail_at(last).is_ok());
        assert_eq!(with_mail_at(beyond), Err(DetailError::Mailbox { address: beyond }));
        for len in 0..good.len() {
            assert!(Detail::decode(&good[..len]).is_err(), "{len} bytes");
        }
    }

    #[test]
    fn mutated_descriptions_never_panic() {
        let seed = rand::random();
        println!("seed {seed}");
        let mut rng = StdRng::seed_from_u64(seed);
        for _ in 0..20_000 {
            let mut bytes = detail().encode();
            for _ in 0..rng.random_range(1..4) {
                let at = rng.random_range(0..bytes.len());
                bytes[at] = rng.random();
            }
            bytes.truncate(rng.random_range(0..=bytes.len()));
            if let Ok(found) = Detail::decode(&bytes) {
                assert!(found.address.len() <= MAX_ADDRESS_BYTES);
            }
        }
    }
}
