//! Owners of the library's objects. Each closes its object and keeps the object's parents alive.

use std::any::Any;
use std::ffi::{CStr, CString, c_int};
use std::ptr::{NonNull, null, null_mut};
use std::sync::Arc;

use super::load::Library;
use super::sys;

/// A failed call of the library.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{op}: {text} (code {code})")]
pub(super) struct CallError {
    /// Name of the call.
    pub(super) op: &'static str,
    /// Positive error code.
    pub(super) code: i64,
    /// The library's description of the code.
    pub(super) text: String,
}

/// Converts a negative result into an error.
pub(super) fn check(library: &Library, op: &'static str, result: i64) -> Result<i64, CallError> {
    if result >= 0 {
        return Ok(result);
    }
    Err(CallError { op, code: -result, text: library.describe(result) })
}

/// A list of providers with their capabilities, from `fi_getinfo`.
pub(super) struct Info {
    library: &'static Library,
    head: NonNull<sys::FiInfo>,
}

// SAFETY: plain memory of the library without thread affinity, freed once.
unsafe impl Send for Info {}
// SAFETY: never written after it was made.
unsafe impl Sync for Info {}

impl Info {
    /// Queries the providers that fit `hints`, from the local address `node` if it is given.
    pub(super) fn query(
        library: &'static Library,
        node: Option<&str>,
        hints: &Hints,
    ) -> Result<Self, CallError> {
        let op = "fi_getinfo";
        let node = node.map(CString::new).transpose().map_err(|_| CallError {
            op,
            code: 22,
            text: "the address has a zero byte".to_owned(),
        })?;
        let flags = if node.is_some() { sys::FI_SOURCE } else { 0 };
        let node = node.as_ref().map_or(null(), |node| node.as_ptr());
        let mut head = null_mut();
        // SAFETY: strings end with a zero byte or are null; the hints are the library's own
        // structure.
        let result = unsafe {
            (library.getinfo)(
                library.api_version(),
                node,
                null(),
                flags,
                hints.info.head.as_ptr(),
                &raw mut head,
            )
        };
        check(library, op, result.into())?;
        let head = NonNull::new(head).ok_or_else(|| CallError {
            op,
            code: sys::FI_ENODATA,
            text: "nothing was found".to_owned(),
        })?;
        Ok(Self { library, head })
    }

    /// The first member, which the library prefers.
    pub(super) fn first(&self) -> Entry<'_> {
        // SAFETY: the list lives as long as `self`.
        Entry { raw: unsafe { self.head.as_ref() } }
    }

    /// All members.
    pub(super) fn iter(&self) -> impl Iterator<Item = Entry<'_>> {
        std::iter::successors(Some(self.first()), |entry| {
            // SAFETY: a member of the same list, or null.
            unsafe { entry.raw.next.as_ref() }.map(|raw| Entry { raw })
        })
    }

    /// A list of `entry` alone.
    pub(super) fn only(&self, entry: &Entry<'_>) -> Result<Self, CallError> {
        // SAFETY: copies one member, with all that it points to.
        let head = unsafe { (self.library.dupinfo)(entry.raw) };
        let head = NonNull::new(head).ok_or_else(|| out_of_memory("fi_dupinfo"))?;
        Ok(Self { library: self.library, head })
    }
}

impl Drop for Info {
    fn drop(&mut self) {
        // SAFETY: made by the library and freed once.
        unsafe { (self.library.freeinfo)(self.head.as_ptr()) }
    }
}

/// One member of an [`Info`].
#[derive(Clone, Copy)]
pub(super) struct Entry<'a> {
    raw: &'a sys::FiInfo,
}

impl Entry<'_> {
    pub(super) fn provider(&self) -> String {
        // SAFETY: the library fills in what it points to, and keeps it as long as the list.
        unsafe { text(self.fabric().prov_name) }
    }

    pub(super) const fn address_format(&self) -> u32 {
        self.raw.addr_format
    }

    pub(super) const fn caps(&self) -> u64 {
        self.raw.caps
    }

    pub(super) fn inject_bytes(&self) -> usize {
        // SAFETY: as above.
        unsafe { self.raw.tx_attr.as_ref() }.map_or(0, |tx| tx.inject_size)
    }

    pub(super) fn num_receives(&self) -> usize {
        // SAFETY: as above.
        unsafe { self.raw.rx_attr.as_ref() }.map_or(0, |rx| rx.size)
    }

    pub(super) fn max_message_bytes(&self) -> usize {
        // SAFETY: as above.
        unsafe { self.raw.ep_attr.as_ref() }.map_or(0, |ep| ep.max_msg_size)
    }

    pub(super) fn domain(&self) -> &sys::DomainAttr {
        // SAFETY: the library always fills it in.
        unsafe { &*self.raw.domain_attr }
    }

    fn fabric(&self) -> &sys::FabricAttr {
        // SAFETY: the library always fills it in.
        unsafe { &*self.raw.fabric_attr }
    }
}

/// Required capabilities, for a query.
pub(super) struct Hints {
    info: Info,
    // `info` points to it during a query. It is freed here, not by the library.
    provider: Option<CString>,
}

impl Hints {
    /// Asks for reliable datagrams with messages and remote memory access, safe for several
    /// threads, and for `extra_caps`. Messages of `inject_bytes` must be sent without keeping the
    /// buffer; 0 accepts any limit.
    pub(super) fn new(
        library: &'static Library,
        provider: Option<&str>,
        extra_caps: u64,
        inject_bytes: usize,
    ) -> Result<Self, CallError> {
        // SAFETY: null asks for a fresh one, zeroed, with all parts allocated.
        let head = unsafe { (library.dupinfo)(null()) };
        let head = NonNull::new(head).ok_or_else(|| out_of_memory("fi_allocinfo"))?;
        let mut hints = Self { info: Info { library, head }, provider: None };
        // SAFETY: just made, with no other user, all parts allocated by the library.
        unsafe {
            let info = head.as_ptr();
            (*info).caps = sys::FI_MSG | sys::FI_RMA | extra_caps;
            (*info).mode = sys::FI_CONTEXT | sys::FI_CONTEXT2;
            (*(*info).ep_attr).kind = sys::FI_EP_RDM;
            (*(*info).tx_attr).inject_size = inject_bytes;
            (*(*info).tx_attr).msg_order = sys::FI_ORDER_SAS;
            (*(*info).rx_attr).msg_order = sys::FI_ORDER_SAS;
            let domain = (*info).domain_attr;
            (*domain).threading = sys::FI_THREAD_SAFE;
            (*domain).resource_mgmt = sys::FI_RM_ENABLED;
            (*domain).mr_mode = sys::FI_MR_LOCAL
                | sys::FI_MR_VIRT_ADDR
                | sys::FI_MR_ALLOCATED
                | sys::FI_MR_PROV_KEY
                | sys::FI_MR_ENDPOINT
                | sys::FI_MR_HMEM;
        }
        if let Some(provider) = provider.and_then(|name| CString::new(name).ok()) {
            // SAFETY: as above; taken back in `drop`, before the library would free it.
            unsafe { (*(*head.as_ptr()).fabric_attr).prov_name = provider.as_ptr().cast_mut() };
            hints.provider = Some(provider);
        }
        Ok(hints)
    }
}

impl Drop for Hints {
    fn drop(&mut self) {
        if self.provider.is_some() {
            // SAFETY: this owns the string, which the library would free with its own allocator.
            unsafe { (*(*self.info.head.as_ptr()).fabric_attr).prov_name = null_mut() };
        }
    }
}

/// An object of the library, closed when dropped. `parents` outlive it.
pub(super) struct Object<T> {
    ptr: NonNull<T>,
    name: &'static str,
    library: &'static Library,
    is_closed: bool,
    _parents: Vec<Arc<dyn Any + Send + Sync>>,
}

// SAFETY: objects of a domain opened as FI_THREAD_SAFE have no thread affinity; closed once.
unsafe impl<T> Send for Object<T> {}
// SAFETY: the same promise of the library covers calls from several threads at a time.
unsafe impl<T> Sync for Object<T> {}

impl<T> Object<T> {
    pub(super) const fn as_ptr(&self) -> *mut T {
        self.ptr.as_ptr()
    }

    /// The head that every object begins with.
    pub(super) const fn fid(&self) -> *mut sys::Fid {
        self.ptr.as_ptr().cast()
    }

    /// Takes ownership of the object that a call has made.
    ///
    /// # Safety
    /// If `result` is 0 then `ptr` is a fresh object of the library that begins with a `fid`.
    unsafe fn from_result(
        library: &'static Library,
        name: &'static str,
        result: c_int,
        ptr: *mut T,
        parents: Vec<Arc<dyn Any + Send + Sync>>,
    ) -> Result<Self, CallError> {
        check(library, name, result.into())?;
        let ptr = NonNull::new(ptr).ok_or_else(|| out_of_memory(name))?;
        Ok(Self { ptr, name, library, is_closed: false, _parents: parents })
    }

    /// Closes the object. A closed object may only be dropped.
    ///
    /// # Errors
    /// [`CallError`] with the library's reason, such as `EBUSY`. The object stays open then.
    pub(super) fn close(&mut self) -> Result<(), CallError> {
        if self.is_closed {
            return Ok(());
        }
        // SAFETY: a live object; it is not used after its only owner has closed it.
        let result = unsafe { ((*(*self.fid()).ops).close)(self.fid()) };
        check(self.library, "fi_close", result.into())?;
        self.is_closed = true;
        Ok(())
    }

    /// Makes dropping leave the object open, after the library has refused to close it.
    pub(super) const fn leave_open(&mut self) {
        self.is_closed = true;
    }
}

impl<T> Drop for Object<T> {
    fn drop(&mut self) {
        if let Err(error) = self.close() {
            tracing::error!(object = self.name, %error, "libfabric object not closed");
        }
    }
}

/// Opens the fabric of `info`.
pub(super) fn open_fabric(
    library: &'static Library,
    info: &Info,
) -> Result<Arc<Object<sys::FidFabric>>, CallError> {
    let mut fabric = null_mut();
    // SAFETY: the attributes are the library's own.
    unsafe {
        let attr = (*info.head.as_ptr()).fabric_attr;
        let result = (library.fabric)(attr, &raw mut fabric, null_mut());
        Ok(Arc::new(Object::from_result(library, "fi_fabric", result, fabric, Vec::new())?))
    }
}

/// Opens the domain of `info`.
pub(super) fn open_domain(
    library: &'static Library,
    fabric: &Arc<Object<sys::FidFabric>>,
    info: &Info,
) -> Result<Arc<Object<sys::FidDomain>>, CallError> {
    let mut domain = null_mut();
    // SAFETY: a live fabric and the library's own info.
    unsafe {
        let open = (*(*fabric.as_ptr()).ops).domain;
        let result = open(fabric.as_ptr(), info.head.as_ptr(), &raw mut domain, null_mut());
        let parents: Vec<Arc<dyn Any + Send + Sync>> = vec![Arc::clone(fabric) as _];
        Ok(Arc::new(Object::from_result(library, "fi_domain", result, domain, parents)?))
    }
}

/// Opens an address vector.
pub(super) fn open_av(
    library: &'static Library,
    domain: &Arc<Object<sys::FidDomain>>,
) -> Result<Arc<Object<sys::FidAv>>, CallError> {
    let mut attr = sys::AvAttr {
        kind: sys::FI_AV_TABLE,
        rx_ctx_bits: 0,
        count: 64,
        ep_per_node: 0,
        name: null(),
        map_addr: null_mut(),
        flags: 0,
    };
    let mut av = null_mut();
    // SAFETY: a live domain.
    unsafe {
        let open = (*(*domain.as_ptr()).ops).av_open;
        let result = open(domain.as_ptr(), &raw mut attr, &raw mut av, null_mut());
        let parents: Vec<Arc<dyn Any + Send + Sync>> = vec![Arc::clone(domain) as _];
        Ok(Arc::new(Object::from_result(library, "fi_av_open", result, av, parents)?))
    }
}

/// Opens a completion queue whose entries carry data. `wait_obj` says if it has a descriptor.
pub(super) fn open_cq(
    library: &'static Library,
    domain: &Arc<Object<sys::FidDomain>>,
    num_entries: usize,
    wait_obj: u32,
) -> Result<Arc<Object<sys::FidCq>>, CallError> {
    let mut attr = sys::CqAttr {
        size: num_entries,
        flags: 0,
        format: sys::FI_CQ_FORMAT_DATA,
        wait_obj,
        signaling_vector: 0,
        wait_cond: 0,
        wait_set: null_mut(),
    };
    let mut cq = null_mut();
    // SAFETY: a live domain.
    unsafe {
        let open = (*(*domain.as_ptr()).ops).cq_open;
        let result = open(domain.as_ptr(), &raw mut attr, &raw mut cq, null_mut());
        let parents: Vec<Arc<dyn Any + Send + Sync>> = vec![Arc::clone(domain) as _];
        Ok(Arc::new(Object::from_result(library, "fi_cq_open", result, cq, parents)?))
    }
}

/// Opens an endpoint, binds it and enables it.
pub(super) fn open_ep(
    library: &'static Library,
    domain: &Arc<Object<sys::FidDomain>>,
    info: &Info,
    av: &Arc<Object<sys::FidAv>>,
    cq: &Arc<Object<sys::FidCq>>,
) -> Result<Arc<Object<sys::FidEp>>, CallError> {
    let mut ep = null_mut();
    // SAFETY: a live domain and the library's own info.
    let ep = unsafe {
        let open = (*(*domain.as_ptr()).ops).endpoint;
        let result = open(domain.as_ptr(), info.head.as_ptr(), &raw mut ep, null_mut());
        let parents: Vec<Arc<dyn Any + Send + Sync>> =
            vec![Arc::clone(domain) as _, Arc::clone(av) as _, Arc::clone(cq) as _];
        Object::from_result(library, "fi_endpoint", result, ep, parents)?
    };
    // SAFETY: live objects of one domain.
    unsafe {
        let ops = (*ep.fid()).ops;
        for flags in [sys::FI_TRANSMIT | sys::FI_SELECTIVE_COMPLETION, sys::FI_RECV] {
            let result = ((*ops).bind)(ep.fid(), cq.fid(), flags);
            check(library, "fi_ep_bind (completion queue)", result.into())?;
        }
        let result = ((*ops).bind)(ep.fid(), av.fid(), 0);
        check(library, "fi_ep_bind (address vector)", result.into())?;
    }
    enable(library, &ep)?;
    Ok(Arc::new(ep))
}

/// Enables an endpoint, with retries if the name of its memory is taken.
///
/// The provider `shm` names an endpoint's memory in `/dev/shm` after the process id, the user and a
/// number of its own. A killed process leaves such memory behind, and a later process with the same
/// id finds it. The library (1.17) sees that the process id is alive, because it is its own. It
/// then removes the name and returns `EBUSY`. The name is free for the next attempt.
fn enable(library: &'static Library, ep: &Object<sys::FidEp>) -> Result<(), CallError> {
    for attempt in 1.. {
        // SAFETY: a live endpoint with all that it must be bound to.
        let result = unsafe { ((*(*ep.fid()).ops).control)(ep.fid(), sys::FI_ENABLE, null_mut()) };
        match check(library, "fi_enable", result.into()) {
            Err(error) if error.code == sys::FI_EBUSY && attempt < MAX_ENABLE_ATTEMPTS => {
                tracing::info!(%error, "memory of a killed process has the name of a new endpoint");
            }
            Err(mut error) if error.code == sys::FI_EBUSY => {
                error.text += ": another process uses the name of this endpoint's memory; do processes of \
                               several process namespaces share /dev/shm?";
                return Err(error);
            }
            result => return result.map(drop),
        }
    }
    unreachable!("the last attempt returns")
}

/// Another object may take the name between its removal and the next attempt, but not every time.
const MAX_ENABLE_ATTEMPTS: u32 = 4;

/// Registers host memory, bound to `ep` if it is given.
///
/// # Safety
/// `ptr..ptr+len` stays mapped as long as the registration.
pub(super) unsafe fn register(
    library: &'static Library,
    domain: &Arc<Object<sys::FidDomain>>,
    ep: Option<&Arc<Object<sys::FidEp>>>,
    (ptr, len): (*mut u8, usize),
    access: u64,
    requested_key: u64,
) -> Result<Object<sys::FidMr>, CallError> {
    let iov = sys::Iovec { base: ptr.cast(), len };
    let attr = sys::MrAttr {
        iov: &raw const iov,
        iov_count: 1,
        access,
        offset: 0,
        requested_key,
        context: null_mut(),
        auth_key_size: 0,
        auth_key: null_mut(),
        iface: sys::FI_HMEM_SYSTEM,
        device: 0,
    };
    let mut mr = null_mut();
    // SAFETY: a live domain; the memory is the caller's promise.
    let mr = unsafe {
        let regattr = (*(*domain.as_ptr()).mr).regattr;
        let result = regattr(domain.fid(), &raw const attr, 0, &raw mut mr);
        let mut parents: Vec<Arc<dyn Any + Send + Sync>> = vec![Arc::clone(domain) as _];
        parents.extend(ep.map(|ep| Arc::clone(ep) as _));
        Object::from_result(library, "fi_mr_regattr", result, mr, parents)?
    };
    if let Some(ep) = ep {
        // SAFETY: live objects of one domain.
        unsafe {
            let ops = (*mr.fid()).ops;
            let result = ((*ops).bind)(mr.fid(), ep.fid(), 0);
            check(library, "fi_mr_bind", result.into())?;
            let result = ((*ops).control)(mr.fid(), sys::FI_ENABLE, null_mut());
            check(library, "fi_mr_enable", result.into())?;
        }
    }
    Ok(mr)
}

fn out_of_memory(op: &'static str) -> CallError {
    CallError { op, code: 12, text: "no memory".to_owned() }
}

/// # Safety
/// `ptr` is null or a string that ends with a zero byte.
unsafe fn text(ptr: *const std::ffi::c_char) -> String {
    if ptr.is_null() {
        return String::new();
    }
    // SAFETY: the caller's promise.
    unsafe { CStr::from_ptr(ptr) }.to_string_lossy().into_owned()
}
