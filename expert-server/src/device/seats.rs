//! Clients of a server on a GPU: each has a seat, the index that kernels know it by.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use bytemuck::Zeroable;
use kernels::abi::{ClientPeer, DevicePtr, FrameGeometry, Link, MAX_PEERS, WAY_DIRECT};
use kernels::gpu::{Gpu, GpuBuffer, GpuError};
use p2p_core::bootstrap::DevicePair;
use p2p_core::slot::PROGRESS;
use p2p_core::{AnyEndpoint, Channel};
use protocol::DispatchExpect;
use tokio::sync::oneshot;

use crate::data::LinkId;
use crate::metrics::DropReason;

/// A link that has ended. Dropping it unmaps the client's slot.
#[derive(Debug)]
pub(crate) struct EndedSeat {
    pub(crate) reason: DropReason,
    pub(crate) slots: ClientSlots,
}

/// What a connection gave: the device slots, and those of the host, which are as good as unused.
#[derive(Debug)]
pub(crate) struct ClientSlots {
    pub(crate) pair: DevicePair,
    /// Nothing goes through it; it stands as long as the link.
    pub(crate) _channel: Channel<AnyEndpoint>,
}

/// One client.
#[derive(Debug)]
pub(super) struct Seat {
    pub(super) id: LinkId,
    pub(super) slots: ClientSlots,
    pub(super) expect: DispatchExpect,
    pub(super) ended: oneshot::Sender<EndedSeat>,
    /// Frames up to this one have been looked at for refusals.
    pub(super) judged: u64,
    num_bad_frames: u32,
    doom: Option<DropReason>,
}

impl Seat {
    pub(super) const fn new(
        id: LinkId,
        slots: ClientSlots,
        expect: DispatchExpect,
        ended: oneshot::Sender<EndedSeat>,
    ) -> Self {
        Self { id, slots, expect, ended, judged: 0, num_bad_frames: 0, doom: None }
    }

    /// Ends the link between two batches. The first reason counts.
    pub(super) fn end_with(&mut self, reason: DropReason) {
        self.doom.get_or_insert(reason);
    }

    pub(super) const fn doom(&self) -> Option<DropReason> {
        self.doom
    }

    /// Counts a malformed frame.
    pub(super) fn count_bad_frame(&mut self, max_bad_frames: u32, fault: &dyn std::fmt::Display) {
        if self.num_bad_frames == 0 {
            tracing::warn!(link = %self.id, client = self.expect.client_id, error = %fault, "a client sent a malformed frame");
        }
        self.num_bad_frames = self.num_bad_frames.saturating_add(1);
        if self.num_bad_frames > max_bad_frames {
            self.end_with(DropReason::BadFrames);
        }
    }

    /// The client's progress word.
    pub(super) fn progress_word(&self, geometry: &FrameGeometry) -> DevicePtr {
        self.slots.pair.peer().add(geometry.response_control_offset + PROGRESS as u64)
    }

    fn peer(&self) -> ClientPeer {
        let pair = &self.slots.pair;
        ClientPeer {
            request: pair.own(),
            response: Link { window: pair.peer(), context: 0, way: WAY_DIRECT, reserved: 0 },
            client_id: self.expect.client_id,
            generation: self.expect.generation,
            reserved: 0,
        }
    }
}

/// All seats, and the memory that stands in for those that are empty: nobody ever writes it, so kernels
/// see a client that never sends anything.
#[derive(Debug)]
pub(super) struct Seats {
    seats: [Option<Seat>; MAX_PEERS],
    nobody: GpuBuffer,
}

impl Seats {
    pub(super) fn new(gpu: &Gpu, geometry: &FrameGeometry) -> Result<Self, GpuError> {
        let bytes = geometry.slot_bytes.max(geometry.response_slot_bytes);
        Ok(Self { seats: [const { None }; MAX_PEERS], nobody: gpu.alloc(bytes)? })
    }

    /// Takes the first empty seat; gives the client back when there is none.
    pub(super) fn take(&mut self, seat: Seat) -> Result<usize, Box<Seat>> {
        match self.seats.iter().position(Option::is_none) {
            Some(idx) => {
                self.seats[idx] = Some(seat);
                Ok(idx)
            }
            None => Err(Box::new(seat)),
        }
    }

    /// Empties the seats of clients that are to go.
    pub(super) fn remove_doomed(&mut self) -> impl Iterator<Item = Seat> + '_ {
        self.seats.iter_mut().filter_map(|place| place.take_if(|seat| seat.doom.is_some()))
    }

    pub(super) fn get_mut(&mut self, idx: usize) -> Option<&mut Seat> {
        self.seats.get_mut(idx).and_then(Option::as_mut)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Seat> {
        self.seats.iter().flatten()
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Seat> {
        self.seats.iter_mut().flatten()
    }

    pub(super) fn len(&self) -> usize {
        self.iter().count()
    }

    pub(super) fn has_doomed(&self) -> bool {
        self.iter().any(|seat| seat.doom.is_some())
    }

    /// Seats that kernels look at: up to the last that is taken.
    pub(super) fn num_clients(&self) -> u32 {
        self.seats.iter().rposition(Option::is_some).map_or(0, |last| last as u32 + 1)
    }

    /// The table that kernels read.
    pub(super) fn table(&self) -> [ClientPeer; MAX_PEERS] {
        let nobody = self.nobody.ptr();
        let empty = ClientPeer {
            request: nobody,
            response: Link { window: nobody, context: 0, way: WAY_DIRECT, reserved: 0 },
            ..ClientPeer::zeroed()
        };
        std::array::from_fn(|idx| self.seats[idx].as_ref().map_or(empty, Seat::peer))
    }
}

/// What control tasks and the data thread share about seats: which link has which, and the mask of dead
/// clients in host memory that running kernels poll.
#[derive(Debug)]
pub(super) struct SeatBoard {
    ids: [AtomicU64; MAX_PEERS],
    mask: GpuBuffer,
}

impl SeatBoard {
    pub(super) fn new(gpu: &Gpu) -> Result<Self, GpuError> {
        let ids = std::array::from_fn(|_| AtomicU64::new(0));
        Ok(Self { ids, mask: gpu.alloc_host(size_of::<u64>() as u64)? })
    }

    /// The mask, for kernels.
    pub(super) fn mask_ptr(&self) -> DevicePtr {
        self.mask.ptr()
    }

    /// Lets running kernels stop waiting for a client, now. Without effect if it has no seat.
    pub(super) fn give_up(&self, id: LinkId) {
        let seat = self.ids.iter().position(|seat| seat.load(Ordering::Acquire) == id.number());
        if let (Some(idx), Some(mask)) = (seat, self.mask_word()) {
            mask.fetch_or(1 << idx, Ordering::SeqCst);
        }
    }

    /// Notes who has a seat now, and whom kernels need not wait for. Between two batches.
    pub(super) fn set(&self, seats: &Seats) {
        for (id, seat) in self.ids.iter().zip(&seats.seats) {
            let number = seat.as_ref().map_or(0, |seat| seat.id.number());
            id.store(number, Ordering::Release);
        }
        if let Some(mask) = self.mask_word() {
            mask.store(0, Ordering::SeqCst);
        }
    }

    fn mask_word(&self) -> Option<&AtomicU32> {
        let host: NonNull<u8> = self.mask.host()?;
        // SAFETY: aligned memory of at least 4 bytes that lives as long as `self`; kernels only read it,
        // and everybody here uses it atomically.
        Some(unsafe { AtomicU32::from_ptr(host.as_ptr().cast()) })
    }
}
