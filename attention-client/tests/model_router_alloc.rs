//! Routing allocates nothing once its workspace is warm. One test per binary: it owns the
//! allocator.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use attention_client::{Router, RouterWorkspace};

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

/// Counts the allocations of each thread.
struct Counting;

// SAFETY: every call goes to the system allocator unchanged; the counter is a plain cell in
// thread-local storage without a destructor, which itself never allocates.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller keeps the contract of `dealloc`; `ptr` came from `System`.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

#[test]
fn routing_allocates_nothing_when_warm() {
    let bias = (0..256).map(|e| e as f32 * 1e-3).collect();
    let routers = [
        Router::softmax(256, 8, true).unwrap(),
        Router::deepseek_v2(256, 8, Some((8, 3)), 16.0).unwrap(),
        Router::deepseek_v3(256, 8, (8, 4), true, 2.5, bias).unwrap(),
    ];
    let logits: Vec<f32> = (0..64 * 256).map(|i| (i as f32 * 0.7).sin()).collect();
    let (mut idx, mut weights) = (vec![-1; 64 * 8], vec![0.0; 64 * 8]);
    for router in &routers {
        let mut workspace = RouterWorkspace::default();
        let before = ALLOCATIONS.get();
        router.route(&logits[..256], &mut workspace, &mut idx[..8], &mut weights[..8]).unwrap();
        assert!(ALLOCATIONS.get() > before, "the counter counts");
        let before = ALLOCATIONS.get();
        router.route(&logits, &mut workspace, &mut idx, &mut weights).unwrap();
        assert_eq!(ALLOCATIONS.get(), before);
    }
}
