//! The editions of the model, and the model that a request is about.

use std::sync::Arc;

use axum::extract::State;
use axum::{Extension, Json};
use control_api::models::is_fingerprint;
use control_api::{AddModelRequest, ApiError, ClientsReport, EditionList, SwitchRequest, code};
use serde::Deserialize;

use super::App;
use super::change::{Change, NoArguments};
use super::error::HttpError;
use super::extract::{Arguments, Body};
use super::guard::AuditNote;
use crate::boards::EditionBoard;

type Answer = Result<Json<EditionList>, HttpError>;

/// The models that the fleet serves, the current one first. There are two during an update.
#[utoipa::path(get, path = "/v1/models", tag = "models", responses(
    (status = 200, description = "The models", body = EditionList)))]
pub(super) async fn models(State(app): State<App>) -> Answer {
    Ok(Json(app.leader()?.list()))
}

/// Accepts servers of another model beside the current one. Durable before the response is sent.
#[utoipa::path(post, path = "/v1/models", tag = "models",
    request_body = AddModelRequest, responses(
    (status = 200, description = "Servers of the model may register", body = EditionList),
    (status = 400, description = "`bad_request`", body = ApiError),
    (status = 409, description = "`model_update`: no model yet, or two models already", body = ApiError),
    (status = 503, description = "`store_read_only`", body = ApiError)))]
pub(super) async fn add_model(
    State(app): State<App>,
    Body(request): Body<AddModelRequest>,
) -> Change<Json<EditionList>> {
    let list = app.leader()?.add(&request).await?;
    let note = AuditNote { target: Some(request.fingerprint), detail: None };
    Ok((Extension(note), Json(list)))
}

/// Makes the next model the current one, or plans that. Durable before the response is sent.
#[utoipa::path(post, path = "/v1/models/switch", tag = "models",
    request_body = SwitchRequest, responses(
    (status = 200, description = "Switched, or planned", body = EditionList),
    (status = 400, description = "`bad_request`", body = ApiError),
    (status = 409, description = "`model_update`: no next model, or it lacks replicas", body = ApiError),
    (status = 503, description = "`store_read_only`", body = ApiError)))]
pub(super) async fn switch_model(
    State(app): State<App>,
    Body(request): Body<SwitchRequest>,
) -> Change<Json<EditionList>> {
    let list = app.leader()?.switch(&request).await?;
    let target = list.editions.first().and_then(|edition| edition.fingerprint.clone());
    let detail = request.when_complete.then(|| "when complete".to_owned());
    Ok((Extension(AuditNote { target, detail }), Json(list)))
}

/// Ends an update before its switch: the servers of the next model are drained. Durable before the response is sent.
#[utoipa::path(post, path = "/v1/models/abort", tag = "models", responses(
    (status = 200, description = "The servers of the next model leave", body = EditionList),
    (status = 400, description = "`bad_request`: a body other than `{}`", body = ApiError),
    (status = 409, description = "`model_update`: nothing to abort", body = ApiError),
    (status = 503, description = "`store_read_only`", body = ApiError)))]
pub(super) async fn abort_update(
    State(app): State<App>,
    Body(NoArguments {}): Body<NoArguments>,
) -> Answer {
    Ok(Json(app.leader()?.abort().await?))
}

/// Notes the clients of a control plane that follows. They keep their model in service. Control planes send this about
/// once a second.
#[utoipa::path(post, path = "/v1/models/clients", tag = "models",
    request_body = ClientsReport, responses(
    (status = 200, description = "The models", body = EditionList),
    (status = 400, description = "`bad_request`", body = ApiError)))]
pub(super) async fn report_clients(
    State(app): State<App>,
    Body(report): Body<ClientsReport>,
) -> Answer {
    let are_good = report.clients.iter().all(|clients| is_fingerprint(&clients.fingerprint));
    if !(1..=256).contains(&report.reporter.len()) || report.clients.len() > MAX_MODELS || !are_good
    {
        let text = "expected a reporter of 1 to 256 bytes and at most 16 fingerprints of 8 to 128 hex digits";
        return Err(HttpError::new(code::BAD_REQUEST, text));
    }
    Ok(Json(app.leader()?.note_clients(report)))
}

/// Query of routes that concern one model.
#[derive(Debug, Deserialize)]
pub(super) struct ModelQuery {
    pub(super) fingerprint: Option<String>,
    #[serde(default)]
    pub(super) observer: bool,
}

impl ModelQuery {
    /// The board of the model.
    pub(super) fn edition(&self, app: &App) -> Result<Arc<EditionBoard>, HttpError> {
        app.boards.of(self.fingerprint.as_deref()).ok_or_else(|| {
            let found = self.fingerprint.as_deref().unwrap_or_default();
            let current = app.boards.current().fingerprint().unwrap_or_default();
            let text = format!(
                "the fleet serves no model with the fingerprint {found}; its current model is {current}: start the \
                 client again with that one"
            );
            HttpError::new(code::UNKNOWN_MODEL, text)
        })
    }
}

impl Arguments for ModelQuery {
    const FORM: &'static str = "?fingerprint=FINGERPRINT";

    fn check(&self) -> Result<(), String> {
        match &self.fingerprint {
            Some(found) if !is_fingerprint(found) => {
                let found: String = found.chars().take(80).collect();
                Err(format!("fingerprint {found:?}: expected 8 to 128 lowercase hex digits"))
            }
            _ => Ok(()),
        }
    }
}

const MAX_MODELS: usize = 16;
