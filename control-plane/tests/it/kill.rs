//! A control plane in its own process, killed and stopped by signals.

use std::collections::HashMap;
use std::io::{BufRead, BufReader};
use std::process::{Child, Stdio};
use std::sync::Arc;

use control_api::{
    LeaseKeeper, LeaseOptions, MemberState, PlacementTable, PlacementWatch, WatchOptions,
};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use rustix::process::{Pid, Signal, kill_process};
use tokio::runtime::Handle;

use super::*;

/// This test's own binary, which runs [`serve`].
struct Process {
    child: Child,
    url: String,
    listen: String,
}

impl Process {
    fn start(dir: &Path, listen: &str) -> Self {
        let mut child = test_support::child::command("control-plane")
            .arg(dir)
            .arg(listen)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        let listening = |line: String| line.strip_prefix("LISTENING ").map(str::to_owned);
        let listen = stdout.lines().map_while(Result::ok).find_map(listening);
        let listen = listen.expect("the control plane did not start");
        Self { child, url: format!("http://{listen}"), listen }
    }

    fn client(&self) -> ControlClient {
        ControlClient::new(&self.url, Some(TOKEN.to_owned())).unwrap()
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
        if signal == Signal::STOP {
            test_support::stopped::await_stop(self.child.id());
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The process that the tests kill. Arguments: its folder, and the address to listen on.
#[tokio::main(flavor = "current_thread")]
pub async fn serve() {
    let [_, dir, listen] = std::env::args().collect::<Vec<_>>().try_into().unwrap();
    let mut config = durable_config(Path::new(&dir));
    config.listen = listen;
    let plane = Plane::start(config).await;
    println!("LISTENING {}", plane.addr);
    // Ends by itself if the parent does not kill it.
    tokio::time::sleep(Duration::from_secs(300)).await;
}

/// SIGKILL at random moments while members keep running. The cluster id stays the same, no epoch has two
/// tables, and the fleet is complete again after every restart.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kills_lose_nothing_and_issue_no_epoch_twice() {
    let seed: u64 = rand::random();
    println!("seed {seed}");
    let mut rng = StdRng::seed_from_u64(seed);
    let dir = tempfile::tempdir().unwrap();
    let mut process = Process::start(dir.path(), "127.0.0.1:0");
    let client = process.client();
    let mut keepers = Vec::new();
    for name in ["a", "b", "c", "d"] {
        let options = LeaseOptions::default();
        let keeper = LeaseKeeper::spawn(&client, request(name, rng.random()), options).unwrap();
        let assignment = keeper.registered(BOUND).await.unwrap();
        keeper.set_ready(Assignment::clone(&assignment));
        keepers.push(keeper);
    }
    let watch =
        PlacementWatch::spawn(&client, &Handle::current(), WatchOptions::default()).unwrap();
    let complete = watch.wait_for(BOUND, |table| table.is_complete()).await.unwrap();

    let mut seen: HashMap<u64, Arc<PlacementTable>> = HashMap::new();
    let mut tables = watch.tables();
    for round in 0..100 {
        // A slow disk allows few epochs before a kill.
        if round >= 10 && seen.len() > 20 {
            break;
        }
        // Members join and leave, so that the kill hits a write of the store.
        let churn = tokio::spawn({
            let client = client.clone();
            async move {
                for i in 0.. {
                    let joined = client.register(&request("churn", round * 1_000_000 + i)).await;
                    let Ok(joined) = joined else { return };
                    let ready = ReadyRequest {
                        incarnation: round * 1_000_000 + i,
                        holds: joined.assignment,
                    };
                    if client.ready(&joined.member_id, &ready).await.is_err() {
                        return;
                    }
                }
            }
        });
        let kill_at =
            tokio::time::Instant::now() + Duration::from_micros(rng.random_range(1_000..150_000));
        while tokio::time::timeout_at(kill_at, tables.changed()).await.is_ok() {
            let table = tables.borrow_and_update().clone();
            assert_eq!(table.cluster_id, complete.cluster_id);
            let other = seen.insert(table.epoch, Arc::clone(&table));
            assert!(other.is_none_or(|other| other == table), "epoch {} twice", table.epoch);
        }
        process.signal(Signal::KILL);
        let newest = watch.current().epoch;
        let listen = process.listen.clone();
        drop(process);
        churn.await.unwrap();
        process = Process::start(dir.path(), &listen);
        let after = watch.wait_for(BOUND, |t| t.epoch > newest && t.is_complete()).await;
        let after = after.expect("the fleet is not complete after a restart");
        assert_eq!(after.cluster_id, complete.cluster_id);
        for keeper in &keepers {
            keeper.serving(BOUND).await.unwrap();
            assert_eq!(keeper.state().borrow().num_registrations, 1);
        }
    }
    assert!(seen.len() > 20, "{} epochs", seen.len());
}

/// A control plane that was stopped for several leases expires no member when it continues.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_frozen_control_plane_expires_no_member() {
    let dir = tempfile::tempdir().unwrap();
    let process = Process::start(dir.path(), "127.0.0.1:0");
    let client = process.client();
    let keeper = LeaseKeeper::spawn(&client, request("a", 1), LeaseOptions::default()).unwrap();
    let assignment = keeper.registered(BOUND).await.unwrap();
    keeper.set_ready(Assignment::clone(&assignment));
    keeper.serving(BOUND).await.unwrap();
    let before = client.placement().await.unwrap();
    for _ in 0..3 {
        process.signal(Signal::STOP);
        tokio::time::sleep(2 * LEASE).await;
        process.signal(Signal::CONT);
        keeper.serving(BOUND).await.unwrap();
        let renewals = keeper.state().borrow().num_renewals;
        let mut state = keeper.state();
        let alive = state.wait_for(|state| state.num_renewals >= renewals + 2);
        drop(tokio::time::timeout(BOUND, alive).await.unwrap().unwrap());
    }
    assert_eq!(client.placement().await.unwrap(), before);
    assert_eq!(client.members().await.unwrap()[0].state, MemberState::Serving);
    assert_eq!(keeper.state().borrow().num_registrations, 1);
}
