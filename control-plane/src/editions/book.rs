//! The states of all editions, and the changes that operators ask for. Sans-I/O: a change returns a new book, which the
//! caller makes durable first.

use std::time::Duration;

use control_api::models::is_fingerprint;
use control_api::{EditionState, SwitchRequest};

use crate::coordinator::Coordinator;
use crate::store::editions::EditionId;
use crate::store::{EditionRecord, PlannedSwitch, Retirement};
use crate::table::Coverage;

/// One edition in the book. Times are of the control plane's clock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) id: EditionId,
    pub(super) record: EditionRecord,
    /// Time when a client was last seen. At the start of a term every edition counts as followed.
    pub(super) client_seen_at: Duration,
    /// Time by which a retiring edition is drained in any case.
    pub(super) retire_by: Option<Duration>,
}

impl Entry {
    pub(super) fn new(id: EditionId, record: EditionRecord, now: Duration) -> Self {
        Self { id, record, client_seen_at: now, retire_by: None }
    }

    /// An edition of an earlier process. A clock that was set back does not prolong its retirement.
    pub(super) fn restored(
        id: EditionId,
        record: EditionRecord,
        now: Duration,
        unix_ms: u64,
    ) -> Self {
        let retire_by = record.retirement.map(|Retirement { since_unix_ms, after_ms }| {
            let passed = unix_ms.saturating_sub(since_unix_ms);
            now.saturating_add(Duration::from_millis(after_ms.saturating_sub(passed)))
        });
        Self { retire_by, ..Self::new(id, record, now) }
    }
}

/// All editions, the current one first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Book {
    pub(super) entries: Vec<Entry>,
}

/// Reason why the state of the update does not allow a change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct UpdateRefusal(pub(super) String);

/// Outcome of [`Book::add`].
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Addition {
    /// The model was added before.
    Known,
    /// The retiring model is the next one again.
    Revived(Book),
    New(EditionRecord),
}

impl Book {
    pub(super) fn records(&self) -> Vec<(EditionId, EditionRecord)> {
        self.entries.iter().map(|entry| (entry.id, entry.record.clone())).collect()
    }

    fn find(&self, state: EditionState) -> Option<&Entry> {
        self.entries.iter().find(|entry| entry.record.state == state)
    }

    /// Adds a model. `pinned` is the only fingerprint that the settings accept.
    pub(super) fn add(
        &self,
        fingerprint: &str,
        pinned: Option<&str>,
    ) -> Result<Addition, UpdateRefusal> {
        if !is_fingerprint(fingerprint) {
            let found: String = fingerprint.chars().take(80).collect();
            return refuse(format!(
                "model fingerprint {found:?}: expected 8 to 128 lowercase hex digits, as `switchyard inspect` prints them"
            ));
        }
        let current = self.entries.first().and_then(|entry| entry.record.fingerprint.as_deref());
        let Some(current) = current else {
            return refuse(
                "the fleet has no model yet: its first server brings it, so there is nothing to update".to_owned(),
            );
        };
        if let Some(pinned) = pinned.filter(|&pinned| pinned != fingerprint) {
            return refuse(format!(
                "the settings of this control plane accept the model {pinned} only: restart it without \
                 --model-fingerprint for an update"
            ));
        }
        if current == fingerprint {
            return refuse(format!("{fingerprint} is the current model: add another one"));
        }
        let Some(other) = self.entries.get(1) else {
            return Ok(Addition::New(EditionRecord {
                state: EditionState::Next,
                ..EditionRecord::current(Some(fingerprint.to_owned()))
            }));
        };
        let known = other.record.fingerprint.as_deref();
        match (other.record.state, known == Some(fingerprint)) {
            (EditionState::Next, true) => Ok(Addition::Known),
            (EditionState::Retiring, true) => {
                let mut book = self.clone();
                let record = &mut book.entries[1].record;
                (record.state, record.retirement) = (EditionState::Next, None);
                book.entries[1].retire_by = None;
                Ok(Addition::Revived(book))
            }
            (state, _) => {
                let known = known.unwrap_or("?");
                let hint = match state {
                    EditionState::Next => "switch to it or abort that update first",
                    EditionState::Retiring => "wait until its clients have gone",
                    _ => "wait until its servers have left, or stop them",
                };
                refuse(format!(
                    "a fleet serves at most two models, and {known} is {state} beside the current one: {hint}"
                ))
            }
        }
    }

    /// Checks a switch.
    pub(super) fn plan_switch(
        &self,
        request: &SwitchRequest,
    ) -> Result<PlannedSwitch, UpdateRefusal> {
        if self.find(EditionState::Next).is_none() {
            return Err(no_next());
        }
        if request.replicas == Some(0) {
            return refuse("replicas 0: expected 1 or more".to_owned());
        }
        let retire_after_ms = request.retire_after_ms.unwrap_or(RETIRE_AFTER_MS);
        Ok(PlannedSwitch { replicas: request.replicas, retire_after_ms })
    }

    pub(super) fn with_planned_switch(&self, planned: PlannedSwitch) -> Self {
        let mut book = self.clone();
        for entry in &mut book.entries {
            if entry.record.state == EditionState::Next {
                entry.record.planned_switch = Some(planned);
            }
        }
        book
    }

    /// Makes the next edition the current one.
    pub(super) fn switch(
        &self,
        planned: PlannedSwitch,
        now: Duration,
        unix_ms: u64,
    ) -> Result<Self, UpdateRefusal> {
        let mut book = self.clone();
        let next = book.entries.iter().position(|entry| entry.record.state == EditionState::Next);
        let next = next.ok_or_else(no_next)?;
        book.entries.swap(0, next);
        let current = &mut book.entries[0].record;
        (current.state, current.planned_switch) = (EditionState::Current, None);
        let old = &mut book.entries[next];
        let after_ms = planned.retire_after_ms;
        old.record.state = EditionState::Retiring;
        old.record.retirement = Some(Retirement { since_unix_ms: unix_ms, after_ms });
        old.retire_by = Some(now.saturating_add(Duration::from_millis(after_ms)));
        // A client that got the old model just before the switch has yet to follow it.
        old.client_seen_at = now;
        Ok(book)
    }

    /// Drains the next edition.
    pub(super) fn abort(&self) -> Result<Self, UpdateRefusal> {
        if self.find(EditionState::Next).is_some() {
            return Ok(self.with_drain(EditionState::Next));
        }
        match self.entries.get(1) {
            Some(old) => {
                let fingerprint = old.record.fingerprint.as_deref().unwrap_or("?");
                let back = match old.record.state {
                    EditionState::Retiring => {
                        format!("to go back, add {fingerprint} again and switch to it")
                    }
                    _ => format!("{fingerprint} is being drained"),
                };
                refuse(format!("there is no update to abort, the switch is done: {back}"))
            }
            None => refuse("there is no update to abort".to_owned()),
        }
    }

    /// Drains the edition in this state.
    pub(super) fn with_drain(&self, state: EditionState) -> Self {
        let mut book = self.clone();
        for entry in &mut book.entries {
            if entry.record.state == state {
                entry.record.state = EditionState::Draining;
                (entry.record.planned_switch, entry.record.retirement) = (None, None);
            }
        }
        book
    }

    /// The book without this edition.
    pub(super) fn without(&self, id: EditionId) -> Self {
        let is_kept = |entry: &&Entry| entry.id != id;
        Self { entries: self.entries.iter().filter(is_kept).cloned().collect() }
    }
}

pub(super) fn no_next() -> UpdateRefusal {
    UpdateRefusal(
        "there is no next model to switch to: add its fingerprint first, with `switchyard model add`".to_owned(),
    )
}

/// The refusal of a switch to an edition that lacks replicas.
pub(super) fn incomplete(
    next: &Coordinator,
    coverage: Coverage,
    planned: PlannedSwitch,
) -> UpdateRefusal {
    let Coverage { experts_total, without_replica, under_replicated } = coverage;
    let hint = "wait, or switch with --when-complete";
    if experts_total == 0 {
        return UpdateRefusal(format!("no server of the next model has registered: {hint}"));
    }
    let replicas = planned.replicas.unwrap_or_else(|| next.replicas());
    UpdateRefusal(format!(
        "of {experts_total} experts of the next model {without_replica} have no live replica and {under_replicated} \
         fewer than {replicas}: {hint}"
    ))
}

fn refuse<T>(reason: String) -> Result<T, UpdateRefusal> {
    Err(UpdateRefusal(reason))
}

/// Clients that never leave keep an old model for a day.
const RETIRE_AFTER_MS: u64 = 24 * 3600 * 1000;
