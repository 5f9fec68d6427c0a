//! Effects that land after their request was executed: parts that the adversary defers.

use super::reach::{local, pin, remote_domain};
use crate::format::{Local, Remote, Syndrome};
use crate::memory::copy;
use crate::nic::{DeferredEffect, Effect, Nic, Qp, QpState};
use crate::port::Access;

impl Nic {
    /// Lands all effects of requests before `end`.
    pub(super) fn land_before(&mut self, qp: &mut Qp, end: u64) {
        self.land_if(qp, |deferred| deferred.position < end);
    }

    /// Lands every write of requests before `position`. If one cannot land, the request at `position` is not
    /// executed.
    pub(super) fn land_writes(&mut self, qp: &mut Qp, position: u64) -> Result<(), Syndrome> {
        self.land_if(qp, |deferred| {
            deferred.position < position && matches!(deferred.effect, Effect::Write { .. })
        });
        if qp.state == QpState::Error { Err(Syndrome::Flushed) } else { Ok(()) }
    }

    /// The same for writes to memory that keeps their order.
    pub(super) fn land_ordered_writes(
        &mut self,
        qp: &mut Qp,
        position: u64,
    ) -> Result<(), Syndrome> {
        self.land_if(qp, |deferred| {
            deferred.position < position
                && matches!(deferred.effect, Effect::Write { is_relaxed: false, .. })
        });
        if qp.state == QpState::Error { Err(Syndrome::Flushed) } else { Ok(()) }
    }

    /// Lands the last deferred effect.
    pub(super) fn land_last(&mut self, qp: &mut Qp) {
        if let Some(deferred) = qp.deferred.pop() {
            self.land(qp, &deferred);
        }
    }

    fn land_if(&mut self, qp: &mut Qp, is_due: impl Fn(&DeferredEffect) -> bool) {
        while let Some(index) = qp.deferred.iter().position(&is_due) {
            let deferred = qp.deferred.swap_remove(index);
            self.land(qp, &deferred);
        }
    }

    /// Executes a deferred effect. The keys may have been revoked since, or the peer may be gone. In that case its
    /// request fails, even if later requests have run.
    fn land(&mut self, qp: &mut Qp, deferred: &DeferredEffect) {
        if let Err(syndrome) = self.execute_effect(qp, &deferred.effect) {
            tracing::debug!(?syndrome, qpn = qp.qpn, "a late part of a request cannot land");
            self.fail_deferred(qp, deferred.position, syndrome);
        }
    }

    fn execute_effect(&self, qp: &Qp, effect: &Effect) -> Result<(), Syndrome> {
        match effect {
            Effect::Land { local: to, bytes } => {
                local(&self.memory, qp.domain, to, Access::LOCAL_WRITE)
                    // SAFETY: the range was checked.
                    .map(|ptr| unsafe { copy(ptr, bytes.as_ptr(), to.num_bytes as usize) })
            }
            Effect::Write { remote, local: from, .. } => {
                self.move_deferred(qp, remote, from, Access::REMOTE_WRITE, |ours, theirs, len| {
                    // SAFETY: `move_deferred` checked both ranges.
                    unsafe { copy(theirs, ours, len) }
                })
            }
            Effect::Read { remote, local: to } => {
                self.move_deferred(qp, remote, to, Access::REMOTE_READ, |ours, theirs, len| {
                    // SAFETY: as above.
                    unsafe { copy(ours, theirs, len) }
                })
            }
        }
    }

    /// Fails the unreported request at `position` and all behind it. Their effects remain, but their completions
    /// report a failure.
    fn fail_deferred(&mut self, qp: &mut Qp, position: u64, syndrome: Syndrome) {
        qp.deferred.retain(|deferred| deferred.position < position);
        for request in qp.unreported.iter_mut().filter(|request| request.position >= position) {
            self.num_requests -= u64::from(request.cqe.status.is_ok());
            let is_cause = request.position == position;
            request.cqe.status = Err(if is_cause { syndrome } else { Syndrome::Flushed });
            request.cqe.num_bytes = 0;
            request.is_reported = true;
        }
        self.fail(qp);
    }

    fn move_deferred(
        &self,
        qp: &Qp,
        remote: &Remote,
        ours: &Local,
        access: Access,
        copy: impl Fn(*mut u8, *mut u8, usize),
    ) -> Result<(), Syndrome> {
        let peer = qp.remote.ok_or(Syndrome::RetryExceeded)?;
        let domain = remote_domain(&self.peers, peer);
        let needed =
            if access == Access::REMOTE_READ { Access::LOCAL_WRITE } else { Access::default() };
        let local_ptr = local(&self.memory, qp.domain, ours, needed)?;
        let remote_pin = pin(&self.peers, peer, domain, remote, ours.num_bytes.into(), access)?;
        copy(local_ptr, remote_pin.ptr, ours.num_bytes as usize);
        Ok(())
    }
}
