//! `switchyard control-plane`.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use control_api::trust::tls::{ClientCertificates, Tls, TlsFiles};
use control_plane::store::EtcdCredentials;
use control_plane::{BalanceSettings, EtcdConfig, RateLimits, Server, ServerConfig};

use crate::{Global, ui};

/// Options of `control-plane`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Address to listen on, as HOST:PORT. Port 0 takes a free port.
    #[arg(
        long,
        env = "SWITCHYARD_CONTROL_LISTEN",
        value_name = "HOST:PORT",
        default_value = "127.0.0.1:7070"
    )]
    listen: String,
    /// The cluster's own token, which has all roles: the short form for a fleet where all trust each other. Without it
    /// and without --tokens, every process that can reach the port has full access. Prefer the environment variable or
    /// --token-file: other users of the host can see arguments.
    #[arg(long, env = "SWITCHYARD_TOKEN", hide_env_values = true)]
    token: Option<String>,
    /// File with the cluster's own token in one line, if --token is not given. A second line may have the token before
    /// it, which stays valid: so several control planes can change their token one after the other.
    #[arg(long, env = "SWITCHYARD_TOKEN_FILE", value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// File with the names, roles and hashes of tokens, as `switchyard token new` writes it. It is read again every
    /// second. A wrong file changes nothing.
    #[arg(long, env = "SWITCHYARD_TOKENS_FILE", value_name = "FILE")]
    tokens: Option<PathBuf>,
    /// File to which each change of the fleet is appended, with its caller, as a line of JSON.
    #[arg(long, env = "SWITCHYARD_AUDIT_LOG", value_name = "FILE")]
    audit_log: Option<PathBuf>,
    /// Most requests a second from one address without an identity. A burst may have twice as many. 0 means no limit.
    #[arg(long, env = "SWITCHYARD_RATE_ADDRESS", default_value_t = RateLimits::default().per_address, value_name = "NUMBER")]
    rate_address: u32,
    /// Most requests a second of one identity from one address. A burst may have twice as many. 0 means no limit.
    #[arg(long, env = "SWITCHYARD_RATE_IDENTITY", default_value_t = RateLimits::default().per_identity, value_name = "NUMBER")]
    rate_identity: u32,
    /// Most requests a second about one member, which count against no other limit. A burst may have twice as many. 0
    /// means no limit.
    #[arg(long, env = "SWITCHYARD_RATE_MEMBER", default_value_t = RateLimits::default().per_member, value_name = "NUMBER")]
    rate_member: u32,
    /// Placement of the experts. `fixed` divides them among --servers parts. `load` gives hot experts more replicas,
    /// moves experts as load and servers change, and takes servers of any number and memory.
    #[arg(long, env = "SWITCHYARD_PLACEMENT", default_value = "fixed")]
    placement: PlacementKind,
    /// Expert servers. With `--placement fixed` the experts are divided among this many. With `load` it is the number
    /// that is expected at the start. Default: 1, and with `load` as many as --replicas needs.
    #[arg(long, env = "SWITCHYARD_SERVERS")]
    servers: Option<u32>,
    /// Replicas of each expert, on distinct servers. With `--placement load` hot experts get more: see --spare.
    #[arg(long, env = "SWITCHYARD_REPLICAS", default_value_t = 1)]
    replicas: u32,
    /// With `--placement load`: replicas of hot experts beyond --replicas, as a share of all replicas, 0 to 16. Default:
    /// 0.25.
    #[arg(long, env = "SWITCHYARD_SPARE", value_parser = parse_spare)]
    spare: Option<f64>,
    /// With `--placement load`: time between two plans, in milliseconds, 100 to 86400000. A change of the servers is
    /// planned at once. Default: 10000.
    #[arg(long, env = "SWITCHYARD_PLAN_PERIOD_MS", value_parser = clap::value_parser!(u64).range(100..=86_400_000))]
    plan_period_ms: Option<u64>,
    /// Share of the time for which servers should compute, 0.05 to 0.95: the number of servers in `/v1/advice` aims at it.
    #[arg(long, env = "SWITCHYARD_TARGET_SHARE", default_value_t = 0.6)]
    target_share: f64,
    /// Experts of each layer that have a time series of their own in the metrics, 0 to 1024: the busiest ones. The others
    /// are summed.
    #[arg(long, env = "SWITCHYARD_METRICS_TOP_EXPERTS", default_value_t = 8, value_parser = clap::value_parser!(u32).range(0..=1024))]
    metrics_top_experts: u32,
    /// Time to live of a lease, in milliseconds, 100 to 3600000. A server that does not renew its lease for
    /// this time is removed from the placement.
    #[arg(long, env = "SWITCHYARD_LEASE_TTL_MS", default_value_t = 3000)]
    lease_ttl_ms: u64,
    /// Life of the tickets with which clients connect to servers, in seconds, 10 to 43200. Clients renew them after half
    /// of it. While no control plane runs, clients can connect for as long as their last ticket lives.
    #[arg(long, env = "SWITCHYARD_TICKET_LIFE_S", default_value_t = 600)]
    ticket_life_s: u64,
    /// Store of the state. `embedded` belongs to this process: see --data-dir. `etcd` is shared by several control
    /// planes: one leads, the others take over.
    #[arg(long, env = "SWITCHYARD_STORE", default_value = "embedded")]
    store: StoreKind,
    /// With `--store embedded`: folder of the durable state. Without it, the state is lost when the process ends.
    #[arg(long, env = "SWITCHYARD_DATA_DIR", value_name = "DIR")]
    data_dir: Option<PathBuf>,
    #[command(flatten)]
    etcd: EtcdArgs,
    /// Fingerprint of the only model to accept, 64 hex digits. Default: the model of the first server that registers.
    #[arg(
        long,
        env = "SWITCHYARD_MODEL_FINGERPRINT",
        value_name = "HEX",
        value_parser = super::fingerprint
    )]
    model_fingerprint: Option<String>,
    #[command(flatten)]
    tls: super::tls::TlsArgs,
    #[command(flatten)]
    listener_tls: super::tls::ListenerTlsArgs,
}

/// Options of `--store etcd`.
#[derive(Debug, clap::Args)]
struct EtcdArgs {
    /// With `--store etcd`: URLs of etcd's members, with commas between them or by repeating the option.
    #[arg(long, env = "SWITCHYARD_ETCD_ENDPOINTS", value_name = "URL", value_delimiter = ',')]
    etcd_endpoints: Vec<String>,
    /// With `--store etcd`: prefix of all keys. Each fleet needs one of its own.
    #[arg(long, env = "SWITCHYARD_ETCD_PREFIX", default_value = "/switchyard")]
    etcd_prefix: String,
    /// With `--store etcd`: user name, if etcd asks for one.
    #[arg(long, env = "SWITCHYARD_ETCD_USER", value_name = "NAME")]
    etcd_user: Option<String>,
    /// With `--store etcd`: password of --etcd-user. Prefer the environment variable or --etcd-password-file: other
    /// users of the host can see arguments.
    #[arg(long, env = "SWITCHYARD_ETCD_PASSWORD", hide_env_values = true, value_name = "TEXT")]
    etcd_password: Option<String>,
    /// With `--store etcd`: file with the password of --etcd-user. A line break at its end is no part of it.
    #[arg(long, env = "SWITCHYARD_ETCD_PASSWORD_FILE", value_name = "FILE")]
    etcd_password_file: Option<PathBuf>,
    /// With `--store etcd` and https: certificates of the authority of etcd.
    #[arg(long, env = "SWITCHYARD_ETCD_CA", value_name = "FILE")]
    etcd_ca: Option<PathBuf>,
    /// With `--store etcd` and https: certificate for etcd, if etcd asks for one.
    #[arg(long, env = "SWITCHYARD_ETCD_CERT", value_name = "FILE")]
    etcd_cert: Option<PathBuf>,
    /// With `--store etcd` and https: key of --etcd-cert.
    #[arg(long, env = "SWITCHYARD_ETCD_KEY", value_name = "FILE")]
    etcd_key: Option<PathBuf>,
    /// With `--store etcd`: allow plain HTTP to etcd on other hosts, as --insecure does. Everybody on the network can then
    /// read the fleet's state and etcd's password, and name a leader.
    #[arg(
        long,
        env = "SWITCHYARD_ETCD_INSECURE",
        value_parser = clap::builder::FalseyValueParser::new()
    )]
    etcd_insecure: bool,
    /// With `--store etcd`: time to live of the leader's lease in seconds, 2 to 300. Another control plane takes over
    /// this long after a leader was heard for the last time.
    #[arg(long, env = "SWITCHYARD_ETCD_LEASE_S", default_value_t = 3)]
    etcd_lease_s: u64,
    /// With `--store etcd`: URL at which the other control planes reach this one. Default: the address
    /// of --listen, with https:// if this one has a certificate.
    #[arg(long, env = "SWITCHYARD_CONTROL_ADVERTISE", value_name = "URL")]
    advertise: Option<String>,
}

impl EtcdArgs {
    fn config(self, store: StoreKind) -> Result<Option<EtcdConfig>> {
        match store {
            StoreKind::Embedded if self.etcd_endpoints.is_empty() => return Ok(None),
            StoreKind::Embedded => bail!("--etcd-endpoints needs --store etcd"),
            StoreKind::Etcd if self.etcd_endpoints.is_empty() => {
                bail!("--store etcd needs --etcd-endpoints, such as http://10.0.0.5:2379")
            }
            StoreKind::Etcd => {}
        }
        let (given, file) = (&self.etcd_password, &self.etcd_password_file);
        if given.is_some() && file.is_some() {
            bail!("give --etcd-password or --etcd-password-file, not both");
        }
        let password = super::given_or_read(given.as_ref(), file.as_deref())?;
        let mut config = EtcdConfig::new(self.etcd_endpoints);
        config.credentials = match (self.etcd_user, password) {
            (Some(user), Some(password)) => Some(EtcdCredentials { user, password }),
            (None, None) => None,
            (Some(_), None) => bail!("--etcd-user needs --etcd-password or --etcd-password-file"),
            (None, Some(_)) => bail!("an etcd password is given without --etcd-user"),
        };
        let files = TlsFiles { cert: self.etcd_cert, key: self.etcd_key, ca: self.etcd_ca };
        if files != TlsFiles::default() {
            let tls = Tls::open(files, ClientCertificates::Optional);
            config.security.tls = Some(tls.context("--etcd-ca, --etcd-cert and --etcd-key")?);
        }
        config.security.insecure = self.etcd_insecure;
        config.prefix = self.etcd_prefix;
        config.lease = Duration::from_secs(self.etcd_lease_s);
        config.advertise = self.advertise;
        Ok(Some(config))
    }
}

/// Store of the state.
#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum StoreKind {
    /// This process alone.
    Embedded,
    /// Shared by several control planes.
    Etcd,
}

/// Placement of the experts.
#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum PlacementKind {
    /// Fixed parts.
    Fixed,
    /// Follows the load.
    Load,
}

pub fn parse_spare(text: &str) -> Result<f64, String> {
    let spare = text.parse::<f64>().map_err(|error| error.to_string())?;
    match (0.0..=16.0).contains(&spare) {
        true => Ok(spare),
        false => Err("expected 0 to 16".to_owned()),
    }
}

/// The cluster's token and the previous one, given or read from a file.
fn cluster_tokens(given: Option<&String>, file: Option<&Path>) -> Result<[Option<String>; 2]> {
    let Some(text) = super::given_or_read(given, file)? else { return Ok([None, None]) };
    let Some(file) = file.filter(|_| given.is_none()) else { return Ok([Some(text), None]) };
    let mut lines = text.lines().map(|line| Some(line.trim().to_owned()));
    let tokens = [lines.next().flatten(), lines.next().flatten()];
    if lines.next().is_some() {
        let file = file.display();
        bail!(
            "{file} has more than two lines: expected the cluster's token, and at most the previous one"
        );
    }
    Ok(tokens)
}

pub fn run(global: &Global, args: Args) -> Result<ExitCode> {
    let least = match args.placement {
        PlacementKind::Load => args.replicas.max(1),
        PlacementKind::Fixed => 1,
    };
    let servers = args.servers.unwrap_or(least);
    let mut config = ServerConfig::new(args.listen, servers, args.replicas);
    [config.token, config.previous_token] =
        cluster_tokens(args.token.as_ref(), args.token_file.as_deref())?;
    config.tokens = args.tokens;
    config.audit_log = args.audit_log;
    config.limits.rates.per_address = args.rate_address;
    config.limits.rates.per_identity = args.rate_identity;
    config.limits.rates.per_member = args.rate_member;
    config.target_share = args.target_share;
    config.metrics_top_experts = args.metrics_top_experts;
    config.ticket_life = Duration::from_secs(args.ticket_life_s);
    config.lease_ttl = Duration::from_millis(args.lease_ttl_ms);
    match args.placement {
        PlacementKind::Load => {
            let mut balance = BalanceSettings::default();
            balance.goals.spare = args.spare.unwrap_or(balance.goals.spare);
            balance.period = args.plan_period_ms.map_or(balance.period, Duration::from_millis);
            config.balance = Some(balance);
        }
        PlacementKind::Fixed if args.spare.is_some() || args.plan_period_ms.is_some() => {
            bail!("--spare and --plan-period-ms need --placement load");
        }
        PlacementKind::Fixed => {}
    }
    config.data_dir = args.data_dir;
    config.etcd = args.etcd.config(args.store)?;
    config.model_fingerprint = args.model_fingerprint;
    config.security = args.tls.listener_security(args.listener_tls)?;
    let scheme = if config.security.for_listener().is_some() { "https" } else { "http" };
    let requires_identity = config.requires_identity();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .context("cannot start the runtime")?;
    runtime.block_on(async {
        let server = Server::bind(config).await?;
        let addr = server.local_addr();
        if global.json {
            ui::print_json_line(
                &serde_json::json!({ "event": "listening", "addr": addr.to_string(), "scheme": scheme }),
            )?;
        } else {
            outln!("control plane on {scheme}://{addr}");
            if !requires_identity {
                outln!("no token and no TLS: every process that can reach this port may change the cluster");
            }
        }
        server.run(super::shutdown_signal()?).await?;
        Ok(ExitCode::SUCCESS)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_file_has_the_token_and_the_previous_one() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        let read = |text: &str| {
            std::fs::write(&path, text).unwrap();
            cluster_tokens(None, Some(&path)).map(|tokens| tokens.map(Option::unwrap_or_default))
        };
        assert_eq!(read("new\n").unwrap(), ["new", ""]);
        assert_eq!(read("new\r\nold\n").unwrap(), ["new", "old"]);
        assert!(read("new\nold\nolder\n").unwrap_err().to_string().contains("two lines"));
        assert!(read("").is_err());
        let given = "given".to_owned();
        let tokens = cluster_tokens(Some(&given), Some(&path)).unwrap();
        assert_eq!(tokens, [Some(given), None]);
        assert_eq!(cluster_tokens(None, None).unwrap(), [None, None]);
    }
}
