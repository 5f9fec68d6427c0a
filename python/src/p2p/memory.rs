//! Registered memory by number, and checks of addresses that come from Python.

use std::collections::BTreeMap;
use std::ptr::NonNull;

use message_engine::{Access, Engine, MemoryRegion, Span};

use super::error::Failure;

/// Rights of peers to registered memory, as Python names them.
pub(super) fn access_of(name: &str) -> Result<Access, Failure> {
    match name {
        "rw" => Ok(Access::RemoteReadWrite),
        "ro" => Ok(Access::RemoteRead),
        "local" => Ok(Access::Local),
        _ => Err(Failure::argument(format!(
            "access is {name:?}, expected \"rw\", \"ro\" or \"local\""
        ))),
    }
}

/// Memory that Python has registered.
#[derive(Debug)]
pub(super) struct Registered {
    pub(super) region: MemoryRegion,
    pub(super) access: Access,
}

impl Registered {
    pub(super) fn first(&self) -> u64 {
        self.region.as_ptr().as_ptr() as u64
    }

    /// The span of `size` bytes at address `ptr`.
    fn span(&self, mr_id: u64, ptr: u64, size: u64) -> Result<Span, Failure> {
        let (first, limit) = (self.first(), self.region.len());
        let inside = ptr
            .checked_sub(first)
            .filter(|offset| offset.checked_add(size).is_some_and(|end| end <= limit));
        let offset = inside.ok_or_else(|| {
            Failure::argument(format!(
                "{} leave memory region {mr_id}, which is {}: register the whole range",
                range(ptr, size),
                range(first, limit)
            ))
        })?;
        self.region.span(offset, size).map_err(|error| Failure::submit(&error))
    }
}

/// Registrations by number. A number is never reused.
#[derive(Debug, Default)]
pub(super) struct Regions {
    by_id: BTreeMap<u64, Registered>,
    last_id: u64,
}

impl Regions {
    pub(super) fn add(&mut self, registered: Registered) -> u64 {
        self.last_id += 1;
        self.by_id.insert(self.last_id, registered);
        self.last_id
    }

    pub(super) fn get(&self, mr_id: u64) -> Result<&Registered, Failure> {
        self.by_id.get(&mr_id).ok_or_else(|| unknown(mr_id))
    }

    pub(super) fn remove(&mut self, mr_id: u64) -> Result<Registered, Failure> {
        self.by_id.remove(&mr_id).ok_or_else(|| unknown(mr_id))
    }

    /// Puts back memory that could not be deregistered.
    pub(super) fn put_back(&mut self, mr_id: u64, registered: Registered) {
        self.by_id.insert(mr_id, registered);
    }

    /// Checks a range of registration `mr_id`. `is_written`: the transfer stores into it.
    pub(super) fn span(
        &self,
        mr_id: u64,
        ptr: u64,
        size: u64,
        is_written: bool,
    ) -> Result<Span, Failure> {
        let found = self.get(mr_id)?;
        if is_written && found.access == Access::RemoteRead {
            return Err(Failure::argument(format!(
                "memory region {mr_id} is registered for reading only, and this transfer writes into it"
            )));
        }
        found.span(mr_id, ptr, size)
    }

    /// A registration that covers the range with the rights `access`.
    pub(super) fn find(&self, ptr: u64, size: u64, access: Access) -> Option<u64> {
        let covers =
            |found: &Registered| found.access == access && found.span(0, ptr, size).is_ok();
        self.by_id.iter().rev().find(|(_, found)| covers(found)).map(|(id, _)| *id)
    }

    pub(super) fn len(&self) -> usize {
        self.by_id.len()
    }
}

/// Registers `size` bytes at `ptr`.
///
/// Unmapped and unreadable memory is refused. Other wrong addresses cannot be found.
pub(super) fn register(
    engine: &Engine,
    ptr: u64,
    size: u64,
    access: Access,
) -> Result<Registered, Failure> {
    let refused = |why: &str| Failure::argument(format!("{}: {why}", range(ptr, size)));
    let start = usize::try_from(ptr).ok().and_then(|at| NonNull::new(at as *mut u8));
    let start = start.ok_or_else(|| refused("the address is 0"))?;
    let bytes = usize::try_from(size).ok().filter(|bytes| *bytes > 0);
    let bytes = bytes.ok_or_else(|| refused("there is nothing to register"))?;
    if ptr.checked_add(size).is_none_or(|end| end > isize::MAX as u64) {
        return Err(refused("the range leaves the address space"));
    }
    if !is_mapped(ptr, size) {
        return Err(refused(
            "this is not memory that this process can read: give host memory, and keep it mapped",
        ));
    }
    // SAFETY: the range is mapped. The caller of `reg` keeps it mapped until `dereg` or `close`, as the Python
    // documentation demands, and Python code holds no references in Rust's sense.
    let region = unsafe { engine.reg(start, bytes, access) }?;
    Ok(Registered { region, access })
}

/// Whether all of the range is mapped, and its first and last byte can be read.
fn is_mapped(ptr: u64, size: u64) -> bool {
    // SAFETY: no pointer is involved.
    let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    let page = u64::try_from(page).unwrap_or(4096);
    let start = ptr / page * page;
    let bytes = ptr + size - start;
    // SAFETY: MS_ASYNC changes nothing; the system checks the addresses.
    let is_known =
        unsafe { libc::msync(start as *mut libc::c_void, bytes as usize, libc::MS_ASYNC) == 0 };
    if !is_known {
        return false;
    }
    let mut copy = [0u8; 2];
    let here = [libc::iovec { iov_base: copy.as_mut_ptr().cast(), iov_len: copy.len() }];
    let byte_at = |at: u64| libc::iovec { iov_base: at as *mut libc::c_void, iov_len: 1 };
    let there = [byte_at(ptr), byte_at(ptr + size - 1)];
    // SAFETY: `copy` is ours, and the system checks the other addresses.
    let got =
        unsafe { libc::process_vm_readv(libc::getpid(), here.as_ptr(), 1, there.as_ptr(), 2, 0) };
    // A sandbox may forbid the call. The range is mapped, then, and no more is known.
    let is_forbidden = || {
        matches!(std::io::Error::last_os_error().raw_os_error(), Some(libc::EPERM | libc::ENOSYS))
    };
    got == 2 || got < 0 && is_forbidden()
}

/// A range for messages.
pub(super) fn range(ptr: u64, size: u64) -> String {
    format!("{size} bytes at {ptr:#x}")
}

fn unknown(mr_id: u64) -> Failure {
    Failure::argument(format!(
        "there is no memory region {mr_id}: use the number that reg() returned"
    ))
}
