//! The copy to a further GPU that a relay forwards with: by itself, and behind a proxy.

use std::process::ExitCode;

use anyhow::Result;
use clap::Parser;
use switchyard_bench_harness::proxy::output::{self, Output};

#[derive(Debug, Parser)]
#[command(about, version)]
struct Args {
    /// GPU next to the NIC, which copies.
    #[arg(long, default_value_t = 0)]
    near: u32,
    /// GPU that is copied to.
    #[arg(long, default_value_t = 1)]
    far: u32,
    /// Batches per size.
    #[arg(long, default_value_t = 200)]
    batches: usize,
    /// Objects through the proxy.
    #[arg(long, default_value_t = 8192)]
    objects: u32,
    /// Prints a line of JSON for each measurement instead of tables.
    #[arg(long)]
    json: bool,
}

fn main() -> ExitCode {
    let args = Args::parse();
    output::end(run(&args, Output::new(args.json, 2)))
}

#[cfg(feature = "cuda")]
fn run(args: &Args, mut output: Output) -> Result<()> {
    use kernels::gpu::Gpu;
    use switchyard_bench_harness::proxy::output::Column;
    use switchyard_bench_harness::proxy::relay;

    const COPIES: &[Column] = &[
        Column::text("bench", "/bench", 9),
        Column::number("near", "/near", 4),
        Column::number("far", "/far", 4),
        Column::number("copies", "/copies", 6),
        Column::number("bytes", "/bytes", 8),
        Column::number("batch µs p50", "/batch_us", 12),
        Column::number("GB/s", "/gb_per_s", 9),
    ];
    const RELAY: &[Column] = &[
        Column::text("bench", "/bench", 9),
        Column::number("objects", "/objects", 9),
        Column::number("tasks", "/tasks", 9),
        Column::number("seconds", "/seconds", 9),
        Column::number("M objects/s", "/mops", 11),
        Column::number("Gbit/s", "/gbps", 9),
        Column::number("checked", "/checked", 9),
    ];

    let (near, far) = (Gpu::open(args.near)?, Gpu::open(args.far)?);
    output.title(format_args!("from GPU {} to GPU {}", args.near, args.far))?;
    output.step("batches of copies");
    for figures in relay::copies(&near, &far, args.batches)? {
        let mut line = serde_json::to_value(figures)?;
        line["bench"] = "peer_copy".into();
        (line["near"], line["far"]) = (args.near.into(), args.far.into());
        output.row(COPIES, &line)?;
    }
    output.step("objects through a proxy and a relay");
    let (objects, seconds, tasks) = relay::behind_proxy(&near, &far, args.objects)?;
    let line = serde_json::json!({
        "bench": "relay", "objects": objects, "seconds": seconds, "tasks": tasks,
        "mops": f64::from(objects) / seconds / 1e6,
        "gbps": f64::from(objects) * 10_752.0 * 8.0 / seconds / 1e9, "checked": objects,
    });
    output.row(RELAY, &line)
}

#[cfg(not(feature = "cuda"))]
fn run(args: &Args, _output: Output) -> Result<()> {
    anyhow::bail!("GPUs {} and {} need a build with `--features cuda`", args.near, args.far)
}
