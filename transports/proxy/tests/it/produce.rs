//! The benchmarks' producers on a GPU in software: the kernel compiled for the host.

use crate::common;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::common::{Behaviour, Recorder, config, software_gpu};
use bench_harness::clock::gpu::Clocks;
use bench_harness::proxy::gpu::{self, Order};
use bench_harness::proxy::local::{Bench, PostKind, Row, Run};
use p2p_core::wait::Driver;
use switchyard_proxy::gpu::GpuPoster;
use switchyard_proxy::host::PosterConfig;
use switchyard_proxy::{LaneConfig, Proxy};

const ROW: Row =
    Row { num_lanes: 2, batch: 4, budget: 16, object_bytes: 48, commands: 400, is_gpu: true };

#[test]
fn what_a_gpu_in_software_produces_is_compared() {
    let Some(gpu) = software_gpu() else { return };
    let bench = Bench::start(&config(2)).unwrap();
    let figures = bench.run_gpu(&ROW.compared(), &gpu).unwrap();
    assert_eq!((figures.bad, figures.checked, figures.objects), (0, 2 * 2 * 4096, 2 * 2 * 4096));
    for run in [ROW.rate(PostKind::Copy), ROW.round_trip(PostKind::Null), ROW.reads()] {
        let figures = bench.run_gpu(&run, &gpu).unwrap();
        assert!(figures.latency.is_some() && figures.clock.is_none(), "{figures:?}");
    }
}

/// The host can read this GPU's clock, too.
#[test]
fn a_gpus_clock_is_as_far_ahead_as_is_found() {
    let Some(gpu) = software_gpu() else { return };
    let origin = Instant::now();
    let before = gpu::offset(&gpu, origin).unwrap();
    let begin = origin.elapsed().as_nanos() as i64;
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    let end = origin.elapsed().as_nanos() as i64;
    let clocks = Clocks::new(before, gpu::offset(&gpu, origin).unwrap());
    let found = clocks.host(time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64);
    let uncertainty = clocks.uncertainty() as i64;
    assert!(uncertainty > 0);
    assert!(
        (begin - uncertainty..=end + uncertainty).contains(&found),
        "{found} is not within {uncertainty} of {begin} to {end}"
    );
}

#[test]
fn the_way_from_a_push_to_its_post_is_measured() {
    let Some(gpu) = software_gpu() else { return };
    let bench = Bench::start(&config(2)).unwrap();
    let figures = bench.run_gpu(&ROW.one_way(), &gpu).unwrap();
    assert_eq!((figures.batch, figures.objects), (1, 2 * 2 * 400));
    let (latency, clock) = (figures.latency.unwrap(), figures.clock.unwrap());
    // Neither before the push nor behind the end.
    assert!(latency.p50_us > 0.0 && latency.p50_us <= latency.p90_us, "{latency:?}");
    assert!(latency.p90_us <= latency.p99_us && latency.p99_us <= latency.max_us, "{latency:?}");
    assert!(latency.max_us < figures.wall_ms * 1e3 + clock.uncertainty_us, "{latency:?}");
    assert!(clock.uncertainty_us > 0.0, "{clock:?}");
    // Each lane by itself, with all of its objects.
    let lanes: Vec<_> = figures.by_lane.iter().map(|of| (of.thread, of.lane, of.objects)).collect();
    assert_eq!(lanes, [(0, 0, 400), (0, 1, 400), (1, 0, 400), (1, 1, 400)]);
    let most = figures.by_lane.iter().filter_map(|of| of.latency).map(|of| of.max_us);
    assert_eq!(most.clone().count(), 4);
    assert_eq!(most.fold(0.0, f64::max), latency.max_us);
    let line = serde_json::to_value(bench.run_gpu(&ROW.one_way(), &gpu).unwrap()).unwrap();
    assert!(line.pointer("/clock/uncertainty_us").unwrap().is_f64(), "{line}");
}

#[test]
fn one_way_is_of_single_objects_from_a_gpu() {
    let Some(gpu) = software_gpu() else { return };
    let bench = Bench::start(&config(1)).unwrap();
    let of_batches = Run { batch: 4, num_objects: 16, ..ROW.one_way() };
    for run in [of_batches, Run { is_round_trip: false, ..ROW.one_way() }] {
        let error = bench.run_gpu(&run, &gpu).unwrap_err().to_string();
        assert!(error.contains("round trips of single objects"), "{error}");
    }
    let error = bench.run_host(&ROW.one_way()).unwrap_err().to_string();
    assert!(error.contains("producers on this host"), "{error}");
}

/// The driving thread is delayed.
#[derive(Debug)]
struct Slow;

impl Driver for Slow {
    fn drive(&self) {
        std::thread::sleep(Duration::from_millis(100));
    }

    fn may_sleep(&self) -> bool {
        true
    }

    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

/// Longer than a wait may take: the limit counts the time without a completion.
#[test]
fn every_batch_of_a_long_run_is_timed() {
    let Some(gpu) = software_gpu() else { return };
    // More than the kernel keeps in mind at a time.
    let config = LaneConfig { num_lanes: 1, depth: 128, budget: 128 };
    let (mirror, address) = switchyard_proxy::gpu::mirror(&gpu, common::SLOT as u64).unwrap();
    let lanes = switchyard_proxy::gpu::lanes(&gpu, config).unwrap();
    let behaviour = Arc::new(Behaviour::default());
    *behaviour.driver.lock().unwrap() = Some(Arc::new(Slow));
    let proxy = Proxy::start(&common::config(1)).unwrap();
    let recorder = Recorder::new(Arc::clone(&behaviour), mirror.as_ptr().as_ptr() as usize);
    let peer = proxy.add(recorder, common::peer_config(0, &lanes, &mirror)).unwrap();
    let poster = PosterConfig {
        mirror: address.0,
        slot_bytes: common::SLOT as u64,
        window: 0,
        peer: 0,
        timeout_ns: 1_000_000_000,
        error: 0,
        abort_mask: 0,
    };
    let poster = GpuPoster::new(&gpu, &lanes, poster).unwrap();
    let order = Order {
        num_commands: 600,
        batch: 1,
        object_bytes: 64,
        num_objects: 64,
        flags: 0,
        counter_offset: 0,
    };
    let produced = gpu::Producers::new(&gpu, vec![poster]).unwrap().run(&order).unwrap();
    assert_eq!(produced.status, [0], "{:?}", peer.take_failures());
    assert_eq!(produced.samples.iter().map(Vec::len).collect::<Vec<_>>(), [600]);
}
