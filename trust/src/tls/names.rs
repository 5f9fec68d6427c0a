//! Names in certificates, and addresses that never leave the host.

use std::net::IpAddr;

use x509_parser::extensions::GeneralName;
use x509_parser::prelude::{FromDer, X509Certificate};

use crate::{Credential, Identity, Role};

/// The URI by which a certificate names its holder: `switchyard://ROLE/NAME`.
#[must_use]
pub fn certificate_uri(role: Role, name: &str) -> String {
    format!("{SCHEME}{role}/{name}")
}

/// The name and role in a certificate, in DER. `None` if it has no URI of the form `switchyard://ROLE/NAME`: such a
/// certificate proves that its holder belongs to the fleet, and gives no rights. The caller has checked the
/// signature.
#[must_use]
pub fn identity_of(certificate: &[u8]) -> Option<Identity> {
    let (_, certificate) = X509Certificate::from_der(certificate).ok()?;
    let names = certificate.subject_alternative_name().ok()??;
    names.value.general_names.iter().find_map(|name| match name {
        GeneralName::URI(uri) => {
            let (role, name) = uri.strip_prefix(SCHEME)?.split_once('/')?;
            let role = role.parse().ok()?;
            is_valid_name(name).then(|| Identity {
                name: name.to_owned(),
                role,
                credential: Credential::Certificate,
            })
        }
        _ => None,
    })
}

/// Whether `name` can be a holder's name: 1 to 128 letters, digits, `.`, `_` and `-`, the first a letter or digit.
#[must_use]
pub fn is_valid_name(name: &str) -> bool {
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-');
    let first = name.bytes().next().is_some_and(|byte| byte.is_ascii_alphanumeric());
    first && name.len() <= 128 && name.bytes().all(is_allowed)
}

/// Whether `host` is an address or the name of the loopback interface, so that no byte to it leaves the host. An
/// IPv6 address may stand in brackets.
#[must_use]
pub fn is_loopback_host(host: &str) -> bool {
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    match bare.parse::<IpAddr>() {
        Ok(IpAddr::V6(addr)) => {
            addr.is_loopback() || addr.to_ipv4_mapped().is_some_and(|addr| addr.is_loopback())
        }
        Ok(addr) => addr.is_loopback(),
        Err(_) => bare.eq_ignore_ascii_case("localhost"),
    }
}

const SCHEME: &str = "switchyard://";
