//! The faults of a run, their times and their servers, all determined by one seed.

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use serde::Serialize;

/// Kinds of events.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// A server is killed (SIGKILL), stays away for a while, and is started again.
    Kill,
    /// A server is killed and started again at once.
    Restart,
    /// A server is stopped (SIGSTOP) for less or more than the deadline, and goes on (SIGCONT).
    Freeze,
    /// A server is stopped for longer than its lease, and goes on.
    Expire,
    /// A server drains and leaves (SIGTERM), and is started again.
    Drain,
    /// The control plane is killed (SIGKILL) and started again.
    Control,
    /// A server is killed while the control plane is down.
    ControlAndKill,
    /// Servers are killed until some experts have no replica, and started again.
    Outage,
}

impl Kind {
    /// Every kind.
    pub const ALL: [Self; 8] = [
        Self::Kill,
        Self::Restart,
        Self::Freeze,
        Self::Expire,
        Self::Drain,
        Self::Control,
        Self::ControlAndKill,
        Self::Outage,
    ];
}

/// Weight of each kind, in the order of [`Kind::ALL`]. A kind with weight 0 never happens.
pub type Weights = [u32; Kind::ALL.len()];

/// One event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Event {
    /// Kind of the event.
    pub kind: Kind,
    /// The server that it happens to. For an outage, the only server that is spared.
    pub server_idx: usize,
    /// Layers that must finish first, after the cluster is whole again.
    pub gap_layers: u64,
    /// Pause before the event, so that it falls anywhere within a layer.
    pub delay_us: u64,
    /// Length of the fault.
    pub hold_ms: u64,
}

/// Limits of the events.
#[derive(Debug, Clone, Copy)]
pub struct Bounds {
    /// Servers of the cluster.
    pub num_servers: usize,
    /// Average of [`Event::gap_layers`].
    pub gap_layers: u64,
    /// The clients' deadline.
    pub deadline_ms: u64,
    /// Lease of a member.
    pub lease_ms: u64,
    /// Longest absence of the control plane.
    pub control_hold_ms: u64,
}

/// `num_events` events. The kinds of the first events are one of each with a weight, in random order, so
/// that a short schedule misses none.
#[must_use]
pub fn schedule(seed: u64, num_events: usize, weights: &Weights, bounds: &Bounds) -> Vec<Event> {
    let mut rng = StdRng::seed_from_u64(seed);
    let mut first: Vec<Kind> =
        Kind::ALL.into_iter().zip(weights).filter(|(_, w)| **w > 0).map(|(kind, _)| kind).collect();
    let total: u32 = weights.iter().sum();
    if total == 0 {
        return Vec::new();
    }
    (0..num_events)
        .map(|_| {
            let kind = if first.is_empty() {
                draw(&mut rng, weights, total)
            } else {
                first.swap_remove(rng.random_range(0..first.len()))
            };
            Event {
                kind,
                server_idx: rng.random_range(0..bounds.num_servers),
                gap_layers: rng.random_range(bounds.gap_layers / 2..=bounds.gap_layers * 3 / 2),
                delay_us: rng.random_range(0..3000),
                hold_ms: hold_ms(&mut rng, kind, bounds),
            }
        })
        .collect()
}

fn draw(rng: &mut StdRng, weights: &Weights, total: u32) -> Kind {
    let mut roll = rng.random_range(0..total);
    for (kind, &weight) in Kind::ALL.into_iter().zip(weights) {
        if roll < weight {
            return kind;
        }
        roll -= weight;
    }
    Kind::Kill
}

fn hold_ms(rng: &mut StdRng, kind: Kind, bounds: &Bounds) -> u64 {
    match kind {
        Kind::Kill | Kind::Outage => rng.random_range(0..300),
        Kind::Restart | Kind::Drain => 0,
        // From unnoticed to well beyond the deadline.
        Kind::Freeze => rng.random_range(bounds.deadline_ms / 2..=bounds.deadline_ms * 3),
        Kind::Expire => rng.random_range(bounds.lease_ms * 3 / 2..=bounds.lease_ms * 5 / 2),
        Kind::Control | Kind::ControlAndKill => {
            rng.random_range(bounds.control_hold_ms / 4..=bounds.control_hold_ms)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_determines_the_schedule_and_every_kind_with_a_weight_comes_first() {
        let bounds = Bounds {
            num_servers: 4,
            gap_layers: 50,
            deadline_ms: 100,
            lease_ms: 1500,
            control_hold_ms: 1000,
        };
        let weights = [8, 4, 0, 1, 2, 1, 1, 0];
        let events = schedule(42, 40, &weights, &bounds);
        assert_eq!(events, schedule(42, 40, &weights, &bounds));
        assert_ne!(events, schedule(43, 40, &weights, &bounds));
        for (kind, weight) in Kind::ALL.into_iter().zip(weights) {
            let at = events.iter().position(|event| event.kind == kind);
            assert_eq!(at.is_some_and(|at| at < 6), weight > 0, "{kind:?}");
            assert!(weight > 0 || events.iter().all(|event| event.kind != kind));
        }
        assert!(schedule(1, 5, &[0; 8], &bounds).is_empty());
    }
}
