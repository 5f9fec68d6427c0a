//! A lane: one link to every server, used by one call at a time.
//!
//! The holder of a lane has it alone, so nothing here takes a lock. Connectors put new links into mailboxes and
//! notify the lane by [`LaneEvents`].

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use p2p_core::{ChannelError, WaitSet};
use protocol::{DispatchMeta, FrameId, ResponseScratch, encode_dispatch};
use telemetry::Recorder;
use telemetry::ids::next_call;

use super::call::{Call, FrameState};
#[cfg(feature = "failpoints")]
use super::sabotage;
use crate::error::ClientError;
use crate::fail_point;
use crate::fleet::lane_port::LaneEvents;
use crate::fleet::link::{ABANDONED, Link, OpenFrame, Server};
use crate::fleet::placement::Routing;
use crate::fleet::shared::Shared;
use crate::metrics::FailReason;

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct Lane {
    pub id: usize,
    /// Identity of this lane for servers. Each lane has slots of its own.
    pub client_id: u64,
    pub wait: WaitSet,
    pub events: Arc<LaneEvents>,
    pub routing: Arc<Routing>,
    /// By [`Server::idx`].
    pub links: Vec<Option<Box<Link>>>,
    pub call: Call,
    pub scratch: ResponseScratch,
    /// Free buffers for rows that wait to be summed in order.
    pub buffers: Vec<Vec<f32>>,
    seen_events: u64,
    next_sequence: u64,
    /// Last look at the peers' signs of life.
    pub watched_at: Option<Instant>,
    /// Number of events at the end of a futile wait for a replica. Without a new event, another wait is futile too.
    pub futile_wait_at: Option<u64>,
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
        events: Arc<LaneEvents>,
        routing: Arc<Routing>,
    ) -> Self {
        Self {
            id,
            client_id,
            wait,
            events,
            routing,
            links: Vec::new(),
            call: Call::default(),
            scratch: ResponseScratch::default(),
            buffers: Vec::new(),
            // Differs from any count, so that the first `sync` reads everything.
            seen_events: u64::MAX,
            next_sequence: 0,
            watched_at: None,
            futile_wait_at: None,
        }
    }

    /// Begins the sequence numbers of a call. Returns true if the call is to be traced.
    pub fn begin_sequences(&mut self, recorder: Option<&Recorder>) -> bool {
        self.next_sequence = next_call(self.next_sequence);
        recorder.is_some_and(|recorder| recorder.samples(self.client_id, self.next_sequence + 1))
    }

    pub fn next_sequence(&mut self) -> u64 {
        self.next_sequence += 1;
        self.next_sequence
    }

    /// Number of events that [`sync`](Self::sync) has handled.
    pub fn seen_events(&self) -> u64 {
        self.seen_events
    }

    /// Applies new placements, new links and closed connections, if there was an event. Returns true if a new
    /// placement or link may help waiting tokens.
    pub fn sync(&mut self, shared: &Shared) -> bool {
        let count = self.events.count();
        if count == self.seen_events {
            return false;
        }
        self.seen_events = count;
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

    /// Retires links whose connection is closed.
    pub fn fail_closed(&mut self, shared: &Shared) {
        for idx in 0..self.links.len() {
            let Some(down) = self.links[idx].as_ref().and_then(|link| link.state.down()) else {
                continue;
            };
            // Answers that arrived before the close still count.
            let fault = match self.take_answers_of(idx, shared) {
                Ok(_) => LinkFault::new(down.reason(), "the connection closed"),
                Err(fault) => fault,
            };
            self.fail_link(idx, fault, shared);
        }
    }

    /// Retires links whose connection this host's kernel knows to be closed. Waits for that for `limit` at most per
    /// link. Returns true if there was one.
    pub fn fail_closed_now(&mut self, shared: &Shared, limit: Duration) -> bool {
        let links = self.links.iter().flatten();
        // All are looked at: each look lets a link know of its end.
        let num_closed = links.filter(|link| link.look_closed(limit)).count();
        self.fail_closed(shared);
        num_closed > 0
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
            // No harm: without wake-ups the next tick finds the answers.
            tracing::warn!(server = link.server.name(), %error, "no wake-ups from this server");
        }
        self.links[idx] = Some(link);
    }

    /// Returns true if every server of the placement is connected or could not be connected.
    pub fn has_tried_all(&self) -> bool {
        let servers = &self.routing.servers;
        servers.iter().all(|s| self.live_link(s).is_some() || s.last_error.load().is_some())
    }

    /// The link to `server`, if it is up.
    pub fn live_link(&self, server: &Server) -> Option<&Link> {
        let link = self.links.get(server.idx)?.as_deref()?;
        (link.server.uid == server.uid && link.state.down().is_none()).then_some(link)
    }

    /// Publishes queued frames of every link, as far as there is credit.
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
            let frame = &self.call.frames[frame_no as usize];
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
            fail_point!("client::between_payload_and_publish");
            // Before the server can see the frame, so that the time until its answer holds all of the server's.
            let published_at = Instant::now();
            // The request goes before returned frames: the server waits for it.
            let published = link.channel.publish(tx, used_bytes);
            if let Err(error) = published.and_then(|()| link.return_frames()) {
                return Ok(Err(error.into()));
            }
            let open = OpenFrame {
                sequence: frame.sequence,
                frame_idx: frame.plan.frame_idx,
                layer: self.call.layer,
                num_tokens: frame.plan.num_tokens,
                frame: frame_no,
                published_at,
            };
            if !frame.hedge.is_copy() {
                shared.pacing.earn();
            }
            link.push_open(open);
            self.call.frame_sent(frame_no);
            shared.metrics.frames_out.inc();
            shared.metrics.bytes_out.inc_by(used_bytes as u64);
        }
        Ok(Ok(()))
    }

    /// Retires a link. Its slots are never read again, and its unanswered frames are sent to replicas.
    pub fn fail_link(&mut self, idx: usize, fault: LinkFault, shared: &Shared) {
        #[cfg(feature = "failpoints")]
        if fault.reason == FailReason::Silent && sabotage::is_on(sabotage::READ_RETIRED) {
            return self.fail_but_read_on(idx);
        }
        let Some(mut link) = self.links[idx].take() else { return };
        // An error is no harm: closing the last copy of a descriptor removes it from the set too.
        let _ = self.wait.detach(link.channel.endpoint());
        let _ = self.wait.remove(link.liveness.as_fd());
        let mut num_sent = 0;
        for open in link.open.drain(..) {
            if open.frame != ABANDONED {
                self.call.frame_failed(open.frame, &link.server);
                num_sent += 1;
            }
        }
        for frame in link.queue.drain(..) {
            self.call.frame_unsent(frame, &link.server);
        }
        if num_sent > 0 {
            self.call.link_failed(&link.server, link.last_life);
            shared.metrics.count_failover(fault.reason);
            tracing::warn!(
                server = link.server.name(),
                lane = self.id,
                generation = link.generation,
                frames = num_sent,
                reason = fault.reason.name(),
                detail = fault.detail,
                "a server failed with frames unanswered: resending them to replicas"
            );
        }
        match fault.reason {
            FailReason::Silent | FailReason::Stuck => {
                link.server.is_silent.store(true, Ordering::Relaxed);
            }
            FailReason::Invalid => shared.metrics.invalid_responses.inc(),
            _ => {}
        }
        link.server.note_error(fault.detail);
        link.retire(fault.reason);
    }

    /// Resends the link's frames like those of a failed link, but goes on reading its slot.
    #[cfg(feature = "failpoints")]
    fn fail_but_read_on(&mut self, idx: usize) {
        let Some(link) = self.links[idx].as_deref_mut() else { return };
        for open in link.open.iter().filter(|open| open.frame != ABANDONED) {
            self.call.frame_failed(open.frame, &link.server);
        }
        // Later answers match no open frame. Only the count of such answers shows that the slot is still read.
        link.open.clear();
        for frame in link.queue.drain(..) {
            self.call.frame_unsent(frame, &link.server);
        }
        self.call.link_failed(&link.server, link.last_life);
        link.server.is_silent.store(true, Ordering::Relaxed);
        // Keeps the link from failing again for its silence.
        link.last_life = Instant::now() + std::time::Duration::from_secs(3600);
    }

    /// Abandons the current call. Links keep its published frames open, and drop the answers when they arrive.
    pub fn abandon_call(&mut self, shared: &Shared) {
        let mut num_outstanding = 0;
        for link in self.links.iter_mut().flatten() {
            for frame in link.queue.drain(..) {
                self.call.frame_unsent(frame, &link.server);
            }
            for open in &mut link.open {
                if open.frame != ABANDONED {
                    self.call.frame_unsent(open.frame, &link.server);
                    open.frame = ABANDONED;
                    num_outstanding += 1;
                }
            }
            #[cfg(feature = "failpoints")]
            if sabotage::is_on(sabotage::SKIP_STALE_CHECK) {
                link.open.clear();
            }
        }
        if num_outstanding > 0 {
            shared.metrics.abandoned.inc();
        }
        self.drop_hedges(shared);
        self.reclaim_buffers();
    }

    /// Returns the row buffers of the call's frames to the free ones.
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
