//! Routing allocates nothing once its workspace is warm. One test per binary: it owns the
//! allocator.

use switchyard_attention_client::router::{
    GroupScore, Groups, Normalisation, Router, RouterConfig, RouterWorkspace, Scoring,
};
use test_support::allocations::{CountingAllocator, THREAD_ALLOCATIONS};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

#[test]
fn routing_allocates_nothing_when_warm() {
    let bias = (0..256).map(|e| e as f32 * 1e-3).collect();
    let groups = Groups { num_groups: 8, topk_groups: 4, score: GroupScore::TopTwoSum };
    let plain = RouterConfig::softmax(256, 8, true);
    let routers = [
        Router::new(plain, Vec::new()).unwrap(),
        Router::new(RouterConfig { softcap: Some(30.0), ..plain }, Vec::new()).unwrap(),
        Router::new(
            RouterConfig {
                scoring: Scoring::Sigmoid,
                has_bias: true,
                groups: Some(groups),
                normalisation: Normalisation::Sum { epsilon: 1e-20, minimum: 0.0 },
                ..plain
            },
            bias,
        )
        .unwrap(),
    ];
    let logits: Vec<f32> = (0..64 * 256).map(|i| (i as f32 * 0.7).sin()).collect();
    let (mut idx, mut weights) = (vec![-1; 64 * 8], vec![0.0; 64 * 8]);
    for router in &routers {
        let mut workspace = RouterWorkspace::default();
        let before = THREAD_ALLOCATIONS.get();
        router.route(&logits[..256], &mut workspace, &mut idx[..8], &mut weights[..8]).unwrap();
        assert!(THREAD_ALLOCATIONS.get() > before, "the counter counts");
        let before = THREAD_ALLOCATIONS.get();
        router.route(&logits, &mut workspace, &mut idx, &mut weights).unwrap();
        assert_eq!(THREAD_ALLOCATIONS.get(), before);
    }
}
