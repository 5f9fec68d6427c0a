//! Settings of rustls, made of one reading of the files.

use std::sync::Arc;

use arc_swap::ArcSwap;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{ResolvesClientCert, Resumption, WebPkiServerVerifier};
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::danger::ClientCertVerifier;
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::time_provider::TimeProvider;
use rustls::{
    ClientConfig, DigitallySignedStruct, Error, InconsistentKeys, RootCertStore, ServerConfig,
    SignatureScheme,
};
use x509_parser::prelude::{FromDer, X509Certificate};

use super::files::{Contents, TlsFiles};
use super::{ClientCertificates, ServerNames, TlsError};

/// One reading of the files, ready for handshakes.
#[derive(Debug)]
pub(super) struct State {
    /// Number of the reading: each one that came into force has a number of its own.
    pub(super) generation: u64,
    pub(super) contents: Contents,
    /// Settings of listeners, if there is a certificate.
    pub(super) server: Option<Arc<ServerConfig>>,
    /// Checks clients, if there is an authority and a certificate.
    pub(super) client_verifier: Option<Arc<dyn ClientCertVerifier>>,
    /// The certificate that clients show.
    certified: Option<Arc<CertifiedKey>>,
    /// Checks listeners, if there is an authority.
    pub(super) verifier: Option<Arc<WebPkiServerVerifier>>,
    pub(super) expires_at: Option<u64>,
}

impl State {
    pub(super) fn new(
        files: &TlsFiles,
        contents: Contents,
        clients: ClientCertificates,
        clock: &Arc<dyn TimeProvider>,
        generation: u64,
    ) -> Result<Self, TlsError> {
        let path = |path: &Option<_>| path.clone().unwrap_or_default();
        let (cert_file, key_file, ca_file) = (path(&files.cert), path(&files.key), path(&files.ca));
        let refused = |reason: String| TlsError::Refused { file: ca_file.clone(), reason };
        let roots = match &contents.ca {
            Some(pem) => Some(roots(&ca_file, pem)?),
            None => None,
        };
        let verifier = match &roots {
            Some(roots) => {
                let builder =
                    WebPkiServerVerifier::builder_with_provider(Arc::clone(roots), provider());
                Some(builder.build().map_err(|error| refused(error.to_string()))?)
            }
            None => None,
        };
        let (mut certified, mut expires_at, mut server) = (None, None, None);
        let mut client_verifier = None;
        if let (Some(cert), Some(key)) = (&contents.cert, &contents.key) {
            let chain = certificates(&cert_file, cert)?;
            expires_at = Some(check_validity(&cert_file, &chain[0], clock)?);
            let key = PrivateKeyDer::from_pem_slice(key).map_err(|error| TlsError::Pem {
                file: key_file.clone(),
                expected: "private key",
                reason: error.to_string(),
            })?;
            let pair =
                CertifiedKey::from_der(chain, key, &provider()).map_err(|error| match error {
                    Error::InconsistentKeys(InconsistentKeys::KeyMismatch) => {
                        TlsError::Mismatch { cert: cert_file.clone(), key: key_file.clone() }
                    }
                    error => {
                        TlsError::Refused { file: key_file.clone(), reason: error.to_string() }
                    }
                })?;
            let pair = Arc::new(pair);
            client_verifier = match (roots, clients) {
                (None, ClientCertificates::Optional) => None,
                (None, ClientCertificates::Required) => return Err(TlsError::NoAuthority),
                (Some(roots), clients) => {
                    Some(self::client_verifier(roots, clients).map_err(refused)?)
                }
            };
            let verifier = client_verifier.clone();
            server = Some(server_config(Arc::clone(&pair), verifier, clock).map_err(refused)?);
            certified = Some(pair);
        }
        Ok(Self { generation, contents, server, client_verifier, certified, verifier, expires_at })
    }
}

/// The check of the certificates of clients.
fn client_verifier(
    roots: Arc<RootCertStore>,
    clients: ClientCertificates,
) -> Result<Arc<dyn ClientCertVerifier>, String> {
    let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider());
    let verifier = match clients {
        ClientCertificates::Optional => verifier.allow_unauthenticated(),
        ClientCertificates::Required => verifier,
    };
    verifier.build().map_err(|error| error.to_string())
}

fn server_config(
    pair: Arc<CertifiedKey>,
    clients: Option<Arc<dyn ClientCertVerifier>>,
    clock: &Arc<dyn TimeProvider>,
) -> Result<Arc<ServerConfig>, String> {
    let builder = ServerConfig::builder_with_details(provider(), Arc::clone(clock))
        .with_protocol_versions(VERSIONS)
        .map_err(|error| error.to_string())?;
    let builder = match clients {
        None => builder.with_no_client_auth(),
        Some(verifier) => builder.with_client_cert_verifier(verifier),
    };
    let mut config = builder.with_cert_resolver(Arc::new(SingleCertAndKey::from(pair)));
    // A resumed session would not check the client's certificate again. Without tickets the listener sends nothing
    // after the handshake that the client has not asked for.
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    Ok(Arc::new(config))
}

/// Settings of a client that look up the certificates in force at every handshake.
pub(super) fn client_config(
    current: &Arc<ArcSwap<State>>,
    clock: &Arc<dyn TimeProvider>,
) -> Result<Arc<ClientConfig>, TlsError> {
    let refused = |error: Error| TlsError::Refused {
        file: std::path::PathBuf::new(),
        reason: error.to_string(),
    };
    let following = following(current, None);
    let mut config = ClientConfig::builder_with_details(provider(), Arc::clone(clock))
        .with_protocol_versions(VERSIONS)
        .map_err(refused)?
        .dangerous()
        .with_custom_certificate_verifier(Arc::clone(&following) as Arc<dyn ServerCertVerifier>)
        .with_client_cert_resolver(following);
    config.resumption = Resumption::disabled();
    Ok(Arc::new(config))
}

/// The checks of a client, with the names in the certificates of addresses.
pub(super) fn verifier(
    current: &Arc<ArcSwap<State>>,
    names: Arc<dyn ServerNames>,
) -> Arc<dyn ServerCertVerifier> {
    following(current, Some(names))
}

fn following(current: &Arc<ArcSwap<State>>, names: Option<Arc<dyn ServerNames>>) -> Arc<Following> {
    Arc::new(Following { current: Arc::clone(current), names, provider: provider() })
}

/// Checks and shows the certificates in force. The checks themselves are those of rustls.
#[derive(Debug)]
struct Following {
    current: Arc<ArcSwap<State>>,
    names: Option<Arc<dyn ServerNames>>,
    provider: Arc<CryptoProvider>,
}

impl Following {
    /// The name to look for instead of an address.
    fn name_for(&self, server_name: &ServerName<'_>) -> Result<Option<ServerName<'static>>, Error> {
        let (ServerName::IpAddress(address), Some(names)) = (server_name, &self.names) else {
            return Ok(None);
        };
        let Some(name) = names.name_of((*address).into()) else { return Ok(None) };
        match ServerName::try_from(name) {
            Ok(name) => Ok(Some(name)),
            Err(_) => Err(Error::General("the listener's name cannot be in a certificate".into())),
        }
    }
}

impl ServerCertVerifier for Following {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let state = self.current.load();
        let no_authority = || {
            Error::General("no authority is given to check the certificate: give --tls-ca".into())
        };
        let verifier = state.verifier.as_ref().ok_or_else(no_authority)?;
        let name = self.name_for(server_name)?;
        let server_name = name.as_ref().unwrap_or(server_name);
        verifier.verify_server_cert(end_entity, intermediates, server_name, ocsp_response, now)
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(Error::General("TLS 1.2 is not spoken".into()))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        rustls::crypto::verify_tls13_signature(message, cert, dss, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

impl ResolvesClientCert for Following {
    fn resolve(&self, _: &[&[u8]], schemes: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        let certified = self.current.load().certified.clone()?;
        certified.key.choose_scheme(schemes).is_some().then_some(certified)
    }

    fn has_certs(&self) -> bool {
        self.current.load().certified.is_some()
    }
}

fn roots(file: &std::path::Path, pem: &[u8]) -> Result<Arc<RootCertStore>, TlsError> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(file, pem)? {
        roots.add(certificate).map_err(|error| TlsError::Certificate {
            file: file.to_owned(),
            reason: error.to_string(),
        })?;
    }
    Ok(Arc::new(roots))
}

/// The certificates of a file: at least one.
fn certificates(
    file: &std::path::Path,
    pem: &[u8],
) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let fail =
        |reason: String| TlsError::Pem { file: file.to_owned(), expected: "certificate", reason };
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    let found = found.map_err(|error| fail(error.to_string()))?;
    if found.is_empty() {
        return Err(fail("no section BEGIN CERTIFICATE".to_owned()));
    }
    Ok(found)
}

/// Checks that a certificate is valid at this moment. Returns the end of its validity, in seconds since 1970.
fn check_validity(
    file: &std::path::Path,
    certificate: &[u8],
    clock: &Arc<dyn TimeProvider>,
) -> Result<u64, TlsError> {
    let file = file.to_owned();
    let (_, parsed) = match X509Certificate::from_der(certificate) {
        Ok(parsed) => parsed,
        Err(error) => return Err(TlsError::Certificate { file, reason: error.to_string() }),
    };
    let validity = parsed.validity();
    let (begin, end) = (seconds(validity.not_before), seconds(validity.not_after));
    let now = clock.current_time().map_or(0, |now| now.as_secs());
    if now < begin {
        let (not_before, now) = (date(begin), date(now));
        return Err(TlsError::NotYetValid { file, not_before, now });
    }
    if now > end {
        return Err(TlsError::Expired { file, not_after: date(end), now: date(now) });
    }
    Ok(end)
}

/// A time of a certificate in seconds since 1970.
pub(super) fn seconds(time: x509_parser::time::ASN1Time) -> u64 {
    u64::try_from(time.timestamp()).unwrap_or(0)
}

/// A time in seconds since 1970, for people: `2026-11-27 18:00:00 UTC`.
pub(crate) fn date(seconds: u64) -> String {
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    // Civil date from the number of days, for the proleptic Gregorian calendar: years begin in March here, so that
    // the leap day is the last day of a year.
    let days = days + 719_468;
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    format!("{year:04}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02} UTC")
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

const VERSIONS: &[&rustls::SupportedProtocolVersion] = &[&rustls::version::TLS13];
