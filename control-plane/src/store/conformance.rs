//! The conformance suite of every store.

use std::fmt::Debug;
use std::sync::Arc;

use control_api::{
    Assignment, EditionState, FleetGoals, LayerAssignment, MemberId, ModelDescriptor, TicketKey,
};

use super::{
    EditionRecord, FileStore, MemberRecord, MemoryStore, Phase, PlannedSwitch, Retirement,
    Revision, Snapshot, Store, StoreError, StoredEdition, TicketRecord,
};

/// A store that can be opened again, as after a restart.
pub(super) trait Subject {
    type Store: Store + Debug;
    fn open(&self) -> Self::Store;
}

pub(super) fn snapshot(seed: u64) -> Snapshot {
    let experts = LayerAssignment { layer: 3, experts: vec![0, seed as u32 + 1] };
    let assignment = Arc::new(Assignment { layers: vec![experts] });
    Snapshot {
        cluster_id: "c".repeat(32),
        reserved_epoch: seed * 1000,
        model: Some(ModelDescriptor {
            fingerprint: "00ff00ff".to_owned(),
            architecture: "test".to_owned(),
            hidden: 8,
            moe_layers: vec![3],
            num_experts: 1000,
            top_k: 2,
        }),
        members: vec![MemberRecord {
            member_id: MemberId::random(),
            name: format!("member-{seed}"),
            incarnation: u64::MAX - seed,
            data_addr: "[::1]:7000".to_owned(),
            metrics_addr: None,
            weights_addr: (seed > 3).then(|| "host:7".to_owned()),
            phase: Phase::Draining,
            keeps_serving: seed > 2,
            expired: seed.is_multiple_of(2),
            assignment: Arc::clone(&assignment),
            assignment_version: seed,
            holds: assignment,
            superseded: Vec::new(),
            capacity_experts: (seed > 1).then_some(7),
            zone: (seed > 2).then(|| "rack-1".to_owned()),
            needs_tickets: seed > 1,
            plain_text: seed > 2,
        }],
        goals: (seed > 2).then_some(FleetGoals { replicas: 2, spare: 0.125 }),
        tickets: tickets(seed),
        others: (seed > 3).then(|| edition(seed)).into_iter().collect(),
    }
}

fn tickets(seed: u64) -> TicketRecord {
    let key = |idx| TicketKey { key: format!("k4.public.{idx}"), expires_at: idx };
    TicketRecord { keys: (0..seed).map(key).collect(), least_epoch: seed }
}

fn edition(seed: u64) -> StoredEdition {
    let record = EditionRecord {
        fingerprint: Some("11ff11ff".to_owned()),
        state: EditionState::Next,
        planned_switch: Some(PlannedSwitch { replicas: None, retire_after_ms: seed }),
        retirement: Some(Retirement { since_unix_ms: 1, after_ms: seed }),
    };
    StoredEdition { record, snapshot: snapshot(0) }
}

fn a_fresh_store_is_empty(subject: &impl Subject) {
    let mut store = subject.open();
    assert_eq!(store.load().unwrap(), (None, Revision(0)));
    assert!(!store.kind().is_empty());
}

fn what_is_saved_is_found_after_a_restart(subject: &impl Subject) {
    let mut store = subject.open();
    let (_, mut revision) = store.load().unwrap();
    for seed in 0..5 {
        let saved = snapshot(seed);
        let next = store.save(&saved, revision).unwrap();
        assert!(next > revision);
        revision = next;
        assert_eq!(store.load().unwrap(), (Some(saved.clone()), revision));
        drop(store);
        store = subject.open();
        assert_eq!(store.load().unwrap(), (Some(saved), revision));
    }
}

fn a_writer_with_an_old_revision_is_refused(subject: &impl Subject) {
    let mut store = subject.open();
    let (_, old) = store.load().unwrap();
    let kept = snapshot(1);
    let new = store.save(&kept, old).unwrap();
    for wrong in [old, Revision(new.0 + 1)] {
        match store.save(&snapshot(2), wrong) {
            Err(StoreError::Conflict { expected, found }) => {
                assert_eq!((expected, found), (wrong.0, new.0));
            }
            other => panic!("a conflict was expected, not {other:?}"),
        }
    }
    assert_eq!(store.load().unwrap(), (Some(kept), new));
}

fn reserved_epochs_bound_the_snapshot_from_below(subject: &impl Subject) {
    let mut store = subject.open();
    let saved = snapshot(1);
    let revision = store.save(&saved, Revision(0)).unwrap();
    for (epoch, expected) in [(7, 1000), (5000, 5000), (4000, 5000), (6000, 6000)] {
        store.reserve_epoch(epoch).unwrap();
        drop(store);
        store = subject.open();
        let found = store.load().unwrap();
        let expected = Snapshot { reserved_epoch: expected, ..saved.clone() };
        assert_eq!(found, (Some(expected), revision));
    }
}

/// Larger than one request to etcd may be.
fn a_large_snapshot_is_kept_whole(subject: &impl Subject) {
    let mut store = subject.open();
    let mut saved = snapshot(3);
    let member = saved.members[0].clone();
    saved.members = (0..4000)
        .map(|i| MemberRecord {
            member_id: MemberId::random(),
            name: format!("member-{i}-{}", "n".repeat(900)),
            ..member.clone()
        })
        .collect();
    let mut revision = Revision(0);
    for num_members in [4000, 2000, 1, 3000] {
        saved.members.truncate(num_members);
        revision = store.save(&saved, revision).unwrap();
        drop(store);
        store = subject.open();
        assert_eq!(store.load().unwrap(), (Some(saved.clone()), revision));
    }
}

/// Runs the whole suite, each case on its own subject.
pub(super) fn conforms<S: Subject>(make: impl Fn() -> S) {
    a_large_snapshot_is_kept_whole(&make());
    a_fresh_store_is_empty(&make());
    what_is_saved_is_found_after_a_restart(&make());
    a_writer_with_an_old_revision_is_refused(&make());
    reserved_epochs_bound_the_snapshot_from_below(&make());
}

impl Subject for MemoryStore {
    type Store = MemoryStore;

    fn open(&self) -> MemoryStore {
        self.clone()
    }
}

impl Subject for tempfile::TempDir {
    type Store = FileStore;

    fn open(&self) -> FileStore {
        FileStore::open(self.path()).unwrap()
    }
}

#[test]
fn memory_store_conforms() {
    conforms(MemoryStore::new);
}

#[test]
fn file_store_conforms() {
    conforms(|| tempfile::tempdir().unwrap());
}

#[test]
fn a_second_control_plane_on_the_same_directory_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let first = FileStore::open(dir.path()).unwrap();
    let err = FileStore::open(dir.path()).unwrap_err();
    assert!(matches!(err, StoreError::InUse { .. }), "{err}");
    assert!(err.to_string().contains(&dir.path().display().to_string()), "{err}");
    drop(first);
    FileStore::open(dir.path()).unwrap();
}

#[test]
fn every_damaged_byte_is_noticed() {
    let dir = tempfile::tempdir().unwrap();
    let mut store = dir.open();
    store.save(&snapshot(7), Revision(0)).unwrap();
    let path = store.path();
    let good = std::fs::read(&path).unwrap();
    for i in 0..good.len() {
        let mut bad = good.clone();
        bad[i] ^= 0x10;
        std::fs::write(&path, &bad).unwrap();
        // The revision is in the header, outside the checksum. A flip there changes the number; all
        // other flips must be errors.
        match store.load() {
            Ok((Some(found), revision)) => {
                assert_ne!(revision, Revision(1), "byte {i} of {}", good.len());
                assert_eq!(found, snapshot_like(&found, 7));
            }
            Ok((None, _)) => panic!("byte {i}: damage reported as a fresh store"),
            Err(err) => assert!(
                matches!(err, StoreError::Corrupt { .. } | StoreError::Format { .. }),
                "byte {i}: {err}"
            ),
        }
    }
    for len in 0..good.len() {
        std::fs::write(&path, &good[..len]).unwrap();
        let err = store.load().unwrap_err();
        assert!(matches!(err, StoreError::Corrupt { .. }), "{len} bytes: {err}");
        assert!(err.to_string().contains("state.snapshot is damaged"), "{err}");
    }
}

/// The snapshot of a seed with the random identity taken from another.
fn snapshot_like(other: &Snapshot, seed: u64) -> Snapshot {
    let mut expected = snapshot(seed);
    expected.members[0].member_id = other.members[0].member_id.clone();
    expected
}

#[test]
fn a_newer_format_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let mut store = dir.open();
    std::fs::write(store.path(), "switchyard-state 9 1 2 00000000\n{}").unwrap();
    let err = store.load().unwrap_err();
    assert!(matches!(err, StoreError::Format { found: 9, supported: 1, .. }), "{err}");
}

#[test]
fn a_write_that_died_half_way_leaves_the_old_snapshot() {
    let dir = tempfile::tempdir().unwrap();
    let mut store = dir.open();
    let kept = snapshot(1);
    let revision = store.save(&kept, Revision(0)).unwrap();
    std::fs::write(dir.path().join("state.snapshot.tmp"), "switchyard-state 1 2 99").unwrap();
    drop(store);
    let mut store = dir.open();
    assert_eq!(store.load().unwrap(), (Some(kept), revision));
    store.save(&snapshot(2), revision).unwrap();
}

/// A real full disk: a small tmpfs, which only root can mount.
#[test]
fn a_full_disk_is_named_and_heals() {
    let dir = tempfile::tempdir().unwrap();
    let mount = |args: &[&str]| {
        let status = std::process::Command::new(args[0]).args(&args[1..]).arg(dir.path()).status();
        status.is_ok_and(|status| status.success())
    };
    if !mount(&["mount", "-t", "tmpfs", "-o", "size=64k", "none"]) {
        return test_support::skip("root", "a full disk needs root to mount a tmpfs");
    }
    let outcome = std::panic::catch_unwind(|| {
        let mut store = dir.open();
        let kept = snapshot(1);
        let revision = store.save(&kept, Revision(0)).unwrap();
        let filler = dir.path().join("filler");
        let mut bytes = 1 << 20;
        while bytes > 0 {
            if std::fs::write(&filler, vec![0; bytes]).is_err() {
                bytes /= 2;
            } else {
                break;
            }
        }
        std::fs::write(dir.path().join("rest"), vec![0; 64 << 10]).unwrap_err();
        let err = store.save(&snapshot(2), revision).unwrap_err();
        assert!(matches!(err, StoreError::Full { .. }), "{err}");
        assert_eq!(store.load().unwrap(), (Some(kept.clone()), revision));
        // Epochs need no space.
        store.reserve_epoch(9000).unwrap();
        drop(store);
        let mut store = dir.open();
        let kept = Snapshot { reserved_epoch: 9000, ..kept };
        assert_eq!(store.load().unwrap(), (Some(kept), revision));
        std::fs::remove_file(&filler).unwrap();
        std::fs::remove_file(dir.path().join("rest")).unwrap();
        store.save(&snapshot(3), revision).unwrap();
    });
    assert!(mount(&["umount"]));
    outcome.unwrap();
}
