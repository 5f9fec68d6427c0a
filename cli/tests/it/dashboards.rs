//! `deploy/grafana`, `deploy/prometheus/rules.yml` and the chart's copy of it are generated from the names of the metrics, and every alert
//! has a page in `docs/runbooks`.
//!
//! `cargo xtask dashboards` runs these tests with `SWITCHYARD_BLESS=1`: then they write the files instead of
//! comparing them.

mod alerts;
mod grafana;
mod rules;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Compares values, not text: features of other crates decide on the order of a JSON object's fields.
#[test]
fn the_dashboard_is_current() {
    let file = "deploy/grafana/dashboards/switchyard.json";
    if is_blessing() {
        return compare(file, &grafana::text());
    }
    let found = std::fs::read_to_string(root().join(file)).expect("dashboard");
    let found: serde_json::Value = serde_json::from_str(&found).expect("dashboard is JSON");
    let expected = grafana::dashboard();
    let num_panels = |dashboard: &serde_json::Value| dashboard["panels"].as_array().map(Vec::len);
    assert_eq!(num_panels(&found), num_panels(&expected), "{file}: run cargo xtask dashboards");
    for (idx, panel) in expected["panels"].as_array().expect("panels").iter().enumerate() {
        assert_eq!(found["panels"][idx], *panel, "{file}: run cargo xtask dashboards");
    }
    assert_eq!(found, expected, "{file}: run cargo xtask dashboards");
}

#[test]
fn the_rules_are_current() {
    compare("deploy/prometheus/rules.yml", &rules::rules());
    // A chart reads only files of its own folder.
    compare("deploy/helm/switchyard/files/rules.yml", &rules::rules());
}

#[test]
fn every_alert_has_a_page_and_every_page_its_alert() {
    let folder = root().join("docs/runbooks");
    let alerts: BTreeSet<String> =
        alerts::all().iter().map(|alert| alert.name.to_owned()).collect();
    let mut pages = BTreeSet::new();
    for entry in std::fs::read_dir(&folder).expect("docs/runbooks") {
        let path = entry.expect("an entry").path();
        let name = path.file_stem().and_then(|name| name.to_str()).expect("a name").to_owned();
        if name != "README" {
            pages.insert(name);
        }
    }
    assert_eq!(alerts, pages, "one page for each alert: docs/runbooks/ALERT.md");
    let index = std::fs::read_to_string(folder.join("README.md")).expect("the index of the pages");
    for alert in alerts::all() {
        let page =
            std::fs::read_to_string(folder.join(format!("{}.md", alert.name))).expect("page");
        let title = format!("# {}\n", alert.name);
        assert!(page.starts_with(&title), "{}: the page starts with {title:?}", alert.name);
        for heading in ["## Meaning", "## Look", "## Act"] {
            let found = page.lines().filter(|line| *line == heading).count();
            assert_eq!(found, 1, "{}: the page has the heading {heading:?} once", alert.name);
        }
        let link = format!("[{0}]({0}.md)", alert.name);
        assert!(index.contains(&link), "docs/runbooks/README.md lists {link}");
    }
}

/// Metrics that a page names exist in a crate.
#[test]
fn pages_name_only_metrics_that_exist() {
    let metrics =
        std::fs::read_to_string(root().join("docs/reference/metrics.md")).expect("reference");
    for alert in alerts::all() {
        let path = root().join(format!("docs/runbooks/{}.md", alert.name));
        let page = std::fs::read_to_string(&path).expect("page");
        for part in
            page.split('`').skip(1).step_by(2).filter(|part| part.starts_with("switchyard_"))
        {
            let end = part.find(|c: char| !c.is_ascii_lowercase() && c != '_');
            let name = &part[..end.unwrap_or(part.len())];
            // Metrics of TLS exist only in processes with a certificate.
            if name.starts_with("switchyard_tls_") {
                continue;
            }
            assert!(
                metrics.contains(&format!("`{name}`")),
                "{}: no metric `{name}`",
                path.display()
            );
        }
    }
}

fn is_blessing() -> bool {
    std::env::var_os("SWITCHYARD_BLESS").is_some_and(|value| value == "1")
}

fn root() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
}

/// Compares a file of the repository with `text`, or writes it.
fn compare(file: &str, text: &str) {
    let path = root().join(Path::new(file));
    if is_blessing() {
        std::fs::write(&path, text).expect("write the file");
        return;
    }
    let found = std::fs::read_to_string(&path).unwrap_or_default();
    for (number, (line, expected)) in found.lines().zip(text.lines()).enumerate() {
        assert_eq!(line, expected, "{file}:{}: run cargo xtask dashboards", number + 1);
    }
    assert_eq!(found.len(), text.len(), "{file} is out of date: run cargo xtask dashboards");
}
