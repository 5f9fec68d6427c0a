//! Libraries that are absent, invalid, or too old.

use std::ffi::c_void;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::ptr::NonNull;

use switchyard_ibgda::ffi::{MLX5_SYMBOLS, VERBS_SYMBOLS};
use switchyard_ibgda::{Libraries, LibraryError};

/// A library in `dir` with functions of these names; none is ever called.
fn library(dir: &Path, name: &str, functions: impl Iterator<Item = &'static str>) -> PathBuf {
    let (source, library) = (dir.join(format!("{name}.c")), dir.join(format!("{name}.so")));
    let functions: String =
        functions.map(|name| format!("int {name}(void) {{ return 0; }}\n")).collect();
    std::fs::write(&source, functions).unwrap();
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".to_owned());
    let mut command = Command::new(compiler);
    let status = command.args(["-shared", "-fPIC", "-o"]).arg(&library).arg(&source).status();
    assert!(status.expect("a C compiler").success());
    library
}

fn open(verbs: &Path, mlx5: &Path) -> Result<(), LibraryError> {
    Libraries::open_files(verbs.to_str().unwrap(), mlx5.to_str().unwrap()).map(drop)
}

#[test]
fn a_library_that_is_absent_is_named_with_its_package() {
    let dir = tempfile::tempdir().unwrap();
    let verbs = library(dir.path(), "verbs", VERBS_SYMBOLS.iter().copied());
    let mlx5 = library(dir.path(), "mlx5", MLX5_SYMBOLS.iter().copied());
    open(&verbs, &mlx5).expect("both are whole");

    let absent = dir.path().join("absent.so");
    for (result, package) in
        [(open(&absent, &mlx5), "libibverbs1"), (open(&verbs, &absent), "ibverbs-providers")]
    {
        let error = result.expect_err("it is not there");
        let LibraryError::Open { name, detail, package: named } = &error else {
            panic!("{error:?}")
        };
        assert_eq!((name.as_str(), *named), (absent.to_str().unwrap(), package));
        assert!(detail.contains("No such file"), "{detail}");
        assert!(error.to_string().contains(&format!("install {package}")), "{error}");
    }
}

#[test]
fn a_file_that_is_no_library_is_named_with_the_loader_s_reason() {
    let dir = tempfile::tempdir().unwrap();
    let verbs = library(dir.path(), "verbs", VERBS_SYMBOLS.iter().copied());
    let text = dir.path().join("text.so");
    std::fs::write(&text, "not a library at all, but longer than the head of one is\n".repeat(4))
        .unwrap();
    let error = open(&verbs, &text).expect_err("it is text");
    assert!(matches!(&error, LibraryError::Open { .. }), "{error:?}");
    assert!(error.to_string().contains("text.so"), "{error}");
    // For such names the loader would return this program itself, or the part before the 0.
    for no_name in ["", "a\0b"] {
        let error = Libraries::open_files(no_name, no_name).map(drop).expect_err("no such name");
        assert!(matches!(&error, LibraryError::Open { name, .. } if name == no_name), "{error:?}");
    }
}

#[test]
fn a_function_that_is_missing_is_named_with_its_library() {
    let dir = tempfile::tempdir().unwrap();
    let verbs = library(dir.path(), "verbs", VERBS_SYMBOLS.iter().copied());
    let mlx5 = library(dir.path(), "mlx5", MLX5_SYMBOLS.iter().copied());
    for missing in [VERBS_SYMBOLS[0], *VERBS_SYMBOLS.last().unwrap()] {
        let rest = VERBS_SYMBOLS.iter().copied().filter(|name| *name != missing);
        let older = library(dir.path(), missing, rest);
        check(open(&older, &mlx5), missing, &older, "libibverbs1");
    }
    for missing in [MLX5_SYMBOLS[0], *MLX5_SYMBOLS.last().unwrap()] {
        let rest = MLX5_SYMBOLS.iter().copied().filter(|name| *name != missing);
        let older = library(dir.path(), missing, rest);
        check(open(&verbs, &older), missing, &older, "ibverbs-providers");
    }
}

fn check(result: Result<(), LibraryError>, symbol: &str, library: &Path, package: &str) {
    let error = result.expect_err("a function is missing");
    let LibraryError::Symbol { name, symbol: named, package: of } = &error else {
        panic!("{error:?}")
    };
    assert_eq!((name.as_str(), *named, *of), (library.to_str().unwrap(), symbol, package));
    let text = error.to_string();
    assert!(text.contains("rdma-core 44") && text.contains(symbol), "{text}");
}

#[test]
fn every_function_is_looked_up_before_any_is_called() {
    for missing in VERBS_SYMBOLS.iter().chain(MLX5_SYMBOLS) {
        let find = |name| (name != *missing).then_some(NonNull::<c_void>::dangling());
        // SAFETY: nothing is called: one is always missing, so there is no value to call by.
        let result = unsafe { Libraries::of_functions("stand-in", find) };
        let error = result.map(drop).expect_err("a function is missing");
        let LibraryError::Symbol { symbol, .. } = &error else { panic!("{error:?}") };
        assert_eq!(symbol, missing);
    }
}
