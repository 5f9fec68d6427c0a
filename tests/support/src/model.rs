//! The model that tests compute with.

use std::path::{Path, PathBuf};

/// The trained checkpoint of the repository, `data/tiny-moe`. In a virtual machine `SWITCHYARD_TEST_MODEL` is its path.
#[must_use]
pub fn tiny_moe() -> PathBuf {
    let given = std::env::var_os("SWITCHYARD_TEST_MODEL").map(PathBuf::from);
    given.unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data/tiny-moe"))
}
