//! The transport over a software NIC: one NIC per process, one queue pair and one protection domain
//! per peer.
//!
//! The posting thread also makes the NIC progress, so that an operation is usually complete when its call returns,
//! as with fast hardware. A NIC with an adversary in its configuration delays operations. A caretaker thread then
//! guarantees that every delay ends.

mod endpoint;
mod wake;

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use p2p_core::network::{JoinedSide, Network, NetworkError, OpenSide, Route, SideDescription};
use p2p_core::wait::Driver;
use p2p_core::{AnyEndpoint, SlotLayout, TransportKind};

use crate::memory::Segment;
use crate::network::endpoint::{Side, SoftEndpoint};
use crate::nic::{Nic, NicConfig};
use crate::port::{Access, PortAddress};
use crate::queue::{HostQueue, Poster, QueueSizes};

/// A software NIC as a network of the handshake.
#[derive(Debug)]
pub struct SoftNetwork {
    device: Arc<Device>,
    flavour: String,
}

impl SoftNetwork {
    /// A NIC of this process, which peers of the same host and the same PID namespace can reach.
    ///
    /// # Errors
    /// [`NetworkError`].
    pub fn open(config: NicConfig) -> Result<Self, NetworkError> {
        let nic = Nic::new(config).map_err(|e| failed("open", e))?;
        let has_caretaker = config.adversary.is_some();
        let is_idle = AtomicBool::new(true);
        let device = Arc::new(Device { nic: Mutex::new(nic), is_idle, has_caretaker });
        if has_caretaker {
            let device = Arc::downgrade(&device);
            std::thread::Builder::new()
                .name("softnic-care".to_owned())
                .spawn(move || take_care(&device))
                .map_err(|e| failed("start a thread", e))?;
        }
        Ok(Self { device, flavour: flavour().map_err(|e| failed("look at /proc", e))? })
    }

    /// Locks the NIC between two steps, to inject faults and to read what it recorded. Blocks while another thread
    /// drives the NIC.
    pub fn nic(&self) -> MutexGuard<'_, Nic> {
        self.device.lock()
    }
}

impl Network for SoftNetwork {
    fn kind(&self) -> TransportKind {
        TransportKind::SoftNic
    }

    fn flavour(&self) -> &str {
        &self.flavour
    }

    fn open(&self, layout: &SlotLayout, _route: Route) -> Result<Box<dyn OpenSide>, NetworkError> {
        let bytes = layout.slot_bytes();
        let slot = Segment::create(bytes).map_err(|e| failed("make a slot", e))?;
        let (reader, number) = wake::make().map_err(|e| failed("make a wake-up pipe", e))?;
        let mut nic = self.device.lock();
        let domain = nic.alloc_domain();
        let port = nic.address();
        let queue =
            HostQueue::create(&mut nic, domain, QueueSizes::default()).and_then(|queue| match nic
                .register(domain, &slot, 0, bytes, Access::ALL)
            {
                Ok(keys) => Ok((keys, Poster::new(queue)?)),
                Err(error) => {
                    let _ = queue.destroy(&mut nic);
                    Err(error)
                }
            });
        drop(nic);
        let (slot_keys, poster) = queue.map_err(|e| failed("make a queue pair", e))?;
        let qpn = poster.queue().qpn();
        let device = Arc::clone(&self.device);
        let side = Side::new(device, domain, slot, slot_keys, poster);
        let detail = Detail { port, qpn, wake: number };
        Ok(Box::new(OpenSoft { side, detail, wake_self: reader, slot_bytes: bytes }))
    }
}

/// The NIC of a process, shared by its endpoints.
#[derive(Debug)]
struct Device {
    nic: Mutex<Nic>,
    is_idle: AtomicBool,
    has_caretaker: bool,
}

impl Device {
    fn lock(&self) -> MutexGuard<'_, Nic> {
        self.nic.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// As much progress as there is to make, within bounds.
    fn progress(&self) {
        let mut nic = self.lock();
        let mut work = 0;
        for _ in 0..MAX_STEPS {
            work = nic.progress();
            if work == 0 {
                break;
            }
        }
        self.is_idle.store(work == 0, Ordering::Relaxed);
    }
}

impl Driver for Device {
    fn drive(&self) {
        // Requests of this side were executed when they were posted, and the peers' NICs execute those of peers.
        // Only a NIC that delays operations has work left.
        if !self.is_idle.load(Ordering::Relaxed) {
            self.progress();
        }
    }

    fn may_sleep(&self) -> bool {
        self.has_caretaker || self.is_idle.load(Ordering::Relaxed)
    }

    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

/// Drives a NIC that has no other driver, until its last owner drops it.
fn take_care(device: &Weak<Device>) {
    while let Some(device) = device.upgrade() {
        device.progress();
        drop(device);
        std::thread::sleep(CARE_INTERVAL);
    }
}

/// Information for the peer beside the slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Detail {
    port: PortAddress,
    qpn: u32,
    wake: u32,
}

impl Detail {
    const BYTES: usize = PortAddress::BYTES + 8;

    fn encode(&self) -> Vec<u8> {
        let mut bytes = self.port.encode().to_vec();
        bytes.extend(self.qpn.to_le_bytes());
        bytes.extend(self.wake.to_le_bytes());
        bytes
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let (port, rest) = bytes.split_at_checked(PortAddress::BYTES)?;
        let [a, b, c, d, e, f, g, h] = *rest else { return None };
        Some(Self {
            port: PortAddress::decode(port)?,
            qpn: u32::from_le_bytes([a, b, c, d]),
            wake: u32::from_le_bytes([e, f, g, h]),
        })
    }
}

#[derive(Debug)]
struct OpenSoft {
    side: Side,
    detail: Detail,
    wake_self: OwnedFd,
    slot_bytes: usize,
}

impl OpenSide for OpenSoft {
    fn description(&self) -> SideDescription {
        let keys = self.side.slot_keys();
        SideDescription {
            address: keys.address,
            remote_key: keys.rkey.into(),
            bytes: self.slot_bytes as u64,
            detail: self.detail.encode(),
        }
    }

    fn join(self: Box<Self>, peer: &SideDescription) -> Result<JoinedSide, NetworkError> {
        let detail = Detail::decode(&peer.detail).ok_or_else(|| {
            let (found, expected) = (peer.detail.len(), Detail::BYTES);
            failed("join", format!("the peer's detail has {found} bytes, expected {expected}"))
        })?;
        let rkey = u32::try_from(peer.remote_key).map_err(|_| {
            failed("join", format!("the peer's key {:#x} has more than 32 bits", peer.remote_key))
        })?;
        if peer.bytes != self.slot_bytes as u64 {
            let (found, expected) = (peer.bytes, self.slot_bytes);
            return Err(failed("join", format!("a slot of {found} bytes, expected {expected}")));
        }
        let wake_peer = wake::open(detail.port.pid, detail.wake)
            .map_err(|e| failed("open the peer's wake-up pipe", e))?;
        self.side.connect(detail.port, detail.qpn).map_err(|e| failed("connect", e))?;
        let slot = self.side.slot_region();
        let endpoint = SoftEndpoint::new(
            self.side,
            peer.address,
            rkey,
            self.slot_bytes,
            wake_peer,
            self.wake_self,
        );
        Ok(JoinedSide { endpoint: AnyEndpoint::Other(Box::new(endpoint)), slot })
    }
}

/// Identifies the host and PID namespace: peers find each other's memory by process and descriptor.
fn flavour() -> io::Result<String> {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
    let namespace = std::fs::read_link("/proc/self/ns/pid")?;
    let namespace = namespace.to_string_lossy();
    let number = namespace.trim_start_matches("pid:[").trim_end_matches(']');
    // Short, because a network above it adds to it.
    let number = number.parse::<u64>().map_or_else(|_| number.to_owned(), |n| format!("{n:x}"));
    Ok(format!("{}-{number}", boot.chars().take(8).collect::<String>()))
}

fn failed(op: &'static str, detail: impl std::fmt::Display) -> NetworkError {
    NetworkError {
        network: TransportKind::SoftNic.name().to_owned(),
        op,
        code: None,
        detail: detail.to_string(),
    }
}

const MAX_STEPS: usize = 64;
const CARE_INTERVAL: Duration = Duration::from_millis(1);
