//! The HTTP interface: routes, authentication, timeouts, errors as JSON.

mod digests;
mod error;
mod exposure;
mod forward;
mod openapi;
mod page;
mod routes;
mod tickets;
mod watch;

use std::sync::Arc;
use std::time::Instant;

use axum::Router;
use axum::extract::{DefaultBodyLimit, MatchedPath, Request, State};
use axum::http::header::{AUTHORIZATION, CONTENT_LENGTH};
use axum::http::{HeaderMap, Method};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodRouter, delete, get, post, put};
use control_api::code;
use sha2::{Digest, Sha256};
use tokio::sync::Semaphore;

use crate::board::Board;
use crate::config::Limits;
use crate::coordinator::Coordinator;
use crate::metrics::Metrics;
use crate::role::{Role, Roles};
use error::HttpError;
pub(crate) use exposure::Exposure;

/// State shared by all handlers.
#[derive(Clone, Debug)]
pub(crate) struct App {
    pub(crate) roles: Roles,
    pub(crate) board: Arc<Board>,
    pub(crate) metrics: Metrics,
    /// Sends requests to the leader.
    forwarder: reqwest::Client,
    pub(crate) limits: Limits,
    /// Digest of the token, if one is required.
    token: Option<[u8; 32]>,
    pub(crate) exposure: Exposure,
    watch_permits: Arc<Semaphore>,
    /// Requests that may hold digests in memory at a time.
    digest_permits: Arc<Semaphore>,
    /// Turns true at shutdown: watches end, and `/readyz` fails.
    pub(crate) shutdown: tokio::sync::watch::Receiver<bool>,
}

impl App {
    pub(crate) fn new(
        roles: Roles,
        board: Arc<Board>,
        metrics: Metrics,
        limits: Limits,
        token: Option<&str>,
        exposure: Exposure,
        shutdown: tokio::sync::watch::Receiver<bool>,
    ) -> Self {
        let watch_permits = Arc::new(Semaphore::new(limits.max_watchers));
        let token = token.map(|token| Sha256::digest(token).into());
        let digest_permits = Arc::new(Semaphore::new(MAX_DIGEST_UPLOADS));
        let forwarder = forward::client(&exposure.security);
        Self {
            roles,
            board,
            metrics,
            forwarder,
            limits,
            token,
            exposure,
            watch_permits,
            digest_permits,
            shutdown,
        }
    }

    /// The fleet, if this process leads.
    pub(crate) fn leader(&self) -> Result<Arc<Coordinator>, HttpError> {
        match self.roles.current() {
            Role::Leader { coordinator, .. } => Ok(coordinator),
            // The role has changed since the request was taken for local.
            Role::Follower(_) => Err(forward::no_leader("this control plane does not lead")),
        }
    }
}

/// One route. A test compares the list of routes with the OpenAPI document.
struct Route {
    #[cfg_attr(
        not(test),
        expect(dead_code, reason = "only the test reads it: the handler includes its method")
    )]
    method: Method,
    path: &'static str,
    handler: MethodRouter<App>,
}

/// Every route.
fn all_routes() -> Vec<Route> {
    let route = |method, path, handler| Route { method, path, handler };
    vec![
        route(Method::GET, "/healthz", get(routes::healthz)),
        route(Method::GET, "/readyz", get(routes::readyz)),
        route(Method::GET, "/metrics", get(routes::metrics)),
        route(Method::GET, "/openapi.json", get(openapi::openapi_json)),
        route(Method::GET, "/v1/placement", get(routes::placement)),
        route(Method::GET, "/v1/placement/watch", get(watch::placement_watch)),
        route(Method::GET, DIGESTS_PATH, get(digests::model_digests)),
        route(Method::PUT, DIGESTS_PATH, put(digests::store_model_digests)),
        route(Method::GET, "/v1/leader", get(routes::leader)),
        route(Method::GET, "/v1/status", get(routes::status)),
        route(Method::GET, "/v1/advice", get(routes::advice)),
        route(Method::GET, "/v1/events", get(routes::events)),
        route(Method::GET, "/v1/goals", get(routes::goals)),
        route(Method::PUT, "/v1/goals", put(routes::set_goals)),
        route(Method::GET, "/v1/members", get(routes::members)),
        route(Method::POST, "/v1/members", post(routes::register)),
        route(Method::DELETE, "/v1/members/{id}", delete(routes::leave)),
        route(Method::PUT, "/v1/members/{id}/lease", put(routes::renew)),
        route(Method::POST, "/v1/members/{id}/ready", post(routes::ready)),
        route(Method::POST, "/v1/members/{id}/drain", post(routes::drain)),
        route(Method::POST, "/v1/members/{id}/resume", post(routes::resume)),
        route(Method::POST, "/v1/members/{id}/suspect", post(routes::suspect)),
        route(Method::POST, "/v1/tickets", post(tickets::issue)),
        route(Method::POST, "/v1/tickets/revoke", post(tickets::revoke)),
    ]
}

/// The router with all routes.
pub(crate) fn router(app: App) -> Router {
    let mut router = Router::new();
    for route in all_routes() {
        router = router.route(route.path, route.handler);
    }
    for (path, handler) in page::routes() {
        router = router.route(path, handler);
    }
    let not_found =
        || async { HttpError::new(code::NOT_FOUND, "no such route; see /openapi.json") };
    let wrong_method = || async {
        HttpError::new(code::METHOD_NOT_ALLOWED, "this route does not support this method")
    };
    router
        .fallback(not_found)
        .method_not_allowed_fallback(wrong_method)
        .layer(DefaultBodyLimit::max(app.limits.max_body_bytes))
        .layer(middleware::from_fn_with_state(app.clone(), forward::forward))
        .layer(middleware::from_fn_with_state(app.clone(), guard))
        .layer(middleware::from_fn_with_state(app.clone(), measure))
        .with_state(app)
}

/// Checks the token and bounds the time of a request, including its body.
async fn guard(State(app): State<App>, request: Request, next: Next) -> Response {
    let expected = app.token.as_ref().filter(|_| is_protected(request.uri().path()));
    let admission = expected.map_or(Ok(()), |expected| authorize(request.headers(), expected));
    if let Err(refusal) = admission {
        return refusal.into_response();
    }
    // Refuse a body that is announced as too large without reading it.
    let announced = request.headers().get(CONTENT_LENGTH).and_then(|value| value.to_str().ok());
    let announced = announced.and_then(|length| length.parse::<u64>().ok());
    let max_body_bytes = match request.uri().path() {
        DIGESTS_PATH => app.limits.max_digests_bytes,
        _ => app.limits.max_body_bytes,
    };
    if announced.is_some_and(|length| length > max_body_bytes as u64) {
        return HttpError::body_too_large(max_body_bytes).into_response();
    }
    let limit = app.limits.request_timeout;
    match tokio::time::timeout(limit, next.run(request)).await {
        Ok(response) => response,
        Err(_) => {
            let text = format!("the request was not complete within {limit:?}");
            HttpError::new(code::REQUEST_TIMEOUT, text).into_response()
        }
    }
}

async fn measure(State(app): State<App>, request: Request, next: Next) -> Response {
    let started = Instant::now();
    let route = request.extensions().get::<MatchedPath>().cloned();
    let method = request.method().clone();
    let response = next.run(request).await;
    let route = route.as_ref().map_or("unmatched", MatchedPath::as_str);
    let status = response.status().as_u16();
    app.metrics.observe_request(route, method.as_str(), status, started.elapsed());
    response
}

/// Returns true for all paths except the probes, the metrics and the OpenAPI document.
fn is_protected(path: &str) -> bool {
    !matches!(path, "/healthz" | "/readyz" | "/metrics" | "/openapi.json") && !page::is_page(path)
}

fn authorize(headers: &HeaderMap, expected: &[u8; 32]) -> Result<(), HttpError> {
    let refuse = |text: &str| Err(HttpError::new(code::UNAUTHORIZED, text));
    let Some(value) = headers.get(AUTHORIZATION) else {
        return refuse("no token: send the header `Authorization: Bearer TOKEN`");
    };
    let (scheme, token) = value.as_bytes().split_at(value.len().min(BEARER.len()));
    if !scheme.eq_ignore_ascii_case(BEARER) {
        return refuse("not a bearer token: send the header `Authorization: Bearer TOKEN`");
    }
    // Compare digests of equal length without an early exit, so that the time does not depend on the
    // token.
    let found: [u8; 32] = Sha256::digest(token).into();
    let difference = found.iter().zip(expected).fold(0, |sum, (a, b)| sum | (a ^ b));
    if std::hint::black_box(difference) != 0 {
        return refuse("the token is wrong");
    }
    Ok(())
}

const BEARER: &[u8] = b"Bearer ";
/// Bounds the memory for uploads of digests.
const MAX_DIGEST_UPLOADS: usize = 2;
/// Its bodies may be larger than those of other routes.
const DIGESTS_PATH: &str = "/v1/model/digests";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_right_token_is_let_in() {
        let expected: [u8; 32] = Sha256::digest("secret").into();
        let attempt = |value: Option<&str>| {
            let mut headers = HeaderMap::new();
            if let Some(value) = value {
                headers.insert(AUTHORIZATION, value.parse().unwrap());
            }
            authorize(&headers, &expected).is_ok()
        };
        assert!(attempt(Some("Bearer secret")));
        assert!(attempt(Some("bearer secret")));
        for wrong in
            ["Bearer secre", "Bearer secrets", "Bearer ", "Bearer", "secret", "Basic secret"]
        {
            assert!(!attempt(Some(wrong)), "{wrong}");
        }
        assert!(!attempt(None));
    }
}
