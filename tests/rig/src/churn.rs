//! Clients that connect and leave, and the resources that they leave behind.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use attention_client::{ClientModel, MoeClient};
use checkpoint::Checkpoint;
use control_api::ControlClient;
use p2p_core::PeerHello;
use p2p_core::bootstrap::{ConnectConfig, Connection, connect};
use protocol::{ClientHello, WireDtype};
use rand::SeedableRng;
use rand::rngs::StdRng;
use serde::Serialize;
use switchyard_cli::cluster::{ClusterOptions, LocalCluster};
use test_support::procfs::{self, Usage};

use crate::inputs::{InputPool, TOLERANCE, difference};

/// Options of a run.
#[derive(Debug, Clone)]
pub struct ChurnOptions {
    /// The binary of control plane and server.
    pub binary: PathBuf,
    /// Checkpoint folder.
    pub model: PathBuf,
    /// Clients that connect and leave.
    pub connections: usize,
    /// Connections at the same time.
    pub at_once: usize,
    /// Number of connections for each whole client, which computes a layer and leaves.
    pub client_every: usize,
    /// Seed of the layers.
    pub seed: u64,
}

impl ChurnOptions {
    /// `connections` clients, 16 at a time, one of 200 a whole client.
    #[must_use]
    pub const fn new(binary: PathBuf, model: PathBuf, connections: usize, seed: u64) -> Self {
        Self { binary, model, connections, at_once: 16, client_every: 200, seed }
    }
}

/// Usage of one process.
#[derive(Debug, Clone, Serialize)]
pub struct ProcessReport {
    /// Name of the process.
    pub name: String,
    /// After the first connections, when pools and allocators have grown.
    pub before: Usage,
    /// After the last.
    pub after: Usage,
}

/// Result of a run.
#[derive(Debug, Clone, Serialize)]
pub struct ChurnReport {
    /// Whether every process has returned its resources.
    pub sound: bool,
    /// Clients that connected and left.
    pub connections: usize,
    /// Layers computed and checked on the way.
    pub layers: usize,
    /// Length of the run, seconds.
    pub wall_s: f64,
    /// Server, control plane and this process.
    pub processes: Vec<ProcessReport>,
}

impl ChurnReport {
    /// The report as text.
    #[must_use]
    pub fn as_text(&self) -> String {
        let mut text = format!(
            "{} connections, {} layers, {:.1} s\n",
            self.connections, self.layers, self.wall_s
        );
        for ProcessReport { name, before, after } in &self.processes {
            text += &format!(
                "{name:<14} descriptors {} -> {}, resident {:.1} -> {:.1} MiB\n",
                before.descriptors,
                after.descriptors,
                before.rss_bytes as f64 / f64::from(1 << 20),
                after.rss_bytes as f64 / f64::from(1 << 20)
            );
        }
        text
    }
}

/// Lets clients connect and leave, half of them without closing the connection properly.
///
/// # Errors
/// When the cluster does not come up, a connection fails, or an output is wrong.
pub fn run(options: &ChurnOptions) -> Result<ChurnReport> {
    let _ = p2p_core::bootstrap::raise_descriptor_limit();
    let checkpoint = Arc::new(Checkpoint::open(&options.model)?);
    let mut cluster_options = ClusterOptions::new(&options.model)?;
    cluster_options.binary.clone_from(&options.binary);
    cluster_options.num_servers = 1;
    cluster_options.replicas = 1;
    cluster_options.threads = Some(1);
    // The raw clients have no tickets.
    cluster_options.server_args = vec!["--tickets".to_owned(), "off".to_owned()];
    let cluster = LocalCluster::start(cluster_options, &mut |_| {})?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .context("cannot start a runtime")?;
    let control = ControlClient::new(&cluster.control_url(), Some(cluster.token().to_owned()))?;
    let members = runtime.block_on(control.members())?;
    let addr = members.first().context("the cluster has no server")?.data_addr.clone();
    let mut crowd = Crowd {
        // Made beforehand: the oracle's memory would look like a leak.
        pool: InputPool::new(&checkpoint, options.seed, 8, 32)?,
        token: cluster.token().to_owned(),
        control_url: cluster.control_url(),
        addr,
        at_once: options.at_once.max(1),
        client_every: options.client_every.max(1),
        rng: StdRng::seed_from_u64(options.seed),
        num_layers: 0,
    };
    let processes = [
        ("server", cluster.server_pid(0).context("the server is gone")?),
        ("control plane", procfs::control_plane()?),
        ("clients", std::process::id()),
    ];
    let begin = Instant::now();
    let warm_up = WARM_UP.min(options.connections / 4).max(1);
    crowd.come_and_go(&runtime, warm_up)?;
    crowd.compute_once()?;
    let before = settled(&processes, None)?;
    crowd.come_and_go(&runtime, options.connections.saturating_sub(warm_up))?;
    let after = settled(&processes, Some(&before))?;
    let processes: Vec<ProcessReport> = processes
        .iter()
        .zip(before.iter().zip(&after))
        .map(|((name, _), (&before, &after))| ProcessReport {
            name: (*name).to_owned(),
            before,
            after,
        })
        .collect();
    Ok(ChurnReport {
        sound: processes.iter().all(|p| is_back(&p.before, &p.after)),
        connections: options.connections,
        layers: crowd.num_layers,
        wall_s: begin.elapsed().as_secs_f64(),
        processes,
    })
}

/// The hello and configuration of client `client_id` for a server of `model` with the secret `token`.
#[must_use]
pub fn handshake(model: &ClientModel, token: &str, client_id: u64) -> (PeerHello, ConnectConfig) {
    let hello = ClientHello {
        model: model.shape,
        client_id,
        dtype: WireDtype::F32,
        response_dtype: WireDtype::F32,
        name: format!("client-{client_id}"),
    };
    let hello = PeerHello { peer_id: client_id, generation: 1, payload: hello.encode() };
    let config = ConnectConfig {
        secret: Some(token.to_owned()),
        timeout: PATIENCE,
        ..ConnectConfig::default()
    };
    (hello, config)
}

struct Crowd {
    pool: InputPool,
    token: String,
    control_url: String,
    addr: String,
    at_once: usize,
    client_every: usize,
    rng: StdRng,
    num_layers: usize,
}

impl Crowd {
    fn come_and_go(&mut self, runtime: &tokio::runtime::Runtime, num: usize) -> Result<()> {
        let mut done = 0;
        while done < num {
            let at_once = self.at_once.min(num - done);
            let joined = runtime.block_on(async {
                let mut connecting = tokio::task::JoinSet::new();
                for idx in 0..at_once {
                    let (hello, config) =
                        handshake(&self.pool.model, &self.token, (done + idx) as u64 + 1);
                    let addr = self.addr.clone();
                    connecting.spawn(async move { connect(addr.as_str(), hello, config).await });
                }
                connecting.join_all().await
            });
            for (idx, connection) in joined.into_iter().enumerate() {
                let connection: Connection = connection.context("a client cannot connect")?;
                if idx % 2 == 0 {
                    connection.liveness.close();
                }
                drop(connection);
            }
            let whole_before = done / self.client_every;
            done += at_once;
            if done / self.client_every > whole_before {
                self.compute_once()?;
            }
        }
        Ok(())
    }

    /// Runs a whole client: it follows the placement, computes a layer, and leaves.
    fn compute_once(&mut self) -> Result<()> {
        let client = MoeClient::builder(self.pool.model.clone())
            .control_plane(self.control_url.clone(), Some(self.token.clone()))
            .secret(Some(self.token.clone()))
            .replica_wait(PATIENCE)
            .build()?;
        client.wait_ready(PATIENCE)?;
        let input = self.pool.pick(&mut self.rng);
        let mut out = vec![f32::NAN; input.x.len()];
        client.forward(input.layer, &input.x, &input.idx, &input.weights, &mut out)?;
        let worst = difference(&out, &input.expected);
        ensure!(worst <= TOLERANCE, "a layer is off by {worst:e}, expected at most {TOLERANCE:e}");
        self.num_layers += 1;
        Ok(())
    }
}

/// Usage once it no longer shrinks, or has returned to `target`.
fn settled(processes: &[(&str, u32)], target: Option<&[Usage]>) -> Result<Vec<Usage>> {
    let begin = Instant::now();
    let mut last: Vec<Usage> = Vec::new();
    loop {
        let now: Vec<Usage> =
            processes.iter().map(|(_, pid)| procfs::usage(*pid)).collect::<Result<_>>()?;
        let settled = match target {
            Some(target) => target.iter().zip(&now).all(|(before, after)| is_back(before, after)),
            None => now == last && begin.elapsed() > Duration::from_secs(1),
        };
        if settled || begin.elapsed() > SETTLE_PATIENCE {
            return Ok(now);
        }
        last = now;
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Whether descriptors, slots and memory are as before. Memory that an allocator keeps is no leak, a client's slot is.
fn is_back(before: &Usage, after: &Usage) -> bool {
    after.descriptors <= before.descriptors + DESCRIPTOR_SLACK
        && after.slots <= before.slots
        && after.rss_bytes <= before.rss_bytes + RSS_SLACK_BYTES
}

const WARM_UP: usize = 500;
const PATIENCE: Duration = Duration::from_secs(20);
const SETTLE_PATIENCE: Duration = Duration::from_secs(30);
/// Connections that a pool keeps. One of each client would be hundreds.
const DESCRIPTOR_SLACK: usize = 8;
const RSS_SLACK_BYTES: u64 = 32 << 20;
