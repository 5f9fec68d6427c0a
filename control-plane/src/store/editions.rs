//! The stored state of several editions of the model in one document, so that a restart finds all of them.
//!
//! Every edition writes its snapshot through an [`EditionStore`] of its own, which replaces the whole document. The
//! snapshot of the current edition is the outer one, with the others inside. A document without others is that of a fleet
//! with one model.
//!
//! The goals are those of the fleet. Each write gives the goals of the edition that writes to all editions, so goals change
//! in one write. A process that ends before the other editions have written leaves no difference.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use control_api::{EditionState, FleetGoals};
use serde::{Deserialize, Serialize};
use tracing::warn;

use super::{Revision, Snapshot, Store, StoreError};

/// Part of an edition in an update, as it is stored.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EditionRecord {
    /// Fingerprint of its model. `None` in a fleet whose first member has not registered.
    pub fingerprint: Option<String>,
    /// State.
    pub state: EditionState,
    /// Switch that waits until the edition is complete.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub planned_switch: Option<PlannedSwitch>,
    /// Bound of the time in which clients may leave a retiring edition.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retirement: Option<Retirement>,
}

/// Settings of a switch to another edition.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlannedSwitch {
    /// Live replicas that each expert must have. `None` stands for as many as planned.
    pub replicas: Option<u32>,
    /// See [`Retirement::after_ms`].
    pub retire_after_ms: u64,
}

/// Retirement of an edition.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Retirement {
    /// Time of the switch in milliseconds since 1970.
    pub since_unix_ms: u64,
    /// Longest time from the switch to the drain of its servers, in milliseconds.
    pub after_ms: u64,
}

impl EditionRecord {
    /// The current edition of a fleet.
    pub(crate) fn current(fingerprint: Option<String>) -> Self {
        let state = EditionState::Current;
        Self { fingerprint, state, planned_switch: None, retirement: None }
    }
}

/// An edition inside of the snapshot of the current one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StoredEdition {
    /// Part in the update.
    pub record: EditionRecord,
    /// Its fleet. It has no other editions inside.
    pub snapshot: Snapshot,
}

/// Identity of an edition in this process.
pub(crate) type EditionId = u64;

/// The document of all editions. Clones share it. All methods block while another one writes the store.
#[derive(Clone, Debug)]
pub(crate) struct EditionStores {
    document: Arc<Mutex<Document>>,
    kind: &'static str,
}

#[derive(Debug)]
struct Document {
    store: Box<dyn Store>,
    revision: Revision,
    /// The current edition first.
    parts: Vec<Part>,
    /// Upper bound of the epochs of all editions that were forgotten.
    epoch_floor: u64,
    /// Goals of all editions, as the last write has them. A part's snapshot may have older ones.
    goals: Option<FleetGoals>,
}

#[derive(Clone, Debug)]
struct Part {
    id: EditionId,
    record: EditionRecord,
    /// `None` until the first write.
    snapshot: Option<Snapshot>,
}

/// An edition as it was found in the store.
#[derive(Debug)]
pub(crate) struct Found {
    pub(crate) record: EditionRecord,
    pub(crate) snapshot: Option<Snapshot>,
    pub(crate) store: EditionStore,
    pub(crate) revision: Revision,
}

impl EditionStores {
    /// Reads the document. An empty store has one edition without a snapshot.
    pub(crate) fn load(mut store: Box<dyn Store>) -> Result<(Self, Vec<Found>), StoreError> {
        let (snapshot, revision) = store.load()?;
        let kind = store.kind();
        let parts = split(snapshot);
        let goals = parts[0].snapshot.as_ref().and_then(|snapshot| snapshot.goals);
        let document = Document { store, revision, parts: parts.clone(), epoch_floor: 0, goals };
        let stores = Self { document: Arc::new(Mutex::new(document)), kind };
        let found = parts.into_iter().map(|part| Found {
            record: part.record,
            snapshot: part.snapshot,
            store: stores.of(part.id),
            revision,
        });
        let found = found.collect();
        Ok((stores, found))
    }

    /// The store of one edition.
    fn of(&self, id: EditionId) -> EditionStore {
        EditionStore { id, stores: self.clone() }
    }

    /// Adds an edition, which its first write makes durable. Returns the epoch above which it may issue epochs: tables of
    /// a fingerprint that comes back are then newer than the ones that its clients may still have.
    pub(crate) fn add(&self, record: EditionRecord) -> (EditionStore, u64) {
        let mut document = self.lock();
        let id = document.parts.iter().map(|part| part.id + 1).max().unwrap_or(0);
        let reserved = document.parts.iter().map(Part::reserved_epoch).max().unwrap_or(0);
        let floor = document.epoch_floor.max(reserved);
        document.parts.push(Part { id, record, snapshot: None });
        (self.of(id), floor)
    }

    /// Removes an edition whose first write has failed.
    pub(crate) fn take_back(&self, id: EditionId) {
        self.lock().parts.retain(|part| part.id != id);
    }

    /// Replaces the records of all editions in one write; the first one is the current edition. Editions without a record
    /// are forgotten.
    ///
    /// # Errors
    /// [`StoreError`]. The records are then as before.
    pub(crate) fn change(&self, records: &[(EditionId, EditionRecord)]) -> Result<(), StoreError> {
        let mut document = self.lock();
        let (old_parts, old_floor) = (document.parts.clone(), document.epoch_floor);
        let mut parts = Vec::new();
        for (id, record) in records {
            if let Some(old) = old_parts.iter().find(|part| part.id == *id) {
                parts.push(Part { record: record.clone(), ..old.clone() });
            }
        }
        let is_forgotten = |part: &&Part| !records.iter().any(|(id, _)| *id == part.id);
        let forgotten = old_parts.iter().filter(is_forgotten).map(Part::reserved_epoch).max();
        document.epoch_floor = old_floor.max(forgotten.unwrap_or(0));
        document.parts = parts;
        document.save().inspect_err(|_| {
            document.parts = old_parts;
            document.epoch_floor = old_floor;
        })
    }

    fn lock(&self) -> MutexGuard<'_, Document> {
        self.document.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Part {
    fn reserved_epoch(&self) -> u64 {
        self.snapshot.as_ref().map_or(0, |snapshot| snapshot.reserved_epoch)
    }
}

impl Document {
    /// Writes all editions.
    fn save(&mut self) -> Result<(), StoreError> {
        let mut written =
            self.parts.iter().filter_map(|part| Some((part, part.snapshot.as_ref()?)));
        let Some((_, current)) = written.next() else { return Ok(()) };
        let mut whole = current.clone();
        whole.reserved_epoch = whole.reserved_epoch.max(self.epoch_floor);
        whole.goals = self.goals;
        whole.others = written
            .map(|(part, snapshot)| StoredEdition {
                record: part.record.clone(),
                snapshot: Snapshot { goals: self.goals, ..snapshot.clone() },
            })
            .collect();
        self.revision = self.store.save(&whole, self.revision)?;
        Ok(())
    }
}

/// The editions inside of a snapshot, one for each fingerprint, the current one first. Their ids are their indices.
fn split(snapshot: Option<Snapshot>) -> Vec<Part> {
    let Some(mut current) = snapshot else {
        return vec![Part { id: 0, record: EditionRecord::current(None), snapshot: None }];
    };
    let mut others = std::mem::take(&mut current.others);
    let current_model = current.model.as_ref().map(|model| model.fingerprint.clone());
    // Epochs reserved without a snapshot are those of any edition, and tickets have the epochs of any.
    let reserved = others.iter().map(|other| other.snapshot.reserved_epoch);
    let floor = reserved.fold(current.reserved_epoch, u64::max);
    current.reserved_epoch = floor;
    for other in &mut others {
        other.snapshot.reserved_epoch = floor;
        forget_replaced(&mut current, &mut other.snapshot);
        if other.snapshot.goals != current.goals {
            let fingerprint = other.record.fingerprint.as_deref();
            warn!(
                fingerprint,
                "the store had other goals for this model; those of the current one hold"
            );
            other.snapshot.goals = current.goals;
        }
    }
    let others = without_twins(&mut current, current_model.as_deref(), others);
    let record = EditionRecord::current(current_model);
    let parts = std::iter::once((record, current));
    let parts = parts.chain(others.into_iter().map(|other| (other.record, other.snapshot)));
    let part = |(id, (record, snapshot))| Part { id, record, snapshot: Some(snapshot) };
    (0..).zip(parts).map(part).collect()
}

/// The other editions, one for each fingerprint: requests could not tell two apart. Among twins the current edition stays,
/// else the first one that has servers. Servers of the others register again. The keys of tickets of all editions stay.
fn without_twins(
    current: &mut Snapshot,
    current_model: Option<&str>,
    others: Vec<StoredEdition>,
) -> Vec<StoredEdition> {
    let mut kept: Vec<StoredEdition> = Vec::new();
    for mut other in others {
        let fingerprint = other.record.fingerprint.clone();
        if fingerprint.is_some() && fingerprint.as_deref() == current_model {
            current.tickets.join(&other.snapshot.tickets);
        } else if let Some(twin) =
            kept.iter_mut().find(|twin| twin.record.fingerprint == fingerprint)
        {
            if twin.snapshot.members.is_empty() && !other.snapshot.members.is_empty() {
                std::mem::swap(twin, &mut other);
            }
            twin.snapshot.tickets.join(&other.snapshot.tickets);
        } else {
            kept.push(other);
            continue;
        }
        warn!(fingerprint, "the store had two editions of one model; one was dropped");
    }
    kept
}

/// Removes members that a process of the same name in the other edition has replaced. The write without them was lost.
fn forget_replaced(a: &mut Snapshot, b: &mut Snapshot) {
    let replaced = |kept: &Snapshot| -> Vec<_> {
        let old = kept.members.iter().flat_map(|member| &member.superseded);
        old.map(|old| old.member_id.clone()).collect()
    };
    let (by_a, by_b) = (replaced(a), replaced(b));
    a.members.retain(|member| !by_b.contains(&member.member_id));
    b.members.retain(|member| !by_a.contains(&member.member_id));
}

/// The part of one edition.
#[derive(Debug)]
pub(crate) struct EditionStore {
    id: EditionId,
    stores: EditionStores,
}

impl EditionStore {
    pub(crate) fn id(&self) -> EditionId {
        self.id
    }
}

impl Store for EditionStore {
    fn kind(&self) -> &'static str {
        self.stores.kind
    }

    fn load(&mut self) -> Result<(Option<Snapshot>, Revision), StoreError> {
        let document = self.stores.lock();
        let part = document.parts.iter().find(|part| part.id == self.id);
        let snapshot = part.and_then(|part| part.snapshot.clone());
        let goals = document.goals;
        Ok((snapshot.map(|snapshot| Snapshot { goals, ..snapshot }), document.revision))
    }

    fn save(&mut self, snapshot: &Snapshot, expected: Revision) -> Result<Revision, StoreError> {
        let mut document = self.stores.lock();
        // The document's revision is the one that counts. The edition itself has one writer.
        let next = Revision(expected.0 + 1);
        let Some(at) = document.parts.iter().position(|part| part.id == self.id) else {
            // The edition was forgotten meanwhile.
            return Ok(next);
        };
        let old = document.parts[at].snapshot.replace(snapshot.clone());
        let old_goals = std::mem::replace(&mut document.goals, snapshot.goals);
        match document.save() {
            Ok(()) => Ok(next),
            Err(err) => {
                document.parts[at].snapshot = old;
                document.goals = old_goals;
                Err(err)
            }
        }
    }

    fn reserve_epoch(&mut self, epoch: u64) -> Result<(), StoreError> {
        self.stores.lock().store.reserve_epoch(epoch)
    }
}

#[cfg(test)]
mod tests;
