//! Servers as members of a fleet: assignments, a control plane that restarts, leaving, supersession.

use std::path::Path;
use std::time::{Duration, Instant};

use control_api::{ControlClient, PlacementTable};
use control_plane::{Server, ServerConfig as ControlConfig};
use switchyard_expert_server::{ExpertSelection, Placement, RunningServer, ServerError};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use crate::common::{PATIENCE, start_server};

struct ControlPlane {
    url: String,
    stop: oneshot::Sender<()>,
    task: JoinHandle<()>,
}

impl ControlPlane {
    /// Two servers, every expert on one of them, short leases.
    async fn start(listen: &str, dir: &Path) -> Self {
        let mut config = ControlConfig::new(listen, 2, 1);
        config.lease_ttl = Duration::from_secs(2);
        config.data_dir = Some(dir.to_owned());
        let server = Server::bind(config).await.expect("the control plane binds");
        let url = format!("http://{}", server.local_addr());
        let (stop, stopped) = oneshot::channel::<()>();
        let task = tokio::spawn(async move {
            let shutdown = async move {
                // A dropped sender stops the server, too.
                let _ = stopped.await;
            };
            server.run(shutdown).await.expect("the control plane runs");
        });
        Self { url, stop, task }
    }

    async fn stop(self) {
        self.stop.send(()).expect("it runs");
        self.task.await.expect("it ends well");
    }

    async fn member(&self, name: &str) -> RunningServer {
        start_server(name, ExpertSelection::All, |config| {
            config.placement = Placement::ControlPlane { url: self.url.clone(), token: None };
            config.drain_idle = Duration::from_millis(50);
        })
        .await
    }

    async fn placement_when(&self, what: &str, holds: impl Fn(&PlacementTable) -> bool) {
        let client = ControlClient::new(&self.url, None).expect("a client");
        let deadline = Instant::now() + PATIENCE;
        loop {
            if client.placement().await.is_ok_and(|table| holds(&table)) {
                return;
            }
            assert!(Instant::now() < deadline, "not in time: {what}");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn members_share_the_experts_outlive_a_restart_of_the_control_plane_and_leave() {
    let dir = tempfile::tempdir().expect("a directory");
    let control = ControlPlane::start("127.0.0.1:0", dir.path()).await;
    let (a, b) = tokio::join!(control.member("a"), control.member("b"));
    a.serving(PATIENCE).await.expect("a serves");
    b.serving(PATIENCE).await.expect("b serves");
    let (held_a, held_b) = (a.holds(), b.holds());
    assert_eq!(held_a.num_experts() + held_b.num_experts(), 64);
    for entry in &held_a.layers {
        let twice = entry.experts.iter().find(|&&expert| held_b.contains(entry.layer, expert));
        assert_eq!(twice, None, "held by both in layer {}", entry.layer);
    }
    control.placement_when("every expert has a place", PlacementTable::is_complete).await;

    let listen = control.url.strip_prefix("http://").expect("a URL").to_owned();
    control.stop().await;
    // Longer than a lease, so both servers must register again by themselves.
    let deadline = Instant::now() + PATIENCE;
    while a.ready().is_ok() || b.ready().is_ok() {
        assert!(Instant::now() < deadline, "a lost lease shows in readiness");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let control = ControlPlane::start(&listen, dir.path()).await;
    a.serving(PATIENCE).await.expect("a is back");
    b.serving(PATIENCE).await.expect("b is back");
    control.placement_when("every expert has a place again", PlacementTable::is_complete).await;
    assert_eq!((a.holds(), b.holds()), (held_a, held_b), "no server loads again");

    a.drain().await;
    a.wait().await.expect("a drain is a good end");
    let is_gone = |table: &PlacementTable| table.servers.iter().all(|entry| entry.name != "a");
    control.placement_when("a is out of the placement", is_gone).await;
    b.shutdown().await;
    b.wait().await.expect("a shutdown is a good end");
    control.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_whose_name_is_taken_over_ends_with_an_error() {
    let dir = tempfile::tempdir().expect("a directory");
    let control = ControlPlane::start("127.0.0.1:0", dir.path()).await;
    let old = control.member("same").await;
    old.serving(PATIENCE).await.expect("the old one serves");
    let new = control.member("same").await;
    let end = tokio::time::timeout(PATIENCE, old.wait()).await.expect("the old one ends");
    assert!(matches!(end, Err(ServerError::Membership { .. })), "{end:?}");
    new.serving(PATIENCE).await.expect("the new one serves");
    new.shutdown().await;
    control.stop().await;
}
