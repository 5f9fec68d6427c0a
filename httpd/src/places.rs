//! The places of a listener: its open connections, and the choice of the one that gives way at the limit.
//!
//! A connection is a stranger's until its client has shown an identity. Strangers share three quarters of the places, so
//! they cannot take those of known clients. Known ones take at most seven eighths, so a newcomer always finds a place:
//! a stranger of the address with the most strangers gives way to it. At the limit of known connections, an identity with
//! more than half of them gives way to the others, also while its requests are open.

use std::cmp::Reverse;
use std::collections::{BTreeSet, HashMap};
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::AbortHandle;

use crate::Metrics;

/// All connections of a listener.
#[derive(Debug)]
pub(crate) struct Places {
    max_strangers: usize,
    max_known: usize,
    /// One for each connection whose descriptor is open.
    permits: Arc<Semaphore>,
    table: Mutex<Table>,
    metrics: Metrics,
}

/// Connections by id. An evicted one leaves at once, before its task has ended.
#[derive(Debug, Default)]
struct Table {
    /// Source of ids and ranks. A lower rank has been without a complete request for longer.
    next: u64,
    entries: HashMap<u64, Entry>,
    /// Strangers of each address by rank and id.
    strangers: HashMap<IpAddr, BTreeSet<(u64, u64)>>,
    /// Number of strangers and lowest rank of each address. The last one gives way first.
    weights: BTreeSet<(usize, Reverse<u64>, IpAddr)>,
    num_strangers: usize,
    num_known: usize,
    /// Known connections on which no request is open, by rank and id.
    idle: BTreeSet<(u64, u64)>,
    /// Known connections of each identity, by rank and id.
    holders: HashMap<Arc<str>, BTreeSet<(u64, u64)>>,
}

#[derive(Debug)]
struct Entry {
    site: IpAddr,
    rank: u64,
    is_known: bool,
    /// Identity of a known client, unless the whole fleet shares it.
    holder: Option<Arc<str>>,
    task: AbortHandle,
    is_blocked: Arc<AtomicBool>,
}

impl Places {
    pub(crate) fn new(num_places: usize, metrics: Metrics) -> Arc<Self> {
        Arc::new(Self {
            max_strangers: (num_places - num_places / 4).max(1),
            max_known: num_places - (num_places / 8).max(1),
            permits: Arc::new(Semaphore::new(num_places)),
            table: Mutex::default(),
            metrics,
        })
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gets a permit for one more connection. At the limit another one gives way. Waits up to a second until its
    /// descriptor is closed, and returns `None` if it is not, or if no connection can give way.
    pub(crate) async fn acquire(&self) -> Option<OwnedSemaphorePermit> {
        let is_crowded = self.lock().num_strangers >= self.max_strangers;
        if is_crowded {
            self.evict_stranger();
        }
        if let Ok(permit) = Arc::clone(&self.permits).try_acquire_owned() {
            return Some(permit);
        }
        if !is_crowded && !self.evict() {
            return None;
        }
        let permit = Arc::clone(&self.permits).acquire_owned();
        tokio::time::timeout(EVICTION_TIMEOUT, permit).await.ok()?.ok()
    }

    /// Adds a stranger at `site`, whose task `spawn` starts. The task's first request finds its entry.
    pub(crate) fn insert(
        self: &Arc<Self>,
        site: IpAddr,
        spawn: impl FnOnce(Arc<Place>) -> AbortHandle,
    ) {
        let mut table = self.lock();
        table.next += 1;
        let (id, is_blocked) = (table.next, Arc::new(AtomicBool::new(false)));
        let place = Place { places: Arc::clone(self), id, is_blocked: Arc::clone(&is_blocked) };
        let task = spawn(Arc::new(place));
        let (rank, is_known, holder) = (id, false, None);
        table.entries.insert(id, Entry { site, rank, is_known, holder, task, is_blocked });
        table.add_stranger(site, id, id);
    }

    /// Closes a stranger's connection or, without one, the known one that has been idle longest. Returns false if there
    /// is neither.
    pub(crate) fn evict(&self) -> bool {
        self.evict_stranger() || {
            let evicted = self.lock().take_idle();
            self.close(evicted)
        }
    }

    fn evict_stranger(&self) -> bool {
        let evicted = self.lock().take_stranger();
        self.close(evicted)
    }

    /// Ends the task of a connection that has left the table. The caller does not hold the lock, which the task takes at
    /// its end.
    fn close(&self, evicted: Option<Entry>) -> bool {
        let Some(entry) = evicted else { return false };
        entry.task.abort();
        self.metrics.culled.with_label_values(&["crowded"]).inc();
        true
    }
}

impl Table {
    /// Removes the oldest stranger of the address with the most strangers.
    fn take_stranger(&mut self) -> Option<Entry> {
        let (_, _, site) = self.weights.last()?;
        let (_, id) = *self.strangers.get(site)?.first()?;
        self.remove(id)
    }

    /// Removes the known connection that has been idle longest, unless its peer still reads.
    fn take_idle(&mut self) -> Option<Entry> {
        let is_written = |id: &u64| {
            let entry = self.entries.get(id);
            entry.is_some_and(|entry| !entry.is_blocked.load(Ordering::Relaxed))
        };
        let id = self.idle.iter().map(|(_, id)| *id).find(is_written)?;
        self.remove(id)
    }

    /// Removes a known connection so that `newcomer` gets its place. One of an identity with more than half of `limit`
    /// goes first: the one that has been idle longest, or else the oldest. Such an identity itself takes the place of
    /// none but its own idle ones.
    fn make_room(&mut self, limit: usize, newcomer: Option<&str>) -> Option<Entry> {
        let largest = self.holders.iter().max_by_key(|(_, ranks)| ranks.len());
        let Some((holder, ranks)) = largest.filter(|(_, ranks)| 2 * ranks.len() > limit) else {
            return self.take_idle();
        };
        let is_written = |(_, id): &(u64, u64)| {
            let entry = self.entries.get(id);
            entry.is_some_and(|entry| !entry.is_blocked.load(Ordering::Relaxed))
        };
        let idle = ranks.iter().find(|place| self.idle.contains(place) && is_written(place));
        let is_own = newcomer == Some(&**holder);
        let (_, id) = *idle.or_else(|| ranks.first().filter(|_| !is_own))?;
        self.remove(id)
    }

    fn remove(&mut self, id: u64) -> Option<Entry> {
        let entry = self.entries.remove(&id)?;
        if entry.is_known {
            self.num_known -= 1;
            self.idle.remove(&(entry.rank, id));
            if let Some(holder) = &entry.holder
                && let Some(ranks) = self.holders.get_mut(holder)
            {
                ranks.remove(&(entry.rank, id));
                if ranks.is_empty() {
                    self.holders.remove(holder);
                }
            }
        } else {
            self.remove_stranger(entry.site, entry.rank, id);
        }
        Some(entry)
    }

    fn add_stranger(&mut self, site: IpAddr, rank: u64, id: u64) {
        self.num_strangers += 1;
        self.change_site(site, |ranks| {
            ranks.insert((rank, id));
        });
    }

    fn remove_stranger(&mut self, site: IpAddr, rank: u64, id: u64) {
        self.num_strangers -= 1;
        self.change_site(site, |ranks| {
            ranks.remove(&(rank, id));
        });
    }

    fn change_site(&mut self, site: IpAddr, change: impl FnOnce(&mut BTreeSet<(u64, u64)>)) {
        let weight = |ranks: &BTreeSet<(u64, u64)>| {
            ranks.first().map(|(rank, _)| (ranks.len(), Reverse(*rank), site))
        };
        let ranks = self.strangers.entry(site).or_default();
        if let Some(before) = weight(ranks) {
            self.weights.remove(&before);
        }
        change(ranks);
        match weight(ranks) {
            Some(after) => drop(self.weights.insert(after)),
            None => drop(self.strangers.remove(&site)),
        }
    }
}

/// The place of one connection. HTTP/1 has at most one open request at a time.
#[derive(Debug)]
pub(crate) struct Place {
    places: Arc<Places>,
    id: u64,
    /// The peer has yet to read a part of the last response.
    pub(crate) is_blocked: Arc<AtomicBool>,
}

impl Place {
    /// Notes that a request is open.
    pub(crate) fn begin(&self) {
        let mut table = self.places.lock();
        let Some(rank) = table.entries.get(&self.id).map(|entry| entry.rank) else { return };
        table.idle.remove(&(rank, self.id));
    }

    /// Notes that the response of the open request is complete.
    pub(crate) fn end(&self) {
        let mut table = self.places.lock();
        table.next += 1;
        let rank = table.next;
        let Some(entry) = table.entries.get_mut(&self.id) else { return };
        let (site, before) = (entry.site, std::mem::replace(&mut entry.rank, rank));
        if entry.is_known {
            let holder = entry.holder.clone();
            table.idle.insert((rank, self.id));
            if let Some(ranks) = holder.and_then(|holder| table.holders.get_mut(&holder)) {
                ranks.remove(&(before, self.id));
                ranks.insert((rank, self.id));
            }
        } else {
            table.remove_stranger(site, before, self.id);
            table.add_stranger(site, rank, self.id);
        }
    }

    /// Notes that the client has shown an identity, while a request of it is open or, if not `is_busy`, before the first.
    /// `holder` is the identity, unless the whole fleet shares it. At the limit of known connections another one gives
    /// way: one of an identity with more than half of them, or else the one that has been idle longest. Without one this
    /// connection stays a stranger's.
    pub(crate) fn recognise(&self, holder: Option<&str>, is_busy: bool) {
        let mut table = self.places.lock();
        if table.entries.get(&self.id).is_none_or(|entry| entry.is_known) {
            return;
        }
        let is_full = table.num_known >= self.places.max_known;
        let limit = self.places.max_known;
        let evicted = if is_full { table.make_room(limit, holder) } else { None };
        if is_full && evicted.is_none() {
            return;
        }
        let Some(entry) = table.entries.get_mut(&self.id) else { return };
        let holder: Option<Arc<str>> = holder.map(Into::into);
        (entry.is_known, entry.holder) = (true, holder.clone());
        let (site, rank) = (entry.site, entry.rank);
        table.remove_stranger(site, rank, self.id);
        if let Some(holder) = holder {
            table.holders.entry(holder).or_default().insert((rank, self.id));
        }
        table.num_known += 1;
        if !is_busy {
            table.idle.insert((rank, self.id));
        }
        drop(table);
        self.places.close(evicted);
    }

    fn leave(&self) {
        self.places.lock().remove(self.id);
    }
}

/// Takes its connection out of the table for good when dropped.
pub(crate) struct EndOfConnection(pub(crate) Arc<Place>);

impl Drop for EndOfConnection {
    fn drop(&mut self) {
        self.0.leave();
    }
}

/// The handle of a connection in the extensions of its requests.
#[derive(Clone, Debug)]
pub struct Standing(pub(crate) Arc<Place>);

impl Standing {
    /// Notes that the client has shown an identity, so that its connection does not count with those of strangers. Call
    /// it while a request is open. A client certificate has the same effect without a call. `holder` is the name of the
    /// identity, which bounds its connections at the limit; `None` for one that the whole fleet shares.
    pub fn recognise(&self, holder: Option<&str>) {
        self.0.recognise(holder, true);
    }
}

const EVICTION_TIMEOUT: Duration = Duration::from_secs(1);
