//! Servers on GPUs, and tensors in a client's GPU memory.

use std::sync::Arc;
use std::time::{Duration, Instant};

use checkpoint::Checkpoint;
use control_api::PlacementTable;
use expert_server::device::DeviceOptions as ServerDevice;
use expert_server::{ExpertSelection, ExpertServer, Placement, RunningServer, ServerConfig};
use half::bf16;
use kernels::gpu::{DeviceName, Gpu, GpuBuffer, Stream};
use p2p_core::SlotConfig;
use protocol::{WireDtype, convert};
use reference_model::LocalExperts;
use switchyard_attention_client::{ClientModel, DeviceClient, DeviceInput, DeviceOptions};
use switchyard_attention_client::{DeviceClientBuilder, DeviceTensor, TensorType};

use crate::client_common::{Request, local_reference, table, tiny_dir};

/// Some dozens of tokens of the tiny model.
pub const SLOT: SlotConfig = SlotConfig { slot_bytes: 64 << 10, num_frames: 2 };

/// GPUs of the servers, and of the client. `None` skips a test loudly.
pub fn devices() -> Option<(DeviceName, DeviceName)> {
    let name = std::env::var("SWITCHYARD_TEST_DEVICE").unwrap_or_else(|_| "emulated".to_owned());
    if name == "emulated" {
        return Some((DeviceName::Emulated(0), DeviceName::Emulated(1)));
    }
    match Gpu::count() {
        Ok(count) if count > 0 => Some((DeviceName::Cuda(0), DeviceName::Cuda(count - 1))),
        other => {
            test_support::skip("gpu", &format!("no GPU: {other:?}"));
            None
        }
    }
}

/// [`SLOT`], but for another number of frames of the same size.
pub const fn slot_of(num_frames: usize) -> SlotConfig {
    SlotConfig { slot_bytes: SLOT.slot_bytes / SLOT.num_frames * num_frames, num_frames }
}

pub fn soon() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

/// Layout of the experts: expert `e` lies on `replicas` servers from `e % num_servers` on.
#[derive(Debug, Clone, Copy)]
pub struct Layout {
    pub num_servers: usize,
    pub replicas: usize,
}

impl Layout {
    pub fn holders(&self, expert: usize) -> Vec<u32> {
        (0..self.replicas).map(|r| ((expert + r) % self.num_servers) as u32).collect()
    }

    pub fn held(&self, server: usize, num_experts: usize) -> Vec<u32> {
        let holds = |expert: &usize| self.holders(*expert).contains(&(server as u32));
        (0..num_experts).filter(holds).map(|expert| expert as u32).collect()
    }
}

/// Settings of a server of the tests.
pub fn server_config(
    name: &str,
    device: DeviceName,
    dtype: WireDtype,
    held: Vec<u32>,
) -> ServerConfig {
    let selection = ExpertSelection::EveryLayer(held);
    let mut config = ServerConfig::new(tiny_dir(), name, Placement::Static(selection));
    config.device = Some(ServerDevice { dtype, ..ServerDevice::new(device) });
    config.slot = SLOT;
    config
}

/// Servers in this process.
pub struct Fleet {
    pub runtime: tokio::runtime::Runtime,
    pub servers: Vec<Option<RunningServer>>,
    pub layout: Layout,
    pub model: ClientModel,
    pub dtype: WireDtype,
    pub addrs: Vec<String>,
    client: DeviceName,
    server: DeviceName,
    checkpoint: Arc<Checkpoint>,
}

impl Fleet {
    pub fn start(num_servers: usize, replicas: usize, dtype: WireDtype) -> Option<Self> {
        Self::start_with(num_servers, replicas, dtype, &|_, _| {})
    }

    /// With settings that `tweak` changes, by the number of the server.
    pub fn start_with(
        num_servers: usize,
        replicas: usize,
        dtype: WireDtype,
        tweak: &dyn Fn(usize, &mut ServerConfig),
    ) -> Option<Self> {
        let (server, client) = devices()?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .expect("runtime");
        let checkpoint = Arc::new(Checkpoint::open(tiny_dir()).expect("checkpoint"));
        let model = ClientModel::of(&checkpoint);
        let layout = Layout { num_servers, replicas };
        let mut fleet = Self {
            runtime,
            servers: Vec::new(),
            layout,
            model,
            dtype,
            addrs: Vec::new(),
            client,
            server,
            checkpoint,
        };
        for server in 0..num_servers {
            let started = fleet.start_server_with(server, tweak);
            fleet.addrs.push(started.data_addr().to_string());
            fleet.servers.push(Some(started));
        }
        Some(fleet)
    }

    /// One more server with the experts of server number `server`.
    pub fn start_server(&self, server: usize) -> RunningServer {
        self.start_server_with(server, &|_, _| {})
    }

    fn start_server_with(
        &self,
        server: usize,
        tweak: &dyn Fn(usize, &mut ServerConfig),
    ) -> RunningServer {
        let held = self.layout.held(server, self.model.shape.num_experts as usize);
        let mut config = server_config(&format!("server-{server}"), self.server, self.dtype, held);
        tweak(server, &mut config);
        self.runtime.block_on(ExpertServer::start(config, |_| {})).expect("server")
    }

    pub fn table(&self, epoch: u64) -> PlacementTable {
        table_of(&self.model, self.layout, epoch, &self.addrs)
    }

    pub fn builder(&self) -> DeviceClientBuilder {
        builder(&self.model).placement(self.table(1))
    }

    pub fn gpu(&self) -> Gpu {
        Gpu::open_named(self.client).expect("the client's GPU")
    }

    pub fn client(&self) -> DeviceClient {
        self.connect(self.builder())
    }

    pub fn connect(&self, builder: DeviceClientBuilder) -> DeviceClient {
        let mut client = builder.build(self.gpu(), options(self.dtype)).expect("client");
        client.wait_ready(Duration::from_secs(60)).expect("servers");
        client
    }

    pub fn local(&self) -> LocalExperts {
        LocalExperts::new(Arc::clone(&self.checkpoint))
    }

    pub fn stop(&mut self, server: usize) {
        if let Some(server) = self.servers[server].take() {
            self.runtime.block_on(server.shutdown());
        }
    }
}

/// Servers that replicate each other, each in a process of its own.
pub struct Replicas {
    servers: Vec<Option<child::Server>>,
    pub model: ClientModel,
    pub dtype: WireDtype,
    pub num_frames: usize,
    /// [`DeviceOptions::max_servers`] of clients.
    pub max_servers: usize,
    server: DeviceName,
    /// GPU of clients.
    pub client: DeviceName,
    checkpoint: Arc<Checkpoint>,
    table: PlacementTable,
}

impl Replicas {
    /// Two of them.
    pub fn start(dtype: WireDtype) -> Option<Self> {
        Self::of(dtype, 2, SLOT.num_frames)
    }

    pub fn of(dtype: WireDtype, num_servers: usize, num_frames: usize) -> Option<Self> {
        let (server, client) = devices()?;
        let checkpoint = Arc::new(Checkpoint::open(tiny_dir()).expect("checkpoint"));
        let model = ClientModel::of(&checkpoint);
        let layout = Layout { num_servers, replicas: num_servers };
        let start = |_| child::Server::start(server, dtype, num_frames);
        let servers: Vec<_> = (0..num_servers).map(start).map(Some).collect();
        let addrs: Vec<String> = servers.iter().flatten().map(|s| s.addr.clone()).collect();
        let table = table_of(&model, layout, 1, &addrs);
        let max_servers = DeviceOptions::default().max_servers;
        Some(Self {
            servers,
            model,
            dtype,
            num_frames,
            max_servers,
            server,
            client,
            checkpoint,
            table,
        })
    }

    pub fn server(&self, server: usize) -> &child::Server {
        self.servers[server].as_ref().expect("not killed before")
    }

    pub fn kill(&mut self, server: usize) {
        self.servers[server] = None;
    }

    pub fn lives(&self, server: usize) -> bool {
        self.servers[server].is_some()
    }

    /// A successor of a server that was killed, and the placement with its address.
    pub fn restart(&mut self, server: usize) -> PlacementTable {
        let child = child::Server::start(self.server, self.dtype, self.num_frames);
        let layout = Layout { num_servers: self.servers.len(), replicas: self.servers.len() };
        let mut addrs: Vec<String> =
            self.table.servers.iter().map(|s| s.data_addr.clone()).collect();
        addrs[server].clone_from(&child.addr);
        self.servers[server] = Some(child);
        self.table = table_of(&self.model, layout, self.table.epoch + 1, &addrs);
        self.table.clone()
    }

    pub fn table(&self) -> PlacementTable {
        self.table.clone()
    }

    /// A client with all servers connected.
    pub fn connect(&self, builder: DeviceClientBuilder) -> DeviceClient {
        self.connect_by(builder.placement(self.table.clone()))
    }

    /// As [`connect`](Self::connect), but the caller sets the placement.
    pub fn connect_by(&self, builder: DeviceClientBuilder) -> DeviceClient {
        self.guest().connect_by(builder)
    }

    pub fn guest(&self) -> Guest {
        Guest {
            model: self.model.clone(),
            dtype: self.dtype,
            slot: slot_of(self.num_frames),
            max_servers: self.max_servers,
            client: self.client,
            checkpoint: Arc::clone(&self.checkpoint),
        }
    }

    pub fn local(&self) -> LocalExperts {
        LocalExperts::new(Arc::clone(&self.checkpoint))
    }
}

/// Settings for clients of [`Replicas`].
#[derive(Clone)]
pub struct Guest {
    pub model: ClientModel,
    pub dtype: WireDtype,
    pub slot: SlotConfig,
    max_servers: usize,
    client: DeviceName,
    checkpoint: Arc<Checkpoint>,
}

impl Guest {
    /// A client with all experts in reach.
    pub fn connect_by(&self, builder: DeviceClientBuilder) -> DeviceClient {
        let gpu = Gpu::open_named(self.client).expect("the client's GPU");
        let mut options = options(self.dtype);
        options.max_servers = self.max_servers;
        let mut client = builder.slot(self.slot).build(gpu, options).expect("client");
        client.wait_ready(Duration::from_secs(60)).expect("servers");
        client
    }

    pub fn local(&self) -> LocalExperts {
        LocalExperts::new(Arc::clone(&self.checkpoint))
    }
}

pub fn options(dtype: WireDtype) -> DeviceOptions {
    let mut options = DeviceOptions::default();
    options.dtype = dtype;
    options
}

/// A loaded machine must not look like a dead server, except where that is the test.
pub fn builder(model: &ClientModel) -> DeviceClientBuilder {
    DeviceClient::builder(model.clone())
        .slot(SLOT)
        .deadline(Duration::from_secs(20))
        .replica_wait(Duration::from_secs(20))
}

pub fn table_of(
    model: &ClientModel,
    layout: Layout,
    epoch: u64,
    addrs: &[String],
) -> PlacementTable {
    let replicas: Vec<Vec<u32>> =
        (0..model.shape.num_experts as usize).map(|expert| layout.holders(expert)).collect();
    table(model, epoch, addrs, &replicas)
}

/// Tensors of a call in the client's GPU memory.
pub struct Tensors {
    gpu: Gpu,
    pub hidden_states: GpuBuffer,
    pub topk_idx: GpuBuffer,
    pub topk_weights: GpuBuffer,
    pub num_tokens: GpuBuffer,
    pub out: GpuBuffer,
    hidden: usize,
    top_k: usize,
    capacity: u32,
}

impl Tensors {
    pub fn new(client: &DeviceClient) -> Self {
        Self::with_capacity(client, client.max_tokens())
    }

    pub fn with_capacity(client: &DeviceClient, capacity: u32) -> Self {
        let gpu = client.gpu().clone();
        let shape = client.model().shape;
        let (hidden, top_k) = (shape.hidden as usize, shape.top_k as usize);
        let alloc = |values: usize| gpu.alloc((values * capacity as usize) as u64).expect("memory");
        Self {
            hidden_states: alloc(hidden * 2),
            topk_idx: alloc(top_k * 4),
            topk_weights: alloc(top_k * 4),
            num_tokens: gpu.alloc(4).expect("memory"),
            out: alloc(hidden * 2),
            hidden,
            top_k,
            capacity,
            gpu,
        }
    }

    /// Loads a request. Memory behind its tokens, and the output, is poison.
    pub fn load(&self, request: &Request) -> DeviceInput {
        let k = request.idx.len().checked_div(request.num_tokens).unwrap_or(self.top_k);
        assert!(k <= self.top_k && request.num_tokens <= self.capacity as usize);
        let rows = self.capacity as usize;
        let mut x = vec![0xffff_u16; rows * self.hidden];
        for (to, from) in x.iter_mut().zip(&request.x) {
            *to = bf16::from_f32(*from).to_bits();
        }
        let mut idx = vec![-1i32; rows * self.top_k];
        let mut weights = vec![f32::NAN; rows * self.top_k];
        idx[request.num_tokens * self.top_k..].fill(i32::MAX);
        for token in 0..request.num_tokens {
            for place in 0..k {
                idx[token * self.top_k + place] = request.idx[token * k + place];
                weights[token * self.top_k + place] = request.weights[token * k + place];
            }
        }
        self.write(&self.hidden_states, &x);
        self.write(&self.topk_idx, &idx);
        self.write(&self.topk_weights, &weights);
        self.write(&self.num_tokens, &[request.num_tokens as u32]);
        self.write(&self.out, &vec![0xffff_u16; rows * self.hidden]);
        self.input()
    }

    pub fn input(&self) -> DeviceInput {
        DeviceInput::new(
            self.hidden_states.ptr(),
            self.topk_idx.ptr(),
            self.topk_weights.ptr(),
            self.num_tokens.ptr(),
            self.capacity,
        )
    }

    pub fn out(&self) -> DeviceTensor {
        DeviceTensor::new(self.out.ptr(), TensorType::Bf16)
    }

    /// Rows of the output.
    pub fn read(&self, num_tokens: usize) -> Vec<f32> {
        let mut bits = vec![0u16; num_tokens * self.hidden];
        if bits.is_empty() {
            return Vec::new();
        }
        let bytes = bytemuck::cast_slice_mut(&mut bits);
        self.gpu.read(&self.out, 0, bytes, soon()).expect("read");
        bits.into_iter().map(|bits| bf16::from_bits(bits).to_f32()).collect()
    }

    pub fn write<T: bytemuck::Pod>(&self, to: &GpuBuffer, values: &[T]) {
        self.gpu.write(to, 0, bytemuck::cast_slice(values), soon()).expect("write");
    }
}

/// A call from begin to end, checked.
pub fn forward(
    client: &mut DeviceClient,
    stream: &Stream,
    tensors: &Tensors,
    request: &Request,
    local: &mut LocalExperts,
    dtype: WireDtype,
) -> switchyard_attention_client::LayerTiming {
    let input = tensors.load(request);
    // SAFETY: the tensors have these sizes and outlive the call.
    let timing = unsafe { client.forward(stream, request.layer, &input, tensors.out()) };
    let timing = timing.expect("forward");
    check(request, &tensors.read(request.num_tokens), local, dtype);
    timing
}

/// The values that arrive at a server, in f32.
pub fn on_the_wire(x: &[f32], dtype: WireDtype) -> Vec<f32> {
    let rounded: Vec<f32> = x.iter().map(|v| bf16::from_f32(*v).to_f32()).collect();
    if dtype != WireDtype::F8E4m3 {
        return rounded;
    }
    let (mut codes, mut scales) = (vec![0; x.len()], vec![0.0; x.len() / 128]);
    let mut back = vec![0.0; x.len()];
    convert::f32_to_f8(&rounded, &mut codes, &mut scales);
    convert::f8_to_f32(&codes, &scales, &mut back);
    back.iter().map(|v| bf16::from_f32(*v).to_f32()).collect()
}

/// Asserts that `found` is the answer, as the processor computes it from the same rounded input, within
/// the precision of bf16 activations, outputs and sums.
pub fn check(request: &Request, found: &[f32], local: &mut LocalExperts, dtype: WireDtype) {
    let rounded = Request { x: on_the_wire(&request.x, dtype), ..request.clone() };
    let expected = local_reference(&rounded, local);
    assert_eq!(found.len(), expected.len());
    let hidden = request.x.len().checked_div(request.num_tokens).unwrap_or(1).max(1);
    for (token, (found, expected)) in
        found.chunks_exact(hidden).zip(expected.chunks_exact(hidden)).enumerate()
    {
        let largest = expected.iter().fold(0.05f32, |most, value| most.max(value.abs()));
        for (found, expected) in found.iter().zip(expected) {
            let off = (found - expected).abs() / largest;
            assert!(off < 0.03, "token {token}: {found}, expected {expected} (of {largest})");
        }
    }
}

pub mod child {
    //! A server in a process of its own.

    use std::io::{BufRead, BufReader, Write};
    use std::process::{Child, Stdio};

    use super::*;

    /// Kills its process when dropped.
    pub struct Server {
        child: Child,
        pub addr: String,
    }

    impl Server {
        /// A server with all experts.
        pub fn start(device: DeviceName, dtype: WireDtype, num_frames: usize) -> Self {
            let mut child = test_support::child::command("server")
                .env(SETTINGS, format!("{device} {} {num_frames}", dtype.name()))
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()
                .expect("a child");
            let lines = BufReader::new(child.stdout.take().expect("piped")).lines();
            let mut addrs = lines.map_while(Result::ok).filter_map(|line| {
                let at = line.find(MARK)?;
                Some(line[at + MARK.len()..].trim().to_owned())
            });
            let addr = addrs.next().expect("the child's address");
            Self { child, addr }
        }

        pub fn signal(&self, signal: rustix::process::Signal) {
            let pid = rustix::process::Pid::from_child(&self.child);
            rustix::process::kill_process(pid, signal).expect("signal");
            if signal == rustix::process::Signal::STOP {
                test_support::stopped::await_stop(self.child.id());
            }
        }

        /// Stops the process, and waits until it answers nothing more. A GPU that is no process of this host goes on
        /// with the batches that it was given: some eight, and each waits 2 ms for a first frame.
        pub fn freeze(&self) {
            self.signal(rustix::process::Signal::STOP);
            std::thread::sleep(std::time::Duration::from_millis(100));
        }
    }

    impl Drop for Server {
        fn drop(&mut self) {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
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
        let num_frames = word().parse().expect("a number");
        let all = ClientModel::of(&Checkpoint::open(tiny_dir()).expect("checkpoint"));
        let held = (0..all.shape.num_experts).collect();
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .expect("runtime");
        let mut config = server_config("child", device, dtype, held);
        config.slot = slot_of(num_frames);
        let server = runtime.block_on(ExpertServer::start(config, |_| {})).expect("server");
        println!("{MARK}{}", server.data_addr());
        let _ = std::io::stdout().flush();
        // Until the test goes.
        let _ = std::io::stdin().read_line(&mut String::new());
        runtime.block_on(server.shutdown());
    }

    const SETTINGS: &str = "SWITCHYARD_CHILD_SERVER";
    const MARK: &str = "child server at ";
}
