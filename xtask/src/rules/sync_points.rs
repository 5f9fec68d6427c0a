//! SYNC POINTs: the memory model describes every one that the code names, and the code names every one that it
//! describes.

use std::collections::BTreeMap;

use anyhow::{Context, Result};

/// Name of the page, in a folder below `docs/`.
const PAGE: &str = "memory-model.md";
/// This file names points that are only examples.
const OWN: &str = "xtask/src/rules/sync_points.rs";
const MARKER: &str = "SYNC POINT ";

/// Names that only one side has, a line each, with file and line.
pub fn errors(files: &BTreeMap<String, String>) -> Result<Vec<String>> {
    let is_page = |(path, _): &(&String, &String)| {
        path.starts_with("docs/") && path.rsplit('/').next() == Some(PAGE)
    };
    let (path, page) =
        files.iter().find(is_page).with_context(|| format!("docs/ has no {PAGE}"))?;
    let headings = page.lines().enumerate().filter(|(_, line)| line.starts_with("### "));
    let described: BTreeMap<String, usize> = headings
        .flat_map(|(idx, line)| names_in(line).into_iter().map(move |name| (name, idx + 1)))
        .collect();
    let mut used: BTreeMap<String, (&str, usize)> = BTreeMap::new();
    for (file, text) in files.iter().filter(|(file, _)| is_source(file)) {
        for (idx, line) in text.lines().enumerate() {
            for name in names_in(line) {
                used.entry(name).or_insert((file, idx + 1));
            }
        }
    }
    let undescribed = used.iter().filter(|(name, _)| !described.contains_key(*name));
    let unused = described.iter().filter(|(name, _)| !used.contains_key(*name));
    let undescribed = undescribed.map(|(name, (file, line))| {
        format!("{file}:{line}: {path} does not describe SYNC POINT `{name}`")
    });
    let unused =
        unused.map(|(name, line)| format!("{path}:{line}: no code names SYNC POINT `{name}`"));
    Ok(undescribed.chain(unused).collect())
}

fn is_source(file: &str) -> bool {
    let extension = file.rsplit_once('.').map(|(_, extension)| extension);
    matches!(extension, Some("rs" | "cu" | "cuh" | "h" | "hpp")) && file != OWN
}

/// The names that follow the marker: `marker name`, with or without backticks, `/` between two.
fn names_in(text: &str) -> Vec<String> {
    let mut names = Vec::new();
    for rest in text.split(MARKER).skip(1) {
        let end = rest.find(|c: char| !(c.is_ascii_lowercase() || "-/`".contains(c)));
        let found = &rest[..end.unwrap_or(rest.len())];
        names.extend(found.split('/').map(|name| name.trim_matches('`')).map(str::to_owned));
    }
    names.retain(|name| !name.is_empty());
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_found_with_and_without_quotes_and_in_pairs() {
        let text = "// SYNC POINT `a-b`, SYNC POINT c: see SYNC POINT d/e. Of the SYNC POINTs, a SYNC POINT, none";
        assert_eq!(names_in(text), ["a-b", "c", "d", "e"]);
    }

    #[test]
    fn names_of_one_side_are_errors_with_their_line() {
        let files = [
            (
                "docs/explanation/memory-model.md",
                "# Model\n\n### SYNC POINT `a`\n### SYNC POINT `gone`\n",
            ),
            ("x.rs", "// SYNC POINT a\n// SYNC POINT `new`"),
        ];
        let files = files.map(|(path, text)| (path.to_owned(), text.to_owned())).into();
        assert_eq!(
            errors(&files).unwrap(),
            [
                "x.rs:2: docs/explanation/memory-model.md does not describe SYNC POINT `new`",
                "docs/explanation/memory-model.md:4: no code names SYNC POINT `gone`",
            ]
        );
    }
}
