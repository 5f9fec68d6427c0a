//! Dispatches one MoE layer against a running cluster, with `switchyard-attention-client` alone.
//!
//! ```sh
//! cargo run -- http://HOST:PORT TOKEN NUM_LAYERS [FILE]
//! ```
//!
//! `TOKEN` is the cluster's bearer token, `-` for none. `NUM_LAYERS` is `num_hidden_layers` of the model's
//! `config.json`. The program sends 8 tokens of random input to the first MoE layer and prints a summary. With `FILE`
//! it also writes input and output there, one line for each tensor.

use std::error::Error;
use std::fmt::Write;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use switchyard_attention_client::{ClientModel, MoeClient};

const NUM_TOKENS: usize = 8;

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [url, token, num_layers, file @ ..] = &args[..] else {
        return Err("usage: standalone-client URL TOKEN NUM_LAYERS [FILE]".into());
    };
    let token = (token != "-").then(|| token.clone());

    let model =
        ClientModel::fetch(url, token.clone(), num_layers.parse()?, Duration::from_secs(10))?;
    let client = MoeClient::builder(model)
        .control_plane(url, token.clone())
        // Servers of a cluster with a token ask for it in the handshake.
        .secret(token)
        // Generous, for a machine that is busy otherwise. The default is 100 ms.
        .deadline(Duration::from_secs(10))
        .build()?;
    client.wait_ready(Duration::from_secs(60))?;

    let shape = client.model().shape;
    let (hidden, top_k) = (client.hidden(), shape.top_k as usize);
    let layer = client.model().moe_layers[0];
    let mut random = Random::new();
    let x: Vec<f32> = (0..NUM_TOKENS * hidden).map(|_| random.next() - 0.5).collect();
    let topk_weights: Vec<f32> = (0..NUM_TOKENS * top_k).map(|_| random.next()).collect();
    // Different experts for each token: neighbours of a random one.
    let topk_idx: Vec<i32> = (0..NUM_TOKENS)
        .flat_map(|_| {
            let first = (random.next() * shape.num_experts as f32) as u32;
            (0..shape.top_k).map(move |k| ((first + k) % shape.num_experts) as i32)
        })
        .collect();

    let mut out = vec![0.0; x.len()];
    // An engine may compute something else between these two.
    let handle = client.dispatch(layer, &x, &topk_idx, &topk_weights)?;
    let timing = client.combine(handle, &mut out)?;

    let norm = out.iter().map(|&value| f64::from(value).powi(2)).sum::<f64>().sqrt();
    println!(
        "layer {layer}: {NUM_TOKENS} tokens to {} servers in {:.1} us, norm of the output {norm:.6}",
        timing.num_servers,
        timing.total_ns() as f64 / 1e3,
    );
    if let [file, ..] = file {
        let mut text = format!("layer {layer}\n");
        line(&mut text, "x", &x)?;
        line(&mut text, "topk_idx", &topk_idx)?;
        line(&mut text, "topk_weights", &topk_weights)?;
        line(&mut text, "out", &out)?;
        std::fs::write(file, text)?;
    }
    Ok(())
}

fn line<T: std::fmt::Display>(text: &mut String, name: &str, values: &[T]) -> std::fmt::Result {
    write!(text, "{name}")?;
    for value in values {
        write!(text, " {value}")?;
    }
    writeln!(text)
}

/// Numbers in 0..1: xorshift, seeded by the clock.
struct Random(u64);

impl Random {
    fn new() -> Self {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self(now.as_nanos() as u64 | 1)
    }

    fn next(&mut self) -> f32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 40) as f32 / (1u64 << 24) as f32
    }
}
