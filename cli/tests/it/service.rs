//! Checkpoints served by processes, against results of Hugging Face transformers.

use std::collections::HashMap;
use std::fmt::Debug;
use std::path::PathBuf;
use std::process::Command;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use attention_client::{ClientModel, MoeClient};
use checkpoint::{Checkpoint, TensorFile};
use protocol::WireDtype;
use reference_model::{
    ExpertBackend, GenerateOptions, Generator, LocalExperts, LogitsOf, MoeRecord, Qwen3Moe,
};
use switchyard_cli::cluster::{ClusterOptions, LocalCluster};

/// The golden values of one prompt.
struct Golden {
    text: String,
    prompt_ids: Vec<u32>,
    new_ids: Vec<u32>,
}

#[test]
fn greedy_text_logits_and_blocks_equal_the_reference_in_f32() {
    let checkpoint = open("tiny-moe");
    let cluster = start(&checkpoint, 3, 2);
    let client = connect(&checkpoint, &cluster, WireDtype::F32, WireDtype::F32);
    let mut generator = Generator::open(&checkpoint, client.clone()).expect("generator");
    let goldens = goldens();
    assert_eq!(goldens.len(), 8);
    for golden in &goldens {
        let options =
            GenerateOptions { max_new_tokens: golden.new_ids.len(), ..Default::default() };
        let generation =
            generator.generate(&golden.text, &options, &mut |_| {}).expect("generation");
        assert_eq!(generation.prompt_ids, golden.prompt_ids, "{:?}", golden.text);
        assert_eq!(generation.token_ids, golden.new_ids, "{:?}", golden.text);
    }

    let reference = TensorFile::open(data("tiny-moe/golden.safetensors")).expect("golden tensors");
    let mut model = Qwen3Moe::load(&checkpoint).expect("model");
    let mut client = client;
    for (prompt_idx, golden) in goldens.iter().enumerate() {
        let (mut cache, mut records) = (model.new_cache(), Vec::<(u32, Vec<f32>)>::new());
        let mut observer = |record: &MoeRecord<'_>| {
            records.push((record.layer, record.output.to_vec()));
        };
        let logits = model
            .forward(
                &golden.prompt_ids,
                &mut cache,
                LogitsOf::All,
                &mut client,
                Some(&mut observer),
            )
            .expect("forward");
        let expected = tensor(&reference, &format!("p{prompt_idx}.logits"));
        let worst = max_abs_diff(&logits, &expected);
        assert!(worst <= 2e-4, "prompt {prompt_idx}: logits differ by {worst:e}");
        let layers: Vec<u32> = records.iter().map(|(layer, _)| *layer).collect();
        assert_eq!(layers, checkpoint.config().moe_layers(), "every block was seen, once");
        for (layer, output) in records.iter().filter(|_| prompt_idx < 2) {
            let expected = tensor(&reference, &format!("p{prompt_idx}.l{layer}.mlp_out"));
            let worst = rel_diff(output, &expected);
            assert!(worst <= 1e-4, "prompt {prompt_idx} layer {layer}: differs by {worst:e}");
        }
    }
}

#[test]
fn other_wire_formats_drift_no_more_than_their_precision_explains() {
    let checkpoint = open("tiny-moe");
    let cluster = start(&checkpoint, 2, 2);
    let reference = TensorFile::open(data("tiny-moe/golden.safetensors")).expect("golden tensors");
    let mut model = Qwen3Moe::load(&checkpoint).expect("model");
    let goldens = goldens();
    // Bound on a block's output, relative to its largest value: a few units of the format's last place over
    // top-4 sums. A unit is 2^-9 for bf16, 2^-11 for f16, and 2^-4 for fp8 with bf16 responses.
    let formats = [
        (WireDtype::Bf16, WireDtype::Bf16, 2e-2),
        (WireDtype::F16, WireDtype::F16, 4e-3),
        (WireDtype::F8E4m3, WireDtype::Bf16, 2e-1),
    ];
    for (wire, response, bound) in formats {
        let mut client = connect(&checkpoint, &cluster, wire, response);
        let (mut worst_block, mut worst_logit, mut same, mut total) = (0f32, 0f32, 0, 0);
        for (prompt_idx, golden) in goldens.iter().enumerate().take(2) {
            for layer in checkpoint.config().moe_layers() {
                let mut block = reference_model::MoeBlock::load(&checkpoint, layer).expect("block");
                let x = tensor(&reference, &format!("p{prompt_idx}.l{layer}.mlp_in"));
                let mut out = vec![f32::NAN; x.len()];
                block.forward(&x, &mut out, &mut client, None).expect("block");
                let expected = tensor(&reference, &format!("p{prompt_idx}.l{layer}.mlp_out"));
                worst_block = worst_block.max(rel_diff(&out, &expected));
            }
            let logits = model
                .forward(
                    &golden.prompt_ids,
                    &mut model.new_cache(),
                    LogitsOf::All,
                    &mut client,
                    None,
                )
                .expect("forward");
            let expected = tensor(&reference, &format!("p{prompt_idx}.logits"));
            worst_logit = worst_logit.max(max_abs_diff(&logits, &expected));
        }
        let mut generator = Generator::open(&checkpoint, client).expect("generator");
        for golden in &goldens {
            let options =
                GenerateOptions { max_new_tokens: golden.new_ids.len(), ..Default::default() };
            let generation =
                generator.generate(&golden.text, &options, &mut |_| {}).expect("generation");
            let pairs = generation.token_ids.iter().zip(&golden.new_ids);
            same += pairs.take_while(|(a, b)| a == b).count();
            total += golden.new_ids.len();
        }
        println!(
            "{wire} out, {response} back: blocks differ by at most {worst_block:.1e} (relative), \
             logits by {worst_logit:.1e}; {same} of {total} greedy tokens before the first difference"
        );
        assert!(worst_block <= bound, "{wire}: blocks differ by {worst_block:e}, bound {bound:e}");
        assert!(worst_block > 0.0, "{wire}: no rounding at all means that it was not used");
    }
}

#[test]
fn blocks_of_other_architectures_equal_transformers_through_the_service() {
    let mut tested = 0;
    for entry in std::fs::read_dir(data("reference-blocks")).expect("reference blocks") {
        let dir = entry.expect("entry").path();
        if !dir.is_dir() {
            continue;
        }
        let checkpoint = Arc::new(Checkpoint::open(&dir).expect("checkpoint"));
        let cluster = start(&checkpoint, 2, 1);
        let mut client = connect(&checkpoint, &cluster, WireDtype::F32, WireDtype::F32);
        let reference = TensorFile::open(dir.join("reference.safetensors")).expect("reference");
        let layer = checkpoint.config().moe_layers()[0];
        let x = tensor(&reference, "x");
        let idx = reference.tensor("topk_idx").and_then(|t| t.to_i32()).expect("topk_idx");
        let weights = tensor(&reference, "topk_weights");
        let mut routed = vec![f32::NAN; x.len()];
        client.forward(layer, &x, &idx, &weights, &mut routed).expect("layer");
        let worst = rel_diff(&routed, &tensor(&reference, "routed_out"));
        assert!(worst <= 1e-4, "{}: routed experts differ by {worst:e}", dir.display());

        let mut block = reference_model::MoeBlock::load(&checkpoint, layer).expect("block");
        let mut out = vec![f32::NAN; x.len()];
        block.forward(&x, &mut out, &mut client, None).expect("block");
        let worst = rel_diff(&out, &tensor(&reference, "block_out"));
        assert!(worst <= 1e-4, "{}: the block differs by {worst:e}", dir.display());
        tested += 1;
    }
    assert!(tested >= 4, "only {tested} reference blocks found");
}

#[test]
fn a_client_keeps_the_epoch_of_a_placement_without_servers() {
    let checkpoint = open("tiny-moe");
    let mut cluster = start(&checkpoint, 1, 1);
    cluster.drain_server(0, Duration::from_secs(60)).expect("drained");
    let token = Some(cluster.token().to_owned());
    let client = MoeClient::builder(ClientModel::of(&checkpoint))
        .control_plane(cluster.control_url(), token.clone())
        .secret(token)
        .build()
        .expect("client");
    let begin = std::time::Instant::now();
    while client.epoch() == 0 {
        assert!(begin.elapsed() < Duration::from_secs(60), "no placement");
        std::thread::sleep(Duration::from_millis(1));
    }
    let epoch = client.epoch();
    // The client learns after the table that the stream is open.
    let said = format!("epoch {epoch}, 0 servers");
    loop {
        let error =
            client.wait_ready(Duration::from_millis(300)).expect_err("no server").to_string();
        if error.contains(&said) {
            break;
        }
        assert!(begin.elapsed() < Duration::from_secs(60), "{error}");
    }
    assert_eq!(client.epoch(), epoch);
}

/// Generates a text and kills a server meanwhile, with a network transport between the processes.
#[cfg(feature = "libfabric")]
#[test]
fn the_demo_goes_over_libfabric() {
    use std::process::Stdio;
    use std::time::Instant;

    if let Err(error) = libfabric_transport::FabricNetwork::open("tcp;ofi_rxm") {
        return test_support::skip("libfabric", &error.to_string());
    }
    let demo = ["demo", "--transport", "libfabric", "--servers", "2", "--json"];
    let mut command = Command::new(env!("CARGO_BIN_EXE_switchyard"));
    command.args(demo).args(["--max-new-tokens", "16"]).env_remove("SWITCHYARD_TOKEN");
    let mut child = command.stdout(Stdio::piped()).spawn().expect("start");
    let deadline = Instant::now() + Duration::from_secs(90);
    while child.try_wait().expect("wait").is_none() {
        if Instant::now() >= deadline {
            child.kill().expect("kill");
            panic!("the demo did not end");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let output = child.wait_with_output().expect("output");
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert!(output.status.success(), "{report}");
    assert_eq!(report["verified"], true, "{report}");
    assert_eq!((&report["lost_requests"], &report["duplicated_requests"]), (&0.into(), &0.into()));
    assert_eq!(report["killed"]["server"], "server-1", "{report}");
    assert_eq!(report["killed"]["taken_over_by"][0], "server-0", "{report}");
}

#[test]
fn a_client_outside_of_the_workspace_gets_what_the_reference_computes() {
    let binary = build_standalone_client();
    let checkpoint = open("tiny-moe");
    let cluster = start(&checkpoint, 2, 2);
    let dir = tempfile::tempdir().expect("folder");
    let file = dir.path().join("layer.txt");
    let num_layers = checkpoint.config().num_layers.to_string();
    let mut command = Command::new(binary);
    command.args([&cluster.control_url(), cluster.token(), &num_layers]).arg(&file);
    let output = command.output().expect("start");
    let (stdout, stderr) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{stdout}{stderr}");
    assert!(stdout.contains("norm of the output"), "{stdout}");

    let text = std::fs::read_to_string(file).expect("written");
    let lines: HashMap<&str, &str> = text.lines().filter_map(|line| line.split_once(' ')).collect();
    fn values<T: FromStr<Err: Debug>>(line: &str) -> Vec<T> {
        line.split(' ').map(|value| value.parse().expect("number")).collect()
    }
    let (x, out): (Vec<f32>, Vec<f32>) = (values(lines["x"]), values(lines["out"]));
    let (idx, weights): (Vec<i32>, Vec<f32>) =
        (values(lines["topk_idx"]), values(lines["topk_weights"]));
    let mut expected = vec![f32::NAN; out.len()];
    let layer = lines["layer"].parse().expect("layer");
    let mut local = LocalExperts::new(checkpoint);
    local.forward(layer, &x, &idx, &weights, &mut expected).expect("reference");
    assert!(expected.iter().any(|value| *value != 0.0));
    let worst = rel_diff(&out, &expected);
    assert!(worst <= 1e-4, "differs by {worst:e}");
}

/// Builds `examples/standalone-client` as a user would, but from crates that are here already.
fn build_standalone_client() -> PathBuf {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/..");
    let example = PathBuf::from(root).join("examples/standalone-client");
    // The same versions as in the workspace: these are there offline, and some are built.
    std::fs::copy(format!("{root}/Cargo.lock"), example.join("Cargo.lock")).expect("lock file");
    let mut target = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    target.pop();
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(["build", "--offline", "--quiet", "--manifest-path"]);
    command.arg(example.join("Cargo.toml")).arg("--target-dir").arg(&target);
    // Without settings that cargo gives to the tests of this package.
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("CARGO_PKG_")) {
        command.env_remove(name);
    }
    let output = command.output().expect("cargo");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    target.join("debug/standalone-client")
}

fn data(path: &str) -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../data")).join(path)
}

fn open(name: &str) -> Arc<Checkpoint> {
    Arc::new(Checkpoint::open(data(name)).expect("checkpoint"))
}

fn start(checkpoint: &Checkpoint, num_servers: usize, replicas: usize) -> LocalCluster {
    let mut options = ClusterOptions::new(checkpoint.dir()).expect("options");
    options.binary = env!("CARGO_BIN_EXE_switchyard").into();
    options.num_servers = num_servers;
    options.replicas = replicas;
    options.threads = Some(1);
    LocalCluster::start(options, &mut |_| {}).expect("cluster")
}

fn connect(
    checkpoint: &Checkpoint,
    cluster: &LocalCluster,
    wire: WireDtype,
    response: WireDtype,
) -> MoeClient {
    let token = Some(cluster.token().to_owned());
    let client = MoeClient::builder(ClientModel::of(checkpoint))
        .control_plane(cluster.control_url(), token.clone())
        .secret(token)
        .wire_dtype(wire)
        .response_dtype(response)
        // A long timeout, so that a slow test machine causes no failovers.
        .deadline(Duration::from_secs(10))
        .build()
        .expect("client");
    client.wait_ready(Duration::from_secs(60)).expect("servers");
    client
}

fn goldens() -> Vec<Golden> {
    let text = std::fs::read_to_string(data("tiny-moe/golden.json")).expect("golden.json");
    let json: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    let ids = |value: &serde_json::Value| -> Vec<u32> {
        let values = value.as_array().expect("ids").iter();
        values.map(|id| id.as_u64().expect("id") as u32).collect()
    };
    let prompts = json["prompts"].as_array().expect("prompts").iter();
    prompts
        .map(|entry| {
            let prompt_ids = ids(&entry["ids"]);
            let new_ids = ids(&entry["greedy_f32"]).split_off(prompt_ids.len());
            Golden { text: entry["text"].as_str().expect("text").to_owned(), prompt_ids, new_ids }
        })
        .collect()
}

fn tensor(file: &TensorFile, name: &str) -> Vec<f32> {
    file.tensor(name).and_then(|tensor| tensor.to_f32()).expect(name)
}

fn max_abs_diff(found: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(found.len(), expected.len());
    assert!(found.iter().all(|value| value.is_finite()), "not everything was written");
    found.iter().zip(expected).fold(0.0, |max, (a, b)| max.max((a - b).abs()))
}

fn rel_diff(found: &[f32], expected: &[f32]) -> f32 {
    let scale = expected.iter().fold(f32::MIN_POSITIVE, |max, value| max.max(value.abs()));
    max_abs_diff(found, expected) / scale
}
