//! `switchyard control-plane`.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result};
use control_plane::{Server, ServerConfig};

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
    /// Bearer token that servers and clients must send. Without a token, every process that can reach the
    /// port has full access. Prefer the environment variable: other users of the host can see arguments.
    #[arg(long, env = "SWITCHYARD_TOKEN", hide_env_values = true)]
    token: Option<String>,
    /// Planned number of expert servers. The experts are divided among this many servers.
    #[arg(long, env = "SWITCHYARD_SERVERS", default_value_t = 1)]
    servers: u32,
    /// Replicas of each expert, on distinct servers.
    #[arg(long, env = "SWITCHYARD_REPLICAS", default_value_t = 1)]
    replicas: u32,
    /// Time to live of a lease, in milliseconds, 100 to 3600000. A server that does not renew its lease for
    /// this time is removed from the placement.
    #[arg(long, env = "SWITCHYARD_LEASE_TTL_MS", default_value_t = 3000)]
    lease_ttl_ms: u64,
    /// Folder of the durable state. Without it, the state is lost when the process ends.
    #[arg(long, env = "SWITCHYARD_DATA_DIR", value_name = "DIR")]
    data_dir: Option<PathBuf>,
    /// Fingerprint of the only model to accept. Default: the model of the first server that registers.
    #[arg(long, env = "SWITCHYARD_MODEL_FINGERPRINT", value_name = "HEX")]
    model_fingerprint: Option<String>,
}

pub fn run(global: &Global, args: Args) -> Result<ExitCode> {
    let mut config = ServerConfig::new(args.listen, args.servers, args.replicas);
    config.token = args.token;
    config.lease_ttl = Duration::from_millis(args.lease_ttl_ms);
    config.data_dir = args.data_dir;
    config.model_fingerprint = args.model_fingerprint;
    let without_token = config.token.is_none();
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
                &serde_json::json!({ "event": "listening", "addr": addr.to_string() }),
            )?;
        } else {
            outln!("control plane on http://{addr}");
            if without_token {
                outln!("no token: every process that can reach this port may change the cluster");
            }
        }
        server.run(super::shutdown_signal()?).await?;
        Ok(ExitCode::SUCCESS)
    })
}
