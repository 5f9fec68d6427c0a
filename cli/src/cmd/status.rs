//! `switchyard status`: members, placement and health of a running cluster.

use std::process::ExitCode;

use anyhow::{Context, Result};
use control_api::{ControlClient, MemberInfo, MemberState};

use crate::{Global, ui};

/// Flags of `status`.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    control: super::ControlArgs,
}

pub fn run(global: &Global, args: Args) -> Result<ExitCode> {
    let url = args.control.required_url()?;
    let client = ControlClient::new(url, args.control.token.clone())?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("cannot start the runtime")?;
    let (status, members) = runtime.block_on(async {
        let status = client.status().await?;
        let members = client.members().await?;
        Ok::<_, control_api::ControlError>((status, members))
    })?;
    let healthy = status.experts_without_replica == 0 && status.experts_total > 0;
    if global.json {
        ui::print_json(&serde_json::json!({
            "control_plane": url,
            "healthy": healthy,
            "status": status,
            "members": members,
        }))?;
    } else {
        outln!(
            "cluster {} at {url}, version {}, epoch {}",
            status.cluster_id,
            status.version,
            status.epoch
        );
        match &status.model {
            Some(model) => outln!(
                "model {} hidden {} · {} MoE layers · {} experts, top-{} · fingerprint {:.12}…",
                model.architecture,
                model.hidden,
                model.moe_layers.len(),
                model.num_experts,
                model.top_k,
                model.fingerprint
            ),
            None => outln!("no model yet: no expert server has registered"),
        }
        outln!(
            "experts: {} of {} without a live replica (planned: {} servers, {} replicas)",
            status.experts_without_replica,
            status.experts_total,
            status.num_servers,
            status.replicas
        );
        if !members.is_empty() {
            outln!(
                "\n{:<20} {:<10} {:<22} {:>9} {:>10}  CLIENTS",
                "SERVER",
                "STATE",
                "ADDRESS",
                "EXPERTS",
                "LEASE"
            );
        }
        for member in &members {
            let suspected = if member.suspected { " (suspected)" } else { "" };
            let lease = match member.state {
                MemberState::Expired => "-".to_owned(),
                _ => format!("{:.1} s", member.lease_remaining_ms as f64 / 1e3),
            };
            outln!(
                "{:<20} {:<10} {:<22} {:>9} {:>10}  {}{suspected}",
                member.name,
                member.state.as_str(),
                member.data_addr,
                member.experts_held,
                lease,
                clients(member)
            );
        }
    }
    Ok(if healthy { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Client links of a member by transport, as in `2 shm, 1 libfabric`, as of its last report.
fn clients(member: &MemberInfo) -> String {
    let links = member.load.iter().flat_map(|load| &load.links);
    let texts: Vec<String> =
        links.map(|links| format!("{} {}", links.num_links, links.transport)).collect();
    if texts.is_empty() { "-".to_owned() } else { texts.join(", ") }
}
