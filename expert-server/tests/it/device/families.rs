//! Every family of the reference data: computed on the GPU as transformers does, or refused by name.

use protocol::WireDtype;
use switchyard_expert_server::ExpertSelection;

use super::padded::{GateUp, HIDDEN, pad_block};
use super::starting::refusal;
use crate::common::{Recorded, Reference, Request, difference, name_of, recorded_folders, seeded};
use crate::device::client::Outcome;
use crate::device::{check, devices, join, server_on};

/// Families that the kernels do not compute, with the part of the arithmetic that is missing.
const REFUSED: &[(&str, &str)] = &[
    ("deepseek_v4", "activation swiglu(alpha 1, limit 1.5, offset 0), only silu"),
    ("deepseek_v4-hash", "activation swiglu(alpha 1, limit 1.5, offset 0), only silu"),
    ("gemma4", "activation gelu_tanh, only silu"),
    ("gpt_oss", "activation swiglu(alpha 1.702, limit 1.5, offset 1), only silu"),
    ("gpt_oss-mxfp4", "activation swiglu(alpha 1.702, limit 7, offset 1), only silu"),
    ("llama4", "router factors on the experts' input"),
    ("minimax_m3_vl", "activation swiglu(alpha 1.5, limit 1.5, offset 1), only silu"),
    ("nemotron_h", "experts without a gate (activation relu2)"),
    ("openai_privacy_filter", "activation swiglu(alpha 1.702, limit 1.5, offset 1), only silu"),
];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn families_agree_with_transformers() {
    let Some((device, gpu)) = devices() else { return };
    let mut rng = seeded();
    let mut num_served = 0;
    for dir in recorded_folders("family-blocks") {
        let name = name_of(&dir);
        if name == "nemotron_h-latent" || REFUSED.iter().any(|(refused, _)| *refused == name) {
            continue;
        }
        let padded = tempfile::tempdir().expect("a directory");
        let order = match name.as_str() {
            "inkling" => GateUp::Alternating,
            _ => GateUp::OneAfterTheOther,
        };
        pad_block(&dir, padded.path(), order);
        let reference = Reference::of(padded.path());
        let [from, to] = HIDDEN;
        let recorded = Recorded::open(&dir, &reference.checkpoint).padded(from, to);
        let dtype = WireDtype::Bf16;
        let server = server_on(device, dtype, ExpertSelection::All, |config| {
            config.model_dir = padded.path().to_owned();
        })
        .await;
        let mut client = join(&gpu, &server, reference.shape, 1, dtype).await;
        tokio::task::block_in_place(|| {
            let (outcome, rows) = client.layer(&recorded.request);
            assert_eq!(outcome, Outcome::Answered, "{name}");
            let error = difference(&rows, recorded.expected.iter().map(|v| f64::from(*v)));
            println!("{name}: {error:.1e}");
            assert!(error <= 1e-2, "{name}: {error:.1e} from transformers");
            let mut request = Request::random(&mut rng, &reference.shape, 9);
            request.layer = recorded.request.layer;
            let (outcome, rows) = client.layer(&request);
            assert_eq!(outcome, Outcome::Answered, "{name}");
            check(&reference, &request, dtype, &rows);
        });
        server.shutdown().await;
        num_served += 1;
    }
    assert!(num_served >= 45, "{num_served} families only");
}

#[tokio::test]
async fn families_that_the_kernels_do_not_compute_are_named() {
    let dirs = recorded_folders("family-blocks");
    for (family, lacks) in REFUSED {
        let dir = dirs.iter().find(|dir| name_of(dir) == *family).expect("the family's folder");
        let said = refusal(|config| config.model_dir = dir.clone()).await;
        let expected = format!("the GPU kernels have no {lacks}; ");
        assert!(said.starts_with(&expected), "{family}: {said}");
        assert!(said.contains("--device cpu"), "{said}");
    }
}
