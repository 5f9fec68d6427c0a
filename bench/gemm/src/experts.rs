//! Pseudo-random experts, as a checkpoint stores them and as f32.

use std::error::Error;
use std::sync::Arc;

use expert_compute::{
    ExpertWeights, LayerExperts, Weight, WeightBytes, WeightFormat, WeightScales,
};

use crate::Preset;

pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u32 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as u32 ^ (self.0 >> 20) as u32
    }

    /// Returns a number from -1 to 1.
    pub fn float(&mut self) -> f32 {
        self.next() as i32 as f32 / 2f32.powi(31)
    }
}

pub fn make_experts(preset: &Preset) -> Result<LayerExperts, Box<dyn Error>> {
    let Preset { hidden, inter, format, .. } = *preset;
    let mut random = Random(0x5157_1711);
    let mut layer = LayerExperts::new(hidden, inter)?;
    for expert in 0..preset.num_loaded {
        let mut matrix = |rows: usize, cols: usize| {
            let mut bytes = Vec::with_capacity(rows * cols * format.code_bits() / 8);
            for _ in 0..rows * cols {
                match format {
                    WeightFormat::F8E4m3 { .. } => {
                        let byte = random.next() as u8;
                        bytes.push(if byte & 0x7f == 0x7f { byte ^ 1 } else { byte });
                    }
                    _ => {
                        let bits = (random.float() * 0.05).to_bits() >> 16;
                        bytes.extend_from_slice(&(bits as u16).to_le_bytes());
                    }
                }
            }
            let scales = format.scale_shape(rows, cols);
            let scales = scales.map(|[r, c]| WeightScales::from(vec![1e-3; r * c]));
            Weight::new(format, rows, cols, WeightBytes::from(bytes), scales)
        };
        let weights = ExpertWeights {
            gate: Some(matrix(inter, hidden)?),
            up: matrix(inter, hidden)?,
            down: matrix(hidden, inter)?,
            biases: None,
        };
        layer.insert(expert as u32, Arc::new(weights))?;
    }
    Ok(layer)
}

/// Experts of the same shape in f32. Their values have no influence on the time.
pub struct Floats {
    experts: Vec<[Vec<f32>; 3]>,
}

impl Floats {
    pub fn new(preset: &Preset) -> Self {
        let mut random = Random(3);
        let mut matrix = || (0..preset.hidden * preset.inter).map(|_| random.float()).collect();
        let experts = (0..preset.num_loaded).map(|_| [matrix(), matrix(), matrix()]).collect();
        Self { experts }
    }

    pub fn expert(&self, expert: usize) -> [&[f32]; 3] {
        let [gate, up, down] = &self.experts[expert % self.experts.len()];
        [gate, up, down]
    }
}
