//! Servers on a GPU. By default it is a GPU in software: its kernels are those of a real GPU, compiled for
//! the host. With `SWITCHYARD_TEST_DEVICE=cuda` the same tests use GPUs of the host: `cuda:0` for servers,
//! the last one for clients.

mod assigned;
pub mod client;
mod families;
mod formats;
mod fp8;
mod hostile;
mod layers;
pub mod leaving;
mod observed;
mod padded;
mod random;
mod starting;
mod stuck_path;
mod timing;

use kernels::gpu::{DeviceName, Gpu};
use p2p_core::SlotConfig;
use protocol::convert::{f8_to_f32, f32_to_f8};
use protocol::{ModelShape, WireDtype};
use switchyard_expert_server::device::DeviceOptions;
use switchyard_expert_server::{ExpertSelection, RunningServer, ServerConfig};

use self::client::Client;
use crate::common::{Reference, Request, dot, start_server};

/// Device slots of these tests: some dozens of tokens of the tiny model.
pub const SLOT: SlotConfig = SlotConfig { slot_bytes: 64 << 10, num_frames: 2 };

/// The GPUs of servers and of clients, or `None` after reporting a skipped test.
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
            test_support::skip("gpu", &error.to_string());
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

/// Asserts that `rows` are the answer to `request`, apart from the order of sums.
pub fn check(reference: &Reference, request: &Request, dtype: WireDtype, rows: &[f32]) {
    let expected = expected_rows(reference, request, dtype);
    assert_eq!(rows.len(), expected.len(), "rows of another size");
    let hidden = reference.shape.hidden as usize;
    // An activation near the middle of two codes may become either, which is a sixteenth of it.
    let tolerance = if reference.is_fp8 { 3.0 * TOLERANCE } else { TOLERANCE };
    let pairs = rows.chunks_exact(hidden).zip(expected.chunks_exact(hidden));
    for (token, (row, expected)) in pairs.enumerate() {
        let largest = expected.iter().fold(1e-30f64, |max, v| max.max(v.abs()));
        for (at, (found, expected)) in row.iter().zip(expected).enumerate() {
            let error = (f64::from(*found) - expected).abs() / largest;
            assert!(
                error <= tolerance,
                "layer {} token {token} value {at}: found {found}, expected {expected}, largest {largest}",
                request.layer
            );
        }
    }
}

/// The answer to `request`, `[num_tokens, hidden]`, computed in f64 and rounded where the kernels round: tokens as they
/// arrive, activations, outputs. Under fp8 weights tokens and activations are fp8, too.
pub fn expected_rows(reference: &Reference, request: &Request, dtype: WireDtype) -> Vec<f64> {
    let round = |value: f64| half::bf16::from_f64(value).to_f64();
    let hidden = reference.shape.hidden as usize;
    let mut rows = vec![0f64; request.x.len()];
    let tokens = request.x.chunks_exact(hidden).zip(&request.routes);
    for (row, (x, routes)) in rows.chunks_exact_mut(hidden).zip(tokens) {
        let sent: Vec<f32> = x.iter().map(|v| half::bf16::from_f32(*v).to_f32()).collect();
        let x: Vec<f64> = if reference.is_fp8 {
            quantised(&sent).into_iter().map(f64::from).collect()
        } else {
            arrived(&sent, dtype).into_iter().map(|v| round(v.into())).collect()
        };
        for &(expert, weight) in routes {
            let [gate, up, down] = &reference.experts[&(request.layer, expert)];
            let inner: Vec<f64> = gate
                .chunks_exact(hidden)
                .zip(up.chunks_exact(hidden))
                .map(|(gate, up)| {
                    let (g, u) = (dot(gate, &x), dot(up, &x));
                    round(g / (1.0 + (-g).exp()) * u)
                })
                .collect();
            let inner = match reference.is_fp8 {
                true => quantised(&inner.iter().map(|v| *v as f32).collect::<Vec<f32>>())
                    .into_iter()
                    .map(f64::from)
                    .collect(),
                false => inner,
            };
            for (out, down) in row.iter_mut().zip(down.chunks_exact(inner.len())) {
                *out += f64::from(weight) * round(dot(down, &inner));
            }
        }
    }
    rows
}

/// A row as the server receives it. Other tests compare its codes with the kernels' bit by bit.
fn arrived(row: &[f32], dtype: WireDtype) -> Vec<f32> {
    if dtype == WireDtype::F8E4m3 { quantised(row) } else { row.to_vec() }
}

/// A row after its conversion to fp8 with a scale per 128 values.
fn quantised(row: &[f32]) -> Vec<f32> {
    let (mut codes, mut scales) = (vec![0; row.len()], vec![0.0; row.len().div_ceil(128)]);
    let mut out = row.to_vec();
    f32_to_f8(row, &mut codes, &mut scales);
    f8_to_f32(&codes, &scales, &mut out);
    out
}

/// The order of a sum can change its rounding by a unit of bf16.
const TOLERANCE: f64 = 0.02;
