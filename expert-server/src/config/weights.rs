//! The source of a server's weights, and what other servers may read of them.

use std::fmt;
use std::net::SocketAddr;
use std::str::FromStr;
use std::time::Duration;

/// Settings of the exchange of weights between servers. It needs a control plane.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WeightsConfig {
    /// The source of the experts.
    pub from: WeightsFrom,
    /// Address on which other servers connect to read weights; `None` takes a free port of the interface for clients.
    pub listen: Option<SocketAddr>,
    /// Bytes per second that all other servers together may read of this one. With 0 they may read nothing.
    pub read_limit: u64,
    /// Longest time without a new expert from a peer, for a server that needs peers.
    pub peer_timeout: Duration,
    /// Longest read of up to 16 MiB of a peer. A peer that takes longer has stopped: it is not asked again, and its
    /// experts come from another peer.
    pub chunk_timeout: Duration,
}

impl Default for WeightsConfig {
    fn default() -> Self {
        Self {
            from: WeightsFrom::default(),
            listen: None,
            read_limit: DEFAULT_READ_LIMIT,
            peer_timeout: Duration::from_secs(30),
            // A peer that sends 1 MiB a second needs less.
            chunk_timeout: Duration::from_secs(20),
        }
    }
}

/// The source of a server's experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum WeightsFrom {
    /// From the checkpoint's files if the system has them in memory, otherwise from servers that hold them, otherwise
    /// from the disk. A checkpoint without weight files is as with [`Peers`](Self::Peers).
    #[default]
    Auto,
    /// From servers that hold them. The checkpoint needs no weight files.
    Peers,
    /// From the checkpoint's files.
    Disk,
}

impl WeightsFrom {
    /// All values.
    pub const ALL: [Self; 3] = [Self::Auto, Self::Peers, Self::Disk];

    /// The name in options.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Peers => "peers",
            Self::Disk => "disk",
        }
    }
}

impl fmt::Display for WeightsFrom {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for WeightsFrom {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let known = Self::ALL.into_iter().find(|from| from.name() == text);
        known.ok_or_else(|| {
            format!("'{text}' is no source of weights; expected auto, peers or disk")
        })
    }
}

/// Default of [`WeightsConfig::read_limit`].
pub const DEFAULT_READ_LIMIT: u64 = 4_000_000_000;
