//! A client that dies at a failpoint.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use attention_client::MoeClient;
use checkpoint::Checkpoint;
use rand::SeedableRng;
use rand::rngs::StdRng;

use crate::inputs::InputPool;

/// Computes layers until a failpoint kills the process.
///
/// # Errors
/// When no failpoint has killed it after 20 s, or a call fails.
pub fn run(control_url: &str, model: &Path, seed: u64) -> Result<()> {
    let token = std::env::var("SWITCHYARD_TOKEN").context("SWITCHYARD_TOKEN is not set")?;
    let checkpoint = Arc::new(Checkpoint::open(model)?);
    let pool = InputPool::new(&checkpoint, seed, 4, 32)?;
    let client = MoeClient::builder(pool.model.clone())
        .control_plane(control_url, Some(token.clone()))
        .secret(Some(token))
        .replica_wait(PATIENCE)
        .build()?;
    client.wait_ready(PATIENCE)?;
    let mut rng = StdRng::seed_from_u64(seed);
    let begin = Instant::now();
    let mut out = Vec::new();
    while begin.elapsed() < PATIENCE {
        let input = pool.pick(&mut rng);
        out.resize(input.x.len(), f32::NAN);
        client.forward(input.layer, &input.x, &input.idx, &input.weights, &mut out)?;
    }
    bail!("no failpoint killed this process within {PATIENCE:?}")
}

const PATIENCE: Duration = Duration::from_secs(20);
