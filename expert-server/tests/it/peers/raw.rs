//! A peer that offers weights and misbehaves. It speaks the protocol by itself, so it shares no code with the server.

use std::collections::HashMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use checkpoint::Checkpoint;
use control_api::{ControlClient, LeaseKeeper, LeaseOptions, ModelDescriptor, RegisterRequest};
use message_engine::{
    Access, Connection, Descriptor, Engine, EngineConfig, MemoryRegion, Notification,
    default_fabrics,
};
use p2p_core::TransportKind;
use rustix::process::{Signal, getpid, kill_process};
use serde_json::{Value, json};

use crate::common::PATIENCE;

/// The fault of a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Misdeed {
    /// One bit of each expert's memory is wrong.
    FlipBit,
    /// Its grants arrive when their leases are over.
    Late,
    /// Its scales have types that no scales can have, in grants that are right otherwise.
    OddScales,
    /// It kills its own process once it has let a reader read.
    Die,
    /// It stops its own process then. Its host goes on to confirm what arrives. It offers reads over TCP only, which
    /// it has to answer, and for an hour.
    Stop,
}

/// An expert as an honest server offered it.
#[derive(Clone)]
struct Copied {
    grant: Value,
    parts: Vec<Vec<u8>>,
}

impl Copied {
    /// Gives the scales of each matrix a random type that scales cannot have, their parts the lengths for it, and the
    /// grant the digest for that.
    fn rename_scales(&mut self, layer: u64, expert: u64) {
        const ODD: [(&str, usize); 7] =
            [("U8", 1), ("I8", 1), ("BOOL", 1), ("I16", 2), ("I32", 4), ("F64", 8), ("I64", 8)];
        let matrices = self.grant["manifest"]["matrices"].as_array_mut().expect("matrices");
        // The digest covers the fields in the order of the protocol.
        let mut texts = Vec::new();
        for (matrix, parts) in matrices.iter_mut().zip(self.parts.chunks_mut(3)) {
            assert_eq!(matrix["scales"]["dtype"], "F32", "{matrix}");
            let (dtype, bytes) = ODD[rand::random_range(0..ODD.len())];
            matrix["scales"]["dtype"] = json!(dtype);
            let num_scales = parts[1].len() / size_of::<f32>();
            parts[1].resize(num_scales * bytes, 0);
            let [format, rows, cols] = ["format", "rows", "cols"].map(|field| &matrix[field]);
            let factor = &matrix["scales"]["factor_bits"];
            texts.push(format!(
                r#"{{"format":{format},"rows":{rows},"cols":{cols},"scales":{{"dtype":"{dtype}","factor_bits":{factor}}}}}"#
            ));
        }
        let text = format!(r#"{{"matrices":[{}],"has_biases":false}}"#, texts.join(","));
        let mut hash = blake3::Hasher::new_derive_key("switchyard weights between servers 1");
        hash.update(&(layer as u32).to_le_bytes()).update(&(expert as u32).to_le_bytes());
        hash.update(text.as_bytes());
        for part in &self.parts {
            hash.update(part);
        }
        self.grant["digest"] = json!(hash.finalize().to_hex().as_str());
    }
}

/// A member of the fleet that offers copies of an honest member's experts. It stops when it is dropped.
pub struct RawPeer {
    state: Arc<State>,
    _keeper: LeaseKeeper,
    thread: Option<JoinHandle<()>>,
}

struct State {
    engine: Engine,
    upstream: Upstream,
    misdeed: Misdeed,
    mark: Option<std::path::PathBuf>,
    copies: Mutex<HashMap<(u64, u64), Copied>>,
    num_granted: AtomicUsize,
    is_over: AtomicBool,
}

/// Registers a member of the fleet that offers weights at `addr`.
pub async fn register(
    control: &ControlClient,
    checkpoint: &Checkpoint,
    name: &str,
    addr: SocketAddr,
) -> LeaseKeeper {
    let model = checkpoint.config();
    let model = ModelDescriptor {
        fingerprint: checkpoint.fingerprint().expect("it has experts").to_string(),
        architecture: model.family.model_type.to_owned(),
        hidden: model.hidden as u32,
        moe_layers: model.moe_layers(),
        num_experts: model.num_experts,
        top_k: model.top_k as u32,
    };
    let mut request = RegisterRequest::new(name, addr.to_string(), model);
    request.weights_addr = Some(addr.to_string());
    let keeper = LeaseKeeper::spawn(control, request, LeaseOptions::default());
    let keeper = keeper.expect("a keeper");
    keeper.registered(PATIENCE).await.expect("registered");
    keeper
}

/// A connection to an honest server.
struct Upstream {
    engine: Engine,
    connection: Connection,
    index: Value,
}

impl RawPeer {
    /// Joins a fleet whose first member offers weights. `dir` is a complete checkpoint.
    pub async fn join(url: &str, name: &str, dir: &Path, misdeed: Misdeed) -> Self {
        Self::join_with(url, name, dir, misdeed, None).await
    }

    async fn join_with(
        url: &str,
        name: &str,
        dir: &Path,
        misdeed: Misdeed,
        mark: Option<std::path::PathBuf>,
    ) -> Self {
        let checkpoint = Checkpoint::open(dir).expect("it opens");
        let fingerprint = checkpoint.fingerprint().expect("it has experts").to_string();
        let parameters = hex(&checkpoint.config().parameters_digest());
        let control = ControlClient::new(url, None).expect("a client");
        let members = control.members().await.expect("members");
        let source = members.iter().find_map(|m| m.weights_addr.clone()).expect("a source");
        let upstream = tokio::task::block_in_place(|| {
            Upstream::connect(source.parse().expect("an address"), &fingerprint, &parameters)
        });
        let mut config = EngineConfig::local();
        if misdeed == Misdeed::Stop {
            let fabrics = default_fabrics(Ipv4Addr::LOCALHOST.into(), None).expect("fabrics");
            config.fabrics =
                fabrics.into_iter().filter(|fabric| fabric.kind() == TransportKind::Tcp).collect();
        }
        let engine = Engine::start(config).expect("an engine");
        let addr = engine.endpoint().addr;
        let keeper = register(&control, &checkpoint, name, addr).await;
        let state = Arc::new(State {
            engine,
            upstream,
            misdeed,
            mark,
            copies: Mutex::default(),
            num_granted: AtomicUsize::new(0),
            is_over: AtomicBool::new(false),
        });
        let serving = Arc::clone(&state);
        let thread = std::thread::spawn(move || serving.serve());
        Self { state, _keeper: keeper, thread: Some(thread) }
    }

    /// Experts that it has let readers read.
    pub fn num_granted(&self) -> usize {
        self.state.num_granted.load(Ordering::Relaxed)
    }

    /// Asks the honest server for an expert, and does not give the grant back.
    pub fn hold_grant(&self) -> Value {
        let upstream = &self.state.upstream;
        let layer = &upstream.index["experts"][0];
        let (layer, expert) = (number(&layer["layer"]), number(&layer["experts"][0]));
        let message = json!({ "type": "read", "id": 1, "layer": layer, "expert": expert });
        send(&upstream.connection, &message);
        let grant = receive(&upstream.engine);
        assert_eq!(grant["type"], "grant", "{grant}");
        grant
    }

    /// Reads the first part of a held grant.
    pub fn read_held(&self, grant: &Value) -> Result<u64, String> {
        let upstream = &self.state.upstream;
        let text = grant["parts"][0].as_str().expect("a descriptor");
        let remote = Descriptor::from_bytes(&unhex(text)).expect("a descriptor");
        let region = upstream.engine.alloc(remote.bytes as usize, Access::Local).expect("memory");
        let deadline = Instant::now() + PATIENCE;
        let read = upstream.connection.read(&region.whole(), &remote, deadline);
        read.map_err(|error| error.to_string())
    }

    /// Copies all experts of the honest server, so that it may go.
    pub fn copy_all(&self) {
        let index = &self.state.upstream.index["experts"];
        for entry in index.as_array().expect("layers") {
            for expert in entry["experts"].as_array().expect("experts") {
                self.state.copy(number(&entry["layer"]), number(expert));
            }
        }
    }
}

impl Drop for RawPeer {
    fn drop(&mut self) {
        self.state.is_over.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            drop(thread.join());
        }
    }
}

impl State {
    fn serve(&self) {
        let mut connections: HashMap<u64, Connection> = HashMap::new();
        let mut memory: Vec<MemoryRegion> = Vec::new();
        while !self.is_over.load(Ordering::Relaxed) {
            let soon = Instant::now() + Duration::from_millis(20);
            let Ok(Notification { connection, bytes, .. }) = self.engine.next_notification(soon)
            else {
                continue;
            };
            while let Ok(accepted) = self.engine.accept(Instant::now()) {
                connections.insert(accepted.id(), accepted);
            }
            let connection = &connections[&connection];
            let request: Value = serde_json::from_slice(&bytes).expect("JSON");
            let deadline = Instant::now() + PATIENCE;
            match request["type"].as_str() {
                Some("hello") => {
                    send(connection, &self.upstream.index);
                }
                Some("read") => {
                    let copied = self.copy(number(&request["layer"]), number(&request["expert"]));
                    let mut grant = copied.grant.clone();
                    grant["id"] = request["id"].clone();
                    let describe = |part: &Vec<u8>| {
                        if part.is_empty() {
                            return String::new();
                        }
                        let region = self.engine.alloc(part.len(), Access::RemoteRead);
                        let region = region.expect("memory");
                        region.copy_in(0, part).expect("copied");
                        let descriptor = connection.advertise(&region.whole()).expect("reachable");
                        memory.push(region);
                        hex(&descriptor.to_bytes())
                    };
                    let parts: Vec<String> = copied.parts.iter().map(describe).collect();
                    grant["parts"] = json!(parts);
                    if self.misdeed == Misdeed::Late {
                        grant["lease_ms"] = json!(100);
                        std::thread::sleep(Duration::from_millis(120));
                    }
                    if self.misdeed == Misdeed::Stop {
                        grant["lease_ms"] = json!(3_600_000);
                    }
                    self.num_granted.fetch_add(1, Ordering::Relaxed);
                    if let Some(mark) = &self.mark {
                        std::fs::write(mark, b"").expect("marked");
                    }
                    let bytes = serde_json::to_vec(&grant).expect("JSON");
                    let sent = connection.notify(&bytes, deadline);
                    let signal = match self.misdeed {
                        Misdeed::Die => Some(Signal::KILL),
                        Misdeed::Stop => Some(Signal::STOP),
                        Misdeed::FlipBit | Misdeed::Late | Misdeed::OddScales => None,
                    };
                    if let Some(signal) = signal {
                        kill_process(getpid(), signal).expect("sent");
                    }
                    drop(sent);
                }
                _ => {}
            }
        }
    }

    /// The expert, with the fault of this peer.
    fn copy(&self, layer: u64, expert: u64) -> Copied {
        let mut copies = self.copies.lock().unwrap_or_else(PoisonError::into_inner);
        let copied = copies.entry((layer, expert)).or_insert_with(|| {
            let mut copied = self.upstream.read(layer, expert);
            if self.misdeed == Misdeed::FlipBit {
                let mut bits: Vec<&mut u8> = copied.parts.iter_mut().flatten().collect();
                let place = rand::random_range(0..bits.len());
                *bits[place] ^= 1 << rand::random_range(0..8);
            }
            if self.misdeed == Misdeed::OddScales {
                copied.rename_scales(layer, expert);
            }
            copied
        });
        copied.clone()
    }
}

impl Upstream {
    fn connect(addr: std::net::SocketAddr, fingerprint: &str, parameters: &str) -> Self {
        let engine = Engine::start(EngineConfig::local()).expect("an engine");
        let connection = engine.connect(addr, Instant::now() + PATIENCE).expect("connected");
        let hello = json!({
            "type": "hello", "version": 1, "fingerprint": fingerprint, "parameters": parameters,
        });
        send(&connection, &hello);
        let index = receive(&engine);
        assert_eq!(index["type"], "index", "{index}");
        Self { engine, connection, index }
    }

    fn read(&self, layer: u64, expert: u64) -> Copied {
        let id = layer << 32 | expert;
        let request = json!({ "type": "read", "id": id, "layer": layer, "expert": expert });
        let grant = loop {
            send(&self.connection, &request);
            let answer = receive(&self.engine);
            if answer["type"] != "later" {
                break answer;
            }
            std::thread::sleep(Duration::from_millis(number(&answer["after_ms"])));
        };
        assert_eq!(grant["type"], "grant", "{grant}");
        let texts = grant["parts"].as_array().expect("parts");
        let read = |text: &Value| {
            let text = text.as_str().expect("a descriptor");
            if text.is_empty() {
                return Vec::new();
            }
            let remote = Descriptor::from_bytes(&unhex(text)).expect("a descriptor");
            let region = self.engine.alloc(remote.bytes as usize, Access::Local).expect("memory");
            let deadline = Instant::now() + PATIENCE;
            self.connection.read(&region.whole(), &remote, deadline).expect("read");
            let mut bytes = vec![0; remote.bytes as usize];
            region.copy_out(0, &mut bytes).expect("copied");
            bytes
        };
        let parts = texts.iter().map(read).collect();
        send(&self.connection, &json!({ "type": "done", "id": id }));
        Copied { grant, parts }
    }
}

/// The process of a peer that dies, see [`faulty_peer`].
pub fn dying_peer() {
    faulty_peer("dying", Misdeed::Die);
}

/// The process of a peer that stops, see [`faulty_peer`].
pub fn stopping_peer() {
    faulty_peer("stopping", Misdeed::Stop);
}

/// A process with one peer. Its arguments are the control plane, a checkpoint, and a file to create before it lets a
/// reader read.
#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn faulty_peer(name: &str, misdeed: Misdeed) {
    let mut args = std::env::args().skip(1);
    let mut next = || args.next().expect("an argument");
    let (url, dir, mark) = (next(), next(), next());
    let peer = RawPeer::join_with(&url, name, dir.as_ref(), misdeed, Some(mark.into())).await;
    tokio::time::sleep(PATIENCE).await;
    drop(peer);
}

pub fn send(connection: &Connection, message: &Value) {
    let bytes = serde_json::to_vec(message).expect("JSON");
    connection.notify(&bytes, Instant::now() + PATIENCE).expect("sent");
}

pub fn receive(engine: &Engine) -> Value {
    let notification = engine.next_notification(Instant::now() + PATIENCE).expect("an answer");
    serde_json::from_slice(&notification.bytes).expect("JSON")
}

fn number(value: &Value) -> u64 {
    value.as_u64().expect("a number")
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> = text.chars().map(|c| c.to_digit(16).expect("a digit") as u8).collect();
    digits.chunks(2).map(|pair| pair[0] << 4 | pair[1]).collect()
}
