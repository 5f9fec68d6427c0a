//! Experts loaded from checkpoints: computed blocks against those of transformers, and live
//! changes.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use checkpoint::{
    Checkpoint, DType, MakeOptions, Preset, TensorError, TensorFile, UNREADABLE_FILE_EXIT_CODE,
    make_checkpoint,
};
use switchyard_expert_compute::{
    ComputePool, ExpertGroup, ExpertStore, Isa, LayerBatch, LoadError, LoadProgress, Residency,
};

#[test]
fn loaded_blocks_agree_with_transformers() {
    let mut pool = ComputePool::new(2, None).unwrap();
    let dirs = folders("reference-blocks");
    assert!(dirs.len() >= 5, "{dirs:?}");
    for dir in dirs {
        for residency in [Residency::Mapped, Residency::Copied] {
            let (store, _) = load(&dir, residency);
            let block = Block::open(&dir, store.checkpoint());
            let out = block.run(&mut pool, &store);
            let context = format!("{}, {residency:?}", dir.display());
            assert_close(&out, block.expected.iter().copied(), 1e-5, &context);
        }
    }
}

#[test]
fn loaded_experts_of_every_family_agree_with_transformers() {
    let mut pools: Vec<ComputePool> = Isa::ALL
        .into_iter()
        .filter(|isa| isa.is_available())
        .map(|isa| ComputePool::with_isa(2, None, isa).unwrap())
        .collect();
    let dirs = folders("family-blocks");
    assert!(dirs.len() > 50, "{dirs:?}");
    for dir in dirs {
        let name = dir.file_name().unwrap().to_string_lossy().into_owned();
        for residency in [Residency::Mapped, Residency::Copied] {
            let (store, _) = load(&dir, residency);
            let block = Block::open(&dir, store.checkpoint());
            for pool in &mut pools {
                let out = block.run(pool, &store);
                let context = format!("{name}, {residency:?}, {:?}", pool.isa());
                assert_close(&out, block.expected.iter().copied(), 1e-5, &context);
            }
        }
    }
}

/// The bytes that each library wrote, against the library's own weights and results.
#[test]
fn loaded_formats_agree_with_their_libraries() {
    let mut pool = ComputePool::new(2, None).unwrap();
    for dir in folders("reference-formats") {
        let name = dir.file_name().unwrap().to_string_lossy().into_owned();
        let checkpoint = Checkpoint::open(&dir).unwrap();
        check_dequantised(&dir, &checkpoint, &name);
        for residency in [Residency::Mapped, Residency::Copied] {
            let (store, _) = load(&dir, residency);
            let block = Block::open(&dir, store.checkpoint());
            let out = block.run(&mut pool, &store);
            let context = format!("{name}, {residency:?}");
            // The library rounds its weights to 16 bits.
            assert_close(&out, block.expected.iter().copied(), 3e-2, &context);
            assert_close(&out, block.in_f64(store.checkpoint()).into_iter(), 1e-5, &context);
        }
    }
}

/// Compares expert 0 with the library's dequantised weights, in the library's type.
fn check_dequantised(dir: &Path, checkpoint: &Checkpoint, name: &str) {
    let reference = TensorFile::open(dir.join("reference.safetensors")).unwrap();
    let tensors = checkpoint.expert(0, 0).unwrap();
    for (view, matrix) in tensors.matrices().zip(["gate", "up", "down"]) {
        let expected = reference.tensor(&format!("dequant.{matrix}")).unwrap();
        let round = |value: f32| match expected.dtype {
            DType::Bf16 => half::bf16::from_f32(value).to_f32(),
            DType::F16 => half::f16::from_f32(value).to_f32(),
            _ => value,
        };
        let ours: Vec<f32> = view.to_f32().into_iter().map(round).collect();
        let theirs = expected.to_f32().unwrap();
        assert_eq!(ours.len(), theirs.len());
        // Zeros are equal whatever their sign.
        let differing = ours.iter().zip(&theirs).filter(|(a, b)| a != b).count();
        let first = ours.iter().zip(&theirs).find(|(a, b)| a != b);
        assert_eq!(differing, 0, "{name}: {matrix}, {} differs, first {first:?}", view.format());
    }
}

#[test]
fn loading_reports_progress_and_changes_take_effect_for_new_readers_only() {
    let dir = block_dir("deepseek-v3-fp8");
    let checkpoint = Arc::new(Checkpoint::open(&dir).unwrap());
    for residency in [Residency::Mapped, Residency::Copied] {
        let wanted = BTreeMap::from([(0, vec![7, 2, 3])]);
        let mut seen: Vec<LoadProgress> = Vec::new();
        let store =
            ExpertStore::load(Arc::clone(&checkpoint), &wanted, residency, 2, &mut |progress| {
                seen.push(progress);
            })
            .unwrap();
        assert_eq!(seen.iter().map(|p| p.num_loaded).collect::<Vec<_>>(), [1, 2, 3]);
        assert!(seen.iter().all(|p| p.num_experts == 3));
        assert_eq!(seen[2].loaded_bytes, store.size_bytes());
        assert_eq!(store.experts(), BTreeMap::from([(0, vec![2, 3, 7])]));

        let before = store.layer(0).unwrap();
        assert_eq!(store.add(0, 11).unwrap(), store.size_bytes() / 4);
        assert!(store.remove(0, 3));
        assert!(!store.remove(0, 3) && !store.remove(0, 999) && !store.remove(9, 0));
        assert_eq!(store.experts(), BTreeMap::from([(0, vec![2, 7, 11])]));
        assert_eq!(before.ids().collect::<Vec<_>>(), [2, 3, 7]);
        let expert = store.layer(0).unwrap().get(7).cloned().unwrap();
        let stored = checkpoint.expert(0, 7).unwrap();
        assert_eq!(expert.up.codes(), &*stored.up.codes());
        let (scales, expected) = (expert.down.scales().unwrap(), stored.down.scales().unwrap());
        assert_eq!(scales.data.as_slice(), &*expected.data);

        let error = store.add(0, 12).unwrap_err();
        let source = TensorError::NoSuchExpert { expert: 12, num_experts: 12 };
        let expected = LoadError::Tensor { layer: 0, expert: 12, source }.to_string();
        assert_eq!(error.to_string(), expected);
        assert!(matches!(store.add(8, 0), Err(LoadError::Tensor { layer: 8, expert: 0, .. })));
        assert!(store.layer(8).is_none());
    }
}

#[test]
fn any_number_of_threads_loads_the_same_and_names_the_same_fault() {
    let dir = block_dir("mixtral");
    let checkpoint = Arc::new(Checkpoint::open(&dir).unwrap());
    let num_experts = checkpoint.config().num_experts;
    let all = BTreeMap::from([(0, (0..num_experts).rev().collect::<Vec<_>>())]);
    let faulty = BTreeMap::from([(0, vec![1, 99, 2, 98, 3, 97]), (7, vec![0])]);
    for num_threads in [0, 1, 2, 5, 64] {
        for residency in [Residency::Mapped, Residency::Copied] {
            let mut seen = Vec::new();
            let load = |experts, progress: &mut dyn FnMut(LoadProgress)| {
                ExpertStore::load(
                    Arc::clone(&checkpoint),
                    experts,
                    residency,
                    num_threads,
                    progress,
                )
            };
            let store = load(&all, &mut |progress| seen.push(progress)).unwrap();
            let counts: Vec<usize> = seen.iter().map(|progress| progress.num_loaded).collect();
            assert_eq!(counts, (1..=num_experts as usize).collect::<Vec<_>>());
            assert!(seen.is_sorted_by(|a, b| a.loaded_bytes < b.loaded_bytes));
            assert_eq!(seen.last().unwrap().loaded_bytes, store.size_bytes());
            for expert in 0..num_experts {
                let loaded = store.layer(0).unwrap().get(expert).cloned().unwrap();
                let stored = checkpoint.expert(0, expert).unwrap();
                assert_eq!(loaded.down.codes(), &*stored.down.codes(), "expert {expert}");
            }
            for _ in 0..20 {
                let error = load(&faulty, &mut |_| {}).unwrap_err();
                let is_first = matches!(error, LoadError::Tensor { layer: 0, expert: 99, .. });
                assert!(is_first, "{num_threads} threads: {error}");
            }
        }
    }
}

/// Loads the checkpoint in `SWITCHYARD_TEST_DIR` on several threads after its file has lost its second half.
pub fn loader() {
    checkpoint::report_unreadable_files().unwrap();
    let dir = PathBuf::from(std::env::var("SWITCHYARD_TEST_DIR").unwrap());
    let checkpoint = Arc::new(Checkpoint::open(&dir).unwrap());
    let config = checkpoint.config();
    let ids: Vec<u32> = (0..config.num_experts).collect();
    let all = config.moe_layers().into_iter().map(|layer| (layer, ids.clone())).collect();
    let file = std::fs::OpenOptions::new().write(true).open(dir.join("model.safetensors")).unwrap();
    file.set_len(checkpoint.len_bytes() / 2 / 4096 * 4096).unwrap();
    drop(ExpertStore::load(checkpoint, &all, Residency::Mapped, 4, &mut |_| {}));
    unreachable!("half of the file is gone");
}

#[test]
fn every_loading_thread_reports_a_truncated_file() {
    let dir = tempfile::tempdir().unwrap();
    let options = MakeOptions::new(Preset::TinyMixtral, 2);
    make_checkpoint(dir.path(), &MakeOptions { overwrite: true, ..options }, &mut |_, _| {})
        .unwrap();
    let mut loader = test_support::child::command("loader");
    let output = loader.env("SWITCHYARD_TEST_DIR", dir.path()).output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(UNREADABLE_FILE_EXIT_CODE), "{text}");
    assert!(text.contains("model.safetensors became unreadable"), "{text}");
}

#[test]
fn batches_run_while_experts_come_and_go() {
    let (store, x) = load(&block_dir("mixtral"), Residency::Mapped);
    let store = Arc::new(store);
    let changer = {
        let store = Arc::clone(&store);
        std::thread::spawn(move || {
            for _ in 0..200 {
                assert!(store.remove(0, 5));
                store.add(0, 5).unwrap();
            }
        })
    };
    let mut pool = ComputePool::new(2, None).unwrap();
    let groups = [ExpertGroup { expert: 4, begin: 0, end: 1 }];
    let batch = LayerBatch { x: &x, groups: &groups, entry_token: &[0], entry_weight: &[1.0] };
    let mut expected = None;
    while !changer.is_finished() {
        let mut out = vec![f32::NAN; x.len()];
        pool.run(&store.layer(0).unwrap(), &batch, &mut out, &mut || {}).unwrap();
        let expected = expected.get_or_insert_with(|| out.clone());
        assert!(*expected == out);
    }
    changer.join().unwrap();
    assert_eq!(store.experts()[&0].len(), 8);
}

/// Routed tokens and the output of their experts.
struct Block {
    x: Vec<f32>,
    /// Expert, token and factor, sorted.
    entries: Vec<(u32, usize, f32)>,
    expected: Vec<f32>,
    num_experts: u32,
}

impl Block {
    fn open(dir: &Path, checkpoint: &Checkpoint) -> Self {
        let reference = TensorFile::open(dir.join("reference.safetensors")).unwrap();
        let read = |name: &str| reference.tensor(name).unwrap().to_f32().unwrap();
        let idx = reference.tensor("topk_idx").unwrap();
        let (top_k, idx) = (idx.shape[1], idx.to_i32().unwrap());
        let num_experts = checkpoint.config().num_experts;
        let mut entries: Vec<(u32, usize, f32)> = idx
            .iter()
            .zip(read("topk_weights"))
            .enumerate()
            .map(|(i, (&expert, weight))| (expert as u32, i / top_k, weight))
            // Some tokens of `zaya` skip the experts.
            .filter(|entry| entry.0 < num_experts)
            .collect();
        entries.sort_by_key(|&(expert, token, _)| (expert, token));
        // Some families give experts another input than the block's.
        let x = if reference.contains("experts_x") { read("experts_x") } else { read("x") };
        Self { x, entries, expected: read("routed_out"), num_experts }
    }

    fn run(&self, pool: &mut ComputePool, store: &ExpertStore) -> Vec<f32> {
        let entry_token: Vec<u32> = self.entries.iter().map(|e| e.1 as u32).collect();
        let entry_weight: Vec<f32> = self.entries.iter().map(|e| e.2).collect();
        let groups: Vec<ExpertGroup> = (0..self.num_experts)
            .map(|expert| ExpertGroup {
                expert,
                begin: self.entries.partition_point(|e| e.0 < expert) as u32,
                end: self.entries.partition_point(|e| e.0 <= expert) as u32,
            })
            .collect();
        let batch = LayerBatch {
            x: &self.x,
            groups: &groups,
            entry_token: &entry_token,
            entry_weight: &entry_weight,
        };
        let mut out = vec![f32::NAN; self.x.len()];
        let layer = store.checkpoint().config().moe_layers()[0];
        pool.run(&store.layer(layer).unwrap(), &batch, &mut out, &mut || {}).unwrap();
        out
    }

    /// The output over the checkpoint's dequantised weights, for experts with SwiGLU.
    fn in_f64(&self, checkpoint: &Checkpoint) -> Vec<f32> {
        let hidden = checkpoint.config().hidden;
        let mut out = vec![0.0f64; self.x.len()];
        let dot =
            |a: &[f32], b: &[f64]| -> f64 { a.iter().zip(b).map(|(a, b)| f64::from(*a) * b).sum() };
        for expert in 0..self.num_experts {
            let tensors = checkpoint.expert(0, expert).unwrap();
            let [gate, up, down] =
                [tensors.gate.as_ref().unwrap(), &tensors.up, &tensors.down].map(|w| w.to_f32());
            for &(_, token, factor) in self.entries.iter().filter(|entry| entry.0 == expert) {
                let x: Vec<f64> =
                    self.x[token * hidden..][..hidden].iter().map(|&v| v.into()).collect();
                let inner: Vec<f64> = gate
                    .chunks(hidden)
                    .zip(up.chunks(hidden))
                    .map(|(gate, up)| {
                        let gate = dot(gate, &x);
                        gate / (1.0 + (-gate).exp()) * dot(up, &x)
                    })
                    .collect();
                let rows = down.chunks(inner.len());
                for (out, row) in out[token * hidden..][..hidden].iter_mut().zip(rows) {
                    *out += f64::from(factor) * dot(row, &inner);
                }
            }
        }
        out.into_iter().map(|value| value as f32).collect()
    }
}

fn assert_close(out: &[f32], expected: impl Iterator<Item = f32> + Clone, bound: f32, what: &str) {
    let largest = expected.clone().fold(0.0f32, |max, value| max.max(value.abs()));
    for (found, expected) in out.iter().zip(expected) {
        let error = (found - expected).abs() / largest;
        assert!(error < bound, "{what}: {found}, expected {expected}, largest {largest}");
    }
}

/// The folders of reference data that hold a checkpoint.
fn folders(kind: &str) -> Vec<PathBuf> {
    let all = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data").join(kind);
    let entries = std::fs::read_dir(all).unwrap().map(|entry| entry.unwrap().path());
    let mut dirs: Vec<PathBuf> =
        entries.filter(|dir| dir.join("reference.safetensors").is_file()).collect();
    dirs.sort();
    dirs
}

fn block_dir(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data/reference-blocks").join(name)
}

/// All experts of the first layer that has any, and the tokens of the reference.
fn load(dir: &Path, residency: Residency) -> (ExpertStore, Vec<f32>) {
    let checkpoint = Arc::new(Checkpoint::open(dir).unwrap());
    let config = checkpoint.config();
    let experts = BTreeMap::from([(config.moe_layers()[0], (0..config.num_experts).collect())]);
    let store = ExpertStore::load(checkpoint, &experts, residency, 3, &mut |_| {}).unwrap();
    let reference = TensorFile::open(dir.join("reference.safetensors")).unwrap();
    (store, reference.tensor("x").unwrap().to_f32().unwrap())
}
