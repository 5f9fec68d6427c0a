//! Tests of the store alone, on a GPU in software.

use std::time::Instant;

use checkpoint::WeightFormat;
use kernels::gpu::DeviceName;
use p2p_core::SlotConfig;

use super::*;
use crate::config::Limits;
use crate::device::DeviceOptions;
use crate::experts::{CopyError, DevicePlace};

fn empty() -> DeviceStore {
    empty_on(0)
}

fn empty_on(gpu: u32) -> DeviceStore {
    let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/../data/tiny-moe");
    let checkpoint = Arc::new(Checkpoint::open(dir).expect("the trained checkpoint"));
    let options = DeviceOptions::new(DeviceName::Emulated(gpu));
    let slot = SlotConfig { slot_bytes: 64 << 10, num_frames: 2 };
    let plan = DevicePlan::new(&options, slot, &Limits::default(), checkpoint.config());
    let gpu = Gpu::open_emulated(gpu).expect("a GPU in software");
    let plan = plan.expect("a plan");
    DeviceStore::load(&gpu, plan, checkpoint, &BTreeMap::new(), &BTreeMap::new(), &mut |_| {})
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
        // A version before has a larger block, and not yet the expert.
        while store.tables().find(0, 1).is_none() {
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

/// Asserts that the GPU has an expert's weights, bit by bit.
fn check_weights(store: &DeviceStore, layer: u32, expert: u32) {
    let held = store.copy_to_host(layer, expert).expect("copied");
    let stored = store.checkpoint.expert(layer, expert).expect("in the files");
    let [gate, up, down] = shape::gated(stored).expect("gated");
    for (held, stored) in
        [(held.gate.as_ref(), gate), (Some(&held.up), up), (Some(&held.down), down)]
    {
        assert_eq!(held.expect("a matrix").codes(), &*stored.codes(), "layer {layer} {expert}");
    }
}

#[test]
fn an_expert_that_arrives_while_its_layer_moves_keeps_its_weights() {
    let store = empty();
    let mut early = store.reserve(0, 1).expect("a place").expect("not loaded");
    let (uploader, memory, local_idx) = early.parts();
    put(uploader, &store.checkpoint, memory, local_idx, (0, 1)).expect("copied");
    assert!(store.reserve(0, 1).is_err(), "it is being loaded");
    // A place that is given back is the next one's.
    drop(store.reserve(0, 2).expect("a place"));
    for expert in 2..6 {
        store.load_one(0, expert).expect("loaded");
    }
    assert!(!store.has(0, 1));
    early.publish().expect("published");
    for expert in 1..6 {
        check_weights(&store, 0, expert);
    }
    assert_eq!(store.loaded()[&0], [1, 2, 3, 4, 5]);
    let places = &store.tables().layers[0].places;
    assert_eq!(places.len(), 5, "{places:?}");
}

#[test]
fn copies_to_the_host_keep_few_page_locked_buffers() {
    let store = empty();
    for _ in 0..5 {
        store.keep_some(Uploader::new(&store.gpu).expect("streams"));
    }
    assert_eq!(lock(&store.uploaders).len(), 2);
}

#[test]
fn an_abandoned_landing_gives_its_place_back_and_keeps_its_buffers() {
    let store = empty();
    let form = MatrixForm { format: WeightFormat::Bf16, scales: None };
    let open = || match store.landing(0, 1, &[form; 3]).expect("room") {
        Room::Pieces(landing) => landing,
        Room::Whole | Room::Loaded => panic!("the GPU takes this form in pieces"),
    };
    let mut landing = open();
    let first = landing.buffers().expect("buffers");
    landing.abandon();
    let again = open().buffers().expect("buffers");
    assert!(first.iter().all(|old| !again.contains(old)), "{first:?} {again:?}");
    store.load_one(0, 1).expect("the place is free");
    check_weights(&store, 0, 1);
    assert_eq!(store.place(0, 1).expect("loaded").0.local_idx, 0);
    // A loaded expert needs no room, and its arrival is no error.
    assert!(matches!(store.landing(0, 1, &[form; 3]), Ok(Room::Loaded)));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_copy_from_another_gpu_is_served_only_with_the_right_checksum() {
    let (source, reader) = (Arc::new(empty_on(0)), Arc::new(empty_on(1)));
    source.load_one(0, 3).expect("loaded");
    source.load_one(0, 1).expect("loaded");
    assert_eq!(source.form(), reader.form());
    let (text, serving) = Arc::clone(&source).share().expect("a socket");
    tokio::spawn(serving);
    let copying = tokio::task::spawn_blocking(move || {
        let (place, _memory) = source.place(0, 1).expect("loaded");
        let sum = source.checksum(0, 1).expect("a checksum");
        let memory = Arc::clone(&reader).reach(&text).expect("reached");
        let soon = Instant::now() + Duration::from_secs(60);
        let damaged = memory.take(0, 1, &place, [sum[0], sum[1] ^ 1], soon);
        assert!(matches!(damaged, Err(CopyError::Damaged { .. })), "{damaged:?}");
        for wrong in [
            DevicePlace { block: place.block + 1000, ..place },
            DevicePlace { local_idx: place.capacity, ..place },
            DevicePlace { capacity: u32::MAX, ..place },
            // In a block that is mapped already, a place behind its end.
            DevicePlace { capacity: place.capacity + 100, local_idx: place.capacity + 99, ..place },
        ] {
            let refused = memory.take(0, 1, &wrong, sum, soon);
            let fresh = Arc::clone(&reader).reach(&text).expect("reached");
            let again = fresh.take(0, 1, &wrong, sum, soon);
            for refused in [refused, again] {
                assert!(
                    matches!(refused, Err(CopyError::Unreachable(_))),
                    "{wrong:?}: {refused:?}"
                );
            }
        }
        assert!(reader.loaded().is_empty());
        // The next expert's place is not taken by what failed.
        let late = memory.take(0, 1, &place, sum, Instant::now());
        assert!(matches!(late, Err(CopyError::Unreachable(_))), "{late:?}");
        assert!(reader.loaded().is_empty());
        let copied = memory.take(0, 1, &place, sum, soon).expect("copied");
        assert_eq!(copied, reader.shape.expert_bytes());
        check_weights(&reader, 0, 1);
        assert_eq!(reader.checksum(0, 1).expect("a checksum"), sum);
        assert_eq!(reader.place(0, 1).expect("loaded").0.local_idx, 0);
        let malformed = Arc::clone(&reader).reach("no share");
        assert!(malformed.is_err());
    });
    copying.await.expect("it ends");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_block_that_could_not_be_mapped_keeps_no_later_reader_waiting() {
    let (source, reader) = (Arc::new(empty_on(0)), Arc::new(empty_on(1)));
    source.load_one(0, 1).expect("loaded");
    let (text, serving) = Arc::clone(&source).share().expect("a socket");
    let copying = tokio::task::spawn_blocking(move || {
        let (place, _memory) = source.place(0, 1).expect("loaded");
        let sum = source.checksum(0, 1).expect("a checksum");
        let memory = Arc::clone(&reader).reach(&text).expect("reached");
        let soon = Instant::now() + Duration::from_secs(60);
        let take = || memory.take(0, 1, &place, sum, soon);
        // The socket answers nothing.
        std::thread::scope(|scope| {
            for thread in [(); 4].map(|()| scope.spawn(take)) {
                let refused = thread.join().expect("it ends");
                assert!(matches!(refused, Err(CopyError::Unreachable(_))), "{refused:?}");
            }
        });
        // A reader that asked again would succeed.
        tokio::spawn(serving);
        let again = take();
        assert!(matches!(again, Err(CopyError::Unreachable(_))), "{again:?}");
        let fresh = Arc::clone(&reader).reach(&text).expect("reached");
        fresh.take(0, 1, &place, sum, soon).expect("copied");
    });
    copying.await.expect("it ends");
}
