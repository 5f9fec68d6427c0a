//! A process that ends with a message when a mapped weight file becomes shorter.
//!
//! The system answers an access beyond the end of a mapped file, or a page that the disk cannot read, with SIGBUS.
//! Without a handler the process ends without a word.

use std::ffi::{c_int, c_void};
use std::io;
use std::ops::Range;
use std::path::Path;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, Ordering};
use std::time::Duration;

/// Exit code of a process whose weight file became unreadable: `EX_IOERR` of sysexits.h.
pub const UNREADABLE_FILE_EXIT_CODE: i32 = 74;

/// Installs a handler of SIGBUS for the whole process. If the fault lies in a weight file that is mapped by
/// [`TensorFile`](crate::TensorFile), it writes the file and the tensor to standard error and ends the process with
/// [`UNREADABLE_FILE_EXIT_CODE`]. For other faults it restores the system's own action, which then ends the process.
/// For programs, not for libraries: it replaces a handler that was there.
///
/// # Errors
/// The error of `sigaction`.
pub fn report_unreadable_files() -> io::Result<()> {
    EXIT_CODE.store(UNREADABLE_FILE_EXIT_CODE, Ordering::Relaxed);
    // SAFETY: an all-zero sigaction is valid, and the handler calls only functions that are safe in a signal
    // handler (signal-safety(7)).
    let result = unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        let handler: extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void) = on_sigbus;
        action.sa_sigaction = handler as usize;
        action.sa_flags = libc::SA_SIGINFO;
        libc::sigaction(libc::SIGBUS, &raw const action, ptr::null_mut())
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// The mapped files for the handler, which may not take a lock.
static FILES: [AtomicPtr<Mapped>; MAX_FILES] =
    [const { AtomicPtr::new(ptr::null_mut()) }; MAX_FILES];
/// The handler runs. Files stay registered from then on: the process ends.
static HANDLES: AtomicBool = AtomicBool::new(false);
static EXIT_CODE: AtomicI32 = AtomicI32::new(1);

/// A mapped file: what the handler needs.
struct Mapped {
    addresses: Range<usize>,
    path: Vec<u8>,
    /// Address ranges of tensors with their names, ascending.
    tensors: Vec<(Range<usize>, Vec<u8>)>,
}

/// The registration of a mapped file. Dropped before the file is unmapped.
#[derive(Debug)]
pub(crate) struct Registration {
    slot: Option<usize>,
}

impl Registration {
    /// Registers a mapping. Without a free entry the file is not named by the handler.
    pub(crate) fn new<'a>(
        path: &Path,
        mapping: &[u8],
        tensors: impl Iterator<Item = (&'a str, Range<usize>)>,
    ) -> Registration {
        let base = mapping.as_ptr().addr();
        let mut tensors: Vec<(Range<usize>, Vec<u8>)> = tensors
            .map(|(name, bytes)| (base + bytes.start..base + bytes.end, name.as_bytes().to_vec()))
            .collect();
        tensors.sort_by_key(|(addresses, _)| addresses.start);
        let mapped = Box::into_raw(Box::new(Mapped {
            addresses: base..base + mapping.len(),
            path: path.to_string_lossy().into_owned().into_bytes(),
            tensors,
        }));
        let taken = FILES.iter().position(|file| {
            let null = ptr::null_mut();
            file.compare_exchange(null, mapped, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        });
        if taken.is_none() {
            // SAFETY: it came from a box and nothing else has it.
            drop(unsafe { Box::from_raw(mapped) });
        }
        Registration { slot: taken }
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        let Some(slot) = self.slot else { return };
        let mapped = FILES[slot].swap(ptr::null_mut(), Ordering::SeqCst);
        if HANDLES.load(Ordering::SeqCst) {
            // The handler of another thread may hold the pointer, and is about to end the process.
            std::thread::sleep(Duration::from_secs(1));
            return;
        }
        // SAFETY: it came from a box, and it is in no entry any more. A handler that starts from now on does not
        // find it.
        drop(unsafe { Box::from_raw(mapped) });
    }
}

extern "C" fn on_sigbus(signal: c_int, info: *mut libc::siginfo_t, _context: *mut c_void) {
    // SAFETY: the system passes a valid siginfo_t.
    let is_fault = unsafe { (*info).si_code } > 0;
    if !is_fault {
        // Sent by a process: the default action of the signal ends this one.
        // SAFETY: both calls are safe in a signal handler.
        unsafe {
            libc::signal(signal, libc::SIG_DFL);
            libc::raise(signal);
        }
        return;
    }
    if HANDLES.swap(true, Ordering::SeqCst) {
        // Another thread writes the message and ends the process.
        loop {
            // SAFETY: pause is safe in a signal handler.
            unsafe { libc::pause() };
        }
    }
    // SAFETY: the siginfo_t of a fault has an address.
    let address = unsafe { (*info).si_addr() }.addr();
    let found = FILES.iter().find_map(|file| {
        // SAFETY: an entry that is not null points to a value that lives until its registration is dropped, which
        // waits when it sees `HANDLES`.
        let mapped = unsafe { file.load(Ordering::SeqCst).as_ref() }?;
        mapped.addresses.contains(&address).then_some(mapped)
    });
    let Some(mapped) = found else {
        // SAFETY: the default action is always valid. The instruction runs again and the system ends the process.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
        return;
    };
    let tensor = mapped.tensors.iter().find(|(addresses, _)| addresses.contains(&address));
    write_error(b"error: ");
    write_error(&mapped.path);
    write_error(b" became unreadable while it was in use (truncated, or a disk error)");
    if let Some((_, name)) = tensor {
        write_error(b", in tensor '");
        write_error(name);
        write_error(b"'");
    }
    write_error(b"; restore the file and start again\n");
    // SAFETY: ends the process without running anything of it.
    unsafe { libc::_exit(EXIT_CODE.load(Ordering::Relaxed)) };
}

fn write_error(mut bytes: &[u8]) {
    while !bytes.is_empty() {
        // SAFETY: the range is readable. Standard error may be closed, which ends the attempt.
        let written = unsafe { libc::write(2, bytes.as_ptr().cast(), bytes.len()) };
        match usize::try_from(written) {
            Ok(written) if written > 0 => bytes = bytes.get(written..).unwrap_or_default(),
            _ => break,
        }
    }
}

/// Files that the handler can name at once: DeepSeek-V3 has 163.
const MAX_FILES: usize = 2048;
