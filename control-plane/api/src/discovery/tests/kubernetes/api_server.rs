//! A small API server of Kubernetes: lists and watches of EndpointSlices.
//!
//! Its answers have the form of recorded ones: <https://kubernetes.io/docs/reference/using-api/api-concepts/>.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use axum::body::Body;
use axum::extract::{Path, Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use futures_util::stream;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};

use super::super::support::{TIMEOUT, eventually};

/// An endpoint of a slice.
pub(super) fn endpoint(address: IpAddr, conditions: Value) -> Value {
    json!({
        "addresses": [address.to_string()],
        "conditions": conditions,
        "nodeName": "node-1",
        "targetRef": {
            "kind": "Pod",
            "name": "demo-switchyard-control-0",
            "namespace": "experts",
            "uid": "0d2c0c5c-57a5-4b6e-8b1d-6a1b3d2b8f11",
        },
    })
}

/// A slice of the Service `demo-switchyard-control` in the namespace `experts`.
pub(super) fn slice(name: &str, port: u16, endpoints: &[Value]) -> Value {
    json!({
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "addressType": "IPv4",
        "metadata": {
            "name": name,
            "namespace": "experts",
            "generateName": "demo-switchyard-control-",
            "generation": 3,
            "creationTimestamp": "2026-11-27T12:00:00Z",
            "labels": {
                "endpointslice.kubernetes.io/managed-by": "endpointslice-controller.k8s.io",
                "kubernetes.io/service-name": "demo-switchyard-control",
            },
            "ownerReferences": [{
                "apiVersion": "v1",
                "kind": "Service",
                "name": "demo-switchyard-control",
                "uid": "4f1c7a3e-8a66-4f0b-9d2f-3d53a2f6f0a5",
                "controller": true,
                "blockOwnerDeletion": true,
            }],
        },
        "endpoints": endpoints,
        "ports": [{ "name": "http", "port": port, "protocol": "TCP" }],
    })
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    Normal,
    Forbidden,
    Unauthorized,
    /// Answers 200 with a body that is no list.
    Nonsense,
    /// Takes requests and does not answer.
    Hanging,
}

pub(super) struct ApiServer {
    url: String,
    shared: Arc<Shared>,
}

struct Shared {
    state: Mutex<Cluster>,
    /// Ends all watches that run.
    ends: watch::Sender<u64>,
}

struct Cluster {
    mode: Mode,
    version: u64,
    /// Watches from an earlier version are answered with 410.
    oldest: u64,
    slices: BTreeMap<String, Value>,
    events: Vec<(u64, Value)>,
    watchers: Vec<mpsc::UnboundedSender<Value>>,
    num_lists: usize,
    num_watches: usize,
}

impl ApiServer {
    pub(super) async fn start() -> Self {
        let state = Cluster {
            mode: Mode::Normal,
            version: 1000,
            oldest: 0,
            slices: BTreeMap::new(),
            events: Vec::new(),
            watchers: Vec::new(),
            num_lists: 0,
            num_watches: 0,
        };
        let shared = Arc::new(Shared { state: Mutex::new(state), ends: watch::Sender::new(0) });
        let path = "/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices";
        let router = Router::new().route(path, get(answer)).with_state(shared.clone());
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
        Self { url, shared }
    }

    pub(super) fn url(&self) -> &str {
        &self.url
    }

    pub(super) fn set_mode(&self, mode: Mode) {
        self.shared.lock().mode = mode;
    }

    /// Adds or changes a slice, and tells the watches.
    pub(super) fn apply(&self, slice: Value) {
        self.shared.lock().apply(slice);
    }

    /// Changes a slice. No watch hears of it, and the versions before are gone.
    pub(super) fn change_unseen(&self, slice: Value) {
        let mut state = self.shared.lock();
        // The streams stay open: they end when their senders are gone.
        let silent = std::mem::take(&mut state.watchers);
        state.apply(slice);
        state.watchers = silent;
        state.oldest = state.version;
        state.events.clear();
    }

    pub(super) fn delete(&self, name: &str) {
        let mut state = self.shared.lock();
        let slice = state.slices.remove(name).unwrap();
        state.tell("DELETED", slice);
    }

    pub(super) fn end_watches(&self) {
        self.shared.ends.send_modify(|number| *number += 1);
    }

    pub(super) fn num_lists(&self) -> usize {
        self.shared.lock().num_lists
    }

    pub(super) async fn wait_for_watch(&self, number: usize) {
        eventually(|| self.shared.lock().num_watches >= number).await;
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Cluster> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Cluster {
    fn apply(&mut self, slice: Value) {
        let name = slice["metadata"]["name"].as_str().unwrap().to_owned();
        let kind = if self.slices.contains_key(&name) { "MODIFIED" } else { "ADDED" };
        let slice = self.tell(kind, slice);
        self.slices.insert(name, slice);
    }

    /// Gives the slice a new version, and sends the event.
    fn tell(&mut self, kind: &str, mut slice: Value) -> Value {
        self.version += 1;
        slice["metadata"]["resourceVersion"] = json!(self.version.to_string());
        let event = json!({ "type": kind, "object": slice });
        self.events.push((self.version, event.clone()));
        self.watchers.retain(|watcher| watcher.send(event.clone()).is_ok());
        slice
    }
}

async fn answer(
    State(shared): State<Arc<Shared>>,
    Path(namespace): Path<String>,
    Query(query): Query<BTreeMap<String, String>>,
) -> Response {
    let mode = shared.lock().mode;
    match mode {
        Mode::Normal => {}
        Mode::Forbidden => {
            let message = "endpointslices is forbidden: User \"system:serviceaccount:experts:demo\" cannot list \
                           resource \"endpointslices\" in API group \"discovery.k8s.io\" in the namespace \"experts\"";
            return refuse(StatusCode::FORBIDDEN, "Forbidden", message);
        }
        Mode::Unauthorized => {
            return refuse(StatusCode::UNAUTHORIZED, "Unauthorized", "Unauthorized");
        }
        Mode::Nonsense => return "<html>a proxy</html>".into_response(),
        Mode::Hanging => {
            tokio::time::sleep(TIMEOUT).await;
            return StatusCode::GATEWAY_TIMEOUT.into_response();
        }
    }
    assert_eq!(namespace, "experts");
    let selector = query.get("labelSelector").map(String::as_str).unwrap_or_default();
    let service = selector.strip_prefix("kubernetes.io/service-name=").unwrap_or_default();
    if query.get("watch").is_some_and(|value| value == "true" || value == "1") {
        let version = query.get("resourceVersion").and_then(|text| text.parse().ok());
        return watch_from(&shared, version.unwrap_or(0));
    }
    let mut state = shared.lock();
    state.num_lists += 1;
    let is_selected =
        |slice: &&Value| slice["metadata"]["labels"]["kubernetes.io/service-name"] == service;
    let items: Vec<Value> = state.slices.values().filter(is_selected).cloned().collect();
    Json(json!({
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSliceList",
        "metadata": { "resourceVersion": state.version.to_string() },
        "items": items,
    }))
    .into_response()
}

fn watch_from(shared: &Shared, version: u64) -> Response {
    let mut state = shared.lock();
    let (sender, events) = mpsc::unbounded_channel();
    let ends = shared.ends.subscribe();
    state.num_watches += 1;
    if version < state.oldest {
        let status = status(StatusCode::GONE, "Expired", "too old resource version");
        let _ = sender.send(json!({ "type": "ERROR", "object": status }));
    } else {
        for (_, event) in state.events.iter().filter(|(number, _)| *number > version) {
            let _ = sender.send(event.clone());
        }
        let bookmark = json!({
            "kind": "EndpointSlice",
            "apiVersion": "discovery.k8s.io/v1",
            "metadata": { "resourceVersion": state.version.to_string(), "creationTimestamp": null },
        });
        let _ = sender.send(json!({ "type": "BOOKMARK", "object": bookmark }));
        state.watchers.push(sender);
    }
    let lines = stream::unfold((events, ends), async |(mut events, mut ends)| {
        let event = tokio::select! {
            biased;
            _ = ends.changed() => None,
            event = events.recv() => event,
        };
        Some((Ok::<_, Infallible>(format!("{}\n", event?)), (events, ends)))
    });
    Body::from_stream(lines).into_response()
}

fn refuse(code: StatusCode, reason: &str, message: &str) -> Response {
    (code, Json(status(code, reason, message))).into_response()
}

fn status(code: StatusCode, reason: &str, message: &str) -> Value {
    json!({
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": message,
        "reason": reason,
        "code": code.as_u16(),
    })
}
