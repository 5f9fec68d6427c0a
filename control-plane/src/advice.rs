//! Scaling advice: the number of servers that suits the load. Sans-I/O: a pure function of the members' reports.
//!
//! The advice is a proportional rule, as Kubernetes' horizontal autoscaler has one: the number of servers times the
//! compute share over the target share. Queues, late frames and memory can raise the number. It falls only with a
//! margin, so that it does not swing.

use std::time::Duration;

use control_api::AdviceReason;

pub use control_api::ScalingAdvice;

use crate::member::{Member, Phase};

/// The fleet as its members have reported it.
#[derive(Clone, Debug)]
pub struct FleetWork {
    /// Leased servers.
    pub servers: Vec<ServerWork>,
    /// Time in which the weight of a report halves.
    pub half_life: Duration,
    /// (layer, expert) pairs of the model.
    pub num_experts: u64,
    /// Fewest replicas of each expert.
    pub replicas: u32,
    /// True if the members have too little memory for a plan.
    pub is_short: bool,
}

/// Work of one leased server, with old work decayed.
#[derive(Clone, Debug, Default)]
pub struct ServerWork {
    /// The server leaves: its load remains, its place does not.
    pub is_draining: bool,
    /// Time that the reports cover.
    pub window_ms: f64,
    /// Compute time within it.
    pub busy_ms: f64,
    /// Sum of the waiting times of frames.
    pub queued_ms: f64,
    /// Frames computed.
    pub frames: f64,
    /// Frames computed too late.
    pub late: f64,
    /// Speed relative to the other servers.
    pub speed: f64,
    /// Most (layer, expert) pairs that fit into its memory.
    pub capacity_experts: Option<u32>,
}

impl ServerWork {
    pub(crate) fn of(member: &Member) -> Self {
        let work = &member.work;
        Self {
            is_draining: member.record.phase == Phase::Draining,
            window_ms: work.window_ms,
            busy_ms: work.busy_ms,
            queued_ms: work.queued_ms,
            frames: work.frames,
            late: work.late,
            speed: work.speed(),
            capacity_experts: member.record.capacity_experts,
        }
    }

    fn share(&self) -> f64 {
        if self.window_ms > 0.0 { self.busy_ms / self.window_ms } else { 0.0 }
    }
}

/// The number of servers with which each computes for about `target_share` of the time. `target_share` is above 0 and
/// below 1.
pub fn advise(fleet: &FleetWork, target_share: f64) -> ScalingAdvice {
    let current = fleet.servers.iter().filter(|server| !server.is_draining).count() as u32;
    let speed_of = |of_all: bool| -> f64 {
        let servers = fleet.servers.iter().filter(|server| of_all || !server.is_draining);
        servers.map(|server| server.speed).sum()
    };
    // The load of servers that leave goes to the others.
    let demand: f64 = fleet.servers.iter().map(|server| server.share() * server.speed).sum();
    let speed = speed_of(false);
    let compute_share = if speed > 0.0 { demand / speed } else { 0.0 };
    let busiest_share = fleet.servers.iter().map(ServerWork::share).fold(0.0, f64::max);
    let sum = |of: fn(&ServerWork) -> f64| fleet.servers.iter().map(of).sum::<f64>();
    let over = |part: f64, whole: f64| if whole > 0.0 { part / whole } else { 0.0 };
    let queue_frames = over(sum(|server| server.queued_ms), sum(|server| server.window_ms));
    let late_share = over(sum(|server| server.late), sum(|server| server.frames));
    let full_window_ms = fleet.half_life.as_secs_f64() * 1e3 / std::f64::consts::LN_2;
    let evidence = |server: &ServerWork| (server.window_ms / full_window_ms).min(1.0);
    let confidence = over(fleet.servers.iter().map(evidence).sum(), fleet.servers.len() as f64);

    let (by_replicas, by_memory) = fewest(fleet);
    let min_servers = by_replicas.max(by_memory);
    let scaled = |factor: f64| (f64::from(current) * factor - ROUNDING).ceil().max(0.0) as u32;
    let most = scaled(MAX_GROWTH).max(current + 1);
    // One more server at least, if a figure exceeds its limit.
    let above = |found: f64, limit: f64, growth: f64| match found > limit {
        true => scaled((found / limit).min(growth)).max(current + 1),
        false => 0,
    };
    let mut wishes = [
        (by_replicas, AdviceReason::Replicas),
        (by_memory, AdviceReason::Memory),
        (scaled(compute_share / target_share), AdviceReason::Compute),
        (above(busiest_share, MAX_BUSIEST_SHARE, MAX_GROWTH), AdviceReason::BusiestServer),
        (above(queue_frames, MAX_QUEUE_FRAMES, 1.5), AdviceReason::Queue),
        (above(late_share, MAX_LATE_SHARE, 1.25), AdviceReason::LateFrames),
    ];
    if fleet.is_short && by_replicas <= current {
        wishes[1].0 = by_memory.max(current + 1);
    }
    let is_known = confidence >= MIN_CONFIDENCE;
    if !is_known {
        // The wishes for memory and replicas follow from the present members and need no history.
        wishes[2..].iter_mut().for_each(|wish| wish.0 = 0);
    }
    let (mut wanted, mut why) = wishes[0];
    for wish in wishes {
        if wish.0 > wanted {
            (wanted, why) = wish;
        }
    }
    let lower = scaled(compute_share / (target_share * SHRINK_BELOW)).max(min_servers).max(wanted);
    let (desired_servers, reason) = if wanted > current {
        (wanted.min(most.max(min_servers)), why)
    } else if !is_known {
        (current, AdviceReason::TooLittleData)
    } else if lower < current {
        (
            lower.max(1),
            if lower.max(1) < current { AdviceReason::Surplus } else { AdviceReason::Steady },
        )
    } else {
        (current, AdviceReason::Steady)
    };
    let text = format!(
        "{current} servers compute for {:.0} % of the time (target {:.0} %, busiest {:.0} %); {queue_frames:.2} frames \
         wait per server; {:.2} % of the frames are late; memory needs {min_servers} servers",
        compute_share * 1e2,
        target_share * 1e2,
        busiest_share * 1e2,
        late_share * 1e2,
    );
    ScalingAdvice {
        desired_servers,
        current_servers: current,
        min_servers,
        reason,
        text,
        confidence,
        compute_share,
        busiest_share,
        target_share,
        queue_frames,
        late_share,
    }
}

/// Fewest servers that hold every expert `replicas` times: because no server holds an expert twice, and with the memory
/// of the present servers.
fn fewest(fleet: &FleetWork) -> (u32, u32) {
    let replicas = u64::from(fleet.replicas.max(1));
    let copies = fleet.num_experts.saturating_mul(replicas);
    let rooms = fleet.servers.iter().filter(|server| !server.is_draining);
    let rooms: Vec<u64> = rooms
        .map(|server| server.capacity_experts.map_or(fleet.num_experts, u64::from))
        .map(|room| room.min(fleet.num_experts))
        .collect();
    let mean = rooms.iter().sum::<u64>().checked_div(rooms.len() as u64).unwrap_or(0);
    let by_memory = if mean > 0 { copies.div_ceil(mean) } else { 0 };
    (u32::try_from(replicas).unwrap_or(u32::MAX), u32::try_from(by_memory).unwrap_or(u32::MAX))
}

/// The busiest server should compute for at most this share of the time.
const MAX_BUSIEST_SHARE: f64 = 0.9;
/// Frames that may wait per server.
const MAX_QUEUE_FRAMES: f64 = 1.0;
/// Share of the frames that may be late.
const MAX_LATE_SHARE: f64 = 0.001;
/// Fewer servers are advised only if their compute share would be below this share of the target.
const SHRINK_BELOW: f64 = 0.85;
/// Growth by one advice: a surge shows its size only after servers have been added.
const MAX_GROWTH: f64 = 2.0;
/// With less evidence the advice does not change the number for the load.
const MIN_CONFIDENCE: f64 = 0.5;
/// A share that is above the target by rounding alone asks for no server.
const ROUNDING: f64 = 1e-6;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn server(share: f64) -> ServerWork {
        let window_ms = 60_000.0;
        ServerWork {
            window_ms,
            busy_ms: share * window_ms,
            frames: 10_000.0,
            speed: 1.0,
            ..ServerWork::default()
        }
    }

    fn fleet(servers: Vec<ServerWork>) -> FleetWork {
        FleetWork {
            servers,
            half_life: Duration::from_secs(30),
            num_experts: 100,
            replicas: 1,
            is_short: false,
        }
    }

    fn advice(servers: Vec<ServerWork>) -> (u32, AdviceReason) {
        let ScalingAdvice { desired_servers, reason, .. } = advise(&fleet(servers), 0.6);
        (desired_servers, reason)
    }

    #[test]
    fn each_signal_has_its_advice() {
        assert_eq!(advice(vec![server(0.6); 4]), (4, AdviceReason::Steady));
        assert_eq!(advice(vec![server(0.9); 4]), (6, AdviceReason::Compute));
        assert_eq!(advice(vec![server(0.2); 6]), (3, AdviceReason::Surplus));
        // 3 would do, but with no margin.
        assert_eq!(advice(vec![server(0.45); 4]), (4, AdviceReason::Steady));
        let mut servers = vec![server(0.4); 4];
        servers[0] = server(0.99);
        assert_eq!(advice(servers), (5, AdviceReason::BusiestServer));
        let queue = ServerWork { queued_ms: 75_000.0, ..server(0.5) };
        assert_eq!(advice(vec![queue; 4]), (5, AdviceReason::Queue));
        let late = ServerWork { late: 50.0, ..server(0.5) };
        assert_eq!(advice(vec![late; 4]), (5, AdviceReason::LateFrames));
        let small = ServerWork { capacity_experts: Some(30), ..server(0.1) };
        assert_eq!(advice(vec![small; 3]), (4, AdviceReason::Memory));
        // 64 replicas on 2 servers are a matter of their number, whether the plan says so yet or not.
        for is_short in [false, true] {
            let fleet = FleetWork { replicas: 64, is_short, ..fleet(vec![server(0.6); 2]) };
            let advice = advise(&fleet, 0.6);
            assert_eq!((advice.min_servers, advice.reason), (64, AdviceReason::Replicas));
        }
        let fresh = ServerWork { window_ms: 1000.0, busy_ms: 1000.0, ..server(0.0) };
        assert_eq!(advice(vec![fresh; 3]), (3, AdviceReason::TooLittleData));
        let leaving = ServerWork { is_draining: true, ..server(0.6) };
        assert_eq!(advice(vec![server(0.6), server(0.6), leaving]), (3, AdviceReason::Compute));
        assert_eq!(advice(Vec::new()).0, 1);
    }

    #[test]
    fn a_fast_server_that_idles_counts_for_many() {
        let gpu = ServerWork { speed: 50.0, ..server(0.1) };
        assert_eq!(advice(vec![server(0.6), gpu]), (1, AdviceReason::Surplus));
    }

    proptest! {
        #[test]
        fn advice_is_within_its_bounds(
            servers in prop::collection::vec(
                (any::<bool>(), 0.0f64..1e6, 0.0f64..2.0, 0.0f64..1e9, 0.0f64..1.0, 0.01f64..100.0, prop::option::of(0u32..200)),
                0..20,
            ),
            target in 0.05f64..0.95,
            replicas in 0u32..5,
            is_short in any::<bool>(),
        ) {
            let servers = servers.into_iter().map(|(is_draining, window_ms, share, queued_ms, late, speed, capacity_experts)| ServerWork {
                is_draining, window_ms, busy_ms: window_ms * share, queued_ms,
                frames: 100.0, late: late * 100.0, speed, capacity_experts,
            }).collect();
            let fleet = FleetWork { replicas, is_short, ..fleet(servers) };
            let advice = advise(&fleet, target);
            let (current, least) = (advice.current_servers, advice.min_servers);
            prop_assert!(advice.desired_servers >= least.min(current).max(1), "{:?}", advice);
            prop_assert!(advice.desired_servers <= (2 * current).max(current + 1).max(least), "{:?}", advice);
            prop_assert!((0.0..=1.0).contains(&advice.confidence), "{:?}", advice);
            let changes = advice.desired_servers.cmp(&current);
            match advice.reason {
                AdviceReason::Steady | AdviceReason::TooLittleData => {
                    prop_assert!(changes.is_eq() || current == 0, "{:?}", advice);
                }
                AdviceReason::Surplus => prop_assert!(changes.is_lt(), "{:?}", advice),
                _ => prop_assert!(changes.is_gt(), "{:?}", advice),
            }
        }
    }
}
