//! A peer's description: the bytes that both sides exchange, checked by field.

use super::{PeerConfig, PeerError};
use crate::nic::LinkLayer;

/// Bytes of a description without its queues.
pub const DESCRIPTION_BYTES: usize = 48;

/// A peer's description, checked.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Description {
    pub(super) mtu: u8,
    pub(super) lid: u16,
    pub(super) gid: [u8; 16],
    pub(super) slot_address: u64,
    pub(super) slot_key: u32,
    /// Number of its first packet.
    pub(super) psn: u32,
    pub(super) qpns: Vec<u32>,
}

impl Description {
    /// Specified in docs/reference/wire-format.md. The slot at the address has `slot_bytes`.
    pub(super) fn encode(&self, link: LinkLayer, slot_bytes: u64) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(DESCRIPTION_BYTES + 4 * self.qpns.len());
        bytes.extend([VERSION, link_code(link), self.mtu]);
        bytes.push(u8::try_from(self.qpns.len()).unwrap_or(0));
        bytes.extend(self.lid.to_le_bytes());
        bytes.extend([0; 2]);
        bytes.extend(self.gid);
        bytes.extend(self.slot_address.to_le_bytes());
        bytes.extend(slot_bytes.to_le_bytes());
        bytes.extend(self.slot_key.to_le_bytes());
        bytes.extend(self.psn.to_le_bytes());
        bytes.extend(self.qpns.iter().flat_map(|qpn| qpn.to_le_bytes()));
        bytes
    }

    pub(super) fn decode(
        bytes: &[u8],
        config: &PeerConfig,
        link: LinkLayer,
    ) -> Result<Self, PeerError> {
        let wrong =
            |field, found, expected: String| PeerError::Description { field, found, expected };
        let expected = DESCRIPTION_BYTES + 4 * config.num_queues;
        if bytes.len() != expected {
            let text = format!("{expected} ({} queues)", config.num_queues);
            return Err(wrong("length", bytes.len() as u64, text));
        }
        let same = |field, found: u8, expected: u8| {
            if found == expected {
                Ok(())
            } else {
                Err(wrong(field, u64::from(found), expected.to_string()))
            }
        };
        same("version", bytes[0], VERSION)?;
        same("link", bytes[1], link_code(link))?;
        same("num_queues", bytes[3], u8::try_from(config.num_queues).unwrap_or(0))?;
        let mtu = bytes[2];
        if !(1..=5).contains(&mtu) {
            return Err(wrong("mtu", u64::from(mtu), "from 1 (256 bytes) to 5 (4096)".to_owned()));
        }
        let reserved = u16::from_le_bytes([bytes[6], bytes[7]]);
        if reserved != 0 {
            return Err(wrong("reserved", u64::from(reserved), "0".to_owned()));
        }
        let mut gid = [0; 16];
        gid.copy_from_slice(&bytes[8..24]);
        let word = |at: usize| {
            u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        let long = |at: usize| u64::from(word(at)) | u64::from(word(at + 4)) << 32;
        let slot_address = long(24);
        if slot_address == 0 || !slot_address.is_multiple_of(64) {
            return Err(wrong("slot address", slot_address, "a multiple of 64 above 0".to_owned()));
        }
        let slot_bytes = long(32);
        if slot_bytes != config.peer_slot_bytes as u64 {
            return Err(wrong("slot bytes", slot_bytes, config.peer_slot_bytes.to_string()));
        }
        if slot_address.checked_add(slot_bytes).is_none() {
            let text = format!("a slot of {slot_bytes} bytes that ends before the last address");
            return Err(wrong("slot address", slot_address, text));
        }
        let psn = word(PSN_AT);
        if psn > MAX_PSN {
            return Err(wrong("psn", u64::from(psn), "24 bits".to_owned()));
        }
        let qpns: Vec<u32> =
            (0..config.num_queues).map(|idx| word(DESCRIPTION_BYTES + 4 * idx)).collect();
        if let Some(qpn) = qpns.iter().find(|qpn| **qpn == 0 || **qpn >> 24 != 0) {
            return Err(wrong("queue pair", u64::from(*qpn), "24 bits, not 0".to_owned()));
        }
        Ok(Self {
            mtu,
            lid: u16::from_le_bytes([bytes[4], bytes[5]]),
            gid,
            slot_address,
            slot_key: word(40),
            psn,
            qpns,
        })
    }

    /// Whether this is a peer that is where it was, and was reset since it sent `former`.
    pub(super) fn check_successor(&self, former: &Self) -> Result<(), PeerError> {
        let halves = |gid: [u8; 16]| {
            let gid = u128::from_be_bytes(gid);
            [(gid >> 64) as u64, gid as u64]
        };
        let ([gid, interface], [former_gid, former_interface]) =
            (halves(self.gid), halves(former.gid));
        let fields = [
            ("mtu", u64::from(self.mtu), u64::from(former.mtu)),
            ("lid", u64::from(self.lid), u64::from(former.lid)),
            ("gid", gid, former_gid),
            ("gid", interface, former_interface),
            ("slot address", self.slot_address, former.slot_address),
            ("slot key", u64::from(self.slot_key), u64::from(former.slot_key)),
        ];
        let queues = self.qpns.iter().zip(&former.qpns);
        let queues =
            queues.map(|(qpn, former)| ("queue pair", u64::from(*qpn), u64::from(*former)));
        for (field, found, former) in fields.into_iter().chain(queues) {
            if found != former {
                let expected = format!("{former}, as before the reset");
                return Err(PeerError::Description { field, found, expected });
            }
        }
        if self.psn == former.psn {
            let expected = "another than before the reset".to_owned();
            return Err(PeerError::Description {
                field: "psn",
                found: u64::from(self.psn),
                expected,
            });
        }
        Ok(())
    }
}

const fn link_code(link: LinkLayer) -> u8 {
    match link {
        LinkLayer::InfiniBand => 1,
        LinkLayer::Ethernet => 2,
    }
}

/// Descriptions of one queue and of all, on both kinds of links, for fuzz targets.
#[cfg(fuzzing)]
#[must_use]
pub fn description_samples() -> Vec<Vec<u8>> {
    let sample = |(link, num_queues): (_, u32)| {
        let description = Description {
            mtu: 5,
            lid: 20,
            gid: [21; 16],
            slot_address: 0x7f00_1234_5000,
            slot_key: 22,
            psn: 23,
            qpns: (64..64 + num_queues).collect(),
        };
        description.encode(link, FUZZED_SLOT_BYTES as u64)
    };
    let links = [LinkLayer::InfiniBand, LinkLayer::Ethernet];
    links.into_iter().flat_map(|link| [(link, 1), (link, 64)]).map(sample).collect()
}

/// Reads bytes as a peer's description, on both kinds of links. Every accepted description must be within its
/// bounds and must encode to the same bytes. For fuzz targets.
#[cfg(fuzzing)]
pub fn check_description(bytes: &[u8]) {
    let num_queues = usize::from(bytes.get(3).copied().unwrap_or(1)).clamp(1, super::MAX_QUEUES);
    let config = PeerConfig {
        peer: 0,
        num_queues,
        queue: crate::queue::QueueConfig::default(),
        own_slot_bytes: 64,
        peer_slot_bytes: FUZZED_SLOT_BYTES,
    };
    for link in [LinkLayer::InfiniBand, LinkLayer::Ethernet] {
        let Ok(read) = Description::decode(bytes, &config, link) else { continue };
        assert_eq!(read.qpns.len(), num_queues);
        assert!(read.qpns.iter().all(|qpn| (1..=0xff_ffff).contains(qpn)) && read.psn <= MAX_PSN);
        assert!(read.slot_address.checked_add(FUZZED_SLOT_BYTES as u64).is_some());
        assert_eq!(read.encode(link, FUZZED_SLOT_BYTES as u64), bytes);
        assert!(read.check_successor(&read).is_err(), "it was not reset");
    }
}

#[cfg(fuzzing)]
const FUZZED_SLOT_BYTES: usize = 4096;
/// Of descriptions.
const VERSION: u8 = 2;
/// Offset of the first packet number in a description.
pub(super) const PSN_AT: usize = 44;
/// Packets are counted in 24 bits.
pub(super) const MAX_PSN: u32 = 0xff_ffff;
