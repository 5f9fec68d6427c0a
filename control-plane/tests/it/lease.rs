//! The keeper of a lease against a real control plane.

use control_api::{
    LeaseError, LeaseKeeper, LeaseOptions, LeaseRequest, LeaseState, LeaseStatus, LoadReport,
    MemberState, PlacementWatch, WatchOptions, code,
};
use tokio::runtime::Handle;

use super::*;

fn keeper(client: &ControlClient, name: &str, incarnation: u64) -> LeaseKeeper {
    LeaseKeeper::spawn(client, request(name, incarnation), LeaseOptions::default()).unwrap()
}

async fn until(keeper: &LeaseKeeper, wanted: impl FnMut(&LeaseState) -> bool) -> LeaseState {
    let mut state = keeper.state();
    tokio::time::timeout(BOUND, state.wait_for(wanted)).await.unwrap().unwrap().clone()
}

#[tokio::test]
async fn a_keeper_registers_serves_renews_drains_and_leaves() {
    let plane = Plane::start(config()).await;
    let client = plane.client();
    let keeper = keeper(&client, "a", 1);
    let assignment = keeper.registered(BOUND).await.unwrap();
    assert!(!assignment.is_empty());
    keeper.set_ready(Assignment::clone(&assignment));
    keeper.serving(BOUND).await.unwrap();
    assert_eq!(client.placement().await.unwrap().servers.len(), 1);
    keeper.report_load(LoadReport { num_tokens: 5, ..LoadReport::default() });
    // Renewals over more than one lease.
    until(&keeper, |state| state.num_renewals >= 5).await;
    let members = client.members().await.unwrap();
    assert_eq!(members[0].state, MemberState::Serving);
    assert_eq!(members[0].load.as_ref().unwrap().num_tokens, 5);
    keeper.drain(BOUND).await.unwrap();
    assert!(client.placement().await.unwrap().servers.is_empty());
    let seen = until(&keeper, |_| true).await.num_renewals;
    until(&keeper, |state| state.num_renewals >= seen + 4).await;
    keeper.leave(BOUND).await.unwrap();
    assert!(client.members().await.unwrap().is_empty());
    let err = keeper.serving(BOUND).await.unwrap_err();
    assert!(matches!(err, LeaseError::Ended { .. }), "{err}");
    plane.stop().await;
}

#[tokio::test]
async fn a_dropped_keeper_lets_the_lease_run_out() {
    let plane = Plane::start(config()).await;
    let client = plane.client();
    let keeper = keeper(&client, "a", 1);
    keeper.registered(BOUND).await.unwrap();
    drop(keeper);
    let expired = async {
        while client.members().await.unwrap()[0].state != MemberState::Expired {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::time::timeout(BOUND, expired).await.unwrap();
    plane.stop().await;
}

#[tokio::test]
async fn a_refused_first_registration_is_final() {
    let plane = Plane::start(config()).await;
    let client = plane.client();
    client.register(&request("a", 1)).await.unwrap();
    let mut other = request("b", 2);
    other.model.fingerprint = "feedfeedfeedfeed".to_owned();
    let keeper = LeaseKeeper::spawn(&client, other, LeaseOptions::default()).unwrap();
    match keeper.registered(BOUND).await.unwrap_err() {
        LeaseError::Ended { reason, code, was_leased: false } => {
            assert_eq!(code.as_deref(), Some(code::MODEL_MISMATCH));
            assert!(reason.contains("feedfeedfeedfeed"), "{reason}");
        }
        err => panic!("{err}"),
    }
    let stranger = ControlClient::new(&plane.url(), Some("wrong".to_owned())).unwrap();
    let keeper = self::keeper(&stranger, "c", 3);
    match keeper.registered(BOUND).await.unwrap_err() {
        LeaseError::Ended { code, .. } => assert_eq!(code.as_deref(), Some(code::UNAUTHORIZED)),
        err => panic!("{err}"),
    }
    plane.stop().await;
}

#[tokio::test]
async fn a_keeper_waits_for_a_control_plane_that_is_not_up_yet() {
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = free.local_addr().unwrap();
    drop(free);
    let client = ControlClient::new(&format!("http://{addr}"), Some(TOKEN.to_owned())).unwrap();
    let keeper = keeper(&client, "a", 1);
    let state = until(&keeper, |state| state.last_error.is_some()).await;
    assert_eq!(state.status, LeaseStatus::Registering);
    let err = keeper.registered(Duration::from_millis(50)).await.unwrap_err();
    assert!(matches!(err, LeaseError::Timeout { .. }), "{err}");
    let mut config = config();
    config.listen = addr.to_string();
    let plane = Plane::start(config).await;
    keeper.registered(BOUND).await.unwrap();
    keeper.leave(BOUND).await.unwrap();
    plane.stop().await;
}

/// A control plane without a durable store loses its state; members keep their experts.
#[tokio::test]
async fn keepers_and_clients_survive_a_control_plane_that_lost_its_state() {
    let plane = Plane::start(patient_config()).await;
    let client = plane.client();
    let keepers = ["a", "b", "c", "d"].map(|name| keeper(&client, name, 1));
    let watch =
        PlacementWatch::spawn(&client, &Handle::current(), WatchOptions::default()).unwrap();
    let mut held = Vec::new();
    for keeper in &keepers {
        let assignment = keeper.registered(BOUND).await.unwrap();
        keeper.set_ready(Assignment::clone(&assignment));
        keeper.serving(BOUND).await.unwrap();
        held.push(assignment);
    }
    let before = client.placement().await.unwrap();
    watch.wait_for(BOUND, |table| table.is_complete()).await.unwrap();
    let mut tables = watch.tables();
    let mut later = watch.tables();
    let seen_incomplete =
        tokio::spawn(async move { later.wait_for(|table| !table.is_complete()).await.map(drop) });
    tables.mark_unchanged();
    let mut config = patient_config();
    config.listen = plane.addr.to_string();
    plane.stop().await;
    let plane = Plane::start(config).await;
    for (keeper, held) in keepers.iter().zip(&held) {
        let back = until(keeper, |state| {
            state.num_registrations >= 2 && state.member_state == Some(MemberState::Serving)
        });
        assert_eq!(back.await.assignment.as_ref(), Some(held));
    }
    let after = client.placement().await.unwrap();
    assert_ne!(after.cluster_id, before.cluster_id);
    assert_eq!(after.layers, before.layers);
    // Clients went from one complete table to the next and never saw the empty one.
    watch.wait_for(BOUND, |table| *table == after).await.unwrap();
    assert!(tables.has_changed().unwrap());
    assert!(!seen_incomplete.is_finished(), "an incomplete table came into force");
    seen_incomplete.abort();
    plane.stop().await;
}

/// As after SIGSTOP and SIGCONT of a member: the control plane has expired it in between.
#[tokio::test]
async fn a_keeper_comes_back_after_its_lease_ran_out() {
    let mut config = config();
    config.suspect_grace = Duration::ZERO;
    let plane = Plane::start(config).await;
    let client = plane.client();
    let proxy = Proxy::start(plane.addr).await;
    let through = ControlClient::new(&proxy.url, Some(TOKEN.to_owned())).unwrap();
    let keeper = keeper(&through, "a", 1);
    let assignment = keeper.registered(BOUND).await.unwrap();
    keeper.set_ready(Assignment::clone(&assignment));
    keeper.serving(BOUND).await.unwrap();
    let first = until(&keeper, |_| true).await;

    proxy.cut.send_replace(true);
    let state = until(&keeper, |state| state.status == LeaseStatus::Lost).await;
    assert!(state.last_error.is_some());
    let gone = async {
        while client.members().await.unwrap()[0].state != MemberState::Expired {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::time::timeout(BOUND, gone).await.unwrap();
    assert!(client.placement().await.unwrap().servers.is_empty());

    proxy.cut.send_replace(false);
    let back = until(&keeper, |state| {
        state.num_registrations >= 2 && state.member_state == Some(MemberState::Serving)
    });
    let back = back.await;
    assert_eq!((back.member_id, back.assignment), (first.member_id, first.assignment));
    let table = client.placement().await.unwrap();
    assert_eq!(table.servers.len(), 1);
    assert!(table.epoch > first.epoch);
    plane.stop().await;
}

#[tokio::test]
async fn a_superseded_keeper_gives_up() {
    let plane = Plane::start(config()).await;
    let client = plane.client();
    let old = keeper(&client, "a", 1);
    old.registered(BOUND).await.unwrap();
    let new = keeper(&client, "a", 2);
    new.registered(BOUND).await.unwrap();
    let state = until(&old, |state| state.status == LeaseStatus::Failed).await;
    assert_eq!(state.last_error_code.as_deref(), Some(code::SUPERSEDED));
    until(&new, |state| state.num_renewals >= 4).await;
    let members = client.members().await.unwrap();
    assert_eq!((members.len(), members[0].incarnation), (1, 2));
    plane.stop().await;
}

/// A keeper waits for the name of a process that may have died, as long as that one's lease may last.
#[tokio::test]
async fn a_name_in_use_is_given_up_after_two_leases_and_free_after_one() {
    let config = config();
    let lease_ttl = config.lease_ttl;
    let plane = Plane::start(config).await;
    let client = plane.client();
    let first = keeper(&client, "a", 1);
    first.registered(BOUND).await.unwrap();
    let second = keeper(&client, "a", 2);
    // The first one is heard after it was replaced: two live processes use the name.
    until(&first, |state| state.status == LeaseStatus::Failed).await;
    let since = std::time::Instant::now();
    let third = keeper(&client, "a", 3);
    let state = until(&third, |state| state.status == LeaseStatus::Failed).await;
    assert_eq!(state.last_error_code.as_deref(), Some(code::NAME_IN_USE));
    assert!(since.elapsed() >= lease_ttl * 2);
    assert_eq!(client.members().await.unwrap()[0].incarnation, 2);
    // The holder dies.
    drop(second);
    let fourth = keeper(&client, "a", 4);
    fourth.registered(BOUND).await.unwrap();
    plane.stop().await;
}

/// A suspected live member renews in time and stays.
#[tokio::test]
async fn a_suspected_keeper_stays() {
    let plane = Plane::start(patient_config()).await;
    let client = plane.client();
    let keeper = keeper(&client, "a", 1);
    let assignment = keeper.registered(BOUND).await.unwrap();
    keeper.set_ready(Assignment::clone(&assignment));
    keeper.serving(BOUND).await.unwrap();
    let epoch = client.placement().await.unwrap().epoch;
    let member = until(&keeper, |_| true).await.member_id.unwrap();
    for _ in 0..10 {
        let report = control_api::SuspectRequest {
            reporter: "test".to_owned(),
            reason: "none".to_owned(),
            incarnation: None,
        };
        client.suspect(&member, &report).await.unwrap();
        tokio::time::sleep(Duration::from_millis(150)).await;
    }
    assert_eq!(client.placement().await.unwrap().epoch, epoch);
    let lease = LeaseRequest { incarnation: 1, assignment_version: 0, load: None };
    client.renew(&member, &lease).await.unwrap();
    plane.stop().await;
}

/// `leave` is bounded even without a response.
#[tokio::test]
async fn leaving_without_a_control_plane_is_bounded() {
    let plane = Plane::start(config()).await;
    let client = plane.client();
    let keeper = keeper(&client, "a", 1);
    keeper.registered(BOUND).await.unwrap();
    plane.stop().await;
    let bound = Duration::from_millis(300);
    let err = tokio::time::timeout(BOUND, keeper.leave(bound)).await.unwrap().unwrap_err();
    assert!(matches!(err, LeaseError::Timeout { .. } | LeaseError::Ended { .. }), "{err}");
    until(&keeper, |state| state.status == LeaseStatus::Failed).await;
}

/// The keeper backs off from a control plane that registers it and then does not know it.
#[tokio::test]
async fn a_forgetful_control_plane_is_not_hammered() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let num_requests = std::sync::Arc::new(std::sync::atomic::AtomicU32::new(0));
    let counter = std::sync::Arc::clone(&num_requests);
    let server = tokio::spawn(async move {
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut chunk = vec![0; 16 << 10];
            let len = stream.read(&mut chunk).await.unwrap_or(0);
            counter.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            let (status, body) = if chunk[..len].starts_with(b"POST /v1/members HTTP") {
                let body = r#"{"member_id":"a","lease_ttl_ms":900,"epoch":1,
                    "assignment":{"layers":[]},"assignment_version":1}"#;
                ("200 OK", body)
            } else {
                ("404 Not Found", r#"{"code":"unknown_member","message":"who?"}"#)
            };
            let length = body.len();
            let answer = format!(
                "HTTP/1.1 {status}\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n{body}"
            );
            let _ = stream.write_all(answer.as_bytes()).await;
        }
    });
    let client = ControlClient::new(&url, None).unwrap();
    let keeper = keeper(&client, "a", 1);
    keeper.set_ready(Assignment::default());
    until(&keeper, |state| state.num_registrations >= 4).await;
    tokio::time::sleep(Duration::from_secs(2)).await;
    let found = num_requests.load(std::sync::atomic::Ordering::Relaxed);
    // Delays of 50 ms doubling to 1 s allow a dozen rounds; a tight loop makes thousands.
    assert!(found < 60, "{found} requests");
    server.abort();
}

/// Forwards connections until it is cut, like a network.
struct Proxy {
    url: String,
    cut: tokio::sync::watch::Sender<bool>,
    _task: tokio::task::JoinHandle<()>,
}

impl Proxy {
    async fn start(to: SocketAddr) -> Self {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let (cut, is_cut) = tokio::sync::watch::channel(false);
        let task = tokio::spawn(async move {
            loop {
                let (mut near, _) = listener.accept().await.unwrap();
                let mut is_cut = is_cut.clone();
                tokio::spawn(async move {
                    if *is_cut.borrow() {
                        return;
                    }
                    let mut far = tokio::net::TcpStream::connect(to).await.unwrap();
                    tokio::select! {
                        _ = tokio::io::copy_bidirectional(&mut near, &mut far) => {}
                        _ = is_cut.wait_for(|&cut| cut) => {}
                    }
                });
            }
        });
        Self { url, cut, _task: task }
    }
}
