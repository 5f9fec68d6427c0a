//! Endpoints of a Service, from an API server in this process that answers with recorded objects.

mod api_server;

use std::collections::BTreeMap;
use std::net::Ipv4Addr;

use k8s_openapi::api::discovery::v1::EndpointSlice;
use serde_json::json;

use super::support::{client_with, wait_for};
use super::*;
use api_server::{ApiServer, Mode, endpoint, slice};

const SLICE: &str = "control-x2k4f";
const LOCATOR: &str = "k8s://experts/demo-switchyard-control:http";

async fn start(locator: &str) -> (ApiServer, ControlClient) {
    let server = ApiServer::start().await;
    let client = client_of(&server, locator);
    (server, client)
}

/// Two control planes and a client that watches the Service. The first plane is the only endpoint of the Service.
async fn watch_the_first_of_two() -> ([Plane; 2], ApiServer, ControlClient) {
    let [a, b] = Plane::start_pair().await;
    let (server, client) = start(LOCATOR).await;
    server.apply(endpoints_of(&[ready(&a)], &a));
    client.leader().await.unwrap();
    server.wait_for_watch(1).await;
    ([a, b], server, client)
}

/// The slice of the Service with these endpoints, on the port of `plane`.
fn endpoints_of(endpoints: &[serde_json::Value], plane: &Plane) -> serde_json::Value {
    slice(SLICE, plane.addr.port(), endpoints)
}

fn client_of(server: &ApiServer, locator: &str) -> ControlClient {
    client_at(server.url(), locator)
}

/// A client of the API server at `url`.
fn client_at(url: &str, locator: &str) -> ControlClient {
    let config = kube::Config::new(url.parse().unwrap());
    let backends = Backends { resolver: Arc::new(SystemResolver), kubernetes: Some(config) };
    client_with(locator, backends)
}

fn urls(known: &Known) -> Vec<String> {
    known.urls.iter().map(|url| text_of(url).to_owned()).collect()
}

async fn wait_for_urls(client: &ControlClient, wanted: &[&Plane]) {
    let mut texts: Vec<String> = wanted.iter().map(|plane| plane.url()).collect();
    texts.sort();
    wait_for(client, |known| urls(known) == texts).await;
}

fn ready(plane: &Plane) -> serde_json::Value {
    endpoint(plane.addr.ip(), json!({ "ready": true, "serving": true, "terminating": false }))
}

fn not_ready(plane: &Plane) -> serde_json::Value {
    endpoint(plane.addr.ip(), json!({ "ready": false, "serving": false, "terminating": false }))
}

#[tokio::test]
async fn endpoints_that_come_go_and_are_not_ready_change_the_list() {
    let [a, b] = Plane::start_pair().await;
    let (server, client) = start(LOCATOR).await;
    server.apply(endpoints_of(&[ready(&a), not_ready(&b)], &a));
    assert_eq!(client.leader().await.unwrap().url, Some(a.url()));
    let name = client.planes().name_of(a.addr.ip());
    assert_eq!(name.as_deref(), Some("demo-switchyard-control.experts.svc"));
    // The other one becomes ready, then appears in a slice of its own, too, as during a move between slices.
    server.apply(endpoints_of(&[ready(&a), ready(&b)], &a));
    wait_for_urls(&client, &[&a, &b]).await;
    server.apply(slice("control-97zqm", a.addr.port(), &[ready(&b)]));
    server.apply(endpoints_of(&[not_ready(&a)], &a));
    wait_for_urls(&client, &[&b]).await;
    assert_eq!(client.leader().await.unwrap().url, Some(b.url()));
    server.delete("control-97zqm");
    wait_for_urls(&client, &[]).await;
    let err = client.leader().await.unwrap_err().to_string();
    let expected = format!(
        "no control plane found by {LOCATOR} (the Service demo-switchyard-control has 1 endpoints, none of them ready)"
    );
    assert_eq!(err, expected);
    server.apply(endpoints_of(&[ready(&a)], &a));
    wait_for_urls(&client, &[&a]).await;
}

#[tokio::test]
async fn an_unknown_condition_means_ready_and_names_are_no_addresses() {
    let [a, b] = Plane::start_pair().await;
    let (server, client) = start(LOCATOR).await;
    let mut names = slice("control-names", 1, &[json!({ "addresses": ["pod.example"] })]);
    names["addressType"] = json!("FQDN");
    server.apply(names);
    let unknown = endpoint(a.addr.ip(), json!({}));
    let bare = json!({ "addresses": [b.addr.ip().to_string(), "192.0.2.1"] });
    server.apply(endpoints_of(&[unknown, bare], &a));
    wait_for_urls(&client, &[]).await;
    client.leader().await.unwrap();
    wait_for_urls(&client, &[&a, &b]).await;
}

/// The API server has compacted the version that the client knows.
#[tokio::test]
async fn a_version_that_is_gone_lists_again() {
    let ([a, b], server, client) = watch_the_first_of_two().await;
    // The client misses the change: its watch breaks, and the next one finds its version gone.
    server.change_unseen(endpoints_of(&[ready(&b)], &a));
    server.end_watches();
    wait_for_urls(&client, &[&b]).await;
    assert!(server.num_lists() >= 2);
}

/// A watch that ends as asked goes on where it ended.
#[tokio::test]
async fn a_watch_that_ends_is_opened_again_from_its_version() {
    let ([a, b], server, client) = watch_the_first_of_two().await;
    server.end_watches();
    server.apply(endpoints_of(&[ready(&a), ready(&b)], &a));
    wait_for_urls(&client, &[&a, &b]).await;
    assert_eq!(server.num_lists(), 1);
}

/// A watch that delivers nothing any more: a request that no known control plane answers lists again.
#[tokio::test]
async fn a_stale_watch_is_noticed_when_no_control_plane_answers() {
    let ([a, b], server, client) = watch_the_first_of_two().await;
    server.change_unseen(endpoints_of(&[ready(&b)], &a));
    a.stop();
    assert_eq!(client.leader().await.unwrap().url, Some(b.url()));
}

#[tokio::test]
async fn refusals_and_silence_of_the_api_server_are_one_clear_line() {
    let server = ApiServer::start().await;
    for (mode, parts) in [
        (Mode::Forbidden, vec!["403", "get, list and watch", "endpointslices is forbidden"]),
        (Mode::Unauthorized, vec!["401", "Unauthorized"]),
        (Mode::Nonsense, vec!["Kubernetes: "]),
        (Mode::Hanging, vec!["no answer within 500 ms"]),
    ] {
        server.set_mode(mode);
        let bound = if mode == Mode::Hanging { Duration::from_millis(500) } else { TIMEOUT };
        let err = client_of(&server, LOCATOR).with_timeout(bound).leader().await.unwrap_err();
        assert!(err.is_transient(), "{err}");
        let err = err.to_string();
        assert!(parts.iter().all(|part| err.contains(part)), "{mode:?}: {err}");
        assert!(err.starts_with(&format!("no control plane found by {LOCATOR} (")), "{err}");
        assert!(!err.contains('\n'), "{err}");
    }
    // The API server that does not exist.
    let err = client_at("http://127.0.0.1:9", LOCATOR).leader().await.unwrap_err().to_string();
    assert!(err.contains("Connection refused"), "{err}");
}

/// Endpoints stay in force while the API server refuses or hangs.
#[tokio::test]
async fn the_list_survives_an_outage_of_the_api_server() {
    let ([a, b], server, client) = watch_the_first_of_two().await;
    server.set_mode(Mode::Forbidden);
    server.end_watches();
    let is_refused = |known: &Known| known.reason().is_some_and(|reason| reason.contains("403"));
    wait_for(&client, is_refused).await;
    assert_eq!(client.leader().await.unwrap().url, Some(a.url()));
    server.apply(endpoints_of(&[ready(&b)], &a));
    server.set_mode(Mode::Normal);
    wait_for_urls(&client, &[&b]).await;
}

#[tokio::test]
async fn a_service_that_does_not_exist_is_named() {
    let (server, client) = start("k8s://experts/nothing").await;
    server.apply(slice(SLICE, 1, &[]));
    let err = client.leader().await.unwrap_err().to_string();
    assert_eq!(
        err,
        "no control plane found by k8s://experts/nothing (no EndpointSlice of the Service nothing in the namespace \
         experts: does it exist?)"
    );
}

#[test]
fn ports_are_found_by_name_and_number() {
    let object = json!({
        "metadata": { "name": SLICE },
        "addressType": "IPv4",
        "endpoints": [{ "addresses": ["10.0.0.1"] }],
        "ports": [
            { "name": "http", "port": 7070, "protocol": "TCP" },
            { "name": "metrics", "port": 9090 },
            { "name": "gossip", "port": 7946, "protocol": "UDP" },
        ],
    });
    let slice: EndpointSlice = serde_json::from_value(object).unwrap();
    let slices = BTreeMap::from([(SLICE.to_owned(), slice)]);
    let port_of = |locator: &str| {
        let Ok(Locator::Service(service)) = Locator::parse(locator, |_| unreachable!()) else {
            panic!("{locator}")
        };
        let found = super::super::kubernetes::ready_addresses(&service, &slices);
        found.map(|addresses| {
            assert_eq!(addresses[0].ip(), Ipv4Addr::new(10, 0, 0, 1));
            addresses[0].port()
        })
    };
    assert_eq!(port_of("k8s://experts/control:http"), Ok(7070));
    assert_eq!(port_of("k8s://experts/control:9090"), Ok(9090));
    for (locator, part) in [
        ("k8s://experts/control", "none was given"),
        ("k8s://experts/control:https", "\"https\" is none of them"),
        ("k8s://experts/control:7946", "7946 is none of them"),
    ] {
        let err = port_of(locator).unwrap_err();
        assert!(err.contains(part) && err.contains("7070 (\"http\"), 9090 (\"metrics\")"), "{err}");
    }
}

#[test]
fn services_that_cannot_exist_are_refused() {
    for (text, reason) in [
        ("k8s://", "no Service"),
        ("k8s://experts", "no Service"),
        ("k8s:///control", "namespace \"\""),
        ("k8s://experts/", "Service \"\""),
        ("k8s://Experts/control", "namespace \"Experts\""),
        ("k8s://experts/a/b", "Service \"a/b\""),
        ("k8s://experts/-a", "Service \"-a\""),
        ("k8s://experts/control:", "port \"\""),
        ("k8s://experts/control:0", "port \"0\""),
        ("k8s://experts/control:99999", "port \"99999\""),
        ("k8s://experts/control:HTTP", "port \"HTTP\""),
        ("k8s://experts/control,labelSelector=x", "scheme"),
        ("k8s://experts/control?x=1", "Service \"control?x=1\""),
    ] {
        let err = parse(text).unwrap_err().to_string();
        assert!(err.contains(&format!("({reason})")), "{text}: {err}");
    }
    for text in ["k8s://experts/control", "k8s://experts/control:http", "k8s://e/c:7070"] {
        assert_eq!(parse(text).unwrap().known.borrow().text(), text);
    }
}
