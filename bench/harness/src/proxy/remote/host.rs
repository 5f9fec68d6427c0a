//! Producers that are threads of this host.

use std::time::Instant;

use anyhow::{Result, bail, ensure};
use p2p_core::network::JoinedSide;
use p2p_core::{AnyEndpoint, Region, SlotLayout};

use super::lines::{LIMIT, Lines};
use super::{Plan, Samples, check, fill, peer_config};
use proxy::command::{Command, Opcode};
use proxy::lane::{Lanes, Poster};
use proxy::threads::{Proxy, ProxyPeer};

pub(super) fn from_host(
    proxy: &Proxy,
    pairs: Vec<JoinedSide>,
    plan: &Plan,
    layout: &SlotLayout,
    line: &mut Lines,
) -> Result<Samples> {
    let mut senders = Vec::new();
    for (idx, JoinedSide { endpoint, slot }) in pairs.into_iter().enumerate() {
        senders.push(Sender::new(proxy, endpoint, slot, plan, layout, idx)?);
    }
    let mut checked = 0;
    for round in 0..u64::from(plan.checks) {
        each(&mut senders, |sender| sender.round(plan, round))?;
        checked += check(line, plan.whole_round(round, round + 1))?;
    }
    let (round, counter) = (u64::from(plan.checks), u64::from(plan.checks));
    each(&mut senders, |sender| fill(&sender.mirror, plan, sender.idx, round))?;
    let start = Instant::now();
    let samples = each(&mut senders, |sender| sender.timed(plan))?;
    let wall = start.elapsed();
    let mut checked_timed = check(line, plan.left_of(plan.commands, plan.threads, round, counter))?;
    let one_by_one = |sender: &mut Sender| {
        fill(&sender.mirror, plan, sender.idx, round + 1)?;
        sender.one_by_one(plan)
    };
    let one = senders.first_mut().map(one_by_one).transpose()?;
    checked_timed += check(line, plan.left_of(plan.num_one_by_one(), 1, round + 1, counter))?;
    let samples = samples.into_iter().flatten().collect();
    Ok(Samples { checked, checked_timed, wall, samples, one: one.unwrap_or_default() })
}

/// The pair and the producer of one thread.
struct Sender {
    peer: ProxyPeer<AnyEndpoint>,
    poster: Poster,
    mirror: Region,
    _slot: Region,
    idx: usize,
    counter: u32,
}

impl Sender {
    fn new(
        proxy: &Proxy,
        endpoint: AnyEndpoint,
        slot: Region,
        plan: &Plan,
        layout: &SlotLayout,
        idx: usize,
    ) -> Result<Self> {
        let lanes = Lanes::anonymous(plan.lanes())?;
        let mirror = Region::anonymous(layout.slot_bytes())?;
        let poster = lanes.poster(0);
        let config = peer_config(lanes, mirror.clone(), layout, idx);
        let peer = proxy.add(endpoint, config)?;
        let counter = Plan::counter(layout) as u32;
        Ok(Self { peer, poster, mirror, _slot: slot, idx, counter })
    }

    fn post(&mut self, command: &Command) -> Result<u64> {
        let deadline = Instant::now() + LIMIT;
        loop {
            if let Some(number) = self.poster.try_post(command) {
                return Ok(number);
            }
            self.look(deadline)?;
        }
    }

    fn look(&mut self, deadline: Instant) -> Result<()> {
        self.peer.ring();
        if let Some(failure) = self.peer.take_failures().into_iter().next() {
            return Err(failure.into());
        }
        ensure!(Instant::now() < deadline, "the proxy makes no progress");
        std::thread::yield_now();
        Ok(())
    }

    fn wait(&mut self, number: u64) -> Result<()> {
        let deadline = Instant::now() + LIMIT;
        while self.poster.completed() < number {
            self.look(deadline)?;
        }
        Ok(())
    }

    fn put(&mut self, plan: &Plan, idx: u64) -> Result<u64> {
        let offset = (idx % u64::from(plan.budget)) as u32 * plan.object_bytes;
        self.post(&Command::transfer(Opcode::Put, offset, 0, offset, plan.object_bytes))
    }

    /// Puts fresh objects with adds to a counter behind them, and waits until all have arrived.
    fn round(&mut self, plan: &Plan, round: u64) -> Result<()> {
        fill(&self.mirror, plan, self.idx, round)?;
        for idx in 0..u64::from(plan.budget) {
            self.put(plan, idx)?;
        }
        let counter = self.counter;
        self.post(&Command::word(Opcode::Add, counter, 1))?;
        let end = self.post(&Command::new(Opcode::Quiet))?;
        self.wait(end)
    }

    /// Puts objects as fast as the budget allows. Returns the latencies of batches.
    fn timed(&mut self, plan: &Plan) -> Result<Vec<u64>> {
        let mut under_way = std::collections::VecDeque::new();
        let mut samples = Vec::with_capacity((plan.commands / u64::from(plan.batch)) as usize + 1);
        let mut begin = 0;
        while begin < plan.commands {
            let posted = Instant::now();
            let num = u64::from(plan.batch).min(plan.commands - begin);
            let mut end = 0;
            for idx in begin..begin + num {
                end = self.put(plan, idx)?;
            }
            self.peer.ring();
            under_way.push_back((posted, end));
            begin += num;
            let completed = self.poster.completed();
            while let Some((posted, _)) = under_way.pop_front_if(|(_, end)| *end <= completed) {
                samples.push(posted.elapsed().as_nanos() as u64);
            }
        }
        let end = self.post(&Command::new(Opcode::Quiet))?;
        self.wait(end)?;
        Ok(samples)
    }

    /// Puts objects one after the other, and waits for the arrival of each.
    fn one_by_one(&mut self, plan: &Plan) -> Result<Vec<u64>> {
        let mut samples = Vec::new();
        for idx in 0..plan.num_one_by_one() {
            let posted = Instant::now();
            self.put(plan, idx)?;
            let end = self.post(&Command::new(Opcode::Quiet))?;
            self.peer.ring();
            self.wait(end)?;
            samples.push(posted.elapsed().as_nanos() as u64);
        }
        Ok(samples)
    }
}

fn each<T: Send>(
    senders: &mut [Sender],
    work: impl Fn(&mut Sender) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    std::thread::scope(|scope| {
        let threads: Vec<_> =
            senders.iter_mut().map(|sender| scope.spawn(|| work(sender))).collect();
        let join = |thread: std::thread::ScopedJoinHandle<'_, Result<T>>| match thread.join() {
            Ok(result) => result,
            Err(_) => bail!("a producer panicked"),
        };
        threads.into_iter().map(join).collect()
    })
}
