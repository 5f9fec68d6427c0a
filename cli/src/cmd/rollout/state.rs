//! The plan of a rollout and its progress, in memory and in a file.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use control_api::{MemberInfo, MemberState};
use serde::{Deserialize, Serialize};

/// Servers to restart, in order.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Plan {
    pub steps: Vec<Step>,
    #[serde(skip)]
    file: Option<PathBuf>,
}

/// One server to restart.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Step {
    pub name: String,
    /// The process that the rollout ends.
    pub incarnation: u64,
    pub is_done: bool,
}

impl Plan {
    /// A plan for the named servers, or for all that are not expired.
    pub fn new(members: &[MemberInfo], names: &[String]) -> Result<Self> {
        let step = |member: &MemberInfo| Step {
            name: member.name.clone(),
            incarnation: member.incarnation,
            is_done: false,
        };
        let steps = if names.is_empty() {
            let live = members.iter().filter(|member| member.state != MemberState::Expired);
            live.map(step).collect()
        } else {
            let find = |name: &String| {
                let found = members.iter().find(|member| member.name == *name);
                found.map(step).with_context(|| {
                    let known: Vec<&str> = members.iter().map(|m| m.name.as_str()).collect();
                    format!(
                        "the fleet has no server '{name}'; its servers are: {}",
                        known.join(", ")
                    )
                })
            };
            names.iter().map(find).collect::<Result<Vec<_>>>()?
        };
        if steps.is_empty() {
            bail!("the fleet has no servers");
        }
        Ok(Self { steps, file: None })
    }

    /// The plan in `file` if there is one, otherwise a new one, which is written there.
    pub fn open(file: &Path, members: &[MemberInfo], names: &[String]) -> Result<Self> {
        let context = || format!("cannot read the rollout in {}", file.display());
        let text = match std::fs::read(file) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                let plan = Self { file: Some(file.to_owned()), ..Self::new(members, names)? };
                plan.save()?;
                return Ok(plan);
            }
            Err(error) => return Err(error).with_context(context),
        };
        let mut plan: Self = serde_json::from_slice(&text).with_context(context)?;
        plan.file = Some(file.to_owned());
        let planned: Vec<&str> = plan.steps.iter().map(|step| step.name.as_str()).collect();
        if !names.is_empty() && planned != names {
            bail!(
                "{} holds a rollout of {}: name these servers, or remove the file to start over",
                file.display(),
                planned.join(", ")
            );
        }
        Ok(plan)
    }

    /// Writes the plan to its file, if it has one.
    pub fn save(&self) -> Result<()> {
        let Some(file) = &self.file else { return Ok(()) };
        // A reader sees the old plan or the new one.
        let next = file.with_extension("next");
        std::fs::write(&next, serde_json::to_vec_pretty(self)?)
            .and_then(|()| std::fs::rename(&next, file))
            .with_context(|| format!("cannot write the rollout to {}", file.display()))
    }

    /// Removes the file of a plan that is done.
    pub fn remove(&self) {
        if let Some(file) = &self.file
            && let Err(error) = std::fs::remove_file(file)
        {
            let file = file.display();
            tracing::warn!(%error, "cannot remove {file}: remove it before the next rollout");
        }
    }
}
