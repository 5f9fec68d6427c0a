//! Measures the cost of the calls of an endpoint: of the concrete type, of `AnyEndpoint::Mapped`, and of
//! `AnyEndpoint::Other`, whose calls are indirect.
//!
//! ```text
//! cargo run --release -p switchyard-bench-harness --no-default-features --example endpoint_bench -- [ROUNDS]
//! ```
//!
//! All three are the same endpoint over a slot in this process. A pair is a put of 8 bytes and an `add_flag`. Each
//! round measures the three in turns, in another order than the round before. The program prints a table of
//! nanoseconds per pair.

use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result};
use p2p_core::backend::mapped::MappedEndpoint;
use p2p_core::endpoint::{Endpoint, TransportKind};
use p2p_core::wait::event_fd;
use p2p_core::{AnyEndpoint, LocalRange, PostError, Region, RemoteRange, SlotKey};
use switchyard_bench_harness::stats::percentile;

/// Short, so that a round is rarely interrupted.
const PAIRS: u32 = 50_000;
const SLOT_BYTES: usize = 4096;
const FLAG_OFFSET: usize = 2048;

fn main() -> Result<()> {
    let rounds: usize =
        std::env::args().nth(1).map_or(Ok(300), |text| text.parse()).context("ROUNDS")?;
    let source = Region::anonymous(SLOT_BYTES)?.range(0, 8).context("source")?;
    let mut concrete = mapped()?;
    let mut direct = AnyEndpoint::Mapped(mapped()?);
    let mut indirect = AnyEndpoint::Other(Box::new(mapped()?));
    let mut samples: [Vec<f64>; 3] = Default::default();
    for round in 0..rounds {
        for turn in 0..3 {
            let variant = (round + turn) % 3;
            let ns = match variant {
                0 => measure(&mut concrete, &source)?,
                1 => measure(&mut direct, &source)?,
                _ => measure(&mut indirect, &source)?,
            };
            samples[variant].push(ns);
        }
    }
    println!("| endpoint | p0 ns | p50 ns | p90 ns |\n|---|---|---|---|");
    let names = ["MappedEndpoint", "AnyEndpoint::Mapped", "AnyEndpoint::Other"];
    for (name, samples) in names.into_iter().zip(&mut samples) {
        let [p0, p50, p90] = [0.0, 0.5, 0.9].map(|fraction| percentile(samples, fraction));
        println!("| {name} | {p0:.2} | {p50:.2} | {p90:.2} |");
    }
    Ok(())
}

fn mapped() -> Result<MappedEndpoint> {
    let event = Arc::new(event_fd()?);
    let slot = Region::anonymous(SLOT_BYTES)?;
    Ok(MappedEndpoint::new(TransportKind::Local, slot, Arc::clone(&event), event))
}

/// Returns nanoseconds per pair.
#[inline(never)]
fn measure<E: Endpoint<RemoteKey = SlotKey>>(
    endpoint: &mut E,
    source: &LocalRange,
) -> Result<f64, PostError> {
    let data = RemoteRange { key: SlotKey, offset: 64, len: 8 };
    let flag = RemoteRange { key: SlotKey, offset: FLAG_OFFSET, len: 8 };
    let begin = Instant::now();
    for _ in 0..PAIRS {
        // The compiler must not learn the variant.
        let endpoint = black_box(&mut *endpoint);
        // SAFETY: no code writes the source.
        unsafe { endpoint.put(data, source.clone())? };
        endpoint.add_flag(flag, 1)?;
    }
    Ok(begin.elapsed().as_nanos() as f64 / f64::from(PAIRS))
}
