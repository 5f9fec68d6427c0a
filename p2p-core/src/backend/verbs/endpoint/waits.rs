//! What an endpoint waits for, all within bounds: requests, room at the peer, and what the peer's driver has done.

use std::time::{Duration, Instant};

use super::{Sent, VerbsEndpoint};
use crate::backend::counted::message::Then;
use crate::backend::verbs::lane::{Failed, Lane};
use crate::backend::verbs::request::OpKind;
use crate::backend::verbs::status::Cause;
use crate::endpoint::{Endpoint, PostError, QuietError};
use crate::wait::Driver;

impl VerbsEndpoint {
    /// Waits until the lanes from `first` on have nothing under way.
    pub(super) fn settle(&mut self, first: usize) -> Result<(), PostError> {
        let address = self.remote.address;
        let lanes = &mut self.lanes[first..];
        let settled = lanes.iter_mut().try_for_each(|lane| lane.seal(address)).and_then(|()| {
            lanes.iter().try_for_each(|lane| lane.wait(OpKind::Put, 0, None).map(drop))
        });
        match settled {
            Ok(()) => {
                self.is_spread = false;
                if let Some(sent) = &mut self.sent {
                    sent.has_spread_reads = false;
                }
                Ok(())
            }
            Err(Failed) => Err(self.failure("put")),
        }
    }

    /// Whether the peer has a receive for another message or counted write.
    pub(super) fn has_room(&self) -> bool {
        let under_way = |sent: &Sent| sent.num_taking.wrapping_sub(self.peer.arrivals.peer_taken());
        self.sent.as_ref().is_none_or(|sent| under_way(sent) < sent.window)
    }

    /// Waits until it has. The peer fails when it takes nothing for longer than allowed.
    pub(super) fn wait_for_room(&self, kind: OpKind) -> Result<(), PostError> {
        let mut seen = (self.peer.arrivals.peer_taken(), None);
        let mut num_looks = 0u32;
        while !self.has_room() {
            self.progress.drive();
            self.health()?;
            num_looks = num_looks.wrapping_add(1);
            // A clock costs as much as a look.
            if !num_looks.is_multiple_of(16) {
                continue;
            }
            let (now, taken) = (Instant::now(), self.peer.arrivals.peer_taken());
            let since = if seen.0 == taken { seen.1.unwrap_or(now) } else { now };
            seen = (taken, Some(since));
            let limit = self.lanes[0].limit();
            if now - since >= limit {
                let limit_ms = limit.as_millis() as u64;
                self.peer.health.fail(kind.name(), Cause::Still { limit_ms });
                return Err(self.failure(kind.name()));
            }
            // Room comes within microseconds, unless the peer's process stands still.
            if now - since >= YIELD {
                std::thread::sleep(PAUSE);
            } else {
                std::thread::yield_now();
            }
        }
        Ok(())
    }

    /// Waits until all requests are complete.
    pub(super) fn drain(&mut self, deadline: Instant) -> Result<(), QuietError> {
        self.health()?;
        let address = self.remote.address;
        let lanes = if self.is_spread { self.lanes.len() } else { 1 };
        for lane in &mut self.lanes[..lanes] {
            if lane.seal(address).is_err() {
                return Err(self.failure("quiet").into());
            }
        }
        for lane in &self.lanes[..lanes] {
            match lane.wait(OpKind::Quiet, 0, Some(deadline)) {
                Ok(true) => {}
                Ok(false) => {
                    let outstanding: u64 = self.lanes.iter().map(Lane::num_outstanding).sum();
                    return Err(QuietError::Deadline { outstanding: outstanding as usize });
                }
                Err(Failed) => return Err(self.failure("quiet").into()),
            }
        }
        self.is_spread = false;
        self.fence_before_spread = false;
        if let Some(sent) = &mut self.sent {
            sent.has_spread_reads = false;
        }
        Ok(())
    }

    /// Waits until the peer's driver has done what the messages before asked for.
    pub(super) fn hear(&mut self, deadline: Instant) -> Result<(), QuietError> {
        let Some(sent) = &self.sent else { return Ok(()) };
        let (mut asked, mut is_open) = (sent.num_asked, sent.is_open);
        let mut num_looks = 0u32;
        loop {
            if is_open && self.has_room() {
                asked += 1;
                self.send(OpKind::Quiet, Then::Answer { id: asked }).transpose()?;
                is_open = false;
                if let Some(sent) = &mut self.sent {
                    (sent.num_asked, sent.is_open) = (asked, is_open);
                }
            }
            self.progress.drive();
            if !is_open && self.peer.arrivals.answered() >= asked {
                return Ok(());
            }
            self.health()?;
            num_looks = num_looks.wrapping_add(1);
            // A clock costs as much as a look.
            if num_looks.is_multiple_of(16) {
                if Instant::now() >= deadline {
                    return Err(QuietError::Deadline { outstanding: 1 });
                }
                std::thread::yield_now();
            }
        }
    }
}

/// How long a wait for room lets others run between looks, and how long it sleeps between them then.
const YIELD: Duration = Duration::from_millis(1);
const PAUSE: Duration = Duration::from_micros(100);
