//! Predicts a layer over GPU-initiated RDMA, and prints it as JSON.

use std::io::Write;
use std::path::PathBuf;

use anyhow::Context;
use clap::Parser;
use incast_sim::layer::{LayerModel, LayerOutcome, LayerScenario, put_and_flag, run_layer};
use incast_sim::{Control, Model};
use serde::Serialize;

/// Predicts dispatch and combine of a layer when kernels post to 400 Gb/s NICs by themselves.
///
/// First the published 8-to-8 table as a test of the model, then 8 to 320 servers.
#[derive(Parser)]
struct Args {
    /// Folder for results.json, instead of printing.
    #[arg(long)]
    out: Option<PathBuf>,
    /// Expert servers, with as many clients.
    #[arg(long, value_delimiter = ',', default_value = "8,16,32,64,128,192,256,320")]
    servers: Vec<usize>,
    /// Further shapes, clients and servers, as in 32v64.
    #[arg(long, value_delimiter = ',', default_value = "32v8,32v32,32v64,32v128,32v320")]
    shapes: Vec<String>,
    /// Flow control of the senders.
    #[arg(long, value_delimiter = ',', default_value = "pause,credits")]
    controls: Vec<Control>,
    /// Repetitions, with seeds 1, 2, …
    #[arg(long, default_value_t = 3)]
    seeds: u64,
    /// Measured: from a kernel's call until the doorbell, in nanoseconds.
    #[arg(long)]
    post_ns: Option<u64>,
    /// Measured: requests that all queues of a GPU take in a microsecond.
    #[arg(long)]
    requests_per_us: Option<u64>,
    /// Measured: kernels of a layer over NVLink with one token, in nanoseconds.
    #[arg(long)]
    kernels_ns: Option<u64>,
    /// Tokens of every client.
    #[arg(long)]
    tokens: Option<usize>,
}

/// One row of the published table.
#[derive(Serialize)]
struct Put {
    bytes: u64,
    published_us: f64,
    links_us: f64,
    /// Prediction, with the time of the table's smallest message beside its links.
    predicted_us: f64,
    ratio: f64,
}

#[derive(Serialize)]
struct Results {
    model: Model,
    layer: LayerModel,
    put_8v8: Vec<Put>,
    layers: Vec<LayerOutcome>,
}

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    let model = Model::default();
    let mut layer = LayerModel::default();
    layer.post_ns = args.post_ns.unwrap_or(layer.post_ns);
    layer.requests_per_us = args.requests_per_us.unwrap_or(layer.requests_per_us);
    layer.kernels_ns = args.kernels_ns.unwrap_or(layer.kernels_ns);
    layer.tokens = args.tokens.unwrap_or(layer.tokens);
    anyhow::ensure!(layer.requests_per_us > 0, "--requests-per-us is 0, expected at least 1");
    anyhow::ensure!((1..=4096).contains(&layer.tokens), "--tokens must be from 1 to 4096");

    let mut shapes: Vec<(usize, usize)> = args.servers.iter().map(|n| (*n, *n)).collect();
    for shape in &args.shapes {
        let shape = shape
            .split_once('v')
            .and_then(|(m, n)| Some((m.parse().ok()?, n.parse().ok()?)))
            .with_context(|| format!("`{shape}` is not a shape; expected something like 32v64"))?;
        shapes.push(shape);
    }
    let mut layers = Vec::new();
    for (clients, servers) in shapes {
        anyhow::ensure!(clients > 0 && servers > 0, "`{clients}v{servers}`: neither may be 0");
        // Beyond one switch's ports there are two more hops, and the packet memory of more switches.
        let num_switches = (clients + servers).div_ceil(SWITCH_PORTS) as u64;
        let wide = Model {
            hop_ns: model.hop_ns + if num_switches > 1 { HOP_NS } else { 0 },
            buffer_bytes: model.buffer_bytes * num_switches,
            ..model
        };
        for control in args.controls.iter().copied() {
            for seed in 1..=args.seeds {
                let scenario = LayerScenario { clients, servers, control, seed };
                let outcome = run_layer(scenario, &layer, &wide)
                    .with_context(|| format!("{clients}v{servers}, {control:?}"))?;
                eprintln!(
                    "{clients:>4} clients {servers:>4} servers {control:?} seed {seed}: {:.1} us, limit {:.1} us",
                    outcome.layer_us, outcome.limit_us
                );
                layers.push(outcome);
            }
        }
    }
    let results = Results { model, layer, put_8v8: published(&layer, &model)?, layers };
    let json = serde_json::to_string_pretty(&results)?;
    match args.out {
        Some(folder) => {
            std::fs::create_dir_all(&folder)?;
            let path = folder.join("results.json");
            std::fs::write(&path, json).with_context(|| format!("cannot write {}", path.display()))
        }
        None => Ok(writeln!(std::io::stdout(), "{json}")?),
    }
}

/// Predicts the published table. The part that does not depend on the size comes from its row of 1 KiB.
fn published(layer: &LayerModel, model: &Model) -> anyhow::Result<Vec<Put>> {
    let links = |bytes| put_and_flag(8, bytes, layer, model);
    let fixed_row = PUBLISHED_8V8.iter().find(|(bytes, _)| *bytes == FIXED_FROM_BYTES);
    let (bytes, published_us) = fixed_row.context("the published table has no row of 1 KiB")?;
    let fixed_us = published_us - links(*bytes)?;
    PUBLISHED_8V8
        .iter()
        .map(|(bytes, published_us)| {
            let links_us = links(*bytes)?;
            let predicted_us = links_us + fixed_us;
            let ratio = predicted_us / published_us;
            Ok(Put { bytes: *bytes, published_us: *published_us, links_us, predicted_us, ratio })
        })
        .collect()
}

/// Bytes and microseconds of "8 vs 8" in NexVenusCL's README (GPU and NIC are not stated there).
const PUBLISHED_8V8: [(u64, f64); 22] = [
    (4, 70.0),
    (8, 70.0),
    (16, 70.0),
    (32, 70.0),
    (64, 71.0),
    (128, 56.0),
    (256, 58.0),
    (512, 58.0),
    (1 << 10, 58.0),
    (2 << 10, 62.0),
    (4 << 10, 57.0),
    (8 << 10, 57.0),
    (16 << 10, 58.0),
    (32 << 10, 61.0),
    (64 << 10, 65.0),
    (128 << 10, 79.0),
    (256 << 10, 104.0),
    (512 << 10, 147.0),
    (1 << 20, 233.0),
    (2 << 20, 404.0),
    (4 << 20, 747.0),
    (8 << 20, 1432.0),
];
/// The row that gives the part that does not depend on the size.
const FIXED_FROM_BYTES: u64 = 1 << 10;
/// Ports of one switch.
const SWITCH_PORTS: usize = 64;
/// Time through one more switch and its cable.
const HOP_NS: u64 = 600;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_published_table_is_met_where_links_decide() {
        let puts = published(&LayerModel::default(), &Model::default()).unwrap();
        // At 256 KiB more than half of the time is the part taken from the row of 1 KiB.
        let is_link_bound = |put: &Put| put.links_us > 0.5 * put.published_us;
        let bound: Vec<u64> =
            puts.iter().filter(|put| is_link_bound(put)).map(|put| put.bytes).collect();
        assert_eq!(bound, [512 << 10, 1 << 20, 2 << 20, 4 << 20, 8 << 20]);
        for put in puts.iter().filter(|put| put.bytes >= 128 << 10) {
            let (bytes, ratio) = (put.bytes, put.ratio);
            assert!((0.8..1.2).contains(&ratio), "{bytes} bytes: {ratio} of what was published");
        }
    }
}
