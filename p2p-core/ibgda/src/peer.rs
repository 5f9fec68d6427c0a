//! A peer's slot and the queues to it, from nothing to what kernels are given.
//!
//! Both sides [`open`](OpenPeer::open), send each other their [`description`](OpenPeer::description)
//! over a connection they trust, and [`join`](OpenPeer::join). Nothing here waits for the peer.

use std::sync::Arc;

use kernels::mlx5::{Bound, ErrorWord, PeerHandle, QueueHandle};
use thiserror::Error;

use crate::access::{Access, AccessError, PageTable, SharedMemory};
use crate::nic::{LinkLayer, Nic, NicError, Registration};
use crate::queue::{Queue, QueueConfig, QueueError, RemoteQueue, register};

/// Most queues to one peer.
pub const MAX_QUEUES: usize = 64;
/// Bytes of a description without its queues.
pub const DESCRIPTION_BYTES: usize = 48;

/// Slots and queues of one peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PeerConfig {
    /// Number of the peer, from 0 to 31: its bit in the abort mask, and its name in error words.
    pub peer: u32,
    /// Queues, from 1 to [`MAX_QUEUES`]; both sides need the same number.
    pub num_queues: usize,
    /// Every one of them.
    pub queue: QueueConfig,
    /// Bytes of this side's slot, which the peer writes.
    pub own_slot_bytes: usize,
    /// Bytes of the peer's slot.
    pub peer_slot_bytes: usize,
}

/// A peer could not be opened or joined.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum PeerError {
    /// A value that cannot be.
    #[error("`{field}` is {found}, expected {expected}")]
    Config {
        /// Which.
        field: &'static str,
        /// Value.
        found: usize,
        /// What is possible.
        expected: &'static str,
    },
    /// The NIC refused.
    #[error(transparent)]
    Nic(#[from] NicError),
    /// A queue failed.
    #[error("queue {queue_idx}: {source}")]
    Queue {
        /// Which.
        queue_idx: usize,
        /// Why.
        source: QueueError,
    },
    /// There is no memory, or posters cannot reach it.
    #[error(transparent)]
    Access(#[from] AccessError),
    /// The peer's description cannot be used.
    #[error("the peer's description: `{field}` is {found}, expected {expected}")]
    Description {
        /// Part of it.
        field: &'static str,
        /// What was found.
        found: u64,
        /// What was expected.
        expected: String,
    },
}

/// This side before the peer's is known. Dropping it frees everything.
#[derive(Debug)]
pub struct OpenPeer {
    config: PeerConfig,
    queues: Vec<Queue>,
    nic: Arc<Nic>,
    access: Arc<dyn Access>,
    // Registrations go before the memory.
    slot_key: Registration,
    mirror_key: Registration,
    slot: Box<dyn SharedMemory>,
    mirror: Box<dyn SharedMemory>,
}

impl OpenPeer {
    /// Makes slots and queues.
    ///
    /// # Errors
    /// [`PeerError`].
    pub fn open(
        nic: &Arc<Nic>,
        access: &Arc<dyn Access>,
        config: PeerConfig,
    ) -> Result<Self, PeerError> {
        let wrong = |field, found, expected| Err(PeerError::Config { field, found, expected });
        if config.num_queues == 0 || config.num_queues > MAX_QUEUES {
            return wrong("num_queues", config.num_queues, "from 1 to 64");
        }
        if config.peer >= 32 {
            return wrong("peer", config.peer as usize, "from 0 to 31");
        }
        for (field, bytes) in
            [("own_slot_bytes", config.own_slot_bytes), ("peer_slot_bytes", config.peer_slot_bytes)]
        {
            if bytes == 0 || !bytes.is_multiple_of(64) {
                return wrong(field, bytes, "a multiple of 64 above 0");
            }
        }
        let slot = access.alloc(config.own_slot_bytes)?;
        let mirror = access.alloc(config.peer_slot_bytes)?;
        // SAFETY: both memories are dropped after their registrations, here and in `Peer`.
        let (slot_key, mirror_key) =
            unsafe { (register(nic, slot.as_ref())?, register(nic, mirror.as_ref())?) };
        let pages = PageTable::new(Arc::clone(access));
        let queues = (0..config.num_queues)
            .map(|queue_idx| {
                Queue::create(nic, &pages, &config.queue, config.peer)
                    .map_err(|source| PeerError::Queue { queue_idx, source })
            })
            .collect::<Result<Vec<_>, _>>()?;
        let (nic, access) = (Arc::clone(nic), Arc::clone(access));
        Ok(Self { config, queues, nic, access, slot_key, mirror_key, slot, mirror })
    }

    /// What the peer must know, and nobody else: it has the key of this side's slot.
    #[must_use]
    pub fn description(&self) -> Vec<u8> {
        let port = self.nic.port();
        let mut bytes = Vec::with_capacity(DESCRIPTION_BYTES + 4 * self.queues.len());
        bytes.push(VERSION);
        bytes.push(link_code(port.link));
        bytes.push(port.mtu);
        bytes.push(u8::try_from(self.queues.len()).unwrap_or(0));
        bytes.extend(port.lid.to_le_bytes());
        bytes.extend([0; 2]);
        bytes.extend(port.gid);
        bytes.extend(self.slot.address().to_le_bytes());
        bytes.extend((self.config.own_slot_bytes as u64).to_le_bytes());
        bytes.extend(self.slot_key.remote_key().to_le_bytes());
        bytes.extend([0; 4]);
        for queue in &self.queues {
            bytes.extend(queue.qpn().to_le_bytes());
        }
        bytes
    }

    /// Connects the queues with the peer's.
    ///
    /// # Errors
    /// [`PeerError`], also when the peer's bytes make no sense.
    pub fn join(mut self, description: &[u8]) -> Result<Peer, PeerError> {
        let remote = Description::decode(description, &self.config, self.nic.port().link)?;
        let mtu = remote.mtu.min(self.nic.port().mtu);
        for (queue_idx, (queue, qpn)) in self.queues.iter_mut().zip(&remote.qpns).enumerate() {
            let remote = RemoteQueue { qpn: *qpn, lid: remote.lid, gid: remote.gid, mtu };
            queue.connect(&remote).map_err(|source| PeerError::Queue { queue_idx, source })?;
        }
        let handles: Vec<QueueHandle> = self.queues.iter().map(Queue::handle).collect();
        let table = self.access.alloc(handles.len() * size_of::<QueueHandle>())?;
        for (idx, handle) in handles.iter().enumerate() {
            table.write(idx * size_of::<QueueHandle>(), &handle_bytes(handle))?;
        }
        Ok(Peer {
            queues: self.queues,
            remote: (remote.slot_address, remote.slot_key),
            config: self.config,
            table,
            slot_key: self.slot_key,
            mirror_key: self.mirror_key,
            slot: self.slot,
            mirror: self.mirror,
        })
    }
}

/// A joined peer. Dropping it destroys the queues and takes the peer's key back; no kernel may post on
/// them any more.
#[derive(Debug)]
pub struct Peer {
    queues: Vec<Queue>,
    remote: (u64, u32),
    config: PeerConfig,
    table: Box<dyn SharedMemory>,
    slot_key: Registration,
    mirror_key: Registration,
    slot: Box<dyn SharedMemory>,
    mirror: Box<dyn SharedMemory>,
}

impl Peer {
    /// What kernels are given. `error` and `abort_mask` are addresses that they reach, or null.
    #[must_use]
    pub fn handle(
        &self,
        error: *mut ErrorWord,
        abort_mask: *const u32,
        timeout_ns: u64,
    ) -> PeerHandle {
        PeerHandle {
            qps: self.table.address(),
            mirror: self.mirror.address(),
            remote: self.remote.0,
            slot_bytes: self.config.peer_slot_bytes as u64,
            lkey: self.mirror_key.local_key(),
            rkey: self.remote.1,
            num_qps: u32::try_from(self.queues.len()).unwrap_or(0),
            reserved: 0,
            bound: Bound { error, abort_mask, timeout_ns },
        }
    }

    /// The queues.
    #[must_use]
    pub fn queues(&self) -> &[Queue] {
        &self.queues
    }

    /// This side's slot, which the peer writes.
    #[must_use]
    pub fn slot(&self) -> &dyn SharedMemory {
        self.slot.as_ref()
    }

    /// The local copy of the peer's slot, from which puts are made.
    #[must_use]
    pub fn mirror(&self) -> &dyn SharedMemory {
        self.mirror.as_ref()
    }

    /// How slot and mirror were registered.
    #[must_use]
    pub const fn registered_by(&self) -> [crate::nic::RegisteredBy; 2] {
        [self.slot_key.by(), self.mirror_key.by()]
    }
}

/// What a peer says of itself, checked.
#[derive(Debug, PartialEq, Eq)]
struct Description {
    mtu: u8,
    lid: u16,
    gid: [u8; 16],
    slot_address: u64,
    slot_key: u32,
    qpns: Vec<u32>,
}

impl Description {
    fn decode(bytes: &[u8], config: &PeerConfig, link: LinkLayer) -> Result<Self, PeerError> {
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
            qpns,
        })
    }
}

/// The structure as kernels read it.
fn handle_bytes(handle: &QueueHandle) -> [u8; size_of::<QueueHandle>()] {
    // SAFETY: the structure has no padding (see the assert below), so every byte is initialised.
    unsafe { std::mem::transmute::<QueueHandle, [u8; size_of::<QueueHandle>()]>(*handle) }
}

const fn link_code(link: LinkLayer) -> u8 {
    match link {
        LinkLayer::InfiniBand => 1,
        LinkLayer::Ethernet => 2,
    }
}

/// Of descriptions.
const VERSION: u8 = 1;
// 7 addresses and 8 words: nothing between and behind them.
const _: () = assert!(size_of::<QueueHandle>() == 7 * 8 + 8 * 4);
