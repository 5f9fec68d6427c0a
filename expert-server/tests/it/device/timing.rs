//! Reports the time of a layer through the service on a GPU, without a check: one client with one layer in
//! flight.

use std::time::{Duration, Instant};

use checkpoint::{Checkpoint, MakeOptions, Preset, make_checkpoint};
use kernels::gpu::{DeviceName, Gpu};
use p2p_core::SlotConfig;
use protocol::{ModelShape, WireDtype};
use switchyard_expert_server::device::DeviceOptions;
use switchyard_expert_server::{ExpertSelection, ExpertServer, Placement, ServerConfig};

use crate::common::{Request, metric, seeded, shape_of};
use crate::device::client::{Client, Outcome};
use crate::device::devices;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_time_of_a_layer_is_reported() {
    let Some((device, gpu)) = devices() else { return };
    if let DeviceName::Emulated(_) = device {
        test_support::skip(
            "gpu",
            "the time of a layer: a GPU in software has no times to speak of",
        );
        return;
    }
    let mut rng = seeded();
    let dir = tempfile::tempdir().expect("a directory");
    let options = MakeOptions::new(Preset::Qwen3_30bA3b, 1);
    make_checkpoint(dir.path(), &options, &mut |_, _| {}).expect("a checkpoint");
    let shape = shape_of(&Checkpoint::open(dir.path()).expect("it opens"));
    let slot = SlotConfig { slot_bytes: 4 << 20, num_frames: 2 };
    for (dtype, batches_in_flight) in
        [(WireDtype::F8E4m3, 1), (WireDtype::F8E4m3, 2), (WireDtype::Bf16, 1), (WireDtype::Bf16, 2)]
    {
        let placement = Placement::Static(ExpertSelection::All);
        let mut config = ServerConfig::new(dir.path(), "timed", placement);
        config.slot = slot;
        config.device =
            Some(DeviceOptions { dtype, batches_in_flight, ..DeviceOptions::new(device) });
        let loading = Instant::now();
        let server = ExpertServer::start(config, |_| {}).await.expect("the server starts");
        let loaded_s = loading.elapsed().as_secs_f64();
        let joined = Client::join(&gpu, server.data_addr(), shape, 1, dtype, slot).await;
        let mut client = joined.expect("connected");
        let mut lines = vec![format!(
            "{{\"load_seconds\":{loaded_s:.2},\"gigabytes\":{:.2}}}",
            server.expert_bytes() as f64 / 1e9
        )];
        for tokens in [1, 8, 32, 128] {
            let tokens = tokens.min(client.geometry.max_tokens as usize);
            let mut request = Request::random(&mut rng, &shape, tokens);
            for (token, routes) in request.routes.iter_mut().enumerate() {
                // Every token has top-k experts, as with a router.
                let experts = (0..shape.top_k)
                    .map(|k| (token as u32 * 37 + k * 41 + rng_step(k)) % shape.num_experts);
                let mut experts: Vec<u32> = experts.collect();
                experts.sort_unstable();
                experts.dedup();
                *routes = experts.into_iter().map(|expert| (expert, 0.125)).collect();
            }
            assert_eq!(tokio::task::block_in_place(|| client.layer(&request)).0, Outcome::Answered);
            let compute = || {
                let name =
                    |part| format!("switchyard_server_phase_seconds_{part}{{phase=\"compute\"}}");
                let metrics = server.metrics();
                (metric(metrics, &name("sum")), metric(metrics, &name("count")))
            };
            tokio::time::sleep(Duration::from_millis(5)).await;
            let before = compute();
            let mut times = tokio::task::block_in_place(|| client.replay(300));
            tokio::time::sleep(Duration::from_millis(5)).await;
            let after = compute();
            times.sort_unstable();
            let us = |at: usize| times[at].as_secs_f64() * 1e6;
            lines.push(format!(
                "{{\"dtype\":\"{dtype}\",\"batches_in_flight\":{batches_in_flight},\"tokens\":{tokens},\"layer_p50_us\":{:.1},\"layer_p99_us\":{:.1},\"compute_and_send_us\":{:.1}}}",
                us(times.len() / 2),
                us(times.len() * 99 / 100),
                (after.0 - before.0) / (after.1 - before.1).max(1.0) * 1e6
            ));
        }
        println!("{}", lines.join("\n"));
        drop(client);
        server.shutdown().await;
    }
    for gather_us in [0, 100] {
        two_loops(device, &gpu, dir.path(), &shape, Duration::from_micros(gather_us)).await;
    }
}

/// Reports whether two clients in closed loops on one server share batches.
async fn two_loops(
    device: DeviceName,
    gpu: &Gpu,
    dir: &std::path::Path,
    shape: &ModelShape,
    gather: Duration,
) {
    let (dtype, slot) = (WireDtype::F8E4m3, SlotConfig { slot_bytes: 4 << 20, num_frames: 2 });
    let placement = Placement::Static(ExpertSelection::All);
    let mut config = ServerConfig::new(dir, "two", placement);
    config.slot = slot;
    config.device = Some(DeviceOptions { dtype, gather, ..DeviceOptions::new(device) });
    let server = ExpertServer::start(config, |_| {}).await.expect("the server starts");
    let mut rng = seeded();
    let mut loops = Vec::new();
    for id in [1, 2] {
        let joined = Client::join(gpu, server.data_addr(), *shape, id, dtype, slot).await;
        let mut client = joined.expect("connected");
        let request = Request::random(&mut rng, shape, 128);
        assert_eq!(tokio::task::block_in_place(|| client.layer(&request)).0, Outcome::Answered);
        loops.push(client);
    }
    let tasks: Vec<_> = loops
        .into_iter()
        .map(|mut client| tokio::task::spawn_blocking(move || client.replay(500)))
        .collect();
    let mut times = Vec::new();
    for task in tasks {
        times.extend(task.await.expect("its times"));
    }
    times.sort_unstable();
    let of = |part| metric(server.metrics(), &format!("switchyard_server_batch_clients_{part}"));
    println!(
        "{{\"clients\":2,\"tokens\":128,\"gather_us\":{},\"layer_p50_us\":{:.1},\"layer_p99_us\":{:.1},\"clients_per_batch\":{:.2}}}",
        gather.as_micros(),
        times[times.len() / 2].as_secs_f64() * 1e6,
        times[times.len() * 99 / 100].as_secs_f64() * 1e6,
        of("sum") / of("count").max(1.0)
    );
    server.shutdown().await;
}

/// Spreads a token's experts.
const fn rng_step(k: u32) -> u32 {
    k * k * 7
}
