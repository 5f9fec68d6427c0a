//! The client against servers that misbehave on purpose.

mod client_common;

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use client_common::fake::{Act, FakeFleet, Greeting, Script, Seen, expected};
use client_common::stand_in::StandIn;
use client_common::{Request, difference, metric, poisoned, seeded, table};
use p2p_core::bootstrap::MAX_USELESS_LINKS;
use p2p_core::{SlotConfig, TransportKind, Transports};
use protocol::ErrorCode;
use rand::RngExt;
use switchyard_attention_client::{
    ClientError, ErrorKind, LayerTiming, MoeClient, OnMissingExpert,
};

const SLOT: SlotConfig = SlotConfig { slot_bytes: 20 << 10, num_frames: 2 };
const HIDDEN: usize = 40;
/// The deadline where silence is the test. A busy machine can make an answer wait for longer.
const SILENCE: Duration = Duration::from_millis(250);
/// The deadline where an answer that only waits for a processor must not count as silence.
const LONG_SILENCE: Duration = Duration::from_secs(1);
/// For what must happen in the end.
const LIMIT: Duration = Duration::from_secs(60);

fn script(script: impl Fn(Seen) -> Act + Send + Sync + 'static) -> Script {
    Arc::new(script)
}

fn right() -> Script {
    script(|_| Act::Answer)
}

/// The given act for the frame with this number, the right answer for all others.
fn once(number: usize, act: Act) -> Script {
    script(move |seen| if seen.before == number { act.clone() } else { Act::Answer })
}

fn forward(client: &MoeClient, request: &Request) -> Result<LayerTiming, ClientError> {
    let mut out = poisoned(request.x.len());
    let timing =
        client.forward(request.layer, &request.x, &request.idx, &request.weights, &mut out)?;
    let worst = difference(&out, &expected(request, HIDDEN));
    assert!(worst < 1e-5, "the sum differs by {worst}: {timing:?}");
    Ok(timing)
}

fn failovers(client: &MoeClient, reason: &str) -> f64 {
    metric(client, "switchyard_client_failovers_total", Some(reason))
}

/// One server misbehaves once; the call must come out right, and the failure be counted.
fn survives(test: &str, act: Act, reason: &str) {
    let mut rng = seeded(test);
    let fleet = FakeFleet::start(SLOT, vec![once(2, act), right()]);
    let is_silent = reason == "silent";
    let deadline = if is_silent { SILENCE } else { LIMIT };
    let client = fleet.builder().deadline(deadline).build().unwrap();
    client.wait_ready(Duration::from_secs(20)).unwrap();
    let mut num_failovers = 0;
    let mut num_resent = 0;
    for _ in 0..8 {
        let num_tokens = rng.random_range(1..200);
        let request = Request::random(&mut rng, &fleet.model, num_tokens, 4);
        let timing = forward(&client, &request).unwrap();
        num_failovers += timing.failovers;
        num_resent += timing.resent_pairs;
        assert_eq!(timing.failovers > 0, timing.stall_ns > 0);
    }
    // More where a busy machine kept a server that answers for longer than the deadline.
    assert!(num_failovers == 1 || is_silent && num_failovers > 1, "{num_failovers} failovers");
    assert!(num_resent > 0);
    assert_eq!(failovers(&client, reason), f64::from(num_failovers));
    assert_eq!(metric(&client, "switchyard_client_resent_pairs_total", None), num_resent as f64);
    assert_eq!(metric(&client, "switchyard_client_lost_requests_total", None), 0.0);
    assert_eq!(metric(&client, "switchyard_client_duplicated_requests_total", None), 0.0);
}

#[test]
fn a_server_that_dies() {
    survives("a_server_that_dies", Act::Die, "closed");
}

#[test]
fn a_server_that_goes_silent() {
    survives("a_server_that_goes_silent", Act::Silence, "silent");
}

#[test]
fn a_server_that_corrupts_its_answer() {
    survives("a_server_that_corrupts_its_answer", Act::CorruptHeader, "invalid");
}

#[test]
fn a_server_that_answers_with_too_many_rows() {
    survives("a_server_that_answers_with_too_many_rows", Act::MissingRows, "invalid");
}

#[test]
fn a_server_that_answers_for_another_layer() {
    survives("a_server_that_answers_for_another_layer", Act::WrongLayer, "silent");
}

#[test]
fn a_server_whose_flags_are_impossible() {
    let mut rng = seeded("a_server_whose_flags_are_impossible");
    let fleet = FakeFleet::start(SLOT, vec![once(0, Act::Desync), right()]);
    let client = fleet.builder().build().unwrap();
    client.wait_ready(Duration::from_secs(20)).unwrap();
    let request = Request::random(&mut rng, &fleet.model, 30, 4);
    // Depending on who looks first it shows as bad flags or as frames without content.
    assert_eq!(forward(&client, &request).unwrap().failovers, 1);
    forward(&client, &request).unwrap();
}

#[test]
fn a_duplicate_or_stale_answer_is_dropped_and_counted() {
    let mut rng = seeded("a_duplicate_or_stale_answer_is_dropped_and_counted");
    for act in [Act::AnswerTwice, Act::StaleThenAnswer] {
        let fleet = FakeFleet::start(SLOT, vec![script(move |_| act.clone())]);
        let client = fleet.builder().build().unwrap();
        for _ in 0..5 {
            let request = Request::random(&mut rng, &fleet.model, 100, 4);
            assert_eq!(forward(&client, &request).unwrap().failovers, 0);
        }
        let stale = metric(&client, "switchyard_client_stale_responses_total", None);
        // The last duplicates may still be on their way.
        assert!(stale >= fleet.servers[0].frames() as f64 - 2.0, "{stale} stale responses");
        assert_eq!(metric(&client, "switchyard_client_duplicated_requests_total", None), 0.0);
    }
}

#[test]
fn half_an_answer_then_death_counts_every_pair_once() {
    let mut rng = seeded("half_an_answer_then_death_counts_every_pair_once");
    for die_at in 1..8 {
        let fleet = FakeFleet::start(SLOT, vec![once(die_at, Act::Die), right()]);
        let client = fleet.builder().build().unwrap();
        client.wait_ready(Duration::from_secs(20)).unwrap();
        // A dozen frames for each server.
        let mut request = Request::random(&mut rng, &fleet.model, 500, 4);
        request.idx.iter_mut().filter(|e| **e == -1).for_each(|e| *e = 3);
        let timing = forward(&client, &request).unwrap();
        assert_eq!(timing.failovers, 1);
        // Answered pairs are not resent.
        assert!(timing.resent_pairs < 1000, "{timing:?}");
        assert_eq!(metric(&client, "switchyard_client_lost_requests_total", None), 0.0);
    }
}

#[test]
fn long_work_is_not_silence() {
    let mut rng = seeded("long_work_is_not_silence");
    let work = Act::Work(2 * LONG_SILENCE);
    let fleet = FakeFleet::start(SLOT, vec![once(0, work)]);
    let client = fleet.builder().deadline(LONG_SILENCE).build().unwrap();
    let request = Request::random(&mut rng, &fleet.model, 3, 4);
    let timing = forward(&client, &request).unwrap();
    assert_eq!(timing.failovers, 0);
    assert!(timing.wait_ns >= 1_800_000_000, "{timing:?}");
}

#[test]
fn life_without_an_answer_ends_too() {
    let mut rng = seeded("life_without_an_answer_ends_too");
    let fleet = FakeFleet::start(SLOT, vec![once(0, Act::WorkForEver), right()]);
    let builder = fleet.builder().deadline(LONG_SILENCE);
    let client = builder.work_limit(LONG_SILENCE).build().unwrap();
    client.wait_ready(Duration::from_secs(20)).unwrap();
    let mut request = Request::random(&mut rng, &fleet.model, 20, 4);
    request.idx.fill(1);
    request.idx[0] = 2;
    assert_eq!(forward(&client, &request).unwrap().failovers, 1);
    assert_eq!(failovers(&client, "stuck"), 1.0);
}

#[test]
fn the_caller_ends_a_blocked_call() {
    let mut rng = seeded("the_caller_ends_a_blocked_call");
    let fleet = FakeFleet::start(SLOT, vec![once(0, Act::Work(LONG_SILENCE))]);
    let builder = fleet.builder().deadline(LIMIT).replica_wait(LIMIT);
    let client = builder.max_lanes(NonZeroUsize::MIN).build().unwrap();
    client.wait_ready(Duration::from_secs(20)).unwrap();
    let num_asked = AtomicUsize::new(0);
    let third_time = || num_asked.fetch_add(1, Ordering::Relaxed) == 2;
    let mut request = Request::random(&mut rng, &fleet.model, 3, 4);
    request.idx[0] = 1;
    let Request { layer, x, idx, weights, .. } = &request;
    let handle = client.dispatch(*layer, x, idx, weights).unwrap();
    // The only lane is in use.
    let ended = client.dispatch_unless(*layer, x, idx, weights, &third_time);
    assert!(matches!(ended, Err(ClientError::Cancelled)), "{ended:?}");
    assert_eq!(num_asked.swap(0, Ordering::Relaxed), 3);
    let mut out = poisoned(x.len());
    let ended = client.combine_unless(handle, &mut out, &third_time);
    assert!(matches!(ended, Err(ClientError::Cancelled)), "{ended:?}");
    assert_eq!(num_asked.load(Ordering::Relaxed), 3);
    assert!(matches!(client.wait_ready_unless(LIMIT, &|| true), Err(ClientError::Cancelled)));
    // The answer to the abandoned call counts for no other.
    forward(&client, &request).unwrap();
    assert_eq!(metric(&client, "switchyard_client_abandoned_requests_total", None), 1.0);
}

#[test]
fn a_late_answer_lands_nowhere() {
    let mut rng = seeded("a_late_answer_lands_nowhere");
    let zombie = Act::Zombie(Duration::from_millis(500));
    let fleet = FakeFleet::start(SLOT, vec![once(1, zombie), right()]);
    let client = fleet.builder().deadline(SILENCE).build().unwrap();
    client.wait_ready(Duration::from_secs(20)).unwrap();
    let start = Instant::now();
    let mut num_failovers = 0;
    // The late write happens while these calls go on, also over the server's next connection.
    let came_back = || fleet.servers[0].num_connections.load(Ordering::SeqCst) >= 2;
    while start.elapsed() < Duration::from_millis(1200) || !came_back() {
        let request = Request::random(&mut rng, &fleet.model, 40, 4);
        num_failovers += forward(&client, &request).unwrap().failovers;
        assert!(start.elapsed() < LIMIT, "the server did not come back");
    }
    assert!(num_failovers > 0);
    assert_eq!(metric(&client, "switchyard_client_lost_requests_total", None), 0.0);
    assert_eq!(metric(&client, "switchyard_client_duplicated_requests_total", None), 0.0);
}

#[test]
fn a_refusal_is_routed_elsewhere() {
    let mut rng = seeded("a_refusal_is_routed_elsewhere");
    for code in [
        ErrorCode::NotMyExpert,
        ErrorCode::ShuttingDown,
        ErrorCode::StaleEpoch,
        ErrorCode::Overloaded,
        ErrorCode::Other(4711),
        ErrorCode::BadFrame,
    ] {
        let fleet = FakeFleet::start(SLOT, vec![once(0, Act::Refuse(code)), right()]);
        let client = fleet.builder().build().unwrap();
        client.wait_ready(Duration::from_secs(20)).unwrap();
        for _ in 0..3 {
            let request = Request::random(&mut rng, &fleet.model, 30, 4);
            assert_eq!(forward(&client, &request).unwrap().failovers, 0);
        }
        assert_eq!(metric(&client, "switchyard_client_error_frames_total", None), 1.0);
        assert_eq!(metric(&client, "switchyard_client_connects_total", Some("ok")), 2.0);
    }
}

#[test]
fn a_refusal_by_the_only_replica_is_asked_again() {
    let mut rng = seeded("a_refusal_by_the_only_replica_is_asked_again");
    let busy = script(|seen| match seen.before {
        0..3 => Act::Refuse(ErrorCode::Overloaded),
        _ => Act::Answer,
    });
    let fleet = FakeFleet::start(SLOT, vec![busy]);
    let client = fleet.builder().build().unwrap();
    let request = Request::random(&mut rng, &fleet.model, 2, 4);
    forward(&client, &request).unwrap();
}

#[test]
fn a_final_refusal_is_an_error_in_the_servers_words() {
    let mut rng = seeded("a_final_refusal_is_an_error_in_the_servers_words");
    let refuse = |code| script(move |_| Act::Refuse(code));
    let fleet = FakeFleet::start(SLOT, vec![refuse(ErrorCode::UnknownExpert)]);
    let client = fleet.builder().build().unwrap();
    let request = Request::random(&mut rng, &fleet.model, 300, 4);
    let error = forward(&client, &request).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("server-0") && text.contains("unknown_expert"), "{text}");
    assert!(text.contains("as the test wants it"), "{text}");
    assert_eq!(error.kind(), ErrorKind::PeerFault);
}

#[test]
fn all_replicas_dead_is_an_error_that_names_layer_and_expert() {
    let mut rng = seeded("all_replicas_dead_is_an_error_that_names_layer_and_expert");
    let mut fleet = FakeFleet::start(SLOT, vec![right(), right()]);
    let builder = fleet.builder().replica_wait(Duration::from_millis(100));
    let client = builder.build().unwrap();
    client.wait_ready(Duration::from_secs(20)).unwrap();
    let mut request = Request::random(&mut rng, &fleet.model, 10, 4);
    request.idx.fill(5);
    forward(&client, &request).unwrap();
    fleet.servers.iter_mut().for_each(|server| server.kill());
    let error = forward(&client, &request).unwrap_err();
    let text = error.to_string();
    let named = format!("no live replica of expert 5 of layer {}", request.layer);
    assert!(text.contains(&named), "{text}");
    assert!(text.contains("server-0 at 127.0.0.1") && text.contains("server-1"), "{text}");
    assert_eq!(error.kind(), ErrorKind::Transient);
}

#[test]
fn servers_that_always_fail_do_not_keep_a_call_for_ever() {
    let mut rng = seeded("servers_that_always_fail_do_not_keep_a_call_for_ever");
    for act in [Act::Die, Act::Silence, Act::CorruptHeader, Act::Refuse(ErrorCode::Internal)] {
        let always = || {
            script({
                let act = act.clone();
                move |_| act.clone()
            })
        };
        let fleet = FakeFleet::start(SLOT, vec![always(), always()]);
        let builder = fleet.builder().deadline(Duration::from_millis(30));
        let client = builder.replica_wait(Duration::from_millis(700)).build().unwrap();
        let request = Request::random(&mut rng, &fleet.model, 10, 4);
        let error = forward(&client, &request).unwrap_err();
        assert!(matches!(error, ClientError::NoReplica { .. }), "{error}");
    }
}

#[test]
fn a_server_that_comes_back_is_used_again() {
    let mut rng = seeded("a_server_that_comes_back_is_used_again");
    // The only replica dies twice within one call and is back at once.
    let script = script(|seen| match seen.before {
        0 | 1 => Act::Die,
        _ => Act::Answer,
    });
    let fleet = FakeFleet::start(SLOT, vec![script]);
    let client = fleet.builder().build().unwrap();
    let request = Request::random(&mut rng, &fleet.model, 3, 4);
    let timing = forward(&client, &request).unwrap();
    assert_eq!(timing.failovers, 2);
    assert!(timing.stall_ns > 0);
}

#[test]
fn a_server_that_fails_many_times_in_one_call_is_used_again() {
    let mut rng = seeded("a_server_that_fails_many_times_in_one_call_is_used_again");
    let script = script(|seen| match seen.before {
        0..6 => Act::Silence,
        _ => Act::Answer,
    });
    let fleet = FakeFleet::start(SLOT, vec![script]);
    let builder = fleet.builder().deadline(Duration::from_millis(30));
    let client = builder.replica_wait(Duration::from_secs(20)).build().unwrap();
    let request = Request::random(&mut rng, &fleet.model, 3, 4);
    let timing = forward(&client, &request).unwrap();
    // More where a busy machine kept a server that answers for longer than the deadline.
    assert!(timing.failovers >= 6, "{} failovers", timing.failovers);
}

#[test]
fn missing_experts_are_left_out_and_the_rest_scaled() {
    let mut rng = seeded("missing_experts_are_left_out_and_the_rest_scaled");
    let fleet = FakeFleet::start(SLOT, vec![right()]);
    let mut replicas = vec![vec![0]; 8];
    replicas[2].clear();
    replicas[6].clear();
    let placement = table(&fleet.model, 1, &[fleet.servers[0].addr.clone()], &replicas);
    let client = fleet
        .builder()
        .placement(placement)
        .on_missing_expert(OnMissingExpert::DropAndRenormalise)
        .replica_wait(Duration::from_millis(20))
        .build()
        .unwrap();
    // Until the server is connected everything is missing. `wait_ready` would wait for the experts that
    // never come.
    let mut there = Request::random(&mut rng, &fleet.model, 1, 4);
    there.idx.fill(1);
    let until = Instant::now() + LIMIT;
    let before = loop {
        assert!(Instant::now() < until, "the server is never connected");
        let mut out = poisoned(there.x.len());
        let timing =
            client.forward(there.layer, &there.x, &there.idx, &there.weights, &mut out).unwrap();
        if timing.missing_pairs == 0 {
            break metric(&client, "switchyard_client_missing_pairs_total", None);
        }
    };
    let mut request = Request::random(&mut rng, &fleet.model, 60, 4);
    request.weights.iter_mut().for_each(|w| *w = w.abs() + 0.1);
    // A token that keeps nothing.
    request.idx[..4].copy_from_slice(&[2, 6, -1, 2]);
    let mut out = poisoned(request.x.len());
    let timing = client
        .forward(request.layer, &request.x, &request.idx, &request.weights, &mut out)
        .unwrap();
    // The reference: the same arithmetic on the weights themselves.
    let is_missing = |e: i32| e == 2 || e == 6;
    let num_missing = request.idx.iter().filter(|e| is_missing(**e)).count();
    let mut scaled = request.clone();
    for (idx, weights) in scaled.idx.chunks_mut(4).zip(scaled.weights.chunks_mut(4)) {
        let sum = |keep: &dyn Fn(i32) -> bool| -> f64 {
            let kept = idx.iter().zip(weights.iter()).filter(|(e, _)| **e >= 0 && keep(**e));
            kept.map(|(_, w)| f64::from(*w)).sum()
        };
        let factor = sum(&|_| true) / sum(&|e| !is_missing(e));
        idx.iter_mut().filter(|e| is_missing(**e)).for_each(|e| *e = -1);
        weights.iter_mut().for_each(|w| *w = (f64::from(*w) * factor) as f32);
    }
    let worst = difference(&out, &expected(&scaled, HIDDEN));
    assert!(worst < 1e-5, "{worst}");
    assert!(out[..HIDDEN].iter().all(|&v| v == 0.0));
    assert_eq!(timing.missing_pairs, num_missing as u64);
    let counted = metric(&client, "switchyard_client_missing_pairs_total", None) - before;
    assert_eq!(counted, num_missing as f64);
}

#[test]
fn random_faults_never_give_a_wrong_sum() {
    let mut rng = seeded("random_faults_never_give_a_wrong_sum");
    let num_faults = Arc::new(AtomicUsize::new(0));
    let seed: u64 = rng.random();
    let faulty = |server: u64| {
        let num_faults = Arc::clone(&num_faults);
        script(move |seen: Seen| {
            let roll = mix(seed ^ (server << 32) ^ seen.before as u64);
            let act = match roll % 40 {
                0 => Act::Die,
                1 => Act::Silence,
                2 => Act::CorruptHeader,
                3 => Act::AnswerTwice,
                4 => Act::StaleThenAnswer,
                5 => Act::Refuse(ErrorCode::Overloaded),
                6 => Act::Zombie(Duration::from_millis(60)),
                7 => Act::WrongLayer,
                8 => Act::Work(Duration::from_millis(5)),
                _ => return Act::Answer,
            };
            num_faults.fetch_add(1, Ordering::Relaxed);
            act
        })
    };
    let fleet = FakeFleet::start(SLOT, vec![faulty(1), faulty(2), faulty(3), right()]);
    let builder = fleet.builder().deadline(Duration::from_millis(40)).replica_wait(LIMIT);
    let client = builder.build().unwrap();
    client.wait_ready(Duration::from_secs(20)).unwrap();
    let until = Instant::now() + Duration::from_secs(6);
    let mut num_calls = 0;
    while Instant::now() < until {
        let num_tokens = rng.random_range(1..150);
        let request = Request::random(&mut rng, &fleet.model, num_tokens, 4);
        forward(&client, &request).unwrap();
        num_calls += 1;
    }
    let num_faults = num_faults.load(Ordering::Relaxed);
    println!("{num_calls} calls, {num_faults} faults");
    assert!(num_faults > 0);
    assert_eq!(metric(&client, "switchyard_client_lost_requests_total", None), 0.0);
    assert_eq!(metric(&client, "switchyard_client_duplicated_requests_total", None), 0.0);
}

/// SplitMix64's finaliser.
fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// A network beside shared memory, which it is preferred to.
fn offered(network: &Arc<StandIn>) -> Transports {
    Transports {
        kinds: vec![TransportKind::Verbs, TransportKind::Shm],
        networks: vec![Arc::clone(network) as _],
        ..Transports::default()
    }
}

fn stand_in() -> Arc<StandIn> {
    StandIn::new(TransportKind::Verbs, "filtered")
}

/// The transport of every connection to the first server so far.
fn kinds_used(fleet: &FakeFleet) -> Vec<TransportKind> {
    let used = fleet.servers[0].transports.lock().unwrap();
    used.iter().map(|(kind, _)| *kind).collect()
}

#[test]
fn a_network_that_joins_and_carries_nothing_is_left_out() {
    let mut rng = seeded("a_network_that_joins_and_carries_nothing_is_left_out");
    let fleet = FakeFleet::over(offered(&stand_in()), SLOT, vec![right()]);
    let client = fleet
        .builder()
        .transports(offered(&stand_in()))
        .deadline(LONG_SILENCE)
        .replica_wait(LIMIT)
        .build()
        .unwrap();
    // One call: its links go silent until the next best transport has its turn.
    let request = Request::random(&mut rng, &fleet.model, 30, 4);
    let timing = forward(&client, &request).unwrap();
    assert_eq!(timing.failovers, MAX_USELESS_LINKS);
    let used = fleet.servers[0].transports.lock().unwrap().clone();
    let kinds = kinds_used(&fleet);
    let mut expected = vec![TransportKind::Verbs; MAX_USELESS_LINKS as usize];
    expected.push(TransportKind::Shm);
    assert_eq!(kinds, expected);
    let (_, why) = &used[MAX_USELESS_LINKS as usize];
    assert!(why.contains("verbs:filtered") && why.contains("silent"), "{why}");
    // The link that works stays.
    for _ in 0..5 {
        assert_eq!(forward(&client, &request).unwrap().failovers, 0);
    }
    assert_eq!(fleet.servers[0].transports.lock().unwrap().len(), kinds.len());
}

/// Memory may be freed late. Neither the call in which its server failed nor the client's drop waits for it.
#[test]
fn no_caller_waits_for_the_memory_of_ended_links() {
    let mut rng = seeded("no_caller_waits_for_the_memory_of_ended_links");
    let (near, far) = (stand_in(), stand_in());
    near.filter_next(0);
    far.filter_next(0);
    for (act, reason) in [(Act::Die, "closed"), (Act::CorruptHeader, "invalid")] {
        let fleet = FakeFleet::over(offered(&far), SLOT, vec![once(2, act), right()]);
        let builder = fleet.builder().transports(offered(&near)).deadline(LIMIT);
        let client = builder.build().unwrap();
        client.wait_ready(LIMIT).unwrap();
        near.hold_ends(true);
        while failovers(&client, reason) == 0.0 {
            let request = Request::random(&mut rng, &fleet.model, 100, 4);
            forward(&client, &request).unwrap();
        }
        let until = Instant::now() + LIMIT;
        while near.ends() == (0, 0) {
            assert!(Instant::now() < until, "the link's memory is never freed");
            std::thread::sleep(Duration::from_millis(1));
        }
        drop(client);
        let (num_waiting, num_in_vain) = near.ends();
        assert!(num_waiting > 0 && num_in_vain == 0, "{num_waiting} and {num_in_vain}");
        near.hold_ends(false);
    }
}

#[test]
fn a_server_that_goes_before_anything_came_says_nothing_about_the_network() {
    let mut rng = seeded("a_server_that_goes_before_anything_came_says_nothing_about_the_network");
    let enough = MAX_USELESS_LINKS as usize + 3;
    for greeting in [Greeting::Lose, Greeting::Restart, Greeting::Close] {
        let fleet = FakeFleet::over(offered(&stand_in()), SLOT, vec![right()]);
        *fleet.servers[0].greeting.lock().unwrap() = greeting;
        let wait = Duration::from_millis(100);
        let builder = fleet.builder().transports(offered(&stand_in())).replica_wait(wait);
        let client = builder.build().unwrap();
        let request = Request::random(&mut rng, &fleet.model, 3, 4);
        let until = Instant::now() + Duration::from_secs(60);
        while kinds_used(&fleet).len() < enough {
            assert!(forward(&client, &request).is_err());
            assert!(Instant::now() < until, "{greeting:?}: {:?}", kinds_used(&fleet));
        }
        let mut kinds = vec![TransportKind::Verbs; enough];
        if greeting == Greeting::Close {
            // It is still there and gives up one link after the other: that does say something. It is
            // known of a link when the next one is made.
            kinds[MAX_USELESS_LINKS as usize + 1..].fill(TransportKind::Shm);
        }
        assert_eq!(kinds_used(&fleet)[..enough], kinds, "{greeting:?}");
    }
}

#[test]
fn a_link_that_carried_and_is_idle_has_cleared_its_network() {
    let mut rng = seeded("a_link_that_carried_and_is_idle_has_cleared_its_network");
    let (near, far) = (stand_in(), stand_in());
    far.filter_next(0);
    let num_useless = MAX_USELESS_LINKS as usize - 1;
    // Longer than the links that go silent meanwhile take.
    const WORK: Duration = Duration::from_secs(10);
    // The second request keeps its lane, so that the third goes by another one.
    let fleet = FakeFleet::over(offered(&far), SLOT, vec![once(1, Act::Work(WORK))]);
    let client = fleet
        .builder()
        .transports(offered(&near))
        .deadline(LONG_SILENCE)
        .replica_wait(LIMIT)
        .build()
        .unwrap();
    let request = Request::random(&mut rng, &fleet.model, 3, 4);
    near.filter_next(num_useless);
    assert_eq!(forward(&client, &request).unwrap().failovers as usize, num_useless);
    std::thread::scope(|scope| {
        let first = scope.spawn(|| forward(&client, &request).unwrap());
        while fleet.servers[0].frames() < 2 && !first.is_finished() {
            std::thread::sleep(Duration::from_millis(1));
        }
        near.filter_next(num_useless);
        assert_eq!(forward(&client, &request).unwrap().failovers as usize, num_useless);
        assert_eq!(first.join().unwrap().failovers, 0, "a link that works");
    });
    assert_eq!(kinds_used(&fleet), vec![TransportKind::Verbs; 2 * (num_useless + 1)]);
}
