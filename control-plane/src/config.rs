//! Settings of a control plane.

use std::path::PathBuf;
use std::time::Duration;

use crate::planner::{PlannerConfigError, SeatPlanner};

/// Everything that can be set. [`ServerConfig::new`] gives the defaults.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ServerConfig {
    /// `host:port` to listen on; port 0 takes any free one.
    pub listen: String,
    /// Bearer token that every request under `/v1` must carry; `None` lets everybody in.
    pub token: Option<String>,
    /// Time to live of a lease. Members renew every third of it.
    pub lease_ttl: Duration,
    /// Added to a heartbeat interval to give the time in which a suspected member must renew.
    pub suspect_grace: Duration,
    /// How long an expired member is remembered, so that it may come back as the same.
    pub expired_retention: Duration,
    /// Planned size of the fleet.
    pub num_servers: u32,
    /// Replicas per expert, on distinct servers.
    pub replicas: u32,
    /// The only model accepted; `None` = the first one registered.
    pub model_fingerprint: Option<String>,
    /// Directory of the durable state; `None` keeps it in memory only.
    pub data_dir: Option<PathBuf>,
    /// Protection against too much of anything.
    pub limits: Limits,
}

impl ServerConfig {
    /// Defaults for a fleet of `num_servers` with `replicas` replicas per expert.
    pub fn new(listen: impl Into<String>, num_servers: u32, replicas: u32) -> Self {
        Self {
            listen: listen.into(),
            token: None,
            lease_ttl: Duration::from_secs(3),
            suspect_grace: Duration::from_millis(300),
            expired_retention: Duration::from_secs(600),
            num_servers,
            replicas,
            model_fingerprint: None,
            data_dir: None,
            limits: Limits::default(),
        }
    }

    /// Checks what can be checked without touching anything.
    pub(crate) fn check(&self) -> Result<SeatPlanner, ConfigError> {
        if !(MIN_LEASE_TTL..=MAX_LEASE_TTL).contains(&self.lease_ttl) {
            return Err(ConfigError::LeaseTtl { found: self.lease_ttl });
        }
        if let Some(token) = &self.token
            && (token.is_empty() || !token.bytes().all(|byte| byte.is_ascii_graphic()))
        {
            return Err(ConfigError::Token);
        }
        if let Some(found) = &self.model_fingerprint {
            let is_hex = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
            if !(8..=128).contains(&found.len()) || !found.bytes().all(is_hex) {
                return Err(ConfigError::Fingerprint { found: found.clone() });
            }
        }
        Ok(SeatPlanner::new(self.num_servers, self.replicas)?)
    }
}

/// Protection against too much of anything.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Limits {
    /// Most members, expired ones included.
    pub max_members: usize,
    /// Most connections at a time; also kept below the process's limit on open files. Beyond it
    /// the oldest connection that has not sent a request yet gives way.
    pub max_connections: usize,
    /// Most placement watches at a time.
    pub max_watchers: usize,
    /// Largest head of a request in bytes, 8192 at least.
    pub max_head_bytes: usize,
    /// Most header lines of a request.
    pub max_headers: usize,
    /// Largest body of a request in bytes.
    pub max_body_bytes: usize,
    /// Time within which a head must be complete, and after which an idle connection is closed.
    pub head_timeout: Duration,
    /// Time within which a request must be complete and answered.
    pub request_timeout: Duration,
    /// How long a peer may leave an answer unread.
    pub write_timeout: Duration,
    /// Pause between the keep-alives of a watch.
    pub watch_keep_alive: Duration,
    /// Time for open requests to finish at shutdown.
    pub shutdown_timeout: Duration,
}

impl Limits {
    pub(crate) fn http(&self) -> httpd::Limits {
        httpd::Limits {
            max_connections: self.max_connections,
            max_head_bytes: self.max_head_bytes,
            max_headers: self.max_headers,
            head_timeout: self.head_timeout,
            write_timeout: self.write_timeout,
            shutdown_timeout: self.shutdown_timeout,
        }
    }
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_members: 4096,
            max_connections: 8192,
            max_watchers: 4096,
            max_head_bytes: 16 << 10,
            max_headers: 64,
            max_body_bytes: 8 << 20,
            head_timeout: Duration::from_secs(5),
            request_timeout: Duration::from_secs(5),
            write_timeout: Duration::from_secs(8),
            watch_keep_alive: Duration::from_secs(1),
            shutdown_timeout: Duration::from_secs(2),
        }
    }
}

/// Settings that cannot work.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// See [`ServerConfig::lease_ttl`].
    #[error("a lease of {found:?}: expected {MIN_LEASE_TTL:?} to {MAX_LEASE_TTL:?}")]
    LeaseTtl {
        /// The setting.
        found: Duration,
    },
    /// See [`ServerConfig::token`].
    #[error("the token is empty or has characters other than visible ASCII")]
    Token,
    /// See [`ServerConfig::model_fingerprint`].
    #[error("model fingerprint {found:?}: expected 8 to 128 lowercase hex digits")]
    Fingerprint {
        /// The setting.
        found: String,
    },
    /// See [`ServerConfig::num_servers`] and [`ServerConfig::replicas`].
    #[error(transparent)]
    Planner(#[from] PlannerConfigError),
}

const MIN_LEASE_TTL: Duration = Duration::from_millis(100);
const MAX_LEASE_TTL: Duration = Duration::from_secs(3600);
