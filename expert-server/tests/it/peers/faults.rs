//! Peers that damage weights, are late, die or stop in the middle of a read.

use std::path::Path;
use std::process::Child;
use std::time::{Duration, Instant};

use checkpoint::Preset;
use switchyard_expert_server::WeightsFrom;

use super::raw::{Misdeed, RawPeer};
use super::{Fleet, Folders, check_answers, read_bytes, refused_start, sent_bytes, start};
use crate::common::{PATIENCE, Reference, eventually, metric, seeded};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn damaged_weights_of_a_peer_are_refused_and_come_from_another_one() {
    let mut rng = seeded();
    let folders = Folders::random(&mut rng, Preset::TinyQwen3Moe);
    let reference = Reference::of(&folders.full);
    let fleet = Fleet::of_replicas().await;
    let honest = fleet.server("honest", &folders.full, WeightsFrom::Disk).await;
    let raw = RawPeer::join(&fleet.url, "raw", &folders.full, Misdeed::FlipBit).await;
    let c = fleet.server("c", &folders.bare, WeightsFrom::Peers).await;
    let damaged = metric(c.metrics(), "switchyard_server_weights_damaged_total");
    assert!(raw.num_granted() > 0, "the damaged peer was asked");
    assert_eq!(damaged, raw.num_granted() as f64);
    assert_eq!(read_bytes(&c, "peer"), c.expert_bytes() as f64);
    check_answers(&c, &reference, &mut rng).await;
    for server in [honest, c] {
        server.shutdown().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_grant_that_arrives_after_its_lease_is_not_used() {
    let mut rng = seeded();
    let folders = Folders::random(&mut rng, Preset::TinyQwen3Moe);
    let fleet = Fleet::of_replicas().await;
    let honest = fleet.server("honest", &folders.full, WeightsFrom::Disk).await;
    let raw = RawPeer::join(&fleet.url, "raw", &folders.full, Misdeed::Late).await;
    raw.copy_all();
    let before = sent_bytes(&honest);
    let c = fleet.server("c", &folders.bare, WeightsFrom::Peers).await;
    assert!(raw.num_granted() > 0, "the late peer was asked");
    assert_eq!(sent_bytes(&honest) - before, c.expert_bytes() as f64);
    for server in [honest, c] {
        server.shutdown().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_damaged_peers_alone_the_start_fails_with_the_checksum() {
    let mut rng = seeded();
    let folders = Folders::random(&mut rng, Preset::TinyQwen3Moe);
    let fleet = Fleet::of_replicas().await;
    let honest = fleet.server("honest", &folders.full, WeightsFrom::Disk).await;
    let raw = RawPeer::join(&fleet.url, "raw", &folders.full, Misdeed::FlipBit).await;
    raw.copy_all();
    honest.shutdown().await;
    let mut config = fleet.config("c", &folders.bare, WeightsFrom::Peers);
    config.weights.peer_timeout = Duration::from_millis(1500);
    let error = refused_start(config, "checksum").await;
    assert!(error.contains("raw"), "{error}");
    assert!(raw.num_granted() > 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_peer_that_is_killed_in_a_read_is_replaced_by_another_one() {
    let mut rng = seeded();
    let folders = Folders::random(&mut rng, Preset::MiniDeepseekV3);
    let reference = Reference::of(&folders.full);
    let fleet = Fleet::of_replicas().await;
    let honest = fleet.server("honest", &folders.full, WeightsFrom::Disk).await;
    let mark = folders.bare.join("granted");
    let mut child = faulty_peer("dying", &fleet, &folders.full, &mark).await;
    let c = fleet.server("c", &folders.bare, WeightsFrom::Peers).await;
    eventually("the child has killed itself", || child.0.try_wait().expect("a child").is_some());
    assert!(mark.exists(), "it gave a grant before");
    assert_eq!(c.holds(), honest.holds());
    check_answers(&c, &reference, &mut rng).await;
    for server in [honest, c] {
        server.shutdown().await;
    }
}

/// A peer that stops neither answers nor ends its connections, and its lease lasts an hour.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_peer_that_stops_in_a_read_is_replaced_by_another_one() {
    let mut rng = seeded();
    let folders = Folders::random(&mut rng, Preset::TinyQwen3Moe);
    let reference = Reference::of(&folders.full);
    let fleet = Fleet::of_replicas().await;
    let honest = fleet.server("honest", &folders.full, WeightsFrom::Disk).await;
    let mark = folders.bare.join("granted");
    let mut child = faulty_peer("stopping", &fleet, &folders.full, &mark).await;
    let mut config = fleet.config("c", &folders.bare, WeightsFrom::Peers);
    config.weights.chunk_timeout = Duration::from_millis(300);
    let c = tokio::time::timeout(PATIENCE, start(config)).await.expect("the read ends");
    assert!(mark.exists(), "it gave a grant before");
    assert!(child.0.try_wait().expect("a child").is_none(), "the child still exists");
    assert_eq!(c.holds(), honest.holds());
    check_answers(&c, &reference, &mut rng).await;
    for server in [honest, c] {
        server.shutdown().await;
    }
}

/// A process that is killed at the end of the test.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

/// Starts a peer in a process of its own, which creates `mark` before it lets a reader read.
async fn faulty_peer(name: &str, fleet: &Fleet, dir: &Path, mark: &Path) -> Killed {
    let child = test_support::child::command(&format!("{name}-peer"))
        .arg(&fleet.url)
        .args([dir, mark])
        .spawn()
        .expect("a child");
    let child = Killed(child);
    let deadline = Instant::now() + PATIENCE;
    while !fleet.members().await.iter().any(|member| member.name == name) {
        assert!(Instant::now() < deadline, "the child does not join");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    child
}
