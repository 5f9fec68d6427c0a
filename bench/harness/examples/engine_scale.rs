//! Measures the cost of many peers of one message engine. Prints JSON: `engine_scale [NUM_PEERS [TRANSPORT]]`.
//!
//! Both ends of all connections are in this process: one engine in the middle, and 32 engines that connect to it, all
//! connections at the same time. The engine in the middle never sleeps. The cost of idle peers is the time of a round
//! of its thread with all peers idle, less the time of a round without peers.

#[path = "../../../tests/scale/support/mod.rs"]
mod scale_support;

use std::sync::Arc;
use std::time::{Duration, Instant};

use message_engine::engine::Access;
use scale_support::engines::Engines;
use scale_support::{num_descriptors, resident_bytes};
use switchyard_bench_harness::stats::median;

fn main() {
    let argument = |idx| std::env::args().nth(idx);
    let wanted = argument(1).map_or(1024, |text| text.parse().expect("a number of peers"));
    let transport = argument(2).unwrap_or_else(|| "tcp".to_owned());
    let num_peers = Engines::possible(wanted);
    // A first run that is not counted pays for threads, arenas, and resources that a provider opens once.
    let first = Engines::engine(&transport, false).expect("the transport");
    drop(Engines::gather(first, 4, &transport));
    let hub = Engines::engine(&transport, true).expect("the transport");
    let alone_ns = median_of(|| Engines::round_ns(&hub, SAMPLE));
    let (bytes, descriptors) = (resident_bytes(), num_descriptors());
    let engines = Engines::gather(Arc::clone(&hub), num_peers, &transport);
    let per_peer = |now: u64, before: u64| now.saturating_sub(before) / num_peers as u64;
    let idle_bytes = per_peer(resident_bytes(), bytes);
    let descriptors = per_peer(num_descriptors() as u64, descriptors as u64);
    // Gives the handshakes time to finish their remaining work.
    std::thread::sleep(Duration::from_millis(500));
    let among_all_ns = median_of(|| Engines::round_ns(&hub, SAMPLE));
    let soon = || Instant::now() + Duration::from_secs(60);
    let memory = hub.alloc(64, Access::RemoteReadWrite).expect("memory");
    let before = resident_bytes();
    for back in &engines.back {
        back.send(&memory.whole(), soon()).expect("a message");
    }
    let used_bytes = per_peer(resident_bytes(), before);
    // Time of a notification until it is received, while all other peers are idle.
    let notice_us = median_of(|| {
        let start = Instant::now();
        for _ in 0..NUM_NOTICES {
            engines.out[0].notify(&[1; 16], soon()).expect("a notification");
            hub.next_notification(soon()).expect("a notification");
        }
        start.elapsed().as_secs_f64() * 1e6 / f64::from(NUM_NOTICES)
    });
    let poll_ns = (among_all_ns - alone_ns) / num_peers as f64;
    println!(
        r#"{{"transport": "{}", "num_peers": {num_peers}, "connect_storm_s": {:.3}, "idle_bytes_per_peer_both_ends": {idle_bytes}, "more_bytes_after_a_short_message": {used_bytes}, "descriptors_per_peer_both_ends": {descriptors}, "round_ns_without_peers": {alone_ns:.1}, "round_ns_with_all": {among_all_ns:.1}, "poll_ns_per_idle_peer": {poll_ns:.2}, "notification_us": {notice_us:.1}}}"#,
        engines.out[0].transport(),
        engines.took.as_secs_f64(),
    );
}

fn median_of(sample: impl Fn() -> f64) -> f64 {
    let mut samples: Vec<f64> = (0..NUM_SAMPLES).map(|_| sample()).collect();
    median(&mut samples)
}

const NUM_SAMPLES: usize = 21;
const NUM_NOTICES: u32 = 200;
const SAMPLE: Duration = Duration::from_millis(50);
