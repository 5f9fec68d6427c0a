//! Two models side by side, over real sockets.

use control_api::{
    AddModelRequest, EditionState, PlacementQuery, PlacementWatch, SwitchRequest, WatchOptions,
    code,
};
use tokio::runtime::Handle;

use super::*;

pub(super) const NEXT: &str = "fedcba9876543210";

pub(super) fn next_model() -> ModelDescriptor {
    ModelDescriptor { fingerprint: NEXT.to_owned(), ..model() }
}

async fn serve_next(client: &ControlClient, name: &str) {
    let mut request = request(name, 1);
    request.model = next_model();
    let response = client.register(&request).await.unwrap();
    let ready = ReadyRequest { incarnation: 1, holds: response.assignment };
    client.ready(&response.member_id, &ready).await.unwrap();
}

fn watch(client: &ControlClient) -> PlacementWatch {
    PlacementWatch::spawn(client, &Handle::current(), WatchOptions::default()).unwrap()
}

fn query(fingerprint: &str) -> PlacementQuery {
    PlacementQuery { fingerprint: Some(fingerprint.to_owned()), is_observer: false }
}

fn fingerprint(table: &control_api::PlacementTable) -> String {
    table.model.as_ref().map(|model| model.fingerprint.clone()).unwrap_or_default()
}

#[tokio::test]
async fn a_watch_stays_with_its_model_over_a_switch_and_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = durable_config(dir.path());
    config.lease_ttl = Duration::from_secs(60);
    (config.num_servers, config.replicas) = (1, 1);
    let plane = Plane::start(config.clone()).await;
    let client = plane.client();
    serve(&client, "old", 1).await;
    let old = watch(&client);
    let first = old.wait_for(BOUND, control_api::PlacementTable::is_complete).await.unwrap();

    let err = client.switch_model(&SwitchRequest::default()).await.unwrap_err();
    assert_eq!(err.code(), Some(code::MODEL_UPDATE), "{err}");
    client.add_model(&AddModelRequest { fingerprint: NEXT.to_owned() }).await.unwrap();
    serve_next(&client, "new").await;
    // A trial before the switch.
    let trial = client.placement_of(&query(NEXT)).await.unwrap();
    assert_eq!((fingerprint(&trial).as_str(), trial.is_complete()), (NEXT, true));
    assert_eq!(client.placement().await.unwrap(), *first);
    let list = client.switch_model(&SwitchRequest::default()).await.unwrap();
    let states: Vec<_> = list.editions.iter().map(|edition| edition.state).collect();
    assert_eq!(states, [EditionState::Current, EditionState::Retiring]);
    assert_eq!(list.editions[1].num_clients, 1);
    assert_eq!(client.placement().await.unwrap(), trial);
    let new = watch(&client);
    new.wait_for(BOUND, |table| *table == trial).await.unwrap();
    let status = client.status().await.unwrap();
    assert_eq!((status.editions.len(), status.model.unwrap()), (2, next_model()));
    let members = client.members().await.unwrap();
    let models: Vec<_> = members.iter().map(|member| member.fingerprint.clone()).collect();
    assert_eq!(models, [Some(NEXT.to_owned()), Some(model().fingerprint)]);
    let metrics = raw(plane.addr, b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
    let metrics = metrics.await;
    let series = "switchyard_control_model_clients{model=\"0123456789ab\",state=\"retiring\"} 1";
    assert!(metrics.contains(series), "{metrics}");

    config.listen = plane.addr.to_string();
    plane.stop().await;
    let plane = Plane::start(config).await;
    let again = old.wait_for(BOUND, |table| table.epoch > first.epoch).await.unwrap();
    assert_eq!((fingerprint(&again), &again.servers), (model().fingerprint, &first.servers));
    let again = new.wait_for(BOUND, |table| table.epoch > trial.epoch).await.unwrap();
    assert_eq!((fingerprint(&again).as_str(), &again.servers), (NEXT, &trial.servers));
    assert_eq!(old.state().borrow().num_stale_tables + new.state().borrow().num_stale_tables, 0);
    plane.stop().await;
}

#[tokio::test]
async fn requests_about_other_models_are_refused_in_one_line() {
    let plane = Plane::start(config()).await;
    let client = plane.client();
    let unknown = query("2222222222222222");
    // The first server may bring any model.
    assert!(client.placement_of(&unknown).await.unwrap().model.is_none());
    let add = AddModelRequest { fingerprint: NEXT.to_owned() };
    let err = client.add_model(&add).await.unwrap_err();
    assert_eq!(err.code(), Some(code::MODEL_UPDATE), "{err}");
    serve(&client, "a", 1).await;
    let err = client.placement_of(&unknown).await.unwrap_err();
    assert_eq!(err.code(), Some(code::UNKNOWN_MODEL), "{err}");
    assert!(!err.to_string().contains('\n'), "{err}");
    let err = client.watch_placement_of(&unknown).await.unwrap_err();
    assert_eq!(err.code(), Some(code::UNKNOWN_MODEL), "{err}");
    let err = client.placement_of(&query("XY")).await.unwrap_err();
    assert_eq!(err.code(), Some(code::BAD_REQUEST), "{err}");
    for path in ["/v1/placement?observer=7", "/v1/model/digests?fingerprint=%20"] {
        let request = format!(
            "GET {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\nConnection: close\r\n\r\n"
        );
        let answer = raw(plane.addr, request.as_bytes()).await;
        assert!(answer.starts_with("HTTP/1.1 400"), "{answer}");
    }
    plane.stop().await;
}
