//! `switchyard scale`: show or change the goals of a fleet whose placement follows the load.

use std::process::ExitCode;

use anyhow::{Context, Result};
use control_api::{ControlError, FleetGoals};

use crate::{Global, ui};

/// Options of `scale`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Fewest replicas of each expert, 1 to 64. Default: as it is.
    #[arg(long, env = "SWITCHYARD_SCALE_REPLICAS")]
    replicas: Option<u32>,
    /// Replicas of hot experts beyond the minimum, as a share of all replicas, 0 to 16. Default: as it is.
    #[arg(long, env = "SWITCHYARD_SCALE_SPARE")]
    spare: Option<f64>,
    #[command(flatten)]
    control: super::ControlArgs,
}

pub fn run(global: &Global, args: Args) -> Result<ExitCode> {
    let client = args.control.client(&args.control.required_url()?)?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("cannot start the runtime")?;
    let (goals, advice) = runtime.block_on(async {
        let old = client.goals().await?;
        let new = FleetGoals {
            replicas: args.replicas.unwrap_or(old.replicas),
            spare: args.spare.unwrap_or(old.spare),
        };
        let goals = if new == old { old } else { client.set_goals(&new).await? };
        Ok::<_, ControlError>((goals, client.advice().await))
    })?;
    // The goals are in force, whatever the advice says.
    match advice {
        Ok(advice) if advice.min_servers > advice.current_servers => ui::write_err(format_args!(
            "warning: {} replicas of each expert need {} servers of the present kind, and the fleet has {}; until then \
             experts have as many replicas as fit\n",
            goals.replicas, advice.min_servers, advice.current_servers
        )),
        Ok(_) => {}
        Err(error) => ui::write_err(format_args!(
            "warning: the goals are in force; whether the fleet has enough servers for them is unknown: {error}\n"
        )),
    }
    if global.json {
        ui::print_json(&goals)?;
    } else {
        outln!(
            "{} replicas of each expert, {:.3} of all replicas spare",
            goals.replicas,
            goals.spare
        );
    }
    Ok(ExitCode::SUCCESS)
}
