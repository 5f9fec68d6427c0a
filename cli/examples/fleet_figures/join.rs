//! A server joins a fleet that serves.

use std::time::{Duration, Instant};

use switchyard_cli::anyhow::{Result, anyhow, ensure};
use switchyard_cli::cluster::LocalCluster;

use crate::fleet::{Caller, HEDGE_BUDGET, Setup, Trust, quantile, sorted};

const SERVERS: usize = 4;
const REPLICAS: usize = 2;
/// Tokens of a call, enough for every server to have some.
const TOKENS: usize = 8;
const PATIENCE: Duration = Duration::from_secs(10);

/// Times `rounds` joins of each kind, in turns. Each time a server with half of the experts leaves and starts again,
/// while a client computes.
pub(crate) fn run(setup: &Setup, rounds: u32) -> Result<()> {
    let mut fleets = Vec::new();
    for trust in Trust::BOTH {
        let cluster = setup.start(trust, SERVERS, REPLICAS, &[])?;
        let caller = setup.client(&cluster, 1, HEDGE_BUDGET)?;
        fleets.push((trust, cluster, caller, Vec::new(), Vec::new()));
    }
    for _ in 0..rounds {
        for (_, cluster, caller, serving, answered) in &mut fleets {
            let (serving_ms, answered_ms) = join(cluster, caller)?;
            serving.push(serving_ms);
            answered.push(answered_ms);
        }
    }
    for (trust, _, _, serving, answered) in fleets {
        for (until, times) in [("serving", serving), ("first_answer", answered)] {
            let times = sorted(times);
            println!(
                "{{\"figure\":\"join\",\"trust\":\"{}\",\"until\":\"{until}\",\"joins\":{},\"least_ms\":{:.2},\
                 \"p50_ms\":{:.2},\"p90_ms\":{:.2},\"p99_ms\":{:.2},\"max_ms\":{:.2}}}",
                trust.name(),
                times.len(),
                quantile(&times, 0.0),
                quantile(&times, 0.5),
                quantile(&times, 0.9),
                quantile(&times, 0.99),
                quantile(&times, 1.0)
            );
        }
    }
    Ok(())
}

/// The last server leaves and joins. Returns the times from exec until it reports that it serves, and until a call has
/// its first answer, in milliseconds.
fn join(cluster: &mut LocalCluster, caller: &mut Caller) -> Result<(f64, f64)> {
    let joiner = SERVERS - 1;
    let name = LocalCluster::server_name(joiner);
    cluster.drain_server(joiner, PATIENCE)?;
    let left = Instant::now();
    while caller.call(TOKENS).is_ok() && caller.was_answered_by(&name) {
        ensure!(left.elapsed() < PATIENCE, "{name} still answers after it has left");
    }
    std::thread::scope(|scope| {
        let begin = Instant::now();
        let calls = scope.spawn(move || -> Result<f64> {
            loop {
                caller.call(TOKENS)?;
                if caller.was_answered_by(&name) {
                    return Ok(begin.elapsed().as_secs_f64() * 1e3);
                }
                ensure!(begin.elapsed() < PATIENCE, "{name} answers nothing after {PATIENCE:?}");
            }
        });
        cluster.start_server(joiner)?;
        cluster.wait_serving(joiner)?;
        let serving = begin.elapsed().as_secs_f64() * 1e3;
        let answered = calls.join().map_err(|_| anyhow!("the client panicked"))??;
        Ok((serving, answered))
    })
}
