//! Copiers, which move bytes from staging to their targets.

use std::sync::atomic::Ordering;

use p2p_core::Region;
use thiserror::Error;

use crate::memory;

/// Bytes of staging and their place in a target. The receiver has checked that both ranges are
/// inside.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CopyTask {
    /// Index of the target, from 0.
    pub target: usize,
    /// Offset in the slot.
    pub source_offset: u64,
    /// Offset in the target.
    pub target_offset: u64,
    /// Bytes.
    pub num_bytes: u64,
}

/// An addition to a word of a target, after the copies that were submitted with or before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WordTask {
    /// Index of the target, from 0.
    pub target: usize,
    /// Offset of the word in the target, a multiple of 8.
    pub target_offset: u64,
    /// The value to add.
    pub value: u64,
}

/// A copy failed.
#[derive(Debug, Error)]
#[error("{op}: {detail}")]
pub struct CopyError {
    /// The step.
    pub op: &'static str,
    /// Description of the failure.
    pub detail: String,
}

/// Carries out batches of tasks, one batch at a time.
pub trait Copier: Send {
    /// Bytes of each target.
    fn targets(&self) -> Vec<u64>;

    /// Starts a batch. The caller waits for the previous one first.
    ///
    /// # Errors
    /// [`CopyError`]; the receiver ends then.
    fn submit(&mut self, copies: &[CopyTask], words: &[WordTask]) -> Result<(), CopyError>;

    /// Returns true if the batch is finished. Does not wait.
    ///
    /// # Errors
    /// [`CopyError`]; the receiver ends then.
    fn is_done(&mut self) -> Result<bool, CopyError>;
}

/// Copies by the processor, for targets in host memory.
#[derive(Debug)]
pub struct HostCopier {
    slot: Region,
    targets: Vec<Region>,
}

impl HostCopier {
    /// Copies from `slot` to `targets`.
    #[must_use]
    pub const fn new(slot: Region, targets: Vec<Region>) -> Self {
        Self { slot, targets }
    }
}

impl Copier for HostCopier {
    fn targets(&self) -> Vec<u64> {
        self.targets.iter().map(|target| target.len() as u64).collect()
    }

    fn submit(&mut self, copies: &[CopyTask], words: &[WordTask]) -> Result<(), CopyError> {
        let outside = || CopyError { op: "copy", detail: "a task leaves its memory".to_owned() };
        for task in copies {
            let (from, to) = (task.source_offset as usize, task.target_offset as usize);
            let target = self.targets.get(task.target).ok_or_else(outside)?;
            let source = self.slot.range(from, task.num_bytes as usize).ok_or_else(outside)?;
            let target = target.range(to, task.num_bytes as usize).ok_or_else(outside)?;
            // SAFETY: both ranges were just made; slot and targets are different mappings. A
            // concurrent write of the sender only spoils what it sent.
            unsafe {
                std::ptr::copy_nonoverlapping(
                    source.as_ptr().as_ptr(),
                    target.as_ptr().as_ptr(),
                    source.len(),
                );
            }
        }
        for task in words {
            let target = self.targets.get(task.target).ok_or_else(outside)?;
            let word = memory::word(target, task.target_offset as usize).ok_or_else(outside)?;
            word.fetch_add(task.value, Ordering::AcqRel);
        }
        Ok(())
    }

    fn is_done(&mut self) -> Result<bool, CopyError> {
        Ok(true)
    }
}

pub use gpu::{GpuCopier, GpuTarget};

mod gpu {
    use std::time::{Duration, Instant};

    use kernels::abi::DevicePtr;
    use kernels::gpu::{Gpu, GpuBuffer, GpuError, PreparedKernel, Stream};
    use kernels::proxy::{CopyEntry, PeerCopyParams};

    use super::{Copier, CopyError, CopyTask, WordTask};

    /// Memory of a GPU that the copying GPU can access.
    #[derive(Debug, Clone, Copy)]
    pub struct GpuTarget {
        /// First byte, mapped for the copying GPU.
        pub address: DevicePtr,
        /// Bytes.
        pub bytes: u64,
    }

    /// The peer-copy kernel of one GPU: 16-byte stores over NVLink.
    #[derive(Debug)]
    pub struct GpuCopier {
        stream: Stream,
        slot: DevicePtr,
        targets: Vec<GpuTarget>,
        /// In page-locked memory, where the kernel reads them. Kept until the copier is dropped.
        entries: Option<GpuBuffer>,
        kernels: Vec<PreparedKernel<PeerCopyParams>>,
    }

    impl GpuCopier {
        /// Copies from the slot at `slot` to `targets`, by `gpu`.
        ///
        /// # Safety
        /// `slot` and the targets are memory that `gpu` can access, with the given sizes. They stay
        /// valid until the copier's drop has returned, which waits for the running batch. If drop
        /// logs that the batch does not end within 10 s, they stay valid until the GPU's context is
        /// destroyed.
        ///
        /// # Errors
        /// [`GpuError`].
        pub unsafe fn new(
            gpu: &Gpu,
            slot: DevicePtr,
            targets: Vec<GpuTarget>,
        ) -> Result<Self, GpuError> {
            let entries = gpu.alloc_host((MAX_ENTRIES * size_of::<CopyEntry>()) as u64)?;
            // One kernel per number of entries.
            let kernels = (1..=MAX_ENTRIES as u32)
                .map(|num| {
                    let params = PeerCopyParams::new(entries.ptr(), num);
                    // SAFETY: the entries live as long as the kernels; what they point to is the
                    // caller's promise.
                    unsafe { gpu.prepare(params) }
                })
                .collect::<Result<_, _>>()?;
            Ok(Self { stream: gpu.stream()?, slot, targets, entries: Some(entries), kernels })
        }
    }

    impl Drop for GpuCopier {
        fn drop(&mut self) {
            // A failed stream may still read them.
            if let Err(error) = self.stream.wait(Instant::now() + DROP_LIMIT) {
                tracing::error!(%error, "copies to a further GPU do not end: their list stays allocated");
                std::mem::forget(self.entries.take());
            }
        }
    }

    impl Copier for GpuCopier {
        fn targets(&self) -> Vec<u64> {
            self.targets.iter().map(|target| target.bytes).collect()
        }

        fn submit(&mut self, copies: &[CopyTask], words: &[WordTask]) -> Result<(), CopyError> {
            let failed = |op, error: GpuError| CopyError { op, detail: error.to_string() };
            if copies.len() > MAX_ENTRIES {
                let detail = format!("{} tasks, at most {MAX_ENTRIES}", copies.len());
                return Err(CopyError { op: "copy", detail });
            }
            let host =
                self.entries.as_ref().and_then(GpuBuffer::host).ok_or_else(|| CopyError {
                    op: "copy",
                    detail: "the entries are not in memory of the host".to_owned(),
                })?;
            for (idx, task) in copies.iter().enumerate() {
                let entry = CopyEntry {
                    source: self.slot.0 + task.source_offset,
                    target: self.targets[task.target].address.0 + task.target_offset,
                    num_bytes: task.num_bytes,
                };
                // SAFETY: fewer than the buffer holds; no kernel runs, since the previous batch is
                // finished.
                unsafe { host.cast::<CopyEntry>().add(idx).write_volatile(entry) };
            }
            if let Some(kernel) = copies.len().checked_sub(1).and_then(|idx| self.kernels.get(idx))
            {
                self.stream.launch(kernel).map_err(|e| failed("copy", e))?;
            }
            for task in words {
                let word = self.targets[task.target].address.add(task.target_offset);
                // SAFETY: the receiver checked it to be inside of the target, and aligned.
                unsafe { self.stream.add_flag(word, task.value) }
                    .map_err(|e| failed("add to a word", e))?;
            }
            Ok(())
        }

        fn is_done(&mut self) -> Result<bool, CopyError> {
            self.stream
                .is_done()
                .map_err(|error| CopyError { op: "copy", detail: error.to_string() })
        }
    }

    /// Tasks of one launch.
    const MAX_ENTRIES: usize = super::super::MAX_BATCH;
    const DROP_LIMIT: Duration = Duration::from_secs(10);

    #[cfg(all(test, not(loom)))]
    mod tests {
        use std::sync::Arc;
        use std::sync::atomic::{AtomicBool, Ordering};

        use super::*;

        #[test]
        fn a_copier_ends_after_its_batch() {
            let gpu = Gpu::open_emulated(0).unwrap();
            let (slot, target) = (gpu.alloc(4096).unwrap(), gpu.alloc(4096).unwrap());
            let targets = vec![GpuTarget { address: target.ptr(), bytes: target.len() }];
            // SAFETY: both buffers outlive the copier.
            let copier = unsafe { GpuCopier::new(&gpu, slot.ptr(), targets).unwrap() };
            let is_over = Arc::new(AtomicBool::new(false));
            let theirs = Arc::clone(&is_over);
            let batch = move || {
                std::thread::sleep(Duration::from_millis(100));
                theirs.store(true, Ordering::SeqCst);
            };
            copier.stream.then(batch).unwrap();
            drop(copier);
            assert!(is_over.load(Ordering::SeqCst));
        }
    }
}
