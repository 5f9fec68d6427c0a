//! The stored state of several editions of the model in one document, so that a restart finds all of them.
//!
//! Every edition writes its snapshot through an [`EditionStore`] of its own, which replaces the whole document. The
//! snapshot of the current edition is the outer one, with the others inside. A document without others is that of a fleet
//! with one model.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use control_api::EditionState;
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
        let document = Document { store, revision, parts: parts.clone(), epoch_floor: 0 };
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
        whole.others = written
            .map(|(part, snapshot)| StoredEdition {
                record: part.record.clone(),
                snapshot: snapshot.clone(),
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
        Ok((part.and_then(|part| part.snapshot.clone()), document.revision))
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
        match document.save() {
            Ok(()) => Ok(next),
            Err(err) => {
                document.parts[at].snapshot = old;
                Err(err)
            }
        }
    }

    fn reserve_epoch(&mut self, epoch: u64) -> Result<(), StoreError> {
        self.stores.lock().store.reserve_epoch(epoch)
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::super::MemoryStore;
    use super::super::conformance::snapshot;
    use super::*;

    /// A store that can be full.
    #[derive(Clone, Debug, Default)]
    struct Limited {
        inner: MemoryStore,
        is_full: Arc<Mutex<bool>>,
    }

    impl Store for Limited {
        fn kind(&self) -> &'static str {
            "limited"
        }

        fn load(&mut self) -> Result<(Option<Snapshot>, Revision), StoreError> {
            self.inner.load()
        }

        fn save(&mut self, new: &Snapshot, expected: Revision) -> Result<Revision, StoreError> {
            if *self.is_full.lock().unwrap() {
                let source = io::ErrorKind::StorageFull.into();
                return Err(StoreError::Full { path: "disk".into(), source });
            }
            self.inner.save(new, expected)
        }

        fn reserve_epoch(&mut self, epoch: u64) -> Result<(), StoreError> {
            self.inner.reserve_epoch(epoch)
        }
    }

    fn record(state: EditionState) -> EditionRecord {
        let fingerprint = Some("11ff11ff".to_owned());
        EditionRecord { fingerprint, ..EditionRecord { state, ..EditionRecord::current(None) } }
    }

    fn next(seed: u64) -> Snapshot {
        let mut next = Snapshot { others: Vec::new(), ..snapshot(seed) };
        for member in &mut next.members {
            (member.name, member.member_id) =
                (format!("next-{}", member.name), control_api::MemberId::random());
        }
        next
    }

    #[test]
    fn all_editions_come_back_and_a_full_disk_changes_none() {
        let limited = Limited::default();
        let (stores, mut found) = EditionStores::load(Box::new(limited.clone())).unwrap();
        assert_eq!(found.len(), 1);
        let mut current = found.remove(0).store;
        let first = snapshot(3);
        let revision = current.save(&first, Revision(0)).unwrap();
        let (mut store, floor) = stores.add(record(EditionState::Next));
        assert_eq!(floor, first.reserved_epoch);
        let other = next(7);
        store.save(&other, Revision(0)).unwrap();

        *limited.is_full.lock().unwrap() = true;
        let records = [
            (store.id(), EditionRecord::current(Some("11ff11ff".to_owned()))),
            (current.id(), record(EditionState::Retiring)),
        ];
        stores.change(&records).unwrap_err();
        current.save(&snapshot(4), revision).unwrap_err();
        *limited.is_full.lock().unwrap() = false;
        let (_, found) = EditionStores::load(Box::new(limited.clone())).unwrap();
        let states: Vec<_> = found.iter().map(|found| found.record.state).collect();
        assert_eq!(states, [EditionState::Current, EditionState::Next]);
        // The epochs of both count for each.
        let reserved_epoch = other.reserved_epoch;
        assert_eq!(found[0].snapshot, Some(Snapshot { reserved_epoch, ..first.clone() }));
        assert_eq!(found[1].snapshot, Some(other.clone()));

        stores.change(&records).unwrap();
        let (_, found) = EditionStores::load(Box::new(limited.clone())).unwrap();
        assert_eq!(found[0].snapshot, Some(other.clone()));
        assert_eq!(found[1].record, record(EditionState::Retiring));
        assert_eq!(found[1].snapshot.as_ref().unwrap().reserved_epoch, reserved_epoch);

        // A forgotten edition leaves only its epochs.
        stores.change(&records[1..]).unwrap();
        let (_, found) = EditionStores::load(Box::new(limited)).unwrap();
        let expected = Snapshot { reserved_epoch: other.reserved_epoch, ..first };
        assert_eq!(found[0].snapshot, Some(expected));
        assert_eq!(found.len(), 1);
        assert_eq!(stores.add(record(EditionState::Next)).1, other.reserved_epoch);
    }

    #[test]
    fn two_editions_of_one_model_come_back_as_one() {
        let seed = u64::from(rand::random::<u8>());
        println!("seed {seed}");
        let mut current = snapshot(seed);
        let model = current.model.as_ref().unwrap().fingerprint.clone();
        let served = next(seed.wrapping_add(1));
        assert!(!served.members.is_empty());
        let orphan = Snapshot { members: Vec::new(), ..next(seed.wrapping_add(2)) };
        let other =
            |record, snapshot: &Snapshot| StoredEdition { record, snapshot: snapshot.clone() };
        let same_as_current =
            EditionRecord { fingerprint: Some(model.clone()), ..record(EditionState::Retiring) };
        current.others = vec![
            other(record(EditionState::Next), &orphan),
            other(same_as_current, &next(seed.wrapping_add(3))),
            other(record(EditionState::Draining), &served),
            other(record(EditionState::Next), &orphan),
        ];
        let highest = current.others.iter().map(|other| other.snapshot.reserved_epoch).max();
        let highest = highest.max(Some(current.reserved_epoch)).unwrap();
        let parts = split(Some(current));
        let found: Vec<_> = parts.iter().map(|part| (part.id, part.record.clone())).collect();
        let expected =
            [(0, EditionRecord::current(Some(model))), (1, record(EditionState::Draining))];
        assert_eq!(found, expected);
        assert_eq!(parts[1].snapshot.as_ref().unwrap().members, served.members);
        assert!(parts.iter().all(|part| part.reserved_epoch() == highest));
    }

    #[test]
    fn a_member_that_moved_to_the_other_model_is_not_restored_in_the_old_one() {
        let (mut old, mut new) = (snapshot(1), next(2));
        let moved = old.members[0].clone();
        new.members[0].superseded = vec![super::super::Predecessor {
            member_id: moved.member_id.clone(),
            incarnation: moved.incarnation,
        }];
        old.others =
            vec![StoredEdition { record: record(EditionState::Next), snapshot: new.clone() }];
        let parts = split(Some(old.clone()));
        let members = |part: &Part| part.snapshot.as_ref().unwrap().members.clone();
        assert_eq!(members(&parts[0]), old.members[1..]);
        assert_eq!(members(&parts[1]), new.members);
    }
}
