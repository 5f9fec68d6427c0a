//! The table of a device's pairs: what only the driving thread touches.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::fi_endpoint::PostStatus;
use super::inbound::Inbound;
use super::link::{Context, IDX_MASK, Link};
use super::mailbox::{Mailbox, MailboxCursor};
use super::message::Then;
use super::port::{Failure, MemoryRegistration, Port};
use super::receives::Receives;
use super::sys;
use p2p_core::region::Region;

/// What only the driving thread touches.
#[derive(Debug)]
pub(super) struct State {
    pub(super) receives: Receives,
    pub(super) table: Vec<Entry>,
    /// Where the next mail of each place of the table is expected.
    pub(super) cursors: Vec<Option<MailboxCursor>>,
    /// Places that got mail lately, and the one to give its room away next.
    pub(super) hot: Vec<u16>,
    pub(super) next_victim: usize,
    /// Where the next look at some of all the others begins.
    pub(super) next_cursor: usize,
    /// Pairs in which something came before what it follows, and when that was noticed.
    pub(super) stalls: Vec<Stall>,
    pub(super) free: Vec<u16>,
    pub(super) addresses: HashMap<Vec<u8>, Address>,
    /// Turns for which additions have waited.
    pub(super) credit_turns: u32,
    /// Pairs whose endpoint is gone, with operations that the keeper has not given away yet.
    pub(super) close_requests: Vec<CloseRequest>,
    /// Pairs that are over but not yet forgotten.
    pub(super) closing: Vec<u16>,
    /// Slots and mailboxes into which a peer that is not known to be gone may still write. Their pages are given
    /// back; only their addresses are kept from others.
    pub(super) quarantine: Quarantine,
    pub(super) entries: [sys::CqDataEntry; NUM_ENTRIES],
    pub(super) sources: [sys::FiAddr; NUM_ENTRIES],
}

// SAFETY: the pointers in `entries` are scratch, written and read within one call under the lock.
unsafe impl Send for State {}

/// One place of the table.
#[derive(Debug, Default)]
pub(super) struct Entry {
    pub(super) generation: u16,
    pub(super) link: Option<Arc<Link>>,
    /// Stays registered until the peer has said farewell: mail under way must find it.
    pub(super) mailbox: Option<Mailbox>,
    pub(super) inbound: Inbound,
    /// Set when this side's endpoint is gone.
    pub(super) close_state: Option<CloseState>,
    /// What the peer said of its writes when its endpoint went.
    pub(super) farewell: Option<u64>,
    pub(super) address: Option<Vec<u8>>,
}

#[derive(Debug)]
pub(super) struct CloseState {
    pub(super) since: Instant,
    pub(super) is_farewell_sent: bool,
    /// Registrations that operations under way may use.
    pub(super) _sources: Vec<Source>,
}

/// What the endpoint of a pair has left to its end.
#[derive(Debug)]
pub(super) struct CloseRequest {
    pub(super) since: Instant,
    pub(super) link: Arc<Link>,
    pub(super) slot: Option<MemoryRegistration>,
    pub(super) sources: Vec<Source>,
}

/// Something that is expected at a pair.
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
    // Before the memory.
    pub(super) registered: Option<MemoryRegistration>,
    pub(super) region: Region,
}

impl State {
    pub(super) fn entry_of(&mut self, id: u32) -> Option<&mut Entry> {
        let entry = self.table.get_mut((id & IDX_MASK) as usize)?;
        (u32::from(entry.generation) == id >> 16 && entry.link.is_some()).then_some(entry)
    }

    /// Looks at a pair's mailbox in every turn.
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

    /// Looks at a pair's mailbox no more.
    pub(super) fn remove_cursor(&mut self, idx: u16) {
        if let Some(head) = self.cursors.get_mut(usize::from(idx)) {
            *head = None;
        }
    }

    /// A write or read is over.
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

    /// Forgets pairs that are over as soon as nothing can refer to them.
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
                link.unnumbered(Then::Farewell, writes).is_none_or(|message| {
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
            // The peer, or what it left in the network, may write until its connection ends, which
            // nobody tells. The memory goes back to the system, the addresses to nobody. The keys are
            // gone by then, so that only a write that was let in before can touch the pages again.
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

/// Remembers that something before what came has not come.
pub(super) fn note_stall(stalls: &mut Vec<Stall>, id: u32, seq: u32) {
    if !stalls.iter().any(|stall| stall.id == id && stall.seq == seq) {
        stalls.push(Stall { idx: (id & IDX_MASK) as u16, id, seq, since: Instant::now() });
    }
}

/// Memory whose addresses nobody may have any more, without its pages.
#[derive(Debug, Default)]
pub(super) struct Quarantine {
    regions: Vec<Region>,
    next: usize,
}

impl Quarantine {
    fn add(&mut self, region: Region) {
        release_pages(&region);
        self.regions.push(region);
        // A late write may have touched pages of others again.
        for _ in 0..NUM_RELEASED_PER_ADD.min(self.regions.len()) {
            self.next = (self.next + 1) % self.regions.len();
            release_pages(&self.regions[self.next]);
        }
    }
}

/// Releases the pages of memory that nobody uses any more; its addresses stay taken.
fn release_pages(memory: &Region) {
    // SAFETY: the whole mapping; what anybody may still read there is zero afterwards.
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

/// Completions that are read at once.
pub(super) const NUM_ENTRIES: usize = 16;
/// Mailboxes that are looked at in every turn of the driver, beside some of all the others.
pub(super) const MAX_HOT: usize = 64;
/// Longest time that a pair is remembered for its peer's farewell.
const FAREWELL_TIMEOUT: Duration = Duration::from_secs(5);
/// Regions in quarantine that are looked after whenever another one comes.
const NUM_RELEASED_PER_ADD: usize = 2;
