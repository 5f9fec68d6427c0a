//! From (token, expert) pairs to frames: choice of replicas, grouping by server, splitting.
//!
//! Nothing here does I/O or reads a clock. Buffers are kept from call to call, so planning allocates nothing once
//! they have grown.

use protocol::{Entry, TokenRef};

use crate::fleet::pace::USUAL_PACE;
use crate::fleet::placement::Routing;

/// One expert of one token.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Pair {
    /// Row of the caller's `x`.
    pub token: u32,
    pub expert: u32,
    pub weight: f32,
}

/// A group of tokens for one server, small enough for one frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PlannedFrame {
    /// Index into the routing's servers.
    pub rank: u32,
    /// Range in [`Plan::tokens`].
    pub first_token: u32,
    pub num_tokens: u32,
    pub num_entries: u32,
    /// Number of this frame among those of one `assign` for the server, and how many there are.
    pub frame_idx: u32,
    pub num_frames: u32,
}

/// Why a replica is a worse choice than others. The least penalty wins; fields compare in this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Penalty {
    /// Failures of the server in this call.
    pub failures: u32,
    /// Another call's link to the server went silent, and nothing came from it since.
    pub is_silent: bool,
    /// A frame of this client is late there, and no answer has come over its connection since.
    pub is_overdue: bool,
}

impl Penalty {
    pub const NONE: Self = Self { failures: 0, is_silent: false, is_overdue: false };
}

/// The tokens and entries of all frames of one call, initial and re-sent.
#[derive(Debug, Default)]
pub(crate) struct Plan {
    pub tokens: Vec<TokenRef>,
    pub entries: Vec<Entry>,
    /// Frames made by the last [`assign`](Self::assign), by rank.
    pub frames: Vec<PlannedFrame>,
    /// Pairs of the last `assign` that no server can take now.
    pub orphans: Vec<Pair>,
    expert_pairs: Vec<u32>,
    expert_rank: Vec<u32>,
    used_experts: Vec<u32>,
    loads: Vec<u64>,
    /// Factors on the loads, by rank.
    slowness: Vec<u64>,
    cursors: Vec<Cursor>,
}

/// Positions for the tokens and entries of one server.
#[derive(Debug, Clone, Copy)]
struct Cursor {
    num_tokens: u32,
    num_entries: u32,
    next_token: u32,
    next_entry: u32,
    first_token: u32,
    last_row: u32,
}

impl Plan {
    /// Prepares for the next call.
    pub fn reset(&mut self, num_experts: usize) {
        self.tokens.clear();
        self.entries.clear();
        self.frames.clear();
        self.orphans.clear();
        self.expert_pairs.resize(num_experts, 0);
        self.expert_rank.resize(num_experts, NONE);
    }

    /// Grows the buffers for plans of these sizes.
    pub fn reserve(
        &mut self,
        num_rows: usize,
        num_pairs: usize,
        num_frames: usize,
        num_servers: usize,
    ) {
        self.tokens.reserve(num_rows.saturating_sub(self.tokens.len()));
        self.entries.reserve(num_pairs.saturating_sub(self.entries.len()));
        self.frames.reserve(num_frames.saturating_sub(self.frames.len()));
        self.used_experts.reserve(num_pairs.min(self.expert_pairs.len()));
        self.loads.reserve(num_servers.saturating_sub(self.loads.len()));
        self.slowness.reserve(num_servers.saturating_sub(self.slowness.len()));
        self.cursors.reserve(num_servers.saturating_sub(self.cursors.len()));
    }

    /// Distributes `pairs`, ascending by token, over the servers of `routing`. Each expert goes to one replica for
    /// which `usable` returns a penalty: the one with the least penalty, and among these with the least load. The load
    /// of a straggler counts more. With `probe_at_ns`, the time of this plan, a straggler that got nothing for a while
    /// gets one expert. Frames have at most `max_tokens` tokens. Appends to `tokens` and `entries`.
    ///
    /// The choice depends only on the arguments and on the servers' loads and pace. So a caller that is alone gets the
    /// same grouping, and thereby the same rounding, every time while no server is slow.
    pub fn assign(
        &mut self,
        routing: &Routing,
        layer_idx: usize,
        pairs: &[Pair],
        max_tokens: usize,
        probe_at_ns: Option<u64>,
        usable: impl Fn(u32) -> Option<Penalty>,
    ) {
        self.frames.clear();
        self.orphans.clear();
        routing.loads(&mut self.loads, &mut self.slowness);
        self.choose_replicas(routing, layer_idx, pairs, &usable);
        if let Some(now_ns) = probe_at_ns {
            self.probe_stragglers(routing, layer_idx, now_ns, &usable);
        }
        self.group(routing.servers.len(), pairs);
        for rank in 0..self.cursors.len() {
            self.split(rank as u32, max_tokens as u32);
        }
        for &expert in &self.used_experts {
            self.expert_pairs[expert as usize] = 0;
        }
        self.used_experts.clear();
    }

    fn choose_replicas(
        &mut self,
        routing: &Routing,
        layer_idx: usize,
        pairs: &[Pair],
        usable: &impl Fn(u32) -> Option<Penalty>,
    ) {
        for pair in pairs {
            let count = &mut self.expert_pairs[pair.expert as usize];
            if *count == 0 {
                self.used_experts.push(pair.expert);
            }
            *count += 1;
        }
        // The largest first: small ones fill the gaps. Ties by index, for a reproducible order.
        let counts = &self.expert_pairs;
        self.used_experts.sort_unstable_by_key(|&e| (u32::MAX - counts[e as usize], e));
        for &expert in &self.used_experts {
            let replicas = routing.replicas(layer_idx, expert);
            let mut best: Option<(Penalty, u64, u32)> = None;
            // Starting at another replica for every expert spreads equally loaded ones.
            for i in 0..replicas.len() {
                let rank = replicas[(i + expert as usize) % replicas.len()];
                let Some(penalty) = usable(rank) else { continue };
                let count = u64::from(counts[expert as usize]);
                let load = self.loads[rank as usize].saturating_add(count);
                let load = load.saturating_mul(self.slowness[rank as usize]);
                if best.is_none_or(|(r, l, _)| (penalty, load) < (r, l)) {
                    best = Some((penalty, load, rank));
                }
            }
            self.expert_rank[expert as usize] = match best {
                Some((_, _, rank)) => {
                    self.loads[rank as usize] += u64::from(self.expert_pairs[expert as usize]);
                    rank
                }
                None => NONE,
            };
        }
    }

    /// Gives each straggler whose probe is due the least of the experts that it holds, unless it has one already.
    fn probe_stragglers(
        &mut self,
        routing: &Routing,
        layer_idx: usize,
        now_ns: u64,
        usable: &impl Fn(u32) -> Option<Penalty>,
    ) {
        for (rank, server) in (0..).zip(&routing.servers) {
            if self.slowness[rank as usize] == USUAL_PACE
                || self.used_experts.iter().any(|&e| self.expert_rank[e as usize] == rank)
                || !server.pace.is_probe_due(now_ns)
                || usable(rank) != Some(Penalty::NONE)
            {
                continue;
            }
            let holds = |&&expert: &&u32| routing.replicas(layer_idx, expert).contains(&rank);
            if let Some(&expert) = self.used_experts.iter().rev().find(holds) {
                self.expert_rank[expert as usize] = rank;
                server.pace.note_probe(now_ns);
            }
        }
    }

    /// Counting sort of the pairs by server; a token has one row per server.
    fn group(&mut self, num_servers: usize, pairs: &[Pair]) {
        self.cursors.clear();
        self.cursors.resize(num_servers, Cursor::EMPTY);
        for pair in pairs {
            match self.expert_rank[pair.expert as usize] {
                NONE => self.orphans.push(*pair),
                rank => {
                    let cursor = &mut self.cursors[rank as usize];
                    cursor.num_entries += 1;
                    if cursor.last_row != pair.token {
                        cursor.last_row = pair.token;
                        cursor.num_tokens += 1;
                    }
                }
            }
        }
        let (mut token, mut entry) = (self.tokens.len() as u32, self.entries.len() as u32);
        for cursor in &mut self.cursors {
            (cursor.first_token, cursor.next_token, cursor.next_entry) = (token, token, entry);
            cursor.last_row = NONE;
            token += cursor.num_tokens;
            entry += cursor.num_entries;
        }
        let no_token = TokenRef { token: 0, entry_begin: 0, entry_count: 0 };
        self.tokens.resize(token as usize, no_token);
        self.entries.resize(entry as usize, Entry { expert: 0, weight: 0.0 });
        for pair in pairs {
            let rank = self.expert_rank[pair.expert as usize];
            if rank == NONE {
                continue;
            }
            let cursor = &mut self.cursors[rank as usize];
            if cursor.last_row != pair.token {
                cursor.last_row = pair.token;
                self.tokens[cursor.next_token as usize] =
                    TokenRef { token: pair.token, entry_begin: cursor.next_entry, entry_count: 0 };
                cursor.next_token += 1;
            }
            self.tokens[cursor.next_token as usize - 1].entry_count += 1;
            self.entries[cursor.next_entry as usize] =
                Entry { expert: pair.expert, weight: pair.weight };
            cursor.next_entry += 1;
        }
    }

    fn split(&mut self, rank: u32, max_tokens: u32) {
        let Cursor { num_tokens, first_token, .. } = self.cursors[rank as usize];
        if num_tokens == 0 {
            return;
        }
        // Frames of even size: a short last one would leave the server idle at the end.
        let num_frames = num_tokens.div_ceil(max_tokens);
        let mut first = first_token;
        for frame_idx in 0..num_frames {
            let left = first_token + num_tokens - first;
            let take = left.div_ceil(num_frames - frame_idx);
            let tokens = &self.tokens[first as usize..(first + take) as usize];
            let num_entries = tokens.iter().map(|token| token.entry_count).sum();
            self.frames.push(PlannedFrame {
                rank,
                first_token: first,
                num_tokens: take,
                num_entries,
                frame_idx,
                num_frames,
            });
            first += take;
        }
    }
}

impl Cursor {
    const EMPTY: Self = Self {
        num_tokens: 0,
        num_entries: 0,
        next_token: 0,
        next_entry: 0,
        first_token: 0,
        last_row: NONE,
    };
}

/// No server, or no row. Neither number gets that large.
const NONE: u32 = u32::MAX;

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::atomic::Ordering;

    use control_api::{LayerPlacement, MemberId, ModelDescriptor, PlacementTable, ServerEntry};
    use rand::rngs::StdRng;
    use rand::{RngExt, SeedableRng};

    use super::*;
    use crate::fleet::placement::Registry;

    fn routing(num_servers: u32, replicas: Vec<Vec<u32>>) -> Routing {
        let model = ModelDescriptor {
            fingerprint: "00112233".to_owned(),
            architecture: "test".to_owned(),
            hidden: 8,
            moe_layers: vec![0],
            num_experts: replicas.len() as u32,
            top_k: 1,
        };
        let servers = (0..num_servers).map(|server| ServerEntry {
            member_id: MemberId::parse(&format!("s{server}")).unwrap(),
            name: format!("s{server}"),
            incarnation: 1,
            data_addr: "127.0.0.1:1".to_owned(),
            needs_tickets: false,
        });
        let table = PlacementTable {
            cluster_id: "c".to_owned(),
            epoch: 1,
            model: Some(model.clone()),
            servers: servers.collect(),
            layers: vec![LayerPlacement { layer: 0, replicas }],
        };
        table.validate().unwrap();
        Registry::new(1).apply(&table, &model).routing
    }

    fn ready(_rank: u32) -> Option<Penalty> {
        Some(Penalty::NONE)
    }

    type Key = (u32, u32, u32);

    fn count(pairs: impl Iterator<Item = Key>) -> BTreeMap<Key, usize> {
        let mut counts = BTreeMap::new();
        pairs.for_each(|pair| *counts.entry(pair).or_default() += 1);
        counts
    }

    #[test]
    fn every_pair_goes_to_exactly_one_replica_in_frames_that_fit() {
        let seed: u64 = rand::random();
        println!("seed {seed}");
        let mut rng = StdRng::seed_from_u64(seed);
        let mut plan = Plan::default();
        for _ in 0..300 {
            let (num_servers, num_experts) = (rng.random_range(1..6), rng.random_range(1..20));
            let replicas: Vec<Vec<u32>> = (0..num_experts)
                .map(|_| (0..num_servers).filter(|_| rng.random_bool(0.6)).collect())
                .collect();
            let routing = routing(num_servers, replicas.clone());
            let down = rng.random_range(0..num_servers + 2);
            let mut pairs = Vec::new();
            for token in 0..rng.random_range(0..40) {
                for _ in 0..rng.random_range(0..5) {
                    let expert = rng.random_range(0..num_experts as u32);
                    pairs.push(Pair { token, expert, weight: rng.random() });
                }
            }
            let max_tokens = rng.random_range(1..10);
            plan.reset(num_experts);
            plan.assign(&routing, 0, &pairs, max_tokens, None, |r| {
                (r != down).then(|| ready(r)).flatten()
            });
            let key = |pair: &Pair| (pair.token, pair.expert, pair.weight.to_bits());
            let mut placed: Vec<Key> = plan.orphans.iter().map(key).collect();
            for orphan in &plan.orphans {
                assert!(replicas[orphan.expert as usize].iter().all(|&rank| rank == down));
            }
            let mut last_rank = 0;
            let mut tokens_of = BTreeMap::new();
            for frame in &plan.frames {
                assert!(frame.rank >= last_rank && frame.rank != down);
                last_rank = frame.rank;
                assert!((1..=max_tokens as u32).contains(&frame.num_tokens));
                assert!(frame.frame_idx < frame.num_frames);
                let first = frame.first_token as usize;
                let tokens = &plan.tokens[first..first + frame.num_tokens as usize];
                let mut num_entries = 0;
                for token in tokens {
                    // A token goes to a server once.
                    assert!(tokens_of.insert((frame.rank, token.token), ()).is_none());
                    num_entries += token.entry_count;
                    let begin = token.entry_begin as usize;
                    for entry in &plan.entries[begin..begin + token.entry_count as usize] {
                        assert!(replicas[entry.expert as usize].contains(&frame.rank));
                        placed.push((token.token, entry.expert, entry.weight.to_bits()));
                    }
                }
                assert_eq!(num_entries, frame.num_entries);
            }
            assert_eq!(count(placed.into_iter()), count(pairs.iter().map(key)));
        }
    }

    #[test]
    fn load_is_balanced_by_what_is_outstanding_and_by_what_is_sent() {
        let routing = routing(4, vec![vec![0, 1, 2, 3]; 8]);
        let pairs: Vec<Pair> =
            (0..8).map(|expert| Pair { token: 0, expert, weight: 1.0 }).collect();
        let mut plan = Plan::default();
        plan.reset(8);
        plan.assign(&routing, 0, &pairs, 100, None, ready);
        assert!(plan.frames.iter().all(|frame| frame.num_entries == 2), "{:?}", plan.frames);
        assert_eq!(plan.frames.len(), 4);
        // A busy server gets less, a penalised one nothing.
        routing.servers[1].outstanding.store(100, Ordering::Relaxed);
        plan.reset(8);
        let penalised = |rank| Some(Penalty { is_silent: rank == 3, ..Penalty::NONE });
        plan.assign(&routing, 0, &pairs, 100, None, penalised);
        let loads: Vec<_> = plan.frames.iter().map(|f| (f.rank, f.num_entries)).collect();
        assert_eq!(loads, [(0, 4), (2, 4)]);
    }

    #[test]
    fn frames_of_a_batch_are_of_even_size() {
        let routing = routing(1, vec![vec![0]]);
        let pairs: Vec<Pair> =
            (0..101).map(|token| Pair { token, expert: 0, weight: 1.0 }).collect();
        let mut plan = Plan::default();
        plan.reset(1);
        plan.assign(&routing, 0, &pairs, 50, None, ready);
        let sizes: Vec<_> = plan.frames.iter().map(|frame| frame.num_tokens).collect();
        assert_eq!(sizes, [34, 34, 33]);
    }
}
