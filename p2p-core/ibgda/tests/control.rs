//! The control path against a stand-in for libibverbs and libmlx5 (`mock/mlx5.c`), which takes apart
//! what it is told with the vendor's structures and a transcription of its own of the firmware's
//! commands. Nothing here was run on a ConnectX.

#[path = "../../../tests/src/skip.rs"]
mod skip;

use std::fmt::Write as _;
use std::mem::{offset_of, size_of};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::ptr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ibgda::access::{Access, AccessError, HostRange, Mapped, SharedMemory};
use ibgda::peer::DESCRIPTION_BYTES;
use ibgda::{
    HostAccess, Libraries, Nic, NicConfig, OpenPeer, Peer, PeerConfig, QueueConfig, QueuePath, ffi,
};
use kernels::mlx5::{CQ_COLLAPSED, PeerHandle, QueueHandle};

/// `struct mock`
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct MockState {
    num_live: i32,
    num_failures: i32,
    fail_code: i32,
    has_devx: u32,
    has_dma_buf: u32,
    has_peer_memory: u32,
    port_state: u32,
    link_layer: u32,
    sq_stride: u32,
    cqe_version: u32,
    atomic_operations: u32,
    firmware_status: u32,
    last_error: u32,
    num_relaxed: u32,
}

const CLEAN: MockState = MockState {
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
};

/// `struct mock_queue`
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct MockQueue {
    qpn: u32,
    state: u32,
    remote_qpn: u32,
    mtu: u32,
    depth: u32,
    is_collapsed: u32,
    dbrec_umem: u32,
    umem: u32,
    port: u32,
    lid: u32,
    timeout: u32,
    retries: u32,
    hop_limit: u32,
    udp_port: u32,
    traffic_class: u32,
    service_level: u32,
    gid_idx: u32,
    reserved: u32,
    sq: u64,
    dbrec: u64,
    cq: u64,
    cq_dbrec: u64,
    doorbell: u64,
    gid: [u8; 16],
    mac: [u8; 8],
}

/// The stand-in, one test at a time.
struct Mock {
    libraries: Libraries,
    handle: *mut libc::c_void,
    root: tempfile::TempDir,
    _turn: MutexGuard<'static, ()>,
}

static TURN: Mutex<()> = Mutex::new(());

impl Mock {
    /// `None` where the vendor's headers are missing.
    fn open() -> Option<Self> {
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

    fn get(&self) -> MockState {
        // SAFETY: nothing runs in the library now.
        unsafe { self.state().read() }
    }

    fn change(&self, change: impl FnOnce(&mut MockState)) {
        // SAFETY: nothing runs in the library now.
        change(unsafe { &mut *self.state() });
    }

    fn queue(&self, qpn: u32) -> MockQueue {
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

    fn config(&self) -> NicConfig {
        NicConfig { root: self.root.path().to_owned(), ..NicConfig::default() }
    }

    fn nic(&self) -> Arc<Nic> {
        Nic::open(&self.libraries, &self.config()).unwrap()
    }

    /// Fails unless everything was given back and nothing that came in was wrong.
    fn settle(&self) {
        let state = self.get();
        assert_eq!(state.last_error, 0, "mock/mlx5.c, this line, was told something wrong");
        assert_eq!((state.num_live, state.num_relaxed), (0, 0), "objects live on, or relaxed");
    }
}

impl Drop for Mock {
    fn drop(&mut self) {
        // SAFETY: opened by `open`.
        unsafe { libc::dlclose(self.handle) };
    }
}

fn has_headers() -> bool {
    let has = Command::new("cc")
        .args(["-E", "-include", "infiniband/mlx5dv.h", "-x", "c", "/dev/null"])
        .output()
        .is_ok_and(|output| output.status.success());
    if !has {
        skip::skip("mlx5dv", "infiniband/mlx5dv.h is missing: install Debian's libibverbs-dev");
    }
    has
}

fn compile(flags: &[&str], source: &Path, out: &Path) {
    let output = Command::new("cc").args(flags).arg("-o").args([out, source]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

fn access() -> Arc<dyn Access> {
    Arc::new(HostAccess)
}

fn peer_config(path: QueuePath, num_queues: usize) -> PeerConfig {
    PeerConfig {
        peer: 3,
        num_queues,
        queue: QueueConfig { path, depth: 256, ..QueueConfig::default() },
        own_slot_bytes: 1 << 16,
        peer_slot_bytes: 1 << 15,
    }
}

fn mirrored(config: &PeerConfig) -> PeerConfig {
    PeerConfig {
        own_slot_bytes: config.peer_slot_bytes,
        peer_slot_bytes: config.own_slot_bytes,
        ..*config
    }
}

fn pair(nic: &Arc<Nic>, config: PeerConfig) -> (Peer, Peer) {
    let one = OpenPeer::open(nic, &access(), config).unwrap();
    let other = OpenPeer::open(nic, &access(), mirrored(&config)).unwrap();
    let (from_one, from_other) = (one.description(), other.description());
    (one.join(&from_other).unwrap(), other.join(&from_one).unwrap())
}

fn handle(peer: &Peer) -> (PeerHandle, Vec<QueueHandle>) {
    let handle = peer.handle(ptr::null_mut(), ptr::null(), 1_000_000);
    let table = ptr::with_exposed_provenance::<QueueHandle>(usize::try_from(handle.qps).unwrap());
    // SAFETY: the peer keeps the table, which has so many queues.
    let queues = (0..handle.num_qps).map(|idx| unsafe { table.add(idx as usize).read() }).collect();
    (handle, queues)
}

#[test]
fn both_paths_give_connected_queues_that_kernels_can_use() {
    let Some(mock) = Mock::open() else { return };
    for path in [QueuePath::Plain, QueuePath::Devx] {
        for link_layer in [1, 2] {
            mock.change(|state| *state = MockState { link_layer, ..CLEAN });
            let mut config = mock.config();
            (config.traffic_class, config.service_level) = (0x6a, 5);
            let nic = Nic::open(&mock.libraries, &config).unwrap();
            // The address over IPv4 is preferred to the first one.
            assert_eq!(nic.port().gid_idx, if link_layer == 2 { 3 } else { 0 });
            let (one, other) = pair(&nic, peer_config(path, 3));
            let ((of_one, queues), (of_other, others)) = (handle(&one), handle(&other));
            assert_eq!((of_one.num_qps, of_one.slot_bytes, of_other.slot_bytes), (3, 32768, 65536));
            assert_eq!(of_one.remote, other.slot().address());
            assert_eq!(of_other.remote, one.slot().address());
            assert_eq!(of_one.mirror, one.mirror().address());
            assert_ne!(of_one.rkey, of_other.rkey);
            for (queue, remote) in queues.iter().zip(&others) {
                let made = mock.queue(queue.qpn);
                assert_eq!((made.state, made.remote_qpn), (3, remote.qpn), "{made:?}");
                assert_eq!((made.mtu, made.port), (5, 1));
                assert_eq!((made.timeout, made.retries), (14, 7));
                assert_eq!((made.service_level, made.gid_idx), (5, u32::from(nic.port().gid_idx)));
                if link_layer == 2 {
                    assert_eq!((made.hop_limit, made.traffic_class), (64, 0x6a));
                    assert_eq!(made.gid, nic.port().gid);
                } else {
                    assert_eq!(made.lid, 0x21);
                }
                if path == QueuePath::Devx && link_layer == 2 {
                    // As the kernel resolved it, and a port of the dynamic range.
                    assert_eq!(made.mac[..6], [2, 0xaa, 0xbb, 0xcc, 0xdd, 4]);
                    assert!((0xc000..=0xffff).contains(&made.udp_port), "{made:?}");
                }
                assert_eq!((queue.sq, queue.dbrec), (made.sq, made.dbrec));
                assert_eq!((queue.doorbell, queue.sq_depth), (made.doorbell, made.depth));
                assert_eq!((queue.batch, queue.peer), (32, 3));
                let is_collapsed = path == QueuePath::Devx;
                assert_eq!(queue.flags, if is_collapsed { CQ_COLLAPSED } else { 0 });
                assert_eq!(queue.cq_depth, if is_collapsed { 1 } else { 512 });
                if is_collapsed {
                    assert_eq!((queue.cq, queue.cq_dbrec), (made.cq, made.cq_dbrec));
                    assert_eq!(made.is_collapsed, 1);
                    let first = ptr::with_exposed_provenance::<[u8; 64]>(
                        usize::try_from(queue.cq).unwrap(),
                    );
                    // SAFETY: the queue keeps its completions.
                    assert_eq!(unsafe { first.read() }, [0xff; 64], "no valid completion yet");
                }
                assert_eq!(queue.scratch % 8, 0);
                assert_ne!((queue.state, queue.scratch_lkey), (0, 0));
            }
            drop((one, other, nic));
            mock.settle();
        }
    }
}

#[test]
fn whatever_fails_nothing_is_left_behind() {
    let Some(mock) = Mock::open() else { return };
    for path in [QueuePath::Plain, QueuePath::Devx] {
        let mut num_errors = 0;
        for num_failures in 0.. {
            mock.change(|state| *state = MockState { num_failures, ..CLEAN });
            let config = peer_config(path, 2);
            let made = Nic::open(&mock.libraries, &mock.config())
                .map_err(|error| error.to_string())
                .and_then(|nic| {
                    let one = OpenPeer::open(&nic, &access(), config).map_err(|e| e.to_string())?;
                    let other = OpenPeer::open(&nic, &access(), mirrored(&config))
                        .map_err(|e| e.to_string())?;
                    let description = other.description();
                    one.join(&description).map_err(|e| e.to_string())
                });
            let left = mock.get().num_failures;
            match made {
                // Optional parts may have failed and been done without.
                Ok(peer) => {
                    drop(peer);
                    if left > 0 {
                        mock.settle();
                        break;
                    }
                }
                Err(text) => {
                    num_errors += 1;
                    // The call, or the step whose absence was noticed.
                    assert!(text.contains("ibv_") || text.contains("mlx5"), "{text}");
                }
            }
            mock.settle();
            assert!(num_failures < 200, "never succeeds");
        }
        assert!(num_errors > 15, "only {num_errors} calls can fail?");
    }
}

#[test]
fn what_a_host_lacks_is_named() {
    let Some(mock) = Mock::open() else { return };
    type Change = fn(&mut MockState);
    let open: [(&str, Change); 1] = [("state 1, expected 4 (active)", |s| s.port_state = 1)];
    for (part, change) in open {
        mock.change(|state| *state = CLEAN);
        mock.change(change);
        let text = Nic::open(&mock.libraries, &mock.config()).unwrap_err().to_string();
        assert!(text.contains(part) && text.contains("mlx5_7"), "{text}");
        mock.settle();
    }
    mock.change(|state| *state = CLEAN);
    let absent = NicConfig { device: Some("mlx5_9".to_owned()), ..mock.config() };
    let text = Nic::open(&mock.libraries, &absent).unwrap_err().to_string();
    assert!(text.contains("no mlx5 device `mlx5_9`: found other_0 (not mlx5), mlx5_7"), "{text}");
    let foreign = NicConfig { device: Some("other_0".to_owned()), ..mock.config() };
    let text = Nic::open(&mock.libraries, &foreign).unwrap_err().to_string();
    assert!(text.contains("other_0 (not mlx5)"), "{text}");
    let port = NicConfig { port: 2, ..mock.config() };
    assert!(Nic::open(&mock.libraries, &port).unwrap_err().to_string().contains("this port"));
    let gid = NicConfig { gid_idx: Some(9), ..mock.config() };
    let text = Nic::open(&mock.libraries, &gid).unwrap_err().to_string();
    assert!(text.contains("no address of index 9"), "{text}");
    mock.settle();

    let devx: [(&str, Change); 4] = [
        ("UCTX_EN=1", |s| s.has_devx = 0),
        ("cqe_version is 0, expected 1", |s| s.cqe_version = 0),
        ("masked fetch-add", |s| s.atomic_operations = 0b0011),
        ("status 0x08 (limit exceeded), syndrome 0x00000077", |s| s.firmware_status = 8),
    ];
    for (part, change) in devx {
        mock.change(|state| *state = CLEAN);
        mock.change(change);
        // The NIC is of use all the same, by the plain path.
        let nic = mock.nic();
        OpenPeer::open(&nic, &access(), peer_config(QueuePath::Plain, 1)).unwrap();
        let refused = OpenPeer::open(&nic, &access(), peer_config(QueuePath::Devx, 1));
        let text = refused.unwrap_err().to_string();
        assert!(text.contains(part), "{text}");
        drop(nic);
        mock.settle();
    }

    mock.change(|state| *state = MockState { sq_stride: 128, ..CLEAN });
    let nic = mock.nic();
    let refused = OpenPeer::open(&nic, &access(), peer_config(QueuePath::Plain, 1));
    let text = refused.unwrap_err().to_string();
    assert!(text.contains("sq.stride 128, expected 64"), "{text}");
    drop(nic);
    mock.settle();
}

/// Pretends that its memory is a GPU's.
#[derive(Debug)]
struct FarAccess {
    has_descriptor: bool,
}

#[derive(Debug)]
struct FarMemory {
    bytes: usize,
    descriptor: Option<std::fs::File>,
}

impl Access for FarAccess {
    fn alloc(&self, bytes: usize) -> Result<Box<dyn SharedMemory>, AccessError> {
        let descriptor = self.has_descriptor.then(|| std::fs::File::open("/dev/null").unwrap());
        Ok(Box::new(FarMemory { bytes, descriptor }))
    }

    unsafe fn map(
        &self,
        pages: ptr::NonNull<u8>,
        bytes: usize,
        _kind: HostRange,
    ) -> Result<Mapped, AccessError> {
        assert!(pages.addr().get().is_multiple_of(4096) && bytes.is_multiple_of(4096));
        Ok(Mapped { address: pages.addr().get() as u64, guard: None })
    }
}

impl SharedMemory for FarMemory {
    fn address(&self) -> u64 {
        1 << 60
    }
    fn bytes(&self) -> usize {
        self.bytes
    }
    fn is_on_gpu(&self) -> bool {
        true
    }
    fn dma_buf(&self) -> Option<(std::os::fd::BorrowedFd<'_>, u64)> {
        use std::os::fd::AsFd;
        self.descriptor.as_ref().map(|file| (file.as_fd(), 4096))
    }
    fn write(&self, _offset: usize, _bytes: &[u8]) -> Result<(), AccessError> {
        Ok(())
    }
}

#[test]
fn gpu_memory_goes_by_dma_buf_then_by_address_then_says_why_not() {
    use ibgda::nic::RegisteredBy::{DmaBuf, PeerMemory};
    let Some(mock) = Mock::open() else { return };
    let config = peer_config(QueuePath::Plain, 1);
    for (has_descriptor, has_dma_buf, expected) in
        [(true, 1, DmaBuf), (true, 0, PeerMemory), (false, 1, PeerMemory)]
    {
        mock.change(|state| *state = MockState { has_dma_buf, ..CLEAN });
        let nic = mock.nic();
        let far: Arc<dyn Access> = Arc::new(FarAccess { has_descriptor });
        let one = OpenPeer::open(&nic, &far, config).unwrap();
        let other = OpenPeer::open(&nic, &access(), mirrored(&config)).unwrap();
        let description = other.description();
        assert_eq!(one.join(&description).unwrap().registered_by(), [expected; 2]);
        drop((other, nic));
        mock.settle();
    }
    mock.change(|state| *state = MockState { has_dma_buf: 0, has_peer_memory: 0, ..CLEAN });
    let nic = mock.nic();
    let far: Arc<dyn Access> = Arc::new(FarAccess { has_descriptor: true });
    let text = OpenPeer::open(&nic, &far, config).unwrap_err().to_string();
    for part in ["by dma-buf: ", "by address: ", "nvidia_peermem", "65536 bytes"] {
        assert!(text.contains(part), "{text}");
    }
    drop(nic);
    mock.settle();
}

#[test]
fn a_description_that_makes_no_sense_is_refused_by_field() {
    let Some(mock) = Mock::open() else { return };
    mock.change(|state| *state = CLEAN);
    let nic = mock.nic();
    let config = peer_config(QueuePath::Plain, 2);
    let other = OpenPeer::open(&nic, &access(), mirrored(&config)).unwrap();
    let good = other.description();
    assert_eq!(good.len(), DESCRIPTION_BYTES + 8);
    let cases: [(&str, usize, &[u8]); 9] = [
        ("version", 0, &[9]),
        ("link", 1, &[1]),
        ("mtu", 2, &[0]),
        ("mtu", 2, &[6]),
        ("num_queues", 3, &[3]),
        ("slot address", 24, &[0; 8]),
        ("slot address", 24, &[1]),
        ("slot bytes", 32, &[0xff; 8]),
        ("queue pair", DESCRIPTION_BYTES + 4, &[0, 0, 0, 1]),
    ];
    let refuse = |bytes: &[u8]| {
        let one = OpenPeer::open(&nic, &access(), config).unwrap();
        one.join(bytes).unwrap_err().to_string()
    };
    for (field, at, change) in cases {
        let mut bytes = good.clone();
        bytes[at..at + change.len()].copy_from_slice(change);
        let text = refuse(&bytes);
        assert!(text.contains(&format!("`{field}`")), "{field}: {text}");
    }
    for len in 0..good.len() {
        assert!(refuse(&good[..len]).contains("`length`"));
    }
    drop((other, nic));
    mock.settle();
}

#[test]
fn sizes_that_no_queue_can_have_are_refused_before_anything_is_made() {
    let Some(mock) = Mock::open() else { return };
    mock.change(|state| *state = CLEAN);
    let nic = mock.nic();
    let num_live = mock.get().num_live;
    type Change = fn(&mut PeerConfig);
    let cases: [(&str, Change); 10] = [
        ("depth", |c| c.queue.depth = 100),
        ("depth", |c| c.queue.depth = 65536),
        ("batch", |c| c.queue.batch = 0),
        ("batch", |c| c.queue.batch = 65),
        ("max_message_bytes", |c| c.queue.max_message_bytes = u32::MAX),
        ("retries", |c| c.queue.retries = 8),
        ("ack_timeout", |c| c.queue.ack_timeout = 32),
        ("num_queues", |c| c.num_queues = 65),
        ("peer", |c| c.peer = 32),
        ("own_slot_bytes", |c| c.own_slot_bytes = 100),
    ];
    for (field, change) in cases {
        let mut config = peer_config(QueuePath::Plain, 1);
        change(&mut config);
        let text = OpenPeer::open(&nic, &access(), config).unwrap_err().to_string();
        assert!(text.contains(&format!("`{field}`")), "{field}: {text}");
        assert_eq!(mock.get().num_live, num_live, "{field}");
    }
    drop(nic);
    mock.settle();
}

/// Every structure that is handed to the libraries, against their headers.
#[test]
fn the_vendors_headers_agree_on_every_structure() {
    if !has_headers() {
        return;
    }
    let mut text = String::from(
        "#include <stddef.h>\n#include <infiniband/mlx5dv.h>\n#include <infiniband/verbs.h>\n",
    );
    macro_rules! same {
        ($rust:ident = $c:literal, $($field:ident = $member:literal),*) => {
            $(writeln!(
                text,
                "_Static_assert(offsetof({}, {}) == {}, \"{}\");",
                $c, $member, offset_of!(ffi::$rust, $field), $member
            ).unwrap();)*
        };
    }
    macro_rules! size {
        ($($rust:ident = $c:literal),*) => {
            $(writeln!(
                text, "_Static_assert(sizeof({}) == {}, \"{}\");", $c, size_of::<ffi::$rust>(), $c
            ).unwrap();)*
        };
    }
    size!(
        ContextAttributes = "struct mlx5dv_context_attr",
        Mr = "struct ibv_mr",
        QpCapacity = "struct ibv_qp_cap",
        QpInit = "struct ibv_qp_init_attr",
        GlobalRoute = "struct ibv_global_route",
        AhAttributes = "struct ibv_ah_attr",
        QpAttributes = "struct ibv_qp_attr",
        DvQp = "struct mlx5dv_qp",
        DvCq = "struct mlx5dv_cq",
        DvPd = "struct mlx5dv_pd",
        DvAh = "struct mlx5dv_ah",
        AddressVector = "struct mlx5_wqe_av",
        DvObject = "struct mlx5dv_obj",
        Umem = "struct mlx5dv_devx_umem",
        UmemIn = "struct mlx5dv_devx_umem_in",
        Uar = "struct mlx5dv_devx_uar"
    );
    same!(Qp = "struct ibv_qp", handle = "handle", qp_num = "qp_num");
    same!(Mr = "struct ibv_mr", length = "length", lkey = "lkey", rkey = "rkey");
    same!(
        PortAttributes = "struct ibv_port_attr",
        state = "state",
        active_mtu = "active_mtu",
        gid_tbl_len = "gid_tbl_len",
        lid = "lid",
        link_layer = "link_layer",
        port_cap_flags2 = "port_cap_flags2"
    );
    same!(QpInit = "struct ibv_qp_init_attr", cap = "cap", qp_type = "qp_type");
    same!(
        QpAttributes = "struct ibv_qp_attr",
        dest_qp_num = "dest_qp_num",
        qp_access_flags = "qp_access_flags",
        ah_attr = "ah_attr",
        pkey_index = "pkey_index",
        max_rd_atomic = "max_rd_atomic",
        max_dest_rd_atomic = "max_dest_rd_atomic",
        min_rnr_timer = "min_rnr_timer",
        port_num = "port_num",
        timeout = "timeout",
        retry_cnt = "retry_cnt",
        rnr_retry = "rnr_retry",
        rate_limit = "rate_limit"
    );
    same!(
        AhAttributes = "struct ibv_ah_attr",
        dlid = "dlid",
        sl = "sl",
        is_global = "is_global",
        port_num = "port_num"
    );
    same!(
        DvQp = "struct mlx5dv_qp",
        sq_buf = "sq.buf",
        sq_wqe_cnt = "sq.wqe_cnt",
        sq_stride = "sq.stride",
        bf_reg = "bf.reg",
        bf_size = "bf.size"
    );
    same!(DvCq = "struct mlx5dv_cq", dbrec = "dbrec", cqe_cnt = "cqe_cnt", cqe_size = "cqe_size");
    same!(DvObject = "struct mlx5dv_obj", cq = "cq", ah = "ah", pd = "pd");
    same!(AddressVector = "struct mlx5_wqe_av", rmac = "rmac", rgid = "rgid");
    same!(
        UmemIn = "struct mlx5dv_devx_umem_in",
        pgsz_bitmap = "pgsz_bitmap",
        comp_mask = "comp_mask",
        dmabuf_fd = "dmabuf_fd"
    );
    same!(Uar = "struct mlx5dv_devx_uar", page_id = "page_id", reg_addr = "reg_addr");
    for (name, value) in [
        ("MLX5DV_CONTEXT_FLAGS_DEVX", u64::from(ffi::CONTEXT_FLAGS_DEVX)),
        ("MLX5DV_OBJ_QP", ffi::OBJ_QP),
        ("MLX5DV_OBJ_CQ", ffi::OBJ_CQ),
        ("MLX5DV_OBJ_AH", ffi::OBJ_AH),
        ("MLX5DV_OBJ_PD", ffi::OBJ_PD),
        ("MLX5DV_UMEM_MASK_DMABUF", ffi::UMEM_MASK_DMABUF),
        ("MLX5DV_UAR_ALLOC_TYPE_NC", u64::from(ffi::UAR_NON_CACHED)),
        ("IBV_PORT_ACTIVE", u64::from(ffi::PORT_ACTIVE)),
        ("IBV_LINK_LAYER_ETHERNET", u64::from(ffi::LINK_LAYER_ETHERNET)),
        ("IBV_QPT_RC", u64::from(ffi::QPT_RC)),
        ("IBV_QPS_RTS", u64::from(ffi::QPS_RTS)),
        ("IBV_QP_DEST_QPN", 1 << 20),
    ] {
        writeln!(text, "_Static_assert({name} == {value}, \"{name}\");").unwrap();
    }
    let dir = tempfile::tempdir().unwrap();
    let source: PathBuf = dir.path().join("layout.c");
    std::fs::write(&source, text).unwrap();
    compile(&["-c"], &source, &dir.path().join("layout.o"));
}
