//! The pool: validates a batch, cuts it into tiles, and runs them on a team of threads.

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
/// Idle threads sleep. Scratch memory grows to the largest batch seen (intermediate activations
/// are bounded to 64 MiB) and is then reused: a batch of a size seen before allocates nothing, but for what a GEMM
/// library takes for itself where there are no vector kernels for the processor.
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
    /// A pool of `num_threads` threads (0: as many as the process has CPUs), one of which is
    /// whoever calls [`run`](Self::run).
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

    /// The same pool with all products by `products`, a GEMM library, over weights that are widened
    /// to f32 tile by tile: for comparisons.
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

    /// Computes `batch` into `out [num_tokens, hidden]`, overwriting it; rows of tokens without
    /// entries become zero. The calling thread works too, and calls `on_tick` between pieces of
    /// work, many times per millisecond.
    ///
    /// # Errors
    /// [`ComputeError`] when the batch is inconsistent or a worker panicked; `out` then holds
    /// nothing of use.
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

/// One batch on its way through the threads.
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
    /// Tiles done. A phase may start when all tiles before it are done.
    done: CachePadded<AtomicUsize>,
}

// SAFETY: `tick` is used by thread 0 alone, and `scratch[i]` by thread `i` alone. `h` and `out`
// are written in ranges that belong to one tile each, and `h` is read only in the phase after.
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
                    // The caller stays until everything is done, ticking.
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

    /// Waits until `num_tiles` tiles are done; false when a thread panicked instead. Bounded by
    /// the time that the other threads take for one tile each.
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

    /// `h[entry, rows] = silu(gate[rows] . x) * (up[rows] . x)` for one run of rows of one expert.
    fn gate_up(&self, phase: &Phase, idx: usize, scratch: &mut [f32], ticker: &mut Ticker<'_, '_>) {
        let (hidden, inter) = (self.experts.hidden(), self.experts.inter());
        let tiles = self.plan.gate_up_tiles(inter);
        let segment = &self.plan.segments[phase.first_segment + idx / tiles];
        let rows = tile_range(idx % tiles, self.plan.gate_up_rows, inter);
        let Some(weights) = self.weights(segment) else { return };
        let mut scratch = self.sizes.split(scratch);
        let use_gemm = self.prefers_gemm(segment);
        let [gate_rows, up_rows] = [&weights.gate, &weights.up].map(|weight| {
            let rows = rows.clone();
            self.operand(weight, rows, use_gemm, &mut scratch.panel, ticker)
        });
        let step = step_tokens(2 * rows.len(), hidden);
        let mut begin = segment.begin;
        while begin < segment.end {
            let end = segment.end.min(begin + step);
            let tokens = &self.batch.entry_token[begin..end];
            let x = Rows { data: self.batch.x, len: hidden, rows: RowIds::List(tokens) };
            let (gate, up) = scratch.y.split_at_mut(rows.len() * (end - begin));
            let up = &mut up[..gate.len()];
            self.multiply(&gate_rows, x, scratch.spare, gate);
            self.multiply(&up_rows, x, scratch.spare, up);
            for entry in begin..end {
                let at = (entry - begin) * rows.len()..(entry - begin + 1) * rows.len();
                let h_row = segment.h_row + entry - segment.begin;
                // SAFETY: only this tile writes these columns of this row in this phase, and
                // nobody reads them before the next.
                unsafe {
                    let h = self.h.columns(h_row, rows.clone());
                    self.kernels.silu_mul(&gate[at.clone()], &up[at], h);
                }
            }
            ticker.add(2 * rows.len() * hidden * (end - begin));
            begin = end;
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
        // SAFETY: all writes to `h` were in the phase before, which is over.
        let h = unsafe { self.h.as_slice() };
        for segment in &self.plan.segments[phase.first_segment..][..phase.num_segments] {
            let Some(weights) = self.weights(segment) else { return };
            let mut scratch = self.sizes.split(scratch);
            let use_gemm = self.prefers_gemm(segment);
            let down_rows =
                self.operand(&weights.down, cols.clone(), use_gemm, &mut scratch.panel, ticker);
            let mut begin = segment.begin;
            while begin < segment.end {
                let num = (segment.end - begin).min(step);
                let first = segment.h_row + begin - segment.begin;
                let rows = Rows { data: h, len: inter, rows: RowIds::Run(first, num) };
                let y = &mut scratch.y[..num * cols.len()];
                self.multiply(&down_rows, rows, scratch.spare, y);
                for (y, entry) in y.chunks_exact(cols.len()).zip(begin..begin + num) {
                    let token = self.batch.entry_token[entry] as usize;
                    // SAFETY: only this tile touches these columns of the output in this phase.
                    unsafe {
                        let out = self.out.columns(token, cols.clone());
                        self.kernels.axpy(self.batch.entry_weight[entry], y, out);
                    }
                }
                ticker.add(cols.len() * inter * num);
                begin += num;
            }
        }
    }

    /// Rows of a weight as they are stored or, for a GEMM, widened into `panel`.
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
        self.kernels.widen(weight, rows, 0..weight.cols(), widened);
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

    /// Weights of a segment; present, since the batch was validated against the same experts.
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

/// How a thread's scratch memory is divided, in values.
#[derive(Clone, Copy)]
struct ScratchSizes {
    y: usize,
    panel: usize,
    spare: usize,
}

struct Scratch<'s> {
    /// Results of one step, of two matrices at most.
    y: &'s mut [f32],
    /// Widened weights of one tile, of two matrices at most.
    panel: &'s mut [f32],
    /// Token rows side by side, for a GEMM.
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

/// Calls `on_tick` on the calling thread whenever enough work has gone by.
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

    /// Pointer to some columns of a row, checked to lie inside.
    ///
    /// # Safety
    /// The caller reads or writes no further than `columns`, and nobody else accesses them.
    unsafe fn columns(&self, row: usize, columns: Range<usize>) -> *mut f32 {
        assert!(columns.end <= self.row_len && (row + 1) * self.row_len <= self.len);
        // SAFETY: within the allocation, as just checked.
        unsafe { self.ptr.add(row * self.row_len + columns.start) }
    }

    /// # Safety
    /// Nobody writes while the slice lives.
    unsafe fn as_slice(&self) -> &[f32] {
        // SAFETY: the memory is borrowed for `'a`; not written, as promised.
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

/// Lengthens a buffer, never shortens it. New values are NaN, so that a value which is used
/// before it is computed shows.
fn grow(buffer: &mut Vec<f32>, len: usize) {
    if buffer.len() < len {
        buffer.resize(len, f32::NAN);
    }
}

/// Multiplications between two ticks: 170 µs at 200 GFLOP/s, 1 ms at 34.
const TICK_WORK: usize = 16 << 20;
/// Tokens between two ticks at most.
const MAX_STEP_TOKENS: usize = 16 * MAX_TOKENS;
/// What one wait counts for.
const WAIT_WORK: usize = TICK_WORK / 64;
