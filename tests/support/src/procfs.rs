//! Processes, as the kernel reports them.

use std::time::Duration;

use anyhow::{Context, Result};

use crate::descriptors::num_descriptors;

/// Descriptors, slots and memory of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct Usage {
    /// Open descriptors.
    pub descriptors: usize,
    /// Mappings of slots in shared memory, its own and its peers'.
    pub slots: usize,
    /// Resident memory, bytes.
    pub rss_bytes: u64,
}

/// Usage of process `pid` now.
///
/// # Errors
/// When it is gone.
pub fn usage(pid: u32) -> Result<Usage> {
    let descriptors = num_descriptors(&pid.to_string())
        .with_context(|| format!("cannot list the descriptors of process {pid}"))?;
    let status = read(pid, "status")?;
    let rss = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib: u64 = rss
        .and_then(|rest| rest.split_whitespace().next())
        .and_then(|number| number.parse().ok())
        .with_context(|| format!("process {pid} has no VmRSS"))?;
    let maps = read(pid, "maps")?;
    let slots = maps.lines().filter(|line| line.contains("memfd:switchyard-slot")).count();
    Ok(Usage { descriptors, slots, rss_bytes: kib << 10 })
}

/// CPU time that process `pid` has used: utime + stime, in steps of 10 ms.
///
/// # Errors
/// When it is gone.
pub fn cpu_time(pid: u32) -> Result<Duration> {
    let stat = read(pid, "stat")?;
    // The name, in parentheses, may hold anything.
    let fields: Vec<&str> =
        stat.rsplit_once(')').map_or("", |(_, rest)| rest).split_whitespace().collect();
    let ticks = |at: usize| fields.get(at).and_then(|field| field.parse::<u64>().ok());
    let (utime, stime) =
        ticks(11).zip(ticks(12)).with_context(|| format!("process {pid} has no CPU times"))?;
    let per_second = rustix::param::clock_ticks_per_second().max(1);
    Ok(Duration::from_millis((utime + stime) * 1000 / per_second))
}

/// Whether process `pid` has ended, reaped or not.
#[must_use]
pub fn has_ended(pid: u32) -> bool {
    let state = read(pid, "stat").ok().and_then(|stat| {
        let (_, rest) = stat.rsplit_once(')')?;
        rest.split_whitespace().next().map(str::to_owned)
    });
    state.is_none_or(|state| state == "Z" || state == "X")
}

/// Children of this process, with their command lines, arguments separated by spaces.
///
/// # Errors
/// When /proc cannot be read.
pub fn children() -> Result<Vec<(u32, String)>> {
    let own = std::process::id();
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc").context("cannot read /proc")? {
        let name = entry.context("cannot read /proc")?.file_name();
        let Some(pid) = name.to_str().and_then(|name| name.parse::<u32>().ok()) else { continue };
        // A process may end meanwhile.
        let Ok(stat) = read(pid, "stat") else { continue };
        let parent = stat.rsplit_once(')').and_then(|(_, rest)| rest.split_whitespace().nth(1));
        if parent.and_then(|parent| parent.parse().ok()) == Some(own)
            && let Ok(command) = read(pid, "cmdline")
        {
            found.push((pid, command.replace('\0', " ")));
        }
    }
    Ok(found)
}

/// The control plane among the children of this process.
///
/// # Errors
/// When there is none.
pub fn control_plane() -> Result<u32> {
    let all = children()?;
    let found = all.iter().find(|(_, command)| command.contains(" control-plane "));
    Ok(found.context("no child of this process is a control plane")?.0)
}

fn read(pid: u32, file: &str) -> Result<String> {
    let path = format!("/proc/{pid}/{file}");
    let bytes = std::fs::read(&path).with_context(|| format!("cannot read {path}"))?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn usage_follows_descriptors_and_memory_of_a_process() {
        let own = std::process::id();
        let before = usage(own).expect("usage");
        // Enough of both for other tests of this process not to matter.
        let files: Vec<_> =
            (0..40).map(|_| std::fs::File::open("/proc/self/stat").expect("a file")).collect();
        let memory = vec![1u8; 64 << 20];
        let after = usage(own).expect("usage");
        assert!(after.descriptors >= before.descriptors + 20);
        assert!(after.rss_bytes >= before.rss_bytes + (48 << 20), "{} bytes", memory.len());
        drop(files);
        let begin = cpu_time(own).expect("time");
        let mut spun = 0u64;
        while cpu_time(own).expect("time") < begin + Duration::from_millis(30) {
            spun = std::hint::black_box(spun + 1);
        }
    }
}
