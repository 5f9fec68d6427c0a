//! Compiles `driver.cpp` against the device headers. Without a C++ compiler nothing is compiled, and the
//! tests say that they were skipped.

use std::path::PathBuf;

fn main() {
    println!("cargo:rustc-check-cfg=cfg(has_cxx)");
    let here = PathBuf::from(std::env::var_os("CARGO_MANIFEST_DIR").expect("set by cargo"));
    let include = here.join("../../../kernels/include");
    for input in [here.join("driver.cpp"), include.join("switchyard")] {
        println!("cargo:rerun-if-changed={}", input.display());
    }
    println!("cargo:rerun-if-env-changed=CXX");
    let compiler = std::env::var_os("CXX").unwrap_or_else(|| "c++".into());
    let has_compiler = std::process::Command::new(compiler)
        .arg("--version")
        .output()
        .is_ok_and(|output| output.status.success());
    if !has_compiler {
        println!(
            "cargo:warning=no C++ compiler: tests of the proxy's device functions will be skipped"
        );
        return;
    }
    println!("cargo:rustc-cfg=has_cxx");
    cc::Build::new()
        .cpp(true)
        // Nothing of the C++ library is used.
        .cpp_link_stdlib(None)
        .std("c++17")
        .flag("-fno-exceptions")
        .flag("-fno-rtti")
        .opt_level(2)
        .warnings_into_errors(true)
        .include(include)
        .file(here.join("driver.cpp"))
        .compile("sy_proxy_driver");
}
