//! Tickets over HTTP, with the check that servers make.

use std::time::SystemTime;

use control_api::{LeaseRequest, TicketKeys, TicketRequest, TicketRole, code};
use switchyard_control_plane::EtcdConfig;
use test_support::etcd::EtcdCluster;
use trust::Role;
use trust::ticket::{Claims, Gate, Handshake, SecretKey, TicketError, TrustedKey, UnixTime, prove};
use trust::tokens::{self, TokenEntry};

use super::*;

fn check(keys: &TicketKeys, ticket: &str, client: &SecretKey) -> Result<(), TicketError> {
    claims_of(keys, ticket, client, Role::Client).map(drop)
}

/// The check of a server that has these keys and admits `role`.
fn claims_of(
    keys: &TicketKeys,
    ticket: &str,
    client: &SecretKey,
    role: Role,
) -> Result<Claims, TicketError> {
    let trusted: Vec<TrustedKey> = keys
        .keys
        .iter()
        .map(|found| TrustedKey {
            key: found.key.parse().expect("a key"),
            fleet: keys.fleet.clone(),
            expires_at: UnixTime(found.expires_at),
        })
        .collect();
    let handshake = Handshake { server: "a", incarnation: 1, channel: None, hello: b"hello" };
    let proof = prove(ticket, &handshake, client).expect("a proof");
    let (gate, now) = (Gate::default(), SystemTime::now().into());
    gate.check(ticket, &proof, &handshake, role, &trusted, keys.least_epoch, now)
}

fn ask(client: &SecretKey) -> TicketRequest {
    TicketRequest::new("tester".to_owned(), client.public().to_string())
}

#[tokio::test]
async fn tickets_and_revocations_survive_a_restart_and_no_secret_is_stored() {
    let dir = tempfile::tempdir().unwrap();
    let plane = Plane::start(durable_config(dir.path())).await;
    let control = plane.client();
    let registered = control.register(&request("a", 1)).await.unwrap();
    let keys = registered.ticket_keys.expect("keys with the registration");
    assert_eq!(keys.fleet, control.placement().await.unwrap().cluster_id);
    let client = SecretKey::generate().unwrap();
    let old = control.ticket(&ask(&client)).await.unwrap();
    assert_eq!(old.expires_in_ms, 600_000);
    assert_eq!(check(&keys, &old.ticket, &client), Ok(()));
    plane.stop().await;

    let stored = std::fs::read(dir.path().join("state.snapshot")).unwrap();
    let stored = String::from_utf8_lossy(&stored);
    assert!(stored.contains(&keys.keys[0].key), "the public key is kept");
    assert!(!stored.contains("k4.secret"));

    let plane = Plane::start(durable_config(dir.path())).await;
    let control = plane.client();
    let lease = LeaseRequest { incarnation: 1, assignment_version: 0, load: None };
    let renew = async || control.renew(&registered.member_id, &lease).await.unwrap();
    let keys = renew().await.ticket_keys.expect("keys with the renewal");
    assert_eq!(keys.keys.len(), 2);
    let new = control.ticket(&ask(&client)).await.unwrap();
    for ticket in [&old.ticket, &new.ticket] {
        assert_eq!(check(&keys, ticket, &client), Ok(()));
    }
    let revoked = control.revoke_tickets().await.unwrap();
    plane.stop().await;

    let plane = Plane::start(durable_config(dir.path())).await;
    let control = plane.client();
    let renewed = control.renew(&registered.member_id, &lease).await.unwrap();
    let keys = renewed.ticket_keys.expect("keys with the renewal");
    assert_eq!(keys.least_epoch, revoked.least_epoch);
    assert_eq!(check(&keys, &old.ticket, &client), Err(TicketError::UnknownKey));
    let found = check(&keys, &new.ticket, &client);
    assert!(matches!(found, Err(TicketError::Revoked { .. })), "{found:?}");
    let fresh = control.ticket(&ask(&client)).await.unwrap();
    assert_eq!(check(&keys, &fresh.ticket, &client), Ok(()));
    assert!(control.revoke_tickets().await.unwrap().least_epoch > revoked.least_epoch);
    plane.stop().await;
}

#[tokio::test]
async fn malformed_requests_for_tickets_are_named() {
    let plane = Plane::start(config()).await;
    let control = plane.client();
    let good = ask(&SecretKey::generate().unwrap());
    let wrong = [
        TicketRequest { client: String::new(), ..good.clone() },
        TicketRequest { client: "\u{1b}[2J".to_owned(), ..good.clone() },
        TicketRequest { key: "k4.secret.AAAA".to_owned(), ..good },
    ];
    for request in wrong {
        let refused = control.ticket(&request).await.unwrap_err();
        assert_eq!(refused.code(), Some(code::BAD_REQUEST), "{refused}");
    }
    let stranger = ControlClient::new(&plane.url(), None).unwrap();
    let refused = stranger.ticket(&ask(&SecretKey::generate().unwrap())).await.unwrap_err();
    assert_eq!(refused.code(), Some(code::UNAUTHORIZED));
    plane.stop().await;
}

/// A client that knows a follower only gets the leader's tickets under its own name and with its own rights. It gets
/// those of the next leader, too.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_gets_tickets_through_a_follower() {
    let etcd = EtcdCluster::start(1);
    let dir = tempfile::tempdir().unwrap();
    let tokens = dir.path().join("tokens");
    let [server, engine, viewer] =
        [("gpu-1", Role::Server), ("engine", Role::Client), ("wall", Role::Viewer)].map(
            |(name, role)| {
                let token = tokens::generate();
                let entry = TokenEntry::new(name, role, &token, None).unwrap();
                tokens::add(&tokens, &entry).unwrap();
                token
            },
        );
    let start = async || {
        let mut config = patient_config();
        let mut settings = EtcdConfig::new(etcd.endpoints());
        settings.lease = Duration::from_secs(2);
        (config.etcd, config.tokens) = (Some(settings), Some(tokens.clone()));
        Plane::start(config).await
    };
    // The one that leads comes first.
    let sorted = async |one: Plane, other: Plane| {
        let knows = async |plane: &Plane| {
            plane.client().leader().await.ok().filter(|info| info.url.is_some())
        };
        let find = async {
            loop {
                match (knows(&one).await, knows(&other).await) {
                    (Some(info), Some(second)) if info.leads != second.leads => break info.leads,
                    _ => tokio::time::sleep(Duration::from_millis(20)).await,
                }
            }
        };
        match tokio::time::timeout(BOUND, find).await.expect("one leads") {
            true => (one, other),
            false => (other, one),
        }
    };
    let client = |plane: &Plane, token: &str| {
        ControlClient::new(&plane.url(), Some(token.to_owned())).unwrap()
    };
    // As clients do: a new leader answers once the servers know its key.
    let ticket = async |control: &ControlClient, request: &TicketRequest| {
        let asking = async {
            loop {
                match control.ticket(request).await {
                    Err(error) if error.is_transient() => {
                        tokio::time::sleep(Duration::from_millis(50)).await;
                    }
                    answer => break answer,
                }
            }
        };
        tokio::time::timeout(BOUND, asking).await.expect("an answer")
    };
    let (leader, follower) = sorted(start().await, start().await).await;
    let registered = client(&follower, &server).register(&request("a", 1)).await.unwrap();
    let keys = registered.ticket_keys.expect("keys with the registration");
    let key = SecretKey::generate().unwrap();
    let compute = ask(&key);
    let read = TicketRequest { role: TicketRole::Server, ..compute.clone() };
    let first = ticket(&client(&follower, &engine), &compute).await.unwrap();
    let claims = claims_of(&keys, &first.ticket, &key, Role::Client).unwrap();
    assert_eq!(claims.holder, "engine");
    let weights = ticket(&client(&follower, &server), &read).await.unwrap();
    let claims = claims_of(&keys, &weights.ticket, &key, Role::Server).unwrap();
    assert_eq!(claims.holder, "gpu-1");
    let shared = ticket(&follower.client(), &compute).await.unwrap();
    let claims = claims_of(&keys, &shared.ticket, &key, Role::Client).unwrap();
    assert_eq!(claims.holder, "cluster-token at 127.0.0.1");
    for (token, request) in [(&engine, &read), (&viewer, &compute)] {
        let refused = ticket(&client(&follower, token), request).await.unwrap_err();
        assert_eq!(refused.code(), Some(code::FORBIDDEN), "{refused}");
    }
    // The leader's log has the callers, also the viewer, whom the follower refuses by itself.
    let log = client(&leader, &viewer).audit(0).await.unwrap();
    let issued = log.entries.iter().filter(|entry| entry.action == "ticket");
    let seen: Vec<_> =
        issued.map(|entry| (&*entry.name, entry.address.as_deref(), &*entry.outcome)).collect();
    let address = Some("127.0.0.1");
    let expected = [
        ("engine", address, "ok"),
        ("gpu-1", address, "ok"),
        ("cluster-token", address, "ok"),
        ("engine", address, "forbidden"),
        ("wall", address, "forbidden"),
    ];
    assert_eq!(seen, expected);

    // The follower leads, and another one follows it.
    leader.stop().await;
    let (leader, follower) = sorted(follower, start().await).await;
    let second = ticket(&client(&follower, &engine), &compute).await.unwrap();
    let lease = LeaseRequest { incarnation: 1, assignment_version: 0, load: None };
    let renewed = client(&follower, &server).renew(&registered.member_id, &lease).await.unwrap();
    let keys = renewed.ticket_keys.expect("keys with the renewal");
    for ticket in [&first.ticket, &second.ticket] {
        assert_eq!(check(&keys, ticket, &key), Ok(()));
    }
    for plane in [leader, follower] {
        plane.stop().await;
    }
}
