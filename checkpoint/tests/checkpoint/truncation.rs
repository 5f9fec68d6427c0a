//! A weight file that becomes shorter while it is mapped.

use std::fs::OpenOptions;
use std::path::Path;

use switchyard_checkpoint::{
    Checkpoint, Preset, UNREADABLE_FILE_EXIT_CODE, report_unreadable_files,
};

use crate::support::tiny;

/// Opens the checkpoint in `SWITCHYARD_TEST_DIR`, truncates its file, and reads every expert.
pub fn reader() {
    report_unreadable_files().unwrap();
    let dir = std::env::var("SWITCHYARD_TEST_DIR").unwrap();
    let checkpoint = Checkpoint::open(&dir).unwrap();
    let file = Path::new(&dir).join("model.safetensors");
    let file = OpenOptions::new().write(true).open(file).unwrap();
    // The header stays, and the first experts.
    file.set_len(checkpoint.len_bytes() / 2 / 4096 * 4096).unwrap();
    for layer in checkpoint.config().moe_layers() {
        for expert in 0..checkpoint.config().num_experts {
            let sum: f32 = checkpoint.expert(layer, expert).unwrap().up.to_f32().iter().sum();
            println!("{sum}");
        }
    }
    unreachable!("half of the file is gone");
}

#[test]
fn a_process_that_reads_a_truncated_file_names_file_and_tensor_and_has_an_exit_code_of_its_own() {
    let (dir, checkpoint) = tiny(Preset::TinyMixtral, 2);
    drop(checkpoint);
    let output = test_support::child::command("reader")
        .env("SWITCHYARD_TEST_DIR", dir.path())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(UNREADABLE_FILE_EXIT_CODE), "{text}");
    assert!(text.contains("model.safetensors became unreadable"), "{text}");
    assert!(text.contains("in tensor 'model.layers."), "{text}");
}
