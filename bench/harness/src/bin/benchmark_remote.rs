//! Objects from producers of one host, through the threads of a proxy, into slots of another: µs,
//! millions of objects and gigabits a second, after every word of some rounds was compared.
//!
//! `benchmark_remote --listen 0.0.0.0:7555` on one host, `benchmark_remote --connect HOST:7555` on the
//! other, both with the same `--transport`.

use std::net::TcpListener;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::Parser;
use kernels::gpu::Gpu;
use proxy::{Device, Placement, ProxyConfig, Sysfs};
use switchyard_bench_harness::proxy::output::{self, Column, Output};
use switchyard_bench_harness::proxy::remote::{self, Plan};

#[derive(Debug, Parser)]
#[command(about, version)]
struct Args {
    /// Receives, for one sender.
    #[arg(long, conflicts_with = "connect")]
    listen: Option<String>,
    /// How long the receiver waits for a sender, in seconds.
    #[arg(long, default_value_t = 600)]
    patience_s: u64,
    /// Sends to this receiver.
    #[arg(long, required_unless_present = "listen")]
    connect: Option<String>,
    /// `libfabric`, `libfabric:PROVIDER` or `verbs`, as far as they are in this build.
    #[arg(long, default_value = "libfabric")]
    transport: String,
    /// Threads of the sender's proxy, with a pair of slots each.
    #[arg(long, default_value_t = 4)]
    threads: usize,
    /// Bytes of an object.
    #[arg(long, default_value_t = 10_752)]
    object_bytes: u32,
    /// Objects of each thread in flight at most.
    #[arg(long, default_value_t = 64)]
    budget: u32,
    /// Objects posted together.
    #[arg(long, default_value_t = 32)]
    batch: u32,
    /// Objects of each thread that are timed.
    #[arg(long, default_value_t = 100_000)]
    commands: u64,
    /// Rounds of objects whose every word is compared first.
    #[arg(long, default_value_t = 8)]
    checks: u32,
    /// GPU whose warps produce, one for each thread of the proxy; without it, threads of this host do.
    #[arg(long)]
    gpu: Option<u32>,
    /// The GPU's address on the PCI bus, for the choice of processors.
    #[arg(long)]
    pci: Option<String>,
    /// The RDMA device, for the choice of processors.
    #[arg(long)]
    nic: Option<String>,
    /// Prints a line of JSON instead of a table.
    #[arg(long)]
    json: bool,
}

fn main() -> ExitCode {
    output::end(run(&Args::parse()))
}

fn run(args: &Args) -> Result<()> {
    let mut output = Output::new(args.json, 1);
    let network = remote::open(&args.transport)?;
    if let Some(address) = &args.listen {
        let listener =
            TcpListener::bind(address).with_context(|| format!("cannot listen on {address}"))?;
        output.note(format_args!("listening on {}", listener.local_addr()?));
        let patience = Duration::from_secs(args.patience_s);
        let received = remote::receive(&*network, &listener, patience)?;
        output.title(format_args!("objects received over {}", received.transport))?;
        let mut line = serde_json::to_value(received)?;
        line["bench"] = "received".into();
        return output.row(RECEIVED, &line);
    }
    let receiver = args.connect.as_deref().context("--connect or --listen is needed")?;
    let plan = Plan {
        threads: args.threads,
        object_bytes: args.object_bytes,
        budget: args.budget,
        batch: args.batch,
        commands: args.commands,
        checks: args.checks,
        is_gpu: args.gpu.is_some(),
    };
    let gpu = args.gpu.map(Gpu::open).transpose()?;
    let pci = args.pci.clone().map(Device::Pci);
    let nic = args.nic.clone().map(Device::Rdma);
    let placement = Placement::near(&Sysfs::default(), pci.as_ref(), nic.as_ref(), args.threads);
    let config = ProxyConfig { num_threads: args.threads, placement, ..ProxyConfig::default() };
    output.step(format_args!("{} threads to {receiver}", args.threads));
    let figures = remote::send(&*network, receiver, plan, &config, gpu.as_ref())?;
    let producer = if gpu.is_some() { "gpu" } else { "host" };
    output.title(format_args!(
        "objects to {receiver} over {}, producers on the {producer}; µs of a batch, and of one object after the other",
        figures.transport
    ))?;
    let mut line = serde_json::to_value(figures)?;
    line["bench"] = "remote".into();
    line["producer"] = producer.into();
    output.row(SENT, &line)
}

const SENT: &[Column] = &[
    Column::text("bench", "/bench", 6),
    Column::number("threads", "/threads", 7),
    Column::number("batch", "/batch", 5),
    Column::number("budget", "/budget", 6),
    Column::number("object bytes", "/object_bytes", 12),
    Column::number("M objects/s", "/mops", 11),
    Column::number("Gbit/s", "/gbps", 8),
    Column::number("batch µs p50", "/latency/p50_us", 12),
    Column::number("µs p99", "/latency/p99_us", 9),
    Column::number("µs max", "/latency/max_us", 9),
    Column::number("one µs p50", "/one/p50_us", 10),
    Column::number("µs p99", "/one/p99_us", 9),
    Column::number("µs max", "/one/max_us", 9),
    Column::number("checked", "/checked", 8),
    Column::number("timed checked", "/checked_timed", 13),
];
const RECEIVED: &[Column] = &[
    Column::text("bench", "/bench", 8),
    Column::number("threads", "/threads", 7),
    Column::number("batch", "/batch", 5),
    Column::number("budget", "/budget", 6),
    Column::number("object bytes", "/object_bytes", 12),
    Column::number("checked", "/checked", 8),
    Column::number("timed checked", "/checked_timed", 13),
];
