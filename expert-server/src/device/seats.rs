//! Clients of a server on a GPU: each has a seat, the index that kernels know it by.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytemuck::Zeroable;
use kernels::abi::{
    ClientPeer, DevicePtr, FrameGeometry, Link, MAX_FRAMES, MAX_PEERS, PATH_DIRECT,
};
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
    judged: u64,
    /// What the client was told of refused frames, by place, as far as it was counted.
    told: [u64; MAX_FRAMES as usize],
    num_bad_frames: u32,
    withheld: Withheld,
    doom: Option<DropReason>,
}

impl Seat {
    pub(super) fn new(
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
            told: [0; MAX_FRAMES as usize],
            num_bad_frames: 0,
            withheld: Withheld::new(Instant::now()),
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

    /// Status words that were not there at the last call. Each names its frame, so no two are the same.
    pub(super) fn new_told(
        &mut self,
        told: &[u64; MAX_FRAMES as usize],
    ) -> impl Iterator<Item = u64> + use<> {
        let former = std::mem::replace(&mut self.told, *told);
        (*told).into_iter().zip(former).filter(|(new, old)| new != old).map(|(new, _)| new)
    }

    /// Counts the frames since the last call, of which `taken` is the last and the rows of `num_withheld` did
    /// not come in time.
    ///
    /// Within a host rows follow their header at once, unless the client's GPU does something else in between,
    /// and over a network something may lie there. So both are forgiven alike.
    pub(super) fn count_withheld(
        &mut self,
        taken: u64,
        num_withheld: u32,
        max_bad_frames: u32,
        now: Instant,
    ) {
        let num_frames = taken.saturating_sub(self.judged);
        self.judged = taken;
        let num_whole = num_frames.saturating_sub(num_withheld.into());
        let frames = self.withheld.count(num_whole, num_withheld, now);
        let most = if self.is_remote() { u32::MAX } else { max_bad_frames.saturating_add(1) };
        if frames >= most.min(MAX_WITHHELD) {
            tracing::warn!(link = %self.id, client = self.expect.client_id, frame = taken, frames, "dropping a client that announces rows and does not send them");
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
        if self.doom.is_some() {
            return;
        }
        if let Some(Err(error)) = self.slots.pair.as_remote().map(RemoteSlots::health) {
            tracing::warn!(link = %self.id, client = self.expect.client_id, %error, "dropping a client");
            self.end_with(DropReason::Transport);
        }
    }

    /// Whether kernels store answers into the client's memory by themselves: such rows have no flags.
    fn is_stored_to(&self) -> bool {
        self.slots.pair.link().path == PATH_DIRECT
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

/// Frames of a client whose rows did not come in time and that are not forgiven.
///
/// A congested way may hold some up, but each holds up everybody's batch. So they are forgiven as frames come,
/// which one that only withholds never sees, and not faster than one in [`FORGIVEN_EVERY`]: frames are cheap,
/// and one that came would otherwise pay for one that did not, for as long as somebody likes.
#[derive(Debug)]
struct Withheld {
    num: u32,
    /// Frames that came in time since the last that was forgiven.
    num_whole: u64,
    /// Where the next period begins.
    since: Instant,
}

impl Withheld {
    const fn new(now: Instant) -> Self {
        Self { num: 0, num_whole: 0, since: now }
    }

    /// Counts frames that came and frames that did not, and says how many of the latter stand.
    fn count(&mut self, num_whole: u64, num_withheld: u32, now: Instant) -> u32 {
        self.num_whole = self.num_whole.saturating_add(num_whole);
        if self.num > 0 {
            let elapsed = now.saturating_duration_since(self.since);
            let num_periods = (elapsed.as_nanos() / FORGIVEN_EVERY.as_nanos()) as u32;
            let most = u32::try_from(self.num_whole).unwrap_or(u32::MAX);
            let forgiven = num_periods.min(most).min(self.num);
            if forgiven > 0 {
                self.num -= forgiven;
                // Time that forgave nothing is no credit for later.
                self.since += FORGIVEN_EVERY * num_periods;
                self.num_whole = 0;
            }
        }
        if self.num == 0 {
            (self.since, self.num_whole) = (now, 0);
        }
        self.num = self.num.saturating_add(num_withheld);
        self.num
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

    /// Seats that somebody has, as a mask.
    pub(super) fn taken(&self) -> u32 {
        self.mask_of(|_| true)
    }

    /// Seats of clients whose answers come with a flag per row, as a mask.
    pub(super) fn flagged(&self) -> u32 {
        self.mask_of(|seat| !seat.is_stored_to())
    }

    fn mask_of(&self, is_one: impl Fn(&Seat) -> bool) -> u32 {
        let seats = self.seats.iter().enumerate();
        let these = seats.filter(|(_, seat)| seat.as_ref().is_some_and(&is_one));
        these.fold(0, |mask, (idx, _)| mask | 1 << idx)
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
            response: Link { window: nobody, context: 0, path: PATH_DIRECT, reserved: 0 },
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

    /// Gives up whoever is to go and has not been yet: what lets them go waits for the kernels. Not between the
    /// taking of a seat and [`set`](Self::set).
    pub(super) fn give_up_doomed(&self, seats: &Seats) {
        for (idx, seat) in seats.seats.iter().enumerate() {
            if let Some(seat) = seat
                && seat.doom.is_some()
                && !self.is_given_up(idx)
            {
                self.give_up(seat.id);
            }
        }
    }

    /// Whether kernels need not wait for a seat's client any more.
    pub(super) fn is_given_up(&self, seat: usize) -> bool {
        self.mask_word().is_some_and(|mask| mask.load(Ordering::SeqCst) >> seat & 1 != 0)
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

/// Frames that a client may announce without sending their rows in time, one less: with so many that
/// are not forgiven it is dropped. In docs/operations.md.
const MAX_WITHHELD: u32 = 8;
/// A frame that was withheld is forgiven after this long, if one has come. Each costs a batch 20 ms, so a client
/// that goes to the limit costs the others one part in 500. In docs/operations.md.
const FORGIVEN_EVERY: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests {
    use p2p_core::backend::mapped::MappedEndpoint;
    use p2p_core::bootstrap::DeviceSide;
    use p2p_core::wait::event_fd;
    use p2p_core::{PostError, Region, SlotConfig, SlotKey, SlotLayout};
    use protocol::WireDtype;

    use super::*;
    use crate::data::Inbox;

    /// A way to a client that is in order and takes nothing.
    #[derive(Debug)]
    struct Way {
        own: GpuBuffer,
        waits: Arc<GpuBuffer>,
    }

    impl RemoteSlots for Way {
        fn own(&self) -> &GpuBuffer {
            &self.own
        }

        fn link(&self) -> Link {
            Link { window: self.own.ptr(), context: 0, path: PATH_DIRECT, reserved: 0 }
        }

        fn waits(&self) -> KernelWaits {
            KernelWaits::new(Arc::clone(&self.waits))
        }

        fn show_life(&self, _: u64) -> Result<(), PostError> {
            Ok(())
        }

        fn health(&self) -> Result<(), PostError> {
            Ok(())
        }
    }

    /// A client over a network, and the word that ends kernels' waits for the way to it.
    fn remote(gpu: &Gpu, id: LinkId) -> (Seat, Arc<GpuBuffer>) {
        let waits = Arc::new(gpu.alloc_host(4096).expect("memory"));
        let way = Way { own: gpu.alloc(4096).expect("memory"), waits: Arc::clone(&waits) };
        let (own_slot_bytes, peer_slot_bytes) = (4096, 4096);
        let gpu = gpu.clone();
        let side = DeviceSide { gpu, own_slot_bytes, peer_slot_bytes, shape: Vec::new() };
        let pair = DevicePair::remote(Box::new(way), &side);
        let layout = SlotLayout::new(SlotConfig::default()).expect("a layout");
        let slot = || Region::anonymous(layout.slot_bytes()).expect("memory");
        let event = Arc::new(event_fd().expect("an event"));
        let kind = TransportKind::Local;
        let endpoint = MappedEndpoint::new(kind, slot(), Arc::clone(&event), event);
        let endpoint = AnyEndpoint::Mapped(endpoint);
        let channel = Channel::new(endpoint, layout, slot(), SlotKey).expect("a channel");
        let expect = DispatchExpect {
            client_id: 1,
            generation: 1,
            hidden: 128,
            num_layers: 1,
            num_experts: 8,
            max_tokens: 8,
            top_k: 2,
            dtype: WireDtype::Bf16,
            response_dtype: WireDtype::Bf16,
        };
        let seat = Seat::new(id, ClientSlots { pair, channel }, expect, oneshot::channel().0);
        (seat, waits)
    }

    /// In whichever order it comes to that.
    #[test]
    fn kernels_wait_for_nobody_who_is_to_go() {
        let gpu = Gpu::open_emulated(0).expect("a GPU in software");
        let geometry = FrameGeometry::new(256, 4, kernels::abi::DTYPE_BF16, 16, 2);
        let mut seats = Seats::new(&gpu, &geometry.expect("a geometry")).expect("seats");
        let board = SeatBoard::new(&gpu).expect("a board");
        let inbox = Inbox::<()>::new();
        let ids = [inbox.next_id(), inbox.next_id(), inbox.next_id()];
        let [wrong, gone, right] = ids;
        let ended = ids.map(|id| {
            let (seat, waits) = remote(&gpu, id);
            seats.take(seat).expect("a seat");
            waits
        });
        let ended = || {
            ended.each_ref().map(|waits| {
                let host = waits.host().expect("host memory");
                // SAFETY: a word of page-locked memory that lives, used atomically by all.
                unsafe { AtomicU32::from_ptr(host.as_ptr().cast()) }.load(Ordering::SeqCst)
            })
        };
        // Its connection ends when it has its seat, and the board does not know yet.
        board.give_up(gone);
        board.set(&seats);
        board.give_up_doomed(&seats);
        assert_eq!(ended(), [0, 0, 0], "nobody is to go");
        let mut doom = |id, reason| {
            let seat = seats.iter_mut().find(|seat| seat.id == id).expect("a seat");
            seat.end_with(reason);
            board.give_up_doomed(&seats);
        };
        doom(gone, DropReason::PeerClosed);
        assert_eq!((ended(), board.is_given_up(1)), ([0, 1, 0], true));
        // Its way is in order, and its connection stands.
        doom(wrong, DropReason::BadFrames);
        assert_eq!((ended(), board.is_given_up(0)), ([1, 1, 0], true));
        doom(wrong, DropReason::PeerClosed);
        assert_eq!((ended(), board.is_given_up(2)), ([1, 1, 0], false));
        assert_eq!(seats.iter().find(|seat| seat.id == right).and_then(Seat::doom), None);
    }

    #[test]
    fn withheld_frames_add_up_whatever_comes_in_between() {
        let begin = Instant::now();
        let mut withheld = Withheld::new(begin);
        for turn in 1..=MAX_WITHHELD {
            let at = begin + Duration::from_millis(20) * turn;
            assert_eq!(withheld.count(1000, 1, at), turn);
            assert_eq!(withheld.count(1000, 0, at), turn);
        }
        let mut at_once = Withheld::new(begin);
        assert_eq!(at_once.count(0, MAX_WITHHELD, begin), MAX_WITHHELD);
    }

    #[test]
    fn withheld_frames_are_forgiven_with_time_and_for_frames_that_come() {
        let begin = Instant::now();
        let after = |periods: f64| begin + FORGIVEN_EVERY.mul_f64(periods);
        let mut withheld = Withheld::new(begin);
        assert_eq!(withheld.count(0, 5, begin), 5);
        // Time alone forgives nothing: nothing has come.
        assert_eq!(withheld.count(0, 1, after(50.0)), 6);
        // A frame that came forgives one only, however long it took, and frames do no more than time allows.
        assert_eq!(withheld.count(1, 0, after(60.0)), 5);
        let mut withheld = Withheld::new(begin);
        assert_eq!(withheld.count(0, 4, begin), 4);
        assert_eq!(withheld.count(1000, 0, after(0.9)), 4);
        assert_eq!(withheld.count(0, 0, after(1.1)), 3);
        // Looks in between do not make a period longer.
        assert_eq!(withheld.count(1000, 0, after(1.9)), 3);
        assert_eq!(withheld.count(0, 0, after(2.1)), 2);
        assert_eq!(withheld.count(1000, 0, after(9.0)), 0);
        // Good times are no credit for bad ones.
        assert_eq!(withheld.count(1000, 7, after(90.0)), 7);
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
