//! One MoE layer through two expert servers. One of them stops half-way.
//!
//! `cargo run --release -p switchyard-bench-harness --example one_layer -- data/tiny-moe 2000`

use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use attention_client::{ClientModel, LayerTiming, MoeClient};
use checkpoint::Checkpoint;
use control_api::{LayerPlacement, MemberId, PlacementTable, ServerEntry};
use expert_server::{ExpertSelection, ExpertServer, Placement, ServerConfig};
use rand::RngExt;
use switchyard_bench_harness::stats::Latency;

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let dir = args.next().unwrap_or_else(|| "data/tiny-moe".to_owned());
    let num_calls: usize = args.next().map_or(Ok(2000), |text| text.parse())?;
    let checkpoint = Arc::new(Checkpoint::open(&dir)?);
    let model = ClientModel::of(&checkpoint);

    // Two servers with all experts each, and a placement that says so.
    let runtime = tokio::runtime::Runtime::new()?;
    let mut servers = Vec::new();
    for name in ["first", "second"] {
        let mut config = ServerConfig::new(&dir, name, Placement::Static(ExpertSelection::All));
        config.num_threads = 1;
        servers.push(runtime.block_on(ExpertServer::start(config, |_| {}))?);
    }
    let entry = |(number, server): (usize, &expert_server::RunningServer)| {
        Ok(ServerEntry {
            member_id: MemberId::parse(&format!("server-{number}"))?,
            name: server.name().to_owned(),
            incarnation: 1,
            data_addr: server.data_addr().to_string(),
            needs_tickets: false,
        })
    };
    let everywhere = vec![vec![0, 1]; model.shape.num_experts as usize];
    let layers = model.moe_layers.iter();
    let layers = layers.map(|&layer| LayerPlacement { layer, replicas: everywhere.clone() });
    let table = PlacementTable {
        cluster_id: "example".to_owned(),
        epoch: 1,
        model: Some(model.descriptor()),
        servers: servers.iter().enumerate().map(entry).collect::<Result<_, Box<dyn Error>>>()?,
        layers: layers.collect(),
    };

    let client = MoeClient::builder(model.clone()).placement(table).build()?;
    client.wait_ready(Duration::from_secs(5))?;
    let (hidden, top_k) = (model.shape.hidden as usize, model.shape.top_k as usize);
    let mut rng = rand::rng();
    let x: Vec<f32> = (0..hidden).map(|_| rng.random_range(-1.0..1.0)).collect();
    let topk_weights = vec![1.0 / top_k as f32; top_k];
    let mut out = vec![0.0; hidden];
    let mut timings: Vec<LayerTiming> = Vec::with_capacity(num_calls);
    let mut stopping = None;
    for call in 0..num_calls {
        if call == num_calls / 2 {
            let server = servers.remove(0);
            stopping = Some(runtime.spawn(async move { server.shutdown().await }));
        }
        let first = rng.random_range(0..model.shape.num_experts as usize);
        let num_experts = model.shape.num_experts as usize;
        let topk_idx: Vec<i32> = (0..top_k).map(|k| ((first + k) % num_experts) as i32).collect();
        let layer = model.moe_layers[call % model.moe_layers.len()];
        timings.push(client.forward(layer, &x, &topk_idx, &topk_weights, &mut out)?);
    }
    if let Some(stopping) = stopping {
        runtime.block_on(stopping)?;
    }

    type Part = fn(&LayerTiming) -> u64;
    let parts: [(&str, Part); 5] = [
        ("total", LayerTiming::total_ns),
        ("dispatch", |t| t.dispatch_ns),
        ("wait", |t| t.wait_ns),
        ("combine", |t| t.combine_ns),
        ("server compute", |t| t.server_compute_ns),
    ];
    for (name, part) in parts {
        let latency = Latency::of(timings.iter().map(part).collect()).ok_or("no call was made")?;
        println!("{name:>15}: p50 {:7.1} µs, p99 {:7.1} µs", latency.p50_us, latency.p99_us);
    }
    let failovers: u32 = timings.iter().map(|timing| timing.failovers).sum();
    let stall_ns: u64 = timings.iter().map(|timing| timing.stall_ns).sum();
    println!("{failovers} failovers, stalled for {:.3} ms", stall_ns as f64 / 1e6);
    Ok(())
}
