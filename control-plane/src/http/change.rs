//! Types of the routes that change something.

use axum::Extension;
use serde::Deserialize;

use super::error::HttpError;
use super::guard::AuditNote;

/// An answer to a change, with a note for the audit log.
pub(super) type Change<T> = Result<(Extension<AuditNote>, T), HttpError>;

/// The body of a request without arguments: nothing, or `{}`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct NoArguments {}
