//! Loads many experts with several threads. A thread reads from the page cache at a fraction of the rate of a GPU's
//! link, so each has buffers and streams of its own.

use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::thread;

use checkpoint::Checkpoint;
use kernels::gpu::Gpu;

use super::block::LayerMemory;
use super::weights::{put, refused};
use crate::compute::LoadError;
use crate::device::upload::Uploader;

/// An expert, and its place in GPU memory.
#[derive(Debug, Clone, Copy)]
pub(super) struct Job<'a> {
    pub(super) layer: u32,
    pub(super) expert: u32,
    pub(super) memory: &'a LayerMemory,
    pub(super) local_idx: usize,
}

/// A load that failed.
#[derive(Debug)]
pub(super) struct BulkError {
    /// The first error.
    pub(super) source: LoadError,
    /// Copies may still run: the memory must not be freed.
    pub(super) is_copying: bool,
}

/// Loads experts and calls `progress` on this thread for each whose copies have started. Returns when all copies have
/// ended. After an error no more experts are started.
pub(super) fn load_all(
    gpu: &Gpu,
    checkpoint: &Checkpoint,
    jobs: &[Job<'_>],
    progress: &mut dyn FnMut(),
) -> Result<(), BulkError> {
    let cores = thread::available_parallelism().map_or(1, NonZeroUsize::get);
    let num_threads = cores.min(MOST_THREADS).min(jobs.len());
    let (next, is_over) = (AtomicUsize::new(0), AtomicBool::new(false));
    let work = |started: Sender<()>| {
        let mut uploader = Uploader::new(gpu).map_err(|source| {
            is_over.store(true, Ordering::Relaxed);
            BulkError { source: refused(source), is_copying: false }
        })?;
        let mut load = || {
            while !is_over.load(Ordering::Relaxed)
                && let Some(job) = jobs.get(next.fetch_add(1, Ordering::Relaxed))
            {
                let what = (job.layer, job.expert);
                put(&mut uploader, checkpoint, job.memory, job.local_idx, what)?;
                // The receiver lives as long as the threads.
                let _ = started.send(());
            }
            Ok(())
        };
        let loaded: Result<(), LoadError> = load();
        // Also after an error: the caller frees the memory.
        let ended = uploader.wait().map_err(refused);
        let is_copying = ended.is_err();
        loaded.and(ended).map_err(|source| {
            is_over.store(true, Ordering::Relaxed);
            BulkError { source, is_copying }
        })
    };
    thread::scope(|scope| {
        let (started, starts) = channel();
        let threads: Vec<_> = (0..num_threads)
            .map(|_| {
                let started = started.clone();
                scope.spawn(move || work(started))
            })
            .collect();
        drop(started);
        starts.iter().for_each(|()| progress());
        let mut result = Ok(());
        for thread in threads {
            let ended = thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            let Err(error) = ended else { continue };
            result = match result {
                Ok(()) => Err(error),
                Err(first @ BulkError { .. }) => {
                    Err(BulkError { is_copying: first.is_copying || error.is_copying, ..first })
                }
            };
        }
        result
    })
}

/// More do not read faster.
const MOST_THREADS: usize = 16;
