//! Peers that connect and disconnect. This test has a process of its own, since it counts the
//! process's resources.
#![cfg(not(loom))]

extern crate switchyard_p2p_core as p2p_core;

use std::time::{Duration, Instant};

use p2p_core::bootstrap::{ConnectConfig, Listener, ListenerConfig, connect};
use p2p_core::{PeerHello, SlotConfig};
use test_support::resources::{num_descriptors, num_mappings_of, resident_bytes};
use tokio::sync::mpsc;
use tokio::time::timeout;

/// Connects and disconnects many times. Neither descriptors nor memory may stay behind.
#[tokio::test(flavor = "multi_thread")]
async fn connecting_and_disconnecting_leaks_nothing() {
    let rounds = std::env::var("SWITCHYARD_CHURN_ROUNDS").ok().and_then(|v| v.parse().ok());
    let rounds: usize = rounds.unwrap_or(300);
    let slot = SlotConfig { slot_bytes: 64 << 10, num_frames: 2 };
    let config = ListenerConfig { slot, ..Default::default() };
    let listener = Listener::bind("127.0.0.1:0", config).await.unwrap();
    let addr = listener.local_addr();
    let (sender, mut peers) = mpsc::unbounded_channel();
    let on_peer = move |connection| drop(sender.send(connection));
    tokio::spawn(listener.serve(|_| Ok(Vec::new()), on_peer, std::future::pending()));
    let mut base = None;
    for round in 0..rounds {
        let config = ConnectConfig { slot, ..Default::default() };
        let mut here = connect(addr, PeerHello::default(), config).await.unwrap();
        let there = timeout(LIMIT, peers.recv()).await.unwrap().unwrap();
        let frame = here.channel.try_reserve().unwrap().unwrap();
        here.channel.publish(frame, 0).unwrap();
        assert!(num_mappings_of(SLOTS) > 0, "slots have another name than `{SLOTS}`");
        drop(there);
        timeout(LIMIT, here.liveness.closed()).await.unwrap();
        drop(here);
        // By this round everything that is made only once exists.
        if round == rounds / 3 {
            base = Some((num_descriptors(), resident_bytes()));
        }
    }
    let (descriptors, resident) = base.unwrap();
    // Room for memory that belongs neither to descriptors nor to slots.
    let allowed = (16 << 20).max(rounds as u64 * 4096);
    let begin = Instant::now();
    // The other side closes its last connections a moment later.
    loop {
        let growth = resident_bytes().saturating_sub(resident);
        let (now, slots) = (num_descriptors(), num_mappings_of(SLOTS));
        if now <= descriptors + 4 && slots == 0 && growth < allowed {
            println!("after {rounds} rounds: {now} descriptors, {growth} bytes more");
            return;
        }
        assert!(
            begin.elapsed() < LIMIT,
            "after {rounds} rounds {now} descriptors, expected at most {descriptors} + 4, {slots} \
             mappings of slots, expected none, and {growth} bytes more, expected less than {allowed}"
        );
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Name of the slots' mappings.
const SLOTS: &str = "memfd:switchyard-slot";
const LIMIT: Duration = Duration::from_secs(60);
