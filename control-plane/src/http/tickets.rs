//! The handlers of tickets.

use axum::extract::State;
use axum::{Extension, Json};
use control_api::{ApiError, RevokeResponse, TicketRequest, TicketResponse};

use super::App;
use super::change::{Change, NoArguments};
use super::error::HttpError;
use super::extract::Body;
use super::guard::AuditNote;

/// Issues a ticket: a short-lived permission to connect to the servers of the fleet. The client shows it in each
/// handshake, with a proof by its secret key. After a change of the leader the answer waits until the servers know the
/// leader's key, which is half of a lease. A request that would wait longer than its limit gets `request_timeout`: send it
/// again.
#[utoipa::path(post, path = "/v1/tickets", tag = "tickets",
    request_body = TicketRequest, responses(
    (status = 200, description = "The ticket", body = TicketResponse),
    (status = 400, description = "`bad_request`", body = ApiError)))]
pub(super) async fn issue(
    State(app): State<App>,
    Body(request): Body<TicketRequest>,
) -> Result<Json<TicketResponse>, HttpError> {
    Ok(Json(app.leader()?.issue_ticket(&request).await?))
}

/// Revokes all tickets issued so far. Servers refuse them as soon as they have renewed their lease. Open connections
/// stay open. The revocation is durable before the response is sent, unless the store cannot be written.
#[utoipa::path(post, path = "/v1/tickets/revoke", tag = "tickets", responses(
    (status = 200, description = "Revoked", body = RevokeResponse)))]
pub(super) async fn revoke(
    State(app): State<App>,
    Body(NoArguments {}): Body<NoArguments>,
) -> Change<Json<RevokeResponse>> {
    let least_epoch = app.leader()?.revoke_tickets().await?;
    let detail = Some(format!("tickets before epoch {least_epoch}"));
    Ok((Extension(AuditNote { target: None, detail }), Json(RevokeResponse { least_epoch })))
}
