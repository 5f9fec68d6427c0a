//! Layers of two clients in turns: in plain text and with TLS and tickets, or without hedges and with them.

use std::time::{Duration, Instant};

use switchyard_cli::anyhow::Result;

use crate::fleet::{Caller, HEDGE_BUDGET, Setup, Trust, quantile, sorted};

const SERVERS: usize = 2;
const TURN: Duration = Duration::from_millis(250);
const WARM_UP: usize = 200;

/// A fleet in plain text beside one with TLS and tickets. Each number of tokens takes `seconds`.
pub(crate) fn run(setup: &Setup, seconds: u32) -> Result<()> {
    let clusters =
        [setup.start(Trust::Plain, SERVERS, 1, &[])?, setup.start(Trust::Secure, SERVERS, 1, &[])?];
    let callers = [
        setup.client(&clusters[0], 1, HEDGE_BUDGET)?,
        setup.client(&clusters[1], 1, HEDGE_BUDGET)?,
    ];
    compare("trust", Trust::BOTH.map(Trust::name), callers, seconds)
}

/// A client without hedges beside one with the default budget, in a fleet of three servers without a slow one.
pub(crate) fn hedges(setup: &Setup, seconds: u32) -> Result<()> {
    let cluster = setup.start(Trust::Plain, 3, 2, &[])?;
    let callers = [setup.client(&cluster, 1, 0.0)?, setup.client(&cluster, 1, HEDGE_BUDGET)?];
    compare("hedges", ["off", "on"], callers, seconds)
}

/// Half of the `seconds` of each number of tokens is for each client. The order alternates from turn to turn.
fn compare(kind: &str, names: [&str; 2], mut callers: [Caller; 2], seconds: u32) -> Result<()> {
    for num_tokens in [1, 64] {
        for _ in 0..WARM_UP {
            callers.iter_mut().try_for_each(|caller| caller.call(num_tokens).map(drop))?;
        }
        let mut times = [Vec::new(), Vec::new()];
        let mut ratios = Vec::new();
        let until = Instant::now() + Duration::from_secs(seconds.into());
        while Instant::now() < until {
            let mut medians = [0.0; 2];
            let order = if ratios.len() % 2 == 0 { [0, 1] } else { [1, 0] };
            for one in order {
                let mut turn = Vec::new();
                let end = Instant::now() + TURN;
                while Instant::now() < end {
                    turn.push(callers[one].call(num_tokens)?.us);
                }
                turn.sort_by(f64::total_cmp);
                medians[one] = quantile(&turn, 0.5);
                times[one].extend(turn);
            }
            ratios.push(medians[1] / medians[0]);
        }
        let ratios = sorted(ratios);
        let times = times.map(sorted);
        for (name, times) in names.into_iter().zip(&times) {
            println!(
                "{{\"figure\":\"layer\",\"{kind}\":\"{name}\",\"tokens\":{num_tokens},\"layers\":{},\"p50_us\":{:.2},\
                 \"p90_us\":{:.2},\"p99_us\":{:.2},\"mean_us\":{:.2}}}",
                times.len(),
                quantile(times, 0.5),
                quantile(times, 0.9),
                quantile(times, 0.99),
                mean(times)
            );
        }
        println!(
            "{{\"figure\":\"layer ratio\",\"of\":\"{kind}\",\"tokens\":{num_tokens},\"turns\":{},\
             \"of_medians\":{:.4},\"of_means\":{:.4},\"by_turn_p25\":{:.4},\"by_turn_p50\":{:.4},\"by_turn_p75\":{:.4}}}",
            ratios.len(),
            quantile(&times[1], 0.5) / quantile(&times[0], 0.5),
            mean(&times[1]) / mean(&times[0]),
            quantile(&ratios, 0.25),
            quantile(&ratios, 0.5),
            quantile(&ratios, 0.75)
        );
    }
    Ok(())
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len().max(1) as f64
}
