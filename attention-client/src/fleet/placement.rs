//! The placement in the form that calls read: flat arrays, and servers with their live state.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use arc_swap::ArcSwapOption;
use control_api::{MemberId, ModelDescriptor, PlacementTable, ServerEntry};
use crossbeam_queue::ArrayQueue;
use p2p_core::bootstrap::Fallback;

use super::link::Server;
use super::pace::Pace;

/// Identity of a server in the registry.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct ServerKey {
    member_id: MemberId,
    incarnation: u64,
    addr: String,
}

/// All servers that a client knows. Owned by the control task.
#[derive(Debug)]
pub(crate) struct Registry {
    max_lanes: usize,
    next_uid: u64,
    free: Vec<usize>,
    num_slots: usize,
    servers: HashMap<ServerKey, Arc<Server>>,
}

/// Effect of a new table.
pub(crate) struct Change {
    pub routing: Routing,
    pub joined: Vec<Arc<Server>>,
    pub left: Vec<Arc<Server>>,
}

impl Registry {
    pub fn new(max_lanes: usize) -> Self {
        Self { max_lanes, next_uid: 0, free: Vec::new(), num_slots: 0, servers: HashMap::new() }
    }

    /// Applies a validated table.
    pub fn apply(&mut self, table: &PlacementTable, model: &ModelDescriptor) -> Change {
        let mut joined = Vec::new();
        let mut servers = HashMap::with_capacity(table.servers.len());
        let mut order = Vec::with_capacity(table.servers.len());
        for entry in &table.servers {
            let key = ServerKey {
                member_id: entry.member_id.clone(),
                incarnation: entry.incarnation,
                addr: entry.data_addr.clone(),
            };
            let server = match self.servers.remove(&key) {
                Some(server) => server,
                None => {
                    let server = self.create(entry);
                    joined.push(Arc::clone(&server));
                    server
                }
            };
            order.push(Arc::clone(&server));
            servers.insert(key, server);
        }
        let left: Vec<_> = std::mem::replace(&mut self.servers, servers).into_values().collect();
        Change { routing: Routing::new(table, model, order), joined, left }
    }

    /// Frees the index of a server that left. No connector of it may be left.
    pub fn recycle(&mut self, server: &Server) {
        self.free.push(server.idx);
    }

    fn create(&mut self, entry: &ServerEntry) -> Arc<Server> {
        let idx = self.free.pop().unwrap_or_else(|| {
            self.num_slots += 1;
            self.num_slots - 1
        });
        self.next_uid += 1;
        Arc::new(Server {
            idx,
            uid: self.next_uid,
            entry: entry.clone(),
            shared_name: entry.name.as_str().into(),
            outstanding: AtomicU64::new(0),
            is_silent: AtomicBool::new(false),
            pace: Pace::default(),
            has_refused: AtomicBool::new(false),
            fallback: Fallback::default(),
            last_error: ArcSwapOption::empty(),
            mailboxes: (0..self.max_lanes).map(|_| ArrayQueue::new(1)).collect(),
        })
    }
}

/// One placement table, compiled.
#[derive(Debug)]
pub(crate) struct Routing {
    pub epoch: u64,
    /// In the table's order. Partial sums are added in this order.
    pub servers: Vec<Arc<Server>>,
    /// Why there is no placement, for error messages.
    pub problem: Option<String>,
    num_experts: usize,
    /// `[num_layers * num_experts + 1]` offsets into `replicas`.
    offsets: Vec<u32>,
    /// Indices into `servers`.
    replicas: Vec<u32>,
}

impl Routing {
    /// A routing without servers.
    pub fn empty(model: &ModelDescriptor) -> Self {
        let pairs = model.moe_layers.len() * model.num_experts as usize;
        Self {
            epoch: 0,
            servers: Vec::new(),
            problem: None,
            num_experts: model.num_experts as usize,
            offsets: vec![0; pairs + 1],
            replicas: Vec::new(),
        }
    }

    fn new(table: &PlacementTable, model: &ModelDescriptor, servers: Vec<Arc<Server>>) -> Self {
        let mut routing = Self::empty(model);
        routing.epoch = table.epoch;
        routing.servers = servers;
        routing.offsets.truncate(1);
        for &layer in &model.moe_layers {
            for expert in 0..model.num_experts {
                routing.replicas.extend_from_slice(table.replicas(layer, expert));
                routing.offsets.push(routing.replicas.len() as u32);
            }
        }
        routing
    }

    /// Number of MoE layers.
    #[cfg(feature = "device")]
    pub fn num_layers(&self) -> usize {
        (self.offsets.len() - 1) / self.num_experts.max(1)
    }

    /// Replicas of an expert, as indices into `servers`. `layer_idx` counts MoE layers.
    pub fn replicas(&self, layer_idx: usize, expert: u32) -> &[u32] {
        let pair = layer_idx * self.num_experts + expert as usize;
        &self.replicas[self.offsets[pair] as usize..self.offsets[pair + 1] as usize]
    }

    /// Returns true if all replicas of an expert refuse this client until a setting changes.
    pub fn is_hopeless(&self, layer_idx: usize, expert: u32) -> bool {
        let replicas = self.replicas(layer_idx, expert);
        let refused = |&rank: &u32| self.servers[rank as usize].has_refused.load(Ordering::Relaxed);
        !replicas.is_empty() && replicas.iter().all(refused)
    }

    /// State of the replicas of an expert in words, for an error message.
    pub fn describe_replicas(&self, layer_idx: usize, expert: u32) -> String {
        let replicas = self.replicas(layer_idx, expert);
        if let Some(problem) = &self.problem {
            return problem.clone();
        }
        if replicas.is_empty() {
            return format!(
                "the placement (epoch {}, {} servers) names none",
                self.epoch,
                self.servers.len()
            );
        }
        let describe = |&rank: &u32| {
            let server = &self.servers[rank as usize];
            let error = server.last_error.load();
            let state = error.as_ref().map_or("no answer yet", |error| error.as_str());
            format!("{} at {}: {state}", server.name(), server.entry.data_addr)
        };
        replicas.iter().map(describe).collect::<Vec<_>>().join("; ")
    }

    /// Writes the load of every server to `loads`, and the factor on it to `slowness`, for balancing.
    pub fn loads(&self, loads: &mut Vec<u64>, slowness: &mut Vec<u64>) {
        slowness.clear();
        slowness.extend(self.servers.iter().map(|s| s.pace.slowness()));
        loads.clear();
        loads.extend(self.servers.iter().map(|s| s.outstanding.load(Ordering::Relaxed)));
    }
}

#[cfg(test)]
mod tests {
    use control_api::LayerPlacement;

    use super::*;

    fn model() -> ModelDescriptor {
        ModelDescriptor {
            fingerprint: "00112233".to_owned(),
            architecture: "test".to_owned(),
            hidden: 8,
            moe_layers: vec![1, 5],
            num_experts: 3,
            top_k: 2,
        }
    }

    fn table(epoch: u64, servers: &[(&str, u64)], replicas: [Vec<Vec<u32>>; 2]) -> PlacementTable {
        let servers = servers.iter().map(|&(name, incarnation)| ServerEntry {
            member_id: MemberId::parse(name).unwrap(),
            name: name.to_owned(),
            incarnation,
            data_addr: "127.0.0.1:1".to_owned(),
            needs_tickets: false,
        });
        let [first, second] = replicas;
        let table = PlacementTable {
            cluster_id: "c".to_owned(),
            epoch,
            model: Some(model()),
            servers: servers.collect(),
            layers: vec![
                LayerPlacement { layer: 1, replicas: first },
                LayerPlacement { layer: 5, replicas: second },
            ],
        };
        table.validate().unwrap();
        table
    }

    #[test]
    fn a_table_is_compiled_and_its_successor_keeps_what_stays() {
        let mut registry = Registry::new(2);
        let all = || vec![vec![0, 1], vec![1], vec![]];
        let first = registry.apply(&table(1, &[("a", 1), ("b", 1)], [all(), all()]), &model());
        assert_eq!((first.joined.len(), first.left.len()), (2, 0));
        assert_eq!(first.routing.replicas(0, 0), [0, 1]);
        assert_eq!(first.routing.replicas(1, 1), [1]);
        assert!(first.routing.replicas(1, 2).is_empty());
        // `a` restarts, `b` stays.
        let next = registry.apply(&table(2, &[("b", 1), ("a", 2)], [all(), all()]), &model());
        assert_eq!(next.joined.len(), 1);
        assert_eq!(next.left.len(), 1);
        assert_eq!(next.left[0].entry.incarnation, 1);
        assert_eq!(next.routing.servers[0].uid, first.routing.servers[1].uid);
        assert_ne!(next.routing.servers[1].uid, first.routing.servers[0].uid);
        // An index is used again only after `recycle`.
        assert_eq!(next.joined[0].idx, 2);
        registry.recycle(&next.left[0]);
        let last =
            registry.apply(&table(3, &[("b", 1), ("a", 2), ("c", 1)], [all(), all()]), &model());
        assert_eq!(last.joined[0].idx, 0);
    }
}
