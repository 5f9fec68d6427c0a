//! Parts of a request as handlers take them. A part that is not as expected is refused in the form of the API's errors.

use std::sync::Arc;

use axum::extract::{FromRequest, FromRequestParts, Path, Query, Request};
use axum::http::header::CONTENT_TYPE;
use axum::http::request::Parts;
use control_api::{MemberId, code};
use serde::de::DeserializeOwned;

use super::App;
use super::bodies::BodyShare;
use super::error::HttpError;

/// The query of a route.
pub(super) trait Arguments: DeserializeOwned + Send {
    /// The form of the query, for the refusal of another one.
    const FORM: &'static str;

    /// Refuses values that cannot be right.
    fn check(&self) -> Result<(), String> {
        Ok(())
    }
}

/// [`Arguments`], checked.
pub(super) struct Checked<T>(pub(super) T);

impl<T: Arguments> FromRequestParts<App> for Checked<T> {
    type Rejection = HttpError;

    async fn from_request_parts(parts: &mut Parts, state: &App) -> Result<Self, HttpError> {
        let bad = |text: String| HttpError::new(code::BAD_REQUEST, text);
        let query = Query::<T>::from_request_parts(parts, state).await;
        let Query(arguments) = query
            .map_err(|rejection| bad(format!("{}: expected {}", rejection.body_text(), T::FORM)))?;
        arguments.check().map_err(bad)?;
        Ok(Self(arguments))
    }
}

/// The member in the path of a request.
pub(super) struct Target(pub(super) MemberId);

impl FromRequestParts<App> for Target {
    type Rejection = HttpError;

    async fn from_request_parts(parts: &mut Parts, state: &App) -> Result<Self, HttpError> {
        let path = Path::<String>::from_request_parts(parts, state).await;
        let Path(text) =
            path.map_err(|rejection| HttpError::new(code::UNKNOWN_MEMBER, rejection.body_text()))?;
        member_id(&text).map(Self)
    }
}

/// A text that is no identity belongs to no member.
pub(super) fn member_id(text: &str) -> Result<MemberId, HttpError> {
    MemberId::parse(text).map_err(|err| HttpError::new(code::UNKNOWN_MEMBER, err.to_string()))
}

/// A JSON body. An empty one stands for `{}`.
pub(super) struct Body<T>(pub(super) T);

impl<T: DeserializeOwned> FromRequest<App> for Body<T> {
    type Rejection = HttpError;

    async fn from_request(request: Request, _: &App) -> Result<Self, HttpError> {
        // Requiring the content type stops web pages from posting here without the browser's CORS
        // preflight request.
        let content_type = request.headers().get(CONTENT_TYPE).cloned();
        let share = request.extensions().get::<Arc<BodyShare>>().cloned();
        let share = share.ok_or_else(|| {
            HttpError::new(code::INTERNAL, "the request has no memory for its body")
        })?;
        let bytes = share.read(request.into_body()).await?;
        let is_json = content_type.is_some_and(|value| {
            value.as_bytes().to_ascii_lowercase().starts_with(b"application/json")
        });
        if !bytes.is_empty() && !is_json {
            let text = "the body must be JSON: send the header `Content-Type: application/json`";
            return Err(HttpError::new(code::BAD_REQUEST, text));
        }
        let text = if bytes.is_empty() { b"{}" } else { &bytes[..] };
        // An array would be read as the fields in their order.
        let is_array = text.iter().find(|byte| !byte.is_ascii_whitespace()) == Some(&b'[');
        match serde_json::from_slice(text) {
            Ok(_) if is_array => {
                let text = "the body is not the JSON that this route expects: expected an object";
                Err(HttpError::new(code::BAD_REQUEST, text))
            }
            Ok(value) => Ok(Self(value)),
            Err(err) => {
                let text = format!("the body is not the JSON that this route expects: {err}");
                Err(HttpError::new(code::BAD_REQUEST, text))
            }
        }
    }
}
