//! Servers that die at the client's most delicate moments. Needs the feature `failpoints`.
#![cfg(feature = "failpoints")]

mod client_common;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use client_common::fake::{Act, FakeFleet, Script, expected};
use client_common::{Request, difference, metric, poisoned, seeded};
use p2p_core::SlotConfig;
use rand::RngExt;
use switchyard_attention_client::ClientError;

const SLOT: SlotConfig = SlotConfig { slot_bytes: 20 << 10, num_frames: 2 };

#[test]
fn a_death_at_any_failpoint_costs_no_pair() {
    let mut rng = seeded("a_death_at_any_failpoint_costs_no_pair");
    for point in [
        "client::between_payload_and_publish",
        "client::after_response_before_credit",
        "client::before_resend",
    ] {
        for hit in 0..6 {
            let answer: Script = Arc::new(|_| Act::Answer);
            // The first server dies by itself, so that there is something to send again.
            let dies: Script =
                Arc::new(|seen| if seen.before == 1 { Act::Die } else { Act::Answer });
            let mut fleet = FakeFleet::start(SLOT, vec![dies, Arc::clone(&answer), answer]);
            let victim = Mutex::new(Some(fleet.servers.remove(1)));
            let mut builder = fleet.builder();
            {
                // The victim is in the placement all the same.
                let guard = victim.lock().unwrap();
                let addrs = [
                    fleet.servers[0].addr.clone(),
                    guard.as_ref().unwrap().addr.clone(),
                    fleet.servers[1].addr.clone(),
                ];
                let replicas = vec![vec![0, 1, 2]; fleet.model.shape.num_experts as usize];
                builder =
                    builder.placement(client_common::table(&fleet.model, 1, &addrs, &replicas));
            }
            let client = builder.build().unwrap();
            client.wait_ready(Duration::from_secs(20)).unwrap();
            let hits = AtomicUsize::new(0);
            fail::cfg_callback(point, move || {
                if hits.fetch_add(1, Ordering::SeqCst) == hit {
                    drop(victim.lock().unwrap().take());
                }
            })
            .unwrap();
            for _ in 0..4 {
                let num_tokens = rng.random_range(1..250);
                let request = Request::random(&mut rng, &fleet.model, num_tokens, 4);
                let mut out = poisoned(request.x.len());
                client
                    .forward(request.layer, &request.x, &request.idx, &request.weights, &mut out)
                    .unwrap();
                let worst = difference(&out, &expected(&request, client.hidden()));
                assert!(worst < 1e-5, "{point}, hit {hit}: {worst}");
            }
            fail::remove(point);
            assert_eq!(metric(&client, "switchyard_client_lost_requests_total", None), 0.0);
        }
    }
}

/// The tests of hedges can fail: the accounts notice a pair that counts twice.
#[test]
fn a_pair_that_counts_twice_is_noticed() {
    let mut rng = seeded("a_pair_that_counts_twice_is_noticed");
    let slow: Script = Arc::new(|seen| match seen.before % 20 {
        19 => Act::Work(Duration::from_millis(20)),
        _ => Act::Answer,
    });
    let fleet = FakeFleet::start(SLOT, vec![slow, Arc::new(|_| Act::Answer)]);
    let client = fleet.builder().hedge_budget(1.0).build().unwrap();
    client.wait_ready(Duration::from_secs(20)).unwrap();
    fail::cfg("client::sabotage_double_hedge", "return").unwrap();
    let until = Instant::now() + Duration::from_secs(60);
    let error = loop {
        assert!(Instant::now() < until, "no error");
        let mut request = Request::random(&mut rng, &fleet.model, 2, 4);
        request.idx.iter_mut().zip(0..).for_each(|(expert, idx)| *expert = idx);
        let mut out = poisoned(request.x.len());
        let Request { layer, x, idx, weights, .. } = &request;
        if let Err(error) = client.forward(*layer, x, idx, weights, &mut out) {
            break error;
        }
    };
    fail::remove("client::sabotage_double_hedge");
    assert!(matches!(error, ClientError::Accounting { .. }), "{error}");
    assert!(metric(&client, "switchyard_client_duplicated_requests_total", None) > 0.0);
}
