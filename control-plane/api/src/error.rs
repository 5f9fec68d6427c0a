//! Errors of the HTTP interface and of its client.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::placement::PlacementError;

/// Body of every answer that is not a success.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ApiError {
    /// Stable snake_case string for programs, one of [`code`].
    pub code: String,
    /// Sentence for people; may change between versions.
    pub message: String,
}

/// The values of [`ApiError::code`].
pub mod code {
    /// 401: the bearer token is missing or wrong.
    pub const UNAUTHORIZED: &str = "unauthorized";
    /// 400: the body is not the JSON that the route expects.
    pub const BAD_REQUEST: &str = "bad_request";
    /// 404: no such route.
    pub const NOT_FOUND: &str = "not_found";
    /// 405: the route exists, the method does not.
    pub const METHOD_NOT_ALLOWED: &str = "method_not_allowed";
    /// 413: the body is larger than the server accepts.
    pub const BODY_TOO_LARGE: &str = "body_too_large";
    /// 408: the request was not complete in time.
    pub const REQUEST_TIMEOUT: &str = "request_timeout";
    /// 404: no member has this id. Register again.
    pub const UNKNOWN_MEMBER: &str = "unknown_member";
    /// 409: the lease ran out. Register again.
    pub const LEASE_EXPIRED: &str = "lease_expired";
    /// 409: another process has registered under the same name.
    pub const SUPERSEDED: &str = "superseded";
    /// 409: the member serves another model than the fleet.
    pub const MODEL_MISMATCH: &str = "model_mismatch";
    /// 409: no share of the model fits into the member.
    pub const CAPACITY_TOO_SMALL: &str = "capacity_too_small";
    /// 503: as many members as the control plane accepts.
    pub const TOO_MANY_MEMBERS: &str = "too_many_members";
    /// 503: as many placement watches as the control plane accepts.
    pub const TOO_MANY_WATCHERS: &str = "too_many_watchers";
    /// 503: the store cannot be written at present.
    pub const STORE_READ_ONLY: &str = "store_read_only";
    /// 503: the control plane is shutting down.
    pub const SHUTTING_DOWN: &str = "shutting_down";
    /// 500: a defect of the control plane.
    pub const INTERNAL: &str = "internal";
}

/// Why a client could not be made.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The URL has no usable form.
    #[error("control plane URL {url:?} is malformed ({reason}): expected http://HOST:PORT")]
    Url {
        /// The URL as given.
        url: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The token cannot stand in an HTTP header.
    #[error("the token has characters that an HTTP header cannot carry: use visible ASCII only")]
    Token,
    /// The HTTP client could not be set up.
    #[error("HTTP client could not be set up: {reason}")]
    Setup {
        /// What the HTTP library says.
        reason: String,
    },
}

/// Why a request to the control plane failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ControlError {
    /// No connection, or it broke before the answer was complete.
    #[error("control plane {url} is unreachable ({reason}): is it running?")]
    Unreachable {
        /// What was asked for.
        url: String,
        /// The chain of causes.
        reason: String,
    },
    /// No complete answer within the client's time limit.
    #[error("control plane {url} did not answer within {timeout_ms} ms")]
    Timeout {
        /// What was asked for.
        url: String,
        /// The limit in milliseconds.
        timeout_ms: u64,
    },
    /// 401.
    #[error("control plane {url} refuses the token ({message}): pass the one it was started with")]
    Unauthorized {
        /// What was asked for.
        url: String,
        /// What the server says.
        message: String,
    },
    /// Any other refusal with a typed body.
    #[error("control plane refuses ({code}): {message}")]
    Rejected {
        /// HTTP status.
        status: u16,
        /// Stable code, see [`code`].
        code: String,
        /// Sentence for people.
        message: String,
    },
    /// An answer that the control plane of this project does not give.
    #[error("{url} answers with something that is not a control plane's: {reason}")]
    BadResponse {
        /// What was asked for.
        url: String,
        /// What is wrong with the answer.
        reason: String,
    },
    /// A placement table with contradictions.
    #[error("{url} sends an invalid placement table: {source}")]
    BadPlacement {
        /// What was asked for.
        url: String,
        /// The contradiction.
        source: PlacementError,
    },
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

    /// Whether the same request may succeed later without anybody changing anything else.
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Unreachable { .. } | Self::Timeout { .. } => true,
            Self::Rejected { status, .. } => *status >= 500 || *status == 408 || *status == 429,
            _ => false,
        }
    }
}
