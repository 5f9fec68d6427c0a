//! The engine of a source.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use httpd::trust::tls::Tls;
use message_engine::{Engine, EngineConfig, default_fabrics};
use p2p_core::bootstrap::TicketCheck;

use crate::peers::WeightsSecret;

/// Settings of a source.
pub(crate) struct SourceConfig {
    pub(crate) bind: SocketAddr,
    /// Address of this host for peers, if it is not that of `bind`.
    pub(crate) advertise: Option<IpAddr>,
    /// Check of the tickets or certificates of peers; `None` asks for none.
    pub(crate) check: Option<Arc<dyn TicketCheck>>,
    /// Secret that peers must present; `None` asks for none.
    pub(crate) secret: Option<WeightsSecret>,
    /// Certificates. With them, peers without TLS are refused.
    pub(crate) tls: Option<Tls>,
    /// Bytes per second that peers may read.
    pub(crate) limit: u64,
}

/// Why a source cannot be opened.
#[derive(Debug, thiserror::Error)]
#[error("cannot listen for servers that read weights on {addr}: {detail}")]
pub struct SourceError {
    addr: SocketAddr,
    detail: String,
}

/// The engine of a source, which listens. Peers that connect wait until the source [runs](super::WeightSource::run).
pub(crate) struct ListeningSource {
    pub(super) engine: Engine,
    pub(super) limit: u64,
}

impl SourceConfig {
    /// Listens. Blocks for about a millisecond.
    ///
    /// # Errors
    /// [`SourceError`].
    pub(crate) fn listen(self) -> Result<ListeningSource, SourceError> {
        let Self { bind, advertise, check, secret, tls, limit } = self;
        let failed = |detail: String| SourceError { addr: bind, detail };
        let fabrics = default_fabrics(bind.ip(), advertise).map_err(|e| failed(e.to_string()))?;
        let config = EngineConfig {
            bind,
            advertise,
            fabrics,
            check,
            ticket: secret.map(|secret| secret.reveal().to_owned()),
            tls,
            max_connections: MAX_READERS,
            max_handshakes: MAX_READERS,
            max_notification_bytes: MAX_REQUEST_BYTES,
            notify_window_bytes: REQUEST_WINDOW_BYTES,
            ..EngineConfig::default()
        };
        let engine = Engine::start(config).map_err(|error| failed(error.to_string()))?;
        Ok(ListeningSource { engine, limit })
    }
}

/// Most connections of peers. A server that starts has up to 16.
const MAX_READERS: usize = 512;
/// Longest request, and most bytes of requests of one reader that wait.
const MAX_REQUEST_BYTES: u64 = 4096;
const REQUEST_WINDOW_BYTES: u64 = 64 << 10;
