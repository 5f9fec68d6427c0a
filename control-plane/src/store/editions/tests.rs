//! The document of all editions.

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

/// One edition writes new goals, and the process ends, or the disk fills up, before the other one writes.
#[test]
fn goals_change_in_all_editions_by_one_write() {
    let goals = |replicas| Some(FleetGoals { replicas, spare: 0.25 });
    let limited = Limited::default();
    let found_goals = || {
        let (_, found) = EditionStores::load(Box::new(limited.clone())).unwrap();
        let of = |found: Found| found.snapshot.unwrap().goals;
        found.into_iter().map(of).collect::<Vec<_>>()
    };
    let (stores, mut found) = EditionStores::load(Box::new(limited.clone())).unwrap();
    let mut current = found.remove(0).store;
    let of = |replicas, snapshot| Snapshot { goals: goals(replicas), ..snapshot };
    let revision = current.save(&of(1, snapshot(3)), Revision(0)).unwrap();
    let (mut next_store, _) = stores.add(record(EditionState::Next));
    let next_revision = next_store.save(&of(1, next(7)), Revision(0)).unwrap();
    assert_eq!(found_goals(), [goals(1); 2]);
    let revision = current.save(&of(2, snapshot(3)), revision).unwrap();
    assert_eq!(found_goals(), [goals(2); 2]);
    // A failed write changes the goals of neither, also not with the next write of the other edition.
    *limited.is_full.lock().unwrap() = true;
    next_store.save(&of(3, next(7)), next_revision).unwrap_err();
    *limited.is_full.lock().unwrap() = false;
    let records = [
        (current.id(), EditionRecord::current(None)),
        (next_store.id(), record(EditionState::Next)),
    ];
    stores.change(&records).unwrap();
    assert_eq!(found_goals(), [goals(2); 2]);
    next_store.save(&of(2, next(7)), next_revision).unwrap();
    // The other edition takes the change back.
    next_store.save(&of(1, next(7)), next_revision).unwrap();
    assert_eq!(found_goals(), [goals(1); 2]);
    current.save(&of(1, snapshot(3)), revision).unwrap();
    assert_eq!(found_goals(), [goals(1); 2]);
}

/// Documents of earlier versions may have goals that differ.
#[test]
fn goals_that_differ_come_back_as_those_of_the_current_edition() {
    let goals = |replicas| Some(FleetGoals { replicas, spare: 0.25 });
    let mut current = Snapshot { goals: goals(2), ..snapshot(1) };
    let other = Snapshot { goals: goals(1), ..next(2) };
    current.others = vec![StoredEdition { record: record(EditionState::Next), snapshot: other }];
    let parts = split(Some(current));
    let found: Vec<_> = parts.iter().map(|part| part.snapshot.as_ref().unwrap().goals).collect();
    assert_eq!(found, [goals(2); 2]);
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
    let other = |record, snapshot: &Snapshot| StoredEdition { record, snapshot: snapshot.clone() };
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
    let expected = [(0, EditionRecord::current(Some(model))), (1, record(EditionState::Draining))];
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
    old.others = vec![StoredEdition { record: record(EditionState::Next), snapshot: new.clone() }];
    let parts = split(Some(old.clone()));
    let members = |part: &Part| part.snapshot.as_ref().unwrap().members.clone();
    assert_eq!(members(&parts[0]), old.members[1..]);
    assert_eq!(members(&parts[1]), new.members);
}
