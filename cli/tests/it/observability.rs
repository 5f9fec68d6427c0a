//! Metrics and labels in the dashboard and the rules exist in a live cluster.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use attention_client::{ClientModel, ExpertBackend, MoeClient};
use checkpoint::Checkpoint;
use control_api::{ClientOptions, ControlClient, Security};
use switchyard_cli::cluster::{ClusterOptions, LocalCluster};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

/// A metric family of a process.
#[derive(Debug, Default)]
pub struct Family {
    /// `counter`, `gauge` or `histogram`.
    pub kind: String,
    pub help: String,
    /// Names of its labels, without `le`.
    pub labels: BTreeSet<String>,
}

/// Metric families by name.
pub type Families = BTreeMap<String, Family>;

#[test]
fn dashboards_and_rules_name_only_metrics_and_labels_that_exist() {
    let mut live = BTreeMap::<String, BTreeSet<String>>::new();
    for (_, families) in live_metrics() {
        for (name, family) in families {
            live.entry(name).or_default().extend(family.labels);
        }
    }
    // Only with TLS, which this cluster does without.
    live.entry(control_plane::metric_names::TLS_CERTIFICATE_EXPIRY.to_owned()).or_default();
    let mut checked = 0;
    for (place, expression) in expressions() {
        for (metric, labels) in uses(&expression) {
            let known = live
                .get(&metric)
                .unwrap_or_else(|| panic!("{place}: no process exports `{metric}`"));
            for label in labels {
                assert!(
                    known.contains(&label) || SCRAPE_LABELS.contains(&label.as_str()),
                    "{place}: `{metric}` has no label `{label}`, only {known:?}"
                );
            }
            checked += 1;
        }
    }
    assert!(checked > 40, "only {checked} uses of metrics were found: is the scan broken?");
}

#[test]
fn the_scan_finds_names_and_labels() {
    let found = uses(
        r#"sum by (le, phase) (rate(switchyard_client_phase_seconds_bucket{job="x", phase!="y"}[1m])) / switchyard_server_links"#,
    );
    let labels = |list: &[&str]| list.iter().map(|l| (*l).to_owned()).collect::<BTreeSet<_>>();
    assert_eq!(
        found,
        [
            ("switchyard_client_phase_seconds".to_owned(), labels(&["phase", "job"])),
            ("switchyard_server_links".to_owned(), labels(&["phase"])),
        ]
    );
}

/// Metric families of client, expert servers and control plane of a cluster that has served a layer.
pub fn live_metrics() -> [(&'static str, Families); 3] {
    let dir = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../data/tiny-moe"));
    let checkpoint = Checkpoint::open(&dir).expect("checkpoint");
    let mut options = ClusterOptions::new(&dir).expect("options");
    options.binary = env!("CARGO_BIN_EXE_switchyard").into();
    options.num_servers = 2;
    options.threads = Some(1);
    options.tls = true;
    let cluster = LocalCluster::start(options, &mut |_| {}).expect("cluster");
    let token = Some(cluster.token().to_owned());
    let mut client = MoeClient::builder(ClientModel::of(&checkpoint))
        .control_plane(cluster.control_url(), token.clone())
        .secret(token.clone())
        .security(cluster.security())
        .build()
        .expect("client");
    client.wait_ready(Duration::from_secs(60)).expect("servers");
    let hidden = checkpoint.config().hidden;
    let mut out = vec![0.0; hidden];
    ExpertBackend::forward(&mut client, 0, &vec![0.5; hidden], &[0, 1], &[0.5, 0.5], &mut out)
        .expect("layer");

    let text = prometheus::TextEncoder::new().encode_to_string(&client.registry().gather());
    let mut of_client = Families::new();
    parse_exposition(&text.expect("exposition"), &mut of_client);
    let mut options = ClientOptions::default();
    options.security = cluster.security();
    let control = ControlClient::with_options(&cluster.control_url(), token, options);
    let control = control.expect("control client");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("rt");
    let members = runtime.block_on(control.members()).expect("members");
    assert_eq!(members.len(), 2);
    let mut of_servers = Families::new();
    for addr in members.iter().filter_map(|member| member.metrics_addr.as_ref()) {
        parse_exposition(&get(addr, "/metrics", &cluster.security()), &mut of_servers);
    }
    let mut of_control = Families::new();
    let control_url = cluster.control_url();
    // The load of the experts comes with the next report of a server.
    let deadline = Instant::now() + Duration::from_secs(60);
    let text = loop {
        let text = get(control_url.trim_start_matches("https://"), "/metrics", &cluster.security());
        if text.contains(control_plane::metric_names::EXPERT_TOKENS_PER_SECOND) {
            break text;
        }
        assert!(Instant::now() < deadline, "no load of experts: {text}");
        std::thread::sleep(Duration::from_millis(50));
    };
    parse_exposition(&text, &mut of_control);
    [("Client", of_client), ("Expert server", of_servers), ("Control plane", of_control)]
}

/// Reads families with samples from Prometheus' text format. A counter by reason must have a sample before
/// its first event, because Prometheus misses the first event of a new series.
fn parse_exposition(text: &str, live: &mut Families) {
    let mut about = BTreeMap::<&str, (&str, &str)>::new();
    for line in text.lines().filter(|line| !line.is_empty()) {
        if let Some((name, help)) = line.strip_prefix("# HELP ").and_then(|l| l.split_once(' ')) {
            about.entry(name).or_default().1 = help;
            continue;
        }
        if let Some((name, kind)) = line.strip_prefix("# TYPE ").and_then(|l| l.split_once(' ')) {
            about.entry(name).or_default().0 = kind;
            continue;
        }
        let name_end = line.find(['{', ' ']).unwrap_or(line.len());
        let sample = &line[..name_end];
        let name = family(sample);
        // Only histograms have such suffixes.
        let is_histogram = about.get(name.as_str()).is_some_and(|(kind, _)| *kind == "histogram");
        let name = if is_histogram { name } else { sample.to_owned() };
        let (kind, help) = about.get(name.as_str()).copied().unwrap_or_default();
        let family = live.entry(name).or_default();
        (family.kind, family.help) = (kind.to_owned(), help.to_owned());
        let labels = &mut family.labels;
        if let Some(body) =
            line[name_end..].strip_prefix('{').and_then(|rest| rest.split_once("} "))
        {
            let names = body.0.split("\",").filter_map(|pair| pair.split_once("=\""));
            let names = names.map(|(name, _)| name.trim_start_matches(',').to_owned());
            // `le` belongs to the buckets of a histogram, not to the family.
            labels.extend(names.filter(|name| name != "le"));
        }
    }
}

fn family(name: &str) -> String {
    ["_bucket", "_sum", "_count"]
        .iter()
        .find_map(|suffix| name.strip_suffix(suffix))
        .unwrap_or(name)
        .to_owned()
}

/// PromQL of the dashboard's panels and of the rules, each with its place.
fn expressions() -> Vec<(String, String)> {
    let deploy = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy"));
    let path = deploy.join("grafana/dashboards/switchyard.json");
    let text = std::fs::read_to_string(&path).expect("dashboard");
    let dashboard: serde_json::Value = serde_json::from_str(&text).expect("dashboard is JSON");
    let mut found = Vec::new();
    for panel in dashboard["panels"].as_array().expect("panels") {
        for target in panel["targets"].as_array().into_iter().flatten() {
            let place = format!("dashboard panel {}", panel["title"]);
            found.push((place, target["expr"].as_str().expect("expr").to_owned()));
        }
    }
    let rules = std::fs::read_to_string(deploy.join("prometheus/rules.yml")).expect("rules");
    for block in rules.split("- record:").flat_map(|part| part.split("- alert:")).skip(1) {
        let name = block.lines().next().unwrap_or_default().trim();
        let after = block.split_once("expr:").expect("every rule has an expr").1;
        let expression: Vec<&str> = after
            .lines()
            .take_while(|line| {
                let line = line.trim();
                !["for:", "labels:", "annotations:"].iter().any(|key| line.starts_with(key))
            })
            .collect();
        found.push((format!("rule {name}"), expression.join(" ")));
    }
    found
}

/// The metrics of an expression, each with the labels that it is filtered or grouped by.
fn uses(expression: &str) -> Vec<(String, BTreeSet<String>)> {
    let mut grouped = BTreeSet::new();
    for part in expression.split("by (").skip(1) {
        let list = part.split(')').next().unwrap_or_default();
        let names = list.split(',').map(|name| name.trim().to_owned());
        grouped.extend(names.filter(|name| name != "le"));
    }
    let mut found = Vec::new();
    let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == ':';
    let mut rest = expression;
    while let Some(start) = rest.find("switchyard_") {
        rest = &rest[start..];
        let end = rest.find(|c| !is_name(c)).unwrap_or(rest.len());
        let (name, after) = rest.split_at(end);
        let mut labels = grouped.clone();
        if let Some(body) = after.strip_prefix('{').and_then(|tail| tail.split('}').next()) {
            let names = body.split(',').filter_map(|pair| pair.split(['=', '!']).next());
            labels.extend(names.map(|name| name.trim().to_owned()).filter(|name| !name.is_empty()));
        }
        found.push((family(name), labels));
        rest = after;
    }
    found
}

fn get(addr: &str, path: &str, security: &Security) -> String {
    let tls = security.tls.clone().expect("a cluster with TLS");
    let answer = async {
        let stream = tokio::net::TcpStream::connect(addr).await.expect("connect");
        let host = addr.rsplit_once(':').expect("host and port").0;
        let mut stream = tls.connect(host, stream).await.expect("a TLS handshake");
        let request = format!("GET {path} HTTP/1.1\r\nHost: {addr}\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.expect("write");
        let mut text = String::new();
        stream.read_to_string(&mut text).await.expect("read");
        text
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("rt");
    let text = runtime.block_on(answer);
    assert!(text.starts_with("HTTP/1.1 200"), "{}", text.lines().next().unwrap_or_default());
    text.split_once("\r\n\r\n").expect("body").1.to_owned()
}

/// Labels that Prometheus adds when it scrapes.
const SCRAPE_LABELS: [&str; 2] = ["instance", "job"];
