//! `deploy/prometheus/rules.yml`.

use std::fmt::Write as _;

use attention_client::metrics::names as client;
use expert_server::metrics::names as server;

use super::alerts;

/// The text of the file.
pub fn rules() -> String {
    let mut text =
        "# Generated from the names of the metrics: `cargo xtask dashboards` writes it.\n\
                    groups:\n  - name: switchyard-recording\n    rules:\n"
            .to_owned();
    for (record, expr) in recording() {
        let _ = write!(text, "      - record: {record}\n        expr: {}\n", quoted(&expr));
    }
    text.push_str("\n  - name: switchyard-alerts\n    rules:\n");
    for (idx, alert) in alerts::all().iter().enumerate() {
        if idx > 0 {
            text.push('\n');
        }
        let _ =
            write!(text, "      - alert: {}\n        expr: {}\n", alert.name, quoted(&alert.expr));
        if let Some(hold) = alert.hold {
            let _ = writeln!(text, "        for: {hold}");
        }
        let url = format!("{RUNBOOKS}/{}.md", alert.name);
        let _ = write!(
            text,
            "        labels: {{severity: {}}}\n        annotations:\n          summary: {}\n          \
             description: {}\n          runbook_url: {}\n",
            alert.severity,
            quoted(alert.summary),
            quoted(alert.description),
            quoted(&url),
        );
    }
    text
}

fn recording() -> Vec<(&'static str, String)> {
    let quantile = |share: &str, name: &str| {
        format!("histogram_quantile({share}, sum by (le, phase) (rate({name}_bucket[1m])))")
    };
    let by_expert = format!("sum by (layer, expert) (rate({}[5m]))", server::EXPERT_TOKENS_TOTAL);
    vec![
        (
            "switchyard:client_requests:rate1m",
            format!("sum by (outcome) (rate({}[1m]))", client::REQUESTS_TOTAL),
        ),
        ("switchyard:client_phase_seconds:p50_1m", quantile("0.5", client::PHASE_SECONDS)),
        ("switchyard:client_phase_seconds:p99_1m", quantile("0.99", client::PHASE_SECONDS)),
        ("switchyard:server_phase_seconds:p99_1m", quantile("0.99", server::PHASE_SECONDS)),
        (
            "switchyard:server_tokens:rate1m",
            format!("sum by (instance) (rate({}[1m]))", server::TOKENS_TOTAL),
        ),
        // 1 is perfect balance.
        ("switchyard:expert_load:max_over_mean5m", format!("max({by_expert}) / avg({by_expert})")),
    ]
}

/// A string of YAML: JSON's are.
fn quoted(text: &str) -> String {
    serde_json::to_string(text).expect("a string has a JSON form")
}

const RUNBOOKS: &str = concat!(env!("CARGO_PKG_REPOSITORY"), "/blob/main/docs/runbooks");
