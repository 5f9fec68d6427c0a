//! Peers over libfabric: `tcp;ofi_rxm` on any network, `shm` on one host, and `verbs;ofi_rxm`,
//! `efa` and `cxi` on hosts with that hardware.
//!
//! The library is opened at run time: [`LIBRARY_VARIABLE`], then `libfabric.so.1`. A host without
//! it reports that in one line and offers its other transports.
//!
//! | layer | files |
//! |---|---|
//! | sys | `sys` (structures, tables of functions), `load` (symbols) |
//! | owner | `owner` (objects that close themselves), `fi_endpoint` (one endpoint), `port` (with its queue and addresses) |
//! | safe | `device` (the driver, shared by all pairs), `library_thread` (the only caller of some providers), `table` (a device's pairs), `link` (one pair), `outbox` (its queued operations), `endpoint` |
//!
//! `docs/explanation/memory-model.md` describes how the ordering contract is kept without any
//! promise of the provider about writes and messages.
//!
//! Threads can sleep on a queue's descriptor, and every packet makes a report to its epoll set.
//! With [`WAIT_VARIABLE`] set to `poll`, queues have no descriptor. Round trips over `tcp;ofi_rxm`
//! get shorter then. A waiting thread polls instead, at intervals of a hundredth of the time since
//! the last arrival and at most 2 ms.
//!
//! Not here: discovery, and any choice between providers. The caller of [`FabricNetwork::open`]
//! names one.

mod detail;
mod device;
mod endpoint;
mod fi_endpoint;
#[cfg(fuzzing)]
pub mod fuzzing;
mod lazy;
mod library_thread;
mod link;
mod load;
mod mailbox;
mod outbox;
mod owner;
mod port;
mod prefault;
mod queue;
mod receives;
mod rma;
mod rxm;
mod service;
mod sys;
mod table;
mod wait_mode;

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

pub use endpoint::LibfabricEndpoint;
pub use load::{LIBRARY_VARIABLE, LoadError};
pub use rma::LibfabricFabric;
pub use wait_mode::WAIT_VARIABLE;

use detail::Detail;
use device::Device;
use endpoint::Lease;
use lazy::LazyDefault;
use library_thread::{Timeouts, UserGuard};
use link::RemoteEndpoint;
use load::Library;
use p2p_core::counted::{inbound, message};
use p2p_core::endpoint::TransportKind;
use p2p_core::fabric::FabricOpener;
use p2p_core::network::{JoinedSide, Network, NetworkError, OpenSide, Route, SideDescription};
use p2p_core::slot::{SlotLayout, WAITING};
use p2p_core::transport::AnyEndpoint;
use p2p_core::transports::NetworkOpener;

/// Provider that works between any two hosts.
pub const DEFAULT_PROVIDER: &str = "tcp;ofi_rxm";

/// Names of this host's providers that can carry a slot, in the library's order of preference.
///
/// # Errors
/// [`LoadError`] if there is no library.
pub fn providers() -> Result<Vec<String>, LoadError> {
    Ok(port::providers(Library::get()?))
}

/// Why `provider` is refused in this environment although this host has it. `None` if it is not.
#[must_use]
pub fn refusal(provider: &str) -> Option<String> {
    rxm::refusal(provider)
}

/// Opens libfabric for slots: `libfabric` or `libfabric:PROVIDER`. `auto` opens the default
/// provider only when the first peer needs it, because the library's search for providers can take
/// seconds.
#[must_use]
pub fn opener() -> NetworkOpener {
    NetworkOpener::new(TransportKind::Libfabric, |provider, _| {
        let network = FabricNetwork::open(provider.unwrap_or(DEFAULT_PROVIDER))?;
        Ok(vec![Arc::new(network) as Arc<dyn Network>])
    })
    .lazy_in_auto(|| Arc::new(LazyDefault::default()))
}

/// Opens libfabric for the message engine: `libfabric` or `libfabric:PROVIDER`.
#[must_use]
pub fn fabric_opener() -> FabricOpener {
    FabricOpener {
        name: "libfabric",
        argument: "PROVIDER",
        open: |provider, local| {
            let provider = provider.unwrap_or(DEFAULT_PROVIDER);
            Ok(Box::new(LibfabricFabric::open(provider, local)?))
        },
    }
}

/// One provider of this process. It opens an endpoint per local address, when the first peer needs
/// it.
#[derive(Debug)]
pub struct FabricNetwork {
    provider: String,
    is_ip: bool,
    /// Bounds for providers whose calls may never return.
    timeouts: Timeouts,
    devices: Mutex<HashMap<Option<IpAddr>, OpenDevice>>,
}

/// A device that may get further pairs.
#[derive(Debug)]
struct OpenDevice {
    // Dropped before the guard.
    device: Arc<Device>,
    _user: UserGuard,
}

impl FabricNetwork {
    /// Finds `provider`, such as `tcp;ofi_rxm` (short: `tcp`), `shm` or `verbs;ofi_rxm`.
    ///
    /// # Errors
    /// [`NetworkError`] if there is no library or no such provider; it names the providers that it
    /// found.
    pub fn open(provider: &str) -> Result<Self, NetworkError> {
        let (info, _) = port::find(library()?, provider, None)?;
        let entry = info.first();
        let is_ip = matches!(
            entry.address_format(),
            sys::FI_SOCKADDR | sys::FI_SOCKADDR_IN | sys::FI_SOCKADDR_IN6
        );
        let timeouts = Timeouts::DEFAULT;
        Ok(Self { provider: entry.provider(), is_ip, timeouts, devices: Mutex::default() })
    }

    /// Name of the provider.
    #[must_use]
    pub fn provider(&self) -> &str {
        &self.provider
    }

    fn device(&self, route: Route) -> Result<Arc<Device>, NetworkError> {
        let local = self.is_ip.then(|| route.local.to_canonical());
        let mut devices = lock(&self.devices);
        // The pairs of a stuck device are lost, but new pairs can use a new device.
        if let Some(open) = devices.get(&local).filter(|open| !open.device.is_stuck()) {
            return Ok(Arc::clone(&open.device));
        }
        let library = library()?;
        let found = port::find(library, &self.provider, local)?;
        let device = Device::open(library, found, self.timeouts)?;
        let _user = UserGuard::first(device.library_thread());
        devices.insert(local, OpenDevice { device: Arc::clone(&device), _user });
        Ok(device)
    }
}

impl Network for FabricNetwork {
    fn kind(&self) -> TransportKind {
        TransportKind::Libfabric
    }

    fn flavour(&self) -> &str {
        &self.provider
    }

    fn open(&self, layout: &SlotLayout, route: Route) -> Result<Box<dyn OpenSide>, NetworkError> {
        let device = self.device(route)?;
        let lease = device.add(layout.slot_bytes(), layout.control_offset(WAITING))?;
        Ok(Box::new(Side { lease, layout: *layout }))
    }
}

/// This side of a pair before the peer's side is known.
#[derive(Debug)]
struct Side {
    lease: Lease,
    layout: SlotLayout,
}

impl OpenSide for Side {
    fn description(&self) -> SideDescription {
        let Lease { device, link, slot, .. } = &self.lease;
        let traits = device.port().traits();
        let detail = Detail {
            slot: link.id,
            max_message_bytes: device.max_message_bytes() as u32,
            counts_writes: traits.counts_writes,
            token: link.token,
            mail: link.mail,
            address: device.port().endpoint().name().to_vec(),
        };
        SideDescription {
            address: slot.as_ref().map_or(0, |slot| slot.base),
            remote_key: slot.as_ref().map_or(0, port::MemoryRegistration::key),
            bytes: self.layout.slot_bytes() as u64,
            detail: detail.encode(),
        }
    }

    fn join(self: Box<Self>, peer: &SideDescription) -> Result<JoinedSide, NetworkError> {
        let Self { lease, layout } = *self;
        let device = Arc::clone(&lease.device);
        let provider = &device.port().traits().provider;
        let failed = |detail: String| NetworkError {
            network: format!("libfabric {provider}"),
            op: "join",
            code: None,
            detail,
        };
        if peer.bytes != layout.slot_bytes() as u64 {
            return Err(failed(format!(
                "the peer's slot has {} bytes, expected {}",
                peer.bytes,
                layout.slot_bytes()
            )));
        }
        if peer.address.checked_add(peer.bytes).is_none() {
            return Err(failed(format!("the peer's slot at {:#x} leaves memory", peer.address)));
        }
        let detail = Detail::decode(&peer.detail).map_err(|error| failed(error.to_string()))?;
        let counts_writes = detail.counts_writes && device.port().traits().counts_writes;
        let remote = RemoteEndpoint {
            peer: device.locate(&lease.link, &detail.address)?,
            id: detail.slot,
            token: detail.token,
            address: peer.address,
            key: peer.remote_key,
            slot_bytes: layout.slot_bytes(),
            mail: detail.mail,
            counts_writes,
        };
        lease.link.join(remote.clone());
        let max_message_bytes = device.max_message_bytes().min(detail.max_message_bytes as usize);
        let slot = lease.link.slot.clone();
        let endpoint = LibfabricEndpoint::new(lease, remote, max_message_bytes);
        Ok(JoinedSide { endpoint: AnyEndpoint::Other(Box::new(endpoint)), slot })
    }
}

fn library() -> Result<&'static Library, NetworkError> {
    Library::get().map_err(|error| NetworkError {
        network: "libfabric".to_owned(),
        op: "load",
        code: None,
        detail: error.to_string(),
    })
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // No code that holds the lock can leave the table half changed.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
