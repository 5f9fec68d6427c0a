//! Tickets over HTTP, with the check that servers make.

use std::time::SystemTime;

use control_api::{LeaseRequest, TicketKeys, TicketRequest, code};
use trust::Role;
use trust::ticket::{Gate, Handshake, SecretKey, TicketError, TrustedKey, UnixTime, prove};

use super::*;

/// The check of a server that has these keys.
fn check(keys: &TicketKeys, ticket: &str, client: &SecretKey) -> Result<(), TicketError> {
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
    gate.check(ticket, &proof, &handshake, Role::Client, &trusted, keys.least_epoch, now).map(drop)
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
