//! Clients of a server on a GPU: each has a seat, the index that kernels know it by.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytemuck::Zeroable;
use kernels::abi::{ClientPeer, DevicePtr, FrameGeometry, Link, MAX_PEERS, WAY_DIRECT};
use kernels::gpu::{Gpu, GpuBuffer, GpuError, Stream};
use p2p_core::bootstrap::{DevicePair, KernelWaits, RemoteSlots};
use p2p_core::slot::PROGRESS;
use p2p_core::{AnyEndpoint, Channel, TransportKind};
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
    pub(crate) channel: Channel<AnyEndpoint>,
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
    withheld: Withheld,
    doom: Option<DropReason>,
}

impl Seat {
    pub(super) const fn new(
        id: LinkId,
        slots: ClientSlots,
        expect: DispatchExpect,
        ended: oneshot::Sender<EndedSeat>,
    ) -> Self {
        Self {
            id,
            slots,
            expect,
            ended,
            judged: 0,
            num_bad_frames: 0,
            withheld: Withheld { num_in_a_row: 0, last: 0 },
            doom: None,
        }
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

    /// Counts frame `frame`, whose rows did not come over the network in time. A congested way may hold some
    /// up; a client of which nothing else comes any more holds up everybody's batches.
    pub(super) fn count_withheld(&mut self, frame: u64, fault: &dyn std::fmt::Display) {
        let frames = self.withheld.count(frame);
        if frames >= MAX_WITHHELD {
            tracing::warn!(link = %self.id, client = self.expect.client_id, error = %fault, frames, "dropping a client that announces rows and does not send them");
            self.end_with(DropReason::BadFrames);
        }
    }

    /// Tells the client that this side is alive.
    pub(super) fn show_life(
        &self,
        control: &Stream,
        geometry: &FrameGeometry,
    ) -> Result<(), GpuError> {
        let offset = geometry.response_control_offset + PROGRESS as u64;
        match self.slots.pair.as_remote() {
            Some(remote) => {
                if let Err(error) = remote.show_life(offset) {
                    tracing::debug!(link = %self.id, %error, "a client sees no life");
                }
                Ok(())
            }
            // SAFETY: the word is aligned within the client's slot, which stays mapped until this stream
            // is done.
            None => unsafe { control.add_flag(self.slots.pair.peer().add(offset), 1) },
        }
    }

    /// Ends the link when the way to the client is out of service.
    pub(super) fn check_way(&mut self) {
        if let Some(Err(error)) = self.slots.pair.as_remote().map(RemoteSlots::health) {
            tracing::warn!(link = %self.id, client = self.expect.client_id, %error, "dropping a client");
            self.end_with(DropReason::Transport);
        }
    }

    /// Whether the client's memory is out of this GPU's reach.
    pub(super) fn is_remote(&self) -> bool {
        self.slots.pair.as_remote().is_some()
    }

    /// Transport of the slots.
    pub(super) fn kind(&self) -> TransportKind {
        match self.slots.pair.as_remote() {
            Some(_) => self.slots.channel.kind(),
            None => TransportKind::CudaIpc,
        }
    }

    fn peer(&self) -> ClientPeer {
        let pair = &self.slots.pair;
        ClientPeer {
            request: pair.own(),
            response: pair.link(),
            client_id: self.expect.client_id,
            generation: self.expect.generation,
            reserved: 0,
        }
    }
}

/// Frames of a client in a row whose rows did not come.
#[derive(Debug, Default)]
struct Withheld {
    num_in_a_row: u32,
    last: u64,
}

impl Withheld {
    /// Counts frame `frame`, and says how many there are in a row. A frame that came in between ends the row.
    const fn count(&mut self, frame: u64) -> u32 {
        let is_next = frame == self.last.wrapping_add(1);
        self.num_in_a_row = if is_next { self.num_in_a_row.saturating_add(1) } else { 1 };
        self.last = frame;
        self.num_in_a_row
    }
}

/// All seats, and the memory that stands in for those that are empty: nobody ever writes it, so kernels
/// see a client that never sends anything.
#[derive(Debug)]
pub(super) struct Seats {
    seats: [Option<Seat>; MAX_PEERS],
    nobody: Arc<GpuBuffer>,
}

impl Seats {
    pub(super) fn new(gpu: &Gpu, geometry: &FrameGeometry) -> Result<Self, GpuError> {
        let bytes = geometry.slot_bytes.max(geometry.response_slot_bytes);
        let nobody = Arc::new(gpu.alloc(bytes)?);
        Ok(Self { seats: [const { None }; MAX_PEERS], nobody })
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

    /// Ends all links, but leaves their slots mapped for good.
    pub(super) fn keep_slots(&mut self) {
        for Seat { slots, .. } in self.seats.iter_mut().filter_map(Option::take) {
            std::mem::forget(slots);
        }
        std::mem::forget(Arc::clone(&self.nobody));
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
    /// Of seats whose clients are reached over a network: what ends waits for the way itself. Held while
    /// seats are given up or set: neither may see half of the other.
    waits: Mutex<Vec<(LinkId, KernelWaits)>>,
}

impl SeatBoard {
    pub(super) fn new(gpu: &Gpu) -> Result<Self, GpuError> {
        let ids = std::array::from_fn(|_| AtomicU64::new(0));
        let mask = gpu.alloc_host(size_of::<u64>() as u64)?;
        Ok(Self { ids, mask, waits: Mutex::default() })
    }

    /// The mask, for kernels.
    pub(super) fn mask_ptr(&self) -> DevicePtr {
        self.mask.ptr()
    }

    /// Lets running kernels stop waiting for a client, now. Without effect if it has no seat.
    pub(super) fn give_up(&self, id: LinkId) {
        let all_waits = self.waits();
        let seat = self.ids.iter().position(|seat| seat.load(Ordering::Acquire) == id.number());
        if let (Some(idx), Some(mask)) = (seat, self.mask_word()) {
            mask.fetch_or(1 << idx, Ordering::SeqCst);
        }
        for (_, waits) in all_waits.iter().filter(|(link, _)| *link == id) {
            waits.end();
        }
    }

    /// Notes who has a seat now, and whom kernels need not wait for. Between two batches.
    pub(super) fn set(&self, seats: &Seats) {
        let mut all_waits = self.waits();
        self.set_ids(|idx| seats.seats[idx].as_ref().map_or(0, |seat| seat.id.number()));
        let waits = |seat: &Seat| Some((seat.id, seat.slots.pair.as_remote()?.waits()));
        *all_waits = seats.iter().filter_map(waits).collect();
    }

    /// Who was given up stays so until another one has the seat.
    fn set_ids(&self, number_of: impl Fn(usize) -> u64) {
        let mut same = 0;
        for (idx, id) in self.ids.iter().enumerate() {
            let number = number_of(idx);
            same |= u32::from(id.swap(number, Ordering::AcqRel) == number && number != 0) << idx;
        }
        if let Some(mask) = self.mask_word() {
            mask.fetch_and(same, Ordering::SeqCst);
        }
    }

    fn waits(&self) -> MutexGuard<'_, Vec<(LinkId, KernelWaits)>> {
        // Nothing that holds the lock can leave the list half changed.
        self.waits.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn mask_word(&self) -> Option<&AtomicU32> {
        let host: NonNull<u8> = self.mask.host()?;
        // SAFETY: aligned memory of at least 4 bytes that lives as long as `self`; kernels only read it,
        // and everybody here uses it atomically.
        Some(unsafe { AtomicU32::from_ptr(host.as_ptr().cast()) })
    }
}

/// Frames in a row that a client may announce over a network without sending their rows.
const MAX_WITHHELD: u32 = 8;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::Inbox;

    #[test]
    fn a_frame_that_comes_forgives_those_that_did_not() {
        let mut withheld = Withheld::default();
        // The first frame of a link has number 1.
        let found: Vec<u32> = [1, 2, 3, 5, 6, 9, u64::MAX].map(|at| withheld.count(at)).into();
        assert_eq!(found, [1, 2, 3, 1, 2, 1, 1]);
        let mut withheld = Withheld::default();
        let dropped_at = (1..).find(|frame| withheld.count(*frame) >= MAX_WITHHELD);
        assert_eq!(dropped_at, Some(u64::from(MAX_WITHHELD)));
    }

    #[test]
    fn who_was_given_up_stays_so_until_another_one_has_the_seat() {
        let gpu = Gpu::open_emulated(0).expect("a GPU in software");
        let board = SeatBoard::new(&gpu).expect("a board");
        let inbox = Inbox::<()>::new();
        let [first, second, third] = [inbox.next_id(), inbox.next_id(), inbox.next_id()];
        let mask = || board.mask_word().expect("a mask").load(Ordering::SeqCst);
        let set = |ids: [LinkId; 2]| board.set_ids(|idx| ids.get(idx).map_or(0, |id| id.number()));
        set([first, second]);
        board.give_up(second);
        assert_eq!(mask(), 0b10);
        set([first, second]);
        assert_eq!(mask(), 0b10, "the same client is in the seat");
        set([first, third]);
        assert_eq!(mask(), 0, "another one is");
        board.give_up(second);
        assert_eq!(mask(), 0, "nobody has the seat of a client that is gone");
    }
}
