//! Settings of a control plane.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use control_api::{ClientOptions, ControlClient, FleetGoals};
use trust::tls::Security;

use crate::access::rates::RateLimits;
use crate::admission::check_goals;
use crate::balance::BalanceSettings;
use crate::planner::{BalancedPlanner, PlannerConfigError};
use crate::store::EtcdCredentials;

/// All settings. [`ServerConfig::new`] returns the defaults.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ServerConfig {
    /// `host:port` to listen on. Port 0 takes any free port.
    pub listen: String,
    /// The cluster's own token, which has all roles. Without it and without [`tokens`](Self::tokens) every request is
    /// accepted. Control planes on one etcd know each other by it.
    pub token: Option<String>,
    /// The cluster's token before [`token`](Self::token), which stays valid beside it. So the token can be replaced on
    /// one control plane after the other.
    pub previous_token: Option<String>,
    /// File with the names, roles and hashes of further tokens: see [`trust::tokens`]. It is read again every second.
    pub tokens: Option<PathBuf>,
    /// File to which each change of the fleet is appended as a line of JSON. `None` keeps changes in memory only.
    pub audit_log: Option<PathBuf>,
    /// Time to live of a lease, 100 ms to 1 hour. Members renew it three times per period.
    pub lease_ttl: Duration,
    /// A suspected member must renew within one heartbeat interval plus this time.
    pub suspect_grace: Duration,
    /// Time for which an expired member is kept, so that it may return under the same identity.
    pub expired_retention: Duration,
    /// Planned size of the fleet.
    pub num_servers: u32,
    /// Replicas per expert, on distinct servers.
    pub replicas: u32,
    /// Follows the load: experts move between servers as load and members change. `None` divides the model into
    /// `num_servers` fixed parts.
    pub balance: Option<BalanceSettings>,
    /// Compute share of a server that the scaling advice aims at, 0.05 to 0.95.
    pub target_share: f64,
    /// Fingerprint of the only accepted model. `None` accepts the model of the first member.
    pub model_fingerprint: Option<String>,
    /// Life of the tickets with which clients connect to servers, 10 s to 12 hours. Clients renew them after half of it.
    pub ticket_life: Duration,
    /// Directory of the durable state. `None` keeps the state in memory only, unless it is in etcd.
    pub data_dir: Option<PathBuf>,
    /// etcd, if the state is there and several control planes share it.
    pub etcd: Option<EtcdConfig>,
    /// Experts of each layer with a time series of their own in the metrics: the busiest ones.
    pub metrics_top_experts: u32,
    /// Limits on members, connections and requests.
    pub limits: Limits,
    /// TLS of the port and of the connections to other control planes.
    pub security: Security,
}

impl ServerConfig {
    /// Defaults for a fleet of `num_servers` with `replicas` replicas per expert.
    pub fn new(listen: impl Into<String>, num_servers: u32, replicas: u32) -> Self {
        Self {
            listen: listen.into(),
            token: None,
            previous_token: None,
            tokens: None,
            audit_log: None,
            lease_ttl: Duration::from_secs(3),
            suspect_grace: Duration::from_millis(300),
            expired_retention: Duration::from_secs(600),
            num_servers,
            replicas,
            balance: None,
            target_share: 0.6,
            model_fingerprint: None,
            ticket_life: trust::ticket::DEFAULT_LIFE,
            data_dir: None,
            etcd: None,
            metrics_top_experts: 8,
            limits: Limits::default(),
            security: Security::default(),
        }
    }

    /// Returns false if every process that reaches the port may do everything: neither tokens nor client certificates are
    /// checked.
    pub fn requires_identity(&self) -> bool {
        self.token.is_some() || self.tokens.is_some() || self.security.for_listener().is_some()
    }

    /// The valid tokens of the cluster, the present one first.
    pub(crate) fn cluster_tokens(&self) -> impl Iterator<Item = &str> {
        [&self.token, &self.previous_token].into_iter().flatten().map(String::as_str)
    }

    /// Checks the settings without any I/O.
    pub(crate) fn check(&self) -> Result<BalancedPlanner, ConfigError> {
        if !(MIN_LEASE_TTL..=MAX_LEASE_TTL).contains(&self.lease_ttl) {
            return Err(ConfigError::LeaseTtl { found: self.lease_ttl });
        }
        if let Some(balance) = &self.balance {
            if !(MIN_PLAN_PERIOD..=MAX_PLAN_PERIOD).contains(&balance.period) {
                return Err(ConfigError::PlanPeriod { found: balance.period });
            }
            let goals = FleetGoals { replicas: self.replicas, spare: balance.goals.spare };
            check_goals(&goals).map_err(|refusal| ConfigError::Goals(refusal.to_string()))?;
        }
        if !(MIN_TICKET_LIFE..=MAX_TICKET_LIFE).contains(&self.ticket_life) {
            return Err(ConfigError::TicketLife { found: self.ticket_life });
        }
        if !(MIN_TARGET_SHARE..=MAX_TARGET_SHARE).contains(&self.target_share) {
            return Err(ConfigError::TargetShare { found: self.target_share.to_string() });
        }
        let is_token =
            |token: &str| !token.is_empty() && token.bytes().all(|byte| byte.is_ascii_graphic());
        if !self.cluster_tokens().all(is_token) {
            return Err(ConfigError::Token);
        }
        if let Some(found) = &self.model_fingerprint {
            let is_hex = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
            if !(8..=128).contains(&found.len()) || !found.bytes().all(is_hex) {
                return Err(ConfigError::Fingerprint { found: found.clone() });
            }
        }
        if let Some(etcd) = &self.etcd {
            let has_identities = self.tokens.is_some() || self.security.for_listener().is_some();
            if has_identities && self.token.is_none() {
                return Err(ConfigError::NoClusterToken);
            }
            if self.data_dir.is_some() {
                return Err(ConfigError::TwoStores);
            }
            let is_whole = etcd.lease.subsec_nanos() == 0;
            if !is_whole || !(MIN_ETCD_LEASE..=MAX_ETCD_LEASE).contains(&etcd.lease) {
                return Err(ConfigError::EtcdLease { found: etcd.lease });
            }
            etcd.checked_prefix()?;
        }
        Ok(BalancedPlanner::new(self.num_servers, self.replicas)?)
    }
}

/// State in etcd, shared by several control planes: see [`ServerConfig::etcd`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct EtcdConfig {
    /// URLs of the members of etcd, as `https://HOST:PORT` or `http://HOST:PORT`.
    pub endpoints: Vec<String>,
    /// Prefix of all keys. Control planes with the same prefix are those of one fleet.
    pub prefix: String,
    /// User name and password, if etcd asks for them.
    pub credentials: Option<EtcdCredentials>,
    /// Certificates for `https` endpoints: the authority of etcd, and a certificate if etcd asks for one.
    pub security: Security,
    /// Time to live of the leader's lease in whole seconds, 2 to 300. Without a leader for this time another control
    /// plane takes over.
    pub lease: Duration,
    /// URL at which the other control planes reach this one. `None` takes the address that it listens on.
    pub advertise: Option<String>,
}

impl EtcdConfig {
    /// Defaults for these endpoints.
    pub fn new(endpoints: Vec<String>) -> Self {
        Self {
            endpoints,
            prefix: "/switchyard/".to_owned(),
            credentials: None,
            security: Security::default(),
            lease: Duration::from_secs(3),
            advertise: None,
        }
    }

    /// The prefix with a slash at both ends.
    pub(crate) fn checked_prefix(&self) -> Result<String, ConfigError> {
        let inner = self.prefix.trim_matches('/');
        let is_bad = |byte: u8| !byte.is_ascii_graphic();
        if inner.is_empty() || inner.len() > MAX_PREFIX_BYTES || inner.bytes().any(is_bad) {
            return Err(ConfigError::EtcdPrefix { found: self.prefix.clone() });
        }
        Ok(format!("/{inner}/"))
    }

    /// URL of a control plane that listens on `local_addr`.
    pub(crate) fn own_url(
        &self,
        local_addr: SocketAddr,
        security: &Security,
    ) -> Result<String, ConfigError> {
        let url = match &self.advertise {
            Some(url) => url.clone(),
            None if local_addr.ip().is_unspecified() => {
                return Err(ConfigError::Advertise {
                    reason: format!("{local_addr} is no address that others can reach"),
                });
            }
            None if security.for_listener().is_some() => format!("https://{local_addr}"),
            None => format!("http://{local_addr}"),
        };
        check_plane_url(&url, None, security)
            .map_err(|reason| ConfigError::Advertise { reason })?;
        Ok(url.trim_end_matches('/').to_owned())
    }
}

/// Checks that `url` is that of one control plane, and that `token` may be sent there.
pub(crate) fn check_plane_url(
    url: &str,
    token: Option<&str>,
    security: &Security,
) -> Result<(), String> {
    let mut options = ClientOptions::default();
    options.security = security.clone();
    let checked = ControlClient::with_options(url, token.map(str::to_owned), options);
    if !checked.map_err(|err| err.to_string())?.has_fixed_urls() {
        return Err(format!("{url:?} is no URL of one control plane"));
    }
    match url.contains(',') {
        true => Err(format!("{url:?} is more than one URL")),
        false => Ok(()),
    }
}

/// Limits on members, connections and requests.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Limits {
    /// Most members, including expired ones. One identity may have half of them, except for the cluster's own token.
    pub max_members: usize,
    /// Most connections at a time; nine tenths of the process's limit on open files can be less. At the limit, a new
    /// connection replaces one without an identity, of the address with the most of them.
    pub max_connections: usize,
    /// Most placement watches at a time; three quarters of the connections can be less. One identity may open half of
    /// them, except for the cluster's own token.
    pub max_watchers: usize,
    /// Largest head of a request in bytes, at least 8192.
    pub max_head_bytes: usize,
    /// Most header lines of a request.
    pub max_headers: usize,
    /// Largest body of a request about each expert of a server, in bytes. Other bodies have at most 16 KiB.
    pub max_body_bytes: usize,
    /// Most bytes of all bodies at a time, except for those with digests. One identity may hold as many as it leaves free.
    pub max_bodies_bytes: usize,
    /// Largest body with the digests of the model's tensors in bytes. One such body stays in memory.
    pub max_digests_bytes: usize,
    /// Most requests a second of one caller.
    pub rates: RateLimits,
    /// Timeout for a complete request head. Also the timeout after which an idle connection is closed.
    pub head_timeout: Duration,
    /// Timeout from the request's head to its answer.
    pub request_timeout: Duration,
    /// Timeout after which a connection is closed because its peer does not read the answer.
    pub write_timeout: Duration,
    /// Bytes a second that a peer must read while an answer waits for it.
    pub min_write_rate: u32,
    /// Interval between two keep-alive comments on an idle watch.
    pub watch_keep_alive: Duration,
    /// Longest wait for open requests at shutdown.
    pub shutdown_timeout: Duration,
}

impl Limits {
    pub(crate) fn http(&self) -> httpd::Limits {
        httpd::Limits {
            max_connections: self.max_connections,
            file_share: FILE_SHARE,
            max_head_bytes: self.max_head_bytes,
            max_headers: self.max_headers,
            head_timeout: self.head_timeout,
            write_timeout: self.write_timeout,
            min_write_rate: self.min_write_rate,
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
            max_bodies_bytes: 128 << 20,
            max_digests_bytes: 64 << 20,
            rates: RateLimits::default(),
            head_timeout: Duration::from_secs(5),
            request_timeout: Duration::from_secs(5),
            write_timeout: Duration::from_secs(8),
            min_write_rate: 32 << 10,
            watch_keep_alive: Duration::from_secs(1),
            shutdown_timeout: Duration::from_secs(2),
        }
    }
}

/// Per cent of the open files for connections. The store and the probes of members need few.
const FILE_SHARE: u8 = 90;

/// Invalid settings.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages name every field")]
pub enum ConfigError {
    /// See [`ServerConfig::lease_ttl`].
    #[error("a lease of {found:?}: expected {MIN_LEASE_TTL:?} to {MAX_LEASE_TTL:?}")]
    LeaseTtl { found: Duration },
    /// See [`BalanceSettings::period`].
    #[error("a plan period of {found:?}: expected {MIN_PLAN_PERIOD:?} to {MAX_PLAN_PERIOD:?}")]
    PlanPeriod { found: Duration },
    /// See [`BalanceSettings::goals`].
    #[error("goals: {0}")]
    Goals(String),
    /// See [`ServerConfig::ticket_life`].
    #[error("a life of {found:?} for tickets: expected {MIN_TICKET_LIFE:?} to {MAX_TICKET_LIFE:?}")]
    TicketLife { found: Duration },
    /// See [`ServerConfig::target_share`].
    #[error("a target share of {found}: expected {MIN_TARGET_SHARE} to {MAX_TARGET_SHARE}")]
    TargetShare { found: String },
    /// See [`ServerConfig::token`].
    #[error("the token is empty or has characters other than visible ASCII")]
    Token,
    /// Control planes on etcd need a token for each other.
    #[error(
        "etcd and a token file or certificates are given without the cluster's token: control planes on one etcd know each other by it, so set SWITCHYARD_TOKEN to the same random text on all of them"
    )]
    NoClusterToken,
    /// See [`ServerConfig::model_fingerprint`].
    #[error("model fingerprint {found:?}: expected 8 to 128 lowercase hex digits")]
    Fingerprint { found: String },
    /// Both [`ServerConfig::data_dir`] and [`ServerConfig::etcd`] are set.
    #[error("a data directory and etcd are given: the state has one place, so choose one")]
    TwoStores,
    /// See [`EtcdConfig::lease`].
    #[error(
        "an etcd lease of {found:?}: expected whole seconds from {MIN_ETCD_LEASE:?} to {MAX_ETCD_LEASE:?}"
    )]
    EtcdLease { found: Duration },
    /// See [`EtcdConfig::prefix`].
    #[error(
        "etcd prefix {found:?}: expected 1 to {MAX_PREFIX_BYTES} visible ASCII characters, such as /switchyard"
    )]
    EtcdPrefix { found: String },
    /// See [`EtcdConfig::advertise`].
    #[error(
        "no URL for other control planes ({reason}): advertise http://HOST:PORT at which they reach this one"
    )]
    Advertise { reason: String },
    /// See [`ServerConfig::num_servers`] and [`ServerConfig::replicas`].
    #[error(transparent)]
    Planner(#[from] PlannerConfigError),
}

const MIN_ETCD_LEASE: Duration = Duration::from_secs(2);
const MAX_ETCD_LEASE: Duration = Duration::from_secs(300);
const MAX_PREFIX_BYTES: usize = 256;
const MIN_TARGET_SHARE: f64 = 0.05;
const MAX_TARGET_SHARE: f64 = 0.95;
const MIN_LEASE_TTL: Duration = Duration::from_millis(100);
const MIN_TICKET_LIFE: Duration = Duration::from_secs(10);
/// Half of the life of the key that signs a ticket must be longer.
const MAX_TICKET_LIFE: Duration = Duration::from_secs(12 * 3600);
const MIN_PLAN_PERIOD: Duration = Duration::from_millis(100);
const MAX_PLAN_PERIOD: Duration = Duration::from_secs(24 * 3600);
const MAX_LEASE_TTL: Duration = Duration::from_secs(3600);
