//! Work in order: streams, the events between them, and recorded graphs.

use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cudarc::driver::sys::{self, CUresult};

use super::{Context, Gpu, check, ignore};
use crate::abi::DevicePtr;
use crate::entries::{CHECKSUM, CONVERT, FLAG_ADD, TELL_HOST};
use crate::gpu::checksum::{ChecksumParams, ChecksumRange};
use crate::gpu::convert::Conversions;
use crate::gpu::{Conversion, GpuError, Piece};
use crate::plan::LaunchPlan;

#[derive(Debug)]
pub(in crate::gpu) struct Stream {
    context: Arc<Context>,
    stream: sys::CUstream,
    /// Whether this made the stream, and so destroys it.
    is_own: bool,
}

// SAFETY: streams have no thread affinity.
unsafe impl Send for Stream {}
// SAFETY: the driver orders calls on one stream itself.
unsafe impl Sync for Stream {}

#[derive(Debug)]
pub(in crate::gpu) struct Event {
    context: Arc<Context>,
    event: sys::CUevent,
}

// SAFETY: events have no thread affinity.
unsafe impl Send for Event {}
// SAFETY: the driver orders calls on one event itself.
unsafe impl Sync for Event {}

#[derive(Debug)]
pub(in crate::gpu) struct Graph {
    context: Arc<Context>,
    executable: sys::CUgraphExec,
}

// SAFETY: as for streams.
unsafe impl Send for Graph {}
// SAFETY: launches of one graph are ordered by the driver.
unsafe impl Sync for Graph {}

impl Gpu {
    pub(in crate::gpu) fn stream(&self) -> Result<Stream, GpuError> {
        let _current = self.context.bind()?;
        let mut stream = null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: writes one handle; destroyed in `Stream::drop`.
        check("cuStreamCreate", unsafe { sys::cuStreamCreate(&raw mut stream, flags) })?;
        Ok(Stream { context: Arc::clone(&self.context), stream, is_own: true })
    }

    pub(in crate::gpu) fn wrap_stream(&self, raw: u64) -> Result<Stream, GpuError> {
        let stream = raw as usize as sys::CUstream;
        Ok(Stream { context: Arc::clone(&self.context), stream, is_own: false })
    }

    pub(in crate::gpu) fn event(&self) -> Result<Event, GpuError> {
        let _current = self.context.bind()?;
        let mut event = null_mut();
        let flags = sys::CUevent_flags_enum::CU_EVENT_DEFAULT as u32;
        // SAFETY: writes one handle; destroyed in `Event::drop`.
        check("cuEventCreate", unsafe { sys::cuEventCreate(&raw mut event, flags) })?;
        Ok(Event { context: Arc::clone(&self.context), event })
    }
}

impl Stream {
    pub(in crate::gpu) unsafe fn copy(
        &self,
        to: DevicePtr,
        from: DevicePtr,
        bytes: u64,
    ) -> Result<(), GpuError> {
        let _current = self.context.bind()?;
        // SAFETY: the caller's promise; with unified addresses the driver distinguishes memories.
        check("cuMemcpyAsync", unsafe {
            sys::cuMemcpyAsync(to.0, from.0, bytes as usize, self.stream)
        })
    }

    pub(in crate::gpu) unsafe fn fill(
        &self,
        to: DevicePtr,
        value: u8,
        bytes: u64,
    ) -> Result<(), GpuError> {
        let _current = self.context.bind()?;
        // SAFETY: the caller's promise.
        check("cuMemsetD8Async", unsafe {
            sys::cuMemsetD8Async(to.0, value, bytes as usize, self.stream)
        })
    }

    pub(in crate::gpu) unsafe fn add_flag(
        &self,
        flag: DevicePtr,
        value: u64,
    ) -> Result<(), GpuError> {
        let (mut flag, mut value) = (flag.0, value);
        let mut arguments = [(&raw mut flag).cast::<c_void>(), (&raw mut value).cast()];
        // SAFETY: the caller's promise about the address; the kernel takes two 64-bit arguments.
        unsafe { self.start("sy_flag_add", &FLAG_ADD_PLAN, &mut arguments) }
    }

    pub(in crate::gpu) unsafe fn tell(
        &self,
        first: &Piece,
        last: &Piece,
        began_to: DevicePtr,
    ) -> Result<(), GpuError> {
        let mut words = [first, last].map(|piece| (piece.to.0, piece.from.0, piece.bytes / 4));
        let is_silent = began_to.is_null();
        let mut began_to = began_to.0;
        let mut arguments = [null_mut::<c_void>(); 7];
        arguments[6] = (&raw mut began_to).cast();
        let at = words.iter_mut().flat_map(|(to, from, num)| [to, from, num]);
        for (argument, word) in arguments.iter_mut().zip(at) {
            *argument = std::ptr::from_mut(word).cast();
        }
        // With a time it is the last step of a batch, which the next batch's first kernel follows.
        let plan = LaunchPlan { overlaps: !is_silent, ..TELL_HOST_PLAN };
        // SAFETY: the caller's promise about the addresses; the kernel takes seven 64-bit arguments.
        unsafe { self.start("sy_tell_host", &plan, &mut arguments) }
    }

    pub(in crate::gpu) unsafe fn convert(&self, pieces: &[Conversion]) -> Result<(), GpuError> {
        let most = pieces.iter().map(Conversion::num_elements).max().unwrap_or(0);
        let blocks = most.div_ceil(CONVERT_PLAN.num_threads.into()).clamp(1, CONVERT_BLOCKS);
        let plan = LaunchPlan { num_blocks: blocks as u32, ..CONVERT_PLAN };
        let params = Conversions::of(pieces);
        // SAFETY: the caller's promise about the matrices; the kernel takes this structure.
        unsafe { self.launch("sy_convert", &plan, bytemuck::bytes_of(&params)) }
    }

    pub(in crate::gpu) unsafe fn checksum(&self, params: &ChecksumParams) -> Result<(), GpuError> {
        let words: u64 = params.ranges.iter().map(ChecksumRange::words).sum();
        let blocks = words.div_ceil(CHECKSUM_PLAN.num_threads.into()).clamp(1, CHECKSUM_BLOCKS);
        let plan = LaunchPlan { num_blocks: blocks as u32, ..CHECKSUM_PLAN };
        // SAFETY: the caller's promise about the memory; the kernel takes this structure.
        unsafe { self.launch("sy_checksum", &plan, bytemuck::bytes_of(params)) }
    }

    pub(in crate::gpu) fn then(&self, action: Box<dyn FnOnce() + Send>) -> Result<(), GpuError> {
        // A recorded call would run at every replay, but can only run once.
        if self.is_capturing()? {
            return Err(GpuError::Driver {
                call: "cuLaunchHostFunc",
                code: CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED as u32,
                name: "a host call cannot be recorded".into(),
            });
        }
        let _current = self.context.bind()?;
        let data = Box::into_raw(Box::new(action)).cast::<c_void>();
        // SAFETY: `call_once` takes back the box, once.
        let launched = check("cuLaunchHostFunc", unsafe {
            sys::cuLaunchHostFunc(self.stream, Some(call_once), data)
        });
        if launched.is_err() {
            // SAFETY: the driver refused, so the box is still ours.
            drop(unsafe { Box::from_raw(data.cast::<Box<dyn FnOnce() + Send>>()) });
        }
        launched
    }

    pub(in crate::gpu) unsafe fn launch(
        &self,
        name: &'static str,
        plan: &LaunchPlan,
        params: &[u8],
    ) -> Result<(), GpuError> {
        let mut arguments = [params.as_ptr().cast_mut().cast::<c_void>()];
        // SAFETY: the caller's promise that `params` has the entry's type; the driver copies it.
        unsafe { self.start(name, plan, &mut arguments) }
    }

    /// # Safety
    /// `arguments` point to the kernel's arguments.
    unsafe fn start(
        &self,
        call: &'static str,
        plan: &LaunchPlan,
        arguments: &mut [*mut c_void],
    ) -> Result<(), GpuError> {
        let _current = self.context.bind()?;
        let function = self.context.function(plan.entry)?;
        // SAFETY: an all-zero attribute is a valid value of this plain struct.
        let mut attribute: sys::CUlaunchAttribute = unsafe { std::mem::zeroed() };
        attribute.id =
            sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
        attribute.value.programmaticStreamSerializationAllowed = 1;
        let config = sys::CUlaunchConfig {
            gridDimX: plan.num_blocks,
            gridDimY: 1,
            gridDimZ: 1,
            blockDimX: plan.num_threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: plan.shared_bytes,
            hStream: self.stream,
            attrs: &raw mut attribute,
            numAttrs: u32::from(plan.overlaps),
        };
        // SAFETY: function and stream belong to the current context; the caller's promise about the
        // arguments, which the driver copies before it returns.
        check(call, unsafe {
            sys::cuLaunchKernelEx(&raw const config, function, arguments.as_mut_ptr(), null_mut())
        })
    }

    pub(in crate::gpu) fn ordinal(&self) -> u32 {
        self.context.ordinal
    }

    pub(in crate::gpu) fn raw(&self) -> u64 {
        self.stream as u64
    }

    pub(in crate::gpu) fn is_capturing(&self) -> Result<bool, GpuError> {
        let _current = self.context.bind()?;
        let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: the stream is alive; writes one word.
        check("cuStreamIsCapturing", unsafe {
            sys::cuStreamIsCapturing(self.stream, &raw mut status)
        })?;
        Ok(status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
    }

    pub(in crate::gpu) fn record(&self, event: &Event) -> Result<(), GpuError> {
        let _current = self.context.bind()?;
        // External: a recording made while capturing becomes a step of the graph, seen from outside.
        let flags = match self.is_capturing()? {
            true => sys::CUevent_record_flags_enum::CU_EVENT_RECORD_EXTERNAL,
            false => sys::CUevent_record_flags_enum::CU_EVENT_RECORD_DEFAULT,
        };
        // SAFETY: both are alive.
        check("cuEventRecordWithFlags", unsafe {
            sys::cuEventRecordWithFlags(event.event, self.stream, flags as u32)
        })
    }

    pub(in crate::gpu) fn wait_for(&self, event: &Event) -> Result<(), GpuError> {
        let _current = self.context.bind()?;
        // SAFETY: both are alive; the driver keeps the objects that the wait needs.
        check("cuStreamWaitEvent", unsafe { sys::cuStreamWaitEvent(self.stream, event.event, 0) })
    }

    pub(in crate::gpu) fn is_done(&self) -> Result<bool, GpuError> {
        let _current = self.context.bind()?;
        // SAFETY: the stream is alive.
        match unsafe { sys::cuStreamQuery(self.stream) } {
            CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            answer => check("cuStreamQuery", answer).map(|()| true),
        }
    }

    pub(in crate::gpu) fn wait(&self, deadline: Instant) -> Result<(), GpuError> {
        let start = Instant::now();
        loop {
            if self.is_done()? {
                return Ok(());
            }
            let now = Instant::now();
            if now >= deadline {
                return Err(GpuError::Deadline { what: "stream" });
            }
            // Most waits end immediately; long ones yield the core to others.
            if now - start > SPIN {
                std::thread::sleep(PAUSE);
            } else {
                std::hint::spin_loop();
            }
        }
    }

    pub(in crate::gpu) fn begin_capture(&self) -> Result<(), GpuError> {
        let _current = self.context.bind()?;
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is alive.
        check("cuStreamBeginCapture", unsafe { sys::cuStreamBeginCapture_v2(self.stream, mode) })
    }

    pub(in crate::gpu) fn end_capture(&self) -> Result<Graph, GpuError> {
        let _current = self.context.bind()?;
        let mut graph = null_mut();
        // SAFETY: the stream captures; writes one handle, destroyed below.
        check("cuStreamEndCapture", unsafe {
            sys::cuStreamEndCapture(self.stream, &raw mut graph)
        })?;
        let mut executable = null_mut();
        // SAFETY: a whole graph; writes one handle, destroyed in `Graph::drop`.
        let made = check("cuGraphInstantiate", unsafe {
            sys::cuGraphInstantiateWithFlags(&raw mut executable, graph, 0)
        });
        // SAFETY: made by the capture, destroyed once; the executable graph is independent of it.
        ignore("cuGraphDestroy", unsafe { sys::cuGraphDestroy(graph) });
        made.map(|()| Graph { context: Arc::clone(&self.context), executable })
    }

    pub(in crate::gpu) fn replay(&self, graph: &Graph) -> Result<(), GpuError> {
        let _current = self.context.bind()?;
        // SAFETY: both are alive.
        check("cuGraphLaunch", unsafe { sys::cuGraphLaunch(graph.executable, self.stream) })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.is_own
            && let Ok(_current) = self.context.bind()
        {
            // SAFETY: created once, destroyed once; work under way runs to its end.
            ignore("cuStreamDestroy", unsafe { sys::cuStreamDestroy_v2(self.stream) });
        }
    }
}

impl Event {
    pub(in crate::gpu) fn is_done(&self) -> Result<bool, GpuError> {
        let _current = self.context.bind()?;
        // SAFETY: the event is alive.
        match unsafe { sys::cuEventQuery(self.event) } {
            CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            answer => check("cuEventQuery", answer).map(|()| true),
        }
    }

    pub(in crate::gpu) fn since(&self, earlier: &Self) -> Result<Duration, GpuError> {
        let _current = self.context.bind()?;
        let mut elapsed_ms = 0f32;
        // SAFETY: both are alive; writes one number.
        check("cuEventElapsedTime", unsafe {
            sys::cuEventElapsedTime_v2(&raw mut elapsed_ms, earlier.event, self.event)
        })?;
        Ok(Duration::from_secs_f64(f64::from(elapsed_ms.max(0.0)) * 1e-3))
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if let Ok(_current) = self.context.bind() {
            // SAFETY: created once, destroyed once; the driver keeps waits for it.
            ignore("cuEventDestroy", unsafe { sys::cuEventDestroy_v2(self.event) });
        }
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if let Ok(_current) = self.context.bind() {
            // SAFETY: instantiated once, destroyed once.
            ignore("cuGraphExecDestroy", unsafe { sys::cuGraphExecDestroy(self.executable) });
        }
    }
}

/// Runs the boxed function of [`Stream::then`].
///
/// # Safety
/// `data` is such a box, and this its only use.
unsafe extern "C" fn call_once(data: *mut c_void) {
    // SAFETY: the caller's promise.
    let action = unsafe { Box::from_raw(data.cast::<Box<dyn FnOnce() + Send>>()) };
    action();
}

const FLAG_ADD_PLAN: LaunchPlan = LaunchPlan {
    num_blocks: 1,
    num_threads: 1,
    is_tuned: false,
    is_few: false,
    entry: FLAG_ADD,
    shared_bytes: 0,
    overlaps: false,
};
const TELL_HOST_PLAN: LaunchPlan =
    LaunchPlan { num_threads: 256, entry: TELL_HOST, ..FLAG_ADD_PLAN };
const CONVERT_PLAN: LaunchPlan = LaunchPlan { num_threads: 256, entry: CONVERT, ..FLAG_ADD_PLAN };
const CHECKSUM_PLAN: LaunchPlan = LaunchPlan { num_threads: 256, entry: CHECKSUM, ..FLAG_ADD_PLAN };
/// Enough for most of the bandwidth of a GPU's memory, and few beside kernels that serve.
const CHECKSUM_BLOCKS: u64 = 264;
/// Enough for the bandwidth of a GPU's memory.
const CONVERT_BLOCKS: u64 = 1024;
const SPIN: Duration = Duration::from_micros(200);
const PAUSE: Duration = Duration::from_micros(20);
