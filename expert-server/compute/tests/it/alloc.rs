//! A batch of a size seen before allocates nothing on any thread. The count is the process's, so the test
//! runs alone.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use rand::SeedableRng;
use rand::rngs::StdRng;
use switchyard_expert_compute::{
    ComputePool, ExpertGroup, ExpertWeights, LayerBatch, LayerExperts,
};
use test_support::allocations::PROCESS_ALLOCATIONS;
use test_support::own_process::is_alone;

use crate::formats::{FORMATS, random_weight};

#[test]
fn the_second_batch_allocates_nothing() {
    if !is_alone("alloc::the_second_batch_allocates_nothing") {
        return;
    }
    const HIDDEN: usize = 96;
    const INTER: usize = 64;
    let mut rng = StdRng::seed_from_u64(7);
    let mut experts = LayerExperts::new(HIDDEN, INTER).unwrap();
    // As many experts as formats, so that no kernel has a first use later.
    for (expert, format) in (0..).zip(FORMATS) {
        let mut matrix = |rows, cols| random_weight(&mut rng, rows, cols, format).0;
        let (gate, up) = (Some(matrix(INTER, HIDDEN)), matrix(INTER, HIDDEN));
        let weights = ExpertWeights { gate, up, down: matrix(HIDDEN, INTER), biases: None };
        experts.insert(expert, Arc::new(weights)).unwrap();
    }
    let num_experts = FORMATS.len() as u32;
    let x = vec![0.5; 20 * HIDDEN];
    let entry_token: Vec<u32> = (0..num_experts).flat_map(|_| 0..20).collect();
    let entry_weight = vec![0.25; entry_token.len()];
    let groups: Vec<ExpertGroup> = (0..num_experts)
        .map(|expert| ExpertGroup { expert, begin: expert * 20, end: expert * 20 + 20 })
        .collect();
    let full = LayerBatch {
        x: &x,
        groups: &groups,
        entry_token: &entry_token,
        entry_weight: &entry_weight,
    };
    let small = LayerBatch { groups: &groups[1..3], ..full };
    let mut out = vec![0.0; x.len()];
    let mut pool = ComputePool::new(3, None).unwrap();
    for _ in 0..3 {
        pool.run(&experts, &full, &mut out, &mut || {}).unwrap();
    }
    let before = PROCESS_ALLOCATIONS.load(Ordering::Relaxed);
    assert_ne!(before, 0, "the allocator counts nothing");
    for _ in 0..100 {
        pool.run(&experts, &full, &mut out, &mut || {}).unwrap();
        pool.run(&experts, &small, &mut out, &mut || {}).unwrap();
    }
    assert_eq!(PROCESS_ALLOCATIONS.load(Ordering::Relaxed) - before, 0);
}
