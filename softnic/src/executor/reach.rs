//! Checks of the memory that a request may reach: memory of this side by its key, and the peer and its memory by
//! the tables that the peer publishes.

use std::sync::atomic::Ordering;

use crate::format::{Local, Remote, Syndrome};
use crate::nic::{Memory, Nic, Qp};
use crate::port::{self, Access, MemoryPin, Peer, state};

impl Nic {
    pub(super) fn local(
        &self,
        qp: &Qp,
        wanted: &Local,
        access: Access,
    ) -> Result<*mut u8, Syndrome> {
        local(&self.memory, qp.domain, wanted, access)
    }

    /// The peer that `qp` talks to, if it answers and permits access to `remote`.
    pub(super) fn peer(
        &mut self,
        qp: &Qp,
        remote: &Remote,
        num_bytes: u64,
    ) -> Result<(usize, u32), Syndrome> {
        let (index, qpn) = qp.remote.ok_or(Syndrome::RetryExceeded)?;
        let peer = self.peers.get_mut(index).and_then(Option::as_mut);
        let peer = peer.ok_or(Syndrome::RetryExceeded)?;
        if !peer.is_alive() {
            return Err(Syndrome::RetryExceeded);
        }
        let range = remote.address..remote.address.saturating_add(num_bytes.max(1));
        let is_failing =
            |failing: &std::ops::Range<u64>| failing.start < range.end && range.start < failing.end;
        if let Some((_, how)) = qp.failing_ranges.iter().find(|(failing, _)| is_failing(failing)) {
            return Err(*how);
        }
        if num_bytes != 0 {
            peer.prepare(remote.rkey);
        }
        let entry = remote_entry(&self.peers, (index, qpn)).ok_or(Syndrome::RetryExceeded)?;
        let is_ready = entry.state.load(Ordering::Acquire) == state::READY
            && entry.peer_qpn.load(Ordering::Relaxed) == qp.qpn;
        if is_ready { Ok((index, qpn)) } else { Err(Syndrome::RetryExceeded) }
    }
}

/// Address of local memory, checked.
pub(super) fn local(
    memory: &[Option<Memory>],
    domain: u32,
    wanted: &Local,
    access: Access,
) -> Result<*mut u8, Syndrome> {
    let found = memory.get(port::key_index(wanted.lkey)).and_then(Option::as_ref);
    let found = found
        .filter(|m| m.lkey == wanted.lkey && m.domain == domain && m.access.contains(access))
        .ok_or(Syndrome::LocalProtection)?;
    wanted
        .address
        .checked_sub(found.address)
        .and_then(|offset| usize::try_from(offset).ok())
        .and_then(|offset| found.part.at(offset, wanted.num_bytes as usize))
        .ok_or(Syndrome::LocalProtection)
}

pub(super) fn remote_entry(peers: &[Option<Peer>], peer: (usize, u32)) -> Option<&port::QpEntry> {
    peers.get(peer.0)?.as_ref()?.tables().qps.get(port::qp_index(peer.1)?)
}

/// Protection domain of the peer's queue pair, which limits the memory that requests may reach.
pub(super) fn remote_domain(peers: &[Option<Peer>], peer: (usize, u32)) -> u32 {
    remote_entry(peers, peer).map_or(0, |entry| entry.domain.load(Ordering::Relaxed))
}

/// The peer's memory behind `remote`. A refusal takes the peer's queue pair out of service as well.
pub(super) fn pin<'a>(
    peers: &'a [Option<Peer>],
    peer: (usize, u32),
    domain: u32,
    remote: &Remote,
    num_bytes: u64,
    access: Access,
) -> Result<MemoryPin<'a>, Syndrome> {
    let found = peers.get(peer.0).and_then(Option::as_ref).ok_or(Syndrome::RetryExceeded)?;
    found.pin(domain, remote.rkey, remote.address, num_bytes, access).inspect_err(|_| {
        if let Some(entry) = remote_entry(peers, peer) {
            entry.state.store(state::ERROR, Ordering::Release);
        }
    })
}
