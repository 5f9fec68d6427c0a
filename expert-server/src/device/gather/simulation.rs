//! Clients and servers in virtual time: which clients share a batch under the policy of [`GatherPolicy`].
//!
//! A server computes one batch after the other. The end of a batch decides what the next but one waits for, as in
//! the data thread. Each further client makes a batch 2 % longer; durations vary by 2 %.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::time::Duration;

use kernels::abi::Gather;
use kernels::gpu::DeviceName;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use super::GatherPolicy;
use crate::device::DeviceOptions;

/// Times are ns.
#[derive(Clone)]
struct World {
    /// Duration of each server's batches.
    compute: Vec<u64>,
    /// Shortest and longest time of each client from an answer to its next frame.
    think: Vec<[u64; 2]>,
    /// Time at which a client leaves, if it does.
    gone_at: Vec<Option<u64>>,
    gather: Duration,
}

struct Server {
    policy: GatherPolicy,
    gathers: VecDeque<Gather>,
    queued: u32,
    last: u32,
    is_busy: bool,
    free_at: u64,
    num_batches: usize,
    num_frames: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Frames { client: usize },
    Look { server: usize },
    Answers { server: usize, clients: u32, expected: u32, compute: u64 },
}

/// The results of a run.
struct Outcome {
    /// Durations of each client's layers in the last three quarters of the time.
    layers: Vec<Vec<u64>>,
    /// Layers of each client in the last quarter of the time.
    num_late: Vec<usize>,
    clients_per_batch: f64,
}

struct Run<'a> {
    world: &'a World,
    rng: StdRng,
    servers: Vec<Server>,
    events: BinaryHeap<Reverse<(u64, usize, Event)>>,
    num_events: usize,
    /// For each client: servers that have not answered, and the time of its frames.
    open: Vec<(usize, u64)>,
    outcome: Outcome,
}

impl World {
    fn new(compute_us: &[u64], think_us: &[[u64; 2]]) -> Self {
        Self {
            compute: compute_us.iter().map(|us| us * 1000).collect(),
            think: think_us.iter().map(|range| range.map(|us| us * 1000)).collect(),
            gone_at: vec![None; think_us.len()],
            gather: Duration::from_millis(2),
        }
    }

    fn without_waiting(&self) -> Self {
        Self { gather: Duration::ZERO, ..self.clone() }
    }

    fn run(&self, seed: u64) -> Outcome {
        let options =
            DeviceOptions { gather: self.gather, ..DeviceOptions::new(DeviceName::Emulated(0)) };
        let servers = self.compute.iter().map(|_| {
            let policy = GatherPolicy::new(&options);
            let gathers = VecDeque::from([policy.next(u32::MAX); 2]);
            let (queued, last, is_busy, free_at) = (0, 0, false, 0);
            let (num_batches, num_frames) = (0, 0);
            Server { policy, gathers, queued, last, is_busy, free_at, num_batches, num_frames }
        });
        let num_clients = self.think.len();
        let mut run = Run {
            world: self,
            rng: StdRng::seed_from_u64(seed),
            servers: servers.collect(),
            events: BinaryHeap::new(),
            num_events: 0,
            open: vec![(0, 0); num_clients],
            outcome: Outcome {
                layers: vec![Vec::new(); num_clients],
                num_late: vec![0; num_clients],
                clients_per_batch: 0.0,
            },
        };
        for client in 0..num_clients {
            let at = run.rng.random_range(0..self.compute[0]);
            run.at(at, Event::Frames { client });
        }
        while let Some(Reverse((now, _, event))) = run.events.pop() {
            if now > END {
                break;
            }
            run.step(now, event);
        }
        let sum = |of: fn(&Server) -> usize| run.servers.iter().map(of).sum::<usize>() as f64;
        run.outcome.clients_per_batch = sum(|s| s.num_frames) / sum(|s| s.num_batches).max(1.0);
        run.outcome
    }
}

impl Run<'_> {
    fn at(&mut self, time: u64, event: Event) {
        self.num_events += 1;
        self.events.push(Reverse((time, self.num_events, event)));
    }

    fn step(&mut self, now: u64, event: Event) {
        match event {
            Event::Frames { client } => {
                self.open[client] = (self.servers.len(), now);
                for server in 0..self.servers.len() {
                    self.servers[server].queued |= 1 << client;
                    self.look(now, server);
                }
            }
            Event::Look { server } => self.look(now, server),
            Event::Answers { server, clients, expected, compute } => {
                let at = &mut self.servers[server];
                (at.is_busy, at.free_at) = (false, now);
                at.policy.record(clients, expected, Duration::from_nanos(compute));
                at.gathers.push_back(at.policy.next(u32::MAX));
                for client in bits(clients) {
                    self.answer(now, client);
                }
                self.look(now, server);
            }
        }
    }

    /// Begins a batch, unless no frame is queued or an expected client is missing.
    fn look(&mut self, now: u64, server: usize) {
        let at = &mut self.servers[server];
        if at.is_busy || at.queued == 0 {
            return;
        }
        let gather = at.gathers[0];
        let expected = gather.clients & at.last;
        let until = at.free_at + u64::from(gather.within_ns);
        if expected & !at.queued != 0 && now < until {
            return self.at(until, Event::Look { server });
        }
        at.gathers.pop_front();
        let clients = std::mem::take(&mut at.queued);
        (at.is_busy, at.last) = (true, clients);
        at.num_batches += 1;
        at.num_frames += clients.count_ones() as usize;
        let share = 1.0 + 0.02 * f64::from(clients.count_ones() - 1);
        let share = share * self.rng.random_range(0.98..1.02);
        let compute = (self.world.compute[server] as f64 * share) as u64;
        self.at(now + compute, Event::Answers { server, clients, expected, compute });
    }

    fn answer(&mut self, now: u64, client: usize) {
        let (open, since) = &mut self.open[client];
        *open -= 1;
        if *open > 0 {
            return;
        }
        if now > END / 4 {
            self.outcome.layers[client].push(now - *since);
        }
        self.outcome.num_late[client] += usize::from(now > END / 4 * 3);
        let [least, most] = self.world.think[client];
        let next = now + self.rng.random_range(least..=most);
        if self.world.gone_at[client].is_none_or(|at| next < at) {
            self.at(next, Event::Frames { client });
        }
    }
}

fn bits(mask: u32) -> impl Iterator<Item = usize> {
    (0..32).filter(move |idx| mask >> idx & 1 != 0)
}

fn median(values: &[u64]) -> f64 {
    let mut values = values.to_vec();
    values.sort_unstable();
    values.get(values.len() / 2).copied().unwrap_or(0) as f64
}

fn seeds() -> impl Iterator<Item = u64> {
    let first: u64 = rand::random();
    println!("seeds from {first}");
    (0..20).map(move |idx| first.wrapping_add(idx))
}

/// Think time of a message engine's client: a tenth of a millisecond.
const QUICK: [u64; 2] = [80, 140];
const END: u64 = 1_000_000_000;

#[test]
fn closed_loops_share_batches_on_one_server_and_on_several_with_unequal_loads() {
    let worlds = [
        World::new(&[2600], &[QUICK; 2]),
        World::new(&[2600], &[QUICK; 3]),
        World::new(&[1300, 1300], &[QUICK; 2]),
        World::new(&[1235, 1300], &[QUICK; 2]),
        World::new(&[1000, 1300], &[QUICK; 2]),
        World::new(&[900, 950, 1000], &[QUICK; 3]),
    ];
    for (world, seed) in worlds.iter().flat_map(|world| seeds().map(move |seed| (world, seed))) {
        let longest = world.compute.iter().copied().max().unwrap_or(1) as f64;
        let (apart, together) = (world.without_waiting().run(seed), world.run(seed));
        for (apart, together) in apart.layers.iter().zip(&together.layers) {
            let ratios = [median(apart) / longest, median(together) / longest];
            println!(
                "{:?} ns: {:.3} without waiting, {:.3} with it",
                world.compute, ratios[0], ratios[1]
            );
            assert!(ratios[0] > 1.7, "without waiting they would alternate: {ratios:?}");
            assert!(ratios[1] < 1.15, "{ratios:?} on {:?}, seed {seed}", world.compute);
        }
        let most = world.think.len() as f64;
        assert!(
            together.clients_per_batch > 0.8 * most,
            "{} of {most}",
            together.clients_per_batch
        );
    }
}

#[test]
fn slow_clients_cost_quick_ones_next_to_nothing() {
    for slow in [[2_000, 6_000], [7_000, 13_000], [40_000, 60_000]] {
        let world = World::new(&[1300], &[QUICK, slow]);
        for seed in seeds() {
            let (apart, together) = (world.without_waiting().run(seed), world.run(seed));
            let [apart, together] =
                [&apart, &together].map(|outcome| outcome.layers[0].len() as f64);
            assert!(
                together > 0.97 * apart,
                "{together} layers, {apart} without waiting, seed {seed}"
            );
        }
    }
}

#[test]
fn clients_that_left_and_clients_alone_cost_nothing() {
    let mut world = World::new(&[1300], &[QUICK; 2]);
    world.gone_at[1] = Some(END / 2);
    let alone = World::new(&[1300], &[QUICK]);
    for seed in seeds() {
        let [left, alone, plain] = [
            world.run(seed).num_late[0],
            alone.run(seed).num_late[0],
            alone.without_waiting().run(seed).num_late[0],
        ];
        assert_eq!(alone, plain, "seed {seed}");
        assert!(left as f64 > 0.98 * plain as f64, "{left} of {plain}, seed {seed}");
    }
}

#[test]
fn batches_that_take_hardly_longer_than_a_return_are_shared() {
    // The clients' own work between two calls differs by up to 10 µs.
    for compute in [&[38][..], &[38, 38], &[22, 24]] {
        let world = World::new(compute, &[[12, 22]; 2]);
        for seed in seeds() {
            let outcome = world.run(seed);
            assert!(
                outcome.clients_per_batch > 1.9,
                "{} clients a batch of {compute:?} µs, seed {seed}",
                outcome.clients_per_batch
            );
        }
    }
}
