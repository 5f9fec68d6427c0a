//! The device functions of the IBGDA path, compiled for the host, for tests: unchanged, and as mutants. Handles
//! and bounds are passed as pointers to the structures of `queue.h`.
//!
//! And the NICs of GPUs, run by a processor: [`GpuNic`].

use std::ffi::{CStr, c_char, c_void};

pub mod gpu_nic;

pub use gpu_nic::GpuNic;

/// Kinds of requests for [`Driver::build`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
#[allow(missing_docs, reason = "the names are those of the builders")]
pub enum Kind {
    Nop = 0,
    Dump,
    Write,
    WriteInline,
    WriteInlineBytes,
    WriteImm,
    Read,
    FetchAdd,
    MaskedFetchAdd4,
    MaskedFetchAdd8,
    WriteInlineWords,
}

impl Kind {
    /// All of them.
    pub const ALL: [Self; 11] = [
        Self::Nop,
        Self::Dump,
        Self::Write,
        Self::WriteInline,
        Self::WriteInlineBytes,
        Self::WriteImm,
        Self::Read,
        Self::FetchAdd,
        Self::MaskedFetchAdd4,
        Self::MaskedFetchAdd8,
        Self::WriteInlineWords,
    ];
}

/// Fields of a request; its kind decides which are used.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
#[allow(missing_docs, reason = "the names are those of the format")]
pub struct Fields {
    pub qpn: u32,
    pub index: u32,
    pub flags: u32,
    pub lkey: u32,
    pub local: u64,
    pub remote: u64,
    pub rkey: u32,
    pub num_bytes: u32,
    pub value: u64,
    pub boundary: u64,
}

type Move = unsafe extern "C" fn(*const c_void, u64, u32, u64, u32, u64, *const c_void) -> u32;
/// A move, and an add or a signal behind it.
type MoveAnd =
    unsafe extern "C" fn(*const c_void, u64, u32, u64, u32, u64, u64, u64, *const c_void) -> u32;
type Set = unsafe extern "C" fn(*const c_void, u64, u32, u64, *const c_void) -> u32;

/// One variant of the device functions. Every status is a `SY_MLX5_*`.
///
/// All functions are unsafe: handle and bound must be valid, with everything they point to.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
#[allow(missing_docs, reason = "the names are those of the device functions")]
pub struct Driver {
    pub build: unsafe extern "C" fn(u32, *const Fields, *const u8, *mut u8),
    pub put: Move,
    pub get: Move,
    pub put_add: MoveAnd,
    pub add8: Set,
    pub add4: Set,
    pub add_fields: unsafe extern "C" fn(*const c_void, u64, u32, u64, u64, *const c_void) -> u32,
    pub signal: Set,
    pub put_imm:
        unsafe extern "C" fn(*const c_void, u64, u32, u64, u32, u64, u32, *const c_void) -> u32,
    pub quiet: unsafe extern "C" fn(*const c_void, *const c_void) -> u32,
    pub quiet_gets: unsafe extern "C" fn(*const c_void, u64, u32, *const c_void) -> u32,
    pub poll: unsafe extern "C" fn(*const c_void) -> u64,
    /// A group of signals to consecutive words, one per lane, published once the gate opens.
    pub signal_words:
        unsafe extern "C" fn(*const c_void, u64, u32, u64, u32, *const u32, *const c_void) -> u32,
    pub doorbell: unsafe extern "C" fn(u32, u64) -> u64,
    pub dbrec: unsafe extern "C" fn(u64) -> u32,
    pub completed_after: unsafe extern "C" fn(u64, u32) -> u64,
    /// Opcode, owner, counter, error word.
    pub decode_cqe: unsafe extern "C" fn(*const u8, *mut [u64; 4]),
    check: unsafe extern "C" fn(*const c_void) -> *const c_char,
    /// A request that moves nothing.
    pub nop: unsafe extern "C" fn(*const c_void, *const c_void) -> u32,
    /// 1 if there was immediate data. The handle is a `sy_mlx5_rq`.
    pub try_receive: unsafe extern "C" fn(*const c_void, *mut Immediate) -> u32,
    /// The same, waiting for it.
    pub receive_imm: unsafe extern "C" fn(*const c_void, *mut Immediate, *const c_void) -> u32,
    check_receives: unsafe extern "C" fn(*const c_void) -> *const c_char,
    /// Groups of signals to a ring of words by the queue's exclusive owner; then quiet.
    pub own_signals: unsafe extern "C" fn(
        *const c_void,
        u64,
        u32,
        u64,
        u64,
        u32,
        u64,
        *const u64,
        *mut u64,
        *const c_void,
    ) -> u32,
    /// One call of an [`OwnMove`], then quiet.
    pub own_move: unsafe extern "C" fn(
        *const c_void,
        OwnMove,
        u64,
        u32,
        u64,
        u32,
        u64,
        u64,
        u64,
        *const c_void,
    ) -> u32,
    pub put_signal: MoveAnd,
    /// Returns 1 if the caller is the one to poll at this time. The word starts as 0.
    pub poll_turn: unsafe extern "C" fn(*mut u64) -> u32,
}

/// Calls by the queue's exclusive owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
#[allow(missing_docs, reason = "the names are those of the calls")]
pub enum OwnMove {
    Put = 0,
    Get,
    PutAdd,
    PutSignal,
    Add,
    Signal,
}

/// Content of a completion that a write with immediate data caused.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Immediate {
    /// Number of the receiving queue pair.
    pub qpn: u32,
    /// Immediate data of the peer.
    pub imm: u32,
    /// Bytes written before.
    pub num_bytes: u32,
}

impl Driver {
    /// The variant with this name: `product`, or a mutant. `None` where there is no C++ compiler.
    #[must_use]
    pub fn variant(name: &str) -> Option<Self> {
        assert!(is_known(Self::mutants(), name), "no variant is called {name}");
        find(name)
    }

    /// The unchanged device functions. `None` where there is no C++ compiler.
    #[must_use]
    pub fn product() -> Option<Self> {
        Self::variant("product")
    }

    /// All mutants.
    #[must_use]
    pub const fn mutants() -> &'static [Mutant] {
        variants::CALLS
    }

    /// Describes the error in a handle.
    ///
    /// # Safety
    /// `handle` points to a `sy_mlx5_qp`.
    #[must_use]
    pub unsafe fn check(&self, handle: *const c_void) -> Option<String> {
        // SAFETY: the caller's promise; the answer is null or a constant string.
        unsafe { text_of((self.check)(handle)) }
    }

    /// Describes the error in a receive queue.
    ///
    /// # Safety
    /// `handle` points to a `sy_mlx5_rq`.
    #[must_use]
    pub unsafe fn check_receives(&self, handle: *const c_void) -> Option<String> {
        // SAFETY: as for `check`.
        unsafe { text_of((self.check_receives)(handle)) }
    }
}

/// A variant with one error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mutant {
    /// Name of the variant.
    pub name: &'static str,
    /// Text that must occur in the reported symptom. ` or ` separates alternatives. `none`: this variant can show
    /// no symptom.
    pub symptom: &'static str,
}

fn is_known(mutants: &[Mutant], name: &str) -> bool {
    name == "product" || mutants.iter().any(|mutant| mutant.name == name)
}

/// # Safety
/// Null, or a static string.
unsafe fn text_of(text: *const c_char) -> Option<String> {
    // SAFETY: the caller's promise.
    (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
}

/// Calls of a link that [`Job`] can ask for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
#[allow(missing_docs, reason = "the names are those of the calls")]
pub enum Call {
    Set = 0,
    Add,
    PutSet,
    Send,
    PutRows,
    Quiet,
    HasFailed,
    PutCopy,
    GetCopy,
    QuietCopies,
    QuietGets,
    PutByStores,
    GetByStores,
}

/// A call of a link by a warp. Fields that the call does not use may have any value.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct Job {
    /// `sy_ibgda_peer`
    pub peer: *const c_void,
    /// Kind of the call.
    pub call: Call,
    /// Index of the block.
    pub lane: u32,
    /// Value stored in the mirror, or the first row.
    pub offset: u64,
    /// Bytes of it, or of every row.
    pub num_bytes: u64,
    /// The word, or the first of them.
    pub word_offset: u64,
    /// Bound of the words.
    pub value: u64,
    /// From row to row.
    pub stride: u64,
    /// Words of [`Call::Send`].
    pub num_words: u32,
    /// Lanes that have a row.
    pub rows: u32,
    /// Result of [`Call::HasFailed`] and of waits for copies. For copies by stores: whether the first lane sees
    /// the last byte behind the call.
    pub answer: *mut u32,
    /// Local address of copies.
    pub local: *mut u8,
    /// The peer's slot, for copies by stores.
    pub stores: *mut u8,
}

/// The calls of links, unchanged or as a mutant.
#[derive(Debug, Clone, Copy)]
pub struct LinkDriver(unsafe extern "C" fn(*const c_void));

impl LinkDriver {
    /// The variant with this name: `product`, or a mutant. `None` where there is no C++ compiler.
    #[must_use]
    pub fn variant(name: &str) -> Option<Self> {
        assert!(is_known(Self::mutants(), name), "no variant of links is called {name}");
        find_link(name).map(Self)
    }

    /// All mutants.
    #[must_use]
    pub const fn mutants() -> &'static [Mutant] {
        variants::LINKS
    }

    /// Makes the call by a warp. Its lanes are fibres of this thread.
    ///
    /// # Safety
    /// The peer, the queues and, for calls that have one, the answer are valid. Memory that copies name is valid,
    /// except where the NIC checks it.
    pub unsafe fn run(&self, job: &Job) {
        // SAFETY: the caller's promise; the structures are the same on both sides.
        unsafe { (self.0)(std::ptr::from_ref(job).cast()) };
    }
}

#[cfg(has_cxx)]
fn find_link(name: &str) -> Option<unsafe extern "C" fn(*const c_void)> {
    variants::link(name)
}

#[cfg(not(has_cxx))]
fn find_link(_name: &str) -> Option<unsafe extern "C" fn(*const c_void)> {
    None
}

#[cfg(has_cxx)]
fn find(name: &str) -> Option<Driver> {
    let table = variants::table(name)?;
    // SAFETY: the table has one function per field, in this order, with these signatures (passing a
    // reference in C++ is passing a pointer).
    Some(unsafe { table.cast::<Driver>().read() })
}

#[cfg(not(has_cxx))]
fn find(_name: &str) -> Option<Driver> {
    None
}

#[cfg_attr(not(has_cxx), allow(unused_imports, dead_code, reason = "nothing was compiled"))]
mod variants {
    use super::{Mutant, c_void};

    include!(concat!(env!("OUT_DIR"), "/variants.rs"));
}

const _: () = assert!(size_of::<Driver>() == 26 * size_of::<usize>());
