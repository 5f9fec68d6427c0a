//! Producers on a GPU: one warp a lane, each as fast as its budget allows.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use kernels::gpu::{Gpu, GpuBuffer};
use kernels::proxy::{PROXY_VERSION, ProduceParams};

use super::local::{Bench, BenchPeer, Figures, Run};
use crate::abi::PeerHandle;
use crate::gpu::{GpuPoster, lanes, mirror};
use crate::host::PosterConfig;

pub use kernels::proxy::{PRODUCE_FILLS, PRODUCE_READS, PRODUCE_ROUND_TRIP};

/// Posters of a GPU, one of each peer, and where they are listed for the kernel.
#[derive(Debug)]
pub struct Producers {
    gpu: Gpu,
    posters: Vec<GpuPoster>,
    table: GpuBuffer,
}

/// What every lane's producer does.
#[derive(Debug, Clone, Copy)]
pub struct Order {
    /// Objects, a multiple of `batch`.
    pub num_commands: u64,
    /// Objects posted together.
    pub batch: u32,
    /// Bytes of an object, a multiple of 16.
    pub object_bytes: u32,
    /// Objects of each lane in mirror and slot, a multiple of `batch`.
    pub num_objects: u32,
    /// `PRODUCE_*`
    pub flags: u32,
    /// 0, or where lanes' counters are added to once per object.
    pub counter_offset: u64,
}

/// What came of an [`Order`].
#[derive(Debug)]
pub struct Produced {
    /// Until everything of the slowest lane had arrived, by the GPU's own clock.
    pub elapsed: Duration,
    /// Times of batches, nanoseconds.
    pub samples: Vec<u64>,
    /// How each lane ended: `SY_PROXY_*`.
    pub status: Vec<u32>,
}

impl Producers {
    /// Posters that exist already.
    ///
    /// # Errors
    /// What the GPU says.
    pub fn new(gpu: &Gpu, posters: Vec<GpuPoster>) -> Result<Self> {
        let handles: Vec<PeerHandle> = posters.iter().map(|poster| *poster.handle()).collect();
        let table = gpu.alloc((handles.len() * size_of::<PeerHandle>()) as u64)?;
        gpu.write(&table, 0, bytemuck::cast_slice(&handles), Instant::now() + LIMIT)?;
        Ok(Self { gpu: gpu.clone(), posters, table })
    }

    /// Runs a kernel to its end.
    ///
    /// # Errors
    /// What the GPU says, a producer that did not end included.
    pub fn run(&self, order: &Order) -> Result<Produced> {
        let num_lanes = |poster: &GpuPoster| u64::from(poster.handle().num_lanes);
        let num_blocks: u64 = self.posters.iter().map(num_lanes).sum();
        let num_samples = (order.num_commands / u64::from(order.batch)).min(MAX_SAMPLES);
        let gpu = &self.gpu;
        let (latency, elapsed, status) = (
            gpu.alloc(8 * num_blocks * num_samples)?,
            gpu.alloc(8 * num_blocks)?,
            gpu.alloc(4 * num_blocks)?,
        );
        let params = ProduceParams {
            version: PROXY_VERSION,
            num_blocks: num_blocks as u32,
            peers: self.table.ptr(),
            latency_ns: latency.ptr(),
            elapsed_ns: elapsed.ptr(),
            status: status.ptr(),
            num_commands: order.num_commands,
            batch: order.batch,
            opcode: 1,
            object_bytes: order.object_bytes,
            num_objects: order.num_objects,
            flags: order.flags,
            num_samples: num_samples as u32,
            counter_offset: order.counter_offset,
        };
        // SAFETY: all buffers live until the kernel has ended, and have the sizes that it expects.
        let kernel = unsafe { gpu.prepare(params)? };
        let deadline = Instant::now() + LIMIT;
        let stream = gpu.stream()?;
        stream.launch(&kernel)?;
        stream.wait(deadline)?;
        let read = |buffer: &GpuBuffer, num: u64, bytes: usize| -> Result<Vec<u8>> {
            let mut out = vec![0; num as usize * bytes];
            gpu.read(buffer, 0, &mut out, deadline)?;
            Ok(out)
        };
        let words = |bytes: &[u8]| -> Vec<u64> {
            bytes.chunks_exact(8).map(bytemuck::pod_read_unaligned).collect()
        };
        let codes = read(&status, num_blocks, 4)?;
        let slowest = words(&read(&elapsed, num_blocks, 8)?).into_iter().max();
        let samples = words(&read(&latency, num_blocks * num_samples, 8)?);
        Ok(Produced {
            // The GPU's own time: launching takes longer than a short run.
            elapsed: Duration::from_nanos(slowest.context("no block")?),
            samples: samples.into_iter().filter(|ns| *ns > 0).collect(),
            status: codes.chunks_exact(4).map(bytemuck::pod_read_unaligned).collect(),
        })
    }
}

impl Bench {
    /// Producers on a GPU, one warp per lane.
    ///
    /// # Errors
    /// As for [`figures`](Self::figures), a run that cannot be, or a producer that gave up.
    pub fn run_gpu(&self, run: &Run, gpu: &Gpu) -> Result<Figures> {
        run.check()?;
        let mut peers: Vec<BenchPeer> = Vec::new();
        let mut posters = Vec::new();
        for idx in 0..self.num_threads() {
            let (mirror, address) = mirror(gpu, run.slot_bytes())?;
            let peer = self.peer(run, idx, lanes(gpu, run.lanes)?, mirror)?;
            let config = poster_config(address.0, run.slot_bytes(), idx);
            posters.push(GpuPoster::new(gpu, peer.peer.lanes(), config)?);
            peers.push(peer);
        }
        let producers = Producers::new(gpu, posters)?;
        self.proxy().expect_work();
        let produced = producers.run(&Order {
            num_commands: run.num_commands,
            batch: run.batch,
            object_bytes: run.object_bytes,
            num_objects: run.num_objects,
            flags: if run.counts() { PRODUCE_FILLS } else { 0 }
                | if run.is_round_trip { PRODUCE_ROUND_TRIP } else { 0 }
                | if run.only_reads { PRODUCE_READS } else { 0 },
            counter_offset: if run.counts() { run.counter_offset() } else { 0 },
        })?;
        if let Some(lane) = produced.status.iter().position(|code| *code != 0) {
            let failures: Vec<_> = peers.iter().flat_map(|p| p.peer.take_failures()).collect();
            bail!("the producer of lane {lane} ended with {}: {failures:?}", produced.status[lane]);
        }
        self.figures("gpu", run, &peers, produced.elapsed, produced.samples)
    }
}

/// Of peer `idx` of a benchmark.
pub(super) const fn poster_config(mirror: u64, slot_bytes: u64, idx: usize) -> PosterConfig {
    PosterConfig {
        mirror,
        slot_bytes,
        window: 0,
        peer: idx as u32,
        timeout_ns: 5_000_000_000,
        error: 0,
        abort_mask: 0,
    }
}

const MAX_SAMPLES: u64 = 20_000;
const LIMIT: Duration = Duration::from_secs(60);
