//! The HTTP routes `/metrics`, `/healthz` and `/readyz`.

use std::sync::Arc;

use axum::Router;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use telemetry::openmetrics;

use crate::status::Health;

/// The routes of a server.
pub(crate) fn router(health: Arc<Health>) -> Router {
    let limited = health.metrics.requests_limited.clone();
    let routes = Router::new()
        .route("/metrics", get(metrics))
        .route("/healthz", get(healthz))
        .route("/readyz", get(readyz))
        .with_state(health);
    httpd::limit_rates(routes, MAX_REQUESTS_PER_SECOND, limited)
}

async fn metrics(State(health): State<Arc<Health>>, headers: HeaderMap) -> Response {
    let accept = headers.get(header::ACCEPT).and_then(|value| value.to_str().ok());
    let is_open = accept.is_some_and(openmetrics::is_preferred);
    let format = if is_open { openmetrics::CONTENT_TYPE } else { TEXT_FORMAT };
    match health.render_metrics(is_open) {
        Ok(text) => ([(header::CONTENT_TYPE, format)], text).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}

async fn healthz(State(health): State<Arc<Health>>) -> Response {
    answer(health.live())
}

async fn readyz(State(health): State<Arc<Health>>) -> Response {
    match (health.ready(), health.reservation()) {
        (Ok(()), Some(reason)) => format!("ok, but {reason}\n").into_response(),
        (verdict, _) => answer(verdict),
    }
}

fn answer(verdict: Result<(), String>) -> Response {
    match verdict {
        Ok(()) => "ok\n".into_response(),
        Err(reason) => (StatusCode::SERVICE_UNAVAILABLE, format!("{reason}\n")).into_response(),
    }
}

/// Of one address. Monitors ask a few times a second.
const MAX_REQUESTS_PER_SECOND: u32 = 100;
const TEXT_FORMAT: &str = "text/plain; version=0.0.4; charset=utf-8";
