//! TLS of the fleet: certificates of this process, the authority that it trusts, and handshakes.
//!
//! One [`Tls`] serves every listener and every client of a process. It follows its files: a new certificate is in
//! force within two seconds, for handshakes that begin after that. Files that cannot be used change nothing; the
//! log and [`Tls::status`] then say why. Only TLS 1.3 is spoken, and no session is resumed, so that each handshake
//! checks the certificates in force.
//!
//! A certificate carries the name and role of its holder as a URI among its subject alternative names:
//! `switchyard://ROLE/NAME`, see [`identity_of`].

mod error;
mod explain;
mod files;
mod names;
mod peer;
mod records;
mod security;
mod state;
#[cfg(test)]
mod tests;

use std::fmt;
use std::io;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use arc_swap::ArcSwap;
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ServerConfig};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::watch;
use tokio_rustls::{TlsAcceptor, TlsConnector};

pub use error::TlsError;
pub use explain::{HandshakeError, Side, explain};
pub use files::TlsFiles;
pub use names::{certificate_uri, identity_of, is_loopback_host, is_valid_name};
pub use peer::PeerCertificate;
pub use records::{NotTls, Records};
pub use security::{InsecureListener, InsecurePeer, Security, is_exposed};
pub(crate) use state::date;
// Types of other crates in the signatures of this one.
pub use rustls;
pub use rustls::time_provider::TimeProvider;
pub use tokio_rustls;

use crate::Identity;
use files::Contents;
use state::State;

/// Stream of either side after the handshake.
pub type TlsStream<IO> = tokio_rustls::TlsStream<IO>;

/// Rule of a listener for the certificates of its clients.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ClientCertificates {
    /// A client may show a certificate. One that the authority did not sign ends the handshake.
    #[default]
    Optional,
    /// A client without a certificate is refused.
    Required,
}

/// TLS of one process. Cheap to clone; clones share the certificates.
#[derive(Clone, Debug)]
pub struct Tls {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    files: TlsFiles,
    clients: ClientCertificates,
    clock: Arc<dyn TimeProvider>,
    current: Arc<ArcSwap<State>>,
    /// Number of the files in force, for those who wait for a change.
    changed: watch::Sender<u64>,
    /// Looks up the certificates in force at every handshake.
    client_config: Arc<ClientConfig>,
    reload: Mutex<Reload>,
}

/// State of the files on the disk.
#[derive(Debug, Default)]
struct Reload {
    num_reloads: u64,
    num_failures: u64,
    /// Why the files cannot be used.
    problem: Option<String>,
    /// Contents that failed at the last poll. A failure counts once the same contents have failed twice: files are
    /// replaced one after the other.
    failed: Option<Contents>,
    /// `problem` says that the certificate in force has expired.
    is_over: bool,
}

/// Names in the certificates of listeners that a client reaches by their addresses.
pub trait ServerNames: fmt::Debug + Send + Sync {
    /// The name in the certificate of the listener at `address`. `None` if the certificate has the address itself.
    fn name_of(&self, address: IpAddr) -> Option<String>;
}

/// The certificate in force, and the state of the files.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TlsStatus {
    /// End of the certificate of this process, in seconds since 1970. `None` without a certificate.
    pub expires_at: Option<u64>,
    /// Changes of the files that came into force.
    pub num_reloads: u64,
    /// Changes of the files that could not be used.
    pub num_failures: u64,
    /// Why the files on the disk cannot be used. The previous ones stay in force. Or that the certificate in force has
    /// expired.
    pub problem: Option<String>,
}

impl Tls {
    /// Reads the files, and follows them on a thread until the last clone is dropped.
    ///
    /// # Errors
    /// [`TlsError`] names the file, the fault and the remedy.
    pub fn open(files: TlsFiles, clients: ClientCertificates) -> Result<Self, TlsError> {
        Self::with_clock(files, clients, Arc::new(rustls::time_provider::DefaultTimeProvider))
    }

    /// As [`open`](Self::open), with a given clock for the validity of certificates.
    ///
    /// # Errors
    /// As for [`open`](Self::open).
    pub fn with_clock(
        files: TlsFiles,
        clients: ClientCertificates,
        clock: Arc<dyn TimeProvider>,
    ) -> Result<Self, TlsError> {
        files.check()?;
        let state = State::new(&files, files.read()?, clients, &clock, 0)?;
        let current = Arc::new(ArcSwap::from_pointee(state));
        let client_config = state::client_config(&current, &clock)?;
        let (reload, changed) = (Mutex::default(), watch::Sender::new(0));
        let shared =
            Arc::new(Shared { files, clients, clock, current, changed, client_config, reload });
        let weak = Arc::downgrade(&shared);
        let follow = move || {
            loop {
                std::thread::sleep(POLL_PERIOD);
                let Some(shared) = weak.upgrade() else { return };
                shared.poll();
            }
        };
        let thread = std::thread::Builder::new().name("sy-tls-files".to_owned());
        thread.spawn(follow).map_err(TlsError::Thread)?;
        Ok(Self { shared })
    }

    /// Whether this process has a certificate, which listeners need.
    #[must_use]
    pub fn can_listen(&self) -> bool {
        self.shared.current.load().server.is_some()
    }

    /// Whether this process trusts an authority, which clients need.
    #[must_use]
    pub fn can_connect(&self) -> bool {
        self.shared.current.load().verifier.is_some()
    }

    /// The rule for certificates of clients.
    #[must_use]
    pub fn clients(&self) -> ClientCertificates {
        self.shared.clients
    }

    /// The files.
    #[must_use]
    pub fn files(&self) -> &TlsFiles {
        &self.shared.files
    }

    /// The certificate in force, and the state of the files.
    #[must_use]
    pub fn status(&self) -> TlsStatus {
        let expires_at = self.shared.current.load().expires_at;
        let reload = self.shared.reload();
        TlsStatus {
            expires_at,
            num_reloads: reload.num_reloads,
            num_failures: reload.num_failures,
            problem: reload.problem.clone(),
        }
    }

    /// Settings of a client, for libraries that make their own connections. They follow the files, too.
    #[must_use]
    pub fn client_config(&self) -> Arc<ClientConfig> {
        Arc::clone(&self.shared.client_config)
    }

    /// As [`client_config`](Self::client_config). The certificate of a listener whose address has a name in `names` must
    /// contain that name instead of the address.
    #[must_use]
    pub fn client_config_with_names(&self, names: Arc<dyn ServerNames>) -> ClientConfig {
        let mut config = (*self.shared.client_config).clone();
        let verifier = state::verifier(&self.shared.current, names);
        config.dangerous().set_certificate_verifier(verifier);
        config
    }

    fn server_config(&self) -> Option<Arc<ServerConfig>> {
        self.shared.current.load().server.clone()
    }

    /// Carries out the handshake of the listening side. The caller bounds the time.
    ///
    /// # Errors
    /// [`HandshakeError`].
    pub async fn accept<IO>(&self, stream: IO) -> Result<TlsStream<IO>, HandshakeError>
    where
        IO: AsyncRead + AsyncWrite + Unpin,
    {
        let explained = |error: io::Error| HandshakeError::new(Side::Listener, &error);
        let config = self.server_config().ok_or(HandshakeError::NO_CERTIFICATE)?;
        TlsAcceptor::from(config).accept(stream).await.map(TlsStream::Server).map_err(explained)
    }

    /// Carries out the handshake of the connecting side. `host` is the name or the address to which the caller has
    /// connected: the certificate of the listener must contain it. The caller bounds the time.
    ///
    /// # Errors
    /// [`HandshakeError`].
    pub async fn connect<IO>(&self, host: &str, stream: IO) -> Result<TlsStream<IO>, HandshakeError>
    where
        IO: AsyncRead + AsyncWrite + Unpin,
    {
        let explained = |error: io::Error| HandshakeError::new(Side::Client, &error);
        let name = server_name(host)?;
        let connector = TlsConnector::from(self.client_config());
        connector.connect(name, stream).await.map(TlsStream::Client).map_err(explained)
    }

    /// Begins the handshake of the listening side, for callers that move the bytes themselves.
    ///
    /// # Errors
    /// [`HandshakeError`] without a certificate.
    pub fn begin_accept(&self) -> Result<rustls::Connection, HandshakeError> {
        let config = self.server_config().ok_or(HandshakeError::NO_CERTIFICATE)?;
        let begun = rustls::ServerConnection::new(config);
        Ok(begun
            .map_err(|error| HandshakeError::new(Side::Listener, &io::Error::other(error)))?
            .into())
    }

    /// Begins the handshake of the connecting side, for callers that move the bytes themselves. `host` is as for
    /// [`connect`](Self::connect).
    ///
    /// # Errors
    /// [`HandshakeError`] if `host` cannot be in a certificate.
    pub fn begin_connect(&self, host: &str) -> Result<rustls::Connection, HandshakeError> {
        let begun = rustls::ClientConnection::new(self.client_config(), server_name(host)?);
        Ok(begun
            .map_err(|error| HandshakeError::new(Side::Client, &io::Error::other(error)))?
            .into())
    }

    /// Looks at the files now. For tests: a thread does it every second.
    #[doc(hidden)]
    pub fn poll_files(&self) {
        self.shared.poll();
    }
}

/// The identity that the peer of `stream` has proved with its certificate, if any.
#[must_use]
pub fn peer_identity<IO>(stream: &TlsStream<IO>) -> Option<Identity> {
    let (_, connection) = stream.get_ref();
    connection.peer_certificates()?.first().and_then(|certificate| identity_of(certificate))
}

/// As [`peer_identity`], for a connection whose bytes the caller moves. `None` before the end of the handshake.
#[must_use]
pub fn identity_in(connection: &rustls::Connection) -> Option<Identity> {
    if connection.is_handshaking() {
        return None;
    }
    connection.peer_certificates()?.first().and_then(|certificate| identity_of(certificate))
}

/// The value that binds a proof to the TLS connection of `stream`: `tls-exporter` of RFC 9266. Both sides compute the
/// same, and no other connection has it.
#[must_use]
pub fn channel_binding<IO>(stream: &TlsStream<IO>) -> Option<[u8; 32]> {
    exported(stream, CHANNEL_BINDING)
}

/// As [`channel_binding`], for a connection whose bytes the caller moves. `None` before the end of the handshake.
#[must_use]
pub fn binding_of(connection: &rustls::Connection) -> Option<[u8; 32]> {
    connection.export_keying_material([0; 32], CHANNEL_BINDING, Some(b"")).ok()
}

fn server_name(host: &str) -> Result<ServerName<'static>, HandshakeError> {
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    ServerName::try_from(bare.to_owned()).map_err(|_| HandshakeError::name(host))
}

/// 32 secret bytes that both sides of `stream` compute from its keys and `label`.
#[must_use]
pub fn exported<IO>(stream: &TlsStream<IO>, label: &[u8]) -> Option<[u8; 32]> {
    let bytes = [0; 32];
    let exported = match stream {
        TlsStream::Client(stream) => {
            stream.get_ref().1.export_keying_material(bytes, label, Some(b""))
        }
        TlsStream::Server(stream) => {
            stream.get_ref().1.export_keying_material(bytes, label, Some(b""))
        }
    };
    exported.ok()
}

impl Shared {
    fn reload(&self) -> MutexGuard<'_, Reload> {
        self.reload.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that the files are those in force. Their certificate may have expired since.
    fn note_unchanged(&self, contents: Contents, expires_at: Option<u64>) {
        let now = self.clock.current_time().map_or(0, |now| now.as_secs());
        let is_over = expires_at.is_some_and(|end| end < now);
        // Explains it as at a start.
        let loaded =
            is_over.then(|| State::new(&self.files, contents, self.clients, &self.clock, 0));
        let mut reload = self.reload();
        reload.failed = None;
        let was_over = std::mem::replace(&mut reload.is_over, is_over);
        match loaded.and_then(Result::err) {
            Some(_) if was_over => {}
            Some(error) => {
                tracing::error!(%error, "the certificate in force has expired: its peers refuse it");
                reload.problem = Some(error.to_string());
            }
            None => {
                if reload.problem.take().is_some() {
                    tracing::info!("the TLS files are again those in force");
                }
            }
        }
    }

    /// Takes changed files into force.
    fn poll(&self) {
        let before = self.current.load();
        let (contents, loaded) = match self.files.read() {
            Ok(contents) if contents == before.contents => {
                return self.note_unchanged(contents, before.expires_at);
            }
            Ok(contents) => {
                let (files, clock, generation) = (&self.files, &self.clock, before.generation + 1);
                let loaded = State::new(files, contents.clone(), self.clients, clock, generation);
                (contents, loaded)
            }
            Err(error) => (Contents::default(), Err(error)),
        };
        let mut reload = self.reload();
        match loaded {
            Ok(state) => {
                let (expires_at, generation) = (state.expires_at, state.generation);
                self.current.store(Arc::new(state));
                self.changed.send_replace(generation);
                reload.num_reloads += 1;
                (reload.problem, reload.failed, reload.is_over) = (None, None, false);
                tracing::info!(files = %self.files, expires_at, "new TLS files are in force");
            }
            Err(error) => {
                if reload.failed.replace(contents.clone()).as_ref() != Some(&contents) {
                    return;
                }
                let problem = error.to_string();
                if reload.problem.as_ref() == Some(&problem) {
                    return;
                }
                tracing::error!(%error, "the TLS files cannot be used: the previous ones stay in force");
                reload.num_failures += 1;
                (reload.problem, reload.is_over) = (Some(problem), false);
            }
        }
    }
}

/// Label of the exporter, see RFC 9266.
const CHANNEL_BINDING: &[u8] = b"EXPORTER-Channel-Binding";
const POLL_PERIOD: Duration = Duration::from_secs(1);
