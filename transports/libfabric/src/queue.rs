//! A completion queue, and the descriptor to sleep on.

use std::os::fd::{BorrowedFd, RawFd};
use std::ptr::null_mut;
use std::sync::Arc;

use super::load::Library;
use super::owner::{self, CallError, Object, check};
use super::port::{Failure, PollOutcome};
use super::sys;
use super::wait_mode::WaitMode;

/// A completion queue. Reading it also makes progress on all work of its endpoints.
pub(super) struct Queue {
    cq: Arc<Object<sys::FidCq>>,
    fabric: Arc<Object<sys::FidFabric>>,
    library: &'static Library,
    knows_source: bool,
    wait_fd: Option<RawFd>,
}

impl std::fmt::Debug for Queue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Queue").field("wait_fd", &self.wait_fd).finish_non_exhaustive()
    }
}

impl Queue {
    /// Opens a queue, with a descriptor if `wait_mode` asks for one and the provider has them.
    pub(super) fn open(
        library: &'static Library,
        fabric: &Arc<Object<sys::FidFabric>>,
        domain: &Arc<Object<sys::FidDomain>>,
        knows_source: bool,
        wait_mode: WaitMode,
    ) -> Result<Self, CallError> {
        let mut wait_fd = None;
        let with_descriptor = (wait_mode == WaitMode::Descriptor)
            .then(|| owner::open_cq(library, domain, NUM_CQ_ENTRIES, sys::FI_WAIT_FD));
        let cq = match with_descriptor {
            Some(Ok(cq)) => {
                let mut fd: RawFd = -1;
                // SAFETY: a live queue with a descriptor; the command stores one integer.
                let result = unsafe {
                    ((*(*cq.fid()).ops).control)(cq.fid(), sys::FI_GETWAIT, (&raw mut fd).cast())
                };
                wait_fd = (result == 0 && fd >= 0).then_some(fd);
                cq
            }
            _ => owner::open_cq(library, domain, NUM_CQ_ENTRIES, sys::FI_WAIT_NONE)?,
        };
        Ok(Self { cq, fabric: Arc::clone(fabric), library, knows_source, wait_fd })
    }

    /// For endpoints, which keep it alive.
    pub(super) const fn owner(&self) -> &Arc<Object<sys::FidCq>> {
        &self.cq
    }

    /// Descriptor that becomes readable when the queue has entries.
    #[inline]
    pub(super) fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        // SAFETY: the queue owns it and lives as long as `self`.
        self.wait_fd.map(|fd| unsafe { BorrowedFd::borrow_raw(fd) })
    }

    /// Makes progress and reads completions, with their senders. Does not block.
    #[inline]
    pub(super) fn poll(
        &self,
        entries: &mut [sys::CqDataEntry],
        sources: &mut [sys::FiAddr],
    ) -> Result<PollOutcome, CallError> {
        let room = entries.len().min(sources.len());
        // SAFETY: a live queue of this entry format, and room for as many entries.
        let result = unsafe {
            let ops = (*self.cq.as_ptr()).ops;
            let cq = self.cq.as_ptr();
            if self.knows_source {
                ((*ops).readfrom)(cq, entries.as_mut_ptr().cast(), room, sources.as_mut_ptr())
            } else {
                ((*ops).read)(cq, entries.as_mut_ptr().cast(), room)
            }
        };
        match result as i64 {
            num @ 1.. => Ok(PollOutcome::Entries(num as usize)),
            0 => Ok(PollOutcome::Nothing),
            code if code == -sys::FI_EAGAIN => Ok(PollOutcome::Nothing),
            code if code == -sys::FI_EAVAIL => self.read_failure(),
            code => {
                let text = self.library.describe(code);
                Err(CallError { op: "fi_cq_read", code: -code, text })
            }
        }
    }

    /// Prepares for sleep on [`wait_fd`](Self::wait_fd). Returns false if the queue has entries.
    pub(super) fn may_sleep(&self) -> bool {
        let mut fids = [self.cq.fid()];
        // SAFETY: live objects; the array has one element.
        let result = unsafe {
            ((*(*self.fabric.as_ptr()).ops).trywait)(self.fabric.as_ptr(), fids.as_mut_ptr(), 1)
        };
        result == 0
    }

    fn read_failure(&self) -> Result<PollOutcome, CallError> {
        let mut entry = sys::CqErrEntry {
            op_context: null_mut(),
            flags: 0,
            len: 0,
            buf: null_mut(),
            data: 0,
            tag: 0,
            olen: 0,
            err: 0,
            prov_errno: 0,
            err_data: null_mut(),
            err_data_size: 0,
        };
        // SAFETY: a live queue and room for one entry.
        let result =
            unsafe { ((*(*self.cq.as_ptr()).ops).readerr)(self.cq.as_ptr(), &raw mut entry, 0) }
                as i64;
        if result == -sys::FI_EAGAIN || result == 0 {
            return Ok(PollOutcome::Nothing);
        }
        check(self.library, "fi_cq_readerr", result)?;
        let code = i64::from(entry.err);
        let text =
            format!("{} (provider's code {})", self.library.describe(code), entry.prov_errno);
        let (context, flags) = (entry.op_context, entry.flags);
        Ok(PollOutcome::Failed(Failure { context, flags, code, text }))
    }
}

const NUM_CQ_ENTRIES: usize = 1024;
