//! Settings of both sides.

use std::sync::Arc;
use std::time::Duration;

use trust::tls::Tls;

use super::fallback::Fallback;
use super::ticket::{TicketCheck, TicketSource};
use super::{DEFAULT_HANDSHAKE_TIMEOUT, DEFAULT_LIVENESS_TIMEOUT};
#[cfg(feature = "test-transports")]
use crate::backend::staged::Disorder;
use crate::device::DeviceMemory;
use crate::endpoint::TransportKind;
use crate::network::Network;
use crate::slot::SlotConfig;

/// How to connect.
#[derive(Debug, Clone)]
pub struct ConnectConfig {
    /// Slots to use. The listening side must have the same.
    pub slot: SlotConfig,
    /// Shared secret, if the listening side wants one. It travels as it is.
    pub secret: Option<String>,
    /// Tickets, if the listening side wants one. A listener that wants none ignores them.
    pub tickets: Option<Arc<dyn TicketSource>>,
    /// Transports to offer, the best first.
    pub transports: Vec<TransportKind>,
    /// Networks of this process, for the network kinds among `transports`.
    pub networks: Vec<Arc<dyn Network>>,
    /// Failures of offers with this peer so far. All connections to one peer should share it.
    pub fallback: Fallback,
    /// Memory for device slots beside the host slots. The listening side must want the same.
    pub device: Option<Arc<dyn DeviceMemory>>,
    /// Certificates, if the listening side speaks TLS. Its certificate must contain the host to
    /// which this side connects.
    pub tls: Option<Tls>,
    /// Limit on the time of the whole handshake.
    pub timeout: Duration,
    /// Time after which a host that does not answer counts as gone.
    pub liveness_timeout: Duration,
    /// Delays and reordering of a staged transport. For tests.
    #[cfg(feature = "test-transports")]
    pub disorder: Option<Disorder>,
}

impl Default for ConnectConfig {
    fn default() -> Self {
        Self {
            slot: SlotConfig::default(),
            secret: None,
            tickets: None,
            transports: vec![TransportKind::Local, TransportKind::Shm],
            networks: Vec::new(),
            fallback: Fallback::default(),
            device: None,
            tls: None,
            timeout: DEFAULT_HANDSHAKE_TIMEOUT,
            liveness_timeout: DEFAULT_LIVENESS_TIMEOUT,
            #[cfg(feature = "test-transports")]
            disorder: None,
        }
    }
}

/// How to listen.
#[derive(Debug, Clone)]
pub struct ListenerConfig {
    /// Slots to use. Peers must have the same.
    pub slot: SlotConfig,
    /// Shared secret that peers must show; `None` asks for none.
    pub secret: Option<String>,
    /// Check of peers' tickets; `None` asks for none.
    pub tickets: Option<Arc<dyn TicketCheck>>,
    /// Transports to offer.
    pub transports: Vec<TransportKind>,
    /// Networks of this process, for the network kinds among `transports`.
    pub networks: Vec<Arc<dyn Network>>,
    /// Memory for device slots beside the host slots. Peers must want the same.
    pub device: Option<Arc<dyn DeviceMemory>>,
    /// Certificates. With them, peers without TLS are refused.
    pub tls: Option<Tls>,
    /// Limit on the time of a whole handshake.
    pub handshake_timeout: Duration,
    /// Most handshakes under way. Beyond it, a newcomer evicts the oldest silent one. A quarter of
    /// the process's limit on open files is a second bound, so that connected peers keep theirs.
    pub max_handshakes: usize,
    /// Most peers connected at the same time.
    pub max_peers: usize,
    /// Most peers of one holder of tickets at the same time. Default: half of `max_peers`.
    pub max_peers_of_holder: Option<usize>,
    /// Time after which a host that does not answer counts as gone.
    pub liveness_timeout: Duration,
    /// Delays and reordering of a staged transport. For tests.
    #[cfg(feature = "test-transports")]
    pub disorder: Option<Disorder>,
}

impl Default for ListenerConfig {
    fn default() -> Self {
        Self {
            slot: SlotConfig::default(),
            secret: None,
            tickets: None,
            transports: vec![TransportKind::Local, TransportKind::Shm],
            networks: Vec::new(),
            device: None,
            tls: None,
            handshake_timeout: DEFAULT_HANDSHAKE_TIMEOUT,
            max_handshakes: 1024,
            max_peers: 4096,
            max_peers_of_holder: None,
            liveness_timeout: DEFAULT_LIVENESS_TIMEOUT,
            #[cfg(feature = "test-transports")]
            disorder: None,
        }
    }
}
