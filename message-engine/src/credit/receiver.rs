//! The receiving half: distributes the window among the senders.

use super::heap::Heap;
use super::list::List;
use super::{Credit, CreditConfig, CreditError, Demand, GrantOrder, within};

/// A sender of a receiver.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SenderId {
    index: u32,
    generation: u32,
}

impl SenderId {
    /// Its index, below [`CreditConfig::max_senders`]. The index is reused after the sender has left.
    #[must_use]
    pub const fn index(self) -> usize {
        self.index as usize
    }
}

/// An event at the receiver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// The sender reported its demand.
    Demand(Demand),
    /// Scheduled bytes that have arrived from the sender since it joined.
    Received(u64),
    /// Unscheduled bytes that have arrived from the sender since it joined.
    UnscheduledReceived(u64),
}

/// A step for the caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Action {
    /// Send the sender its credit.
    Credit {
        /// The sender.
        sender: SenderId,
        /// Its credit, which replaces all earlier reports.
        credit: Credit,
    },
    /// The sender did not use its grant in time. The caller need do nothing: the sender gets no grants until it does.
    Stalled {
        /// The sender.
        sender: SenderId,
        /// Bytes that it may still send.
        outstanding_bytes: u64,
    },
}

/// A receiver's state of one sender, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SenderState {
    /// Announced, not withdrawn and not granted.
    pub ungranted: u64,
    /// Granted and not arrived.
    pub outstanding: u64,
    /// Whether the outstanding bytes have timed out and do not count in the window.
    pub stalled: bool,
}

/// Distributes one receiver's window among its senders.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CreditReceiver {
    config: CreditConfig,
    senders: Vec<Sender>,
    free: Vec<u32>,
    num_senders: usize,
    /// Bytes granted and not arrived, without stalled senders.
    window_used: u64,
    /// Senders that may get a grant, the longest-waiting first.
    ready: List,
    /// The same senders by ungranted bytes; empty unless the order needs it.
    by_demand: Heap,
    /// Senders with a running time limit, the first to expire first.
    timed: List,
    /// Senders with an action.
    pending_actions: List,
    num_turns: u64,
    now_ns: u64,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Sender {
    present: bool,
    generation: u32,
    demand: Demand,
    received: u64,
    granted: u64,
    unscheduled_received: u64,
    stalled: bool,
    /// Begin of the time limit for `target`.
    since_ns: u64,
    /// Value that received + withdrawn must reach within the time limit.
    target: u64,
    credit_pending: bool,
    stall_pending: bool,
}

impl Sender {
    const fn used(&self) -> u64 {
        self.received + self.demand.withdrawn
    }

    const fn outstanding(&self) -> u64 {
        self.granted - self.used()
    }

    const fn ungranted(&self) -> u64 {
        self.demand.announced - self.granted
    }
}

impl CreditReceiver {
    /// A receiver without senders. All memory it will ever need is allocated here.
    ///
    /// # Errors
    /// [`CreditError::Config`].
    pub fn new(config: CreditConfig) -> Result<Self, CreditError> {
        config.check()?;
        let by_demand = match config.order {
            GrantOrder::ShortestFirst => config.max_senders,
            GrantOrder::RoundRobin => 0,
        };
        Ok(Self {
            senders: vec![Sender::default(); config.max_senders],
            free: (0..config.max_senders as u32).rev().collect(),
            num_senders: 0,
            window_used: 0,
            ready: List::new(config.max_senders),
            by_demand: Heap::new(by_demand),
            timed: List::new(config.max_senders),
            pending_actions: List::new(config.max_senders),
            num_turns: 0,
            now_ns: 0,
            config,
        })
    }

    /// Admits a sender with a fresh [`CreditSender`](super::CreditSender).
    ///
    /// # Errors
    /// [`CreditError::Full`].
    pub fn join(&mut self) -> Result<SenderId, CreditError> {
        let index = self.free.pop().ok_or(CreditError::Full { max: self.config.max_senders })?;
        let sender = &mut self.senders[index as usize];
        let generation = sender.generation;
        *sender = Sender { present: true, generation, ..Sender::default() };
        self.num_senders += 1;
        Ok(SenderId { index, generation })
    }

    /// Removes a sender and frees its grant. The caller ensures that nothing of it can arrive any more.
    ///
    /// # Errors
    /// [`CreditError::Unknown`].
    pub fn leave(&mut self, now_ns: u64, id: SenderId) -> Result<(), CreditError> {
        let idx = self.find(id)?;
        self.now_ns = self.now_ns.max(now_ns);
        for list in [&mut self.ready, &mut self.timed, &mut self.pending_actions] {
            list.remove(idx);
        }
        if self.config.order == GrantOrder::ShortestFirst {
            self.by_demand.remove(idx);
        }
        let sender = &mut self.senders[idx as usize];
        if !sender.stalled {
            self.window_used -= sender.outstanding();
        }
        sender.present = false;
        sender.generation = sender.generation.wrapping_add(1);
        self.free.push(idx);
        self.num_senders -= 1;
        self.grant();
        Ok(())
    }

    /// Handles an event of sender `id` at `now_ns`, by any clock that does not run backwards. Then
    /// [`next_action`](Self::next_action) returns the steps for the caller.
    ///
    /// # Errors
    /// [`CreditError::Impossible`] if the sender broke the protocol; [`CreditError::Unknown`]. The state is unchanged
    /// then.
    pub fn handle(&mut self, now_ns: u64, id: SenderId, event: Event) -> Result<(), CreditError> {
        let idx = self.find(id)?;
        match event {
            Event::Demand(demand) => self.on_demand(idx, demand)?,
            Event::Received(received) => self.on_received(idx, received)?,
            Event::UnscheduledReceived(received) => return self.on_unscheduled(idx, received),
        }
        self.now_ns = self.now_ns.max(now_ns);
        self.update_queues(idx);
        self.grant();
        Ok(())
    }

    /// Expires the grants that have timed out at `now_ns`, and gives their share to others. Returns the number of
    /// senders that stalled.
    pub fn expire(&mut self, now_ns: u64) -> usize {
        self.now_ns = self.now_ns.max(now_ns);
        let mut num_stalled = 0;
        while let Some(idx) = self.timed.first() {
            let sender = &mut self.senders[idx as usize];
            if sender.since_ns.saturating_add(self.config.expiry_ns) > self.now_ns {
                break;
            }
            self.window_used -= sender.outstanding();
            sender.stalled = true;
            sender.stall_pending = true;
            num_stalled += 1;
            self.pending_actions.push_last(idx);
            self.update_queues(idx);
        }
        if num_stalled > 0 {
            self.grant();
        }
        num_stalled
    }

    /// Time of the next expiry, unless more bytes arrive before.
    #[must_use]
    pub fn next_expiry_ns(&self) -> Option<u64> {
        let idx = self.timed.first()?;
        Some(self.senders[idx as usize].since_ns.saturating_add(self.config.expiry_ns))
    }

    /// Returns the next step. The caller repeats the call until it returns `None`.
    pub fn next_action(&mut self) -> Option<Action> {
        let idx = self.pending_actions.first()?;
        let sender = &mut self.senders[idx as usize];
        let id = SenderId { index: idx, generation: sender.generation };
        let action = if std::mem::take(&mut sender.stall_pending) {
            Action::Stalled { sender: id, outstanding_bytes: sender.outstanding() }
        } else {
            sender.credit_pending = false;
            let unscheduled =
                sender.unscheduled_received.saturating_add(self.config.unscheduled_bytes);
            Action::Credit { sender: id, credit: Credit { granted: sender.granted, unscheduled } }
        };
        if !sender.credit_pending {
            self.pending_actions.remove(idx);
        }
        Some(action)
    }

    /// Bytes of the window that are granted and under way.
    #[must_use]
    pub const fn window_used(&self) -> u64 {
        self.window_used
    }

    /// Number of senders.
    #[must_use]
    pub const fn num_senders(&self) -> usize {
        self.num_senders
    }

    /// State of a sender.
    ///
    /// # Errors
    /// [`CreditError::Unknown`].
    pub fn sender(&self, id: SenderId) -> Result<SenderState, CreditError> {
        let sender = &self.senders[self.find(id)? as usize];
        Ok(SenderState {
            ungranted: sender.ungranted(),
            outstanding: sender.outstanding(),
            stalled: sender.stalled,
        })
    }

    /// Current credit of a sender: the same as in the next [`Action::Credit`]. For senders in the same process, such as
    /// the reads of this receiver's own user.
    ///
    /// # Errors
    /// [`CreditError::Unknown`].
    pub fn credit_of(&self, id: SenderId) -> Result<Credit, CreditError> {
        let sender = &self.senders[self.find(id)? as usize];
        let unscheduled = sender.unscheduled_received.saturating_add(self.config.unscheduled_bytes);
        Ok(Credit { granted: sender.granted, unscheduled })
    }

    fn find(&self, id: SenderId) -> Result<u32, CreditError> {
        match self.senders.get(id.index()) {
            Some(sender) if sender.present && sender.generation == id.generation => Ok(id.index),
            _ => Err(CreditError::Unknown { index: id.index, generation: id.generation }),
        }
    }

    fn on_demand(&mut self, idx: u32, demand: Demand) -> Result<(), CreditError> {
        let sender = &mut self.senders[idx as usize];
        let old = sender.demand;
        within("announced", demand.announced, old.announced, u64::MAX)?;
        let high = demand.announced - sender.received;
        within("withdrawn", demand.withdrawn, old.withdrawn, high)?;
        // The sender no longer counts sent bytes as demanded, and some of them are still under way.
        let limit = self.config.max_demand_bytes.saturating_add(sender.outstanding());
        if demand.announced - demand.withdrawn - sender.received > limit {
            let high = limit.saturating_add(demand.withdrawn + sender.received);
            return Err(CreditError::Impossible {
                counter: "announced",
                found: demand.announced,
                low: old.announced,
                high,
            });
        }
        // Withdrawn bytes first reduce the ungranted bytes, as if those were granted and used at once. Only then do
        // they reduce the grant.
        let withdrawn = demand.withdrawn - old.withdrawn;
        let from_ungranted = withdrawn.min(demand.announced - sender.granted);
        sender.demand = demand;
        sender.granted += from_ungranted;
        if !sender.stalled {
            self.window_used -= withdrawn - from_ungranted;
        }
        if from_ungranted > 0 {
            self.queue_credit(idx);
        }
        Ok(())
    }

    fn on_received(&mut self, idx: u32, received: u64) -> Result<(), CreditError> {
        let sender = &mut self.senders[idx as usize];
        let high = sender.received + sender.outstanding();
        within("received", received, sender.received, high)?;
        if !sender.stalled {
            self.window_used -= received - sender.received;
        }
        sender.received = received;
        Ok(())
    }

    fn on_unscheduled(&mut self, idx: u32, received: u64) -> Result<(), CreditError> {
        let sender = &mut self.senders[idx as usize];
        let low = sender.unscheduled_received;
        let high = low.saturating_add(self.config.unscheduled_bytes);
        within("unscheduled received", received, low, high)?;
        sender.unscheduled_received = received;
        if received > low {
            self.queue_credit(idx);
        }
        Ok(())
    }

    /// Moves a sender whose counters changed to the right queues.
    fn update_queues(&mut self, idx: u32) {
        let sender = &mut self.senders[idx as usize];
        if sender.outstanding() == 0 {
            sender.stalled = false;
        }
        if sender.stalled || sender.outstanding() == 0 {
            self.timed.remove(idx);
        } else if !self.timed.contains(idx) || sender.used() >= sender.target {
            // A time limit for all bytes under way now: a sender that sends a byte now and then does not keep its share
            // for ever.
            sender.since_ns = self.now_ns;
            sender.target = sender.granted;
            self.timed.push_last(idx);
        }
        let turn = sender.ungranted().min(self.config.grant_bytes);
        let room = self.config.sender_window_bytes - sender.outstanding();
        if turn > 0 && turn <= room && !sender.stalled {
            if !self.ready.contains(idx) {
                self.ready.push_last(idx);
            }
            if self.config.order == GrantOrder::ShortestFirst {
                self.by_demand.set(idx, sender.ungranted());
            }
        } else {
            self.ready.remove(idx);
            if self.config.order == GrantOrder::ShortestFirst {
                self.by_demand.remove(idx);
            }
        }
    }

    /// Gives turns while there is room in the window. A turn that does not fit whole waits, and all others with it.
    /// Otherwise grants would become ever smaller.
    fn grant(&mut self) {
        while let Some(idx) = self.next_sender() {
            let sender = &mut self.senders[idx as usize];
            let turn = sender.ungranted().min(self.config.grant_bytes);
            if turn > self.config.window_bytes - self.window_used {
                break;
            }
            sender.granted += turn;
            self.window_used += turn;
            self.num_turns = self.num_turns.wrapping_add(1);
            self.ready.remove(idx);
            self.update_queues(idx);
            self.queue_credit(idx);
        }
    }

    fn next_sender(&self) -> Option<u32> {
        match self.config.order {
            GrantOrder::ShortestFirst if !self.num_turns.is_multiple_of(TURNS_PER_FAIR_TURN) => {
                self.by_demand.first()
            }
            _ => self.ready.first(),
        }
    }

    fn queue_credit(&mut self, idx: u32) {
        self.senders[idx as usize].credit_pending = true;
        if !self.pending_actions.contains(idx) {
            self.pending_actions.push_last(idx);
        }
    }
}

/// One of this many turns goes to the sender that has waited longest.
const TURNS_PER_FAIR_TURN: u64 = 8;
