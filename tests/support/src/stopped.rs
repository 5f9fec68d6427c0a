//! Waits until a process that was sent `SIGSTOP` has stopped.

use std::time::{Duration, Instant};

/// Returns when no thread of the process runs any more, within a minute. The thread that takes the signal may be the
/// last to get a processor.
///
/// # Panics
/// When the process still runs after a minute, or is gone.
pub fn await_stop(pid: u32) {
    let limit = Instant::now() + Duration::from_secs(60);
    while !has_stopped(pid) {
        assert!(Instant::now() < limit, "process {pid} does not stop");
        std::thread::yield_now();
    }
}

fn has_stopped(pid: u32) -> bool {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).expect("its threads").flatten();
    tasks.map(|task| std::fs::read_to_string(task.path().join("stat"))).all(|stat| {
        // The state follows the name, which is in parentheses.
        stat.is_ok_and(|stat| stat.rsplit_once(") ").is_some_and(|rest| rest.1.starts_with('T')))
    })
}
