//! Requests that a browser sends for a page of another site. A browser adds the user's certificate by itself, and reaches
//! ports of the user's own host.

use std::fmt;
use std::net::IpAddr;

use axum::http::header::{HOST, ORIGIN};
use axum::http::{HeaderMap, HeaderName};

use super::Exposure;

/// A request that comes from another site.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Foreign {
    Origin,
    Host,
}

impl fmt::Display for Foreign {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Origin => "a page of another site may change nothing: use the page of this control plane",
            Self::Host => {
                "the header Host names another host: use localhost, or an address at which this control plane listens or that it advertises"
            }
        })
    }
}

/// Checks where a change comes from. A browser that says so is believed, since pages cannot set this header; an older one
/// sends the origin. Programs send neither.
pub(super) fn check_origin(headers: &HeaderMap) -> Result<(), Foreign> {
    let text = |name: HeaderName| headers.get(name).map(|value| value.to_str().unwrap_or("?"));
    if let Some(site) = text(SEC_FETCH_SITE) {
        return match site {
            "same-origin" | "none" => Ok(()),
            _ => Err(Foreign::Origin),
        };
    }
    let Some(origin) = text(ORIGIN) else { return Ok(()) };
    let authority = origin.split_once("://").map(|(_, authority)| authority);
    let host = text(HOST);
    match authority.is_some_and(|authority| host.is_some_and(|h| h.eq_ignore_ascii_case(authority)))
    {
        true => Ok(()),
        false => Err(Foreign::Origin),
    }
}

/// Checks that a request to a loopback address was meant for it: `Host` is an address, localhost, or a name of this control
/// plane in its settings. Followers use the advertised one.
pub(super) fn check_local_host(headers: &HeaderMap, exposure: &Exposure) -> Result<(), Foreign> {
    let Some(value) = headers.get(HOST) else { return Ok(()) };
    let host = value.to_str().map_err(|_| Foreign::Host)?;
    let name = host_of(host);
    let is_local = name.trim_matches(['[', ']']).parse::<IpAddr>().is_ok()
        || name.eq_ignore_ascii_case("localhost")
        || name.to_ascii_lowercase().ends_with(".localhost")
        || exposure.own_names().any(|own| name.eq_ignore_ascii_case(host_of(own)));
    if is_local { Ok(()) } else { Err(Foreign::Host) }
}

/// The host of `host:port` or `host`.
fn host_of(text: &str) -> &str {
    match text.rsplit_once(':') {
        Some((host, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => host,
        _ => text,
    }
}

pub(super) const SEC_FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;
    use trust::tls::Security;

    use super::*;

    fn headers(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
        let pair = |(name, value): &(&'static str, &'static str)| {
            (HeaderName::from_static(name), HeaderValue::from_static(value))
        };
        pairs.iter().map(pair).collect()
    }

    #[test]
    fn only_the_own_page_and_programs_change_anything() {
        let check = |pairs: &[(&'static str, &'static str)]| check_origin(&headers(pairs)).is_ok();
        assert!(check(&[("host", "a:7070")]));
        assert!(check(&[("host", "a:7070"), ("origin", "https://A:7070")]));
        // A proxy may change the host.
        let proxied = ("origin", "https://fleet.example");
        assert!(check(&[("host", "a:7070"), proxied, ("sec-fetch-site", "same-origin")]));
        assert!(!check(&[("host", "a:7070"), proxied]));
        assert!(!check(&[("host", "a:7070"), ("origin", "null")]));
        assert!(!check(&[("origin", "https://a:7070")]));
        for site in ["cross-site", "same-site", "?"] {
            let site = ("sec-fetch-site", site);
            assert!(!check(&[("host", "a:7070"), ("origin", "https://a:7070"), site]));
        }
    }

    #[test]
    fn a_loopback_address_answers_to_its_own_names() {
        let exposure = Exposure {
            security: Security::default(),
            listen: "planes:7070".to_owned(),
            advertise: Some("https://Plane-0.example:443/".to_owned()),
            local_addr: ([127, 0, 0, 1], 7070).into(),
            store: None,
            requires_identity: false,
        };
        let check = |host| check_local_host(&headers(&[("host", host)]), &exposure).is_ok();
        for own in [
            "localhost",
            "LOCALHOST:7070",
            "a.localhost:1",
            "127.0.0.1:7070",
            "[::1]:7070",
            "[::1]",
            "planes:7070",
            "plane-0.example",
            "plane-0.example:7070",
        ] {
            assert!(check(own), "{own}");
        }
        for other in [
            "evil.example",
            "evil.example:7070",
            "localhost.evil.example",
            "127.0.0.1.evil.example:7070",
            "example",
            "plane-1.example:443",
            "",
        ] {
            assert!(!check(other), "{other}");
        }
        assert!(check_local_host(&HeaderMap::new(), &exposure).is_ok());
        let alone = Exposure { advertise: None, ..exposure };
        let foreign = headers(&[("host", "plane-0.example")]);
        assert_eq!(check_local_host(&foreign, &alone), Err(Foreign::Host));
        assert_eq!(check_local_host(&headers(&[("host", "")]), &alone), Err(Foreign::Host));
    }
}
