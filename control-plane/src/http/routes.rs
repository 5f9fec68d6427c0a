//! The handlers.

use axum::extract::State;
use axum::http::header::{ACCEPT, CONTENT_TYPE};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use control_api::text::is_disruptive;
use control_api::{
    ApiError, AuditList, ClusterStatus, DrainRequest, EventList, FleetGoals, LeaderInfo,
    LeaseRequest, LeaseResponse, MemberId, MemberInfo, MemberList, PlacementTable, ReadyRequest,
    RegisterRequest, RegisterResponse, ScalingAdvice, SuspectRequest, SuspectResponse, WhoAmI,
    code,
};
use serde::Deserialize;
use utoipa::ToSchema;

use super::App;
use super::change::{Change, NoArguments};
use super::error::HttpError;
use super::extract::{Arguments, Body, Checked, Target};
use super::forward::no_leader;
use super::guard::AuditNote;
use super::models::ModelQuery;
use crate::access::Caller;
use crate::role::{Following, Role};

type Answer<T> = Result<Json<T>, HttpError>;

/// Returns 200 while the process runs.
#[utoipa::path(get, path = "/healthz", tag = "probes", security(()),
    responses((status = 200, description = "Alive", body = String)))]
pub(super) async fn healthz() -> &'static str {
    "ok\n"
}

/// Returns 200 while the control plane accepts requests: it leads, or it knows the leader. Returns 503 without a
/// leader, and once a shutdown has begun. The text says so if the store cannot be written.
#[utoipa::path(get, path = "/readyz", tag = "probes", security(()), responses(
    (status = 200, description = "Ready", body = String),
    (status = 503, description = "`shutting_down`, `no_leader`", body = ApiError)))]
pub(super) async fn readyz(State(app): State<App>) -> Result<String, HttpError> {
    if *app.shutdown.borrow() {
        return Err(HttpError::new(code::SHUTTING_DOWN, "the control plane is shutting down"));
    }
    match app.roles.current() {
        Role::Leader { editions, .. } => {
            let status = editions.status();
            let store = editions.write_error();
            let problems = [
                store.map(|reason| format!("the store cannot be written: {reason}")),
                app.exposure
                    .tls_error()
                    .map(|reason| format!("the TLS files cannot be used: {reason}")),
                status.lost_experts(),
                status.plan_problem(),
            ];
            let problems: Vec<String> = problems.into_iter().flatten().collect();
            Ok(match problems.is_empty() {
                true => "ok\n".to_owned(),
                false => format!("ok, but {}\n", problems.join("; ")),
            })
        }
        // The table of a follower turns stale if the leader does not answer.
        Role::Follower(Following { leader_url: Some(url), .. })
            if *app.boards.current().board.freshness().borrow() =>
        {
            Ok(format!("ok, {url} leads\n"))
        }
        Role::Follower(Following { problem, .. }) => {
            Err(no_leader(problem.as_deref().unwrap_or("an election is under way")))
        }
    }
}

/// Metrics in Prometheus' text format, or as OpenMetrics if the scraper prefers that.
#[utoipa::path(get, path = "/metrics", tag = "probes", security(()),
    responses((status = 200, description = "Metrics", body = String)))]
pub(super) async fn metrics(State(app): State<App>, headers: HeaderMap) -> Response {
    let accept = headers.get(ACCEPT).and_then(|value| value.to_str().ok());
    match app.metrics.render_as(accept) {
        Ok((format, text)) => ([(CONTENT_TYPE, format)], text).into_response(),
        Err(err) => HttpError::new(code::INTERNAL, err.to_string()).into_response(),
    }
}

/// The placement table in force.
#[utoipa::path(get, path = "/v1/placement", tag = "placement",
    params(("fingerprint" = Option<String>, Query, description = "Model. Default: the current one")), responses(
    (status = 200, description = "The table", body = PlacementTable),
    (status = 400, description = "`bad_request`: not a fingerprint", body = ApiError),
    (status = 404, description = "`unknown_model`", body = ApiError),
    (status = 503, description = "`no_leader`: no table is known yet", body = ApiError)))]
pub(super) async fn placement(
    State(app): State<App>,
    Checked(query): Checked<ModelQuery>,
) -> Result<Response, HttpError> {
    let edition = query.edition(&app)?;
    let latest = edition.board.latest().ok_or_else(|| no_leader("no placement is known"))?;
    Ok(([(CONTENT_TYPE, "application/json")], latest.json.clone()).into_response())
}

/// The control plane that leads, as the one that answers knows it.
#[utoipa::path(get, path = "/v1/leader", tag = "placement", responses(
    (status = 200, description = "The leader", body = LeaderInfo)))]
pub(super) async fn leader(State(app): State<App>) -> Json<LeaderInfo> {
    let own_url = app.roles.group().own_url;
    Json(match app.roles.current() {
        Role::Leader { term, .. } => LeaderInfo { leads: true, url: own_url, term },
        Role::Follower(Following { leader_url, term, .. }) => {
            LeaderInfo { leads: false, url: leader_url, term }
        }
    })
}

/// The identity that the control plane sees in this request.
#[utoipa::path(get, path = "/v1/whoami", tag = "access", responses(
    (status = 200, description = "The identity", body = WhoAmI)))]
pub(super) async fn whoami(Extension(caller): Extension<Caller>) -> Json<WhoAmI> {
    Json(caller.whoami())
}

/// The last changes of the fleet and their callers, in memory: at most 1,000 since this control plane leads, and as many
/// entries about tickets. A reader asks again with the number of the last one.
#[utoipa::path(get, path = "/v1/audit", tag = "access",
    params(("after" = Option<u64>, Query, description = "Only entries after this number")), responses(
    (status = 200, description = "The changes, oldest first", body = AuditList),
    (status = 400, description = "`bad_request`", body = ApiError)))]
pub(super) async fn audit(
    State(app): State<App>,
    Checked(query): Checked<AfterQuery>,
) -> Answer<AuditList> {
    Ok(Json(app.audit.after(query.after)))
}

/// Overview of the cluster.
#[utoipa::path(get, path = "/v1/status", tag = "placement", responses(
    (status = 200, description = "The overview", body = ClusterStatus)))]
pub(super) async fn status(State(app): State<App>) -> Answer<ClusterStatus> {
    let mut status = app.leader()?.status();
    let group = app.roles.group();
    status.leader = group.own_url;
    status.followers = group.others;
    (status.tls_error, status.insecure) = (app.exposure.tls_error(), app.exposure.insecure());
    let tokens = app.access.tokens.as_ref().and_then(|tokens| tokens.error());
    status.problems.extend(tokens.map(|reason| format!("{reason}; older tokens stay in force")));
    let audit = app.audit.error();
    status.problems.extend(audit.map(|reason| format!("the audit log lacks entries: {reason}")));
    status.assess();
    Ok(Json(status))
}

/// The number of servers that suits the load, for an autoscaler.
#[utoipa::path(get, path = "/v1/advice", tag = "placement", responses(
    (status = 200, description = "The advice", body = ScalingAdvice)))]
pub(super) async fn advice(State(app): State<App>) -> Answer<ScalingAdvice> {
    Ok(Json(app.leader()?.advice()))
}

/// The last events of the fleet, in memory: at most 1,000. A reader asks again with the number of the last one.
#[utoipa::path(get, path = "/v1/events", tag = "placement",
    params(("after" = Option<u64>, Query, description = "Only events after this number")), responses(
    (status = 200, description = "The events, oldest first", body = EventList),
    (status = 400, description = "`bad_request`", body = ApiError)))]
pub(super) async fn events(
    State(app): State<App>,
    Checked(query): Checked<AfterQuery>,
) -> Answer<EventList> {
    Ok(Json(app.leader()?.events_after(query.after)))
}

/// Query of [`events`] and [`audit`].
#[derive(Debug, Deserialize)]
pub(super) struct AfterQuery {
    #[serde(default)]
    after: u64,
}

impl Arguments for AfterQuery {
    const FORM: &'static str = "?after=NUMBER";
}

/// Goals of a placement that follows the load.
#[utoipa::path(get, path = "/v1/goals", tag = "placement", responses(
    (status = 200, description = "The goals", body = FleetGoals),
    (status = 409, description = "`fixed_placement`", body = ApiError)))]
pub(super) async fn goals(State(app): State<App>) -> Answer<FleetGoals> {
    Ok(Json(app.leader()?.goals()?))
}

/// Changes the goals. The next plan meets them.
#[utoipa::path(put, path = "/v1/goals", tag = "placement",
    request_body = GoalsRequest, responses(
    (status = 200, description = "The new goals", body = FleetGoals),
    (status = 400, description = "`bad_request`", body = ApiError),
    (status = 409, description = "`fixed_placement`", body = ApiError),
    (status = 503, description = "`store_read_only`: the change is not in force", body = ApiError)))]
pub(super) async fn set_goals(
    State(app): State<App>,
    Body(GoalsRequest { replicas, spare }): Body<GoalsRequest>,
) -> Change<Json<FleetGoals>> {
    let goals = app.leader()?.set_goals(FleetGoals { replicas, spare }).await?;
    let detail = format!("replicas {}, spare {}", goals.replicas, goals.spare);
    Ok((Extension(AuditNote { target: None, detail: Some(detail) }), Json(goals)))
}

/// [`FleetGoals`] as a request: both fields, and no others.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct GoalsRequest {
    /// Fewest replicas per expert, 1 to 64, as far as there are servers.
    replicas: u32,
    /// Replicas of hot experts beyond the minimum, as a share of all replicas of a layer, 0 to 16.
    spare: f64,
}

/// All members by name.
#[utoipa::path(get, path = "/v1/members", tag = "members", responses(
    (status = 200, description = "The members", body = MemberList)))]
pub(super) async fn members(State(app): State<App>) -> Answer<MemberList> {
    Ok(Json(MemberList { members: app.leader()?.members() }))
}

/// Registers a member. The same name and incarnation return the same member; another incarnation takes
/// over the name. The registration is durable before the response is sent.
#[utoipa::path(post, path = "/v1/members", tag = "members",
    request_body = RegisterRequest, responses(
    (status = 200, description = "Registered; the lease starts now", body = RegisterResponse),
    (status = 400, description = "`bad_request`", body = ApiError),
    (status = 409, description = "`model_mismatch`, `capacity_too_small`, `superseded`, \
        `name_in_use`",
        body = ApiError),
    (status = 503, description = "`store_read_only`, `too_many_members`, `shutting_down`",
        body = ApiError)))]
pub(super) async fn register(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    Body(request): Body<RegisterRequest>,
) -> Change<Json<RegisterResponse>> {
    let (name, incarnation) = (request.name.clone(), request.incarnation);
    let response = app.leader()?.register(request, caller.member_tag().as_deref()).await?;
    let detail = format!("member {}, incarnation {incarnation}", response.member_id);
    Ok((Extension(AuditNote { target: Some(name), detail: Some(detail) }), Json(response)))
}

/// Removes a member for good.
#[utoipa::path(delete, path = "/v1/members/{id}", tag = "members",
    params(("id" = MemberId, Path, description = "Member")), responses(
    (status = 204, description = "Removed"),
    (status = 400, description = "`bad_request`: a body other than `{}`", body = ApiError),
    (status = 404, description = "`unknown_member`", body = ApiError),
    (status = 409, description = "`superseded`", body = ApiError)))]
pub(super) async fn leave(
    State(app): State<App>,
    Target(member): Target,
    Body(NoArguments {}): Body<NoArguments>,
) -> Result<StatusCode, HttpError> {
    app.leader()?.leave(&member)?;
    Ok(StatusCode::NO_CONTENT)
}

/// Renews a lease.
#[utoipa::path(put, path = "/v1/members/{id}/lease", tag = "members",
    params(("id" = MemberId, Path, description = "Member")),
    request_body = LeaseRequest, responses(
    (status = 200, description = "Renewed; the lease starts again now", body = LeaseResponse),
    (status = 400, description = "`bad_request`", body = ApiError),
    (status = 404, description = "`unknown_member`: register again", body = ApiError),
    (status = 409, description = "`lease_expired`: register again; `superseded`: stop",
        body = ApiError)))]
pub(super) async fn renew(
    State(app): State<App>,
    Target(member): Target,
    Body(request): Body<LeaseRequest>,
) -> Answer<LeaseResponse> {
    Ok(Json(app.leader()?.renew(&member, request)?))
}

/// Reports the loaded experts and adds the member to the placement.
#[utoipa::path(post, path = "/v1/members/{id}/ready", tag = "members",
    params(("id" = MemberId, Path, description = "Member")),
    request_body = ReadyRequest, responses(
    (status = 200, description = "Noted", body = MemberInfo),
    (status = 400, description = "`bad_request`", body = ApiError),
    (status = 404, description = "`unknown_member`", body = ApiError),
    (status = 409, description = "`lease_expired`, `superseded`", body = ApiError)))]
pub(super) async fn ready(
    State(app): State<App>,
    Target(member): Target,
    Body(request): Body<ReadyRequest>,
) -> Answer<MemberInfo> {
    Ok(Json(app.leader()?.ready(&member, request)?))
}

/// Removes a member from the placement. Its lease continues.
#[utoipa::path(post, path = "/v1/members/{id}/drain", tag = "members",
    params(("id" = MemberId, Path, description = "Member")),
    request_body = Option<DrainRequest>, responses(
    (status = 200, description = "Removed from the placement", body = MemberInfo),
    (status = 400, description = "`bad_request`", body = ApiError),
    (status = 404, description = "`unknown_member`", body = ApiError),
    (status = 409, description = "`lease_expired`, `superseded`", body = ApiError)))]
pub(super) async fn drain(
    State(app): State<App>,
    Target(member): Target,
    Body(request): Body<DrainRequest>,
) -> Change<Json<MemberInfo>> {
    let info = app.leader()?.drain(&member, request.incarnation).await?;
    Ok((about(&info), Json(info)))
}

/// Takes a drain back: the member returns to the placement.
#[utoipa::path(post, path = "/v1/members/{id}/resume", tag = "members",
    params(("id" = MemberId, Path, description = "Member")), responses(
    (status = 200, description = "In the placement again, if it was draining", body = MemberInfo),
    (status = 400, description = "`bad_request`: a body other than `{}`", body = ApiError),
    (status = 404, description = "`unknown_member`", body = ApiError),
    (status = 409, description = "`lease_expired`, `superseded`", body = ApiError),
    (status = 503, description = "`store_read_only`: the change is not in force", body = ApiError)))]
pub(super) async fn resume(
    State(app): State<App>,
    Target(member): Target,
    Body(NoArguments {}): Body<NoArguments>,
) -> Change<Json<MemberInfo>> {
    let info = app.leader()?.resume(&member).await?;
    Ok((about(&info), Json(info)))
}

/// Reports that a member seems to have failed. It expires unless it renews within one heartbeat interval
/// plus the grace period, once two observers agree. All reports of one identity from one address are those of one observer.
#[utoipa::path(post, path = "/v1/members/{id}/suspect", tag = "members",
    params(("id" = MemberId, Path, description = "Member")),
    request_body = SuspectRequest, responses(
    (status = 200, description = "Noted", body = SuspectResponse),
    (status = 400, description = "`bad_request`", body = ApiError),
    (status = 404, description = "`unknown_member`", body = ApiError),
    (status = 409, description = "`superseded`", body = ApiError)))]
pub(super) async fn suspect(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    Target(member): Target,
    Body(request): Body<SuspectRequest>,
) -> Answer<SuspectResponse> {
    let is_bad = |text: &str, most| text.chars().count() > most || text.contains(is_disruptive);
    if is_bad(&request.reporter, 128) || is_bad(&request.reason, 512) {
        let text = "reporter may have at most 128 characters, reason at most 512, and neither may have control characters";
        return Err(HttpError::new(code::BAD_REQUEST, text));
    }
    let left = app.leader()?.suspect(&member, request, &caller.observer())?;
    Ok(Json(SuspectResponse { must_renew_within_ms: left.as_millis() as u64 }))
}

/// The note about a change of a member.
fn about(info: &MemberInfo) -> Extension<AuditNote> {
    let detail = format!("member {}, {}", info.member_id, info.state);
    Extension(AuditNote { target: Some(info.name.clone()), detail: Some(detail) })
}
