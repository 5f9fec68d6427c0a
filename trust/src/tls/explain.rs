//! Failed handshakes in plain words.

use std::error::Error as StdError;
use std::io;

use rustls::{AlertDescription, CertificateError, Error, InvalidMessage, PeerIncompatible};

use super::records::NotTls;
use super::state::date;

/// Side of a handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The side that accepts connections.
    Listener,
    /// The side that connects.
    Client,
}

/// A TLS handshake failed. The text says why, and the remedy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{reason}")]
pub struct HandshakeError {
    reason: std::borrow::Cow<'static, str>,
    /// The peer's first bytes were not TLS.
    pub is_plain: bool,
    /// The connection ended, or the peer was silent: the certificates are not to blame.
    pub is_broken: bool,
}

impl HandshakeError {
    pub(super) const NO_CERTIFICATE: Self = Self {
        reason: std::borrow::Cow::Borrowed("this side has no certificate"),
        is_plain: false,
        is_broken: false,
    };

    pub(super) fn new(side: Side, error: &io::Error) -> Self {
        let is_plain = error.get_ref().is_some_and(|inner| inner.is::<NotTls>());
        let explained = explain(side, error);
        let is_broken = explained.is_none();
        let reason = explained
            .unwrap_or_else(|| format!("the connection broke during the TLS handshake: {error}"));
        Self { reason: reason.into(), is_plain, is_broken }
    }

    pub(super) fn name(host: &str) -> Self {
        let reason = format!("\"{}\" is neither a host name nor an address", host.escape_default());
        Self { reason: reason.into(), is_plain: false, is_broken: false }
    }
}

/// Explains the TLS error among the causes of `error`, as `side` sees it. `None` if there is none.
#[must_use]
pub fn explain(side: Side, error: &(dyn StdError + 'static)) -> Option<String> {
    let mut next = Some(error);
    while let Some(error) = next {
        if error.is::<NotTls>() {
            return Some(not_tls(side));
        }
        if let Some(error) = error.downcast_ref::<Error>() {
            return Some(explain_tls(side, error));
        }
        // The source of an I/O error is the source of the error inside it.
        next = match error.downcast_ref::<io::Error>().and_then(io::Error::get_ref) {
            Some(inner) => Some(inner),
            None => error.source(),
        };
    }
    None
}

fn not_tls(side: Side) -> String {
    match side {
        Side::Client => "the listener does not speak TLS: start it with --tls DIR, or, if the network is trusted, \
                         connect without TLS and with --insecure"
            .to_owned(),
        Side::Listener => "the client does not speak TLS, which this port requires: give the client --tls DIR, and \
                           https:// in the URL of a control plane"
            .to_owned(),
    }
}

fn explain_tls(side: Side, error: &Error) -> String {
    let peer = match side {
        Side::Client => "listener",
        Side::Listener => "client",
    };
    match error {
        Error::InvalidCertificate(error) => certificate(side, peer, error),
        Error::InvalidMessage(
            InvalidMessage::InvalidContentType | InvalidMessage::UnknownProtocolVersion,
        ) => not_tls(side),
        Error::NoCertificatesPresented => {
            "the client shows no certificate, which this port requires: give the client --tls DIR with the folder \
             that `switchyard certs issue` has written for it"
                .to_owned()
        }
        Error::PeerIncompatible(
            PeerIncompatible::Tls12NotOfferedOrEnabled | PeerIncompatible::Tls13RequiredForQuic
            | PeerIncompatible::SupportedVersionsExtensionRequired
            | PeerIncompatible::ServerTlsVersionIsDisabledByOurConfig,
        ) => format!("the {peer} speaks no TLS 1.3, which is required: update it"),
        Error::AlertReceived(alert) => refused(peer, *alert),
        error => format!("the TLS handshake with the {peer} failed: {error}"),
    }
}

fn certificate(side: Side, peer: &str, error: &CertificateError) -> String {
    let role = match side {
        Side::Client => "server",
        Side::Listener => "client, operator, viewer or server",
    };
    match error {
        CertificateError::UnknownIssuer | CertificateError::BadSignature => format!(
            "the certificate of the {peer} is not signed by an authority that this side trusts: both need the ca.pem of \
             one fleet"
        ),
        CertificateError::ExpiredContext { time, not_after } => format!(
            "the certificate of the {peer} has expired on {}, and the clock of this host says {}: issue a new one \
             with `switchyard certs issue`, or correct the clock",
            date(not_after.as_secs()),
            date(time.as_secs())
        ),
        CertificateError::NotValidYetContext { time, not_before } => format!(
            "the certificate of the {peer} is valid from {}, and the clock of this host says {}: correct the clock of \
             this host, or of the host that has issued the certificate",
            date(not_before.as_secs()),
            date(time.as_secs())
        ),
        CertificateError::NotValidForNameContext { expected, presented } => {
            let presented = presented.iter().map(|name| plain(name));
            let presented: Vec<String> = presented.filter(|name| !name.contains("://")).collect();
            let expected = expected.to_str();
            format!(
                "the certificate of the {peer} is for {}, not for {expected}: issue one with --address {expected}, or \
                 connect by a name that it has",
                if presented.is_empty() { "no address".to_owned() } else { presented.join(", ") }
            )
        }
        CertificateError::InvalidPurpose | CertificateError::InvalidPurposeContext { .. } => {
            format!(
                "the certificate of the {peer} was issued for another use: issue one with --role {role}"
            )
        }
        error => format!("the certificate of the {peer} cannot be used: {error}"),
    }
}

/// A name as rustls shows it, such as `DnsName("host")`, without its kind.
fn plain(name: &str) -> String {
    let inner = name.split_once('(').map_or(name, |(_, rest)| rest.trim_end_matches(')'));
    inner.trim_matches('"').escape_default().to_string()
}

fn refused(peer: &str, alert: AlertDescription) -> String {
    use AlertDescription as Alert;
    match alert {
        Alert::CertificateRequired => format!(
            "the {peer} requires a client certificate: give --tls DIR with the folder that `switchyard certs issue` \
             has written for this client"
        ),
        Alert::UnknownCA | Alert::DecryptError => format!(
            "the {peer} refuses the certificate of this side, because it does not trust the authority: both need the \
             ca.pem of one fleet"
        ),
        Alert::CertificateExpired => format!(
            "the {peer} refuses the certificate of this side as expired: issue a new one with `switchyard certs \
             issue`, or correct the clocks"
        ),
        Alert::ProtocolVersion => {
            format!("the {peer} speaks no TLS 1.3, which is required: update it")
        }
        alert => format!("the {peer} refuses the TLS handshake ({alert:?}): its log says why"),
    }
}
