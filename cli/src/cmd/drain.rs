//! `switchyard drain` and `switchyard resume`: take a server out of the placement, and put it back.

use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use control_api::{ControlClient, DrainRequest, MemberInfo, MemberState, PlacementTable};

use crate::{Global, ui};

/// Options of `drain` and `resume`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Name of the server, as `status` shows it.
    server: String,
    #[command(flatten)]
    control: super::ControlArgs,
}

/// Options of `drain`.
#[derive(Debug, clap::Args)]
pub struct DrainArgs {
    #[command(flatten)]
    args: Args,
    /// Drain the server even if experts have no other replica. Calls for them fail meanwhile.
    #[arg(
        long,
        env = "SWITCHYARD_DRAIN_FORCE",
        value_parser = clap::builder::FalseyValueParser::new()
    )]
    force: bool,
}

/// Change of a server's place in the fleet.
#[derive(Debug, Clone, Copy)]
enum Action {
    /// Take it out of the placement. It answers clients until they have moved, and keeps running.
    Drain { force: bool },
    /// Return it to the placement.
    Resume,
}

pub fn drain(global: &Global, DrainArgs { args, force }: DrainArgs) -> Result<ExitCode> {
    run(global, args, Action::Drain { force })
}

pub fn resume(global: &Global, args: Args) -> Result<ExitCode> {
    run(global, args, Action::Resume)
}

fn run(global: &Global, args: Args, action: Action) -> Result<ExitCode> {
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
) -> Result<(Vec<String>, Option<MemberInfo>)> {
    let members = client.members().await?;
    let Some(member) = members.iter().find(|member| member.name == name) else {
        return Ok((members.into_iter().map(|member| member.name).collect(), None));
    };
    let info = match action {
        Action::Drain { force } => {
            let is_drained = member.state == MemberState::Draining;
            let is_other =
                |member: &MemberInfo| member.state == MemberState::Serving && member.name != name;
            // A fleet that follows the load keeps the server in the placement until others have its experts.
            let is_replaced = members.iter().any(is_other) && client.goals().await.is_ok();
            if !force
                && !is_drained
                && !is_replaced
                && let Some((layer, expert)) = sole_expert(name, &client.placement().await?)
            {
                bail!(
                    "expert {expert} of layer {layer} is on {name} alone, so calls would fail: let another server have \
                     it first, or use --force"
                );
            }
            let request = DrainRequest { incarnation: Some(member.incarnation) };
            client.drain(&member.member_id, &request).await?
        }
        Action::Resume => client.resume(&member.member_id).await?,
    };
    Ok((Vec::new(), Some(info)))
}

/// Layer and number of an expert that the server has alone, if there is one.
pub(super) fn sole_expert(name: &str, table: &PlacementTable) -> Option<(u32, usize)> {
    let rank = table.servers.iter().position(|server| server.name == name)?;
    table.layers.iter().find_map(|layer| {
        let alone = layer.replicas.iter().position(|replicas| replicas[..] == [rank as u32]);
        alone.map(|expert| (layer.layer, expert))
    })
}
