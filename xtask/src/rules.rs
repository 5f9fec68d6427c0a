//! `cargo xtask rules`: dependencies of each crate, cycles among modules, and the names of SYNC POINTs.
//!
//! The rules are a [table]. A breach is named with file and line. Breaches that exist today are in a [list](known)
//! that only shrinks.

mod known;
mod manifest;
mod modules;
mod paths;
mod sync_points;
mod table;

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result, anyhow};

use self::known::Known;
use self::manifest::{Dependency, Manifest};
use self::modules::{ModulePath, Modules};
use self::paths::{Outline, Path};
use self::table::{Ours, Rule};
use crate::process::Outcome;
use crate::tree;

const FILES: [&str; 7] =
    ["*.rs", "*Cargo.toml", "*.cu", "*.cuh", "*.h", "*.hpp", "docs/*memory-model.md"];
const KNOWN: &str = "xtask/rules-known.txt";

/// The step `rules`.
pub fn check() -> Result<Outcome> {
    run(false)
}

/// `cargo xtask rules --list`: every breach, as an entry of the list of known ones.
pub fn list() -> Result<Outcome> {
    let breaches = breaches(&tree::read(&FILES)?)?;
    let known: BTreeSet<Known> = breaches.into_iter().filter_map(|breach| breach.known).collect();
    known.iter().for_each(|entry| println!("{entry}"));
    Ok(Outcome::Passed)
}

/// Checks the workspace. With `write` it removes entries without a breach from the list.
pub fn run(write: bool) -> Result<Outcome> {
    let files = tree::read(&FILES)?;
    let list = std::fs::read_to_string(KNOWN).with_context(|| format!("cannot read {KNOWN}"))?;
    let breaches = breaches(&files)?;
    if write {
        let found = breaches.iter().filter_map(|breach| breach.known.clone()).collect();
        std::fs::write(KNOWN, known::shrink(&list, &found))
            .with_context(|| format!("cannot write {KNOWN}"))?;
        return run(false);
    }
    let mut errors = errors(&breaches, &list)?;
    errors.extend(sync_points::errors(&files)?);
    for error in &errors {
        println!("{error}");
    }
    Ok(match errors.len() {
        0 => {
            println!("no new breach; {KNOWN} lists {}", known_count(&list));
            Outcome::Passed
        }
        num => Outcome::Failed(format!("{num} breaches of the rules; first: {}", errors[0])),
    })
}

fn known_count(list: &str) -> usize {
    known::parse(list).map_or(0, |entries| entries.len())
}

/// A line that breaks a rule.
struct Breach {
    /// `file:line: reason`, with further lines for a cycle.
    text: String,
    /// The entry that would allow it. Some breaches cannot be allowed.
    known: Option<Known>,
}

/// Breaches that the list does not allow, and entries of the list without a breach.
fn errors(breaches: &[Breach], list: &str) -> Result<Vec<String>> {
    let entries = known::parse(list)
        .map_err(|line| anyhow!("{KNOWN}:{line}: not an entry; see xtask/src/rules/known.rs"))?;
    let is_allowed = |breach: &&Breach| {
        let Some(found) = &breach.known else { return false };
        entries.iter().any(|(_, known)| known.covers(found))
    };
    let mut errors: Vec<String> = breaches
        .iter()
        .filter(|breach| !is_allowed(breach))
        .map(|breach| breach.text.clone())
        .collect();
    let found: BTreeSet<&Known> =
        breaches.iter().filter_map(|breach| breach.known.as_ref()).collect();
    for (line, known) in &entries {
        if !found.contains(known) {
            errors.push(format!(
                "{KNOWN}:{line}: `{known}` is gone or smaller: run `cargo xtask rules --write`"
            ));
        }
    }
    Ok(errors)
}

/// A crate of the workspace.
struct Crate<'a> {
    folder: String,
    rule: &'static Rule,
    manifest: Manifest,
    /// File, module and outline of every source of the library and the main program; and of other programs.
    sources: Vec<(String, ModulePath, Outline)>,
    programs: Vec<(String, Outline)>,
    root: Option<&'a str>,
}

fn breaches(files: &BTreeMap<String, String>) -> Result<Vec<Breach>> {
    let text = files.get("Cargo.toml").context("the workspace has no Cargo.toml")?;
    let workspace = Manifest::parse(text);
    let mut breaches = Vec::new();
    let mut crates = Vec::new();
    for folder in &workspace.members {
        let path = format!("{folder}/Cargo.toml");
        let text = files.get(&path).with_context(|| format!("{path} is missing"))?;
        match table::rule_of(folder) {
            Some(rule) => crates.push(Crate::new(folder, rule, Manifest::parse(text), files)),
            None => breaches.push(Breach {
                text: format!("{path}:1: {folder} has no rule in xtask/src/rules/table.rs"),
                known: None,
            }),
        }
    }
    // Names in sources: of the libraries, and the keys under which manifests know them.
    let mut folders: BTreeMap<String, String> = BTreeMap::new();
    for member in &crates {
        folders.insert(member.manifest.library.clone(), member.folder.clone());
    }
    for shared in &workspace.shared {
        if let Some(path) = &shared.path {
            folders.insert(shared.key.replace('-', "_"), path.clone());
        }
    }
    for member in &crates {
        member.check(&workspace, &folders, &mut breaches);
    }
    Ok(breaches)
}

impl<'a> Crate<'a> {
    fn new(
        folder: &str,
        rule: &'static Rule,
        manifest: Manifest,
        files: &'a BTreeMap<String, String>,
    ) -> Self {
        let prefix = format!("{folder}/src/");
        let (mut sources, mut programs) = (Vec::new(), Vec::new());
        let mut tests = BTreeSet::new();
        let own = files.range(prefix.clone()..).take_while(|(path, _)| path.starts_with(&prefix));
        for (path, text) in own.filter(|(path, _)| path.ends_with(".rs")) {
            let inner = &path[prefix.len()..];
            let outline = paths::outline(text);
            if inner.starts_with("bin/") {
                programs.push((path.clone(), outline));
                continue;
            }
            let module = module_of(inner);
            for child in outline.modules.iter().filter(|child| child.is_test) {
                tests.insert(
                    [module.as_slice(), &child.within, std::slice::from_ref(&child.name)].concat(),
                );
            }
            sources.push((path.clone(), module, outline));
        }
        // Files of modules that only tests have.
        sources.retain(|(_, module, _)| !tests.iter().any(|test| module.starts_with(test)));
        let root = files.get(&format!("{prefix}lib.rs")).map(String::as_str);
        Self { folder: folder.to_owned(), rule, manifest, sources, programs, root }
    }

    fn check(
        &self,
        workspace: &Manifest,
        folders: &BTreeMap<String, String>,
        breaches: &mut Vec<Breach>,
    ) {
        let manifest = format!("{}/Cargo.toml", self.folder);
        let mut keys = BTreeMap::new();
        for dependency in &self.manifest.dependencies {
            let target = self.target(dependency, workspace);
            keys.insert(dependency.key.replace('-', "_"), target.clone());
            if let Some(reason) = self.forbids(&target, dependency.is_optional) {
                breaches.push(self.breach(&manifest, dependency.line, &target, &reason));
            }
        }
        for dependency in &self.manifest.dev_dependencies {
            let name = dependency.key.replace('-', "_");
            keys.entry(name).or_insert_with(|| self.target(dependency, workspace));
        }
        let modules = Modules::new(&self.sources);
        let files = self.sources.iter().map(|(file, _, outline)| (file, outline));
        for (file, outline) in
            files.chain(self.programs.iter().map(|(file, outline)| (file, outline)))
        {
            let uses = outline.uses.iter().map(|import| &import.path);
            for path in uses.chain(&outline.paths) {
                let Some(target) = self.extern_target(path, &keys, folders, &modules) else {
                    continue;
                };
                // A dependency that must be optional is a matter of the manifest.
                if let Some(reason) = self.forbids(&target, true) {
                    breaches.push(self.breach(file, path.line, &target, &reason));
                }
            }
        }
        if self.rule.forbids_unsafe
            && !self.root.is_some_and(|text| text.contains("#![forbid(unsafe_code)]"))
        {
            let text = format!("{}/src/lib.rs:1: lacks #![forbid(unsafe_code)]", self.folder);
            breaches.push(Breach { text, known: None });
        }
        self.check_modules(&modules, breaches);
    }

    fn check_modules(&self, modules: &Modules, breaches: &mut Vec<Breach>) {
        for reference in modules.references() {
            let (Some(from), Some(to)) = (reference.from.first(), reference.to.first()) else {
                continue;
            };
            for (a, b) in self.rule.apart {
                if (from == a && to == b) || (from == b && to == a) {
                    let known = Known::Apart(self.folder.clone(), (*a).to_owned(), (*b).to_owned());
                    breaches.push(Breach {
                        text: format!(
                            "{}:{}: module `{from}` must not refer to module `{to}`",
                            reference.file, reference.line
                        ),
                        known: Some(known),
                    });
                }
            }
        }
        for cycle in modules.cycles() {
            let parent =
                if cycle.parent.is_empty() { ".".to_owned() } else { cycle.parent.join("::") };
            let first = &cycle.references[0];
            let mut text = format!(
                "{}:{}: modules in a cycle: {}",
                first.file,
                first.line,
                cycle.names.join(", ")
            );
            for reference in &cycle.references {
                text += &format!(
                    "\n    {}:{}: {} -> {}",
                    reference.file,
                    reference.line,
                    reference.from.join("::"),
                    reference.to.join("::")
                );
            }
            breaches.push(Breach {
                text,
                known: Some(Known::Cycle(self.folder.clone(), parent, cycle.names)),
            });
        }
    }

    /// The folder of a dependency of ours, or the package of another's.
    fn target(&self, dependency: &Dependency, workspace: &Manifest) -> String {
        let shared = workspace
            .shared
            .iter()
            .find(|shared| dependency.is_shared && shared.key == dependency.key);
        match (shared, &dependency.path) {
            (Some(shared), _) => shared.path.clone().unwrap_or_else(|| shared.package.clone()),
            (None, Some(path)) => join(&self.folder, path),
            (None, None) => dependency.package.clone(),
        }
    }

    /// The crate that a path in a source leads to, in the form of [`Self::target`].
    fn extern_target(
        &self,
        path: &Path,
        keys: &BTreeMap<String, String>,
        folders: &BTreeMap<String, String>,
        modules: &Modules,
    ) -> Option<String> {
        let name = path.segments.first()?;
        if let Some(target) = keys.get(name) {
            return Some(target.clone());
        }
        // Without an entry in the manifest it may be a module of the crate or one that is in scope.
        if modules.has(name) || *name == self.manifest.library {
            return None;
        }
        let foreign = || {
            let is_it = |package: &&&str| package.replace('-', "_") == *name;
            self.rule.forbidden.iter().find(is_it).map(|package| (*package).to_owned())
        };
        folders.get(name).cloned().or_else(foreign)
    }

    /// The reason why this crate must not depend on `target`.
    fn forbids(&self, target: &str, is_optional: bool) -> Option<String> {
        let folder = &self.folder;
        if self.rule.forbidden.contains(&target) {
            return Some(format!("{folder} must not depend on {target}"));
        }
        // Crates of others have no folder.
        if !IS_OURS.iter().any(|top| target == *top || target.starts_with(&format!("{top}/"))) {
            return None;
        }
        match &self.rule.ours {
            Ours::AllBut(names) if names.contains(&target) => {
                Some(format!("{folder} must not depend on {target}"))
            }
            Ours::AllBut(_) => None,
            Ours::Only(names, _) if names.contains(&target) => None,
            Ours::Only(_, optional) if optional.contains(&target) => (!is_optional)
                .then(|| format!("{folder} may depend on {target} only with `optional = true`")),
            Ours::Only(names, optional) => {
                let names: Vec<&str> = names.iter().chain(*optional).copied().collect();
                let list =
                    if names.is_empty() { "no crate of ours".to_owned() } else { names.join(", ") };
                Some(format!("{folder} must not depend on {target}; it may depend on {list}"))
            }
        }
    }

    fn breach(&self, file: &str, line: usize, target: &str, reason: &str) -> Breach {
        Breach {
            text: format!("{file}:{line}: {reason}"),
            known: Some(Known::Dependency(self.folder.clone(), target.to_owned())),
        }
    }
}

/// Top folders with crates of ours.
const IS_OURS: [&str; 17] = [
    "p2p-core",
    "transports",
    "message-engine",
    "softnic",
    "protocol",
    "checkpoint",
    "httpd",
    "kernels",
    "expert-server",
    "attention-client",
    "reference-model",
    "control-plane",
    "cli",
    "tests",
    "bench",
    "xtask",
    "fuzz",
];

/// The module of a file below `src`.
fn module_of(file: &str) -> ModulePath {
    let mut module: ModulePath =
        file.trim_end_matches(".rs").split('/').map(str::to_owned).collect();
    let is_root = module.len() == 1 && matches!(module[0].as_str(), "lib" | "main");
    if is_root || module.last().is_some_and(|last| last == "mod") {
        module.pop();
    }
    module
}

/// `folder/path` without `..`.
fn join(folder: &str, path: &str) -> String {
    let mut parts: Vec<&str> = folder.split('/').collect();
    for part in path.split('/') {
        match part {
            ".." => {
                parts.pop();
            }
            "." => {}
            _ => parts.push(part),
        }
    }
    parts.join("/")
}

#[cfg(test)]
mod tests {
    use super::*;

    const WORKSPACE: &str = "[workspace]\nmembers = [\"p2p-core\", \"kernels\", \"protocol\"]\n\
        [workspace.dependencies]\n\
        kernels = { package = \"switchyard-kernels\", path = \"kernels\" }\n\
        protocol = { package = \"switchyard-wire\", path = \"protocol\" }\n\
        tokio = \"1\"\n";

    /// A small tree that keeps the rules, with `changes` put in.
    fn found(changes: &[(&str, &str)], list: &str) -> Vec<String> {
        let manifest = |name: &str| format!("[package]\nname = \"switchyard-{name}\"\n");
        let mut files: BTreeMap<String, String> = ["p2p-core", "kernels", "protocol"]
            .iter()
            .flat_map(|name| {
                [
                    (format!("{name}/Cargo.toml"), manifest(name)),
                    (format!("{name}/src/lib.rs"), "mod a;\n".to_owned()),
                ]
            })
            .collect();
        files.insert("Cargo.toml".to_owned(), WORKSPACE.to_owned());
        files.extend(changes.iter().map(|(path, text)| ((*path).to_owned(), (*text).to_owned())));
        errors(&breaches(&files).unwrap(), list).unwrap()
    }

    #[test]
    fn a_tree_that_keeps_the_rules_passes() {
        let manifest = "[package]\nname = \"switchyard-kernels\"\n[dev-dependencies]\nprotocol.workspace = true\n";
        let source = "mod a;\n#[cfg(test)]\nmod tests { use protocol::x; }\n#[cfg(test)] mod far;";
        let far = "use protocol::y;";
        assert!(
            found(
                &[
                    ("kernels/Cargo.toml", manifest),
                    ("kernels/src/lib.rs", source),
                    ("kernels/src/far.rs", far)
                ],
                ""
            )
            .is_empty()
        );
    }

    #[test]
    fn a_forbidden_dependency_is_named_with_its_line() {
        let manifest = "[package]\nname = \"switchyard-p2p-core\"\n[dependencies]\nkernels = { workspace = true }\n";
        assert_eq!(
            found(&[("p2p-core/Cargo.toml", manifest)], ""),
            ["p2p-core/Cargo.toml:4: p2p-core must not depend on kernels; it may depend on trust"]
        );
        let manifest = manifest.replace("dependencies", "build-dependencies");
        assert_eq!(found(&[("p2p-core/Cargo.toml", &manifest)], "").len(), 1);
    }

    #[test]
    fn a_forbidden_import_is_named_with_its_line() {
        let found = |text| {
            let found = found(&[("p2p-core/src/a.rs", text)], "");
            found
                .into_iter()
                .map(|error| error.split(": ").next().unwrap().to_owned())
                .collect::<Vec<_>>()
        };
        assert_eq!(found("//! Doc.\nuse kernels::Gpu;\n"), ["p2p-core/src/a.rs:2"]);
        assert_eq!(
            found("fn f() {\n\n    ::switchyard_kernels::open();\n}"),
            ["p2p-core/src/a.rs:3"]
        );
        assert_eq!(found("use rdma_sys::x;"), ["p2p-core/src/a.rs:1"]);
        assert!(found("use std::x; // kernels::Gpu\nconst A: &str = \"kernels::Gpu\";").is_empty());
        assert!(
            found("mod kernels { } use kernels::x;").is_empty(),
            "a module of the crate itself"
        );
    }

    #[test]
    fn a_foreign_crate_may_be_forbidden() {
        let manifest = "[package]\nname = \"switchyard-wire\"\n[dependencies]\nserde = \"1\"\ntokio.workspace = true\n";
        assert_eq!(
            found(&[("protocol/Cargo.toml", manifest)], ""),
            ["protocol/Cargo.toml:5: protocol must not depend on tokio"]
        );
    }

    #[test]
    fn a_cycle_is_named_and_may_be_known() {
        let changes = [
            ("protocol/src/lib.rs", "mod a;\nmod b;\n"),
            ("protocol/src/a.rs", "use crate::b::X;"),
            ("protocol/src/b.rs", "\nuse super::a;"),
        ];
        let errors = found(&changes, "");
        assert_eq!(errors.len(), 1);
        assert!(errors[0].starts_with("protocol/src/a.rs:1: modules in a cycle: a, b\n"));
        assert!(errors[0].ends_with("protocol/src/b.rs:2: b -> a"));
        assert!(found(&changes, "# today\ncycle protocol .: a b\n").is_empty());
    }

    #[test]
    fn a_known_breach_that_is_gone_must_leave_the_list() {
        let list = "cycle protocol .: a b\ndependency p2p-core kernels\n";
        let errors = found(&[], list);
        assert_eq!(errors.len(), 2);
        assert!(errors[0].contains("rules-known.txt:1: `cycle protocol .: a b` is gone"));
        assert_eq!(known::shrink(list, &BTreeSet::new()), "\n");
        let smaller = BTreeSet::from([Known::Cycle(
            "protocol".into(),
            ".".into(),
            vec!["a".into(), "b".into()],
        )]);
        assert_eq!(known::shrink("cycle protocol .: a b c\n", &smaller), "cycle protocol .: a b\n");
    }

    #[test]
    fn sides_of_a_crate_stay_apart() {
        let workspace = "[workspace]\nmembers = [\"attention-client\"]\n";
        let manifest = "[package]\nname = \"switchyard-attention-client\"\n";
        let files = [
            ("Cargo.toml", workspace),
            ("attention-client/Cargo.toml", manifest),
            ("attention-client/src/lib.rs", "mod client; mod device;"),
            ("attention-client/src/client.rs", "use crate::device::Slots;"),
            ("attention-client/src/device.rs", ""),
        ];
        let files = files.map(|(path, text)| (path.to_owned(), text.to_owned())).into();
        let errors = errors(&breaches(&files).unwrap(), "").unwrap();
        assert_eq!(
            errors,
            ["attention-client/src/client.rs:1: module `client` must not refer to module `device`"]
        );
    }

    #[test]
    fn every_member_of_the_workspace_has_a_rule() {
        let workspace = WORKSPACE.replace("\"protocol\"]", "\"protocol\", \"new\"]");
        let manifest = "[package]\nname = \"switchyard-new\"\n";
        let errors = found(&[("Cargo.toml", &workspace), ("new/Cargo.toml", manifest)], "");
        assert_eq!(errors, ["new/Cargo.toml:1: new has no rule in xtask/src/rules/table.rs"]);
    }
}
