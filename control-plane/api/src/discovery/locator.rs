//! The texts that name control planes.

use std::fmt;

use reqwest::Url;

use crate::error::{CREDENTIALS_INSIDE, ConfigError};

/// One or several control planes, as a setting names them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Locator {
    /// `http://HOST:PORT`: one control plane.
    Url(Url),
    /// `dns://HOST:PORT`: one on every address of the name.
    Dns { host: String, port: u16 },
    /// `k8s://NAMESPACE/SERVICE[:PORT]`: one on every ready endpoint of the Service.
    #[cfg(feature = "kubernetes")]
    Service(Service),
}

/// A Service of Kubernetes.
#[cfg(feature = "kubernetes")]
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Service {
    pub(super) namespace: String,
    pub(super) name: String,
    /// `None` if the Service has only one port.
    pub(super) port: Option<Port>,
}

/// A port of a Service's endpoints.
#[cfg(feature = "kubernetes")]
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Port {
    Name(String),
    Number(u16),
}

impl Locator {
    /// Parses one locator; `parse_url` parses all that is not `dns://` or `k8s://`.
    ///
    /// # Errors
    /// [`ConfigError::Url`] with the reason.
    pub(super) fn parse(
        text: &str,
        parse_url: impl Fn(&str) -> Result<Url, ConfigError>,
    ) -> Result<Self, ConfigError> {
        let has_scheme = ["dns://", "k8s://"].iter().any(|scheme| text.starts_with(scheme));
        let parsed = if has_scheme && text.contains('@') {
            Err(CREDENTIALS_INSIDE.to_owned())
        } else if let Some(rest) = text.strip_prefix("dns://") {
            parse_dns(rest.trim_end_matches('/'))
        } else if let Some(rest) = text.strip_prefix("k8s://") {
            parse_service(rest)
        } else {
            return parse_url(text).map(Self::Url);
        };
        parsed.map_err(|reason| ConfigError::Url { url: text.to_owned(), reason })
    }

    /// The name in the certificates of control planes that are looked up. `None` for a URL, which has it.
    pub(super) fn certificate_name(&self) -> Option<String> {
        match self {
            Self::Url(_) => None,
            Self::Dns { host, .. } => Some(host.clone()),
            #[cfg(feature = "kubernetes")]
            Self::Service(service) => Some(format!("{}.{}.svc", service.name, service.namespace)),
        }
    }
}

impl fmt::Display for Locator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Url(url) => f.write_str(super::text_of(url)),
            Self::Dns { host, port } if host.contains(':') => write!(f, "dns://[{host}]:{port}"),
            Self::Dns { host, port } => write!(f, "dns://{host}:{port}"),
            #[cfg(feature = "kubernetes")]
            Self::Service(service) => service.fmt(f),
        }
    }
}

fn parse_dns(text: &str) -> Result<Locator, String> {
    let Some((host, port)) = text.rsplit_once(':').filter(|(_, port)| !port.contains(']')) else {
        return Err("no port".to_owned());
    };
    let port = parse_port(port).ok_or_else(|| format!("port {port:?}"))?;
    if let Some(address) = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')) {
        let address: std::net::Ipv6Addr = address.parse().map_err(|_| format!("host {host:?}"))?;
        return Ok(Locator::Dns { host: address.to_string(), port });
    }
    let is_good = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    if host.is_empty() || host.len() > MAX_NAME_BYTES || !host.bytes().all(is_good) {
        return Err(if host.is_empty() { "no host".to_owned() } else { format!("host {host:?}") });
    }
    Ok(Locator::Dns { host: host.to_owned(), port })
}

fn parse_port(text: &str) -> Option<u16> {
    // `parse` alone accepts a plus sign.
    let is_number = text.bytes().all(|byte| byte.is_ascii_digit());
    text.parse().ok().filter(|port| is_number && *port != 0)
}

#[cfg(not(feature = "kubernetes"))]
fn parse_service(_: &str) -> Result<Locator, String> {
    Err("this build has no feature `kubernetes`".to_owned())
}

#[cfg(feature = "kubernetes")]
fn parse_service(text: &str) -> Result<Locator, String> {
    let Some((namespace, rest)) = text.split_once('/') else {
        return Err("no Service".to_owned());
    };
    let (name, port) = match rest.split_once(':') {
        Some((name, port)) => (name, Some(port)),
        None => (rest, None),
    };
    for (what, label) in [("namespace", namespace), ("Service", name)] {
        if !is_label(label) {
            return Err(format!("{what} {label:?}"));
        }
    }
    let port = match port {
        None => None,
        Some(text) => match parse_port(text) {
            Some(number) => Some(Port::Number(number)),
            None if is_label(text) && text.bytes().any(|byte| byte.is_ascii_lowercase()) => {
                Some(Port::Name(text.to_owned()))
            }
            None => return Err(format!("port {text:?}")),
        },
    };
    Ok(Locator::Service(Service { namespace: namespace.to_owned(), name: name.to_owned(), port }))
}

/// Returns true for a name of a namespace, a Service or a port, as RFC 1123 defines labels. The API server's own rules
/// for Services and ports are stricter.
#[cfg(feature = "kubernetes")]
fn is_label(text: &str) -> bool {
    let is_good = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    let is_end = |byte: Option<u8>| byte.is_some_and(|byte| byte != b'-');
    text.len() <= MAX_LABEL_BYTES
        && text.bytes().all(is_good)
        && is_end(text.bytes().next())
        && is_end(text.bytes().next_back())
}

#[cfg(feature = "kubernetes")]
impl fmt::Display for Service {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "k8s://{}/{}", self.namespace, self.name)?;
        match &self.port {
            None => Ok(()),
            Some(Port::Name(name)) => write!(f, ":{name}"),
            Some(Port::Number(number)) => write!(f, ":{number}"),
        }
    }
}

const MAX_NAME_BYTES: usize = 253;
#[cfg(feature = "kubernetes")]
const MAX_LABEL_BYTES: usize = 63;
