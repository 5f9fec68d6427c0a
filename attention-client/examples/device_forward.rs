//! Times `DeviceClient::forward` at a running cluster: what `python -m switchyard_moe.bench call` compares with.
//!
//! ```text
//! device_forward URL DEVICE TOKENS CALLS    (secret of the cluster in SWITCHYARD_TOKEN)
//! ```
//!
//! Prints one line with the time of each call in microseconds: from outside, and the parts of dispatch and wait, as
//! the client reports them, with colons between.

use std::error::Error;
use std::time::{Duration, Instant};

use switchyard_attention_client::device::{DevicePtr, Gpu, GpuBuffer};
use switchyard_attention_client::{
    ClientModel, DeviceClient, DeviceInput, DeviceOptions, DeviceTensor, ModelShape, TensorType,
};

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [url, device, num_tokens, num_calls] = &arguments[..] else {
        return Err("usage: device_forward URL DEVICE TOKENS CALLS".into());
    };
    let (num_tokens, num_calls): (u32, usize) = (num_tokens.parse()?, num_calls.parse()?);
    let token = std::env::var("SWITCHYARD_TOKEN").ok();
    let limit = Duration::from_secs(30);
    let model = ClientModel::fetch(url, token.clone(), ModelShape::UNKNOWN_LAYERS, limit)?;
    let gpu = Gpu::open_named(device.parse()?)?;
    let mut client = DeviceClient::builder(model.clone())
        .control_plane(url, token.clone())
        .secret(token)
        .replica_wait(limit)
        .build(gpu.clone(), DeviceOptions::default())?;
    client.wait_ready(limit)?;
    let (hidden, top_k) = (model.shape.hidden, model.shape.top_k);
    // Each token's experts differ from its neighbours', as in the comparison.
    let indices = (0..num_tokens * top_k).map(|at| (at * 7 + at / top_k) % model.shape.num_experts);
    let x = upload(&gpu, (0..num_tokens * hidden).flat_map(|at| bf16(at).to_ne_bytes()))?;
    let topk_idx = upload(&gpu, indices.flat_map(u32::to_ne_bytes))?;
    let weight = 1.0 / top_k as f32;
    let topk_weights = upload(&gpu, (0..num_tokens * top_k).flat_map(|_| weight.to_ne_bytes()))?;
    let count = upload(&gpu, num_tokens.to_ne_bytes().into_iter())?;
    let out = gpu.alloc(u64::from(num_tokens) * u64::from(hidden) * 2)?;
    let input =
        DeviceInput::new(x.ptr(), topk_idx.ptr(), topk_weights.ptr(), count.ptr(), num_tokens);
    let out_tensor = DeviceTensor::new(DevicePtr(out.ptr().0), TensorType::Bf16);
    let stream = gpu.stream()?;
    let layer = model.moe_layers[0];
    let mut times = Vec::with_capacity(num_calls);
    for call in 0..num_calls + num_calls / 10 {
        let start = Instant::now();
        // SAFETY: the tensors are as large as the input says, and nothing else uses them.
        let timing = unsafe { client.forward(&stream, layer, &input, out_tensor)? };
        let took = start.elapsed();
        if call >= num_calls / 10 {
            let [dispatch, wait] = [timing.dispatch_ns, timing.wait_ns].map(|ns| ns as f64 / 1e3);
            times.push(format!("{:.3}:{dispatch:.3}:{wait:.3}", took.as_secs_f64() * 1e6));
        }
    }
    println!("{}", times.join(" "));
    Ok(())
}

/// The upper half of a small float: values between 1 and 2 of either sign.
fn bf16(at: u32) -> u16 {
    0x3f80 | (at.wrapping_mul(2_654_435_761) >> 16) as u16 & 0x807f
}

fn upload(gpu: &Gpu, bytes: impl Iterator<Item = u8>) -> Result<GpuBuffer, Box<dyn Error>> {
    let bytes: Vec<u8> = bytes.collect();
    let buffer = gpu.alloc(bytes.len() as u64)?;
    gpu.write(&buffer, 0, &bytes, Instant::now() + Duration::from_secs(10))?;
    Ok(buffer)
}
