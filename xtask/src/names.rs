//! Whether the names under which parts of the workspace would be published are free.

use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::process::{Outcome, cargo};
use crate::tree;

/// Asks the registries, by their own clients, for `names`; without any, for the distribution and each crate that is
/// not for development only. Fails if another project has a name.
pub fn check(names: &[String]) -> Result<Outcome> {
    let names = if names.is_empty() { published()? } else { names.to_vec() };
    let mut taken = Vec::new();
    for name in &names {
        let (registry, is_free) = if name == DISTRIBUTION {
            ("PyPI", is_free_distribution(name)?)
        } else {
            ("crates.io", is_free_crate(name)?)
        };
        println!("{name:<32} {registry:<10} {}", if is_free { "free" } else { "taken" });
        if !is_free {
            taken.push(name.as_str());
        }
    }
    Ok(match taken.as_slice() {
        [] => Outcome::Passed,
        taken => Outcome::Failed(format!("taken: {}", taken.join(", "))),
    })
}

/// The distribution, and the workspace's crates with the prefix that are no tools of development.
fn published() -> Result<Vec<String>> {
    let mut names = vec![DISTRIBUTION.to_owned()];
    for (path, text) in tree::read(&["Cargo.toml", "*/Cargo.toml"])? {
        let is_internal = INTERNAL.iter().any(|folder| path.starts_with(folder));
        names.extend(package_name(&text).filter(|_| !is_internal).map(str::to_owned));
    }
    Ok(names)
}

/// The name of a manifest's package, if it has the workspace's prefix.
fn package_name(manifest: &str) -> Option<&str> {
    let (_, package) = manifest.split_once("[package]\n")?;
    let name = package.lines().find_map(|line| line.strip_prefix("name = \""))?;
    name.strip_suffix('"').filter(|name| name.starts_with("switchyard-"))
}

fn is_free_crate(name: &str) -> Result<bool> {
    // Another folder: in the workspace cargo describes the workspace's own crate.
    let mut info = cargo(&["info", "--registry", "crates-io", name]);
    info.current_dir(std::env::temp_dir());
    asked(&mut info, "could not find")
}

fn is_free_distribution(name: &str) -> Result<bool> {
    let mut versions = Command::new("python3");
    versions.args(["-m", "pip", "index", "versions", "--disable-pip-version-check", name]);
    asked(&mut versions, "No matching distribution found")
}

/// Runs a client of a registry. Returns true if it says `absent`.
fn asked(command: &mut Command, absent: &str) -> Result<bool> {
    let output = command.output().with_context(|| format!("cannot start {command:?}"))?;
    let errors = String::from_utf8_lossy(&output.stderr);
    match (output.status.success(), errors.contains(absent)) {
        (true, _) => Ok(false),
        (false, true) => Ok(true),
        (false, false) => bail!("{command:?}: {}", errors.trim()),
    }
}

const DISTRIBUTION: &str = "switchyard-moe";
/// Folders of crates that are for development only.
const INTERNAL: [&str; 8] = [
    "bench/",
    "examples/",
    "fuzz/",
    "softnic/",
    "tests/",
    "transports/ibgda/bring-up/",
    "transports/proxy/driver/",
    "xtask/",
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_packages_name_is_found_by_its_prefix() {
        let manifest = "[package]\nname = \"switchyard-cli\"\n\n[[bin]]\nname = \"switchyard\"\n";
        assert_eq!(package_name(manifest), Some("switchyard-cli"));
        assert_eq!(package_name("[package]\nname = \"xtask\"\n"), None);
        assert_eq!(package_name("[workspace]\nmembers = []\n"), None);
    }
}
