//! Clients that come and go leave nothing behind. Alone in its process, whose descriptors, threads
//! and memory it counts.

mod client_common;

use std::time::{Duration, Instant};

use client_common::{Fleet, Request, difference, local_reference, poisoned, seeded};
use p2p_core::SlotConfig;
use test_support::descriptors::num_descriptors;

#[test]
fn clients_that_come_and_go_leave_nothing_behind() {
    let mut rng = seeded("clients_that_come_and_go_leave_nothing_behind");
    let fleet = Fleet::start(2, 2, SlotConfig { slot_bytes: 256 << 10, num_frames: 2 });
    // More than a slot holds, so that all of it is touched.
    let request = Request::random(&mut rng, &fleet.model, 400, 4);
    let expected = local_reference(&request, &mut fleet.local());
    let mut before = Counts::default();
    for round in 0..120 {
        let client = fleet.builder().build().unwrap();
        client.wait_ready(Duration::from_secs(20)).unwrap();
        let dispatch =
            || client.dispatch(request.layer, &request.x, &request.idx, &request.weights).unwrap();
        let (given_up, handle) = (dispatch(), dispatch());
        let mut out = poisoned(request.x.len());
        client.combine(handle, &mut out).unwrap();
        assert!(difference(&out, &expected) < 1e-5);
        // Some go with answers outstanding.
        drop(given_up);
        drop(client);
        if round == 19 {
            before = settled(&fleet);
        }
    }
    let begin = Instant::now();
    loop {
        let after = settled(&fleet);
        // 100 clients with 2 lanes, 2 servers and 4 slots each would be 200 MiB, 400 links and as many
        // threads as clients at least. A thread of a pool that has not ended yet is no leak.
        if after.descriptors <= before.descriptors + 8
            && after.threads <= before.threads + 4
            && after.memory_bytes < before.memory_bytes + (64 << 20)
        {
            return;
        }
        assert!(begin.elapsed() < PATIENCE, "{before:?} after 20 clients, {after:?} after 120");
    }
}

#[derive(Debug, Default)]
struct Counts {
    descriptors: usize,
    threads: usize,
    memory_bytes: usize,
}

const PATIENCE: Duration = Duration::from_secs(20);

/// Counts once the servers have noticed that the clients are gone.
fn settled(fleet: &Fleet) -> Counts {
    let until = Instant::now() + PATIENCE;
    while fleet.servers.iter().flatten().any(|server| server.num_links() > 0) {
        assert!(Instant::now() < until, "links stay open");
        std::thread::sleep(Duration::from_millis(5));
    }
    // Connections close a moment after their links.
    let mut last = counts();
    loop {
        std::thread::sleep(Duration::from_millis(200));
        let now = counts();
        if (now.descriptors, now.threads) == (last.descriptors, last.threads) {
            return now;
        }
        assert!(Instant::now() < until, "descriptors and threads do not settle: {now:?}");
        last = now;
    }
}

fn counts() -> Counts {
    let entries = |dir: &str| std::fs::read_dir(dir).expect("procfs").count();
    let statm = std::fs::read_to_string("/proc/self/statm").expect("procfs");
    let pages = statm.split(' ').nth(1).and_then(|pages| pages.parse::<usize>().ok());
    Counts {
        descriptors: num_descriptors("self").expect("descriptors"),
        threads: entries("/proc/self/task"),
        memory_bytes: pages.expect("resident pages") * 4096,
    }
}
