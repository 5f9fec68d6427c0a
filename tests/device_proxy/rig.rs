//! Servers on GPUs in processes of their own, and clients with tensors in GPU memory.

use std::sync::Arc;
use std::time::{Duration, Instant};

use attention_client::device::{DeviceHandle, DevicePending};
use attention_client::{
    ClientModel, DeviceClient, DeviceError, DeviceInput, DeviceOptions, DeviceTensor, LayerTiming,
    TensorType,
};
use checkpoint::Checkpoint;
use control_api::PlacementTable;
use expert_server::device::DeviceOptions as ServerDevice;
use expert_server::{ExpertSelection, ExpertServer, Placement, ServerConfig};
use half::bf16;
use kernels::gpu::{DeviceName, Gpu, GpuBuffer, Stream};
use p2p_core::network::Network;
use p2p_core::{SlotConfig, TransportKind, Transports};
use protocol::WireDtype;
use rand::RngExt;
use rand::rngs::StdRng;
use rand::seq::index::sample;
use rustix::process::Signal;
use switchyard_tests::inputs;
use switchyard_tests::replicas::table;
use test_support::model::tiny_moe;
use tokio::sync::watch;

use crate::way::{self, Carrier};

// By their whole paths, since two tests have this module.
#[path = "rig/breaking.rs"]
pub mod breaking;
#[path = "rig/layers.rs"]
pub mod layers;
#[path = "rig/withholding.rs"]
pub mod withholding;

/// Room for some dozens of tokens of the tiny model.
const SLOT: SlotConfig = SlotConfig { slot_bytes: 64 << 10, num_frames: 2 };
pub const PATIENCE: Duration = Duration::from_secs(60);
const POISON: u16 = 0xffff;

/// How a client reaches servers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// The servers' slots are mapped.
    Memory,
    /// Over the network under test only.
    Network,
}

/// Where servers run, and where clients do. `None` skips a test loudly.
pub fn devices() -> Option<(DeviceName, DeviceName)> {
    let name = std::env::var("SWITCHYARD_TEST_DEVICE").unwrap_or_else(|_| "emulated".to_owned());
    if name == "emulated" {
        return Some((DeviceName::Emulated(0), DeviceName::Emulated(1)));
    }
    match Gpu::count() {
        Ok(count) if count > 0 => Some((DeviceName::Cuda(0), DeviceName::Cuda(count - 1))),
        other => {
            test_support::skip("gpu", &format!("{other:?}"));
            None
        }
    }
}

fn soon() -> Instant {
    Instant::now() + PATIENCE
}

/// Tokens, chosen experts and weights.
pub struct Request {
    layer: u32,
    num_tokens: usize,
    x: Vec<u16>,
    idx: Vec<i32>,
    weights: Vec<f32>,
}

impl Request {
    pub fn random(rng: &mut StdRng, model: &ClientModel, num_tokens: usize) -> Self {
        let (hidden, top_k) = (model.shape.hidden as usize, model.shape.top_k as usize);
        let num_experts = model.shape.num_experts as usize;
        let value = |rng: &mut StdRng| bf16::from_f32(rng.random_range(-2.0..2.0)).to_bits();
        let mut idx = Vec::new();
        for _ in 0..num_tokens {
            let chosen = sample(rng, num_experts, top_k);
            idx.extend(chosen.iter().map(|expert| match rng.random_range(0..12) {
                0 => -1,
                _ => expert as i32,
            }));
        }
        Self {
            layer: model.moe_layers[rng.random_range(0..model.moe_layers.len())],
            num_tokens,
            x: (0..num_tokens * hidden).map(|_| value(rng)).collect(),
            weights: (0..num_tokens * top_k).map(|_| rng.random_range(-0.5..1.5)).collect(),
            idx,
        }
    }

    pub fn num_pairs(&self) -> u64 {
        self.idx.iter().filter(|&&expert| expert >= 0).count() as u64
    }
}

/// Largest difference of two outputs, relative to the largest value of its token.
pub fn difference(found: &[u16], expected: &[u16], request: &Request) -> f32 {
    assert_eq!(found.len(), expected.len());
    let hidden = found.len() / request.num_tokens;
    let values = |bits: &[u16]| -> Vec<f32> {
        bits.iter().map(|bits| bf16::from_bits(*bits).to_f32()).collect()
    };
    let rows = found.chunks_exact(hidden).zip(expected.chunks_exact(hidden));
    rows.map(|(f, e)| inputs::difference(&values(f), &values(e))).fold(0.0, f32::max)
}

/// Servers in processes of their own, and where they are.
pub struct Servers {
    servers: Vec<Option<child::Server>>,
    pub model: ClientModel,
    replicas: Vec<Vec<u32>>,
    dtype: WireDtype,
    /// Beside memory.
    way: Way,
    server_device: DeviceName,
    client_device: DeviceName,
    tables: watch::Sender<Arc<PlacementTable>>,
    epoch: u64,
}

impl Servers {
    /// Servers that hold expert `e` from `e % num_servers` on, as many times as `num_replicas` says, and
    /// that can be reached both ways.
    pub fn start(num_servers: usize, num_replicas: usize, dtype: WireDtype) -> Option<Self> {
        Self::reached(Way::Network, num_servers, num_replicas, dtype)
    }

    /// As [`start`](Self::start); with [`Way::Memory`] they can be reached within the host only.
    pub fn reached(
        way: Way,
        num_servers: usize,
        num_replicas: usize,
        dtype: WireDtype,
    ) -> Option<Self> {
        let (server_device, client_device) = devices()?;
        way::network()?;
        let checkpoint = Checkpoint::open(tiny_moe()).expect("checkpoint");
        let model = ClientModel::of(&checkpoint);
        let replicas: Vec<Vec<u32>> = (0..model.shape.num_experts as usize)
            .map(|e| (0..num_replicas).map(|r| ((e + r) % num_servers) as u32).collect())
            .collect();
        let (tables, _) = watch::channel(Arc::new(table(&model, Vec::new(), &[])));
        let servers = Vec::new();
        let mut started = Self {
            servers,
            model,
            replicas,
            dtype,
            way,
            server_device,
            client_device,
            tables,
            epoch: 0,
        };
        let held = (0..num_servers).map(|server| Some(started.start_one(server)));
        started.servers = held.collect();
        started.announce();
        Some(started)
    }

    fn start_one(&self, server: usize) -> child::Server {
        let held = self.replicas.iter().enumerate();
        let held = held.filter(|(_, replicas)| replicas.contains(&(server as u32)));
        let held: Vec<u32> = held.map(|(expert, _)| expert as u32).collect();
        child::Server::start(self.server_device, self.dtype, &held, self.way)
    }

    fn announce(&mut self) {
        self.epoch += 1;
        let addrs = self.servers.iter().flatten().map(|server| server.addr.clone()).collect();
        let mut table = table(&self.model, addrs, &self.replicas);
        table.epoch = self.epoch;
        self.tables.send_replace(Arc::new(table));
    }

    /// Kills a server and starts another in its place.
    pub fn restart(&mut self, server: usize) {
        self.servers[server] = None;
        self.servers[server] = Some(self.start_one(server));
        self.announce();
    }

    pub fn signal(&mut self, server: usize, signal: Signal) {
        self.servers[server].as_ref().expect("a server").signal(signal);
    }

    /// Gives an order to the network under test in the server's process. Returns its answer.
    pub fn order(&mut self, server: usize, order: &str) -> String {
        self.servers[server].as_mut().expect("a server").order(order)
    }

    /// A client that reaches all of them one way.
    pub fn caller(&self, way: Way) -> Caller {
        self.try_caller(way).expect("servers")
    }

    /// As [`caller`](Self::caller), or why they cannot be reached.
    pub fn try_caller(&self, way: Way) -> Result<Caller, DeviceError> {
        match way {
            Way::Memory => self.connect(vec![TransportKind::Shm].into(), None),
            Way::Network => self.try_caller_over(way::network().expect("it was here before")),
        }
    }

    /// A client that reaches all of them over this network.
    pub fn try_caller_over(&self, network: Arc<dyn Network>) -> Result<Caller, DeviceError> {
        let (transports, carrier) = way::reach(network);
        self.connect(transports, Some(carrier))
    }

    /// A client over the network under test that gives servers up which say nothing for so long.
    pub fn caller_within(&self, deadline: Duration) -> Caller {
        let (transports, carrier) = way::reach(way::network().expect("a network"));
        self.connect_within(transports, Some(carrier), deadline).expect("servers")
    }

    fn connect(
        &self,
        transports: Transports,
        carrier: Option<Carrier>,
    ) -> Result<Caller, DeviceError> {
        // A loaded machine must not look like a dead server: only the end of a connection does.
        self.connect_within(transports, carrier, Duration::from_secs(600))
    }

    fn connect_within(
        &self,
        transports: Transports,
        carrier: Option<Carrier>,
        deadline: Duration,
    ) -> Result<Caller, DeviceError> {
        let gpu = Gpu::open_named(self.client_device).expect("the clients' GPU");
        let mut options = DeviceOptions::default();
        options.dtype = self.dtype;
        let mut client = DeviceClient::builder(self.model.clone())
            .placement_watch(self.tables.subscribe())
            .slot(SLOT)
            .transports(transports)
            .deadline(deadline)
            .connect_timeout(PATIENCE)
            .work_limit(Duration::from_secs(600))
            .replica_wait(PATIENCE)
            .build(gpu.clone(), options)
            .expect("client");
        client.wait_ready(PATIENCE)?;
        Ok(Caller::new(client, gpu, carrier))
    }
}

/// A client with its tensors.
#[derive(Debug)]
pub struct Caller {
    client: DeviceClient,
    gpu: Gpu,
    stream: Stream,
    carrier: Option<Carrier>,
    x: GpuBuffer,
    idx: GpuBuffer,
    weights: GpuBuffer,
    num_tokens: GpuBuffer,
    out: GpuBuffer,
    capacity: usize,
    hidden: usize,
    top_k: usize,
}

impl Caller {
    fn new(client: DeviceClient, gpu: Gpu, carrier: Option<Carrier>) -> Self {
        let shape = client.model().shape;
        let (hidden, top_k) = (shape.hidden as usize, shape.top_k as usize);
        let capacity = client.max_tokens() as usize;
        let alloc = |bytes: usize| gpu.alloc((capacity * bytes) as u64).expect("memory");
        Self {
            x: alloc(hidden * 2),
            idx: alloc(top_k * 4),
            weights: alloc(top_k * 4),
            num_tokens: gpu.alloc(4).expect("memory"),
            out: alloc(hidden * 2),
            stream: gpu.stream().expect("stream"),
            client,
            gpu,
            carrier,
            capacity,
            hidden,
            top_k,
        }
    }

    /// Loads a request; what lies behind its tokens, and the output, is poison.
    fn load(&self, request: &Request) -> DeviceInput {
        assert!(request.num_tokens <= self.capacity);
        let mut x = vec![POISON; self.capacity * self.hidden];
        x[..request.x.len()].copy_from_slice(&request.x);
        let mut idx = vec![i32::MAX; self.capacity * self.top_k];
        idx[..request.idx.len()].copy_from_slice(&request.idx);
        let mut weights = vec![f32::NAN; self.capacity * self.top_k];
        weights[..request.weights.len()].copy_from_slice(&request.weights);
        self.write(&self.x, &x);
        self.write(&self.idx, &idx);
        self.write(&self.weights, &weights);
        self.write(&self.num_tokens, &[request.num_tokens as u32]);
        self.write(&self.out, &vec![POISON; self.capacity * self.hidden]);
        DeviceInput::new(
            self.x.ptr(),
            self.idx.ptr(),
            self.weights.ptr(),
            self.num_tokens.ptr(),
            self.capacity as u32,
        )
    }

    fn write<T: bytemuck::Pod>(&self, to: &GpuBuffer, values: &[T]) {
        self.gpu.write(to, 0, bytemuck::cast_slice(values), soon()).expect("write");
    }

    /// Sends a request without a wait for its answer.
    pub fn send(&mut self, request: &Request) -> DeviceHandle {
        let input = self.load(request);
        // SAFETY: the tensors have these sizes and live as long as the client; they are loaded anew once the
        // stream has sent what they held.
        let sent = unsafe { self.client.dispatch(&self.stream, request.layer, &input) };
        self.stream.wait(soon()).expect("sent");
        sent.expect("dispatch")
    }

    pub fn begin(&mut self, request: &Request) -> DevicePending {
        let input = self.load(request);
        // SAFETY: the tensors have these sizes, outlive the call and are used for nothing else.
        unsafe {
            let handle = self.client.dispatch(&self.stream, request.layer, &input);
            let handle = handle.expect("dispatch");
            let out = DeviceTensor::new(self.out.ptr(), TensorType::Bf16);
            self.client.combine(&self.stream, handle, out).expect("combine")
        }
    }

    /// The rows of the tokens. Those behind them must not have been touched.
    pub fn finish(&mut self, begun: DevicePending, request: &Request) -> (Vec<u16>, LayerTiming) {
        let timing = self.client.finish(&self.stream, begun).expect("finish");
        (self.rows(request), timing)
    }

    fn rows(&self, request: &Request) -> Vec<u16> {
        let mut rows = vec![0u16; self.capacity * self.hidden];
        let bytes = bytemuck::cast_slice_mut(&mut rows);
        self.gpu.read(&self.out, 0, bytes, soon()).expect("read");
        let rest = rows.split_off(request.num_tokens * self.hidden);
        assert!(rest.iter().all(|value| *value == POISON), "rows beyond the tokens were written");
        rows
    }

    pub fn forward(&mut self, request: &Request) -> (Vec<u16>, LayerTiming) {
        let begun = self.begin(request);
        self.finish(begun, request)
    }

    /// Waits until the newest placement is in force and `num_servers` are reached.
    pub fn wait_for(&mut self, servers: &Servers, num_servers: u32) {
        let limit = soon();
        let is_there = |caller: &Self| {
            caller.client.epoch() == servers.epoch
                && caller.metric("switchyard_client_links", Some("up")) >= f64::from(num_servers)
        };
        while !is_there(self) {
            assert!(Instant::now() < limit, "the servers are not reached");
            std::thread::sleep(Duration::from_millis(5));
        }
        self.client.wait_ready(PATIENCE).expect("servers");
    }

    /// Connections that were made.
    pub fn num_connects(&self) -> u64 {
        self.metric("switchyard_client_connects_total", Some("ok")) as u64
    }

    /// Waits until so many were made.
    pub fn wait_for_connects(&self, num: u64) {
        let limit = soon();
        while self.num_connects() < num {
            assert!(Instant::now() < limit, "{} of {num} connections", self.num_connects());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Operations carried out for this client's kernels.
    pub fn num_carried(&self) -> u64 {
        self.carrier.as_ref().map_or(0, way::num_carried)
    }

    pub fn nothing_lost(&self) {
        for name in ["lost", "duplicated", "abandoned"] {
            let name = format!("switchyard_client_{name}_requests_total");
            assert_eq!(self.metric(&name, None), 0.0, "{name}");
        }
    }

    fn metric(&self, name: &str, label: Option<&str>) -> f64 {
        let families = self.client.registry().gather();
        let family = families.iter().find(|family| family.name() == name).expect("metric");
        let chosen = family.get_metric().iter().filter(|metric| {
            label.is_none_or(|label| metric.get_label().iter().any(|pair| pair.value() == label))
        });
        chosen.map(|m| m.get_counter().get_value() + m.get_gauge().get_value()).sum()
    }
}

pub mod child {
    //! A server in a process of its own.

    use std::io::{BufRead, BufReader, Lines, Write, stdin};
    use std::process::{Child, ChildStdout, Stdio};

    use super::*;

    /// Kills its process when dropped.
    pub struct Server {
        child: Child,
        said: Lines<BufReader<ChildStdout>>,
        pub addr: String,
    }

    impl Server {
        pub fn start(device: DeviceName, dtype: WireDtype, held: &[u32], way: Way) -> Self {
            let held: Vec<String> = held.iter().map(u32::to_string).collect();
            let settings = format!("{device} {} {way:?} {}", dtype.name(), held.join(","));
            let mut child = test_support::child::command("server")
                .env(SETTINGS, settings)
                .envs(way::variables())
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()
                .expect("a child");
            let mut said = BufReader::new(child.stdout.take().expect("piped")).lines();
            let addr = answer(&mut said);
            Self { child, said, addr }
        }

        pub fn order(&mut self, order: &str) -> String {
            writeln!(self.child.stdin.as_mut().expect("piped"), "{order}").expect("a child");
            answer(&mut self.said)
        }

        pub fn signal(&self, signal: Signal) {
            let pid = rustix::process::Pid::from_child(&self.child);
            rustix::process::kill_process(pid, signal).expect("signal");
            if signal == Signal::STOP {
                crate::stopped::await_stop(self.child.id());
            }
        }
    }

    impl Drop for Server {
        fn drop(&mut self) {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }

    fn answer(said: &mut Lines<BufReader<ChildStdout>>) -> String {
        let mut answers = said.map_while(Result::ok).filter_map(|line| {
            let at = line.find(MARK)?;
            Some(line[at + MARK.len()..].trim().to_owned())
        });
        answers.next().expect("the child's answer")
    }

    pub fn run() {
        let settings = std::env::var(SETTINGS).expect("settings");
        let mut words = settings.split(' ');
        let mut word = || words.next().expect("settings");
        let device: DeviceName = word().parse().expect("a device");
        let dtype = match word() {
            "fp8" => WireDtype::F8E4m3,
            _ => WireDtype::Bf16,
        };
        let has_network = word() == "Network";
        let held = word().split(',').map(|expert| expert.parse().expect("expert")).collect();
        let selection = ExpertSelection::EveryLayer(held);
        let mut config = ServerConfig::new(tiny_moe(), "child", Placement::Static(selection));
        config.device = Some(ServerDevice { dtype, ..ServerDevice::new(device) });
        config.slot = SLOT;
        config.limits.handshake_timeout = PATIENCE;
        if has_network {
            let (mut transports, _) = way::reach(way::network().expect("a network"));
            // Direct stores, too, for comparison.
            transports.kinds.insert(0, TransportKind::Shm);
            config.transports = transports;
        }
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .expect("runtime");
        let server = runtime.block_on(ExpertServer::start(config, |_| {})).expect("server");
        let say = |text: &str| {
            println!("\n{MARK}{text}");
            let _ = std::io::stdout().flush();
        };
        say(&server.data_addr().to_string());
        // Until the test goes.
        for order in stdin().lines().map_while(Result::ok) {
            say(&way::control(&order));
        }
        runtime.block_on(server.shutdown());
    }

    const SETTINGS: &str = "SWITCHYARD_CHILD_SERVER";
    const MARK: &str = "child server says ";
}
