//! Tensors of a client in GPU memory, and a checkpoint that has shapes only.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use attention_client::{ClientModel, DeviceInput, DeviceTensor, TensorType};
use checkpoint::{MakeOptions, Preset, make_checkpoint};
use kernels::gpu::{Gpu, GpuBuffer};
use rand::rngs::StdRng;
use rand::seq::index::sample;
use rand::{RngExt, SeedableRng};

/// Random tokens and routing in GPU memory.
pub(super) struct Tensors {
    _memory: Vec<GpuBuffer>,
    pub(super) input: DeviceInput,
    out: GpuBuffer,
    hidden: usize,
}

impl Tensors {
    pub(super) fn random(gpu: &Gpu, model: &ClientModel, tokens: usize, seed: u64) -> Result<Self> {
        let mut rng = StdRng::seed_from_u64(seed);
        let (hidden, top_k) = (model.shape.hidden as usize, model.shape.top_k as usize);
        let deadline = Instant::now() + Duration::from_secs(60);
        let upload = |bytes: &[u8]| -> Result<GpuBuffer> {
            let memory = gpu.alloc(bytes.len() as u64)?;
            gpu.write(&memory, 0, bytes, deadline)?;
            Ok(memory)
        };
        // The upper half of an f32 is a bf16.
        let x: Vec<u8> = (0..tokens * hidden)
            .flat_map(|_| {
                let bits = rng.random_range(-1.0f32..1.0).to_bits();
                ((bits >> 16) as u16).to_le_bytes()
            })
            .collect();
        let (mut idx, mut weights) = (Vec::new(), Vec::new());
        for _ in 0..tokens {
            for expert in sample(&mut rng, model.shape.num_experts as usize, top_k).iter() {
                idx.extend_from_slice(&(expert as i32).to_le_bytes());
                weights.extend_from_slice(&(1.0 / top_k as f32).to_le_bytes());
            }
        }
        let memory = vec![
            upload(&x)?,
            upload(&idx)?,
            upload(&weights)?,
            upload(&(tokens as u32).to_le_bytes())?,
        ];
        let [states, idx, weights, count] = [0, 1, 2, 3].map(|at| memory[at].ptr());
        let input = DeviceInput::new(states, idx, weights, count, u32::try_from(tokens)?);
        let out = gpu.alloc((tokens * hidden * 2) as u64)?;
        Ok(Self { _memory: memory, input, out, hidden })
    }

    pub(super) fn out(&self) -> DeviceTensor {
        DeviceTensor::new(self.out.ptr(), TensorType::Bf16)
    }

    pub(super) fn read(&self, gpu: &Gpu) -> Result<Vec<f32>> {
        let mut bytes = vec![0u8; self.out.len() as usize];
        gpu.read(&self.out, 0, &mut bytes, Instant::now() + Duration::from_secs(60))?;
        let (words, _) = bytes.as_chunks::<2>();
        Ok(words.iter().map(|w| f32::from_bits(u32::from(u16::from_le_bytes(*w)) << 16)).collect())
    }

    /// Returns true if the output equals `expected` up to the order of its sums. An expert too many or too few
    /// changes a token by an eighth.
    pub(super) fn is_like(&self, gpu: &Gpu, expected: &[f32]) -> Result<bool> {
        let found = self.read(gpu)?;
        Ok(found.chunks_exact(self.hidden).zip(expected.chunks_exact(self.hidden)).all(
            |(found, expected)| {
                let norm: f64 = expected.iter().map(|v| f64::from(*v).powi(2)).sum();
                let pairs = found.iter().zip(expected);
                let off: f64 = pairs.map(|(f, e)| f64::from(f - e).powi(2)).sum();
                off.is_finite() && norm > 0.0 && off <= norm * 4e-4
            },
        ))
    }
}

/// A checkpoint whose files are sparse. The folder is removed when this is dropped.
pub(super) struct Shapes<'a> {
    dir: &'a Path,
}

impl<'a> Shapes<'a> {
    pub(super) fn make(dir: &'a Path, preset: Preset) -> Result<Self> {
        let made = Self { dir };
        let mut options = MakeOptions::new(preset, 1);
        options.shapes_only = true;
        make_checkpoint(dir, &options, &mut |_, _| {})
            .with_context(|| format!("cannot make a checkpoint in {}", dir.display()))?;
        Ok(made)
    }
}

impl Drop for Shapes<'_> {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(self.dir);
    }
}
