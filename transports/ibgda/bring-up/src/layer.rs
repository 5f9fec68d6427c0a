//! A layer on a GPU as the fused kernels compute it: a client, a server of all experts, and input for them.

use std::mem::offset_of;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use bytemuck::{Pod, Zeroable};
use ibgda::Waits;
use kernels::abi::{
    ANSWER_HOLE, ClientPeer, ClientState, CombineParams, DEVICE_ABI_VERSION, DTYPE_F8_E4M3,
    DevicePtr, DispatchParams, EchoParams, ErrorWord, ExpertLists, ExpertRecvParams,
    ExpertSendParams, FLAG_CONTACT_ALL, FrameGeometry, Handle, Link, PATH_DIRECT, Placement,
    ServerPeer, ServerState, TAG_NONE,
};
use kernels::gpu::{Gpu, GpuBuffer, Stream};
use kernels::plan::KernelParams;

use crate::in_use::{InUse, Launches};
use crate::memory::pattern;
use crate::post::ErrorCompletion;

/// Frames of a shape that tuned kernels exist for.
pub(crate) fn geometry() -> Result<FrameGeometry> {
    FrameGeometry::new(HIDDEN, TOP_K, DTYPE_F8_E4M3, MAX_TOKENS, NUM_FRAMES)
        .context("the frames of the stage `fused`")
}

/// Tokens with their experts and weights, which `seed` and `salt` determine.
pub(crate) struct Input {
    num_tokens: u32,
    hidden_states: Vec<u16>,
    topk_idx: Vec<i32>,
    topk_weights: Vec<f32>,
}

impl Input {
    pub(crate) fn new(seed: u64, salt: u64, num_tokens: u32) -> Self {
        let num_values = (num_tokens * HIDDEN) as usize;
        let num_choices = (num_tokens * TOP_K) as usize;
        let bytes = pattern(seed, salt, num_values * 2 + num_choices * 2 + num_tokens as usize);
        let (values, rest) = bytes.split_at(num_values * 2);
        let (choices, firsts) = rest.split_at(num_choices * 2);
        // Any sign and fraction, and magnitudes from 2^-7 to 2^8: no infinities.
        let value = |pair: &[u8]| {
            let bits = u16::from_le_bytes([pair[0], pair[1]]);
            bits & 0x807f | (120 + (bits >> 7 & 15)) << 7
        };
        let hidden_states = values.chunks_exact(2).map(value).collect();
        let mut topk_idx = Vec::with_capacity(num_choices);
        let mut topk_weights = Vec::with_capacity(num_choices);
        for (idx, choice) in choices.chunks_exact(2).enumerate() {
            let (token, place) = (idx / TOP_K as usize, (idx % TOP_K as usize) as u32);
            // A stride without a common divisor, so that no token has an expert twice; few are masked.
            let expert = (u32::from(firsts[token]) + 11 * place) % NUM_EXPERTS;
            topk_idx.push(if choice[0] < 16 { -1 } else { expert as i32 });
            topk_weights.push((f32::from(choice[1]) + 1.0) / 256.0);
        }
        Self { num_tokens, hidden_states, topk_idx, topk_weights }
    }
}

/// Memory of a GPU, written and read while no kernel uses it.
struct Buffer {
    gpu: Gpu,
    buffer: GpuBuffer,
}

impl Buffer {
    fn zeroed(gpu: &Gpu, bytes: u64) -> Result<Self> {
        Ok(Self { gpu: gpu.clone(), buffer: gpu.alloc(bytes)? })
    }

    fn of<T: Pod>(gpu: &Gpu, values: &[T]) -> Result<Self> {
        let memory = Self::zeroed(gpu, size_of_val(values) as u64)?;
        memory.write(values)?;
        Ok(memory)
    }

    fn at(&self) -> DevicePtr {
        self.buffer.ptr()
    }

    fn write<T: Pod>(&self, values: &[T]) -> Result<()> {
        let deadline = Instant::now() + COPY_TIMEOUT;
        Ok(self.gpu.write(&self.buffer, 0, bytemuck::cast_slice(values), deadline)?)
    }

    fn read<T: Pod>(&self, count: usize) -> Result<Vec<T>> {
        let mut values = vec![T::zeroed(); count];
        let deadline = Instant::now() + COPY_TIMEOUT;
        let bytes = bytemuck::cast_slice_mut(&mut values);
        self.gpu.read(&self.buffer, 0, bytes, deadline)?;
        Ok(values)
    }
}

/// How kernels of a layer run.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Run {
    /// `FLAG_*` of all kernels.
    pub(crate) flags: u32,
    /// Of every wait.
    pub(crate) timeout: Duration,
}

impl Run {
    fn timeout_ns(self) -> u64 {
        u64::try_from(self.timeout.as_nanos()).unwrap_or(u64::MAX)
    }

    /// Launches a kernel and waits for its end.
    ///
    /// # Safety
    /// Pointers in `params` are to memory as large as documented, which the caller keeps: as [`InUse`], where
    /// this fails.
    unsafe fn launch<P: KernelParams>(self, gpu: &Gpu, stream: &Stream, params: P) -> Result<()> {
        // SAFETY: the caller's promise; the launch is waited for below, and by `InUse` if it does not end.
        let kernel = unsafe { gpu.prepare(params)? };
        stream.launch(&kernel).with_context(|| P::NAME)?;
        // Kernels end without help: each of their waits is bounded, and only a few follow one another.
        let deadline = Instant::now() + self.timeout * KERNEL_PATIENCE + COPY_TIMEOUT;
        stream.wait(deadline).with_context(|| format!("{} does not end", P::NAME))
    }
}

/// The sender of tokens.
pub(crate) struct Client {
    gpu: Gpu,
    stream: Stream,
    geometry: FrameGeometry,
    id: u64,
    hidden_states: Buffer,
    topk_idx: Buffer,
    topk_weights: Buffer,
    num_tokens: Buffer,
    placement: Buffer,
    state: Buffer,
    handle: Buffer,
    out: Buffer,
    table: Buffer,
}

impl Client {
    pub(crate) const fn stream(&self) -> &Stream {
        &self.stream
    }

    /// A client of one server. [`set_server`](Self::set_server) sets the server.
    pub(crate) fn new(gpu: &Gpu, geometry: FrameGeometry, id: u64) -> Result<Self> {
        let num_choices = u64::from(MAX_TOKENS * TOP_K);
        let row_bytes = u64::from(MAX_TOKENS * HIDDEN) * 2;
        let placement = Placement::new(1, &vec![vec![0]; NUM_EXPERTS as usize])?;
        Ok(Self {
            gpu: gpu.clone(),
            stream: gpu.stream()?,
            geometry,
            id,
            hidden_states: Buffer::zeroed(gpu, row_bytes)?,
            topk_idx: Buffer::zeroed(gpu, num_choices * 4)?,
            topk_weights: Buffer::zeroed(gpu, num_choices * 4)?,
            num_tokens: Buffer::of(gpu, &[0_u32])?,
            placement: Buffer::of(gpu, &[placement])?,
            state: Buffer::of(gpu, &[ClientState::zeroed()])?,
            handle: Buffer::zeroed(gpu, geometry.handle_bytes())?,
            out: Buffer::zeroed(gpu, row_bytes)?,
            table: Buffer::zeroed(gpu, size_of::<ServerPeer>() as u64)?,
        })
    }

    pub(crate) fn waits(&self, timeout: Duration) -> Waits {
        let error = self.state.at().add(offset_of!(ClientState, error) as u64);
        Waits { error, abort_mask: DevicePtr::NULL, timeout }
    }

    pub(crate) fn set_server(&self, line: ServerPeer) -> Result<()> {
        self.table.write(&[line])
    }

    /// Sends the tokens of `input`.
    pub(crate) fn dispatch(&self, input: &Input, run: Run) -> Result<()> {
        self.hidden_states.write(&input.hidden_states)?;
        self.topk_idx.write(&input.topk_idx)?;
        self.topk_weights.write(&input.topk_weights)?;
        self.num_tokens.write(&[input.num_tokens])?;
        let params = DispatchParams {
            version: DEVICE_ABI_VERSION,
            flags: run.flags | FLAG_CONTACT_ALL,
            geometry: self.geometry,
            hidden_states: self.hidden_states.at(),
            topk_idx: self.topk_idx.at(),
            topk_weights: self.topk_weights.at(),
            num_tokens: self.num_tokens.at(),
            placement: self.placement.at(),
            state: self.state.at(),
            handle: self.handle.at(),
            trace: DevicePtr::NULL,
            client_id: self.id,
            trace_len: 0,
            capacity: MAX_TOKENS,
            layer: 0,
            num_experts: NUM_EXPERTS,
            num_servers: 1,
            num_blocks: 0,
            servers: self.table.at(),
        };
        // SAFETY: all of it is this client's, and slots are as large as the geometry says.
        unsafe { run.launch(&self.gpu, &self.stream, params) }?;
        self.check("dispatch")
    }

    /// Waits for the answers to the last dispatch, and gives their sums, bf16.
    pub(crate) fn combine(&self, input: &Input, run: Run) -> Result<Vec<u16>> {
        let num_values = (input.num_tokens * HIDDEN) as usize;
        // Nothing of before may pass for a result.
        self.out.write(&vec![0xffff_u16; num_values])?;
        let params = CombineParams {
            version: DEVICE_ABI_VERSION,
            flags: run.flags,
            geometry: self.geometry,
            handle: self.handle.at(),
            state: self.state.at(),
            out: self.out.at(),
            token_missing: DevicePtr::NULL,
            abort_mask: DevicePtr::NULL,
            timeout_ns: run.timeout_ns(),
            capacity: MAX_TOKENS,
            num_servers: 1,
            num_blocks: 0,
            trace_len: 0,
            servers: self.table.at(),
            trace: DevicePtr::NULL,
        };
        // SAFETY: as for `dispatch`.
        unsafe { run.launch(&self.gpu, &self.stream, params) }?;
        self.check("combine")?;
        let handle: Handle = self.handle.read(1)?[0];
        ensure!(
            (handle.contacted, handle.missing, handle.refused) == (1, 0, 0),
            "combine: servers contacted {:#x}, missing {:#x}, refused {:#x}; expected 0x1, 0x0, 0x0",
            handle.contacted,
            handle.missing,
            handle.refused
        );
        self.out.read(num_values)
    }

    fn check(&self, kernel: &str) -> Result<()> {
        no_error(kernel, &self.state.read::<ClientState>(1)?[0].error)
    }
}

/// The owner of the experts, which return their input.
pub(crate) struct Server {
    gpu: Gpu,
    stream: Stream,
    geometry: FrameGeometry,
    state: Buffer,
    local_expert: Buffer,
    lists: ExpertLists,
    table: Buffer,
    // `lists` points into it.
    _lists: Buffer,
}

impl Server {
    pub(crate) const fn stream(&self) -> &Stream {
        &self.stream
    }

    /// A server of one client. [`set_client`](Self::set_client) sets the client.
    pub(crate) fn new(gpu: &Gpu, geometry: FrameGeometry) -> Result<Self> {
        let local_expert: Vec<i16> = (0..NUM_EXPERTS as i16).collect();
        let (_, bytes) = geometry.lists_at(DevicePtr::NULL, NUM_EXPERTS, MAX_TOKENS);
        let memory = Buffer::zeroed(gpu, bytes)?;
        Ok(Self {
            gpu: gpu.clone(),
            stream: gpu.stream()?,
            geometry,
            state: Buffer::of(gpu, &[ServerState::zeroed()])?,
            local_expert: Buffer::of(gpu, &local_expert)?,
            lists: geometry.lists_at(memory.at(), NUM_EXPERTS, MAX_TOKENS).0,
            table: Buffer::zeroed(gpu, size_of::<ClientPeer>() as u64)?,
            _lists: memory,
        })
    }

    pub(crate) fn waits(&self, timeout: Duration) -> Waits {
        let error = self.state.at().add(offset_of!(ServerState, error) as u64);
        Waits { error, abort_mask: DevicePtr::NULL, timeout }
    }

    pub(crate) fn set_client(&self, line: ClientPeer) -> Result<()> {
        self.table.write(&[line])
    }

    /// Waits for the client's frame `number`, from 1, and answers it: by one kernel, or by those that sort rows by
    /// expert and back.
    pub(crate) fn serve(&self, number: u64, is_echo: bool, run: Run) -> Result<()> {
        let kernel = if is_echo {
            // SAFETY: all of it is this server's, and slots are as large as the geometry says.
            unsafe { run.launch(&self.gpu, &self.stream, self.echo_params(run)) }?;
            "echo"
        } else {
            // SAFETY: as above; null stands for identity experts.
            unsafe {
                run.launch(&self.gpu, &self.stream, self.recv_params(run))?;
                run.launch(&self.gpu, &self.stream, self.send_params(run))?;
            }
            "expert_recv and expert_send"
        };
        let state: ServerState = self.state.read(1)?[0];
        let seconds = run.timeout.as_secs_f64();
        ensure!(
            state.taken[0] == number,
            "{kernel}: the client's frame {number} did not come within {seconds} s: {} were taken{}",
            state.taken[0],
            describe(&state.error)
        );
        ensure!(state.num_refused == 0, "{kernel}: {} frames were refused", state.num_refused);
        no_error(kernel, &state.error)
    }

    fn echo_params(&self, run: Run) -> EchoParams {
        EchoParams {
            version: DEVICE_ABI_VERSION,
            flags: run.flags,
            geometry: self.geometry,
            state: self.state.at(),
            abort_mask: DevicePtr::NULL,
            timeout_ns: run.timeout_ns(),
            capacity: MAX_TOKENS,
            num_clients: 1,
            num_blocks: 0,
            reserved: 0,
            clients: self.table.at(),
        }
    }

    fn recv_params(&self, run: Run) -> ExpertRecvParams {
        ExpertRecvParams {
            version: DEVICE_ABI_VERSION,
            flags: run.flags,
            geometry: self.geometry,
            state: self.state.at(),
            lists: self.lists,
            local_expert: self.local_expert.at(),
            abort_mask: DevicePtr::NULL,
            min_epoch: DevicePtr::NULL,
            timeout_ns: run.timeout_ns(),
            min_ready: 1,
            num_experts: NUM_EXPERTS,
            num_local_experts: NUM_EXPERTS,
            num_layers: 1,
            num_clients: 1,
            gather_ns: 0,
            gather: DevicePtr::NULL,
            clients: self.table.at(),
        }
    }

    fn send_params(&self, run: Run) -> ExpertSendParams {
        ExpertSendParams {
            version: DEVICE_ABI_VERSION,
            flags: run.flags,
            geometry: self.geometry,
            lists: self.lists,
            expert_out: DevicePtr::NULL,
            max_rows: self.lists.max_rows,
            num_clients: 1,
            num_blocks: 0,
            reserved: 0,
            clients: self.table.at(),
        }
    }
}

/// A client and a server of one GPU that store into each other's slots: the reference for all comparisons.
pub(crate) struct Direct {
    client: Client,
    server: Server,
    // The objects that the tables point to.
    _slots: [Buffer; 2],
    num_layers: u64,
}

impl Launches for Direct {
    fn streams(&self) -> [&Stream; 2] {
        [self.client.stream(), self.server.stream()]
    }
}

impl Direct {
    pub(crate) fn new(gpu: &Gpu, geometry: FrameGeometry, id: u64) -> Result<InUse<Self>> {
        let (client, server) = (Client::new(gpu, geometry, id)?, Server::new(gpu, geometry)?);
        let request = Buffer::zeroed(gpu, geometry.slot_bytes)?;
        let mut response = vec![0u8; usize::try_from(geometry.response_slot_bytes)?];
        for (offset, bytes) in geometry.answer_rows() {
            response[offset as usize..][..bytes as usize].fill(ANSWER_HOLE as u8);
        }
        let response = Buffer::of(gpu, &response)?;
        let link =
            |slot: &Buffer| Link { window: slot.at(), context: 0, path: PATH_DIRECT, reserved: 0 };
        client.set_server(ServerPeer {
            request: link(&request),
            response: response.at(),
            generation: GENERATION,
            reserved: 0,
        })?;
        server.set_client(ClientPeer {
            request: request.at(),
            response: link(&response),
            client_id: id,
            generation: GENERATION,
            reserved: 0,
        })?;
        Ok(InUse::new(Self { client, server, _slots: [request, response], num_layers: 0 }))
    }

    pub(crate) fn layer(&mut self, input: &Input, timeout: Duration) -> Result<Vec<u16>> {
        let run = Run { flags: 0, timeout };
        self.num_layers += 1;
        self.client.dispatch(input, run)?;
        self.server.serve(self.num_layers, false, run)?;
        self.client.combine(input, run)
    }
}

fn no_error(kernel: &str, error: &ErrorWord) -> Result<()> {
    ensure!(error.tag == TAG_NONE, "{kernel}{}", describe(error));
    Ok(())
}

/// An error word for people, empty if there is none.
fn describe(error: &ErrorWord) -> String {
    let ErrorWord { tag, reason, observed, expected, .. } = *error;
    match tag {
        TAG_NONE => String::new(),
        TAG_MLX5_COMPLETION => format!(": {}", ErrorCompletion::new(observed)),
        tag => format!(
            ": error word: tag {tag}, reason {reason}, observed {observed:#x}, expected {expected:#x}"
        ),
    }
}

/// In the tables of peers and in frames.
pub(crate) const GENERATION: u32 = 1;
/// Most tokens of a layer.
pub(crate) const MAX_TOKENS: u32 = 16;
/// Values of a token.
pub(crate) const HIDDEN: u32 = 7168;
const TOP_K: u32 = 8;
const NUM_EXPERTS: u32 = 64;
const NUM_FRAMES: u32 = 2;
/// `SY_TAG_MLX5_COMPLETION`
const TAG_MLX5_COMPLETION: u32 = 35;
/// Time limit of a copy to or from the GPU.
const COPY_TIMEOUT: Duration = Duration::from_secs(30);
/// Waits of a kernel that may follow one another.
const KERNEL_PATIENCE: u32 = 4;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inputs_are_of_distinct_experts_and_finite_values() {
        let input = Input::new(3, 4, MAX_TOKENS);
        let mut num_masked = 0;
        for experts in input.topk_idx.chunks(TOP_K as usize) {
            let mut used: Vec<i32> =
                experts.iter().copied().filter(|expert| *expert >= 0).collect();
            num_masked += experts.len() - used.len();
            assert!(used.iter().all(|expert| *expert < NUM_EXPERTS as i32));
            used.sort_unstable();
            let num = used.len();
            used.dedup();
            assert_eq!(used.len(), num);
        }
        assert!(num_masked < input.topk_idx.len() / 4, "{num_masked}");
        assert!(input.hidden_states.iter().all(|bits| (120..136).contains(&(bits >> 7 & 0xff))));
        assert!(input.topk_weights.iter().all(|weight| (0.0..=1.0).contains(weight)));
        assert_eq!(input.hidden_states.len(), (MAX_TOKENS * HIDDEN) as usize);
        assert_ne!(Input::new(3, 5, 1).hidden_states, input.hidden_states[..HIDDEN as usize]);
        assert!(Input::new(3, 4, 0).hidden_states.is_empty());
    }

    #[test]
    fn an_error_word_names_a_completion() {
        let error = ErrorWord { tag: 35, observed: 0x1234_0d88_1303, ..ErrorWord::default() };
        assert!(describe(&error).contains("syndrome 0x13"), "{}", describe(&error));
        assert_eq!(describe(&ErrorWord::default()), "");
        let text = no_error("combine", &ErrorWord { tag: 2, reason: 1, ..error }).unwrap_err();
        assert!(text.to_string().starts_with("combine: error word: tag 2, reason 1"), "{text}");
    }
}
