//! Work of servers as they report it, and their speeds from it. Sans-I/O.

use std::time::Duration;

use control_api::LoadReport;

/// Work of a member, with old work decayed.
#[derive(Clone, Debug, Default)]
pub(crate) struct Work {
    /// (token, expert) pairs.
    pairs: f64,
    pub(crate) window_ms: f64,
    pub(crate) busy_ms: f64,
    pub(crate) queued_ms: f64,
    pub(crate) frames: f64,
    pub(crate) late: f64,
    /// The speed in force, as a power of [`STEP`] over the fleet's median.
    step: i32,
    /// The speed in force. `None` stands for 1.
    speed: Option<f64>,
    /// True if the member is a GPU.
    is_device: bool,
}

impl Work {
    pub(crate) fn add(&mut self, report: &LoadReport) {
        let pairs: u64 =
            report.experts.iter().fold(0, |sum, load| sum.saturating_add(load.num_tokens));
        self.is_device = report.device.is_some();
        // A wrong report must not outweigh all others.
        let window_ms = report.window_ms.min(MAX_WINDOW_MS);
        let within = |ms: u64| ms.min(window_ms.saturating_add(MAX_EXCESS_MS)) as f64;
        self.pairs += pairs as f64;
        self.window_ms += window_ms as f64;
        self.busy_ms += within(report.busy_ms);
        self.queued_ms += report.queued_ms.min(window_ms.saturating_mul(MAX_QUEUE)) as f64;
        self.frames += report.num_frames as f64;
        self.late += report.num_late.min(report.num_frames) as f64;
    }

    /// Speed relative to the other members, as [`compare`] found it.
    pub(crate) fn speed(&self) -> f64 {
        self.speed.unwrap_or(1.0)
    }

    pub(crate) fn decay(&mut self, factor: f64) {
        for value in [
            &mut self.pairs,
            &mut self.window_ms,
            &mut self.busy_ms,
            &mut self.queued_ms,
            &mut self.frames,
            &mut self.late,
        ] {
            *value *= factor;
        }
    }

    /// (token, expert) pairs per second of compute, once there is enough of it.
    pub(crate) fn pairs_per_s(&self) -> Option<f64> {
        (self.busy_ms >= MIN_BUSY_MS && self.pairs > 0.0).then(|| self.pairs / self.busy_ms * 1e3)
    }
}

/// Compares the members and sets the speed of each. A member keeps its speed until the measurement differs clearly,
/// so that plans do not follow noise. A member that has computed too little is taken to be as fast as others of its
/// kind, a CPU or a GPU.
pub(crate) fn compare<'a>(members: impl Iterator<Item = &'a mut Work>) {
    let mut members: Vec<&mut Work> = members.collect();
    let mut rates: Vec<f64> = members.iter().filter_map(|work| work.pairs_per_s()).collect();
    rates.sort_by(f64::total_cmp);
    // The lower one of two: a rate that a member has, so that equal members have exactly 1.
    let Some(&median) = rates.get(rates.len().saturating_sub(1) / 2) else { return };
    let mut of_kind: [Vec<i32>; 2] = Default::default();
    for work in &mut members {
        let Some(rate) = work.pairs_per_s() else { continue };
        let exact = (rate / median).ln() / STEP.ln();
        if (exact - f64::from(work.step)).abs() > STAY {
            work.step = (exact.round() as i32).clamp(-MAX_STEPS, MAX_STEPS);
        }
        of_kind[usize::from(work.is_device)].push(work.step);
    }
    let typical = of_kind.map(|mut steps| {
        steps.sort_unstable();
        steps.get(steps.len() / 2).copied().unwrap_or(0)
    });
    for work in members {
        let is_known = work.pairs_per_s().is_some();
        let step = if is_known { work.step } else { typical[usize::from(work.is_device)] };
        work.speed = Some(STEP.powi(step));
    }
}

/// Factor by which a value decays in `since`.
pub(crate) fn decay_factor(since: Duration, half_life: Duration) -> f64 {
    0.5f64.powf(since.as_secs_f64() / half_life.as_secs_f64().max(1e-3))
}

/// Speeds are powers of this. Batches of servers differ in size, and so do their rates: less is noise.
const STEP: f64 = 1.5;
/// Distance from the speed in force, in steps, within which it stays.
const STAY: f64 = 0.75;
/// 1.5^12 is 130.
const MAX_STEPS: i32 = 12;
/// Least compute time that tells a speed.
const MIN_BUSY_MS: f64 = 100.0;
/// Members report several times per lease, and a lease is an hour at most.
const MAX_WINDOW_MS: u64 = 3_600_000;
/// Most frames that wait in a report.
const MAX_QUEUE: u64 = 1 << 20;
/// Windows and compute are rounded and end at different times.
const MAX_EXCESS_MS: u64 = 1000;

#[cfg(test)]
mod tests {
    use control_api::ExpertLoad;

    use super::*;

    fn report(num_tokens: u64, busy_ms: u64, device: Option<&str>) -> LoadReport {
        LoadReport {
            window_ms: 1000,
            busy_ms,
            experts: vec![ExpertLoad { layer: 0, expert: 0, num_tokens }],
            device: device.map(str::to_owned),
            ..LoadReport::default()
        }
    }

    fn fleet(reports: &[LoadReport]) -> Vec<Work> {
        let work = |report: &LoadReport| {
            let mut work = Work::default();
            work.add(report);
            work
        };
        reports.iter().map(work).collect()
    }

    fn relative(fleet: &mut [Work]) -> Vec<f64> {
        compare(fleet.iter_mut());
        fleet.iter().map(Work::speed).collect()
    }

    #[test]
    fn equal_servers_are_equal_and_a_gpu_counts_for_many_cpus() {
        let gpu = Some("cuda:0");
        let mut fleet = fleet(&[
            report(1_000_000, 1000, None),
            report(900_000, 1000, None),
            report(1_150_000, 1000, None),
            report(40_000_000, 800, gpu),
            // These have computed too little.
            report(10, 1, None),
            report(10, 1, gpu),
        ]);
        let speeds = relative(&mut fleet);
        assert_eq!(speeds[..3], [1.0; 3]);
        assert!((40.0..60.0).contains(&speeds[3]), "{speeds:?}");
        assert_eq!((speeds[4], speeds[5]), (1.0, speeds[3]));
    }

    #[test]
    fn noise_changes_no_speed_and_a_lasting_change_does() {
        let mut fleet = fleet(&[report(1000, 500, None), report(1000, 500, None)]);
        assert_eq!(relative(&mut fleet), [1.0, 1.0]);
        for (pairs, expected) in
            [(900, 1.0), (1300, 1.0), (1340, 1.0), (2300, 2.25), (1800, 2.25), (1000, 1.0)]
        {
            fleet[1] = Work { pairs: pairs as f64, ..fleet[1].clone() };
            assert_eq!(relative(&mut fleet)[1], expected, "{pairs}");
        }
    }

    #[test]
    fn wrong_reports_cannot_make_a_speed_that_is_not_finite() {
        let mut fleet = fleet(&[
            report(u64::MAX, u64::MAX, None),
            report(u64::MAX, 0, None),
            report(0, u64::MAX, None),
            report(1, 1000, None),
        ]);
        for speed in relative(&mut fleet) {
            assert!(speed.is_finite() && speed > 0.0, "{speed}");
        }
    }
}
