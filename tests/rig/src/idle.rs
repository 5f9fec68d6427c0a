//! The cost of an idle cluster.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use attention_client::MoeClient;
use checkpoint::Checkpoint;
use rand::SeedableRng;
use rand::rngs::StdRng;
use serde::Serialize;
use switchyard_cli::cluster::{ClusterOptions, LocalCluster};
use test_support::procfs;

use crate::inputs::InputPool;

/// One process over one span.
#[derive(Debug, Clone, Serialize)]
pub struct IdleReport {
    /// Name of the process.
    pub name: String,
    /// Whether a client was connected, idle after its calls.
    pub with_client: bool,
    /// CPU time over wall time of one core, percent.
    pub core_percent: f64,
}

/// CPU time of 4 idle servers and their control plane, for `span` each without and with a client.
///
/// # Errors
/// When the cluster does not come up.
pub fn run(binary: &Path, model: &Path, span: Duration) -> Result<Vec<IdleReport>> {
    let checkpoint = Arc::new(Checkpoint::open(model)?);
    let mut options = ClusterOptions::new(model)?;
    options.binary = binary.to_owned();
    let cluster = LocalCluster::start(options, &mut |_| {})?;
    let mut processes = vec![("control plane".to_owned(), procfs::control_plane()?)];
    for idx in cluster.running() {
        let pid = cluster.server_pid(idx).context("a server is gone")?;
        processes.push((LocalCluster::server_name(idx), pid));
    }
    let mut reports = measure(&processes, span, false)?;
    let pool = InputPool::new(&checkpoint, 1, 1, 16)?;
    let client = MoeClient::builder(pool.model.clone())
        .control_plane(cluster.control_url(), Some(cluster.token().to_owned()))
        .secret(Some(cluster.token().to_owned()))
        .build()?;
    client.wait_ready(Duration::from_secs(20))?;
    let input = pool.pick(&mut StdRng::seed_from_u64(1));
    let mut out = vec![f32::NAN; input.x.len()];
    client.forward(input.layer, &input.x, &input.idx, &input.weights, &mut out)?;
    processes.push(("client".to_owned(), std::process::id()));
    reports.extend(measure(&processes, span, true)?);
    Ok(reports)
}

/// An idle process may use less than this share of a core, percent.
pub const LIMIT_PERCENT: f64 = 1.0;

fn measure(
    processes: &[(String, u32)],
    span: Duration,
    with_client: bool,
) -> Result<Vec<IdleReport>> {
    // Work that starting up left is no idling.
    std::thread::sleep(Duration::from_secs(2));
    let times =
        || processes.iter().map(|(_, pid)| procfs::cpu_time(*pid)).collect::<Result<Vec<_>>>();
    let before = times()?;
    std::thread::sleep(span);
    let after = times()?;
    let spans = before.iter().zip(after);
    let reports = processes.iter().zip(spans).map(|((name, _), (before, after))| IdleReport {
        name: name.clone(),
        with_client,
        core_percent: (after - *before).as_secs_f64() / span.as_secs_f64() * 100.0,
    });
    Ok(reports.collect())
}
