//! Experts of several families through whole servers over shared memory, against what transformers computed.

mod client_common;

use std::path::PathBuf;
use std::time::Duration;

use checkpoint::TensorFile;
use client_common::{Fleet, difference, poisoned};
use p2p_core::SlotConfig;
use protocol::WireDtype;

const SLOT: SlotConfig = SlotConfig { slot_bytes: 64 << 10, num_frames: 2 };

/// One folder for each arithmetic, layout, weighting and width of rows. The configuration of each names the layer that
/// is stored, and no other one, as a layer with experts.
const FOLDERS: &[&str] = &[
    "family-blocks/qwen2_moe",
    "family-blocks/mixtral",
    "family-blocks/gpt_oss",
    "family-blocks/gpt_oss-mxfp4",
    "family-blocks/llama4",
    "family-blocks/deepseek_v3",
    "family-blocks/granitemoe",
    "family-blocks/gemma4",
    "family-blocks/inkling",
    "family-blocks/nemotron_h-latent",
    "reference-formats/gptq-int4-desc-act",
    "reference-formats/ct-int4-g-idx",
];

#[test]
fn experts_of_every_kind_agree_with_transformers_through_servers() {
    let data: PathBuf = concat!(env!("CARGO_MANIFEST_DIR"), "/../data").into();
    for folder in FOLDERS {
        let dir = data.join(folder);
        let reference = TensorFile::open(dir.join("reference.safetensors")).expect(folder);
        let floats = |name: &str| reference.tensor(name).expect(name).to_f32().expect(name);
        let input = if reference.contains("experts_x") { "experts_x" } else { "x" };
        let (x, weights) = (floats(input), floats("topk_weights"));
        let idx = reference.tensor("topk_idx").expect(folder).to_i32().expect(folder);

        let fleet = Fleet::of(&dir, 2, 1, SLOT);
        let client = fleet.builder().wire_dtype(WireDtype::F32).build().expect(folder);
        client.wait_ready(Duration::from_secs(60)).expect(folder);
        let &[layer] = fleet.model.moe_layers.as_slice() else {
            panic!("{folder}: layers {:?}", fleet.model.moe_layers);
        };
        assert_eq!(x.len(), 12 * fleet.model.shape.hidden as usize, "{folder}");
        let mut out = poisoned(x.len());
        client.forward(layer, &x, &idx, &weights, &mut out).expect(folder);
        let error = difference(&out, &floats("routed_out"));
        println!("{folder}: differs by {error:.1e}");
        assert!(error < 1e-4, "{folder}: differs by {error}");
    }
}
