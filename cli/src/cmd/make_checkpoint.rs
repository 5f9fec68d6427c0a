//! `switchyard make-checkpoint`: seeded weights in the real layout and size.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context, Result};
use checkpoint::{MakeOptions, Preset, make_checkpoint, planned_bytes};

use crate::{Global, ui};

/// Flags of `make-checkpoint`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Model whose shapes, names and number formats are used.
    #[arg(long, env = "SWITCHYARD_PRESET", value_parser = parse_preset)]
    preset: Preset,
    /// Decoder layers to write.
    #[arg(long, env = "SWITCHYARD_LAYERS", default_value_t = 1)]
    layers: u32,
    /// Folder to write to; made if it is missing.
    #[arg(long, env = "SWITCHYARD_OUT")]
    out: PathBuf,
    /// Seed of the weights.
    #[arg(long, env = "SWITCHYARD_SEED", default_value_t = 1)]
    seed: u64,
    /// Writes into a folder that is not empty.
    #[arg(long, env = "SWITCHYARD_FORCE", value_parser = clap::builder::FalseyValueParser::new())]
    force: bool,
}

pub fn parse_preset(text: &str) -> Result<Preset, String> {
    text.parse().map_err(|error: checkpoint::ParsePresetError| error.to_string())
}

pub fn run(global: &Global, args: Args) -> Result<ExitCode> {
    let mut options = MakeOptions::new(args.preset, args.layers);
    options.seed = args.seed;
    options.overwrite = args.force;
    let total = planned_bytes(args.preset, args.layers)?;
    let bar = ui::bytes_bar(global.json, total, "writing");
    let start = Instant::now();
    let summary = make_checkpoint(&args.out, &options, &mut |done, _| bar.set_position(done))
        .with_context(|| format!("cannot make a checkpoint in {}", args.out.display()))?;
    bar.finish_and_clear();
    let seconds = start.elapsed().as_secs_f64();
    if global.json {
        ui::print_json(&serde_json::json!({
            "dir": args.out,
            "preset": args.preset.name(),
            "layers": args.layers,
            "bytes": summary.tensor_bytes,
            "tensors": summary.num_tensors,
            "shards": summary.num_shards,
            "seconds": seconds,
        }))?;
    } else {
        outln!(
            "wrote {} ({} layers, {:.2} GB in {} shards) to {} in {seconds:.1} s",
            args.preset.name(),
            args.layers,
            summary.tensor_bytes as f64 / 1e9,
            summary.num_shards,
            args.out.display()
        );
    }
    Ok(ExitCode::SUCCESS)
}
