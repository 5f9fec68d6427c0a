//! What a transport over a network offers to the handshake.
//!
//! A [`Network`] is one device or provider of this process, opened once. For every peer the handshake
//! asks it to [`open`](Network::open) one side of a pair, sends what that side says of itself to the
//! other ([`SideDescription`]), and has both [`join`](OpenSide::join). Transports that map the peer's
//! memory need none of this; see [`shm`](crate::backend::shm).
//!
//! ```text
//! connecting side                         listening side
//!   hello: offers (kind, flavour) ───────▶ chooses, opens its side
//!   opens its side, joins ◀─────────────── welcome: offer, region, detail
//!   ready: region, detail ───────────────▶ joins
//!   first frame ◀───────────────────────── go
//! ```

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

/// A network could not be opened, or not for this peer.
#[derive(Debug, Clone, Error)]
#[error("{network}: {op} failed: {detail}{}", code.map(|code| format!(" (code {code})")).unwrap_or_default())]
pub struct NetworkError {
    /// Which network, as people name it: `verbs mlx5_0`, `libfabric tcp;ofi_rxm`.
    pub network: String,
    /// The call or step.
    pub op: &'static str,
    /// The transport's raw code, if there is one.
    pub code: Option<i64>,
    /// What was found, what was expected, what to do.
    pub detail: String,
}

/// Where the two peers' bootstrap connection runs, as a hint for the choice of port and address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Route {
    /// This side's address.
    pub local: IpAddr,
    /// The peer's.
    pub remote: IpAddr,
}

/// One device or provider of this process.
pub trait Network: Send + Sync + Debug {
    /// Kind of the endpoints that come of it.
    fn kind(&self) -> TransportKind;

    /// What both sides must have alike beside the kind, such as the provider's name. At most
    /// [`MAX_FLAVOUR_BYTES`] of printable ASCII.
    fn flavour(&self) -> &str;

    /// Makes this side of one pair: a fresh zeroed slot, registered, with a remote key of its own, and
    /// whatever else the peer has to know. May block for milliseconds.
    ///
    /// # Errors
    /// [`NetworkError`].
    fn open(&self, layout: &SlotLayout, route: Route) -> Result<Box<dyn OpenSide>, NetworkError>;

    /// The first RDMA device in use, such as `mlx5_0`, for the choice of processors next to it.
    fn rdma_device(&self) -> Option<&str> {
        None
    }

    /// Whether kernels can reach slots of this network.
    fn carries_device_slots(&self) -> bool {
        false
    }

    /// Layout of the hosts' slots where there are device slots. Both sides come to the same. By default they
    /// hold either side's device slot, and apart from it a control tail.
    ///
    /// # Errors
    /// [`SlotConfigError`] when they are too large.
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

    /// As [`open`](Self::open), with a slot that `device`'s kernels read. The layout is that of
    /// [`device_layout`](Self::device_layout).
    ///
    /// # Errors
    /// [`NetworkError`], also where the network cannot do it.
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

/// This side of a pair before the peer's is known. Dropping it frees everything.
pub trait OpenSide: Send + Debug {
    /// What the peer must know.
    fn description(&self) -> SideDescription;

    /// Joins with the peer's side. May block for milliseconds; never on the peer.
    ///
    /// # Errors
    /// [`NetworkError`], also when the peer's bytes make no sense.
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

/// One side of a pair, with device slots or without.
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

/// A joined pair.
#[derive(Debug)]
pub struct JoinedSide {
    /// Towards the peer's slot.
    pub endpoint: AnyEndpoint,
    /// This side's slot. The endpoint keeps it registered, and revokes the peer's key when dropped.
    pub slot: Region,
}

/// What one side says of itself.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SideDescription {
    /// Address of the slot as the peer must give it to the transport.
    pub address: u64,
    /// Remote key of the slot. Never a local key.
    pub remote_key: u64,
    /// Bytes of the slot.
    pub bytes: u64,
    /// Whatever the transport needs, at most [`MAX_DETAIL_BYTES`].
    pub detail: Vec<u8>,
}

/// A transport that one side offers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Offer {
    /// Kind.
    pub kind: TransportKind,
    /// As [`Network::flavour`]; empty where the kind says it all.
    pub flavour: String,
}

impl Offer {
    /// Offer of a kind that has no flavours.
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

/// What a side with these settings offers, the best first: `kinds` in their order, and of each network
/// kind every network there is. Without device slots, not what joins nothing else.
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

/// The network behind an offer.
pub(crate) fn network_of<'a>(
    offer: &Offer,
    networks: &'a [Arc<dyn Network>],
) -> Option<&'a Arc<dyn Network>> {
    networks
        .iter()
        .find(|network| network.kind() == offer.kind && network.flavour() == offer.flavour)
}
