//! Servers that do what a test tells them: right, wrong, late, twice, or not at all.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use p2p_core::bootstrap::{Connection, Listener, ListenerConfig};
use p2p_core::{SlotConfig, TransportKind, Transports};
use protocol::{
    ClientHello, CombineMeta, DispatchExpect, DispatchScratch, ErrorCode, FrameGeometry, FrameId,
    ModelShape, ServerHello, decode_dispatch, encode_combine, encode_error,
};
use switchyard_attention_client::{ClientModel, MoeClient, MoeClientBuilder};

use super::{Request, table};

/// Reaction to one frame.
#[derive(Debug, Clone)]
pub enum Act {
    /// The right answer.
    Answer,
    /// The right answer, twice.
    AnswerTwice,
    /// First the right answer to another request, then this one's.
    StaleThenAnswer,
    /// Rows of another layer under the right identity otherwise, then nothing.
    WrongLayer,
    /// The right answer with one bit of the header flipped.
    CorruptHeader,
    /// The right answer with fewer rows than asked for.
    MissingRows,
    /// Nothing, not even a sign of life.
    Silence,
    /// Signs of life for so long, then the right answer.
    Work(Duration),
    /// Signs of life for ever.
    WorkForEver,
    /// The connection closes.
    Die,
    /// Nothing now; the right answer into the same slot after this long, whatever happened since.
    Zombie(Duration),
    /// An error frame.
    Refuse(ErrorCode),
    /// Flags that no correct peer can have.
    Desync,
}

/// One frame as a script sees it.
#[derive(Debug, Clone, Copy)]
pub struct Seen {
    /// Frames that this server was given before, on all connections.
    pub before: usize,
    /// Tokens in the frame.
    pub num_tokens: usize,
}

/// Reaction to a new connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Greeting {
    /// Its frames are answered by the script.
    #[default]
    Serve,
    /// It is gone without a word, as when the process ends.
    Lose,
    /// It is closed in order, by a server that is still there afterwards.
    Close,
    /// Closed in order, by a server that another process replaces afterwards.
    Restart,
}

pub type Script = Arc<dyn Fn(Seen) -> Act + Send + Sync>;

/// A fleet of scripted servers: each expert of the model is on all of them.
pub struct FakeFleet {
    pub runtime: tokio::runtime::Runtime,
    pub servers: Vec<FakeServer>,
    pub model: ClientModel,
    pub slot: SlotConfig,
}

pub struct FakeServer {
    pub addr: String,
    pub num_frames: Arc<AtomicUsize>,
    pub num_connections: Arc<AtomicUsize>,
    /// Transport of every connection so far, and what its client left out.
    pub transports: Arc<Mutex<Vec<(TransportKind, String)>>>,
    pub greeting: Arc<Mutex<Greeting>>,
    stop: Arc<AtomicBool>,
    threads: Arc<Mutex<Vec<std::thread::JoinHandle<()>>>>,
    shutdown: Option<tokio::sync::oneshot::Sender<()>>,
}

impl FakeFleet {
    pub fn start(slot: SlotConfig, scripts: Vec<Script>) -> Self {
        Self::over(vec![TransportKind::Local, TransportKind::Shm].into(), slot, scripts)
    }

    /// As [`start`](Self::start), for servers that offer these transports.
    pub fn over(offered: Transports, slot: SlotConfig, scripts: Vec<Script>) -> Self {
        let model = fake_model();
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .expect("runtime");
        let servers = scripts
            .into_iter()
            .map(|script| {
                let config = ListenerConfig {
                    slot,
                    transports: offered.kinds.clone(),
                    networks: offered.networks.clone(),
                    ..ListenerConfig::default()
                };
                runtime.block_on(FakeServer::start(config, model.shape, script))
            })
            .collect();
        Self { runtime, servers, model, slot }
    }

    pub fn builder(&self) -> MoeClientBuilder {
        let addrs: Vec<String> = self.servers.iter().map(|server| server.addr.clone()).collect();
        let everywhere: Vec<u32> = (0..addrs.len() as u32).collect();
        let replicas = vec![everywhere; self.model.shape.num_experts as usize];
        MoeClient::builder(self.model.clone())
            .placement(table(&self.model, 1, &addrs, &replicas))
            .slot(self.slot)
            // A loaded machine must not look like a dead server, except where that is the test.
            .deadline(Duration::from_secs(5))
            .replica_wait(Duration::from_secs(5))
    }
}

impl Drop for FakeFleet {
    fn drop(&mut self) {
        self.servers.clear();
    }
}

impl FakeServer {
    async fn start(config: ListenerConfig, shape: ModelShape, script: Script) -> Self {
        let listener = Listener::bind("127.0.0.1:0", config).await.expect("listener");
        let addr = listener.local_addr().to_string();
        let num_frames = Arc::new(AtomicUsize::new(0));
        let num_connections = Arc::new(AtomicUsize::new(0));
        let transports: Arc<Mutex<Vec<_>>> = Arc::default();
        let greeting: Arc<Mutex<Greeting>> = Arc::default();
        let incarnation = Arc::new(AtomicU64::new(1));
        let stop = Arc::new(AtomicBool::new(false));
        let threads: Arc<Mutex<Vec<_>>> = Arc::default();
        let (shutdown, stopped) = tokio::sync::oneshot::channel::<()>();
        let current = Arc::clone(&incarnation);
        let accept = move |hello: &p2p_core::PeerHello| {
            Ok(ServerHello {
                model: shape,
                incarnation: current.load(Ordering::SeqCst),
                epoch: 1,
                generation: hello.generation,
                progress_interval_us: 1000,
                name: "fake".to_owned(),
            }
            .encode())
        };
        let on_peer = {
            let (num_frames, num_connections) = (num_frames.clone(), num_connections.clone());
            let (stop, threads, transports) = (stop.clone(), threads.clone(), transports.clone());
            let greeting = Arc::clone(&greeting);
            move |connection: Connection| {
                num_connections.fetch_add(1, Ordering::SeqCst);
                let used = (connection.transport.kind, connection.left_out.clone());
                transports.lock().expect("transports").push(used);
                let greeting = *greeting.lock().expect("greeting");
                if greeting == Greeting::Restart {
                    incarnation.fetch_add(1, Ordering::SeqCst);
                }
                match greeting {
                    Greeting::Serve => {}
                    Greeting::Lose => return,
                    Greeting::Close | Greeting::Restart => return connection.liveness.close(),
                }
                let (script, num_frames, stop) = (script.clone(), num_frames.clone(), stop.clone());
                let thread = std::thread::spawn(move || {
                    Peer::new(connection, shape, stop).run(&script, &num_frames);
                });
                threads.lock().expect("threads").push(thread);
            }
        };
        tokio::spawn(listener.serve(accept, on_peer, async {
            let _ = stopped.await;
        }));
        let shutdown = Some(shutdown);
        Self { addr, num_frames, num_connections, transports, greeting, stop, threads, shutdown }
    }

    /// Closes all connections and takes no new ones.
    pub fn kill(&mut self) {
        if let Some(shutdown) = self.shutdown.take() {
            let _ = shutdown.send(());
        }
        self.stop.store(true, Ordering::SeqCst);
        let threads: Vec<_> = self.threads.lock().expect("threads").drain(..).collect();
        threads.into_iter().for_each(|thread| thread.join().expect("fake server"));
    }

    pub fn frames(&self) -> usize {
        self.num_frames.load(Ordering::SeqCst)
    }
}

impl Drop for FakeServer {
    fn drop(&mut self) {
        self.kill();
    }
}

/// One connection.
struct Peer {
    connection: Connection,
    expect: DispatchExpect,
    scratch: DispatchScratch,
    zombies: Vec<(Instant, CombineMeta, Vec<f32>)>,
    /// Set when the server is to die, perhaps by the thread whose client it waits for.
    stop: Arc<AtomicBool>,
}

impl Peer {
    fn new(connection: Connection, shape: ModelShape, stop: Arc<AtomicBool>) -> Self {
        let hello = ClientHello::decode(&connection.peer.payload).expect("client hello");
        assert_eq!(hello.client_id, connection.peer.peer_id);
        let frame_bytes = connection.channel.layout().frame_bytes();
        let geometry = FrameGeometry::new(
            frame_bytes,
            shape.hidden as usize,
            hello.dtype,
            hello.response_dtype,
            shape.top_k as usize,
        )
        .expect("geometry");
        let expect = DispatchExpect {
            client_id: hello.client_id,
            generation: connection.peer.generation,
            hidden: shape.hidden as usize,
            num_layers: shape.num_layers,
            num_experts: shape.num_experts,
            max_tokens: geometry.max_tokens(),
            top_k: shape.top_k as usize,
            dtype: hello.dtype,
            response_dtype: hello.response_dtype,
        };
        Self { connection, expect, scratch: DispatchScratch::default(), zombies: Vec::new(), stop }
    }

    fn run(mut self, script: &Script, num_frames: &AtomicUsize) {
        while !self.is_stopped() {
            self.raise_zombies();
            let gone = self.connection.liveness.closed_now().is_some();
            if gone && self.zombies.is_empty() {
                return;
            }
            let frame = match self.connection.channel.try_next() {
                Ok(Some(frame)) if !gone => frame,
                _ => {
                    std::thread::sleep(Duration::from_micros(50));
                    continue;
                }
            };
            let view = self.connection.channel.view(&frame);
            let mut dispatch =
                decode_dispatch(view, &self.expect, &mut self.scratch).expect("sound frame");
            let num_tokens = dispatch.num_tokens();
            let hidden = self.expect.hidden;
            let mut x = vec![0.0; num_tokens * hidden];
            dispatch.read_rows_f32(0..num_tokens, &mut x).expect("rows");
            let mut rows = Vec::with_capacity(x.len());
            for (token, x) in x.chunks_exact(hidden).enumerate() {
                let entries: Vec<_> =
                    dispatch.entries_of(token).iter().map(|e| (e.expert, e.weight)).collect();
                rows.extend(sum_of_experts(dispatch.id().layer, x, &entries));
            }
            let meta = dispatch.response_meta();
            let seen = Seen { before: num_frames.fetch_add(1, Ordering::SeqCst), num_tokens };
            self.connection.channel.release().expect("release");
            match script(seen) {
                Act::Die => return,
                act => self.act(act, meta, rows),
            }
        }
    }

    fn act(&mut self, act: Act, meta: CombineMeta, rows: Vec<f32>) {
        let hidden = self.expect.hidden;
        match act {
            Act::Answer => self.publish(&meta, &rows, |_| {}),
            Act::AnswerTwice => {
                self.publish(&meta, &rows, |_| {});
                self.publish(&meta, &rows, |_| {});
            }
            Act::StaleThenAnswer => {
                let id = FrameId { sequence: meta.id.sequence.wrapping_sub(1), ..meta.id };
                let poison = vec![1e30; rows.len()];
                self.publish(&CombineMeta { id, ..meta }, &poison, |_| {});
                self.publish(&meta, &rows, |_| {});
            }
            Act::WrongLayer => {
                let id = FrameId { layer: meta.id.layer ^ 1, ..meta.id };
                self.publish(&CombineMeta { id, ..meta }, &rows, |_| {});
            }
            Act::CorruptHeader => self.publish(&meta, &rows, |view| {
                // One bit of the number of tokens.
                view.put_bytes(48, &[0x80]).expect("in range");
            }),
            Act::MissingRows => {
                let rows = [rows.as_slice(), &rows[..hidden]].concat();
                self.publish(&meta, &rows, |_| {});
            }
            Act::Silence | Act::Die => {}
            Act::Work(time) => {
                let until = Instant::now() + time;
                while Instant::now() < until && !self.is_stopped() {
                    self.connection.channel.bump_progress().expect("progress");
                    std::thread::sleep(Duration::from_millis(1));
                }
                self.publish(&meta, &rows, |_| {});
            }
            Act::WorkForEver => {
                let gone = |peer: &Self| peer.connection.liveness.closed_now().is_some();
                while !gone(self) && !self.is_stopped() {
                    self.connection.channel.bump_progress().expect("progress");
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
            Act::Zombie(time) => self.zombies.push((Instant::now() + time, meta, rows)),
            Act::Refuse(code) => {
                let Some(frame) = self.reserve() else { return };
                let channel = &mut self.connection.channel;
                let mut view = channel.write_view(&frame);
                let used = encode_error(&mut view, &meta.id, code, [0; 2], "as the test wants it")
                    .expect("fits");
                channel.publish(frame, used).expect("publish");
            }
            Act::Desync => {
                // More published than any credit allows.
                for _ in 0..10 {
                    let channel = &mut self.connection.channel;
                    if let Ok(Some(frame)) = channel.try_reserve() {
                        channel.publish(frame, 0).expect("publish");
                    }
                }
            }
        }
    }

    fn raise_zombies(&mut self) {
        let now = Instant::now();
        while let Some(at) = self.zombies.iter().position(|(at, ..)| *at <= now) {
            let (_, meta, _) = self.zombies.swap_remove(at);
            let poison = vec![1e30; self.expect.hidden];
            self.publish(&meta, &poison, |_| {});
        }
    }

    fn publish(
        &mut self,
        meta: &CombineMeta,
        rows: &[f32],
        spoil: impl FnOnce(&mut p2p_core::WriteView<'_>),
    ) {
        let Some(frame) = self.reserve() else { return };
        let channel = &mut self.connection.channel;
        let mut view = channel.write_view(&frame);
        let used = encode_combine(&mut view, meta, rows).expect("fits");
        spoil(&mut view);
        channel.publish(frame, used).expect("publish");
    }

    /// The next frame to fill, or `None` when the client is gone or the server is to die.
    fn reserve(&mut self) -> Option<p2p_core::TxFrame> {
        let until = Instant::now() + Duration::from_secs(20);
        loop {
            if let Some(frame) = self.connection.channel.try_reserve().expect("reserve") {
                return Some(frame);
            }
            if self.is_stopped() || self.connection.liveness.closed_now().is_some() {
                return None;
            }
            assert!(Instant::now() < until, "the client gives no credit");
            std::thread::sleep(Duration::from_micros(50));
        }
    }

    fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::SeqCst)
    }
}

pub fn fake_model() -> ClientModel {
    ClientModel {
        shape: ModelShape {
            fingerprint: [7; 32],
            hidden: 40,
            num_layers: 3,
            num_experts: 8,
            top_k: 4,
        },
        architecture: "fake".to_owned(),
        moe_layers: vec![1, 2],
    }
}

/// Output of scripted servers: cheap, different for every expert and layer, and not linear in x.
fn sum_of_experts(layer: u32, x: &[f32], entries: &[(u32, f32)]) -> Vec<f32> {
    let value = |v: f64, expert: u32| {
        let scale = f64::from(expert + 1) * 0.25 + f64::from(layer);
        scale * v + 0.1 * v * v - f64::from(expert)
    };
    let sum = |&v: &f32| {
        entries.iter().map(|&(e, w)| f64::from(w) * value(v.into(), e)).sum::<f64>() as f32
    };
    x.iter().map(sum).collect()
}

/// The answer of a fault-free fleet.
pub fn expected(request: &Request, hidden: usize) -> Vec<f32> {
    let k = request.idx.len().checked_div(request.num_tokens).unwrap_or(0);
    let mut out = Vec::with_capacity(request.x.len());
    for (token, x) in request.x.chunks_exact(hidden).enumerate() {
        let row = token * k..(token + 1) * k;
        let entries: Vec<(u32, f32)> = request.idx[row.clone()]
            .iter()
            .zip(&request.weights[row])
            .filter_map(|(&e, &w)| Some((u32::try_from(e).ok()?, w)))
            .collect();
        out.extend(sum_of_experts(request.layer, x, &entries));
    }
    out
}
