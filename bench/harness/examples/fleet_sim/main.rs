//! The control-plane binary under a large fleet. Servers and clients are simulated: servers register, renew their leases
//! with load reports and take assignments; clients watch the placement and read every table. Nothing computes, and a
//! server holds an expert as soon as it learns of it.
//!
//! `fleet_sim SWITCHYARD [SERVERS] [CLIENTS] [SECONDS]`: the binary, the sizes (1,000 each) and the length of the steady
//! phase (20). Prints a line of JSON for each phase.

mod plane;
mod servers;
mod watchers;

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use control_api::{ControlClient, DrainRequest, PlacementWatch, WatchOptions};
use tokio::runtime::Handle;

use plane::Plane;
use servers::{Servers, listen_for_probes};
use watchers::Watchers;

const LEASE_MS: u64 = 3000;
/// Longest wait for a phase.
const PATIENCE: Duration = Duration::from_secs(120);

fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let binary =
        args.next().context("usage: fleet_sim SWITCHYARD [SERVERS] [CLIENTS] [SECONDS]")?;
    let mut number = |default: u64| -> Result<u64> {
        args.next().map_or(Ok(default), |text| text.parse().with_context(|| format!("{text:?}")))
    };
    let (num_servers, num_clients, seconds) = (number(1000)?, number(1000)?, number(20)?);
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let _ = p2p_core::bootstrap::raise_descriptor_limit();
    runtime.block_on(simulate(&binary, num_servers, num_clients, seconds))
}

async fn simulate(binary: &str, num_servers: u64, num_clients: u64, seconds: u64) -> Result<()> {
    let state = tempfile::tempdir()?;
    let mut plane = Plane::start(binary, state.path(), "127.0.0.1:0", num_servers)?;
    let client = ControlClient::new(&plane.url, None)?;
    let probed = listen_for_probes().await?;
    let observer = PlacementWatch::spawn(&client, &Handle::current(), WatchOptions::default())?;

    let started = Instant::now();
    let mut servers = Servers::start(num_servers, &probed, &client, &observer)?;
    settled(&client, num_servers).await?;
    report("join", num_servers, &[("settled_s", started.elapsed().as_secs_f64())]);

    let connecting = Instant::now();
    let mut watchers = Watchers::start(num_clients, &plane.addr);
    let epoch = client.status().await?.epoch;
    watchers.reached(epoch).await?;
    report("connect", num_clients, &[("tables_s", connecting.elapsed().as_secs_f64())]);

    // Heartbeats and open watches, nothing else.
    quiet(&client).await?;
    let (cpu, since) = (plane.cpu_seconds()?, Instant::now());
    let (before, moved) = (client.status().await?.epoch, plane.experts_moved().await?);
    tokio::time::sleep(Duration::from_secs(seconds)).await;
    let elapsed = since.elapsed().as_secs_f64();
    let cores = (plane.cpu_seconds()? - cpu) / elapsed;
    let num_epochs = (client.status().await?.epoch - before) as f64;
    let moves_per_10_s = (plane.experts_moved().await? - moved) / elapsed * 10.0;
    let steady = [
        ("cores", cores),
        ("rss_mb", plane.rss_mb()?),
        ("epochs", num_epochs),
        ("moves_per_10_s", moves_per_10_s),
    ];
    report("steady", num_servers, &steady);

    // An operator drains servers. The first new table comes after the next plan, half a second later.
    let (mut spreads, mut drains) = (Vec::new(), Vec::new());
    for nth in 0..5 {
        let Some(id) = servers.id(nth) else { bail!("server {nth} is not registered") };
        let (before, since) = (client.status().await?.epoch, Instant::now());
        client.drain(&id, &DrainRequest::default()).await?;
        let (after, issued) = (changed(&client, before).await?, Instant::now());
        watchers.reached(after).await?;
        spreads.push(issued.elapsed().as_secs_f64());
        drains.push(since.elapsed().as_secs_f64());
        client.resume(&id).await?;
        quiet(&client).await?;
    }
    let [(median, worst), (drain_median, drain_worst)] = [spreads, drains].map(|mut times| {
        times.sort_by(f64::total_cmp);
        (times[times.len() / 2], times.last().copied().unwrap_or(0.0))
    });
    let times = [("median_s", median), ("worst_s", worst)];
    report("epoch", num_clients, &times);
    report("drain", num_clients, &[("median_s", drain_median), ("worst_s", drain_worst)]);
    report("so far", num_servers, &plane.work(&client).await?);

    // The control plane is killed and starts again with its state, on the same port.
    let addr = plane.addr.clone();
    drop(plane);
    let restarted = Instant::now();
    plane = Plane::start(binary, state.path(), &addr, num_servers)?;
    let serving = restarted.elapsed().as_secs_f64();
    settled(&client, num_servers).await?;
    let epoch = client.status().await?.epoch;
    watchers.reached(epoch).await?;
    let after = [("listening_s", serving), ("settled_s", restarted.elapsed().as_secs_f64())];
    report("restart", num_servers, &after);
    quiet(&client).await?;

    // Everything is killed and starts again: the control plane with its state, the servers without experts.
    drop(plane);
    drop((servers, watchers));
    let restarted = Instant::now();
    plane = Plane::start(binary, state.path(), &addr, num_servers)?;
    servers = Servers::start(num_servers, &probed, &client, &observer)?;
    watchers = Watchers::start(num_clients, &plane.addr);
    servers.registered().await?;
    settled(&client, num_servers).await?;
    let epoch = client.status().await?.epoch;
    watchers.reached(epoch).await?;
    report("restart all", num_servers, &[("settled_s", restarted.elapsed().as_secs_f64())]);
    quiet(&client).await?;
    report("quiet again", num_servers, &[("after_s", restarted.elapsed().as_secs_f64())]);
    report("end", num_servers, &plane.work(&client).await?);
    Ok(())
}

fn report(phase: &str, size: u64, values: &[(&str, f64)]) {
    let mut line = serde_json::json!({ "phase": phase, "size": size });
    for (name, value) in values {
        line[*name] = serde_json::json!((value * 1000.0).round() / 1000.0);
    }
    println!("{line}");
}

/// Waits until all servers serve and every expert has its replicas.
async fn settled(client: &ControlClient, num_servers: u64) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let status = client.status().await;
        if let Ok(status) = &status {
            let is_whole = status.experts_total > 0
                && status.experts_without_replica == 0
                && status.experts_under_replicated == 0;
            if is_whole && u64::from(status.members.serving) == num_servers {
                return Ok(());
            }
        }
        if Instant::now() > deadline {
            bail!("the fleet has not settled after {PATIENCE:?}: {status:?}");
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Waits until the epoch has not changed for two seconds.
async fn quiet(client: &ControlClient) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    let mut last = (client.status().await?.epoch, Instant::now());
    while last.1.elapsed() < Duration::from_secs(2) {
        if Instant::now() > deadline {
            bail!("the epoch still changes after {PATIENCE:?}");
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
        let epoch = client.status().await?.epoch;
        if epoch != last.0 {
            last = (epoch, Instant::now());
        }
    }
    Ok(())
}

/// Waits for another epoch than `before`, and returns it.
async fn changed(client: &ControlClient, before: u64) -> Result<u64> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let epoch = client.status().await?.epoch;
        if epoch != before {
            return Ok(epoch);
        }
        if Instant::now() > deadline {
            bail!("epoch {before} has not changed after {PATIENCE:?}");
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}
