//! Limits the number of handshakes under way.
//!
//! A newcomer is never turned away. If the limit is reached, it evicts another handshake.
//! Handshakes without a valid hello are evicted first. Among these, the oldest one of the source
//! with the most handshakes goes first. A healthy peer sends its hello within one round trip. So a
//! source with many silent connections evicts its own.
//!
//! No handshake is evicted in its first moments. Newcomers wait in the accept queue meanwhile, so
//! many healthy peers at once do not evict each other.

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::Notify;

/// The handshakes under way.
#[derive(Debug, Clone)]
pub(super) struct Admission {
    cap: usize,
    table: Arc<Mutex<Table>>,
}

#[derive(Debug, Default)]
struct Table {
    next_id: u64,
    // Ordered by id, which is also the order of age.
    entries: BTreeMap<u64, Entry>,
}

#[derive(Debug)]
struct Entry {
    source: IpAddr,
    is_valid: bool,
    since: Instant,
    evicted: Arc<Notify>,
}

/// A handshake's entry in the table, removed when dropped.
#[derive(Debug)]
pub(super) struct HandshakeEntry {
    id: u64,
    table: Arc<Mutex<Table>>,
    evicted: Arc<Notify>,
}

impl Admission {
    pub(super) fn new(cap: usize) -> Self {
        Self { cap: cap.max(1), table: Arc::default() }
    }

    /// Time that a newcomer has to wait, unless an entry becomes free before.
    pub(super) fn delay(&self) -> Duration {
        let table = lock(&self.table);
        if table.entries.len() < self.cap {
            return Duration::ZERO;
        }
        let victim = table.victim().and_then(|id| table.entries.get(&id));
        victim.map_or(Duration::ZERO, |entry| {
            let stay = if entry.is_valid { STAY_VALID } else { STAY_SILENT };
            stay.saturating_sub(entry.since.elapsed())
        })
    }

    /// Adds an entry for a newcomer. The flag is true if another handshake was evicted for it.
    pub(super) fn admit(&self, source: IpAddr) -> (HandshakeEntry, bool) {
        let mut table = lock(&self.table);
        let full = table.entries.len() >= self.cap;
        if full
            && let Some(victim) = table.victim()
            && let Some(entry) = table.entries.remove(&victim)
        {
            // The notification is stored if the task does not wait yet.
            entry.evicted.notify_one();
        }
        let id = table.next_id;
        table.next_id += 1;
        let evicted = Arc::new(Notify::new());
        let since = Instant::now();
        let entry = Entry { source, is_valid: false, since, evicted: Arc::clone(&evicted) };
        table.entries.insert(id, entry);
        (HandshakeEntry { id, table: Arc::clone(&self.table), evicted }, full)
    }
}

impl HandshakeEntry {
    /// Marks this handshake as one with a valid hello. Such handshakes are evicted last.
    pub(super) fn mark_valid(&self) {
        if let Some(entry) = lock(&self.table).entries.get_mut(&self.id) {
            entry.is_valid = true;
        }
    }

    /// Returns when this handshake is evicted.
    pub(super) async fn evicted(&self) {
        self.evicted.notified().await;
    }
}

impl Drop for HandshakeEntry {
    fn drop(&mut self) {
        lock(&self.table).entries.remove(&self.id);
    }
}

impl Table {
    fn victim(&self) -> Option<u64> {
        [false, true].into_iter().find_map(|is_valid| {
            let mut num_by_source: HashMap<IpAddr, usize> = HashMap::new();
            for entry in self.entries.values().filter(|e| e.is_valid == is_valid) {
                *num_by_source.entry(entry.source).or_default() += 1;
            }
            let most = *num_by_source.values().max()?;
            self.entries
                .iter()
                .find(|(_, e)| {
                    e.is_valid == is_valid && num_by_source.get(&e.source) == Some(&most)
                })
                .map(|(id, _)| *id)
        })
    }
}

fn lock(table: &Mutex<Table>) -> MutexGuard<'_, Table> {
    // No code that holds the lock can leave the table half changed.
    table.lock().unwrap_or_else(PoisonError::into_inner)
}

/// An entry cannot be evicted for this long: before a hello has come, and after.
const STAY_SILENT: Duration = Duration::from_millis(100);
const STAY_VALID: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_oldest_silent_one_of_the_busiest_source_gives_way() {
        let admission = Admission::new(4);
        let [quiet, busy] = [IpAddr::from([10, 0, 0, 1]), IpAddr::from([10, 0, 0, 2])];
        let (healthy, _) = admission.admit(quiet);
        let (valid, _) = admission.admit(busy);
        valid.mark_valid();
        let (silent_old, _) = admission.admit(busy);
        let (_silent_new, pushed) = admission.admit(busy);
        assert!(!pushed);
        let (_newcomer, pushed) = admission.admit(quiet);
        assert!(pushed);
        silent_old.evicted().await;
        assert!(
            tokio::time::timeout(std::time::Duration::from_millis(20), async {
                tokio::select! { () = healthy.evicted() => {}, () = valid.evicted() => {} }
            })
            .await
            .is_err()
        );
    }

    #[test]
    fn a_newcomer_waits_for_a_place_but_not_for_ever() {
        let admission = Admission::new(1);
        let source = IpAddr::from([10, 0, 0, 1]);
        assert_eq!(admission.delay(), Duration::ZERO);
        let (entry, _) = admission.admit(source);
        assert!(admission.delay() <= STAY_SILENT);
        entry.mark_valid();
        assert!(admission.delay() > STAY_SILENT && admission.delay() <= STAY_VALID);
        drop(entry);
        assert_eq!(admission.delay(), Duration::ZERO);
        let (_entry, _) = admission.admit(source);
        std::thread::sleep(STAY_SILENT);
        assert_eq!(admission.delay(), Duration::ZERO);
        assert!(admission.admit(source).1);
    }

    #[test]
    fn a_place_is_given_back() {
        let admission = Admission::new(2);
        for _ in 0..10 {
            let (_entry, pushed) = admission.admit(IpAddr::from([127, 0, 0, 1]));
            assert!(!pushed);
        }
        assert!(lock(&admission.table).entries.is_empty());
    }
}
