//! State after a restart, a kill and a full disk.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use control_api::{DrainRequest, FleetGoals, LeaseRequest, MemberState, code};
use switchyard_control_plane::clock::MonotonicClock;
use switchyard_control_plane::store::{MemoryStore, Revision, Snapshot, Store, StoreError};
use switchyard_control_plane::{BalanceSettings, BindError};

use super::*;

#[tokio::test]
async fn a_restart_keeps_cluster_members_and_order_of_epochs() {
    let dir = tempfile::tempdir().unwrap();
    let plane = Plane::start(durable_config(dir.path())).await;
    let client = plane.client();
    let serving = serve(&client, "a", 1).await;
    let loading = client.register(&request("b", 2)).await.unwrap().member_id;
    let before = client.placement().await.unwrap();
    plane.stop().await;

    let plane = Plane::start(durable_config(dir.path())).await;
    let client = plane.client();
    let after = client.placement().await.unwrap();
    assert_eq!(after.cluster_id, before.cluster_id);
    assert!(after.epoch > before.epoch);
    assert_eq!((&after.servers, &after.layers), (&before.servers, &before.layers));
    for (member, incarnation, state) in
        [(&serving, 1, MemberState::Serving), (&loading, 2, MemberState::Loading)]
    {
        let lease = LeaseRequest { incarnation, assignment_version: 0, load: None };
        assert_eq!(client.renew(member, &lease).await.unwrap().state, state);
    }
    plane.stop().await;
}

/// A registration is on disk before its response is sent, so a kill right after it loses nothing.
#[tokio::test]
async fn an_answered_registration_survives_a_kill() {
    let dir = tempfile::tempdir().unwrap();
    let copy = tempfile::tempdir().unwrap();
    let plane = Plane::start(durable_config(dir.path())).await;
    let client = plane.client();
    for i in 0..20 {
        let name = format!("m{i}");
        let member = client.register(&request(&name, i)).await.unwrap().member_id;
        // The state that a kill at this moment would leave.
        std::fs::copy(dir.path().join("state.snapshot"), copy.path().join("state.snapshot"))
            .unwrap();
        let heir = Plane::start(durable_config(copy.path())).await;
        let lease = LeaseRequest { incarnation: i, assignment_version: 0, load: None };
        heir.client().renew(&member, &lease).await.unwrap();
        heir.stop().await;
    }
    plane.stop().await;
}

#[tokio::test]
async fn a_damaged_state_is_refused_not_forgotten() {
    let dir = tempfile::tempdir().unwrap();
    let plane = Plane::start(durable_config(dir.path())).await;
    serve(&plane.client(), "a", 1).await;
    plane.stop().await;
    let path = dir.path().join("state.snapshot");
    let mut bytes = std::fs::read(&path).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&path, &bytes).unwrap();
    let err = switchyard_control_plane::Server::bind(durable_config(dir.path())).await.unwrap_err();
    assert!(matches!(err, BindError::Store(StoreError::Corrupt { .. })), "{err}");
    assert!(err.to_string().contains("state.snapshot is damaged"), "{err}");
    assert_eq!(std::fs::read(&path).unwrap(), bytes);
}

#[tokio::test]
async fn two_control_planes_cannot_share_a_directory() {
    let dir = tempfile::tempdir().unwrap();
    let plane = Plane::start(durable_config(dir.path())).await;
    let err = switchyard_control_plane::Server::bind(durable_config(dir.path())).await.unwrap_err();
    assert!(matches!(err, BindError::Store(StoreError::InUse { .. })), "{err}");
    plane.stop().await;
}

#[tokio::test]
async fn the_state_of_another_model_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let plane = Plane::start(durable_config(dir.path())).await;
    serve(&plane.client(), "a", 1).await;
    plane.stop().await;
    let mut config = durable_config(dir.path());
    config.model_fingerprint = Some("feedfeedfeedfeed".to_owned());
    let err = switchyard_control_plane::Server::bind(config.clone()).await.unwrap_err().to_string();
    assert!(err.contains("feedfeedfeedfeed") && err.contains("0123456789abcdef"), "{err}");
    config.model_fingerprint = Some(model().fingerprint);
    Plane::start(config).await.stop().await;
}

/// A store whose disk can be full.
#[derive(Debug)]
struct Moody {
    inner: MemoryStore,
    is_full: Arc<AtomicBool>,
}

impl Store for Moody {
    fn kind(&self) -> &'static str {
        "moody"
    }

    fn load(&mut self) -> Result<(Option<Snapshot>, Revision), StoreError> {
        self.inner.load()
    }

    fn save(&mut self, snapshot: &Snapshot, expected: Revision) -> Result<Revision, StoreError> {
        if self.is_full.load(Ordering::SeqCst) {
            let source = std::io::Error::from(std::io::ErrorKind::StorageFull);
            return Err(StoreError::Full { path: "moody".into(), source });
        }
        self.inner.save(snapshot, expected)
    }

    fn reserve_epoch(&mut self, epoch: u64) -> Result<(), StoreError> {
        self.inner.reserve_epoch(epoch)
    }
}

#[tokio::test]
async fn a_full_disk_makes_it_read_only_until_there_is_space() {
    let is_full = Arc::new(AtomicBool::new(false));
    let store = Moody { inner: MemoryStore::new(), is_full: Arc::clone(&is_full) };
    let mut config = config();
    config.lease_ttl = Duration::from_secs(60);
    let clock = Arc::new(MonotonicClock::new());
    let server = switchyard_control_plane::Server::bind_with(config, Box::new(store), clock);
    let plane = Plane::run(server.await.unwrap());
    let client = plane.client();
    let member = serve(&client, "a", 1).await;
    let other = serve(&client, "b", 2).await;
    is_full.store(true, Ordering::SeqCst);

    let err = client.register(&request("c", 3)).await.unwrap_err();
    assert_eq!(err.code(), Some(code::STORE_READ_ONLY));
    assert!(err.is_transient());
    assert!(err.to_string().contains("no space left"), "{err}");
    let err = client.register(&request("c", 3)).await.unwrap_err();
    assert_eq!(err.code(), Some(code::STORE_READ_ONLY));
    let status = client.status().await.unwrap().store;
    assert!(!status.writable && status.error.is_some());
    // A revocation is in force, and its caller learns that a restart would lose it.
    let err = client.revoke_tickets().await.unwrap_err();
    assert_eq!(err.code(), Some(code::STORE_READ_ONLY));
    assert!(err.to_string().contains("are revoked, but a restart"), "{err}");
    let keys = client.register(&request("a", 1)).await.unwrap().ticket_keys.unwrap();
    assert!(keys.least_epoch > 0, "{keys:?}");
    // Everything else works: heartbeats, known processes, expirations, new epochs.
    let lease = LeaseRequest { incarnation: 1, assignment_version: 0, load: None };
    client.renew(&member, &lease).await.unwrap();
    assert_eq!(client.register(&request("a", 1)).await.unwrap().member_id, member);
    // A killed server that comes back as a new process is a known member, too.
    let back = serve(&client, "a", 9).await;
    assert_ne!(back, member);
    let epoch = client.placement().await.unwrap().epoch;
    let drained = client.drain(&other, &DrainRequest::default()).await.unwrap();
    assert!(drained.not_stored.unwrap().contains("no space left"));
    let table = client.placement().await.unwrap();
    assert_eq!((table.epoch, table.servers.len()), (epoch + 1, 1));

    is_full.store(false, Ordering::SeqCst);
    let healed = async {
        while client.register(&request("c", 3)).await.is_err() {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::time::timeout(BOUND, healed).await.unwrap();
    assert!(client.status().await.unwrap().store.writable);
    plane.stop().await;
}

/// On a disk that stays full, a killed control plane comes back, and so does a killed server. The placement changes
/// more often than epochs were reserved while there was space.
#[tokio::test]
async fn a_full_disk_stops_no_recovery() {
    let is_full = Arc::new(AtomicBool::new(false));
    let inner = MemoryStore::new();
    let start = async || {
        let store = Moody { inner: inner.clone(), is_full: Arc::clone(&is_full) };
        let mut config = config();
        config.lease_ttl = Duration::from_secs(60);
        let clock = Arc::new(MonotonicClock::new());
        let server = switchyard_control_plane::Server::bind_with(config, Box::new(store), clock);
        Plane::run(server.await.unwrap())
    };
    let plane = start().await;
    serve(&plane.client(), "a", 1).await;
    // Its response means that everything before it is stored, too.
    plane.client().register(&request("b", 1)).await.unwrap();
    let epoch = plane.client().placement().await.unwrap().epoch;
    is_full.store(true, Ordering::SeqCst);
    plane.stop().await;

    let plane = start().await;
    let client = plane.client();
    let mut last = client.placement().await.unwrap();
    assert!(last.epoch > epoch, "{} after {epoch}", last.epoch);
    assert_eq!(last.servers[0].incarnation, 1);
    assert!(!client.status().await.unwrap().store.writable);
    let text =
        raw(plane.addr, b"GET /readyz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").await;
    assert!(text.starts_with("HTTP/1.1 200") && text.contains("no space left"), "{text}");
    for incarnation in 2..800 {
        serve(&client, "a", incarnation).await;
        let next = client.placement().await.unwrap();
        assert!(next.epoch >= last.epoch);
        last = next;
    }
    let settled = async {
        while client.placement().await.unwrap().servers.first().map(|s| s.incarnation) != Some(799)
        {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::time::timeout(BOUND, settled).await.unwrap();
    last = client.placement().await.unwrap();
    assert!(last.epoch > epoch + 1024, "{}", last.epoch);
    plane.stop().await;

    // With space again no epoch comes twice.
    is_full.store(false, Ordering::SeqCst);
    let plane = start().await;
    let table = plane.client().placement().await.unwrap();
    assert!(table.epoch > last.epoch, "{} after {}", table.epoch, last.epoch);
    plane.stop().await;
}

/// Goals and the end of a drain are in the store before the answer comes, or nothing changes.
#[tokio::test]
async fn changes_that_cannot_be_stored_are_taken_back() {
    let is_full = Arc::new(AtomicBool::new(false));
    let inner = MemoryStore::new();
    let start = async || {
        let store = Moody { inner: inner.clone(), is_full: Arc::clone(&is_full) };
        let mut config = config();
        config.lease_ttl = Duration::from_secs(60);
        config.balance = Some(BalanceSettings::default());
        let clock = Arc::new(MonotonicClock::new());
        let server = switchyard_control_plane::Server::bind_with(config, Box::new(store), clock);
        Plane::run(server.await.unwrap())
    };
    let plane = start().await;
    let client = plane.client();
    let member = serve(&client, "a", 1).await;
    let drained = client.drain(&member, &DrainRequest::default()).await.unwrap();
    assert_eq!((drained.state, drained.not_stored), (MemberState::Draining, None));
    let stored = FleetGoals { replicas: 2, spare: 0.25 };
    assert_eq!(client.set_goals(&stored).await.unwrap(), stored);
    is_full.store(true, Ordering::SeqCst);
    // The first of them meets the full disk; the second knows of it.
    for _ in 0..2 {
        let err = client.set_goals(&FleetGoals { replicas: 3, spare: 0.5 }).await.unwrap_err();
        assert_eq!(err.code(), Some(code::STORE_READ_ONLY));
        assert!(err.to_string().contains("the change is not in force"), "{err}");
        assert_eq!(client.goals().await.unwrap(), stored);
        let err = client.resume(&member).await.unwrap_err();
        assert_eq!(err.code(), Some(code::STORE_READ_ONLY));
        assert_eq!(client.members().await.unwrap()[0].state, MemberState::Draining);
    }
    is_full.store(false, Ordering::SeqCst);
    plane.stop().await;
    let plane = start().await;
    assert_eq!(plane.client().goals().await.unwrap(), stored);
    assert_eq!(plane.client().members().await.unwrap()[0].state, MemberState::Draining);
    plane.stop().await;
}

/// A store that another process writes.
#[tokio::test]
async fn a_control_plane_that_has_been_replaced_stops() {
    let store = MemoryStore::new();
    let clock = Arc::new(MonotonicClock::new());
    let server =
        switchyard_control_plane::Server::bind_with(config(), Box::new(store.clone()), clock);
    let plane = Plane::run(server.await.unwrap());
    let mut rival = store.clone();
    let (snapshot, revision) = rival.load().unwrap();
    rival.save(&snapshot.unwrap(), revision).unwrap();
    // The registration cannot become durable. Its refusal may or may not arrive.
    let _ = plane.client().register(&request("a", 1)).await;
    let outcome = tokio::time::timeout(BOUND, plane.task).await.unwrap().unwrap();
    assert!(matches!(outcome, Err(RunError::Store(StoreError::Conflict { .. }))), "{outcome:?}");
}
