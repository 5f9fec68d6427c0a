//! Tests of the store alone, on a GPU in software.

use std::time::Instant;

use kernels::gpu::DeviceName;
use p2p_core::SlotConfig;

use super::*;
use crate::config::Limits;
use crate::device::DeviceOptions;

fn empty() -> DeviceStore {
    let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/../data/tiny-moe");
    let checkpoint = Arc::new(Checkpoint::open(dir).expect("the trained checkpoint"));
    let options = DeviceOptions::new(DeviceName::Emulated(0));
    let slot = SlotConfig { slot_bytes: 64 << 10, num_frames: 2 };
    let plan = DevicePlan::new(&options, slot, &Limits::default(), checkpoint.config());
    let gpu = Gpu::open_emulated(0).expect("a GPU in software");
    let plan = plan.expect("a plan");
    DeviceStore::load(&gpu, plan, checkpoint, &BTreeMap::new(), &mut |_| {})
        .expect("an empty store")
}

#[test]
fn a_store_that_begins_empty_takes_the_type_of_the_model() {
    let store = empty();
    assert_eq!(store.weights_dtype(), DTYPE_BF16);
    let bytes = store.load_one(0, 3).expect("loaded");
    assert_eq!((bytes, store.loaded_bytes()), (store.shape.expert_bytes(), bytes));
    assert!(store.has(0, 3) && !store.has(0, 2));
}

#[test]
fn an_expert_is_held_from_when_it_is_in_service() {
    let store = empty();
    store.on_change(Box::new(|| {}));
    std::thread::scope(|scope| {
        let loading = scope.spawn(|| store.load_one(0, 1).expect("loaded"));
        let limit = Instant::now() + Duration::from_secs(30);
        while store.tables().version < 2 {
            assert!(Instant::now() < limit, "the expert is not loaded");
            std::thread::sleep(Duration::from_millis(1));
        }
        // The data thread still uses the old tables.
        assert!(!store.has(0, 1) && store.loaded().is_empty() && store.loaded_bytes() == 0);
        store.set_in_service(&store.tables());
        assert_eq!(loading.join().expect("it ends"), store.shape.expert_bytes());
    });
    assert!(store.has(0, 1));
    assert_eq!(store.load_one(0, 1).expect("held"), 0);
}
