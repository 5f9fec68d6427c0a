//! Open descriptors of a process, those of its threads with tables of their own among them.
//!
//! Other crates' tests include this file by its path, as they do `skip.rs`.

use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};

/// Number and target.
type Entry = (OsString, Option<PathBuf>);

/// How many descriptors `process` has open: its number, or `self`.
///
/// # Errors
/// When it is gone, or not this user's.
pub fn num_descriptors(process: &str) -> io::Result<usize> {
    let folder = PathBuf::from(format!("/proc/{process}"));
    let shared = list(&folder.join("fd"))?;
    let mut num_apart = 0;
    for thread in std::fs::read_dir(folder.join("task"))?.flatten() {
        // A thread may end meanwhile.
        let name = std::fs::read_to_string(thread.path().join("comm")).unwrap_or_default();
        if name.trim() == HAS_OWN_TABLE
            && let Ok(own) = list(&thread.path().join("fd"))
        {
            // Where the system gives none, its table is the shared one.
            let is_shared = own.iter().all(|entry| shared.contains(entry));
            num_apart += if is_shared { 0 } else { own.len() };
        }
    }
    Ok(shared.len() + num_apart)
}

fn list(folder: &Path) -> io::Result<Vec<Entry>> {
    let entries = std::fs::read_dir(folder)?.flatten();
    Ok(entries.map(|entry| (entry.file_name(), std::fs::read_link(entry.path()).ok())).collect())
}

/// The thread that holds connections (`p2p-core/src/bootstrap/sentry.rs`).
const HAS_OWN_TABLE: &str = "sy-liveness";
