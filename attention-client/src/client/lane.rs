//! A lane: one link to every server, used by one call at a time.
//!
//! Whoever holds the lane has it alone, so nothing here takes a lock. The control side hands fresh
//! links over through mailboxes and says so by [`LaneNews`].

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use p2p_core::{ChannelError, WaitSet};
use protocol::{DispatchMeta, FrameId, ResponseScratch, encode_dispatch};

use super::call::{Call, FrameState};
use super::error::ClientError;
use super::link::{ABANDONED, LaneNews, Link, Pending};
use super::sabotage;
use super::shared::Shared;
use crate::metrics::FailReason;
use crate::placement::{Routing, Server};

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct Lane {
    pub id: usize,
    /// Identity of this lane towards servers: each has slots of its own.
    pub client_id: u64,
    pub wait: WaitSet,
    pub news: Arc<LaneNews>,
    pub routing: Arc<Routing>,
    /// By [`Server::idx`].
    pub links: Vec<Option<Box<Link>>>,
    pub call: Call,
    pub scratch: ResponseScratch,
    /// Buffers for rows that wait for their turn to be summed.
    pub buffers: Vec<Vec<f32>>,
    seen_news: u64,
    next_sequence: u64,
    /// The count of news at which a call waited for a replica in vain: until there is more, waiting
    /// again is no use.
    pub vain_wait_at: Option<u64>,
}

/// A link cannot go on.
#[derive(Debug)]
pub(crate) struct LinkFault {
    pub reason: FailReason,
    pub detail: String,
}

impl LinkFault {
    pub fn new(reason: FailReason, detail: impl ToString) -> Self {
        Self { reason, detail: detail.to_string() }
    }
}

impl From<ChannelError> for LinkFault {
    fn from(error: ChannelError) -> Self {
        let reason = match error {
            ChannelError::Desync(_) => FailReason::Desync,
            _ => FailReason::Transport,
        };
        Self::new(reason, error)
    }
}

impl Lane {
    pub fn new(
        id: usize,
        client_id: u64,
        wait: WaitSet,
        news: Arc<LaneNews>,
        routing: Arc<Routing>,
    ) -> Self {
        Self {
            id,
            client_id,
            wait,
            news,
            routing,
            links: Vec::new(),
            call: Call::default(),
            scratch: ResponseScratch::default(),
            buffers: Vec::new(),
            // Differs from the count, so that the first look takes in what is there.
            seen_news: u64::MAX,
            next_sequence: 0,
            vain_wait_at: None,
        }
    }

    pub fn next_sequence(&mut self) -> u64 {
        self.next_sequence += 1;
        self.next_sequence
    }

    /// How many announcements [`sync`](Self::sync) has taken in.
    pub fn seen_news(&self) -> u64 {
        self.seen_news
    }

    /// Takes in new placements, new links and broken connections, if any were announced. Says
    /// whether something came that may help waiting tokens.
    pub fn sync(&mut self, shared: &Shared) -> bool {
        let count = self.news.count();
        if count == self.seen_news {
            return false;
        }
        self.seen_news = count;
        let newest = shared.routing.load();
        let mut helps = false;
        if !Arc::ptr_eq(&newest, &self.routing) {
            self.routing = Arc::clone(&newest);
            helps = true;
        }
        drop(newest);
        for rank in 0..self.routing.servers.len() {
            let server = &self.routing.servers[rank];
            if let Some(link) = server.mailboxes[self.id].pop() {
                self.install(link, shared);
                helps = true;
            }
        }
        self.fail_closed(shared);
        helps
    }

    /// Fails links whose connection is over.
    pub fn fail_closed(&mut self, shared: &Shared) {
        for idx in 0..self.links.len() {
            let Some(down) = self.links[idx].as_ref().and_then(|link| link.state.down()) else {
                continue;
            };
            // What it had answered before is there to be taken.
            let fault = match self.take_answers_of(idx, shared) {
                Ok(_) => LinkFault::new(down.reason(), "the connection closed"),
                Err(fault) => fault,
            };
            self.fail_link(idx, fault, shared);
        }
    }

    fn install(&mut self, link: Box<Link>, shared: &Shared) {
        let idx = link.server.idx;
        if idx >= self.links.len() {
            self.links.resize_with(idx + 1, || None);
        }
        if self.links[idx].is_some() {
            let detail = "replaced by a newer connection";
            self.fail_link(idx, LinkFault::new(FailReason::Closed, detail), shared);
        }
        let added = self.wait.attach(link.channel.endpoint());
        if let Err(error) = added.and_then(|()| self.wait.add(link.liveness.as_fd())) {
            // Without wake-ups answers are still found, at the next tick.
            tracing::warn!(server = link.server.name(), %error, "no wake-ups from this server");
        }
        self.links[idx] = Some(link);
    }

    /// The link to `server`, if it is up.
    pub fn live_link(&self, server: &Server) -> Option<&Link> {
        let link = self.links.get(server.idx)?.as_deref()?;
        (link.server.uid == server.uid && link.state.down().is_none()).then_some(link)
    }

    /// Publishes waiting frames of every link as far as there is credit.
    pub fn pump(&mut self, shared: &Shared, x: &[f32]) -> Result<(), ClientError> {
        for idx in 0..self.links.len() {
            match self.pump_link(idx, shared, x)? {
                Ok(()) => {}
                Err(fault) => self.fail_link(idx, fault, shared),
            }
        }
        Ok(())
    }

    fn pump_link(
        &mut self,
        idx: usize,
        shared: &Shared,
        x: &[f32],
    ) -> Result<Result<(), LinkFault>, ClientError> {
        let Some(link) = self.links[idx].as_deref_mut() else { return Ok(Ok(())) };
        while let Some(&frame_no) = link.queue.front() {
            let tx = match link.channel.try_reserve() {
                Ok(Some(tx)) => tx,
                Ok(None) => break,
                Err(error) => return Ok(Err(error.into())),
            };
            let frame = &mut self.call.frames[frame_no as usize];
            let meta = DispatchMeta {
                id: FrameId {
                    epoch: frame.epoch,
                    client_id: self.client_id,
                    generation: link.generation,
                    sequence: frame.sequence,
                    layer: self.call.layer,
                    frame_idx: frame.plan.frame_idx,
                    num_frames: frame.plan.num_frames,
                },
                hidden: shared.geometry.hidden(),
                dtype: shared.geometry.dtype(),
                response_dtype: shared.geometry.response_dtype(),
                payload_checksum: shared.settings.payload_checksum,
            };
            let first = frame.plan.first_token as usize;
            let tokens = &self.call.plan.tokens[first..first + frame.plan.num_tokens as usize];
            let mut view = link.channel.write_view(&tx);
            let used_bytes = encode_dispatch(&mut view, &meta, x, tokens, &self.call.plan.entries)
                .map_err(|error| ClientError::Encode {
                    layer: self.call.layer,
                    detail: error.to_string(),
                })?;
            fail::fail_point!("client::between_payload_and_publish");
            // The request goes first: it is what the server waits for.
            let published = link.channel.publish(tx, used_bytes);
            if let Err(error) = published.and_then(|()| link.give_credit()) {
                return Ok(Err(error.into()));
            }
            let pending = Pending {
                sequence: frame.sequence,
                frame_idx: frame.plan.frame_idx,
                layer: self.call.layer,
                num_tokens: frame.plan.num_tokens,
                frame: frame_no,
            };
            link.push_pending(pending, Instant::now());
            frame.state = FrameState::Sent;
            self.call.timing.num_frames += 1;
            shared.metrics.frames_out.inc();
            shared.metrics.bytes_out.inc_by(used_bytes as u64);
        }
        Ok(Ok(()))
    }

    /// Retires a link: its slots are never read again, and what it has not answered is to be sent
    /// elsewhere.
    pub fn fail_link(&mut self, idx: usize, fault: LinkFault, shared: &Shared) {
        if fault.reason == FailReason::Silent && sabotage::asked(sabotage::READ_RETIRED) {
            return self.fail_but_read_on(idx);
        }
        let Some(mut link) = self.links[idx].take() else { return };
        // Closing a descriptor's last copy removes it too.
        let _ = self.wait.detach(link.channel.endpoint());
        let _ = self.wait.remove(link.liveness.as_fd());
        let mut num_sent = 0;
        for pending in link.pending.drain(..) {
            if pending.frame != ABANDONED {
                self.call.frame_failed(pending.frame, &link.server);
                num_sent += 1;
            }
        }
        for frame in link.queue.drain(..) {
            self.call.frame_unsent(frame, &link.server);
        }
        if num_sent > 0 {
            self.call.link_failed(link.server.idx, link.last_life);
            shared.metrics.count_failover(fault.reason);
            tracing::warn!(
                server = link.server.name(),
                slot = self.id,
                generation = link.generation,
                frames = num_sent,
                reason = fault.reason.name(),
                detail = fault.detail,
                "a server failed with frames unanswered; they go to replicas"
            );
        }
        match fault.reason {
            FailReason::Silent | FailReason::Stuck => {
                link.server.silenced.store(true, Ordering::Relaxed);
            }
            FailReason::Invalid => shared.metrics.invalid_responses.inc(),
            _ => {}
        }
        link.server.note_error(fault.detail);
        link.retire(fault.reason);
    }

    /// Gives the current call up. Frames that are with servers stay the links' business: their
    /// answers are dropped when they come.
    pub fn abandon_call(&mut self, shared: &Shared) {
        let mut num_outstanding = 0;
        for link in self.links.iter_mut().flatten() {
            for frame in link.queue.drain(..) {
                self.call.frame_unsent(frame, &link.server);
            }
            for pending in &mut link.pending {
                if pending.frame != ABANDONED {
                    self.call.frame_unsent(pending.frame, &link.server);
                    pending.frame = ABANDONED;
                    num_outstanding += 1;
                }
            }
            if sabotage::asked(sabotage::SKIP_STALE_CHECK) {
                link.pending.clear();
            }
        }
        if num_outstanding > 0 {
            shared.metrics.abandoned.inc();
        }
        self.reclaim_buffers();
    }

    /// Takes the row buffers of the call's frames back.
    pub fn reclaim_buffers(&mut self) {
        for frame in &mut self.call.frames {
            if let FrameState::Answered(buffer) =
                std::mem::replace(&mut frame.state, FrameState::Done)
            {
                self.buffers.push(buffer);
            }
        }
    }
}
