//! Protection of a process's connections, and the rule for addresses without it.

use std::net::SocketAddr;
use std::sync::Arc;

use rustls::{ClientConfig, RootCertStore};

use super::{ServerNames, Tls, is_loopback_host};

/// Protection of the connections of a process. The default is no TLS, and plain text on the loopback interface only.
#[derive(Clone, Debug, Default)]
pub struct Security {
    /// Certificates. Listeners with them speak TLS only, and so do clients of expert servers.
    pub tls: Option<Tls>,
    /// Allows plain text on other addresses than loopback ones.
    pub insecure: bool,
}

/// A listener would be reachable from other hosts in plain text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{addr} is reachable from other hosts, and this process has no certificate: give --tls DIR (SWITCHYARD_TLS) with a \
     folder of `switchyard certs issue`, or, on a trusted network, --insecure (SWITCHYARD_INSECURE=1)"
)]
pub struct InsecureListener {
    addr: SocketAddr,
}

/// A secret would travel in plain text to another host.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{host} is another host, and this process would show it its secrets unencrypted: give --tls DIR (SWITCHYARD_TLS), \
     or, on a trusted network, --insecure (SWITCHYARD_INSECURE=1)"
)]
pub struct InsecurePeer {
    host: String,
}

impl Security {
    /// The certificates, if a listener can use them.
    #[must_use]
    pub fn for_listener(&self) -> Option<&Tls> {
        self.tls.as_ref().filter(|tls| tls.can_listen())
    }

    /// The certificates, if a client can use them.
    #[must_use]
    pub fn for_client(&self) -> Option<&Tls> {
        self.tls.as_ref().filter(|tls| tls.can_connect())
    }

    /// Settings for an HTTP client. Without certificates they trust no authority, so that every `https` URL fails.
    #[must_use]
    pub fn client_config(&self) -> ClientConfig {
        match &self.tls {
            Some(tls) => (*tls.client_config()).clone(),
            None => without_authority(),
        }
    }

    /// As [`client_config`](Self::client_config), with the names in the certificates of addresses.
    #[must_use]
    pub fn client_config_with_names(&self, names: Arc<dyn ServerNames>) -> ClientConfig {
        match &self.tls {
            Some(tls) => tls.client_config_with_names(names),
            None => without_authority(),
        }
    }

    /// Checks that a listener on `addr` may be opened.
    ///
    /// # Errors
    /// [`InsecureListener`].
    pub fn check_listener(&self, addr: SocketAddr) -> Result<(), InsecureListener> {
        match self.insecure || self.for_listener().is_some() || !is_exposed(addr) {
            true => Ok(()),
            false => Err(InsecureListener { addr }),
        }
    }

    /// Checks that a client may connect to `host` and show its secrets.
    ///
    /// # Errors
    /// [`InsecurePeer`].
    pub fn check_peer(&self, host: &str) -> Result<(), InsecurePeer> {
        match self.insecure || self.for_client().is_some() || is_loopback_host(host) {
            true => Ok(()),
            false => Err(InsecurePeer { host: host.escape_default().to_string() }),
        }
    }

    /// Names the danger of a listener on `addr`, if other hosts reach it in plain text.
    #[must_use]
    pub fn exposure(&self, addr: SocketAddr) -> Option<String> {
        (self.for_listener().is_none() && is_exposed(addr)).then(|| {
            format!(
                "INSECURE: {addr} serves plain text to other hosts (--insecure): give --tls DIR"
            )
        })
    }
}

fn without_authority() -> ClientConfig {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .expect("the provider has suites of TLS 1.3")
        .with_root_certificates(RootCertStore::empty())
        .with_no_client_auth()
}

/// Returns true if other hosts can reach a listener on `addr`.
#[must_use]
pub fn is_exposed(addr: SocketAddr) -> bool {
    !is_loopback_host(&addr.ip().to_string())
}
