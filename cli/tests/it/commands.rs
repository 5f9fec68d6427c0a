//! Wrong input causes one clear error line and a non-zero exit code; valid input works as documented.

mod transports;

use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use safetensors::tensor::{Dtype, TensorView, serialize_to_file};
use switchyard_cli::cluster::{ClusterOptions, LocalCluster};
use tempfile::TempDir;

#[test]
fn wrong_usage_exits_with_2() {
    for args in [
        &["generate"][..],
        &["nonsense"],
        &["demo", "--servers", "many"],
        &["expert-server", "--model", ".", "--name", ""],
        &["expert-server", "--model", ".", "--name", "a b"],
        &["expert-server", "--model", ".", "--name", "a", "--threads", "100000"],
        &["bench", "moe", "--threads", "1025"],
        &["generate", "--prompt", "hi", "--temperature", "nan"],
        &["generate", "--prompt", "hi", "--temperature", "-1"],
        &["certs", "issue", "ca", "--role", "viewer", "--name", "a", "--days", "0"],
        &["certs", "issue", "ca", "--role", "viewer", "--name", "a", "--days", "99999999999"],
    ] {
        let output = run(args, &[]);
        assert_eq!(output.status.code(), Some(2), "{args:?}");
    }
    assert_eq!(run(&["--help"], &[]).status.code(), Some(0));
}

#[test]
fn switches_take_the_usual_words_from_the_environment() {
    for (value, is_json) in [("1", true), ("yes", true), ("0", false), ("", false), ("off", false)]
    {
        let output = run(&["doctor"], &[("SWITCHYARD_JSON", value)]);
        assert_eq!(output.status.code(), Some(0), "{value:?}");
        let parsed = serde_json::from_slice::<serde_json::Value>(&output.stdout);
        assert_eq!(parsed.is_ok(), is_json, "{value:?}");
    }
}

#[test]
fn a_reader_that_leaves_ends_the_command_quietly() {
    for args in [&["doctor"][..], &["doctor", "--json"], &["demo", "--no-kill"]] {
        let mut child = Command::new(env!("CARGO_BIN_EXE_switchyard"))
            .args(args)
            .stdout(std::process::Stdio::piped())
            .stderr(std::process::Stdio::piped())
            .spawn()
            .expect("start");
        drop(child.stdout.take());
        let output = child.wait_with_output().expect("wait");
        assert_eq!(output.status.code(), Some(0), "{args:?}");
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(!stderr.contains("panicked"), "{args:?}: {stderr}");
    }
}

#[test]
fn a_log_that_cannot_be_written_does_not_stop_a_server() {
    let full = || std::fs::File::options().write(true).open("/dev/full").expect("/dev/full");
    let mut server = Command::new(env!("CARGO_BIN_EXE_switchyard"))
        .args(serve(&tiny()))
        .args(["--json", "--log", "debug"])
        .stdout(std::process::Stdio::piped())
        .stderr(full())
        .spawn()
        .expect("start");
    let mut lines = BufReader::new(server.stdout.take().expect("stdout")).lines();
    let listening = lines.next().expect("a line").expect("a line");
    let event: serde_json::Value = serde_json::from_str(&listening).expect("JSON");
    let addr = event["addr"].as_str().expect("addr").to_owned();
    for _ in 0..3 {
        let mut garbage = std::net::TcpStream::connect(&addr).expect("the listener is there");
        garbage.write_all(&[0xa5; 300]).expect("write");
        // Read until the listener closes the connection. The contents do not matter here.
        let mut answer = Vec::new();
        let _ = std::io::Read::read_to_end(&mut garbage, &mut answer);
    }
    std::net::TcpStream::connect(&addr).expect("the listener is still there");
    server.kill().expect("kill");
    server.wait().expect("wait");
}

/// A server that waits for its control plane, and could wait for half a minute.
#[test]
fn a_signal_before_a_server_serves_ends_it() {
    let mut server = Command::new(env!("CARGO_BIN_EXE_switchyard"))
        .args(["expert-server", "--name", "a", "--listen", "127.0.0.1:0", "--threads", "1"])
        .arg("--model")
        .arg(tiny())
        .args(["--control-plane", "http://127.0.0.1:9", "--json"])
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .expect("start");
    // It says that the control plane is unreachable, after it has begun to wait for signals.
    let mut log = BufReader::new(server.stderr.take().expect("stderr")).lines();
    log.next().expect("a line").expect("a line");
    let pid = rustix::process::Pid::from_child(&server);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).expect("a signal");
    let output = server.wait_with_output().expect("an end");
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains(r#""event":"stopped""#), "{text}");
}

#[test]
fn damaged_checkpoints_are_named() {
    let dir = copy_of_tiny();
    let weights = dir.path().join("model.safetensors");
    let whole = std::fs::metadata(&weights).expect("metadata").len();
    truncate(&weights, whole - 1000);
    let line = fails(&serve(dir.path()), &[]);
    assert!(line.contains("model.safetensors") && line.contains(&whole.to_string()), "{line}");
    assert!(line.contains(&(whole - 1000).to_string()), "{line}");

    std::fs::remove_file(&weights).expect("remove");
    let line = fails(&serve(dir.path()), &[]);
    assert!(line.contains("model.safetensors"), "{line}");

    let line = fails(&serve(Path::new("/nonexistent/model")), &[]);
    assert!(line.contains("/nonexistent/model"), "{line}");
}

#[test]
fn a_missing_shard_is_named() {
    let dir = copy_of_tiny();
    let shard = "model-00001-of-00002.safetensors";
    let expert = "model.layers.0.mlp.experts.0.up_proj.weight";
    let index =
        format!(r#"{{"weight_map":{{"{expert}":"{shard}","model.norm.weight":"{shard}"}}}}"#);
    std::fs::remove_file(dir.path().join("model.safetensors")).expect("remove");
    std::fs::write(dir.path().join("model.safetensors.index.json"), index).expect("write");
    let line = fails(&serve(dir.path()), &[]);
    assert!(line.contains(shard), "{line}");
}

#[test]
fn a_tensor_of_the_wrong_shape_and_an_unknown_architecture_are_named() {
    let dir = copy_of_tiny();
    edit_config(dir.path(), "\"moe_intermediate_size\": 64", "\"moe_intermediate_size\": 96");
    let line = fails(&serve(dir.path()), &[]);
    assert!(line.contains("experts.0") && line.contains("64") && line.contains("96"), "{line}");

    let dir = copy_of_tiny();
    edit_config(dir.path(), "Qwen3MoeForCausalLM", "GPT9ForCausalLM");
    edit_config(dir.path(), "qwen3_moe", "gpt9");
    let line = fails(&serve(dir.path()), &[]);
    assert!(line.contains("GPT9ForCausalLM") && line.contains("Mixtral"), "{line}");
}

#[test]
fn what_a_child_of_a_local_cluster_says_is_the_error() {
    let generate = |dir: &TempDir| {
        let model = dir.path().to_str().expect("path");
        let args = ["generate", "--prompt", "x", "--servers", "2", "--model", model];
        let line = fails(&args, &[]);
        assert!(!line.contains("standard error:") && !line.contains("exit status"), "{line}");
        assert_eq!(line.matches("error: ").count(), 1, "{line}");
        line
    };
    // Errors of files that this process opens itself.
    let dir = copy_of_tiny();
    let weights = dir.path().join("model.safetensors");
    let whole = std::fs::metadata(&weights).expect("metadata").len();
    truncate(&weights, whole - 1000);
    let line = generate(&dir);
    assert!(line.contains("model.safetensors") && line.contains(&whole.to_string()), "{line}");
    std::fs::remove_file(&weights).expect("remove");
    assert!(generate(&dir).contains("model.safetensors"));
    let dir = copy_of_tiny();
    edit_config(dir.path(), "Qwen3MoeForCausalLM", "GPT9ForCausalLM");
    edit_config(dir.path(), "qwen3_moe", "gpt9");
    assert!(generate(&dir).contains("GPT9ForCausalLM"));
    // Only servers check the experts.
    let dir = copy_of_tiny();
    edit_config(dir.path(), "\"moe_intermediate_size\": 64", "\"moe_intermediate_size\": 96");
    let line = generate(&dir);
    assert!(line.starts_with("error: server-") && line.contains("experts."), "{line}");
    assert!(line.contains("64") && line.contains("96"), "{line}");
}

#[test]
fn a_server_that_fails_ends_the_start_of_a_cluster_with_its_own_words() {
    let mut options = options(3, 1);
    options.server_env.push(("SWITCHYARD_SLOT_BYTES".to_owned(), "1000".to_owned()));
    let error = LocalCluster::start(options, &mut |_| {}).expect_err("small slots").to_string();
    assert!(error.starts_with("server-") && error.contains("1000"), "{error}");
    assert!(!error.contains("standard error:") && !error.contains('\n'), "{error}");
}

#[test]
fn a_port_taken_from_a_child_is_named() {
    let mut cluster = cluster(1, 1);
    let addr = cluster.control_url().replace("http://", "");
    cluster.kill_control().expect("killed");
    let _taken = TcpListener::bind(&addr).expect("bind");
    let error = cluster.restart_control().expect_err("the port is taken").to_string();
    assert!(error.starts_with("control-plane: ") && error.contains(&addr), "{error}");
    assert!(error.contains("in use") && !error.contains("standard error:"), "{error}");
}

#[test]
fn a_port_in_use_is_named_by_every_listener() {
    let taken = TcpListener::bind("127.0.0.1:0").expect("bind");
    let addr = taken.local_addr().expect("addr").to_string();
    let line = fails(&["control-plane", "--listen", &addr], &[]);
    assert!(line.contains(&addr) && line.contains("in use"), "{line}");
    let tiny = tiny();
    let tiny = tiny.to_str().expect("path");
    let server = ["expert-server", "--model", tiny, "--name", "a", "--experts", "all"];
    let line = fails(&[&server[..], &["--listen", &addr]].concat(), &[]);
    assert!(line.contains(&addr) && line.contains("in use"), "{line}");
    let metrics = ["--listen", "127.0.0.1:0", "--metrics-listen", &addr];
    let line = fails(&[&server[..], &metrics].concat(), &[]);
    assert!(line.contains(&addr) && line.contains("in use"), "{line}");
}

#[test]
fn prompts_and_flags_that_cannot_work_are_explained() {
    let long = "word ".repeat(3000);
    let line = fails(&["generate", "--prompt", &long, "--servers", "1", "--replicas", "1"], &[]);
    assert!(line.contains("1024") && line.contains("tokens"), "{line}");
    let line = fails(&["generate", "--prompt", ""], &[]);
    assert!(line.contains("empty"), "{line}");
    let line = fails(&["demo", "--replicas", "5"], &[]);
    assert!(line.contains('5') && line.contains('4'), "{line}");
    let line = fails(&["demo", "--replicas", "1"], &[]);
    assert!(line.contains("--no-kill"), "{line}");
    let line = fails(&["generate", "--prompt", "x", "--slot-bytes", "1000"], &[]);
    assert!(line.contains("1000") && line.contains("4096"), "{line}");
    let line = fails(&["demo", "--max-new-tokens", "1"], &[]);
    assert!(line.contains("at least 2"), "{line}");
    for (args, found) in [
        (["moe", "--seconds=-1"], "-1"),
        (["moe", "--seconds=nan"], "NaN"),
        (["moe", "--seconds=1e300"], "--seconds"),
        (["moe", "--tokens=0"], "--tokens 0"),
        (["moe", "--tokens=16385"], "16385"),
        (["p2p", "--iterations=18446744073709551615"], "18446744073709551615"),
        (["p2p", "--max-bytes=0"], "max_bytes is 0"),
        (["p2p", "--num-iovs=4"], "found shm"),
    ] {
        let line = fails(&[&["bench"][..], &args].concat(), &[]);
        assert!(line.contains(found) && line.contains("expected"), "{args:?}: {line}");
    }
    let line = fails(&["bench", "p2p", "--device", "emulated:0", "--min-bytes", "12"], &[]);
    assert!(line.contains("min_bytes is 12") && line.contains("a multiple of 16"), "{line}");
    // There is no GPU with a higher number for the second process.
    let line = fails(&["bench", "p2p", "--device", "emulated:4294967295"], &[]);
    assert!(line.contains("GPU"), "{line}");
    let line = fails(&["status"], &[]);
    assert!(line.contains("--control-plane"), "{line}");
    let line = fails(&["status", "--control-plane", "http://127.0.0.1:1"], &[]);
    assert!(line.contains("127.0.0.1:1"), "{line}");
    let tiny = tiny();
    let line =
        fails(&["expert-server", "--model", tiny.to_str().expect("path"), "--name", "a"], &[]);
    assert!(line.contains("--experts"), "{line}");
}

#[test]
fn peers_that_do_not_fit_the_cluster_are_turned_away_with_both_values() {
    let cluster = cluster(1, 1);
    let url = cluster.control_url();
    let token = [("SWITCHYARD_TOKEN", cluster.token())];
    let generate = ["generate", "--prompt", "An iterator", "--control-plane", &url];

    let line = fails(&generate, &[("SWITCHYARD_TOKEN", "wrong")]);
    assert!(line.contains("token") || line.contains("unauthorized"), "{line}");

    let line = fails(&[&generate[..], &["--slot-bytes", "1048576"]].concat(), &token);
    assert!(line.contains("1048576") && line.contains("10485760"), "{line}");

    // Other weights: one matrix of one expert.
    let dir = copy_of_tiny();
    let changed = "model.layers.2.mlp.experts.3.up_proj.weight";
    write_tensors(dir.path(), |name, bytes| {
        if name == changed {
            bytes.iter_mut().for_each(|byte| *byte ^= 1);
        }
        true
    });
    let path = dir.path().to_str().expect("path");
    let line = fails(&[&generate[..], &["--model", path]].concat(), &token);
    assert!(line.contains("the weights differ"), "{line}");
    assert!(line.contains(changed) || line.contains("fingerprint"), "{line}");
    let server = [
        "expert-server",
        "--model",
        path,
        "--name",
        "b",
        "--listen",
        "127.0.0.1:0",
        "--control-plane",
        &url,
    ];
    let line = fails(&server, &token);
    assert!(line.contains("other weights") && line.contains("fingerprint"), "{line}");
    assert!(line.ends_with(&format!("tensors that differ first: {changed}")), "{line}");

    // A client needs no experts.
    write_tensors(dir.path(), |name, _| !name.contains(".experts."));
    let output =
        run(&[&generate[..], &["--max-new-tokens", "2", "--model", path]].concat(), &token);
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn inspect_describes_folders_and_files_and_fails_for_what_cannot_be_served() {
    let data = concat!(env!("CARGO_MANIFEST_DIR"), "/../data");
    let inspect = |path: &str, more: &[&str]| {
        let path = format!("{data}/{path}");
        run(&[&["inspect", &path, "--json"][..], more].concat(), &[])
    };
    let json = |output: &Output| -> serde_json::Value {
        serde_json::from_slice(&output.stdout).expect("JSON on standard output")
    };

    let tiny = inspect("tiny-moe", &["--servers", "3", "--verify", "sampled"]);
    assert_eq!(tiny.status.code(), Some(0));
    let report = json(&tiny);
    assert_eq!(report["model_type"], "qwen3_moe");
    assert_eq!(report["moe_layers"], serde_json::json!([0, 1, 2, 3]));
    // 3 matrices of 64 x 256 values in bf16; a server of three has 6 of 16 experts in each of 4 layers.
    assert_eq!(report["expert_bytes"], 3 * 64 * 256 * 2);
    assert_eq!(report["bytes_per_server"], 3 * 64 * 256 * 2 * 6 * 4);
    assert_eq!(report["gpu"]["servable"], true);
    assert_eq!(report["fingerprint"].as_str().map(str::len), Some(64));
    assert!(report["full_digest"].is_null());

    let full = json(&inspect("tiny-moe", &["--verify", "full"]));
    assert!(full["fingerprint"].is_null() && full["full_digest"].is_string(), "{full}");

    let packed = json(&inspect("family-blocks/gpt_oss-mxfp4", &[]));
    assert_eq!(packed["formats"], serde_json::json!({ "fp4/32": 18 }));
    assert_eq!(
        (&packed["cpu"]["servable"], &packed["gpu"]["servable"]),
        (&true.into(), &false.into())
    );
    assert!(packed["gpu"]["note"].as_str().is_some_and(|note| note.contains("swiglu")), "{packed}");

    let reordered = json(&inspect("reference-formats/gptq-int4-desc-act", &[]));
    assert_eq!(reordered["formats"], serde_json::json!({ "f16": 12 }));
    assert_eq!(reordered["expert_bytes"], 3 * 64 * 128 * 2);
    let note = reordered["cpu"]["note"].to_string();
    assert!(note.contains("12 matrices") && note.contains("dequantised"), "{note}");

    let file = json(&inspect("tiny-moe/model.safetensors", &[]));
    assert_eq!(file["dtypes"]["BF16"]["tensors"], 230);
    let dir = TempDir::new().expect("temp dir");
    let gguf = dir.path().join("m.gguf");
    std::fs::write(&gguf, b"GGUF\x03\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0").expect("a file");
    let gguf = run(&["inspect", gguf.to_str().expect("path"), "--json"], &[]);
    assert_eq!(gguf.status.code(), Some(1));
    assert!(json(&gguf)["remedy"].as_str().is_some_and(|text| text.contains("convert")));
    let line = fails(&["inspect", "some/model"], &[]);
    assert!(line.contains("hf download some/model"), "{line}");
}

#[test]
fn layer_writes_what_the_experts_compute() {
    let dir = TempDir::new().expect("temp dir");
    let (input, out) = (dir.path().join("in.safetensors"), dir.path().join("out.safetensors"));
    let x: Vec<u8> = (0..3 * 256).flat_map(|i| ((i % 17) as f32 / 17.0).to_le_bytes()).collect();
    let idx: Vec<u8> = [0i32, 5, 3, -1, -1, -1].iter().flat_map(|v| v.to_le_bytes()).collect();
    let weights: Vec<u8> =
        [0.5f32, 0.25, 1.0, 0.0, 9.0, 9.0].iter().flat_map(|v| v.to_le_bytes()).collect();
    let view = |dtype, shape: &[usize], bytes| {
        TensorView::new(dtype, shape.to_vec(), bytes).expect("view")
    };
    let tensors = [
        ("x", view(Dtype::F32, &[3, 256], &x)),
        ("topk_idx", view(Dtype::I32, &[3, 2], &idx)),
        ("topk_weights", view(Dtype::F32, &[3, 2], &weights)),
    ];
    serialize_to_file(tensors, None, &input).expect("write");
    let (input, out_path) = (input.to_str().expect("path"), out.to_str().expect("path"));
    let args =
        ["layer", "--layer", "1", "--in", input, "--out", out_path, "--servers", "2", "--json"];
    let output = run(&args, &[]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!((&report["tokens"], &report["top_k"]), (&3.into(), &2.into()));

    let file = checkpoint::TensorFile::open(&out).expect("output");
    let found = file.tensor("out").and_then(|t| t.expect_shape(&[3, 256])?.to_f32()).expect("out");
    let checkpoint = std::sync::Arc::new(checkpoint::Checkpoint::open(tiny()).expect("model"));
    let mut oracle = reference_model::LocalExperts::new(checkpoint);
    let mut expected = vec![f32::NAN; 3 * 256];
    let x: Vec<f32> = (0..3 * 256).map(|i| (i % 17) as f32 / 17.0).collect();
    attention_client::ExpertBackend::forward(
        &mut oracle,
        1,
        &x,
        &[0, 5, 3, -1, -1, -1],
        &[0.5, 0.25, 1.0, 0.0, 9.0, 9.0],
        &mut expected,
    )
    .expect("oracle");
    let scale = expected.iter().fold(0f32, |max, value| max.max(value.abs()));
    assert!(scale > 0.0);
    for (found, expected) in found.iter().zip(&expected) {
        assert!((found - expected).abs() <= 1e-5 * scale, "{found} is not {expected}");
    }
    assert!(found[512..].iter().all(|value| *value == 0.0), "a masked token has an output");
}

#[test]
fn the_demo_verifies_itself_and_status_and_doctor_answer() {
    let output = run(&["demo", "--json"], &[]);
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert!(output.status.success(), "{report}");
    assert_eq!(report["verified"], true, "{report}");
    assert_eq!((&report["lost_requests"], &report["duplicated_requests"]), (&0.into(), &0.into()));
    for field in ["tokens_per_s", "layer_us_p50", "layer_us_p99", "failover_stall_ms"] {
        assert!(report[field].is_number(), "{field} in {report}");
    }
    assert_eq!(report["killed"]["server"], "server-2", "{report}");

    let cluster = cluster(2, 2);
    let token = [("SWITCHYARD_TOKEN", cluster.token())];
    let url = cluster.control_url();
    let output = run(&["status", "--json", "--control-plane", &url], &token);
    let status: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert!(output.status.success() && status["healthy"] == true, "{status}");
    assert_eq!(status["members"].as_array().map(Vec::len), Some(2));
    let output = run(&["doctor", "--json", "--control-plane", &url], &token);
    let doctor: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert!(output.status.success() && doctor["healthy"] == true, "{doctor}");
}

#[test]
fn a_demo_whose_text_is_not_the_reference_says_so() {
    let dir = copy_of_tiny();
    let golden = std::fs::read_to_string(tiny().join("golden.json")).expect("golden.json");
    let mut golden: serde_json::Value = serde_json::from_str(&golden).expect("JSON");
    for prompt in golden["prompts"].as_array_mut().expect("prompts") {
        let num_prompt_ids = prompt["ids"].as_array().expect("ids").len();
        let ids = prompt["greedy_f32"].as_array_mut().expect("greedy ids");
        ids[num_prompt_ids + 2] = (ids[num_prompt_ids + 2].as_u64().expect("an id") + 1).into();
    }
    std::fs::write(dir.path().join("golden.json"), golden.to_string()).expect("write");
    let model = dir.path().to_str().expect("path");
    let demo = ["demo", "--no-kill", "--servers", "2", "--max-new-tokens", "4", "--json"];
    let line = fails(&[&demo[..], &["--model", model]].concat(), &[]);
    assert!(line.contains("the run failed") && line.contains("token 3 of 4"), "{line}");
}

#[test]
fn made_checkpoints_serve_and_full_folders_are_left_alone() {
    let dir = TempDir::new().expect("temp dir");
    let path = dir.path().join("made");
    let path = path.to_str().expect("path");
    let make = ["make-checkpoint", "--preset", "tiny-deepseek-v3", "--layers", "2", "--out", path];
    let output = run(&[&make[..], &["--json"]].concat(), &[]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let line = fails(&make, &[]);
    assert!(line.contains(path), "{line}");
    let bench = ["bench", "moe", "--model", path, "--tokens", "1,3", "--seconds", "0.01", "--json"];
    let output = run(&bench, &[]);
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(report["rows"].as_array().map(Vec::len), Some(2), "{report}");
    for row in report["rows"].as_array().expect("rows") {
        assert!(row["max_rel_diff"].as_f64().expect("number") <= 1e-5, "{row}");
    }
}

/// On emulated GPUs: checks that all parts of the benchmark work together, not their speed.
#[test]
fn layers_through_servers_on_gpus_are_measured_with_clients_that_share_them() {
    let report = bench_on_gpus(&["--clients", "2", "--servers", "2"]);
    let row = &report["rows"][0];
    let number = |name: &str| row[name].as_f64().unwrap_or_else(|| panic!("{name} of {row}"));
    assert!(number("compute_us") > 0.0 && number("server_us") > 0.0, "{row}");
    for (part, ratio) in [("compute_us", "ratio"), ("server_us", "server_ratio")] {
        let expected = number("layer_us_p50") / number(part);
        assert!((number(ratio) / expected - 1.0).abs() < 1e-6, "{row}");
    }
    let per_batch = number("clients_per_batch");
    assert!((1.0..=2.0).contains(&per_batch), "{row}");
    assert_eq!(row["clients"].as_array().map(Vec::len), Some(2), "{row}");
    assert!(number("gain") > 0.0, "{row}");
    let num_failovers = row["clients"][0]["failovers"].as_u64();
    assert_eq!(num_failovers, Some(0), "no server fails here: {row}");
}

#[test]
fn flags_that_would_do_nothing_are_refused_and_variables_for_others_are_not() {
    let on_gpus = ["bench", "moe", "--device", "emulated:0"];
    for (flags, expected) in [
        (&["--threads", "2"][..], "--threads would do nothing with --device"),
        (&["--slot-bytes", "65536"], "--slot-bytes would do nothing with --device"),
        (&["--peer-transport", "a=shm"], "--peer-transport would do nothing with --device"),
        (&["--wire-dtype", "f32"], "expected bf16 or fp8"),
        (&["--servers", "2", "--kill", "--clients", "2"], "--clients would do nothing with --kill"),
        (&["--servers", "2", "--kills", "3"], "--kills would do nothing without --kill"),
        (&["--servers", "2", "--kill", "--tokens", "1,2"], "one number of --tokens"),
    ] {
        let output = run(&[&on_gpus[..], flags].concat(), &[]);
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(2) && text.contains(expected), "{flags:?}: {text}");
    }
    for flags in [&["--kill"][..], &["--clients", "2"], &["--device-gather-us", "5"]] {
        let output = run(&[&["bench", "moe", "--tokens", "0"], flags].concat(), &[]);
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(2) && text.contains("without --device"), "{text}");
    }
    // These variables may be meant for servers started from the same shell. The error here is another flag.
    let others = [
        ("SWITCHYARD_DEVICE", "cpu"),
        ("SWITCHYARD_CLIENTS", "2"),
        ("SWITCHYARD_DEVICE_GATHER_US", "5"),
    ];
    let output = run(&["bench", "moe", "--tokens", "0"], &others);
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(1) && text.contains("--tokens 0"), "{text}");
}

#[test]
fn measurements_begin_at_the_gpu_that_is_named() {
    let others = ["bench", "moe", "--preset", "mini-deepseek-v3", "--tokens", "2", "--json"];
    let how = ["--seconds", "0.2", "--device"];
    // Only one of the eight emulated GPUs is left.
    let output = run(&[&others[..], &how, &["emulated:7"]].concat(), &[]);
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && text.contains("one GPU"), "{text}");
    let output = run(&[&others[..], &how, &["emulated:8"]].concat(), &[]);
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && text.contains("expected one of the 8"), "{text}");
    let output = run(&[&others[..], &how, &["emulated:6"]].concat(), &[]);
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}");
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(report["num_gpus"].as_u64(), Some(2), "{report}");
}

#[test]
fn puts_between_gpus_are_medians_of_enough_launches() {
    let bench = ["bench", "p2p", "--device", "emulated:0", "--max-bytes", "16", "--json"];
    let output = run(&[&bench[..], &["--iterations", "2"]].concat(), &[]);
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}");
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert!(report[0]["launches"].as_u64().is_some_and(|launches| launches >= 21), "{report}");
    assert_eq!(report[0]["rows"].as_array().map(Vec::len), Some(3), "{report}");
}

#[test]
fn killing_one_of_two_gpu_servers_under_load_loses_nothing() {
    let report = bench_on_gpus(&["--servers", "2", "--kill", "--kills", "2"]);
    let killed = &report["killed"];
    assert_eq!(killed["stalls_us"].as_array().map(Vec::len), Some(2), "{killed}");
    assert!(killed["stall_us_p50"].as_f64() <= killed["stall_us"].as_f64(), "{killed}");
    assert_eq!(killed["wrong"].as_u64(), Some(0), "{killed}");
    assert!(killed["after_calls_per_s"].as_f64().is_some_and(|rate| rate > 0.0), "{killed}");
    assert_eq!(killed["one_server"].as_array().map(Vec::len), Some(2), "{killed}");
    let deaths = killed["deaths"].as_array().expect("deaths");
    assert_eq!(deaths.len(), 2, "{killed}");
    // The call after a death between two calls may already know of it.
    for death in deaths.iter().filter(|death| !death.is_null()) {
        let us = |name: &str| death[name].as_f64().expect("a time");
        assert!(us("sent_again_us") > 0.0 && us("answered_us") > 0.0, "{killed}");
    }
}

fn bench_on_gpus(more: &[&str]) -> serde_json::Value {
    let bench = ["bench", "moe", "--device", "emulated:0", "--preset", "mini-deepseek-v3"];
    let how = ["--tokens", "2", "--seconds", "0.2", "--json"];
    let output = run(&[&bench[..], &how, more].concat(), &[]);
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}");
    serde_json::from_slice(&output.stdout).expect("JSON")
}

/// Runs the binary with a time limit.
pub fn run(args: &[&str], env: &[(&str, &str)]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_switchyard"));
    command.args(args).env_remove("SWITCHYARD_TOKEN").envs(env.iter().copied());
    let mut child = command
        .stdin(std::process::Stdio::null())
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .expect("start");
    let deadline = Instant::now() + Duration::from_secs(90);
    // Threads drain both pipes, so that the child never blocks on a full one.
    let drain = |stream: Box<dyn std::io::Read + Send>| {
        std::thread::spawn(move || {
            let (mut stream, mut bytes) = (stream, Vec::new());
            stream.read_to_end(&mut bytes).expect("read");
            bytes
        })
    };
    let stdout = drain(Box::new(child.stdout.take().expect("stdout")));
    let stderr = drain(Box::new(child.stderr.take().expect("stderr")));
    let status = loop {
        if let Some(status) = child.try_wait().expect("wait") {
            break status;
        }
        if Instant::now() >= deadline {
            child.kill().expect("kill");
            panic!("{args:?} did not end");
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    Output {
        status,
        stdout: stdout.join().expect("stdout"),
        stderr: stderr.join().expect("stderr"),
    }
}

/// Runs the binary, which must fail with exactly one line that starts with "error:".
pub fn fails(args: &[&str], env: &[(&str, &str)]) -> String {
    let output = run(args, env);
    let stderr = String::from_utf8(output.stderr).expect("UTF-8");
    assert_eq!(output.status.code(), Some(1), "{args:?}: {stderr}");
    let errors: Vec<&str> = stderr.lines().filter(|line| line.starts_with("error: ")).collect();
    assert_eq!(errors.len(), 1, "{args:?}: {stderr}");
    assert!(!stderr.contains("panicked"), "{stderr}");
    assert_eq!(stderr.lines().last(), Some(errors[0]), "{args:?}: the error comes last: {stderr}");
    errors[0].to_owned()
}

fn serve(model: &Path) -> Vec<&str> {
    let model = model.to_str().expect("path");
    vec![
        "expert-server",
        "--model",
        model,
        "--name",
        "a",
        "--experts",
        "all",
        "--listen",
        "127.0.0.1:0",
    ]
}

fn tiny() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../data/tiny-moe"))
}

fn copy_of_tiny() -> TempDir {
    let dir = TempDir::new().expect("temp dir");
    for name in ["config.json", "model.safetensors", "tokenizer.json", "generation_config.json"] {
        std::fs::copy(tiny().join(name), dir.path().join(name)).expect("copy");
    }
    dir
}

fn edit_config(dir: &Path, from: &str, to: &str) {
    let path = dir.join("config.json");
    let text = std::fs::read_to_string(&path).expect("config");
    assert!(text.contains(from), "config.json has no {from}");
    let mut file = std::fs::File::create(&path).expect("config");
    file.write_all(text.replace(from, to).as_bytes()).expect("config");
}

/// Writes the tensors of a copy of the small model again, changed by `edit`, without those for which it returns
/// false.
fn write_tensors(dir: &Path, edit: impl Fn(&str, &mut [u8]) -> bool) {
    let bytes = std::fs::read(tiny().join("model.safetensors")).expect("weights");
    let tensors = safetensors::SafeTensors::deserialize(&bytes).expect("weights");
    let mut kept = Vec::new();
    for (name, view) in tensors.tensors() {
        let mut data = view.data().to_vec();
        if edit(&name, &mut data) {
            kept.push((name, view.dtype(), view.shape().to_vec(), data));
        }
    }
    let views = kept.iter().map(|(name, dtype, shape, data)| {
        (name, TensorView::new(*dtype, shape.clone(), data).expect("a tensor"))
    });
    serialize_to_file(views, None, &dir.join("model.safetensors")).expect("write");
}

fn truncate(path: &Path, bytes: u64) {
    let file = std::fs::OpenOptions::new().write(true).open(path).expect("open");
    file.set_len(bytes).expect("truncate");
}

fn cluster(num_servers: usize, replicas: usize) -> LocalCluster {
    LocalCluster::start(options(num_servers, replicas), &mut |_| {}).expect("cluster")
}

fn options(num_servers: usize, replicas: usize) -> ClusterOptions {
    let mut options = ClusterOptions::new(tiny()).expect("options");
    options.binary = env!("CARGO_BIN_EXE_switchyard").into();
    options.num_servers = num_servers;
    options.replicas = replicas;
    options.threads = Some(1);
    options
}
