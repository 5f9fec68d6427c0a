//! The digests of the model's tensors: kept in memory, for members that serve other weights. After a restart members
//! are asked for them with their next renewals.

use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use control_api::{ApiError, ModelDigests, code};

use super::App;
use super::error::HttpError;
use super::extract::Checked;
use super::models::ModelQuery;

/// The digests of the model's tensors.
#[utoipa::path(get, path = "/v1/model/digests", tag = "placement",
    params(("fingerprint" = Option<String>, Query, description = "Model. Default: the current one")), responses(
    (status = 200, description = "The digests", body = ModelDigests),
    (status = 400, description = "`bad_request`: not a fingerprint", body = ApiError),
    (status = 404, description = "`not_found`: no member has sent them", body = ApiError)))]
pub(super) async fn model_digests(
    State(app): State<App>,
    Checked(query): Checked<ModelQuery>,
) -> Result<Response, HttpError> {
    let missing = "no member has sent digests of the model's tensors";
    let json = app.leader()?.model_digests(query.fingerprint.as_deref());
    let json = json.ok_or_else(|| HttpError::new(code::NOT_FOUND, missing))?;
    Ok(([(CONTENT_TYPE, "application/json")], json).into_response())
}

/// Stores the digests of the model's tensors. The first ones that fit the fleet's model stay, until a member sends
/// digests of all bytes, too. Other digests of all bytes than those stored are refused. After a restart of the control
/// plane, responses to renewals ask for the digests.
#[utoipa::path(put, path = "/v1/model/digests", tag = "placement",
    request_body = ModelDigests, responses(
    (status = 204, description = "Stored, or stored before"),
    (status = 400, description = "`bad_request`", body = ApiError),
    (status = 409, description = "`model_mismatch`", body = ApiError),
    (status = 413, description = "`body_too_large`", body = ApiError)))]
pub(super) async fn store_model_digests(
    State(app): State<App>,
    request: Request,
) -> Result<StatusCode, HttpError> {
    let permit = app.digest_permits.acquire().await;
    let _permit = permit.map_err(|err| HttpError::new(code::INTERNAL, err.to_string()))?;
    let limit = app.limits.max_digests_bytes;
    let body = axum::body::to_bytes(request.into_body(), limit).await;
    let body = body.map_err(|_| HttpError::body_too_large(limit))?;
    let bad = |text: String| HttpError::new(code::BAD_REQUEST, text);
    let digests: ModelDigests =
        serde_json::from_slice(&body).map_err(|err| bad(format!("malformed digests: {err}")))?;
    let is_hex = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
    for tensor in digests.tensors.iter().chain(&digests.full) {
        if tensor.digest.len() != 32 || !tensor.digest.bytes().all(is_hex) {
            let found: String = tensor.digest.chars().take(80).collect();
            return Err(bad(format!("digest {found:?}, expected 32 lowercase hex digits")));
        }
    }
    for tensors in [&digests.tensors, &digests.full] {
        if !tensors.is_sorted_by(|a, b| a.name < b.name) {
            return Err(bad("names of tensors must be strictly ascending".to_owned()));
        }
    }
    app.leader()?.store_model_digests(digests, body)?;
    Ok(StatusCode::NO_CONTENT)
}
