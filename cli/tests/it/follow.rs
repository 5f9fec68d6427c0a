//! A placement that follows the load, with real processes.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use attention_client::{ClientModel, MoeClient};
use checkpoint::Checkpoint;
use control_api::{ControlClient, PlacementTable, ScalingAdvice};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use reference_model::{ExpertBackend, LocalExperts};
use switchyard_cli::cluster::{ClusterOptions, LocalCluster};

/// Tokens per call. Each goes to the hot expert and to one of the others. So the hot one has half of the load and needs
/// more than one of three servers.
const TOKENS: usize = 24;
const HOT: u32 = 5;
const SECONDS: u64 = 90;

/// One call of one layer with its expected output.
struct Call {
    layer: u32,
    x: Vec<f32>,
    idx: Vec<i32>,
    weights: Vec<f32>,
    expected: Vec<f32>,
}

#[test]
fn a_fleet_that_follows_the_load_needs_no_number_of_servers() {
    let mut child = Command::new(env!("CARGO_BIN_EXE_switchyard"))
        .args(["control-plane", "--listen", "127.0.0.1:0", "--json"])
        .args(["--placement", "load", "--replicas", "3"])
        .stdout(Stdio::piped())
        .spawn()
        .expect("start");
    let mut line = String::new();
    let read = BufReader::new(child.stdout.take().expect("stdout")).read_line(&mut line);
    child.kill().expect("kill");
    child.wait().expect("wait");
    read.expect("a line");
    assert!(line.contains("\"listening\""), "{line}");
}

#[test]
fn a_hot_expert_gets_replicas_and_a_drained_server_is_replaced_without_a_failed_call() {
    let seed: u64 = rand::random();
    println!("seed {seed}");
    let dir = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../data/tiny-moe"));
    let checkpoint = Arc::new(Checkpoint::open(&dir).expect("checkpoint"));
    let mut options = ClusterOptions::new(&dir).expect("options");
    options.binary = env!("CARGO_BIN_EXE_switchyard").into();
    options.num_servers = 3;
    // Without a second replica, only a hand-over keeps the experts of a drained server.
    options.replicas = 1;
    options.threads = Some(1);
    let load = ["--placement", "load", "--plan-period-ms", "500", "--spare", "0.5"];
    options.control_args = load.map(str::to_owned).to_vec();
    let mut cluster = LocalCluster::start(options, &mut |_| {}).expect("cluster");
    let token = Some(cluster.token().to_owned());
    let client = MoeClient::builder(ClientModel::of(&checkpoint))
        .control_plane(cluster.control_url(), token.clone())
        .secret(token.clone())
        .deadline(Duration::from_secs(10))
        .build()
        .expect("client");
    client.wait_ready(Duration::from_secs(60)).expect("servers");
    let runtime = tokio::runtime::Runtime::new().expect("runtime");
    let control = ControlClient::new(&cluster.control_url(), token).expect("control");
    let calls = calls(&checkpoint, seed);

    let start = table(&runtime, &control);
    assert!(replicas_of(&start, HOT).iter().all(|&num| num == 1), "{start:?}");
    let deadline = Instant::now() + Duration::from_secs(SECONDS);
    let mut num_calls = 0usize;
    // Until the hot expert of every layer has a second replica, and the load is even.
    loop {
        num_calls += call_all(&client, &calls);
        let table = table(&runtime, &control);
        let busiest = busiest(&table, &calls);
        if replicas_of(&table, HOT).iter().all(|&num| num >= 2) && busiest < 1.35 {
            println!("{num_calls} calls, busiest {busiest:.3}, epoch {}", table.epoch);
            break;
        }
        assert!(Instant::now() < deadline, "busiest {busiest}: {table:?}");
    }
    let advice: ScalingAdvice = runtime.block_on(control.advice()).expect("advice");
    assert_eq!(advice.current_servers, 3, "{advice:?}");
    assert!(advice.compute_share > 0.0 && advice.min_servers == 1, "{advice:?}");

    // A drain under load: the server ends by itself once the others have its experts.
    let (num_before, lost_before) = (num_calls, counters(&client));
    let drained = std::thread::spawn(move || {
        cluster.drain_server(1, Duration::from_secs(60)).expect("drained");
        cluster
    });
    while !drained.is_finished() {
        num_calls += call_all(&client, &calls);
    }
    let _cluster = drained.join().expect("drain");
    num_calls += call_all(&client, &calls);
    assert!(num_calls > num_before);
    let table = table(&runtime, &control);
    assert_eq!(table.servers.len(), 2, "{table:?}");
    assert!((0..16).all(|expert| replicas_of(&table, expert).iter().all(|&num| num >= 1)));
    assert_eq!(counters(&client), lost_before);
    let status = runtime.block_on(control.status()).expect("status");
    assert_eq!((status.experts_without_replica, status.plan_error), (0, None));
}

fn calls(checkpoint: &Arc<Checkpoint>, seed: u64) -> Vec<Call> {
    let mut rng = StdRng::seed_from_u64(seed);
    let model = checkpoint.config();
    let mut local = LocalExperts::new(Arc::clone(checkpoint));
    let mut call = |layer: u32| {
        let x: Vec<f32> = (0..TOKENS * model.hidden).map(|_| rng.random_range(-1.0..1.0)).collect();
        let mut idx = Vec::new();
        for _ in 0..TOKENS {
            idx.push(HOT as i32);
            let other = rng.random_range(0..model.num_experts - 1);
            // The hot expert is left out, and further places are masked.
            idx.push((other + u32::from(other >= HOT)) as i32);
            idx.extend(std::iter::repeat_n(-1, model.top_k - 2));
        }
        let weights = vec![0.5; idx.len()];
        let mut expected = vec![f32::NAN; x.len()];
        local.forward(layer, &x, &idx, &weights, &mut expected).expect("reference");
        Call { layer, x, idx, weights, expected }
    };
    model.moe_layers().into_iter().map(&mut call).collect()
}

/// Makes every call once and compares its output. Returns their number.
fn call_all(client: &MoeClient, calls: &[Call]) -> usize {
    for Call { layer, x, idx, weights, expected } in calls {
        let mut out = vec![f32::NAN; x.len()];
        client.forward(*layer, x, idx, weights, &mut out).expect("call");
        let largest = expected.iter().fold(0f32, |most, value| most.max(value.abs()));
        for (found, wanted) in out.iter().zip(expected) {
            assert!((found - wanted).abs() <= 1e-4 * largest, "layer {layer}: {found} {wanted}");
        }
    }
    calls.len()
}

fn table(runtime: &tokio::runtime::Runtime, control: &ControlClient) -> PlacementTable {
    runtime.block_on(control.placement()).expect("placement")
}

/// Replicas of an expert in each layer.
fn replicas_of(table: &PlacementTable, expert: u32) -> Vec<usize> {
    table.layers.iter().map(|layer| layer.replicas[expert as usize].len()).collect()
}

/// (token, expert) pairs of the busiest server over the mean, of the worst layer, if replicas share evenly.
fn busiest(table: &PlacementTable, calls: &[Call]) -> f64 {
    let of_layer = |call: &Call| {
        let layer = table.layers.iter().find(|layer| layer.layer == call.layer).expect("layer");
        let mut pairs = vec![0.0; table.servers.len()];
        for &expert in call.idx.iter().filter(|expert| **expert >= 0) {
            let replicas = &layer.replicas[expert as usize];
            replicas
                .iter()
                .for_each(|&server| pairs[server as usize] += 1.0 / replicas.len() as f64);
        }
        let most = pairs.iter().copied().fold(0.0, f64::max);
        most * pairs.len() as f64 / pairs.iter().sum::<f64>()
    };
    calls.iter().map(of_layer).fold(0.0, f64::max)
}

/// Lost and doubled calls of the client.
fn counters(client: &MoeClient) -> Vec<(String, u64)> {
    let families = client.registry().gather();
    let is_fault = |name: &str| {
        ["switchyard_client_lost_requests_total", "switchyard_client_duplicated_requests_total"]
            .contains(&name)
    };
    let faults = families.iter().filter(|family| is_fault(family.name()));
    let value = |family: &prometheus::proto::MetricFamily| {
        let metric = family.get_metric().first();
        metric.map_or(0, |metric| metric.get_counter().get_value() as u64)
    };
    faults.map(|family| (family.name().to_owned(), value(family))).collect()
}
