//! One endpoint of this process and all pairs over it: the driver.
//!
//! Whoever drives holds the lock of [`State`]; others go on, because somebody drives. Posting takes no
//! lock of ours, unless the library could not take something before.

use std::collections::HashMap;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use super::inbound::Inbound;
use super::link::{Context, FarSide, IDX_MASK, Link, Op, Queued, note_of};
use super::load::Library;
use super::mail::{Head, Mailbox, NUM_CELLS};
use super::message::{Header, Then};
use super::owner::{CallError, Info};
use super::port::{Failure, Polled, Port, Registered, Rights, Taken, network_error};
use super::receives::Receives;
use super::table::{Address, Closing, Entry, MAX_HOT, NUM_ENTRIES, Source, State, note_stall};
use super::{service, sys};
use crossbeam_queue::ArrayQueue;

use crate::endpoint::PostError;
use crate::network::NetworkError;
use crate::region::Region;
use crate::wait::{Driver, event_fd};

/// One endpoint of this process. See the [module](self).
#[derive(Debug)]
pub(super) struct Device {
    // Before what its operations use.
    port: Port,
    state: Mutex<State>,
    /// Longest message that this device sends.
    max_message_bytes: usize,
    /// Pairs with operations that wait.
    num_backlogged: AtomicUsize,
    /// Pairs with additions that wait for the next message, or the next turn of the driver.
    credits: ArrayQueue<Arc<Link>>,
    /// Times that somebody drove.
    num_drives: AtomicU64,
    /// Whether somebody sleeps on the descriptor and will drive when it fires.
    is_watched: AtomicBool,
    /// When something arrived last, in nanoseconds since `start`. Kept only without a descriptor.
    last_news_ns: AtomicU64,
    start: Instant,
}

impl Device {
    /// Opens an endpoint, and starts what drives it when nobody else does.
    pub(super) fn open(library: &'static Library, info: Info) -> Result<Arc<Self>, NetworkError> {
        let port = Port::open(library, info)?;
        let traits = port.traits();
        let max_message_bytes = traits.inject_bytes.min(MAX_MESSAGE_BYTES);
        let provider = traits.provider.clone();
        let failed = |error: CallError| network_error(&provider, error.op, &error);
        if max_message_bytes < super::detail::MIN_MESSAGE_BYTES {
            return Err(NetworkError {
                network: format!("libfabric {provider}"),
                op: "open",
                code: None,
                detail: format!(
                    "the provider sends at most {max_message_bytes} bytes at once, expected {} or more",
                    super::detail::MIN_MESSAGE_BYTES
                ),
            });
        }
        let mut receives = Receives::new(&port, MAX_MESSAGE_BYTES).map_err(failed)?;
        receives.post(&port).map_err(failed)?;
        tracing::debug!(?traits, "libfabric endpoint opened");
        let state = State {
            receives,
            table: Vec::new(),
            heads: Vec::new(),
            hot: Vec::with_capacity(MAX_HOT),
            next_victim: 0,
            next_head: 0,
            stalls: Vec::new(),
            free: Vec::new(),
            addresses: HashMap::new(),
            credit_turns: 0,
            closing: Vec::new(),
            quarantine: Vec::new(),
            entries: [EMPTY_ENTRY; NUM_ENTRIES],
            sources: [sys::FI_ADDR_UNSPEC; NUM_ENTRIES],
        };
        let device = Arc::new(Self {
            port,
            state: Mutex::new(state),
            max_message_bytes,
            num_backlogged: AtomicUsize::new(0),
            credits: ArrayQueue::new(MAX_CREDITS),
            num_drives: AtomicU64::new(0),
            is_watched: AtomicBool::new(false),
            last_news_ns: AtomicU64::new(0),
            start: Instant::now(),
        });
        service::start(&device).map_err(|error| NetworkError {
            network: format!("libfabric {provider}"),
            op: "start a thread",
            code: error.raw_os_error().map(Into::into),
            detail: error.to_string(),
        })?;
        Ok(device)
    }

    pub(super) const fn port(&self) -> &Port {
        &self.port
    }

    pub(super) const fn max_message_bytes(&self) -> usize {
        self.max_message_bytes
    }

    /// Times that somebody drove, and whether somebody will when something comes.
    pub(super) fn attention(&self) -> (u64, bool) {
        let is_watched = self.is_watched.load(Ordering::Acquire);
        (self.num_drives.load(Ordering::Relaxed), is_watched)
    }

    /// Makes a place for a pair with a fresh slot.
    pub(super) fn add(
        &self,
        slot_bytes: usize,
        waiting_offset: usize,
    ) -> Result<(Arc<Link>, Registered), NetworkError> {
        let provider = &self.port.traits().provider;
        let failed = |op: &'static str, detail: String| NetworkError {
            network: format!("libfabric {provider}"),
            op,
            code: None,
            detail,
        };
        let slot =
            Region::anonymous(slot_bytes).map_err(|e| failed("make a slot", e.to_string()))?;
        let wake = event_fd().map_err(|e| failed("make an event", e.to_string()))?;
        // SAFETY: the registration goes before the slot: both belong to the lease of the pair.
        let registered =
            unsafe { self.port.register(slot.as_ptr(), slot_bytes, Rights::ReadWrite) }
                .map_err(|e| network_error(provider, e.op, &e))?;
        let mailbox = self.port.traits().takes_mail.then(|| Mailbox::new(&self.port)).transpose();
        let mailbox = mailbox.map_err(|e| network_error(provider, e.op, &e))?;
        let mut state = lock(&self.state);
        let idx = match state.free.pop() {
            Some(idx) => idx,
            None if state.table.len() <= IDX_MASK as usize => {
                state.table.push(Entry::default());
                state.heads.push(None);
                (state.table.len() - 1) as u16
            }
            None => return Err(failed("make a slot", "65536 pairs are open".to_owned())),
        };
        let entry = &mut state.table[usize::from(idx)];
        let id = u32::from(entry.generation) << 16 | u32::from(idx);
        let offer = mailbox.as_ref().map(Mailbox::offer);
        let link = Arc::new(Link::new(id, slot, offer, waiting_offset, wake));
        entry.link = Some(Arc::clone(&link));
        // SAFETY: the head is taken away with the pair's end, before the mailbox.
        let head = mailbox.as_ref().map(|mailbox| unsafe { mailbox.head(link.token) });
        entry.inbound = Inbound::new(if mailbox.is_some() { NUM_CELLS } else { 0 });
        entry.mailbox = mailbox;
        state.heads[usize::from(idx)] = head;
        Ok((link, registered))
    }

    /// Learns where the peer of a pair is.
    pub(super) fn join(
        &self,
        link: &Link,
        address: &[u8],
        far: impl FnOnce(sys::FiAddr) -> FarSide,
    ) -> Result<(), CallError> {
        let mut state = lock(&self.state);
        let addr = match state.addresses.get_mut(address) {
            Some(known) => {
                known.num_pairs += 1;
                known.addr
            }
            None => {
                let addr = self.port.insert(address)?;
                state.addresses.insert(address.to_vec(), Address { addr, num_pairs: 1 });
                addr
            }
        };
        if let Some(entry) = state.table.get_mut((link.id & IDX_MASK) as usize) {
            entry.address = Some(address.to_vec());
        }
        link.join(far(addr));
        Ok(())
    }

    /// The endpoint of a pair is gone. The slot's registration must be gone, too.
    pub(super) fn close(&self, link: &Arc<Link>, sources: Vec<Source>) {
        if link.discard() {
            self.num_backlogged.fetch_sub(1, Ordering::AcqRel);
        }
        link.fail("close", 0, "closed by this side".to_owned());
        let mut state = lock(&self.state);
        let idx = (link.id & IDX_MASK) as u16;
        state.ignore_mail(idx);
        if let Some(entry) = state.table.get_mut(usize::from(idx)) {
            let closing =
                Closing { since: Instant::now(), has_said_farewell: false, _sources: sources };
            entry.closing = Some(closing);
            state.closing.push(idx);
        }
        state.sweep_closing(&self.port);
    }

    /// Gives `op` to the library as soon as it takes it. Drives, and waits within a bound, when too
    /// much waits already. False when it was merged with what waits.
    pub(super) fn enqueue(
        &self,
        link: &Link,
        name: &'static str,
        mut make: impl FnMut() -> Op,
    ) -> Result<bool, PostError> {
        let mut deadline = None;
        loop {
            link.health()?;
            match link.enqueue(make()) {
                (Queued::Merged, _) => return Ok(false),
                (Queued::Yes, is_first) => {
                    if is_first {
                        self.num_backlogged.fetch_add(1, Ordering::AcqRel);
                    }
                    // A provider that takes nothing may have moved what came instead, of which nobody
                    // is told if it was mail.
                    self.drive();
                    return Ok(true);
                }
                (Queued::Full, _) => {
                    let now = Instant::now();
                    if now >= *deadline.get_or_insert(now + POST_PATIENCE) {
                        let code = sys::FI_EAGAIN;
                        let detail = format!(
                            "the peer has taken nothing for {} ms",
                            POST_PATIENCE.as_millis()
                        );
                        link.fail(name, code, detail.clone());
                        return Err(PostError::Transport { op: name, code, detail });
                    }
                    self.drive();
                    std::thread::yield_now();
                }
            }
        }
    }

    /// Lets an addition wait for the next message to the peer, or the next turn of the driver. False when
    /// it cannot.
    pub(super) fn add_credit(&self, link: &Arc<Link>, offset: u32, value: u64) -> bool {
        match link.add_credit(offset, value) {
            None => false,
            Some(false) => true,
            Some(true) => {
                if let Err(link) = self.credits.push(Arc::clone(link)) {
                    // More pairs than there is room for: at once, then.
                    let _ = link.flush_credit(&self.port);
                }
                true
            }
        }
    }

    /// Whether additions wait.
    pub(super) fn has_credits(&self) -> bool {
        !self.credits.is_empty()
    }

    /// Sends the additions that no message has taken along.
    pub(super) fn flush_credits(&self) {
        for _ in 0..self.credits.len() {
            let Some(link) = self.credits.pop() else { break };
            if !link.flush_credit(&self.port)
                && let Err(link) = self.credits.push(link)
            {
                link.fail("send", sys::FI_EAGAIN, "the peer takes nothing".to_owned());
            }
        }
    }

    /// The queue itself failed: nothing works any more.
    fn fail_all(&self, state: &State, error: &CallError) {
        tracing::error!(%error, provider = self.port.traits().provider, "libfabric queue failed");
        for link in state.table.iter().filter_map(|entry| entry.link.as_deref()) {
            let _ = link.fail_call(error);
        }
    }

    fn flush_backlogs(&self, state: &State) {
        for link in state.table.iter().filter_map(|entry| entry.link.as_deref()) {
            if link.backlog() > 0 && link.flush(&self.port) {
                self.num_backlogged.fetch_sub(1, Ordering::AcqRel);
            }
        }
    }

    /// One completion.
    fn handle(&self, state: &mut State, nth: usize) {
        let entry = state.entries[nth];
        let source =
            if self.port.traits().knows_source { state.sources[nth] } else { sys::FI_ADDR_UNSPEC };
        if entry.flags & sys::FI_REMOTE_WRITE != 0 {
            if entry.flags & sys::FI_REMOTE_CQ_DATA != 0 {
                self.handle_write(state, entry.data);
            }
            return;
        }
        // SAFETY: the context of an operation of ours, which lives until its completion.
        let Some(context) = (unsafe { entry.op_context.cast::<Context>().as_ref() }) else {
            return;
        };
        if context.is_receive {
            let buffer = context.owner;
            self.handle_message(state, buffer, entry.len, source);
            state.receives.give_back(buffer);
        } else {
            state.complete(context, None);
        }
    }

    /// A peer's write landed. Who wrote is told by the note alone: providers name a source for messages,
    /// and for writes some of them name a wrong one.
    fn handle_write(&self, state: &mut State, note: u64) {
        let has_secret = self.port.traits().has_wide_notes;
        let Some(entry) = state.entry_of(note as u32) else {
            tracing::debug!(note, "a write into a slot that is gone");
            return;
        };
        let Some(link) = &entry.link else { return };
        if note != note_of(link.id, link.token, has_secret) {
            tracing::warn!(slot = link.id, "a write that another peer announces");
            return;
        }
        entry.inbound.count_write();
        land_ready(&self.port, link, &mut entry.inbound);
    }

    /// Takes the mail that came.
    #[inline]
    fn handle_mails(&self, state: &mut State) {
        // Where there are many pairs, only some in turn: an idle one costs next to nothing, and its first
        // mail waits some turns. Nobody sleeps before all were looked at.
        for nth in 0..state.hot.len() {
            self.handle_mails_of(state, state.hot[nth].into());
        }
        let num_heads = state.heads.len();
        for _ in 0..num_heads.min(MAX_COLD) {
            let idx = state.next_head % num_heads;
            state.next_head = idx + 1;
            if self.handle_mails_of(state, idx) && num_heads > MAX_COLD {
                state.heat(idx as u16);
            }
        }
    }

    /// Takes the mail of one pair. Whether there was some.
    #[inline]
    fn handle_mails_of(&self, state: &mut State, idx: usize) -> bool {
        let mut had_some = false;
        while let Some(head) = state.heads[idx]
            && head.has_news()
            && self.handle_mail(state, idx, head)
        {
            had_some = true;
        }
        had_some
    }

    /// One mail. False when it must wait, or ended the pair.
    fn handle_mail(&self, state: &mut State, idx: usize, head: Head) -> bool {
        let Some(mail) = head.read() else { return false };
        let State { heads, table, stalls, .. } = state;
        let entry = &mut table[idx];
        let Some(link) = entry.link.clone() else { return false };
        let mut end = |detail: String| {
            link.fail("receive", 0, detail);
            heads[idx] = None;
            false
        };
        if link.is_failed() {
            return end("a mail after the end".to_owned());
        }
        let message = mail.message();
        let header = match Header::decode(message) {
            Ok(header) => header,
            Err(error) => return end(format!("a bad mail: {error}")),
        };
        if header.slot != link.id || header.token != link.token || header.then.is_unnumbered() {
            return end("a mail that does not belong here".to_owned());
        }
        link.note_mails_taken(header.mails);
        let expected = entry.inbound.next_seq();
        if header.seq.wrapping_sub(expected).cast_signed() > 0 {
            note_stall(stalls, link.id, expected);
            return false;
        }
        let admitted = entry.inbound.admit(&header, message);
        let head = head.next();
        match admitted {
            Ok(is_now) => {
                heads[idx] = Some(head);
                link.set_mails_read(head.num_read());
                (!is_now || land(&self.port, &link, &header, message))
                    && land_ready(&self.port, &link, &mut entry.inbound)
            }
            Err(error) => end(error.to_string()),
        }
    }

    /// A message came.
    fn handle_message(&self, state: &mut State, buffer: u32, len: usize, source: sys::FiAddr) {
        let State { receives, table, stalls, .. } = state;
        let message = receives.message(buffer, len);
        let header = match Header::decode(message) {
            Ok(header) => header,
            Err(error) => {
                tracing::warn!(%error, "a message of nobody known");
                return;
            }
        };
        let Some((entry, link)) = table
            .get_mut((header.slot & IDX_MASK) as usize)
            .and_then(|entry| entry.link.clone().map(|link| (entry, link)))
            .filter(|(_, link)| link.id == header.slot)
        else {
            tracing::debug!(slot = header.slot, "a message to a slot that is gone");
            return;
        };
        if header.token != link.token || !comes_from(&link, source) {
            // Whoever sent it is not the peer, so the pair does not suffer.
            tracing::warn!(slot = link.id, "a message without the right to this slot");
            return;
        }
        if header.then == Then::Farewell {
            entry.farewell = Some(header.writes);
            link.desert();
            return;
        }
        if entry.closing.is_some() || link.is_failed() {
            return;
        }
        link.note_mails_taken(header.mails);
        match entry.inbound.admit(&header, message) {
            Ok(true) => {
                if land(&self.port, &link, &header, message) {
                    land_ready(&self.port, &link, &mut entry.inbound);
                }
            }
            Ok(false) if entry.inbound.has_gap() => {
                note_stall(stalls, link.id, entry.inbound.next_seq());
            }
            Ok(false) => {}
            Err(error) => link.fail("receive", 0, error.to_string()),
        }
    }

    /// Ends pairs in which something is expected that does not come.
    fn sweep_stalls(state: &mut State) {
        let State { stalls, table, .. } = state;
        stalls.retain(|stall| {
            let Some(entry) = table.get(usize::from(stall.idx)) else { return false };
            let Some(link) = entry.link.as_ref().filter(|link| link.id == stall.id) else {
                return false;
            };
            let is_there = entry.inbound.next_seq() == stall.seq && !link.is_failed();
            if is_there && stall.since.elapsed() >= STALL_PATIENCE {
                let seq = stall.seq;
                link.fail("receive", 0, format!("message {seq} does not come: it was lost"));
                return false;
            }
            is_there
        });
    }

    fn handle_failure(&self, state: &mut State, failure: &Failure) {
        // SAFETY: the context of an operation of ours, which lives until its completion.
        match unsafe { failure.context.cast::<Context>().as_ref() } {
            Some(context) if context.is_receive => {
                tracing::warn!(text = failure.text, "a message could not be received");
                state.receives.give_back(context.owner);
            }
            Some(context) => state.complete(context, Some(failure)),
            None => {
                // Small messages have no context; the peers' sequence numbers tell what was lost.
                tracing::debug!(text = failure.text, flags = failure.flags, "a message was lost");
            }
        }
    }
}

impl Driver for Device {
    fn drive(&self) {
        let mut state = match self.state.try_lock() {
            Ok(state) => state,
            // Somebody drives.
            Err(TryLockError::WouldBlock) => return,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
        };
        let state = &mut *state;
        // Only the holder of the lock counts.
        let num_drives = self.num_drives.load(Ordering::Relaxed) + 1;
        self.num_drives.store(num_drives, Ordering::Relaxed);
        if self.is_watched.load(Ordering::Relaxed) {
            self.is_watched.store(false, Ordering::Release);
        }
        let polled = self.port.queue().poll(&mut state.entries, &mut state.sources);
        // Mail first: what else came may have been sent after it.
        self.handle_mails(state);
        match polled {
            Ok(Polled::Nothing) => {
                if !state.stalls.is_empty() {
                    Self::sweep_stalls(state);
                }
                if state.receives.has_spare() {
                    self.repost(state);
                }
                if !state.closing.is_empty() {
                    state.sweep_closing(&self.port);
                }
            }
            Ok(Polled::Entries(num)) => {
                for nth in 0..num.min(NUM_ENTRIES) {
                    self.handle(state, nth);
                }
                if state.receives.is_low() {
                    self.repost(state);
                }
                if self.port.wait_fd().is_none() {
                    let now = self.start.elapsed().as_nanos() as u64;
                    self.last_news_ns.store(now, Ordering::Relaxed);
                }
            }
            Ok(Polled::Failed(failure)) => self.handle_failure(state, &failure),
            Err(error) => self.fail_all(state, &error),
        }
        if self.num_backlogged.load(Ordering::Acquire) > 0 {
            self.flush_backlogs(state);
        }
        if self.has_credits() {
            // A moment, in which most of them find a message to go along with.
            state.credit_turns += 1;
            if state.credit_turns >= CREDIT_TURNS {
                state.credit_turns = 0;
                self.flush_credits();
            }
        }
    }

    fn may_sleep(&self) -> bool {
        if self.has_credits() {
            self.flush_credits();
        }
        self.is_watched.store(true, Ordering::Release);
        self.port.wait_fd().is_none() || (self.port.queue().may_sleep() && !self.has_mail())
    }

    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        self.port.wait_fd()
    }

    fn max_sleep(&self) -> Duration {
        if self.num_backlogged.load(Ordering::Acquire) > 0 {
            return BACKLOG_TICK;
        }
        if self.port.wait_fd().is_some() {
            return WATCHED_TICK;
        }
        let quiet_ns = (self.start.elapsed().as_nanos() as u64)
            .saturating_sub(self.last_news_ns.load(Ordering::Relaxed));
        if quiet_ns < AWAKE_NS {
            return Duration::ZERO;
        }
        // A hundredth of the time since something came: quick while there is traffic, cheap without.
        Duration::from_nanos(quiet_ns / 100).clamp(SHORTEST_TICK, LONGEST_TICK)
    }
}

impl Device {
    /// Whether mail came that nobody has looked at. Also if somebody looks at the moment.
    fn has_mail(&self) -> bool {
        match self.state.try_lock() {
            Ok(state) => {
                state.heads.iter().flatten().any(|head| head.has_news() && head.read().is_some())
            }
            Err(TryLockError::WouldBlock) => true,
            Err(TryLockError::Poisoned(_)) => false,
        }
    }

    fn repost(&self, state: &mut State) {
        if let Err(error) = state.receives.post(&self.port) {
            self.fail_all(state, &error);
        }
    }
}

/// Whether `source` is the peer of `link`, as far as the provider knows.
fn comes_from(link: &Link, source: sys::FiAddr) -> bool {
    source == sys::FI_ADDR_UNSPEC || link.far().is_none_or(|far| far.peer == source)
}

/// Puts in place what was kept and may be put in place now. False when something was bad.
fn land_ready(port: &Port, link: &Link, inbound: &mut Inbound) -> bool {
    while let Some((header, message)) = inbound.next_ready() {
        if !land(port, link, &header, &message) {
            return false;
        }
    }
    true
}

/// Puts a message in place, and answers if it asks. False when it was bad.
fn land(port: &Port, link: &Link, header: &Header, message: &[u8]) -> bool {
    match link.land(header, message) {
        Ok(None) => true,
        Ok(Some(id)) => {
            let Some(answer) = link.unnumbered(Then::Answered { id }, 0) else { return true };
            // A lost answer would be waited for until the deadline.
            for _ in 0..MAX_ANSWER_ATTEMPTS {
                match link.inject(port, &answer) {
                    Ok(Taken::Yes) => break,
                    Ok(Taken::Again) => std::hint::spin_loop(),
                    Err(error) => {
                        let _ = link.fail_call(&error);
                        break;
                    }
                }
            }
            true
        }
        Err(error) => {
            link.fail("receive", 0, format!("a bad message: {error}"));
            false
        }
    }
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    // Nothing that holds the lock can leave the state half changed.
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Longest message. Longer puts are writes.
const MAX_MESSAGE_BYTES: usize = 8 << 10;
/// Mailboxes that are looked at in turn, beside those that got mail lately.
const MAX_COLD: usize = 64;
const EMPTY_ENTRY: sys::CqDataEntry = sys::CqDataEntry {
    op_context: std::ptr::null_mut(),
    flags: 0,
    len: 0,
    buf: std::ptr::null_mut(),
    data: 0,
};
/// Longest time that a post waits for room.
const POST_PATIENCE: Duration = Duration::from_secs(1);
/// How long something may come after what follows it.
const STALL_PATIENCE: Duration = Duration::from_secs(1);
const MAX_ANSWER_ATTEMPTS: u32 = 1000;
/// Turns of the driver for which additions wait: some 20 µs of polling.
const CREDIT_TURNS: u32 = 32;
/// Pairs whose additions may wait at the same time.
const MAX_CREDITS: usize = 4096;
const BACKLOG_TICK: Duration = Duration::from_millis(1);
const WATCHED_TICK: Duration = Duration::from_millis(100);
/// Without a descriptor nobody sleeps this soon after something came.
const AWAKE_NS: u64 = 200_000;
const SHORTEST_TICK: Duration = Duration::from_micros(20);
const LONGEST_TICK: Duration = Duration::from_millis(2);
