//! Makes a link of fused kernels from a joined peer: the entry in the tables of clients and servers.

use std::mem::offset_of;
use std::ptr;
use std::time::Duration;

use kernels::abi::{ClientPeer, DevicePtr, FrameGeometry, Link, PATH_IBGDA, ServerPeer};
use kernels::check::{CheckError, check_clients, check_servers};
use kernels::mlx5::{Bound, PeerHandle, QueueHandle};
use thiserror::Error;

use super::Peer;
use crate::access::{AccessError, SharedMemory};
use crate::queue::{Posters, check_peer};

/// How long kernels wait for the queues of a link, and where they say why they stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Waits {
    /// Address of a [`kernels::abi::ErrorWord`] that the posters reach, as in a client's or a server's state.
    /// Null: errors are not reported there.
    pub error: DevicePtr,
    /// Null, or the address of a u32. Its bit [`PeerConfig::peer`](super::PeerConfig::peer) ends every wait.
    pub abort_mask: DevicePtr,
    /// Limit of a single wait, in whole nanoseconds and above 0: the longest time that one dead NIC may block a
    /// kernel.
    pub timeout: Duration,
}

/// A peer cannot be a link of fused kernels.
#[derive(Debug, Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the names of the fields say enough")]
pub enum LinkError {
    /// The geometry was not made by [`FrameGeometry::new`].
    #[error("the geometry of frames: {0}; make it by `FrameGeometry::new`")]
    Geometry(CheckError),
    /// The slots are those of something else.
    #[error(
        "{whose} slot has {found} bytes, and {what} of {frames} take {expected}: open the peer on both sides \
         with `{field}` of at least that"
    )]
    Slot {
        /// This side's or the peer's.
        whose: &'static str,
        /// Requests or answers.
        what: &'static str,
        /// The geometry in words.
        frames: String,
        /// Bytes of the slot.
        found: u64,
        /// Bytes that are needed.
        expected: u64,
        field: &'static str,
    },
    /// Queues are promised to one block at a time.
    #[error(
        "the queues are for posters of one block (`Posters::OneBlock`), and fused kernels post from all of \
         theirs: open the peer with `Posters::AnyBlocks`"
    )]
    Posters,
    /// An address that kernels cannot use.
    #[error("`{field}` is {found:#x}, expected null or a multiple of {multiple}")]
    Address {
        /// Name of the address.
        field: &'static str,
        found: u64,
        /// Required alignment in bytes.
        multiple: u64,
    },
    /// A limit that ends every wait immediately, or no limit.
    #[error("`timeout` is {found:?}, expected from 1 ns to {} ns", u64::MAX)]
    Timeout { found: Duration },
    /// Kernels could not use the link.
    #[error("the peer cannot be given to kernels: {0}")]
    Handle(&'static str),
    /// The kernels' own check refuses the line of the table.
    #[error("the table of peers: {0}")]
    Table(CheckError),
    /// The structures cannot be put where kernels read them.
    #[error(transparent)]
    Access(#[from] AccessError),
}

impl Peer {
    /// The peer's number: its bit in abort masks, its name in error words, and its line in the table that
    /// kernels are given.
    #[must_use]
    pub const fn number(&self) -> u32 {
        self.config.peer
    }

    /// A client's line for this peer, which is a server: requests go over the queues, answers come into this
    /// side's slot. The kernels need `FLAG_ANY_PATH`.
    ///
    /// Valid as long as the peer, also after [`reset`](Peer::reset) and [`rejoin`](super::ResetPeer::rejoin).
    /// Another call replaces the data that kernels read, so no kernel may run meanwhile.
    ///
    /// # Errors
    /// [`LinkError`].
    pub fn server(
        &mut self,
        geometry: &FrameGeometry,
        generation: u32,
        waits: Waits,
    ) -> Result<ServerPeer, LinkError> {
        self.check_slots(
            geometry,
            [geometry.response_slot_bytes, geometry.slot_bytes],
            ["answers", "requests"],
        )?;
        let request = self.link(waits)?;
        let response = DevicePtr(self.slot.address());
        let line = ServerPeer { request, response, generation, reserved: 0 };
        check_servers(&[line]).map_err(LinkError::Table)?;
        Ok(line)
    }

    /// A server's line for this peer, which is a client: requests come into this side's slot, answers go over
    /// the queues. Otherwise as [`server`](Self::server).
    ///
    /// # Errors
    /// [`LinkError`].
    pub fn client(
        &mut self,
        geometry: &FrameGeometry,
        client_id: u64,
        generation: u32,
        waits: Waits,
    ) -> Result<ClientPeer, LinkError> {
        self.check_slots(
            geometry,
            [geometry.slot_bytes, geometry.response_slot_bytes],
            ["requests", "answers"],
        )?;
        let response = self.link(waits)?;
        let request = DevicePtr(self.slot.address());
        let line = ClientPeer { request, response, client_id, generation, reserved: 0 };
        check_clients(&[line]).map_err(LinkError::Table)?;
        Ok(line)
    }

    /// The path to the peer's slot alone, independent of the slot's content.
    ///
    /// # Errors
    /// [`LinkError`].
    pub fn link(&mut self, waits: Waits) -> Result<Link, LinkError> {
        if self.config.queue.posters != Posters::AnyBlocks {
            return Err(LinkError::Posters);
        }
        let addresses = [("error", waits.error, 8), ("abort_mask", waits.abort_mask, 4)];
        for (field, DevicePtr(found), multiple) in addresses {
            if !found.is_multiple_of(multiple) {
                return Err(LinkError::Address { field, found, multiple });
            }
        }
        let timeout_ns = u64::try_from(waits.timeout.as_nanos()).ok().filter(|ns| *ns > 0);
        let timeout_ns = timeout_ns.ok_or(LinkError::Timeout { found: waits.timeout })?;
        let error = ptr::with_exposed_provenance_mut(waits.error.0 as usize);
        let abort_mask = ptr::with_exposed_provenance(waits.abort_mask.0 as usize);
        let handle = self.handle(error, abort_mask, timeout_ns);
        if let Some(what) = check_peer(&handle) {
            return Err(LinkError::Handle(what));
        }
        let at = handle_offset(self.queues.len());
        self.table.write(at, &peer_bytes(&handle))?;
        let window = DevicePtr(self.mirror.address());
        let context = self.table.address() + at as u64;
        Ok(Link { window, context, path: PATH_IBGDA, reserved: 0 })
    }

    /// Whether this side's slot and the peer's have room for frames of `geometry`.
    fn check_slots(
        &self,
        geometry: &FrameGeometry,
        [own, theirs]: [u64; 2],
        [own_what, their_what]: [&'static str; 2],
    ) -> Result<(), LinkError> {
        let g = geometry;
        let made = FrameGeometry::new(g.hidden, g.top_k, g.dtype, g.max_tokens, g.num_frames);
        if made.map_err(LinkError::Geometry)? != *geometry {
            return Err(LinkError::Geometry(CheckError::Geometry));
        }
        let slots = [
            ("this side's", own_what, self.config.own_slot_bytes, own, "own_slot_bytes"),
            ("the peer's", their_what, self.config.peer_slot_bytes, theirs, "peer_slot_bytes"),
        ];
        for (whose, what, found, expected, field) in slots {
            let found = found as u64;
            if found < expected {
                let frames = geometry.describe();
                return Err(LinkError::Slot { whose, what, frames, found, expected, field });
            }
        }
        Ok(())
    }
}

/// Bytes that kernels read of a peer: its queues, and behind them the peer.
pub(super) const fn table_bytes(num_queues: usize) -> usize {
    handle_offset(num_queues) + size_of::<PeerHandle>()
}

const fn handle_offset(num_queues: usize) -> usize {
    num_queues * size_of::<QueueHandle>()
}

/// The structure as kernels read it.
fn peer_bytes(handle: &PeerHandle) -> [u8; size_of::<PeerHandle>()] {
    let Bound { error, abort_mask, timeout_ns } = handle.bound;
    let longs = [handle.qps, handle.mirror, handle.remote, handle.slot_bytes];
    let words = [handle.lkey, handle.rkey, handle.num_qps, handle.reserved];
    let bound =
        [error.expose_provenance() as u64, abort_mask.expose_provenance() as u64, timeout_ns];
    let mut bytes = [0; size_of::<PeerHandle>()];
    let mut at = 0;
    let mut put = |field: &[u8]| {
        bytes[at..at + field.len()].copy_from_slice(field);
        at += field.len();
    };
    longs.iter().for_each(|long| put(&long.to_ne_bytes()));
    words.iter().for_each(|word| put(&word.to_ne_bytes()));
    bound.iter().for_each(|long| put(&long.to_ne_bytes()));
    bytes
}

// The order of `peer_bytes`; 8-byte words begin at multiples of 8.
const _: () = assert!(offset_of!(PeerHandle, qps) == 0 && offset_of!(PeerHandle, mirror) == 8);
const _: () = assert!(offset_of!(PeerHandle, remote) == 16);
const _: () =
    assert!(offset_of!(PeerHandle, slot_bytes) == 24 && offset_of!(PeerHandle, lkey) == 32);
const _: () = assert!(offset_of!(PeerHandle, rkey) == 36 && offset_of!(PeerHandle, num_qps) == 40);
const _: () = assert!(offset_of!(PeerHandle, bound) == 48 && offset_of!(Bound, error) == 0);
const _: () = assert!(offset_of!(Bound, abort_mask) == 8 && offset_of!(Bound, timeout_ns) == 16);
const _: () = assert!(size_of::<QueueHandle>().is_multiple_of(align_of::<PeerHandle>()));
