//! The endpoint's bounded waits: for requests, for room at the peer, and for progress of the peer's driver.

use std::time::{Duration, Instant};

use super::VerbsEndpoint;
use crate::rdma::request::OpKind;
use crate::rdma::send_queue::{PostFailure, SendQueue};
use crate::rdma::status::Cause;
use p2p_core::counted::message::Action;
use p2p_core::endpoint::{PostError, Progress as _, QuietError};
use p2p_core::wait::Driver;

impl VerbsEndpoint {
    /// Waits until no request is under way on the send queues from `first` on.
    pub(super) fn settle(&mut self, first: usize) -> Result<(), PostError> {
        let address = self.remote.address;
        if self.send_queues[first..]
            .iter_mut()
            .try_for_each(|send_queue| send_queue.seal(address))
            .is_err()
        {
            return Err(self.failure("put"));
        }
        // Posts the buffered requests of all send queues before the first wait.
        self.post_held(OpKind::Put)?;
        let mut send_queues = self.send_queues[first..].iter_mut();
        match send_queues.try_for_each(|send_queue| send_queue.wait(OpKind::Put, 0, None).map(drop))
        {
            Ok(()) => {
                self.is_spread = false;
                if let Some(sent) = &mut self.sent {
                    sent.has_spread_reads = false;
                }
                Ok(())
            }
            Err(PostFailure) => Err(self.failure("put")),
        }
    }

    /// Number of further messages and counted writes that the peer has receives for. A peer fails if it reports
    /// more receives taken than requests sent.
    pub(super) fn room(&self) -> u32 {
        let Some(sent) = &self.sent else { return u32::MAX };
        sent.room(self.peer.arrivals.peer_taken()).unwrap_or_else(|error| {
            self.peer.health.fail("receive", Cause::Peer(error));
            0
        })
    }

    /// Waits until the peer has a free receive. The peer fails if it takes nothing for longer than the limit.
    pub(super) fn wait_for_room(&mut self, kind: OpKind) -> Result<(), PostError> {
        if self.room() > 0 {
            return Ok(());
        }
        // The peer may be waiting for the buffered requests themselves.
        self.post_held(kind)?;
        let mut seen = (self.peer.arrivals.peer_taken(), None);
        let mut num_looks = 0u32;
        while self.room() == 0 {
            self.progress.drive();
            self.health()?;
            num_looks = num_looks.wrapping_add(1);
            // Reading the clock costs as much as one check.
            if !num_looks.is_multiple_of(16) {
                continue;
            }
            let (now, taken) = (Instant::now(), self.peer.arrivals.peer_taken());
            let since = if seen.0 == taken { seen.1.unwrap_or(now) } else { now };
            seen = (taken, Some(since));
            let limit = self.send_queues[0].limit();
            if now - since >= limit {
                let limit_ms = limit.as_millis() as u64;
                self.peer.health.fail(kind.name(), Cause::Still { limit_ms });
                return Err(self.failure(kind.name()));
            }
            // Room comes within microseconds, unless the peer's process is suspended.
            if now - since >= YIELD {
                std::thread::sleep(PAUSE);
            } else {
                std::thread::yield_now();
            }
        }
        Ok(())
    }

    /// Posts the requests that a batch has buffered so far.
    pub(super) fn post_held(&mut self, kind: OpKind) -> Result<(), PostError> {
        let posted = self.send_queues.iter_mut().try_for_each(SendQueue::flush);
        posted.map_err(|PostFailure| self.failure(kind.name()))
    }

    /// Waits until all requests are complete.
    pub(super) fn drain(&mut self, deadline: Instant) -> Result<(), QuietError> {
        self.health()?;
        let address = self.remote.address;
        let send_queues = if self.is_spread { self.send_queues.len() } else { 1 };
        for send_queue in &mut self.send_queues[..send_queues] {
            if send_queue.seal(address).is_err() {
                return Err(self.failure("quiet").into());
            }
        }
        self.post_held(OpKind::Quiet)?;
        for send_queue in &mut self.send_queues[..send_queues] {
            match send_queue.wait(OpKind::Quiet, 0, Some(deadline)) {
                Ok(true) => {}
                Ok(false) => {
                    let outstanding: u64 =
                        self.send_queues.iter().map(SendQueue::num_outstanding).sum();
                    return Err(QuietError::Deadline { outstanding: outstanding as usize });
                }
                Err(PostFailure) => return Err(self.failure("quiet").into()),
            }
        }
        self.is_spread = false;
        self.fence_before_spread = false;
        if let Some(sent) = &mut self.sent {
            sent.has_spread_reads = false;
        }
        Ok(())
    }

    /// Waits until the peer's driver has executed all earlier messages.
    pub(super) fn hear(&mut self, deadline: Instant) -> Result<(), QuietError> {
        let mut num_looks = 0u32;
        loop {
            let Some(sent) = &self.sent else { return Ok(()) };
            if sent.is_open && self.room() > 0 {
                let id = sent.num_asked + 1;
                self.send(OpKind::Quiet, Action::Answer { id }).transpose()?;
                if let Some(sent) = &mut self.sent {
                    sent.count_question();
                }
            }
            self.post_held(OpKind::Quiet)?;
            self.progress.drive();
            self.health()?;
            let Some(sent) = &self.sent else { return Ok(()) };
            match sent.is_answered(self.peer.arrivals.answered()) {
                Ok(is_answered) if is_answered && !sent.is_open => return Ok(()),
                Ok(_) => {}
                Err(error) => {
                    self.peer.health.fail("receive", Cause::Peer(error));
                    self.health()?;
                }
            }
            num_looks = num_looks.wrapping_add(1);
            // Reading the clock costs as much as one check. A caller that only checks passes a deadline in the
            // past.
            let is_pause = num_looks.is_multiple_of(16);
            if (num_looks == 1 || is_pause) && Instant::now() >= deadline {
                return Err(QuietError::Deadline { outstanding: 1 });
            }
            if is_pause {
                std::thread::yield_now();
            }
        }
    }
}

/// Duration of the phase that yields between checks. After it, also the sleep between two checks.
const YIELD: Duration = Duration::from_millis(1);
const PAUSE: Duration = Duration::from_micros(100);
