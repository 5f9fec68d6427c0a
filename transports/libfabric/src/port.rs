//! One endpoint of one provider with its queue and its addresses: the safe layer.

use std::ffi::c_void;
use std::net::IpAddr;
use std::os::fd::BorrowedFd;
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;

use super::fi_endpoint::{Descriptor, FiEndpoint, MAX_ADDRESS_BYTES};
use super::load::Library;
use super::owner::{self, CallError, Entry, Hints, Info, Object, check};
use super::prefault::prefault;
use super::queue::Queue;
use super::wait_mode::WaitMode;
use super::{rxm, sys};
use p2p_core::network::NetworkError;
use p2p_core::region::Region;

/// Outcome of one read of the completion queue.
pub(super) enum PollOutcome {
    /// The number of entries that were read.
    Entries(usize),
    /// The queue is empty.
    Nothing,
    Failed(Failure),
}

pub(super) struct Failure {
    /// The operation's context, or null.
    pub(super) context: *mut c_void,
    pub(super) flags: u64,
    /// Positive error code.
    pub(super) code: i64,
    /// The library's description of the code.
    pub(super) text: String,
}

/// Capabilities of a port's provider.
#[derive(Debug, Clone)]
pub(super) struct Traits {
    pub(super) provider: String,
    /// Largest message that is sent without keeping the caller's buffer.
    pub(super) inject_bytes: usize,
    pub(super) max_message_bytes: usize,
    /// True if a write can notify the target once its bytes have arrived.
    pub(super) counts_writes: bool,
    /// True if that notification has 64 bits, with room for a part of the pair's secret.
    pub(super) has_wide_notes: bool,
    /// True if completions name the sender.
    pub(super) knows_source: bool,
    pub(super) num_receives: usize,
    /// True if the target's own calls carry out a write without notification, and such a write
    /// makes the descriptor of the target's queue readable. It can then replace a message.
    pub(super) has_mailbox: bool,
    mr_mode: i32,
    key_mask: u64,
}

/// An endpoint with its queue, addresses and registrations. See the [module](self).
pub(super) struct Port {
    // Fields are dropped, and so closed, in this order.
    endpoint: FiEndpoint,
    queue: Queue,
    av: Arc<Object<sys::FidAv>>,
    domain: Arc<Object<sys::FidDomain>>,
    fabric: Arc<Object<sys::FidFabric>>,
    library: &'static Library,
    info: Info,
    traits: Traits,
    wait_mode: WaitMode,
}

impl std::fmt::Debug for Port {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Port").field("traits", &self.traits).finish_non_exhaustive()
    }
}

/// A registration of local memory.
pub(super) struct MemoryRegistration {
    mr: Object<sys::FidMr>,
    /// Stays mapped while the registration is in force, even after `self` is dropped.
    memory: Option<Region>,
    /// Remote address of the first byte: a peer adds its offset to it.
    pub(super) base: u64,
}

impl std::fmt::Debug for MemoryRegistration {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MemoryRegistration").field("base", &self.base).finish_non_exhaustive()
    }
}

impl MemoryRegistration {
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

    #[cfg(test)]
    pub(super) const fn fid(&self) -> *mut sys::Fid {
        self.mr.fid()
    }

    /// Revokes the key.
    ///
    /// # Errors
    /// [`CallError`]; the key stays in force then, and the memory must stay mapped.
    pub(super) fn close(&mut self) -> Result<(), CallError> {
        self.mr.close()
    }
}

impl Drop for MemoryRegistration {
    fn drop(&mut self) {
        if let Err(error) = self.close() {
            // A holder of the key may still write there, so the memory is never reused.
            let bytes = self.memory.as_ref().map(Region::len);
            tracing::error!(%error, bytes, "a registration stays in force, and its memory mapped");
            std::mem::forget(self.memory.take());
            self.mr.leave_open();
        }
    }
}

/// Access that peers have to registered memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Rights {
    /// None.
    Local,
    Read,
    ReadWrite,
}

/// Finds the provider `name` at the local address `local`. Returns what it offers and how to wait
/// for its peers.
pub(super) fn find(
    library: &'static Library,
    name: &str,
    local: Option<IpAddr>,
) -> Result<(Info, WaitMode), NetworkError> {
    let failed = |op: &'static str, error: &CallError| network_error(name, op, error);
    let candidates = [name.to_owned(), format!("{name};ofi_rxm")];
    let is_layered = name.contains(';');
    let mut last = None;
    for candidate in &candidates[..if is_layered { 1 } else { 2 }] {
        // Larger messages save operations, but some providers refuse the larger requests.
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
            let provider = found.first().provider();
            let wait_mode = WaitMode::from_environment(&provider);
            return match rxm::refusal(&provider).map_or(wait_mode, Err) {
                Ok(wait_mode) => Ok((found, wait_mode)),
                Err(detail) => Err(NetworkError {
                    network: "libfabric".to_owned(),
                    op: "open",
                    code: None,
                    detail,
                }),
            };
        }
    }
    let others = providers(library).join(", ");
    let others = if others.is_empty() { "none".to_owned() } else { others };
    let code = last.map(|error| error.code).filter(|code| *code != sys::FI_ENODATA);
    let detail = format!("no provider `{name}` here; found: {others}");
    Err(NetworkError { network: "libfabric".to_owned(), op: "fi_getinfo", code, detail })
}

/// Names of the usable providers, in the library's order of preference.
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
    /// Opens the fabric, domain, address vector, queue and endpoint of a provider.
    pub(super) fn open(
        library: &'static Library,
        (info, wait_mode): (Info, WaitMode),
    ) -> Result<Self, NetworkError> {
        let traits = Traits::of(&info.first());
        let failed = |error: CallError| network_error(&traits.provider, error.op, &error);
        let fabric = owner::open_fabric(library, &info).map_err(failed)?;
        let domain = owner::open_domain(library, &fabric, &info).map_err(failed)?;
        let av = owner::open_av(library, &domain).map_err(failed)?;
        let queue = Queue::open(library, &fabric, &domain, traits.knows_source, wait_mode)
            .map_err(failed)?;
        let endpoint =
            FiEndpoint::open(library, &domain, &info, &av, queue.owner()).map_err(failed)?;
        Ok(Self { endpoint, queue, av, domain, fabric, library, info, traits, wait_mode })
    }

    /// Opens another endpoint with an address and a queue of its own. `ofi_rxm` 1.17 leaves entries
    /// of a closed endpoint in a shared queue, and `fi_trywait` dereferences them.
    pub(super) fn open_endpoint(&self) -> Result<(FiEndpoint, Queue), CallError> {
        let Self { library, fabric, domain, .. } = self;
        let queue = Queue::open(library, fabric, domain, self.traits.knows_source, self.wait_mode)?;
        let endpoint = FiEndpoint::open(library, domain, &self.info, &self.av, queue.owner())?;
        Ok((endpoint, queue))
    }

    /// The port's own endpoint.
    #[inline]
    pub(super) const fn endpoint(&self) -> &FiEndpoint {
        &self.endpoint
    }

    pub(super) const fn traits(&self) -> &Traits {
        &self.traits
    }

    /// The queue of the port's own endpoint.
    #[inline]
    pub(super) const fn queue(&self) -> &Queue {
        &self.queue
    }

    /// Descriptor that becomes readable when the queue has entries.
    #[inline]
    pub(super) fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        self.queue.wait_fd()
    }

    /// Inserts a peer's address.
    pub(super) fn insert(&self, name: &[u8]) -> Result<sys::FiAddr, CallError> {
        // The library reads as many bytes as its address format has, so shorter ones are padded.
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

    /// Removes a peer's address.
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

    /// Registers a whole region, and keeps it mapped while its key is in force.
    pub(super) fn register_region(
        &self,
        region: &Region,
        rights: Rights,
    ) -> Result<MemoryRegistration, CallError> {
        // SAFETY: the registration keeps a clone of the region.
        let mut registered = unsafe { self.register(region.as_ptr(), region.len(), rights)? };
        registered.memory = Some(region.clone());
        Ok(registered)
    }

    /// Registers memory, with a random key if the provider lets the caller choose keys.
    ///
    /// # Safety
    /// `ptr..ptr+len` is readable, and stays mapped as long as the registration.
    pub(super) unsafe fn register(
        &self,
        ptr: NonNull<u8>,
        len: usize,
        rights: Rights,
    ) -> Result<MemoryRegistration, CallError> {
        let local = sys::FI_READ | sys::FI_WRITE | sys::FI_TRANSMIT | sys::FI_RECV;
        let access = match rights {
            Rights::Local => local,
            Rights::Read => local | sys::FI_REMOTE_READ,
            Rights::ReadWrite => local | sys::FI_REMOTE_READ | sys::FI_REMOTE_WRITE,
        };
        let has = |mode| self.traits.mr_mode & mode != 0;
        if has(sys::FI_MR_ALLOCATED) {
            // SAFETY: the caller's promise.
            unsafe { prefault(ptr, len) };
        }
        let ep = self.binds_memory().then(|| self.endpoint.owner());
        for attempt in 1.. {
            // An unguessable key. A provider that makes its own keys ignores it.
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
                    return Ok(MemoryRegistration { mr, memory: None, base });
                }
            }
        }
        unreachable!("the last attempt returns")
    }

    /// True if registrations belong to the port's own endpoint alone.
    pub(super) const fn binds_memory(&self) -> bool {
        self.traits.mr_mode & sys::FI_MR_ENDPOINT != 0
    }

    /// True if local buffers need a registration.
    pub(super) const fn needs_local(&self) -> bool {
        self.traits.mr_mode & (sys::FI_MR_LOCAL | sys::FI_MR_HMEM) != 0
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
            // A notification does not say which message its write belongs to. Without an order
            // among writes, one write could stand in for another. Over verbs, such a write also
            // consumes a receive, and `ofi_rxm` with shared receives takes its completion for that
            // of a message.
            counts_writes: domain.cq_data_size >= 4 && is_over_tcp(&entry.provider()),
            has_wide_notes: domain.cq_data_size >= 8,
            knows_source: entry.caps() & sys::FI_SOURCE != 0,
            num_receives: entry.num_receives(),
            has_mailbox: is_over_tcp(&entry.provider())
                && entry.inject_bytes() >= super::mailbox::CELL_BYTES,
            mr_mode: domain.mr_mode,
            key_mask: if key_bytes >= 8 { u64::MAX } else { (1 << (8 * key_bytes)) - 1 },
        }
    }
}

/// The provider that moves the bytes: `tcp` of `tcp;ofi_rxm`.
pub(super) fn core_of(provider: &str) -> &str {
    provider.split_once(';').map_or(provider, |(core, _)| core)
}

/// True for providers that carry out a write in software of the target's process, behind a socket.
fn is_over_tcp(provider: &str) -> bool {
    matches!(core_of(provider), "tcp" | "net")
}

/// Converts a failed call of this provider.
pub(super) fn network_error(provider: &str, op: &'static str, error: &CallError) -> NetworkError {
    NetworkError {
        network: format!("libfabric {provider}"),
        op,
        code: Some(error.code),
        detail: error.text.clone(),
    }
}

const PREFERRED_INJECT_BYTES: usize = 16 << 10;
const MAX_KEY_ATTEMPTS: u32 = 8;
