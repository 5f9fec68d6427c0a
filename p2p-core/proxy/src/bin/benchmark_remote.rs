//! Objects from producers of one host, through the threads of a proxy, into slots of another: µs,
//! millions of objects and gigabits a second, after every word of some rounds was compared.
//!
//! `benchmark_remote --listen 0.0.0.0:7555` on one host, `benchmark_remote --connect HOST:7555` on the
//! other, both with the same `--transport`.

use std::net::TcpListener;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::Parser;
use kernels::gpu::Gpu;
use proxy::bench::remote::{self, Plan};
use proxy::{Device, Placement, ProxyConfig, Sysfs};

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
}

fn main() -> Result<()> {
    let args = Args::parse();
    let network = remote::open(&args.transport)?;
    if let Some(address) = &args.listen {
        let listener =
            TcpListener::bind(address).with_context(|| format!("cannot listen on {address}"))?;
        eprintln!("listening on {}", listener.local_addr()?);
        return remote::receive(&*network, &listener, Duration::from_secs(args.patience_s));
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
    let figures = remote::send(&*network, receiver, plan, &config, gpu.as_ref())?;
    let mut line = serde_json::to_value(figures)?;
    line["bench"] = "remote".into();
    line["producer"] = if gpu.is_some() { "gpu" } else { "host" }.into();
    println!("{line}");
    Ok(())
}
