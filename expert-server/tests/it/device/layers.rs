//! Whole layers against the reference on the CPU.

use protocol::WireDtype;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use switchyard_expert_server::ExpertSelection;

use crate::common::{Reference, Request, eventually, metric, seeded};
use crate::device::client::Outcome;
use crate::device::{check, devices, join, server_on};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answers_to_two_clients_equal_the_reference_with_requests_in_bf16() {
    two_clients(WireDtype::Bf16, 2).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answers_to_two_clients_equal_the_reference_with_requests_in_fp8() {
    two_clients(WireDtype::F8E4m3, 2).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_batch_at_a_time_gives_the_same() {
    two_clients(WireDtype::Bf16, 1).await;
}

async fn two_clients(dtype: WireDtype, batches_in_flight: usize) {
    let Some((device, gpu)) = devices() else { return };
    let mut rng = seeded();
    let reference = std::sync::Arc::new(Reference::open());
    let shape = reference.shape;
    let server = server_on(device, dtype, ExpertSelection::All, |config| {
        if let Some(device) = &mut config.device {
            device.batches_in_flight = batches_in_flight;
        }
    })
    .await;
    let num_experts = shape.num_layers as u64 * u64::from(shape.num_experts);
    assert_eq!(server.holds().num_experts() as u64, num_experts);
    let mut tasks = Vec::new();
    let mut num_tokens = 0u64;
    for id in [7, 8] {
        let mut client = join(&gpu, &server, shape, id, dtype).await;
        let seed = rng.random();
        let reference = std::sync::Arc::clone(&reference);
        let sizes: Vec<usize> = (0..LAYERS).map(|_| rng.random_range(1..=MOST_TOKENS)).collect();
        num_tokens += sizes.iter().map(|tokens| *tokens as u64).sum::<u64>();
        tasks.push(tokio::task::spawn_blocking(move || {
            let mut rng = StdRng::seed_from_u64(seed);
            for tokens in sizes {
                let request = Request::random(&mut rng, &shape, tokens);
                let (outcome, rows) = client.layer(&request);
                assert_eq!(outcome, Outcome::Answered);
                check(&reference, &request, dtype, &rows);
            }
        }));
    }
    for task in tasks {
        task.await.expect("a client's layers are right");
    }
    let metrics = server.metrics();
    // The server counts frames a moment after it has answered them.
    eventually("all tokens are counted", || {
        metric(metrics, "switchyard_server_tokens_total") == num_tokens as f64
    });
    let frames = metric(metrics, "switchyard_server_frames_total{direction=\"in\"}");
    assert_eq!(frames, (2 * LAYERS) as f64);
    // Rows that kernels store directly have no flags.
    let bytes = metric(metrics, "switchyard_server_bytes_total{direction=\"out\"}");
    assert_eq!(bytes, (num_tokens * u64::from(shape.hidden) * 2) as f64);
    assert!(metric(metrics, "switchyard_server_batches_total") <= (2 * LAYERS) as f64);
    assert!(metric(metrics, "switchyard_server_phase_seconds_count{phase=\"compute\"}") > 0.0);
    eventually("both links are gone", || server.num_links() == 0);
    server.shutdown().await;
    server.wait().await.expect("a shutdown is a good end");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn frames_of_different_layers_and_a_batch_limit_of_one_frame_are_served_one_after_another() {
    let Some((device, gpu)) = devices() else { return };
    let mut rng = seeded();
    let reference = Reference::open();
    let shape = reference.shape;
    let dtype = WireDtype::Bf16;
    let server = server_on(device, dtype, ExpertSelection::All, |config| {
        config.limits.max_batch_tokens = 1;
    })
    .await;
    let mut clients = Vec::new();
    for id in 0..3 {
        clients.push(join(&gpu, &server, shape, id, dtype).await);
    }
    let (reference, rng) = tokio::task::spawn_blocking(move || {
        for round in 0..4 {
            let requests: Vec<Request> = (0..3)
                .map(|client| {
                    let mut request = Request::random(&mut rng, &shape, 5 + client);
                    request.layer = (round + client as u32) % shape.num_layers;
                    request
                })
                .collect();
            clients.iter_mut().zip(&requests).for_each(|(client, r)| client.dispatch(r));
            for (client, request) in clients.iter_mut().zip(&requests) {
                let (outcome, rows) = client.combine(request);
                assert_eq!(outcome, Outcome::Answered);
                check(&reference, request, dtype, &rows);
            }
        }
        (reference, rng)
    })
    .await
    .expect("all layers are right");
    drop((reference, rng));
    server.shutdown().await;
}

const LAYERS: usize = 12;
const MOST_TOKENS: usize = 40;
