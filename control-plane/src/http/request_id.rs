//! Identities of requests.

use axum::http::{HeaderMap, HeaderName, HeaderValue};

/// Identity of a request, for the audit log and the response.
#[derive(Clone, Debug)]
pub(super) struct RequestId(pub(super) HeaderValue);

impl RequestId {
    /// The caller's own identity of the request if it is short and plain, or else a new one.
    pub(super) fn of(headers: &HeaderMap) -> Self {
        let given = headers.get(REQUEST_ID).filter(|value| {
            let is_plain = |byte: &u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
            (1..=64).contains(&value.len()) && value.as_bytes().iter().all(is_plain)
        });
        let new = || {
            let text = format!("{:016x}", rand::random::<u64>());
            HeaderValue::from_str(&text).unwrap_or(HeaderValue::from_static("0"))
        };
        Self(given.cloned().unwrap_or_else(new))
    }
}

pub(super) const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_plain_request_identities_are_taken_over() {
        let of = |text: &'static str| {
            let headers = HeaderMap::from_iter([(REQUEST_ID, HeaderValue::from_static(text))]);
            RequestId::of(&headers).0
        };
        assert_eq!(of("abc-1_2"), "abc-1_2");
        for wrong in ["", "a b", "a\"b", "a\tb"] {
            assert_ne!(of(wrong), wrong);
            assert_eq!(of(wrong).len(), 16);
        }
    }
}
