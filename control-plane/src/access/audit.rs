//! The audit log: each change of the fleet with its caller, in memory and as JSON lines in a file.

use std::collections::{HashMap, VecDeque};
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use control_api::{AuditEntry, AuditList};
use prometheus::IntCounter;
use tracing::{error, info};

use super::audit_budget::Budgets;
pub(crate) use super::audit_budget::Kind;

/// See the [module](self). Clones share one log.
#[derive(Clone, Debug)]
pub(crate) struct AuditLog {
    kept: Arc<Mutex<Kept>>,
    file: Option<FileHandle>,
    budgets: Arc<Budgets>,
}

#[derive(Debug)]
struct Kept {
    last_seq: u64,
    entries: VecDeque<AuditEntry>,
}

impl Kept {
    /// Drops the oldest entry of the caller with the most entries. The entries of others stay.
    fn drop_one(&mut self) {
        let mut counts: HashMap<&str, usize> = HashMap::new();
        for entry in &self.entries {
            *counts.entry(&entry.name).or_default() += 1;
        }
        let most = counts.values().copied().max().unwrap_or(0);
        let is_most = |entry: &AuditEntry| counts.get(entry.name.as_str()) == Some(&most);
        if let Some(idx) = self.entries.iter().position(is_most) {
            self.entries.remove(idx);
        }
    }
}

/// The sending side of the thread that writes the file.
#[derive(Clone, Debug)]
struct FileHandle {
    lines: SyncSender<String>,
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
        let kept = Arc::new(Mutex::new(Kept { last_seq, entries: VecDeque::new() }));
        let budgets = Arc::new(Budgets::new());
        let Some(path) = path else { return Ok(Self { kept, file: None, budgets }) };
        let writer = Writer { path: path.to_owned(), file: open(path)?, must_break: false };
        let (lines, queue) = sync_channel(QUEUE_LINES);
        let handle = FileHandle { lines, error: Arc::default(), lost };
        let (error, lost) = (Arc::clone(&handle.error), handle.lost.clone());
        std::thread::Builder::new()
            .name("switchyard-audit".to_owned())
            .spawn(move || writer.run(&queue, &error, &lost))?;
        Ok(Self { kept, file: Some(handle), budgets })
    }

    /// Adds an entry; its number and time are set here. Never waits for the file.
    pub(crate) fn add(&self, mut entry: AuditEntry) {
        let mut kept = lock(&self.kept);
        kept.last_seq += 1;
        (entry.seq, entry.unix_ms) = (kept.last_seq, unix_ms());
        // Under the lock, so that the file has the order of the numbers.
        if let Some(file) = &self.file {
            let line = serde_json::to_string(&entry).unwrap_or_default();
            if file.lines.try_send(line).is_err() {
                file.lost.inc();
                lock(&file.error).get_or_insert_with(|| "its disk is too slow".to_owned());
            }
        }
        if kept.entries.len() == CAPACITY {
            kept.drop_one();
        }
        kept.entries.push_back(entry);
    }

    /// Takes an entry out of the budget of a [caller](crate::access::Caller::budget). Returns the number of the caller's
    /// attempts before it that have no entry, or `None` if this one gets none either.
    pub(crate) fn allow(&self, caller: &str, kind: Kind) -> Option<u64> {
        self.budgets.take(caller, kind)
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
        let entries = kept.entries.iter().filter(|entry| entry.seq > seq).cloned().collect();
        AuditList { last_seq: kept.last_seq, entries }
    }

    /// Reason why the file lacks entries, if the last one was lost.
    pub(crate) fn error(&self) -> Option<String> {
        self.file.as_ref().and_then(|file| lock(&file.error).clone())
    }
}

/// The thread's side of the file.
struct Writer {
    path: PathBuf,
    file: File,
    /// A part of a line may be at the end of the file.
    must_break: bool,
}

impl Writer {
    fn run(mut self, queue: &Receiver<String>, error: &Mutex<Option<String>>, lost: &IntCounter) {
        while let Ok(line) = queue.recv() {
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

/// Entries in memory.
const CAPACITY: usize = 1000;
/// Lines that wait for the disk.
const QUEUE_LINES: usize = 4096;
const NUMBERS_PER_MS: u64 = 1000;
const OWNER_ONLY: u32 = 0o600;

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

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
