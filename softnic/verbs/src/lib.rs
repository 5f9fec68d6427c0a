//! A software NIC behind the functions of libibverbs and libmlx5, for rehearsals without hardware. `softnic`
//! executes posted requests between processes of one host.
//!
//! `SWITCHYARD_SOFTNIC_SEED`, a number, makes the NIC delay and reorder operations as far as a reliable connection
//! permits. All users must tolerate that.
//!
//! Memory that peers may reach must begin at a page. The NIC replaces its pages by pages of a shared segment with
//! the same bytes, the last page wholly. Pages of [`SharedPages`] are shared from the beginning.

mod devx;
mod pages;
mod verbs;

use std::collections::HashMap;
use std::ffi::{OsStr, c_int, c_void};
use std::io;
use std::ptr::{self, NonNull};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use ibgda::{Libraries, LibraryError, ffi};
use p2p_core::Region;
pub use softnic::format::Syndrome;
use softnic::{
    Adversary, ControlError, Domain, DoorbellMode, Fault, Keys, Nic, NicConfig, NicThread, Segment,
};

use self::pages::MemoryRange;
pub use self::pages::SharedPages;

/// The functions, over the NIC of this process. They follow the vendor's signatures, so there is one NIC for
/// all that open a device; it connects queue pairs with those of other processes' NICs and with its own.
///
/// # Errors
/// None: every function that is looked up exists.
pub fn libraries() -> Result<Libraries, LibraryError> {
    // SAFETY: every function is that of the name, with the signature of `ffi`.
    unsafe {
        Libraries::of_functions("the software NIC", |name| verbs::find(name).or(devx::find(name)))
    }
}

/// The NIC of this process, once a function of the libraries was called: to inject faults, to let it progress, and
/// to read what it did.
///
/// # Errors
/// The NIC cannot be opened.
pub fn nic() -> io::Result<&'static NicThread> {
    device().map(|device| &device.nic).ok_or_else(io::Error::last_os_error)
}

/// Violations by posters.
#[must_use]
pub fn violations() -> Vec<String> {
    match DEVICE_STATE.get() {
        Some(Ok(device)) => {
            device.nic.lock().violations().iter().map(ToString::to_string).collect()
        }
        Some(Err(_)) | None => Vec::new(),
    }
}

/// Stops serving a queue pair until its reset.
///
/// # Errors
/// No queue pair has this number.
pub fn stall(qpn: u32) -> io::Result<()> {
    inject(Fault::Stall { qpn })
}

/// Fails a queue pair's `nth` request from now on, from 0.
///
/// # Errors
/// No queue pair has this number.
pub fn fail(qpn: u32, nth: u64, syndrome: Syndrome) -> io::Result<()> {
    inject(Fault::Fail { qpn, nth, syndrome })
}

/// Refuses to register memory at addresses for which `is_refused` returns true, as a system that cannot pin a
/// GPU's pages. `None` accepts all memory again.
pub fn refuse_memory(is_refused: Option<IsRefused>) {
    *REFUSED.lock().unwrap_or_else(PoisonError::into_inner) = is_refused;
}

fn inject(fault: Fault) -> io::Result<()> {
    let device = device().ok_or_else(io::Error::last_os_error)?;
    device.nic.lock().inject(fault).map_err(io::Error::other)
}

/// The NIC and the objects made from it.
struct Device {
    nic: NicThread,
    made: Mutex<Objects>,
}

#[derive(Default)]
struct Objects {
    /// Protection domains by number, from 1.
    domains: Vec<Domain>,
    umems: HashMap<u32, Region>,
    uars: HashMap<u32, Region>,
    next_id: u32,
}

impl Objects {
    fn fresh_id(&mut self) -> u32 {
        self.next_id += 1;
        self.next_id
    }
}

/// Whether memory at an address is refused.
pub type IsRefused = fn(u64) -> bool;

static REFUSED: Mutex<Option<IsRefused>> = Mutex::new(None);

static DEVICE_STATE: OnceLock<io::Result<Device>> = OnceLock::new();

/// `None`, with `errno` set, if the NIC cannot be opened.
fn device() -> Option<&'static Device> {
    let state = DEVICE_STATE.get_or_init(|| {
        let config = NicConfig {
            is_strict: true,
            doorbell: DoorbellMode::Checked,
            rnr_timeout: RNR_TIMEOUT,
            adversary: adversary(std::env::var_os(SEED_VARIABLE).as_deref())?,
            ..NicConfig::default()
        };
        let nic = Nic::new(config).map_err(io::Error::other)?;
        Ok(Device { nic: NicThread::spawn(nic)?, made: Mutex::default() })
    });
    match state {
        Ok(device) => Some(device),
        Err(error) => {
            tracing::error!(%error, "there is no software NIC");
            set_errno(libc::ENODEV);
            None
        }
    }
}

/// The disorder with the seed of an environment variable; none without it.
fn adversary(seed: Option<&OsStr>) -> io::Result<Option<Adversary>> {
    let Some(text) = seed else { return Ok(None) };
    match text.to_str().and_then(|text| text.parse().ok()) {
        Some(seed) => Ok(Some(Adversary { seed })),
        None => {
            let detail = format!("{SEED_VARIABLE} is {text:?}, expected a number below 2^64");
            Err(io::Error::new(io::ErrorKind::InvalidInput, detail))
        }
    }
}

impl Device {
    fn made(&self) -> MutexGuard<'_, Objects> {
        self.made.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Registers memory of this process.
    ///
    /// # Safety
    /// The memory is mapped, readable and writable, until it is deregistered; no thread writes it meanwhile.
    unsafe fn register(
        &self,
        domain: Domain,
        address: *mut c_void,
        bytes: usize,
        is_for_peers: bool,
    ) -> Result<Keys, c_int> {
        let is_refused = *REFUSED.lock().unwrap_or_else(PoisonError::into_inner);
        if is_refused.is_some_and(|is_refused| is_refused(address.addr() as u64)) {
            return Err(libc::EFAULT);
        }
        // SAFETY: the caller keeps the memory.
        let view = unsafe { borrow(address, bytes) }.ok_or(libc::EINVAL)?;
        if !is_for_peers {
            let access = softnic::Access::LOCAL_WRITE;
            return self.nic.lock().register_local(domain, &view, access).map_err(refuse);
        }
        match pages::find(address.addr(), bytes) {
            MemoryRange::Within(segment, offset) => {
                let (mut nic, access) = (self.nic.lock(), softnic::Access::ALL);
                return nic.register(domain, &segment, offset, bytes, access).map_err(refuse);
            }
            MemoryRange::Beyond => return Err(libc::EINVAL),
            MemoryRange::Elsewhere => {}
        }
        // SAFETY: as above.
        let segment = unsafe { share(address, bytes) }?;
        self.nic.lock().register_view(domain, &segment, &view, softnic::Access::ALL).map_err(refuse)
    }
}

/// A region of memory that another owner frees. `None` for a null address or no bytes.
///
/// # Safety
/// The memory stays mapped as long as the NIC uses the region.
unsafe fn borrow(address: *mut c_void, bytes: usize) -> Option<Region> {
    // SAFETY: the caller's promise.
    unsafe { Region::of_owner(address.cast(), bytes, Arc::new(())) }
}

/// Replaces pages of this process by a segment with the same bytes.
///
/// # Safety
/// As for [`Device::register`].
unsafe fn share(address: *mut c_void, bytes: usize) -> Result<Segment, c_int> {
    if !address.addr().is_multiple_of(PAGE_BYTES) {
        tracing::error!(?address, "memory for peers of the software NIC must begin at a page");
        return Err(libc::EINVAL);
    }
    let segment = Segment::create(bytes).map_err(|error| {
        tracing::error!(%error, "no shared memory for the software NIC");
        libc::ENOMEM
    })?;
    let descriptor = c_int::try_from(segment.descriptor()).map_err(|_| libc::EMFILE)?;
    let whole = segment.region().len();
    // SAFETY: this number of bytes is mapped at both addresses. The new pages replace whole old ones, which belong
    // to the caller's memory.
    let placed = unsafe {
        ptr::copy_nonoverlapping(address.cast::<u8>(), segment.region().as_ptr().as_ptr(), bytes);
        let (rights, flags) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_FIXED);
        libc::mmap(address, whole, rights, flags, descriptor, 0)
    };
    if placed == libc::MAP_FAILED { Err(errno()) } else { Ok(segment) }
}

/// The system's code for a refusal by the NIC, which is logged.
fn refuse(error: ControlError) -> c_int {
    tracing::error!(%error, "the software NIC refuses");
    match error {
        ControlError::Full { .. } => libc::ENOSPC,
        ControlError::Segment(_) => libc::EHOSTUNREACH,
        _ => libc::EINVAL,
    }
}

/// The result, or null with `errno` set.
fn or_null<T>(result: Result<*mut T, c_int>) -> *mut T {
    result.unwrap_or_else(|code| {
        set_errno(code);
        ptr::null_mut()
    })
}

/// The code that the result stands for.
fn code_of(result: Result<(), c_int>) -> c_int {
    result.err().unwrap_or(0)
}

fn give<T>(value: T) -> *mut T {
    Box::into_raw(Box::new(value))
}

/// Frees an object of [`give`].
///
/// # Safety
/// `object` comes from [`give`] and is not used afterwards.
unsafe fn take<T>(object: *mut c_void) -> T {
    // SAFETY: the caller's promise.
    *unsafe { Box::from_raw(object.cast::<T>()) }
}

/// Address of a function, as [`Libraries`] looks it up.
fn function(address: *const ()) -> Option<NonNull<c_void>> {
    NonNull::new(address.cast_mut().cast())
}

fn errno() -> c_int {
    io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO)
}

fn set_errno(code: c_int) {
    // SAFETY: this thread's own word.
    unsafe { *libc::__errno_location() = code };
}

/// Time limit of a write with immediate data for a receive. Six retries of 0.64 ms would be 4 ms; but the peer's
/// NIC is a thread, which a busy machine may delay longer.
const RNR_TIMEOUT: Duration = Duration::from_millis(250);
const SEED_VARIABLE: &str = "SWITCHYARD_SOFTNIC_SEED";
const PAGE_BYTES: usize = 4096;
/// The only address index.
const GID_IDX: c_int = 0;
/// Rights of peers. A registration has all of them or none.
const PEER_RIGHTS: c_int =
    ffi::ACCESS_REMOTE_WRITE | ffi::ACCESS_REMOTE_READ | ffi::ACCESS_REMOTE_ATOMIC;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_asks_for_disorder_and_anything_else_is_refused() {
        assert_eq!(adversary(None).unwrap(), None);
        let seed = |text| adversary(Some(OsStr::new(text)));
        assert_eq!(seed("0").unwrap(), Some(Adversary { seed: 0 }));
        assert_eq!(seed("18446744073709551615").unwrap(), Some(Adversary { seed: u64::MAX }));
        for text in ["", "-1", "yes", "18446744073709551616"] {
            let error = seed(text).unwrap_err().to_string();
            assert!(
                error.contains(SEED_VARIABLE) && error.contains(&format!("{text:?}")),
                "{error}"
            );
        }
    }
}
