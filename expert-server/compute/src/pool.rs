//! The compute pool: validates a batch, cuts it into tiles, and runs the tiles on a team of threads.

use std::cell::UnsafeCell;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use crossbeam_utils::CachePadded;

use super::batch::{ComputeError, LayerBatch};
use super::kernels::{Isa, Kernels, MAX_TOKENS, RowIds, Rows, gemm};
use super::plan::{Phase, PhaseKind, Plan, Segment};
use super::team::{AbortFlag, Backoff, Pinning, PoolError, Team};
use super::weights::{ExpertWeights, LayerExperts, Weight};

/// Threads and scratch memory that compute one batch at a time.
///
/// Idle threads sleep. Scratch memory grows to the largest batch and is reused; intermediate activations take
/// at most 64 MiB. A batch of a size seen before allocates nothing. The exception is a processor without
/// vector kernels: there the GEMM library allocates its own memory.
pub struct ComputePool {
    team: Team,
    abort: AbortFlag,
    kernels: Kernels,
    products: Option<Products>,
    plan: Plan,
    h: Vec<f32>,
    scratch: Vec<CachePadded<UnsafeCell<Vec<f32>>>>,
}

/// Matrix products `y[t, i] = sum_k w[i, k] * x[t, k]` of row-major f32 matrices `w [num_rows, len]`,
/// `x [num_tokens, len]` and `y [num_tokens, num_rows]`: `(w, x, len, y)`.
pub type Products = fn(&[f32], &[f32], usize, &mut [f32]);

impl ComputePool {
    /// Starts a pool of `num_threads` threads (0: as many as the process has CPUs). The caller of
    /// [`run`](Self::run) is one of them.
    ///
    /// # Errors
    /// [`PoolError`] when a thread cannot be started or pinned.
    pub fn new(num_threads: usize, pinning: Option<Pinning>) -> Result<Self, PoolError> {
        Self::with_isa(num_threads, pinning, Isa::detect())
    }

    /// Like [`new`](Self::new), with an instruction set other than the best one.
    ///
    /// # Errors
    /// [`PoolError`] when the processor lacks `isa`, or a thread cannot be started or pinned.
    pub fn with_isa(
        num_threads: usize,
        pinning: Option<Pinning>,
        isa: Isa,
    ) -> Result<Self, PoolError> {
        let kernels = Kernels::new(isa).ok_or(PoolError::Isa { isa })?;
        let team = Team::new(num_threads, pinning.as_ref())?;
        let scratch = (0..team.num_threads()).map(|_| CachePadded::default()).collect();
        let abort = team.abort_flag();
        let (plan, h) = (Plan::default(), Vec::new());
        Ok(Self { team, abort, kernels, products: None, plan, h, scratch })
    }

    /// Makes the pool compute all products by `products`, over weights that are widened to f32 tile by tile. For
    /// comparisons with GEMM libraries.
    #[must_use]
    pub fn with_products(mut self, products: Products) -> Self {
        self.products = Some(products);
        self
    }

    /// Number of threads, the caller included.
    #[must_use]
    pub fn num_threads(&self) -> usize {
        self.team.num_threads()
    }

    /// The instruction set in use.
    #[must_use]
    pub fn isa(&self) -> Isa {
        self.kernels.isa()
    }

    /// Computes `batch` and writes the result to `out [num_tokens, hidden]`. Rows of tokens without entries
    /// become zero. The calling thread computes, too, and calls `on_tick` between pieces of work, many times
    /// per millisecond. Blocks until the batch is done.
    ///
    /// # Errors
    /// [`ComputeError`] when the batch is inconsistent or a compute thread panicked. The contents of `out`
    /// are then unspecified.
    pub fn run(
        &mut self,
        experts: &LayerExperts,
        batch: &LayerBatch<'_>,
        out: &mut [f32],
        on_tick: &mut dyn FnMut(),
    ) -> Result<(), ComputeError> {
        let num_tokens = batch.validate(experts, out.len())?;
        self.plan.build(experts, batch);
        if self.plan.num_tiles == 0 {
            out.fill(0.0);
            return Ok(());
        }
        grow(&mut self.h, self.plan.max_h_rows * experts.inter());
        let uses_gemm = self.products.is_some() || self.kernels.prefers_gemm(usize::MAX);
        let sizes = ScratchSizes::new(uses_gemm, &self.plan, experts);
        for scratch in &mut self.scratch {
            grow(scratch.get_mut(), sizes.total());
        }
        let job = Job {
            kernels: self.kernels,
            products: self.products,
            plan: &self.plan,
            experts,
            batch,
            num_tokens,
            h: SharedRows::new(&mut self.h, experts.inter()),
            out: SharedRows::new(out, experts.hidden()),
            scratch: &self.scratch,
            sizes,
            tick: UnsafeCell::new(on_tick),
            abort: &self.abort,
            next: CachePadded::new(AtomicUsize::new(0)),
            done: CachePadded::new(AtomicUsize::new(0)),
        };
        let work = |thread: usize| job.work(thread);
        self.team.run(&work).map_err(|thread| ComputeError::WorkerPanicked { thread })
    }
}

impl std::fmt::Debug for ComputePool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ComputePool")
            .field("num_threads", &self.num_threads())
            .field("isa", &self.isa())
            .finish_non_exhaustive()
    }
}

/// The batch that the threads compute.
struct Job<'a> {
    kernels: Kernels,
    products: Option<Products>,
    plan: &'a Plan,
    experts: &'a LayerExperts,
    batch: &'a LayerBatch<'a>,
    num_tokens: usize,
    /// `[entries of the round, inter]`.
    h: SharedRows<'a>,
    /// `[num_tokens, hidden]`.
    out: SharedRows<'a>,
    scratch: &'a [CachePadded<UnsafeCell<Vec<f32>>>],
    sizes: ScratchSizes,
    /// Used by thread 0 only.
    tick: UnsafeCell<&'a mut dyn FnMut()>,
    abort: &'a AbortFlag,
    /// The next ticket.
    next: CachePadded<AtomicUsize>,
    /// Number of tiles done. A phase may start when all earlier tiles are done.
    done: CachePadded<AtomicUsize>,
}

// SAFETY: thread 0 alone uses `tick`, and thread `i` alone uses `scratch[i]`. Each tile writes its own ranges
// of `h` and `out`, and `h` is read only in the phase after its writes.
unsafe impl Sync for Job<'_> {}

impl Job<'_> {
    fn work(&self, thread: usize) {
        let mut ticker = Ticker { job: self, is_caller: thread == 0, work: 0 };
        // SAFETY: thread `thread` alone uses this cell, once per piece of work.
        let scratch = unsafe { &mut *self.scratch[thread].get() };
        let mut phases = self.plan.phases.iter();
        let mut current: Option<&Phase> = None;
        loop {
            let ticket = self.next.fetch_add(1, Ordering::Relaxed);
            while current.is_none_or(|phase| ticket >= phase.first_tile + phase.num_tiles) {
                current = phases.next();
                if current.is_none() {
                    // The caller stays and ticks until all tiles are done.
                    if thread == 0 {
                        self.wait_for(self.plan.num_tiles, &mut ticker);
                    }
                    return;
                }
            }
            let Some(phase) = current else { return };
            if !self.wait_for(phase.first_tile, &mut ticker) {
                return;
            }
            let idx = ticket - phase.first_tile;
            match phase.kind {
                PhaseKind::GateUp => self.gate_up(phase, idx, scratch, &mut ticker),
                PhaseKind::Down => self.down(phase, idx, scratch, &mut ticker),
            }
            // SYNC POINT compute-phase: publishes this tile's results to the next phase.
            self.done.fetch_add(1, Ordering::Release);
        }
    }

    /// Waits until `num_tiles` tiles are done. Returns false if a thread panicked instead. Waits at most for
    /// the time of one tile per thread.
    fn wait_for(&self, num_tiles: usize, ticker: &mut Ticker<'_, '_>) -> bool {
        let mut backoff = Backoff::default();
        // SYNC POINT compute-phase: pairs with the end of each tile.
        while self.done.load(Ordering::Acquire) < num_tiles {
            if self.abort.is_set() {
                return false;
            }
            backoff.wait();
            ticker.add(WAIT_WORK);
        }
        true
    }

    /// `h[entry, rows] = activation(gate[rows] . x, up[rows] . x)` for one run of rows of one expert.
    fn gate_up(&self, phase: &Phase, idx: usize, scratch: &mut [f32], ticker: &mut Ticker<'_, '_>) {
        let (hidden, inter) = (self.experts.hidden(), self.experts.inter());
        let activation = self.experts.activation();
        let tiles = self.plan.gate_up_tiles(inter);
        let segment = &self.plan.segments[phase.first_segment + idx / tiles];
        let rows = tile_range(idx % tiles, self.plan.gate_up_rows, inter);
        let Some(weights) = self.weights(segment) else { return };
        let mut scratch = self.sizes.split(scratch);
        let use_gemm = self.prefers_gemm(segment);
        let mut operand =
            |weight| self.operand(weight, rows.clone(), use_gemm, &mut scratch.panel, ticker);
        let gate_rows = weights.gate.as_ref().map(&mut operand);
        let up_rows = operand(&weights.up);
        let biases = weights.biases.as_ref();
        let gate_bias = biases.filter(|_| gate_rows.is_some()).map(|b| &b.gate[rows.clone()]);
        let up_bias = biases.map(|b| &b.up[rows.clone()]);
        let num_matrices = if gate_rows.is_some() { 2 } else { 1 };
        let step = step_tokens(num_matrices * rows.len(), hidden);
        let mut begin = segment.begin;
        while begin < segment.end {
            let end = segment.end.min(begin + step);
            let tokens = &self.batch.entry_token[begin..end];
            let x = Rows { data: self.batch.x, len: hidden, rows: RowIds::List(tokens) };
            let num = rows.len() * (end - begin);
            let (up, gate) = scratch.y.split_at_mut(num);
            self.multiply(&up_rows, x, scratch.spare, up);
            self.finish(up, begin, rows.len(), up_bias);
            let gate: &[f32] = match &gate_rows {
                None => &[],
                Some(gate_rows) => {
                    let gate = &mut gate[..num];
                    self.multiply(gate_rows, x, scratch.spare, gate);
                    self.finish(gate, begin, rows.len(), gate_bias);
                    gate
                }
            };
            for entry in begin..end {
                let at = (entry - begin) * rows.len()..(entry - begin + 1) * rows.len();
                let h_row = segment.h_row + entry - segment.begin;
                let gate = if gate.is_empty() { &[] } else { &gate[at.clone()] };
                // SAFETY: in this phase only this tile writes these columns of this row, and no tile reads them
                // before the next phase.
                unsafe {
                    let h = self.h.columns(h_row, rows.clone());
                    self.kernels.activate(activation, gate, &up[at], h);
                }
            }
            ticker.add(num_matrices * rows.len() * hidden * (end - begin));
            begin = end;
        }
    }

    /// Applies the factors of entries from `begin` on, if they belong to the input, and a bias, to products
    /// `y [entries, len]`. The products are linear, so a factor of the input is one of the product.
    fn finish(&self, y: &mut [f32], begin: usize, len: usize, bias: Option<&[f32]>) {
        let weights_input = self.experts.weights_input();
        if !weights_input && bias.is_none() {
            return;
        }
        for (y, entry) in y.chunks_exact_mut(len).zip(begin..) {
            if weights_input {
                let factor = self.batch.entry_weight[entry];
                y.iter_mut().for_each(|y| *y *= factor);
            }
            if let Some(bias) = bias {
                y.iter_mut().zip(bias).for_each(|(y, bias)| *y += bias);
            }
        }
    }

    /// `out[token, cols] = sum over entries of weight * (down[cols] . h[entry])` for one run of
    /// output columns, which are rows of `down`.
    fn down(&self, phase: &Phase, idx: usize, scratch: &mut [f32], ticker: &mut Ticker<'_, '_>) {
        let (hidden, inter) = (self.experts.hidden(), self.experts.inter());
        let cols = tile_range(idx, self.plan.down_rows, hidden);
        if phase.first_segment == 0 {
            for token in 0..self.num_tokens {
                // SAFETY: only this tile touches these columns of the output in this phase.
                unsafe { self.out.columns(token, cols.clone()).write_bytes(0, cols.len()) };
            }
        }
        let step = step_tokens(cols.len(), inter);
        let weights_input = self.experts.weights_input();
        // SAFETY: all writes to `h` were in the previous phase, which has ended.
        let h = unsafe { self.h.as_slice() };
        for segment in &self.plan.segments[phase.first_segment..][..phase.num_segments] {
            let Some(weights) = self.weights(segment) else { return };
            let mut scratch = self.sizes.split(scratch);
            let use_gemm = self.prefers_gemm(segment);
            let down_rows =
                self.operand(&weights.down, cols.clone(), use_gemm, &mut scratch.panel, ticker);
            let bias = weights.biases.as_ref().map(|biases| &biases.down[cols.clone()]);
            let mut begin = segment.begin;
            while begin < segment.end {
                let num = (segment.end - begin).min(step);
                let first = segment.h_row + begin - segment.begin;
                let rows = Rows { data: h, len: inter, rows: RowIds::Run(first, num) };
                let y = &mut scratch.y[..num * cols.len()];
                self.multiply(&down_rows, rows, scratch.spare, y);
                for (y, entry) in y.chunks_exact_mut(cols.len()).zip(begin..begin + num) {
                    if let Some(bias) = bias {
                        y.iter_mut().zip(bias).for_each(|(y, bias)| *y += bias);
                    }
                    let token = self.batch.entry_token[entry] as usize;
                    let factor = if weights_input { 1.0 } else { self.batch.entry_weight[entry] };
                    // SAFETY: only this tile touches these columns of the output in this phase.
                    unsafe {
                        let out = self.out.columns(token, cols.clone());
                        self.kernels.axpy(factor, y, out);
                    }
                }
                ticker.add(cols.len() * inter * num);
                begin += num;
            }
        }
    }

    /// Rows of a weight, as they are stored or widened into `panel` for a GEMM.
    fn operand<'w>(
        &self,
        weight: &'w Weight,
        rows: Range<usize>,
        use_gemm: bool,
        panel: &mut &'w mut [f32],
        ticker: &mut Ticker<'_, '_>,
    ) -> Operand<'w> {
        if !use_gemm {
            return Operand::Stored(weight, rows);
        }
        let size = rows.len() * weight.cols();
        let (widened, rest) = std::mem::take(panel).split_at_mut(size);
        *panel = rest;
        self.kernels.widen(weight, rows, widened);
        ticker.add(size);
        Operand::Panel(widened)
    }

    /// `y [num_tokens, num_rows] = x . weights^T`. `spare` is scratch memory for a GEMM.
    fn multiply(&self, weights: &Operand<'_>, x: Rows<'_>, spare: &mut [f32], y: &mut [f32]) {
        match weights {
            Operand::Stored(weight, rows) => {
                self.kernels.dot(weight, rows.clone(), x, y);
            }
            Operand::Panel(panel) => {
                let gathered = &mut spare[..x.rows.len() * x.len];
                for (idx, row) in gathered.chunks_exact_mut(x.len).enumerate() {
                    row.copy_from_slice(x.row(idx));
                }
                self.products.unwrap_or(gemm)(panel, gathered, x.len, y);
            }
        }
    }

    fn prefers_gemm(&self, segment: &Segment) -> bool {
        self.products.is_some() || self.kernels.prefers_gemm(segment.end - segment.begin)
    }

    /// Weights of a segment. They are present, because the batch was validated against the same experts.
    fn weights(&self, segment: &Segment) -> Option<&ExpertWeights> {
        self.experts.get(segment.expert).map(|weights| &**weights)
    }
}

/// One side of a multiplication.
enum Operand<'w> {
    /// Rows of a weight.
    Stored(&'w Weight, Range<usize>),
    /// Rows widened to f32.
    Panel(&'w [f32]),
}

/// Sizes of the parts of a thread's scratch memory, in values.
#[derive(Clone, Copy)]
struct ScratchSizes {
    y: usize,
    panel: usize,
    spare: usize,
}

struct Scratch<'s> {
    /// Results of one step for up to two matrices.
    y: &'s mut [f32],
    /// Widened weights of one tile for up to two matrices.
    panel: &'s mut [f32],
    /// Contiguous token rows, for a GEMM.
    spare: &'s mut [f32],
}

impl ScratchSizes {
    fn new(uses_gemm: bool, plan: &Plan, experts: &LayerExperts) -> Self {
        let (hidden, inter) = (experts.hidden(), experts.inter());
        let (up_rows, down_rows) = (plan.gate_up_rows, plan.down_rows);
        let y = (2 * up_rows).max(down_rows) * MAX_STEP_TOKENS;
        if !uses_gemm {
            return Self { y, panel: 0, spare: 0 };
        }
        let panel = (2 * up_rows * hidden).max(down_rows * inter);
        Self { y, panel, spare: MAX_STEP_TOKENS * hidden.max(inter) }
    }

    fn total(&self) -> usize {
        self.y + self.panel + self.spare
    }

    fn split<'s>(&self, memory: &'s mut [f32]) -> Scratch<'s> {
        let (y, rest) = memory.split_at_mut(self.y);
        let (panel, rest) = rest.split_at_mut(self.panel);
        Scratch { y, panel, spare: &mut rest[..self.spare] }
    }
}

/// Calls `on_tick` on the calling thread after every [`TICK_WORK`] multiplications.
struct Ticker<'a, 'job> {
    job: &'a Job<'job>,
    is_caller: bool,
    work: usize,
}

impl Ticker<'_, '_> {
    /// Counts `work` multiplications.
    fn add(&mut self, work: usize) {
        self.work += work;
        if self.work >= TICK_WORK {
            self.work = 0;
            if self.is_caller {
                // SAFETY: thread 0 alone uses `tick`, and this borrow ends with the call.
                let tick = unsafe { &mut *self.job.tick.get() };
                tick();
            }
        }
    }
}

/// A matrix that threads write in disjoint parts.
struct SharedRows<'a> {
    ptr: *mut f32,
    len: usize,
    row_len: usize,
    _borrow: std::marker::PhantomData<&'a mut [f32]>,
}

impl<'a> SharedRows<'a> {
    fn new(data: &'a mut [f32], row_len: usize) -> Self {
        let (ptr, len) = (data.as_mut_ptr(), data.len());
        Self { ptr, len, row_len, _borrow: std::marker::PhantomData }
    }

    /// Pointer to columns of a row. Panics if they are out of range.
    ///
    /// # Safety
    /// The caller accesses only `columns`, and no other thread accesses them meanwhile.
    unsafe fn columns(&self, row: usize, columns: Range<usize>) -> *mut f32 {
        assert!(columns.end <= self.row_len && (row + 1) * self.row_len <= self.len);
        // SAFETY: within the allocation, as just checked.
        unsafe { self.ptr.add(row * self.row_len + columns.start) }
    }

    /// # Safety
    /// No thread writes while the slice lives.
    unsafe fn as_slice(&self) -> &[f32] {
        // SAFETY: the memory is borrowed for `'a`, and the caller promises that it is not written.
        unsafe { std::slice::from_raw_parts(self.ptr, self.len) }
    }
}

fn tile_range(idx: usize, rows: usize, end: usize) -> Range<usize> {
    idx * rows..((idx + 1) * rows).min(end)
}

/// Tokens between two ticks for a tile of `rows` by `cols` weights.
fn step_tokens(rows: usize, cols: usize) -> usize {
    let fit = TICK_WORK / (rows * cols).max(1) / MAX_TOKENS * MAX_TOKENS;
    fit.clamp(MAX_TOKENS, MAX_STEP_TOKENS)
}

/// Lengthens a buffer, but never shortens it. New values are NaN, which shows a use of a value before its
/// computation.
fn grow(buffer: &mut Vec<f32>, len: usize) {
    if buffer.len() < len {
        buffer.resize(len, f32::NAN);
    }
}

/// Multiplications between two ticks: 170 µs at 200 GFLOP/s, 1 ms at 34.
const TICK_WORK: usize = 16 << 20;
/// Most tokens between two ticks.
const MAX_STEP_TOKENS: usize = 16 * MAX_TOKENS;
/// Multiplications that one wait counts as.
const WAIT_WORK: usize = TICK_WORK / 64;
