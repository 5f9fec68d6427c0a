//! The store against a real etcd.

mod tls;

use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use test_support::etcd::EtcdCluster;
use tokio::runtime::Runtime;
use trust::tls::Security;

use super::super::conformance::{Subject, conforms, snapshot};
use super::super::{Revision, Store, StoreError};
use super::{EtcdClient, EtcdCredentials, EtcdError, EtcdStore, Fence, encoded};

struct Prefix<'a> {
    client: Arc<EtcdClient>,
    prefix: String,
    runtime: &'a Runtime,
}

impl<'a> Prefix<'a> {
    fn new(endpoints: &[String], runtime: &'a Runtime) -> Self {
        let client = Arc::new(EtcdClient::new(endpoints, None, &Security::default()).unwrap());
        Self { client, prefix: format!("/test-{:x}/", rand::random::<u64>()), runtime }
    }

    fn open_with(&self, fence: Option<Fence>) -> EtcdStore {
        let handle = self.runtime.handle().clone();
        EtcdStore::new(Arc::clone(&self.client), &self.prefix, handle, fence)
    }

    fn put(&self, key: &str, value: &str) {
        let body = json!({ "key": encoded(key), "value": encoded(value) });
        let put = self.client.call::<serde_json::Value>("kv/put", &body, BOUND);
        self.runtime.block_on(put).unwrap();
    }

    /// Makes a key that stands for a leader.
    fn lead(&self, name: &str) -> Fence {
        let key = format!("{}election/{name}", self.prefix);
        self.put(&key, "http://leader");
        let found = self.runtime.block_on(self.client.get(&key, 0, BOUND)).unwrap();
        Fence { key: key.into_bytes(), create_revision: found.kvs[0].create_revision }
    }

    fn delete(&self, key: &[u8]) {
        let body = json!({ "key": encoded(key) });
        let delete = self.client.call::<serde_json::Value>("kv/deleterange", &body, BOUND);
        self.runtime.block_on(delete).unwrap();
    }
}

impl Subject for Prefix<'_> {
    type Store = EtcdStore;

    fn open(&self) -> EtcdStore {
        self.open_with(None)
    }
}

fn runtime() -> Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap()
}

#[test]
fn etcd_store_conforms() {
    let (etcd, runtime) = (EtcdCluster::start(1), runtime());
    conforms(|| Prefix::new(&etcd.endpoints(), &runtime));
}

/// The suite goes on over the death, the pause and the loss of members, as long as most of them run.
#[test]
fn etcd_store_of_three_members_conforms_without_one() {
    let (mut etcd, runtime) = (EtcdCluster::start(3), runtime());
    let endpoints = etcd.endpoints();
    // Without its leader etcd refuses everything until it has elected another one. That can take several rounds.
    let elected = || {
        test_support::eventually("another leader of etcd", Duration::from_secs(60), || {
            Prefix::new(&endpoints, &runtime).open().load().is_ok()
        });
    };
    let dead = etcd.leader();
    etcd.kill(dead);
    elected();
    conforms(|| Prefix::new(&endpoints, &runtime));
    etcd.restart(dead);
    let paused = etcd.leader();
    etcd.pause(paused);
    elected();
    conforms(|| Prefix::new(&endpoints, &runtime));
    etcd.resume(paused);
    let cut = etcd.leader();
    etcd.cut_off(cut);
    elected();
    conforms(|| Prefix::new(&endpoints, &runtime));
    // The member that is cut off takes no write, and says why.
    let prefix = Prefix::new(&endpoints[cut..=cut], &runtime);
    let err = prefix.open().save(&snapshot(1), Revision(0)).unwrap_err();
    assert!(matches!(err, StoreError::Etcd(EtcdError::NoQuorum { .. })), "{err}");
    etcd.join();
    test_support::eventually("the member again", Duration::from_secs(60), || {
        prefix.open().load().is_ok()
    });
}

#[test]
fn only_the_leader_writes() {
    let (etcd, runtime) = (EtcdCluster::start(1), runtime());
    let prefix = Prefix::new(&etcd.endpoints(), &runtime);
    let old = prefix.lead("old");
    let mut first = prefix.open_with(Some(old.clone()));
    let revision = first.save(&snapshot(1), Revision(0)).unwrap();
    first.reserve_epoch(5).unwrap();
    prefix.delete(&old.key);
    let refused = |outcome: Result<_, StoreError>| match outcome {
        Err(StoreError::Deposed) => {}
        other => panic!("the old leader writes: {other:?}"),
    };
    refused(first.save(&snapshot(2), revision).map(drop));
    refused(first.reserve_epoch(1_000_000));
    // The same key, created anew, belongs to another process.
    let mut second = prefix.open_with(Some(prefix.lead("old")));
    refused(first.save(&snapshot(2), revision).map(drop));
    refused(first.reserve_epoch(1_000_000));
    let (found, revision) = second.load().unwrap();
    assert_eq!(found.unwrap().reserved_epoch, 1000);
    second.save(&snapshot(3), revision).unwrap();
}

/// A write whose answer was lost is found again, and the next one succeeds.
#[test]
fn a_write_without_an_answer_is_no_conflict() {
    let (etcd, runtime) = (EtcdCluster::start(1), runtime());
    let prefix = Prefix::new(&etcd.endpoints(), &runtime);
    let mut store = prefix.open();
    let first = store.save(&snapshot(1), Revision(0)).unwrap();
    let second = store.save(&snapshot(2), first).unwrap();
    // As if the answer to the second write had been lost.
    store.is_unsure = true;
    let third = store.save(&snapshot(3), first).unwrap();
    assert!(third > second);
    let other = prefix.open().save(&snapshot(4), third).unwrap();
    store.is_unsure = true;
    let err = store.save(&snapshot(5), third).unwrap_err();
    assert!(matches!(err, StoreError::Conflict { found, .. } if found == other.0), "{err}");
}

#[test]
fn data_of_another_program_is_refused() {
    let (etcd, runtime) = (EtcdCluster::start(1), runtime());
    let prefix = Prefix::new(&etcd.endpoints(), &runtime);
    prefix.put(&format!("{}registry/pods/a", prefix.prefix), "pod");
    let err = prefix.open().load().unwrap_err();
    assert!(matches!(err, StoreError::Foreign { .. }), "{err}");
    assert!(err.to_string().contains("registry/pods/a"), "{err}");

    let prefix = Prefix::new(&etcd.endpoints(), &runtime);
    prefix.put(&format!("{}snapshot", prefix.prefix), "{\"a\": 1}");
    let err = prefix.open().load().unwrap_err();
    assert!(matches!(err, StoreError::Foreign { .. }), "{err}");
}

/// A leader whose key another program has overwritten names it, and writes again once the key is gone. A process that
/// leads no longer gets an error that says so.
#[test]
fn a_leader_outlives_a_foreign_value() {
    let (etcd, runtime) = (EtcdCluster::start(1), runtime());
    let prefix = Prefix::new(&etcd.endpoints(), &runtime);
    let fence = prefix.lead("a");
    let mut store = prefix.open_with(Some(fence.clone()));
    let first = store.save(&snapshot(1), Revision(0)).unwrap();
    let key = format!("{}snapshot", prefix.prefix);
    prefix.put(&key, "garbage");
    for _ in 0..2 {
        let err = store.save(&snapshot(2), first).unwrap_err();
        assert!(matches!(&err, StoreError::Foreign { key: found, .. } if *found == key), "{err}");
    }
    prefix.delete(key.as_bytes());
    let second = store.save(&snapshot(3), first).unwrap();
    assert_eq!(store.load().unwrap().1, second);
    prefix.put(&key, "garbage");
    prefix.delete(&fence.key);
    let err = store.save(&snapshot(4), second).unwrap_err();
    assert!(matches!(err, StoreError::Deposed), "{err}");
}

#[test]
fn damage_is_noticed() {
    let (etcd, runtime) = (EtcdCluster::start(1), runtime());
    let prefix = Prefix::new(&etcd.endpoints(), &runtime);
    let mut store = prefix.open();
    store.save(&snapshot(1), Revision(0)).unwrap();
    let key = format!("{}snapshot", prefix.prefix);
    let good = runtime.block_on(prefix.client.get(&key, 0, BOUND)).unwrap().kvs.remove(0).value;
    let good = String::from_utf8(good).unwrap();
    for bad in [
        &good[..good.len() - 1],
        &good.replace("member-1", "member-2"),
        &good.replacen(" 0\n", " 3\n", 1),
        &good.replacen("switchyard-head 1", "switchyard-head 9", 1),
    ] {
        prefix.put(&key, bad);
        let err = store.load().unwrap_err();
        let is_named = matches!(err, StoreError::Corrupt { .. } | StoreError::Format { .. });
        assert!(is_named && err.to_string().contains(&key), "{err}");
    }
    prefix.put(&key, &good);
    store.load().unwrap();
}

/// Each fault has an error of its own, which names the endpoint.
#[test]
fn faults_of_the_endpoints_are_named() {
    let (mut etcd, runtime) = (EtcdCluster::start(3), runtime());
    let load = |endpoints: &[String], credentials: Option<EtcdCredentials>| {
        let client =
            Arc::new(EtcdClient::new(endpoints, credentials, &Security::default()).unwrap());
        let store = EtcdStore::new(client, "/test/", runtime.handle().clone(), None).load();
        match store {
            Err(StoreError::Etcd(err)) => err,
            other => panic!("{other:?}"),
        }
    };
    let wrong = ["http://127.0.0.1:1".to_owned()];
    let err = load(&wrong, None);
    assert!(matches!(err, EtcdError::Unreachable { .. }), "{err}");
    assert!(err.to_string().contains("127.0.0.1:1"), "{err}");

    // A server that is no etcd.
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        use std::io::{Read, Write};
        for mut stream in listener.incoming().flatten() {
            let _ = stream.read(&mut [0; 4096]);
            let _ = stream.write_all(b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\nno");
        }
    });
    let err = load(&[url], None);
    assert!(matches!(err, EtcdError::NotEtcd { .. }), "{err}");

    let credentials =
        |password: &str| EtcdCredentials { user: "root".to_owned(), password: password.to_owned() };
    let err = load(&etcd.endpoints(), Some(credentials("x")));
    assert!(matches!(err, EtcdError::Credentials { .. }), "{err}");
    etcd.control(&["user", "add", "root:secret"]);
    etcd.control(&["user", "grant-role", "root", "root"]);
    etcd.control(&["auth", "enable"]);
    for wrong in [None, Some(credentials("wrong"))] {
        let err = load(&etcd.endpoints(), wrong);
        assert!(matches!(err, EtcdError::Credentials { .. }), "{err}");
        assert!(!err.to_string().contains("wrong"), "{err}");
    }
    let client =
        EtcdClient::new(&etcd.endpoints(), Some(credentials("secret")), &Security::default())
            .unwrap();
    let handle = runtime.handle().clone();
    let mut store = EtcdStore::new(Arc::new(client), "/test/", handle, None);
    let revision = store.save(&snapshot(1), Revision(0)).unwrap();

    for index in 0..2 {
        etcd.kill(index);
    }
    let err = load(&etcd.endpoints(), None);
    assert!(matches!(err, EtcdError::NoQuorum { .. }), "{err}");
    store.save(&snapshot(2), revision).unwrap_err();
    // Nothing is lost, and the store recovers by itself.
    etcd.restart(0);
    let mut saved = revision;
    test_support::eventually("a quorum", Duration::from_secs(60), || {
        store.save(&snapshot(3), revision).is_ok_and(|revision| {
            saved = revision;
            true
        })
    });
    let found = store.load().unwrap();
    assert_eq!((found.0.unwrap().reserved_epoch, found.1), (3000, saved));
}

const BOUND: Duration = Duration::from_secs(10);
