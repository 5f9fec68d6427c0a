//! Entries of the audit log about tickets, few enough for a large fleet. Sans-I/O: times are arguments.
//!
//! A client asks for a ticket after each half of a ticket's life, so 2,000 clients ask seven times a second for good. The
//! first request of a caller is an entry at once. The next ones of the same kind are counted, and the count is an entry
//! after each [`PERIOD`]. An entry therefore names each caller, and no ticket is missing from the counts.

use std::collections::HashMap;
use std::time::Duration;

use control_api::{AuditEntry, AuditTickets, TicketRole};

/// The counts of all callers.
#[derive(Debug, Default)]
pub(super) struct TicketCounts {
    callers: HashMap<Key, Count>,
    /// Time of the next look for periods that have ended.
    look_at: Duration,
}

/// Requests that share a count.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Key {
    name: String,
    credential: String,
    /// The host of the caller.
    site: String,
    role: Option<TicketRole>,
    outcome: String,
}

#[derive(Debug)]
struct Count {
    /// The first entry, without its tickets.
    like: AuditEntry,
    since: Duration,
    /// Requests since the last entry.
    tickets: AuditTickets,
}

impl TicketCounts {
    /// Counts a request of a caller at `site` if an earlier entry is like this one. Returns false if it needs an entry.
    pub(super) fn count(&mut self, entry: &AuditEntry, site: &str) -> bool {
        let Some(count) = self.callers.get_mut(&Key::of(entry, site)) else { return false };
        count.tickets = joined(count.tickets, entry.tickets.unwrap_or_default());
        true
    }

    /// Begins to count the requests that are like `entry`, which is in the log. Without room it does nothing, and each
    /// request takes an entry out of the caller's budget.
    pub(super) fn begin(&mut self, entry: &AuditEntry, site: &str, now: Duration) {
        if self.callers.len() < MAX_COUNTS {
            let tickets = AuditTickets { count: 0, ..AuditTickets::default() };
            let like = AuditEntry { detail: None, request_id: None, ..entry.clone() };
            self.callers.insert(Key::of(entry, site), Count { like, since: now, tickets });
        }
    }

    /// The entries for periods that have ended. Looks at all counts, at most once in [`LOOK_PERIOD`].
    pub(super) fn ended(&mut self, now: Duration) -> Vec<AuditEntry> {
        if now < self.look_at {
            return Vec::new();
        }
        self.look_at = now + LOOK_PERIOD;
        let mut entries = Vec::new();
        self.callers.retain(|_, count| {
            if now < count.since + PERIOD {
                return true;
            }
            let entry = count.take(now);
            let is_in_use = entry.is_some();
            entries.extend(entry);
            is_in_use
        });
        entries
    }

    /// The entries for all requests that have none yet. Forgets all callers.
    pub(super) fn take_all(&mut self, now: Duration) -> Vec<AuditEntry> {
        self.callers.drain().filter_map(|(_, mut count)| count.take(now)).collect()
    }
}

impl Count {
    /// The entry for the requests since the last one, if there are any.
    fn take(&mut self, now: Duration) -> Option<AuditEntry> {
        let tickets = std::mem::take(&mut self.tickets);
        let since = std::mem::replace(&mut self.since, now);
        if tickets.count == 0 {
            return None;
        }
        let what = match self.like.tickets.and_then(|tickets| tickets.role) {
            Some(role) => format!("tickets of the role {}", role.name()),
            None => "requests".to_owned(),
        };
        let seconds = now.saturating_sub(since).as_secs();
        let detail = Some(format!("{} more {what} in {seconds} s", tickets.count));
        Some(AuditEntry { tickets: Some(tickets), detail, ..self.like.clone() })
    }
}

impl Key {
    fn of(entry: &AuditEntry, site: &str) -> Self {
        Self {
            name: entry.name.clone(),
            credential: entry.credential.clone(),
            site: site.to_owned(),
            role: entry.tickets.and_then(|tickets| tickets.role),
            outcome: entry.outcome.clone(),
        }
    }
}

fn joined(one: AuditTickets, other: AuditTickets) -> AuditTickets {
    AuditTickets {
        count: one.count + other.count,
        role: one.role.or(other.role),
        first_epoch: one.first_epoch.into_iter().chain(other.first_epoch).min(),
        last_epoch: one.last_epoch.max(other.last_epoch),
    }
}

/// Time between two entries of one caller.
const PERIOD: Duration = Duration::from_secs(3600);
pub(super) const LOOK_PERIOD: Duration = Duration::from_secs(10);
/// Twice as many as members.
const MAX_COUNTS: usize = 8192;

#[cfg(test)]
mod tests {
    use super::*;

    fn issued(name: &str, role: TicketRole, epoch: u64) -> AuditEntry {
        let (first_epoch, last_epoch) = (Some(epoch), Some(epoch));
        AuditEntry {
            name: name.to_owned(),
            outcome: "ok".to_owned(),
            tickets: Some(AuditTickets { count: 1, role: Some(role), first_epoch, last_epoch }),
            ..AuditEntry::default()
        }
    }

    /// Counts a request as the log does. Returns its entry.
    fn ask(counts: &mut TicketCounts, entry: &AuditEntry, now: Duration) -> Option<AuditEntry> {
        if counts.count(entry, "") {
            return None;
        }
        counts.begin(entry, "", now);
        Some(entry.clone())
    }

    /// A fleet at rest: each of 2,000 callers asks every five minutes, for three hours and a half.
    #[test]
    fn each_ticket_is_counted_once_and_each_caller_has_an_entry_an_hour() {
        let mut counts = TicketCounts::default();
        let (mut entries, mut asked) = (Vec::new(), 0);
        for second in (0..12_600_u64).step_by(10) {
            let now = Duration::from_secs(second);
            for caller in 0..2000_u64 {
                if (second / 10 + caller).is_multiple_of(30) {
                    let role = [TicketRole::Client, TicketRole::Server][caller as usize % 2];
                    let entry = issued(&format!("c{caller}"), role, 1 + second / 60);
                    entries.extend(ask(&mut counts, &entry, now));
                    asked += 1;
                }
            }
            entries.extend(counts.ended(now));
        }
        assert!(entries.len() <= 2000 * 4, "{}", entries.len());
        entries.extend(counts.take_all(Duration::from_secs(12_600)));
        let listed = |entry: &AuditEntry| entry.tickets.unwrap();
        assert_eq!(entries.iter().map(|entry| listed(entry).count).sum::<u64>(), asked);
        let own: Vec<_> = entries.iter().filter(|entry| entry.name == "c0").map(listed).collect();
        let epochs: Vec<_> = own.iter().map(|own| (own.first_epoch, own.last_epoch)).collect();
        assert_eq!(epochs[0], (Some(1), Some(1)));
        assert_eq!(epochs[1], (Some(6), Some(61)));
        assert!(own.iter().all(|own| own.role == Some(TicketRole::Client)));
        assert!(counts.take_all(Duration::MAX).is_empty());
    }

    #[test]
    fn callers_roles_hosts_and_outcomes_have_entries_of_their_own() {
        let mut counts = TicketCounts::default();
        let one = issued("a", TicketRole::Client, 1);
        counts.begin(&one, "10.0.0.1", Duration::ZERO);
        assert!(counts.count(&one, "10.0.0.1"));
        assert!(!counts.count(&one, "10.0.0.2"));
        assert!(!counts.count(&issued("b", TicketRole::Client, 1), "10.0.0.1"));
        assert!(!counts.count(&issued("a", TicketRole::Server, 1), "10.0.0.1"));
        let refused = AuditEntry { outcome: "forbidden".to_owned(), ..one.clone() };
        assert!(!counts.count(&refused, "10.0.0.1"));
    }

    #[test]
    fn the_memory_for_counts_is_bounded_and_silent_callers_leave_it() {
        let mut counts = TicketCounts::default();
        for caller in 0..2 * MAX_COUNTS {
            ask(&mut counts, &issued(&caller.to_string(), TicketRole::Client, 1), Duration::ZERO);
        }
        assert_eq!(counts.callers.len(), MAX_COUNTS);
        assert!(counts.ended(PERIOD).is_empty());
        assert!(counts.callers.is_empty());
    }
}
