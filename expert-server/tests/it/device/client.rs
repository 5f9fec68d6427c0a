//! A client of one server that drives the kernels directly, one layer at a time.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use bytemuck::Zeroable;
use cuda_ipc::GpuMemory;
use kernels::abi::{
    ANSWER_HOLE, ClientState, CombineParams, DEVICE_ABI_VERSION, DTYPE_BF16, DTYPE_F8_E4M3,
    DispatchParams, ErrorWord, FrameGeometry, Handle, Link, PATH_DIRECT, Placement, ServerPeer,
    WORD_STATUS_OFFSET, WORD_STRIDE,
};
use kernels::gpu::{Gpu, GpuBuffer, PreparedKernel, Stream};
use kernels::slots::{DevicePair, DeviceSide};
use p2p_core::bootstrap::{ConnectConfig, ConnectError, Connection, Liveness, PeerHello, connect};
use p2p_core::{AnyEndpoint, Channel, SlotConfig};
use protocol::{ClientHello, ModelShape, WireDtype};

use crate::common::{PATIENCE, Request};

pub const HOST_SLOT: SlotConfig = SlotConfig { slot_bytes: 64 << 10, num_frames: 2 };

/// The result of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    Answered,
    /// The server refused the frame with this status code.
    Refused(u64),
    Missing,
}

pub struct Client {
    pub gpu: Gpu,
    pub geometry: FrameGeometry,
    pub liveness: Liveness,
    pub pair: DevicePair,
    shape: ModelShape,
    client_id: u64,
    layer: u32,
    _channel: Channel<AnyEndpoint>,
    stream: Stream,
    hidden_states: GpuBuffer,
    topk_idx: GpuBuffer,
    topk_weights: GpuBuffer,
    num_tokens: GpuBuffer,
    placement: GpuBuffer,
    state: GpuBuffer,
    handle: GpuBuffer,
    table: GpuBuffer,
    out: GpuBuffer,
    pub timeout: Duration,
}

/// Geometry of device slots with the size and frames of `slot`.
pub fn geometry_of(shape: &ModelShape, dtype: WireDtype, slot: SlotConfig) -> FrameGeometry {
    let code = if dtype == WireDtype::F8E4m3 { DTYPE_F8_E4M3 } else { DTYPE_BF16 };
    let (hidden, top_k, frames) = (shape.hidden, shape.top_k, slot.num_frames as u32);
    let tokens =
        FrameGeometry::tokens_for_slot(hidden, top_k, code, frames, slot.slot_bytes as u64);
    FrameGeometry::new(hidden, top_k, code, tokens, frames).expect("a geometry")
}

pub fn hello(shape: ModelShape, client_id: u64, dtype: WireDtype) -> PeerHello {
    let response_dtype = WireDtype::Bf16;
    let hello = ClientHello { model: shape, client_id, dtype, response_dtype, name: "test".into() };
    PeerHello { peer_id: client_id, generation: 5, payload: hello.encode() }
}

pub fn config_for(gpu: &Gpu, geometry: &FrameGeometry) -> ConnectConfig {
    ConnectConfig {
        slot: HOST_SLOT,
        device: Some(GpuMemory::offer(DeviceSide {
            gpu: gpu.clone(),
            own_slot_bytes: geometry.response_slot_bytes,
            peer_slot_bytes: geometry.slot_bytes,
            shape: geometry.describe().into_bytes(),
        })),
        timeout: PATIENCE,
        ..ConnectConfig::default()
    }
}

impl Client {
    pub async fn join(
        gpu: &Gpu,
        addr: SocketAddr,
        shape: ModelShape,
        client_id: u64,
        dtype: WireDtype,
        slot: SlotConfig,
    ) -> Result<Self, ConnectError> {
        let geometry = geometry_of(&shape, dtype, slot);
        let config = config_for(gpu, &geometry);
        Self::join_by(gpu, addr, shape, client_id, dtype, geometry, config).await
    }

    /// Like [`join`](Self::join), with the caller's choice of networks.
    pub async fn join_by(
        gpu: &Gpu,
        addr: SocketAddr,
        shape: ModelShape,
        client_id: u64,
        dtype: WireDtype,
        geometry: FrameGeometry,
        config: ConnectConfig,
    ) -> Result<Self, ConnectError> {
        let hello = hello(shape, client_id, dtype);
        let connection = connect(addr, hello, config).await?;
        Ok(Self::over(gpu, geometry, shape, client_id, connection))
    }

    fn over(
        gpu: &Gpu,
        geometry: FrameGeometry,
        shape: ModelShape,
        client_id: u64,
        connection: Connection,
    ) -> Self {
        let Connection { channel, device, liveness, .. } = connection;
        let pair = device.and_then(|slots| slots.downcast().ok()).expect("device slots");
        let tokens = u64::from(geometry.max_tokens);
        let entries = tokens * u64::from(geometry.top_k);
        let alloc = |bytes: u64| gpu.alloc(bytes).expect("memory");
        let experts = vec![vec![0u8]; shape.num_experts as usize];
        let client = Self {
            gpu: gpu.clone(),
            liveness,
            shape,
            client_id,
            layer: 0,
            _channel: channel,
            stream: gpu.stream().expect("stream"),
            hidden_states: alloc(tokens * u64::from(geometry.hidden) * 2),
            topk_idx: alloc(entries * 4),
            topk_weights: alloc(entries * 4),
            num_tokens: alloc(4),
            placement: alloc(size_of::<Placement>() as u64),
            state: alloc(size_of::<ClientState>() as u64),
            handle: alloc(geometry.handle_bytes()),
            table: alloc(size_of::<ServerPeer>() as u64),
            out: alloc(tokens * u64::from(geometry.hidden) * 2),
            timeout: PATIENCE,
            geometry,
            pair,
        };
        let placement = Placement::new(1, &experts).expect("a placement");
        client.write(&client.placement, bytemuck::bytes_of(&placement));
        let request =
            Link { window: client.pair.peer(), context: 0, path: PATH_DIRECT, reserved: 0 };
        let peer = ServerPeer { request, response: client.pair.own(), generation: 5, reserved: 0 };
        client.write(&client.table, bytemuck::bytes_of(&peer));
        for (offset, bytes) in client.geometry.answer_rows() {
            let rows = client.pair.own().add(offset);
            // SAFETY: the client's own slot. The server stores nothing there before the first request.
            unsafe { client.stream.fill(rows, ANSWER_HOLE as u8, bytes).expect("fill") };
        }
        // A client that is dropped at once frees the slot.
        client.wait();
        client
    }

    /// Sends one layer and waits for it. Returns rows `[num_tokens, hidden]` if it was answered.
    pub fn layer(&mut self, request: &Request) -> (Outcome, Vec<f32>) {
        self.dispatch(request);
        self.combine(request)
    }

    /// Repeats the last layer and waits for each recorded launch. Returns the time of each.
    pub fn replay(&mut self, num_layers: usize) -> Vec<Duration> {
        let (dispatch, combine) = (self.prepared_dispatch(), self.prepared_combine());
        let graph = self
            .stream
            .capture(|stream| {
                stream.launch(&dispatch)?;
                stream.launch(&combine)
            })
            .expect("a graph");
        (0..num_layers + 20)
            .map(|_| {
                let begin = Instant::now();
                self.stream.replay(&graph).expect("replayed");
                self.wait();
                begin.elapsed()
            })
            .skip(20)
            .collect()
    }

    pub fn dispatch(&mut self, request: &Request) {
        self.layer = request.layer;
        let top_k = self.geometry.top_k as usize;
        let num_tokens = request.routes.len();
        assert!(num_tokens <= self.geometry.max_tokens as usize, "the request fits a frame");
        let rows: Vec<u16> =
            request.x.iter().map(|value| half::bf16::from_f32(*value).to_bits()).collect();
        let (mut idx, mut weights) =
            (vec![-1i32; num_tokens * top_k], vec![0f32; num_tokens * top_k]);
        for (token, routes) in request.routes.iter().enumerate() {
            for (place, (expert, weight)) in routes.iter().enumerate() {
                idx[token * top_k + place] = *expert as i32;
                weights[token * top_k + place] = *weight;
            }
        }
        // Poison shows rows that no kernel writes.
        self.write(&self.out, &vec![0xff; self.out.len() as usize]);
        self.write(&self.hidden_states, bytemuck::cast_slice(&rows));
        self.write(&self.topk_idx, bytemuck::cast_slice(&idx));
        self.write(&self.topk_weights, bytemuck::cast_slice(&weights));
        self.write(&self.num_tokens, &(num_tokens as u32).to_le_bytes());
        self.stream.launch(&self.prepared_dispatch()).expect("dispatch");
        self.wait();
    }

    fn prepared_dispatch(&self) -> PreparedKernel<DispatchParams> {
        let params = DispatchParams {
            version: DEVICE_ABI_VERSION,
            geometry: self.geometry,
            hidden_states: self.hidden_states.ptr(),
            topk_idx: self.topk_idx.ptr(),
            topk_weights: self.topk_weights.ptr(),
            num_tokens: self.num_tokens.ptr(),
            placement: self.placement.ptr(),
            state: self.state.ptr(),
            handle: self.handle.ptr(),
            client_id: self.client_id,
            capacity: self.geometry.max_tokens,
            layer: self.layer,
            num_experts: self.shape.num_experts,
            num_servers: 1,
            servers: self.table.ptr(),
            ..DispatchParams::zeroed()
        };
        // SAFETY: the client's memory has the size of its geometry, and outlives the launch.
        unsafe { self.gpu.prepare(params) }.expect("dispatch")
    }

    pub fn combine(&mut self, request: &Request) -> (Outcome, Vec<f32>) {
        self.stream.launch(&self.prepared_combine()).expect("combine");
        self.wait();
        self.outcome(request)
    }

    fn prepared_combine(&self) -> PreparedKernel<CombineParams> {
        let params = CombineParams {
            version: DEVICE_ABI_VERSION,
            geometry: self.geometry,
            handle: self.handle.ptr(),
            state: self.state.ptr(),
            out: self.out.ptr(),
            timeout_ns: self.timeout.as_nanos() as u64,
            capacity: self.geometry.max_tokens,
            num_servers: 1,
            servers: self.table.ptr(),
            ..CombineParams::zeroed()
        };
        // SAFETY: as for dispatch.
        unsafe { self.gpu.prepare(params) }.expect("combine")
    }

    fn outcome(&self, request: &Request) -> (Outcome, Vec<f32>) {
        let handle: Handle = self.read(&self.handle, 0);
        if handle.refused != 0 {
            let state: ClientState = self.read(&self.state, 0);
            let error = std::mem::offset_of!(ClientState, error) as u64;
            self.write_at(&self.state, error, &[0; size_of::<ErrorWord>()]);
            return (Outcome::Refused(state.error.observed & 0xffff), Vec::new());
        }
        if handle.missing != 0 {
            return (Outcome::Missing, Vec::new());
        }
        let hidden = self.geometry.hidden as usize;
        let mut bytes = vec![0u8; request.routes.len() * hidden * 2];
        self.gpu.read(&self.out, 0, &mut bytes, Instant::now() + PATIENCE).expect("read");
        let words = bytes.as_chunks::<2>().0;
        let rows = words.iter().map(|word| half::bf16::from_le_bytes(*word).to_f32()).collect();
        (Outcome::Answered, rows)
    }

    /// Writes into the server's slot in a manner that no kernel does.
    pub fn scribble(&self, offset: u64, bytes: &[u8]) {
        self.write_at(self.pair.peer_memory().expect("mapped"), offset, bytes);
    }

    /// The server's progress word.
    pub fn progress(&self) -> u64 {
        let offset = self.geometry.response_control_offset + p2p_core::slot::PROGRESS as u64;
        self.read(self.pair.own_memory(), offset)
    }

    /// Announces frame `number` with so many rows. The slot has only the header and rows of an earlier frame.
    pub fn announce(&self, number: u64, rows: u64) {
        let place = number % u64::from(self.geometry.num_frames);
        let at = self.geometry.control_offset + WORD_HEADER_OFFSET + place * WORD_STRIDE;
        self.scribble(at, &(number << ANNOUNCE_SHIFT | rows).to_le_bytes());
    }

    /// The status word of frame `number`.
    pub fn status(&self, number: u64) -> u64 {
        let place = number % u64::from(self.geometry.num_frames);
        let at = self.geometry.response_control_offset + WORD_STATUS_OFFSET + place * WORD_STRIDE;
        self.read(self.pair.own_memory(), at)
    }

    /// Replaces the client id in the next frames. Returns the old id.
    pub fn pretend(&mut self, client_id: u64) -> u64 {
        std::mem::replace(&mut self.client_id, client_id)
    }

    fn wait(&self) {
        self.stream.wait(Instant::now() + PATIENCE * 2).expect("the kernel ends");
    }

    fn write(&self, buffer: &GpuBuffer, bytes: &[u8]) {
        self.write_at(buffer, 0, bytes);
    }

    fn write_at(&self, buffer: &GpuBuffer, offset: u64, bytes: &[u8]) {
        self.gpu.write(buffer, offset, bytes, Instant::now() + PATIENCE).expect("write");
    }

    fn read<T: bytemuck::Pod>(&self, buffer: &GpuBuffer, offset: u64) -> T {
        let mut value = T::zeroed();
        let bytes = bytemuck::bytes_of_mut(&mut value);
        self.gpu.read(buffer, offset, bytes, Instant::now() + PATIENCE).expect("read");
        value
    }
}

/// `SY_WORD_HEADER` and `SY_ANNOUNCE_SHIFT` of the kernels' header.
const WORD_HEADER_OFFSET: u64 = 2048;
const ANNOUNCE_SHIFT: u32 = 24;
