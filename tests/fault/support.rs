//! Clusters, clients and the rig, as these tests use them.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use attention_client::{MoeClient, MoeClientBuilder};
use checkpoint::Checkpoint;
use control_api::{ControlClient, MemberInfo};
use rand::SeedableRng;
use rand::rngs::StdRng;
use serde_json::Value;
use switchyard_cli::cluster::{ClusterOptions, LocalCluster};
use switchyard_tests::inputs::{InputPool, TOLERANCE, difference};
use switchyard_tests::worker::{metric, metric_by_label};
use test_support::model::tiny_moe;
use test_support::printed_seed;

/// Longest wait for anything. It is generous, because it only ends a failing test.
pub const PATIENCE: Duration = Duration::from_secs(90);

/// The rig, which is also the servers.
pub fn binary() -> PathBuf {
    PathBuf::from(env!("CARGO_BIN_EXE_fault-rig"))
}

/// Result of a run of the rig.
pub struct RigRun {
    /// Exit code of a process that ended by itself.
    pub code: Option<i32>,
    pub report: Value,
}

/// Runs `fault-rig` with these arguments, separated by spaces.
pub fn rig(args: &str) -> RigRun {
    let output = Command::new(binary())
        .args(["--json", "--exit-with-parent", "--seed", &printed_seed().to_string()])
        .args(args.split_whitespace())
        .stdin(Stdio::null())
        .output()
        .expect("the rig starts");
    let stdout = String::from_utf8_lossy(&output.stdout);
    println!("{args}: {}\n{stdout}", output.status);
    println!("{}", String::from_utf8_lossy(&output.stderr));
    let report = serde_json::from_str(&stdout).unwrap_or(Value::Null);
    RigRun { code: output.status.code(), report }
}

/// A cluster on the small checkpoint, with a pool of requests and a checked client.
pub struct Setup<C = LocalCluster> {
    pub cluster: C,
    pub pool: InputPool,
    pub client: MoeClient,
    pub checkpoint: Arc<Checkpoint>,
    pub rng: StdRng,
    pub seed: u64,
    outs: Vec<f32>,
}

impl Setup {
    /// `num_servers` servers, each expert on `replicas` of them.
    ///
    /// With `SWITCHYARD_LOG` set, the client's log goes to standard error.
    pub fn start(
        num_servers: usize,
        replicas: usize,
        max_tokens: usize,
        tweak: impl FnOnce(&mut ClusterOptions),
    ) -> Self {
        let seed = printed_seed();
        if let Ok(filter) = std::env::var("SWITCHYARD_LOG") {
            // A second cluster of the same test finds the log set up.
            let _ = tracing_subscriber::fmt().with_env_filter(filter).try_init();
        }
        let mut options = ClusterOptions::new(tiny_moe()).expect("options");
        options.binary = binary();
        options.num_servers = num_servers;
        options.replicas = replicas;
        options.threads = Some(1);
        tweak(&mut options);
        let cluster = LocalCluster::start(options, &mut |_| {}).expect("the cluster comes up");
        let reach = (cluster.control_url(), cluster.token().to_owned());
        Self::of(cluster, &reach, seed, max_tokens, |builder| builder)
    }

    /// Members as the control plane shows them.
    pub fn members(&self, runtime: &tokio::runtime::Runtime) -> Vec<MemberInfo> {
        let token = Some(self.cluster.token().to_owned());
        let control = ControlClient::new(&self.cluster.control_url(), token).expect("a client");
        runtime.block_on(control.members()).expect("members")
    }
}

impl<C> Setup<C> {
    /// A client of a cluster that is up, whose control plane has this URL and token.
    pub fn of(
        cluster: C,
        reach: &(String, String),
        seed: u64,
        max_tokens: usize,
        tweak: impl FnOnce(MoeClientBuilder) -> MoeClientBuilder,
    ) -> Self {
        let checkpoint = Arc::new(Checkpoint::open(tiny_moe()).expect("the checkpoint opens"));
        let pool = InputPool::new(&checkpoint, seed, 12, max_tokens).expect("a pool");
        let client = tweak(client_at(reach, &pool)).build().expect("a client");
        client.wait_ready(PATIENCE).expect("every expert has a replica");
        let rng = StdRng::seed_from_u64(seed);
        Self { cluster, pool, client, checkpoint, rng, seed, outs: Vec::new() }
    }

    /// Computes layers until `done` returns true, and checks every one. Returns their number.
    pub fn compute_until(
        &mut self,
        what: &str,
        mut done: impl FnMut(&Self, usize) -> bool,
    ) -> usize {
        let begin = Instant::now();
        let mut num_layers = 0;
        while !done(self, num_layers) {
            let input = self.pool.pick(&mut self.rng);
            self.outs.clear();
            self.outs.resize(input.x.len(), f32::NAN);
            self.client
                .forward(input.layer, &input.x, &input.idx, &input.weights, &mut self.outs)
                .expect("a layer");
            let worst = difference(&self.outs, &input.expected);
            assert!(worst <= TOLERANCE, "layer {num_layers} is off by {worst:e}");
            num_layers += 1;
            assert!(begin.elapsed() < PATIENCE, "{what}: not within {PATIENCE:?}");
        }
        num_layers
    }

    /// Computes and checks `num` layers.
    pub fn compute(&mut self, num: usize) {
        self.compute_until("layers", |_, done| done == num);
    }

    /// Failovers that no silence explains: a busy machine can make any server look frozen.
    pub fn failovers(&self) -> BTreeMap<String, f64> {
        let mut all = metric_by_label(&self.client, "switchyard_client_failovers_total");
        all.retain(|reason, count| reason != "silent" && *count > 0.0);
        all
    }

    /// Nothing was lost, doubled, taken from a retired slot, or malformed.
    pub fn assert_accounts(&self) {
        for what in ["lost_requests", "duplicated_requests", "stale_responses", "invalid_responses"]
        {
            let name = format!("switchyard_client_{what}_total");
            assert_eq!(metric(&self.client, &name), 0.0, "{name}");
        }
    }
}

/// A client of `cluster`, patient with everything but silence.
pub fn client(cluster: &LocalCluster, pool: &InputPool) -> MoeClientBuilder {
    client_at(&(cluster.control_url(), cluster.token().to_owned()), pool)
}

/// The same by URL and token.
fn client_at((url, token): &(String, String), pool: &InputPool) -> MoeClientBuilder {
    MoeClient::builder(pool.model.clone())
        .control_plane(url, Some(token.clone()))
        .secret(Some(token.clone()))
        .replica_wait(Duration::from_secs(20))
}

/// The value of `read` once it has stayed the same for a second. A count that is compared later must not include a
/// resource that is about to be released.
pub fn steady<T: PartialEq + std::fmt::Debug>(what: &str, read: impl Fn() -> T) -> T {
    let begin = Instant::now();
    let (mut value, mut since) = (read(), Instant::now());
    while since.elapsed() < Duration::from_secs(1) {
        assert!(begin.elapsed() < PATIENCE, "{what} do not settle, last {value:?}");
        std::thread::sleep(Duration::from_millis(20));
        let now = read();
        if now != value {
            (value, since) = (now, Instant::now());
        }
    }
    value
}

/// A runtime for connections of the tests' own.
pub fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .expect("a runtime")
}

/// The answer of a plain HTTP server to one request.
pub async fn get(addr: &str, path: &str) -> String {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let fetch = async {
        let mut stream = tokio::net::TcpStream::connect(addr).await?;
        let request = format!("GET {path} HTTP/1.1\r\nHost: {addr}\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await?;
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).await?;
        Ok::<_, std::io::Error>(String::from_utf8_lossy(&answer).into_owned())
    };
    tokio::time::timeout(PATIENCE, fetch).await.expect("an answer in time").expect("an answer")
}
