//! Coming and going, on its own in a process because it counts what the process holds.
#![cfg(not(loom))]

use std::time::{Duration, Instant};

use p2p_core::bootstrap::{ConnectConfig, Listener, ListenerConfig, connect};
use p2p_core::{PeerHello, SlotConfig};
use tokio::sync::mpsc;
use tokio::time::timeout;

/// Connects and disconnects many times; neither descriptors nor memory may stay behind.
#[tokio::test(flavor = "multi_thread")]
async fn coming_and_going_leaks_nothing() {
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
        drop(there);
        timeout(LIMIT, here.liveness.closed()).await.unwrap();
        drop(here);
        // Everything that is made once is there after a while.
        if round == rounds / 3 {
            base = Some((num_descriptors(), resident_bytes()));
        }
    }
    let (descriptors, resident) = base.unwrap();
    // A leaked slot would cost its touched pages: at least 8 KiB a round.
    let allowed = (2 << 20).max(rounds as u64 / 3 * 4096);
    let begin = Instant::now();
    // The other side closes its last connections a moment later.
    loop {
        let growth = resident_bytes().saturating_sub(resident);
        let now = num_descriptors();
        if now <= descriptors + 4 && growth < allowed {
            println!("after {rounds} rounds: {now} descriptors, {growth} bytes more");
            return;
        }
        assert!(
            begin.elapsed() < LIMIT,
            "after {rounds} rounds {now} descriptors, expected at most {descriptors} + 4, and \
             {growth} bytes more, expected less than {allowed}"
        );
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

const LIMIT: Duration = Duration::from_secs(20);

fn num_descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

fn resident_bytes() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4096
}
