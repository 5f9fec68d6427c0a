//! Errors as HTTP responses.

use axum::Json;
use axum::http::header::{RETRY_AFTER, WWW_AUTHENTICATE};
use axum::http::{HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use control_api::{ApiError, code};

use crate::admission::Refusal;
use crate::coordinator::OperationError;
use crate::tickets::IssueError;

/// An error response.
#[derive(Clone, Debug)]
pub(crate) struct HttpError {
    code: &'static str,
    message: String,
    /// Seconds to wait before the next request.
    retry_after: Option<u64>,
}

/// Code and message of an error response, as an extension of it.
#[derive(Clone, Debug)]
pub(super) struct Failure {
    pub(super) code: &'static str,
    pub(super) message: String,
}

impl HttpError {
    pub(crate) fn new(code: &'static str, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), retry_after: None }
    }

    pub(super) fn with_retry_after(self, seconds: u64) -> Self {
        Self { retry_after: Some(seconds), ..self }
    }

    pub(super) fn body_too_large(limit_bytes: usize) -> Self {
        Self::new(code::BODY_TOO_LARGE, format!("the body is larger than {limit_bytes} bytes"))
    }

    pub(super) fn code(&self) -> &'static str {
        self.code
    }

    pub(super) fn message(&self) -> &str {
        &self.message
    }

    fn status(&self) -> StatusCode {
        match self.code {
            code::UNAUTHORIZED => StatusCode::UNAUTHORIZED,
            code::FORBIDDEN => StatusCode::FORBIDDEN,
            code::RATE_LIMITED => StatusCode::TOO_MANY_REQUESTS,
            code::BAD_REQUEST => StatusCode::BAD_REQUEST,
            code::NOT_FOUND | code::UNKNOWN_MEMBER | code::UNKNOWN_MODEL => StatusCode::NOT_FOUND,
            code::METHOD_NOT_ALLOWED => StatusCode::METHOD_NOT_ALLOWED,
            code::BODY_TOO_LARGE => StatusCode::PAYLOAD_TOO_LARGE,
            code::REQUEST_TIMEOUT => StatusCode::REQUEST_TIMEOUT,
            code::LEASE_EXPIRED
            | code::SUPERSEDED
            | code::NAME_IN_USE
            | code::FIXED_PLACEMENT
            | code::MODEL_MISMATCH
            | code::MODEL_UPDATE
            | code::CAPACITY_TOO_SMALL => StatusCode::CONFLICT,
            code::TOO_MANY_MEMBERS
            | code::TOO_MANY_WATCHERS
            | code::STORE_READ_ONLY
            | code::NO_LEADER
            | code::SHUTTING_DOWN => StatusCode::SERVICE_UNAVAILABLE,
            _ => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }
}

impl IntoResponse for HttpError {
    fn into_response(self) -> Response {
        let status = self.status();
        let body = ApiError { code: self.code.to_owned(), message: self.message.clone() };
        let mut response = (status, Json(body)).into_response();
        if status == StatusCode::UNAUTHORIZED {
            response.headers_mut().insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        if let Some(seconds) = self.retry_after {
            response.headers_mut().insert(RETRY_AFTER, seconds.into());
        }
        response.extensions_mut().insert(Failure { code: self.code, message: self.message });
        response
    }
}

impl From<OperationError> for HttpError {
    fn from(err: OperationError) -> Self {
        let code = match &err {
            OperationError::Refused(refusal) => match refusal {
                Refusal::UnknownMember { .. } => code::UNKNOWN_MEMBER,
                Refusal::LeaseExpired { .. } => code::LEASE_EXPIRED,
                Refusal::Superseded { .. } => code::SUPERSEDED,
                Refusal::NameInUse { .. } => code::NAME_IN_USE,
                Refusal::NameBound { .. } => code::FORBIDDEN,
                Refusal::ModelMismatch { .. }
                | Refusal::DeadModel { .. }
                | Refusal::ModelLeaves { .. }
                | Refusal::DescriptorMismatch { .. }
                | Refusal::BytesMismatch => code::MODEL_MISMATCH,
                Refusal::FixedPlacement => code::FIXED_PLACEMENT,
                Refusal::Capacity(_) => code::CAPACITY_TOO_SMALL,
                Refusal::TooManyMembers { .. } | Refusal::TooManyOfOwner { .. } => {
                    code::TOO_MANY_MEMBERS
                }
                Refusal::BadRequest(_) => code::BAD_REQUEST,
            },
            OperationError::Ticket(IssueError::Sign(_)) => code::INTERNAL,
            OperationError::Ticket(IssueError::NotYet { .. }) => code::REQUEST_TIMEOUT,
            OperationError::Ticket(_) => code::BAD_REQUEST,
            OperationError::ReadOnly { .. }
            | OperationError::NotStored { .. }
            | OperationError::NotDurable { .. } => code::STORE_READ_ONLY,
            OperationError::Update(_) => code::MODEL_UPDATE,
            OperationError::ShuttingDown => code::SHUTTING_DOWN,
        };
        let retry_after = match &err {
            OperationError::Ticket(IssueError::NotYet { seconds }) => Some(*seconds),
            _ => None,
        };
        Self { retry_after, ..Self::new(code, err.to_string()) }
    }
}
