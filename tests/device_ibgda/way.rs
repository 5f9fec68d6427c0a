//! The way to servers under test: requests that kernels post by themselves, to NICs in software behind the
//! calls of libibverbs and libmlx5. Hosts are joined by the NIC model as a transport.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use ibgda::{Nic, NicConfig, QueueConfig, QueuePath};
use ibgda_network::{DeviceConfig, DeviceNetwork, SlotPlace};
use kernels::abi::DevicePtr;
use kernels::gpu::{DeviceName, Gpu};
use p2p_core::network::Network;
use p2p_core::{TransportKind, Transports};
use softnic::SoftNetwork;
use softnic::format::Syndrome;
use softnic_verbs::SharedPages;

use crate::rig::PATIENCE;

/// Counts from here: the requests that the NIC of the process had executed before.
#[derive(Debug, Clone, Copy)]
pub struct Carrier(u64);

/// Memory of the slots.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// As the command has it.
    Auto,
    Host,
    /// As the command has it, on a host whose NIC cannot have a GPU's memory.
    Refused,
}

/// Sets the memory of slots, for servers started from now on and for this process.
pub fn place(servers: Place, clients: Place) {
    *PLACES.lock().unwrap_or_else(PoisonError::into_inner) = [servers, clients];
}

/// Settings of the path, for servers.
pub fn variables() -> Vec<(&'static str, String)> {
    let [servers, _] = *PLACES.lock().unwrap_or_else(PoisonError::into_inner);
    vec![(SLOTS, format!("{servers:?}"))]
}

/// Of this process.
fn own_place() -> Place {
    match std::env::var(SLOTS).as_deref() {
        Ok("Auto") => Place::Auto,
        Ok("Host") => Place::Host,
        Ok("Refused") => Place::Refused,
        Ok(other) => panic!("{SLOTS} is {other}"),
        Err(_) => PLACES.lock().unwrap_or_else(PoisonError::into_inner)[1],
    }
}

/// Whether GPUs are none in software. Their memory is out of the reach of a NIC that is.
pub fn is_on_cuda() -> bool {
    matches!(crate::rig::devices(), Some((DeviceName::Cuda(_), _)))
}

/// Memory that one GPU reaches and another does not is a GPU's.
fn is_on_a_gpu(address: u64) -> bool {
    let is_known = |ordinal| {
        let gpu = Gpu::open_emulated(ordinal).expect("a GPU in software");
        gpu.is_registered(DevicePtr(address))
    };
    is_known(0) != is_known(1)
}

/// Refuses nothing, and counts what is asked for of GPUs.
fn noted(address: u64) -> bool {
    NUM_OF_GPUS.fetch_add(u32::from(is_on_a_gpu(address)), Ordering::Relaxed);
    false
}

/// Registrations of GPUs' memory for clients, which are in this process.
pub fn num_registrations_of_gpus() -> u32 {
    NUM_OF_GPUS.load(Ordering::Relaxed)
}

/// The network under test, opened anew for every party.
#[allow(clippy::unnecessary_wraps, reason = "other ways are not on every host")]
pub fn network() -> Option<Arc<dyn Network>> {
    let libraries = softnic_verbs::libraries().expect("functions");
    // A NIC in software is in no list of addresses.
    let config = NicConfig { gid_idx: Some(0), ..NicConfig::default() };
    let nic = Nic::open(&libraries, &config).expect("a NIC");
    let inner = SoftNetwork::open(softnic::NicConfig::default()).expect("a NIC in software");
    let path = match std::env::var("SWITCHYARD_TEST_QUEUES").as_deref() {
        Ok("devx") => QueuePath::Devx,
        Ok("plain") | Err(_) => QueuePath::Plain,
        Ok(other) => panic!("SWITCHYARD_TEST_QUEUES is {other}, not plain or devx"),
    };
    // Shallow, so that queues wrap and fill, and few, so that blocks share them.
    let queue = QueueConfig { path, depth: 128, ..QueueConfig::default() };
    let place = own_place();
    let refused: fn(u64) -> bool = match place {
        Place::Refused => is_on_a_gpu,
        Place::Auto | Place::Host => noted,
    };
    softnic_verbs::refuse_memory(Some(refused));
    let slots =
        if place == Place::Host || is_on_cuda() { SlotPlace::Host } else { SlotPlace::Auto };
    let config = DeviceConfig { num_queues: 3, queue, slots, wait_limit: PATIENCE };
    let network = DeviceNetwork::new(Arc::new(inner), nic, config);
    Some(Arc::new(network.over_software_nic(Arc::new(SharedPages))))
}

/// The network alone: there is no other way.
pub fn reach(network: Arc<dyn Network>) -> (Transports, Carrier) {
    let (kinds, networks) = (vec![TransportKind::Ibgda], vec![network]);
    (Transports { kinds, networks, missing: Vec::new() }, Carrier(num_requests()))
}

/// Requests that the NIC has executed since.
pub fn num_carried(carrier: &Carrier) -> u64 {
    num_requests() - carrier.0
}

fn num_requests() -> u64 {
    softnic_verbs::nic().expect("a NIC").lock().num_requests()
}

/// Does something to the NIC of this process: `queues` says which queue pairs there are, `stall` and `fail`
/// are for those named behind it. A failed one says that the peer acknowledged nothing.
pub fn control(order: &str) -> String {
    let (what, whom) = order.split_once(' ').unwrap_or((order, ""));
    for qpn in whom.split_whitespace().map(|qpn| qpn.parse().expect("a queue pair")) {
        let done = match what {
            "stall" => softnic_verbs::stall(qpn),
            "fail" => softnic_verbs::fail(qpn, 0, Syndrome::RetryExceeded),
            _ => panic!("`{order}` is no order"),
        };
        done.expect("a queue pair");
    }
    let known = softnic_verbs::nic().expect("a NIC").lock().queue_pairs();
    known.iter().map(u32::to_string).collect::<Vec<_>>().join(" ")
}

static NUM_OF_GPUS: AtomicU32 = AtomicU32::new(0);
/// Of servers and of this process.
static PLACES: Mutex<[Place; 2]> = Mutex::new([Place::Auto; 2]);
const SLOTS: &str = "SWITCHYARD_TEST_SLOTS";
