//! `switchyard drain` and `switchyard resume`: take a server out of the placement, and put it back.

use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use control_api::{ControlClient, ControlError, DrainRequest, MemberInfo};

use crate::{Global, ui};

/// Options of `drain` and `resume`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Name of the server, as `status` shows it.
    server: String,
    #[command(flatten)]
    control: super::ControlArgs,
}

/// Change of a server's place in the fleet.
#[derive(Debug, Clone, Copy)]
pub enum Action {
    /// Take it out of the placement. It answers clients until they have moved, and keeps running.
    Drain,
    /// Return it to the placement.
    Resume,
}

pub fn run(global: &Global, args: Args, action: Action) -> Result<ExitCode> {
    let url = args.control.required_url()?;
    let client = args.control.client(&url)?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("cannot start the runtime")?;
    let (found, info) = runtime.block_on(apply(&client, &args.server, action))?;
    let Some(info) = info else {
        let names = if found.is_empty() { "none".to_owned() } else { found.join(", ") };
        bail!("the fleet at {url} has no server '{}'; its servers are: {names}", args.server);
    };
    if let Some(reason) = &info.not_stored {
        ui::write_err(format_args!(
            "warning: the drain is not stored ({reason}): a restart of the control plane takes it back\n"
        ));
    }
    if global.json {
        ui::print_json(&info)?;
    } else {
        outln!("{} is {}", info.name, info.state);
    }
    Ok(ExitCode::SUCCESS)
}

/// Names of the members, and the named one after the action. `None` if there is no such member.
async fn apply(
    client: &ControlClient,
    name: &str,
    action: Action,
) -> Result<(Vec<String>, Option<MemberInfo>), ControlError> {
    let members = client.members().await?;
    let Some(member) = members.iter().find(|member| member.name == name) else {
        return Ok((members.into_iter().map(|member| member.name).collect(), None));
    };
    let info = match action {
        Action::Drain => {
            let request = DrainRequest { incarnation: Some(member.incarnation) };
            client.drain(&member.member_id, &request).await?
        }
        Action::Resume => client.resume(&member.member_id).await?,
    };
    Ok((Vec::new(), Some(info)))
}
