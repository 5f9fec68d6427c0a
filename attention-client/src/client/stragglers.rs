//! Tests of the choice among replicas with servers that get slow and recover, on simulated time.

use std::time::Duration;

use control_api::{LayerPlacement, MemberId, ModelDescriptor, PlacementTable, ServerEntry};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use super::plan::{Pair, Penalty, Plan};
use crate::fleet::pace::{PROBE_INTERVAL, PROBE_PLANS, Pacing, USUAL_PACE};
use crate::fleet::placement::{Registry, Routing};

const NUM_EXPERTS: usize = 24;

/// A client that calls one layer again and again, and servers whose latency a test sets.
struct World {
    rng: StdRng,
    routing: Routing,
    pacing: Pacing,
    plan: Plan,
    now_ns: u64,
    /// Factor on the latency, by server.
    slowness: Vec<f64>,
    num_tokens: u32,
    /// Time and number of the call of each server's last frame.
    last_frame: Vec<(u64, u64)>,
    num_calls: u64,
    longest_call_ns: u64,
    /// Longest time and most calls without a frame, by server, since the last `reset_gaps`.
    gaps: Vec<(u64, u64)>,
}

impl World {
    fn new(rng: StdRng, num_servers: usize, num_tokens: u32) -> Self {
        let model = ModelDescriptor {
            fingerprint: "00112233".to_owned(),
            architecture: "test".to_owned(),
            hidden: 8,
            moe_layers: vec![0],
            num_experts: NUM_EXPERTS as u32,
            top_k: 8,
        };
        let servers = (0..num_servers).map(|server| ServerEntry {
            member_id: MemberId::parse(&format!("s{server}")).unwrap(),
            name: format!("s{server}"),
            incarnation: 1,
            data_addr: "127.0.0.1:1".to_owned(),
            needs_tickets: false,
        });
        let everywhere: Vec<u32> = (0..num_servers as u32).collect();
        let table = PlacementTable {
            cluster_id: "c".to_owned(),
            epoch: 1,
            model: Some(model.clone()),
            servers: servers.collect(),
            layers: vec![LayerPlacement { layer: 0, replicas: vec![everywhere; NUM_EXPERTS] }],
        };
        Self {
            rng,
            routing: Registry::new(1).apply(&table, &model).routing,
            pacing: Pacing::new(0.05),
            plan: Plan::default(),
            now_ns: 0,
            slowness: vec![1.0; num_servers],
            num_tokens,
            last_frame: vec![(0, 0); num_servers],
            num_calls: 0,
            longest_call_ns: 0,
            gaps: vec![(0, 0); num_servers],
        }
    }

    /// One call. Adds the pairs that each server gets to `shares`.
    fn call(&mut self, shares: &mut [u64]) {
        let mut pairs = Vec::new();
        for token in 0..self.num_tokens {
            for _ in 0..8 {
                let expert = self.rng.random_range(0..NUM_EXPERTS as u32);
                pairs.push(Pair { token, expert, weight: 1.0 });
            }
        }
        let usable = |_| Some(Penalty::NONE);
        self.plan.reset(NUM_EXPERTS);
        self.plan.assign(&self.routing, 0, &pairs, 1000, Some(self.now_ns), usable);
        let mut longest = 0;
        for frame in &self.plan.frames {
            let rank = frame.rank as usize;
            shares[rank] += u64::from(frame.num_entries);
            // Up to twice as long by chance, and now and then a hundred times.
            let chance =
                if self.rng.random_bool(0.01) { 100.0 } else { self.rng.random_range(1.0..2.0) };
            let ns = 1000.0 * f64::from(20 + frame.num_entries) * self.slowness[rank] * chance;
            let deviation = self.pacing.observe(frame.num_entries, Duration::from_nanos(ns as u64));
            self.routing.servers[rank].pace.observe(deviation);
            longest = longest.max(ns as u64);
            self.last_frame[rank] = (self.now_ns, self.num_calls);
        }
        self.longest_call_ns = self.longest_call_ns.max(longest + 5000);
        self.now_ns += longest + 5000;
        self.num_calls += 1;
        for (gap, last) in self.gaps.iter_mut().zip(&self.last_frame) {
            *gap = (gap.0.max(self.now_ns - last.0), gap.1.max(self.num_calls - last.1));
        }
    }

    /// Share of `server` in the pairs of `num_calls` calls, relative to an equal share.
    fn share(&mut self, server: usize, num_calls: usize) -> f64 {
        let mut shares = vec![0; self.slowness.len()];
        (0..num_calls).for_each(|_| self.call(&mut shares));
        let total: u64 = shares.iter().sum();
        shares[server] as f64 * shares.len() as f64 / total as f64
    }

    fn stragglers(&self) -> Vec<usize> {
        let is_slow = |&s: &usize| self.routing.servers[s].pace.slowness() > USUAL_PACE;
        (0..self.slowness.len()).filter(is_slow).collect()
    }
}

#[test]
fn a_straggler_gets_less_and_its_share_returns_when_it_recovers() {
    let seed: u64 = rand::random();
    println!("seed {seed}");
    let mut rng = StdRng::seed_from_u64(seed);
    for round in 0..20 {
        let num_servers = rng.random_range(2..6);
        let num_tokens = [1, 2, 8, 64][round % 4];
        let slow = rng.random_range(0..num_servers);
        let factor = rng.random_range(5.0..30.0);
        let mut world = World::new(StdRng::seed_from_u64(rng.random()), num_servers, num_tokens);
        let case = format!("{num_servers} servers, {num_tokens} tokens, {factor:.1} times as slow");
        // Chance alone makes no straggler, so an even load stays even.
        let usual = world.share(slow, 2000);
        assert_eq!(world.stragglers(), [0; 0], "{case}");
        world.slowness[slow] = factor;
        world.share(slow, 200);
        assert_eq!(world.stragglers(), [slow], "{case}");
        world.gaps.fill((0, 0));
        world.last_frame.fill((world.now_ns, world.num_calls));
        let share = world.share(slow, 3000);
        assert!(share < 0.6 * usual, "{case}: {share} of {usual}");
        assert_eq!(world.stragglers(), [slow], "{case}");
        // No server starves: the first call after both limits are passed has a probe. A gap ends with a call, so the
        // calls before and at the probe count, too.
        let (longest, most) = world.gaps[slow];
        let is_within = longest <= PROBE_INTERVAL.as_nanos() as u64 + 2 * world.longest_call_ns
            || most <= u64::from(PROBE_PLANS) + 1;
        assert!(is_within, "{case}: {longest} ns and {most} calls without a frame");
        world.slowness[slow] = 1.0;
        let until = world.now_ns + 20 * PROBE_INTERVAL.as_nanos() as u64;
        while world.now_ns < until {
            world.share(slow, 10);
        }
        assert_eq!(world.stragglers(), [0; 0], "{case}");
        let share = world.share(slow, 2000);
        assert!((0.9..1.1).contains(&(share / usual)), "{case}: {share} of {usual}");
    }
}

#[test]
fn late_is_a_multiple_of_what_is_usual_and_the_budget_bounds_hedges() {
    let seed: u64 = rand::random();
    println!("seed {seed}");
    let mut rng = StdRng::seed_from_u64(seed);
    let pacing = Pacing::new(0.05);
    assert_eq!(pacing.late_after(1), None);
    for _ in 0..5000 {
        pacing.observe(8, Duration::from_micros(rng.random_range(100..300)));
    }
    let late = pacing.late_after(15).unwrap();
    assert!((400..900).contains(&late.as_micros()), "{late:?}");
    // Another class knows nothing yet.
    assert_eq!(pacing.late_after(16), None);
    let (mut num_frames, mut num_hedges) = (0, 0);
    for _ in 0..10_000 {
        if rng.random_bool(0.7) {
            pacing.earn();
            num_frames += 1;
        }
        let wanted = rng.random_range(1..4);
        if rng.random_bool(0.5) && pacing.spend(wanted) {
            num_hedges += wanted;
        }
        assert!(num_hedges as f64 <= 0.05 * f64::from(num_frames), "{num_hedges} of {num_frames}");
    }
    assert!(num_hedges > 200, "{num_hedges}");
    let off = Pacing::new(0.0);
    (0..1000).for_each(|_| off.earn());
    assert!(!off.may_hedge());
}
