//! The stream of placement tables as server-sent events.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::Arc;

use axum::Extension;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE};
use axum::response::{IntoResponse, Response};
use control_api::{ApiError, PlacementTable, code};
use prometheus::IntGauge;
use tokio::sync::broadcast;

use super::App;
use super::error::HttpError;
use super::extract::Checked;
use super::forward::no_leader;
use super::models::ModelQuery;
use super::watch_permits::WatchPermit;
use crate::access::Caller;
use crate::board::{Board, EncodedTable};
use crate::boards::CountedClient;
use httpd::stopped;

/// Stream of placement tables. The table in force comes at once, then every new one. Each is an event
/// `placement` whose id is the epoch. A watcher that falls far behind skips to the newest table; one of a large table
/// skips as soon as two wait for it. Comments keep the connection alive.
///
/// A stream stays with one model: that of `fingerprint`, or the one that is current when it begins. It counts as a client
/// of that model, unless it is an observer.
#[utoipa::path(get, path = "/v1/placement/watch", tag = "placement",
    params(("fingerprint" = Option<String>, Query, description = "Model. Default: the current one"),
        ("observer" = Option<bool>, Query, description = "True for a watch that makes no calls")), responses(
    (status = 200, description = "Server-sent events; data is the table",
        content_type = "text/event-stream", body = PlacementTable),
    (status = 400, description = "`bad_request`: not a fingerprint", body = ApiError),
    (status = 404, description = "`unknown_model`", body = ApiError),
    (status = 503, description = "`too_many_watchers`, `shutting_down`, `no_leader`", body = ApiError)))]
pub(super) async fn placement_watch(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    Checked(query): Checked<ModelQuery>,
) -> Result<Response, HttpError> {
    if *app.shutdown.borrow() {
        return Err(HttpError::new(code::SHUTTING_DOWN, "the control plane is shutting down"));
    }
    let edition = query.edition(&app)?;
    let freshness = edition.board.freshness();
    if !*freshness.borrow() {
        return Err(no_leader("the placement is not confirmed"));
    }
    let permit = app.watch_permits.take(&caller);
    let permit = permit.map_err(|text| HttpError::new(code::TOO_MANY_WATCHERS, text))?;
    let (latest, changes) = edition.board.subscribe();
    let watcher = Watcher {
        pending: latest.iter().map(|latest| latest.event.clone()).collect(),
        changes,
        freshness,
        caller,
        _open: OpenWatch::new(app.metrics.watchers.clone(), permit),
        _client: (!query.observer).then(|| edition.count_client()),
        board: Arc::clone(&edition.board),
        app,
    };
    let stream = futures_util::stream::unfold(watcher, |mut watcher| async {
        let bytes = watcher.next().await?;
        Some((Ok::<Bytes, Infallible>(bytes), watcher))
    });
    let headers = [(CONTENT_TYPE, "text/event-stream"), (CACHE_CONTROL, "no-store")];
    Ok((headers, Body::from_stream(stream)).into_response())
}

struct Watcher {
    app: App,
    board: Arc<Board>,
    pending: VecDeque<Bytes>,
    changes: broadcast::Receiver<Arc<EncodedTable>>,
    /// Turns false when no leader confirms the table.
    freshness: tokio::sync::watch::Receiver<bool>,
    caller: Caller,
    _open: OpenWatch,
    /// `None` for an observer.
    _client: Option<CountedClient>,
}

impl Watcher {
    /// The next piece of the stream; `None` at shutdown, when no leader confirms the table, and when the caller's token
    /// has expired or was removed.
    async fn next(&mut self) -> Option<Bytes> {
        if !self.app.access.is_valid(&self.caller) {
            return None;
        }
        if let Some(bytes) = self.pending.pop_front() {
            return Some(bytes);
        }
        let keep_alive = self.app.limits.watch_keep_alive;
        let next = tokio::select! {
            () = stopped(&mut self.app.shutdown) => None,
            _ = self.freshness.wait_for(|&is_fresh| !is_fresh) => None,
            change = tokio::time::timeout(keep_alive, self.changes.recv()) => match change {
                Err(_) => Some(Bytes::from_static(b": keep-alive\n\n")),
                Ok(change) => self.board.event_after(change, &mut self.changes),
            },
        };
        // The wait may have been longer than the token's life.
        next.filter(|_| self.app.access.is_valid(&self.caller))
    }
}

/// Counts a watch for as long as it is open.
struct OpenWatch {
    gauge: IntGauge,
    _permit: WatchPermit,
}

impl OpenWatch {
    fn new(gauge: IntGauge, permit: WatchPermit) -> Self {
        gauge.inc();
        Self { gauge, _permit: permit }
    }
}

impl Drop for OpenWatch {
    fn drop(&mut self) {
        self.gauge.dec();
    }
}
