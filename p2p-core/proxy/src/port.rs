//! One peer as its thread sees it: take commands, check them, post them, recycle what is over.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use p2p_core::endpoint::Endpoint;
use p2p_core::region::{LocalRange, RemoteRange, SlotKey};
use p2p_core::{PostError, QuietError, Region};

use crate::abi::MAX_SOURCES;
use crate::command::{BadCommand, Command, ERROR_CLOSED, Opcode, error_word};
use crate::failure::{Cause, Failure};
use crate::lane::{Lanes, Reader};
use crate::relay::{RelaySender, Sent};

/// What a peer's thread and its owner share.
#[derive(Debug)]
pub(crate) struct Shared {
    /// For reports.
    pub(crate) peer: u32,
    failures: Mutex<Vec<Failure>>,
    has_failed: AtomicBool,
}

impl Shared {
    pub(crate) const fn new(peer: u32) -> Self {
        Self { peer, failures: Mutex::new(Vec::new()), has_failed: AtomicBool::new(false) }
    }

    /// Whether anything was reported.
    pub(crate) fn has_failed(&self) -> bool {
        self.has_failed.load(Ordering::Acquire)
    }

    pub(crate) fn take(&self) -> Vec<Failure> {
        std::mem::take(&mut self.failures.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn report(&self, failure: Failure) {
        tracing::warn!(%failure, "commands are refused");
        let mut failures = self.failures.lock().unwrap_or_else(PoisonError::into_inner);
        if failures.len() < MAX_FAILURES {
            failures.push(failure);
        }
        self.has_failed.store(true, Ordering::Release);
    }
}

/// What a turn of a port came to.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Turn {
    /// Commands taken.
    pub(crate) taken: u64,
    /// Of those, bytes put or got.
    pub(crate) bytes: u64,
    /// Commands recycled.
    pub(crate) recycled: u64,
}

/// One peer.
#[derive(Debug)]
pub(crate) struct Port<E> {
    endpoint: E,
    sources: Vec<LocalRange>,
    window_bytes: u64,
    /// The words that signals and adds have set, by offset / 8: only this side writes them.
    words: Box<[u64]>,
    lanes: Vec<Lane>,
    relay: Option<RelaySender>,
    shared: Arc<Shared>,
    /// Operations given to the endpoint, those that use no memory of this side any more, and those that
    /// have arrived.
    issued: u64,
    settled: u64,
    quieted: u64,
    /// Whether a lane waits for a quiet.
    wants_quiet: bool,
    is_closed: bool,
    /// When something was over last, while anything is under way.
    busy_since: Option<Instant>,
    stall_limit: Duration,
    has_driver: bool,
    num_turns: u32,
}

#[derive(Debug)]
struct Lane {
    reader: Reader,
    /// Taken and not over, in order.
    under_way: VecDeque<Batch>,
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

impl<E: Endpoint<RemoteKey = SlotKey>> Port<E> {
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
            wants_quiet: false,
            is_closed: false,
            busy_since: None,
            stall_limit,
            num_turns: 0,
        }
    }

    /// Makes a region known to the transport. Gives its number.
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

    /// Whether a turn would find something to do.
    pub(crate) fn has_work(&self) -> bool {
        self.is_busy() || self.has_commands()
    }

    fn has_commands(&self) -> bool {
        let has_one = |lane: &Lane| !lane.is_closed && !matches!(lane.reader.peek(), Ok(None));
        !self.is_closed && self.lanes.iter().any(has_one)
    }

    /// Whether commands are under way.
    pub(crate) fn is_busy(&self) -> bool {
        !self.is_closed && self.lanes.iter().any(|lane| !lane.under_way.is_empty())
    }

    /// Takes up to `batch` commands of every lane, posts them, and recycles what is over.
    pub(crate) fn turn(&mut self, batch: usize) -> Turn {
        let mut turn = Turn::default();
        if self.is_closed {
            return turn;
        }
        for idx in 0..self.lanes.len() {
            self.take(idx, batch, &mut turn);
            if self.is_closed {
                return turn;
            }
        }
        if let Some(relay) = &mut self.relay
            && let Err(error) = relay.publish(&mut self.endpoint)
        {
            self.fail(0, Cause::Transport(error));
            return turn;
        }
        self.num_turns = self.num_turns.wrapping_add(1);
        if self.is_busy() {
            self.look(&mut turn);
        } else if self.num_turns.is_multiple_of(TURNS_PER_HEALTH) && self.endpoint.health().is_err()
        {
            // Nobody waits for anything: the next command meets the failure.
            self.busy_since = None;
        }
        turn
    }

    /// Ends service: what was posted before is posted on, within bounds, as an endpoint without a proxy
    /// would have done at once; what is under way stays so.
    pub(crate) fn close(&mut self, batch: usize) {
        let deadline = Instant::now() + CLOSE_LIMIT;
        let most: u64 = self.lanes.iter().map(|lane| lane.under_way.capacity() as u64).sum();
        let mut num_taken = 0;
        while self.has_commands() && num_taken < most && Instant::now() < deadline {
            let turn = self.turn(batch);
            num_taken += turn.taken;
            if turn.taken == 0 {
                std::thread::yield_now();
            }
        }
        self.is_closed = true;
        for lane in &self.lanes {
            lane.reader.fail(error_word(ERROR_CLOSED, 0, lane.reader.next()));
        }
    }

    fn take(&mut self, idx: usize, batch: usize, turn: &mut Turn) {
        let mut num_taken = 0;
        while num_taken < batch && !self.lanes[idx].is_closed {
            let command = match self.lanes[idx].reader.peek() {
                Ok(None) => break,
                Ok(Some(command)) => command,
                Err(bad) => return self.fail(idx, bad.into()),
            };
            match self.carry_out(&command) {
                Ok(true) => {}
                // No room: it is looked at again in the next turn.
                Ok(false) => break,
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

    /// Gives a command to the endpoint or the relay. `false`: not now.
    fn carry_out(&mut self, command: &Command) -> Result<bool, Cause> {
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
            let bytes = relay.target_bytes(window);
            let sent = match opcode {
                Opcode::Put => {
                    remote(num_bytes, bytes)?;
                    relay.put(&mut self.endpoint, window, offset, local()?)?
                }
                Opcode::Add | Opcode::Signal => {
                    word(bytes)?;
                    relay.word(&mut self.endpoint, window, offset, opcode == Opcode::Add, value)?
                }
                Opcode::Quiet | Opcode::Fence | Opcode::Nop => Sent::Yes,
                Opcode::Get | Opcode::Wake => {
                    return Err(BadCommand::Unsupported { window, opcode }.into());
                }
            };
            self.issued += u64::from(sent == Sent::Yes);
            return Ok(sent == Sent::Yes);
        }
        let bytes = self.window_bytes;
        let post = |source| Cause::Post { opcode, source };
        match opcode {
            Opcode::Put => {
                let (dst, src) = (remote(num_bytes, bytes)?, local()?);
                // SAFETY: whoever posts leaves the source unwritten until the command is over, which it
                // is only once the endpoint is settled; the region was registered, and `sources` keeps
                // it mapped. What a GPU writes there nonetheless only spoils what is put.
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
            Opcode::Fence => self.endpoint.fence().map_err(post)?,
            Opcode::Wake => {
                word(bytes)?;
                self.endpoint.wake(SlotKey, offset as usize).map_err(post)?;
            }
            Opcode::Quiet | Opcode::Nop => {}
        }
        self.issued += 1;
        Ok(true)
    }

    /// Finds out what is over, and gives it back.
    fn look(&mut self, turn: &mut Turn) {
        if self.has_driver
            && let Some(driver) = self.endpoint.driver()
        {
            driver.drive();
        }
        let result = if self.wants_quiet && self.quieted < self.issued {
            match self.endpoint.quiet(Instant::now()) {
                Ok(()) => {
                    (self.settled, self.quieted) = (self.issued, self.issued);
                    self.wants_quiet = false;
                    Ok(())
                }
                Err(QuietError::Deadline { .. }) => Ok(()),
                Err(QuietError::Post(error)) => Err(Cause::Transport(error)),
                Err(error) => {
                    let (code, detail) = (0, error.to_string());
                    Err(Cause::Transport(PostError::Transport { op: "quiet", code, detail }))
                }
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
        let result = result.and_then(|()| {
            self.relay.as_mut().map_or(Ok(0), |relay| relay.look().map_err(Cause::from))
        });
        let done = match result {
            Ok(done) => done,
            Err(cause) => return self.fail(0, cause),
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
        self.watch(turn.recycled > 0);
    }

    /// Gives a peer up at which nothing moves.
    fn watch(&mut self, has_moved: bool) {
        if !self.is_busy() {
            self.busy_since = None;
        } else if has_moved || self.busy_since.is_none() {
            self.busy_since = Some(Instant::now());
        } else if self.num_turns.is_multiple_of(TURNS_PER_CLOCK)
            && self.busy_since.is_some_and(|since| since.elapsed() > self.stall_limit)
        {
            let lane = self.lanes.iter().position(|lane| !lane.under_way.is_empty()).unwrap_or(0);
            let limit_ms = self.stall_limit.as_millis() as u64;
            self.fail(lane, Cause::Stalled { limit_ms });
        }
    }

    fn fail(&mut self, idx: usize, cause: Cause) {
        let lane = &mut self.lanes[idx];
        let index = match cause {
            Cause::Command(_) | Cause::Post { .. } => lane.reader.next(),
            _ => lane.recycled,
        };
        let word = error_word(cause.code(), lane.reader.opcode_bits(), index);
        if cause.is_of_lane() {
            lane.is_closed = true;
            lane.reader.fail(word);
        } else {
            self.is_closed = true;
            self.lanes.iter().for_each(|lane| lane.reader.fail(word));
        }
        self.shared.report(Failure { peer: self.shared.peer, lane: idx as u32, index, cause });
    }
}

/// Reports that are kept.
const MAX_FAILURES: usize = 256;
const TURNS_PER_HEALTH: u32 = 64;
const TURNS_PER_CLOCK: u32 = 64;
/// How long closing a peer may take.
const CLOSE_LIMIT: Duration = Duration::from_millis(100);
