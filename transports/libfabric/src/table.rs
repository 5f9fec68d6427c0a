//! The table of a device's pairs: state that only the driving thread uses.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::fi_endpoint::PostStatus;
use super::inbound::Inbound;
use super::link::{Context, IDX_MASK, Link};
use super::mailbox::{Mailbox, MailboxCursor};
use super::message::Action;
use super::port::{Failure, MemoryRegistration, Port};
use super::receives::Receives;
use super::sys;
use p2p_core::region::Region;

/// State that only the driving thread uses.
#[derive(Debug)]
pub(super) struct State {
    pub(super) receives: Receives,
    pub(super) table: Vec<Entry>,
    /// For each entry of the table, the position of its next mail.
    pub(super) cursors: Vec<Option<MailboxCursor>>,
    /// Indexes of pairs that got mail lately, and the position to replace next.
    pub(super) hot: Vec<u16>,
    pub(super) next_victim: usize,
    /// Index at which the next turn begins its reads of the other mailboxes.
    pub(super) next_cursor: usize,
    /// Pairs with a gap in their sequence numbers, and when it was noticed.
    pub(super) stalls: Vec<Stall>,
    pub(super) free: Vec<u16>,
    pub(super) addresses: HashMap<Vec<u8>, Address>,
    /// Turns for which lazy additions have waited.
    pub(super) credit_turns: u32,
    /// Pairs whose endpoint was dropped, with posts that the library thread has not passed on yet.
    pub(super) close_requests: Vec<CloseRequest>,
    /// Indexes of closed pairs that still occupy their entry.
    pub(super) closing: Vec<u16>,
    /// Slots and mailboxes that a peer may still write because it never reported its end. Their
    /// pages are released; only their addresses stay reserved.
    pub(super) quarantine: Quarantine,
    pub(super) entries: [sys::CqDataEntry; NUM_ENTRIES],
    pub(super) sources: [sys::FiAddr; NUM_ENTRIES],
}

// SAFETY: the pointers in `entries` are scratch, written and read within one call under the lock.
unsafe impl Send for State {}

/// One entry of the table.
#[derive(Debug, Default)]
pub(super) struct Entry {
    pub(super) generation: u16,
    pub(super) link: Option<Arc<Link>>,
    /// Stays registered until the peer has said farewell, because mail may still be on its way.
    pub(super) mailbox: Option<Mailbox>,
    pub(super) inbound: Inbound,
    /// Set once this side's endpoint was dropped.
    pub(super) close_state: Option<CloseState>,
    /// Number of writes that the peer had issued when its endpoint was dropped.
    pub(super) farewell: Option<u64>,
    pub(super) address: Option<Vec<u8>>,
}

#[derive(Debug)]
pub(super) struct CloseState {
    pub(super) since: Instant,
    pub(super) is_farewell_sent: bool,
    /// Registrations that running operations may use.
    pub(super) _sources: Vec<Source>,
}

/// A dropped endpoint's pair, to be closed.
#[derive(Debug)]
pub(super) struct CloseRequest {
    pub(super) since: Instant,
    pub(super) link: Arc<Link>,
    pub(super) slot: Option<MemoryRegistration>,
    pub(super) sources: Vec<Source>,
}

/// A missing message of a pair.
#[derive(Debug)]
pub(super) struct Stall {
    pub(super) idx: u16,
    pub(super) id: u32,
    pub(super) seq: u32,
    pub(super) since: Instant,
}

#[derive(Debug)]
pub(super) struct Address {
    pub(super) addr: sys::FiAddr,
    pub(super) num_pairs: usize,
}

/// Local memory that an endpoint may use.
#[derive(Debug)]
pub(super) struct Source {
    // Dropped before the memory.
    pub(super) registered: Option<MemoryRegistration>,
    pub(super) region: Region,
}

impl State {
    pub(super) fn entry_of(&mut self, id: u32) -> Option<&mut Entry> {
        let entry = self.table.get_mut((id & IDX_MASK) as usize)?;
        (u32::from(entry.generation) == id >> 16 && entry.link.is_some()).then_some(entry)
    }

    /// Makes every turn read this pair's mailbox.
    pub(super) fn mark_hot(&mut self, idx: u16) {
        if self.hot.contains(&idx) {
            return;
        }
        if self.hot.len() < MAX_HOT {
            self.hot.push(idx);
        } else {
            self.hot[self.next_victim] = idx;
            self.next_victim = (self.next_victim + 1) % MAX_HOT;
        }
    }

    /// Stops reading a pair's mailbox.
    pub(super) fn remove_cursor(&mut self, idx: u16) {
        if let Some(head) = self.cursors.get_mut(usize::from(idx)) {
            *head = None;
        }
    }

    /// Completes a write or read.
    pub(super) fn complete(&mut self, context: &Context, failure: Option<&Failure>) {
        let Some(link) =
            self.table.get(context.owner as usize).and_then(|entry| entry.link.as_ref())
        else {
            return;
        };
        if let Some(failure) = failure {
            link.fail("write or read", failure.code, failure.text.clone());
        }
        link.complete(context);
    }

    /// Frees the entries of closed pairs once no operation, mail or message can refer to them.
    pub(super) fn sweep_closing(&mut self, port: &Port) {
        let mut nth = 0;
        while nth < self.closing.len() {
            let idx = self.closing[nth];
            if self.try_free(port, idx) {
                self.closing.swap_remove(nth);
            } else {
                nth += 1;
            }
        }
    }

    fn try_free(&mut self, port: &Port, idx: u16) -> bool {
        self.remove_cursor(idx);
        let entry = &mut self.table[usize::from(idx)];
        let (Some(link), Some(close_state)) = (&entry.link, &mut entry.close_state) else {
            return true;
        };
        if link.outstanding() > 0 {
            // The library may still use this side's memory.
            return false;
        }
        if let (Some(remote), false) = (link.remote(), close_state.is_farewell_sent) {
            let writes = if remote.counts_writes { link.num_posted() } else { 0 };
            close_state.is_farewell_sent =
                link.unnumbered(Action::Farewell, writes).is_none_or(|message| {
                    !matches!(link.inject(port, &message), Ok(PostStatus::Again))
                });
        }
        let is_joined = link.remote().is_some();
        let is_peer_done =
            entry.farewell.is_some_and(|writes| entry.inbound.num_writes() >= writes);
        let has_waited = close_state.since.elapsed() >= FAREWELL_TIMEOUT;
        if is_joined && !has_waited && !(is_peer_done && close_state.is_farewell_sent) {
            return false;
        }
        if is_joined && !is_peer_done {
            // The peer, or its data in the network, may write until its connection ends, and no
            // event reports that end. The memory goes back to the system and its addresses stay
            // reserved. The keys are revoked by then, so only a write that was admitted before can
            // touch the pages.
            let mailbox = entry.mailbox.take().map(Mailbox::retire);
            for memory in [Some(link.slot.clone()), mailbox].into_iter().flatten() {
                self.quarantine.add(memory);
            }
        }
        let generation = entry.generation.wrapping_add(1);
        let address = entry.address.take();
        *entry = Entry { generation, ..Entry::default() };
        self.free.push(idx);
        if let Some(address) = address
            && let Some(known) = self.addresses.get_mut(&address)
        {
            known.num_pairs -= 1;
            if known.num_pairs == 0 {
                port.remove(known.addr);
                self.addresses.remove(&address);
            }
        }
        true
    }
}

/// Records that the message before an arrived one is missing.
pub(super) fn note_stall(stalls: &mut Vec<Stall>, id: u32, seq: u32) {
    if !stalls.iter().any(|stall| stall.id == id && stall.seq == seq) {
        stalls.push(Stall { idx: (id & IDX_MASK) as u16, id, seq, since: Instant::now() });
    }
}

/// Memory without pages, whose addresses stay reserved.
#[derive(Debug, Default)]
pub(super) struct Quarantine {
    regions: Vec<Region>,
    next: usize,
}

impl Quarantine {
    fn add(&mut self, region: Region) {
        release_pages(&region);
        self.regions.push(region);
        // A late write may have touched pages of other regions again.
        for _ in 0..NUM_RELEASED_PER_ADD.min(self.regions.len()) {
            self.next = (self.next + 1) % self.regions.len();
            release_pages(&self.regions[self.next]);
        }
    }
}

/// Releases the pages of unused memory; its addresses stay reserved.
fn release_pages(memory: &Region) {
    // SAFETY: the whole mapping; later reads of it return zeros.
    let result = unsafe {
        rustix::mm::madvise(
            memory.as_ptr().as_ptr().cast(),
            memory.len(),
            rustix::mm::Advice::LinuxDontNeed,
        )
    };
    if let Err(error) = result {
        tracing::warn!(%error, "the pages of a retired slot were not released");
    }
}

/// Completions that one read returns at most.
pub(super) const NUM_ENTRIES: usize = 16;
/// Mailboxes that every turn of the driver reads, beside some of the others.
pub(super) const MAX_HOT: usize = 64;
/// Longest time that a closed pair waits for its peer's farewell.
const FAREWELL_TIMEOUT: Duration = Duration::from_secs(5);
/// Older regions whose pages are released again with each added one.
const NUM_RELEASED_PER_ADD: usize = 2;
