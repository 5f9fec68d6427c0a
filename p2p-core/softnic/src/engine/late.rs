//! What lands later than its request was executed: parts that the adversary puts off.

use super::reach::{local, pin, remote_domain};
use crate::format::{Local, Remote, Syndrome};
use crate::memory::copy;
use crate::nic::{Nic, Qp};
use crate::port::Access;

/// A part of an executed request that lands later.
#[derive(Debug)]
pub(crate) struct Later {
    pub(super) position: u64,
    pub(super) effect: Effect,
}

#[derive(Debug)]
pub(super) enum Effect {
    Write { remote: Remote, local: Local },
    Read { remote: Remote, local: Local },
    Land { local: Local, bytes: [u8; 8] },
}

impl Nic {
    /// Everything of requests before `end` lands.
    pub(super) fn land_before(&mut self, qp: &mut Qp, end: u64) {
        self.land_if(qp, |later| later.position < end);
    }

    pub(super) fn land_writes(&mut self, qp: &mut Qp, end: u64) {
        self.land_if(qp, |later| {
            later.position < end && matches!(later.effect, Effect::Write { .. })
        });
    }

    fn land_if(&mut self, qp: &mut Qp, is_due: impl Fn(&Later) -> bool) {
        let mut index = 0;
        while index < qp.later.len() {
            if is_due(&qp.later[index]) {
                let later = qp.later.swap_remove(index);
                self.land(qp, &later.effect);
            } else {
                index += 1;
            }
        }
    }

    /// Carries out what was put off. Keys may have been revoked since; then it is lost, as are packets
    /// under way.
    pub(super) fn land(&mut self, qp: &Qp, effect: &Effect) {
        let result = match effect {
            Effect::Land { local: to, bytes } => {
                local(&self.memory, qp.domain, to, Access::LOCAL_WRITE)
                    // SAFETY: the range was checked.
                    .map(|ptr| unsafe { copy(ptr, bytes.as_ptr(), to.num_bytes as usize) })
            }
            Effect::Write { remote, local: from } => {
                self.move_late(qp, remote, from, Access::REMOTE_WRITE, |ours, theirs, len| {
                    // SAFETY: `move_late` checked both ranges.
                    unsafe { copy(theirs, ours, len) }
                })
            }
            Effect::Read { remote, local: to } => {
                self.move_late(qp, remote, to, Access::REMOTE_READ, |ours, theirs, len| {
                    // SAFETY: as above.
                    unsafe { copy(ours, theirs, len) }
                })
            }
        };
        if let Err(syndrome) = result {
            tracing::debug!(?syndrome, qpn = qp.qpn, "a late part of a request is lost");
        }
    }

    fn move_late(
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
        let near = local(&self.memory, qp.domain, ours, needed)?;
        let far = pin(&self.peers, peer, domain, remote, ours.num_bytes.into(), access)?;
        copy(near, far.ptr, ours.num_bytes as usize);
        Ok(())
    }
}
