//! Open descriptors of a process, also of threads with a table of their own.

use std::collections::HashSet;
use std::io;
use std::path::{Path, PathBuf};

/// The number of open descriptors of `process`: its number, or `self`.
///
/// # Errors
/// When it is gone, or belongs to another user.
pub fn num_descriptors(process: &str) -> io::Result<usize> {
    let folder = PathBuf::from(format!("/proc/{process}"));
    let (num_shared, sockets) = list(&folder.join("fd"))?;
    let mut num_own_tables = 0;
    for thread in std::fs::read_dir(folder.join("task"))?.flatten() {
        // A thread may end meanwhile.
        let name = std::fs::read_to_string(thread.path().join("comm")).unwrap_or_default();
        if name.trim() == HAS_OWN_TABLE
            && let Ok((num_own, own_sockets)) = list(&thread.path().join("fd"))
        {
            // It has one socket at least. Without a table of its own, they are in the shared one.
            num_own_tables += if own_sockets.is_subset(&sockets) { 0 } else { num_own };
        }
    }
    Ok(num_shared + num_own_tables)
}

/// The number of descriptors in a table, and its sockets.
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
