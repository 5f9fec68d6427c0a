//! Resources of this process, for tests of leaks.

use super::descriptors;

/// Open descriptors of this process, in all its tables.
pub fn num_descriptors() -> usize {
    descriptors::num_descriptors("self").expect("descriptors")
}

/// Threads.
pub fn num_threads() -> usize {
    std::fs::read_dir("/proc/self/task").unwrap().count()
}

/// Mappings of files whose names contain `name`, as those of slots do.
pub fn num_mappings_of(name: &str) -> usize {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines().filter(|line| line.contains(name)).count()
}

/// Resident memory in bytes, after the allocator has returned its free memory. That is no leak, and its amount depends
/// on which threads ran side by side.
pub fn resident_bytes() -> u64 {
    // SAFETY: gives free memory of the heap back to the system.
    unsafe { libc::malloc_trim(0) };
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4096
}

/// The median growth of memory from one sample to the next, in bytes: half of the steps are no greater. Pools grow by
/// megabytes in some steps and not in others; a leak is in all of them.
///
/// # Panics
/// With fewer than [`MIN_SAMPLES`]: one step has no meaningful median, and the test would check nothing.
pub fn usual_growth(samples: &[u64]) -> i64 {
    let num_samples = samples.len();
    assert!(num_samples >= MIN_SAMPLES, "{num_samples} samples of memory, expected {MIN_SAMPLES}");
    let mut steps: Vec<i64> =
        samples.windows(2).map(|pair| pair[1].cast_signed() - pair[0].cast_signed()).collect();
    steps.sort_unstable();
    steps[(steps.len() - 1) / 2]
}

/// Three steps: the lower middle one of fewer is the least.
pub const MIN_SAMPLES: usize = 4;
