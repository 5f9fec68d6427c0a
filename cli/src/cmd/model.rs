//! `switchyard model`: the models that a fleet serves, and the update from one to the next.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result};
use control_api::{AddModelRequest, EditionInfo, EditionList, EditionState, SwitchRequest};

use crate::{Global, ui};

/// Options of `model`.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, clap::Subcommand)]
enum Action {
    /// List the models that the fleet serves. There are two during an update.
    List {
        #[command(flatten)]
        control: super::ControlArgs,
    },
    /// Accept servers of another model beside the current one.
    Add {
        /// Fingerprint of the model, as `inspect --verify sampled` prints it: 64 hex digits.
        #[arg(value_parser = super::fingerprint)]
        fingerprint: String,
        #[command(flatten)]
        control: super::ControlArgs,
    },
    /// Make the next model the current one. Clients that start get it; the others keep theirs.
    Switch {
        /// Switch as soon as every expert of the next model has its replicas, instead of failing before.
        #[arg(
            long,
            env = "SWITCHYARD_MODEL_WHEN_COMPLETE",
            value_parser = clap::builder::FalseyValueParser::new()
        )]
        when_complete: bool,
        /// Live replicas that each expert of the next model must have. Default: as many as planned.
        #[arg(long, env = "SWITCHYARD_MODEL_REPLICAS")]
        replicas: Option<u32>,
        /// Longest time in seconds for which clients keep the old model. Then its servers are drained all the same.
        #[arg(long, env = "SWITCHYARD_MODEL_RETIRE_AFTER_S", default_value_t = 24 * 3600)]
        retire_after_s: u64,
        #[command(flatten)]
        control: super::ControlArgs,
    },
    /// End an update before its switch: the servers of the next model are drained.
    Abort {
        #[command(flatten)]
        control: super::ControlArgs,
    },
}

impl Action {
    fn control(&self) -> &super::ControlArgs {
        match self {
            Self::List { control }
            | Self::Add { control, .. }
            | Self::Switch { control, .. }
            | Self::Abort { control } => control,
        }
    }
}

pub fn run(global: &Global, args: Args) -> Result<ExitCode> {
    let control = args.action.control();
    let client = control.client(&control.required_url()?)?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("cannot start the runtime")?;
    let list = runtime.block_on(async {
        match args.action {
            Action::List { .. } => client.models().await,
            Action::Add { fingerprint, .. } => {
                client.add_model(&AddModelRequest { fingerprint }).await
            }
            Action::Switch { when_complete, replicas, retire_after_s, .. } => {
                let retire_after_ms = Some(retire_after_s.saturating_mul(1000));
                let request = SwitchRequest { when_complete, replicas, retire_after_ms };
                client.switch_model(&request).await
            }
            Action::Abort { .. } => client.abort_model_update().await,
        }
    })?;
    match global.json {
        true => ui::print_json(&list)?,
        false => print(&list),
    }
    Ok(ExitCode::SUCCESS)
}

/// A line for each model.
fn print(EditionList { editions }: &EditionList) {
    outln!(
        "{:<9} {:<14} {:>8} {:>8} {:>12}  NOTE",
        "STATE",
        "MODEL",
        "SERVERS",
        "CLIENTS",
        "EXPERTS"
    );
    for edition in editions {
        outln!("{}", line(edition));
    }
}

pub(super) fn line(edition: &EditionInfo) -> String {
    let EditionInfo { experts_total, experts_without_replica, num_clients, .. } = edition;
    let served = experts_total.saturating_sub(*experts_without_replica);
    let line = format!(
        "{:<9} {:<14.12} {:>8} {num_clients:>8} {:>12}  {}",
        edition.state,
        edition.fingerprint.as_deref().unwrap_or("none yet"),
        edition.members.serving,
        format!("{served}/{experts_total}"),
        note(edition)
    );
    line.trim_end().to_owned()
}

/// The next step of an edition.
fn note(edition: &EditionInfo) -> String {
    match edition.state {
        EditionState::Current => String::new(),
        EditionState::Next if edition.switches_when_complete => {
            "becomes the current model when it is complete".to_owned()
        }
        EditionState::Next if edition.is_complete() => "complete: ready for the switch".to_owned(),
        EditionState::Next => "waits for servers".to_owned(),
        EditionState::Retiring => {
            let left = Duration::from_millis(edition.retires_within_ms.unwrap_or(0)).as_secs();
            format!("its servers are drained once no client follows it, within {left} s at most")
        }
        EditionState::Draining => "its servers leave".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_shows_what_an_edition_waits_for() {
        let edition = |value: serde_json::Value| -> EditionInfo {
            let mut info = serde_json::json!({
                "fingerprint": "0123456789abcdef0123", "state": "next", "epoch": 7, "experts_total": 8,
                "experts_without_replica": 2, "experts_under_replicated": 0, "num_clients": 3,
                "members": { "loading": 1, "serving": 2, "draining": 0, "expired": 0 },
            });
            info.as_object_mut().unwrap().extend(value.as_object().unwrap().clone());
            serde_json::from_value(info).unwrap()
        };
        let next = line(&edition(serde_json::json!({})));
        assert_eq!(
            next,
            "next      0123456789ab          2        3          6/8  waits for servers"
        );
        let complete = line(&edition(serde_json::json!({ "experts_without_replica": 0 })));
        assert!(complete.contains("8/8  complete"), "{complete}");
        let planned = line(&edition(serde_json::json!({ "switches_when_complete": true })));
        assert!(planned.contains("when it is complete"), "{planned}");
        let retiring = serde_json::json!({ "state": "retiring", "retires_within_ms": 61_000 });
        assert!(line(&edition(retiring)).contains("within 61 s"));
    }
}
