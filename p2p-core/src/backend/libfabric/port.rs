//! One endpoint of one provider with its queue and its addresses: the safe layer.

use std::ffi::c_void;
use std::net::IpAddr;
use std::os::fd::BorrowedFd;
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;

use super::load::Library;
use super::owner::{self, CallError, Entry, Hints, Info, Owned, check};
use super::queue::Queue;
use super::sys;
use crate::network::NetworkError;

/// Largest address of an endpoint in bytes.
pub(super) const MAX_ADDRESS_BYTES: usize = 512;
/// Bytes at the head of every context, which some providers use for themselves.
pub(super) type ContextRoom = [u64; 8];

/// Whether the library took an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Taken {
    /// It will be carried out.
    Yes,
    /// Not now.
    Again,
}

/// What reading the completion queue brought.
pub(super) enum Polled {
    /// As many entries.
    Entries(usize),
    /// Nothing.
    Nothing,
    /// An operation failed.
    Failed(Failure),
}

/// A failed operation.
pub(super) struct Failure {
    /// The operation's context, if it had one.
    pub(super) context: *mut c_void,
    /// Its flags.
    pub(super) flags: u64,
    /// Positive code.
    pub(super) code: i64,
    /// What it means.
    pub(super) text: String,
}

/// What the provider of a port can do.
#[derive(Debug, Clone)]
pub(super) struct Traits {
    pub(super) provider: String,
    /// Largest message that is sent without keeping the caller's buffer.
    pub(super) inject_bytes: usize,
    pub(super) max_message_bytes: usize,
    /// Whether a write can tell the target that it has landed.
    pub(super) counts_writes: bool,
    /// Whether such data has 64 bits, and room for a part of the pair's secret.
    pub(super) has_wide_notes: bool,
    /// Whether completions say who sent.
    pub(super) knows_source: bool,
    pub(super) num_receives: usize,
    /// Whether a write that nobody is told of is put in place by the target's own calls, and makes its
    /// queue's descriptor readable: then it can replace a message.
    pub(super) takes_mail: bool,
    mr_mode: i32,
    key_mask: u64,
}

/// One endpoint. Operations on different ones of a port share its queue and its addresses.
pub(super) struct Lane {
    ep: Arc<Owned<sys::FidEp>>,
    library: &'static Library,
    name: Vec<u8>,
}

impl std::fmt::Debug for Lane {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Lane").field("name", &self.name).finish_non_exhaustive()
    }
}

/// An endpoint with its queue, addresses and registrations. See the [module](self).
pub(super) struct Port {
    // Closed in this order.
    lane: Lane,
    queue: Queue,
    av: Arc<Owned<sys::FidAv>>,
    domain: Arc<Owned<sys::FidDomain>>,
    fabric: Arc<Owned<sys::FidFabric>>,
    library: &'static Library,
    info: Info,
    traits: Traits,
}

impl std::fmt::Debug for Port {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Port").field("traits", &self.traits).finish_non_exhaustive()
    }
}

/// Registered memory.
pub(super) struct Registered {
    mr: Owned<sys::FidMr>,
    /// What a peer adds to an offset to address the first byte.
    pub(super) base: u64,
}

impl std::fmt::Debug for Registered {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Registered").field("base", &self.base).finish_non_exhaustive()
    }
}

impl Registered {
    /// Remote key.
    pub(super) fn key(&self) -> u64 {
        // SAFETY: a live registration; the field is set once, while registering.
        unsafe { (*self.mr.as_ptr()).key }
    }

    /// Descriptor for local use.
    pub(super) fn descriptor(&self) -> Descriptor {
        // SAFETY: as above.
        Descriptor(unsafe { (*self.mr.as_ptr()).mem_desc })
    }
}

/// The library's word for registered local memory. Null where it wants none.
#[derive(Debug, Clone, Copy)]
pub(super) struct Descriptor(pub(super) *mut c_void);

// SAFETY: an opaque value that the library alone looks behind, from any thread.
unsafe impl Send for Descriptor {}
// SAFETY: as above.
unsafe impl Sync for Descriptor {}

impl Descriptor {
    pub(super) const NONE: Self = Self(null_mut());
}

/// What others may do with registered memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Rights {
    /// Nothing.
    Local,
    /// Read.
    Read,
    /// Read and write.
    ReadWrite,
}

/// Memory of a peer.
#[derive(Debug, Clone, Copy)]
pub(super) struct Far {
    pub(super) peer: sys::FiAddr,
    pub(super) address: u64,
    pub(super) key: u64,
}

/// When a write counts as complete.
#[derive(Debug, Clone, Copy)]
pub(super) enum Completes {
    /// When the source may be reused; the target is told this.
    Sent {
        /// What the target is told.
        note: u64,
    },
    /// When the bytes are visible at the target.
    Delivered,
}

/// The provider that `name` stands for, and what it offers from `local`.
pub(super) fn find(
    library: &'static Library,
    name: &str,
    local: Option<IpAddr>,
) -> Result<Info, NetworkError> {
    let failed = |op: &'static str, error: &CallError| network_error(name, op, error);
    let candidates = [name.to_owned(), format!("{name};ofi_rxm")];
    let is_layered = name.contains(';');
    let mut last = None;
    for candidate in &candidates[..if is_layered { 1 } else { 2 }] {
        // The more a message can hold the fewer operations are needed; some providers refuse wishes.
        for (caps, inject_bytes) in
            [(sys::FI_SOURCE, PREFERRED_INJECT_BYTES), (sys::FI_SOURCE, 4096), (0, 4096), (0, 0)]
        {
            let hints = Hints::new(library, Some(candidate), caps, inject_bytes)
                .map_err(|e| failed("fi_allocinfo", &e))?;
            let anywhere = match Info::query(library, None, &hints) {
                Ok(info) => info,
                Err(error) => {
                    last = Some(error);
                    continue;
                }
            };
            let is_ip = matches!(
                anywhere.first().address_format(),
                sys::FI_SOCKADDR | sys::FI_SOCKADDR_IN | sys::FI_SOCKADDR_IN6
            );
            let found = match local {
                Some(local) if is_ip => Info::query(library, Some(&local.to_string()), &hints)
                    .map_err(|e| NetworkError {
                        network: format!("libfabric {candidate}"),
                        op: "fi_getinfo",
                        code: Some(e.code),
                        detail: format!("not from address {local}: {}", e.text),
                    })?,
                _ => anywhere,
            };
            let found = found.only(&found.first()).map_err(|e| failed("fi_dupinfo", &e))?;
            return Ok(found);
        }
    }
    let others = providers(library).join(", ");
    let others = if others.is_empty() { "none".to_owned() } else { others };
    let code = last.map(|error| error.code).filter(|code| *code != sys::FI_ENODATA);
    let detail = format!("no provider `{name}` here; found: {others}");
    Err(NetworkError { network: "libfabric".to_owned(), op: "fi_getinfo", code, detail })
}

/// Names of the providers that could be used, the library's favourite first.
pub(super) fn providers(library: &'static Library) -> Vec<String> {
    let mut names = Vec::new();
    let found =
        Hints::new(library, None, 0, 0).and_then(|hints| Info::query(library, None, &hints));
    if let Ok(found) = found {
        for entry in found.iter() {
            let name = entry.provider();
            if !names.contains(&name) {
                names.push(name);
            }
        }
    }
    names
}

impl Port {
    /// Opens everything.
    pub(super) fn open(library: &'static Library, info: Info) -> Result<Self, NetworkError> {
        let traits = Traits::of(&info.first());
        let failed = |error: CallError| network_error(&traits.provider, error.op, &error);
        let fabric = owner::open_fabric(library, &info).map_err(failed)?;
        let domain = owner::open_domain(library, &fabric, &info).map_err(failed)?;
        let av = owner::open_av(library, &domain).map_err(failed)?;
        let mut traits = traits.clone();
        let queue = Queue::open(library, &fabric, &domain, traits.knows_source).map_err(failed)?;
        // Without a descriptor, sleepers would find mail late.
        traits.takes_mail &= queue.wait_fd().is_some();
        let lane = Lane::open(library, &domain, &info, &av, queue.owner()).map_err(failed)?;
        Ok(Self { lane, queue, av, domain, fabric, library, info, traits })
    }

    /// Another endpoint beside the first, with an address and a queue of its own. (`ofi_rxm` 1.17 leaves
    /// what belongs to a closed endpoint in the queue that it shared, and `fi_trywait` follows it.)
    pub(super) fn open_lane(&self) -> Result<(Lane, Queue), CallError> {
        let Self { library, fabric, domain, .. } = self;
        let queue = Queue::open(library, fabric, domain, self.traits.knows_source)?;
        let lane = Lane::open(library, domain, &self.info, &self.av, queue.owner())?;
        Ok((lane, queue))
    }

    /// The first endpoint.
    #[inline]
    pub(super) const fn lane(&self) -> &Lane {
        &self.lane
    }

    pub(super) const fn traits(&self) -> &Traits {
        &self.traits
    }

    /// The first endpoint's queue.
    #[inline]
    pub(super) const fn queue(&self) -> &Queue {
        &self.queue
    }

    /// Descriptor that becomes readable when there is something to read.
    #[inline]
    pub(super) fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        self.queue.wait_fd()
    }

    /// Learns a peer's address.
    pub(super) fn insert(&self, name: &[u8]) -> Result<sys::FiAddr, CallError> {
        // The library reads as many bytes as its format has, so short ones are padded.
        let mut padded = [0u8; MAX_ADDRESS_BYTES];
        let len = name.len().min(padded.len());
        padded[..len].copy_from_slice(&name[..len]);
        let mut addr = sys::FI_ADDR_UNSPEC;
        // SAFETY: a live address vector; one address, longer than any format.
        let result = unsafe {
            let insert = (*(*self.av.as_ptr()).ops).insert;
            insert(self.av.as_ptr(), padded.as_ptr().cast(), 1, &raw mut addr, 0, null_mut())
        };
        let num = check(self.library, "fi_av_insert", result.into())?;
        if num != 1 || addr == sys::FI_ADDR_UNSPEC {
            let text = "the peer's address is not one of this provider".to_owned();
            return Err(CallError { op: "fi_av_insert", code: 22, text });
        }
        Ok(addr)
    }

    /// Forgets a peer's address.
    pub(super) fn remove(&self, mut addr: sys::FiAddr) {
        // SAFETY: a live address vector.
        let result = unsafe {
            let remove = (*(*self.av.as_ptr()).ops).remove;
            remove(self.av.as_ptr(), &raw mut addr, 1, 0)
        };
        if result != 0 {
            tracing::debug!(code = -result, "a peer's libfabric address was not removed");
        }
    }

    /// Registers memory, with a random key where keys can be chosen.
    ///
    /// # Safety
    /// `ptr..ptr+len` stays mapped as long as the registration.
    pub(super) unsafe fn register(
        &self,
        ptr: NonNull<u8>,
        len: usize,
        rights: Rights,
    ) -> Result<Registered, CallError> {
        let local = sys::FI_READ | sys::FI_WRITE | sys::FI_TRANSMIT | sys::FI_RECV;
        let access = match rights {
            Rights::Local => local,
            Rights::Read => local | sys::FI_REMOTE_READ,
            Rights::ReadWrite => local | sys::FI_REMOTE_READ | sys::FI_REMOTE_WRITE,
        };
        let has = |mode| self.traits.mr_mode & mode != 0;
        if has(sys::FI_MR_ALLOCATED) {
            // SAFETY: the caller's promise.
            unsafe { touch(ptr, len) };
        }
        let ep = self.binds_memory().then_some(&self.lane.ep);
        for attempt in 1.. {
            // A key that nobody can guess; a provider that makes its own ignores it.
            let key = rand::random::<u64>() & self.traits.key_mask;
            // SAFETY: the caller's promise.
            let made = unsafe {
                let memory = (ptr.as_ptr(), len);
                owner::register(self.library, &self.domain, ep, memory, access, key)
            };
            match made {
                Err(error) if error.code == sys::FI_ENOKEY && attempt < MAX_KEY_ATTEMPTS => {}
                Err(error) => return Err(error),
                Ok(mr) => {
                    let is_virtual = has(sys::FI_MR_VIRT_ADDR);
                    let base = if is_virtual { ptr.as_ptr().addr() as u64 } else { 0 };
                    return Ok(Registered { mr, base });
                }
            }
        }
        unreachable!("the last attempt returns")
    }

    /// Whether registrations belong to the first endpoint alone.
    pub(super) const fn binds_memory(&self) -> bool {
        self.traits.mr_mode & sys::FI_MR_ENDPOINT != 0
    }

    /// Whether local buffers need a registration.
    pub(super) const fn needs_local(&self) -> bool {
        self.traits.mr_mode & (sys::FI_MR_LOCAL | sys::FI_MR_HMEM) != 0
    }
}

impl Lane {
    fn open(
        library: &'static Library,
        domain: &Arc<Owned<sys::FidDomain>>,
        info: &Info,
        av: &Arc<Owned<sys::FidAv>>,
        cq: &Arc<Owned<sys::FidCq>>,
    ) -> Result<Self, CallError> {
        let ep = owner::open_ep(library, domain, info, av, cq)?;
        let mut name = vec![0u8; MAX_ADDRESS_BYTES];
        let mut len = name.len();
        // SAFETY: room for `len` bytes.
        let result = unsafe {
            ((*(*ep.as_ptr()).cm).getname)(ep.fid(), name.as_mut_ptr().cast(), &raw mut len)
        };
        check(library, "fi_getname", result.into())?;
        name.truncate(len);
        Ok(Self { ep, library, name })
    }

    /// This endpoint's address, for peers.
    pub(super) fn name(&self) -> &[u8] {
        &self.name
    }

    /// Sends a small message; the bytes may be reused at once.
    #[inline]
    pub(super) fn inject(&self, peer: sys::FiAddr, bytes: &[u8]) -> Result<Taken, CallError> {
        // SAFETY: a live endpoint and valid bytes, which the call copies.
        let result = unsafe {
            let inject = (*(*self.ep.as_ptr()).msg).inject;
            inject(self.ep.as_ptr(), bytes.as_ptr().cast(), bytes.len(), peer)
        };
        self.taken("fi_inject", result)
    }

    /// Offers a buffer for the next message.
    ///
    /// # Safety
    /// The buffer is neither read nor written, and it and the context stay, until the completion or
    /// the end of the port.
    pub(super) unsafe fn receive(
        &self,
        (ptr, len): (*mut u8, usize),
        descriptor: Descriptor,
        context: *mut c_void,
    ) -> Result<Taken, CallError> {
        // SAFETY: a live endpoint; the caller's promise.
        let result = unsafe {
            let recv = (*(*self.ep.as_ptr()).msg).recv;
            let any = sys::FI_ADDR_UNSPEC;
            recv(self.ep.as_ptr(), ptr.cast(), len, descriptor.0, any, context)
        };
        self.taken("fi_recv", result)
    }

    /// Copies a few bytes, at least 9, into a peer's memory; they may be reused at once, and nobody is
    /// told.
    #[inline]
    pub(super) fn inject_write(&self, to: Far, bytes: &[u8]) -> Result<Taken, CallError> {
        // In two pieces: for one, `ofi_rxm` 1.17 hands the operation on without a context of its own,
        // and follows a null pointer when the peer has died.
        let (first, second) = bytes.split_at(8.min(bytes.len()));
        let piece =
            |bytes: &[u8]| sys::Iovec { base: bytes.as_ptr().cast_mut().cast(), len: bytes.len() };
        let iov = [piece(first), piece(second)];
        let rma = sys::RmaIov { addr: to.address, len: bytes.len(), key: to.key };
        let mut desc = [null_mut(); 2];
        let message = sys::MsgRma {
            iov: iov.as_ptr(),
            desc: desc.as_mut_ptr(),
            iov_count: iov.len(),
            addr: to.peer,
            rma_iov: &raw const rma,
            rma_iov_count: 1,
            context: null_mut(),
            data: 0,
        };
        // SAFETY: a live endpoint; the vectors are read, and the bytes copied, by the call.
        let result = unsafe {
            let write = (*(*self.ep.as_ptr()).rma).writemsg;
            write(self.ep.as_ptr(), &raw const message, sys::FI_INJECT)
        };
        self.taken("fi_writemsg", result)
    }

    /// Starts a copy into a peer's memory.
    ///
    /// # Safety
    /// `ptr..ptr+len` is mapped and not written, and the context stays, until the completion.
    pub(super) unsafe fn write(
        &self,
        to: Far,
        (ptr, len): (*const u8, usize),
        descriptor: Descriptor,
        completes: Completes,
        context: *mut c_void,
    ) -> Result<Taken, CallError> {
        let iov = sys::Iovec { base: ptr.cast_mut().cast(), len };
        let rma = sys::RmaIov { addr: to.address, len, key: to.key };
        let mut desc = descriptor.0;
        let (flags, data) = match completes {
            Completes::Sent { note } => (sys::FI_REMOTE_CQ_DATA, note),
            Completes::Delivered => (sys::FI_DELIVERY_COMPLETE, 0),
        };
        let message = sys::MsgRma {
            iov: &raw const iov,
            desc: &raw mut desc,
            iov_count: 1,
            addr: to.peer,
            rma_iov: &raw const rma,
            rma_iov_count: 1,
            context,
            data,
        };
        // SAFETY: a live endpoint; the vectors are read by the call; the caller's promise.
        let result = unsafe {
            let write = (*(*self.ep.as_ptr()).rma).writemsg;
            write(self.ep.as_ptr(), &raw const message, sys::FI_COMPLETION | flags)
        };
        self.taken("fi_writemsg", result)
    }

    /// Starts a copy from a peer's memory.
    ///
    /// # Safety
    /// `ptr..ptr+len` is mapped and neither read nor written, and the context stays, until the
    /// completion.
    pub(super) unsafe fn read(
        &self,
        from: Far,
        (ptr, len): (*mut u8, usize),
        descriptor: Descriptor,
        context: *mut c_void,
    ) -> Result<Taken, CallError> {
        let iov = sys::Iovec { base: ptr.cast(), len };
        let rma = sys::RmaIov { addr: from.address, len, key: from.key };
        let mut desc = descriptor.0;
        let message = sys::MsgRma {
            iov: &raw const iov,
            desc: &raw mut desc,
            iov_count: 1,
            addr: from.peer,
            rma_iov: &raw const rma,
            rma_iov_count: 1,
            context,
            data: 0,
        };
        // SAFETY: a live endpoint; the vectors are read by the call; the caller's promise.
        let result = unsafe {
            let read = (*(*self.ep.as_ptr()).rma).readmsg;
            read(self.ep.as_ptr(), &raw const message, sys::FI_COMPLETION)
        };
        self.taken("fi_readmsg", result)
    }

    #[inline]
    fn taken(&self, op: &'static str, result: isize) -> Result<Taken, CallError> {
        match result as i64 {
            0 => Ok(Taken::Yes),
            code if code == -sys::FI_EAGAIN => Ok(Taken::Again),
            code => Err(CallError { op, code: -code, text: self.library.describe(code) }),
        }
    }
}

impl Traits {
    fn of(entry: &Entry<'_>) -> Self {
        let domain = entry.domain();
        let key_bytes = domain.mr_key_size.min(8);
        Self {
            provider: entry.provider(),
            inject_bytes: entry.inject_bytes(),
            max_message_bytes: entry.max_message_bytes(),
            counts_writes: domain.cq_data_size >= 4,
            has_wide_notes: domain.cq_data_size >= 8,
            knows_source: entry.caps() & sys::FI_SOURCE != 0,
            num_receives: entry.num_receives(),
            takes_mail: is_over_tcp(&entry.provider())
                && entry.inject_bytes() >= super::mail::CELL_BYTES,
            mr_mode: domain.mr_mode,
            key_mask: if key_bytes >= 8 { u64::MAX } else { (1 << (8 * key_bytes)) - 1 },
        }
    }
}

/// Providers whose target's side of a write is software of the target's process, behind a socket.
fn is_over_tcp(provider: &str) -> bool {
    matches!(provider.split(';').next(), Some("tcp" | "net"))
}

/// A failure of this provider.
pub(super) fn network_error(provider: &str, op: &'static str, error: &CallError) -> NetworkError {
    NetworkError {
        network: format!("libfabric {provider}"),
        op,
        code: Some(error.code),
        detail: error.text.clone(),
    }
}

/// Makes every page exist, without changing it.
///
/// # Safety
/// `ptr..ptr+len` is mapped, readable and writable.
unsafe fn touch(ptr: NonNull<u8>, len: usize) {
    for offset in (0..len).step_by(4096) {
        // SAFETY: in range; an atomic addition of nothing changes nothing for others.
        unsafe {
            let byte = ptr.as_ptr().add(offset).cast::<std::sync::atomic::AtomicU8>();
            (*byte).fetch_add(0, std::sync::atomic::Ordering::Relaxed);
        }
    }
}

const PREFERRED_INJECT_BYTES: usize = 16 << 10;
const MAX_KEY_ATTEMPTS: u32 = 8;
