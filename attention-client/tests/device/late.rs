//! Servers that answer late, again and again.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use expert_server::device::BatchObserver;
use protocol::WireDtype;
use switchyard_attention_client::DeviceClient;

use crate::client_common::{Request, seeded};
use crate::faults::{metric, until};
use crate::graphs::{DTYPE as RECORDED_DTYPE, NUM_TOKENS, record};
use crate::rig::{Fleet, Tensors, forward};

const DTYPE: WireDtype = WireDtype::Bf16;
/// Calls by which the client learns what is usual.
const MANY: usize = 120;
/// For shares to be measured.
const SOME: usize = 60;

#[test]
fn a_server_that_is_late_gets_less_until_it_recovers() {
    let mut rng = seeded("a_server_that_is_late_gets_less_until_it_recovers");
    let is_slow = Arc::new(AtomicBool::new(false));
    let pause_ms = Arc::new(AtomicU64::new(0));
    let num_rows = [0, 1].map(|_| Arc::new(AtomicU64::new(0)));
    let fleet = Fleet::start_with(2, 2, DTYPE, &|server, config| {
        let (is_slow, pause_ms) = (Arc::clone(&is_slow), Arc::clone(&pause_ms));
        let num_rows = Arc::clone(&num_rows[server]);
        // The thread that launches batches stands still.
        config.batch_observer = Some(BatchObserver::new(move |report| {
            num_rows.fetch_add(report.num_rows.into(), Ordering::Relaxed);
            if server == 0 && is_slow.load(Ordering::Relaxed) {
                std::thread::sleep(Duration::from_millis(pause_ms.load(Ordering::Relaxed)));
            }
        }));
    });
    let Some(fleet) = fleet else { return };
    let mut client = fleet.client();
    let tensors = Tensors::new(&client);
    let stream = client.gpu().stream().expect("stream");
    let mut local = fleet.local();
    let mut slowest = Duration::ZERO;
    let mut call = |client: &mut _, times: usize| {
        let before = num_rows.each_ref().map(|rows| rows.load(Ordering::Relaxed));
        for _ in 0..times {
            let request = Request::random(&mut rng, &fleet.model, 8, 4);
            let begin = Instant::now();
            forward(client, &stream, &tensors, &request, &mut local, DTYPE);
            slowest = slowest.max(begin.elapsed());
        }
        let after = num_rows.each_ref().map(|rows| rows.load(Ordering::Relaxed));
        let [first, second] = [0, 1].map(|idx| (after[idx] - before[idx]) as f64);
        (first / (first + second), slowest)
    };
    let num_begun = |client: &_| metric(client, "switchyard_client_late_servers_total", None);
    // Calls that are late by chance give one server less for a while.
    let (mut usual, mut slowest) = (0.0, Duration::ZERO);
    until("the servers share the rows", || {
        (usual, slowest) = call(&mut client, MANY);
        (0.3..0.7).contains(&usual)
    });
    // Longer than anything that happened by chance.
    pause_ms.store((slowest.as_millis() as u64 * 3).clamp(100, 2000), Ordering::Relaxed);
    is_slow.store(true, Ordering::Relaxed);
    let before = num_begun(&client);
    until("the client sees that the server is late", || {
        call(&mut client, 1);
        num_begun(&client) > before
    });
    until("the server gets less", || call(&mut client, SOME).0 < 0.6 * usual);
    is_slow.store(false, Ordering::Relaxed);
    until("its share returns", || call(&mut client, SOME).0 > 0.8 * usual);
}

/// A server that was late for some replays, and is not any more, is not avoided for a single late answer.
#[test]
fn a_server_recovers_by_timely_replays() {
    let mut rng = seeded("a_server_recovers_by_timely_replays");
    let pause_ms = Arc::new(AtomicU64::new(0));
    let fleet = Fleet::start_with(2, 2, RECORDED_DTYPE, &|server, config| {
        let pause_ms = Arc::clone(&pause_ms);
        config.batch_observer = Some(BatchObserver::new(move |_| {
            if server == 0 {
                std::thread::sleep(Duration::from_millis(pause_ms.load(Ordering::Relaxed)));
            }
        }));
    });
    let Some(fleet) = fleet else { return };
    let mut client = fleet.client();
    let mut local = fleet.local();
    let stream = client.gpu().stream().expect("stream");
    let recorded = record(&mut client, &stream);
    let mut slowest = Duration::ZERO;
    let mut replay = |client: &mut DeviceClient, times: usize| {
        for _ in 0..times {
            let request = Request::random(&mut rng, &fleet.model, NUM_TOKENS, 4);
            recorded.load(&request);
            let begin = Instant::now();
            client.replay(&stream, &recorded.graph).expect("replay");
            slowest = slowest.max(begin.elapsed());
            recorded.check(&request, &mut local);
        }
        slowest
    };
    let num_begun = |client: &_| metric(client, "switchyard_client_late_servers_total", None);
    let slowest = replay(&mut client, MANY);
    let slow = (slowest.as_millis() as u64 * 3).clamp(100, 2000);
    let before = num_begun(&client);
    pause_ms.store(slow, Ordering::Relaxed);
    until("the client sees that the server is late", || {
        replay(&mut client, 1);
        num_begun(&client) > before
    });
    let mut num_calm = 0;
    until("a late answer among timely ones means nothing again", || {
        pause_ms.store(0, Ordering::Relaxed);
        replay(&mut client, SOME);
        let before = num_begun(&client);
        pause_ms.store(slow, Ordering::Relaxed);
        replay(&mut client, 1);
        num_calm = if num_begun(&client) == before { num_calm + 1 } else { 0 };
        num_calm == 3
    });
}
