//! Work in order: copies, launches, graphs and places to wait for.

use std::time::{Duration, Instant};

use super::checksum::ChecksumParams;
use super::kind::Kind;
use super::{
    Checksum, ChecksumRange, Conversion, DeviceName, Event, GpuError, Graph, MAX_CHECKSUM_RANGES,
    MAX_CONVERSIONS, PreparedKernel, Stream,
};
use crate::abi::DevicePtr;
use crate::plan::KernelParams;

/// A piece of a GPU's memory and its destination: `bytes` from `from` on to `to`.
#[derive(Debug, Clone, Copy)]
pub struct Piece {
    /// In memory of the host, as the GPU reaches it.
    pub to: DevicePtr,
    /// In the GPU's memory.
    pub from: DevicePtr,
    /// A multiple of 4.
    pub bytes: u64,
}

impl Stream {
    /// Copies `bytes` between any two of device memory, peers' memory and host memory.
    ///
    /// # Safety
    /// Both ranges are valid. No other code writes the source or accesses the destination before a
    /// [`wait`](Self::wait) that covers this call.
    ///
    /// # Errors
    /// [`GpuError::Driver`].
    pub unsafe fn copy(&self, to: DevicePtr, from: DevicePtr, bytes: u64) -> Result<(), GpuError> {
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        unsafe { either!(&self.0, stream => stream.copy(to, from, bytes)) }
    }

    /// Sets `bytes` bytes to `value`.
    ///
    /// # Safety
    /// The range is valid device memory.
    ///
    /// # Errors
    /// [`GpuError::Driver`].
    pub unsafe fn fill(&self, to: DevicePtr, value: u8, bytes: u64) -> Result<(), GpuError> {
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        unsafe { either!(&self.0, stream => stream.fill(to, value, bytes)) }
    }

    /// Adds `value` to the 64-bit word at `flag`, released to the whole system after everything that this
    /// stream did before.
    ///
    /// # Safety
    /// `flag` is a valid address, aligned to 8 bytes, in memory that the GPU reaches.
    ///
    /// # Errors
    /// [`GpuError::Driver`].
    pub unsafe fn add_flag(&self, flag: DevicePtr, value: u64) -> Result<(), GpuError> {
        // SAFETY: the caller's promise.
        unsafe { either!(&self.0, stream => stream.add_flag(flag, value)) }
    }

    /// Copies two small pieces of this GPU's memory to memory of the host that it reaches. A kernel does it, so
    /// that later work in the stream does not wait for the copy engine. The first eight bytes of `last` are stored
    /// behind everything else, in one store.
    ///
    /// # Safety
    /// All ranges are valid, and aligned to 8 bytes. No code writes the sources before a [`wait`](Self::wait) that
    /// covers this call. No code reads the destinations other than as words of four bytes, or the eight that come
    /// last.
    ///
    /// # Errors
    /// [`GpuError::Driver`].
    ///
    /// # Panics
    /// If a piece is not of whole words of four bytes, or `last` is shorter than 8.
    pub unsafe fn tell(&self, first: Piece, last: Piece) -> Result<(), GpuError> {
        // SAFETY: the caller's promise.
        unsafe { self.tell_with_time(first, last, DevicePtr::NULL) }
    }

    /// As [`tell`](Self::tell). Stores the time of its begin at `began_to`, nanoseconds of the GPU's timer and never 0,
    /// behind all else: when earlier work of the stream had ended. Does not store it if `began_to` is null.
    ///
    /// # Safety
    /// As for [`tell`](Self::tell). `began_to` is a word of eight bytes in memory of the host, which no code writes.
    ///
    /// # Errors
    /// [`GpuError::Driver`].
    ///
    /// # Panics
    /// As [`tell`](Self::tell).
    pub unsafe fn tell_with_time(
        &self,
        first: Piece,
        last: Piece,
        began_to: DevicePtr,
    ) -> Result<(), GpuError> {
        assert!(first.bytes.is_multiple_of(4) && last.bytes.is_multiple_of(4), "whole words");
        assert!(last.bytes >= 8, "what comes last");
        // SAFETY: the caller's promise.
        unsafe { either!(&self.0, stream => stream.tell(&first, &last, began_to)) }
    }

    /// Converts matrices, one launch for all.
    ///
    /// # Safety
    /// All sources and targets are valid, as large as the conversions say, and aligned to their elements. No code
    /// writes a source or accesses a target before a [`wait`](Self::wait) that covers this call, except later work of
    /// this stream.
    ///
    /// # Errors
    /// [`GpuError::Driver`].
    ///
    /// # Panics
    /// If there are more than [`MAX_CONVERSIONS`].
    pub unsafe fn convert(&self, pieces: &[Conversion]) -> Result<(), GpuError> {
        assert!(pieces.len() <= MAX_CONVERSIONS, "as many as a launch takes");
        if pieces.iter().all(|piece| piece.num_elements() == 0) {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        unsafe { either!(&self.0, stream => stream.convert(pieces)) }
    }

    /// Computes the [`Checksum`] of ranges of memory and stores it at `to`.
    ///
    /// # Safety
    /// All ranges are valid. `to` is 16 bytes of device memory, aligned to 8. No code writes the ranges or accesses `to`
    /// before a [`wait`](Self::wait) that covers this call, except earlier and later work of this stream.
    ///
    /// # Errors
    /// [`GpuError::Driver`].
    ///
    /// # Panics
    /// If there are more than [`MAX_CHECKSUM_RANGES`].
    pub unsafe fn checksum(&self, ranges: &[ChecksumRange], to: DevicePtr) -> Result<(), GpuError> {
        assert!(ranges.len() <= MAX_CHECKSUM_RANGES, "as many as a launch takes");
        let params = ChecksumParams::new(ranges, to);
        // SAFETY: the caller's promise.
        unsafe {
            self.fill(to, 0, size_of::<Checksum>() as u64)?;
            either!(&self.0, stream => stream.checksum(&params))
        }
    }

    /// Calls `action` on a thread of the driver when all earlier work is done. It must be short and use no CUDA.
    ///
    /// # Errors
    /// [`GpuError::Driver`].
    pub fn then(&self, action: impl FnOnce() + Send + 'static) -> Result<(), GpuError> {
        either!(&self.0, stream => stream.then(Box::new(action)))
    }

    /// Launches a kernel.
    ///
    /// # Errors
    /// [`GpuError::Driver`].
    pub fn launch<P: KernelParams>(&self, kernel: &PreparedKernel<P>) -> Result<(), GpuError> {
        let params = bytemuck::bytes_of(&kernel.params);
        match &self.0 {
            Kind::Driver(stream) => kernel.plans.iter().try_for_each(|plan| {
                // SAFETY: `prepare` checked the parameters, and its caller guarantees the memory; the plan's entry
                // takes exactly a `P`.
                unsafe { stream.launch(P::NAME, plan, params) }
            }),
            // SAFETY: as above; the kernel of this name takes exactly a `P`.
            Kind::Emulated(stream) => unsafe { stream.launch_all(P::NAME, &kernel.plans, params) },
        }
    }

    /// Records the stream's progress so far. Recorded within [`capture`](Self::capture), the event marks that
    /// place of each replay, when the replay reaches it: before, the event shows an older run.
    ///
    /// # Errors
    /// [`GpuError::Driver`].
    pub fn record(&self, event: &Event) -> Result<(), GpuError> {
        match (&self.0, &event.0) {
            (Kind::Driver(stream), Kind::Driver(event)) => stream.record(event),
            (Kind::Emulated(stream), Kind::Emulated(event)) => stream.record(event),
            _ => Err(GpuError::Foreign),
        }
    }

    /// Later work in this stream begins when `event`, as last recorded, is done. Not within
    /// [`capture`](Self::capture), and not for an event of a graph.
    ///
    /// # Errors
    /// [`GpuError::Driver`].
    pub fn wait_for(&self, event: &Event) -> Result<(), GpuError> {
        match (&self.0, &event.0) {
            (Kind::Driver(stream), Kind::Driver(event)) => stream.wait_for(event),
            (Kind::Emulated(stream), Kind::Emulated(event)) => stream.wait_for(event),
            _ => Err(GpuError::Foreign),
        }
    }

    /// Waits until everything so far is done.
    ///
    /// # Errors
    /// [`GpuError::Deadline`], [`GpuError::Driver`] when a kernel failed.
    pub fn wait(&self, deadline: Instant) -> Result<(), GpuError> {
        either!(&self.0, stream => stream.wait(deadline))
    }

    /// Whether everything so far is done.
    ///
    /// # Errors
    /// [`GpuError::Driver`] when a kernel failed.
    pub fn is_done(&self) -> Result<bool, GpuError> {
        either!(&self.0, stream => stream.is_done())
    }

    /// The GPU of this stream.
    #[must_use]
    pub fn device(&self) -> DeviceName {
        match &self.0 {
            Kind::Driver(stream) => DeviceName::Cuda(stream.ordinal()),
            Kind::Emulated(stream) => DeviceName::Emulated(stream.ordinal()),
        }
    }

    /// The driver's handle of this stream, a `CUstream`; of an emulated GPU's, a number of its own.
    #[must_use]
    pub fn raw(&self) -> u64 {
        either!(&self.0, stream => stream.raw())
    }

    /// Whether work given to this stream is recorded instead of run, by any thread.
    ///
    /// # Errors
    /// [`GpuError::Driver`].
    pub fn is_capturing(&self) -> Result<bool, GpuError> {
        either!(&self.0, stream => stream.is_capturing())
    }

    /// Records the launches of `record` on this stream instead of running them.
    ///
    /// # Errors
    /// The error of `record`, or [`GpuError::Driver`].
    pub fn capture(
        &self,
        record: impl FnOnce(&Self) -> Result<(), GpuError>,
    ) -> Result<Graph, GpuError> {
        either!(&self.0, stream => stream.begin_capture())?;
        let recorded = record(self);
        // Ended in any case: a stream that keeps capturing is unusable.
        let graph = wrapped!(&self.0, stream => stream.end_capture(), Graph);
        recorded?;
        graph
    }

    /// Runs a recorded graph.
    ///
    /// # Errors
    /// [`GpuError::Driver`].
    pub fn replay(&self, graph: &Graph) -> Result<(), GpuError> {
        match (&self.0, &graph.0) {
            (Kind::Driver(stream), Kind::Driver(graph)) => stream.replay(graph),
            (Kind::Emulated(stream), Kind::Emulated(graph)) => stream.replay(graph),
            _ => Err(GpuError::Foreign),
        }
    }
}

impl Event {
    /// Whether the event, as last recorded, is done. An event of a graph may count as done while a replay has not
    /// reached it yet: a driver counts it as recorded by the launch or by the replay.
    ///
    /// # Errors
    /// [`GpuError::Driver`] when a kernel before it failed.
    pub fn is_done(&self) -> Result<bool, GpuError> {
        either!(&self.0, event => event.is_done())
    }

    /// Time on the GPU from `earlier` to this event. Both are done.
    ///
    /// # Errors
    /// [`GpuError::Driver`].
    pub fn since(&self, earlier: &Self) -> Result<Duration, GpuError> {
        match (&self.0, &earlier.0) {
            (Kind::Driver(event), Kind::Driver(earlier)) => event.since(earlier),
            (Kind::Emulated(event), Kind::Emulated(earlier)) => event.since(earlier),
            _ => Err(GpuError::Foreign),
        }
    }
}
