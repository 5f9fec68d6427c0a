//! `benchmark_local`: producers, lanes and a proxy's threads on one host. A post does nothing, or copies.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use p2p_core::Region;

use super::{BenchEndpoint, Checks, Posts, pattern};
use crate::clock::gpu::Certainty;
use crate::stats::Latency;
use proxy::abi::{MAX_DEPTH, MAX_LANES, MAX_SLOT_BYTES};
use proxy::command::{Command, Opcode};
use proxy::lane::{LaneConfig, Lanes, Poster};
use proxy::threads::{PeerConfig, Proxy, ProxyConfig, ProxyPeer};

/// The action of a post.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum PostKind {
    /// None: measures the cost of taking, checking and recycling a command.
    Null,
    /// A copy into memory of this host.
    Copy,
    /// A copy, and a comparison of each of its words.
    Check,
}

/// Settings that the measurements of one row share.
#[derive(Debug, Clone, Copy)]
pub struct Row {
    /// Lanes of each thread.
    pub num_lanes: u32,
    /// Commands posted together, at most the budget.
    pub batch: u32,
    /// Most commands of a lane in flight.
    pub budget: u32,
    /// Bytes of an object, a multiple of 16.
    pub object_bytes: u32,
    /// Objects of each lane.
    pub commands: u64,
    /// Whether a GPU produces. A warp posts a batch.
    pub is_gpu: bool,
}

/// One measurement.
#[derive(Debug, Clone)]
pub struct Run {
    /// Action of a post.
    pub post: PostKind,
    /// Lanes of each thread.
    pub lanes: LaneConfig,
    /// Commands posted together.
    pub batch: u32,
    /// Bytes of an object.
    pub object_bytes: u32,
    /// Number of places for objects of each lane, in mirror and slot.
    pub num_objects: u32,
    /// Number of objects that each lane posts.
    pub num_commands: u64,
    /// Whether each batch ends before the next is posted.
    pub is_round_trip: bool,
    /// Whether nothing is posted, and samples are times of reads of a lane's words. On a GPU only.
    pub only_reads: bool,
    /// Whether samples are times from the push of an object to its post. On a GPU only, with round trips of single
    /// objects.
    pub is_one_way: bool,
}

/// Figures of a [`Run`].
#[derive(Debug, Clone, serde::Serialize)]
pub struct Figures {
    /// `gpu` or `host`.
    pub producer: &'static str,
    /// Action of a post.
    pub post: PostKind,
    /// Threads of the proxy.
    pub threads: usize,
    /// Lanes of each thread.
    pub lanes: u32,
    /// Commands posted together.
    pub batch: u32,
    /// Most commands of a lane in flight.
    pub budget: u32,
    /// Bytes of an object.
    pub object_bytes: u32,
    /// Objects of all lanes.
    pub objects: u64,
    /// Wall time in milliseconds.
    pub wall_ms: f64,
    /// Millions of objects per second.
    pub mops: f64,
    /// Payload in 10^9 bits per second.
    pub gbps: f64,
    /// From posting a batch to its end; with `is_one_way`, from the push to the post.
    pub latency: Option<Latency>,
    /// With `is_one_way`, the uncertainty of the two clocks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub clock: Option<Certainty>,
    /// Objects compared.
    pub checked: u64,
    /// Objects with a wrong word.
    pub bad: u64,
    /// Figures of each lane, in the order of threads and their lanes.
    #[serde(skip)]
    pub by_lane: Vec<LaneFigures>,
}

/// Figures of one lane.
#[derive(Debug, Clone, serde::Serialize)]
pub struct LaneFigures {
    /// Thread of the proxy that serves the lane.
    pub thread: usize,
    /// Index among the lanes of the thread.
    pub lane: usize,
    /// Objects of the lane.
    pub objects: u64,
    /// As [`Figures::latency`].
    pub latency: Option<Latency>,
}

/// A proxy with one peer per thread. The peers' endpoints are [`BenchEndpoint`]s.
#[derive(Debug)]
pub struct Bench {
    proxy: Proxy<BenchEndpoint>,
    num_threads: usize,
    /// Zero of the host's clock.
    pub(super) origin: Instant,
}

/// A peer of a run.
#[derive(Debug)]
pub struct BenchPeer {
    /// The proxy's peer.
    pub peer: ProxyPeer<BenchEndpoint>,
    /// Target of copies, with the counters of the lanes at its end.
    pub target: Region,
    /// Counts of good and bad objects.
    pub checks: Arc<Checks>,
    /// Times of posts, with `is_one_way`.
    pub posts: Option<Arc<Posts>>,
    /// Source of puts, where producers fill objects.
    pub mirror: Region,
}

impl Row {
    /// Checks that all measurements of the row are possible.
    ///
    /// # Errors
    /// Names the first invalid value and the expected range.
    pub fn check(&self) -> Result<()> {
        let Self { num_lanes, batch, budget, object_bytes, commands, is_gpu } = *self;
        ensure!((1..=MAX_LANES).contains(&num_lanes), "lanes is {num_lanes}: expected 1 to 256");
        ensure!((2..=MAX_DEPTH).contains(&budget), "budget is {budget}: expected 2 to 65536");
        let most = if is_gpu { budget.min(WARP) } else { budget };
        ensure!(
            (1..=most).contains(&batch),
            "batch is {batch}: expected 1 to the budget, and to 32 from a GPU, so here to {most}"
        );
        ensure!(
            object_bytes > 0 && object_bytes.is_multiple_of(16),
            "object-bytes is {object_bytes}: expected a multiple of 16"
        );
        ensure!(
            (1..=MAX_COMMANDS).contains(&commands),
            "commands is {commands}: expected 1 to {MAX_COMMANDS}"
        );
        self.compared().check()?;
        self.rate(PostKind::Null).check()?;
        self.round_trip(PostKind::Null).check()
    }

    /// Returns the run that posts as fast as the budget allows.
    #[must_use]
    pub fn rate(&self, post: PostKind) -> Run {
        self.run(post, self.batch, self.commands)
    }

    /// Returns the run with one batch after the other.
    #[must_use]
    pub fn round_trip(&self, post: PostKind) -> Run {
        Run { is_round_trip: true, ..self.run(post, 1, self.commands.min(20_000)) }
    }

    /// Returns the run that compares each word. An add follows each object, in the same batch.
    #[must_use]
    pub fn compared(&self) -> Run {
        self.run(PostKind::Check, self.batch.min(WARP / 2).min(self.budget / 2), 4096)
    }

    /// Returns the run on a GPU that reads a lane's words and posts nothing.
    #[must_use]
    pub fn reads(&self) -> Run {
        Run { is_round_trip: true, only_reads: true, ..self.run(PostKind::Null, 1, 2000) }
    }

    /// Returns the run on a GPU that times each object from its push to its post, one after the other.
    #[must_use]
    pub fn one_way(&self) -> Run {
        Run { is_one_way: true, ..self.round_trip(PostKind::Null) }
    }

    fn run(&self, post: PostKind, batch: u32, commands: u64) -> Run {
        let depth = self.budget.next_power_of_two().max(64);
        Run {
            post,
            lanes: LaneConfig { num_lanes: self.num_lanes, depth, budget: self.budget },
            batch,
            object_bytes: self.object_bytes,
            // A cell is free once its put has ended, and so is the place of its object.
            num_objects: self.budget.next_multiple_of(batch),
            num_commands: commands.next_multiple_of(batch.into()),
            is_round_trip: false,
            only_reads: false,
            is_one_way: false,
        }
    }
}

impl Run {
    /// Checks that batches never reach past the objects, and that offsets fit into commands.
    ///
    /// # Errors
    /// Names the invalid setting.
    pub fn check(&self) -> Result<()> {
        let Self { batch, num_objects, num_commands, object_bytes, .. } = *self;
        self.lanes.bytes()?;
        ensure!(batch > 0, "batches of no command");
        ensure!(
            num_objects > 0 && num_objects.is_multiple_of(batch),
            "{num_objects} objects of a lane: expected a multiple of the batch, {batch}"
        );
        ensure!(
            num_commands.is_multiple_of(batch.into()),
            "{num_commands} commands: expected a multiple of the batch, {batch}"
        );
        ensure!(
            object_bytes > 0 && object_bytes.is_multiple_of(16),
            "objects of {object_bytes} bytes: expected a multiple of 16"
        );
        ensure!(
            !self.is_one_way || (self.is_round_trip && batch == 1 && self.post == PostKind::Null),
            "one way: expected round trips of single objects whose posts do nothing"
        );
        ensure!(
            self.slot_bytes() <= MAX_SLOT_BYTES,
            "slots of {} bytes ({} lanes, {num_objects} objects of {object_bytes} bytes each): expected at most {MAX_SLOT_BYTES}",
            self.slot_bytes(),
            self.lanes.num_lanes
        );
        Ok(())
    }

    /// Returns the bytes of mirror and slot: the objects of all lanes, and a counter for each lane.
    #[must_use]
    pub const fn slot_bytes(&self) -> u64 {
        self.counter_offset() + 8 * self.lanes.num_lanes as u64
    }

    /// Returns the offset of the counters.
    #[must_use]
    pub const fn counter_offset(&self) -> u64 {
        self.lanes.num_lanes as u64 * self.lane_bytes()
    }

    const fn lane_bytes(&self) -> u64 {
        self.num_objects as u64 * self.object_bytes as u64
    }

    /// Whether producers add to their lane's counter, once per object.
    #[must_use]
    pub fn counts(&self) -> bool {
        self.post == PostKind::Check
    }
}

impl Bench {
    /// Starts the threads.
    ///
    /// # Errors
    /// As for [`Proxy::start`].
    pub fn start(config: &ProxyConfig) -> Result<Self> {
        let proxy = Proxy::start(config)?;
        Ok(Self { proxy, num_threads: config.num_threads, origin: Instant::now() })
    }

    /// Returns the number of threads.
    #[must_use]
    pub const fn num_threads(&self) -> usize {
        self.num_threads
    }

    /// Returns the proxy.
    #[must_use]
    pub const fn proxy(&self) -> &Proxy<BenchEndpoint> {
        &self.proxy
    }

    /// Adds a peer for thread `idx`.
    ///
    /// # Errors
    /// As for [`Proxy::add`].
    pub fn peer(&self, run: &Run, idx: usize, lanes: Lanes, mirror: Region) -> Result<BenchPeer> {
        let target = Region::anonymous(run.slot_bytes() as usize)?;
        let checks = Arc::new(Checks::default());
        let event = Arc::new(p2p_core::wait::event_fd()?);
        let posts = run.is_one_way.then(|| {
            let (num_lanes, num_kept) = (run.lanes.num_lanes as usize, run.num_commands as usize);
            Arc::new(Posts::new(self.origin, num_lanes, run.lane_bytes() as usize, num_kept))
        });
        let endpoint = match run.post {
            PostKind::Null => posts.clone().map_or_else(BenchEndpoint::null, BenchEndpoint::timed),
            PostKind::Copy => BenchEndpoint::copy(target.clone(), &event),
            PostKind::Check => BenchEndpoint::checked(
                target.clone(),
                &event,
                Arc::clone(&checks),
                run.object_bytes as usize,
                run.num_objects as usize,
                run.lanes.num_lanes as usize,
            ),
        };
        let config = PeerConfig {
            peer: idx as u32,
            lanes,
            window_bytes: run.slot_bytes(),
            sources: vec![mirror.clone()],
            thread: Some(idx),
        };
        Ok(BenchPeer { peer: self.proxy.add(endpoint, config)?, target, checks, posts, mirror })
    }

    /// Summarizes a run that has ended. `samples` are the latencies of each lane. Checks the counters and the peers'
    /// health.
    ///
    /// # Errors
    /// A failure that the proxy reported, or a counter that is wrong.
    pub fn figures(
        &self,
        producer: &'static str,
        run: &Run,
        peers: &[BenchPeer],
        wall: Duration,
        samples: Vec<Vec<u64>>,
    ) -> Result<Figures> {
        let mut checked = 0;
        let mut bad = 0;
        for peer in peers {
            if let Some(failure) = peer.peer.take_failures().into_iter().next() {
                return Err(failure.into());
            }
            checked += peer.checks.objects.load(Ordering::Relaxed);
            bad += peer.checks.bad.load(Ordering::Relaxed);
            for lane in 0..run.lanes.num_lanes {
                let offset = run.counter_offset() as usize + 8 * lane as usize;
                let word = proxy::memory::word(&peer.target, offset).context("a counter")?;
                let found = word.load(Ordering::Acquire);
                let expected = if run.counts() { run.num_commands } else { 0 };
                if found != expected {
                    bail!("the counter of lane {lane} is {found}, expected {expected}");
                }
            }
        }
        let objects = run.num_commands * u64::from(run.lanes.num_lanes) * peers.len() as u64;
        let num_lanes = run.lanes.num_lanes as usize;
        let all = Latency::of(samples.concat());
        let of_lane = |(number, samples)| LaneFigures {
            thread: number / num_lanes,
            lane: number % num_lanes,
            objects: run.num_commands,
            latency: Latency::of(samples),
        };
        let by_lane = samples.into_iter().enumerate().map(of_lane).collect();
        let seconds = wall.as_secs_f64();
        let mops = objects as f64 / seconds / 1e6;
        Ok(Figures {
            producer,
            post: run.post,
            threads: peers.len(),
            lanes: run.lanes.num_lanes,
            batch: run.batch,
            budget: run.lanes.budget,
            object_bytes: run.object_bytes,
            objects,
            wall_ms: seconds * 1e3,
            mops,
            gbps: mops * 1e6 * f64::from(run.object_bytes) * 8.0 / 1e9,
            latency: all,
            clock: None,
            checked,
            bad,
            by_lane,
        })
    }

    /// Runs producers on this host, one thread per lane.
    ///
    /// # Errors
    /// As for [`figures`](Self::figures), an invalid run, or a producer that found no room for 60 s.
    pub fn run_host(&self, run: &Run) -> Result<Figures> {
        run.check()?;
        ensure!(!run.is_one_way && !run.only_reads, "producers on this host do not measure that");
        let mut peers = Vec::new();
        for idx in 0..self.num_threads {
            let mirror = Region::anonymous(run.slot_bytes() as usize)?;
            peers.push(self.peer(run, idx, Lanes::anonymous(run.lanes)?, mirror)?);
        }
        let start = Instant::now();
        let mut samples = Vec::new();
        std::thread::scope(|scope| {
            let producers: Vec<_> = peers
                .iter()
                .flat_map(|peer| (0..run.lanes.num_lanes).map(move |lane| (peer, lane)))
                .map(|(peer, lane)| scope.spawn(move || produce(run, peer, lane)))
                .collect();
            for producer in producers {
                match producer.join() {
                    Ok(result) => samples.push(result?),
                    Err(_) => bail!("a producer panicked"),
                }
            }
            Ok(())
        })?;
        let wall = start.elapsed();
        self.figures("host", run, &peers, wall, samples)
    }
}

/// Runs one lane's producer on this host. Returns the latencies of batches, if it waits for each.
fn produce(run: &Run, peer: &BenchPeer, lane: u32) -> Result<Vec<u64>> {
    let mut poster = peer.peer.lanes().poster(lane);
    let mut samples = Vec::new();
    let deadline = Instant::now() + LIMIT;
    let region = u64::from(lane) * u64::from(run.num_objects) * u64::from(run.object_bytes);
    let per_object = if run.counts() { 2 } else { 1 };
    let wait = |poster: &mut Poster, number: u64| {
        while poster.completed() < number {
            if poster.error() != 0 {
                bail!("lane {lane}: {}", proxy::failure::describe_error(poster.error()));
            }
            if Instant::now() > deadline {
                bail!("lane {lane}: {} of {number} over in time", poster.completed());
            }
            std::thread::yield_now();
        }
        Ok(())
    };
    let post = |poster: &mut Poster, command: &Command| -> Result<u64> {
        loop {
            if let Some(number) = poster.try_post(command) {
                return Ok(number);
            }
            peer.peer.ring();
            // One more fits once all but `budget` - 1 commands have ended.
            wait(poster, poster.posted() + 1 - u64::from(run.lanes.budget))?;
        }
    };
    let mut words = vec![0u8; run.object_bytes as usize];
    for begin in (0..run.num_commands).step_by(run.batch as usize) {
        let object = begin % u64::from(run.num_objects);
        let place = |idx: u64| region + (object + idx) * u64::from(run.object_bytes);
        if run.post == PostKind::Check {
            // Their last puts must have ended before the objects are filled again.
            let over = (begin + u64::from(run.batch)).saturating_sub(run.num_objects.into());
            wait(&mut poster, over * per_object)?;
            for idx in 0..u64::from(run.batch) {
                for (word_idx, word) in words.chunks_exact_mut(8).enumerate() {
                    let value = pattern(lane.into(), begin + idx, word_idx as u64);
                    word.copy_from_slice(&value.to_ne_bytes());
                }
                proxy::memory::write(&peer.mirror, place(idx) as usize, &words)?;
            }
        }
        let posted = Instant::now();
        let mut end = 0;
        for idx in 0..u64::from(run.batch) {
            let offset = place(idx) as u32;
            let put = Command::transfer(Opcode::Put, offset, 0, offset, run.object_bytes);
            end = post(&mut poster, &put)?;
        }
        if run.counts() {
            for _ in 0..run.batch {
                let offset = run.counter_offset() as u32 + 8 * lane;
                end = post(&mut poster, &Command::word(Opcode::Add, offset, 1))?;
            }
        }
        peer.peer.ring();
        if run.is_round_trip {
            wait(&mut poster, end)?;
            samples.push(posted.elapsed().as_nanos() as u64);
        }
    }
    let end = poster.posted();
    wait(&mut poster, end)?;
    Ok(samples)
}

const LIMIT: Duration = Duration::from_secs(60);
/// Threads of a warp. Each posts one command of a batch.
const WARP: u32 = 32;
/// Most commands of a lane. Their time exceeds any useful run.
const MAX_COMMANDS: u64 = 1 << 40;
