//! Kills and leaves in fleets whose placement follows the load.

use std::thread::sleep;
use std::time::{Duration, Instant};

use control_api::{ClientOptions, ControlClient};
use switchyard_cli::anyhow::{Result, anyhow, ensure};
use switchyard_cli::cluster::LocalCluster;
use tokio::runtime::{Builder, Runtime};

use crate::fleet::{Background, HEDGE_BUDGET, Sample, Setup, Trust, quantile, sorted};

const SERVERS: usize = 4;
const REPLICAS: usize = 2;
/// Calls before a change that it is compared with.
const BEFORE: Duration = Duration::from_secs(2);
/// Calls after a kill among which the longest is the stall.
const AFTER_KILL: Duration = Duration::from_secs(1);
/// Calls after the end of a server that belong to its leave.
const AFTER_LEAVE: Duration = Duration::from_millis(200);
const PATIENCE: Duration = Duration::from_secs(30);

/// Kills and drains a server in each of `rounds`, in both kinds of fleet at the same time.
pub(crate) fn run(setup: &Setup, rounds: u32) -> Result<()> {
    std::thread::scope(|scope| {
        let fleets = Trust::BOTH.map(|trust| scope.spawn(move || change(setup, trust, rounds)));
        fleets
            .into_iter()
            .try_for_each(|fleet| fleet.join().map_err(|_| anyhow!("a fleet panicked")).flatten())
    })
}

/// A kill or a leave, as known when it happens. Its calls come at the end.
struct Change {
    what: &'static str,
    at: Instant,
    until: Instant,
    /// Time until every expert has its replicas again.
    recovered: Duration,
}

fn change(setup: &Setup, trust: Trust, rounds: u32) -> Result<()> {
    let control_args = ["--placement", "load"];
    let mut cluster = setup.start(trust, SERVERS, REPLICAS, &control_args)?;
    let runtime = Builder::new_current_thread().enable_all().build()?;
    let token = Some(cluster.token().to_owned());
    let mut options = ClientOptions::default();
    options.security = cluster.security();
    let control = ControlClient::with_options(&cluster.control_url(), token, options)?;
    let status = Status { runtime, control };
    status.wait_whole(SERVERS)?;
    let calls = Background::start(setup.client(&cluster, 1, HEDGE_BUDGET)?, 1);
    let mut changes = Vec::new();
    for round in 0..rounds as usize {
        let idx = round % SERVERS;
        sleep(BEFORE);
        let at = cluster.kill_server(idx)?;
        let recovered = status.wait_whole(SERVERS - 1)?.duration_since(at);
        sleep(AFTER_KILL.saturating_sub(recovered));
        changes.push(Change { what: "kill", at, until: at + AFTER_KILL, recovered });
        restart(&mut cluster, idx, &status)?;

        let idx = (idx + 1) % SERVERS;
        sleep(BEFORE);
        let at = Instant::now();
        cluster.drain_server(idx, PATIENCE)?;
        let until = Instant::now() + AFTER_LEAVE;
        let recovered = status.wait_whole(SERVERS - 1)?.duration_since(at);
        sleep(AFTER_LEAVE);
        changes.push(Change { what: "leave", at, until, recovered });
        restart(&mut cluster, idx, &status)?;
    }
    let samples = calls.finish()?;
    changes.iter().for_each(|change| change.print(trust, &samples));
    for what in ["kill", "leave"] {
        let changes: Vec<&Change> = changes.iter().filter(|change| change.what == what).collect();
        let longest = sorted(changes.iter().map(|change| change.longest_us(&samples)));
        let recovered = sorted(changes.iter().map(|change| change.recovered.as_secs_f64()));
        println!(
            "{{\"figure\":\"{what}\",\"trust\":\"{}\",\"times\":{},\"longest_call_p50_ms\":{:.3},\
             \"longest_call_max_ms\":{:.3},\"recovered_p50_s\":{:.3},\"recovered_max_s\":{:.3}}}",
            trust.name(),
            changes.len(),
            quantile(&longest, 0.5) / 1e3,
            quantile(&longest, 1.0) / 1e3,
            quantile(&recovered, 0.5),
            quantile(&recovered, 1.0)
        );
    }
    Ok(())
}

impl Change {
    fn times(&self, samples: &[Sample], from: Instant, until: Instant) -> Vec<f64> {
        let window = samples.iter().filter(|sample| {
            let end = sample.begin + Duration::from_secs_f64(sample.us / 1e6);
            end >= from && sample.begin < until
        });
        sorted(window.map(|sample| sample.us))
    }

    fn longest_us(&self, samples: &[Sample]) -> f64 {
        quantile(&self.times(samples, self.at, self.until), 1.0)
    }

    fn print(&self, trust: Trust, samples: &[Sample]) {
        let before = self.times(samples, self.at - BEFORE, self.at - Duration::from_millis(10));
        let during = self.times(samples, self.at, self.until);
        let in_time = samples.iter().filter(|s| s.begin >= self.at && s.begin < self.until);
        println!(
            "{{\"change\":\"{}\",\"trust\":\"{}\",\"before\":{{\"layers\":{},\"p50_us\":{:.1},\"p99_us\":{:.1},\
             \"max_us\":{:.1}}},\"during\":{{\"layers\":{},\"p50_us\":{:.1},\"p99_us\":{:.1},\"max_us\":{:.1},\
             \"failovers\":{}}},\"recovered_s\":{:.3}}}",
            self.what,
            trust.name(),
            before.len(),
            quantile(&before, 0.5),
            quantile(&before, 0.99),
            quantile(&before, 1.0),
            during.len(),
            quantile(&during, 0.5),
            quantile(&during, 0.99),
            quantile(&during, 1.0),
            in_time.map(|sample| sample.failovers).sum::<u32>(),
            self.recovered.as_secs_f64()
        );
    }
}

fn restart(cluster: &mut LocalCluster, idx: usize, status: &Status) -> Result<()> {
    cluster.start_server(idx)?;
    cluster.wait_serving(idx)?;
    status.wait_whole(SERVERS).map(drop)
}

/// The control plane's view.
struct Status {
    runtime: Runtime,
    control: ControlClient,
}

impl Status {
    /// Waits until `num_servers` serve and every expert has its replicas. Returns the time.
    fn wait_whole(&self, num_servers: usize) -> Result<Instant> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let status = self.runtime.block_on(self.control.status())?;
            let is_whole = status.experts_total > 0
                && status.experts_without_replica == 0
                && status.experts_under_replicated == 0;
            if is_whole && status.members.serving as usize == num_servers {
                return Ok(Instant::now());
            }
            ensure!(Instant::now() < deadline, "not whole after {PATIENCE:?}: {status:?}");
            sleep(Duration::from_millis(5));
        }
    }
}
