//! A fabric between the processes of one host, by copies from memory to memory.
//!
//! The initiator copies with `process_vm_readv` and `process_vm_writev`; within one process with plain
//! copies. The target's processor is not needed. The system allows this between processes of one user
//! (see `ptrace(2)`, "Ptrace access mode checking"); whether it does is tried out at
//! [`join_peer`](Fabric::join_peer), which fails where it does not.
//!
//! Nobody but the initiator sees a copy coming, so the rights are kept by an agreement between the two,
//! through a table that each side shares (`table.rs`): the initiator announces the key that it is
//! about to use, checks that it is in force, copies, and takes the announcement back. Whoever revokes a
//! key, or closes a peer, first makes that known and then waits for announcements to end. This guards
//! against mistakes and against peers that die or lag, not against malice: a process that may copy from
//! another may do so anyway.

mod table;

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use self::table::{Detail, Grant, MAX_PEERS, OwnTable, PeerTable};
use super::memory::{Refusal, Regions, index_of, remote_range, unknown};
use super::{
    Access, Completion, Fabric, LocalSegment, PeerId, Posted, RegionId, RemoteSegment, Token,
    WireRegion, raw,
};
use crate::endpoint::{PostError, TransportKind};
use crate::network::NetworkError;

/// The fabric. See the [module](self).
#[derive(Debug)]
pub struct CmaFabric {
    regions: Regions,
    table: OwnTable,
    peers: Vec<Peer>,
    free_peers: Vec<u32>,
    /// Closed peers that were in the middle of a copy and did not say that they have ended it.
    lingering: Vec<Joined>,
    queue: VecDeque<Op>,
    done: Vec<Completion>,
    /// Never fires: everything is done by the time `poll` returns, or there is more to do.
    idle: OwnedFd,
}

#[derive(Debug)]
struct Peer {
    generation: u32,
    is_open: bool,
    joined: Option<Joined>,
}

/// A peer whose memory can be reached.
#[derive(Debug)]
struct Joined {
    table: PeerTable,
    /// The peer's place in our table, and ours in its.
    our_place: usize,
    pid: Pid,
    /// `None`: the same process.
    process: Option<OwnedFd>,
}

/// One operation, as far as it is left.
#[derive(Debug)]
struct Op {
    token: Token,
    peer: PeerId,
    is_write: bool,
    key: u64,
    address: u64,
    region: RegionId,
    offset: u64,
    bytes: u64,
}

impl CmaFabric {
    /// Makes the table.
    ///
    /// # Errors
    /// [`NetworkError`] when the system has no memory or no descriptors.
    pub fn new() -> Result<Self, NetworkError> {
        let table = OwnTable::new().map_err(|error| system("make a table", &error))?;
        // From zero on: one that is readable would keep every engine awake.
        let flags = EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC;
        let idle =
            eventfd(0, flags).map_err(|error| system("make an event descriptor", &error.into()))?;
        Ok(Self {
            regions: Regions::default(),
            table,
            peers: Vec::new(),
            free_peers: Vec::new(),
            lingering: Vec::new(),
            queue: VecDeque::with_capacity(MAX_OPS),
            done: Vec::new(),
            idle,
        })
    }

    fn find(&self, op: &'static str, peer: PeerId) -> Result<usize, PostError> {
        let idx = (peer.0 & PEER_MASK) as usize;
        match self.peers.get(idx) {
            Some(found) if found.is_open && found.generation == peer.0 >> PEER_BITS => Ok(idx),
            _ => Err(PostError::Disconnected { op }),
        }
    }

    fn post(
        &mut self,
        is_write: bool,
        peer: PeerId,
        remote: RemoteSegment,
        local: LocalSegment,
        token: Token,
    ) -> Result<Posted, PostError> {
        let name = name(is_write);
        let idx = self.find(name, peer)?;
        if self.peers[idx].joined.is_none() {
            return Err(PostError::Disconnected { op: name });
        }
        let offset = remote_range(name, remote, local.bytes)?;
        self.regions.local(name, local)?;
        if self.queue.len() >= MAX_OPS {
            return Ok(Posted::Full);
        }
        let address = remote.region.address.wrapping_add(offset);
        let LocalSegment { region, offset, bytes } = local;
        let op =
            Op { token, peer, is_write, key: remote.region.key, address, region, offset, bytes };
        // A short copy costs less than the way through the queue.
        if self.queue.is_empty() && bytes <= INLINE_BYTES {
            let result = self.copy(&op, bytes);
            self.done.push(Completion { token, result });
        } else {
            self.queue.push_back(op);
        }
        Ok(Posted::Accepted)
    }

    /// Copies the first `bytes` of what is left of `op`.
    fn copy(&self, op: &Op, bytes: u64) -> Result<(), PostError> {
        let name = name(op.is_write);
        let idx = self.find(name, op.peer)?;
        let Some(joined) = &self.peers[idx].joined else {
            return Err(PostError::Disconnected { op: name });
        };
        let segment = LocalSegment { region: op.region, offset: op.offset, bytes };
        let here = self.regions.local(name, segment)?;
        let busy = self.table.announce(idx, op.key);
        if !joined.table.admits(joined.our_place) {
            return Err(PostError::Disconnected { op: name });
        }
        let grant = joined.table.grant(op.key).ok_or(Refusal::Key).and_then(|grant| {
            let Grant { address, bytes: limit, access } = grant;
            let is_allowed = match access {
                Access::RemoteReadWrite => true,
                Access::RemoteRead => !op.is_write,
                Access::Local => false,
            };
            let is_inside = op.address >= address
                && op.address.checked_add(bytes).is_some_and(|end| end <= address + limit);
            match (is_allowed, is_inside) {
                (true, true) => Ok(()),
                (false, _) => Err(Refusal::Access),
                (_, false) => Err(Refusal::Range),
            }
        });
        grant.map_err(|refusal| refusal.error(name))?;
        let Some(process) = &joined.process else {
            let there = op.address as *mut u8;
            // SAFETY: this process's own memory on both sides: `here` is registered with this fabric,
            // `there` with the peer's, which will not let go of it while `busy` is up.
            unsafe {
                let (from, to) = if op.is_write { (here, there) } else { (there, here) };
                std::ptr::copy(from.cast_const(), to, bytes as usize);
            }
            drop(busy);
            return Ok(());
        };
        if has_ended(process) {
            return Err(PostError::Disconnected { op: name });
        }
        let pid = joined.pid.as_raw_nonzero().get();
        let mut copied = 0;
        while copied < bytes {
            let rest = (bytes - copied) as usize;
            let there = op.address + copied;
            // SAFETY: `here..here+bytes` is registered memory; the rest is the system's to check.
            let got = unsafe {
                raw::copy_across(pid, op.is_write, here.add(copied as usize), there, rest)
            };
            match got {
                Ok(0) => return Err(failed(name, &io::ErrorKind::WriteZero.into())),
                Ok(got) => copied += got as u64,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.raw_os_error() == Some(libc::ESRCH) => {
                    return Err(PostError::Disconnected { op: name });
                }
                Err(error) => return Err(failed(name, &error)),
            }
        }
        drop(busy);
        Ok(())
    }

    /// Waits until nobody uses `key`; with 0, until `joined` uses none.
    fn wait_for(joined: &Joined, key: u64) -> bool {
        let start = Instant::now();
        loop {
            for _ in 0..64 {
                let used = joined.table.announced(joined.our_place);
                if used == 0 || key != 0 && used != key {
                    return true;
                }
                std::hint::spin_loop();
            }
            if joined.process.as_ref().is_some_and(has_ended) {
                return true;
            }
            if start.elapsed() >= REVOKE_TIMEOUT {
                return false;
            }
            std::thread::sleep(Duration::from_micros(50));
        }
    }

    fn join(&self, idx: usize, detail: &Detail) -> Result<Joined, NetworkError> {
        let refused = |why: &str| network("join", why, None);
        self.table.check_host(detail).map_err(|why| refused(&why))?;
        let pid = Pid::from_raw(detail.pid).ok_or_else(|| refused("the peer names no process"))?;
        let is_here = pid == rustix::process::getpid();
        let process = if is_here {
            None
        } else {
            let opened = pidfd_open(pid, PidfdFlags::empty());
            Some(opened.map_err(|error| system("open the peer's process", &error.into()))?)
        };
        // Same number after the process was opened: it is the one that wrote the detail.
        let table = PeerTable::open(detail).map_err(|error| {
            let code = error.raw_os_error().map(i64::from);
            network("open the peer's table", &format!("{error}; {HINT}"), code)
        })?;
        if process.is_some() {
            let mut probe = [0u8; 8];
            // SAFETY: the probe is ours.
            let got = unsafe {
                raw::copy_across(detail.pid, false, probe.as_mut_ptr(), detail.probe_address, 8)
            };
            match got {
                Ok(8) if probe == detail.instance.to_le_bytes() => {}
                Ok(_) => return Err(refused("the peer's memory does not hold what it should")),
                Err(error) => {
                    let code = error.raw_os_error().map(i64::from);
                    let why = format!("{error}; {HINT}");
                    return Err(network("read the peer's memory", &why, code));
                }
            }
        }
        let our_place = detail.place as usize;
        if our_place >= MAX_PEERS {
            return Err(refused("the peer gives a place that its table does not have"));
        }
        self.table.open_gate(idx);
        Ok(Joined { table, our_place, pid, process })
    }
}

impl Fabric for CmaFabric {
    fn kind(&self) -> TransportKind {
        TransportKind::Cma
    }

    fn flavour(&self) -> &str {
        ""
    }

    unsafe fn register(
        &mut self,
        ptr: NonNull<u8>,
        bytes: usize,
        access: Access,
    ) -> Result<RegionId, PostError> {
        let id = self.regions.insert(ptr, bytes, access)?;
        if let Some(entry) = self.regions.get(id) {
            self.table.publish(index_of(id), entry);
        }
        Ok(id)
    }

    fn describe(&self, region: RegionId) -> Option<WireRegion> {
        self.regions.describe(region, |entry| entry.ptr.as_ptr() as u64)
    }

    fn deregister(&mut self, region: RegionId) -> Result<(), PostError> {
        let entry = *self.regions.get(region).ok_or_else(|| unknown(region))?;
        self.table.revoke(index_of(region));
        let joined = self.peers.iter().filter_map(|peer| peer.joined.as_ref());
        let in_use = joined.chain(&self.lingering).find(|peer| !Self::wait_for(peer, entry.key));
        if let Some(peer) = in_use {
            return Err(PostError::Register {
                bytes: entry.bytes as usize,
                detail: format!(
                    "process {} is in the middle of a copy and does not go on; the memory must stay \
                     mapped until that process ends",
                    peer.pid.as_raw_nonzero()
                ),
            });
        }
        self.lingering.retain(|peer| !Self::is_quiet(peer));
        self.regions.remove(region)?;
        Ok(())
    }

    fn open_peer(&mut self) -> Result<(PeerId, Vec<u8>), NetworkError> {
        let idx = match self.free_peers.pop() {
            Some(idx) => idx as usize,
            None if self.peers.len() < MAX_PEERS => {
                self.peers.push(Peer { generation: 0, is_open: false, joined: None });
                self.peers.len() - 1
            }
            None => return Err(network("open", "too many peers are there", None)),
        };
        let peer = &mut self.peers[idx];
        peer.is_open = true;
        let detail = self.table.detail(idx);
        Ok((PeerId(idx as u32 | peer.generation << PEER_BITS), detail.encode()))
    }

    fn join_peer(&mut self, peer: PeerId, detail: &[u8]) -> Result<(), NetworkError> {
        let detail = Detail::decode(detail).map_err(|why| network("join", &why, None))?;
        let idx = self.find("join", peer);
        let idx = idx.map_err(|error| network("join", &error.to_string(), None))?;
        let joined = self.join(idx, &detail)?;
        self.peers[idx].joined = Some(joined);
        Ok(())
    }

    fn close_peer(&mut self, peer: PeerId) {
        let Ok(idx) = self.find("close", peer) else { return };
        let queue = &mut self.queue;
        for op in queue.iter().filter(|op| op.peer == peer) {
            let result = Err(PostError::Disconnected { op: name(op.is_write) });
            self.done.push(Completion { token: op.token, result });
        }
        queue.retain(|op| op.peer != peer);
        self.table.close_gate(idx);
        let found = &mut self.peers[idx];
        found.is_open = false;
        found.generation = (found.generation + 1) & (u32::MAX >> PEER_BITS);
        let Some(joined) = found.joined.take() else {
            return self.free_peers.push(idx as u32);
        };
        if Self::wait_for(&joined, 0) {
            self.free_peers.push(idx as u32);
        } else {
            // Its place is never given again, so that its announcement stays its own.
            tracing::error!(
                pid = joined.pid.as_raw_nonzero(),
                "a closed peer is in the middle of a copy and does not go on"
            );
            self.lingering.push(joined);
        }
    }

    unsafe fn write(
        &mut self,
        peer: PeerId,
        dst: RemoteSegment,
        src: LocalSegment,
        token: Token,
    ) -> Result<Posted, PostError> {
        self.post(true, peer, dst, src, token)
    }

    unsafe fn read(
        &mut self,
        peer: PeerId,
        dst: LocalSegment,
        src: RemoteSegment,
        token: Token,
    ) -> Result<Posted, PostError> {
        self.post(false, peer, src, dst, token)
    }

    fn poll(&mut self, out: &mut Vec<Completion>) {
        let mut budget = POLL_BYTES;
        while budget > 0 {
            let Some(op) = self.queue.front() else { break };
            let bytes = op.bytes.min(STEP_BYTES);
            let result = self.copy(op, bytes);
            budget = budget.saturating_sub(bytes.max(1));
            let Some(op) = self.queue.front_mut() else { break };
            if result.is_ok() {
                op.bytes -= bytes;
                op.offset += bytes;
                op.address += bytes;
            }
            if result.is_err() || op.bytes == 0 {
                self.done.push(Completion { token: op.token, result });
                self.queue.pop_front();
            }
        }
        out.append(&mut self.done);
    }

    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.idle.as_fd())
    }

    fn may_sleep(&mut self) -> bool {
        self.done.is_empty() && self.queue.is_empty()
    }

    fn max_operation_bytes(&self) -> u64 {
        1 << 40
    }
}

impl CmaFabric {
    fn is_quiet(peer: &Joined) -> bool {
        peer.table.announced(peer.our_place) == 0 || peer.process.as_ref().is_some_and(has_ended)
    }
}

const fn name(is_write: bool) -> &'static str {
    if is_write { "write" } else { "read" }
}

/// Whether a process is no more.
fn has_ended(process: &OwnedFd) -> bool {
    let mut fds = [PollFd::new(process, PollFlags::IN)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    matches!(rustix::event::poll(&mut fds, Some(&now)), Ok(1..))
}

fn failed(op: &'static str, error: &io::Error) -> PostError {
    let code = error.raw_os_error().map_or(0, i64::from);
    PostError::Transport { op, code, detail: format!("{error}; {HINT}") }
}

fn network(op: &'static str, detail: &str, code: Option<i64>) -> NetworkError {
    NetworkError { network: "cma".to_owned(), op, code, detail: detail.to_owned() }
}

fn system(op: &'static str, error: &io::Error) -> NetworkError {
    network(op, &error.to_string(), error.raw_os_error().map(i64::from))
}

const HINT: &str = "processes of one user, with kernel.yama.ptrace_scope 0 or CAP_SYS_PTRACE, may copy \
                    between each other";
const PEER_BITS: u32 = 16;
const PEER_MASK: u32 = (1 << PEER_BITS) - 1;
const MAX_OPS: usize = 4096;
/// Copies up to here are done at once.
const INLINE_BYTES: u64 = 256 << 10;
/// Bytes under one announcement: how long a revocation may have to wait.
const STEP_BYTES: u64 = 1 << 20;
/// Bytes of one poll, before others have their turn.
const POLL_BYTES: u64 = 4 << 20;
/// A copy that is under way for longer has been stopped.
const REVOKE_TIMEOUT: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use super::*;

    /// Whoever sleeps on an idle fabric must not be woken by it.
    #[test]
    fn an_idle_fabric_is_not_readable() {
        let fabric = CmaFabric::new().unwrap();
        let mut fds = [PollFd::new(&fabric.idle, PollFlags::IN)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        assert_eq!(rustix::event::poll(&mut fds, Some(&now)), Ok(0));
    }
}
