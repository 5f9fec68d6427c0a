//! Settings of an engine.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use super::error::StartError;
use super::io::hello::MAX_TICKET_BYTES;
use super::link::{EAGER_OVERHEAD, Limits, MAX_CHUNK_BYTES};
use super::metadata::MAX_BDF_BYTES;
use super::wire::MAX_BODY_BYTES;
use crate::credit::CreditConfig;
use crate::fabric::cma::CmaFabric;
use crate::fabric::stream::{StreamFabric, TcpConfig};
use crate::fabric::{Fabric, FabricOpener};
use p2p_core::bootstrap::{TicketCheck, TicketSource};
use p2p_core::network::NetworkError;
use trust::tls::Tls;

/// Settings of an engine.
#[derive(Debug)]
pub struct EngineConfig {
    /// Address to listen on. Port 0 selects a free port.
    pub bind: SocketAddr,
    /// Address to publish. `None` publishes the address of `bind`, or of the interface with the default route. Without
    /// a route the engine publishes the loopback address and logs a warning.
    pub advertise: Option<IpAddr>,
    /// Transports, the best first. An empty list selects [`default_fabrics`].
    pub fabrics: Vec<Box<dyn Fabric>>,
    /// GPU to publish.
    pub gpu_index: Option<u32>,
    /// PCI address of that GPU to publish, such as `0000:3b:00.0`: at most 32 visible characters.
    pub pci_bdf: Option<String>,
    /// Shared secret that connecting peers must present; at most 512 bytes. Without TLS it travels as it is.
    pub ticket: Option<String>,
    /// Check of the tickets of connecting peers; `None` asks for none. It runs on the engine's thread, before the engine
    /// joins a peer over any transport.
    pub check: Option<Arc<dyn TicketCheck>>,
    /// Certificates. With them the connections for control speak TLS from their first byte to their last, and peers
    /// without it are refused. The engine's thread does the cryptography, about a millisecond for each handshake. Bytes of
    /// transfers are not encrypted.
    pub tls: Option<Tls>,
    /// Time limit of a handshake that a peer has begun.
    pub handshake_timeout: Duration,
    /// Time without an answer of the peer's host after which the connection is closed.
    pub liveness_timeout: Duration,
    /// Time after which the thread counts as stuck if a call into a transport's library does not return; 2 s or more.
    /// Registering memory may take as long. With some transports it takes a second for every few GB.
    pub stuck_timeout: Duration,
    /// Time for which an idle thread polls before it sleeps.
    pub spin: Duration,
    /// Most connections, handshakes included; at most 65535. `credit.max_senders` limits them too.
    pub max_connections: usize,
    /// Most handshakes at a time that peers have begun. At the limit, the engine closes one that has not sent a valid
    /// hello in favour of a new one, the oldest first. If all have sent one, it closes the oldest of them.
    pub max_handshakes: usize,
    /// Most bytes of notifications that wait to be taken, with 64 for each. Above this the engine refuses new
    /// connections. A peer that reconnects gets a new window, while its old notifications still wait.
    pub max_untaken_bytes: u64,
    /// Most transfers at a time.
    pub max_transfers: u32,
    /// Most commands that wait for the thread.
    pub queue_len: usize,
    /// Longest message that this engine accepts ahead of its receive; at most 64 KiB.
    pub eager_bytes: u64,
    /// Bytes of such messages of one peer that may wait here, with 64 for each.
    pub eager_window_bytes: u64,
    /// Bytes of notifications of one peer that may wait here, with 64 for each.
    pub notify_window_bytes: u64,
    /// Longest notification that this engine accepts.
    pub max_notification_bytes: u64,
    /// Largest part of a transfer that the fabric gets at once; at most 128 MiB.
    pub chunk_bytes: u64,
    /// Shares of senders in this engine's network link.
    pub credit: CreditConfig,
}

/// Settings of one connection, at the connecting side.
#[derive(Debug, Clone, Default)]
pub struct ConnectOptions {
    /// Name or address that the peer's certificate must contain. `None` stands for the address of the connection.
    pub host: Option<String>,
    /// Tickets to show. A peer that wants none ignores them.
    pub tickets: Option<Arc<dyn TicketSource>>,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            bind: SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), 0),
            advertise: None,
            fabrics: Vec::new(),
            gpu_index: None,
            pci_bdf: None,
            ticket: None,
            check: None,
            tls: None,
            handshake_timeout: Duration::from_secs(5),
            liveness_timeout: Duration::from_secs(8),
            stuck_timeout: Duration::from_secs(60),
            spin: Duration::from_micros(20),
            max_connections: 4096,
            max_handshakes: 1024,
            max_untaken_bytes: 256 << 20,
            max_transfers: 4096,
            queue_len: 4096,
            eager_bytes: 8 << 10,
            eager_window_bytes: 256 << 10,
            notify_window_bytes: 16 << 20,
            max_notification_bytes: 1 << 30,
            chunk_bytes: 4 << 20,
            credit: CreditConfig {
                window_bytes: 32 << 20,
                sender_window_bytes: 16 << 20,
                grant_bytes: 2 << 20,
                unscheduled_bytes: 1 << 20,
                ..CreditConfig::default()
            },
        }
    }
}

impl EngineConfig {
    /// Settings for the loopback interface, with a free port.
    #[must_use]
    pub fn local() -> Self {
        Self { bind: SocketAddr::new(Ipv4Addr::LOCALHOST.into(), 0), ..Self::default() }
    }

    pub(super) fn check(&self) -> Result<(), StartError> {
        let limits = [
            ("eager_bytes", self.eager_bytes, 0, MAX_BODY_BYTES as u64, "at most 64 KiB"),
            (
                "eager_window_bytes",
                self.eager_window_bytes,
                self.eager_bytes + EAGER_OVERHEAD,
                u64::MAX >> 1,
                "room for one message of `eager_bytes` and 64 bytes",
            ),
            ("notify_window_bytes", self.notify_window_bytes, 4096, u64::MAX >> 1, "4096 or more"),
            (
                "max_notification_bytes",
                self.max_notification_bytes,
                0,
                u64::MAX >> 2,
                "at most 2^62",
            ),
            ("chunk_bytes", self.chunk_bytes, 4096, MAX_CHUNK_BYTES, "4 KiB to 128 MiB"),
            ("stuck_timeout", self.stuck_timeout.as_secs(), 2, u64::MAX, "2 s or more"),
            ("max_transfers", self.max_transfers.into(), 1, 1 << 20, "1 to 2^20"),
            ("queue_len", self.queue_len as u64, 1, 1 << 24, "1 to 2^24"),
            ("max_handshakes", self.max_handshakes as u64, 1, 65535, "1 to 65535"),
            ("max_connections", self.max_connections as u64, 1, 65535, "1 to 65535"),
        ];
        for (what, found, low, high, expected) in limits {
            if !(low..=high).contains(&found) {
                return Err(StartError::Config { what, found, expected });
            }
        }
        let bytes = self.ticket.as_ref().map_or(0, String::len);
        if bytes > MAX_TICKET_BYTES {
            let (what, expected) = ("bytes of `ticket`", "at most 512");
            return Err(StartError::Config { what, found: bytes as u64, expected });
        }
        if let Some(found) = &self.pci_bdf
            && (found.len() > MAX_BDF_BYTES || !found.bytes().all(|byte| byte.is_ascii_graphic()))
        {
            let expected = "at most 32 visible characters, as `0000:3b:00.0`";
            return Err(StartError::Text { what: "pci_bdf", found: found.clone(), expected });
        }
        Ok(())
    }

    pub(super) const fn limits(&self) -> Limits {
        Limits {
            eager_bytes: self.eager_bytes,
            eager_window: self.eager_window_bytes,
            notify_window: self.notify_window_bytes,
            max_notification: self.max_notification_bytes,
            unscheduled_bytes: self.credit.unscheduled_bytes,
            max_demand_bytes: self.credit.max_demand_bytes,
        }
    }
}

/// Opens one fabric: `tcp`, `cma`, `shm`, or a fabric of `others` by its name and argument, such as `libfabric:tcp;ofi_rxm`.
/// `local` is the address of this side's interface, for fabrics that choose one.
///
/// # Errors
/// [`NetworkError`], also if this build or this host lacks the fabric.
pub fn open_fabric(
    text: &str,
    local: Option<IpAddr>,
    others: &[FabricOpener],
) -> Result<Box<dyn Fabric>, NetworkError> {
    let (name, argument) = match text.split_once(':') {
        Some((name, argument)) => (name, Some(argument)),
        None => (text, None),
    };
    let bind = local.unwrap_or(Ipv4Addr::UNSPECIFIED.into());
    match (name, argument) {
        ("tcp", None) => {
            let config = TcpConfig { bind: SocketAddr::new(bind, 0), ..TcpConfig::default() };
            return Ok(Box::new(StreamFabric::new(config)?));
        }
        ("cma", None) => return Ok(Box::new(CmaFabric::new()?)),
        ("shm", None) => return Ok(Box::new(StreamFabric::shm()?)),
        _ => {}
    }
    if let Some(opener) = others.iter().find(|opener| opener.name == name) {
        return (opener.open)(argument, local);
    }
    let others = others.iter().map(|opener| format!("{}[:{}]", opener.name, opener.argument));
    let here: Vec<_> = ["tcp", "cma", "shm"].map(str::to_owned).into_iter().chain(others).collect();
    let detail = format!("no such transport in this build, which has {}", here.join(", "));
    Err(NetworkError { network: text.to_owned(), op: "open", code: None, detail })
}

/// Opens the transports that need nothing installed, the best first.
///
/// # Errors
/// [`NetworkError`] if the system provides no sockets at `bind`.
pub fn default_fabrics(
    bind: IpAddr,
    advertise: Option<IpAddr>,
) -> Result<Vec<Box<dyn Fabric>>, NetworkError> {
    let tcp = TcpConfig { bind: SocketAddr::new(bind, 0), advertise, ..TcpConfig::default() };
    Ok(vec![
        Box::new(CmaFabric::new()?),
        Box::new(StreamFabric::shm()?),
        Box::new(StreamFabric::new(tcp)?),
    ])
}
