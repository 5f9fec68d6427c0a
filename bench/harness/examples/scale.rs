//! Measures the cost of many peers of one process. Prints JSON: `scale [NUM_PEERS [SLOT_BYTES]]`.
//!
//! Both ends of all connections are in this process, and all peers connect at the same time. The variable
//! `SWITCHYARD_TEST_TRANSPORT` names the transport.

#[path = "../../../tests/scale/support/mod.rs"]
mod scale_support;

use std::time::Instant;

use p2p_core::{SlotConfig, WaitSet};
use scale_support::crowd::Crowd;
use scale_support::{num_descriptors, resident_bytes, transports};
use switchyard_bench_harness::stats::percentile;

fn main() {
    let argument = |idx| std::env::args().nth(idx).and_then(|text| text.parse().ok());
    let wanted = argument(1).unwrap_or(1024);
    let Some(transports) = transports() else { return };
    let num_peers = Crowd::possible(wanted);
    let default = SlotConfig::default();
    let slot = SlotConfig { slot_bytes: argument(2).unwrap_or(default.slot_bytes), ..default };
    let runtime =
        tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("a runtime");
    // A first run that is not counted pays for threads, arenas, and resources that a network opens once.
    drop(runtime.block_on(Crowd::gather(4, Crowd::listener(slot, transports.clone()))));
    let (bytes, descriptors) = (resident_bytes(), num_descriptors());
    let crowd = runtime.block_on(Crowd::gather(num_peers, Crowd::listener(slot, transports)));
    let idle_bytes = resident_bytes().saturating_sub(bytes) / num_peers as u64;
    let descriptors = num_descriptors().saturating_sub(descriptors) / num_peers;
    let channels: Vec<_> = crowd.there.iter().map(|connection| &connection.channel).collect();
    // A sweep includes one call that drives the network.
    let set = WaitSet::new().expect("a wait set");
    channels.iter().for_each(|channel| set.attach(channel.endpoint()).expect("a descriptor"));
    let mut polls: Vec<f64> = (0..NUM_SAMPLES)
        .map(|_| {
            let start = Instant::now();
            for _ in 0..SWEEPS_PER_SAMPLE {
                set.drive();
                assert!(!channels.iter().any(|channel| std::hint::black_box(channel).has_frame()));
            }
            start.elapsed().as_nanos() as f64 / (SWEEPS_PER_SAMPLE * channels.len()) as f64
        })
        .collect();
    let [p01, p50, p99] = [0.01, 0.5, 0.99].map(|part| percentile(&mut polls, part));
    println!(
        r#"{{"transport": "{}", "num_peers": {num_peers}, "slot_bytes": {}, "connect_storm_s": {:.3}, "idle_bytes_per_peer_both_ends": {idle_bytes}, "descriptors_per_peer_both_ends": {descriptors}, "poll_ns_per_idle_peer": {{"p01": {p01:.2}, "p50": {p50:.2}, "p99": {p99:.2}}}}}"#,
        crowd.here[0].transport,
        slot.slot_bytes,
        crowd.took.as_secs_f64(),
    );
}

const NUM_SAMPLES: usize = 300;
const SWEEPS_PER_SAMPLE: usize = 100;
