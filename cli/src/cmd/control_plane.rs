//! `switchyard control-plane`.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result};
use control_plane::{Server, ServerConfig};

use crate::{Global, ui};

/// Flags of `control-plane`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Address to listen on; port 0 takes a free one.
    #[arg(long, env = "SWITCHYARD_CONTROL_LISTEN", default_value = "127.0.0.1:7070")]
    listen: String,
    /// Bearer token that members and clients must present. Without one, whoever reaches the port
    /// may do everything. Prefer the environment variable.
    #[arg(long, env = "SWITCHYARD_TOKEN", hide_env_values = true)]
    token: Option<String>,
    /// Planned size of the fleet: experts are spread over this many servers.
    #[arg(long, env = "SWITCHYARD_SERVERS", default_value_t = 1)]
    servers: u32,
    /// Servers that hold each expert.
    #[arg(long, env = "SWITCHYARD_REPLICAS", default_value_t = 1)]
    replicas: u32,
    /// Time after which a silent member counts as gone.
    #[arg(long, env = "SWITCHYARD_LEASE_TTL_MS", default_value_t = 3000)]
    lease_ttl_ms: u64,
    /// Folder for the durable state; without one the state is lost with the process.
    #[arg(long, env = "SWITCHYARD_DATA_DIR")]
    data_dir: Option<PathBuf>,
    /// Accepts only members with this model; otherwise the first member's model is the model.
    #[arg(long, env = "SWITCHYARD_MODEL_FINGERPRINT")]
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
                outln!("no token: whoever reaches this port may change the cluster");
            }
        }
        server.run(super::shutdown_signal()?).await?;
        Ok(ExitCode::SUCCESS)
    })
}
