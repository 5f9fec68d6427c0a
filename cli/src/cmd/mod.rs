//! One module per command, and the flags that several share.

use std::path::PathBuf;

use anyhow::{Context, Result};

pub mod bench;
pub mod control_plane;
pub mod demo;
pub mod doctor;
pub mod expert_server;
pub mod generate;
pub mod layer;
pub mod make_checkpoint;
pub mod status;

/// How to reach a control plane.
#[derive(Debug, Clone, clap::Args)]
pub struct ControlArgs {
    /// URL of the control plane, as in http://10.0.0.5:7070.
    #[arg(long, env = "SWITCHYARD_CONTROL_PLANE", value_name = "URL")]
    pub control_plane: Option<String>,
    /// Bearer token of the cluster. Prefer the environment variable: arguments are visible to
    /// every user of the host.
    #[arg(long, env = "SWITCHYARD_TOKEN", hide_env_values = true)]
    pub token: Option<String>,
}

impl ControlArgs {
    /// The URL, or an error that says how to give one.
    pub fn required_url(&self) -> Result<&str> {
        self.control_plane
            .as_deref()
            .context("no control plane given: use --control-plane URL or SWITCHYARD_CONTROL_PLANE")
    }
}

/// Slot geometry; both ends of a connection must agree.
#[derive(Debug, Clone, clap::Args)]
pub struct SlotArgs {
    /// Bytes of a slot: the memory that one peer may write in another.
    #[arg(long, env = "SWITCHYARD_SLOT_BYTES", default_value_t = p2p_core::slot::DEFAULT_SLOT_BYTES)]
    pub slot_bytes: usize,
    /// Frames in a slot: how many can be filled while one is computed.
    #[arg(long, env = "SWITCHYARD_SLOT_FRAMES", default_value_t = p2p_core::slot::DEFAULT_NUM_FRAMES)]
    pub slot_frames: usize,
}

impl SlotArgs {
    /// The checked configuration.
    pub fn config(&self) -> Result<p2p_core::SlotConfig> {
        let config =
            p2p_core::SlotConfig { slot_bytes: self.slot_bytes, num_frames: self.slot_frames };
        p2p_core::SlotLayout::new(config).context("--slot-bytes and --slot-frames")?;
        Ok(config)
    }
}

/// A cluster to start for one command, where no control plane is given.
#[derive(Debug, Clone, clap::Args)]
pub struct LocalArgs {
    /// Expert servers to start here.
    #[arg(long, env = "SWITCHYARD_SERVERS", default_value_t = 4)]
    pub servers: usize,
    /// Servers that hold each expert.
    #[arg(long, env = "SWITCHYARD_REPLICAS", default_value_t = 2)]
    pub replicas: usize,
}

/// The checkpoint to use: the one given, or the small model of this repository.
pub fn model_or_tiny(model: Option<PathBuf>) -> Result<PathBuf> {
    if let Some(model) = model {
        return Ok(model);
    }
    let here = PathBuf::from("data/tiny-moe");
    // A binary that was built from a checkout finds the checkout's model from anywhere.
    let built_from = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../data/tiny-moe"));
    [here, built_from]
        .into_iter()
        .find(|dir| dir.join("config.json").is_file())
        .context("no --model given, and data/tiny-moe is not here: give a checkpoint folder")
}
