//! The control path against a stand-in for libibverbs and libmlx5 (`mock/mlx5.c`). The stand-in decodes its input
//! with the vendor's structures and a transcription of its own of the firmware's commands. Nothing here was run on
//! a ConnectX.

use crate::mock;
use std::fmt::Write as _;
use std::mem::{offset_of, size_of};
use std::path::PathBuf;
use std::ptr;
use std::sync::Arc;

use crate::mock::{CLEAN, Mock, MockState, compile, has_headers, join};
use kernels::gpu::GpuError;
use kernels::mlx5::{CQ_COLLAPSED, NO_RECORD, ONE_BLOCK, PeerHandle, QueueHandle, QueueState};
use switchyard_ibgda::access::{
    Access, AccessError, HostRange, Mapping, NoDescriptor, SharedMemory, Space,
};
use switchyard_ibgda::peer::DESCRIPTION_BYTES;
use switchyard_ibgda::probe::MissingPart;
use switchyard_ibgda::{
    Doorbell, HostAccess, Nic, NicConfig, NicError, OpenPeer, Peer, PeerConfig, PeerError, Posters,
    QueueConfig, QueueError, QueuePath, ffi,
};

fn access() -> Arc<dyn Access> {
    Arc::new(HostAccess)
}

/// Queues of DevX are for one block each, those of verbs for all.
fn peer_config(path: QueuePath, num_queues: usize) -> PeerConfig {
    let posters = match path {
        QueuePath::Plain => Posters::AnyBlocks,
        QueuePath::Devx => Posters::OneBlock,
    };
    PeerConfig {
        peer: 3,
        num_queues,
        queue: QueueConfig { path, posters, depth: 256, ..QueueConfig::default() },
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
    join(one, other).into()
}

fn handle(peer: &Peer) -> (PeerHandle, Vec<QueueHandle>) {
    let handle = peer.handle(ptr::null_mut(), ptr::null(), 1_000_000);
    let table = ptr::with_exposed_provenance::<QueueHandle>(usize::try_from(handle.qps).unwrap());
    // SAFETY: the peer keeps the table, which has this number of queues.
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
            // The slots, and nothing else.
            assert_eq!(mock.get().num_exposed, 2);
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
                assert_eq!((queue.batch, queue.peer), (64, 3));
                let is_collapsed = path == QueuePath::Devx;
                assert_eq!(queue.flags, if is_collapsed { CQ_COLLAPSED | ONE_BLOCK } else { 0 });
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

/// The firmware gets the setting, the doorbell is another register of the same page, posters get the setting, and
/// a reset changes none of it.
#[test]
fn queues_without_a_doorbell_record_ring_another_register() {
    let Some(mock) = Mock::open() else { return };
    mock.change(|state| *state = CLEAN);
    let nic = mock.nic();
    let with_record = pair(&nic, peer_config(QueuePath::Devx, 2));
    let mut config = peer_config(QueuePath::Devx, 2);
    config.queue.doorbell = Doorbell::RegisterAlone;
    let (one, other) = pair(&nic, config);
    let [one, other] = mock::rejoin([one, other]);
    let (_, expected) = handle(&with_record.0);
    for queue in handle(&one).1.into_iter().chain(handle(&other).1) {
        let made = mock.queue(queue.qpn);
        assert_eq!((made.send_dbr_mode, made.state), (1, 3));
        assert_eq!(queue.flags, CQ_COLLAPSED | ONE_BLOCK | NO_RECORD);
        assert_eq!(queue.doorbell, made.doorbell);
        assert_eq!((queue.doorbell % 4096, expected[0].doorbell % 4096), (0x600, 0x800));
        assert_ne!(queue.dbrec, 0);
    }
    for queue in expected {
        assert_eq!(mock.queue(queue.qpn).send_dbr_mode, 0);
    }
    drop((one, other, with_record, nic));
    mock.settle();
}

/// A place in the memory of a queue.
fn place<T>(address: u64, offset: usize) -> *mut T {
    ptr::with_exposed_provenance_mut::<T>(usize::try_from(address).unwrap() + offset)
}

/// State of a queue that failed after `consumed` completions, with four more that were not taken.
fn wear_out(queue: &QueueHandle, consumed: u64) {
    let words = [
        (offset_of!(QueueState, reserved), 70_000),
        (offset_of!(QueueState, published), 69_990),
        (offset_of!(QueueState, posted), 69_980),
        (offset_of!(QueueState, completed), 69_000),
        (offset_of!(QueueState, cq_index), consumed),
        (offset_of!(QueueState, poll_lock), 1),
        (offset_of!(QueueState, error), ERROR),
    ];
    // SAFETY: the peer keeps all of it, and it has no other user.
    unsafe {
        for (offset, value) in words {
            place::<u64>(queue.state, offset).write(value);
        }
        for offset in [0, 4] {
            place::<u32>(queue.dbrec, offset).write(0x1234);
        }
        let is_collapsed = queue.flags & CQ_COLLAPSED != 0;
        let first = consumed.saturating_sub(u64::from(queue.cq_depth));
        for index in if is_collapsed { 0..1 } else { first..consumed + 4 } {
            let slot = usize::try_from(index % u64::from(queue.cq_depth)).unwrap();
            let owner = u8::from(index & u64::from(queue.cq_depth) != 0 && !is_collapsed);
            place::<u8>(queue.cq, slot * 64 + 63).write(0xd0 | owner);
        }
    }
}

/// Fails unless a queue is as if nothing had ever been posted.
fn expect_fresh(queue: &QueueHandle, consumed: u64) {
    let is_collapsed = queue.flags & CQ_COLLAPSED != 0;
    let cq_index = if is_collapsed { 0 } else { consumed + 4 };
    // SAFETY: as for `wear_out`.
    unsafe {
        for offset in (0..size_of::<QueueState>()).step_by(8) {
            let is_index = offset == offset_of!(QueueState, cq_index);
            let expected = if is_index { cq_index } else { 0 };
            assert_eq!(place::<u64>(queue.state, offset).read(), expected, "offset {offset}");
        }
        assert_eq!(place::<[u32; 2]>(queue.dbrec, 0).read(), [0; 2]);
        if is_collapsed {
            assert_eq!(place::<[u8; 64]>(queue.cq, 0).read(), [0xff; 64]);
        } else {
            // Posters take up where the NIC goes on, and the NIC knows that everything was consumed.
            let record = u32::from_be(place::<u32>(queue.cq_dbrec, 0).read());
            assert_eq!(u64::from(record), cq_index & 0xff_ffff);
        }
    }
}

/// Offset of the first packet number in a description.
const PSN_AT: usize = 44;
/// Completion with an error, syndrome 15.
const ERROR: u64 = 0x1503;

#[test]
fn queues_that_failed_are_reset_and_joined_again() {
    let Some(mock) = Mock::open() else { return };
    for path in [QueuePath::Plain, QueuePath::Devx] {
        // The ring of the plain path has 512 entries, and its record 24 bits.
        for consumed in [0, 7, 508, 512, 513, 1023, 0xff_fffd] {
            mock.change(|state| *state = CLEAN);
            let nic = mock.nic();
            let (mut one, mut other) = pair(&nic, peer_config(path, 2));
            let before = (handle(&one), handle(&other));
            for round in 0..2 {
                for queue in before.0.1.iter().chain(&before.1.1) {
                    wear_out(queue, consumed + 4 * round);
                }
                assert_eq!(one.queues()[1].error().unwrap(), ERROR);
                let (reset, other_reset) = (one.reset().unwrap(), other.reset().unwrap());
                for queue in before.0.1.iter().chain(&before.1.1) {
                    assert_eq!(mock.queue(queue.qpn).state, 0);
                    expect_fresh(queue, consumed + 4 * round);
                }
                let (from_one, from_other) = (reset.description(), other_reset.description());
                one = reset.rejoin(&from_other).unwrap();
                other = other_reset.rejoin(&from_one).unwrap();
                assert_eq!(one.queues()[0].error().unwrap(), 0);
                for (queue, remote) in before.0.1.iter().zip(&before.1.1) {
                    for (queue, remote) in [(queue, remote), (remote, queue)] {
                        let made = mock.queue(queue.qpn);
                        assert_eq!((made.state, made.remote_qpn), (3, remote.qpn));
                        assert_eq!((made.mtu, made.timeout), (5, 14));
                    }
                }
                // Links of kernels stay as they are.
                for (now, before) in [(handle(&one), &before.0), (handle(&other), &before.1)] {
                    assert_eq!(now.1, before.1);
                    assert_eq!((now.0.qps, now.0.rkey), (before.0.qps, before.0.rkey));
                    assert_eq!((now.0.remote, now.0.mirror), (before.0.remote, before.0.mirror));
                }
            }
            drop((one, other, nic));
            mock.settle();
        }
    }
}

#[test]
fn a_reset_that_fails_frees_everything() {
    let Some(mock) = Mock::open() else { return };
    for path in [QueuePath::Plain, QueuePath::Devx] {
        for num_failures in 0..if path == QueuePath::Plain { 8 } else { 1 } {
            mock.change(|state| *state = CLEAN);
            let nic = mock.nic();
            let config = peer_config(path, 2);
            let one = OpenPeer::open(&nic, &access(), config).unwrap();
            let other = OpenPeer::open(&nic, &access(), mirrored(&config)).unwrap();
            let (from_one, mut from_other) = (one.description(), other.description());
            let (one, other) = (one.join(&from_other).unwrap(), other.join(&from_one).unwrap());
            // As if the other side had been reset.
            from_other[PSN_AT] ^= 1;
            // DevX refuses by its answer, once; verbs by the value that is returned, from a call on.
            mock.change(|state| match path {
                QueuePath::Plain => state.num_failures = num_failures,
                QueuePath::Devx => state.firmware_status = 9,
            });
            let text = match one.reset() {
                Err(error) => error.to_string(),
                Ok(one) => one.rejoin(&from_other).unwrap_err().to_string(),
            };
            let (call, queue) = match path {
                QueuePath::Plain => ("ibv_modify_qp failed", format!("queue {}", num_failures % 2)),
                QueuePath::Devx => ("2RST_QP was refused with status 0x09", "queue 0".to_owned()),
            };
            // Two transitions to reset, then three of the first queue and three of the second.
            let queue = match (path, num_failures) {
                (QueuePath::Plain, 2..=4) => "queue 0".to_owned(),
                (QueuePath::Plain, 5..) => "queue 1".to_owned(),
                _ => queue,
            };
            assert!(text.contains(call) && text.contains(&queue), "{num_failures}: {text}");
            mock.change(|state| (state.num_failures, state.firmware_status) = (-1, 0));
            drop((other, nic));
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
                    // The call, or the step that found it missing.
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

    // Queues that do without a doorbell record.
    let alone = |path| {
        let mut config = peer_config(path, 1);
        config.queue.doorbell = Doorbell::RegisterAlone;
        config
    };
    let no_record: [Change; 2] = [|s| s.has_no_record = 0, |s| s.has_caps_2 = 0];
    for change in no_record {
        mock.change(|state| *state = CLEAN);
        mock.change(change);
        let nic = mock.nic();
        let num_live = mock.get().num_live;
        let refused = OpenPeer::open(&nic, &access(), alone(QueuePath::Devx));
        let text = refused.unwrap_err().to_string();
        let expected = "send_dbr_mode_no_dbr_ext is 0, expected 1: a newer NIC or firmware";
        assert!(text.contains(expected) && text.contains("mlx5_7"), "{text}");
        assert_eq!(mock.get().num_live, num_live);
        // It can be said before there is a peer.
        let error = alone(QueuePath::Devx).queue.check(&nic).unwrap_err();
        assert!(error.to_string().contains(expected), "{error}");
        peer_config(QueuePath::Devx, 1).queue.check(&nic).unwrap();
        drop(nic);
        mock.settle();
    }
    mock.change(|state| *state = CLEAN);
    let nic = mock.nic();
    let refused = OpenPeer::open(&nic, &access(), alone(QueuePath::Plain));
    let text = refused.unwrap_err().to_string();
    assert!(text.contains("`send_dbr_mode` is 1, expected 0: libibverbs makes no"), "{text}");
    drop(nic);
    mock.settle();

    let devx: [(&str, Change); 3] = [
        ("UCTX_EN=1", |s| s.has_devx = 0),
        ("cqe_version is 0, expected 1", |s| s.cqe_version = 0),
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

    // Requirements of requests, on both kinds of queues. Where DevX reports capabilities, that report counts.
    let requests: [(&str, Change); 4] = [
        ("atomic_operations is 0x0003, expected fetch-add and masked", |s| s.atomic_operations = 3),
        ("atomic_cap is 0, expected 1 (IBV_ATOMIC_HCA)", |s| (s.has_devx, s.atomic_cap) = (0, 0)),
        ("max_qp_init_rd_atom is 8, expected at least 16", |s| s.max_reads = 8),
        ("max_qp_init_rd_atom is 0", |s| (s.has_devx, s.max_reads) = (0, 0)),
    ];
    for (part, change) in requests {
        mock.change(|state| *state = CLEAN);
        mock.change(change);
        let nic = mock.nic();
        let num_live = mock.get().num_live;
        for path in [QueuePath::Plain, QueuePath::Devx] {
            let refused = OpenPeer::open(&nic, &access(), peer_config(path, 1));
            let text = refused.unwrap_err().to_string();
            assert!(text.contains(part) && text.contains("mlx5_7"), "{path:?}: {text}");
            assert_eq!(mock.get().num_live, num_live, "{part}");
        }
        drop(nic);
        mock.settle();
    }
    mock.change(|state| *state = MockState { atomic_cap: 0, ..CLEAN });
    let nic = mock.nic();
    OpenPeer::open(&nic, &access(), peer_config(QueuePath::Plain, 1)).unwrap();
    drop(nic);
    mock.settle();

    mock.change(|state| *state = MockState { sq_stride: 128, ..CLEAN });
    let nic = mock.nic();
    let refused = OpenPeer::open(&nic, &access(), peer_config(QueuePath::Plain, 1));
    let text = refused.unwrap_err().to_string();
    assert!(text.contains("sq.stride 128, expected 64"), "{text}");
    drop(nic);
    mock.settle();
}

/// Memory of a [`FarAccess`], and its offset in the memory that its descriptor describes.
const FAR_ADDRESS: u64 = 1 << 60;
const FAR_OFFSET: u64 = 4096;

/// As where the kernel modules of the driver are not the open ones.
fn no_descriptor() -> NoDescriptor {
    let call = "cuMemGetHandleForAddressRange";
    let name = "CUDA_ERROR_NOT_SUPPORTED".to_owned();
    NoDescriptor::Driver(Arc::new(GpuError::Driver { call, code: 801, name }))
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
    fn space(&self) -> Space {
        Space("far")
    }

    fn alloc(&self, bytes: usize) -> Result<Box<dyn SharedMemory>, AccessError> {
        let descriptor = self.has_descriptor.then(|| std::fs::File::open("/dev/null").unwrap());
        Ok(Box::new(FarMemory { bytes, descriptor }))
    }

    unsafe fn map(
        &self,
        pages: ptr::NonNull<u8>,
        bytes: usize,
        _kind: HostRange,
    ) -> Result<Mapping, AccessError> {
        assert!(pages.addr().get().is_multiple_of(4096) && bytes.is_multiple_of(4096));
        Ok(Mapping { address: pages.addr().get() as u64, guard: None })
    }
}

impl SharedMemory for FarMemory {
    fn address(&self) -> u64 {
        FAR_ADDRESS
    }
    fn bytes(&self) -> usize {
        self.bytes
    }
    fn is_on_gpu(&self) -> bool {
        true
    }
    fn dma_buf(&self) -> Result<(std::os::fd::BorrowedFd<'_>, u64), NoDescriptor> {
        use std::os::fd::AsFd;
        let descriptor = self.descriptor.as_ref().ok_or_else(no_descriptor)?;
        Ok((descriptor.as_fd(), FAR_OFFSET))
    }
    fn write(&self, _offset: usize, _bytes: &[u8]) -> Result<(), AccessError> {
        Ok(())
    }
    fn read(&self, _offset: usize, _bytes: &mut [u8]) -> Result<(), AccessError> {
        Ok(())
    }
}

#[test]
fn gpu_memory_goes_by_dma_buf_then_by_address_then_says_why_not() {
    use switchyard_ibgda::nic::RegistrationMethod::{DmaBuf, PeerMemory};
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
        let one = one.join(&description).unwrap();
        assert_eq!(one.registered_by(), [expected; 2]);
        // Parts of one piece of memory. Their descriptor has their offset in it.
        let places = [one.slot(), one.mirror()].map(|part| {
            let offset = part.address() - FAR_ADDRESS;
            let described = part.dma_buf().ok().map(|(_, offset)| offset);
            assert_eq!(described, has_descriptor.then_some(FAR_OFFSET + offset));
            offset
        });
        assert_eq!(places, [0, config.own_slot_bytes as u64]);
        drop((one, other, nic));
        mock.settle();
    }
    for (path, has_dma_buf, has_peer_memory, by_descriptor, by_address) in [
        (QueuePath::Plain, 0, 0, "ibv_reg_dmabuf_mr", "ibv_reg_mr"),
        // Slots can be registered there, but the firmware takes no memory for queues.
        (QueuePath::Devx, 1, 2, "mlx5dv_devx_umem_reg_ex", "mlx5dv_devx_umem_reg"),
    ] {
        mock.change(|state| *state = MockState { has_dma_buf, has_peer_memory, ..CLEAN });
        let nic = mock.nic();
        for has_descriptor in [true, false] {
            let far: Arc<dyn Access> = Arc::new(FarAccess { has_descriptor });
            let error = OpenPeer::open(&nic, &far, peer_config(path, 1)).unwrap_err();
            let text = error.to_string();
            let first = if has_descriptor {
                format!("by dma-buf: {by_descriptor} failed: ")
            } else {
                "by dma-buf: the GPU's driver gives no descriptor: cuMemGetHandleForAddressRange \
                 failed: CUDA_ERROR_NOT_SUPPORTED (801)"
                    .to_owned()
            };
            let second = format!("by address, which is nvidia_peermem's: {by_address} failed: ");
            for part in [first.as_str(), &second] {
                assert!(text.contains(part), "{part}: {text}");
            }
            let (PeerError::Nic(error) | PeerError::Queue { source: QueueError::Nic(error), .. }) =
                error
            else {
                panic!("{text}");
            };
            let NicError::GpuMemory { missing, .. } = error else { panic!("{text}") };
            // Below the root of the stand-in's host is none of it.
            assert_eq!(
                missing,
                [MissingPart::OpenModules, MissingPart::Linux, MissingPart::PeerMemory]
            );
        }
        drop(nic);
        mock.settle();
    }
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
    let cases: [(&str, usize, &[u8]); 13] = [
        ("version", 0, &[9]),
        ("link", 1, &[1]),
        ("mtu", 2, &[0]),
        ("mtu", 2, &[6]),
        ("num_queues", 3, &[3]),
        ("reserved", 6, &[1]),
        ("reserved", 7, &[0x80]),
        ("slot address", 24, &[0; 8]),
        ("slot address", 24, &[1]),
        ("slot address", 24, &[0xc0, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff]),
        ("slot bytes", 32, &[0xff; 8]),
        ("psn", PSN_AT + 3, &[1]),
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
    let cases: [(&str, Change); 11] = [
        ("depth", |c| c.queue.depth = 100),
        ("depth", |c| c.queue.depth = 65536),
        ("batch", |c| c.queue.batch = 0),
        ("max_message_bytes", |c| c.queue.max_message_bytes = u32::MAX),
        ("retries", |c| c.queue.retries = 8),
        ("ack_timeout", |c| c.queue.ack_timeout = 32),
        ("ack_timeout", |c| c.queue.ack_timeout = 0),
        ("num_queues", |c| c.num_queues = 0),
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
        DeviceAttributes = "struct ibv_device_attr",
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
        DeviceAttributes = "struct ibv_device_attr",
        node_guid = "node_guid",
        max_qp_rd_atom = "max_qp_rd_atom",
        max_qp_init_rd_atom = "max_qp_init_rd_atom",
        atomic_cap = "atomic_cap",
        phys_port_cnt = "phys_port_cnt"
    );
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
        rq_buf = "rq.buf",
        rq_wqe_cnt = "rq.wqe_cnt",
        rq_stride = "rq.stride",
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
    same!(
        Uar = "struct mlx5dv_devx_uar",
        page_id = "page_id",
        reg_addr = "reg_addr",
        base_addr = "base_addr"
    );
    for (name, value) in [
        ("MLX5DV_CONTEXT_FLAGS_DEVX", u64::from(ffi::CONTEXT_FLAGS_DEVX)),
        ("MLX5DV_OBJ_QP", ffi::OBJ_QP),
        ("MLX5DV_OBJ_CQ", ffi::OBJ_CQ),
        ("MLX5DV_OBJ_AH", ffi::OBJ_AH),
        ("MLX5DV_OBJ_PD", ffi::OBJ_PD),
        ("MLX5DV_UMEM_MASK_DMABUF", ffi::UMEM_MASK_DMABUF),
        ("MLX5DV_UAR_ALLOC_TYPE_NC", u64::from(ffi::UAR_NON_CACHED)),
        ("IBV_ATOMIC_NONE", u64::from(ffi::ATOMIC_NONE)),
        ("IBV_ATOMIC_HCA", u64::from(ffi::ATOMIC_HCA)),
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
