//! Measured limits of this machine, for comparison with the speed of the pool.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use memmap2::MmapMut;

use super::kernels::{Isa, Kernels, gemm};

/// Measures the bytes per second that `num_threads` threads read from memory together: the best of several
/// passes over a buffer of `bytes`. The buffer should be many times larger than the last cache. Blocks for
/// the measurement.
///
/// # Errors
/// The system's error when the buffer cannot be allocated.
pub fn read_bandwidth(num_threads: usize, bytes: usize) -> std::io::Result<f64> {
    Ok(BandwidthProbe::new(num_threads, bytes)?.measure(NUM_PASSES))
}

/// A buffer for repeated measurements of the read bandwidth. The bandwidth changes from one second to the
/// next if other machines share the memory.
#[derive(Debug)]
pub struct BandwidthProbe {
    memory: MmapMut,
    part_bytes: usize,
    kernels: Option<Kernels>,
}

impl BandwidthProbe {
    /// Allocates a buffer of `bytes`. `num_threads` threads read equal parts of it.
    ///
    /// # Errors
    /// The system's error when the buffer cannot be allocated.
    pub fn new(num_threads: usize, bytes: usize) -> std::io::Result<Self> {
        let num_threads = num_threads.max(1);
        let part = (bytes / num_threads / size_of::<f32>()).max(1);
        let part_bytes = part * size_of::<f32>();
        let mut memory = MmapMut::map_anon(part_bytes * num_threads)?;
        #[cfg(target_os = "linux")]
        let _ = memory.advise(memmap2::Advice::HugePage);
        // Writes allocate every page. The pattern is NaN, which adds as fast as numbers.
        memory.fill(0xff);
        let kernels = Kernels::new(Isa::detect()).or_else(|| Kernels::new(Isa::Portable));
        Ok(Self { memory, part_bytes, kernels })
    }

    /// Bytes per second: the best of `num_passes` passes, after one pass to warm up.
    #[must_use]
    pub fn measure(&self, num_passes: usize) -> f64 {
        let parts: Vec<&[u8]> = self.memory.chunks_exact(self.part_bytes).collect();
        let seconds = best_of(num_passes, &parts, |part| {
            if let Some(kernels) = &self.kernels {
                std::hint::black_box(kernels.read(part));
            }
        });
        self.memory.len() as f64 / seconds
    }
}

/// Measures the floating-point operations per second that `num_threads` threads reach together in f32 matrix
/// products of the GEMM library, each with its own matrices: the best of a few sizes. Blocks for the
/// measurement.
#[must_use]
pub fn gemm_rate(num_threads: usize) -> f64 {
    let run = |(rows, tokens, len): (usize, usize, usize)| {
        let jobs = vec![(); num_threads.max(1)];
        let panel = vec![0.5f32; rows * len];
        let x = vec![0.25f32; tokens * len];
        let seconds = best_of(NUM_PASSES, &jobs, |()| {
            thread_local! {
                static OUT: std::cell::RefCell<Vec<f32>> = const { std::cell::RefCell::new(Vec::new()) };
            }
            OUT.with_borrow_mut(|y| {
                y.resize(rows * tokens, 0.0);
                gemm(&panel, &x, len, y);
            });
        });
        2.0 * (rows * tokens * len * jobs.len()) as f64 / seconds
    };
    GEMM_SIZES.into_iter().map(run).fold(0.0, f64::max)
}

/// Runs `work` on all parts at the same time, each on its own thread, `num_passes` times after one pass to
/// warm up. Returns the shortest time from the first start to the last end, in seconds.
fn best_of<T: Sync>(num_passes: usize, parts: &[T], work: impl Fn(&T) + Sync) -> f64 {
    let barrier = Barrier::new(parts.len());
    let (work, barrier) = (&work, &barrier);
    let times: Vec<Vec<(Instant, Instant)>> = std::thread::scope(|scope| {
        let threads: Vec<_> = parts
            .iter()
            .map(|part| {
                scope.spawn(move || {
                    work(part);
                    let pass = |_| {
                        barrier.wait();
                        let start = Instant::now();
                        work(part);
                        (start, Instant::now())
                    };
                    (0..num_passes).map(pass).collect()
                })
            })
            .collect();
        threads.into_iter().filter_map(|thread| thread.join().ok()).collect()
    });
    let pass_time = |pass: usize| {
        let start = times.iter().filter_map(|times| times.get(pass)).map(|t| t.0).min()?;
        let end = times.iter().filter_map(|times| times.get(pass)).map(|t| t.1).max()?;
        Some(end - start)
    };
    (0..num_passes).filter_map(pass_time).min().unwrap_or(Duration::MAX).as_secs_f64()
}

const NUM_PASSES: usize = 10;
/// Rows, tokens, length: from the sizes of experts to sizes that suit a GEMM.
const GEMM_SIZES: [(usize, usize, usize); 3] =
    [(768, 768, 768), (1536, 512, 512), (1024, 1024, 256)];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_positive_and_finite() {
        for num_threads in [1, 3] {
            let rate = read_bandwidth(num_threads, 1 << 20).unwrap();
            assert!(rate.is_finite() && rate > 0.0, "{rate}");
        }
        let rate = gemm_rate(1);
        assert!(rate.is_finite() && rate > 0.0, "{rate}");
    }
}
