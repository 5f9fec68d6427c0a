//! `switchyard make-checkpoint`: random weights in the layout and size of a real model.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context, Result};
use checkpoint::{MakeOptions, Preset, make_checkpoint, planned_bytes};

use crate::{Global, ui};

/// Options of `make-checkpoint`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Model whose shapes, tensor names and number formats to use: qwen3-30b-a3b, mixtral-8x7b, deepseek-v3,
    /// tiny-qwen3-moe, tiny-mixtral, tiny-deepseek-v3 or mini-deepseek-v3.
    #[arg(long, env = "SWITCHYARD_PRESET", value_name = "NAME", value_parser = parse_preset)]
    preset: Preset,
    /// Number of decoder layers to write.
    #[arg(long, env = "SWITCHYARD_LAYERS", default_value_t = 1)]
    layers: u32,
    /// Folder to write to. It is created if it does not exist.
    #[arg(long, env = "SWITCHYARD_OUT", value_name = "DIR")]
    out: PathBuf,
    /// Seed of the random weights.
    #[arg(long, env = "SWITCHYARD_SEED", default_value_t = 1)]
    seed: u64,
    /// Write even if the folder is not empty.
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
