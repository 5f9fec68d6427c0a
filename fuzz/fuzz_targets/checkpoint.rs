//! A folder from the internet: configuration, index and weight file are read and described without a panic, an access
//! beyond the file, or memory out of proportion.

#![no_main]

use std::fs;
use std::path::PathBuf;
use std::sync::OnceLock;

use checkpoint::{Checkpoint, Coverage, GgufSummary};
use libfuzzer_sys::fuzz_target;

/// A folder of this process in memory.
fn folder() -> &'static PathBuf {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let shm = PathBuf::from("/dev/shm");
        let root = if shm.is_dir() { shm } else { std::env::temp_dir() };
        let folder = root.join(format!("switchyard-fuzz-{}", std::process::id()));
        fs::create_dir_all(&folder).expect("a folder for the files");
        folder
    })
}

// Three files with 0xff between them: configuration, index (may be empty), weights.
fuzz_target!(|input: &[u8]| {
    let folder = folder();
    let path = |name: &str| folder.join(name);
    let mut parts = input.splitn(3, |byte| *byte == 0xff);
    let mut part = || parts.next().unwrap_or_default();
    let (config, index, weights) = (part(), part(), part());
    if config.starts_with(b"GGUF") {
        fs::write(path("model.gguf"), input).expect("room in memory");
        let _ = GgufSummary::read(path("model.gguf"));
        return;
    }
    fs::write(path("config.json"), config).expect("room in memory");
    fs::write(path("model.safetensors"), weights).expect("room in memory");
    let index_path = path("model.safetensors.index.json");
    match index.is_empty() {
        true => drop(fs::remove_file(&index_path)),
        false => fs::write(&index_path, index).expect("room in memory"),
    }
    let Ok(checkpoint) = Checkpoint::open(folder) else { return };
    let config = checkpoint.config();
    let _ = (config.router().is_ok(), config.language().is_ok());
    let layers = config.moe_layers();
    for &layer in layers.iter().take(2) {
        let _ = (checkpoint.router(layer).is_ok(), checkpoint.shared_expert(layer).is_ok());
        for expert in 0..config.num_experts.min(2) {
            let Ok(tensors) = checkpoint.expert(layer, expert) else { break };
            for matrix in tensors.matrices() {
                assert_eq!(matrix.to_f32().len(), matrix.rows() * matrix.cols());
            }
        }
    }
    if layers.len() < 64 && config.num_experts < 64 {
        let _ = checkpoint.summarise_experts();
        let _ = checkpoint.digests(Coverage::Sampled, 1, &mut |_, _| {});
    }
});
