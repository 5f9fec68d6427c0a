//! Hostile headers cost a bounded multiple of their length. One test per binary: it owns the allocator.

use std::alloc::{GlobalAlloc, Layout, System};
use std::fmt::Write;
use std::sync::atomic::{AtomicUsize, Ordering};

use switchyard_checkpoint::TensorFile;

/// The system's allocator, with the bytes in use and their highest number.
struct Measured;

static IN_USE: AtomicUsize = AtomicUsize::new(0);
static HIGHEST: AtomicUsize = AtomicUsize::new(0);

fn add(bytes: usize) {
    let in_use = IN_USE.fetch_add(bytes, Ordering::Relaxed) + bytes;
    HIGHEST.fetch_max(in_use, Ordering::Relaxed);
}

// SAFETY: every call is passed on to the system's allocator unchanged. Counting touches atomics alone.
unsafe impl GlobalAlloc for Measured {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        add(layout.size());
        // SAFETY: the caller's promises are the callee's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        IN_USE.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promises are the callee's.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Measured = Measured;

const HEADER_BYTES: usize = 8 << 20;

#[test]
fn opening_a_hostile_file_takes_little_more_than_its_header() {
    let repeated = |text: &str| text.repeat(HEADER_BYTES / text.len());
    let list = format!("[{}0]", repeated("0,"));
    let entry = |dtype: &str, shape: &str, offsets: &str| {
        format!(r#"{{"w": {{"dtype": "{dtype}", "shape": {shape}, "data_offsets": {offsets}}}}}"#)
    };
    let mut texts = String::new();
    while texts.len() < HEADER_BYTES {
        write!(texts, r#""{}":"w","#, texts.len()).unwrap();
    }
    let mut tensors = String::new();
    while tensors.len() < HEADER_BYTES {
        let at = tensors.len();
        let name = format!("model.layers.{}.mlp.experts.{at}.down_proj.weight", at % 61);
        write!(tensors, r#""{name}":{{"dtype":"BF16","shape":[0,2048],"data_offsets":[0,0]}},"#)
            .unwrap();
    }
    tensors.pop();
    let headers = [
        ("a long shape", entry("F32", &list, "[0,4]"), Some("at most 8 dimensions")),
        ("long offsets", entry("F32", "[1]", &list), Some("trailing characters")),
        ("a long dtype", entry(&repeated("F"), "[1]", "[0,4]"), Some("unknown dtype 'FFF")),
        ("a long name", format!(r#"{{"{}": 1}}"#, repeated("n")), Some("at most 4096 are allowed")),
        ("metadata that is a list", format!(r#"{{"__metadata__": {list}}}"#), Some("of texts")),
        (
            "metadata of lists",
            format!(r#"{{"__metadata__": {{"a": {list}, "b": {{"c": 1}}, "d": null}}}}"#),
            None,
        ),
        ("many texts", format!(r#"{{"__metadata__": {{{texts} "last": "w"}}}}"#), None),
        ("deep lists", format!(r#"{{"w": {}}}"#, repeated("[")), Some("expected value")),
        (
            "an unknown key",
            format!(
                r#"{{"w": {{"dtype": "U8", "shape": [0], "data_offsets": [0, 0], "x": {list}}}}}"#
            ),
            None,
        ),
        ("many tensors", format!("{{{tensors}}}"), None),
    ];
    let dir = tempfile::tempdir().unwrap();
    for (what, header, refused) in headers {
        let path = dir.path().join("model.safetensors");
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.as_bytes());
        std::fs::write(&path, bytes).unwrap();
        let before = IN_USE.load(Ordering::Relaxed);
        HIGHEST.store(before, Ordering::Relaxed);
        let opened = TensorFile::open(&path);
        let highest = HIGHEST.load(Ordering::Relaxed) - before;
        let share = highest as f64 / header.len() as f64;
        println!("{what}: {share:.2} of the header");
        match refused {
            None => drop(opened.unwrap_or_else(|error| panic!("{what}: {error}"))),
            Some(reason) => {
                let error = opened.unwrap_err().to_string();
                assert!(error.len() < 1000 && error.contains(reason), "{what}: {error:.400}");
            }
        }
        // Entries of tensors that could exist stay in memory, with the names that the handler of SIGBUS writes.
        let most = if what == "many tensors" { 3.0 } else { 2.0 };
        assert!(share <= most, "{what}: {share:.2} of the header");
    }
}
