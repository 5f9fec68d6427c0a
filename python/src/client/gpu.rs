//! The client of tensors in GPU memory: a `DeviceClient` that threads share, and the memory of its calls.

mod call;
mod staging;

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use attention_client::device::{Event, Gpu, GpuError, Stream};
use attention_client::prometheus::Registry;
use attention_client::{ClientError, ClientModel, DeviceClient, DeviceError};

use super::call::Failure;
use crate::dlpack::Owner;
use crate::interrupt::Interrupt;
pub use call::GpuCall;
use staging::{Counts, Staging};

/// A client whose arrays are in the memory of one GPU.
pub struct GpuClient {
    state: Mutex<State>,
    /// A call has ended.
    ended: Condvar,
    gpu: Gpu,
    model: ClientModel,
    registry: Registry,
    /// For arrays whose library does not say to which stream it gives its work.
    stream: Stream,
    limits: Limits,
    max_tokens: usize,
}

/// Limits of a client's waits, and of its calls.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Most calls that can be outstanding: frames of a slot.
    pub num_frames: usize,
    /// Longest wait of a call until it can be outstanding.
    pub turn: Duration,
    /// Longest wait for kernels before the client looks for the server that holds them up.
    pub work: Duration,
}

/// Memory that kernels of a call read and write.
#[derive(Default)]
struct Kept {
    staging: Staging,
    owners: Vec<Owner>,
    objects: Vec<pyo3::Py<pyo3::PyAny>>,
}

struct State {
    client: DeviceClient,
    counts: Counts,
    /// Staging memory of finished calls.
    spare: Vec<Staging>,
    /// Memory of abandoned calls. Their kernels may run until the next dispatch has returned.
    abandoned: Vec<Kept>,
    /// Calls that are neither finished nor abandoned.
    num_open: usize,
    /// Stream of the last launch whose kernels may still run.
    last: Option<u64>,
    event: Event,
}

impl GpuClient {
    /// Shares `client` between threads.
    ///
    /// # Errors
    /// [`GpuError::Driver`].
    pub fn new(client: DeviceClient, limits: Limits) -> Result<Self, GpuError> {
        let gpu = client.gpu().clone();
        let (model, registry) = (client.model().clone(), client.registry().clone());
        let max_tokens = client.max_tokens() as usize;
        let state = State {
            client,
            counts: Counts::default(),
            spare: Vec::new(),
            abandoned: Vec::new(),
            num_open: 0,
            last: None,
            event: gpu.event()?,
        };
        let stream = gpu.stream()?;
        let (state, ended) = (Mutex::new(state), Condvar::new());
        Ok(Self { state, ended, gpu, model, registry, stream, limits, max_tokens })
    }

    /// Most tokens of a frame.
    pub fn max_tokens(&self) -> usize {
        self.max_tokens
    }

    /// Tokens of one part of a larger batch. A frame holds them, and the rows of all arrays begin aligned.
    pub fn part_tokens(&self) -> usize {
        match self.max_tokens / ALIGNED_ROWS {
            0 => self.max_tokens.max(1),
            parts => parts * ALIGNED_ROWS,
        }
    }

    pub fn model(&self) -> &ClientModel {
        &self.model
    }

    pub fn registry(&self) -> &Registry {
        &self.registry
    }

    /// Number of the GPU among those of this process.
    pub fn ordinal(&self) -> u32 {
        self.gpu.ordinal()
    }

    /// Handle of the stream for arrays whose library does not say its own.
    pub fn own_stream(&self) -> u64 {
        self.stream.raw()
    }

    /// Blocks while another thread dispatches or finishes a call.
    pub fn epoch(&self) -> u64 {
        self.lock().client.epoch()
    }

    /// As [`epoch`](Self::epoch).
    pub fn replicas(&self, layer: u32, expert: u32) -> Vec<String> {
        self.lock().client.replicas(layer, expert)
    }

    /// Waits for a live replica of every expert, for `timeout` at most or until `interrupt`.
    pub fn wait_ready(&self, timeout: Duration, interrupt: &Interrupt) -> Result<(), DeviceError> {
        let start = Instant::now();
        loop {
            let step = timeout.saturating_sub(start.elapsed()).min(READY_STEP);
            let begun = Instant::now();
            let failure = match self.lock().client.wait_ready(step) {
                Ok(()) => return Ok(()),
                Err(failure) => failure,
            };
            // An earlier end means that waiting is futile.
            let is_final = begun.elapsed() < step
                || start.elapsed() >= timeout
                || !matches!(failure, DeviceError::Client(ClientError::NoReplica { .. }));
            if is_final || interrupt.is_due() {
                return Err(failure);
            }
        }
    }

    /// Keeps the arrays of a call that failed, whose kernels may still run, until the next dispatch has returned.
    pub fn keep(&self, objects: Vec<pyo3::Py<pyo3::PyAny>>) {
        self.lock().abandoned.push(Kept { objects, ..Kept::default() });
    }

    /// Never taken by a thread that is attached to the interpreter: freeing an array under it may need the interpreter.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks the state once another call can be outstanding.
    fn turn(&self, interrupt: &Interrupt) -> Result<MutexGuard<'_, State>, Failure> {
        let start = Instant::now();
        let mut state = self.lock();
        while state.num_open >= self.limits.num_frames {
            if start.elapsed() >= self.limits.turn {
                let num_frames = self.limits.num_frames as u32;
                return Err(DeviceError::Outstanding { num_frames }.into());
            }
            let waited = self.ended.wait_timeout(state, LOOK);
            drop(waited.unwrap_or_else(PoisonError::into_inner));
            if interrupt.is_due() {
                return Err(Failure::Client(ClientError::Cancelled));
            }
            state = self.lock();
        }
        Ok(state)
    }

    /// The stream with this handle.
    ///
    /// # Safety
    /// It stays alive as long as the result, and longer if a call is launched on it: until that call is finished.
    unsafe fn stream(&self, raw: u64) -> Result<Stream, GpuError> {
        // SAFETY: The caller's promise. Libraries use the primary context of their GPU, as `Gpu` does.
        unsafe { self.gpu.wrap_stream(raw) }
    }

    /// Waits until everything on `stream` is done, the limit on work is over, or `interrupt`. Returns false in the last
    /// case. Other threads may call the client meanwhile.
    fn watch(&self, stream: &Stream, interrupt: &Interrupt) -> Result<bool, GpuError> {
        let start = Instant::now();
        while !stream.is_done()? {
            let waited = start.elapsed();
            if waited >= self.limits.work {
                break;
            }
            if interrupt.is_due() {
                return Ok(false);
            }
            // As long as a layer usually takes, a sleep would add its own length.
            if waited > SPIN {
                std::thread::sleep(PAUSE);
            } else {
                std::hint::spin_loop();
            }
        }
        Ok(true)
    }
}

impl State {
    /// Orders later work of `stream` behind the launches of this client and behind `others`.
    ///
    /// # Safety
    /// All streams are alive.
    unsafe fn order(
        &mut self,
        gpu: &GpuClient,
        stream: &Stream,
        others: &[u64],
    ) -> Result<(), GpuError> {
        for &other in self.last.iter().chain(others) {
            if other != stream.raw() {
                // SAFETY: The caller's promise.
                unsafe { gpu.stream(other)? }.record(&self.event)?;
                stream.wait_for(&self.event)?;
            }
        }
        self.last = Some(stream.raw());
        Ok(())
    }

    /// Takes back the memory of calls that have ended.
    fn recycle(&mut self, kept: Kept) {
        let Kept { staging, owners, objects } = kept;
        if !staging.is_empty() {
            self.spare.push(staging);
        }
        drop((owners, objects));
        // The stream may be gone by the next call.
        if self.num_open == 0 && self.abandoned.is_empty() {
            self.last = None;
        }
    }
}

impl Drop for State {
    fn drop(&mut self) {
        // Kernels of abandoned calls may still run.
        std::mem::forget(std::mem::take(&mut self.abandoned));
    }
}

impl std::fmt::Debug for GpuClient {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GpuClient").field("gpu", &self.gpu.name()).finish_non_exhaustive()
    }
}

/// Rows of any array of so many rows are a multiple of 16 bytes.
const ALIGNED_ROWS: usize = 16;
/// Time between two looks for signals while waiting for replicas.
const READY_STEP: Duration = Duration::from_millis(50);
/// Time between two looks for signals while waiting for another call's end.
const LOOK: Duration = Duration::from_millis(20);
const SPIN: Duration = Duration::from_millis(10);
const PAUSE: Duration = Duration::from_micros(20);
