//! The expert server on a GPU, here one in software: its kernels are those of the real one, compiled for
//! the host. With `SWITCHYARD_TEST_DEVICE=cuda` the same tests use a GPU: `cuda:0` for servers and the
//! last one for clients.

#[path = "../common/mod.rs"]
mod common;

mod client;
mod hostile;
mod layers;
mod leaving;
mod starting;

use expert_server::device::DeviceOptions;
use expert_server::{ExpertSelection, RunningServer, ServerConfig};
use kernels::gpu::{DeviceName, Gpu};
use p2p_core::SlotConfig;
use protocol::{ModelShape, WireDtype};

use client::Client;
use common::{Reference, Request, start_server};

/// Device slots of these tests: some dozens of tokens of the tiny model.
pub const SLOT: SlotConfig = SlotConfig { slot_bytes: 64 << 10, num_frames: 2 };

/// Where servers run, and where clients do: `None` skips a test loudly.
pub fn devices() -> Option<(DeviceName, Gpu)> {
    let name = std::env::var("SWITCHYARD_TEST_DEVICE").unwrap_or_else(|_| "emulated".to_owned());
    if name == "emulated" {
        let gpu = Gpu::open_emulated(1).expect("a GPU in software");
        return Some((DeviceName::Emulated(0), gpu));
    }
    let gpu = Gpu::count().and_then(|count| Gpu::open(count.saturating_sub(1)));
    match gpu {
        Ok(gpu) => Some((DeviceName::Cuda(0), gpu)),
        Err(error) => {
            println!("SKIPPED: {error}");
            None
        }
    }
}

/// A server on its GPU, holding `selection` of the tiny checkpoint.
pub async fn server_on(
    device: DeviceName,
    dtype: WireDtype,
    selection: ExpertSelection,
    tweak: impl FnOnce(&mut ServerConfig),
) -> RunningServer {
    start_server("gpu", selection, |config| {
        config.device = Some(DeviceOptions { dtype, ..DeviceOptions::new(device) });
        config.slot = SLOT;
        tweak(config);
    })
    .await
}

/// A client on `gpu`.
pub async fn join(
    gpu: &Gpu,
    server: &RunningServer,
    shape: ModelShape,
    id: u64,
    dtype: WireDtype,
) -> Client {
    Client::join(gpu, server.data_addr(), shape, id, dtype, SLOT).await.expect("connected")
}

/// Asserts that `rows` are the answer within the precision of bf16 matrices and sums.
pub fn check(reference: &Reference, request: &Request, dtype: WireDtype, rows: &[f32]) {
    let rounded = Request {
        x: request.x.iter().map(|v| half::bf16::from_f32(*v).to_f32()).collect(),
        ..request.clone()
    };
    let expected = reference.forward(&rounded, dtype);
    assert_eq!(rows.len(), expected.len(), "rows of another size");
    let hidden = reference.shape.hidden as usize;
    let tolerance = if dtype == WireDtype::F8E4m3 { 0.035 } else { 0.025 };
    for (token, (row, expected)) in
        rows.chunks_exact(hidden).zip(expected.chunks_exact(hidden)).enumerate()
    {
        let largest = expected.iter().fold(1e-30f64, |max, v| max.max(v.abs()));
        for (at, (found, expected)) in row.iter().zip(expected).enumerate() {
            let error = (f64::from(*found) - expected).abs() / largest;
            assert!(
                error <= tolerance,
                "layer {} token {token} value {at}: found {found}, expected {expected}",
                request.layer
            );
        }
    }
}
