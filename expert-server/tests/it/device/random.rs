//! Clients of all kinds connect, act and disconnect in random order, beside a steady client that must not be
//! disturbed. `SWITCHYARD_SEED` replays the random choices, but not the interleaving of threads.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use kernels::gpu::Gpu;
use protocol::WireDtype;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use switchyard_expert_server::{ExpertSelection, RunningServer};
use tokio::runtime::Handle;

use crate::common::{PATIENCE, Reference, Request, eventually, seeded};
use crate::device::client::{Client, Outcome};
use crate::device::{SLOT, check, devices, join, server_on};

const DTYPE: WireDtype = WireDtype::Bf16;
/// Limit for each of the steady client's frames. Late rows delay a GPU in software for half a second.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);
const NUM_GUESTS: u64 = 3;
const MAX_STEPS: usize = 60;
const MAX_TIME: Duration = Duration::from_secs(2);
// Codes of error frames, from docs/reference/wire-format.md.
const BAD_FRAME: u64 = 1;
const WRONG_LAYER: u64 = 3;
const NOT_MY_EXPERT: u64 = 4;
const STALE_CHANNEL: u64 = 6;
const INTERNAL: u64 = 9;
const VERSION: u64 = 10;
/// Offsets of fields in a frame's header, with wrong values for them.
const MAGIC_OFFSET: u64 = 32;
const VERSION_OFFSET: u64 = 36;
const WRONG: [u8; 2] = [0xee, 0x77];

/// The results of all clients.
#[derive(Debug, Default)]
struct Tally {
    joined: u64,
    answered: u64,
    tokens: u64,
    /// Refused frames by code.
    refused: BTreeMap<u64, u64>,
    /// Frames and tokens of frames whose answers the client did not await.
    left: u64,
    left_tokens: u64,
}

struct World {
    runtime: Handle,
    gpu: Gpu,
    server: Arc<RunningServer>,
    reference: Reference,
    /// Number of experts that are loaded in every layer: the first ones.
    num_held: AtomicU32,
    tally: Mutex<Tally>,
    next_id: AtomicU64,
    may_withhold: AtomicBool,
    is_over: AtomicBool,
}

/// A client, with a record of its frames.
struct Guest {
    client: Client,
    num_frames: u64,
    /// Rows of the last frames, by frame of the slot; none for a wrong header.
    rows: [u64; SLOT.num_frames],
}

impl World {
    fn join(&self) -> Guest {
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let joined = join(&self.gpu, &self.server, self.reference.shape, id, DTYPE);
        let client = self.runtime.block_on(joined);
        self.note(|tally| tally.joined += 1);
        Guest { client, num_frames: 0, rows: [0; SLOT.num_frames] }
    }

    fn note(&self, change: impl FnOnce(&mut Tally)) {
        change(&mut self.tally.lock().expect("no client failed"));
    }

    /// A request that the server can answer.
    fn request(&self, rng: &mut StdRng) -> Request {
        let num_tokens = rng.random_range(1..12);
        let num_held = self.num_held.load(Ordering::Acquire);
        let mut request = Request::random(rng, &self.reference.shape, num_tokens);
        for routes in &mut request.routes {
            routes.iter_mut().for_each(|(expert, _)| *expert %= num_held);
            routes.sort_by_key(|(expert, _)| *expert);
            routes.dedup_by_key(|(expert, _)| *expert);
        }
        request
    }

    /// The last expert is never loaded.
    fn missing(&self, rng: &mut StdRng) -> Request {
        let mut request = self.request(rng);
        let token = rng.random_range(0..request.routes.len());
        request.routes[token] = vec![(self.reference.shape.num_experts - 1, 1.0)];
        request
    }

    fn answered(&self, request: &Request, (outcome, rows): (Outcome, Vec<f32>)) {
        assert_eq!(outcome, Outcome::Answered);
        check(&self.reference, request, DTYPE, &rows);
        self.note(|tally| {
            tally.answered += 1;
            tally.tokens += request.routes.len() as u64;
        });
    }

    fn refused(&self, code: u64, outcome: Outcome) {
        assert_eq!(outcome, Outcome::Refused(code));
        self.note(|tally| *tally.refused.entry(code).or_default() += 1);
    }

    /// Sends frames until the end. Each must be answered within `ANSWER_LIMIT`.
    fn judge(&self, mut rng: StdRng) -> Client {
        let mut guest = self.join();
        let mut num_frames = 0;
        while !self.is_over.load(Ordering::Relaxed) {
            let begin = Instant::now();
            if rng.random_range(0..8) == 0 {
                let request = self.missing(&mut rng);
                self.refused(NOT_MY_EXPERT, guest.client.layer(&request).0);
            } else {
                let request = self.request(&mut rng);
                self.answered(&request, guest.client.layer(&request));
            }
            let took = begin.elapsed();
            assert!(took < ANSWER_LIMIT, "frame {num_frames} took {took:?}");
            num_frames += 1;
        }
        println!("{num_frames} frames beside the others");
        guest.client
    }

    /// Loads experts one by one, in another order in each layer.
    fn load(&self, mut rng: StdRng) {
        let shape = self.reference.shape;
        for expert in self.num_held.load(Ordering::Relaxed)..shape.num_experts - 1 {
            for layer in 0..shape.num_layers {
                self.server.load_expert(layer, expert).expect("loaded");
            }
            self.num_held.store(expert + 1, Ordering::Release);
            thread::sleep(Duration::from_millis(rng.random_range(0..150)));
        }
    }

    /// Connects, acts and disconnects repeatedly.
    fn visit(&self, mut rng: StdRng) {
        let deadline = Instant::now() + MAX_TIME;
        let mut guest = None;
        for _ in 0..MAX_STEPS {
            if Instant::now() >= deadline {
                break;
            }
            let mut present = guest.take().unwrap_or_else(|| self.join());
            if self.act(&mut rng, &mut present) {
                guest = Some(present);
            }
        }
    }

    /// One step of a client. Returns false after it has disconnected.
    fn act(&self, rng: &mut StdRng, guest: &mut Guest) -> bool {
        let kind = rng.random_range(0..16);
        let mut request = self.request(rng);
        match kind {
            0..=5 => {
                let found = guest.layer(&request);
                self.answered(&request, found);
            }
            // The client is slow, or stops for a while.
            6..=8 => {
                guest.dispatch(&request);
                let most = if kind == 8 { 200 } else { 20 };
                thread::sleep(Duration::from_millis(rng.random_range(0..most)));
                self.answered(&request, guest.client.combine(&request));
            }
            9 => {
                let request = self.missing(rng);
                self.refused(NOT_MY_EXPERT, guest.layer(&request).0);
            }
            10 => {
                request.layer = self.reference.shape.num_layers + rng.random_range(0..3);
                self.refused(WRONG_LAYER, guest.layer(&request).0);
                guest.spoil();
            }
            11 => {
                let id = guest.client.pretend(u64::MAX);
                self.refused(STALE_CHANNEL, guest.layer(&request).0);
                guest.client.pretend(id);
                guest.spoil();
            }
            12 => return false,
            // In the middle of a frame.
            13 => {
                guest.dispatch(&request);
                self.note(|tally| {
                    tally.left += 1;
                    tally.left_tokens += request.routes.len() as u64;
                });
                return false;
            }
            _ => return !self.send_by_hand(rng, guest),
        }
        true
    }

    /// Sends frames that no kernel sends, one per frame of the slot. The client cannot send valid frames
    /// after them. Returns false if it sent none.
    fn send_by_hand(&self, rng: &mut StdRng, guest: &mut Guest) -> bool {
        if guest.num_frames < SLOT.num_frames as u64 {
            return false;
        }
        for _ in 0..SLOT.num_frames {
            guest.num_frames += 1;
            let number = guest.num_frames;
            let place = number % SLOT.num_frames as u64;
            let frame = place * guest.client.geometry.frame_bytes;
            let rows = guest.rows[place as usize];
            let code = match rng.random_range(0..3) {
                0 if rows > 0 && self.may_withhold.swap(false, Ordering::Relaxed) => INTERNAL,
                1 => {
                    guest.client.scribble(frame + MAGIC_OFFSET, &WRONG);
                    BAD_FRAME
                }
                _ => {
                    guest.client.scribble(frame + VERSION_OFFSET, &WRONG);
                    VERSION
                }
            };
            guest.client.announce(number, rows.max(1));
            let told = number << 16 | code;
            eventually("the frame is refused", || guest.client.status(number) == told);
            self.note(|tally| *tally.refused.entry(code).or_default() += 1);
        }
        true
    }

    /// Asserts that the server's counts equal the clients'. The server counts a batch after its end.
    fn check_counters(&self) {
        let text = || self.server.metrics().render().expect("metrics render");
        let value = |text: &str, name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
            line.map_or(0, |line| line.parse::<f64>().expect("a number") as u64)
        };
        let tally = self.tally.lock().expect("no client failed");
        let text = text();
        let count = |name: &str| value(&text, &format!("switchyard_server_{name}"));
        assert_eq!(count("links_opened_total"), tally.joined);
        let mut num_refused = 0;
        for (code, name) in [
            (BAD_FRAME, "bad_frame"),
            (WRONG_LAYER, "wrong_layer"),
            (NOT_MY_EXPERT, "not_my_expert"),
            (STALE_CHANNEL, "stale_channel"),
            (INTERNAL, "internal"),
            (VERSION, "version"),
            (0, "other"),
        ] {
            let expected = tally.refused.get(&code).copied().unwrap_or_default();
            let counted = count(&format!("bad_frames_total{{code=\"{name}\"}}"));
            // The frame of a client that disconnects in the middle of it is refused as late, or answered.
            let more = if code == INTERNAL { tally.left } else { 0 };
            assert!(
                (expected..=expected + more).contains(&counted),
                "{name}: {counted}, {tally:?}"
            );
            num_refused += counted;
        }
        let frames_in = count("frames_total{direction=\"in\"}");
        let frames_out = count("frames_total{direction=\"out\"}");
        assert_eq!(frames_in, frames_out + num_refused);
        let answered = tally.answered..=tally.answered + tally.left;
        assert!(answered.contains(&frames_out), "{frames_out} answers, {tally:?}");
        let tokens = tally.tokens..=tally.tokens + tally.left_tokens;
        assert!(tokens.contains(&count("tokens_total")), "{tally:?}");
    }
}

impl Guest {
    fn dispatch(&mut self, request: &Request) {
        self.num_frames += 1;
        self.rows[self.num_frames as usize % SLOT.num_frames] = request.routes.len() as u64;
        self.client.dispatch(request);
    }

    /// Records that the last frame's header is wrong.
    fn spoil(&mut self) {
        self.rows[self.num_frames as usize % SLOT.num_frames] = 0;
    }

    fn layer(&mut self, request: &Request) -> (Outcome, Vec<f32>) {
        self.dispatch(request);
        self.client.combine(request)
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_of_all_kinds_in_random_order_disturb_no_other() {
    let Some((device, gpu)) = devices() else { return };
    let mut rng = seeded();
    let reference = Reference::open();
    let num_held = reference.shape.num_experts / 2;
    let selection = ExpertSelection::EveryLayer((0..num_held).collect());
    let server = server_on(device, DTYPE, selection, |config| {
        config.limits.max_bad_frames = u32::MAX;
    });
    let world = Arc::new(World {
        runtime: Handle::current(),
        gpu,
        server: Arc::new(server.await),
        reference,
        num_held: AtomicU32::new(num_held),
        tally: Mutex::default(),
        next_id: AtomicU64::new(1),
        may_withhold: AtomicBool::new(true),
        is_over: AtomicBool::new(false),
    });
    let acting = Arc::clone(&world);
    let steady = tokio::task::spawn_blocking(move || play(&acting, &mut rng)).await.expect("all");
    // The server counts the last frames, too, even if no client awaits their answers.
    let begin = Instant::now();
    tokio::time::timeout(PATIENCE, world.server.shutdown()).await.expect("an end");
    world.server.wait().await.expect("a shutdown is a good end");
    println!("the shutdown took {:?}", begin.elapsed());
    world.check_counters();
    drop(steady);
}

/// Runs the other clients to their end, then sends some last frames. Returns the clients that stay connected.
fn play(world: &World, rng: &mut StdRng) -> Vec<Client> {
    let mut fresh = || StdRng::from_rng(rng);
    let mut stay = thread::scope(|scope| {
        let judge = fresh();
        let judge = scope.spawn(move || world.judge(judge));
        let load = fresh();
        let mut others = vec![scope.spawn(move || world.load(load))];
        for _ in 0..NUM_GUESTS {
            let visit = fresh();
            others.push(scope.spawn(move || world.visit(visit)));
        }
        let ends: Vec<_> = others.into_iter().map(|other| other.join()).collect();
        world.is_over.store(true, Ordering::Relaxed);
        let judge = judge.join().expect("the steady client");
        assert!(ends.iter().all(Result::is_ok), "a client failed");
        vec![judge]
    });
    let mut last = fresh();
    eventually("all others are gone", || world.server.num_links() == 1);
    let [mut wrong, mut silent] = [(); 2].map(|()| world.join());
    wrong.client.pretend(u64::MAX);
    let request = world.request(&mut last);
    silent.dispatch(&request);
    world.note(|tally| {
        tally.left += 1;
        tally.left_tokens += request.routes.len() as u64;
    });
    world.refused(STALE_CHANNEL, wrong.layer(&request).0);
    stay.extend([wrong.client, silent.client]);
    stay
}
