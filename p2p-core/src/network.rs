//! The part of the handshake that a transport over a network implements.
//!
//! A [`Network`] is one device or provider of this process, opened once. For every peer the
//! handshake asks it to [`open`](Network::open) one side of a pair. It sends the description of
//! that side to the peer ([`SideDescription`]), and both sides [`join`](OpenSide::join). Transports
//! that map the peer's memory need none of this; see [`shm`](crate::backend::shm).
//!
//! ```text
//! connecting side                         listening side
//!   hello: offers (kind, flavour) ───────▶ chooses, opens its side
//!   opens its side, joins ◀─────────────── welcome: offer, region, detail
//!   ready: region, detail ───────────────▶ joins
//!   first frame ◀───────────────────────── go
//! ```

use std::any::{Any, type_name};
use std::fmt::Debug;
use std::net::IpAddr;
use std::sync::Arc;

use thiserror::Error;

use crate::device::{DeviceMemory, DeviceSlots};
use crate::endpoint::{Endpoint, TransportKind};
use crate::region::Region;
use crate::slot::{CONTROL_BYTES, SlotConfig, SlotConfigError, SlotLayout};
use crate::transport::AnyEndpoint;

/// Longest [`SideDescription::detail`] in bytes.
pub const MAX_DETAIL_BYTES: usize = 1024;
/// Longest [`Network::flavour`] in bytes.
pub const MAX_FLAVOUR_BYTES: usize = 32;

/// A network could not be opened, either at all or for this peer.
#[derive(Debug, Clone, Error)]
#[error("{network}: {op} failed: {detail}{}", code.map(|code| format!(" (code {code})")).unwrap_or_default())]
pub struct NetworkError {
    /// Name of the network, for people: `verbs mlx5_0`, `libfabric tcp;ofi_rxm`.
    pub network: String,
    /// The call or step.
    pub op: &'static str,
    /// The transport's raw code, if there is one.
    pub code: Option<i64>,
    /// The value found, the value expected, and a remedy.
    pub detail: String,
}

/// Addresses of the peers' bootstrap connection, as a hint for the choice of port and address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Route {
    /// This side's address.
    pub local: IpAddr,
    /// The peer's.
    pub remote: IpAddr,
}

/// One device or provider of this process.
pub trait Network: Send + Sync + Debug {
    /// Kind of its endpoints.
    fn kind(&self) -> TransportKind;

    /// Property that must be equal on both sides beside the kind, such as the provider's name. At
    /// most [`MAX_FLAVOUR_BYTES`] of printable ASCII.
    fn flavour(&self) -> &str;

    /// Makes this side of one pair: a fresh zeroed slot, registered, with a remote key of its own,
    /// and everything else that the peer needs. May block for milliseconds.
    ///
    /// # Errors
    /// [`NetworkError`].
    fn open(&self, layout: &SlotLayout, route: Route) -> Result<Box<dyn OpenSide>, NetworkError>;

    /// The first RDMA device in use, such as `mlx5_0`. It helps to choose processors close to the
    /// device.
    fn rdma_device(&self) -> Option<&str> {
        None
    }

    /// Tells whether kernels can reach slots of this network.
    fn carries_device_slots(&self) -> bool {
        false
    }

    /// Layout of the host slots beside device slots. Both sides compute the same one. By default a
    /// host slot has room for either side's device slot, and for a control tail of its own.
    ///
    /// # Errors
    /// [`SlotConfigError`] if the slots are too large.
    fn device_layout(
        &self,
        device: &dyn DeviceMemory,
        num_frames: usize,
    ) -> Result<SlotLayout, SlotConfigError> {
        let most = device.own_slot_bytes().max(device.peer_slot_bytes());
        let bytes = usize::try_from(most).unwrap_or(usize::MAX);
        let slot_bytes = bytes.checked_next_multiple_of(CONTROL_BYTES).unwrap_or(usize::MAX);
        let slot_bytes = slot_bytes.saturating_add(CONTROL_BYTES);
        SlotLayout::new(SlotConfig { slot_bytes, num_frames })
    }

    /// As [`open`](Self::open), with a slot that kernels of `device` read. The layout is that of
    /// [`device_layout`](Self::device_layout).
    ///
    /// # Errors
    /// [`NetworkError`], also if the network does not support it.
    fn open_device(
        &self,
        layout: &SlotLayout,
        route: Route,
        device: &dyn DeviceMemory,
    ) -> Result<Box<dyn OpenSide>, NetworkError> {
        let _ = (layout, route, device);
        Err(no_device_slots(self.kind()))
    }
}

impl dyn DeviceMemory + '_ {
    /// The concrete description, for a network that carries slots of this kind of device only.
    ///
    /// # Errors
    /// [`NetworkError`] when the memory belongs to another kind of device.
    pub fn downcast_for<T: Any>(&self, network: &str) -> Result<&T, NetworkError> {
        self.as_any().downcast_ref().ok_or_else(|| NetworkError {
            network: network.to_owned(),
            op: "open device slots",
            code: None,
            detail: format!("expected {}, found other device memory", type_name::<T>()),
        })
    }
}

/// This side of a pair before the peer's is known. Dropping it frees everything.
pub trait OpenSide: Send + Debug {
    /// Describes this side to the peer.
    fn description(&self) -> SideDescription;

    /// Joins with the peer's side. May block for milliseconds, but never on the peer.
    ///
    /// # Errors
    /// [`NetworkError`], also if the peer's bytes make no sense.
    fn join(self: Box<Self>, peer: &SideDescription) -> Result<JoinedSide, NetworkError>;

    /// As [`join`](Self::join), for a side of [`Network::open_device`].
    ///
    /// # Errors
    /// [`NetworkError`].
    fn join_device(
        self: Box<Self>,
        peer: &SideDescription,
    ) -> Result<(JoinedSide, DeviceSlots), NetworkError> {
        let kind = self.join(peer)?.endpoint.kind();
        Err(no_device_slots(kind))
    }
}

fn no_device_slots(kind: TransportKind) -> NetworkError {
    let detail = "kernels cannot reach slots of this network: it needs a proxy".to_owned();
    NetworkError { network: kind.name().to_owned(), op: "open device slots", code: None, detail }
}

/// One side of a pair before it is joined, with device slots or without.
pub(crate) struct HandshakeSide {
    side: Box<dyn OpenSide>,
    has_device: bool,
}

impl HandshakeSide {
    pub(crate) fn open(
        network: &dyn Network,
        layout: &SlotLayout,
        route: Route,
        device: Option<&dyn DeviceMemory>,
    ) -> Result<Self, NetworkError> {
        let side = match device {
            Some(device) => network.open_device(layout, route, device)?,
            None => network.open(layout, route)?,
        };
        Ok(Self { side, has_device: device.is_some() })
    }

    pub(crate) fn description(&self) -> SideDescription {
        self.side.description()
    }

    pub(crate) fn join(
        self,
        peer: &SideDescription,
    ) -> Result<(JoinedSide, Option<DeviceSlots>), NetworkError> {
        if self.has_device {
            return self.side.join_device(peer).map(|(joined, pair)| (joined, Some(pair)));
        }
        self.side.join(peer).map(|joined| (joined, None))
    }
}

/// One side of a pair after it is joined.
#[derive(Debug)]
pub struct JoinedSide {
    /// Reaches the peer's slot.
    pub endpoint: AnyEndpoint,
    /// This side's slot. The endpoint keeps it registered, and revokes the peer's key when dropped.
    pub slot: Region,
}

/// One side's description of itself, as the peer needs it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SideDescription {
    /// Address of the slot, as the peer must give it to the transport.
    pub address: u64,
    /// Remote key of the slot. Never a local key.
    pub remote_key: u64,
    /// Bytes of the slot.
    pub bytes: u64,
    /// Further data of the transport, at most [`MAX_DETAIL_BYTES`].
    pub detail: Vec<u8>,
}

/// A transport that one side offers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Offer {
    /// Kind.
    pub kind: TransportKind,
    /// As [`Network::flavour`]; empty for kinds without flavours.
    pub flavour: String,
}

impl Offer {
    /// Makes the offer of a kind without flavours.
    #[must_use]
    pub const fn plain(kind: TransportKind) -> Self {
        Self { kind, flavour: String::new() }
    }
}

impl std::fmt::Display for Offer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.kind.name())?;
        if !self.flavour.is_empty() {
            write!(f, ":{}", self.flavour)?;
        }
        Ok(())
    }
}

/// Lists the offers of a side with these settings, the best first. They follow the order of
/// `kinds`, and a network kind becomes one offer for each of its networks. Without device memory,
/// kinds that join only device slots are left out.
pub(crate) fn offers(
    kinds: &[TransportKind],
    networks: &[Arc<dyn Network>],
    has_device: bool,
) -> Vec<Offer> {
    let mut offers = Vec::with_capacity(kinds.len());
    let is_usable = |network: &&Arc<dyn Network>| {
        let flavour = network.flavour();
        let is_usable = flavour.len() <= MAX_FLAVOUR_BYTES
            && flavour.bytes().all(|byte| byte.is_ascii_graphic());
        if !is_usable {
            tracing::error!(flavour, "not offered: its flavour is not short printable ASCII");
        }
        is_usable
    };
    for kind in kinds.iter().filter(|kind| has_device || !kind.needs_device()) {
        if kind.is_network() {
            let of_kind = networks.iter().filter(|network| network.kind() == *kind);
            let of_kind = of_kind.filter(is_usable);
            offers.extend(
                of_kind.map(|network| Offer { kind: *kind, flavour: network.flavour().to_owned() }),
            );
        } else {
            offers.push(Offer::plain(*kind));
        }
    }
    offers
}

/// Finds the network behind an offer.
pub(crate) fn network_of<'a>(
    offer: &Offer,
    networks: &'a [Arc<dyn Network>],
) -> Option<&'a Arc<dyn Network>> {
    networks
        .iter()
        .find(|network| network.kind() == offer.kind && network.flavour() == offer.flavour)
}
