//! A fabric between the processes of one host, by copies from memory to memory.
//!
//! The initiator copies with `process_vm_readv` and `process_vm_writev`, and within one process with plain copies. The
//! target's processor is not needed. The system allows copies between processes of one user (see `ptrace(2)`, "Ptrace
//! access mode checking"). [`join_peer`](Fabric::join_peer) tries one, and fails if the system forbids it.
//!
//! Only the initiator knows of a copy in advance, so the two sides agree on rights through tables that they share
//! (`table.rs`). The initiator announces the key of a copy, checks that it is in force, copies, and removes the
//! announcement. The owner of a key revokes it in its table first, and then looks for announcements. While there is an
//! announcement of that key, the memory stays registered, and the caller retries. A side that closes a peer waits for
//! at most a second until the peer announces nothing.
//!
//! The agreement protects against mistakes and against peers that die or lag, not against malice: a process that may
//! copy from another may do so anyway.

mod direct;
mod table;

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use self::direct::CmaCopy;
use self::table::{Copier, Detail, Grant, MAX_PEERS, OwnTable, PeerTable};
#[cfg(fuzzing)]
pub(in crate::fabric) use self::table::{check_detail, check_table, detail_samples};
use super::memory::{Refusal, Regions, index_of, unknown};
use super::post::{self, PeerEntry, op_name};
use super::{
    Access, Completion, DirectCopy, Fabric, LocalSegment, MAX_DIRECT_BYTES, PeerId, PostOutcome,
    RegionId, RemoteSegment, Token, WireRegion, raw,
};
use p2p_core::endpoint::{PostError, TransportKind};
use p2p_core::network::NetworkError;

/// The fabric. See the [module](self).
#[derive(Debug)]
pub struct CmaFabric {
    regions: Regions,
    table: Arc<OwnTable>,
    peers: Vec<Peer>,
    free_peers: Vec<u32>,
    /// Closed peers that were in the middle of a copy and have not ended it yet.
    lingering: Vec<Arc<RemoteProcess>>,
    queue: VecDeque<Op>,
    done: Vec<Completion>,
    /// Never readable: when `poll` returns, everything is done or `may_sleep` is false.
    idle: OwnedFd,
}

#[derive(Debug)]
struct Peer {
    entry: PeerEntry,
    remote: Option<Arc<RemoteProcess>>,
    /// Copies of users' threads.
    direct: Option<Arc<CmaCopy>>,
}

/// A peer whose memory can be reached.
#[derive(Debug)]
struct RemoteProcess {
    table: PeerTable,
    /// This side's index in the peer's table.
    our_place: usize,
    pid: Pid,
    /// `None`: the same process.
    process: Option<OwnedFd>,
}

/// The rest of an operation.
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

/// The ranges of one system call.
struct Batch {
    len: usize,
    bytes: u64,
    here: [raw::iovec; MAX_BATCH],
    there: [raw::iovec; MAX_BATCH],
}

impl Default for Batch {
    fn default() -> Self {
        let none = raw::part(std::ptr::null(), 0);
        Self { len: 0, bytes: 0, here: [none; MAX_BATCH], there: [none; MAX_BATCH] }
    }
}

impl Batch {
    fn push(&mut self, here: *mut u8, there: u64, bytes: u64) {
        self.here[self.len] = raw::part(here, bytes as usize);
        self.there[self.len] = raw::part(there as *const u8, bytes as usize);
        self.len += 1;
        self.bytes += bytes;
    }
}

impl CmaFabric {
    /// Makes the table.
    ///
    /// # Errors
    /// [`NetworkError`] when the system has no memory or no descriptors.
    pub fn new() -> Result<Self, NetworkError> {
        let table = OwnTable::new().map_err(|error| system("make a table", &error))?;
        let table = Arc::new(table);
        // The count starts at zero: a readable descriptor would keep every engine awake.
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
        post::find(op, peer, |idx| self.peers.get(idx).map(|peer| &peer.entry))
    }

    fn post(
        &mut self,
        is_write: bool,
        peer: PeerId,
        remote: RemoteSegment,
        local: LocalSegment,
        token: Token,
    ) -> Result<PostOutcome, PostError> {
        let name = op_name(is_write);
        let idx = self.find(name, peer)?;
        if self.peers[idx].remote.is_none() {
            return Err(PostError::Disconnected { op: name });
        }
        let address = remote.checked(name, local.bytes)?;
        self.regions.local(name, local)?;
        if self.queue.len() >= MAX_OPS {
            return Ok(PostOutcome::Full);
        }
        let LocalSegment { region, offset, bytes } = local;
        let op =
            Op { token, peer, is_write, key: remote.region.key, address, region, offset, bytes };
        // Operations are copied in `poll`, so that several can share a system call.
        self.queue.push_back(op);
        Ok(PostOutcome::Accepted)
    }

    /// Copies a step of the first operation in the queue. The same system call copies operations behind it if they have
    /// the same peer, direction and key. Returns the number of operations and the bytes; the last operation may be
    /// partial. An error is that of the first operation.
    fn copy(&self) -> Result<(usize, u64), PostError> {
        let Some(first) = self.queue.front() else { return Ok((0, 0)) };
        let name = op_name(first.is_write);
        let idx = self.find(name, first.peer)?;
        let Some(remote) = &self.peers[idx].remote else {
            return Err(PostError::Disconnected { op: name });
        };
        let announcement = self.table.announce(idx, Copier::Engine, first.key);
        if !remote.table.admits(remote.our_place) {
            return Err(PostError::Disconnected { op: name });
        }
        let mut batch = Batch::default();
        for op in &self.queue {
            let is_alike =
                op.peer == first.peer && op.key == first.key && op.is_write == first.is_write;
            // An operation without bytes is copied alone, so that a failure behind it does not concern it.
            let is_empty = op.bytes == 0 && batch.len > 0 || first.bytes == 0 && batch.len == 1;
            if !is_alike || is_empty || batch.len == MAX_BATCH || batch.bytes == STEP_BYTES {
                break;
            }
            let bytes = op.bytes.min(STEP_BYTES - batch.bytes);
            match self.check(op, bytes, remote) {
                Ok(here) => batch.push(here, op.address, bytes),
                Err(error) if batch.len == 0 => return Err(error),
                // Its error is reported when it is the first one.
                Err(_) => break,
            }
        }
        let Batch { len, bytes, here, there } = batch;
        let (here, there) = (&here[..len], &there[..len]);
        // SAFETY: `here` is memory registered with this fabric. The peer keeps its own registered while `announcement`
        // exists.
        let copied = unsafe { remote.copy(name, first.is_write, here, there, bytes) }?;
        drop(announcement);
        Ok((len, copied))
    }

    /// Local address of the first `bytes` of the rest of `op`, if they may be copied. The caller has announced its key.
    fn check(&self, op: &Op, bytes: u64, remote: &RemoteProcess) -> Result<*mut u8, PostError> {
        let name = op_name(op.is_write);
        let segment = LocalSegment { region: op.region, offset: op.offset, bytes };
        let here = self.regions.local(name, segment)?;
        remote.check(name, op.is_write, op.key, op.address, bytes)?;
        Ok(here)
    }

    /// Copies one step of the queue. Returns the bytes copied.
    fn step(&mut self) -> u64 {
        let (num_ops, copied) = match self.copy() {
            Ok(done) => done,
            Err(error) => {
                if let Some(op) = self.queue.pop_front() {
                    self.done.push(Completion { token: op.token, result: Err(error) });
                }
                return 0;
            }
        };
        let mut rest = copied;
        for _ in 0..num_ops {
            let Some(op) = self.queue.front_mut() else { break };
            let bytes = op.bytes.min(rest);
            rest -= bytes;
            op.bytes -= bytes;
            op.offset += bytes;
            op.address += bytes;
            if op.bytes > 0 {
                break;
            }
            self.done.push(Completion { token: op.token, result: Ok(()) });
            self.queue.pop_front();
        }
        copied
    }

    /// Waits for at most [`CLOSE_TIMEOUT`] until a peer whose gate is closed has ended its step. Returns false on
    /// timeout.
    fn wait_until_quiet(remote: &RemoteProcess) -> bool {
        let start = Instant::now();
        while !Self::is_quiet(remote) {
            if start.elapsed() >= CLOSE_TIMEOUT {
                return false;
            }
            std::thread::sleep(Duration::from_micros(50));
        }
        true
    }

    fn join(&self, idx: usize, detail: &Detail) -> Result<RemoteProcess, NetworkError> {
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
        // The process was opened before its table is read, so a table with the right instance belongs to the process
        // that wrote the detail.
        let table = PeerTable::open(detail).map_err(|error| {
            let code = error.raw_os_error().map(i64::from);
            network("open the peer's table", &format!("{error}; {HINT}"), code)
        })?;
        if process.is_some() {
            let mut probe = [0u8; 8];
            let there = raw::part(detail.probe_address as *const u8, probe.len());
            let here = raw::part(probe.as_mut_ptr(), probe.len());
            // SAFETY: the probe is ours.
            let got = unsafe { raw::copy_across(detail.pid, false, &[here], &[there]) };
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
        Ok(RemoteProcess { table, our_place, pid, process })
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
        let remotes = self.peers.iter().filter_map(|peer| peer.remote.as_ref());
        // Checks once, without waiting, because a peer that is stopped in the middle of a copy must not block this
        // side. A peer that has moved on does not come back, because the key is revoked.
        let in_use = remotes.chain(&self.lingering).find(|peer| Self::is_using(peer, entry.key));
        if let Some(peer) = in_use {
            return Err(PostError::Register {
                bytes: entry.bytes as usize,
                detail: format!(
                    "process {} is in the middle of a copy; the memory must stay mapped until it has \
                     ended that, or ends itself",
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
                self.peers.push(Peer { entry: PeerEntry::default(), remote: None, direct: None });
                self.peers.len() - 1
            }
            None => return Err(network("open", "there are too many peers", None)),
        };
        let id = self.peers[idx].entry.open(idx);
        Ok((id, self.table.detail(idx).encode()))
    }

    fn join_peer(&mut self, peer: PeerId, detail: &[u8]) -> Result<(), NetworkError> {
        let detail = Detail::decode(detail).map_err(|why| network("join", &why, None))?;
        let idx = self.find("join", peer);
        let idx = idx.map_err(|error| network("join", &error.to_string(), None))?;
        let remote = Arc::new(self.join(idx, &detail)?);
        let direct = CmaCopy::new(Arc::clone(&self.table), Arc::clone(&remote), idx);
        self.peers[idx].direct = Some(Arc::new(direct));
        self.peers[idx].remote = Some(remote);
        Ok(())
    }

    fn close_peer(&mut self, peer: PeerId) {
        let Ok(idx) = self.find("close", peer) else { return };
        let queue = &mut self.queue;
        for op in queue.iter().filter(|op| op.peer == peer) {
            let result = Err(PostError::Disconnected { op: op_name(op.is_write) });
            self.done.push(Completion { token: op.token, result });
        }
        queue.retain(|op| op.peer != peer);
        self.table.close_gate(idx);
        let found = &mut self.peers[idx];
        found.entry.close();
        // Waits for a step of a user's thread, so that its announcement does not meet the next peer of this index.
        if let Some(direct) = found.direct.take() {
            direct.close();
        }
        let Some(remote) = found.remote.take() else {
            return self.free_peers.push(idx as u32);
        };
        if Self::wait_until_quiet(&remote) {
            self.free_peers.push(idx as u32);
        } else {
            // Its index is never reused, so that its announcement stays its own.
            tracing::error!(
                pid = remote.pid.as_raw_nonzero(),
                "a closed peer is in the middle of a copy and does not go on"
            );
            self.lingering.push(remote);
        }
    }

    unsafe fn write(
        &mut self,
        peer: PeerId,
        dst: RemoteSegment,
        src: LocalSegment,
        token: Token,
    ) -> Result<PostOutcome, PostError> {
        self.post(true, peer, dst, src, token)
    }

    unsafe fn read(
        &mut self,
        peer: PeerId,
        dst: LocalSegment,
        src: RemoteSegment,
        token: Token,
    ) -> Result<PostOutcome, PostError> {
        self.post(false, peer, src, dst, token)
    }

    fn poll(&mut self, out: &mut Vec<Completion>) {
        let mut budget = POLL_BYTES;
        while budget > 0 && !self.queue.is_empty() {
            budget = budget.saturating_sub(self.step().max(1));
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

    fn direct(&self, peer: PeerId) -> Option<Arc<dyn DirectCopy>> {
        let idx = self.find("copy", peer).ok()?;
        let direct = Arc::clone(self.peers[idx].direct.as_ref()?);
        Some(direct)
    }
}

impl RemoteProcess {
    /// Checks that the peer's key allows a copy. The caller has announced the key.
    fn check(
        &self,
        op: &'static str,
        is_write: bool,
        key: u64,
        address: u64,
        bytes: u64,
    ) -> Result<(), PostError> {
        let grant = self.table.grant(key).ok_or(Refusal::Key).and_then(|grant| {
            let Grant { address: first, bytes: limit, access } = grant;
            let is_allowed = match access {
                Access::RemoteReadWrite => true,
                Access::RemoteRead => !is_write,
                Access::Local => false,
            };
            let is_inside = address >= first
                && address.checked_add(bytes).is_some_and(|end| end <= first + limit);
            match (is_allowed, is_inside) {
                (true, true) => Ok(()),
                (false, _) => Err(Refusal::Access),
                (_, false) => Err(Refusal::Range),
            }
        });
        grant.map_err(|refusal| refusal.error(op))
    }

    /// Copies ranges of `bytes` in all, one after the other. Returns the bytes copied.
    ///
    /// # Safety
    /// The ranges of `here` are registered memory of this process. The caller has announced a key of `there`, which
    /// [`check`](Self::check) has allowed.
    unsafe fn copy(
        &self,
        op: &'static str,
        is_write: bool,
        here: &[raw::iovec],
        there: &[raw::iovec],
        bytes: u64,
    ) -> Result<u64, PostError> {
        let Some(process) = &self.process else {
            for (here, there) in here.iter().zip(there) {
                let (from, to) = if is_write { (here, there) } else { (there, here) };
                // SAFETY: this process's own memory on both sides: `here` is registered with this fabric, `there` with
                // the peer's, which keeps it registered while the key is announced.
                unsafe {
                    std::ptr::copy(
                        from.iov_base.cast_const().cast::<u8>(),
                        to.iov_base.cast::<u8>(),
                        here.iov_len,
                    );
                }
            }
            return Ok(bytes);
        };
        if has_ended(process) {
            return Err(PostError::Disconnected { op });
        }
        let pid = self.pid.as_raw_nonzero().get();
        loop {
            // SAFETY: the ranges of `here` are registered memory.
            match unsafe { raw::copy_across(pid, is_write, here, there) } {
                Ok(0) if bytes > 0 => return Err(failed(op, &io::ErrorKind::WriteZero.into())),
                Ok(copied) => return Ok(copied as u64),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.raw_os_error() == Some(libc::ESRCH) => {
                    return Err(PostError::Disconnected { op });
                }
                Err(error) => return Err(failed(op, &error)),
            }
        }
    }
}

impl CmaFabric {
    /// Whether a peer may be copying by `key`.
    fn is_using(peer: &RemoteProcess, key: u64) -> bool {
        peer.table.announced(peer.our_place).contains(&key)
            && !peer.process.as_ref().is_some_and(has_ended)
    }

    /// Whether a peer is certain not to copy by any key.
    fn is_quiet(peer: &RemoteProcess) -> bool {
        peer.table.announced(peer.our_place) == [0; 2]
            || peer.process.as_ref().is_some_and(has_ended)
    }
}

/// Whether a process has ended.
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
const _: () = assert!(MAX_PEERS <= post::MAX_PLACES);
const MAX_OPS: usize = 4096;
/// Most operations of one call.
const MAX_BATCH: usize = 64;
/// Bytes under one announcement. They bound the time for which a revocation is retried.
const STEP_BYTES: u64 = MAX_DIRECT_BYTES;
/// Bytes of one poll, before other fabrics get their turn.
const POLL_BYTES: u64 = 4 << 20;
/// A process whose copy takes longer counts as stopped.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

#[cfg(test)]
pub(crate) mod tests;
