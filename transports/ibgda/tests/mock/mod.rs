//! A stand-in for libibverbs and libmlx5 (`mlx5.c`). It decodes its input with the vendor's structures and a
//! transcription of its own of the firmware's commands.
#![allow(dead_code, reason = "each test uses a part of it")]

use std::path::Path;
use std::process::Command;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use switchyard_ibgda::{Libraries, Nic, NicConfig, OpenPeer, Peer, QueuePath};

/// Both kinds of queues.
pub const PATHS: [QueuePath; 2] = [QueuePath::Plain, QueuePath::Devx];

/// `struct mock`
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MockState {
    pub num_live: i32,
    pub num_failures: i32,
    pub fail_code: i32,
    pub has_devx: u32,
    pub has_dma_buf: u32,
    pub has_peer_memory: u32,
    pub port_state: u32,
    pub link_layer: u32,
    pub sq_stride: u32,
    pub cqe_version: u32,
    pub atomic_operations: u32,
    pub firmware_status: u32,
    pub last_error: u32,
    pub num_relaxed: u32,
    pub num_exposed: u32,
    pub atomic_cap: u32,
    pub max_reads: u32,
    pub sq_skip: u32,
    pub has_vector: u32,
    pub part_id: u32,
    pub num_ports: u32,
    pub max_blocks: u32,
    pub log_max_blocks: u32,
    pub rq_stride: u32,
    pub has_caps_2: u32,
    pub has_no_record: u32,
}

pub const CLEAN: MockState = MockState {
    num_live: 0,
    num_failures: -1,
    fail_code: libc::ENOMEM,
    has_devx: 1,
    has_dma_buf: 1,
    has_peer_memory: 1,
    port_state: 4,
    link_layer: 2,
    sq_stride: 64,
    cqe_version: 1,
    atomic_operations: 15,
    firmware_status: 0,
    last_error: 0,
    num_relaxed: 0,
    num_exposed: 0,
    atomic_cap: 1,
    max_reads: 16,
    sq_skip: 0,
    has_vector: 1,
    part_id: 0x1021,
    num_ports: 1,
    max_blocks: 32768,
    log_max_blocks: 15,
    rq_stride: 16,
    has_caps_2: 1,
    has_no_record: 1,
};

/// `struct mock_queue`
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MockQueue {
    pub qpn: u32,
    pub state: u32,
    pub remote_qpn: u32,
    pub mtu: u32,
    pub depth: u32,
    pub is_collapsed: u32,
    pub dbrec_umem: u32,
    pub umem: u32,
    pub port: u32,
    pub lid: u32,
    pub timeout: u32,
    pub retries: u32,
    pub hop_limit: u32,
    pub udp_port: u32,
    pub traffic_class: u32,
    pub service_level: u32,
    pub gid_idx: u32,
    pub rnr_retries: u32,
    pub first_sent: u32,
    pub first_expected: u32,
    pub sq: u64,
    pub dbrec: u64,
    pub cq: u64,
    pub cq_dbrec: u64,
    pub doorbell: u64,
    pub gid: [u8; 16],
    pub mac: [u8; 8],
    pub rq: u64,
    pub recv_cq: u64,
    pub recv_cq_dbrec: u64,
    pub num_completions: u64,
    pub rq_depth: u32,
    pub rq_stride: u32,
    pub recv_cq_depth: u32,
    pub num_receives: u32,
    pub send_dbr_mode: u32,
    pub reserved: u32,
}

/// A completion of a receive, as the vendor's header has it.
#[derive(Debug, Clone, Copy)]
pub struct Completion {
    pub qpn: u32,
    pub named_qpn: u32,
    pub opcode: u32,
    pub counter: u32,
    pub imm: u32,
    pub num_bytes: u32,
    pub syndrome: u32,
}

/// The stand-in, one test at a time.
pub struct Mock {
    pub libraries: Libraries,
    handle: *mut libc::c_void,
    root: tempfile::TempDir,
    _turn: MutexGuard<'static, ()>,
}

static TURN: Mutex<()> = Mutex::new(());

impl Mock {
    /// `None` where the vendor's headers are missing.
    pub fn open() -> Option<Self> {
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let root = tempfile::tempdir().unwrap();
        let library = root.path().join("libmock.so");
        if !has_headers() {
            return None;
        }
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/mock/mlx5.c");
        compile(&["-shared", "-fPIC", "-std=gnu11", "-O1", "-Wall", "-Werror"], &source, &library);
        let name = library.to_str().unwrap();
        let libraries = Libraries::open_files(name, name).unwrap();
        let file = std::ffi::CString::new(name).unwrap();
        // SAFETY: the library is open already; this is one more reference.
        let handle = unsafe { libc::dlopen(file.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        assert!(!handle.is_null());
        for (idx, kind) in ["IB/RoCE v1", "RoCE v2", "RoCE v1", "RoCE v2"].iter().enumerate() {
            let dir = root.path().join("sys/class/infiniband/mlx5_7/ports/1/gid_attrs/types");
            std::fs::create_dir_all(&dir).unwrap();
            std::fs::write(dir.join(idx.to_string()), format!("{kind}\n")).unwrap();
        }
        Some(Self { libraries, handle, root, _turn: turn })
    }

    fn state(&self) -> *mut MockState {
        // SAFETY: a variable of the library.
        let symbol = unsafe { libc::dlsym(self.handle, c"sy_mock".as_ptr()) };
        assert!(!symbol.is_null());
        symbol.cast()
    }

    pub fn get(&self) -> MockState {
        // SAFETY: nothing runs in the library now.
        unsafe { self.state().read() }
    }

    pub fn change(&self, change: impl FnOnce(&mut MockState)) {
        // SAFETY: nothing runs in the library now.
        change(unsafe { &mut *self.state() });
    }

    pub fn queue(&self, qpn: u32) -> MockQueue {
        type Find = unsafe extern "C" fn(u32, *mut MockQueue) -> i32;
        let mut queue = MockQueue::default();
        // SAFETY: a function of the library with this signature.
        let code = unsafe {
            let symbol = libc::dlsym(self.handle, c"sy_mock_queue".as_ptr());
            std::mem::transmute::<*mut libc::c_void, Find>(symbol)(qpn, &raw mut queue)
        };
        assert_eq!(code, 0, "no queue pair {qpn:#x}");
        queue
    }

    /// Writes a completion of a receive where a NIC would.
    pub fn complete(&self, cqe: Completion) {
        type Complete = unsafe extern "C" fn(u32, u32, u32, u32, u32, u32, u32) -> i32;
        let Completion { qpn, named_qpn, opcode, counter, imm, num_bytes, syndrome } = cqe;
        // SAFETY: a function of the library with this signature.
        let code = unsafe {
            let symbol = libc::dlsym(self.handle, c"sy_mock_complete".as_ptr());
            let complete = std::mem::transmute::<*mut libc::c_void, Complete>(symbol);
            complete(qpn, named_qpn, opcode, counter, imm, num_bytes, syndrome)
        };
        assert_eq!(code, 0, "no receives of queue pair {qpn:#x}");
    }

    pub fn config(&self) -> NicConfig {
        NicConfig { root: self.root.path().to_owned(), ..NicConfig::default() }
    }

    pub fn nic(&self) -> Arc<Nic> {
        Nic::open(&self.libraries, &self.config()).unwrap()
    }

    /// Runs a test with queues of verbs and once more with those of DevX, each with a NIC of its own, and then
    /// settles.
    pub fn on_both_paths(&self, mut test: impl FnMut(QueuePath, &Arc<Nic>)) {
        for path in PATHS {
            self.change(|state| *state = CLEAN);
            let nic = self.nic();
            test(path, &nic);
            drop(nic);
            self.settle();
        }
    }

    /// Fails unless everything was given back and nothing that came in was wrong.
    pub fn settle(&self) {
        let state = self.get();
        assert_eq!(state.last_error, 0, "mock/mlx5.c, this line, got wrong input");
        assert_eq!((state.num_live, state.num_relaxed), (0, 0), "objects live on, or relaxed");
    }
}

impl Drop for Mock {
    fn drop(&mut self) {
        // SAFETY: opened by `open`.
        unsafe { libc::dlclose(self.handle) };
    }
}

/// Joins both sides.
pub fn join(one: OpenPeer, other: OpenPeer) -> [Peer; 2] {
    let (from_one, from_other) = (one.description(), other.description());
    [one.join(&from_other).unwrap(), other.join(&from_one).unwrap()]
}

/// Resets both and joins them again.
pub fn rejoin([one, other]: [Peer; 2]) -> [Peer; 2] {
    let (one, other) = (one.reset().unwrap(), other.reset().unwrap());
    let (from_one, from_other) = (one.description(), other.description());
    [one.rejoin(&from_other).unwrap(), other.rejoin(&from_one).unwrap()]
}

pub fn has_headers() -> bool {
    let has = Command::new("cc")
        .args(["-E", "-include", "infiniband/mlx5dv.h", "-x", "c", "/dev/null"])
        .output()
        .is_ok_and(|output| output.status.success());
    if !has {
        test_support::skip(
            "mlx5dv",
            "infiniband/mlx5dv.h is missing: install Debian's libibverbs-dev",
        );
    }
    has
}

pub fn compile(flags: &[&str], source: &Path, out: &Path) {
    let output = Command::new("cc").args(flags).arg("-o").args([out, source]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
