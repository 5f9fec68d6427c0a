//! Completion of operations.

use rustix::event::epoll;

use super::super::link::Context;
use super::super::owner::CallError;
use super::super::port::PollOutcome;
use super::super::sys;
use super::LibfabricFabric;
use p2p_core::endpoint::PostError;
use p2p_core::fabric::{Completion, PeerId, RegionId, Token};

/// An operation that the library has accepted.
#[derive(Debug, Clone, Copy)]
pub(super) struct Operation {
    pub(super) token: Token,
    /// `None` once the peer is closed: another peer may reuse its number.
    pub(super) peer: Option<PeerId>,
    pub(super) region: RegionId,
    pub(super) op: &'static str,
    /// Address at the peer.
    pub(super) address: u64,
    pub(super) bytes: u64,
    pub(super) key: u64,
    /// True if the failure of its queue was already reported as its completion.
    pub(super) is_reported: bool,
}

impl Operation {
    /// The operation's error if the peer is gone.
    pub(super) const fn disconnected(&self) -> PostError {
        PostError::Disconnected { op: self.op }
    }

    /// Describes a failure of this operation, with advice.
    fn explain(&self, code: i64, text: &str) -> String {
        let Self { op, address, bytes, key, .. } = self;
        let what = format!("{text}; {op} of {bytes} bytes at {address:#x} with key {key:#x}");
        if ENDINGS.contains(&code) {
            return format!(
                "{what}: the peer denies access and ends the connection then, or is gone; check that it \
                 has not deregistered the memory, its rights, and that the range is inside"
            );
        }
        what
    }
}

impl LibfabricFabric {
    /// Reads the completions of a peer's queue, or of the shared one.
    pub(super) fn poll_queue(&mut self, peer: Option<usize>, out: &mut Vec<Completion>) {
        let mut entries = [sys::CqDataEntry {
            op_context: std::ptr::null_mut(),
            flags: 0,
            len: 0,
            buf: std::ptr::null_mut(),
            data: 0,
        }; 16];
        let mut sources = [sys::FI_ADDR_UNSPEC; 16];
        for _ in 0..MAX_ROUNDS {
            let own = peer.and_then(|idx| self.peers.get(idx)?.as_ref()?.own.as_ref());
            let queue = own.map_or(self.port.queue(), |(_, queue)| queue);
            let polled = queue.poll(&mut entries, &mut sources);
            if !matches!(polled, Ok(PollOutcome::Nothing)) {
                self.disarm(peer);
            }
            match polled {
                Ok(PollOutcome::Nothing) => return,
                Ok(PollOutcome::Entries(num)) => {
                    let num = num.min(entries.len());
                    for entry in &entries[..num] {
                        self.complete(entry.op_context, None, out);
                    }
                    if num < entries.len() {
                        return;
                    }
                }
                Ok(PollOutcome::Failed(failure)) => {
                    self.complete(failure.context, Some((failure.code, failure.text)), out);
                }
                Err(error) => return self.fail_queue(peer, &error, out),
            }
        }
    }

    /// Handles the loss of a queue, and so of all its completions.
    ///
    /// A peer's own endpoint is closed before its operations are reported, so that the library no
    /// longer uses their memory and contexts. A shared endpoint cannot close before the fabric. Its
    /// operations are reported as failed while the library may still use their memory.
    pub(super) fn fail_queue(
        &mut self,
        peer: Option<usize>,
        error: &CallError,
        out: &mut Vec<Completion>,
    ) {
        let failure = |operation: &Operation| {
            let detail = format!("{}: {}", operation.op, error.text);
            PostError::Transport { op: error.op, code: error.code, detail }
        };
        if let Some(idx) = peer {
            let peer = PeerId(idx as u32);
            self.close_endpoint(peer, out, failure);
            return self.lost.push(peer);
        }
        for operation in
            self.operations.iter_mut().flatten().filter(|operation| !operation.is_reported)
        {
            operation.is_reported = true;
            out.push(Completion { token: operation.token, result: Err(failure(operation)) });
        }
    }

    /// Closes a peer's own endpoint, if it has one. The library then no longer uses memory or
    /// contexts of its operations, and they complete with `failure`. Later operations are refused.
    pub(super) fn close_endpoint(
        &mut self,
        id: PeerId,
        out: &mut Vec<Completion>,
        failure: impl Fn(&Operation) -> PostError,
    ) {
        let Some(Some(peer)) = self.peers.get_mut(id.0 as usize) else { return };
        let (own, addr) = (peer.own.take(), peer.addr.take());
        if let (Some(set), Some(fd)) =
            (&self.set, own.as_ref().and_then(|(_, queue)| queue.wait_fd()))
            && let Err(error) = epoll::delete(set, fd)
        {
            tracing::debug!(%error, "a queue was not watched");
        }
        let has_own = own.is_some();
        drop(own);
        if let Some(addr) = addr {
            self.port.remove(addr);
        }
        if !has_own {
            return;
        }
        peer.num_operations = 0;
        for (idx, operation) in self.operations.iter_mut().enumerate() {
            let Some(operation) = operation.take_if(|operation| operation.peer == Some(id)) else {
                continue;
            };
            self.free.push(idx as u32);
            out.push(Completion { token: operation.token, result: Err(failure(&operation)) });
        }
    }

    /// Requires `may_sleep` to ask the queue again before the next sleep.
    pub(super) fn disarm(&mut self, peer: Option<usize>) {
        if let Some(Some(peer)) = peer.and_then(|idx| self.peers.get_mut(idx)) {
            peer.is_armed = false;
        }
    }

    /// Completes an operation.
    fn complete(
        &mut self,
        context: *mut std::ffi::c_void,
        failure: Option<(i64, String)>,
        out: &mut Vec<Completion>,
    ) {
        // SAFETY: null, or the context of an operation of this fabric.
        let Some(context) = (unsafe { context.cast::<Context>().as_ref() }) else { return };
        let Some(operation) = self.operations.get_mut(context.owner as usize) else { return };
        // Otherwise its endpoint was closed, and the operation was reported then.
        let Some(operation) = operation.take() else { return };
        let Operation { token, op, peer, is_reported, .. } = operation;
        self.free.push(context.owner);
        if let Some(Some(peer)) = peer.and_then(|peer| self.peers.get_mut(peer.0 as usize)) {
            peer.num_operations -= 1;
        }
        if is_reported {
            return;
        }
        let result = match failure {
            None => Ok(()),
            Some((code, text)) => {
                let detail = operation.explain(code, &text);
                Err(PostError::Transport { op, code, detail })
            }
        };
        out.push(Completion { token, result });
    }
}

const MAX_ROUNDS: usize = 8;
/// Codes with which operations fail when their connection ends: `EIO`, `EACCES`, `ENOTCONN`,
/// `ECONNABORTED`, `ECONNRESET`, `ESHUTDOWN`, `ECANCELED`, and the library's own for a bad key.
const ENDINGS: [i64; 8] = [5, 13, 107, 103, 104, 108, 125, sys::FI_ENOKEY];
