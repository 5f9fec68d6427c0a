//! An update of the model with real processes: clients of both models call without a pause, and every output is compared
//! with the reference of its own model.

use std::path::Path;
use std::process::{Command, Output};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use attention_client::{ClientModel, MoeClient};
use checkpoint::{Checkpoint, MakeOptions, Preset, make_checkpoint};
use control_api::{ControlClient, EditionInfo, EditionState};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use reference_model::{ExpertBackend, LocalExperts};
use switchyard_cli::cluster::{ClusterOptions, LocalCluster};

const TOKENS: usize = 5;
const LIMIT: Duration = Duration::from_secs(120);

/// A model with its folder, and calls with their outputs.
struct Model {
    dir: tempfile::TempDir,
    checkpoint: Arc<Checkpoint>,
    fingerprint: String,
    calls: Vec<Call>,
}

struct Call {
    layer: u32,
    x: Vec<f32>,
    idx: Vec<i32>,
    weights: Vec<f32>,
    expected: Vec<f32>,
}

impl Model {
    /// Random weights. Models of different seeds have the same shape.
    fn make(seed: u64) -> Self {
        let dir = tempfile::tempdir().expect("folder");
        let preset: Preset = "tiny-qwen3-moe".parse().expect("preset");
        let mut options = MakeOptions::new(preset, 2);
        (options.seed, options.overwrite) = (seed, true);
        make_checkpoint(dir.path(), &options, &mut |_, _| ()).expect("checkpoint");
        let checkpoint = Arc::new(Checkpoint::open(dir.path()).expect("checkpoint"));
        let fingerprint = checkpoint.fingerprint().expect("fingerprint").to_string();
        // The same tokens for both models, so that an output of the other one would be seen.
        let mut rng = StdRng::seed_from_u64(7);
        let mut local = LocalExperts::new(Arc::clone(&checkpoint));
        let config = checkpoint.config();
        let mut call = |layer: u32| {
            let x: Vec<f32> =
                (0..TOKENS * config.hidden).map(|_| rng.random_range(-1.0..1.0)).collect();
            let mut idx = Vec::new();
            for token in 0..TOKENS {
                let first = rng.random_range(0..config.num_experts) as usize;
                let chosen = (0..config.top_k).map(|nth| (first + nth + token) as u32);
                idx.extend(chosen.map(|expert| (expert % config.num_experts) as i32));
            }
            let weights: Vec<f32> = idx.iter().map(|_| rng.random_range(0.1..1.0)).collect();
            let mut expected = vec![f32::NAN; x.len()];
            local.forward(layer, &x, &idx, &weights, &mut expected).expect("reference");
            Call { layer, x, idx, weights, expected }
        };
        let calls = config.moe_layers().into_iter().map(&mut call).collect();
        Self { dir, checkpoint, fingerprint, calls }
    }

    fn path(&self) -> &Path {
        self.dir.path()
    }

    /// A client that knows sizes only: it stays with the model that it gets.
    fn client(&self, cluster: &LocalCluster) -> MoeClient {
        let token = Some(cluster.token().to_owned());
        let client = MoeClient::builder(ClientModel::of(&self.checkpoint))
            .control_plane(cluster.control_url(), token.clone())
            .secret(token)
            .deadline(Duration::from_secs(10))
            .build()
            .expect("client");
        client.wait_ready(Duration::from_secs(60)).expect("servers");
        client
    }

    /// Makes every call once and compares its output.
    fn call_all(&self, client: &MoeClient) {
        for Call { layer, x, idx, weights, expected } in &self.calls {
            let mut out = vec![f32::NAN; x.len()];
            client.forward(*layer, x, idx, weights, &mut out).expect("call");
            let largest = expected.iter().fold(0f32, |most, value| most.max(value.abs()));
            for (found, wanted) in out.iter().zip(expected) {
                let difference = (found - wanted).abs();
                assert!(difference <= 1e-4 * largest, "layer {layer}: {found} {wanted}");
            }
        }
    }
}

/// Calls of a client without a pause until `stop`.
fn call_until(model: &Model, client: MoeClient, stop: &AtomicBool, num_rounds: &AtomicUsize) {
    while !stop.load(Ordering::Relaxed) {
        model.call_all(&client);
        num_rounds.fetch_add(1, Ordering::Relaxed);
    }
}

fn switchyard(cluster: &LocalCluster, args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_switchyard"));
    command.args(args).args(["--control-plane", &cluster.control_url()]);
    command.env("SWITCHYARD_TOKEN", cluster.token());
    command.output().expect("switchyard")
}

fn done(cluster: &LocalCluster, args: &[&str]) -> String {
    let output = switchyard(cluster, args);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    text
}

fn refused(cluster: &LocalCluster, args: &[&str], word: &str) {
    let output = switchyard(cluster, args);
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{args:?}: {text}");
    assert!(text.contains(word) && text.trim_end().lines().count() == 1, "{args:?}: {text}");
}

#[test]
fn the_last_replica_of_an_expert_is_drained_by_force_only() {
    let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/../data/tiny-moe");
    let mut options = ClusterOptions::new(std::path::Path::new(dir)).expect("options");
    options.binary = env!("CARGO_BIN_EXE_switchyard").into();
    (options.num_servers, options.replicas, options.threads) = (1, 1, Some(1));
    let cluster = LocalCluster::start(options, &mut |_| {}).expect("cluster");
    refused(&cluster, &["drain", "server-0"], "expert 0 of layer 0 is on server-0 alone");
    assert!(done(&cluster, &["drain", "server-0", "--force"]).contains("server-0 is draining"));
    // It is drained already.
    done(&cluster, &["drain", "server-0"]);
}

struct Watcher {
    runtime: tokio::runtime::Runtime,
    control: ControlClient,
}

impl Watcher {
    fn new(cluster: &LocalCluster) -> Self {
        let token = Some(cluster.token().to_owned());
        let control = ControlClient::new(&cluster.control_url(), token).expect("control");
        Self { runtime: tokio::runtime::Runtime::new().expect("runtime"), control }
    }

    /// Waits for a state of the editions. The control plane may be away meanwhile.
    fn wait(&self, what: &str, wanted: impl Fn(&[EditionInfo]) -> bool) -> Vec<EditionInfo> {
        let begin = Instant::now();
        loop {
            let found = self.runtime.block_on(self.control.models());
            if let Ok(list) = &found
                && wanted(&list.editions)
            {
                return list.editions.clone();
            }
            assert!(begin.elapsed() < LIMIT, "{what}: {found:?}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

fn is_in(editions: &[EditionInfo], model: &Model, state: EditionState) -> bool {
    let is = |edition: &&EditionInfo| edition.fingerprint.as_ref() == Some(&model.fingerprint);
    editions.iter().find(is).is_some_and(|edition| edition.state == state)
}

#[test]
fn clients_call_without_a_failure_while_the_model_is_updated() {
    let seed: u64 = rand::random();
    println!("seed {seed}");
    let (old, new) = (Model::make(seed), Model::make(seed ^ 1));
    assert_ne!(old.fingerprint, new.fingerprint);
    let state = tempfile::tempdir().expect("folder");
    let mut options = ClusterOptions::new(old.path()).expect("options");
    options.binary = env!("CARGO_BIN_EXE_switchyard").into();
    (options.num_servers, options.replicas, options.threads) = (2, 2, Some(1));
    options.data_dir = Some(state.path().to_owned());
    options.server_args = vec!["--exit-when-drained".to_owned()];
    let mut cluster = LocalCluster::start(options, &mut |_| {}).expect("cluster");
    let watcher = Watcher::new(&cluster);
    let (stop_old, stop_new) = (AtomicBool::new(false), AtomicBool::new(false));
    let (old_rounds, new_rounds) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let progress = |rounds: &AtomicUsize| {
        let begin = (Instant::now(), rounds.load(Ordering::Relaxed));
        while rounds.load(Ordering::Relaxed) < begin.1 + 3 {
            assert!(begin.0.elapsed() < LIMIT, "the client does not call");
            std::thread::sleep(Duration::from_millis(5));
        }
    };
    std::thread::scope(|scope| {
        let client = old.client(&cluster);
        scope.spawn(|| call_until(&old, client, &stop_old, &old_rounds));
        progress(&old_rounds);
        refused(&cluster, &["model", "switch"], "no next model");
        done(&cluster, &["model", "add", &new.fingerprint]);
        refused(&cluster, &["model", "add", &"0123456789abcdef".repeat(4)], "at most two models");
        // No server has the digits of a table as its fingerprint.
        let output = switchyard(&cluster, &["model", "add", &new.fingerprint[..12]]);
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{text}");
        assert!(text.contains("found 12 characters, expected 64"), "{text}");
        refused(&cluster, &["model", "switch"], "no server of the next model");

        // One server is new, and one restarts under its name with the new model.
        cluster.start_server_with(2, new.path()).expect("server");
        cluster.wait_serving(2).expect("serving");
        refused(&cluster, &["model", "switch"], "fewer than 2");
        done(&cluster, &["model", "switch", "--when-complete"]);
        cluster.kill_control().expect("kill");
        progress(&old_rounds);
        cluster.restart_control().expect("restart");
        let text = done(&cluster, &["model", "list"]);
        assert!(text.contains("becomes the current model"), "{text}");
        cluster.kill_server(1).expect("kill");
        cluster.start_server_with(1, new.path()).expect("server");
        cluster.wait_serving(1).expect("serving");
        watcher.wait("switch", |editions| is_in(editions, &new, EditionState::Current));
        refused(&cluster, &["model", "abort"], "the switch is done");

        // A client that starts gets the new model. The old one keeps its own, over a restart of the control plane.
        let client = new.client(&cluster);
        scope.spawn(|| call_until(&new, client, &stop_new, &new_rounds));
        progress(&new_rounds);
        cluster.kill_control().expect("kill");
        cluster.restart_control().expect("restart");
        watcher.wait("both clients", |editions| {
            editions.len() == 2 && editions.iter().all(|edition| edition.num_clients == 1)
        });
        progress(&old_rounds);
        progress(&new_rounds);
        let text = done(&cluster, &["model", "list"]);
        assert!(text.contains("retiring") && text.contains(&old.fingerprint[..12]), "{text}");

        // Without its client the old model goes, and its server ends by itself.
        stop_old.store(true, Ordering::Relaxed);
        let last = watcher.wait("end of the old model", |editions| editions.len() == 1);
        assert!(is_in(&last, &new, EditionState::Current) && last[0].is_complete(), "{last:?}");
        progress(&new_rounds);
        stop_new.store(true, Ordering::Relaxed);
    });
    println!("{old_rounds:?} rounds with the old model, {new_rounds:?} with the new one");
    let members = watcher.runtime.block_on(watcher.control.members()).expect("members");
    let names: Vec<_> = members.iter().map(|member| member.name.as_str()).collect();
    assert_eq!(names, ["server-1", "server-2"]);
}
