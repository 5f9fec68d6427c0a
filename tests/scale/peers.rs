//! A thousand peers of one process: all are served, and memory grows only by the slots in use.
use std::time::{Duration, Instant};

use crate::support::crowd::Crowd;
use crate::support::{
    self, cpu_seconds, num_descriptors, resident_bytes, transports, wanted_peers,
};
use p2p_core::{Connection, Endpoint, Progress, SlotConfig, TransportKind};

/// Default slot size. Together the slots are 20 GiB, so that resident untouched memory would be noticed.
const SLOT: SlotConfig = SlotConfig { slot_bytes: 10 << 20, num_frames: 2 };
/// Slots for devices that pin them from the start. A small host has memory for all of them.
const PINNED_SLOT: SlotConfig = SlotConfig { slot_bytes: 64 << 10, num_frames: 2 };
const NUM_USED: usize = 48;
/// Maximum number of descriptors per peer, at both ends.
const MAX_DESCRIPTORS: f64 = 10.5;

/// Keep-alive of the threads that make slots during handshakes, one per concurrent handshake. Their stacks are gone
/// by the time memory is measured.
const IDLE_THREADS_LIVE: Duration = Duration::from_millis(100);

#[test]
fn memory_grows_by_the_slots_in_use() {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .thread_keep_alive(IDLE_THREADS_LIVE)
        .enable_all()
        .build()
        .expect("a runtime");
    runtime.block_on(check());
}

async fn check() {
    let Some(transports) = transports() else { return };
    let wanted = wanted_peers(1024);
    let num_peers = Crowd::possible(wanted);
    if num_peers < wanted {
        let reason = format!("{num_peers} peers instead of {wanted}: raise `ulimit -Hn`");
        test_support::skip("descriptors", &reason);
    }
    let pins = transports.kinds.contains(&TransportKind::Verbs);
    let slot = if pins { PINNED_SLOT } else { SLOT };
    // Resources that come with the first peer belong to no single peer.
    let listener = || Crowd::listener(slot, transports.clone());
    drop(Crowd::gather(1, listener()).await);
    let num_threads = threads_at_rest().await;
    let (empty_bytes, empty_descriptors) = (resident_bytes(), num_descriptors());
    let cpu = cpu_seconds();
    let mut crowd = Crowd::gather(num_peers, listener()).await;
    let most_threads = support::num_threads();
    let threads = threads_at_rest().await;
    println!("threads: {num_threads}, {most_threads} and {threads}");
    let idle_bytes = resident_bytes().saturating_sub(empty_bytes) / num_peers as u64;
    println!(
        "{num_peers} peers by {} in {:?}; an idle one takes {idle_bytes} bytes at both ends",
        crowd.here[0].transport, crowd.took
    );
    let (user, system) = cpu_seconds();
    println!(
        "connecting took {:.2} s here and {:.2} s in the kernel",
        user - cpu.0,
        system - cpu.1
    );
    // Control words of two slots, and the connection's own memory. A network's provider adds queues for every peer,
    // created at first use.
    let is_network = crowd.here[0].transport.kind.is_network();
    let mut provider_bytes = if is_network { 512 << 10 } else { 0 };
    if pins {
        provider_bytes += 2 * slot.slot_bytes as u64;
    }
    assert!(idle_bytes < provider_bytes + (64 << 10), "{idle_bytes} bytes for an idle peer");
    // Each end has one descriptor to sleep on, one that wakes the peer, one for the connection's end, and the
    // connection with a copy of that. A network adds its own.
    let descriptors = (num_descriptors() - empty_descriptors) as f64 / num_peers as f64;
    println!("{descriptors:.2} descriptors for an idle peer at both ends");
    assert!(descriptors <= MAX_DESCRIPTORS, "{descriptors} descriptors for an idle peer");

    // Each peer sends a little. No peer is left out, and none gets another's message.
    let before = resident_bytes();
    for (idx, connection) in crowd.here.iter_mut().enumerate() {
        send(connection, &message(idx as u64, 64));
    }
    for (idx, connection) in crowd.there.iter_mut().enumerate() {
        assert_eq!(receive(connection, 64), message(idx as u64, 64), "peer {idx}");
    }
    let small = resident_bytes().saturating_sub(before) / num_peers as u64;
    println!("a message of 64 bytes takes {small} bytes more");
    assert!(small < provider_bytes + (16 << 10), "{small} bytes for a message of 64 bytes");

    // A few send much: only they take memory.
    let before = resident_bytes();
    let len = crowd.here[0].channel.layout().frame_bytes();
    let used = num_peers.min(NUM_USED);
    for idx in 0..used {
        send(&mut crowd.here[idx * 7 % num_peers], &message(idx as u64, len));
    }
    for idx in 0..used {
        let found = receive(&mut crowd.there[idx * 7 % num_peers], len);
        assert!(found == message(idx as u64, len), "message {idx} of {len} bytes");
    }
    let grown = resident_bytes().saturating_sub(before);
    // If the peer's slot is not mapped, the sender puts from a frame of its own.
    let channel = &crowd.here[0].channel;
    let is_mapped = channel.endpoint().direct(channel.remote_key()).is_some();
    let expected = (used * len) as u64 * if is_mapped { 1 } else { 2 };
    println!("{used} frames of {len} bytes take {grown} bytes, {expected} expected");
    assert!(grown < expected + expected / 4 + (8 << 20), "{grown} bytes, {expected} expected");

    // All of it is released when the peers disconnect.
    drop(crowd);
    let left = || {
        let bytes = resident_bytes().saturating_sub(empty_bytes);
        (num_descriptors().saturating_sub(empty_descriptors), bytes)
    };
    let kept_bytes = (48 << 20) + num_peers as u64 * provider_bytes / 4;
    let is_clean = |(descriptors, bytes)| descriptors <= 16 && bytes < kept_bytes;
    let deadline = Instant::now() + Duration::from_secs(20);
    while !is_clean(left()) && Instant::now() < deadline {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    println!("left when all have gone: {:?} (descriptors, bytes)", left());
    assert!(is_clean(left()), "{:?}", left());
}

/// The number of threads after idle ones have ended.
async fn threads_at_rest() -> usize {
    let deadline = Instant::now() + Duration::from_secs(20);
    let mut before = support::num_threads();
    loop {
        tokio::time::sleep(2 * IDLE_THREADS_LIVE).await;
        let now = support::num_threads();
        if now == before || Instant::now() > deadline {
            return now;
        }
        before = now;
    }
}

fn send(connection: &mut Connection, bytes: &[u8]) {
    let channel = &mut connection.channel;
    let frame = channel.try_reserve().unwrap().expect("credit");
    channel.write_view(&frame).put_bytes(0, bytes).unwrap();
    channel.publish(frame, bytes.len()).unwrap();
}

fn receive(connection: &mut Connection, len: usize) -> Vec<u8> {
    let deadline = Instant::now() + Duration::from_secs(20);
    let channel = &mut connection.channel;
    let frame = loop {
        if let Some(driver) = channel.endpoint().driver() {
            driver.drive();
        }
        if let Some(frame) = channel.try_next().unwrap() {
            break frame;
        }
        assert!(Instant::now() < deadline, "no frame from peer {:?}", connection.peer);
        std::thread::yield_now();
    };
    let mut found = vec![0xa5; len];
    channel.view(&frame).copy_to(0, &mut found).unwrap();
    channel.release().unwrap();
    found
}

/// Contents that differ for every peer and position.
fn message(idx: u64, len: usize) -> Vec<u8> {
    use rand::{Rng, SeedableRng};
    let mut bytes = vec![0; len];
    rand::rngs::StdRng::seed_from_u64(idx).fill_bytes(&mut bytes);
    bytes
}
