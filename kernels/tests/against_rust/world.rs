//! Clients and servers in host memory, and random input for them.

use std::alloc::{Layout, alloc, dealloc};
use std::ptr::NonNull;
use std::time::{Duration, Instant};

use bytemuck::{Pod, Zeroable};
use half::bf16;
use kernels::abi::{
    ANSWER_HOLE, ClientPeer, ClientState, CombineParams, DEVICE_ABI_VERSION, DevicePtr,
    DispatchParams, EchoParams, ErrorWord, ExpertLists, ExpertRecvParams, ExpertSendParams,
    FrameGeometry, Link, PATH_DIRECT, Placement, ServerPeer, ServerState,
};
use kernels::gpu::{Gpu, GpuBuffer};
use rand::RngExt;
use rand::rngs::StdRng;

use crate::runner::Runner;

pub const POISON: u8 = 0xff;
pub const NUM_LAYERS: u32 = 61;
pub const GENERATION: u32 = 3;

/// Memory that the kernels reach by address.
pub enum Memory {
    Host { ptr: NonNull<u8>, layout: Layout },
    Device { gpu: Gpu, buffer: GpuBuffer },
}

impl Memory {
    pub fn filled(runner: &Runner, bytes: u64, value: u8) -> Self {
        let memory = match runner {
            Runner::Host(_) => {
                let layout = Layout::from_size_align(bytes.max(1) as usize, 4096).expect("layout");
                // SAFETY: the size is not 0.
                let ptr = NonNull::new(unsafe { alloc(layout) }).expect("memory");
                Self::Host { ptr, layout }
            }
            Runner::Gpu(gpu) => {
                let buffer = gpu.alloc(bytes.max(1)).expect("GPU memory");
                Self::Device { gpu: gpu.clone(), buffer }
            }
        };
        memory.fill(0, memory.len(), value);
        memory
    }

    pub fn of<T: Pod>(runner: &Runner, values: &[T]) -> Self {
        let memory = Self::filled(runner, size_of_val(values) as u64, 0);
        memory.write(0, values);
        memory
    }

    pub fn address(&self) -> DevicePtr {
        match self {
            Self::Host { ptr, .. } => DevicePtr(ptr.as_ptr() as u64),
            Self::Device { buffer, .. } => buffer.ptr(),
        }
    }

    pub fn write<T: Pod>(&self, offset: u64, values: &[T]) {
        let bytes: &[u8] = bytemuck::cast_slice(values);
        assert!(offset + bytes.len() as u64 <= self.len());
        match self {
            // SAFETY: the range was checked, and kernels run only inside `Runner::launch`.
            Self::Host { ptr, .. } => unsafe {
                ptr.add(offset as usize).copy_from(NonNull::from(bytes).cast(), bytes.len());
            },
            Self::Device { gpu, buffer } => {
                gpu.write(buffer, offset, bytes, soon()).expect("write")
            }
        }
    }

    pub fn fill(&self, offset: u64, len: u64, value: u8) {
        assert!(offset + len <= self.len());
        match self {
            // SAFETY: as above.
            Self::Host { ptr, .. } => unsafe {
                ptr.add(offset as usize).write_bytes(value, len as usize);
            },
            Self::Device { gpu, buffer } => {
                let stream = gpu.stream().expect("stream");
                // SAFETY: as above.
                unsafe { stream.fill(buffer.ptr().add(offset), value, len).expect("fill") };
                stream.wait(soon()).expect("fill");
            }
        }
    }

    pub fn read<T: Pod>(&self, offset: u64, count: u64) -> Vec<T> {
        let mut out = vec![T::zeroed(); count as usize];
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut out);
        let len = bytes.len();
        assert!(offset + len as u64 <= self.len());
        match self {
            // SAFETY: as above.
            Self::Host { ptr, .. } => unsafe {
                ptr.add(offset as usize).copy_to(NonNull::from(bytes).cast(), len);
            },
            Self::Device { gpu, buffer } => gpu.read(buffer, offset, bytes, soon()).expect("read"),
        }
        out
    }

    pub fn one<T: Pod>(&self, offset: u64) -> T {
        self.read(offset, 1)[0]
    }

    fn len(&self) -> u64 {
        match self {
            Self::Host { layout, .. } => layout.size() as u64,
            Self::Device { buffer, .. } => buffer.len(),
        }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if let Self::Host { ptr, layout } = self {
            // SAFETY: allocated with this layout, freed once.
            unsafe { dealloc(ptr.as_ptr(), *layout) };
        }
    }
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

#[derive(Clone)]
pub struct Input {
    pub num_tokens: u32,
    pub hidden_states: Vec<u16>,
    pub topk_idx: Vec<i32>,
    pub topk_weights: Vec<f32>,
}

impl Input {
    pub fn random(
        rng: &mut StdRng,
        geometry: &FrameGeometry,
        num_experts: u32,
        tokens: u32,
    ) -> Self {
        let (hidden, top_k) = (geometry.hidden as usize, geometry.top_k as usize);
        let mut input = Self {
            num_tokens: tokens,
            hidden_states: Vec::new(),
            topk_idx: Vec::new(),
            topk_weights: Vec::new(),
        };
        for _ in 0..tokens {
            let magnitude = 10f32.powi(rng.random_range(-30..30));
            let kind = rng.random_range(0..8);
            input.hidden_states.extend((0..hidden).map(|at| {
                let value = (rng.random::<f32>() * 2.0 - 1.0) * magnitude;
                match kind {
                    0 if at < 128 => 0,
                    // Rarely something that no scale can serve, and the smallest values.
                    1 if rng.random_range(0..50) == 0 => bf16::NAN.to_bits(),
                    1 if rng.random_range(0..50) == 0 => bf16::NEG_INFINITY.to_bits(),
                    2 => rng.random_range(0..200),
                    _ => bf16::from_f32(value).to_bits(),
                }
            }));
            let mut experts: Vec<i32> = (0..num_experts as i32).collect();
            for _ in 0..top_k {
                let expert = experts.swap_remove(rng.random_range(0..experts.len()));
                input.topk_idx.push(if rng.random_range(0..12) == 0 { -1 } else { expert });
                input.topk_weights.push(rng.random_range(0.01..1.0));
            }
        }
        input
    }
}

pub struct Client {
    pub id: u64,
    pub hidden_states: Memory,
    pub topk_idx: Memory,
    pub topk_weights: Memory,
    pub num_tokens: Memory,
    pub state: Memory,
    pub handle: Memory,
    pub out: Memory,
    pub token_missing: Memory,
    pub responses: Vec<Memory>,
    pub table: Memory,
}

pub struct Server {
    pub requests: Vec<Memory>,
    pub state: Memory,
    pub local_expert: Vec<i16>,
    pub local_memory: Memory,
    pub lists: ExpertLists,
    pub list_memory: Memory,
    pub table: Memory,
    pub min_epoch: Memory,
}

pub struct World {
    pub geometry: FrameGeometry,
    pub placement: Placement,
    pub placement_memory: Memory,
    pub capacity: u32,
    pub clients: Vec<Client>,
    pub servers: Vec<Server>,
}

impl World {
    pub fn new(
        runner: &Runner,
        rng: &mut StdRng,
        geometry: FrameGeometry,
        num_experts: u32,
        num_clients: usize,
        num_servers: usize,
    ) -> Self {
        let g = &geometry;
        let capacity = g.max_tokens;
        let replicas: Vec<Vec<u8>> = (0..num_experts)
            .map(|_| {
                let first = rng.random_range(0..num_servers) as u8;
                let mut servers = vec![first];
                if rng.random_range(0..3) == 0 && num_servers > 1 {
                    servers.push((first + 1) % num_servers as u8);
                }
                servers
            })
            .collect();
        let placement = Placement::new(7, &replicas).expect("in range");
        let row_bytes = u64::from(g.hidden) * 2;
        let rows = u64::from(capacity);
        let choices = rows * u64::from(g.top_k);
        let mut clients: Vec<Client> = (0..num_clients)
            .map(|at| Client {
                id: 100 + at as u64,
                hidden_states: Memory::filled(runner, rows * row_bytes, POISON),
                topk_idx: Memory::filled(runner, choices * 4, POISON),
                topk_weights: Memory::filled(runner, choices * 4, POISON),
                num_tokens: Memory::of(runner, &[0u32]),
                state: Memory::of(runner, &[ClientState::zeroed()]),
                handle: Memory::filled(runner, g.handle_bytes(), POISON),
                out: Memory::filled(runner, rows * row_bytes, POISON),
                token_missing: Memory::filled(runner, rows * 4, POISON),
                responses: (0..num_servers)
                    .map(|_| Memory::filled(runner, g.response_slot_bytes, 0))
                    .collect(),
                table: Memory::filled(runner, 0, 0),
            })
            .collect();
        let mut servers: Vec<Server> = (0..num_servers)
            .map(|at| {
                let mut num_local = 0;
                let local_expert: Vec<i16> = replicas
                    .iter()
                    .map(|servers| match servers.contains(&(at as u8)) {
                        true => {
                            num_local += 1;
                            num_local - 1
                        }
                        false => -1,
                    })
                    .collect();
                let max_rows = capacity * num_clients as u32;
                let (_, bytes) = g.lists_at(DevicePtr::NULL, num_local.max(1) as u32, max_rows);
                let list_memory = Memory::filled(runner, bytes, POISON);
                let (lists, _) =
                    g.lists_at(list_memory.address(), num_local.max(1) as u32, max_rows);
                Server {
                    requests: (0..num_clients)
                        .map(|_| Memory::filled(runner, g.slot_bytes, 0))
                        .collect(),
                    state: Memory::of(runner, &[ServerState::zeroed()]),
                    // The same experts in every layer.
                    local_memory: Memory::of(runner, &local_expert.repeat(NUM_LAYERS as usize)),
                    local_expert,
                    lists,
                    list_memory,
                    table: Memory::filled(runner, 0, 0),
                    min_epoch: Memory::of(runner, &[0u64]),
                }
            })
            .collect();
        let direct = |memory: &Memory| Link {
            window: memory.address(),
            context: 0,
            path: PATH_DIRECT,
            reserved: 0,
        };
        for (at, client) in clients.iter_mut().enumerate() {
            let peers: Vec<ServerPeer> = servers
                .iter()
                .zip(&client.responses)
                .map(|(server, response)| ServerPeer {
                    request: direct(&server.requests[at]),
                    response: response.address(),
                    generation: GENERATION,
                    reserved: 0,
                })
                .collect();
            client.table = Memory::of(runner, &peers);
        }
        for (at, server) in servers.iter_mut().enumerate() {
            let peers: Vec<ClientPeer> = clients
                .iter()
                .zip(&server.requests)
                .map(|(client, request)| ClientPeer {
                    request: request.address(),
                    response: direct(&client.responses[at]),
                    client_id: client.id,
                    generation: GENERATION,
                    reserved: 0,
                })
                .collect();
            server.table = Memory::of(runner, &peers);
        }
        let placement_memory = Memory::of(runner, &[placement]);
        Self { geometry, placement, placement_memory, capacity, clients, servers }
    }

    /// Poisons everything except words that must keep their value: row flags and control tails.
    pub fn poison(&self) {
        let g = &self.geometry;
        for request in self.servers.iter().flat_map(|server| &server.requests) {
            for frame in (0..u64::from(g.num_frames)).map(|place| place * g.frame_bytes) {
                request.fill(frame, g.flags_offset, POISON);
                request.fill(frame + g.entries_offset, g.frame_bytes - g.entries_offset, POISON);
            }
        }
        for response in self.clients.iter().flat_map(|client| &client.responses) {
            for frame in (0..u64::from(g.num_frames)).map(|place| place * g.response_frame_bytes) {
                let head = g.response_payload_offset;
                response.fill(frame + head, g.response_frame_bytes - head, POISON);
            }
        }
        for client in &self.clients {
            let row_bytes = u64::from(g.hidden) * 2;
            client.out.fill(0, u64::from(self.capacity) * row_bytes, POISON);
            client.token_missing.fill(0, u64::from(self.capacity) * 4, POISON);
        }
    }

    /// The host's steps before a client uses a server again that it gave up, but with the same slot: all earlier
    /// frames count as taken and summed, and nothing of them is left.
    pub fn begin_anew(&self, client: usize, server: usize) {
        let (at_client, at_server) = (&self.clients[client], &self.servers[server]);
        for (offset, bytes) in self.geometry.answer_rows() {
            at_client.responses[server].fill(offset, bytes, ANSWER_HOLE as u8);
        }
        let mut state: ClientState = at_client.state.one(0);
        state.lost[server] = 0;
        let sent = state.posted[0][server].max(state.posted[1][server]);
        let num_frames = u64::from(self.geometry.num_frames);
        for number in sent.saturating_sub(num_frames) + 1..=sent {
            state.summed[server][(number % num_frames) as usize] = number;
        }
        state.error = ErrorWord::default();
        at_client.state.write(0, &[state]);
        let mut state: ServerState = at_server.state.one(0);
        state.taken[client] = sent;
        state.error = ErrorWord::default();
        at_server.state.write(0, &[state]);
    }

    pub fn load(&self, client: usize, input: &Input) {
        let client = &self.clients[client];
        client.hidden_states.write(0, &input.hidden_states);
        client.topk_idx.write(0, &input.topk_idx);
        client.topk_weights.write(0, &input.topk_weights);
        client.num_tokens.write(0, &[input.num_tokens]);
    }

    pub fn dispatch_params(&self, client: usize, layer: u32) -> DispatchParams {
        let client = &self.clients[client];
        DispatchParams {
            version: DEVICE_ABI_VERSION,
            flags: 0,
            geometry: self.geometry,
            hidden_states: client.hidden_states.address(),
            topk_idx: client.topk_idx.address(),
            topk_weights: client.topk_weights.address(),
            num_tokens: client.num_tokens.address(),
            placement: self.placement_memory.address(),
            state: client.state.address(),
            handle: client.handle.address(),
            trace: DevicePtr::NULL,
            client_id: client.id,
            trace_len: 0,
            capacity: self.capacity,
            layer,
            num_experts: self.placement.num_experts,
            num_servers: self.servers.len() as u32,
            num_blocks: 5,
            servers: client.table.address(),
        }
    }

    pub fn combine_params(&self, client: usize) -> CombineParams {
        let client = &self.clients[client];
        CombineParams {
            version: DEVICE_ABI_VERSION,
            flags: 0,
            geometry: self.geometry,
            handle: client.handle.address(),
            state: client.state.address(),
            out: client.out.address(),
            token_missing: client.token_missing.address(),
            abort_mask: DevicePtr::NULL,
            timeout_ns: 10_000_000,
            capacity: self.capacity,
            num_servers: self.servers.len() as u32,
            num_blocks: 3,
            trace_len: 0,
            servers: client.table.address(),
            trace: DevicePtr::NULL,
        }
    }

    pub fn recv_params(&self, server: usize, min_ready: u32) -> ExpertRecvParams {
        let server = &self.servers[server];
        let num_local = server.local_expert.iter().filter(|local| **local >= 0).count() as u32;
        ExpertRecvParams {
            version: DEVICE_ABI_VERSION,
            flags: 0,
            geometry: self.geometry,
            state: server.state.address(),
            lists: server.lists,
            local_expert: server.local_memory.address(),
            abort_mask: DevicePtr::NULL,
            min_epoch: server.min_epoch.address(),
            timeout_ns: 10_000_000,
            min_ready,
            num_experts: self.placement.num_experts,
            num_local_experts: num_local.max(1),
            num_layers: NUM_LAYERS,
            num_clients: self.clients.len() as u32,
            gather_ns: 0,
            gather: DevicePtr::NULL,
            clients: server.table.address(),
        }
    }

    pub fn send_params(&self, server: usize, expert_out: DevicePtr) -> ExpertSendParams {
        let server = &self.servers[server];
        ExpertSendParams {
            version: DEVICE_ABI_VERSION,
            flags: 0,
            geometry: self.geometry,
            lists: server.lists,
            expert_out,
            max_rows: server.lists.max_rows,
            num_clients: self.clients.len() as u32,
            num_blocks: 4,
            reserved: 0,
            clients: server.table.address(),
        }
    }

    pub fn echo_params(&self, server: usize) -> EchoParams {
        let server = &self.servers[server];
        EchoParams {
            version: DEVICE_ABI_VERSION,
            flags: 0,
            geometry: self.geometry,
            state: server.state.address(),
            abort_mask: DevicePtr::NULL,
            timeout_ns: 10_000_000,
            capacity: self.capacity,
            num_clients: self.clients.len() as u32,
            num_blocks: 4,
            reserved: 0,
            clients: server.table.address(),
        }
    }

    /// Servers of a token in ascending order, each with the places in top-k order that go there.
    pub fn servers_of(&self, input: &Input, token: u32) -> Vec<(u32, Vec<usize>)> {
        let top_k = self.geometry.top_k as usize;
        let mut found: Vec<(u32, Vec<usize>)> = Vec::new();
        for server in 0..self.servers.len() as u32 {
            let goes = |place: &usize| {
                let expert = input.topk_idx[token as usize * top_k + place];
                self.placement.pick_server(token, expert, self.servers.len() as u32) == Some(server)
            };
            let places: Vec<usize> = (0..top_k).filter(goes).collect();
            if !places.is_empty() {
                found.push((server, places));
            }
        }
        found
    }
}
