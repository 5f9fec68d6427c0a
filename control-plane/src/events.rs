//! The last events of the fleet, for people.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use control_api::{Event, EventList, Severity};

use crate::fleet::{ExpiryCause, FleetEvent, RegistrationKind};

/// The last [`CAPACITY`] events, in memory. Editions of the model share one log.
#[derive(Clone, Debug)]
pub(crate) struct EventLog {
    kept: Arc<Mutex<Kept>>,
    /// Start of every text of this handle: the model, while the fleet serves more than one.
    label: Arc<Mutex<Option<String>>>,
}

#[derive(Debug)]
struct Kept {
    last_seq: u64,
    events: VecDeque<Event>,
}

impl Default for EventLog {
    fn default() -> Self {
        // Numbers rise over restarts and over changes of the leader, as long as clocks do.
        let last_seq = unix_ms() * NUMBERS_PER_MS;
        let kept = Kept { last_seq, events: VecDeque::new() };
        Self { kept: Arc::new(Mutex::new(kept)), label: Arc::default() }
    }
}

impl EventLog {
    /// A handle with a label of its own.
    pub(crate) fn of_edition(&self) -> Self {
        Self { label: Arc::default(), ..self.clone() }
    }

    pub(crate) fn set_label(&self, label: Option<String>) {
        *self.label.lock().unwrap_or_else(PoisonError::into_inner) = label;
    }

    /// Adds an event at the time of the system's clock.
    pub(crate) fn add(&self, event: &FleetEvent) {
        let (severity, text) = describe(event);
        self.note(severity, text);
    }

    /// Adds a text as an event.
    pub(crate) fn note(&self, severity: Severity, text: String) {
        let label = self.label.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let text = label.map_or(text.clone(), |label| format!("{label}: {text}"));
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.last_seq += 1;
        let seq = kept.last_seq;
        if kept.events.len() == CAPACITY {
            kept.events.pop_front();
        }
        kept.events.push_back(Event { seq, unix_ms: unix_ms(), severity, text });
    }

    /// The events after number `seq`, oldest first. All, if `seq` is of an earlier process.
    pub(crate) fn after(&self, seq: u64) -> EventList {
        let kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let seq = if seq > kept.last_seq { 0 } else { seq };
        let events = kept.events.iter().filter(|event| event.seq > seq).cloned().collect();
        EventList { last_seq: kept.last_seq, events }
    }
}

/// Severity and text of an event.
fn describe(event: &FleetEvent) -> (Severity, String) {
    use Severity::{Error, Info, Warn};
    match event {
        FleetEvent::Registered { name, kind } => {
            let how = match kind {
                RegistrationKind::New => "registered",
                RegistrationKind::Returned => "returned",
                RegistrationKind::Takeover => "registered as a new process of its name",
            };
            (Info, format!("{name} {how}"))
        }
        FleetEvent::Planned { num_loads, before, after } => {
            let text = format!(
                "new plan: servers load {num_loads} experts; busiest server {before:.3} of the mean, then {after:.3}"
            );
            (Info, text)
        }
        FleetEvent::GoalsChanged { goals } => {
            let spare = goals.spare * 100.0;
            (Info, format!("new goals: {} replicas at least, {spare:.0} % beyond", goals.replicas))
        }
        FleetEvent::GoalsKept { goals, .. } => {
            let spare = goals.spare * 100.0;
            let text = format!(
                "the stored goals stay, not those of the start: {} replicas at least, {spare:.0} % beyond",
                goals.replicas
            );
            (Warn, text)
        }
        FleetEvent::Short { shortage } => {
            (Error, format!("the fleet cannot be planned as wanted: {shortage}"))
        }
        FleetEvent::NameContested { name } => {
            (Error, format!("two live processes use the name {name}: the later one keeps it"))
        }
        FleetEvent::ModelReplaced { fingerprint } => {
            (Warn, format!("the fleet serves another model: {fingerprint}"))
        }
        FleetEvent::Unreachable { name, data_addr, reason } => {
            (Warn, format!("cannot connect to {name} at {data_addr}: {reason}"))
        }
        FleetEvent::LeftOut { name, is_left_out: true } => {
            (Warn, format!("plans do without {name}: nothing has ever connected to it"))
        }
        FleetEvent::LeftOut { name, is_left_out: false } => {
            (Info, format!("{name} was reached: plans include it"))
        }
        FleetEvent::Serving { name } => (Info, format!("{name} is serving")),
        FleetEvent::Draining { name } => (Info, format!("{name} is draining")),
        FleetEvent::Resumed { name } => (Info, format!("{name} resumed")),
        FleetEvent::Left { name } => (Info, format!("{name} left")),
        FleetEvent::Suspected { name, reporter, reason } => {
            (Warn, format!("{reporter} suspects {name}: {reason}"))
        }
        FleetEvent::Expired { name, cause } => {
            let cause = match cause {
                ExpiryCause::Lease => "its lease ended",
                ExpiryCause::Suspect => "it was suspected and did not renew",
            };
            (Warn, format!("{name} expired: {cause}"))
        }
        FleetEvent::Removed { name } => (Info, format!("{name} was forgotten")),
        FleetEvent::LeasesExtended { pause } => {
            (Warn, format!("the control plane was paused for {pause:?}; all leases last longer"))
        }
        FleetEvent::PlacementChanged { epoch, num_servers } => {
            (Info, format!("epoch {epoch}: {num_servers} servers"))
        }
        FleetEvent::PlacementBlocked => {
            (Error, "the placement cannot change until the store can be written".to_owned())
        }
    }
}

fn unix_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis() as u64
}

/// Events kept.
const CAPACITY: usize = 1000;
/// More than a fleet has events in a millisecond.
const NUMBERS_PER_MS: u64 = 1000;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_log_keeps_the_last_events_and_numbers_all() {
        let log = EventLog::default();
        let first = log.after(0).last_seq;
        // Whole numbers of JavaScript end at 2^53.
        assert!(first > 1_700_000_000_000_000 && first < 1 << 53, "{first}");
        assert_eq!(log.after(0).events, []);
        let num_events = CAPACITY as u64 + 7;
        for epoch in 1..=num_events {
            log.add(&FleetEvent::PlacementChanged { epoch, num_servers: 3 });
        }
        let (all, end) = (log.after(0), first + num_events);
        assert_eq!((all.last_seq, all.events.len()), (end, CAPACITY));
        let oldest = (all.events[0].seq, all.events[0].text.as_str());
        assert_eq!(oldest, (first + 8, "epoch 8: 3 servers"));
        let last: Vec<_> = log.after(end - 2).events.iter().map(|event| event.seq).collect();
        assert_eq!(last, [end - 1, end]);
        assert_eq!(log.after(end).events, []);
        assert_eq!(
            log.after(end + 1).events.len(),
            CAPACITY,
            "the reader's number is of a fast clock"
        );
    }
}
