//! Producers on a GPU: one warp for each lane. Each posts as fast as its budget allows.

use std::ffi::c_void;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use kernels::gpu::{DeviceName, Gpu, GpuBuffer, Stream};
use kernels::proxy::{PROXY_VERSION, ProduceParams};

use super::local::{Bench, BenchPeer, Figures, Run};
use crate::clock::gpu::{Clocks, Exchange, Offset};
use proxy::abi::PeerHandle;
use proxy::gpu::{GpuPoster, lanes, mirror};
use proxy::host::PosterConfig;
use proxy::lane::{LaneConfig, Lanes};

pub use kernels::proxy::{
    PRODUCE_CLOCK, PRODUCE_FILLS, PRODUCE_READS, PRODUCE_ROUND_TRIP, PRODUCE_STAMPS,
};

/// The producers' kernel, compiled as a function of the host. It returns when all producers have ended.
pub type SoftwareKernel = unsafe extern "C" fn(params: *const c_void);

/// Sets the producers' kernel of GPUs in software, which have none by default. Only the first call has an effect.
///
/// # Safety
/// `kernel` must treat `sy_proxy_produce_params` as the GPUs' kernel does, and must not access other memory.
pub unsafe fn set_software_kernel(kernel: SoftwareKernel) {
    SOFTWARE_KERNEL.get_or_init(|| kernel);
}

/// Posters of a GPU, one for each peer, with the kernel's table of them.
#[derive(Debug)]
pub struct Producers {
    gpu: Gpu,
    posters: Vec<GpuPoster>,
    table: GpuBuffer,
}

/// Parameters of a run of all lanes' producers.
#[derive(Debug, Clone, Copy)]
pub struct Order {
    /// Objects of each lane, a multiple of `batch`.
    pub num_commands: u64,
    /// Objects posted together.
    pub batch: u32,
    /// Bytes of an object, a multiple of 16.
    pub object_bytes: u32,
    /// Objects of each lane in mirror and slot, a multiple of `batch`.
    pub num_objects: u32,
    /// `PRODUCE_*`
    pub flags: u32,
    /// Offset of the lanes' counters, to which producers add once per object; 0 for no counters.
    pub counter_offset: u64,
}

/// Result of an [`Order`].
#[derive(Debug)]
pub struct Produced {
    /// Time until all objects of the slowest lane had arrived, by the GPU's own clock.
    pub elapsed: Duration,
    /// Times of each lane's batches in nanoseconds.
    pub samples: Vec<Vec<u64>>,
    /// Status of each lane: `SY_PROXY_*`.
    pub status: Vec<u32>,
}

/// A running kernel and the buffers of its results.
struct Running {
    gpu: Gpu,
    stream: Stream,
    latency: GpuBuffer,
    elapsed: GpuBuffer,
    status: GpuBuffer,
    num_blocks: u64,
    num_samples: u64,
    deadline: Instant,
}

impl Producers {
    /// Makes producers for existing posters, all of `gpu`.
    ///
    /// # Errors
    /// An error of the GPU.
    pub fn new(gpu: &Gpu, posters: Vec<GpuPoster>) -> Result<Self> {
        let handles: Vec<PeerHandle> = posters.iter().map(|poster| *poster.handle()).collect();
        let table = gpu.alloc((handles.len() * size_of::<PeerHandle>()) as u64)?;
        gpu.write(&table, 0, bytemuck::cast_slice(&handles), Instant::now() + LIMIT)?;
        Ok(Self { gpu: gpu.clone(), posters, table })
    }

    /// Runs the kernel and waits for its end, for 60 s at most.
    ///
    /// # Errors
    /// An error of the GPU, or a producer that did not end in time.
    pub fn run(&self, order: &Order) -> Result<Produced> {
        self.start(order)?.end()
    }

    fn start(&self, order: &Order) -> Result<Running> {
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
        match (gpu.name(), SOFTWARE_KERNEL.get()) {
            (DeviceName::Emulated(_), Some(&software)) => stream.then(move || {
                // SAFETY: these are the kernel's parameters, checked in the same way as a GPU's.
                unsafe { software(std::ptr::from_ref(&params).cast()) };
            })?,
            _ => stream.launch(&kernel)?,
        }
        let gpu = gpu.clone();
        Ok(Running { gpu, stream, latency, elapsed, status, num_blocks, num_samples, deadline })
    }
}

impl Running {
    fn end(self) -> Result<Produced> {
        let Self { gpu, stream, latency, elapsed, status, num_blocks, num_samples, deadline } =
            self;
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
        let of_lane =
            |samples: &[u64]| samples.iter().copied().filter(|ns| *ns > 0).collect::<Vec<_>>();
        Ok(Produced {
            // By the GPU's clock, since a launch takes longer than a short run.
            elapsed: Duration::from_nanos(slowest.context("no block")?),
            samples: samples.chunks_exact(num_samples.max(1) as usize).map(of_lane).collect(),
            status: codes.chunks_exact(4).map(bytemuck::pod_read_unaligned).collect(),
        })
    }
}

impl Bench {
    /// Runs producers on a GPU, one warp per lane.
    ///
    /// # Errors
    /// As for [`figures`](Self::figures), an invalid run, or a producer that failed.
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
        let offset = || run.is_one_way.then(|| offset(gpu, self.origin)).transpose();
        let before = offset()?;
        self.proxy().expect_work();
        let produced = producers.run(&Order {
            num_commands: run.num_commands,
            batch: run.batch,
            object_bytes: run.object_bytes,
            num_objects: run.num_objects,
            flags: if run.counts() { PRODUCE_FILLS } else { 0 }
                | if run.is_round_trip { PRODUCE_ROUND_TRIP } else { 0 }
                | if run.only_reads { PRODUCE_READS } else { 0 }
                | if run.is_one_way { PRODUCE_STAMPS } else { 0 },
            counter_offset: if run.counts() { run.counter_offset() } else { 0 },
        })?;
        if let Some(lane) = produced.status.iter().position(|code| *code != 0) {
            let failures: Vec<_> = peers.iter().flat_map(|p| p.peer.take_failures()).collect();
            bail!("the producer of lane {lane} ended with {}: {failures:?}", produced.status[lane]);
        }
        let clocks = before.zip(offset()?).map(|(before, after)| Clocks::new(before, after));
        let samples = match &clocks {
            Some(clocks) => one_way(clocks, run, &peers, &produced.samples)?,
            None => produced.samples,
        };
        let figures = self.figures("gpu", run, &peers, produced.elapsed, samples)?;
        Ok(Figures { clock: clocks.map(|clocks| clocks.certainty()), ..figures })
    }
}

/// Returns for each lane the nanoseconds from an object's push, as the GPU noted it, to its post.
fn one_way(
    clocks: &Clocks,
    run: &Run,
    peers: &[BenchPeer],
    pushed: &[Vec<u64>],
) -> Result<Vec<Vec<u64>>> {
    let posts_of = |peer: &BenchPeer, lane| peer.posts.as_ref().map(|posts| posts.of_lane(lane));
    let num_lanes = run.lanes.num_lanes as usize;
    let uncertainty = clocks.uncertainty().cast_signed();
    let mut lanes = Vec::new();
    for (block, pushed) in pushed.iter().enumerate() {
        let peer = peers.get(block / num_lanes).context("a lane of no peer")?;
        let posted = posts_of(peer, block % num_lanes).context("posts that were not noted")?;
        let (num_pushed, num_posted) = (pushed.len(), posted.len());
        ensure!(num_pushed == num_posted, "{num_pushed} objects pushed, {num_posted} posted");
        let took = |(pushed, posted): (&u64, u64)| {
            let ns = posted.cast_signed() - clocks.host(*pushed);
            // No object is posted before its push.
            ensure!(ns >= -uncertainty, "the clocks are further apart than {uncertainty} ns");
            Ok(ns.max(0).cast_unsigned())
        };
        lanes.push(pushed.iter().zip(posted).map(took).collect::<Result<_>>()?);
    }
    Ok(lanes)
}

/// Measures how far the clock of `gpu` is ahead of the nanoseconds since `origin`. It takes 2,000 exchanges over a lane
/// that no proxy serves: this thread counts, and a kernel answers.
///
/// # Errors
/// An error of the GPU, or a kernel that does not answer within 20 s.
pub fn offset(gpu: &Gpu, origin: Instant) -> Result<Offset> {
    let config = LaneConfig { num_lanes: 1, depth: 16, budget: 16 };
    let lanes = lanes(gpu, config)?;
    let (_mirror, address) = mirror(gpu, CLOCK_SLOT_BYTES)?;
    let poster = GpuPoster::new(gpu, &lanes, poster_config(address.0, CLOCK_SLOT_BYTES, 0))?;
    let producers = Producers::new(gpu, vec![poster])?;
    let running = producers.start(&Order {
        num_commands: NUM_EXCHANGES,
        batch: 1,
        object_bytes: 16,
        num_objects: 1,
        flags: PRODUCE_CLOCK,
        counter_offset: 0,
    })?;
    let exchanges = exchange(&lanes, origin);
    // Waits for the kernel before any return, since it uses memory that a return frees.
    let produced = running.end()?;
    let exchanges = exchanges?;
    ensure!(produced.status == [0], "the GPU's clock: a kernel ended with {:?}", produced.status);
    Offset::of(&exchanges).context("the host's clock runs backwards")
}

/// Runs the host's side of the exchanges.
fn exchange(lanes: &Lanes, origin: Instant) -> Result<Vec<Exchange>> {
    let now = || origin.elapsed().as_nanos() as u64;
    let deadline = Instant::now() + CLOCK_LIMIT;
    let mut reader = lanes.reader(0);
    let mut exchanges = Vec::with_capacity(NUM_EXCHANGES as usize);
    for number in 1..=NUM_EXCHANGES {
        let before = now();
        reader.recycle(number);
        let mut num_looks = 0_u32;
        let gpu = loop {
            if let Some(command) = reader.peek()? {
                break command.value;
            }
            num_looks += 1;
            if num_looks.is_multiple_of(LOOKS_PER_CLOCK) {
                ensure!(Instant::now() < deadline, "the GPU does not answer with its time");
                // A GPU in software may need this processor.
                std::thread::yield_now();
            }
        };
        exchanges.push(Exchange { before, gpu, after: now() });
        reader.advance();
    }
    Ok(exchanges)
}

/// Returns the settings of the poster for peer `idx`.
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

static SOFTWARE_KERNEL: OnceLock<SoftwareKernel> = OnceLock::new();

const MAX_SAMPLES: u64 = 20_000;
const LIMIT: Duration = Duration::from_secs(60);
/// All exchanges together take some milliseconds, in which the clocks hardly drift. Only the shortest counts.
const NUM_EXCHANGES: u64 = 2000;
const CLOCK_LIMIT: Duration = Duration::from_secs(20);
const CLOCK_SLOT_BYTES: u64 = 4096;
/// An exchange with a GPU takes fewer looks.
const LOOKS_PER_CLOCK: u32 = 4096;
