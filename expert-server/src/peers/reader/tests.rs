//! Reads of sources that the tests play themselves.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::sync::atomic::AtomicUsize;

use checkpoint::Checkpoint;
use control_api::LayerAssignment;
use message_engine::{Access, Engine, EngineConfig, MemoryRegion};

use super::*;
use crate::compute::{ExpertWeights, LoadError};
use crate::experts::{MatrixForm, Room};
use crate::peers::wire::{self, Request, Response};

/// A store without room.
#[derive(Debug)]
struct Full(Arc<Checkpoint>);

impl Experts for Full {
    fn checkpoint(&self) -> &Arc<Checkpoint> {
        &self.0
    }

    fn loaded(&self) -> BTreeMap<u32, Vec<u32>> {
        BTreeMap::new()
    }

    fn has(&self, _: u32, _: u32) -> bool {
        false
    }

    fn loaded_bytes(&self) -> u64 {
        0
    }

    fn load_one(&self, _: u32, _: u32) -> Result<u64, LoadError> {
        Err(LoadError::Device("no room".into()))
    }

    fn insert(&self, _: u32, _: u32, _: ExpertWeights) -> Result<u64, LoadError> {
        Err(LoadError::Device("no room".into()))
    }

    fn weights(&self, _: u32, _: u32) -> Option<Arc<ExpertWeights>> {
        None
    }

    fn landing(&self, _: u32, _: u32, _: &[MatrixForm]) -> Result<Room<'_>, LoadError> {
        Err(LoadError::Device("no room".into()))
    }
}

/// A source of the experts 0 to 3 of layer 0.
struct Source {
    engine: Engine,
    memory: MemoryRegion,
    num_granted: AtomicUsize,
}

impl Source {
    fn new() -> Self {
        let engine = Engine::start(EngineConfig::local()).expect("an engine");
        let memory = engine.alloc(8 * 8 * 2, Access::RemoteRead).expect("memory");
        Self { engine, memory, num_granted: AtomicUsize::new(0) }
    }

    fn peer(&self, name: &str) -> Peer {
        let addr = self.engine.endpoint().addr;
        Peer { name: name.to_owned(), addr, options: ConnectOptions::default() }
    }

    /// Answers requests with `answer` until `is_over` is true.
    fn serve(&self, is_over: &AtomicBool, answer: impl Fn(u64) -> Response) {
        let mut connections = std::collections::HashMap::new();
        while !is_over.load(Ordering::Relaxed) {
            let soon = Instant::now() + Duration::from_millis(20);
            let Ok(notification) = self.engine.next_notification(soon) else { continue };
            while let Ok(connection) = self.engine.accept(Instant::now()) {
                connections.insert(connection.id(), connection);
            }
            let response = match wire::decode(&notification.bytes).expect("a request") {
                Request::Hello { .. } => {
                    let experts = vec![LayerAssignment { layer: 0, experts: (0..4).collect() }];
                    Response::Index { version: wire::VERSION, experts, device: None }
                }
                Request::Read { id, .. } => answer(id),
                Request::Done { .. } => continue,
            };
            let connection = &connections[&notification.connection];
            let response = match response {
                Response::Grant { id, manifest, digest, lease_ms, .. } => {
                    self.num_granted.fetch_add(1, Ordering::Relaxed);
                    let descriptor = connection.advertise(&self.memory.whole()).expect("reachable");
                    let parts = vec![wire::hex(&descriptor.to_bytes()); 3];
                    Response::Grant { id, manifest, digest, parts, lease_ms }
                }
                other => other,
            };
            let limit = Instant::now() + Duration::from_secs(60);
            connection.notify(&wire::encode(&response), limit).expect("sent");
        }
    }
}

/// A grant of an expert with three matrices of 8 x 8 bf16 values, without its parts.
fn grant(id: u64) -> Response {
    let matrix = r#"{"format":"bf16","rows":8,"cols":8,"scales":null}"#;
    let manifest = format!(r#"{{"matrices":[{matrix},{matrix},{matrix}],"has_biases":false}}"#);
    let manifest = serde_json::from_str(&manifest).expect("a manifest");
    let (digest, parts) = (String::new(), Vec::new());
    Response::Grant { id, manifest, digest, parts, lease_ms: 60_000 }
}

fn fetch(patience: Duration) -> Fetch {
    let (fingerprint, parameters) = ("f".to_owned(), "p".to_owned());
    Fetch {
        identity: ModelIdentity { fingerprint, parameters },
        local: Ipv4Addr::LOCALHOST.into(),
        secret: None,
        security: Security::default(),
        wants_ticket: false,
        chunk_timeout: Duration::from_secs(60),
        patience,
        shape: FetchShape(ExpertShape { hidden: 8, inter: 8, is_gated: true }),
    }
}

/// Reads all experts of two sources into a store without room.
fn run(patience: Duration, answer: impl Fn(u64) -> Response + Copy + Sync) -> (Fetched, usize) {
    let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/../data/tiny-moe");
    let checkpoint = Arc::new(Checkpoint::open(dir).expect("the trained checkpoint"));
    let store: Arc<dyn Experts> = Arc::new(Full(checkpoint));
    let sources = [(); 2].map(|()| Source::new());
    let is_over = AtomicBool::new(false);
    let fetched = std::thread::scope(|scope| {
        let end = SetOnDrop(&is_over);
        for source in &sources {
            scope.spawn(|| source.serve(&is_over, answer));
        }
        let peers = [sources[0].peer("first"), sources[1].peer("second")];
        let wanted: Vec<_> = (0..4).map(|expert| (0, expert)).collect();
        let stop = AtomicBool::new(false);
        let fetched = fetch(patience).run(&peers, &wanted, 2, &stop, &store, &|_| {});
        drop(end);
        fetched
    });
    let num_granted = sources.iter().map(|source| source.num_granted.load(Ordering::Relaxed));
    (fetched, num_granted.sum())
}

#[test]
fn an_expert_without_room_is_asked_for_once() {
    let (fetched, num_granted) = run(Duration::from_secs(60), grant);
    assert_eq!((num_granted, fetched.num_damaged), (4, 0));
    assert_eq!(fetched.missing.len(), 4);
    for (_, reason) in &fetched.missing {
        assert!(reason.contains("no room"), "{reason}");
    }
}

#[test]
fn the_end_of_patience_names_the_last_answer() {
    let later = |id| Response::Later { id, after_ms: 10 };
    let (fetched, _) = run(Duration::from_millis(500), later);
    assert_eq!(fetched.missing.len(), 4);
    for (_, reason) in &fetched.missing {
        assert!(reason.starts_with("no server gave another expert for 0.5 s"), "{reason}");
    }
    let is_named = |(_, reason): &(_, String)| reason.ends_with(": it has reached its limit");
    assert!(fetched.missing.iter().any(is_named), "{:?}", fetched.missing);
}
