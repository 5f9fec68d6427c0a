//! The HTTP interface: routes, authentication, timeouts, errors as JSON.

mod bodies;
mod change;
mod cross_site;
mod digests;
mod error;
mod exposure;
mod extract;
mod forward;
mod guard;
mod models;
mod openapi;
mod page;
mod request_id;
mod routes;
mod tickets;
mod watch;
mod watch_permits;

use std::sync::Arc;
use std::time::Instant;

use axum::Router;
use axum::extract::{MatchedPath, Request, State};
use axum::http::{HeaderValue, Method};
use axum::middleware::{self, Next};
use axum::response::Response;
use axum::routing::{MethodRouter, delete, get, post, put};
use control_api::code;
use tokio::sync::Semaphore;

use crate::access::audit::AuditLog;
use crate::access::metrics::AccessMetrics;
use crate::access::rates::Rates;
use crate::access::{Access, Rule};
use crate::boards::Boards;
use crate::config::Limits;
use crate::editions::Editions;
use crate::metrics::Metrics;
use crate::role::{Role, Roles};
use bodies::{BodyMemory, BodySize};
use error::HttpError;
pub(crate) use exposure::Exposure;
use guard::{ANY_ROLE, Rules};
use watch_permits::WatchPermits;

/// State shared by all handlers.
#[derive(Clone, Debug)]
pub(crate) struct App {
    pub(crate) roles: Roles,
    pub(crate) boards: Arc<Boards>,
    pub(crate) metrics: Metrics,
    /// Sends requests to the leader.
    forwarder: reqwest::Client,
    pub(crate) limits: Limits,
    pub(crate) exposure: Exposure,
    /// The cluster's own tokens, to vouch for callers of forwarded requests.
    cluster_tokens: Vec<HeaderValue>,
    pub(crate) access: Access,
    access_metrics: AccessMetrics,
    pub(crate) audit: AuditLog,
    rates: Arc<Rates>,
    rules: Arc<Rules>,
    watch_permits: Arc<WatchPermits>,
    body_memory: Arc<BodyMemory>,
    /// Requests that may hold digests in memory at a time.
    digest_permits: Arc<Semaphore>,
    /// Turns true at shutdown: watches end, and `/readyz` fails.
    pub(crate) shutdown: tokio::sync::watch::Receiver<bool>,
}

/// Identities and the log of their changes.
#[derive(Clone, Debug)]
pub(crate) struct Guarding {
    pub(crate) access: Access,
    pub(crate) metrics: AccessMetrics,
    pub(crate) audit: AuditLog,
    /// The cluster's own tokens.
    pub(crate) cluster_tokens: Vec<String>,
}

impl App {
    pub(crate) fn new(
        roles: Roles,
        boards: Arc<Boards>,
        metrics: Metrics,
        limits: Limits,
        guarding: Guarding,
        exposure: Exposure,
        shutdown: tokio::sync::watch::Receiver<bool>,
    ) -> Self {
        let forwarder = forward::client(&exposure.security);
        let cluster_tokens = guarding.cluster_tokens.iter().filter_map(|token| {
            let mut value = HeaderValue::from_str(token).ok()?;
            value.set_sensitive(true);
            Some(value)
        });
        let cluster_tokens = cluster_tokens.collect();
        let body_memory = BodyMemory::new(limits.max_bodies_bytes, guarding.metrics.clone());
        Self {
            roles,
            boards,
            metrics,
            forwarder,
            cluster_tokens,
            access: guarding.access,
            access_metrics: guarding.metrics,
            audit: guarding.audit,
            rates: Arc::new(Rates::new(limits.rates)),
            rules: Arc::new(Rules::new(&all_routes())),
            watch_permits: WatchPermits::new(&limits),
            body_memory,
            digest_permits: Arc::new(Semaphore::new(MAX_DIGEST_UPLOADS)),
            limits,
            exposure,
            shutdown,
        }
    }

    /// The fleet, if this process leads.
    pub(crate) fn leader(&self) -> Result<Arc<Editions>, HttpError> {
        match self.roles.current() {
            Role::Leader { editions, .. } => Ok(editions),
            // The role has changed since the request was taken for local.
            Role::Follower(_) => Err(forward::no_leader("this control plane does not lead")),
        }
    }
}

/// One route. A test compares the list of routes with the OpenAPI document.
struct Route {
    method: Method,
    path: &'static str,
    rule: Rule,
    /// Name of the change in the audit log, for a route that changes the fleet.
    action: Option<&'static str>,
    body: BodySize,
    handler: MethodRouter<App>,
}

impl Route {
    fn new(method: Method, path: &'static str, rule: Rule, handler: MethodRouter<App>) -> Self {
        Self { method, path, rule, action: None, body: BodySize::default(), handler }
    }

    /// The route, with each of its requests in the audit log as `action`.
    fn audited(self, action: &'static str) -> Self {
        Self { action: Some(action), ..self }
    }

    /// The route, for larger bodies than most.
    fn with_body(self, body: BodySize) -> Self {
        Self { body, ..self }
    }
}

/// Every route, with the callers that may use it.
fn all_routes() -> Vec<Route> {
    use trust::Role::{Client, Operator, Server, Viewer};
    let open = |path, handler| Route::new(Method::GET, path, Rule::Open, handler);
    let read = |path, rule, handler| Route::new(Method::GET, path, rule, handler);
    let change = Route::new;
    let people = Rule::Roles(&[Operator, Viewer]);
    let members = Rule::Roles(&[Server, Operator, Viewer]);
    let operator = Rule::Roles(&[Operator]);
    let server = Rule::Roles(&[Server]);
    let own = Rule::Owner { any: &[] };
    let own_or_operator = Rule::Owner { any: &[Operator] };
    let reporters = Rule::Roles(&[Client, Server]);
    // A control plane that follows has the token of the cluster, which stands for all roles. Reports of clients would let
    // them keep an old model in service.
    let planes = Rule::Roles(&[Server, Operator]);
    vec![
        open("/healthz", get(routes::healthz)),
        open("/readyz", get(routes::readyz)),
        open("/metrics", get(routes::metrics)),
        open("/openapi.json", get(openapi::openapi_json)),
        read("/v1/placement", ANY_ROLE, get(routes::placement)),
        read("/v1/placement/watch", ANY_ROLE, get(watch::placement_watch)),
        read(DIGESTS_PATH, ANY_ROLE, get(digests::model_digests)),
        change(Method::PUT, DIGESTS_PATH, server, put(digests::store_model_digests))
            .with_body(BodySize::Digests),
        read("/v1/models", ANY_ROLE, get(models::models)),
        change(Method::POST, "/v1/models", operator, post(models::add_model)).audited("add_model"),
        change(Method::POST, "/v1/models/switch", operator, post(models::switch_model))
            .audited("switch_model"),
        change(Method::POST, "/v1/models/abort", operator, post(models::abort_update))
            .audited("abort_update"),
        change(Method::POST, "/v1/models/clients", planes, post(models::report_clients)),
        read("/v1/leader", ANY_ROLE, get(routes::leader)),
        read("/v1/whoami", ANY_ROLE, get(routes::whoami)),
        read("/v1/status", ANY_ROLE, get(routes::status)),
        read("/v1/advice", people, get(routes::advice)),
        read("/v1/events", people, get(routes::events)),
        read("/v1/audit", people, get(routes::audit)),
        read("/v1/goals", people, get(routes::goals)),
        change(Method::PUT, "/v1/goals", operator, put(routes::set_goals)).audited("goals"),
        read("/v1/members", members, get(routes::members)),
        change(Method::POST, "/v1/members", server, post(routes::register))
            .audited("register")
            .with_body(BodySize::PerExpert),
        change(Method::DELETE, "/v1/members/{id}", own_or_operator, delete(routes::leave))
            .audited("leave"),
        change(Method::PUT, "/v1/members/{id}/lease", own, put(routes::renew))
            .with_body(BodySize::PerExpert),
        change(Method::POST, "/v1/members/{id}/ready", own, post(routes::ready))
            .with_body(BodySize::PerExpert),
        change(Method::POST, "/v1/members/{id}/drain", own_or_operator, post(routes::drain))
            .audited("drain"),
        change(Method::POST, "/v1/members/{id}/resume", operator, post(routes::resume))
            .audited("resume"),
        change(Method::POST, "/v1/members/{id}/suspect", reporters, post(routes::suspect)),
        change(Method::POST, "/v1/tickets", reporters, post(tickets::issue)).audited(guard::TICKET),
        change(Method::POST, "/v1/tickets/revoke", operator, post(tickets::revoke))
            .audited("revoke_tickets"),
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
        .layer(middleware::from_fn_with_state(app.clone(), forward::forward))
        .layer(middleware::from_fn_with_state(app.clone(), guard::guard))
        .layer(middleware::from_fn_with_state(app.clone(), measure))
        .with_state(app)
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

/// Bounds the memory for uploads of digests.
const MAX_DIGEST_UPLOADS: usize = 2;
const DIGESTS_PATH: &str = "/v1/model/digests";
