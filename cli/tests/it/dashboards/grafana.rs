//! `deploy/grafana/dashboards/switchyard.json`.

use attention_client::metrics::names as client;
use control_plane::metric_names as control;
use expert_server::metrics::names as server;
use serde_json::{Value, json};

/// The text of the file.
pub fn text() -> String {
    let mut text = serde_json::to_string_pretty(&dashboard()).expect("JSON");
    text.push('\n');
    text
}

/// The dashboard.
pub fn dashboard() -> Value {
    let mut layout = Layout::default();
    fleet(&mut layout);
    latency(&mut layout);
    experts(&mut layout);
    failures(&mut layout);
    json!({
        "uid": "switchyard",
        "title": "Switchyard",
        "description": "Generated from the names of the metrics: cargo xtask dashboards writes it.",
        "tags": ["switchyard"],
        "schemaVersion": 39,
        "version": 1,
        "editable": true,
        "refresh": "10s",
        "time": { "from": "now-30m", "to": "now" },
        "timezone": "browser",
        "templating": { "list": [{
            "name": "datasource",
            "type": "datasource",
            "query": "prometheus",
            "label": "Prometheus",
            "current": {},
        }] },
        "panels": layout.panels,
    })
}

fn fleet(layout: &mut Layout) {
    layout.row("Fleet");
    layout.height = 4;
    layout.stat(
        "Serving members",
        false,
        &[(format!("sum({}{{state=\"serving\"}})", control::MEMBERS), "serving")],
    );
    layout.stat(
        "Experts without replica",
        true,
        &[(format!("max({})", control::EXPERTS_WITHOUT_REPLICA), "experts")],
    );
    layout.stat(
        "Under-replicated experts",
        true,
        &[(format!("max({})", control::EXPERTS_UNDER_REPLICATED), "experts")],
    );
    layout.stat(
        "Unreachable members",
        true,
        &[(format!("max({})", control::MEMBERS_UNREACHABLE), "members")],
    );
    layout.stat(
        "Lost + duplicated",
        true,
        &[(
            format!(
                "sum({}) + sum({})",
                client::LOST_REQUESTS_TOTAL,
                client::DUPLICATED_REQUESTS_TOTAL
            ),
            "requests",
        )],
    );
    let versions = format!("count by (component, version) ({})", control::BUILD_INFO);
    layout.panel("Versions", "table", 4, "short", &[(versions, "{{component}} {{version}}")]);
    layout.height = 7;
    layout.series("Members by state", "short", &[(by("state", control::MEMBERS), "{{state}}")]);
    layout.series(
        "Tokens by server",
        "ops",
        &[(rate("instance", server::TOKENS_TOTAL), "{{instance}}")],
    );
    layout.series(
        "Links",
        "short",
        &[
            (by("instance", server::LINKS), "{{instance}}"),
            (by("state", client::LINKS), "clients: {{state}}"),
        ],
    );
    layout.series(
        "Placement epoch",
        "short",
        &[
            (format!("max({})", control::EPOCH), "control plane"),
            (format!("min({})", client::PLACEMENT_EPOCH), "oldest at a client"),
        ],
    );
    layout.series(
        "Control planes",
        "short",
        &[
            (format!("sum({})", control::LEADER), "leaders"),
            (format!("min({})", control::STORE_WRITABLE), "store writable"),
        ],
    );
    layout.series(
        "Advice",
        "short",
        &[
            (format!("max({})", control::ADVISED_SERVERS), "advised servers"),
            (format!("max({})", control::COMPUTE_SHARE), "compute share"),
            (format!("max({})", control::BUSIEST_SHARE), "compute share of the busiest"),
        ],
    );
}

fn latency(layout: &mut Layout) {
    layout.row("Dispatch latency by phase");
    layout.height = 8;
    let phases = [
        ("Client, p50", 0.5, client::PHASE_SECONDS),
        ("Client, p99", 0.99, client::PHASE_SECONDS),
        ("Server, p99", 0.99, server::PHASE_SECONDS),
    ];
    for (title, share, name) in phases {
        layout.series(title, "s", &[(quantile(share, "phase", name), "{{phase}}")]);
    }
    layout.height = 7;
    layout.series(
        "Layer calls",
        "ops",
        &[(rate("outcome", client::REQUESTS_TOTAL), "{{outcome}}")],
    );
    layout.series(
        "Bytes on the wire",
        "Bps",
        &[
            (rate("direction", server::BYTES_TOTAL), "servers {{direction}}"),
            (rate("direction", client::BYTES_TOTAL), "clients {{direction}}"),
        ],
    );
    layout.series(
        "Clients per batch",
        "short",
        &[
            (mean(server::BATCH_CLIENTS), "mean clients"),
            (mean(server::BATCH_TOKENS), "mean tokens"),
        ],
    );
}

fn experts(layout: &mut Layout) {
    layout.row("Expert load");
    layout.height = 8;
    let by_expert = rate("layer, expert", server::EXPERT_TOKENS_TOTAL);
    layout.series(
        "Tokens by expert",
        "ops",
        &[(format!("topk(20, {by_expert})"), "layer {{layer}} expert {{expert}}")],
    );
    let reported =
        format!("topk(20, max by (layer, expert) ({}))", control::EXPERT_TOKENS_PER_SECOND);
    layout.series(
        "Busiest experts by the servers' reports",
        "ops",
        &[(reported, "layer {{layer}} expert {{expert}}")],
    );
    layout.series(
        "Busiest expert over the mean",
        "short",
        &[(format!("max({by_expert}) / avg({by_expert})"), "max / mean")],
    );
    layout.series(
        "Experts loaded",
        "short",
        &[(by("instance", server::EXPERTS_LOADED), "{{instance}}")],
    );
}

fn failures(layout: &mut Layout) {
    layout.row("Failovers");
    layout.height = 8;
    layout.series(
        "Failovers by reason",
        "short",
        &[(increase("reason", client::FAILOVERS_TOTAL), "{{reason}}")],
    );
    let stall = format!(
        "histogram_quantile(0.99, sum by (le) (rate({}_bucket[$__rate_interval])))",
        client::STALL_SECONDS
    );
    layout.series("Stall of calls with a failure, p99", "s", &[(stall, "stall")]);
    layout.series(
        "Resent pairs",
        "ops",
        &[
            (format!("sum(rate({}[$__rate_interval]))", client::RESENT_PAIRS_TOTAL), "resent"),
            (format!("sum(rate({}[$__rate_interval]))", client::MISSING_PAIRS_TOTAL), "left out"),
        ],
    );
    layout.series(
        "Dropped and refused",
        "short",
        &[
            (increase("reason", server::LINKS_DROPPED_TOTAL), "links: {{reason}}"),
            (increase("code", server::BAD_FRAMES_TOTAL), "frames: {{code}}"),
            (increase("reason", server::HANDSHAKES_REJECTED_TOTAL), "handshakes: {{reason}}"),
        ],
    );
    layout.series(
        "Lease expirations and suspects",
        "short",
        &[
            (increase("cause", control::EXPIRATIONS_TOTAL), "expired: {{cause}}"),
            (format!("sum(increase({}[$__rate_interval]))", control::SUSPECTS_TOTAL), "suspected"),
        ],
    );
    layout.series(
        "Control plane requests, p99",
        "s",
        &[(quantile(0.99, "route", control::REQUEST_SECONDS), "{{route}}")],
    );
}

fn by(labels: &str, name: &str) -> String {
    format!("sum by ({labels}) ({name})")
}

fn rate(labels: &str, name: &str) -> String {
    format!("sum by ({labels}) (rate({name}[$__rate_interval]))")
}

fn increase(labels: &str, name: &str) -> String {
    format!("sum by ({labels}) (increase({name}[$__rate_interval]))")
}

fn quantile(share: f64, label: &str, name: &str) -> String {
    format!(
        "histogram_quantile({share}, sum by (le, {label}) (rate({name}_bucket[$__rate_interval])))"
    )
}

/// Mean of a histogram's values.
fn mean(name: &str) -> String {
    format!("sum(rate({name}_sum[$__rate_interval])) / sum(rate({name}_count[$__rate_interval]))")
}

/// Panels, placed from the left to the right in rows of 24 columns.
#[derive(Default)]
struct Layout {
    panels: Vec<Value>,
    /// Height of the panels to come.
    height: u32,
    x: u32,
    y: u32,
    /// Bottom of the row of panels that is begun.
    bottom: u32,
}

impl Layout {
    fn row(&mut self, title: &str) {
        let grid = json!({ "x": 0, "y": self.bottom, "w": COLUMNS, "h": 1 });
        let id = self.panels.len() + 1;
        self.panels.push(json!({
            "id": id,
            "title": title,
            "type": "row",
            "collapsed": false,
            "gridPos": grid,
            "panels": [],
        }));
        (self.x, self.y, self.bottom) = (0, self.bottom + 1, self.bottom + 1);
    }

    /// A number. One that `must_be_zero` is red above 0.
    fn stat(&mut self, title: &str, must_be_zero: bool, targets: &[(String, &str)]) {
        self.panel(title, "stat", 4, "short", targets);
        if let Some(panel) = self.panels.last_mut().filter(|_| must_be_zero) {
            panel["fieldConfig"]["defaults"]["thresholds"] = json!({
                "mode": "absolute",
                "steps": [{ "color": "green", "value": null }, { "color": "red", "value": 1 }],
            });
        }
    }

    /// A chart over time.
    fn series(&mut self, title: &str, unit: &str, targets: &[(String, &str)]) {
        self.panel(title, "timeseries", 8, unit, targets);
    }

    fn panel(
        &mut self,
        title: &str,
        kind: &str,
        width: u32,
        unit: &str,
        targets: &[(String, &str)],
    ) {
        if self.x + width > COLUMNS {
            (self.x, self.y) = (0, self.bottom);
        }
        let datasource = json!({ "type": "prometheus", "uid": "${datasource}" });
        let targets: Vec<Value> = targets
            .iter()
            .zip('A'..)
            .map(|((expr, legend), id)| {
                json!({
                    "refId": id,
                    "expr": expr,
                    "legendFormat": legend,
                    "datasource": datasource,
                })
            })
            .collect();
        let grid = json!({ "x": self.x, "y": self.y, "w": width, "h": self.height });
        let id = self.panels.len() + 1;
        self.panels.push(json!({
            "id": id,
            "title": title,
            "type": kind,
            "gridPos": grid,
            "datasource": datasource,
            "targets": targets,
            "fieldConfig": { "defaults": { "unit": unit, "min": 0 }, "overrides": [] },
        }));
        self.x += width;
        self.bottom = self.y + self.height;
    }
}

const COLUMNS: u32 = 24;
