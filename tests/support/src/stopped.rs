//! Waits until a process that was sent `SIGSTOP` stands still. Included by path where it is needed.

use std::time::{Duration, Instant};

/// Returns when no thread of the process runs any more: the one that takes the signal first may be the last
/// to get a processor.
pub fn await_stop(pid: u32) {
    let limit = Instant::now() + Duration::from_secs(60);
    while !stands_still(pid) {
        assert!(Instant::now() < limit, "process {pid} does not stop");
        std::thread::yield_now();
    }
}

fn stands_still(pid: u32) -> bool {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).expect("its threads").flatten();
    tasks.map(|task| std::fs::read_to_string(task.path().join("stat"))).all(|stat| {
        // The state follows the name, which is in parentheses.
        stat.is_ok_and(|stat| stat.rsplit_once(") ").is_some_and(|rest| rest.1.starts_with('T')))
    })
}
