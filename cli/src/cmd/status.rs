//! `switchyard status`: members, placement and health of a running cluster.

use std::process::ExitCode;

use anyhow::{Context, Result};
use control_api::{Health, LoadingReport, MemberInfo, MemberState};

use crate::{Global, ui};

/// Options of `status`.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    control: super::ControlArgs,
}

pub fn run(global: &Global, args: Args) -> Result<ExitCode> {
    let url = args.control.required_url()?;
    let client = args.control.client(&url)?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("cannot start the runtime")?;
    let (status, members) = runtime.block_on(async {
        let status = client.status().await?;
        let members = client.members().await?;
        Ok::<_, control_api::ControlError>((status, members))
    })?;
    let (health, problems) = status.health();
    if global.json {
        ui::print_json(&serde_json::json!({
            "control_plane": url,
            "healthy": health == Health::Healthy,
            "health": health.as_str(),
            "problems": problems,
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
        if let Some(leader) = &status.leader {
            let followers = match &status.followers[..] {
                [] => "no other control plane would take over".to_owned(),
                urls => format!("followed by {}", urls.join(", ")),
            };
            outln!("control planes: {leader} leads, {followers}");
        }
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
        for edition in &status.editions {
            outln!("  {}", super::model::line(edition));
        }
        outln!(
            "experts: {} of {} without a live replica (planned: {} servers, {} replicas)",
            status.experts_without_replica,
            status.experts_total,
            status.num_servers,
            status.replicas
        );
        outln!("health: {}", health.as_str());
        for problem in &problems {
            outln!("  {problem}");
        }
        if !members.is_empty() {
            outln!(
                "\n{:<20} {:<10} {:<22} {:<10} {:>9} {:>10}  CLIENTS",
                "SERVER",
                "STATE",
                "ADDRESS",
                "DEVICE",
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
                "{:<20} {:<10} {:<22} {:<10} {:>9} {:>10}  {}{suspected}",
                member.name,
                member.state.as_str(),
                member.data_addr,
                device(member),
                member.experts_held,
                lease,
                clients(member)
            );
        }
        let lines = members.iter().filter_map(loading);
        let lines = lines.chain(members.iter().flat_map(reports));
        for line in lines.chain(members.iter().flat_map(left_out)) {
            outln!("{line}");
        }
    }
    Ok(exit_code(health))
}

/// Exit code that tells scripts the health of a fleet.
pub(super) fn exit_code(health: Health) -> ExitCode {
    match health {
        Health::Healthy => ExitCode::SUCCESS,
        Health::Degraded => ExitCode::from(DEGRADED_EXIT_CODE),
        Health::Down => ExitCode::FAILURE,
    }
}

/// Exit code for a fleet that serves every expert, but not as planned.
const DEGRADED_EXIT_CODE: u8 = 3;

/// Progress of a member that loads experts.
fn loading(member: &MemberInfo) -> Option<String> {
    let LoadingReport { num_experts, num_loaded, num_from_peers, bytes } =
        member.load.as_ref()?.loading?;
    Some(format!(
        "{} is loading: {num_loaded} of {num_experts} experts, {num_from_peers} of them from other servers, {:.2} GB",
        member.name,
        bytes as f64 / 1e9
    ))
}

/// Device of a member, from its last load report.
fn device(member: &MemberInfo) -> &str {
    match &member.load {
        Some(load) => load.device.as_deref().unwrap_or("cpu"),
        None => "-",
    }
}

/// Reasons why clients of a member do not use a better transport, a line each.
fn left_out(member: &MemberInfo) -> impl Iterator<Item = String> {
    let links = member.load.iter().flat_map(|load| &load.links);
    links.flat_map(move |links| {
        links.left_out.iter().map(move |why| {
            format!("{}: {} because clients left out {why}", member.name, links.transport)
        })
    })
}

/// Clients that could not reach a member lately, a line each.
fn reports(member: &MemberInfo) -> impl Iterator<Item = String> {
    member.reports.iter().map(|report| {
        let (name, reporter, reason) = (&member.name, &report.reporter, &report.reason);
        format!("{name}: {reporter} could not reach it {} s ago: {reason}", report.age_ms / 1000)
    })
}

/// Client links of a member by transport, such as `2 shm, 1 libfabric`, from its last load report.
fn clients(member: &MemberInfo) -> String {
    let links = member.load.iter().flat_map(|load| &load.links);
    let texts: Vec<String> =
        links.map(|links| format!("{} {}", links.num_links, links.transport)).collect();
    if texts.is_empty() { "-".to_owned() } else { texts.join(", ") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn excluded_transports_and_reports_of_clients_are_shown_with_the_reason() {
        let member: MemberInfo = serde_json::from_value(serde_json::json!({
            "member_id": "m-1",
            "name": "server-1",
            "incarnation": 1,
            "state": "serving",
            "data_addr": "10.0.0.1:7171",
            "metrics_addr": null,
            "experts_held": 8,
            "experts_assigned": 8,
            "lease_remaining_ms": 900,
            "suspected": false,
            "load": {
                "window_ms": 1, "busy_ms": 0, "num_tokens": 0,
                "links": [
                    { "transport": "shm", "num_links": 2 },
                    { "transport": "libfabric", "num_links": 1, "left_out": ["verbs:roce2: no way"] },
                ],
            },
            "reports": [{ "reporter": "client-7", "reason": "refused", "age_ms": 2500 }],
        }))
        .unwrap();
        assert_eq!(clients(&member), "2 shm, 1 libfabric");
        let lines: Vec<String> = reports(&member).collect();
        assert_eq!(lines, ["server-1: client-7 could not reach it 2 s ago: refused"]);
        let lines: Vec<String> = left_out(&member).collect();
        assert_eq!(lines, ["server-1: libfabric because clients left out verbs:roce2: no way"]);
    }
}
