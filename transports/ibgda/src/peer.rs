//! A peer's slot and the queues to it, from their creation to the handles for kernels.
//!
//! Both sides [`open`](OpenPeer::open), send each other their [`description`](OpenPeer::description)
//! over a connection they trust, and [`join`](OpenPeer::join). After a failure both
//! [`reset`](Peer::reset), send each other their new [`description`](ResetPeer::description), and
//! [`rejoin`](ResetPeer::rejoin). Nothing here waits for the peer.
//!
//! Every time the queues are connected, they begin with another packet number, which is not predictable. So a late
//! packet of an earlier connection is not accepted as a new one.

mod description;
mod link;

use std::io;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use kernels::mlx5::{Bound, ErrorWord, PeerHandle, QueueHandle};
use thiserror::Error;

pub use self::description::DESCRIPTION_BYTES;
use self::description::{Description, MAX_PSN, PSN_AT};
#[cfg(fuzzing)]
pub use self::description::{check_description, description_samples};
pub use self::link::{LinkError, Waits};
use crate::access::{ALIGN_BYTES, Access, AccessError, Part, Pieces, Plan, SharedMemory};
use crate::nic::{Nic, NicError, Registration, Rights};
use crate::queue::{
    Immediate, Queue, QueueConfig, QueueError, QueuePlace, ReceiveError, RemoteQueue, check_peer,
    register, wait_for,
};

/// Most queues to one peer.
pub const MAX_QUEUES: usize = 64;

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
#[allow(missing_docs, reason = "the names of the fields say enough")]
pub enum PeerError {
    /// A value that cannot be.
    #[error("`{field}` is {found}, expected {expected}")]
    Config {
        /// Name of the setting.
        field: &'static str,
        found: usize,
        expected: &'static str,
    },
    /// The NIC refused.
    #[error(transparent)]
    Nic(#[from] NicError),
    /// A queue failed.
    #[error("queue {queue_idx}: {source}")]
    Queue {
        /// Name of the field.
        queue_idx: usize,
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
        found: u64,
        expected: String,
    },
    /// Kernels could not use the handle.
    #[error("the peer cannot be given to kernels: {0}")]
    Handle(&'static str),
    /// The system gives no random number.
    #[error("getrandom failed: {0}; queues need an unpredictable first packet number")]
    Random(#[source] io::Error),
}

/// Layout of a peer's memory.
struct Memory {
    queues: Pieces,
    /// The same, where these are not apart.
    counts: Pieces,
    places: Vec<QueuePlace>,
    slot: Part,
    mirror: Part,
    table: Part,
}

impl Memory {
    /// Memory of queues and slots as `access` has it, and of counts and handles from `counts`.
    fn open(
        access: &dyn Access,
        counts: Option<&dyn Access>,
        config: &PeerConfig,
    ) -> Result<Self, PeerError> {
        let failed = |queue_idx| move |source| PeerError::Queue { queue_idx, source };
        let slots = access.slots();
        let are_one = slots.zip(counts).is_some_and(|(slots, counts)| ptr::addr_eq(slots, counts));
        let apart = counts.filter(|_| !are_one);
        // The allocators, that of queues first, and the index of each kind of memory's allocator.
        let givers: Vec<_> = [Some(access), slots, apart].into_iter().flatten().collect();
        let of_slots = usize::from(slots.is_some());
        let of_counts = if counts.is_some() { of_slots + usize::from(apart.is_some()) } else { 0 };
        let mut plans: Vec<_> = givers.iter().map(|_| Plan::default()).collect();
        let slot = plans[of_slots].add(config.own_slot_bytes, ALIGN_BYTES)?;
        let mirror = plans[of_slots].add(config.peer_slot_bytes, ALIGN_BYTES)?;
        let places = (0..config.num_queues)
            .map(|idx| {
                let place = QueuePlace::plan(&mut plans[0], &config.queue);
                let place = match of_counts {
                    0 => place,
                    _ => place.and_then(|place| place.with_counts(&mut plans[of_counts])),
                };
                place.map_err(failed(idx))
            })
            .collect::<Result<Vec<_>, _>>()?;
        let table_bytes = link::table_bytes(config.num_queues);
        let table = plans[of_counts].add(table_bytes, align_of::<QueueHandle>())?;
        let memories = plans.into_iter().zip(givers).map(|(plan, giver)| plan.alloc(giver));
        let memories = memories.collect::<Result<Vec<_>, _>>()?;
        Ok(Self {
            queues: memories[0].clone(),
            counts: memories[of_counts].clone(),
            places,
            slot: memories[of_slots].part(slot),
            mirror: memories[of_slots].part(mirror),
            table: memories[of_counts].part(table),
        })
    }
}

/// This side before the peer's is known. Dropping it frees everything.
#[derive(Debug)]
pub struct OpenPeer {
    config: PeerConfig,
    psn: u32,
    queues: Vec<Queue>,
    nic: Arc<Nic>,
    // Registrations go before the memory.
    slot_key: Registration,
    mirror_key: Registration,
    slot: Part,
    mirror: Part,
    table: Part,
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
        let psn = fresh_psn(None)?;
        let failed = |queue_idx| move |source| PeerError::Queue { queue_idx, source };
        let counts = access.counts();
        let memory = match Memory::open(access.as_ref(), counts, &config) {
            // A GPU without room has its slots with the host for that.
            Err(PeerError::Access(error)) if counts.is_some() && access.slots().is_none() => {
                tracing::warn!(%error, "counts and handles lie with the queues, where those who post are slower");
                Memory::open(access.as_ref(), None, &config)?
            }
            memory => memory?,
        };
        let Memory { queues, counts, places, slot, mirror, table } = memory;
        // SAFETY: both memories are dropped after their registrations, here and in `Peer`.
        let (slot_key, mirror_key) =
            unsafe { (register(nic, &slot, Rights::Peer)?, register(nic, &mirror, Rights::Own)?) };
        let queues = places
            .into_iter()
            .enumerate()
            .map(|(idx, place)| {
                let memory = (&queues, &counts, place);
                Queue::create(nic, access.as_ref(), &config.queue, config.peer, memory)
                    .map_err(failed(idx))
            })
            .collect::<Result<Vec<_>, _>>()?;
        let nic = Arc::clone(nic);
        Ok(Self { config, psn, queues, nic, slot_key, mirror_key, slot, mirror, table })
    }

    /// Description for the peer alone: it contains the key of this side's slot.
    #[must_use]
    pub fn description(&self) -> Vec<u8> {
        let port = self.nic.port();
        let description = Description {
            mtu: port.mtu,
            lid: port.lid,
            gid: port.gid,
            slot_address: self.slot.address(),
            slot_key: self.slot_key.remote_key(),
            psn: self.psn,
            qpns: self.queues.iter().map(Queue::qpn).collect(),
        };
        description.encode(port.link, self.config.own_slot_bytes as u64)
    }

    /// This side's slot, which the peer will write.
    #[must_use]
    pub fn slot(&self) -> &dyn SharedMemory {
        &self.slot
    }

    /// Connects the queues with the peer's.
    ///
    /// # Errors
    /// [`PeerError`], also when the peer's bytes make no sense.
    pub fn join(mut self, description: &[u8]) -> Result<Peer, PeerError> {
        let remote = Description::decode(description, &self.config, self.nic.port().link)?;
        let own = self.description();
        connect(&mut self.queues, &self.nic, &remote, self.psn)?;
        let handles: Vec<QueueHandle> = self.queues.iter().map(Queue::handle).collect();
        for (idx, handle) in handles.iter().enumerate() {
            self.table.write(idx * size_of::<QueueHandle>(), &handle_bytes(handle))?;
        }
        let peer = Peer {
            queues: self.queues,
            next_queue: AtomicUsize::new(0),
            own,
            psn: self.psn,
            remote,
            config: self.config,
            nic: self.nic,
            table: self.table,
            slot_key: self.slot_key,
            mirror_key: self.mirror_key,
            slot: self.slot,
            mirror: self.mirror,
        };
        match check_peer(&peer.handle(ptr::null_mut(), ptr::null(), 0)) {
            Some(what) => Err(PeerError::Handle(what)),
            None => Ok(peer),
        }
    }
}

/// A joined peer. Dropping it destroys the queues and takes the peer's key back; no kernel may post on
/// them any more.
#[derive(Debug)]
pub struct Peer {
    queues: Vec<Queue>,
    /// Index of the queue that [`receive`](Self::receive) polls first.
    next_queue: AtomicUsize,
    /// This side's description.
    own: Vec<u8>,
    psn: u32,
    remote: Description,
    config: PeerConfig,
    nic: Arc<Nic>,
    table: Part,
    slot_key: Registration,
    mirror_key: Registration,
    slot: Part,
    mirror: Part,
}

impl Peer {
    /// Handle for kernels. `error` and `abort_mask` are addresses that they reach, or null.
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
            remote: self.remote.slot_address,
            slot_bytes: self.config.peer_slot_bytes as u64,
            lkey: self.mirror_key.local_key(),
            rkey: self.remote.slot_key,
            num_qps: u32::try_from(self.queues.len()).unwrap_or(0),
            reserved: 0,
            bound: Bound { error, abort_mask, timeout_ns },
        }
    }

    /// Resets all queues after one of them failed. Handles of kernels stay valid and can be used again after
    /// [`rejoin`](ResetPeer::rejoin); until then no kernel may post. Operations under way may have arrived or not.
    /// After the next join, their late packets are not accepted as new ones.
    ///
    /// # Errors
    /// [`PeerError`]; everything is then freed, and the peer must be opened again.
    pub fn reset(mut self) -> Result<ResetPeer, PeerError> {
        for (queue_idx, queue) in self.queues.iter_mut().enumerate() {
            queue.reset().map_err(|source| PeerError::Queue { queue_idx, source })?;
        }
        self.psn = fresh_psn(Some(self.psn))?;
        self.own[PSN_AT..PSN_AT + 4].copy_from_slice(&self.psn.to_le_bytes());
        Ok(ResetPeer(self))
    }

    /// The queues.
    #[must_use]
    pub fn queues(&self) -> &[Queue] {
        &self.queues
    }

    /// Waits for immediate data on any queue for at most `timeout`, which may be 0, and posts its receive again.
    /// Everything that the peer wrote before on that queue is then visible here.
    ///
    /// # Errors
    /// [`ReceiveError`] of a queue that takes nothing more until it is reset, once no other queue has
    /// anything.
    pub fn receive(&self, timeout: Duration) -> Result<Option<Immediate>, ReceiveError> {
        wait_for(timeout, || {
            // Each poll begins behind the queue that had data last, so that every queue is served.
            let first = self.next_queue.load(Ordering::Relaxed);
            let num_queues = self.queues.len();
            let mut nothing = Ok(None);
            for queue_idx in (first..first + num_queues).map(|idx| idx % num_queues) {
                match self.queues[queue_idx].receive(Duration::ZERO) {
                    Ok(Some(immediate)) => {
                        self.next_queue.store((queue_idx + 1) % num_queues, Ordering::Relaxed);
                        return Ok(Some(immediate));
                    }
                    Ok(None) => {}
                    Err(error) => nothing = nothing.and(Err(error)),
                }
            }
            nothing
        })
    }

    /// This side's slot, which the peer writes.
    #[must_use]
    pub fn slot(&self) -> &dyn SharedMemory {
        &self.slot
    }

    /// The local copy of the peer's slot, from which puts are made.
    #[must_use]
    pub fn mirror(&self) -> &dyn SharedMemory {
        &self.mirror
    }

    /// How slot and mirror were registered.
    #[must_use]
    pub const fn registered_by(&self) -> [crate::nic::RegistrationMethod; 2] {
        [self.slot_key.by(), self.mirror_key.by()]
    }
}

/// A joined peer whose queues are in reset. If the other side's queue were not in reset, it would take the next
/// packet for an old one. So both sides exchange their new descriptions, which prove that they have reset, before
/// either continues.
#[derive(Debug)]
pub struct ResetPeer(Peer);

impl ResetPeer {
    /// As [`OpenPeer::description`], with the number of this life's first packet.
    #[must_use]
    pub fn description(&self) -> Vec<u8> {
        self.0.own.clone()
    }

    /// Connects the queues with the same ones of the peer as before. The description must be the peer's since its
    /// own reset.
    ///
    /// # Errors
    /// [`PeerError`], also when the peer is not where it was or has not been reset; everything is then
    /// freed.
    pub fn rejoin(self, description: &[u8]) -> Result<Peer, PeerError> {
        let mut peer = self.0;
        let remote = Description::decode(description, &peer.config, peer.nic.port().link)?;
        remote.check_successor(&peer.remote)?;
        peer.remote = remote;
        connect(&mut peer.queues, &peer.nic, &peer.remote, peer.psn)?;
        Ok(peer)
    }
}

/// Connects queues with those of the peer. The first packet from here has the number `psn`.
fn connect(
    queues: &mut [Queue],
    nic: &Nic,
    remote: &Description,
    psn: u32,
) -> Result<(), PeerError> {
    for (queue_idx, (queue, qpn)) in queues.iter_mut().zip(&remote.qpns).enumerate() {
        let other_end = RemoteQueue {
            qpn: *qpn,
            psn: remote.psn,
            lid: remote.lid,
            gid: remote.gid,
            mtu: remote.mtu.min(nic.port().mtu),
        };
        queue.connect(&other_end, psn).map_err(|source| PeerError::Queue { queue_idx, source })?;
    }
    Ok(())
}

/// A random packet number other than `former`.
fn fresh_psn(former: Option<u32>) -> Result<u32, PeerError> {
    let mut bytes = [0_u8; 4];
    // SAFETY: room for this number of bytes.
    let got = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
    if usize::try_from(got) != Ok(bytes.len()) {
        return Err(PeerError::Random(io::Error::last_os_error()));
    }
    let psn = u32::from_le_bytes(bytes) & MAX_PSN;
    // As far away as can be.
    Ok(if former == Some(psn) { psn ^ 1 << 23 } else { psn })
}

/// The structure as kernels read it.
fn handle_bytes(handle: &QueueHandle) -> [u8; size_of::<QueueHandle>()] {
    // SAFETY: the structure has no padding (see the assert below), so every byte is initialised.
    unsafe { std::mem::transmute::<QueueHandle, [u8; size_of::<QueueHandle>()]>(*handle) }
}

// 8 addresses and 8 words: nothing between and behind them.
const _: () = assert!(size_of::<QueueHandle>() == 8 * 8 + 8 * 4);
