//! Several control planes on one etcd, each in its own process. Leaders are killed, paused and cut off.

use std::collections::HashMap;
use std::io::{BufRead, BufReader};
use std::process::{Child, Stdio};
use std::sync::Arc;

use control_api::{
    AddModelRequest, DrainRequest, EditionList, EditionState, LeaseKeeper, LeaseOptions,
    MemberState, PlacementTable, PlacementWatch, SwitchRequest, WatchOptions, code,
};
use rustix::process::{Pid, Signal, kill_process};
use switchyard_control_plane::EtcdConfig;
use test_support::etcd::EtcdCluster;
use tokio::io::AsyncReadExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Handle;
use tokio::sync::watch;

use super::*;

/// Time to live of the leader's lease in etcd.
const ETCD_LEASE: Duration = Duration::from_secs(2);

/// This test's own binary, which runs [`serve`].
struct Process {
    child: Child,
    url: String,
}

impl Process {
    fn start(endpoints: &[String], listen: &str) -> Self {
        let mut child = test_support::child::command("shared-control-plane")
            .arg(endpoints.join(","))
            .arg(listen)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        let listening = |line: String| line.strip_prefix("LISTENING ").map(str::to_owned);
        let addr = stdout.lines().map_while(Result::ok).find_map(listening);
        Self { child, url: format!("http://{}", addr.expect("the control plane did not start")) }
    }

    /// Kills it, and starts it again at the same address.
    fn restart(&mut self, endpoints: &[String]) {
        let listen = self.url.trim_start_matches("http://").to_owned();
        let _ = self.child.kill();
        let _ = self.child.wait();
        *self = Self::start(endpoints, &listen);
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

/// The process that the tests kill. Arguments: the endpoints of etcd, and the address to listen on.
#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
pub async fn serve() {
    let [_, endpoints, listen] = std::env::args().collect::<Vec<_>>().try_into().unwrap();
    let plane = Plane::start(shared_config(endpoints.split(','), &listen)).await;
    println!("LISTENING {}", plane.addr);
    // Ends by itself if the parent does not kill it.
    tokio::time::sleep(Duration::from_secs(300)).await;
}

fn shared_config<'a>(endpoints: impl Iterator<Item = &'a str>, listen: &str) -> ServerConfig {
    let mut config = patient_config();
    config.listen = listen.to_owned();
    let mut etcd = EtcdConfig::new(endpoints.map(str::to_owned).collect());
    etcd.lease = ETCD_LEASE;
    config.etcd = Some(etcd);
    config
}

fn start(etcd: &EtcdCluster, num_planes: usize) -> Vec<Process> {
    (0..num_planes).map(|_| Process::start(&etcd.endpoints(), "127.0.0.1:0")).collect()
}

/// A client that knows every control plane.
fn client_of(planes: &[Process]) -> ControlClient {
    let urls: Vec<&str> = planes.iter().map(|plane| plane.url.as_str()).collect();
    ControlClient::new(&urls.join(","), Some(TOKEN.to_owned())).unwrap()
}

/// Index of the control plane that leads. `counts` tells which ones to ask.
async fn leader_of(planes: &[Process], counts: impl Fn(usize) -> bool) -> usize {
    let find = async {
        loop {
            for (index, plane) in planes.iter().enumerate() {
                if counts(index) && plane.client().leader().await.is_ok_and(|info| info.leads) {
                    return index;
                }
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(BOUND, find).await.expect("no control plane leads")
}

async fn eventually<F: Future<Output = bool>>(what: &str, condition: impl Fn() -> F) {
    let wait = async {
        while !condition().await {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(BOUND, wait).await.unwrap_or_else(|_| panic!("there was no {what}"));
}

async fn keepers(client: &ControlClient, names: &[&str]) -> Vec<LeaseKeeper> {
    keepers_of(client, names, &model()).await
}

async fn keepers_of(
    client: &ControlClient,
    names: &[&str],
    model: &ModelDescriptor,
) -> Vec<LeaseKeeper> {
    let mut keepers = Vec::new();
    for name in names {
        let mut request = request(name, rand::random());
        request.model = model.clone();
        let keeper = LeaseKeeper::spawn(client, request, LeaseOptions::default()).unwrap();
        let assignment = keeper.registered(BOUND).await.unwrap();
        keeper.set_ready(Assignment::clone(&assignment));
        keeper.serving(BOUND).await.unwrap();
        keepers.push(keeper);
    }
    keepers
}

/// Records every table of a watch, and checks that no epoch has two.
struct Epochs {
    watch: PlacementWatch,
    seen: HashMap<u64, Arc<PlacementTable>>,
    cluster_id: String,
}

impl Epochs {
    async fn follow(client: &ControlClient) -> Self {
        let options = WatchOptions::default();
        let watch = PlacementWatch::spawn(client, &Handle::current(), options).unwrap();
        let table = watch.wait_for(BOUND, PlacementTable::is_complete).await.unwrap();
        let cluster_id = table.cluster_id.clone();
        Self { watch, seen: HashMap::from([(table.epoch, table)]), cluster_id }
    }

    async fn complete_after(&mut self, epoch: u64) -> u64 {
        let found = self.watch.wait_for(BOUND, |table| table.epoch > epoch && table.is_complete());
        let table = found.await.expect("no complete placement under a new leader");
        assert_eq!(table.cluster_id, self.cluster_id);
        let other = self.seen.insert(table.epoch, Arc::clone(&table));
        assert!(other.is_none_or(|other| other == table), "epoch {} twice", table.epoch);
        assert_eq!(self.watch.state().borrow().num_stale_tables, 0);
        table.epoch
    }
}

/// Each leader is killed in turn. Its successor takes over members, drains and goals; members keep their leases, the
/// placement goes on, and new members join.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_leader_is_replaced() {
    let etcd = EtcdCluster::start(1);
    let mut planes = start(&etcd, 3);
    let client = client_of(&planes);
    let keepers = keepers(&client, &["a", "b", "c", "d", "e"]).await;
    let drained = keepers[4].state().borrow().member_id.clone().unwrap();
    client.drain(&drained, &DrainRequest { incarnation: None }).await.unwrap();
    let mut epochs = Epochs::follow(&client).await;
    let mut newest = client.status().await.unwrap().epoch;
    for round in 0..3 {
        let leader = leader_of(&planes, |_| true).await;
        planes[leader].signal(Signal::KILL);
        newest = epochs.complete_after(newest).await;
        let joined = format!("new-{round}");
        let new = super::shared::keepers(&client, &[&joined]).await;
        let members = client.members().await.unwrap();
        let state = |name: &str| members.iter().find(|member| member.name == name).unwrap().state;
        assert_eq!(state("e"), MemberState::Draining);
        for name in ["a", "b", "c", "d", joined.as_str()] {
            assert_eq!(state(name), MemberState::Serving, "{name}");
        }
        for keeper in &keepers {
            assert_eq!(keeper.state().borrow().num_registrations, 1);
        }
        new[0].leave(BOUND).await.unwrap();
        planes[leader].restart(&etcd.endpoints());
    }
}

/// An update of the model goes on under the next leader, and the clients of followers keep the old model in service.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_update_of_the_model_survives_its_leader() {
    let etcd = EtcdCluster::start(1);
    let planes = start(&etcd, 2);
    let client = client_of(&planes);
    let _old = keepers(&client, &["a", "b", "c", "d"]).await;
    let leader = leader_of(&planes, |_| true).await;
    let follower = planes[1 - leader].client();
    let watch = PlacementWatch::spawn(&follower, &Handle::current(), WatchOptions::default());
    let watch = watch.unwrap();
    let first = watch.wait_for(BOUND, PlacementTable::is_complete).await.unwrap();
    let next = models::NEXT.to_owned();
    client.add_model(&AddModelRequest { fingerprint: next.clone() }).await.unwrap();
    let _new = keepers_of(&client, &["e", "f", "g", "h"], &models::next_model()).await;
    client.switch_model(&SwitchRequest::default()).await.unwrap();
    let is_as_expected = |list: &EditionList| {
        let [current, old] = &list.editions[..] else { return false };
        let states = (current.state, old.state);
        current.fingerprint.as_ref() == Some(&next)
            && states == (EditionState::Current, EditionState::Retiring)
            && old.num_clients == 1
    };
    eventually("count of the follower's client", || async {
        client.models().await.is_ok_and(|list| is_as_expected(&list))
    })
    .await;
    // The follower's new clients get the new model.
    eventually("new model at the follower", || async {
        follower
            .placement()
            .await
            .is_ok_and(|table| table.model.is_some_and(|model| model.fingerprint == next))
    })
    .await;

    planes[leader].signal(Signal::KILL);
    eventually("both models under the next leader", || async {
        follower.models().await.is_ok_and(|list| is_as_expected(&list))
    })
    .await;
    let table = watch.wait_for(BOUND, |table| table.epoch > first.epoch).await.unwrap();
    assert_eq!((&table.model, &table.servers), (&first.model, &first.servers));
    assert_eq!(watch.state().borrow().num_stale_tables, 0);
}

/// A paused leader finds its successor when it continues, and follows it. It writes nothing any more.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_paused_leader_follows_its_successor() {
    let etcd = EtcdCluster::start(1);
    let planes = start(&etcd, 2);
    let client = client_of(&planes);
    let keepers = keepers(&client, &["a", "b", "c", "d"]).await;
    let mut epochs = Epochs::follow(&client).await;
    for _ in 0..2 {
        let newest = client.status().await.unwrap().epoch;
        let paused = leader_of(&planes, |_| true).await;
        planes[paused].signal(Signal::STOP);
        epochs.complete_after(newest).await;
        planes[paused].signal(Signal::CONT);
        let successor = &planes[1 - paused].url;
        let old = planes[paused].client();
        eventually("follower", || async {
            old.leader().await.is_ok_and(|info| !info.leads && info.url.as_ref() == Some(successor))
        })
        .await;
        // The follower shows the placement of its leader.
        let table = planes[1 - paused].client().placement().await.unwrap();
        eventually("relayed table", || async {
            old.placement().await.is_ok_and(|shown| shown.epoch >= table.epoch)
        })
        .await;
        for keeper in &keepers {
            keeper.serving(BOUND).await.unwrap();
            assert_eq!(keeper.state().borrow().num_registrations, 1);
        }
    }
}

/// Followers answer reads and pass writes on. They refuse a wrong token themselves.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn followers_answer_and_forward() {
    let etcd = EtcdCluster::start(1);
    let planes = start(&etcd, 3);
    let leader = leader_of(&planes, |_| true).await;
    for (index, plane) in planes.iter().enumerate() {
        let client = plane.client();
        let name = format!("m{index}");
        serve_member(&client, &name, index as u64).await;
        let info = client.leader().await.unwrap();
        assert_eq!(info.leads, index == leader);
        assert_eq!(info.url.as_deref(), Some(planes[leader].url.as_str()));
        assert_eq!(client.status().await.unwrap().leader, info.url);
        let stranger = ControlClient::new(&plane.url, Some("wrong".to_owned())).unwrap();
        let err = stranger.status().await.unwrap_err();
        assert_eq!(err.code(), Some(code::UNAUTHORIZED), "{err}");
        // A follower is ready once it has the leader's table.
        eventually("readiness", || async {
            let probe = raw(
                plane.url[7..].parse().unwrap(),
                b"GET /readyz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
            );
            let probe = probe.await;
            probe.starts_with("HTTP/1.1 200") && probe.contains("ok")
        })
        .await;
        let metrics = raw(
            plane.url[7..].parse().unwrap(),
            b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
        );
        let wanted = format!("switchyard_control_leader {}\n", u8::from(index == leader));
        assert!(metrics.await.contains(&wanted));
    }
    let tables = planes.iter().map(|plane| plane.client());
    let newest = planes[leader].client().placement().await.unwrap();
    assert_eq!(newest.servers.len(), 3);
    for client in tables {
        eventually("same table", || async { client.placement().await.is_ok_and(|t| t == newest) })
            .await;
        assert_eq!(client.members().await.unwrap().len(), 3);
    }
    eventually("list of followers", || async {
        planes[0].client().status().await.is_ok_and(|status| status.followers.len() == 2)
    })
    .await;
}

async fn serve_member(client: &ControlClient, name: &str, incarnation: u64) {
    let joined = client.register(&request(name, incarnation)).await.unwrap();
    let ready = ReadyRequest { incarnation, holds: joined.assignment };
    client.ready(&joined.member_id, &ready).await.unwrap();
}

/// Without a quorum of etcd the leader keeps serving what it knows and says so. Nothing is lost, and it recovers by
/// itself. Members of etcd die, pause and come back meanwhile.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_quorum_the_leader_is_read_only() {
    let mut etcd = EtcdCluster::start(3);
    let planes = start(&etcd, 2);
    let client = client_of(&planes);
    let keepers = keepers(&client, &["a", "b", "c", "d"]).await;
    let mut epochs = Epochs::follow(&client).await;

    // One of three members may go at any time.
    let dead = etcd.leader();
    etcd.kill(dead);
    super::shared::keepers(&client, &["during-a-death"]).await;
    etcd.restart(dead);
    let paused = etcd.leader();
    etcd.pause(paused);
    super::shared::keepers(&client, &["during-a-pause"]).await;
    etcd.resume(paused);
    etcd.cut_off(etcd.leader());
    super::shared::keepers(&client, &["during-a-cut"]).await;
    etcd.join();

    let leader = leader_of(&planes, |_| true).await;
    for index in [0, 1] {
        etcd.kill(index);
    }
    // Longer than the leases of members and of the leader.
    tokio::time::sleep(LEASE + ETCD_LEASE).await;
    let status = planes[leader].client().status().await.unwrap();
    let reason = status.store.error.unwrap();
    assert!(!status.store.writable && reason.contains("etcd"), "{reason}");
    let addr: SocketAddr = planes[leader].url[7..].parse().unwrap();
    let get = async |path: &str| {
        let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
        raw(addr, request.as_bytes()).await
    };
    let probe = get("/readyz").await;
    assert!(probe.contains("200 OK") && probe.contains("store cannot be written"), "{probe}");
    let metrics = get("/metrics").await;
    assert!(metrics.contains("switchyard_control_store_writable 0\n"));
    for keeper in &keepers {
        keeper.serving(BOUND).await.unwrap();
        assert_eq!(keeper.state().borrow().num_registrations, 1);
    }
    for plane in &planes {
        let err = plane.client().register(&request("stranger", 1)).await.unwrap_err();
        assert_eq!(err.code(), Some(code::STORE_READ_ONLY), "{err}");
    }
    assert!(client.placement().await.unwrap().is_complete());
    let newest = client.status().await.unwrap().epoch;

    etcd.restart(0);
    eventually("recovery", || async {
        client.status().await.is_ok_and(|status| status.store.writable)
    })
    .await;
    super::shared::keepers(&client, &["afterwards"]).await;
    epochs.complete_after(newest).await;
    for keeper in &keepers {
        assert_eq!(keeper.state().borrow().num_registrations, 1);
    }
}

/// Another program's value under the key of the state ends no control plane. The leader serves what it knows and names
/// the key; one that is elected meanwhile waits until the key is gone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_foreign_value_in_etcd_stops_no_control_plane() {
    const KEY: &str = "/switchyard/snapshot";
    let etcd = EtcdCluster::start(1);
    let mut planes = start(&etcd, 2);
    let client = client_of(&planes);
    let keepers = keepers(&client, &["a", "b", "c", "d"]).await;
    let leader = leader_of(&planes, |_| true).await;
    eventually("follower", || async {
        planes[leader].client().status().await.is_ok_and(|status| status.followers.len() == 1)
    })
    .await;
    etcd.control(&["put", KEY, "garbage"]);
    let err = client.register(&request("stranger", 1)).await.unwrap_err();
    assert_eq!(err.code(), Some(code::STORE_READ_ONLY), "{err}");
    assert!(err.to_string().contains(KEY), "{err}");
    assert!(client.placement().await.unwrap().is_complete());
    etcd.control(&["del", KEY]);
    eventually("recovery", || async {
        client.status().await.is_ok_and(|status| status.store.writable)
    })
    .await;
    assert_eq!(leader_of(&planes, |_| true).await, leader);
    for keeper in &keepers {
        assert_eq!(keeper.state().borrow().num_registrations, 1);
    }

    etcd.control(&["put", KEY, "garbage"]);
    planes[leader].child.kill().unwrap();
    let other = 1 - leader;
    let addr: SocketAddr = planes[other].url[7..].parse().unwrap();
    let request = b"GET /readyz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
    eventually("reason", || async { raw(addr, request).await.contains(KEY) }).await;
    etcd.control(&["del", KEY]);
    leader_of(&planes, |index| index == other).await;
}

/// The only control plane loses its lease while another program's value is under its key. It has led, so it waits.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_leader_that_loses_its_lease_waits_for_a_good_state() {
    const KEY: &str = "/switchyard/snapshot";
    let etcd = EtcdCluster::start(1);
    let planes = start(&etcd, 1);
    leader_of(&planes, |_| true).await;
    planes[0].signal(Signal::STOP);
    etcd.control(&["put", KEY, "garbage"]);
    tokio::time::sleep(ETCD_LEASE * 2).await;
    planes[0].signal(Signal::CONT);
    let addr: SocketAddr = planes[0].url[7..].parse().unwrap();
    let request = b"GET /readyz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
    eventually("reason", || async {
        let answer = raw(addr, request).await;
        answer.contains("503") && answer.contains(KEY)
    })
    .await;
    etcd.control(&["del", KEY]);
    leader_of(&planes, |_| true).await;
}

/// Passes connections on to an address until it is cut.
struct Relay {
    url: String,
    cut: watch::Sender<bool>,
}

impl Relay {
    async fn to(target: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let target = target.trim_start_matches("http://").to_owned();
        let (cut, is_cut) = watch::channel(false);
        tokio::spawn(async move {
            loop {
                let (mut near, _) = listener.accept().await.unwrap();
                let (target, mut is_cut) = (target.clone(), is_cut.clone());
                tokio::spawn(async move {
                    if *is_cut.borrow() {
                        // Silent, as a network that loses every packet.
                        let _ = near.read_to_end(&mut Vec::new()).await;
                        return;
                    }
                    let mut far = TcpStream::connect(target).await.unwrap();
                    tokio::select! {
                        _ = tokio::io::copy_bidirectional(&mut near, &mut far) => {}
                        () = async { drop(is_cut.wait_for(|&cut| cut).await) } => {}
                    }
                    drop(far);
                    let _ = near.read_to_end(&mut Vec::new()).await;
                });
            }
        });
        Self { url, cut }
    }
}

/// A leader that alone is cut off from etcd steps down as soon as another one leads, and comes back as a follower.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_leader_cut_off_from_etcd_steps_down() {
    let etcd = EtcdCluster::start(1);
    let relay = Relay::to(&etcd.endpoints()[0]).await;
    let first = Process::start(std::slice::from_ref(&relay.url), "127.0.0.1:0");
    let planes = [first, Process::start(&etcd.endpoints(), "127.0.0.1:0")];
    assert_eq!(leader_of(&planes, |_| true).await, 0);
    let client = client_of(&planes);
    let keepers = keepers(&client, &["a", "b", "c", "d"]).await;
    let mut epochs = Epochs::follow(&client).await;
    eventually("known follower", || async {
        client.status().await.is_ok_and(|status| status.followers.len() == 1)
    })
    .await;
    let newest = client.status().await.unwrap().epoch;
    relay.cut.send_replace(true);
    assert_eq!(leader_of(&planes, |index| index == 1).await, 1);
    epochs.complete_after(newest).await;
    let old = planes[0].client();
    eventually("follower", || async { old.leader().await.is_ok_and(|info| !info.leads) }).await;
    // It knows the leader from the leader itself, and forwards to it.
    eventually("forwarded request", || async { old.members().await.is_ok() }).await;
    for keeper in &keepers {
        keeper.serving(BOUND).await.unwrap();
        assert_eq!(keeper.state().borrow().num_registrations, 1);
    }
    relay.cut.send_replace(false);
    let newest = client.status().await.unwrap().epoch;
    planes[1].signal(Signal::KILL);
    assert_eq!(leader_of(&planes, |index| index == 0).await, 0);
    epochs.complete_after(newest).await;
}

/// A leader that stops gives its leadership up at once, without waiting for its lease.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_leader_that_stops_hands_over() {
    let etcd = EtcdCluster::start(1);
    let endpoints = etcd.endpoints();
    let config = |lease: Duration| {
        let mut config = shared_config(endpoints.iter().map(String::as_str), "127.0.0.1:0");
        config.etcd.as_mut().unwrap().lease = lease;
        config
    };
    // Longer than the test waits for anything.
    let first = Plane::start(config(Duration::from_secs(300))).await;
    let client = first.client();
    eventually("leader", || async { client.leader().await.is_ok_and(|info| info.leads) }).await;
    let second = Plane::start(config(ETCD_LEASE)).await;
    serve_member(&client, "a", 1).await;
    first.stop().await;
    let client = second.client();
    eventually("leader", || async { client.leader().await.is_ok_and(|info| info.leads) }).await;
    assert_eq!(client.members().await.unwrap().len(), 1);
    second.stop().await;
}

/// Settings and states that cannot work are refused at the start, with one line.
/// A follower without a token sends the host of the leader's URL, which a leader on loopback could take for that of a page.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_tokens_a_leader_answers_to_the_name_that_it_advertises() {
    let etcd = EtcdCluster::start(1);
    let endpoints = etcd.endpoints();
    let mut config = shared_config(endpoints.iter().map(String::as_str), "127.0.0.1:0");
    config.token = None;
    config.etcd.as_mut().unwrap().advertise = Some("http://plane.test:7070".to_owned());
    let plane = Plane::start(config).await;
    let client = ControlClient::new(&plane.url(), None).unwrap();
    eventually("leader", async || client.leader().await.is_ok_and(|info| info.leads)).await;
    let ask = async |host: &str| {
        let request = format!(
            "POST /v1/tickets/revoke HTTP/1.1\r\nhost: {host}\r\nx-switchyard-forwarded: 1\r\nconnection: close\r\n\r\n"
        );
        raw(plane.addr, request.as_bytes()).await
    };
    let answer = ask("plane.test:7070").await;
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    let answer = ask("page.test:7070").await;
    assert!(answer.starts_with("HTTP/1.1 403") && answer.contains("header Host"), "{answer}");
    plane.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_start_that_cannot_work_is_explained() {
    let mut etcd = EtcdCluster::start(3);
    let endpoints = etcd.endpoints();
    let refusal = async |change: &dyn Fn(&mut ServerConfig)| {
        let mut config = shared_config(endpoints.iter().map(String::as_str), "127.0.0.1:0");
        change(&mut config);
        let text = Server::bind(config).await.unwrap_err().to_string();
        assert!(!text.contains('\n'), "{text}");
        text
    };
    etcd.control(&["put", "/other/registry/pods/a", "pod"]);
    type Change = fn(&mut EtcdConfig);
    let cases: [(&str, Change); 8] = [
        ("/other/registry/pods/a", |etcd| etcd.prefix = "/other".to_owned()),
        ("http://127.0.0.1:1", |etcd| etcd.endpoints = vec!["http://127.0.0.1:1".to_owned()]),
        ("https", |etcd| etcd.endpoints = vec!["https://127.0.0.1:1".to_owned()]),
        ("endpoint", |etcd| etcd.endpoints = Vec::new()),
        ("prefix", |etcd| etcd.prefix = "//".to_owned()),
        ("lease", |etcd| etcd.lease = Duration::from_millis(2500)),
        ("advertise", |etcd| etcd.advertise = Some("10.0.0.1".to_owned())),
        ("no URL of one", |etcd| etcd.advertise = Some("dns://plane.test:7070".to_owned())),
    ];
    for (word, change) in cases {
        let text = refusal(&|config| change(config.etcd.as_mut().unwrap())).await;
        assert!(text.contains(word), "{word}: {text}");
    }
    let text = refusal(&|config| config.data_dir = Some("/nonexistent".into())).await;
    assert!(text.contains("choose one"), "{text}");
    let text = refusal(&|config| {
        config.security.insecure = true;
        config.listen = "0.0.0.0:0".to_owned();
    })
    .await;
    assert!(text.contains("0.0.0.0") && text.contains("advertise"), "{text}");
    for index in [0, 1] {
        etcd.kill(index);
    }
    let text = refusal(&|_| ()).await;
    assert!(text.contains("quorum"), "{text}");
}
