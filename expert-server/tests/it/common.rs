//! Helpers for tests with expert servers in this process. [`start_server`] starts a whole server over the small
//! checkpoint of the repository.

mod client;
mod recorded;
mod reference;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use p2p_core::backend::local;
use p2p_core::backend::mapped::MappedEndpoint;
use p2p_core::{Channel, SlotConfig, SpinPolicy};
use protocol::{ModelShape, WireDtype};
use rand::SeedableRng;
use rand::rngs::StdRng;
use switchyard_expert_server::compute::{ExpertStore, Residency};
use switchyard_expert_server::cpu::{CpuConfig, CpuPlane};
use switchyard_expert_server::{
    ClosedLink, ExpertSelection, ExpertServer, Limits, LinkId, Placement, RunningServer,
    ServerConfig, ServerMetrics, ThreadEnd,
};
use tokio::sync::oneshot;

pub use self::client::TestClient;
pub use self::recorded::{Recorded, difference, name_of, recorded_folders};
pub use self::reference::{Reference, Request, dot, shape_of};

/// Longest wait in a test. It is generous, because it ends only failures.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// The trained checkpoint of the repository, or the one at `SWITCHYARD_TEST_MODEL`.
pub fn tiny_moe() -> PathBuf {
    let elsewhere = std::env::var_os("SWITCHYARD_TEST_MODEL").map(PathBuf::from);
    elsewhere.unwrap_or_else(|| data("tiny-moe"))
}

/// A folder of the repository's `data`. `SWITCHYARD_TEST_DATA` is its path where the repository is not.
pub fn data(name: &str) -> PathBuf {
    let elsewhere = std::env::var_os("SWITCHYARD_TEST_DATA").map(PathBuf::from);
    elsewhere.unwrap_or_else(|| concat!(env!("CARGO_MANIFEST_DIR"), "/../data").into()).join(name)
}

/// A folder of the reference data that a quantisation library wrote.
pub fn reference_format(name: &str) -> PathBuf {
    data("reference-formats").join(name)
}

/// A random generator. Prints its seed; `SWITCHYARD_SEED` sets it.
pub fn seeded() -> StdRng {
    let given = std::env::var("SWITCHYARD_SEED").ok().and_then(|seed| seed.parse().ok());
    let seed = given.unwrap_or_else(rand::random::<u64>);
    println!("SWITCHYARD_SEED={seed}");
    StdRng::seed_from_u64(seed)
}

/// A whole server on a free port of the loopback interface, holding `selection` of the tiny
/// checkpoint, without a control plane unless `tweak` names one.
pub async fn start_server(
    name: &str,
    selection: ExpertSelection,
    tweak: impl FnOnce(&mut ServerConfig),
) -> RunningServer {
    let mut config = ServerConfig::new(tiny_moe(), name, Placement::Static(selection));
    config.num_threads = 1;
    tweak(&mut config);
    ExpertServer::start(config, |_| {}).await.expect("the server starts")
}

/// A data thread over the tiny checkpoint, for links within this process.
pub struct Rig {
    pub data: CpuPlane<MappedEndpoint>,
    pub end: ThreadEnd,
    pub metrics: ServerMetrics,
    pub shape: ModelShape,
    pub slot: SlotConfig,
}

impl Rig {
    /// Loads the experts for which `is_held` returns true.
    pub fn start(
        reference: &Reference,
        slot: SlotConfig,
        limits: Limits,
        is_held: impl Fn(u32, u32) -> bool,
    ) -> Self {
        let layers = reference.checkpoint.config().moe_layers().into_iter();
        let experts = layers.map(|layer| {
            let experts = (0..reference.shape.num_experts).filter(|&expert| is_held(layer, expert));
            (layer, experts.collect())
        });
        let store = ExpertStore::load(
            Arc::clone(&reference.checkpoint),
            &experts.collect(),
            Residency::Mapped,
            2,
            &mut |_| {},
        )
        .expect("the experts load");
        let config = CpuConfig {
            num_threads: 2,
            cpus: Vec::new(),
            limits,
            spin: SpinPolicy { spin: Duration::from_micros(20) },
            metrics_by_layer: true,
            recorder: None,
        };
        let metrics = ServerMetrics::new(prometheus::Registry::new()).expect("metrics register");
        let (data, end) = CpuPlane::start(Arc::new(store), config, metrics.clone())
            .expect("the data thread starts");
        Self { data, end, metrics, shape: reference.shape, slot }
    }

    /// A client whose channel is not attached to the data thread, and the server's side of the channel.
    pub fn unattached(
        &self,
        client_id: u64,
        dtype: WireDtype,
        response_dtype: WireDtype,
    ) -> (TestClient<MappedEndpoint>, Channel<MappedEndpoint>) {
        let (near, far) = local::pair(self.slot).expect("a pair of channels");
        (TestClient::new(near, self.shape, client_id, 1, dtype, response_dtype), far)
    }

    /// A connected client, with the end of its link.
    pub fn client(
        &self,
        client_id: u64,
        dtype: WireDtype,
        response_dtype: WireDtype,
    ) -> (TestClient<MappedEndpoint>, LinkId, oneshot::Receiver<ClosedLink<Channel<MappedEndpoint>>>)
    {
        let (client, channel) = self.unattached(client_id, dtype, response_dtype);
        let (id, end) = self.data.attach(channel, client.expected_by_server());
        (client, id, end)
    }

    /// The value of a metric by its name with labels, as `/metrics` prints it.
    pub fn metric(&self, name: &str) -> f64 {
        metric(&self.metrics, name)
    }

    /// Stops the thread and asserts that it ended well.
    pub fn stop(self) {
        self.data.stop();
        let mut end = self.end;
        let mut ended = None;
        eventually("the thread reports its end", || {
            ended = end.try_recv().ok();
            ended.is_some()
        });
        ended.expect("an end").expect("a stop without an error");
    }
}

/// The value of a metric by its name with labels, as `/metrics` prints it.
pub fn metric(metrics: &ServerMetrics, name: &str) -> f64 {
    let text = metrics.render().expect("metrics render");
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    line.unwrap_or_else(|| panic!("no metric {name} in\n{text}")).parse().expect("a number")
}

/// Polls `condition` until it holds.
pub fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !condition() {
        assert!(Instant::now() < deadline, "not in time: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Waits for the end of a link.
pub fn closed<S>(mut end: oneshot::Receiver<ClosedLink<S>>) -> ClosedLink<S> {
    let mut ended = None;
    eventually("the link's end", || {
        ended = end.try_recv().ok();
        ended.is_some()
    });
    ended.expect("the link's end")
}
