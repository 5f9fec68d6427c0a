//! The routes, one by one.

use control_api::{
    ControlClient, ControlError, DrainRequest, Health, LeaseRequest, LoadReport, MemberId,
    MemberState, ModelDigests, SuspectRequest, TensorDigest, WantedDigests, code,
};
use switchyard_control_plane::{BalanceSettings, BindError, Server, ServerConfig};

use super::*;

#[tokio::test]
async fn a_member_joins_serves_drains_and_leaves() {
    let plane = Plane::start(config()).await;
    let client = plane.client();
    assert_eq!(client.placement().await.unwrap().servers.len(), 0);

    let joined = client.register(&request("a", 7)).await.unwrap();
    assert_eq!(joined.lease_ttl_ms, 900);
    assert!(!joined.assignment.is_empty());
    assert!(client.placement().await.unwrap().servers.is_empty());

    let holds = joined.assignment.clone();
    let ready = ReadyRequest { incarnation: 7, holds };
    let info = client.ready(&joined.member_id, &ready).await.unwrap();
    assert_eq!(info.state, MemberState::Serving);
    let table = client.placement().await.unwrap();
    assert_eq!(table.model, Some(model()));
    assert_eq!(table.servers[0].data_addr, "127.0.0.1:7000");
    assert!(table.epoch > joined.epoch);

    let load = LoadReport { num_tokens: 12, ..LoadReport::default() };
    let lease = LeaseRequest { incarnation: 7, assignment_version: 0, load: Some(load.clone()) };
    let renewed = client.renew(&joined.member_id, &lease).await.unwrap();
    assert_eq!((renewed.epoch, renewed.state), (table.epoch, MemberState::Serving));
    assert_eq!(renewed.assignment.as_ref(), Some(&joined.assignment));
    let lease = LeaseRequest { assignment_version: renewed.assignment_version, ..lease };
    assert_eq!(client.renew(&joined.member_id, &lease).await.unwrap().assignment, None);
    let members = client.members().await.unwrap();
    assert_eq!(members[0].load, Some(load));
    assert_eq!(members[0].experts_held, joined.assignment.num_experts() as u64);

    let status = client.status().await.unwrap();
    assert_eq!((status.num_servers, status.replicas, status.members.serving), (4, 2, 1));
    assert_eq!(status.experts_total, 64);
    assert_eq!(status.experts_without_replica, 64 - joined.assignment.num_experts() as u64);
    assert_eq!(status.cluster_id, table.cluster_id);
    assert!(status.store.writable);

    let drain = DrainRequest::default();
    let info = client.drain(&joined.member_id, &drain).await.unwrap();
    assert_eq!(info.state, MemberState::Draining);
    assert!(client.placement().await.unwrap().servers.is_empty());
    client.leave(&joined.member_id).await.unwrap();
    let err = client.leave(&joined.member_id).await.unwrap_err();
    assert_eq!(err.code(), Some(code::UNKNOWN_MEMBER));
    assert!(client.members().await.unwrap().is_empty());
    plane.stop().await;
}

#[tokio::test]
async fn an_address_that_nothing_answers_at_shows_in_the_members() {
    let plane = Plane::start(patient_config()).await;
    let client = plane.client();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let good = listener.local_addr().unwrap().to_string();
    for (name, addr) in [("good", good.as_str()), ("bad", "localhost.invalid:7171")] {
        let mut request = request(name, 7);
        request.data_addr = addr.to_owned();
        let response = client.register(&request).await.unwrap();
        let ready = ReadyRequest { incarnation: 7, holds: response.assignment };
        client.ready(&response.member_id, &ready).await.unwrap();
    }
    let seen = async {
        loop {
            let members = client.members().await.unwrap();
            if let Some(reason) = &members[0].unreachable {
                assert_eq!(
                    (members[0].name.as_str(), members[1].unreachable.as_ref()),
                    ("bad", None)
                );
                return reason.clone();
            }
            tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        }
    };
    let reason = tokio::time::timeout(BOUND, seen).await.unwrap();
    assert!(!reason.is_empty());
    let status = client.status().await.unwrap();
    assert!(status.health.is_some_and(|health| health > Health::Healthy), "{status:?}");
    let named = status.problems.iter().any(|text| text.contains("bad") && text.contains(&reason));
    assert!(named && status.problems.iter().all(|text| !text.contains("good")), "{status:?}");
    // The good one was connected to.
    tokio::time::timeout(BOUND, listener.accept()).await.unwrap().unwrap();

    let mut nowhere = request("nowhere", 7);
    nowhere.data_addr = "0.0.0.0:7171".to_owned();
    let err = client.register(&nowhere).await.unwrap_err();
    assert_eq!(err.code(), Some(code::BAD_REQUEST));
    assert!(err.to_string().contains("0.0.0.0:7171"), "{err}");
    plane.stop().await;
}

#[tokio::test]
async fn a_drain_can_be_taken_back() {
    let plane = Plane::start(patient_config()).await;
    let client = plane.client();
    let member = serve(&client, "a", 1).await;
    let head = format!(
        "POST /v1/members/{member}/drain HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n\
         Content-Type: application/json\r\nContent-Length: 2\r\nConnection: close\r\n\r\n[]"
    );
    let answer = raw(plane.addr, head.as_bytes()).await;
    assert!(answer.starts_with("HTTP/1.1 400") && answer.contains("object"), "{answer}");
    assert_eq!(client.members().await.unwrap()[0].state, MemberState::Serving);

    client.drain(&member, &DrainRequest::default()).await.unwrap();
    assert!(client.placement().await.unwrap().servers.is_empty());
    let info = client.resume(&member).await.unwrap();
    assert_eq!(info.state, MemberState::Serving);
    assert_eq!(client.placement().await.unwrap().servers.len(), 1);
    // It changes nothing about a member that does not drain.
    assert_eq!(client.resume(&member).await.unwrap().state, MemberState::Serving);
    plane.stop().await;
}

#[tokio::test]
async fn a_suspected_silent_member_expires_before_its_lease() {
    let mut config = config();
    config.lease_ttl = Duration::from_secs(3600);
    let plane = Plane::start(config).await;
    let client = plane.client();
    let member = serve(&client, "a", 1).await;
    let report = SuspectRequest {
        reporter: "client-1".to_owned(),
        reason: "connection closed".to_owned(),
        incarnation: Some(1),
    };
    // Nothing answers at the member's address, so the control plane is the second observer.
    client.suspect(&member, &report).await.unwrap();
    let confirmed = async {
        let left = |answer: control_api::SuspectResponse| answer.must_renew_within_ms;
        while left(client.suspect(&member, &report).await.unwrap()) >= 3_600_000 / 2 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(BOUND, confirmed).await.unwrap();
    assert!(client.members().await.unwrap()[0].suspected);
    let stale = SuspectRequest { incarnation: Some(2), ..report.clone() };
    assert_eq!(client.suspect(&member, &stale).await.unwrap().must_renew_within_ms, 0);
    let long = SuspectRequest { reason: "x".repeat(513), ..report };
    let err = client.suspect(&member, &long).await.unwrap_err();
    assert_eq!(err.code(), Some(code::BAD_REQUEST));
    plane.stop().await;
}

#[tokio::test]
async fn the_first_digests_of_the_fleets_model_stay() {
    let mut config = config();
    config.limits.max_digests_bytes = 1 << 20;
    let plane = Plane::start(config).await;
    let client = plane.client();
    let code_of = |result: Result<(), ControlError>| result.unwrap_err().code().map(str::to_owned);
    let tensor =
        |name: &str, digit: &str| TensorDigest { name: name.to_owned(), digest: digit.repeat(32) };
    let digests = ModelDigests {
        fingerprint: model().fingerprint,
        tensors: vec![tensor("a", "0"), tensor("b", "f")],
        full: Vec::new(),
    };
    // No member, so no model.
    let refused = code_of(client.send_model_digests(&digests).await);
    assert_eq!(refused.as_deref(), Some(code::MODEL_MISMATCH));
    assert_eq!(client.model_digests().await.unwrap_err().code(), Some(code::NOT_FOUND));
    client.register(&request("a", 1)).await.unwrap();

    let with = |tensors| ModelDigests { tensors, ..digests.clone() };
    for (wrong, expected) in [
        (
            ModelDigests { fingerprint: "feedfeed".to_owned(), ..digests.clone() },
            code::MODEL_MISMATCH,
        ),
        (with(vec![tensor("b", "0"), tensor("a", "f")]), code::BAD_REQUEST),
        (with(vec![tensor("a", "g")]), code::BAD_REQUEST),
        (with(vec![tensor(&"x".repeat(2 << 20), "0")]), code::BODY_TOO_LARGE),
    ] {
        let refused = code_of(client.send_model_digests(&wrong).await);
        assert_eq!(refused.as_deref(), Some(expected));
    }
    client.send_model_digests(&digests).await.unwrap();
    client.send_model_digests(&with(Vec::new())).await.unwrap();
    assert_eq!(client.model_digests().await.unwrap(), digests);
    plane.stop().await;
}

/// Renewals ask for digests that the control plane lacks. The first digests of all bytes replace those of samples, and
/// other ones are refused.
#[tokio::test]
async fn digests_are_asked_for_and_those_of_all_bytes_must_agree() {
    let plane = Plane::start(config()).await;
    let client = plane.client();
    let member = client.register(&request("a", 1)).await.unwrap().member_id;
    let lease = LeaseRequest { incarnation: 1, assignment_version: 0, load: None };
    let wanted = async || client.renew(&member, &lease).await.unwrap().wanted_digests;
    assert_eq!(wanted().await, WantedDigests::Any);

    let tensor = |digit: &str| TensorDigest { name: "a".to_owned(), digest: digit.repeat(32) };
    let fingerprint = model().fingerprint;
    let sampled = ModelDigests { fingerprint, tensors: vec![tensor("0")], full: Vec::new() };
    client.send_model_digests(&sampled).await.unwrap();
    assert_eq!(wanted().await, WantedDigests::Full);
    let full = |digit| ModelDigests { full: vec![tensor(digit)], ..sampled.clone() };
    let err = client.send_model_digests(&full("x")).await.unwrap_err();
    assert_eq!(err.code(), Some(code::BAD_REQUEST));
    client.send_model_digests(&full("1")).await.unwrap();
    assert_eq!(wanted().await, WantedDigests::None);

    let err = client.send_model_digests(&full("2")).await.unwrap_err();
    assert_eq!(err.code(), Some(code::MODEL_MISMATCH));
    for same in [full("1"), sampled.clone()] {
        client.send_model_digests(&same).await.unwrap();
    }
    assert_eq!(client.model_digests().await.unwrap(), full("1"));
    plane.stop().await;
}

#[tokio::test]
async fn refusals_carry_their_code() {
    let plane = Plane::start(config()).await;
    let client = plane.client();
    client.register(&request("a", 1)).await.unwrap();

    let mut other = request("b", 2);
    other.model.fingerprint = "feedfeedfeedfeed".to_owned();
    let err = client.register(&other).await.unwrap_err();
    assert_eq!(err.code(), Some(code::MODEL_MISMATCH));
    let text = err.to_string();
    assert!(text.contains("feedfeedfeedfeed") && text.contains("0123456789abcdef"), "{text}");

    let mut small = request("b", 2);
    small.capacity_experts = Some(3);
    let err = client.register(&small).await.unwrap_err();
    assert_eq!(err.code(), Some(code::CAPACITY_TOO_SMALL));

    let mut odd = request("b", 2);
    odd.data_addr = "nowhere".to_owned();
    assert_eq!(client.register(&odd).await.unwrap_err().code(), Some(code::BAD_REQUEST));

    let old = client.register(&request("b", 2)).await.unwrap();
    client.register(&request("b", 3)).await.unwrap();
    let lease = LeaseRequest { incarnation: 2, assignment_version: 0, load: None };
    let err = client.renew(&old.member_id, &lease).await.unwrap_err();
    assert_eq!(err.code(), Some(code::SUPERSEDED));
    let err = client.register(&request("b", 2)).await.unwrap_err();
    assert_eq!(err.code(), Some(code::SUPERSEDED));

    let err = client.renew(&MemberId::random(), &lease).await.unwrap_err();
    assert_eq!(err.code(), Some(code::UNKNOWN_MEMBER));
    plane.stop().await;
}

#[tokio::test]
async fn requests_without_the_token_are_refused() {
    let plane = Plane::start(config()).await;
    for token in [None, Some("wrong".to_owned()), Some(format!("{TOKEN}x"))] {
        let remedy = if token.is_some() { "refuses the token" } else { "--token-file" };
        let client = ControlClient::new(&plane.url(), token).unwrap();
        let err = client.status().await.unwrap_err();
        assert!(matches!(err, ControlError::Unauthorized { .. }), "{err}");
        assert!(err.to_string().contains(remedy), "{err}");
        let err = client.watch_placement().await.unwrap_err();
        assert!(matches!(err, ControlError::Unauthorized { .. }), "{err}");
        let err = client.register(&request("a", 1)).await.unwrap_err();
        assert!(matches!(err, ControlError::Unauthorized { .. }), "{err}");
    }
    let answer = raw(plane.addr, b"GET /v1/none HTTP/1.1\r\nhost: x\r\n\r\n").await;
    assert!(answer.starts_with("HTTP/1.1 401"), "{answer}");
    assert!(answer.contains("www-authenticate: Bearer"), "{answer}");
    // Probes, metrics and the description need none.
    for path in ["/healthz", "/readyz", "/metrics", "/openapi.json"] {
        let request = format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
        let answer = raw(plane.addr, request.as_bytes()).await;
        assert!(answer.starts_with("HTTP/1.1 200"), "{path}: {answer}");
    }
    plane.stop().await;
}

#[tokio::test]
async fn metrics_tell_what_happens() {
    let plane = Plane::start(config()).await;
    let client = plane.client();
    serve(&client, "a", 1).await;
    client.members().await.unwrap();
    let text =
        raw(plane.addr, b"GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await;
    for line in [
        "switchyard_control_members{state=\"serving\"} 1",
        "switchyard_control_registrations_total{kind=\"new\"} 1",
        "switchyard_control_placement_changes_total 3",
        "switchyard_control_epoch 3",
        "switchyard_control_watchers 0",
        "switchyard_control_store_writable 1",
        "switchyard_control_experts_without_replica 32",
        "switchyard_control_experts_under_replicated 32",
        "switchyard_build_info{component=\"control-plane\"",
        "switchyard_control_request_seconds_count{method=\"GET\",route=\"/v1/members\",status=\"200\"} 1",
        "switchyard_control_store_write_seconds_count",
        "process_open_fds",
    ] {
        assert!(text.contains(line), "{line} is not in:\n{text}");
    }
    plane.stop().await;
}

#[tokio::test]
async fn a_port_in_use_is_named() {
    let plane = Plane::start(config()).await;
    let mut second = config();
    second.listen = plane.addr.to_string();
    let err = Server::bind(second).await.unwrap_err();
    assert!(matches!(err, BindError::AddrInUse { .. }), "{err}");
    assert!(err.to_string().contains(&plane.addr.to_string()), "{err}");
    plane.stop().await;
}

#[tokio::test]
async fn settings_that_cannot_work_are_named() {
    let attempt = async |change: fn(&mut ServerConfig)| {
        let mut config = config();
        change(&mut config);
        Server::bind(config).await.unwrap_err().to_string()
    };
    let err = attempt(|config| config.replicas = 5).await;
    assert!(err.contains("5 replicas on 4 servers"), "{err}");
    let err = attempt(|config| config.lease_ttl = Duration::ZERO).await;
    assert!(err.contains("lease"), "{err}");
    let err = attempt(|config| config.token = Some("a b".to_owned())).await;
    assert!(err.contains("token"), "{err}");
    let err = attempt(|config| config.model_fingerprint = Some("zz".to_owned())).await;
    assert!(err.contains("fingerprint"), "{err}");
    let err = attempt(|config| config.listen = "nonsense".to_owned()).await;
    assert!(err.contains("nonsense") && err.contains("HOST:PORT"), "{err}");
}

#[test]
fn urls_that_cannot_work_are_named() {
    for url in ["", "localhost:1", "ftp://h", "http://u:p@h", "http://h/?q", "http://"] {
        let err = ControlClient::new(url, None).unwrap_err().to_string();
        assert!(err.contains("http://HOST:PORT"), "{url}: {err}");
    }
    for token in ["", "a b", "a\nb", "ä"] {
        ControlClient::new("http://h:1", Some(token.to_owned())).unwrap_err();
    }
    ControlClient::new("http://[::1]:80/prefix/", Some("t".to_owned())).unwrap();
}

/// A control plane does not start with goals that it would refuse later.
#[tokio::test]
async fn goals_and_plan_periods_out_of_range_are_refused_at_the_start() {
    type Change = fn(&mut ServerConfig);
    let cases: [(Change, &str); 4] = [
        (|config| config.replicas = 65, "replicas 65: expected 1 to 64"),
        (|config| config.balance.as_mut().unwrap().goals.spare = 17.0, "spare 17"),
        (|config| config.balance.as_mut().unwrap().period = Duration::ZERO, "plan period of 0ns"),
        (|config| config.balance.as_mut().unwrap().period = Duration::MAX, "expected 100ms to"),
    ];
    for (change, wanted) in cases {
        let mut config = config();
        config.num_servers = 80;
        config.balance = Some(BalanceSettings::default());
        change(&mut config);
        let text = Server::bind(config).await.unwrap_err().to_string();
        assert!(text.contains(wanted), "{text}");
    }
}

/// `/readyz` stays 200, because clients and servers need the control plane, and names what the fleet lacks.
#[tokio::test]
async fn readiness_names_lost_experts_and_plans_that_cannot_be() {
    let mut config = patient_config();
    let mut balance = BalanceSettings::default();
    balance.goals.min_replicas = 2;
    balance.start_grace = Duration::ZERO;
    config.balance = Some(balance);
    let plane = Plane::start(config).await;
    let readyz = async |wanted: &str| {
        let request = b"GET /readyz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
        let seen = async {
            loop {
                let text = raw(plane.addr, request).await;
                if text.contains(wanted) {
                    return text;
                }
                tokio::time::sleep(std::time::Duration::from_millis(50)).await;
            }
        };
        let text = tokio::time::timeout(BOUND, seen).await.expect(wanted);
        assert!(text.starts_with("HTTP/1.1 200"), "{text}");
    };
    readyz("ok\n").await;
    let client = plane.client();
    client.register(&request("a", 1)).await.unwrap();
    readyz("ok, but 64 of 64 experts have no live replica").await;
    serve(&client, "a", 1).await;
    readyz("2 replicas of each expert need 2 servers, and the fleet has 1").await;
    plane.stop().await;
}
