//! Errors of the HTTP interface and of its client.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::placement::PlacementError;
use crate::text::without_credentials;

/// Body of every error response.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ApiError {
    /// Stable snake_case string for programs, one of [`code`].
    pub code: String,
    /// Sentence for people. It may change between versions.
    pub message: String,
}

/// The values of [`ApiError::code`].
pub mod code {
    /// 401: the bearer token is missing or wrong.
    pub const UNAUTHORIZED: &str = "unauthorized";
    /// 403: the caller's role does not allow the request, or the member belongs to another caller.
    pub const FORBIDDEN: &str = "forbidden";
    /// 429: the caller sends more requests than the control plane accepts. `Retry-After` has the seconds to wait.
    pub const RATE_LIMITED: &str = "rate_limited";
    /// 400: the body is not the JSON that the route expects.
    pub const BAD_REQUEST: &str = "bad_request";
    /// 404: the route does not exist.
    pub const NOT_FOUND: &str = "not_found";
    /// 405: the route does not support the method.
    pub const METHOD_NOT_ALLOWED: &str = "method_not_allowed";
    /// 413: the body is larger than the server accepts.
    pub const BODY_TOO_LARGE: &str = "body_too_large";
    /// 408: the request was not complete before the timeout.
    pub const REQUEST_TIMEOUT: &str = "request_timeout";
    /// 404: no member has this id. Register again.
    pub const UNKNOWN_MEMBER: &str = "unknown_member";
    /// 409: the lease has expired. Register again.
    pub const LEASE_EXPIRED: &str = "lease_expired";
    /// 409: another process has registered under the same name.
    pub const SUPERSEDED: &str = "superseded";
    /// 409: a live process uses the name, and another one has tried to take it before.
    pub const NAME_IN_USE: &str = "name_in_use";
    /// 409: the member serves another model than the fleet.
    pub const MODEL_MISMATCH: &str = "model_mismatch";
    /// 404: the fleet serves no model of this fingerprint.
    pub const UNKNOWN_MODEL: &str = "unknown_model";
    /// 409: the update of the model that is under way does not allow the request.
    pub const MODEL_UPDATE: &str = "model_update";
    /// 409: no partition of the model fits into the member.
    pub const CAPACITY_TOO_SMALL: &str = "capacity_too_small";
    /// 409: the placement of this control plane does not follow the load.
    pub const FIXED_PLACEMENT: &str = "fixed_placement";
    /// 503: the control plane accepts no more members.
    pub const TOO_MANY_MEMBERS: &str = "too_many_members";
    /// 503: the control plane accepts no more placement watches.
    pub const TOO_MANY_WATCHERS: &str = "too_many_watchers";
    /// 503: the store cannot be written.
    pub const STORE_READ_ONLY: &str = "store_read_only";
    /// 503: no control plane leads at the moment, or the leader cannot be reached. Try again, at another one.
    pub const NO_LEADER: &str = "no_leader";
    /// 503: the control plane is shutting down.
    pub const SHUTTING_DOWN: &str = "shutting_down";
    /// 500: a bug of the control plane.
    pub const INTERNAL: &str = "internal";
}

/// Error of setting up a client.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages name every field")]
pub enum ConfigError {
    /// The URL is malformed or unsupported.
    #[error(
        "control plane URL {:?} is malformed ({reason}): expected {EXPECTED_URLS}",
        without_credentials(url)
    )]
    Url { url: String, reason: String },
    /// The URL needs certificates.
    #[error(
        "control plane URL {url:?} needs the certificate of the fleet's authority: give --tls DIR (SWITCHYARD_TLS) or \
         --tls-ca FILE (SWITCHYARD_TLS_CA)"
    )]
    NeedsTls { url: String },
    /// Tokens or tickets would travel unencrypted over a network.
    #[error(
        "{url} is plain HTTP to another host, and tokens and tickets would travel unencrypted: use https:// with --tls DIR \
         (SWITCHYARD_TLS), or, on a trusted network, --insecure (SWITCHYARD_INSECURE=1)"
    )]
    Insecure { url: String },
    /// The token has characters that an HTTP header cannot carry.
    #[error("the token has characters that an HTTP header cannot carry: use visible ASCII only")]
    Token,
    /// The file with the token cannot be used.
    #[error("the token file {path} {reason}: expected one line with the token")]
    TokenFile { path: String, reason: String },
    /// The HTTP client could not be set up.
    #[error("HTTP client could not be set up: {reason}")]
    Setup { reason: String },
}

/// Error of a request to the control plane.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages name every field")]
pub enum ControlError {
    /// No control plane is known: a name has no address, or a Service no ready endpoint.
    #[error("no control plane found by {locators} ({reason})")]
    NoneFound { locators: String, reason: String },
    /// The connection failed, or broke before the response was complete.
    #[error("control plane {url} is unreachable ({reason}): is it running?")]
    Unreachable { url: String, reason: String },
    /// The TLS handshake failed, or the control plane speaks no TLS.
    #[error("no secure connection to the control plane {url}: {reason}")]
    Tls { url: String, reason: String },
    /// The response was not complete before the client's timeout.
    #[error("control plane {url} did not answer within {timeout_ms} ms")]
    Timeout { url: String, timeout_ms: u64 },
    /// The control plane refused the token, or asked for an identity (401).
    #[error("control plane {url} {}", unauthorized(message, *has_token))]
    Unauthorized { url: String, message: String, has_token: bool },
    /// The control plane refused the request for another reason.
    #[error("control plane refuses ({code}): {message}")]
    Rejected { status: u16, code: String, message: String },
    /// The response is not one of this control plane's.
    #[error("{url} is not a Switchyard control plane: {reason}")]
    BadResponse { url: String, reason: String },
    /// The placement table is invalid.
    #[error("{url} sends an invalid placement table: {source}")]
    BadPlacement { url: String, source: PlacementError },
}

impl ControlError {
    /// The stable code of a refusal.
    pub fn code(&self) -> Option<&str> {
        match self {
            Self::Rejected { code, .. } => Some(code),
            Self::Unauthorized { .. } => Some(code::UNAUTHORIZED),
            _ => None,
        }
    }

    /// Returns true if another control plane of the same fleet may answer the same request.
    pub(crate) fn concerns_one_control_plane(&self) -> bool {
        match self {
            Self::Unreachable { .. }
            | Self::Tls { .. }
            | Self::Timeout { .. }
            | Self::BadResponse { .. } => true,
            Self::Rejected { code, .. } => matches!(
                code.as_str(),
                code::NO_LEADER
                    | code::SHUTTING_DOWN
                    | code::TOO_MANY_WATCHERS
                    | code::REQUEST_TIMEOUT
            ),
            _ => false,
        }
    }

    /// Returns true if a retry of the same request may succeed.
    pub fn is_transient(&self) -> bool {
        match self {
            // Certificates are replaced without a restart of either side.
            Self::NoneFound { .. }
            | Self::Unreachable { .. }
            | Self::Tls { .. }
            | Self::Timeout { .. } => true,
            Self::Rejected { status, .. } => *status >= 500 || *status == 408 || *status == 429,
            _ => false,
        }
    }
}

fn unauthorized(message: &str, has_token: bool) -> String {
    match has_token {
        true => {
            format!("refuses the token ({message}): use a token that the control plane knows")
        }
        false => format!(
            "asks who this is ({message}): give --token-file FILE (SWITCHYARD_TOKEN_FILE), or --tls DIR with a certificate \
             of the fleet's authority"
        ),
    }
}

/// The chain of causes without the repetitions that wrapping errors produce.
pub(crate) fn causes(err: &dyn std::error::Error) -> String {
    let mut texts = vec![err.to_string()];
    let mut source = err.source();
    while let Some(err) = source {
        let text = err.to_string();
        if !texts.iter().any(|known| known.contains(&text)) {
            texts.push(text);
        }
        source = err.source();
    }
    // The outermost message of the HTTP library only repeats the URL.
    if texts.len() > 1 {
        texts.remove(0);
    }
    texts.join(": ")
}

/// Reason against a URL.
pub(crate) const CREDENTIALS_INSIDE: &str = "user name or password inside: pass a token instead";
const EXPECTED_URLS: &str = "http://HOST:PORT, dns://HOST:PORT or k8s://NAMESPACE/SERVICE[:PORT]";
