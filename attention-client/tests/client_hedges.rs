//! Late answers: frames that are sent to other replicas too, and servers that are slow for a while.

mod client_common;

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use client_common::fake::{Act, FakeFleet, Script, Seen, expected};
use client_common::{Request, difference, metric, poisoned, seeded};
use p2p_core::SlotConfig;
use protocol::ErrorCode;
use rand::RngExt;
use rand::rngs::StdRng;
use switchyard_attention_client::{ClientModel, LayerTiming, MoeClient};

const SLOT: SlotConfig = SlotConfig { slot_bytes: 20 << 10, num_frames: 2 };
const HIDDEN: usize = 40;
/// For what must happen in the end.
const LIMIT: Duration = Duration::from_secs(60);

fn script(script: impl Fn(Seen) -> Act + Send + Sync + 'static) -> Script {
    Arc::new(script)
}

/// A server that keeps its answers back while `is_held`.
fn held(is_held: &Arc<AtomicBool>) -> Script {
    let is_held = Arc::clone(is_held);
    script(move |_| {
        let until = Instant::now() + LIMIT;
        while is_held.load(Ordering::SeqCst) && Instant::now() < until {
            std::thread::sleep(Duration::from_micros(100));
        }
        Act::Answer
    })
}

fn forward(client: &MoeClient, request: &Request) -> LayerTiming {
    let mut out = poisoned(request.x.len());
    let timing = client
        .forward(request.layer, &request.x, &request.idx, &request.weights, &mut out)
        .unwrap();
    let worst = difference(&out, &expected(request, HIDDEN));
    assert!(worst < 1e-5, "the sum differs by {worst}: {timing:?}");
    timing
}

fn hedges(client: &MoeClient, result: Option<&str>) -> f64 {
    metric(client, "switchyard_client_hedges_total", result)
}

/// Every pair counts exactly once, and there are no more hedges than the budget allows.
fn check_counters(client: &MoeClient, budget: f64) {
    assert_eq!(metric(client, "switchyard_client_lost_requests_total", None), 0.0);
    assert_eq!(metric(client, "switchyard_client_duplicated_requests_total", None), 0.0);
    let frames = metric(client, "switchyard_client_frames_total", Some("out"));
    let hedges = hedges(client, None);
    assert!(hedges <= budget * frames, "{hedges} hedges with {frames} frames");
}

/// A request for every expert, so that each server gets pairs.
fn wide_request(rng: &mut StdRng, model: &ClientModel) -> Request {
    let mut request = Request::random(rng, model, 2, 4);
    request.idx.iter_mut().zip(0..).for_each(|(expert, idx)| *expert = idx);
    request
}

/// Calls until the client knows what is usual and has a budget.
fn warm_up(rng: &mut StdRng, client: &MoeClient, model: &ClientModel) {
    client.wait_ready(LIMIT).unwrap();
    for _ in 0..300 {
        forward(client, &wide_request(rng, model));
    }
}

fn until(what: &str, mut done: impl FnMut() -> bool) {
    let limit = Instant::now() + LIMIT;
    while !done() {
        assert!(Instant::now() < limit, "{what}");
    }
}

#[test]
fn another_replica_answers_for_a_server_that_is_late() {
    let mut rng = seeded("another_replica_answers_for_a_server_that_is_late");
    let is_held = Arc::new(AtomicBool::new(false));
    let right = || script(|_| Act::Answer);
    let fleet = FakeFleet::start(SLOT, vec![held(&is_held), right(), right()]);
    let client = fleet.builder().deadline(LIMIT).build().unwrap();
    warm_up(&mut rng, &client, &fleet.model);
    for _ in 0..3 {
        is_held.store(true, Ordering::SeqCst);
        let before = fleet.servers[0].frames();
        let mut num_won = 0;
        // Another frame may have been late by chance, so that the slow server was avoided.
        until("the slow server gets no frame", || {
            num_won += forward(&client, &wide_request(&mut rng, &fleet.model)).hedges_won;
            fleet.servers[0].frames() > before
        });
        assert!(num_won > 0);
        // While its answer is missing it gets no other frame, and calls go on without it.
        for _ in 0..20 {
            forward(&client, &wide_request(&mut rng, &fleet.model));
        }
        assert_eq!(fleet.servers[0].frames(), before + 1);
        is_held.store(false, Ordering::SeqCst);
        // The late answer lands nowhere, and the server is used again.
        until("the server is not used again", || {
            forward(&client, &wide_request(&mut rng, &fleet.model));
            fleet.servers[0].frames() > before + 5
        });
        for _ in 0..100 {
            forward(&client, &wide_request(&mut rng, &fleet.model));
        }
    }
    assert!(hedges(&client, Some("won")) >= 3.0);
    assert_eq!(metric(&client, "switchyard_client_failovers_total", None), 0.0);
    check_counters(&client, 0.05);
}

#[test]
fn without_a_budget_nothing_is_hedged() {
    let mut rng = seeded("without_a_budget_nothing_is_hedged");
    let slow = |every: usize| {
        script(move |seen: Seen| match seen.before % every {
            0 => Act::Work(Duration::from_millis(5)),
            _ => Act::Answer,
        })
    };
    let fleet = FakeFleet::start(SLOT, vec![slow(7), slow(11)]);
    let client = fleet.builder().hedge_budget(0.0).build().unwrap();
    warm_up(&mut rng, &client, &fleet.model);
    assert_eq!(hedges(&client, None), 0.0);
    for budget in [-0.1, 1.1, f64::NAN] {
        let error = fleet.builder().hedge_budget(budget).build().unwrap_err().to_string();
        assert!(error.contains("hedge_budget"), "{error}");
    }
}

#[test]
fn a_failure_on_either_side_of_a_hedge_costs_no_pair() {
    let mut rng = seeded("a_failure_on_either_side_of_a_hedge_costs_no_pair");
    for (late_fails, act) in [
        (false, Act::Refuse(ErrorCode::Overloaded)),
        (false, Act::Refuse(ErrorCode::UnknownExpert)),
        (false, Act::Die),
        (false, Act::CorruptHeader),
        (true, Act::Refuse(ErrorCode::Overloaded)),
        (true, Act::Die),
        (true, Act::CorruptHeader),
    ] {
        // 0: both answer. 1: the first one is late. 2: it goes on.
        let stage = Arc::new(AtomicUsize::new(0));
        let hedged_at = Arc::new(AtomicUsize::new(usize::MAX));
        let late = {
            let (stage, act) = (Arc::clone(&stage), act.clone());
            script(move |_| {
                let was_held = stage.load(Ordering::SeqCst) == 1;
                let until = Instant::now() + LIMIT;
                while stage.load(Ordering::SeqCst) == 1 && Instant::now() < until {
                    std::thread::sleep(Duration::from_micros(100));
                }
                if was_held && late_fails { act.clone() } else { Act::Answer }
            })
        };
        let other = {
            let (stage, hedged_at) = (Arc::clone(&stage), Arc::clone(&hedged_at));
            script(move |seen: Seen| {
                if stage.load(Ordering::SeqCst) != 1 {
                    return Act::Answer;
                }
                // The first frame is the call's own, the second one the copy.
                let first = hedged_at.load(Ordering::SeqCst).min(seen.before);
                hedged_at.store(first, Ordering::SeqCst);
                if seen.before != first + 1 {
                    return Act::Answer;
                }
                stage.store(2, Ordering::SeqCst);
                if late_fails {
                    // The original fails while the copy is outstanding.
                    std::thread::sleep(Duration::from_millis(30));
                    return Act::Answer;
                }
                act.clone()
            })
        };
        let fleet = FakeFleet::start(SLOT, vec![late, other]);
        let client = fleet.builder().deadline(LIMIT).build().unwrap();
        warm_up(&mut rng, &client, &fleet.model);
        stage.store(1, Ordering::SeqCst);
        until("the copy is never asked for", || {
            forward(&client, &wide_request(&mut rng, &fleet.model));
            stage.load(Ordering::SeqCst) == 2
        });
        for _ in 0..100 {
            forward(&client, &wide_request(&mut rng, &fleet.model));
        }
        assert!(hedges(&client, None) > 0.0);
        check_counters(&client, 0.05);
    }
}

#[test]
fn random_delays_and_faults_never_give_a_wrong_sum() {
    let mut rng = seeded("random_delays_and_faults_never_give_a_wrong_sum");
    for (budget, has_faults) in [(0.05, false), (1.0, false), (1.0, true)] {
        let seed: u64 = rng.random();
        let server = |server: u64| {
            script(move |seen: Seen| {
                let roll = mix(seed ^ (server << 32) ^ seen.before as u64);
                match roll % 200 {
                    0..8 => Act::Work(Duration::from_micros(roll >> 32 & 0x1fff)),
                    8 => Act::Work(Duration::from_millis(30)),
                    9 if has_faults => Act::Die,
                    10 if has_faults => Act::Silence,
                    11 if has_faults => Act::CorruptHeader,
                    12 if has_faults => Act::AnswerTwice,
                    13 if has_faults => Act::StaleThenAnswer,
                    14 if has_faults => Act::Refuse(ErrorCode::Overloaded),
                    15 if has_faults => Act::Zombie(Duration::from_millis(60)),
                    _ => Act::Answer,
                }
            })
        };
        let right = script(|_| Act::Answer);
        let fleet = FakeFleet::start(SLOT, vec![server(1), server(2), server(3), right]);
        let deadline = if has_faults { Duration::from_millis(40) } else { LIMIT };
        let lanes = NonZeroUsize::new(3).unwrap();
        let builder = fleet.builder().deadline(deadline).replica_wait(LIMIT);
        let client = builder.hedge_budget(budget).max_lanes(lanes).build().unwrap();
        client.wait_ready(LIMIT).unwrap();
        let end = Instant::now() + Duration::from_secs(3);
        let num_hedges = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for seed in [rng.random(), rng.random::<u64>()] {
                let (client, fleet, num_hedges) = (&client, &fleet, &num_hedges);
                scope.spawn(move || {
                    let mut rng: StdRng = rand::SeedableRng::seed_from_u64(seed);
                    while Instant::now() < end || num_hedges.load(Ordering::Relaxed) == 0 {
                        let num_tokens = *[1, 2, 3, 60].get(rng.random_range(0..4)).unwrap();
                        let request = Request::random(&mut rng, &fleet.model, num_tokens, 4);
                        let timing = forward(client, &request);
                        assert!(timing.hedges_won <= timing.hedges);
                        num_hedges.fetch_add(timing.hedges as usize, Ordering::Relaxed);
                        assert!(Instant::now() < end + LIMIT, "no hedge");
                    }
                });
            }
        });
        println!(
            "budget {budget}: {} won, {} lost, {} failed",
            hedges(&client, Some("won")),
            hedges(&client, Some("lost")),
            hedges(&client, Some("failed"))
        );
        assert_eq!(hedges(&client, None), num_hedges.into_inner() as f64);
        check_counters(&client, budget);
    }
}

/// SplitMix64's finaliser.
fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[test]
fn one_of_three_servers_is_slow() {
    let mut rng = seeded("one_of_three_servers_is_slow");
    // Scripted servers answer in tens of microseconds.
    let slow = script(|_| Act::Work(Duration::from_millis(2)));
    let fleet =
        FakeFleet::start(SLOT, vec![slow, script(|_| Act::Answer), script(|_| Act::Answer)]);
    let client = fleet.builder().deadline(LIMIT).build().unwrap();
    client.wait_ready(LIMIT).unwrap();
    until("nothing is hedged", || {
        for _ in 0..1000 {
            forward(&client, &wide_request(&mut rng, &fleet.model));
        }
        hedges(&client, None) > 0.0
    });
    let frames: Vec<usize> = fleet.servers.iter().map(|server| server.frames()).collect();
    println!("{frames:?} frames, {} hedges", hedges(&client, None));
    check_counters(&client, 0.05);
}
