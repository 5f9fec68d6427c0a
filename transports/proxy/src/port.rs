//! One peer as its thread sees it: takes commands, checks them, posts them, recycles finished ones.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use p2p_core::endpoint::{Marks, Transport};
use p2p_core::region::{LocalRange, RemoteRange, SlotKey};
use p2p_core::wait::Driver;
use p2p_core::{PostError, QuietError, Region};

use crate::abi::MAX_SOURCES;
use crate::backoff::StallTimer;
use crate::command::{BadCommand, Command, ERROR_CLOSED, Opcode, error_word};
use crate::failure::{Cause, Failure, Shared};
use crate::lane::{Lanes, Reader};
use crate::relay::{RelaySender, RelayStatus};

/// Result of a turn of a port.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Turn {
    /// Commands taken.
    pub(crate) taken: u64,
    /// Bytes put or got by them.
    pub(crate) bytes: u64,
    /// Commands recycled.
    pub(crate) recycled: u64,
    /// Pieces of commands given to the relay.
    pub(crate) pieces: u64,
}

/// One peer.
#[derive(Debug)]
pub(crate) struct Port<E> {
    endpoint: E,
    sources: Vec<LocalRange>,
    window_bytes: u64,
    /// The words that signals and adds have set, by offset / 8: this side is their only writer.
    words: Box<[u64]>,
    lanes: Vec<Lane>,
    relay: Option<RelaySender>,
    shared: Arc<Shared>,
    /// Operations given to the endpoint, operations that no longer use local memory, and operations
    /// that have arrived.
    issued: u64,
    settled: u64,
    quieted: u64,
    /// Marks of the endpoint, and how many operations were issued before each.
    marks: VecDeque<(u64, u64)>,
    /// Whether a lane waits for a quiet.
    wants_quiet: bool,
    is_closed: bool,
    /// Time since which service is to end.
    closing: Option<CloseState>,
    /// While operations are under way: time since the last one was over.
    stall_timer: Option<StallTimer>,
    stall_limit: Duration,
    has_driver: bool,
    num_turns: u32,
}

/// State of closing: the commands posted before that are still taken.
#[derive(Debug)]
struct CloseState {
    deadline: Instant,
    /// Largest number of commands taken from a kernel that keeps posting: the capacity of the lanes.
    num_left: u64,
}

#[derive(Debug)]
struct Lane {
    reader: Reader,
    /// Taken commands that are not over, in order.
    under_way: VecDeque<Batch>,
    /// A command that found no room and is to be taken next, and, of a put to the relay, the first bytes, which
    /// the relay has. The present content of the lane does not matter any more.
    begun: Option<(Command, u32)>,
    recycled: u64,
    is_closed: bool,
}

/// Commands of a lane that are over together.
#[derive(Debug, Clone, Copy)]
struct Batch {
    /// Number behind the last.
    end: u64,
    /// Operations that must be settled.
    issued: u64,
    /// Whether they must have arrived.
    is_quiet: bool,
    /// Tasks of the relay that must be done.
    tasks: u64,
}

impl Lane {
    /// Whether commands are under way, or a part of one.
    fn is_busy(&self) -> bool {
        !self.under_way.is_empty() || self.begun.is_some()
    }

    /// Whether it waits for a fence.
    fn is_fencing(&self) -> bool {
        self.begun.as_ref().is_some_and(|(command, _)| command.opcode == Opcode::Fence)
    }
}

impl<E: Transport<RemoteKey = SlotKey>> Port<E> {
    pub(crate) fn new(
        endpoint: E,
        lanes: &Lanes,
        window_bytes: u64,
        relay: Option<RelaySender>,
        shared: Arc<Shared>,
        stall_limit: Duration,
    ) -> Self {
        let config = lanes.config();
        let lane = |lane| Lane {
            reader: lanes.reader(lane),
            under_way: VecDeque::with_capacity(config.depth as usize),
            begun: None,
            recycled: 0,
            is_closed: false,
        };
        Self {
            has_driver: endpoint.driver().is_some(),
            endpoint,
            sources: Vec::new(),
            window_bytes,
            // Zeroed pages, which cost nothing until a word on them is set.
            words: vec![0; window_bytes.div_ceil(8) as usize].into_boxed_slice(),
            lanes: (0..config.num_lanes).map(lane).collect(),
            relay,
            shared,
            issued: 0,
            settled: 0,
            quieted: 0,
            marks: VecDeque::with_capacity(MAX_MARKS),
            wants_quiet: false,
            is_closed: false,
            closing: None,
            stall_timer: None,
            stall_limit,
            num_turns: 0,
        }
    }

    /// Registers a region with the transport. Returns its number.
    pub(crate) fn register(&mut self, region: &Region) -> Result<u16, PostError> {
        let refused =
            |detail: &str| PostError::Register { bytes: region.len(), detail: detail.to_owned() };
        if self.sources.len() >= MAX_SOURCES {
            return Err(refused("2048 regions are registered with this peer, which is the limit"));
        }
        let range = region.range(0, region.len()).ok_or_else(|| refused("an empty region"))?;
        self.endpoint.register(region)?;
        self.sources.push(range);
        Ok((self.sources.len() - 1) as u16)
    }

    /// As [`register`](Self::register), for memory that no command may name.
    pub(crate) fn register_own(&mut self, region: &Region) -> Result<(), PostError> {
        self.endpoint.register(region)
    }

    /// Driver of the endpoint that a thread must run.
    pub(crate) fn driver(&self) -> Option<Arc<dyn Driver>> {
        self.endpoint.driver()
    }

    /// Whether a turn would find work.
    pub(crate) fn has_work(&self) -> bool {
        self.is_busy() || self.has_commands()
    }

    fn has_commands(&self) -> bool {
        let has_one = |lane: &Lane| !lane.is_closed && !matches!(lane.reader.peek(), Ok(None));
        !self.is_closed && self.lanes.iter().any(has_one)
    }

    /// Whether commands are under way.
    pub(crate) fn is_busy(&self) -> bool {
        !self.is_closed && self.lanes.iter().any(Lane::is_busy)
    }

    /// Takes up to `batch` commands of every lane, posts them, and recycles finished ones.
    pub(crate) fn turn(&mut self, batch: usize) -> Turn {
        let mut turn = Turn::default();
        if self.is_closed {
            return turn;
        }
        // An error of taking does not matter here: a batch that was begun is posted.
        self.endpoint.begin_batch();
        self.take_from_lanes(batch, &mut turn);
        let flushed = self.endpoint.flush();
        if self.is_closed {
            return turn;
        }
        if let Err(error) = flushed {
            self.fail(self.first_busy(), Cause::Transport(error));
            return turn;
        }
        self.num_turns = self.num_turns.wrapping_add(1);
        if self.is_busy() {
            self.poll_endpoint(&mut turn);
        } else if self.num_turns.is_multiple_of(TURNS_PER_HEALTH) && self.endpoint.health().is_err()
        {
            // No caller waits: the next command meets the failure.
            self.stall_timer = None;
        }
        turn
    }

    /// Takes commands of every lane, and gives them to the endpoint and the relay, until the peer is lost.
    fn take_from_lanes(&mut self, batch: usize, turn: &mut Turn) {
        // Each lane comes first in its turn: where there is room for few commands, the others get some, too. A
        // fence that waits for the peer comes before the posts of other lanes, or it might never see all
        // operations done.
        let (num_lanes, first) = (self.lanes.len(), self.num_turns as usize);
        let fencing = self.lanes.iter().position(Lane::is_fencing);
        for nth in 0..num_lanes {
            let idx = (first + nth) % num_lanes;
            if fencing.is_some_and(|fencing| fencing != idx) {
                continue;
            }
            self.take(idx, batch, turn);
            if self.is_closed {
                return;
            }
        }
        if let Some(relay) = &mut self.relay
            && let Err(error) = relay.publish(&mut self.endpoint)
        {
            self.fail(self.first_busy(), Cause::Transport(error));
        }
    }

    /// Begins to end service. The following turns execute the commands posted before, within bounds, as an
    /// endpoint without a proxy would have done immediately. Operations under way continue.
    pub(crate) fn begin_close(&mut self) {
        let num_left = self.lanes.iter().map(|lane| lane.under_way.capacity() as u64).sum();
        let deadline = Instant::now() + CLOSE_LIMIT;
        self.closing.get_or_insert(CloseState { deadline, num_left });
    }

    /// Ends service if it is to end and the time has come, behind a turn that took `num_taken` commands. Returns
    /// whether it has ended.
    pub(crate) fn try_close(&mut self, num_taken: u64) -> bool {
        let Some(closing) = &mut self.closing else { return false };
        closing.num_left = closing.num_left.saturating_sub(num_taken);
        let is_time = closing.num_left == 0 || Instant::now() >= closing.deadline;
        let is_unsaid = self.relay.as_ref().is_some_and(RelaySender::has_unpublished);
        if !is_time && (self.has_commands() || is_unsaid) {
            return false;
        }
        self.is_closed = true;
        for lane in &self.lanes {
            lane.reader.fail(error_word(ERROR_CLOSED, 0, lane.reader.next()));
        }
        true
    }

    /// Whether service has ended as requested.
    pub(crate) const fn has_closed(&self) -> bool {
        self.is_closed && self.closing.is_some()
    }

    fn take(&mut self, idx: usize, batch: usize, turn: &mut Turn) {
        let mut num_taken = 0;
        while num_taken < batch && !self.lanes[idx].is_closed {
            let lane = &mut self.lanes[idx];
            let (command, mut begun) = match lane.begun.take() {
                Some(begun) => begun,
                None => match lane.reader.peek() {
                    Ok(None) => break,
                    Ok(Some(command)) => (command, 0),
                    Err(bad) => return self.fail(idx, bad.into()),
                },
            };
            let before = self.issued;
            match self.carry_out(&command, &mut begun) {
                Ok(true) => {}
                // No room: retried in the next turn.
                Ok(false) => {
                    turn.pieces += self.issued - before;
                    self.lanes[idx].begun = Some((command, begun));
                    break;
                }
                Err(cause) => return self.fail(idx, cause),
            }
            let is_quiet = command.opcode == Opcode::Quiet;
            self.wants_quiet |= is_quiet;
            let tasks = self.relay.as_ref().map_or(0, RelaySender::issued);
            let lane = &mut self.lanes[idx];
            lane.reader.advance();
            let end = lane.reader.next();
            match lane
                .under_way
                .back_mut()
                .filter(|last| num_taken > 0 && !last.is_quiet && !is_quiet)
            {
                Some(last) => *last = Batch { end, issued: self.issued, is_quiet, tasks },
                None => {
                    lane.under_way.push_back(Batch { end, issued: self.issued, is_quiet, tasks });
                }
            }
            num_taken += 1;
            turn.taken += 1;
            turn.bytes += u64::from(command.num_bytes);
        }
    }

    /// Gives a command to the endpoint or the relay, which may have its first bytes already. Returns `false` if it
    /// was not possible in this turn, or only for a part.
    fn carry_out(&mut self, command: &Command, begun: &mut u32) -> Result<bool, Cause> {
        let Command { opcode, window, source, offset, num_bytes, source_offset, value } = *command;
        let num_windows = 1 + self.relay.as_ref().map_or(0, RelaySender::num_targets);
        if usize::from(window) >= num_windows {
            return Err(BadCommand::Window { window, num_windows }.into());
        }
        let remote = |num_bytes: u32, window_bytes: u64| {
            if u64::from(offset) + u64::from(num_bytes) > window_bytes {
                return Err(BadCommand::RemoteRange { offset, num_bytes, window_bytes });
            }
            Ok(RemoteRange { key: SlotKey, offset: offset as usize, len: num_bytes as usize })
        };
        let word = |window_bytes| {
            if offset % 8 == 0 {
                remote(8, window_bytes)
            } else {
                Err(BadCommand::Misaligned { offset })
            }
        };
        let local = || {
            let num_sources = self.sources.len();
            let range = self.sources.get(usize::from(source));
            let range = range.ok_or(BadCommand::Source { source_idx: source, num_sources })?;
            range.sub(source_offset as usize, num_bytes as usize).ok_or(BadCommand::SourceRange {
                source_idx: source,
                offset: source_offset,
                num_bytes,
                source_bytes: range.len() as u64,
            })
        };
        if window != 0
            && let Some(relay) = &mut self.relay
        {
            let (bytes, former) = (relay.target_bytes(window), relay.issued());
            let status = match opcode {
                Opcode::Put => {
                    remote(num_bytes, bytes)?;
                    relay.put(&mut self.endpoint, window, offset, &local()?, begun)?
                }
                Opcode::Add | Opcode::Signal => {
                    word(bytes)?;
                    relay.word(&mut self.endpoint, window, offset, opcode == Opcode::Add, value)?
                }
                Opcode::Fence => relay.fence(&mut self.endpoint, window)?,
                Opcode::Quiet | Opcode::Nop => RelayStatus::Accepted,
                Opcode::Get | Opcode::Wake => {
                    return Err(BadCommand::Unsupported { window, opcode }.into());
                }
            };
            // Each piece uses the source until it is settled.
            self.issued +=
                (relay.issued() - former).max(u64::from(status == RelayStatus::Accepted));
            return Ok(status == RelayStatus::Accepted);
        }
        let bytes = self.window_bytes;
        let post = |source| Cause::Post { opcode, source };
        // Other peers do not wait for this peer's process.
        if matches!(opcode, Opcode::Put | Opcode::Add | Opcode::Signal) && !self.endpoint.has_room()
        {
            return Ok(false);
        }
        match opcode {
            Opcode::Put => {
                let (dst, src) = (remote(num_bytes, bytes)?, local()?);
                // SAFETY: the poster leaves the source unwritten until the command is over, which it is only once
                // the endpoint is settled. The region was registered, and `sources` keeps it mapped. If a GPU
                // writes there nonetheless, only the put data is affected.
                unsafe { self.endpoint.put(dst, src) }.map_err(post)?;
            }
            Opcode::Get => {
                let (src, dst) = (remote(num_bytes, bytes)?, local()?);
                // SAFETY: as above.
                unsafe { self.endpoint.get(dst, src) }.map_err(post)?;
            }
            Opcode::Add | Opcode::Signal => {
                let dst = word(bytes)?;
                let last = &mut self.words[offset as usize / 8];
                let (added, new) = match opcode {
                    Opcode::Add => (value, last.wrapping_add(value)),
                    _ => (value.wrapping_sub(*last), value),
                };
                *last = new;
                self.endpoint.add_flag(dst, added).map_err(post)?;
            }
            Opcode::Fence => {
                if !self.endpoint.try_fence().map_err(post)? {
                    return Ok(false);
                }
            }
            Opcode::Wake => {
                word(bytes)?;
                self.endpoint.wake(SlotKey, offset as usize).map_err(post)?;
            }
            Opcode::Quiet | Opcode::Nop => {}
        }
        self.issued += 1;
        Ok(true)
    }

    /// Finds finished commands, and returns their cells.
    fn poll_endpoint(&mut self, turn: &mut Turn) {
        if self.has_driver
            && let Some(driver) = self.endpoint.driver()
        {
            driver.drive();
        }
        let marks = if self.quieted < self.issued { self.endpoint.marks() } else { Ok(None) };
        let result = if let Some(marks) = marks.transpose() {
            marks.map(|marks| self.advance(marks)).map_err(Cause::Transport)
        } else if self.wants_quiet && self.quieted < self.issued {
            match self.endpoint.quiet(Instant::now()) {
                Ok(()) => {
                    (self.settled, self.quieted) = (self.issued, self.issued);
                    self.wants_quiet = false;
                    Ok(())
                }
                Err(QuietError::Deadline { .. }) => Ok(()),
                Err(QuietError::Post(error)) => Err(Cause::Transport(error)),
            }
        } else if self.settled < self.issued {
            match self.endpoint.is_settled() {
                Ok(is_settled) => {
                    self.settled = if is_settled { self.issued } else { self.settled };
                    Ok(())
                }
                Err(error) => Err(Cause::Transport(error)),
            }
        } else {
            self.endpoint.health().map_err(Cause::Transport)
        };
        let former = self.relay.as_ref().map_or(0, RelaySender::done);
        let result =
            result.and_then(|()| self.relay.as_mut().map_or(Ok(0), RelaySender::poll_done));
        let done = match result {
            Ok(done) => done,
            Err(cause) => return self.fail(self.first_busy(), cause),
        };
        for lane in &mut self.lanes {
            let mut end = lane.recycled;
            while let Some(batch) = lane.under_way.front()
                && batch.issued <= self.settled
                && (!batch.is_quiet || batch.issued <= self.quieted)
                && batch.tasks <= done
            {
                end = batch.end;
                lane.under_way.pop_front();
            }
            if end > lane.recycled {
                turn.recycled += end - lane.recycled;
                lane.recycled = end;
                lane.reader.recycle(end);
            }
        }
        self.watch(turn.recycled > 0 || done > former);
    }

    /// Reads the endpoint's progress: earlier operations become finished while more are issued, without a moment
    /// at which nothing is under way.
    fn advance(&mut self, marks: Marks) {
        let last = self.marks.back().map_or(self.quieted, |(_, issued)| *issued);
        if last < self.issued && self.marks.len() < MAX_MARKS {
            self.marks.push_back((marks.issued, self.issued));
        }
        while let Some((mark, issued)) = self.marks.front().copied()
            && mark <= marks.arrived
        {
            self.quieted = self.quieted.max(issued);
            self.marks.pop_front();
        }
        self.settled = self.settled.max(self.quieted);
        self.wants_quiet &= self.quieted < self.issued;
    }

    /// Gives up a peer without progress.
    fn watch(&mut self, has_moved: bool) {
        if !self.is_busy() {
            self.stall_timer = None;
            return;
        }
        if has_moved || self.stall_timer.is_none() {
            self.stall_timer = Some(StallTimer::new());
            return;
        }
        let (limit, is_due) = (self.stall_limit, self.num_turns.is_multiple_of(TURNS_PER_CLOCK));
        if let Some(stall_timer) = &mut self.stall_timer
            && is_due
            && stall_timer.count(limit / LOOKS_PER_LIMIT) > limit
        {
            self.fail(self.first_busy(), Cause::Stalled { limit_ms: limit.as_millis() as u64 });
        }
    }

    /// The first lane with commands under way.
    fn first_busy(&self) -> usize {
        self.lanes.iter().position(Lane::is_busy).unwrap_or(0)
    }

    fn fail(&mut self, idx: usize, cause: Cause) {
        let (code, is_of_lane) = (cause.code(), cause.is_of_lane());
        let lane = &mut self.lanes[idx];
        lane.is_closed |= is_of_lane;
        self.is_closed |= !is_of_lane;
        // The command at fault, or the first that is not over.
        let (opcode, index) = match cause {
            Cause::Command(_) | Cause::Post { .. } => {
                (lane.reader.opcode_bits(), lane.reader.next())
            }
            _ => (0, lane.recycled),
        };
        // Before the words: a reader that sees one of them finds the report.
        self.shared.report(Failure { peer: self.shared.peer, lane: idx as u32, index, cause });
        self.lanes[idx].reader.fail(error_word(code, opcode, index));
        if !is_of_lane {
            for lane in &self.lanes {
                lane.reader.fail(error_word(code, 0, lane.recycled));
            }
        }
    }
}

impl<E> Drop for Port<E> {
    fn drop(&mut self) {
        // Has no effect on lanes that were closed before: the first reason stays. Only a thread that panics gets
        // here.
        for lane in &self.lanes {
            lane.reader.fail(error_word(ERROR_CLOSED, 0, lane.reader.next()));
        }
    }
}

/// Limit of kept marks, one for each poll.
const MAX_MARKS: usize = 64;
const TURNS_PER_HEALTH: u32 = 64;
const TURNS_PER_CLOCK: u32 = 64;
/// Smallest number of polls that must see a stall.
const LOOKS_PER_LIMIT: u32 = 16;
/// Time limit of closing a peer.
const CLOSE_LIMIT: Duration = Duration::from_millis(100);
