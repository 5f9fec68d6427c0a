//! The time that a server takes for a frame, measured by `bench moe` or given.

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};

/// Time of one call of one layer: `base_us`, and for each server its distinct experts times `expert_us` plus its
/// (token, expert) pairs times `pair_us`. The servers work at the same time.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct CostModel {
    /// Messages, queues and everything else that does not grow with the call.
    pub base_us: f64,
    /// Reads the weights of one expert.
    pub expert_us: f64,
    /// Computes one (token, expert) pair, and moves its rows.
    pub pair_us: f64,
}

impl CostModel {
    /// Time of a call on a server that has `experts` distinct experts and `pairs` pairs of it.
    pub fn time_us(&self, experts: f64, pairs: f64) -> f64 {
        self.base_us + experts * self.expert_us + pairs * self.pair_us
    }
}

/// A report of `switchyard --json bench moe`, as far as a plan needs it.
#[derive(Debug, Clone, Deserialize)]
pub struct BenchReport {
    pub hidden: usize,
    pub top_k: usize,
    pub num_experts: u32,
    pub servers: usize,
    pub rows: Vec<BenchRow>,
}

/// One number of tokens.
#[derive(Debug, Clone, Copy, Deserialize)]
pub struct BenchRow {
    pub tokens: usize,
    pub experts_p50: f64,
    pub service_us_p50: f64,
    pub server_compute_us_p50: f64,
}

impl BenchReport {
    pub fn parse(text: &str) -> Result<Self> {
        let report: Self = serde_json::from_str(text)
            .context("not a report of `switchyard --json bench moe` on CPUs")?;
        let is_valid = |row: &BenchRow| {
            let times = [row.experts_p50, row.service_us_p50, row.server_compute_us_p50];
            row.tokens > 0 && times.iter().all(|value| value.is_finite() && *value > 0.0)
        };
        if report.servers == 0
            || report.top_k == 0
            || report.num_experts < 2
            || !report.rows.iter().all(is_valid)
        {
            bail!("a count or a time in the report is 0 or negative");
        }
        Ok(report)
    }

    /// Distinct experts and pairs of the busiest server in a row. The tokens of the benchmark are uniform and the
    /// servers hold equal parts, so a call's experts fall on a server as in a draw without replacement.
    fn share(&self, row: &BenchRow) -> (f64, f64) {
        let (servers, all) = (self.servers as f64, f64::from(self.num_experts));
        let chosen = row.experts_p50.min(all);
        let part = 1.0 / servers;
        let variance = chosen * part * (1.0 - part) * (all - chosen) / (all - 1.0);
        let mean = chosen * part;
        let most = (mean + expected_maximum(self.servers) * variance.sqrt()).min(chosen);
        (most, (row.tokens * self.top_k) as f64 * part * most / mean)
    }
}

/// Expected largest of the loads of `num` servers that share a fixed sum, in standard deviations above the mean, if loads
/// are normal. Exact values for powers of two, from tables of normal order statistics, and lines between them.
pub fn expected_maximum(num: usize) -> f64 {
    const BY_POWER: [f64; 11] =
        [0.0, 0.564, 1.029, 1.424, 1.766, 2.070, 2.343, 2.594, 2.825, 3.041, 3.244];
    if num < 2 {
        return 0.0;
    }
    let num = num as f64;
    let power = num.log2().min(9.999);
    let below = power.floor();
    let (a, b) = (BY_POWER[below as usize], BY_POWER[below as usize + 1]);
    // The sum is fixed, so one server's surplus is missing on the others.
    (a + (b - a) * (power - below)) * (num / (num - 1.0)).sqrt()
}

/// The two models of a host: of the whole call as a client sees it, and of the server's compute alone.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Hardware {
    pub call: CostModel,
    pub compute: CostModel,
}

/// Fits both models to reports by least squares of the relative errors, with no negative cost.
pub fn fit(reports: &[BenchReport]) -> Result<Hardware> {
    let rows: Vec<(f64, f64, f64, f64)> = reports
        .iter()
        .flat_map(|report| {
            report.rows.iter().map(|row| {
                let (experts, pairs) = report.share(row);
                (experts, pairs, row.service_us_p50, row.server_compute_us_p50)
            })
        })
        .collect();
    // Rows of the same shares have one equation.
    let mut shares: Vec<(f64, f64)> = rows.iter().map(|row| (row.0, row.1)).collect();
    shares.sort_unstable_by(|a, b| a.0.total_cmp(&b.0).then(a.1.total_cmp(&b.1)));
    shares.dedup();
    if shares.len() < 3 {
        bail!(
            "{} rows in the reports, {} of them with different numbers of tokens: expected 3 or more",
            rows.len(),
            shares.len()
        );
    }
    let of = |time: fn(&(f64, f64, f64, f64)) -> f64| {
        let points: Vec<[f64; 3]> = rows.iter().map(|row| [row.0, row.1, time(row)]).collect();
        least_squares(&points)
    };
    Ok(Hardware { call: of(|row| row.2), compute: of(|row| row.3) })
}

/// Predicted and measured time of each row, in microseconds.
pub fn check(model: &CostModel, report: &BenchReport) -> Vec<(usize, f64, f64)> {
    let row = |row: &BenchRow| {
        let (experts, pairs) = report.share(row);
        (row.tokens, model.time_us(experts, pairs), row.service_us_p50)
    };
    report.rows.iter().map(row).collect()
}

/// Non-negative least squares of `base + experts·a + pairs·b = time`, each row divided by its time. With three unknowns,
/// the best of the eight sets of unknowns that may be above 0 is found by trying them.
fn least_squares(points: &[[f64; 3]]) -> CostModel {
    let mut best: Option<(f64, [f64; 3])> = None;
    for set in 1u32..8 {
        let used: Vec<usize> = (0..3).filter(|idx| set >> idx & 1 == 1).collect();
        let Some(found) = solve(points, &used) else { continue };
        if found.iter().any(|value| *value < 0.0) {
            continue;
        }
        let error: f64 = points.iter().map(|point| residual(point, &found).powi(2)).sum();
        if best.is_none_or(|(least, _)| error < least) {
            best = Some((error, found));
        }
    }
    let [base_us, expert_us, pair_us] = best.map_or([0.0; 3], |(_, found)| found);
    CostModel { base_us, expert_us, pair_us }
}

fn row_of(point: &[f64; 3]) -> [f64; 3] {
    [1.0, point[0], point[1]].map(|value| value / point[2])
}

fn residual(point: &[f64; 3], found: &[f64; 3]) -> f64 {
    row_of(point).iter().zip(found).map(|(a, b)| a * b).sum::<f64>() - 1.0
}

/// Solves the normal equations of the `used` unknowns by elimination. `None` if they depend on each other.
fn solve(points: &[[f64; 3]], used: &[usize]) -> Option<[f64; 3]> {
    let n = used.len();
    let mut matrix = vec![vec![0.0; n + 1]; n];
    for row in points.iter().map(row_of) {
        for (i, &a) in used.iter().enumerate() {
            for (j, &b) in used.iter().enumerate() {
                matrix[i][j] += row[a] * row[b];
            }
            matrix[i][n] += row[a];
        }
    }
    for col in 0..n {
        let pivot =
            (col..n).max_by(|&a, &b| matrix[a][col].abs().total_cmp(&matrix[b][col].abs()))?;
        matrix.swap(col, pivot);
        if matrix[col][col].abs() < 1e-12 {
            return None;
        }
        for other in (0..n).filter(|&other| other != col) {
            let factor = matrix[other][col] / matrix[col][col];
            let pivot = matrix[col].clone();
            for (value, pivot) in matrix[other].iter_mut().zip(pivot) {
                *value -= factor * pivot;
            }
        }
    }
    let mut found = [0.0; 3];
    for (i, &unknown) in used.iter().enumerate() {
        found[unknown] = matrix[i][n] / matrix[i][i];
    }
    Some(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(model: CostModel, servers: usize, tokens: &[usize]) -> BenchReport {
        let mut report =
            BenchReport { hidden: 2048, top_k: 8, num_experts: 128, servers, rows: Vec::new() };
        for &tokens in tokens {
            let experts_p50 = 128.0 * (1.0 - (1.0f64 - 8.0 / 128.0).powi(tokens as i32));
            let mut row =
                BenchRow { tokens, experts_p50, service_us_p50: 1.0, server_compute_us_p50: 1.0 };
            let (experts, pairs) = report.share(&row);
            row.service_us_p50 = model.time_us(experts, pairs);
            row.server_compute_us_p50 = row.service_us_p50;
            report.rows.push(row);
        }
        report
    }

    #[test]
    fn the_busiest_server_of_a_small_call_has_more_than_the_mean() {
        let report =
            report(CostModel { base_us: 0.0, expert_us: 1.0, pair_us: 0.0 }, 2, &[1, 4096]);
        // One token has 8 experts; the larger of two shares is 5.1 on average. Large calls are even.
        assert!((report.rows[0].service_us_p50 - 5.1).abs() < 0.1, "{report:?}");
        assert!((report.rows[1].service_us_p50 - 64.0).abs() < 0.1, "{report:?}");
        assert_eq!(expected_maximum(1), 0.0);
        assert!((expected_maximum(32) - 2.103).abs() < 0.01);
        assert!(expected_maximum(100_000).is_finite());
    }

    #[test]
    fn a_fit_finds_the_costs_that_made_the_times() {
        let truth = CostModel { base_us: 40.0, expert_us: 310.0, pair_us: 17.0 };
        let hardware = fit(&[report(truth, 1, &[1, 4, 16, 64, 256])]).unwrap();
        for (found, wanted) in [
            (hardware.call.base_us, 40.0),
            (hardware.call.expert_us, 310.0),
            (hardware.call.pair_us, 17.0),
        ] {
            assert!((found / wanted - 1.0).abs() < 1e-6, "{hardware:?}");
        }
        for (_, predicted, measured) in check(&hardware.call, &report(truth, 2, &[2, 8, 512])) {
            assert!((predicted / measured - 1.0).abs() < 1e-6);
        }
    }

    #[test]
    fn costs_are_never_negative_and_too_few_rows_are_refused() {
        let mut wrong =
            report(CostModel { base_us: 10.0, expert_us: 0.0, pair_us: 1.0 }, 1, &[1, 2, 4, 8]);
        for (idx, row) in wrong.rows.iter_mut().enumerate() {
            row.service_us_p50 = 100.0 / (idx + 1) as f64;
        }
        let CostModel { base_us, expert_us, pair_us } = fit(&[wrong]).unwrap().call;
        assert!(base_us >= 0.0 && expert_us >= 0.0 && pair_us >= 0.0);
        let few = report(CostModel { base_us: 1.0, expert_us: 1.0, pair_us: 1.0 }, 1, &[1, 2]);
        assert!(fit(&[few]).is_err());
        let same = report(CostModel { base_us: 1.0, expert_us: 1.0, pair_us: 1.0 }, 1, &[8, 8, 8]);
        let error = fit(&[same]).unwrap_err().to_string();
        assert!(error.contains("3 rows") && error.contains("1 of them"), "{error}");
        assert!(BenchReport::parse("{}").is_err());
    }
}
