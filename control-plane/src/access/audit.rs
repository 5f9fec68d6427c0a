//! The audit log: each change of the fleet and each ticket with its caller, in memory and as JSON lines in a file.

use std::collections::{HashMap, VecDeque};
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use control_api::{AuditEntry, AuditList};
use prometheus::IntCounter;
use tracing::{error, info};

use super::audit_budget::Budgets;
pub(crate) use super::audit_budget::Kind;
use super::ticket_audit::{LOOK_PERIOD, TicketCounts};

/// See the [module](self). Clones share one log.
#[derive(Clone, Debug)]
pub(crate) struct AuditLog {
    kept: Arc<Mutex<Kept>>,
    file: Option<FileHandle>,
    budgets: Arc<Budgets>,
    tickets: Arc<Mutex<TicketCounts>>,
    origin: Instant,
}

#[derive(Debug, Default)]
struct Kept {
    last_seq: u64,
    changes: Ring,
    /// Apart from the changes, which are few in a fleet with many clients.
    tickets: Ring,
}

/// The last entries, oldest first.
#[derive(Debug, Default)]
struct Ring(VecDeque<AuditEntry>);

impl Ring {
    fn push(&mut self, entry: AuditEntry) {
        if self.0.len() == CAPACITY {
            self.drop_one();
        }
        self.0.push_back(entry);
    }

    /// Drops the oldest entry of the caller with the most entries. The entries of others stay.
    fn drop_one(&mut self) {
        let mut counts: HashMap<&str, usize> = HashMap::new();
        for entry in &self.0 {
            *counts.entry(&entry.name).or_default() += 1;
        }
        let most = counts.values().copied().max().unwrap_or(0);
        let is_most = |entry: &AuditEntry| counts.get(entry.name.as_str()) == Some(&most);
        if let Some(idx) = self.0.iter().position(is_most) {
            self.0.remove(idx);
        }
    }
}

/// The sending side of the thread that writes the file.
#[derive(Clone, Debug)]
struct FileHandle {
    lines: SyncSender<Line>,
    /// Reason why the last line was lost.
    error: Arc<Mutex<Option<String>>>,
    lost: IntCounter,
}

impl AuditLog {
    /// A log that appends to `path`, if there is one. The file is created for its owner alone. It is opened again when
    /// another file has taken its place, so that it can be rotated.
    ///
    /// # Errors
    /// When the file cannot be opened, or the thread that writes it cannot be started.
    pub(crate) fn open(path: Option<&Path>, lost: IntCounter) -> io::Result<Self> {
        // Numbers rise over restarts as long as clocks do.
        let last_seq = unix_ms() * NUMBERS_PER_MS;
        let kept = Arc::new(Mutex::new(Kept { last_seq, ..Kept::default() }));
        let log = Self {
            kept,
            file: None,
            budgets: Arc::new(Budgets::new()),
            tickets: Arc::default(),
            origin: Instant::now(),
        };
        let Some(path) = path else { return Ok(log) };
        let writer = Writer { path: path.to_owned(), file: open(path)?, must_break: false };
        let (lines, queue) = sync_channel(QUEUE_LINES);
        let handle = FileHandle { lines, error: Arc::default(), lost };
        let (error, lost) = (Arc::clone(&handle.error), handle.lost.clone());
        std::thread::Builder::new()
            .name("switchyard-audit".to_owned())
            .spawn(move || writer.run(&queue, &error, &lost))?;
        Ok(Self { file: Some(handle), ..log })
    }

    /// Adds an entry; its number and time are set here. Never waits for the file.
    pub(crate) fn add(&self, mut entry: AuditEntry) {
        let mut kept = lock(&self.kept);
        kept.last_seq += 1;
        (entry.seq, entry.unix_ms) = (kept.last_seq, unix_ms());
        // Under the lock, so that the file has the order of the numbers.
        if let Some(file) = &self.file {
            let line = serde_json::to_string(&entry).unwrap_or_default();
            if file.lines.try_send(Line::Entry(line)).is_err() {
                file.lost.inc();
                lock(&file.error).get_or_insert_with(|| "its disk is too slow".to_owned());
            }
        }
        match entry.tickets {
            Some(_) => kept.tickets.push(entry),
            None => kept.changes.push(entry),
        }
    }

    /// Adds the entry of a request for a ticket of a caller at `site`, or counts the request if the log has an entry like
    /// it: see [`ticket_audit`](super::ticket_audit). `budget` is that of the [caller](crate::access::Caller::budget).
    pub(crate) fn add_ticket(&self, mut entry: AuditEntry, budget: &str, site: &str) {
        let now = self.origin.elapsed();
        let mut tickets = lock(&self.tickets);
        if tickets.count(&entry, site) {
            return;
        }
        let kind = if entry.outcome == "ok" { Kind::Ticket } else { Kind::Failure };
        let Some(num_skipped) = self.budgets.take(budget, kind) else { return };
        tickets.begin(&entry, site, now);
        drop(tickets);
        note_skipped(&mut entry, num_skipped, kind);
        self.add(entry);
    }

    /// Adds the counts of tickets whose period has ended, until the caller drops the future.
    pub(crate) async fn follow_tickets(self) {
        loop {
            tokio::time::sleep(LOOK_PERIOD).await;
            self.add_all(lock(&self.tickets).ended(self.origin.elapsed()));
        }
    }

    /// Adds the counts of all tickets so far, and waits up to one second until the file has every entry. Blocks.
    pub(crate) fn close(&self) {
        self.add_all(lock(&self.tickets).take_all(self.origin.elapsed()));
        if let Some(file) = &self.file {
            let (done, is_done) = sync_channel(1);
            if file.lines.try_send(Line::Flush(done)).is_ok() {
                let _ = is_done.recv_timeout(CLOSE_TIMEOUT);
            }
        }
    }

    fn add_all(&self, entries: Vec<AuditEntry>) {
        for entry in entries {
            self.add(entry);
        }
    }

    /// Adds the entry of a change, if the budget of the [caller](crate::access::Caller::budget) has room for it.
    pub(crate) fn add_change(&self, mut entry: AuditEntry, budget: &str, kind: Kind) {
        if let Some(num_skipped) = self.budgets.take(budget, kind) {
            note_skipped(&mut entry, num_skipped, kind);
            self.add(entry);
        }
    }

    /// Adds a change that the control plane has made by itself.
    pub(crate) fn note(&self, action: &str, outcome: &str, detail: Option<String>) {
        self.add(AuditEntry {
            name: "control-plane".to_owned(),
            credential: "none".to_owned(),
            action: action.to_owned(),
            outcome: outcome.to_owned(),
            detail,
            ..AuditEntry::default()
        });
    }

    /// The entries after number `seq`, oldest first. All, if `seq` is of an earlier process.
    pub(crate) fn after(&self, seq: u64) -> AuditList {
        let kept = lock(&self.kept);
        let seq = if seq > kept.last_seq { 0 } else { seq };
        let all = kept.changes.0.iter().chain(&kept.tickets.0);
        let mut entries: Vec<_> = all.filter(|entry| entry.seq > seq).cloned().collect();
        entries.sort_by_key(|entry| entry.seq);
        AuditList { last_seq: kept.last_seq, entries }
    }

    /// Reason why the file lacks entries, if the last one was lost.
    pub(crate) fn error(&self) -> Option<String> {
        self.file.as_ref().and_then(|file| lock(&file.error).clone())
    }
}

/// Says in an entry how many of the caller are left out before it.
fn note_skipped(entry: &mut AuditEntry, num_skipped: u64, kind: Kind) {
    if num_skipped == 0 {
        return;
    }
    let what = match kind {
        Kind::Change => "changes",
        Kind::Ticket => "tickets",
        Kind::Failure => "failed attempts",
    };
    let (text, name) = (entry.detail.take().unwrap_or_default(), &entry.name);
    entry.detail =
        Some(format!("{text} ({num_skipped} {what} of {name} before it are not listed)"));
}

/// Work of the thread that writes the file.
enum Line {
    Entry(String),
    /// Says when all earlier lines are written.
    Flush(SyncSender<()>),
}

/// The thread's side of the file.
struct Writer {
    path: PathBuf,
    file: File,
    /// A part of a line may be at the end of the file.
    must_break: bool,
}

impl Writer {
    fn run(mut self, queue: &Receiver<Line>, error: &Mutex<Option<String>>, lost: &IntCounter) {
        while let Ok(line) = queue.recv() {
            let line = match line {
                Line::Entry(line) => line,
                Line::Flush(done) => {
                    let _ = done.try_send(());
                    continue;
                }
            };
            let outcome = self.write(&line);
            let reason = outcome.as_ref().err().map(ToString::to_string);
            let before = std::mem::replace(&mut *lock(error), reason);
            let path = self.path.display();
            match (outcome, before) {
                (Ok(()), Some(_)) => info!(%path, "the audit log can be written again"),
                (Ok(()), None) => {}
                (Err(err), before) => {
                    lost.inc();
                    if before.is_none() {
                        error!(%path, error = %err, "the audit log cannot be written: changes go on, and its file lacks them");
                    }
                }
            }
        }
    }

    fn write(&mut self, line: &str) -> io::Result<()> {
        let is_current = std::fs::metadata(&self.path).is_ok_and(|now| {
            let held = self.file.metadata();
            held.is_ok_and(|held| (held.dev(), held.ino()) == (now.dev(), now.ino()))
        });
        if !is_current {
            self.file = open(&self.path)?;
            self.must_break = false;
        }
        let start = if self.must_break { "\n" } else { "" };
        let outcome = self.file.write_all(format!("{start}{line}\n").as_bytes());
        self.must_break = outcome.is_err();
        outcome
    }
}

fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new().create(true).append(true).mode(OWNER_ONLY).open(path)
}

fn unix_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_millis() as u64)
}

/// Ignores poisoning: a panic in one task must not stop the others.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Entries in memory: of changes, and as many of tickets.
const CAPACITY: usize = 1000;
/// Lines that wait for the disk.
const QUEUE_LINES: usize = 4096;
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);
const NUMBERS_PER_MS: u64 = 1000;
const OWNER_ONLY: u32 = 0o600;

#[cfg(test)]
mod tests {
    use control_api::{AuditTickets, TicketRole};

    use super::*;

    fn lost() -> IntCounter {
        IntCounter::new("lost", "lost").unwrap()
    }

    fn entry(detail: &str) -> AuditEntry {
        AuditEntry { detail: Some(detail.to_owned()), ..AuditEntry::default() }
    }

    fn await_lines(path: &Path, wanted: usize) -> Vec<AuditEntry> {
        let begin = Instant::now();
        loop {
            let text = std::fs::read_to_string(path).unwrap_or_default();
            let entries: Vec<_> =
                text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
            if entries.len() >= wanted || begin.elapsed() > Duration::from_secs(20) {
                assert_eq!(entries.len(), wanted, "{text}");
                return entries;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    #[test]
    fn entries_are_kept_in_memory_and_in_a_file_that_may_be_rotated() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("audit");
        let log = AuditLog::open(Some(&path), lost()).unwrap();
        for idx in 0..CAPACITY + 5 {
            log.add(entry(&format!("{idx}\n")));
        }
        let kept = log.after(0);
        assert_eq!(
            (kept.entries.len(), kept.entries[0].detail.as_deref()),
            (CAPACITY, Some("5\n"))
        );
        assert_eq!(kept.entries.last().unwrap().seq, kept.last_seq);
        assert_eq!(log.after(kept.last_seq - 2).entries.len(), 2);
        assert_eq!(log.after(u64::MAX).entries.len(), CAPACITY);
        assert_eq!(await_lines(&path, CAPACITY + 5)[5..], kept.entries);
        std::fs::rename(&path, dir.path().join("audit.1")).unwrap();
        log.add(entry("later"));
        assert_eq!(await_lines(&path, 1)[0].detail.as_deref(), Some("later"));
    }

    #[test]
    fn one_caller_pushes_no_entry_of_another_out() {
        let log = AuditLog::open(None, lost()).unwrap();
        let entry = |name: &str| AuditEntry { name: name.to_owned(), ..AuditEntry::default() };
        log.add(entry("ops"));
        for _ in 0..3 * CAPACITY {
            log.add(entry("server"));
        }
        log.add(entry("ops"));
        let names: Vec<_> = log.after(0).entries.into_iter().map(|entry| entry.name).collect();
        assert_eq!(names.len(), CAPACITY);
        assert_eq!(
            (names[0].as_str(), names[1].as_str(), names[CAPACITY - 1].as_str()),
            ("ops", "server", "ops")
        );
    }

    fn ticket(name: &str, outcome: &str) -> AuditEntry {
        let role = (outcome == "ok").then_some(TicketRole::Client);
        let tickets = Some(AuditTickets { count: 1, role, ..AuditTickets::default() });
        let (name, outcome) = (name.to_owned(), outcome.to_owned());
        AuditEntry { name, outcome, tickets, ..AuditEntry::default() }
    }

    #[test]
    fn tickets_push_no_change_out_and_their_counts_are_written_at_the_end() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("audit");
        let log = AuditLog::open(Some(&path), lost()).unwrap();
        log.add(entry("first"));
        for caller in 0..CAPACITY + 5 {
            log.add_ticket(ticket(&caller.to_string(), "ok"), &caller.to_string(), "");
        }
        for _ in 0..7 {
            log.add_ticket(ticket("0", "ok"), "0", "");
        }
        log.add(entry("last"));
        let kept = log.after(0).entries;
        assert_eq!(kept.len(), CAPACITY + 2);
        assert!(kept.is_sorted_by_key(|entry| entry.seq));
        assert_eq!(kept[0].detail.as_deref(), Some("first"));
        log.close();
        let lines = await_lines(&path, CAPACITY + 8);
        let counted = lines.last().unwrap();
        assert_eq!((counted.name.as_str(), counted.tickets.unwrap().count), ("0", 7));
        let detail = counted.detail.as_deref().unwrap();
        assert!(detail.starts_with("7 more tickets of the role client in "), "{detail}");
    }

    #[test]
    fn refused_tickets_of_a_caller_at_many_addresses_are_limited() {
        let log = AuditLog::open(None, lost()).unwrap();
        for host in 0..1000 {
            log.add_ticket(ticket("viewer", "forbidden"), "viewer", &host.to_string());
        }
        log.add_ticket(ticket("other", "forbidden"), "other", "");
        let entries = log.after(0).entries;
        let of_viewer = entries.iter().filter(|entry| entry.name == "viewer").count();
        // A slow host gives the caller another entry each second.
        assert!((10..100).contains(&of_viewer), "{of_viewer}");
        assert_eq!(entries.last().unwrap().name, "other");
    }

    /// `/dev/full` answers every write as a full disk does.
    #[test]
    fn a_full_disk_stops_no_change_and_is_counted() {
        let lost = lost();
        let log = AuditLog::open(Some(Path::new("/dev/full")), lost.clone()).unwrap();
        log.add(entry("one"));
        let begin = Instant::now();
        while log.error().is_none() && begin.elapsed() < Duration::from_secs(20) {
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(log.error().unwrap().contains("space"), "{:?}", log.error());
        assert_eq!(lost.get(), 1);
        assert_eq!(log.after(0).entries.len(), 1);
        assert!(AuditLog::open(Some(Path::new("/nonexistent/audit")), lost).is_err());
    }
}
