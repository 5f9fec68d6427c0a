//! Memory that this processor does not touch. Memory of the host stands in for it, in a fabric that claims to reach
//! other devices. Over RDMA, the network device really accesses it by its address.

use std::os::fd::AsFd;
use std::ptr::NonNull;

use p2p_core::Region;
use p2p_core::fabric::Fabric;
use switchyard_message_engine::engine::{
    Access, DmaBuf, Engine, EngineConfig, MemoryRegion, OpError, RegisterError, SubmitError,
    TransferError,
};
use switchyard_message_engine::fabric::cma::CmaFabric;

use crate::common::{Pair, TestTransport, config, contents, memory_of, pair_of, poisoned, soon};
use crate::hooked::HookedFabric;

fn reaching() -> Box<dyn Fabric> {
    Box::new(HookedFabric { reaches_devices: true, ..HookedFabric::new(CmaFabric::new().unwrap()) })
}

/// The fabrics under test, each for one engine.
fn fabrics() -> Vec<fn() -> Box<dyn Fabric>> {
    let is_verbs =
        std::env::var("SWITCHYARD_TEST_TRANSPORT").is_ok_and(|it| it.starts_with("verbs"));
    if is_verbs { vec![reaching, || TestTransport::Named.fabric()] } else { vec![reaching] }
}

fn engine_config(fabric: fn() -> Box<dyn Fabric>, eager_bytes: u64) -> EngineConfig {
    EngineConfig { fabrics: vec![fabric()], eager_bytes, ..EngineConfig::local() }
}

/// Memory of a device. Only the test reads and writes it directly.
struct Device {
    memory: Region,
    region: MemoryRegion,
}

impl Device {
    fn new(engine: &Engine, byte: u8, len: usize) -> Self {
        let memory = Region::anonymous(len).unwrap();
        // SAFETY: just made, so nothing else uses it.
        unsafe { memory.as_ptr().write_bytes(byte, len) };
        // SAFETY: the memory is dropped after the engine's use of it, see `bytes`.
        let region =
            unsafe { engine.reg_device(memory.as_ptr(), len, Access::RemoteReadWrite, None) };
        Self { memory, region: region.unwrap() }
    }

    fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.memory.len()];
        // SAFETY: in range; no transfer is under way when a test looks.
        unsafe {
            self.memory.as_ptr().copy_to_nonoverlapping(
                NonNull::new(bytes.as_mut_ptr()).unwrap(),
                self.memory.len(),
            );
        }
        bytes
    }

    /// Deregisters the region, and then drops the memory.
    fn end(self, engine: &Engine) {
        assert!(engine.dereg(self.region).unwrap());
    }
}

#[test]
fn device_memory_is_written_read_sent_and_received_into() {
    for fabric in fabrics() {
        // No message may be sent ahead to the engine that receives into a device.
        let Pair { here, there, out, back } =
            pair_of(engine_config(fabric, 8 << 10), engine_config(fabric, 0));
        for len in [1, 100, 8192, 300_000, 5 << 20] {
            let (near, far) = (Device::new(&here, 1, len), Device::new(&there, 2, len));
            assert!(!near.region.is_host());
            let remote = back.advertise(&far.region.whole()).unwrap();
            out.write(&near.region.whole(), &remote, soon()).unwrap();
            assert!(far.bytes() == vec![1; len], "a write of {len} bytes");
            // SAFETY: no transfer is under way.
            unsafe { far.memory.as_ptr().write_bytes(3, len) };
            out.read(&near.region.whole(), &remote, soon()).unwrap();
            assert!(near.bytes() == vec![3; len], "a read of {len} bytes");
            // Messages in both directions: into a device, and out of one into memory of the host.
            let receive = back.start_recv(&far.region.whole(), soon()).unwrap();
            // SAFETY: no transfer uses it yet.
            unsafe { near.memory.as_ptr().write_bytes(4, len) };
            out.send(&near.region.whole(), soon()).unwrap();
            assert_eq!(receive.wait(), Ok(len as u64));
            assert!(far.bytes() == vec![4; len], "a message of {len} bytes");
            let host = poisoned(&here, len);
            let receive = out.start_recv(&host.span(0, len as u64).unwrap(), soon()).unwrap();
            back.send(&far.region.whole(), soon()).unwrap();
            assert_eq!(receive.wait(), Ok(len as u64));
            assert!(contents(&host, 0, len) == vec![4; len], "a message of {len} bytes back");
            near.end(&here);
            far.end(&there);
        }
    }
}

#[test]
fn this_processor_leaves_device_memory_alone() {
    for fabric in fabrics() {
        let Pair { here, there, out, back } =
            pair_of(engine_config(fabric, 8 << 10), engine_config(fabric, 8 << 10));
        let device = Device::new(&there, 9, 100);
        assert_eq!(device.region.copy_in(0, &[1]), Err(SubmitError::DeviceMemory));
        assert_eq!(device.region.copy_out(0, &mut [0]), Err(SubmitError::DeviceMemory));
        assert!(matches!(device.region.copy_in(100, &[1]), Err(SubmitError::Range { .. })));
        // A short message that was sent ahead cannot be copied into a device, and its receive fails. The next one
        // succeeds.
        let source = memory_of(&here, &[5; 100]);
        let receive = back.start_recv(&device.region.whole(), soon()).unwrap();
        out.send(&source.span(0, 100).unwrap(), soon()).unwrap();
        let error = receive.wait().unwrap_err();
        assert!(matches!(&error, TransferError::Fabric { op: "recv", .. }), "{error}");
        assert!(error.to_string().contains("eager_bytes"), "{error}");
        assert_eq!(device.bytes(), [9; 100]);
        let host = poisoned(&there, 100);
        let receive = back.start_recv(&host.span(0, 100).unwrap(), soon()).unwrap();
        out.send(&source.span(0, 100).unwrap(), soon()).unwrap();
        assert_eq!(receive.wait(), Ok(100));
        // An empty message needs no copy.
        let receive = back.start_recv(&device.region.whole(), soon()).unwrap();
        out.send(&source.span(0, 0).unwrap(), soon()).unwrap();
        assert_eq!(receive.wait(), Ok(0));
        device.end(&there);
    }
}

#[test]
fn transports_that_do_not_reach_it_say_so() {
    let memory = Region::anonymous(4096).unwrap();
    let register = |engine: &Engine, dma_buf: Option<DmaBuf<'_>>| {
        // SAFETY: the memory outlives the engine's use of it.
        unsafe { engine.reg_device(memory.as_ptr(), 4096, Access::RemoteReadWrite, dma_buf) }
    };
    let plain = Engine::start(config(TestTransport::Tcp)).unwrap();
    let error = register(&plain, None).unwrap_err();
    assert!(matches!(&error, RegisterError::Refused { bytes: 4096, .. }), "{error}");
    assert!(error.to_string().contains("tcp") && error.to_string().contains("host"), "{error}");
    // One of two fabrics reaches it. Connections over the other one report an error.
    let mixed = || EngineConfig {
        fabrics: vec![TestTransport::Tcp.fabric(), reaching()],
        ..EngineConfig::local()
    };
    let Pair { here, out, there: _there, back: _back } =
        pair_of(mixed(), config(TestTransport::Tcp));
    let region = register(&here, None).unwrap();
    assert_eq!(out.transport().to_string(), "tcp");
    let refused = out.send(&region.whole(), soon()).unwrap_err();
    assert!(matches!(refused, OpError::Submit(SubmitError::Unregistered { .. })), "{refused}");
    assert!(out.advertise(&region.whole()).is_err());
    assert!(here.dereg(region).unwrap());
    // The same range as memory of the host gets another registration, with keys of its own.
    let device = register(&here, None).unwrap();
    // SAFETY: as above.
    let host = unsafe { here.reg(memory.as_ptr(), 4096, Access::RemoteReadWrite) }.unwrap();
    assert_ne!(device.registration(), host.registration());
    assert!(host.is_host() && host.copy_in(0, &[1]).is_ok());
    assert!(here.dereg(device).unwrap() && here.dereg(host).unwrap());
    // The caller owns the descriptor, and may close it at once.
    let file = tempfile::tempfile().unwrap();
    file.set_len(8192).unwrap();
    let region = register(&here, Some(DmaBuf { fd: file.as_fd(), offset: 4096 })).unwrap();
    drop(file);
    assert!(here.dereg(region).unwrap());
}
