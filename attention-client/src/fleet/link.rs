//! Servers, and connections to them as the lanes that own them see them.

use std::any::Any;
use std::collections::VecDeque;
use std::fmt::Debug;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering, fence};
use std::time::{Duration, Instant};

use arc_swap::ArcSwapOption;
use control_api::ServerEntry;
use crossbeam_queue::ArrayQueue;
use p2p_core::bootstrap::{BackgroundDrop, CloseReason, Fallback, Liveness};
use p2p_core::{AnyEndpoint, Channel, ChannelError};
use tokio::sync::{Notify, oneshot};

use super::pace::Pace;
use crate::metrics::FailReason;

/// A server, shared by all lanes of a client. One for each member and incarnation.
#[derive(Debug)]
pub(crate) struct Server {
    /// Dense index. Used again once the server is gone.
    pub idx: usize,
    /// Never reused.
    pub uid: u64,
    pub entry: ServerEntry,
    /// Name of the entry, for reports that share it.
    pub shared_name: Arc<str>,
    /// (token, expert) pairs sent by this client and not yet answered.
    pub outstanding: AtomicU64,
    /// A link to it went silent, and no link has heard from it since. Such a server is the last choice.
    pub is_silent: AtomicBool,
    pub pace: Pace,
    /// It refused this client for a reason that only a changed setting removes.
    pub has_refused: AtomicBool,
    /// Transports that do not work with it, as lanes found out.
    pub fallback: Fallback,
    /// State of its connections in words, for error messages.
    pub last_error: ArcSwapOption<String>,
    /// One mailbox for each lane: a new link on its way to the lane.
    pub mailboxes: Box<[ArrayQueue<Box<Link>>]>,
}

impl Server {
    pub fn name(&self) -> &str {
        &self.entry.name
    }

    pub fn note_error(&self, error: impl ToString) {
        self.last_error.store(Some(Arc::new(error.to_string())));
    }
}

/// The part of a link that lies in GPU memory, as far as a fleet must know it. The GPU client knows the rest.
pub(crate) trait DeviceLink: Any + Debug + Send + Sync {
    /// The link is down: ends what kernels wait for. Any thread may call, more than once.
    fn link_down(&self);

    /// Takes the memory out if the link is down and no call uses it. Dropping the result frees the memory and may
    /// take milliseconds.
    ///
    /// A call counts itself in `in_flight` first, and then looks whether the link is down. This function runs after
    /// the link went down, and then looks at the count. With a fence in between, one of the two sees the other.
    fn take_if_unused(&self, state: &LinkState) -> Option<Box<dyn Send>>;
}

/// State of a link that its lane and its connector share.
#[derive(Debug, Default)]
pub(crate) struct LinkState {
    /// 0 while up, else a [`LinkEnd`].
    end: AtomicU8,
    /// Frames published and unanswered. Of a link of a GPU client: calls whose kernels may use its slots.
    pub in_flight: AtomicU32,
    /// Set once anything has come over the link.
    carried: AtomicBool,
    /// Notified once, when `carried` is set.
    first_carried: Notify,
    /// Slots in GPU memory, of a GPU client's link.
    device: Option<Arc<dyn DeviceLink>>,
}

impl LinkState {
    pub fn new(device: Option<Arc<dyn DeviceLink>>) -> Self {
        Self { device, ..Self::default() }
    }

    /// Slots in GPU memory, of a GPU client's link.
    pub fn device(&self) -> Option<&Arc<dyn DeviceLink>> {
        self.device.as_ref()
    }

    /// Notes that something came over the link: its transport works.
    pub fn note_carried(&self) {
        if !self.has_carried() && !self.carried.swap(true, Ordering::Relaxed) {
            self.first_carried.notify_one();
        }
    }

    /// Completes once, when the first bytes come over the link. Only the link's connector may wait.
    pub async fn carried(&self) {
        self.first_carried.notified().await;
    }

    /// Returns true if anything ever came over the link.
    pub fn has_carried(&self) -> bool {
        self.carried.load(Ordering::Relaxed)
    }

    /// Ends the link, unless it has ended before. The first reason stays.
    pub fn set_down(&self, reason: LinkEnd) {
        let _ = self.end.compare_exchange(0, reason as u8, Ordering::AcqRel, Ordering::Relaxed);
        // Pairs with the fence in `enter`: see `DeviceLink::take_if_unused`.
        fence(Ordering::SeqCst);
        if let Some(device) = &self.device {
            device.link_down();
        }
    }

    /// Counts a call whose kernels will use the link's slots. Returns false, and does not count it, when the link
    /// is down.
    #[cfg(feature = "device")]
    pub fn enter(&self) -> bool {
        self.in_flight.fetch_add(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        if self.down().is_some() {
            self.in_flight.fetch_sub(1, Ordering::SeqCst);
            return false;
        }
        true
    }

    /// The call's kernels have ended.
    #[cfg(feature = "device")]
    pub fn exit(&self) {
        self.in_flight.fetch_sub(1, Ordering::SeqCst);
    }

    /// Why the link is down; `None` while it is up.
    pub fn down(&self) -> Option<LinkEnd> {
        match self.end.load(Ordering::Acquire) {
            0 => None,
            code if code == LinkEnd::Closed as u8 => Some(LinkEnd::Closed),
            _ => Some(LinkEnd::Left),
        }
    }
}

/// Why the connection of a link is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum LinkEnd {
    /// The server closed it, or its process is gone.
    Closed = 1,
    /// This side closed it because the server left the placement.
    Left = 2,
}

impl LinkEnd {
    pub const fn reason(self) -> FailReason {
        match self {
            Self::Closed => FailReason::Closed,
            Self::Left => FailReason::Left,
        }
    }
}

/// A frame that was published and not yet answered.
#[derive(Debug, Clone, Copy)]
pub(crate) struct OpenFrame {
    pub sequence: u64,
    pub frame_idx: u32,
    pub layer: u32,
    pub num_tokens: u32,
    /// Frame of the lane's current call, or [`ABANDONED`].
    pub frame: u32,
    pub published_at: Instant,
}

/// Marks a frame of an abandoned call. Its answer is dropped.
pub(crate) const ABANDONED: u32 = u32::MAX;

/// A link on its way back from its lane to its connector.
#[derive(Debug)]
pub(crate) struct LinkReturn {
    /// Lives until the connection is closed. Until then a late write of the peer lands in memory that is not
    /// read any more; afterwards the peer cannot write, and the memory is freed.
    pub channel: BackgroundDrop<Channel<AnyEndpoint>>,
    pub reason: FailReason,
    /// Set where no place was free for the link: how many places had become free by then.
    pub places_freed: Option<u64>,
}

/// One slot pair to one server, owned by one lane.
#[derive(Debug)]
pub(crate) struct Link {
    pub server: Arc<Server>,
    pub generation: u32,
    /// Number of the server in traces.
    pub server_key: u64,
    pub channel: BackgroundDrop<Channel<AnyEndpoint>>,
    pub state: Arc<LinkState>,
    pub liveness: Arc<Liveness>,
    pub open: Vec<OpenFrame>,
    /// Frames of the current call that wait for credit.
    pub queue: VecDeque<u32>,
    /// Last value of the peer's activity counter, and when it last changed.
    pub activity: u64,
    pub last_life: Instant,
    /// Time at which the last frame was published or answered, or the first one began to wait.
    pub last_step: Instant,
    /// A frame is late and was sent to another replica too, and no answer has come since.
    is_overdue: bool,
    /// Answers that were read and whose frames have not been returned to the server yet.
    num_unreturned: u32,
    retire: oneshot::Sender<LinkReturn>,
}

impl Link {
    pub fn new(
        server: Arc<Server>,
        (generation, server_key): (u32, u64),
        channel: BackgroundDrop<Channel<AnyEndpoint>>,
        state: Arc<LinkState>,
        liveness: Arc<Liveness>,
        retire: oneshot::Sender<LinkReturn>,
    ) -> Self {
        let num_frames = channel.layout().num_frames();
        let now = Instant::now();
        Self {
            server,
            generation,
            server_key,
            activity: channel.peer_activity(),
            channel,
            state,
            liveness,
            // A server takes frames out of the ring before it answers them, so more than a ring's worth can be open.
            open: Vec::with_capacity(4 * num_frames),
            queue: VecDeque::with_capacity(4 * num_frames),
            last_life: now,
            last_step: now,
            is_overdue: false,
            num_unreturned: 0,
            retire,
        }
    }

    /// Returns true while frames are outstanding or wait for credit.
    pub fn is_active(&self) -> bool {
        !self.open.is_empty() || !self.queue.is_empty()
    }

    /// Ends the link if its connection is closed, and returns true then. Reads one word, which the connection's
    /// own thread writes. The connector learns of the close too, but its thread must be scheduled first.
    pub fn note_closed(&self) -> bool {
        match self.liveness.closed_now() {
            None => return false,
            Some(CloseReason::Local) => self.state.set_down(LinkEnd::Left),
            Some(_) => self.state.set_down(LinkEnd::Closed),
        }
        true
    }

    /// As [`note_closed`](Self::note_closed), but sees an end that the kernel knows of already. Waits for that for
    /// `limit` at most.
    pub fn look_closed(&self, limit: Duration) -> bool {
        let _ = self.liveness.look(limit);
        self.note_closed()
    }

    /// Returns true when an answer is there, credit for a waiting frame, or a fault.
    pub fn has_work(&self) -> bool {
        self.channel.has_frame()
            || (!self.queue.is_empty() && self.channel.has_news())
            || self.channel.health().is_err()
    }

    /// Reads the peer's activity counter and notes a sign of life if it has changed.
    pub fn observe_life(&mut self, now: Instant) {
        let activity = self.channel.peer_activity();
        if activity != self.activity {
            self.activity = activity;
            self.last_life = now;
            self.state.note_carried();
            // Written only on a change: all lanes share the cache line.
            if self.server.is_silent.load(Ordering::Relaxed) {
                self.server.is_silent.store(false, Ordering::Relaxed);
            }
        }
    }

    /// Queues a frame of the current call for credit.
    pub fn enqueue(&mut self, frame: u32, now: Instant) {
        if !self.is_active() {
            // An idle server may be silent, so both clocks start with the first frame.
            (self.last_life, self.last_step) = (now, now);
            self.activity = self.channel.peer_activity();
        }
        self.queue.push_back(frame);
    }

    /// Moves the first queued frame to the open ones: it was published.
    pub fn push_open(&mut self, frame: OpenFrame) {
        self.queue.pop_front();
        self.open.push(frame);
        self.last_step = frame.published_at;
        self.state.in_flight.store(self.open.len() as u32, Ordering::Relaxed);
    }

    /// Removes an open frame: it was answered.
    pub fn remove_open(&mut self, position: usize, now: Instant) {
        self.open.remove(position);
        self.end_overdue();
        self.state.note_carried();
        self.last_step = now;
        self.state.in_flight.store(self.open.len() as u32, Ordering::Relaxed);
    }

    /// Notes that a frame is late and was sent to another replica too.
    pub fn note_overdue(&mut self) {
        if !std::mem::replace(&mut self.is_overdue, true) {
            self.server.pace.link_overdue();
        }
    }

    fn end_overdue(&mut self) {
        if std::mem::take(&mut self.is_overdue) {
            self.server.pace.link_answered();
        }
    }

    /// Returns the frame of an answer that was read to the server. The last one of a call waits for the next
    /// request, if the ring has another frame: on its own it would wake a server that has nothing to do.
    pub fn return_frame(&mut self) -> Result<(), ChannelError> {
        self.num_unreturned += 1;
        if self.is_active() || self.channel.layout().num_frames() == 1 {
            return self.return_frames();
        }
        while self.num_unreturned > 1 {
            self.channel.release()?;
            self.num_unreturned -= 1;
        }
        Ok(())
    }

    /// Returns the frames of all answers that were read.
    pub fn return_frames(&mut self) -> Result<(), ChannelError> {
        while self.num_unreturned > 0 {
            self.channel.release()?;
            self.num_unreturned -= 1;
        }
        Ok(())
    }

    /// Hands the link back to its connector, which closes the connection and then frees the slots.
    pub fn retire(self: Box<Self>, reason: FailReason) {
        self.hand_back(reason, None);
    }

    /// As [`retire`](Self::retire), for a lane without a free place: the connector connects again once more than
    /// `freed` places have become free.
    #[cfg(feature = "device")]
    pub fn reject(self: Box<Self>, freed: u64) {
        self.hand_back(FailReason::Left, Some(freed));
    }

    fn hand_back(mut self: Box<Self>, reason: FailReason, places_freed: Option<u64>) {
        self.end_overdue();
        let Self { channel, retire, .. } = *self;
        // Fails when the connector is gone. Then the connection is gone too, and a background thread frees the slots.
        let _ = retire.send(LinkReturn { channel, reason, places_freed });
    }
}
