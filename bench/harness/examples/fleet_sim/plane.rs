//! The control plane's process.

use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result};
use control_api::ControlClient;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::LEASE_MS;

/// The control plane's process, killed when dropped.
pub(crate) struct Plane {
    child: Child,
    pub(crate) addr: String,
    pub(crate) url: String,
}

impl Plane {
    pub(crate) fn start(
        binary: &str,
        state: &Path,
        listen: &str,
        num_servers: u64,
    ) -> Result<Self> {
        let mut child = Command::new(binary)
            .args(["--json", "control-plane", "--placement", "load", "--replicas", "2"])
            .args(["--servers", &num_servers.to_string(), "--listen", listen, "--data-dir"])
            .arg(state)
            .args(["--lease-ttl-ms", &LEASE_MS.to_string()])
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot start {binary}"))?;
        let stdout = child.stdout.take().context("no standard output")?;
        // Owned from here on, so that an error kills the process.
        let mut plane = Self { child, addr: String::new(), url: String::new() };
        let mut line = String::new();
        BufReader::new(stdout).read_line(&mut line)?;
        let event: serde_json::Value =
            serde_json::from_str(&line).with_context(|| format!("unexpected output {line:?}"))?;
        plane.addr = event["addr"].as_str().context("no address")?.to_owned();
        plane.url = format!("http://{}", plane.addr);
        Ok(plane)
    }

    /// Processor time so far, of user and system.
    pub(crate) fn cpu_seconds(&self) -> Result<f64> {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id()))?;
        let fields: Vec<&str> =
            stat.rsplit_once(')').context("a malformed stat")?.1.split_whitespace().collect();
        let ticks = fields[11].parse::<f64>()? + fields[12].parse::<f64>()?;
        Ok(ticks / rustix::param::clock_ticks_per_second() as f64)
    }

    /// Memory, and the work since the start as the metrics have it: expired leases, tables, plans and writes of the
    /// store. Tables have their mean processor time, plans and writes their mean time.
    pub(crate) async fn work(&self, client: &ControlClient) -> Result<Vec<(&'static str, f64)>> {
        let expired = client.status().await?.members.expired;
        let text = self.metrics().await?;
        let value = |name: &str| value_of(&text, name);
        let of =
            |name: &str, what: &str| value(&format!("switchyard_control_{name}_seconds_{what}"));
        let mean_ms = |name: &str| of(name, "sum") / of(name, "count") * 1e3;
        Ok(vec![
            ("rss_mb", self.rss_mb()?),
            ("peak_rss_mb", self.memory_mb("VmHWM:")?),
            ("expired_now", f64::from(expired)),
            ("leases_lost", value("switchyard_control_expirations_total{cause=\"lease\"}")),
            ("experts_moved", value(MOVES)),
            ("tables", value("switchyard_control_placement_changes_total")),
            ("table_mean_ms", mean_ms("placement")),
            ("plans", of("plan", "count")),
            ("plan_mean_ms", mean_ms("plan")),
            ("plan_max_below_ms", slowest_below(&text, "switchyard_control_plan_seconds") * 1e3),
            ("writes", of("store_write", "count")),
            ("write_mean_ms", mean_ms("store_write")),
        ])
    }

    /// Experts that servers began to load, since the start.
    pub(crate) async fn experts_moved(&self) -> Result<f64> {
        Ok(value_of(&self.metrics().await?, MOVES))
    }

    async fn metrics(&self) -> Result<String> {
        let mut stream = TcpStream::connect(&self.addr).await?;
        let request =
            format!("GET /metrics HTTP/1.1\r\nhost: {}\r\nconnection: close\r\n\r\n", self.addr);
        stream.write_all(request.as_bytes()).await?;
        let mut text = String::new();
        stream.read_to_string(&mut text).await?;
        Ok(text)
    }

    pub(crate) fn rss_mb(&self) -> Result<f64> {
        self.memory_mb("VmRSS:")
    }

    fn memory_mb(&self, name: &str) -> Result<f64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id()))?;
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        let line = line.with_context(|| format!("no {name}"))?;
        Ok(line.trim().trim_end_matches(" kB").trim().parse::<f64>()? / 1024.0)
    }
}

impl Drop for Plane {
    fn drop(&mut self) {
        // An error means that it has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

const MOVES: &str = "switchyard_control_expert_moves_total";

/// The value of a metric without further labels, or NaN.
fn value_of(text: &str, name: &str) -> f64 {
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    line.and_then(|value| value.parse::<f64>().ok()).unwrap_or(f64::NAN)
}

/// The least bound of the histogram `name` that no value exceeds.
fn slowest_below(text: &str, name: &str) -> f64 {
    let count = value_of(text, &format!("{name}_count"));
    let bucket = format!("{name}_bucket{{le=\"");
    let buckets = text.lines().filter_map(|line| line.strip_prefix(&bucket)?.split_once("\"} "));
    let below =
        buckets.filter_map(|(le, n)| Some((le.parse::<f64>().ok()?, n.parse::<f64>().ok()?)));
    below.filter(|(_, n)| *n >= count).map(|(le, _)| le).fold(f64::INFINITY, f64::min)
}
