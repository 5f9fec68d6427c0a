//! More requests than a group may have, and more bytes than a block: refused by name, with nothing posted.
//! The device functions themselves, on this machine's processor (`limits/limits.cpp`).

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

const COMPILER: &str = "c++";

fn compile(out: &Path, options: &[&str]) -> Output {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..");
    Command::new(COMPILER)
        .args(["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror"])
        .args(["-Wno-unknown-pragmas", "-pthread"])
        .args(options)
        .arg("-I")
        .arg(root.join("kernels/host/shim"))
        .arg("-I")
        .arg(root.join("kernels/include"))
        .arg(root.join("transports/ibgda/tests/it/limits/limits.cpp"))
        .arg("-o")
        .arg(out)
        .output()
        .unwrap()
}

fn has_compiler() -> bool {
    let has = Command::new(COMPILER).arg("--version").output().is_ok_and(|o| o.status.success());
    if !has {
        test_support::skip("cxx", "no C++ compiler");
    }
    has
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn what_is_longer_than_a_queue_or_a_block_takes_is_refused() {
    if !has_compiler() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    // Warps of one thread each, and of fibres.
    for (name, options) in [("threads", &[] as &[&str]), ("fibres", &["-include", "simt.hpp"])] {
        let program = dir.path().join(name);
        let built = compile(&program, options);
        assert!(built.status.success(), "{}", text(&built.stderr));
        let ran = Command::new(&program).output().unwrap();
        assert!(ran.status.success(), "{name}: {}{}", text(&ran.stdout), text(&ran.stderr));
    }
}

#[test]
fn an_array_that_is_longer_than_a_block_takes_is_not_compiled() {
    if !has_compiler() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let built = compile(&dir.path().join("program"), &["-DSY_TOO_LONG"]);
    let error = text(&built.stderr);
    assert!(!built.status.success() && error.contains("more bytes than fit a block"), "{error}");
}
