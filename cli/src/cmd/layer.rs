//! `switchyard layer`: the experts of one layer on tokens from a file, to compare with another framework.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use checkpoint::{DType, TensorFile};
use safetensors::tensor::{Dtype, TensorView, serialize_to_file};

use crate::{Global, ui};

/// Options of `layer`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Checkpoint folder. Default: the small model of this repository.
    #[arg(long, env = "SWITCHYARD_MODEL", value_name = "DIR")]
    model: Option<PathBuf>,
    /// Index of the decoder layer, from 0. It must be a layer with experts.
    #[arg(long, env = "SWITCHYARD_LAYER")]
    layer: u32,
    /// Input in safetensors format: `x` [tokens, hidden] (f32, f16 or bf16), `topk_idx` [tokens, k] (i32 or
    /// i64, −1 = masked) and `topk_weights` [tokens, k] (f32, f16 or bf16).
    #[arg(long = "in", env = "SWITCHYARD_IN", value_name = "FILE")]
    input: PathBuf,
    /// Output in safetensors format: `out` [tokens, hidden] in f32.
    #[arg(long, env = "SWITCHYARD_OUT", value_name = "FILE")]
    out: PathBuf,
    #[command(flatten)]
    control: super::ControlArgs,
    #[command(flatten)]
    local: super::LocalArgs,
    #[command(flatten)]
    client: super::ClientArgs,
}

/// The three tensors of a request.
struct Request {
    num_tokens: usize,
    top_k: usize,
    x: Vec<f32>,
    topk_idx: Vec<i32>,
    topk_weights: Vec<f32>,
}

pub fn run(global: &Global, args: Args) -> Result<ExitCode> {
    let dir = super::model_or_tiny(args.model)?;
    let checkpoint = super::open_client_checkpoint(&dir, &args.control)?;
    let config = checkpoint.config();
    if !config.is_moe_layer(args.layer) {
        bail!(
            "--layer {}: not a layer with experts; this model has them in layers {:?}",
            args.layer,
            config.moe_layers()
        );
    }
    let hidden = config.hidden;
    let request = read_request(&args.input, hidden)
        .with_context(|| format!("cannot use {}", args.input.display()))?;
    let service =
        super::Service::open(global, &checkpoint, &args.control, &args.local, &args.client)?;
    let mut out = vec![0f32; request.x.len()];
    let start = Instant::now();
    service.client.forward(
        args.layer,
        &request.x,
        &request.topk_idx,
        &request.topk_weights,
        &mut out,
    )?;
    let layer_us = start.elapsed().as_secs_f64() * 1e6;
    let bytes: Vec<u8> = out.iter().flat_map(|value| value.to_le_bytes()).collect();
    let view = TensorView::new(Dtype::F32, vec![request.num_tokens, hidden], &bytes)
        .context("cannot describe the output")?;
    serialize_to_file([("out", view)], None, &args.out)
        .with_context(|| format!("cannot write {}", args.out.display()))?;
    if global.json {
        ui::print_json(&serde_json::json!({
            "layer": args.layer,
            "tokens": request.num_tokens,
            "top_k": request.top_k,
            "hidden": hidden,
            "layer_us": layer_us,
            "out": args.out,
        }))?;
    } else {
        outln!(
            "layer {}: {} tokens, top-{} in {layer_us:.0} µs → {}",
            args.layer,
            request.num_tokens,
            request.top_k,
            args.out.display()
        );
    }
    Ok(ExitCode::SUCCESS)
}

fn read_request(path: &PathBuf, hidden: usize) -> Result<Request> {
    let file = TensorFile::open(path)?;
    for name in ["x", "topk_idx", "topk_weights"] {
        if !file.contains(name) {
            let found: Vec<&str> = file.names().collect();
            bail!(
                "no tensor `{name}`: expected `x`, `topk_idx` and `topk_weights`, found {found:?}"
            );
        }
    }
    let x = file.tensor("x")?;
    let &[num_tokens, width] = x.shape else {
        bail!("`x` has shape {:?}, expected [tokens, {hidden}]", x.shape);
    };
    if width != hidden {
        bail!("`x` has shape {:?}, expected [tokens, {hidden}]", x.shape);
    }
    let idx = file.tensor("topk_idx")?;
    let &[rows, top_k] = idx.shape else {
        bail!("`topk_idx` has shape {:?}, expected [{num_tokens}, k]", idx.shape);
    };
    if rows != num_tokens || top_k == 0 {
        bail!(
            "`topk_idx` has shape {:?}, expected [{num_tokens}, k] with k of at least 1",
            idx.shape
        );
    }
    let weights = file.tensor("topk_weights")?.expect_shape(&[num_tokens, top_k])?;
    let topk_idx = match idx.dtype {
        DType::I64 => idx
            .data
            .chunks_exact(8)
            .map(|bytes| {
                let mut wide = [0; 8];
                wide.copy_from_slice(bytes);
                let value = i64::from_le_bytes(wide);
                i32::try_from(value).with_context(|| format!("`topk_idx` holds {value}"))
            })
            .collect::<Result<Vec<i32>>>()?,
        _ => idx.to_i32()?,
    };
    Ok(Request { num_tokens, top_k, x: x.to_f32()?, topk_idx, topk_weights: weights.to_f32()? })
}
