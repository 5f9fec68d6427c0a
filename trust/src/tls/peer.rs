//! The certificate of a peer after its handshake.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rustls::pki_types::{CertificateDer, UnixTime};
use tokio::sync::watch;
use x509_parser::prelude::{FromDer, X509Certificate};

use super::state::{State, seconds};
use super::{Tls, TlsStream, identity_of};
use crate::Identity;

/// The certificate that a client has shown to a listener. A connection may outlive it: it ends with its validity, and
/// when the listener's files no longer accept it. Cheap to clone.
#[derive(Clone, Debug)]
pub struct PeerCertificate {
    shown: Arc<Shown>,
    changed: watch::Receiver<u64>,
}

#[derive(Debug)]
struct Shown {
    tls: Tls,
    chain: Vec<CertificateDer<'static>>,
    identity: Option<Identity>,
    /// The first end of a certificate of the chain, in seconds since 1970.
    not_after: u64,
    /// The files against which the chain was checked last, and whether they accept it.
    checked: Mutex<Option<(u64, bool)>>,
}

impl Tls {
    /// The certificate that the client of an accepted `stream` has shown, if any.
    #[must_use]
    pub fn peer_certificate<IO>(&self, stream: &TlsStream<IO>) -> Option<PeerCertificate> {
        let chain = stream.get_ref().1.peer_certificates()?;
        let identity = identity_of(chain.first()?);
        let ends = chain.iter().map(|certificate| match X509Certificate::from_der(certificate) {
            Ok((_, parsed)) => seconds(parsed.validity().not_after),
            Err(_) => 0,
        });
        let shown = Shown {
            tls: self.clone(),
            not_after: ends.min()?,
            chain: chain.iter().map(|certificate| certificate.clone().into_owned()).collect(),
            identity,
            checked: Mutex::default(),
        };
        Some(PeerCertificate { shown: Arc::new(shown), changed: self.shared.changed.subscribe() })
    }
}

impl PeerCertificate {
    /// The holder of the certificate. `None` if it names none, or if the certificate is [no longer
    /// accepted](Self::is_accepted).
    #[must_use]
    pub fn identity(&self) -> Option<&Identity> {
        self.shown.identity.as_ref().filter(|_| self.is_accepted())
    }

    /// Whether a handshake at this moment would accept the certificate. The signatures are checked once for each change
    /// of the files.
    #[must_use]
    pub fn is_accepted(&self) -> bool {
        let shown = &*self.shown;
        let Some(now) = shown.tls.shared.clock.current_time() else { return false };
        if now.as_secs() > shown.not_after {
            return false;
        }
        let state = shown.tls.shared.current.load();
        let mut checked = shown.checked.lock().unwrap_or_else(PoisonError::into_inner);
        match *checked {
            Some((generation, is_accepted)) if generation == state.generation => is_accepted,
            _ => {
                let is_accepted = shown.is_accepted_by(&state, now);
                *checked = Some((state.generation, is_accepted));
                is_accepted
            }
        }
    }

    /// Completes when the certificate is no longer accepted. Cancel safe.
    pub async fn ended(&self) {
        let mut changed = self.changed.clone();
        changed.mark_changed();
        while self.is_accepted() {
            let now = self.shown.tls.shared.clock.current_time().map_or(0, |now| now.as_secs());
            // Valid for the whole of its last second. A clock may be set meanwhile.
            let left = Duration::from_secs((self.shown.not_after + 1).saturating_sub(now));
            let pause = tokio::time::sleep(left.clamp(SHORTEST_WAIT, LONGEST_WAIT));
            tokio::select! {
                () = pause => {}
                // The sender lives as long as the listener's TLS, which this handle holds.
                _ = changed.changed() => {}
            }
        }
    }
}

impl Shown {
    fn is_accepted_by(&self, state: &State, now: UnixTime) -> bool {
        match (&state.client_verifier, self.chain.split_first()) {
            (Some(verifier), Some((certificate, intermediates))) => {
                verifier.verify_client_cert(certificate, intermediates, now).is_ok()
            }
            _ => false,
        }
    }
}

const SHORTEST_WAIT: Duration = Duration::from_millis(10);
const LONGEST_WAIT: Duration = Duration::from_secs(30);
