//! The handlers of tickets.

use std::time::Duration;

use axum::extract::State;
use axum::http::HeaderMap;
use axum::{Extension, Json};
use control_api::{
    ApiError, AuditTickets, RevokeResponse, TicketRequest, TicketResponse, TicketRole, code,
};
use trust::Role;

use super::change::{Change, NoArguments};
use super::error::HttpError;
use super::extract::Body;
use super::guard::AuditNote;
use super::{App, forward};
use crate::access::{Caller, Rule};

/// Issues a ticket: a short-lived permission to connect to the servers of the fleet. The client shows it in each
/// handshake, with a proof by its secret key. After a change of the leader the answer waits until the servers know the
/// leader's key. A request that would wait for more than two seconds gets `request_timeout`: send it again.
#[utoipa::path(post, path = "/v1/tickets", tag = "tickets",
    request_body = TicketRequest, responses(
    (status = 200, description = "The ticket", body = TicketResponse),
    (status = 400, description = "`bad_request`", body = ApiError)))]
pub(super) async fn issue(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    headers: HeaderMap,
    Body(request): Body<TicketRequest>,
) -> Change<(Extension<AuditTickets>, Json<TicketResponse>)> {
    if request.role == TicketRole::Server {
        Rule::Roles(&[Role::Server])
            .check(&caller, "a ticket to read weights", None)
            .map_err(|refusal| HttpError::new(code::FORBIDDEN, refusal.to_string()))?;
    }
    let bound = match headers.contains_key(forward::FORWARDED) {
        true => forward::MAX_FORWARDED_WAIT,
        false => MAX_WAIT,
    };
    let response = app.leader()?.issue_ticket(&request, &caller.holder(), bound).await?;
    let (epoch, role) = (response.epoch, request.role);
    let seconds = response.expires_in_ms / 1000;
    let note = AuditNote {
        target: Some("all servers".to_owned()),
        detail: Some(format!(
            "role {}, epoch {epoch}, {seconds} s, for the client that calls itself {}",
            role.name(),
            request.client
        )),
    };
    let (first_epoch, last_epoch) = (Some(epoch), Some(epoch));
    let issued = AuditTickets { count: 1, role: Some(role), first_epoch, last_epoch };
    Ok((Extension(note), (Extension(issued), Json(response))))
}

/// Revokes all tickets issued so far. Servers refuse them as soon as they have renewed their lease. Open connections
/// stay open. The revocation is durable before the response is sent. With `store_read_only` it is in force, and a restart
/// of the control plane would lose it: send it again once the store can be written.
#[utoipa::path(post, path = "/v1/tickets/revoke", tag = "tickets", responses(
    (status = 200, description = "Revoked", body = RevokeResponse),
    (status = 400, description = "`bad_request`: a body other than `{}`", body = ApiError),
    (status = 503, description = "`store_read_only`, `shutting_down`", body = ApiError)))]
pub(super) async fn revoke(
    State(app): State<App>,
    Body(NoArguments {}): Body<NoArguments>,
) -> Change<Json<RevokeResponse>> {
    let least_epoch = app.leader()?.revoke_tickets().await?;
    let detail = Some(format!("tickets before epoch {least_epoch}"));
    Ok((
        Extension(AuditNote { detail, ..AuditNote::default() }),
        Json(RevokeResponse { least_epoch }),
    ))
}

/// Longest wait until the servers know the leader's key: less than the timeout of clients.
const MAX_WAIT: Duration = Duration::from_secs(2);
