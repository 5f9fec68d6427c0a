//! Place of slots of kernels: preferably the GPU's memory, otherwise page-locked memory of the host, through PCIe.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ibgda::{Access, GpuAccess, Nic, NicError, OpenPeer, PeerConfig, PeerError, Place};
use kernels::gpu::{DeviceName, Gpu, GpuError};
use thiserror::Error;

/// Place of own slots and mirrors. Each side chooses independently.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum SlotPlace {
    /// The GPU's memory, or the host's where the NIC cannot have it, which is logged.
    #[default]
    Auto,
    /// The GPU's memory, or an error.
    Gpu,
    /// Page-locked memory of the host.
    Host,
}

impl SlotPlace {
    /// Name, as [`FromStr`] reads it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Gpu => "gpu",
            Self::Host => "host",
        }
    }
}

impl fmt::Display for SlotPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A text that is not the name of a place.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("`{found}` is not a place of slots: expected auto, gpu or host")]
pub struct ParsePlaceError {
    /// Value found.
    pub found: String,
}

impl FromStr for SlotPlace {
    type Err = ParsePlaceError;

    fn from_str(text: &str) -> Result<Self, ParsePlaceError> {
        let places = [Self::Auto, Self::Gpu, Self::Host];
        let found = places.into_iter().find(|place| place.name() == text);
        found.ok_or_else(|| ParsePlaceError { found: text.to_owned() })
    }
}

/// Queues and slots cannot be made.
#[derive(Debug, Error)]
pub(crate) enum PlaceError {
    #[error("{0}")]
    Peer(#[from] PeerError),
    #[error("whether {gpu} keeps the order of a NIC's writes: {source}")]
    Gpu { gpu: DeviceName, source: GpuError },
    /// It would take the GPU's addresses for the processor's.
    #[error(
        "a NIC in software reaches no memory of {gpu}: its slots can lie in the host's memory only"
    )]
    Software { gpu: DeviceName },
    /// Flags could become visible before the data that they announce.
    #[error(
        "kernels of {gpu} do not see what a NIC writes into its memory in order \
         (CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING): its slots can lie in the host's memory only"
    )]
    Order { gpu: DeviceName },
}

impl PlaceError {
    /// Whether slots in the host's memory would avoid the problem.
    const fn is_of_place(&self) -> bool {
        matches!(
            self,
            Self::Gpu { .. }
                | Self::Software { .. }
                | Self::Order { .. }
                | Self::Peer(PeerError::Nic(NicError::GpuMemory { .. }))
        )
    }
}

/// Places that slots of a network have had. Each is logged once, since a later pair may use another place than the
/// first.
#[derive(Debug, Default)]
pub(crate) struct LoggedPlaces {
    gpu: AtomicBool,
    host: AtomicBool,
}

/// The poster, and the place of slots.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Parties<'a> {
    pub(crate) nic: &'a Arc<Nic>,
    pub(crate) gpu: &'a Gpu,
    /// Pages that the NIC reaches, if it is one in software.
    pub(crate) pages: Option<&'a Arc<dyn Access>>,
}

/// Makes queues and slots. Logs their place once for each network and place, with the reason if it is not the
/// GPU's memory.
pub(crate) fn open(
    parties: Parties<'_>,
    config: PeerConfig,
    wish: SlotPlace,
    logged: &LoggedPlaces,
) -> Result<OpenPeer, PlaceError> {
    open_in_order(parties, config, wish, logged, || check_order(parties.gpu))
}

/// `order` returns whether kernels see the NIC's writes in order.
fn open_in_order(
    parties: Parties<'_>,
    config: PeerConfig,
    wish: SlotPlace,
    logged: &LoggedPlaces,
    order: impl FnOnce() -> Result<(), PlaceError>,
) -> Result<OpenPeer, PlaceError> {
    let Parties { nic, gpu, .. } = parties;
    let at = |place| Ok(OpenPeer::open(nic, &access(parties, place), config)?);
    let in_gpu = || {
        check_reach(parties)?;
        order().and_then(|()| at(Place::Gpu))
    };
    let is_first = |logged: &AtomicBool| !logged.swap(true, Ordering::Relaxed);
    let (device, name) = (nic.name(), gpu.name());
    match wish {
        SlotPlace::Host => at(Place::Host),
        SlotPlace::Gpu => in_gpu(),
        SlotPlace::Auto => match in_gpu() {
            Err(error) if error.is_of_place() => {
                let opened = at(Place::Host)?;
                if is_first(&logged.host) {
                    tracing::warn!(nic = device, gpu = %name, %error, "slots lie in page-locked memory of the host, not in the GPU's");
                }
                Ok(opened)
            }
            opened => {
                if opened.is_ok() && is_first(&logged.gpu) {
                    tracing::info!(nic = device, gpu = %name, "slots lie in the GPU's memory");
                }
                opened
            }
        },
    }
}

fn check_reach(Parties { gpu, pages, .. }: Parties<'_>) -> Result<(), PlaceError> {
    match gpu.name() {
        DeviceName::Cuda(_) if pages.is_some() => Err(PlaceError::Software { gpu: gpu.name() }),
        _ => Ok(()),
    }
}

fn check_order(gpu: &Gpu) -> Result<(), PlaceError> {
    match gpu.orders_writes_of_nics() {
        Ok(true) => Ok(()),
        Ok(false) => Err(PlaceError::Order { gpu: gpu.name() }),
        Err(source) => Err(PlaceError::Gpu { gpu: gpu.name(), source }),
    }
}

/// Queues are in the host's memory wherever slots lie: libibverbs makes them there.
fn access(parties: Parties<'_>, slots: Place) -> Arc<dyn Access> {
    let access = GpuAccess::new(parties.gpu.clone(), Place::Host).with_slots(slots);
    Arc::new(match (parties.pages, parties.gpu.name()) {
        (Some(pages), _) => access.with_software_nic().with_pages(Arc::clone(pages)),
        // A GPU in software uses no other NIC.
        (None, DeviceName::Emulated(_)) => access.with_software_nic(),
        (None, DeviceName::Cuda(_)) => access,
    })
}

#[cfg(test)]
mod tests {
    use ibgda::{NicConfig, QueueConfig};

    use super::*;

    #[test]
    fn a_gpu_that_sees_writes_out_of_order_has_its_slots_in_the_memory_of_the_host() {
        let libraries = softnic_verbs::libraries().unwrap();
        let config = NicConfig { gid_idx: Some(0), ..NicConfig::default() };
        let nic = Nic::open(&libraries, &config).unwrap();
        let gpu = Gpu::open_emulated(0).unwrap();
        let queue = QueueConfig { depth: 128, ..QueueConfig::default() };
        let (own_slot_bytes, peer_slot_bytes) = (4096, 4096);
        let config = PeerConfig { peer: 0, num_queues: 1, queue, own_slot_bytes, peer_slot_bytes };
        let open = |wish, is_in_order: bool| {
            let order = || {
                if is_in_order { Ok(()) } else { Err(PlaceError::Order { gpu: gpu.name() }) }
            };
            let free_bytes = gpu.free_bytes().unwrap();
            let opened = open_in_order(
                Parties { nic: &nic, gpu: &gpu, pages: None },
                config,
                wish,
                &LoggedPlaces::default(),
                order,
            )?;
            // Counts and handles are there wherever slots lie, and a GPU's memory is allocated in pieces.
            assert!(free_bytes - gpu.free_bytes().unwrap() >= 2 << 20);
            let is_in_gpu = opened.slot().is_on_gpu();
            drop(opened);
            assert_eq!(gpu.free_bytes().unwrap(), free_bytes);
            Ok::<_, PlaceError>(is_in_gpu)
        };
        assert!(open(SlotPlace::Auto, true).unwrap());
        assert!(open(SlotPlace::Gpu, true).unwrap());
        assert!(!open(SlotPlace::Auto, false).unwrap());
        assert!(!open(SlotPlace::Host, false).unwrap());
        let text = open(SlotPlace::Gpu, false).unwrap_err().to_string();
        for part in ["emulated:0", "CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING", "host's"]
        {
            assert!(text.contains(part), "{part}: {text}");
        }
    }

    #[test]
    fn places_are_read_by_their_names() {
        for place in [SlotPlace::Auto, SlotPlace::Gpu, SlotPlace::Host] {
            assert_eq!(place.to_string().parse(), Ok(place));
        }
        let error = "GPU".parse::<SlotPlace>().unwrap_err();
        assert_eq!(error.to_string(), "`GPU` is not a place of slots: expected auto, gpu or host");
    }
}
