//! Experts loaded from checkpoints: computed blocks against those of transformers, and live
//! changes.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use checkpoint::{Checkpoint, TensorError, TensorFile};
use switchyard_expert_compute::{
    ComputePool, ExpertGroup, ExpertStore, LayerBatch, LoadError, LoadProgress, Residency,
};

#[test]
fn loaded_blocks_agree_with_transformers() {
    let mut pool = ComputePool::new(2, None).unwrap();
    for name in
        ["mixtral", "qwen3-moe-plain-topk", "deepseek-v2-grouped", "deepseek-v3", "deepseek-v3-fp8"]
    {
        let dir = block_dir(name);
        let reference = TensorFile::open(dir.join("reference.safetensors")).unwrap();
        let read = |name: &str| reference.tensor(name).unwrap().to_f32().unwrap();
        let (x, weights, expected) = (read("x"), read("topk_weights"), read("routed_out"));
        let idx = reference.tensor("topk_idx").unwrap().to_i32().unwrap();
        for residency in [Residency::Mapped, Residency::Copied] {
            let (store, _) = load(&dir, residency);
            let experts = store.layer(0).unwrap();
            let top_k = store.checkpoint().config().top_k;
            let mut entries: Vec<(i32, usize, f32)> = idx
                .iter()
                .zip(&weights)
                .enumerate()
                .map(|(i, (&e, &w))| (e, i / top_k, w))
                .collect();
            entries.sort_by_key(|&(expert, token, _)| (expert, token));
            let entry_token: Vec<u32> = entries.iter().map(|e| e.1 as u32).collect();
            let entry_weight: Vec<f32> = entries.iter().map(|e| e.2).collect();
            let groups: Vec<ExpertGroup> = (0i32..)
                .take(experts.len())
                .map(|expert| ExpertGroup {
                    expert: expert as u32,
                    begin: entries.partition_point(|e| e.0 < expert) as u32,
                    end: entries.partition_point(|e| e.0 <= expert) as u32,
                })
                .collect();
            let batch = LayerBatch {
                x: &x,
                groups: &groups,
                entry_token: &entry_token,
                entry_weight: &entry_weight,
            };
            let mut out = vec![f32::NAN; x.len()];
            pool.run(&experts, &batch, &mut out, &mut || {}).unwrap();
            let largest = expected.iter().fold(0.0f32, |max, value| max.max(value.abs()));
            for (found, expected) in out.iter().zip(&expected) {
                let error = (found - expected).abs() / largest;
                assert!(error < 1e-5, "{name}, {residency:?}: {found}, expected {expected}");
            }
        }
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
            ExpertStore::load(Arc::clone(&checkpoint), &wanted, residency, &mut |progress| {
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
        assert_eq!(expert.up.data(), stored.up.tensor.data);
        assert_eq!(expert.down.scales(), stored.down.scales.unwrap().to_f32());

        let error = store.add(0, 12).unwrap_err();
        let source = TensorError::NoSuchExpert { expert: 12, num_experts: 12 };
        let expected = LoadError::Tensor { layer: 0, expert: 12, source }.to_string();
        assert_eq!(error.to_string(), expected);
        assert!(matches!(store.add(8, 0), Err(LoadError::Tensor { layer: 8, expert: 0, .. })));
        assert!(store.layer(8).is_none());
    }
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

fn block_dir(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data/reference-blocks").join(name)
}

/// All experts of layer 0, and the tokens of the reference.
fn load(dir: &Path, residency: Residency) -> (ExpertStore, Vec<f32>) {
    let checkpoint = Arc::new(Checkpoint::open(dir).unwrap());
    let experts = BTreeMap::from([(0, (0..checkpoint.config().num_experts).collect())]);
    let store = ExpertStore::load(checkpoint, &experts, residency, &mut |_| {}).unwrap();
    let reference = TensorFile::open(dir.join("reference.safetensors")).unwrap();
    (store, reference.tensor("x").unwrap().to_f32().unwrap())
}
