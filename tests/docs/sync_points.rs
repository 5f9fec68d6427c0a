//! Every SYNC POINT that the code names is described in the memory model, and every one described
//! there is named in the code.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

#[test]
fn code_and_memory_model_name_the_same_sync_points() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace's folder");
    let page = fs::read_to_string(root.join("docs/explanation/memory-model.md"))
        .expect("the memory model");
    let described: Vec<String> =
        page.lines().filter_map(|line| line.strip_prefix("### ")).flat_map(names_in).collect();
    let mut used = BTreeMap::new();
    collect(root, &mut used);

    assert!(!used.is_empty(), "no SYNC POINT found below {}", root.display());
    for (name, file) in &used {
        assert!(
            described.contains(name),
            "{} names SYNC POINT `{name}`, which docs/explanation/memory-model.md does not describe",
            file.display()
        );
    }
    for name in &described {
        assert!(
            used.contains_key(name),
            "docs/explanation/memory-model.md describes SYNC POINT `{name}`, which no code names"
        );
    }
}

#[test]
fn names_are_found_with_and_without_quotes_and_in_pairs() {
    let text = "// SYNC POINT `a-b`, SYNC POINT c: see SYNC POINT d/e. Of the SYNC POINTs, a SYNC POINT, none";
    assert_eq!(names_in(text), ["a-b", "c", "d", "e"]);
}

/// Adds each name used below `folder`, with one file that uses it.
fn collect(folder: &Path, used: &mut BTreeMap<String, PathBuf>) {
    for entry in fs::read_dir(folder).expect("a readable folder") {
        let entry = entry.expect("a readable entry");
        let (path, kind) = (entry.path(), entry.file_type().expect("the kind of an entry"));
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if kind.is_dir() {
            // Build outputs, also those of the fuzz targets, and hidden folders hold no sources.
            if name != "target" && !name.starts_with('.') {
                collect(&path, used);
            }
        } else if kind.is_file() && is_source(&path) {
            let text =
                String::from_utf8_lossy(&fs::read(&path).expect("a readable file")).into_owned();
            for name in names_in(&text) {
                used.entry(name).or_insert_with(|| path.clone());
            }
        }
    }
}

/// Whether the file is code; this file is not meant, since it names points that are only examples.
fn is_source(path: &Path) -> bool {
    let extension = path.extension().and_then(|extension| extension.to_str());
    matches!(extension, Some("rs" | "cu" | "cuh" | "h" | "hpp"))
        && !path.ends_with("tests/docs/sync_points.rs")
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

const MARKER: &str = "SYNC POINT ";
