//! Formats that the kernels do not read are widened to bf16 in GPU memory.

use protocol::WireDtype;
use switchyard_expert_server::ExpertSelection;

use crate::common::{Reference, Request, reference_format, seeded};
use crate::device::client::Outcome;
use crate::device::{check, devices, join, server_on};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn packed_weights_are_widened_at_load() {
    let Some((device, gpu)) = devices() else { return };
    let mut rng = seeded();
    for name in ["ct-int4-asym", "ct-mxfp4", "gptq-int8", "hf-fp8-block64"] {
        let dir = reference_format(name);
        let reference = Reference::of(&dir);
        // The kernels round activations for bf16 weights.
        let reference = Reference { is_fp8: false, ..reference };
        let shape = reference.shape;
        let server = server_on(device, WireDtype::Bf16, ExpertSelection::All, |config| {
            config.model_dir = dir;
        })
        .await;
        let model = reference.checkpoint.config();
        let values = (3 * model.hidden * model.moe_intermediate) as u64;
        assert_eq!(server.expert_bytes(), u64::from(shape.num_experts) * values * 2, "{name}");
        let mut client = join(&gpu, &server, shape, 1, WireDtype::Bf16).await;
        tokio::task::block_in_place(|| {
            for tokens in [1, 9] {
                let request = Request::random(&mut rng, &shape, tokens);
                let (outcome, rows) = client.layer(&request);
                assert_eq!(outcome, Outcome::Answered, "{name}");
                check(&reference, &request, WireDtype::Bf16, &rows);
            }
        });
        server.shutdown().await;
    }
}
