//! Simulated expert servers.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use control_api::{
    Assignment, ControlClient, ExpertLoad, LeaseRequest, LoadReport, MemberId, ModelDescriptor,
    PlacementTable, PlacementWatch, ReadyRequest, RegisterRequest, TransportLinks,
};
use rand::RngExt as _;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::{LEASE_MS, PATIENCE};

/// Accepts connections and closes them. The control plane connects to every serving member once.
pub(crate) async fn listen_for_probes() -> Result<String> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let addr = listener.local_addr()?.to_string();
    tokio::spawn(async move { while listener.accept().await.is_ok() {} });
    Ok(addr)
}

/// All simulated servers. They are killed when it is dropped.
pub(crate) struct Servers {
    servers: Arc<Vec<Server>>,
    _tasks: JoinSet<()>,
}

impl Servers {
    pub(crate) fn start(
        num_servers: u64,
        data_addr: &str,
        client: &ControlClient,
        observer: &PlacementWatch,
    ) -> Result<Self> {
        let new = |nth| Server::new(nth, data_addr, observer.tables());
        let servers: Arc<Vec<Server>> = Arc::new((0..num_servers).map(new).collect());
        let mut tasks = JoinSet::new();
        for idx in 0..servers.len() {
            let (servers, client) = (Arc::clone(&servers), client.isolated()?);
            tasks.spawn(async move { servers[idx].run(&client).await });
        }
        Ok(Self { servers, _tasks: tasks })
    }

    pub(crate) fn id(&self, nth: usize) -> Option<MemberId> {
        self.servers[nth].id()
    }

    /// Waits until every server has registered.
    pub(crate) async fn registered(&self) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        while self.servers.iter().any(|server| server.id().is_none()) {
            if Instant::now() > deadline {
                bail!("not all servers have registered after {PATIENCE:?}");
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        Ok(())
    }
}

/// A simulated expert server.
struct Server {
    request: RegisterRequest,
    id: Mutex<Option<MemberId>>,
    is_first: AtomicBool,
    /// The placement, for the number of replicas that share an expert's load.
    tables: watch::Receiver<Arc<PlacementTable>>,
}

impl Server {
    fn new(nth: u64, data_addr: &str, tables: watch::Receiver<Arc<PlacementTable>>) -> Self {
        let model = ModelDescriptor {
            fingerprint: "0123456789abcdef".to_owned(),
            architecture: "deepseek_v3".to_owned(),
            hidden: 7168,
            moe_layers: (0..LAYERS).collect(),
            num_experts: EXPERTS,
            top_k: 8,
        };
        let request = RegisterRequest::new(format!("server-{nth}"), data_addr, model);
        let id = Mutex::default();
        Self { request, id, is_first: AtomicBool::new(true), tables }
    }

    fn id(&self) -> Option<MemberId> {
        self.id.lock().ok()?.clone()
    }

    /// Registers, and renews three times per lease, until the task is aborted. Registers again after an error.
    async fn run(&self, client: &ControlClient) {
        let mut holds = Assignment::default();
        loop {
            if self.is_first.swap(false, Ordering::Relaxed) {
                let spread = rand::rng().random_range(0..LEASE_MS / 3);
                tokio::time::sleep(Duration::from_millis(spread)).await;
            }
            let request = RegisterRequest { holds: holds.clone(), ..self.request.clone() };
            if let Ok(answer) = client.register(&request).await {
                if let Ok(mut id) = self.id.lock() {
                    *id = Some(answer.member_id.clone());
                }
                holds = answer.assignment;
                let _ = self
                    .stay(client, &answer.member_id, answer.assignment_version, &mut holds)
                    .await;
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    }

    async fn stay(
        &self,
        client: &ControlClient,
        id: &MemberId,
        mut version: u64,
        holds: &mut Assignment,
    ) -> Result<(), control_api::ControlError> {
        let incarnation = self.request.incarnation;
        client.ready(id, &ReadyRequest { incarnation, holds: holds.clone() }).await?;
        loop {
            tokio::time::sleep(Duration::from_millis(LEASE_MS / 3)).await;
            let request = LeaseRequest {
                incarnation,
                assignment_version: version,
                load: Some(self.load(holds)),
            };
            let answer = client.renew(id, &request).await?;
            if let Some(assignment) = answer.assignment {
                (*holds, version) = (assignment, answer.assignment_version);
                client.ready(id, &ReadyRequest { incarnation, holds: holds.clone() }).await?;
            }
        }
    }

    /// A report in which every expert has about the same load, divided by its replicas, so that the placement stays.
    fn load(&self, holds: &Assignment) -> LoadReport {
        let table = Arc::clone(&self.tables.borrow());
        let pairs = holds
            .layers
            .iter()
            .flat_map(|entry| entry.experts.iter().map(|&expert| (entry.layer, expert)));
        let load = |(layer, expert)| {
            let num_replicas = table.replicas(layer, expert).len().max(1) as u64;
            ExpertLoad { layer, expert, num_tokens: TOKENS / num_replicas }
        };
        let experts: Vec<ExpertLoad> = pairs.take(REPORTED).map(load).collect();
        let num_tokens = experts.iter().map(|load| load.num_tokens).sum();
        LoadReport {
            window_ms: LEASE_MS / 3,
            busy_ms: LEASE_MS / 9,
            num_tokens,
            experts,
            links: vec![TransportLinks {
                transport: "verbs".to_owned(),
                num_links: 1000,
                left_out: Vec::new(),
            }],
            ..LoadReport::default()
        }
    }
}

const LAYERS: u32 = 61;
const EXPERTS: u32 = 256;
/// Experts in a load report.
const REPORTED: usize = 64;
/// Tokens of an expert in the time of a report, over all replicas.
const TOKENS: u64 = 6000;
