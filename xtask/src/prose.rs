//! `cargo xtask prose`: counts breaches of the rules of plain English in comments and Markdown.
//!
//! It reads doc comments, plain comments and Markdown, without code blocks and `bench/runs`. Every folder with a
//! manifest has a ceiling for every kind of flaw, and the ceilings only fall.

mod ceilings;
mod checks;
mod text;

use std::collections::BTreeMap;
use std::fmt::Write as _;

use anyhow::{Context, Result, anyhow, bail};

use self::ceilings::Counts;
use self::checks::{Finding, Flaw};
use crate::process::Outcome;
use crate::tree;

const CEILINGS: &str = "xtask/prose-ceilings.toml";
const FILES: [&str; 9] =
    ["*.rs", "*.md", "*.c", "*.h", "*.cpp", "*.hpp", "*.cu", "*.cuh", "*Cargo.toml"];
/// Records of runs are not edited.
const LEFT_OUT: &str = "bench/runs/";
const MAX_SHOWN: usize = 20;

/// Use of the counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Compare them with the ceilings.
    Check,
    /// Lower the ceilings to them.
    Lower,
    /// Set the ceilings to them.
    Set,
}

/// A finding and the file that it is in.
struct Place {
    file: String,
    finding: Finding,
}

type Findings = BTreeMap<(String, Flaw), Vec<Place>>;

/// The step `prose`.
pub fn check() -> Result<Outcome> {
    run(Mode::Check)
}

/// Counts all flaws.
pub fn run(mode: Mode) -> Result<Outcome> {
    let findings = findings(&tree::read(&FILES)?);
    let found: Counts = findings.iter().map(|(key, places)| (key.clone(), places.len())).collect();
    if mode == Mode::Set {
        return write(&found);
    }
    let ceilings =
        std::fs::read_to_string(CEILINGS).with_context(|| format!("cannot read {CEILINGS}"))?;
    let ceilings = ceilings::parse(&ceilings).map_err(|line| {
        anyhow!("{CEILINGS}:{line}: expected a folder or a kind of flaw with its ceiling")
    })?;
    if mode == Mode::Lower {
        return write(&ceilings::lowered(&ceilings, &found));
    }
    print!("{}", table(&found));
    let (report, num_over) = compare(&findings, &ceilings);
    print!("{report}");
    Ok(match num_over {
        0 => Outcome::Passed,
        _ => Outcome::Failed(format!(
            "{num_over} counts of flaws are above their ceilings; `cargo xtask prose --list FOLDER` lists them"
        )),
    })
}

/// `cargo xtask prose --list`: every flaw of a folder, a line each.
pub fn list(folder: &str) -> Result<Outcome> {
    let folder = folder.trim_end_matches('/');
    let findings = findings(&tree::read(&FILES)?);
    let own = || findings.iter().filter(|((name, _), _)| name == folder);
    if own().next().is_none() && !std::path::Path::new(folder).is_dir() {
        bail!("there is no folder {folder}");
    }
    for ((_, flaw), places) in own() {
        places.iter().for_each(|place| println!("{}", place.line(*flaw)));
    }
    Ok(Outcome::Passed)
}

fn write(counts: &Counts) -> Result<Outcome> {
    std::fs::write(CEILINGS, ceilings::write(counts))
        .with_context(|| format!("cannot write {CEILINGS}"))?;
    Ok(Outcome::Passed)
}

impl Place {
    fn line(&self, flaw: Flaw) -> String {
        format!("{}:{}: {}: {}", self.file, self.finding.line, flaw.name(), self.finding.text)
    }
}

fn findings(files: &BTreeMap<String, String>) -> Findings {
    let folders: Vec<&str> =
        files.keys().filter_map(|path| path.strip_suffix("/Cargo.toml")).collect();
    let mut all = Findings::new();
    for (file, text) in files {
        if file.starts_with(LEFT_OUT) || file.ends_with(".toml") {
            continue;
        }
        let paragraphs =
            if file.ends_with(".md") { text::of_markdown(text) } else { text::of_source(text) };
        let has_paragraph_limit = file == "README.md" || file.starts_with("docs/");
        let mut found = Vec::new();
        paragraphs
            .iter()
            .for_each(|paragraph| checks::check(paragraph, has_paragraph_limit, &mut found));
        let folder = folder_of(file, &folders);
        for finding in found {
            let places = all.entry((folder.to_owned(), finding.flaw)).or_default();
            places.push(Place { file: file.clone(), finding });
        }
    }
    all
}

/// The innermost folder with a manifest that has the file, or its top folder, or `.`.
fn folder_of<'a>(file: &'a str, folders: &[&'a str]) -> &'a str {
    let is_inside =
        |folder: &&&str| file.strip_prefix(**folder).is_some_and(|rest| rest.starts_with('/'));
    let innermost = folders.iter().filter(is_inside).max_by_key(|folder| folder.len());
    innermost.copied().or_else(|| file.split_once('/').map(|(top, _)| top)).unwrap_or(".")
}

/// The counts, a line for each folder.
fn table(found: &Counts) -> String {
    let mut folders: Vec<&str> = found.keys().map(|(folder, _)| folder.as_str()).collect();
    folders.dedup();
    let row = |name: &str, numbers: [String; 4]| {
        let [a, b, c, d] = numbers;
        format!("{name:<28} {a:>9} {b:>9} {c:>9} {d:>10}\n")
    };
    let mut text = row("", Flaw::ALL.map(|flaw| flaw.name().to_owned()));
    for folder in folders {
        let number = |flaw| found.get(&(folder.to_owned(), flaw)).unwrap_or(&0).to_string();
        text += &row(folder, Flaw::ALL.map(number));
    }
    let sum =
        |flaw| found.iter().filter(|((_, other), _)| *other == flaw).map(|(_, n)| n).sum::<usize>();
    text + &row("all", Flaw::ALL.map(|flaw| sum(flaw).to_string()))
}

/// A report of the counts that differ from their ceilings, and how many are above.
fn compare(findings: &Findings, ceilings: &Counts) -> (String, usize) {
    let (mut report, mut num_over) = (String::new(), 0);
    for (key @ (folder, flaw), places) in findings {
        let ceiling = *ceilings.get(key).unwrap_or(&0);
        if places.len() <= ceiling {
            continue;
        }
        num_over += 1;
        let _ = writeln!(
            report,
            "{folder}: {} {}, at most {ceiling} are allowed:",
            places.len(),
            flaw.name()
        );
        for place in places.iter().take(MAX_SHOWN) {
            let _ = writeln!(report, "    {}", place.line(*flaw));
        }
        if places.len() > MAX_SHOWN {
            let _ = writeln!(report, "    and {} more", places.len() - MAX_SHOWN);
        }
    }
    let is_lower = |(key, ceiling): &(&(String, Flaw), &usize)| {
        findings.get(*key).map_or(0, Vec::len) < **ceiling
    };
    let num_lower = ceilings.iter().filter(is_lower).count();
    if num_lower > 0 {
        let _ = writeln!(
            report,
            "{num_lower} counts are below their ceilings: run `cargo xtask prose --write`"
        );
    }
    (report, num_over)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files() -> BTreeMap<String, String> {
        let files = [
            ("a/Cargo.toml", ""),
            ("a/b/Cargo.toml", ""),
            ("a/src/lib.rs", "//! What is here.\n\n/// Nobody.\nfn a() {}"),
            ("a/b/src/lib.rs", "// Who waits.\n"),
            ("docs/x.md", "Those that are far.\n"),
            ("README.md", "Somebody.\n"),
            ("bench/runs/x.md", "Somebody.\n"),
        ];
        files.map(|(path, text)| (path.to_owned(), text.to_owned())).into()
    }

    #[test]
    fn flaws_belong_to_the_innermost_crate() {
        let findings = findings(&files());
        let found: Vec<_> = findings
            .iter()
            .map(|((folder, flaw), places)| (folder.as_str(), *flaw, places.len()))
            .collect();
        assert_eq!(
            found,
            [
                (".", Flaw::Word, 1),
                ("a", Flaw::Headless, 1),
                ("a", Flaw::Word, 1),
                ("a/b", Flaw::Headless, 1),
                ("docs", Flaw::Word, 1),
            ]
        );
    }

    #[test]
    fn a_count_above_its_ceiling_is_reported_with_its_lines() {
        let mut ceilings: Counts =
            findings(&files()).iter().map(|(key, places)| (key.clone(), places.len())).collect();
        assert_eq!(compare(&findings(&files()), &ceilings), (String::new(), 0));
        ceilings.insert(("a".to_owned(), Flaw::Headless), 0);
        let (report, num_over) = compare(&findings(&files()), &ceilings);
        assert_eq!(num_over, 1);
        assert!(report.contains("    a/src/lib.rs:1: headless: What is here.\n"), "{report}");
        ceilings.insert(("a".to_owned(), Flaw::Headless), 2);
        let (report, num_over) = compare(&findings(&files()), &ceilings);
        assert_eq!(num_over, 0);
        assert!(report.contains("1 counts are below"), "{report}");
    }
}
