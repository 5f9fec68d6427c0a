//! Compiles `driver.cpp` against the device headers, and `produce.cpp` with fibres as warps. Without a C++
//! compiler nothing is compiled, and the tests report that they were skipped.

use std::path::PathBuf;

fn main() {
    println!("cargo:rustc-check-cfg=cfg(has_cxx)");
    let here = PathBuf::from(std::env::var_os("CARGO_MANIFEST_DIR").expect("set by cargo"));
    let include = here.join("../../../kernels/include");
    let shim = here.join("../../../kernels/host/shim");
    let sources = ["driver.cpp", "produce.cpp"].map(|name| here.join(name));
    for input in sources.iter().chain([&include.join("switchyard"), &shim]) {
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
    // Clippy links nothing, so nothing is compiled. Cargo names it in this variable.
    let wrapper = std::env::var("RUSTC_WORKSPACE_WRAPPER");
    if wrapper.is_ok_and(|wrapper| wrapper.ends_with("clippy-driver")) {
        return;
    }
    cc::Build::new()
        .cpp(true)
        // Nothing of the C++ library is used.
        .cpp_link_stdlib(None)
        .std("c++17")
        .flag("-fno-exceptions")
        .flag("-fno-rtti")
        .opt_level(2)
        .warnings_into_errors(true)
        .include(&include)
        .file(&sources[0])
        .compile("sy_proxy_driver");
    cc::Build::new()
        .cpp(true)
        .std("c++17")
        .flag("-fno-rtti")
        .opt_level(1)
        .warnings_into_errors(true)
        // Loops of GPUs.
        .flag("-Wno-unknown-pragmas")
        .include(&shim)
        .include(&include)
        .flag("-include")
        .flag(shim.join("simt.hpp"))
        // Inline functions for fibres must not be taken for those of others by the linker.
        .define("switchyard", "switchyard_proxy_produce")
        .define("simt", "simt_proxy_produce")
        .file(&sources[1])
        .compile("sy_proxy_produce");
}
