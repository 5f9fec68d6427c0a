//! The copy to a further GPU that a relay forwards with: by itself, and behind a proxy.

use anyhow::Result;
use clap::Parser;

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
}

fn main() -> Result<()> {
    run(&Args::parse())
}

#[cfg(feature = "cuda")]
fn run(args: &Args) -> Result<()> {
    use kernels::gpu::Gpu;
    use proxy::bench::relay;

    let (near, far) = (Gpu::open(args.near)?, Gpu::open(args.far)?);
    for figures in relay::copies(&near, &far, args.batches)? {
        let mut line = serde_json::to_value(figures)?;
        line["bench"] = "peer_copy".into();
        (line["near"], line["far"]) = (args.near.into(), args.far.into());
        println!("{line}");
    }
    let (objects, seconds, tasks) = relay::behind_proxy(&near, &far, args.objects)?;
    let line = serde_json::json!({
        "bench": "relay", "objects": objects, "seconds": seconds, "tasks": tasks,
        "mops": f64::from(objects) / seconds / 1e6,
        "gbps": f64::from(objects) * 10_752.0 * 8.0 / seconds / 1e9, "checked": objects,
    });
    println!("{line}");
    Ok(())
}

#[cfg(not(feature = "cuda"))]
fn run(args: &Args) -> Result<()> {
    anyhow::bail!("GPUs {} and {} need a build with `--features cuda`", args.near, args.far)
}
