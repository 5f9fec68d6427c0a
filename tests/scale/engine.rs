//! A thousand peers of one message engine: all are served, and memory grows only by buffers in use.
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::support::engines::Engines;
use crate::support::{num_descriptors, num_mappings, resident_bytes, wanted_peers};
use message_engine::engine::{Access, Engine, MemoryRegion};

/// Buffer of every peer at the hub. Together they are 4 GiB, so that resident untouched memory would be noticed.
const BUFFER_BYTES: usize = 4 << 20;
const NUM_USED: usize = 16;
const MAX_CROWDS: usize = 8;
/// Descriptors of each connecting engine, apart from its peers.
const ENGINE_DESCRIPTORS: usize = 16;
const ENGINE_MAPPINGS: usize = 16;

#[test]
fn memory_of_an_engine_grows_by_what_is_used() {
    let wanted = wanted_peers(1024);
    let num_peers = Engines::possible(wanted);
    if num_peers < wanted {
        let reason = format!("{num_peers} peers instead of {wanted}: raise `ulimit -Hn`");
        test_support::skip("descriptors", &reason);
    }
    for transport in ["tcp", "cma"] {
        let hub = Engines::engine(transport, false).expect("a transport that needs nothing");
        let empty_descriptors = num_descriptors();
        // The allocator reuses one crowd's memory for the next, once every thread has its share.
        let mut left = Vec::new();
        loop {
            crowd(&hub, num_peers, transport);
            settle(empty_descriptors);
            left.push(resident_bytes());
            println!("{transport}: bytes when all have gone: {left:?}");
            if let [.., before, now] = left[..]
                && now < before + (16 << 20)
            {
                break;
            }
            assert!(left.len() < MAX_CROWDS, "more is left every time");
        }
    }
}

/// Waits until the hub has closed all connections.
fn settle(empty_descriptors: usize) {
    let deadline = soon();
    while num_descriptors() > empty_descriptors + 16 {
        assert!(Instant::now() < deadline, "{} descriptors", num_descriptors());
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Sockets of a peer, at both ends: one between the engines. Over `tcp` each direction adds one for the bytes.
fn sockets_of(transport: &str) -> usize {
    if transport == "tcp" { 6 } else { 2 }
}

/// Mappings of a peer, at both ends: over `cma` each side maps the other's table.
fn tables_of(transport: &str) -> usize {
    if transport == "cma" { 2 } else { 0 }
}

fn crowd(hub: &Arc<Engine>, num_peers: usize, transport: &str) {
    let before = resident_bytes();
    let (descriptors, mappings) = (num_descriptors(), num_mappings());
    let engines = Engines::gather(Arc::clone(hub), num_peers, transport);
    let idle_bytes = resident_bytes().saturating_sub(before) / num_peers as u64;
    println!(
        "{num_peers} peers by {} in {:?}; an idle one takes {idle_bytes} bytes at both ends",
        engines.out[0].transport(),
        engines.took
    );
    // At most six receive buffers of 16 KiB, which become resident only from reused memory of the allocator.
    assert!(idle_bytes < 144 << 10, "{idle_bytes} bytes for an idle peer");
    // Sockets, and the other side's table if there is one; no ring and no thread per peer.
    assert_eq!(hub.stats().num_connections, num_peers);
    let num_engines = engines.others.len();
    let descriptors = num_descriptors() - descriptors;
    let most = num_peers * sockets_of(transport) + num_engines * ENGINE_DESCRIPTORS;
    println!("{descriptors} descriptors, {} mappings more", num_mappings() - mappings);
    assert!(descriptors <= most, "{descriptors} descriptors, at most {most} expected");
    assert!(descriptors >= num_peers * sockets_of(transport), "{descriptors} descriptors");
    let most =
        mappings + num_peers * tables_of(transport) + num_engines * ENGINE_MAPPINGS + num_peers / 8;
    assert!(num_mappings() <= most, "{} mappings, at most {most} expected", num_mappings());

    // Each peer has a buffer at the hub, sends a message and gets one back. No peer is left out, and none gets
    // another's message.
    let before = resident_bytes();
    let buffers: Vec<MemoryRegion> = (0..num_peers)
        .map(|_| hub.alloc(BUFFER_BYTES, Access::RemoteReadWrite).expect("memory"))
        .collect();
    let memories: Vec<MemoryRegion> = engines
        .others
        .iter()
        .map(|other| other.alloc(BUFFER_BYTES, Access::RemoteReadWrite).expect("memory"))
        .collect();
    let memory_of = |idx: usize| &memories[idx % memories.len()];
    for (idx, there) in buffers.iter().enumerate() {
        let (out, back, here) = (&engines.out[idx], &engines.back[idx], memory_of(idx));
        here.copy_in(0, &pattern(idx, 64)).expect("in range");
        out.send(&here.span(0, 64).expect("in range"), soon()).expect("sent");
        back.recv(&there.span(0, 64).expect("in range"), soon()).expect("received");
        back.send(&there.span(0, 64).expect("in range"), soon()).expect("sent");
        out.recv(&here.span(64, 64).expect("in range"), soon()).expect("received");
        assert_eq!(contents(here, 64, 64), pattern(idx, 64), "peer {idx}");
    }
    let small = resident_bytes().saturating_sub(before) / num_peers as u64;
    println!("buffers of {BUFFER_BYTES} bytes and messages of 64 take {small} bytes more");
    assert!(small < 48 << 10, "{small} bytes for messages of 64 bytes");

    // A few write much: only they take memory.
    let used = num_peers.min(NUM_USED);
    for memory in &memories {
        memory.copy_in(0, &pattern(0, BUFFER_BYTES)).expect("in range");
    }
    let before = resident_bytes();
    for nth in 0..used {
        let idx = nth * 7 % num_peers;
        let here = memory_of(idx);
        let target = engines.back[idx].advertise(&buffers[idx].whole()).expect("registered");
        engines.out[idx].write(&here.whole(), &target, soon()).expect("written");
    }
    for nth in 0..used {
        let found = contents(&buffers[nth * 7 % num_peers], 0, BUFFER_BYTES);
        assert!(found == pattern(0, BUFFER_BYTES), "write {nth} of {BUFFER_BYTES} bytes");
    }
    let grown = resident_bytes().saturating_sub(before);
    let expected = (used * BUFFER_BYTES) as u64;
    println!("{used} writes of {BUFFER_BYTES} bytes take {grown} bytes, {expected} expected");
    assert!(grown < expected + expected / 4 + (16 << 20), "{grown} bytes, {expected} expected");
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

fn contents(memory: &MemoryRegion, offset: u64, len: usize) -> Vec<u8> {
    let mut found = vec![0xa5; len];
    memory.copy_out(offset, &mut found).expect("in range");
    found
}

/// Contents that differ for every peer and position.
fn pattern(idx: usize, len: usize) -> Vec<u8> {
    use rand::{Rng, SeedableRng};
    let mut bytes = vec![0; len];
    rand::rngs::StdRng::seed_from_u64(idx as u64).fill_bytes(&mut bytes);
    bytes
}
