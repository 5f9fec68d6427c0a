//! Layers that other libraries computed: `reference.safetensors` in the folders of reference data.

use std::path::{Path, PathBuf};

use checkpoint::{Checkpoint, TensorFile};

use super::{Request, data};

/// A layer with the output that a library computed in f32.
pub struct Recorded {
    pub request: Request,
    /// `[num_tokens, hidden]`.
    pub expected: Vec<f32>,
}

impl Recorded {
    /// Reads the layer that is recorded in `dir`, whose checkpoint is `checkpoint`.
    pub fn open(dir: &Path, checkpoint: &Checkpoint) -> Self {
        let file = TensorFile::open(dir.join("reference.safetensors")).expect("a reference");
        let read = |name: &str| {
            file.tensor(name).and_then(|tensor| tensor.to_f32()).expect("values of the reference")
        };
        let idx = file.tensor("topk_idx").expect("a choice of experts");
        let (top_k, idx) = (idx.shape[1], idx.to_i32().expect("experts"));
        let weights = read("topk_weights");
        let num_experts = checkpoint.config().num_experts;
        let routes = idx.chunks(top_k).zip(weights.chunks(top_k)).map(|(experts, weights)| {
            let routes = experts.iter().map(|&expert| expert as u32).zip(weights.iter().copied());
            // Some tokens of `zaya` skip the experts.
            routes.filter(|&(expert, _)| expert < num_experts).collect()
        });
        // Some families give experts another input than the block's.
        let x = if file.contains("experts_x") { read("experts_x") } else { read("x") };
        let layer = checkpoint.config().moe_layers()[0];
        let request = Request { layer, x, routes: routes.collect() };
        Self { request, expected: read("routed_out") }
    }

    /// The same layer with rows of `to` values instead of `from`: zeros follow.
    pub fn padded(mut self, from: usize, to: usize) -> Self {
        for rows in [&mut self.request.x, &mut self.expected] {
            let row = |row: &[f32]| row.iter().copied().chain(vec![0.0; to - from]).collect();
            *rows =
                rows.chunks_exact(from).flat_map(|values| -> Vec<f32> { row(values) }).collect();
        }
        self
    }
}

/// The distance of `found` from `expected`, relative to the length of `expected`. NaN if any value is.
pub fn difference(found: &[f32], expected: impl IntoIterator<Item = f64>) -> f64 {
    let (mut apart, mut length, mut num) = (0.0, 0.0, 0);
    for (found, expected) in found.iter().zip(expected) {
        apart += (f64::from(*found) - expected).powi(2);
        length += expected.powi(2);
        num += 1;
    }
    assert_eq!(num, found.len(), "rows of another size");
    (apart / length).sqrt()
}

/// The folders of `data/kind` that hold a checkpoint and a reference, sorted.
pub fn recorded_folders(kind: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(data(kind)).expect("reference data");
    let dirs = entries.map(|entry| entry.expect("an entry").path());
    let mut dirs: Vec<PathBuf> =
        dirs.filter(|dir| dir.join("reference.safetensors").is_file()).collect();
    dirs.sort();
    dirs
}

/// Last part of a folder's path.
pub fn name_of(dir: &Path) -> String {
    dir.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}
