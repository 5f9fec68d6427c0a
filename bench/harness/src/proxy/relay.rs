//! `benchmark_relay`: the copy to a further GPU, alone and behind a proxy.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use kernels::abi::DevicePtr;
use kernels::gpu::{Gpu, GpuBuffer};
use p2p_core::backend::mapped::MappedEndpoint;
use p2p_core::slot::CONTROL_BYTES;
use p2p_core::wait::event_fd;
use p2p_core::{Region, TransportKind};

use super::pattern;
use crate::stats::median;
use proxy::command::{Command, Opcode};
use proxy::gpu::mirror;
use proxy::lane::{LaneConfig, Lanes};
use proxy::relay::{Copier, CopyTask, GpuCopier, GpuTarget, RelayConfig, RelayReceiver};
use proxy::threads::{PeerConfig, Proxy, ProxyConfig};

/// Figures of one size.
#[derive(Debug, Clone, Copy, serde::Serialize)]
pub struct CopyFigures {
    /// Copies in a batch.
    pub copies: usize,
    /// Bytes of a copy.
    pub bytes: u64,
    /// Median time in microseconds from submitting a batch until its end is seen.
    pub batch_us: f64,
    /// Rate of the median batch in 10^9 bytes per second.
    pub gb_per_s: f64,
}

/// Measures batches of copies from memory of `near` to memory of `far`. Compares every byte of the last batch.
///
/// # Errors
/// An error of the GPUs, or a wrong byte.
pub fn copies(near: &Gpu, far: &Gpu, num_batches: usize) -> Result<Vec<CopyFigures>> {
    let (slot, target) = (near.alloc(SLOT_BYTES)?, Target::new(near, far)?);
    let words: Vec<u64> = (0..SLOT_BYTES / 8).map(|idx| pattern(1, 7, idx)).collect();
    near.write(&slot, 0, bytemuck::cast_slice(&words), deadline())?;
    // SAFETY: both live until the copier is dropped at the end of this function.
    let mut copier = unsafe { GpuCopier::new(near, slot.ptr(), vec![target.as_target()])? };
    let mut figures = Vec::new();
    for bytes in [64, 10_752, 64 << 10, 1 << 20] {
        for num in [1usize, 4, 16, 64] {
            let tasks: Vec<CopyTask> = (0..num as u64)
                .map(|idx| {
                    let (source_offset, target_offset) =
                        (idx * bytes, SLOT_BYTES - (idx + 1) * bytes);
                    CopyTask { target: 0, source_offset, target_offset, num_bytes: bytes }
                })
                .collect();
            let mut times = Vec::with_capacity(num_batches);
            for _ in 0..num_batches {
                let start = Instant::now();
                copier.submit(&tasks, &[])?;
                while !copier.is_done()? {
                    ensure!(start.elapsed() < Duration::from_secs(10), "a copy does not end");
                }
                times.push(start.elapsed().as_secs_f64());
            }
            let median = median(&mut times);
            let mut found = vec![0; bytes as usize];
            for task in &tasks {
                far.read(&target.own, task.target_offset, &mut found, deadline())?;
                let from = task.source_offset as usize / 8;
                let expected = &words[from..from + bytes as usize / 8];
                ensure!(
                    found == bytemuck::cast_slice::<u64, u8>(expected),
                    "{num} x {bytes}: wrong bytes"
                );
            }
            let gb_per_s = bytes as f64 * num as f64 / median / 1e9;
            figures.push(CopyFigures { copies: num, bytes, batch_us: median * 1e6, gb_per_s });
        }
    }
    Ok(figures)
}

/// Measures objects that go from memory of the host through a proxy into a slot in page-locked memory, and from there
/// to `far`. Compares every byte, and the counter behind the objects. Returns objects, seconds and tasks.
///
/// # Errors
/// An error of the GPUs or of the proxy, or a wrong byte.
pub fn behind_proxy(near: &Gpu, far: &Gpu, num_objects: u32) -> Result<(u32, f64, u64)> {
    let target = Target::new(near, far)?;
    let relay = RelayConfig {
        direct_bytes: 0,
        staging_bytes: 4 << 20,
        num_tasks: 1024,
        targets: vec![SLOT_BYTES],
    };
    let slot_bytes = (4 << 20) + 1024 * 32 + CONTROL_BYTES as u64;
    let (there, slot_address) = mirror(near, slot_bytes)?;
    let here = Region::anonymous(slot_bytes as usize)?;
    let events = [Arc::new(event_fd()?), Arc::new(event_fd()?)];
    let end = |remote: &Region, me: usize| {
        let (peer, own) = (Arc::clone(&events[1 - me]), Arc::clone(&events[me]));
        MappedEndpoint::new(TransportKind::Local, remote.clone(), peer, own)
    };
    // SAFETY: both live until the receiver is dropped at the end of this function.
    let copier = unsafe { GpuCopier::new(near, slot_address, vec![target.as_target()])? };
    let mut receiver = RelayReceiver::new(&relay, end(&here, 1), there.clone(), copier)?;

    let proxy: Proxy<MappedEndpoint> = Proxy::start(&ProxyConfig::default())?;
    let lanes = Lanes::anonymous(LaneConfig { num_lanes: 1, depth: 1024, budget: 512 })?;
    let source = Region::anonymous((OBJECT_BYTES * u64::from(num_objects)) as usize)?;
    let words: Vec<u64> = (0..source.len() as u64 / 8).map(|idx| pattern(3, 1, idx)).collect();
    proxy::memory::write(&source, 0, bytemuck::cast_slice(&words))?;
    let mut poster = lanes.poster(0);
    let config =
        PeerConfig { peer: 0, lanes, window_bytes: 0, sources: vec![source], thread: None };
    let peer = proxy.add_with_relay(end(&there, 0), config, &relay, here.clone())?;
    let start = Instant::now();
    let counter = (SLOT_BYTES - 8) as u32;
    let mut num_posted = 0;
    while poster.completed() < 2 * u64::from(num_objects) {
        if let Some(failure) = peer.take_failures().into_iter().next() {
            return Err(failure.into());
        }
        while num_posted < 2 * num_objects {
            let offset = num_posted / 2 * OBJECT_BYTES as u32;
            let mut command = if num_posted % 2 == 0 {
                Command::transfer(Opcode::Put, offset, 0, offset, OBJECT_BYTES as u32)
            } else {
                Command::word(Opcode::Add, counter, 1)
            };
            command.window = 1;
            if poster.try_post(&command).is_none() {
                break;
            }
            num_posted += 1;
        }
        peer.ring();
        receiver.turn()?;
        ensure!(
            start.elapsed() < Duration::from_secs(30),
            "{} of {num_posted} over",
            poster.completed()
        );
    }
    let seconds = start.elapsed().as_secs_f64();
    let mut found = vec![0; words.len() * 8];
    far.read(&target.own, 0, &mut found, deadline())?;
    if found != bytemuck::cast_slice::<u64, u8>(&words) {
        bail!("wrong bytes at the far GPU");
    }
    let mut count = [0; 8];
    far.read(&target.own, counter.into(), &mut count, deadline())?;
    ensure!(u64::from_ne_bytes(count) == u64::from(num_objects), "the counter is {count:?}");
    Ok((num_objects, seconds, receiver.num_done()))
}

/// Memory of the far GPU, mapped for both GPUs.
struct Target {
    own: GpuBuffer,
    mapped: Option<GpuBuffer>,
}

impl Target {
    fn new(near: &Gpu, far: &Gpu) -> Result<Self> {
        let own = far.alloc_shared(SLOT_BYTES)?;
        let mapped = if near.ordinal() == far.ordinal() {
            None
        } else {
            let memory = own.export().context("memory of the far GPU")?;
            Some(near.import_shared(memory, own.len())?)
        };
        Ok(Self { own, mapped })
    }

    fn as_target(&self) -> GpuTarget {
        let address: DevicePtr = self.mapped.as_ref().unwrap_or(&self.own).ptr();
        GpuTarget { address, bytes: SLOT_BYTES }
    }
}

fn deadline() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

const SLOT_BYTES: u64 = 128 << 20;
const OBJECT_BYTES: u64 = 10_752;
