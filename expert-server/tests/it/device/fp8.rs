//! fp8 weights with scales per 128 by 128 values are copied to the GPU unchanged.

use checkpoint::{MakeOptions, Preset, make_checkpoint};
use protocol::WireDtype;
use switchyard_expert_server::{ExpertSelection, Limits};

use crate::common::{Reference, Request, seeded};
use crate::device::client::Outcome;
use crate::device::{check, devices, join, server_on};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_in_fp8_meet_fp8_weights() {
    layers(WireDtype::F8E4m3).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_in_bf16_are_quantised_for_fp8_weights() {
    layers(WireDtype::Bf16).await;
}

async fn layers(dtype: WireDtype) {
    let Some((device, gpu)) = devices() else { return };
    let mut rng = seeded();
    let dir = tempfile::tempdir().expect("a directory");
    let options =
        MakeOptions { seed: rand::random(), ..MakeOptions::new(Preset::MiniDeepseekV3, 4) };
    println!("checkpoint seed {}", options.seed);
    make_checkpoint(dir.path(), &options, &mut |_, _| {}).expect("a checkpoint");
    let reference = Reference::of(dir.path());
    assert!(reference.is_fp8, "otherwise this would test something else");
    let shape = reference.shape;
    let (hidden, inter) = (256u64, 192u64);
    assert_eq!(u64::from(shape.hidden), hidden);
    let first: Vec<u32> = (0..shape.num_experts - 1).collect();
    let server = server_on(device, dtype, ExpertSelection::EveryLayer(first), |config| {
        config.model_dir = dir.path().to_owned();
        config.limits = Limits { max_batch_tokens: 64, ..config.limits };
    })
    .await;
    // One byte per value and one scale per block: no weight was widened.
    let per_expert = 3 * (hidden * inter + 2 * 2 * 4);
    let moe_layers = reference.checkpoint.config().moe_layers();
    let num_held = moe_layers.len() as u64 * u64::from(shape.num_experts - 1);
    assert_eq!(server.expert_bytes(), num_held * per_expert);
    // A later expert moves its layer to a larger block, with the scales.
    let last = moe_layers[0];
    server.load_expert(last, shape.num_experts - 1).expect("loaded");
    let mut client = join(&gpu, &server, shape, 1, dtype).await;
    tokio::task::block_in_place(|| {
        for tokens in [1, 3, 20, 9] {
            for &layer in &moe_layers {
                let mut request = Request::random(&mut rng, &shape, tokens);
                request.layer = layer;
                if layer != last {
                    let held = |(expert, _): &(u32, f32)| *expert != shape.num_experts - 1;
                    request.routes.iter_mut().for_each(|routes| routes.retain(held));
                }
                let (outcome, rows) = client.layer(&request);
                assert_eq!(outcome, Outcome::Answered);
                check(&reference, &request, dtype, &rows);
            }
        }
    });
    server.shutdown().await;
}
