//! The middle layer: one owner per handle, parents held by `Arc`, and a checked result for every call.
//!
//! Children hold their parents, so a handle is released only after everything made of it. All calls of libibverbs
//! on these objects may come from any thread, also concurrently, as its documentation states. The `Send` and `Sync`
//! below rely on that.

use std::ffi::{CStr, c_int};
use std::fmt;
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::Arc;

use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};

use super::sys;

/// A call of libibverbs failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct CallError {
    pub(super) call: &'static str,
    pub(super) code: i32,
}

impl CallError {
    pub(super) fn last(call: &'static str) -> Self {
        Self { call, code: sys::errno() }
    }

    /// Checks the return value of calls that return an error number.
    pub(super) fn check(call: &'static str, code: c_int) -> Result<(), Self> {
        // Some providers return -1 and set errno, some return the number, some its negative.
        match code {
            0 => Ok(()),
            -1 => Err(Self::last(call)),
            code => Err(Self { call, code: code.abs() }),
        }
    }
}

impl fmt::Display for CallError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.call, sys::describe_errno(self.code))
    }
}

/// Names of the RDMA devices of this host.
pub(super) fn device_names() -> Result<Vec<String>, CallError> {
    let list = DeviceList::get()?;
    Ok(list.iter().map(|(name, _)| name).collect())
}

struct DeviceList {
    raw: NonNull<*mut sys::ibv_device>,
    len: usize,
}

impl DeviceList {
    fn get() -> Result<Self, CallError> {
        let mut len = 0;
        // SAFETY: `len` is valid for writing.
        let raw = unsafe { sys::ibv_get_device_list(&raw mut len) };
        let raw = NonNull::new(raw).ok_or_else(|| CallError::last("ibv_get_device_list"))?;
        Ok(Self { raw, len: usize::try_from(len).unwrap_or(0) })
    }

    fn iter(&self) -> impl Iterator<Item = (String, *mut sys::ibv_device)> + '_ {
        (0..self.len).map(|idx| {
            // SAFETY: the list has `len` entries; their names are terminated strings.
            unsafe {
                let device = *self.raw.as_ptr().add(idx);
                let name = CStr::from_ptr(sys::ibv_get_device_name(device));
                (name.to_string_lossy().into_owned(), device)
            }
        })
    }
}

impl Drop for DeviceList {
    fn drop(&mut self) {
        // SAFETY: the list came from `ibv_get_device_list` and is freed once.
        unsafe { sys::ibv_free_device_list(self.raw.as_ptr()) };
    }
}

/// An open device.
pub(super) struct Context {
    raw: NonNull<sys::ibv_context>,
    name: String,
    attr: sys::ibv_device_attr,
}

// SAFETY: an open device has no thread affinity.
unsafe impl Send for Context {}
// SAFETY: libibverbs is thread-safe on one context; `attr` is plain data that never changes.
unsafe impl Sync for Context {}

impl Context {
    pub(super) fn open(name: &str) -> Result<Arc<Self>, CallError> {
        let list = DeviceList::get()?;
        let (_, device) = list
            .iter()
            .find(|(found, _)| found == name)
            .ok_or(CallError { call: "ibv_open_device", code: libc::ENODEV })?;
        // SAFETY: `device` is an entry of the list, which still lives.
        let raw = NonNull::new(unsafe { sys::ibv_open_device(device) })
            .ok_or_else(|| CallError::last("ibv_open_device"))?;
        let mut attr = MaybeUninit::zeroed();
        // SAFETY: the context is open, `attr` is valid for writing.
        let code = unsafe { sys::ibv_query_device(raw.as_ptr(), attr.as_mut_ptr()) };
        // SAFETY: plain integers, for which zero is valid too.
        let context = Self { raw, name: name.to_owned(), attr: unsafe { attr.assume_init() } };
        CallError::check("ibv_query_device", code)?;
        let events = context.async_fd();
        set_nonblocking(events)
            .map_err(|code| CallError { call: "fcntl of the event descriptor", code })?;
        Ok(Arc::new(context))
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) const fn attr(&self) -> &sys::ibv_device_attr {
        &self.attr
    }

    /// True if fenced requests always arrive, even after resends. Soft-RoCE (seen with Linux 6.1) resends a fenced
    /// atomic only while no read or atomic is under way. It counts the request itself. After one late answer the
    /// queue pair stalls for good, and no error reports it.
    pub(super) const fn keeps_fences(&self) -> bool {
        self.attr.vendor_id != SOFT_ROCE
    }

    /// True if the device adds to 64-bit words of this host for peers.
    pub(super) const fn has_atomics(&self) -> bool {
        self.attr.atomic_cap != sys::ibv_atomic_cap::IBV_ATOMIC_NONE
    }

    pub(super) fn port(&self, port: u8) -> Result<sys::ibv_port_attr, CallError> {
        let mut attr = MaybeUninit::zeroed();
        // SAFETY: the context is open, `attr` is valid for writing. This is the function behind C's macro. The
        // plain symbol of that name fills an older and shorter structure.
        let code = unsafe { sys::___ibv_query_port(self.raw.as_ptr(), port, attr.as_mut_ptr()) };
        CallError::check("ibv_query_port", code)?;
        // SAFETY: plain integers, zeroed before the call.
        Ok(unsafe { attr.assume_init() })
    }

    pub(super) fn gid(&self, port: u8, idx: u8) -> Result<[u8; 16], CallError> {
        let mut gid = sys::ibv_gid { raw: [0; 16] };
        // SAFETY: the context is open, `gid` is valid for writing.
        let code =
            unsafe { sys::ibv_query_gid(self.raw.as_ptr(), port, c_int::from(idx), &raw mut gid) };
        CallError::check("ibv_query_gid", code)?;
        // SAFETY: both members are plain bytes.
        Ok(unsafe { gid.raw })
    }

    /// Descriptor that becomes readable on an asynchronous event.
    pub(super) fn async_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor belongs to the context, which outlives the borrow.
        unsafe { BorrowedFd::borrow_raw(self.raw.as_ref().async_fd) }
    }

    /// Takes and acknowledges the next asynchronous event. Returns its number and the affected queue pair or port.
    pub(super) fn next_event(&self) -> Option<AsyncEvent> {
        let mut event = MaybeUninit::<sys::ibv_async_event>::zeroed();
        // SAFETY: the context is open, `event` is valid for writing; the descriptor does not block.
        if unsafe { sys::ibv_get_async_event(self.raw.as_ptr(), event.as_mut_ptr()) } != 0 {
            return None;
        }
        let found = event.as_ptr();
        // SAFETY: the call filled the structure. The number is read as an integer, because a newer library may know
        // events that the enumeration lacks.
        let kind = unsafe { (&raw const (*found).event_type).cast::<u32>().read() };
        // SAFETY: the kind of event determines whether the union holds a pointer or a port number. A queue pair is
        // alive, since destroying it waits for the acknowledgement below.
        let about = unsafe {
            match kind {
                QP_FATAL | QP_REQ_ERR | QP_ACCESS_ERR => {
                    AsyncEvent::QueuePair { kind, number: (*(*found).element.qp).qp_num }
                }
                PORT_ACTIVE | PORT_ERR => AsyncEvent::Port {
                    is_up: kind == PORT_ACTIVE,
                    port: u8::try_from((*found).element.port_num).unwrap_or(0),
                },
                DEVICE_FATAL => AsyncEvent::Device,
                CQ_ERR => AsyncEvent::CompletionQueue,
                _ => AsyncEvent::Other(kind),
            }
        };
        // SAFETY: the event came from `ibv_get_async_event` and is acknowledged once.
        unsafe { sys::ibv_ack_async_event(event.as_mut_ptr()) };
        Some(about)
    }
}

/// An asynchronous event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum AsyncEvent {
    /// A queue pair failed.
    QueuePair { kind: u32, number: u32 },
    /// A port came up or went down.
    Port { is_up: bool, port: u8 },
    /// The whole device failed.
    Device,
    /// A completion queue overran or failed.
    CompletionQueue,
    /// Anything else.
    Other(u32),
}

/// The reason of a queue pair's failure, from the event's number.
pub(super) const fn queue_pair_event(kind: u32) -> &'static str {
    match kind {
        QP_REQ_ERR => "the device refused a request of the peer as invalid",
        QP_ACCESS_ERR => "the peer tried to access memory without the right to",
        _ => "the device gave the queue pair up",
    }
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Context").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: the context is open and closed once. Everything made of it was dropped, since it held this owner.
        let code = unsafe { sys::ibv_close_device(self.raw.as_ptr()) };
        report("ibv_close_device", code);
    }
}

/// A protection domain. A key works only with queue pairs of its own domain.
#[derive(Debug)]
pub(super) struct ProtectionDomain {
    raw: NonNull<sys::ibv_pd>,
    context: Arc<Context>,
}

// SAFETY: a protection domain has no thread affinity.
unsafe impl Send for ProtectionDomain {}
// SAFETY: libibverbs serialises calls on one protection domain.
unsafe impl Sync for ProtectionDomain {}

impl ProtectionDomain {
    pub(super) fn new(context: &Arc<Context>) -> Result<Arc<Self>, CallError> {
        // SAFETY: the context is open.
        let raw = NonNull::new(unsafe { sys::ibv_alloc_pd(context.raw.as_ptr()) })
            .ok_or_else(|| CallError::last("ibv_alloc_pd"))?;
        Ok(Arc::new(Self { raw, context: Arc::clone(context) }))
    }

    pub(super) const fn context(&self) -> &Arc<Context> {
        &self.context
    }
}

impl Drop for ProtectionDomain {
    fn drop(&mut self) {
        // SAFETY: allocated, freed once, and everything made of it was dropped.
        report("ibv_dealloc_pd", unsafe { sys::ibv_dealloc_pd(self.raw.as_ptr()) });
    }
}

/// A completion channel: the descriptor that reports completions.
#[derive(Debug)]
pub(super) struct CompletionChannel {
    raw: NonNull<sys::ibv_comp_channel>,
    context: Arc<Context>,
}

// SAFETY: a completion channel has no thread affinity.
unsafe impl Send for CompletionChannel {}
// SAFETY: reading events is a read of the descriptor, which the kernel serialises.
unsafe impl Sync for CompletionChannel {}

impl CompletionChannel {
    pub(super) fn new(context: &Arc<Context>) -> Result<Arc<Self>, CallError> {
        // SAFETY: the context is open.
        let raw = NonNull::new(unsafe { sys::ibv_create_comp_channel(context.raw.as_ptr()) })
            .ok_or_else(|| CallError::last("ibv_create_comp_channel"))?;
        let channel = Self { raw, context: Arc::clone(context) };
        set_nonblocking(channel.fd())
            .map_err(|code| CallError { call: "fcntl of the completion channel", code })?;
        Ok(Arc::new(channel))
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor belongs to the channel, which outlives the borrow.
        unsafe { BorrowedFd::borrow_raw(self.raw.as_ref().fd) }
    }

    /// Takes all pending events.
    pub(super) fn drain(&self) {
        let (mut cq, mut cookie) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: the channel lives, the results are valid for writing; the descriptor does not block.
        // The queue of an event is alive: destroying it waits for the acknowledgement.
        unsafe {
            while sys::ibv_get_cq_event(self.raw.as_ptr(), &raw mut cq, &raw mut cookie) == 0 {
                sys::ibv_ack_cq_events(cq, 1);
            }
        }
    }
}

impl Drop for CompletionChannel {
    fn drop(&mut self) {
        // SAFETY: created, destroyed once, and all queues that used it were dropped.
        let code = unsafe { sys::ibv_destroy_comp_channel(self.raw.as_ptr()) };
        report("ibv_destroy_comp_channel", code);
    }
}

/// A completion queue.
#[derive(Debug)]
pub(super) struct CompletionQueue {
    raw: NonNull<sys::ibv_cq>,
    _channel: Arc<CompletionChannel>,
}

// SAFETY: a completion queue has no thread affinity.
unsafe impl Send for CompletionQueue {}
// SAFETY: providers lock inside of polling and arming.
unsafe impl Sync for CompletionQueue {}

impl CompletionQueue {
    pub(super) fn new(
        channel: &Arc<CompletionChannel>,
        num_entries: u32,
    ) -> Result<Arc<Self>, CallError> {
        let num_entries = c_int::try_from(num_entries).unwrap_or(c_int::MAX);
        // SAFETY: context and channel live and belong together.
        let raw = unsafe {
            sys::ibv_create_cq(
                channel.context.raw.as_ptr(),
                num_entries,
                std::ptr::null_mut(),
                channel.raw.as_ptr(),
                0,
            )
        };
        let raw = NonNull::new(raw).ok_or_else(|| CallError::last("ibv_create_cq"))?;
        Ok(Arc::new(Self { raw, _channel: Arc::clone(channel) }))
    }

    /// Takes completions and returns their number.
    #[inline]
    pub(super) fn poll(&self, out: &mut CompletionBuffer) -> Result<usize, CallError> {
        let room = out.entries.len() as i32;
        // SAFETY: the queue lives, `entries` has room for that many.
        let found =
            unsafe { sys::ibv_poll_cq(self.raw.as_ptr(), room, out.entries.as_mut_ptr().cast()) };
        usize::try_from(found)
            .map_err(|_| CallError { call: "ibv_poll_cq", code: found.unsigned_abs() as i32 })
    }

    /// Requests an event for the next completion.
    pub(super) fn arm(&self) -> Result<(), CallError> {
        // SAFETY: the queue lives.
        let code = unsafe { sys::ibv_req_notify_cq(self.raw.as_ptr(), 0) };
        CallError::check("ibv_req_notify_cq", code)
    }
}

impl Drop for CompletionQueue {
    fn drop(&mut self) {
        // SAFETY: created, destroyed once, and all queue pairs that used it were dropped.
        report("ibv_destroy_cq", unsafe { sys::ibv_destroy_cq(self.raw.as_ptr()) });
    }
}

/// The buffer that completions are polled into.
pub(super) struct CompletionBuffer {
    entries: [MaybeUninit<sys::ibv_wc>; 32],
}

impl CompletionBuffer {
    pub(super) const fn new() -> Self {
        Self { entries: [const { MaybeUninit::zeroed() }; 32] }
    }

    /// The first `len` entries, just filled by a poll.
    pub(super) fn filled(&self, len: usize) -> impl Iterator<Item = WorkCompletion> + '_ {
        self.entries[..len].iter().map(|entry| {
            // SAFETY: all fields are integers, for which zero is valid, and they start zeroed. A poll need not fill
            // all of them. The checks below select the meaningful ones.
            let entry = unsafe { entry.assume_init_ref() };
            // SAFETY: both readings are integers, initialised as above.
            let immediate = unsafe { entry.imm_data_invalidated_rkey_union.imm_data };
            let is_success = entry.status == sys::ibv_wc_status::IBV_WC_SUCCESS;
            WorkCompletion {
                id: entry.wr_id,
                status: entry.status,
                vendor: entry.vendor_err,
                is_message: is_success && entry.opcode == sys::ibv_wc_opcode::IBV_WC_RECV,
                bytes: if is_success { entry.byte_len } else { 0 },
                immediate: u32::from_be(immediate),
            }
        })
    }
}

impl fmt::Debug for CompletionBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CompletionBuffer").finish_non_exhaustive()
    }
}

/// The used fields of a completion.
#[derive(Debug, Clone, Copy)]
pub(super) struct WorkCompletion {
    pub(super) id: u64,
    pub(super) status: u32,
    pub(super) vendor: u32,
    /// True if a message consumed a receive, false for a write.
    pub(super) is_message: bool,
    /// Bytes of the message.
    pub(super) bytes: u32,
    /// Immediate value of a write.
    pub(super) immediate: u32,
}

fn set_nonblocking(fd: BorrowedFd<'_>) -> Result<(), i32> {
    let flags = fcntl_getfl(fd).map_err(rustix::io::Errno::raw_os_error)?;
    fcntl_setfl(fd, flags | OFlags::NONBLOCK).map_err(rustix::io::Errno::raw_os_error)
}

/// Logs that a handle could not be released. There is no other remedy.
pub(super) fn report(call: &'static str, code: c_int) {
    if let Err(error) = CallError::check(call, code) {
        tracing::error!(%error, "an RDMA object could not be given back");
    }
}

pub(super) const fn raw_domain(domain: &ProtectionDomain) -> *mut sys::ibv_pd {
    domain.raw.as_ptr()
}

pub(super) const fn raw_queue(queue: &CompletionQueue) -> *mut sys::ibv_cq {
    queue.raw.as_ptr()
}

pub(super) fn check(call: &'static str, code: c_int) -> Result<(), CallError> {
    CallError::check(call, code)
}

// Numbers of `enum ibv_event_type`.
const CQ_ERR: u32 = sys::ibv_event_type::IBV_EVENT_CQ_ERR as u32;
const QP_FATAL: u32 = sys::ibv_event_type::IBV_EVENT_QP_FATAL as u32;
const QP_REQ_ERR: u32 = sys::ibv_event_type::IBV_EVENT_QP_REQ_ERR as u32;
const QP_ACCESS_ERR: u32 = sys::ibv_event_type::IBV_EVENT_QP_ACCESS_ERR as u32;
const PORT_ACTIVE: u32 = sys::ibv_event_type::IBV_EVENT_PORT_ACTIVE as u32;
const PORT_ERR: u32 = sys::ibv_event_type::IBV_EVENT_PORT_ERR as u32;
const DEVICE_FATAL: u32 = sys::ibv_event_type::IBV_EVENT_DEVICE_FATAL as u32;
/// `vendor_id` of `rdma_rxe`.
const SOFT_ROCE: u32 = 0xff_ffff;
