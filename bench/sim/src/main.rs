//! Runs the table of experiments and prints it as JSON.

use std::io::Write;
use std::path::PathBuf;

use anyhow::Context;
use clap::Parser;
use incast_sim::{Control, Model, Outcome, Scenario, Verb, run};
use serde::Serialize;

/// Simulates many senders into few receivers on 400 Gb/s links, with and without credits.
///
/// Each sender sends one message to each receiver, or each receiver reads one from each sender. So 32 into 8 and 8 into
/// 32 move the same bytes.
#[derive(Parser)]
struct Args {
    /// Folder for results.json, instead of printing.
    #[arg(long)]
    out: Option<PathBuf>,
    /// Senders and receivers, as in 32v8.
    #[arg(long, value_delimiter = ',', default_value = "8v8,32v32,8v32,32v8,16v32,32v16")]
    shapes: Vec<String>,
    /// Bytes of a message.
    #[arg(long, value_delimiter = ',', default_value = "4096,65536,262144,1048576,8388608")]
    sizes: Vec<u64>,
    /// Flow control of the senders.
    #[arg(long, value_delimiter = ',', default_value = "loss,pause,credits,credits-shortest")]
    controls: Vec<Control>,
    /// Whether senders write or receivers read.
    #[arg(long, value_enum, default_value_t)]
    verb: Verb,
    /// Repetitions, with seeds 1, 2, …
    #[arg(long, default_value_t = 3)]
    seeds: u64,
    /// Packet memory of the switch in MiB.
    #[arg(long)]
    buffer_mib: Option<u64>,
    /// Limit of a queue, as a multiple of the free packet memory.
    #[arg(long)]
    alpha: Option<f64>,
    /// Factor by which receivers grant more than their link needs, with round-robin grants.
    #[arg(long)]
    overcommit: Option<u64>,
    /// Microseconds of silence after which a sender retries.
    #[arg(long)]
    retry_us: Option<u64>,
}

#[derive(Serialize)]
struct Results {
    model: Model,
    runs: Vec<Outcome>,
}

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    let mut model = Model::default();
    model.buffer_bytes = args.buffer_mib.map_or(model.buffer_bytes, |mib| mib << 20);
    model.overcommit = args.overcommit.unwrap_or(model.overcommit);
    model.alpha = args.alpha.unwrap_or(model.alpha);
    model.retry_ns = args.retry_us.map_or(model.retry_ns, |us| us * 1_000);
    let mut runs = Vec::new();
    for shape in &args.shapes {
        let (senders, receivers) = shape
            .split_once('v')
            .and_then(|(m, n)| Some((m.parse().ok()?, n.parse().ok()?)))
            .with_context(|| format!("`{shape}` is not a shape; expected something like 32v8"))?;
        for bytes in args.sizes.iter().copied() {
            for control in args.controls.iter().copied() {
                for seed in 1..=args.seeds {
                    let scenario =
                        Scenario { senders, receivers, bytes, control, verb: args.verb, seed };
                    let outcome = run(scenario, &model)
                        .with_context(|| format!("{shape} with {bytes} bytes, {control:?}"))?;
                    eprintln!(
                        "{shape:>6} {bytes:>9} {control:?} seed {seed}: {:.3} ms, {:.1} GB/s, {} dropped, queue {} KiB",
                        outcome.ms,
                        outcome.gb_per_s_per_receiver,
                        outcome.dropped_packets,
                        outcome.max_queue_bytes >> 10
                    );
                    runs.push(outcome);
                }
            }
        }
    }
    let json = serde_json::to_string_pretty(&Results { model, runs })?;
    match args.out {
        Some(folder) => {
            std::fs::create_dir_all(&folder)?;
            let path = folder.join("results.json");
            std::fs::write(&path, json).with_context(|| format!("cannot write {}", path.display()))
        }
        None => Ok(writeln!(std::io::stdout(), "{json}")?),
    }
}
