//! Every quantisation format of the reference data. The kernels read bf16 and fp8 in blocks of 128 × 128; weights of the
//! other formats are widened to bf16 in GPU memory.

use std::path::PathBuf;

use protocol::WireDtype;
use switchyard_expert_server::{
    ExpertSelection, ExpertServer, Placement, ServerConfig, device::DeviceOptions,
};

use crate::common::{Recorded, Reference, Request, difference, name_of, recorded_folders, seeded};
use crate::device::client::Outcome;
use crate::device::{SLOT, check, devices, expected_rows, join, server_on};

/// A folder with hidden size 192, which the kernels cannot have.
const OTHER_SIZE: &str = "ct-fp8-block";
/// The folder whose weights stay fp8. The kernels then round tokens and activations to fp8, the library does not.
const KEPT_FP8: &str = "hf-fp8-block128";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn formats_agree_with_their_libraries() {
    let Some((device, gpu)) = devices() else { return };
    let mut rng = seeded();
    let mut num_served = 0;
    for dir in served() {
        let name = name_of(&dir);
        let is_kept = name == KEPT_FP8;
        let reference = Reference { is_fp8: is_kept, ..Reference::of(&dir) };
        let recorded = Recorded::open(&dir, &reference.checkpoint);
        let (shape, dtype) = (reference.shape, WireDtype::Bf16);
        let server = server_on(device, dtype, ExpertSelection::All, |config| {
            config.model_dir = dir.clone();
        })
        .await;
        let model = reference.checkpoint.config();
        let values = (3 * model.hidden * model.moe_intermediate) as u64;
        // With one scale per matrix of 128 × 128 fp8 values.
        let expert_bytes = if is_kept { values + 3 * 4 } else { values * 2 };
        assert_eq!(server.expert_bytes(), u64::from(shape.num_experts) * expert_bytes, "{name}");
        let mut client = join(&gpu, &server, shape, 1, dtype).await;
        tokio::task::block_in_place(|| {
            let (outcome, rows) = client.layer(&recorded.request);
            assert_eq!(outcome, Outcome::Answered, "{name}");
            let theirs = difference(&rows, recorded.expected.iter().map(|v| f64::from(*v)));
            let ours = difference(&rows, expected_rows(&reference, &recorded.request, dtype));
            println!("{name}: {theirs:.1e} from the library, {ours:.1e} from rounded f64");
            assert!(ours <= 1e-2, "{name}: {ours:.1e} from rounded f64");
            let bound = if is_kept { 8e-2 } else { 1e-2 };
            assert!(theirs <= bound, "{name}: {theirs:.1e} from the library");
            for tokens in [1, 9] {
                let request = Request::random(&mut rng, &shape, tokens);
                let (outcome, rows) = client.layer(&request);
                assert_eq!(outcome, Outcome::Answered, "{name}");
                check(&reference, &request, dtype, &rows);
            }
        });
        server.shutdown().await;
        num_served += 1;
    }
    assert!(num_served >= 30, "{num_served} formats only");
}

#[tokio::test]
async fn formats_that_cannot_be_served_are_named() {
    let Some((device, _)) = devices() else { return };
    for dir in recorded_folders("reference-formats") {
        let name = name_of(&dir);
        if name != OTHER_SIZE {
            continue;
        }
        let reason = "hidden size: expected a positive multiple of 128";
        let mut config = ServerConfig::new(dir, "refused", Placement::Static(ExpertSelection::All));
        config.device = Some(DeviceOptions::new(device));
        config.slot = SLOT;
        let error = ExpertServer::start(config, |_| {}).await.expect_err("it cannot start");
        let said = error.to_string();
        assert!(said.contains(reason) && !said.contains('\n'), "{name}: {said}");
    }
}

fn served() -> impl Iterator<Item = PathBuf> {
    let is_served = |name: &str| name != OTHER_SIZE;
    recorded_folders("reference-formats").into_iter().filter(move |dir| is_served(&name_of(dir)))
}
