//! The checks of a request before its route sees it: identity, rate, role, size and time. Changes go to the audit log.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{MatchedPath, Request, State};
use axum::http::header::AUTHORIZATION;
use axum::http::{HeaderValue, Method};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use control_api::{AuditEntry, AuditTickets, MemberId, code};
use httpd::{PeerAddr, Standing};
use trust::{Identity, Role};

use super::bodies::{BodyShare, BodySize};
use super::cross_site::{self, Foreign};
use super::error::{Failure, HttpError};
use super::extract::member_id;
use super::forward::{self, Sender};
use super::request_id::{REQUEST_ID, RequestId};
use super::{App, Route, page};
use crate::access::audit::Kind;
use crate::access::metrics::RefusalReason;
use crate::access::rates::Bucket;
use crate::access::{Caller, Proof, Rule, Unauthorized, visible};

/// The rules of all routes, by method and path.
#[derive(Debug, Default)]
pub(super) struct Rules(HashMap<(Method, &'static str), Entry>);

#[derive(Clone, Debug)]
struct Entry {
    rule: Rule,
    /// Name of the change in the audit log.
    action: Option<&'static str>,
    body: BodySize,
    /// Name of the request in messages.
    what: String,
}

impl Rules {
    pub(super) fn new(routes: &[Route]) -> Self {
        let entry = |route: &Route| Entry {
            rule: route.rule,
            action: route.action,
            body: route.body,
            what: format!("{} {}", route.method, route.path),
        };
        Self(
            routes.iter().map(|route| ((route.method.clone(), route.path), entry(route))).collect(),
        )
    }

    /// The entry of a request. Unknown paths and methods need an identity, too: strangers cannot search for routes.
    fn find(&self, method: &Method, path: Option<&str>) -> Entry {
        // A route for GET answers HEAD, too.
        let method = if method == Method::HEAD { &Method::GET } else { method };
        let unknown = || Entry {
            rule: ANY_ROLE,
            action: None,
            body: BodySize::default(),
            what: format!("this {method}"),
        };
        match path {
            Some(path) if page::is_page(path) => Entry { rule: Rule::Open, ..unknown() },
            Some(path) => self.0.get(&(method.clone(), path)).cloned().unwrap_or_else(unknown),
            None => unknown(),
        }
    }
}

/// A handler's note for the audit log, as an extension of its response. [`AuditTickets`] is another one.
#[derive(Clone, Debug, Default)]
pub(super) struct AuditNote {
    /// Name of the member that was changed.
    pub(super) target: Option<String>,
    /// The change in words.
    pub(super) detail: Option<String>,
}

pub(super) async fn guard(State(app): State<App>, mut request: Request, next: Next) -> Response {
    let path = request.extensions().get::<MatchedPath>().map(|path| path.as_str().to_owned());
    let entry = app.rules.find(request.method(), path.as_deref());
    let id = RequestId::of(request.headers());
    let mut response = match identify(&app, &entry, path.as_deref(), &request) {
        Err(refusal) => refusal.into_response(),
        Ok((caller, refused)) => {
            recognise(&entry, &caller, &request);
            let member = member_of(path.as_deref(), request.uri().path());
            let response = match admit(&app, &entry, &caller, member.as_ref())
                .and_then(|()| refused.map_or(Ok(()), Err))
                .and_then(|()| check_site(&app, &entry, &caller, &request))
            {
                Err(refusal) if entry.action.is_some() => {
                    request.extensions_mut().insert(caller.clone());
                    request.extensions_mut().insert(id.clone());
                    forward::refuse(&app, request, refusal).await
                }
                Err(refusal) => refusal.into_response(),
                Ok(()) => {
                    request.extensions_mut().insert(caller.clone());
                    request.extensions_mut().insert(id.clone());
                    let max_body_bytes = entry.body.max_bytes(&app.limits);
                    let body = BodyShare::new(&app.body_memory, caller.holder(), max_body_bytes);
                    bounded(&app, &body, request, next).await
                }
            };
            if let Some(action) = entry.action {
                record(&app, action, &caller, member, &id, &response);
            }
            response
        }
    };
    response.headers_mut().insert(REQUEST_ID, id.0);
    response
}

/// Finds the caller, and the reason for which a follower has refused the request. Requests without an identity count
/// against their address.
fn identify(
    app: &App,
    entry: &Entry,
    path: Option<&str>,
    request: &Request,
) -> Result<(Caller, Option<HttpError>), HttpError> {
    let peer = request.extensions().get::<PeerAddr>().map(|peer| peer.0.ip());
    if entry.rule == Rule::Open {
        let bucket = match path {
            Some("/healthz" | "/readyz" | "/metrics") => Bucket::probes(peer),
            _ => Bucket::address(peer),
        };
        take(app, bucket, RefusalReason::AddressRate)?;
        return Ok((Caller::anonymous(peer), None));
    }
    let authorization = request.headers().get(AUTHORIZATION).map(HeaderValue::as_bytes);
    let unauthorized =
        |refusal: Unauthorized| HttpError::new(code::UNAUTHORIZED, refusal.to_string());
    let found = match forward::sender(&app.access, request.headers()) {
        // The connection's certificate is the follower's.
        Sender::Follower(vouched) => {
            let (identity, address) = (vouched.identity(), vouched.address.or(peer));
            let found = app.access.identify(identity.as_ref(), authorization, address);
            let refused = vouched.refusal.map(|text| HttpError::new(code::FORBIDDEN, text));
            found.map(|caller| (caller, refused)).map_err(unauthorized)
        }
        Sender::UnknownFollower => Err(forward::unknown_follower(peer)),
        Sender::Caller => {
            let certificate = request.extensions().get::<Identity>();
            let found = app.access.identify(certificate, authorization, peer);
            found.map(|caller| (caller, None)).map_err(unauthorized)
        }
    };
    found.map_err(|refusal| match take(app, Bucket::address(peer), RefusalReason::AddressRate) {
        Err(limited) => limited,
        Ok(()) => {
            app.access_metrics.count_refusal(RefusalReason::Unauthorized);
            refusal
        }
    })
}

/// Keeps the connection of a caller who may use the interface apart from those of strangers.
fn recognise(entry: &Entry, caller: &Caller, request: &Request) {
    if entry.rule != Rule::Open
        && let Some(standing) = request.extensions().get::<Standing>()
    {
        standing.recognise(caller.own_name());
    }
}

/// Checks the rate and the role of a caller.
fn admit(
    app: &App,
    entry: &Entry,
    caller: &Caller,
    member: Option<&Result<MemberId, HttpError>>,
) -> Result<(), HttpError> {
    if entry.rule == Rule::Open {
        return Ok(());
    }
    let member = member.map(Result::as_ref).transpose();
    let (bucket, reason) = match member {
        // Other callers cannot use up the rate of a member.
        Ok(Some(member))
            if caller.acts_for(member)
                && app.leader().is_ok_and(|leader| leader.has_member(member)) =>
        {
            (Bucket::Member(member.clone()), RefusalReason::MemberRate)
        }
        _ => caller_bucket(caller),
    };
    take(app, bucket, reason)?;
    // A malformed identity belongs to no member.
    let member = member.map_err(Clone::clone)?;
    entry.rule.check(caller, &entry.what, member).map_err(|refusal| {
        app.access_metrics.count_refusal(RefusalReason::Forbidden);
        HttpError::new(code::FORBIDDEN, refusal.to_string())
    })
}

/// Refuses requests that a page of another site makes a browser send with the rights of its user.
fn check_site(
    app: &App,
    entry: &Entry,
    caller: &Caller,
    request: &Request,
) -> Result<(), HttpError> {
    if entry.rule == Rule::Open {
        return Ok(());
    }
    let refuse = |reason: Foreign| {
        app.access_metrics.count_refusal(RefusalReason::Forbidden);
        Err(HttpError::new(code::FORBIDDEN, format!("{}: {reason}", entry.what)))
    };
    // Such a name can stand for this address after the browser has loaded a page from another one (DNS rebinding). With
    // an identity, that page has neither token nor certificate.
    if caller.proof == Proof::None
        && app.exposure.local_addr.ip().is_loopback()
        && let Err(reason) = cross_site::check_local_host(request.headers(), &app.exposure)
    {
        return refuse(reason);
    }
    match request.method().is_safe() {
        true => Ok(()),
        false => cross_site::check_origin(request.headers()).or_else(refuse),
    }
}

fn caller_bucket(caller: &Caller) -> (Bucket, RefusalReason) {
    match caller.is_identified() {
        true => (Bucket::identity(&caller.name, caller.address), RefusalReason::IdentityRate),
        false => (Bucket::address(caller.address), RefusalReason::AddressRate),
    }
}

fn take(app: &App, bucket: Bucket, reason: RefusalReason) -> Result<(), HttpError> {
    app.rates.take(bucket).map_err(|wait| {
        app.access_metrics.count_refusal(reason);
        HttpError::too_many_requests(wait)
    })
}

/// The member in the path of a route for one member. Identities need no escapes in a URL, so one with escapes is wrong.
fn member_of(route: Option<&str>, path: &str) -> Option<Result<MemberId, HttpError>> {
    let rest = route?.strip_prefix(MEMBER_PREFIX).and(path.strip_prefix(MEMBERS))?;
    let text = rest.split('/').next().unwrap_or_default();
    Some(member_id(text))
}

/// Runs the route, with limits on the body and on the time for body and answer.
async fn bounded(app: &App, body: &Arc<BodyShare>, mut request: Request, next: Next) -> Response {
    if let Err(refusal) = body.check_announced(request.headers()) {
        return refusal.into_response();
    }
    request.extensions_mut().insert(Arc::clone(body));
    let limit = app.limits.request_timeout;
    match tokio::time::timeout(limit, next.run(request)).await {
        Ok(response) => response,
        Err(_) => {
            let text = format!("the request was not complete within {limit:?}");
            HttpError::new(code::REQUEST_TIMEOUT, text).into_response()
        }
    }
}

/// Adds a change to the audit log, unless the leader does.
fn record(
    app: &App,
    action: &str,
    caller: &Caller,
    member: Option<Result<MemberId, HttpError>>,
    id: &RequestId,
    response: &Response,
) {
    let extensions = response.extensions();
    let failure = extensions.get::<Failure>();
    let is_ticket = action == TICKET;
    let has_no_entry = |failure: &Failure| match failure.code {
        code::RATE_LIMITED => true,
        // Each client of a fleet repeats its request until a leader has an answer.
        code::REQUEST_TIMEOUT | code::NO_LEADER | code::SHUTTING_DOWN => is_ticket,
        _ => false,
    };
    if failure.is_some_and(has_no_entry) || extensions.get::<forward::Forwarded>().is_some() {
        return;
    }
    let note = extensions.get::<AuditNote>().cloned().unwrap_or_default();
    let member = member.and_then(Result::ok).map(String::from);
    let detail = failure.map(|failure| failure.message.clone()).or(note.detail);
    let refused = AuditTickets { count: 1, ..AuditTickets::default() };
    let tickets = extensions.get::<AuditTickets>().copied().unwrap_or(refused);
    let entry = AuditEntry {
        name: caller.name.clone(),
        roles: caller.role_names(),
        credential: caller.proof.name().to_owned(),
        address: caller.address.as_ref().map(IpAddr::to_string),
        action: action.to_owned(),
        target: note.target.or(member).map(|target| visible(&target, MAX_TARGET_CHARS)),
        outcome: failure.map_or("ok", |failure| failure.code).to_owned(),
        detail: detail.map(|detail| visible(&detail, MAX_DETAIL_CHARS)),
        request_id: id.0.to_str().ok().map(str::to_owned),
        tickets: is_ticket.then_some(tickets),
        ..AuditEntry::default()
    };
    let budget = caller.budget();
    match failure {
        _ if is_ticket => app.audit.add_ticket(entry, &budget, &caller.site()),
        None => app.audit.add_change(entry, &budget, Kind::Change),
        Some(_) => app.audit.add_change(entry, &budget, Kind::Failure),
    }
}

impl HttpError {
    fn too_many_requests(wait: Duration) -> Self {
        let seconds = wait.as_secs() + 1;
        let text = format!("too many requests: send fewer, and wait {seconds} s");
        Self::new(code::RATE_LIMITED, text).with_retry_after(seconds)
    }
}

pub(super) const ANY_ROLE: Rule = Rule::Roles(&Role::ALL);
/// Name of an issue of a ticket in the audit log.
pub(super) const TICKET: &str = "ticket";
const MEMBER_PREFIX: &str = "/v1/members/{id}";
const MEMBERS: &str = "/v1/members/";
const MAX_TARGET_CHARS: usize = 160;
const MAX_DETAIL_CHARS: usize = 512;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_member_of_a_path_is_the_one_that_the_handler_sees() {
        let route = Some("/v1/members/{id}/drain");
        let id = |path| member_of(route, path).map(|found| found.ok().map(String::from));
        assert_eq!(id("/v1/members/ab-1/drain"), Some(Some("ab-1".to_owned())));
        // An escape would hide the tag of the owner from the check.
        assert_eq!(id("/v1/members/ab%2d1/drain"), Some(None));
        assert!(member_of(Some("/v1/members"), "/v1/members").is_none());
        assert!(member_of(None, "/v1/members/ab/x").is_none());
    }
}
