//! From the host's files to queues that are joined with the peer's.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Error, Result, anyhow};
use ibgda::nic::{LinkLayer, NicError, RegistrationMethod, Rights};
use ibgda::probe::{Check, State, probe, probe_files};
use ibgda::{
    Access, GpuAccess, Libraries, Nic, NicConfig, OpenPeer, Peer, PeerConfig, PeerError, Place,
    QueueConfig, QueueError, QueuePath,
};
use kernels::gpu::Gpu;
use softnic_driver::Driver;

use crate::args::{DoorbellName, Options, QueueMemory};
use crate::exchange::{Channel, Hello};
use crate::memory::{SLOT_BYTES, SlotAccess};
use crate::post::Poster;
use crate::report::{Failure, Reporter, whole_text};
use crate::stage::Stage;
use crate::traffic::{Fused, NUM_RECEIVES, Session};

/// Settings known before anything is opened.
pub(crate) struct Setup<'a> {
    options: &'a Options,
    is_connector: bool,
    reporter: Reporter,
}

/// This side's queues, not yet joined.
pub(crate) struct Ready {
    driver: Driver,
    open: OpenPeer,
    fused: Option<Fused>,
}

/// A port, the memory of slots, and the GPU that posts in the last stage.
type DeviceParts = (Arc<Nic>, Arc<dyn Access>, Option<Gpu>);

impl<'a> Setup<'a> {
    pub(crate) const fn new(options: &'a Options, is_connector: bool, reporter: Reporter) -> Self {
        Self { options, is_connector, reporter }
    }

    /// Runs the stages up to own queues. Returns `None` when the last requested stage needs no peer.
    pub(crate) fn prepare(&self) -> Result<Option<Ready>, Failure> {
        let last = *self.options.stage.end();
        let driver = self.stage(Stage::Probe, || self.probe())?;
        if last == Stage::Probe {
            return Ok(None);
        }
        let (nic, access, gpu) = self.stage(Stage::Device, || self.open_device())?;
        if last == Stage::Device {
            return Ok(None);
        }
        self.stage(Stage::Domain, || self.try_domain(&nic, access.as_ref()))?;
        if last == Stage::Domain {
            return Ok(None);
        }
        let open = self.stage(Stage::Queues, || self.make_queues(&nic, &access))?;
        let fused = gpu.map(|gpu| self.fused(&nic, gpu));
        Ok((last > Stage::Queues).then_some(Ready { driver, open, fused }))
    }

    /// Greets the peer and joins the queues with its own.
    pub(crate) fn connect(
        &self,
        mut ready: Ready,
        mut channel: Channel,
    ) -> Result<Session, Failure> {
        let fused = ready.fused.take();
        match self.join(ready, fused.is_some(), &mut channel) {
            Ok((driver, peer, hellos, detail)) => {
                self.reporter.passed(Stage::Connect, &detail);
                Ok(Session::new(driver, peer, channel, hellos, fused, self.options))
            }
            Err(error) => {
                channel.give_up(Stage::Connect, &whole_text(&error));
                let is_lacking = is_lacking(&error);
                Err(Failure { stage: Stage::Connect, is_lacking, error })
            }
        }
    }

    fn stage<T>(
        &self,
        stage: Stage,
        run: impl FnOnce() -> Result<(T, String)>,
    ) -> Result<T, Failure> {
        match run() {
            Ok((value, detail)) => {
                self.reporter.passed(stage, &detail);
                Ok(value)
            }
            Err(error) => {
                // A host that fails the probe lacks the named parts.
                let is_lacking = stage == Stage::Probe || is_lacking(&error);
                Err(Failure { stage, is_lacking, error })
            }
        }
    }

    fn probe(&self) -> Result<(Driver, String)> {
        let driver = Driver::product().ok_or_else(|| {
            anyhow!("this build has no device functions for the processor: build it where there is a C++ compiler")
        })?;
        let report = match (&self.options.root, self.options.software_nic) {
            (Some(root), _) => probe_files(root),
            (None, true) => {
                return Ok((
                    driver,
                    "a NIC in software: nothing of this host is needed".to_owned(),
                ));
            }
            (None, false) => probe(),
        };
        let is_needed =
            |check: &&Check| self.options.gpu.is_some() || !OF_GPUS.contains(&check.name);
        let checks: Vec<&Check> = report.checks.iter().filter(is_needed).collect();
        let missing: Vec<String> = checks
            .iter()
            .filter(|check| check.state == State::Missing)
            .map(|check| {
                let remedy = check.remedy.as_deref().unwrap_or("no remedy is known");
                format!("{}: {} → {remedy}", check.name, check.found)
            })
            .collect();
        if missing.is_empty() {
            Ok((driver, format!("{} checks passed", checks.len())))
        } else {
            Err(anyhow!("{} of {} missing: {}", missing.len(), checks.len(), missing.join("; ")))
        }
    }

    fn open_device(&self) -> Result<(DeviceParts, String)> {
        let options = self.options;
        let libraries =
            if options.software_nic { softnic_verbs::libraries()? } else { Libraries::open()? };
        let root = options.root.clone().unwrap_or_else(|| "/".into());
        let config = NicConfig {
            device: options.device.clone(),
            port: options.port,
            // A NIC in software is in no list of addresses.
            gid_idx: options.gid_index.or_else(|| options.software_nic.then_some(0)),
            root: root.clone(),
            ..NicConfig::default()
        };
        let nic = Nic::open(&libraries, &config)?;
        if options.path == crate::args::PathName::Devx {
            nic.devx()?;
        }
        let gpu = options.gpu.map(Gpu::open_named).transpose()?;
        let place =
            gpu.as_ref().map_or_else(String::new, |gpu| format!(", slots of {}", gpu.name()));
        let port = nic.port();
        let link = match port.link {
            LinkLayer::InfiniBand => format!("InfiniBand, LID {:#x}", port.lid),
            LinkLayer::Ethernet => "Ethernet".to_owned(),
        };
        let devx = if nic.devx().is_ok() { "DevX" } else { "no DevX" };
        let detail = format!(
            "{}{} port {}: {link}, address {} at index {}, MTU {}, {devx}{place}",
            nic.name(),
            firmware(&root, nic.name()),
            port.number,
            address(&port.gid),
            port.gid_idx,
            128_u32 << port.mtu.min(5),
        );
        Ok(((nic, Arc::new(SlotAccess::new(gpu.clone())), gpu), detail))
    }

    /// Registers memory of a slot's size and gives it back.
    fn try_domain(&self, nic: &Arc<Nic>, access: &dyn Access) -> Result<((), String)> {
        let slot = access.slots().unwrap_or(access).alloc(SLOT_BYTES)?;
        let by = if slot.is_on_gpu() {
            let (bytes, descriptor) = (slot.bytes() as u64, slot.dma_buf());
            // SAFETY: the memory is dropped after its registration.
            unsafe { nic.register_gpu(slot.address(), bytes, descriptor, Rights::Peer) }?.by()
        } else {
            let start = std::ptr::with_exposed_provenance_mut(usize::try_from(slot.address())?);
            let start = std::ptr::NonNull::new(start).ok_or_else(|| anyhow!("no address"))?;
            // SAFETY: as above.
            unsafe { nic.register_host(start, slot.bytes(), Rights::Peer) }?.by()
        };
        Ok(((), format!("{SLOT_BYTES} bytes registered {}", way(by))))
    }

    fn make_queues(&self, nic: &Arc<Nic>, access: &Arc<dyn Access>) -> Result<(OpenPeer, String)> {
        let options = self.options;
        let path = QueuePath::from(options.path);
        let config = PeerConfig {
            peer: 0,
            num_queues: options.queues as usize,
            queue: QueueConfig {
                path,
                depth: options.depth,
                doorbell: options.doorbell.into(),
                num_receives: NUM_RECEIVES,
                ..QueueConfig::default()
            },
            own_slot_bytes: SLOT_BYTES,
            peer_slot_bytes: SLOT_BYTES,
        };
        let open = OpenPeer::open(nic, access, config)?;
        let how = match path {
            QueuePath::Plain => "by libibverbs, completions in a ring",
            QueuePath::Devx => "by commands to the firmware, completions collapsed",
        };
        let record = match options.doorbell {
            DoorbellName::Record => "",
            DoorbellName::Register => ", doorbells by the register alone",
        };
        Ok((open, format!("{} of depth {}, {how}{record}", options.queues, options.depth)))
    }

    /// Requirements of the stage `fused`. The stage makes its queues itself.
    fn fused(&self, nic: &Arc<Nic>, gpu: Gpu) -> Fused {
        let options = self.options;
        let (queues, place) = match options.queue_memory {
            QueueMemory::Host => (Place::Host, "host memory"),
            QueueMemory::Gpu => (Place::Gpu, "the GPU's memory"),
        };
        let access = GpuAccess::new(gpu.clone(), queues).with_slots(Place::Gpu);
        let access = if options.software_nic { access.with_software_nic() } else { access };
        let path = QueuePath::from(options.path);
        let doorbell = options.doorbell.into();
        let queue = QueueConfig { path, doorbell, depth: options.depth, ..QueueConfig::default() };
        Fused { nic: Arc::clone(nic), gpu, access: Arc::new(access), queue, place }
    }

    fn join(
        &self,
        ready: Ready,
        has_gpu: bool,
        channel: &mut Channel,
    ) -> Result<(Driver, Peer, [Hello; 2], String)> {
        let options = self.options;
        let own = Hello {
            is_connector: self.is_connector,
            is_devx: options.path == crate::args::PathName::Devx,
            is_software: options.software_nic,
            has_gpu,
            first: *options.stage.start(),
            last: *options.stage.end(),
            num_queues: options.queues,
            depth: options.depth,
            num_wraps: options.wraps,
            slot_bytes: SLOT_BYTES as u64,
            seed: rand::random(),
        };
        let patience = options.timeout * 3;
        let theirs = channel.greet(&own, patience)?;
        let description = channel.describe(&ready.open.description(), patience)?;
        let peer = ready.open.join(&description)?;
        let poster = Poster::new(&ready.driver, &peer, options.timeout);
        for queue_idx in 0..poster.num_queues() {
            if let Some(what) = poster.check(queue_idx) {
                return Err(anyhow!("queue {queue_idx}: sy_mlx5_check_qp: {what}"));
            }
            if let Some(what) = poster.check_receives(queue_idx) {
                return Err(anyhow!("queue {queue_idx}: sy_mlx5_check_rq: {what}"));
            }
        }
        let pairs: Vec<String> =
            (0..poster.num_queues()).map(|idx| format!("{:#x}", poster.qpn(idx))).collect();
        let [slot, mirror] = peer.registered_by();
        let detail = format!(
            "queue pairs {}; slot {}, mirror {}; sy_mlx5_check_qp and sy_mlx5_check_rq have no objection",
            pairs.join(" "),
            way(slot),
            way(mirror)
        );
        // No side posts before both are ready to receive.
        channel.meet(Stage::Connect, 0, patience)?;
        Ok((ready.driver, peer, [own, theirs], detail))
    }
}

const fn way(by: RegistrationMethod) -> &'static str {
    match by {
        RegistrationMethod::Host => "as host memory",
        RegistrationMethod::DmaBuf => "as a GPU's memory by dma-buf",
        RegistrationMethod::PeerMemory => "as a GPU's memory by its address",
    }
}

/// Whether an error says that the host lacks something, in contrast to a call that fails.
fn is_lacking(error: &Error) -> bool {
    let is_lacking = |error: &NicError| {
        matches!(
            error,
            NicError::Library(_)
                | NicError::Absent { .. }
                | NicError::Port { .. }
                | NicError::Capability { .. }
                | NicError::NoDevx { .. }
                | NicError::GpuMemory { .. }
                | NicError::Call { call: "ibv_get_device_list" | "ibv_open_device", .. }
        )
    };
    error.chain().any(|cause| {
        let nic = cause.downcast_ref::<NicError>().is_some_and(is_lacking);
        let peer = cause.downcast_ref::<PeerError>().is_some_and(|error| match error {
            PeerError::Nic(error) | PeerError::Queue { source: QueueError::Nic(error), .. } => {
                is_lacking(error)
            }
            _ => false,
        });
        nic || peer || cause.is::<ibgda::LibraryError>() || cause.is::<kernels::gpu::GpuError>()
    })
}

/// Settings named in a report of the result.
fn firmware(root: &Path, device: &str) -> String {
    let dir = root.join("sys/class/infiniband").join(device);
    let line = |file: &str| {
        let text = std::fs::read_to_string(dir.join(file)).ok()?;
        Some(text.trim().to_owned()).filter(|text| !text.is_empty())
    };
    match (line("hca_type"), line("fw_ver")) {
        (Some(kind), Some(version)) => format!(" ({kind}, firmware {version})"),
        (None, Some(version)) => format!(" (firmware {version})"),
        _ => String::new(),
    }
}

fn address(gid: &[u8; 16]) -> std::net::Ipv6Addr {
    (*gid).into()
}

/// Lines of the probe that matter once a GPU comes in.
const OF_GPUS: [&str; 4] =
    ["NVIDIA driver", "EnableStreamMemOPs", "RegistryDwords", "registration of GPU memory"];
