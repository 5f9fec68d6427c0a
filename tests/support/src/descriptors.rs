//! Open descriptors of a process, those of its threads with tables of their own among them.
//!
//! Other crates' tests include this file by its path, as they do `skip.rs`.

use std::collections::HashSet;
use std::io;
use std::path::{Path, PathBuf};

/// How many descriptors `process` has open: its number, or `self`.
///
/// # Errors
/// When it is gone, or not this user's.
pub fn num_descriptors(process: &str) -> io::Result<usize> {
    let folder = PathBuf::from(format!("/proc/{process}"));
    let (num_shared, sockets) = list(&folder.join("fd"))?;
    let mut num_apart = 0;
    for thread in std::fs::read_dir(folder.join("task"))?.flatten() {
        // A thread may end meanwhile.
        let name = std::fs::read_to_string(thread.path().join("comm")).unwrap_or_default();
        if name.trim() == HAS_OWN_TABLE
            && let Ok((num_own, own_sockets)) = list(&thread.path().join("fd"))
        {
            // It has one socket at least. Where the system gives no table, they are in the shared one.
            num_apart += if own_sockets.is_subset(&sockets) { 0 } else { num_own };
        }
    }
    Ok(num_shared + num_apart)
}

/// How many descriptors a table has, and which sockets.
fn list(folder: &Path) -> io::Result<(usize, HashSet<PathBuf>)> {
    let (mut num_descriptors, mut sockets) = (0, HashSet::new());
    for entry in std::fs::read_dir(folder)?.flatten() {
        num_descriptors += 1;
        let target = std::fs::read_link(entry.path()).unwrap_or_default();
        if target.to_string_lossy().starts_with("socket:") {
            sockets.insert(target);
        }
    }
    Ok((num_descriptors, sockets))
}

/// The thread that holds connections (`p2p-core/src/bootstrap/sentry.rs`).
const HAS_OWN_TABLE: &str = "sy-liveness";
