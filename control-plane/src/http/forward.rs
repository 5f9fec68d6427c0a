//! Requests that a follower passes on to the leader.

use std::net::IpAddr;
use std::time::Duration;

use axum::body::Body;
use axum::extract::{MatchedPath, Request, State};
use axum::http::header::{AUTHORIZATION, CONTENT_LENGTH, CONTENT_TYPE, RETRY_AFTER};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use control_api::code;
use serde::{Deserialize, Serialize};
use tracing::field::display;
use tracing::warn;
use trust::log_limit::LogLimit;
use trust::tls::{Security, Side, explain};
use trust::{Credential, Identity};

use super::cross_site::SEC_FETCH_SITE;
use super::error::HttpError;
use super::request_id::{REQUEST_ID, RequestId};
use super::{App, page};
use crate::access::{Access, Caller};
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

/// The reason for which this follower has refused a change, as an extension of the request to the leader.
#[derive(Clone, Debug)]
struct RefusedHere(String);

/// The answer to a change that this process refuses. A follower tells the leader, in whose audit log people look for it.
/// Waits up to [`FORWARD_TIMEOUT`] for the leader. Without an answer, the entry belongs into the log of this process.
pub(super) async fn refuse(app: &App, mut request: Request, refusal: HttpError) -> Response {
    let is_noted = match app.roles.current() {
        Role::Follower(following @ Following { leader_url: Some(_), .. })
            if refusal.code() == code::FORBIDDEN
                && !app.cluster_tokens.is_empty()
                && !request.headers().contains_key(FORWARDED) =>
        {
            *request.body_mut() = Body::empty();
            // A leader that does not know of refusals refuses this one.
            request.headers_mut().insert(SEC_FETCH_SITE, HeaderValue::from_static("cross-site"));
            request.extensions_mut().insert(RefusedHere(refusal.message().to_owned()));
            let answer = send(app, following, request).await;
            answer.is_ok_and(|answer| answer.status() == StatusCode::FORBIDDEN)
        }
        _ => false,
    };
    let mut response = refusal.into_response();
    if is_noted {
        response.extensions_mut().insert(Forwarded);
    }
    response
}

pub(super) fn no_leader(reason: &str) -> HttpError {
    HttpError::new(code::NO_LEADER, format!("no control plane leads: {reason}"))
}

/// Marks the response to a request that the leader has answered, and put into its audit log.
#[derive(Clone, Copy, Debug)]
pub(super) struct Forwarded;

/// The caller of a forwarded request, as the follower saw it. The leader believes it if it comes with the cluster's own
/// token, whose holder has all rights anyway. A caller's bearer token is forwarded as it is, and the leader checks it
/// again.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Vouched {
    /// Identity of the caller's certificate, which the leader cannot see.
    certificate: Option<Holder>,
    pub(super) address: Option<IpAddr>,
    /// The follower has refused the change for this reason. The leader does the same, so that its audit log has the
    /// attempt.
    #[serde(default)]
    pub(super) refusal: Option<String>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Holder {
    name: String,
    role: trust::Role,
}

impl Vouched {
    pub(super) fn identity(&self) -> Option<Identity> {
        self.certificate.as_ref().map(|holder| Identity {
            name: holder.name.clone(),
            role: holder.role,
            credential: Credential::Certificate,
        })
    }
}

/// The sender of a request.
#[derive(Debug)]
pub(super) enum Sender {
    /// The caller. The connection's certificate is its own.
    Caller,
    /// A follower that vouches for the caller.
    Follower(Vouched),
    /// A process that says that it has passed the request on, and has none of the cluster's tokens.
    UnknownFollower,
}

/// The sender of a request with these headers.
pub(super) fn sender(access: &Access, headers: &HeaderMap) -> Sender {
    if let Some(vouched) = vouched(access, headers) {
        return Sender::Follower(vouched);
    }
    let is_forwarded =
        [FORWARDED, CONTROL_TOKEN, CALLER].iter().any(|name| headers.contains_key(name));
    // Control planes that ask for no identity have none to confuse.
    match is_forwarded && access.requires_identity() {
        true => Sender::UnknownFollower,
        false => Sender::Caller,
    }
}

/// The answer to [`Sender::UnknownFollower`]. Clients take it for that of a control plane without a leader, and go on to
/// the next one.
pub(super) fn unknown_follower(address: Option<IpAddr>) -> HttpError {
    let text = "the control plane that has passed this request on has another cluster token than the leader: \
                give all control planes of the fleet the same one";
    if let Some(num_suppressed) = UNKNOWN_FOLLOWER_LOG.allow() {
        let address = address.map(display);
        warn!(address, num_suppressed, "{text}");
    }
    HttpError::new(code::NO_LEADER, text)
}

/// The caller that a follower vouches for in these headers.
fn vouched(access: &Access, headers: &HeaderMap) -> Option<Vouched> {
    let mut tokens = headers.get_all(CONTROL_TOKEN).iter().take(MAX_CLUSTER_TOKENS);
    if !tokens.any(|token| access.is_cluster_token(token.as_bytes())) {
        return None;
    }
    let json = STANDARD.decode(headers.get(CALLER)?.as_bytes()).ok()?;
    serde_json::from_slice(&json).ok()
}

/// The headers by which a follower vouches for a caller. While the cluster's token is replaced they have the new and the
/// previous one, because the leader may know only one of them.
fn vouch(
    app: &App,
    request: &axum::http::request::Parts,
) -> Option<Vec<(HeaderName, HeaderValue)>> {
    if app.cluster_tokens.is_empty() {
        return None;
    }
    let holder = |identity: &Identity| Holder { name: identity.name.clone(), role: identity.role };
    let vouched = Vouched {
        certificate: request.extensions.get::<Identity>().map(holder),
        address: request.extensions.get::<Caller>().and_then(|caller| caller.address),
        refusal: request.extensions.get::<RefusedHere>().map(|refused| refused.0.clone()),
    };
    let text = STANDARD.encode(serde_json::to_vec(&vouched).ok()?);
    let caller = [(CALLER, HeaderValue::from_str(&text).ok()?)];
    let tokens = app.cluster_tokens.iter().map(|token| (CONTROL_TOKEN, token.clone()));
    Some(caller.into_iter().chain(tokens).collect())
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
    // Not ORIGIN: the leader has another host.
    for name in [AUTHORIZATION, CONTENT_TYPE, SEC_FETCH_SITE] {
        if let Some(value) = parts.headers.get(&name) {
            let mut value = value.clone();
            value.set_sensitive(name == AUTHORIZATION);
            forwarded = forwarded.header(name, value);
        }
    }
    if let Some(RequestId(id)) = parts.extensions.get::<RequestId>() {
        forwarded = forwarded.header(REQUEST_ID, id);
    }
    for (name, value) in vouch(app, &parts).into_iter().flatten() {
        forwarded = forwarded.header(name, value);
    }
    if parts.method != Method::GET {
        forwarded = forwarded.body(reqwest::Body::wrap_stream(body.into_data_stream()));
    }
    let failed = |reason: String| no_answer(&url, &reason);
    let sent = tokio::time::timeout(FORWARD_TIMEOUT, forwarded.send()).await;
    let response = sent
        .map_err(|_| failed(format!("{FORWARD_TIMEOUT:?} have passed")))?
        .map_err(|err| failed(cause(&err)))?;
    app.metrics.forwarded.inc();
    answer(&url, response)
}

fn no_answer(url: &str, reason: &str) -> HttpError {
    no_leader(&format!("the last one, {url}, does not answer ({reason})"))
}

/// The answer of the leader at `url` as that of this process. With its length, so that the end of a certificate cuts no
/// answer short.
fn answer(url: &str, response: reqwest::Response) -> Result<Response, HttpError> {
    if response.status() == StatusCode::MISDIRECTED_REQUEST {
        // This is about the connection from here to the leader. The caller's own certificate is accepted.
        return Err(no_answer(url, CERTIFICATE_REFUSED));
    }
    let mut answer = Response::builder().extension(Forwarded).status(response.status());
    for name in [CONTENT_LENGTH, CONTENT_TYPE, RETRY_AFTER] {
        if let Some(value) = response.headers().get(&name) {
            answer = answer.header(name, value);
        }
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
pub(super) const LOCAL: [&str; 8] = [
    "/healthz",
    "/readyz",
    "/metrics",
    "/openapi.json",
    "/v1/placement",
    "/v1/placement/watch",
    "/v1/leader",
    "/v1/whoami",
];
const CERTIFICATE_REFUSED: &str = "it no longer accepts the certificate of this control plane";
/// Marks a request of a follower, so that it is forwarded only once.
pub(super) const FORWARDED: HeaderName = HeaderName::from_static("x-switchyard-forwarded");
/// The cluster's own token, from a follower.
const CONTROL_TOKEN: HeaderName = HeaderName::from_static("x-switchyard-control-token");
/// The present token and the previous one.
const MAX_CLUSTER_TOKENS: usize = 2;
static UNKNOWN_FOLLOWER_LOG: LogLimit = LogLimit::new();
/// A [`Vouched`] as JSON in Base64.
const CALLER: HeaderName = HeaderName::from_static("x-switchyard-caller");
/// Shorter than the timeout of clients with one URL, so that they learn the reason.
const FORWARD_TIMEOUT: Duration = Duration::from_millis(1500);
/// Longest time for which a leader lets a follower's request wait on purpose, so that the follower does not give it up.
pub(super) const MAX_FORWARDED_WAIT: Duration = Duration::from_secs(1);
/// Longest time for which a request waits for an election.
const ELECTION_WAIT: Duration = Duration::from_millis(500);
const POOL_IDLE_TIMEOUT: Duration = Duration::from_secs(3);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_forwarded_answer_has_its_length() {
        let text = "x".repeat(rand::random_range(0..1000));
        let response = axum::http::Response::builder()
            .header(CONTENT_LENGTH, text.len())
            .header(RETRY_AFTER, "3")
            .body(text.clone())
            .unwrap();
        let answer = answer("http://leader:1", response.into()).unwrap();
        let header = |name| answer.headers().get(name).unwrap().to_str().unwrap().to_owned();
        assert_eq!(header(CONTENT_LENGTH), text.len().to_string());
        assert_eq!(header(RETRY_AFTER), "3");
    }

    /// The caller cannot renew the certificate of a follower, and needs no other connection.
    #[test]
    fn a_leaders_refusal_of_the_followers_certificate_is_not_the_callers() {
        let response = axum::http::Response::builder().status(421).body("ended").unwrap();
        let refusal = answer("http://leader:1", response.into()).unwrap_err().into_response();
        assert_eq!(refusal.status(), StatusCode::SERVICE_UNAVAILABLE);
    }

    #[test]
    fn only_the_holder_of_the_clusters_token_vouches_for_a_caller() {
        let access = Access::new(Some("secret"), None, false);
        let json = r#"{"certificate":{"name":"gpu-1","role":"server"},"address":"10.0.0.9"}"#;
        let caller = HeaderValue::from_str(&STANDARD.encode(json)).unwrap();
        let headers = |token: &'static str| {
            let token = HeaderValue::from_static(token);
            HeaderMap::from_iter([(CONTROL_TOKEN, token), (CALLER, caller.clone())])
        };
        let found = vouched(&access, &headers("secret")).unwrap();
        assert_eq!(found.address, Some(IpAddr::from([10, 0, 0, 9])));
        assert_eq!(found.identity().unwrap().name, "gpu-1");
        assert!(vouched(&access, &headers("secre")).is_none());
        let rotating = Access::new(["new", "secret"], None, false);
        assert!(vouched(&rotating, &headers("secret")).is_some());
        let open = Access::new(None, None, false);
        assert!(vouched(&open, &headers("secret")).is_none());
        let mut headers = headers("secret");
        headers.insert(CALLER, HeaderValue::from_static("!"));
        assert!(vouched(&access, &headers).is_none());
    }
}
