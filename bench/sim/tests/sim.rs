//! Laws of the model, and the bounds that credits keep in it.

use incast_sim::layer::{LayerModel, LayerOutcome, LayerScenario, put_and_flag, run_layer};
use incast_sim::{Control, Model, Outcome, Scenario, Verb, run};

fn outcome(senders: usize, receivers: usize, bytes: u64, control: Control) -> Outcome {
    run(scenario(senders, receivers, bytes, control), &model()).unwrap()
}

/// Writes, with the first seed.
fn scenario(senders: usize, receivers: usize, bytes: u64, control: Control) -> Scenario {
    Scenario { senders, receivers, bytes, control, verb: Verb::Write, seed: 1 }
}

const VERBS: [Verb; 2] = [Verb::Write, Verb::Read];

/// A small packet memory, so that small messages overrun it.
fn model() -> Model {
    Model { buffer_bytes: 2 << 20, ..Model::default() }
}

/// Returns the least time of the busiest link in milliseconds.
fn limit_ms(senders: usize, receivers: usize, bytes: u64) -> f64 {
    let m = model();
    let packets = bytes.div_ceil(u64::from(m.packet_bytes));
    let on_wire = bytes + packets * u64::from(m.header_bytes);
    (on_wire * senders.max(receivers) as u64 * m.ps_per_byte) as f64 / 1e9
}

/// Returns the most bytes in flight to a receiver, with headers. No queue can be longer.
fn window_bytes() -> u64 {
    let m = model();
    let window = 4 * m.round_trip_ns() * 1_000 / m.ps_per_byte;
    window + window * u64::from(m.header_bytes) / 1024
}

#[test]
fn the_same_seed_gives_the_same_result_and_another_one_does_not() {
    for verb in VERBS {
        let scenario = Scenario { verb, seed: 5, ..scenario(6, 2, 300_000, Control::Loss) };
        let first = run(scenario, &model()).unwrap();
        assert_eq!(first, run(scenario, &model()).unwrap());
        assert_ne!(first.ms, run(Scenario { seed: 6, ..scenario }, &model()).unwrap().ms);
    }
}

#[test]
fn nothing_is_faster_than_its_busiest_link() {
    for control in [Control::Loss, Control::Pause, Control::Credits, Control::CreditsShortest] {
        for (senders, receivers) in [(1, 1), (2, 6), (6, 2), (4, 4)] {
            for bytes in [1, 5_000, 1 << 20] {
                for verb in VERBS {
                    let scenario =
                        Scenario { verb, ..scenario(senders, receivers, bytes, control) };
                    let found = run(scenario, &model()).unwrap();
                    let limit = limit_ms(senders, receivers, bytes);
                    assert!(found.ms > limit, "{found:?} {limit}");
                }
            }
        }
    }
}

#[test]
fn without_control_many_into_few_lose_and_repeat() {
    let found = outcome(16, 4, 1 << 20, Control::Loss);
    assert!(found.dropped_packets > 0 && found.resent_bytes > 0);
    assert!(found.ms > 1.5 * limit_ms(16, 4, 1 << 20), "{found:?}");
    let back = outcome(4, 16, 1 << 20, Control::Loss);
    assert!(back.ms < 1.2 * limit_ms(4, 16, 1 << 20), "{back:?}");
}

#[test]
fn readers_of_many_are_overrun_like_targets_of_many_and_credits_cure_both() {
    for verb in VERBS {
        let outcome = |senders, receivers, control, model: &Model| {
            let scenario = Scenario { verb, ..scenario(senders, receivers, 1 << 20, control) };
            run(scenario, model).unwrap()
        };
        let (small, roomy) = (model(), Model::default());
        let lost = outcome(16, 4, Control::Loss, &small);
        assert!(lost.dropped_packets > 0 && lost.ms > 1.5 * limit_ms(16, 4, 1 << 20), "{lost:?}");
        let many = outcome(16, 4, Control::Credits, &roomy);
        let few = outcome(4, 16, Control::Credits, &roomy);
        assert_eq!((many.dropped_packets, few.dropped_packets), (0, 0));
        assert!(many.ms < 1.1 * few.ms, "{verb:?}: {} ms into few, {} back", many.ms, few.ms);
    }
}

#[test]
fn a_pause_loses_nothing() {
    let found = outcome(16, 4, 1 << 20, Control::Pause);
    assert!(found.pauses > 0);
    assert_eq!((found.dropped_packets, found.resent_bytes), (0, 0));
}

#[test]
fn credits_keep_the_queue_short_and_the_link_busy_either_way() {
    let shapes = [(16, 4), (4, 16), (8, 8), (1, 1), (1, 8), (8, 1)];
    for ((senders, receivers), verb) in shapes.into_iter().flat_map(|s| VERBS.map(|v| (s, v))) {
        let scenario = Scenario { verb, ..scenario(senders, receivers, 1 << 20, Control::Credits) };
        let found = run(scenario, &Model::default()).unwrap();
        assert_eq!((found.dropped_packets, found.resent_bytes), (0, 0));
        assert!(found.max_queue_bytes < window_bytes(), "{found:?}");
        let limit = limit_ms(senders, receivers, 1 << 20);
        assert!(found.ms < 1.1 * limit + 0.02, "{found:?}, limit {limit}");
    }
}

#[test]
fn the_shortest_first_loses_nothing_either_and_needs_longer_queues() {
    let roomy = Model::default();
    for (senders, receivers) in [(16, 4), (4, 16), (8, 8)] {
        let scenario = scenario(senders, receivers, 1 << 20, Control::CreditsShortest);
        let found = run(scenario, &roomy).unwrap();
        assert_eq!((found.dropped_packets, found.resent_bytes), (0, 0));
        assert!(found.max_queue_bytes < roomy.overcommit_shortest * window_bytes(), "{found:?}");
    }
}

#[test]
fn credits_survive_a_switch_that_loses() {
    let tiny = Model { buffer_bytes: 256 << 10, retry_ns: 100_000, ..Model::default() };
    for control in [Control::Credits, Control::CreditsShortest] {
        for verb in VERBS {
            let scenario = Scenario { verb, ..scenario(8, 4, 1 << 20, control) };
            let found = run(scenario, &tiny).unwrap();
            assert!(found.dropped_packets > 0 && found.resent_bytes > 0, "{found:?}");
        }
    }
}

#[test]
fn nonsense_is_refused() {
    let scenario = scenario(0, 1, 1, Control::Loss);
    let error = run(scenario, &model()).unwrap_err();
    assert_eq!(error.to_string(), "senders is 0, expected 1 to 1024");
    assert!(run(Scenario { senders: 1, bytes: 0, ..scenario }, &model()).is_err());
}

fn layer_of(clients: usize, servers: usize) -> LayerOutcome {
    let scenario = LayerScenario { clients, servers, control: Control::Credits, seed: 1 };
    run_layer(scenario, &LayerModel::default(), &Model::default()).unwrap()
}

#[test]
fn a_layer_is_slower_than_its_bytes_and_its_parts_add_up() {
    for (clients, servers) in [(1, 1), (4, 8), (8, 4), (3, 300)] {
        let found = layer_of(clients, servers);
        assert!(found.layer_us > found.limit_us, "{found:?}");
        let layer = LayerModel::default();
        let fixed_us = (layer.kernels_ns + 2 * layer.nic_ns) as f64 / 1e3;
        let sum = found.dispatch_us + found.combine_us + fixed_us;
        assert!((found.layer_us - sum).abs() < 1e-6, "{found:?}");
    }
    // One server gets each token once. Among very many servers, a token goes to as many servers as experts.
    assert!((layer_of(2, 1).servers_per_token - 1.0).abs() < 1e-9);
    assert!((layer_of(2, 256).servers_per_token - 8.0).abs() < 1e-9);
    let eight = layer_of(16, 8).servers_per_token;
    // Drawing without replacement from 32 experts on each of 8 servers.
    let expected =
        8.0 * (1.0 - (0..8).map(|i| f64::from(224 - i) / f64::from(256 - i)).product::<f64>());
    assert!((eight - expected).abs() < 0.1, "{eight} {expected}");
}

#[test]
fn posting_and_kernels_are_counted_once() {
    let scenario = LayerScenario { clients: 2, servers: 2, control: Control::Pause, seed: 3 };
    let run = |layer: &LayerModel| run_layer(scenario, layer, &Model::default()).unwrap().layer_us;
    let base = LayerModel { requests_per_us: 1_000_000, ..LayerModel::default() };
    let slower = run(&LayerModel { kernels_ns: base.kernels_ns + 5_000, ..base }) - run(&base);
    assert!((slower - 5.0).abs() < 1e-6, "{slower}");
    let posted = run(&LayerModel { post_ns: base.post_ns + 1_000, ..base }) - run(&base);
    assert!((posted - 2.0).abs() < 0.1, "both ways: {posted}");
}

#[test]
fn a_put_to_everybody_takes_what_the_links_take() {
    let us = |bytes| put_and_flag(8, bytes, &LayerModel::default(), &Model::default()).unwrap();
    assert!((us(8 << 20) / (limit_of(8 << 20) * 8.0) - 1.0).abs() < 0.02);
    assert!(us(64) < 10.0);
}

fn limit_of(bytes: u64) -> f64 {
    let m = Model::default();
    let packets = bytes.div_ceil(u64::from(m.packet_bytes));
    ((bytes + packets * u64::from(m.header_bytes)) * m.ps_per_byte) as f64 / 1e6
}
