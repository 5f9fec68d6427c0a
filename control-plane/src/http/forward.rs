//! Requests that a follower passes on to the leader.

use std::time::Duration;

use axum::body::Body;
use axum::extract::{MatchedPath, Request, State};
use axum::http::header::{AUTHORIZATION, CONTENT_TYPE};
use axum::http::{HeaderName, Method};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use control_api::code;
use trust::tls::{Security, Side, explain};

use super::error::HttpError;
use super::{App, page};
use crate::role::{Following, Role};

/// Passes a request on if another control plane leads and only the leader can answer it.
pub(super) async fn forward(State(app): State<App>, request: Request, next: Next) -> Response {
    let route = request.extensions().get::<MatchedPath>().map(|path| path.as_str().to_owned());
    let is_local = match route.as_deref() {
        None => true,
        Some(route) => LOCAL.contains(&route) || page::is_page(route),
    };
    if is_local {
        return next.run(request).await;
    }
    let role = match app.roles.current() {
        Role::Follower(Following { leader_url: None, .. }) => {
            app.roles.await_leader(ELECTION_WAIT).await
        }
        role => role,
    };
    let Role::Follower(following) = role else { return next.run(request).await };
    if request.headers().contains_key(FORWARDED) {
        // The sender takes this process for the leader, which it is not (any more).
        return no_leader("this control plane does not lead").into_response();
    }
    match send(&app, following, request).await {
        Ok(response) => response,
        Err(refusal) => refusal.into_response(),
    }
}

pub(super) fn no_leader(reason: &str) -> HttpError {
    HttpError::new(code::NO_LEADER, format!("no control plane leads: {reason}"))
}

async fn send(app: &App, following: Following, request: Request) -> Result<Response, HttpError> {
    let Following { leader_url, problem, .. } = following;
    let url = leader_url
        .ok_or_else(|| no_leader(problem.as_deref().unwrap_or("an election is under way")))?;
    let (parts, body) = request.into_parts();
    let path = parts.uri.path_and_query().map_or("/", |path| path.as_str());
    let mut forwarded = app
        .forwarder
        .request(parts.method.clone(), format!("{}{path}", url.trim_end_matches('/')))
        .header(FORWARDED, "1");
    for name in [AUTHORIZATION, CONTENT_TYPE] {
        if let Some(value) = parts.headers.get(&name) {
            forwarded = forwarded.header(name, value);
        }
    }
    if parts.method != Method::GET {
        forwarded = forwarded.body(reqwest::Body::wrap_stream(body.into_data_stream()));
    }
    let failed =
        |reason: String| no_leader(&format!("the last one, {url}, does not answer ({reason})"));
    let sent = tokio::time::timeout(FORWARD_TIMEOUT, forwarded.send()).await;
    let response = sent
        .map_err(|_| failed(format!("{FORWARD_TIMEOUT:?} have passed")))?
        .map_err(|err| failed(cause(&err)))?;
    app.metrics.forwarded.inc();
    let mut answer = Response::builder().status(response.status());
    if let Some(value) = response.headers().get(CONTENT_TYPE) {
        answer = answer.header(CONTENT_TYPE, value);
    }
    let body = Body::from_stream(response.bytes_stream());
    answer.body(body).map_err(|err| HttpError::new(code::INTERNAL, err.to_string()))
}

/// The client for requests to the leader.
pub(super) fn client(security: &Security) -> reqwest::Client {
    let mut client = reqwest::Client::builder()
        .no_proxy()
        .redirect(reqwest::redirect::Policy::none())
        .connect_timeout(FORWARD_TIMEOUT)
        // A leader that stops in the middle of an answer holds no client.
        .read_timeout(FORWARD_TIMEOUT)
        .pool_idle_timeout(POOL_IDLE_TIMEOUT)
        .tcp_nodelay(true);
    client = client.tls_backend_preconfigured(security.client_config());
    // Nothing of this can fail: the settings of TLS are made.
    client.build().unwrap_or_default()
}

fn cause(err: &reqwest::Error) -> String {
    if let Some(reason) = explain(Side::Client, err) {
        return reason;
    }
    let mut cause: &dyn std::error::Error = err;
    while let Some(next) = cause.source() {
        cause = next;
    }
    cause.to_string()
}

/// Routes that every control plane answers by itself.
const LOCAL: [&str; 7] = [
    "/healthz",
    "/readyz",
    "/metrics",
    "/openapi.json",
    "/v1/placement",
    "/v1/placement/watch",
    "/v1/leader",
];
/// Marks a request of a follower, so that it is forwarded only once.
const FORWARDED: HeaderName = HeaderName::from_static("x-switchyard-forwarded");
/// Shorter than the timeout of clients with one URL, so that they learn the reason.
const FORWARD_TIMEOUT: Duration = Duration::from_millis(1500);
/// Longest time for which a request waits for an election.
const ELECTION_WAIT: Duration = Duration::from_millis(500);
const POOL_IDLE_TIMEOUT: Duration = Duration::from_secs(3);
