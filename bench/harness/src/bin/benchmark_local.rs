//! Commands from producers to the threads of a proxy on one host: rate, latency, and what idle threads
//! cost. Every run first checks each word of the payload.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Result, ensure};
use clap::Parser;
use kernels::gpu::Gpu;
use proxy::{Device, IdlePolicy, LaneConfig, Placement, ProxyConfig, Sysfs};
use serde_json::Value;
use switchyard_bench_harness::proxy::local::{Bench, Figures, PostKind, Row, Run};
use switchyard_bench_harness::proxy::output::{self, Column, Output};
use switchyard_bench_harness::proxy::thread_time;

#[derive(Debug, Parser)]
#[command(about, version)]
struct Args {
    /// Threads of the proxy.
    #[arg(long, value_delimiter = ',', default_value = "4")]
    threads: Vec<usize>,
    /// Lanes of each thread.
    #[arg(long, value_delimiter = ',', default_value = "1")]
    lanes: Vec<u32>,
    /// Commands posted together, not more than the budget, and from a GPU not more than 32.
    #[arg(long, value_delimiter = ',', default_value = "32")]
    batch: Vec<u32>,
    /// Commands of a lane in flight at most.
    #[arg(long, value_delimiter = ',', default_value = "64")]
    budget: Vec<u32>,
    /// Bytes of an object, a multiple of 16.
    #[arg(long, value_delimiter = ',', default_value = "10752")]
    object_bytes: Vec<u32>,
    /// Objects of each lane.
    #[arg(long, default_value_t = 1_000_000)]
    commands: u64,
    /// What a post is.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "null,copy")]
    post: Vec<PostKind>,
    /// GPU that posts; without it, threads of this host do.
    #[arg(long)]
    gpu: Option<u32>,
    /// The GPU's address on the PCI bus, for the choice of processors.
    #[arg(long)]
    pci: Option<String>,
    /// The RDMA device, for the choice of processors.
    #[arg(long)]
    nic: Option<String>,
    /// How long the processor time of idle threads is measured; 0: not at all.
    #[arg(long, default_value_t = 2.0)]
    idle_seconds: f64,
    /// Prints a further row for each lane of a measurement.
    #[arg(long)]
    per_lane: bool,
    /// Prints a line of JSON for each measurement instead of a table.
    #[arg(long)]
    json: bool,
}

impl Args {
    /// Rows of figures for each number of threads, all of which can be measured.
    fn rows(&self) -> Result<Vec<Row>> {
        for threads in &self.threads {
            ensure!((1..=MAX_THREADS).contains(threads), "threads is {threads}: expected 1 to 64");
        }
        let idle = self.idle_seconds;
        ensure!((0.0..=3600.0).contains(&idle), "idle-seconds is {idle}: expected 0 to 3600");
        let mut rows = Vec::new();
        for &num_lanes in &self.lanes {
            for &batch in &self.batch {
                for &budget in &self.budget {
                    for &object_bytes in &self.object_bytes {
                        let (commands, is_gpu) = (self.commands, self.gpu.is_some());
                        let row = Row { num_lanes, batch, budget, object_bytes, commands, is_gpu };
                        row.check()?;
                        rows.push(row);
                    }
                }
            }
        }
        Ok(rows)
    }

    /// Measurements of `num_rows` rows for each number of threads.
    fn num_steps(&self, num_rows: usize) -> usize {
        // Words are compared, a GPU looks and measures one way, and each post has a rate and a round trip.
        let of_row = 1 + 2 * usize::from(self.gpu.is_some()) + 2 * self.post.len();
        self.threads.len() * (num_rows * of_row + usize::from(self.idle_seconds > 0.0))
    }
}

fn main() -> ExitCode {
    output::end(run(&Args::parse()))
}

fn run(args: &Args) -> Result<()> {
    let rows = args.rows()?;
    let producers = Producers::open(args.gpu)?;
    let mut output = Output::new(args.json, args.num_steps(rows.len()));
    let us = "µs from posting a batch to its end";
    match args.gpu {
        None => {
            output.title(format_args!("commands from threads of this host to a proxy's; {us}"))?
        }
        Some(gpu) => output.title(format_args!(
            "commands from GPU {gpu} to threads of a proxy; {us}, in `read` of a look at a lane, in `one_way` from the push to the post, give or take what stands in `± µs`"
        ))?,
    }
    let gpu = args.pci.clone().map(Device::Pci);
    let nic = args.nic.clone().map(Device::Rdma);
    for &num_threads in &args.threads {
        let placement = Placement::near(&Sysfs::default(), gpu.as_ref(), nic.as_ref(), num_threads);
        output.note(format_args!(
            "{num_threads} threads, processors {:?}: {}",
            placement.threads(),
            placement.reason()
        ));
        let config = ProxyConfig { num_threads, placement, ..ProxyConfig::default() };
        let bench = Bench::start(&config)?;
        for row in &rows {
            measure(args, &producers, &bench, row, &mut output)?;
        }
        if args.idle_seconds > 0.0 {
            output.step("idle threads");
            idle(args, &bench, config.idle, &mut output)?;
        }
    }
    Ok(())
}

fn measure(
    args: &Args,
    producers: &Producers,
    bench: &Bench,
    row: &Row,
    output: &mut Output,
) -> Result<()> {
    let mut report = |name: &str, run: &Run| -> Result<()> {
        output.step(format_args!("{name}, {} threads", bench.num_threads()));
        let figures = producers.run(bench, run)?;
        let Figures { bad, checked, .. } = figures;
        ensure!(bad == 0, "{bad} of {checked} objects are wrong");
        let mut line = serde_json::to_value(&figures)?;
        line["bench"] = name.into();
        if !args.per_lane {
            return output.row(COLUMNS, &line);
        }
        output.row(COLUMNS_PER_LANE, &line)?;
        figures.by_lane.iter().try_for_each(|lane| {
            output.row(COLUMNS_PER_LANE, &of_lane(&line, serde_json::to_value(lane)?))
        })
    };
    report("check", &row.compared())?;
    if row.is_gpu {
        report("read", &row.reads())?;
        report("one_way", &row.one_way())?;
    }
    for &post in &args.post {
        report("rate", &row.rate(post))?;
        report("round_trip", &row.round_trip(post))?;
    }
    Ok(())
}

/// A lane's own figures, beside what it was measured with.
fn of_lane(all: &Value, mut lane: Value) -> Value {
    for key in ["bench", "producer", "post", "threads", "lanes", "batch", "budget", "object_bytes"]
    {
        lane[key] = all[key].clone();
    }
    lane
}

/// Processor time of threads that find nothing.
fn idle(args: &Args, bench: &Bench, policy: IdlePolicy, output: &mut Output) -> Result<()> {
    // A peer with lanes, so that there is something to look at.
    let lanes = LaneConfig { num_lanes: 8, ..LaneConfig::default() };
    let run = Run {
        post: PostKind::Null,
        lanes,
        batch: 1,
        object_bytes: 16,
        num_objects: 1,
        num_commands: 0,
        is_round_trip: false,
        only_reads: false,
        is_one_way: false,
    };
    let mut peers = Vec::new();
    for idx in 0..bench.num_threads() {
        let mirror = p2p_core::Region::anonymous(run.slot_bytes() as usize)?;
        peers.push(bench.peer(&run, idx, proxy::Lanes::anonymous(lanes)?, mirror)?);
    }
    std::thread::sleep(Duration::from_millis(1500));
    let (before, num) = thread_time("sy-proxy-");
    std::thread::sleep(Duration::from_secs_f64(args.idle_seconds));
    let (after, _) = thread_time("sy-proxy-");
    let percent = (after - before).as_secs_f64() / args.idle_seconds / num.max(1) as f64 * 100.0;
    let max_sleep_us = policy.max_sleep.as_micros() as u64;
    let line = serde_json::json!({
        "bench": "idle", "threads": num, "lanes": lanes.num_lanes,
        "max_sleep_us": max_sleep_us,
        "cpu_percent_per_thread": percent,
    });
    output.sentence(
        format_args!(
            "idle threads: {num}, with {} lanes each, asleep for up to {max_sleep_us} µs: {percent:.2} % of a processor each",
            lanes.num_lanes
        ),
        &line,
    )
}

/// A GPU, or threads of this host.
struct Producers(Option<Gpu>);

impl Producers {
    fn open(gpu: Option<u32>) -> Result<Self> {
        Ok(Self(gpu.map(Gpu::open).transpose()?))
    }

    fn run(&self, bench: &Bench, run: &Run) -> Result<Figures> {
        match &self.0 {
            Some(gpu) => bench.run_gpu(run, gpu),
            None => bench.run_host(run),
        }
    }
}

const MAX_THREADS: usize = 64;
const COLUMNS: &[Column] = COLUMNS_PER_LANE.split_at(COLUMNS_PER_LANE.len() - 2).0;
/// Which lane comes last, and "-" stands there for all of them together.
const COLUMNS_PER_LANE: &[Column] = &[
    Column::text("bench", "/bench", 10),
    Column::text("post", "/post", 5),
    Column::number("threads", "/threads", 7),
    Column::number("lanes", "/lanes", 5),
    Column::number("batch", "/batch", 5),
    Column::number("budget", "/budget", 6),
    Column::number("object bytes", "/object_bytes", 12),
    Column::number("objects", "/objects", 10),
    Column::number("ms", "/wall_ms", 9),
    Column::number("M objects/s", "/mops", 11),
    Column::number("Gbit/s", "/gbps", 9),
    Column::number("µs p50", "/latency/p50_us", 9),
    Column::number("µs p90", "/latency/p90_us", 9),
    Column::number("µs p99", "/latency/p99_us", 9),
    Column::number("µs max", "/latency/max_us", 9),
    Column::number("± µs", "/clock/uncertainty_us", 7),
    Column::number("checked", "/checked", 8),
    Column::number("of thread", "/thread", 9),
    Column::number("of lane", "/lane", 7),
];
