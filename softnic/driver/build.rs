//! Compiles `driver.cpp` and `link.cpp` against the device headers, and one of them once more for every
//! mutant of a header; and `gpu_nic.cpp` against the NICs of GPUs.
//!
//! Without a C++ compiler nothing is compiled, and the tests say that they were skipped.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

fn main() {
    println!("cargo:rustc-check-cfg=cfg(has_cxx)");
    let here = PathBuf::from(std::env::var_os("CARGO_MANIFEST_DIR").expect("set by cargo"));
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("set by cargo"));
    let include = here.join("../../kernels/include");
    let shim = here.join("../../kernels/host/shim/simt.hpp");
    for input in ["driver.cpp", "link.cpp", "gpu_nic.cpp", "shim", "../gpu", "mutants.txt"] {
        println!("cargo:rerun-if-changed={}", here.join(input).display());
    }
    for input in [include.join("switchyard"), shim] {
        println!("cargo:rerun-if-changed={}", input.display());
    }
    println!("cargo:rerun-if-env-changed=CXX");
    let mutants = std::fs::read_to_string(here.join("mutants.txt")).expect("mutants.txt");
    let mutants: Vec<Mutant> = mutants
        .lines()
        .filter(|line| !line.starts_with('#') && !line.trim().is_empty())
        .map(Mutant::parse)
        .collect();

    let is_link = |mutant: &&Mutant| mutant.source() == Source::Link;
    let (links, calls): (Vec<&Mutant>, Vec<&Mutant>) = mutants.iter().partition(is_link);
    let mut table = String::new();
    for (list, mutants) in [("CALLS", &calls), ("LINKS", &links)] {
        writeln!(table, "pub(crate) const {list}: &[Mutant] = &[").expect("a string");
        for Mutant { name, symptom, .. } in mutants {
            writeln!(table, "    Mutant {{ name: \"{name}\", symptom: \"{symptom}\" }},")
                .expect("a string");
        }
        table.push_str("];\n");
    }
    if !has_compiler() {
        println!("cargo:warning=no C++ compiler: tests of the device functions will be skipped");
        std::fs::write(out.join("variants.rs"), table).expect("OUT_DIR");
        return;
    }
    println!("cargo:rustc-cfg=has_cxx");
    let make_mutant = |mutant: &Mutant| {
        let headers = out.join(&mutant.name);
        copy(&include.join("switchyard"), &headers.join("switchyard"));
        mutant.apply(&headers.join("switchyard/comm"));
        compile(&here, &headers, mutant.source(), &mutant.name);
    };
    let make_links = || {
        compile(&here, &include, Source::Link, "product");
        links.iter().copied().for_each(make_mutant);
    };
    let make_calls = || {
        compile(&here, &include, Source::Calls, "product");
        calls.iter().copied().for_each(make_mutant);
        compile_gpu_nic(&here, &include);
    };
    // Often nothing else of a build is left to be done beside this.
    // NOTES: by source, since an object is named after its source alone before it goes into an archive.
    if is_clippy() {
        // Nothing is linked, so nothing is compiled.
    } else if std::env::var("NUM_JOBS").is_ok_and(|num| num == "1") {
        make_links();
        make_calls();
    } else {
        std::thread::scope(|scope| {
            scope.spawn(make_links);
            make_calls();
        });
    }
    for (mutants, source) in [(&calls, Source::Calls), (&links, Source::Link)] {
        let names: Vec<&str> =
            std::iter::once("product").chain(mutants.iter().map(|m| m.name.as_str())).collect();
        table.push_str(&source.lookup(&names));
    }
    std::fs::write(out.join("variants.rs"), table).expect("OUT_DIR");
}

/// A compiled C++ file and the symbol that it exports.
#[derive(Clone, Copy, PartialEq)]
enum Source {
    /// Posting by plain threads.
    Calls,
    /// Links of fused kernels, by warps of fibres.
    Link,
}

impl Source {
    const fn file(self) -> &'static str {
        match self {
            Self::Calls => "driver.cpp",
            Self::Link => "link.cpp",
        }
    }

    /// Macro and prefix of the symbol.
    const fn symbol(self) -> (&'static str, &'static str) {
        match self {
            Self::Calls => ("SY_DRIVER", "sy_driver"),
            Self::Link => ("SY_LINK", "sy_link"),
        }
    }

    /// Of its namespaces.
    const fn space(self) -> &'static str {
        match self {
            Self::Calls => "calls",
            Self::Link => "links",
        }
    }

    /// Maps the name of a variant to the symbol that it exports.
    fn lookup(self, names: &[&str]) -> String {
        let (function, result) = match self {
            Self::Calls => ("table", "*const *const c_void"),
            Self::Link => ("link", "unsafe extern \"C\" fn(*const c_void)"),
        };
        let prefix = self.symbol().1;
        let mut text = String::from("unsafe extern \"C\" {\n");
        for name in names {
            let signature = match self {
                Self::Calls => "() -> *const *const c_void",
                Self::Link => "(job: *const c_void)",
            };
            writeln!(text, "    fn {prefix}_{name}{signature};").expect("a string");
        }
        writeln!(text, "}}\npub(crate) fn {function}(variant: &str) -> Option<{result}> {{")
            .expect("a string");
        text.push_str("    match variant {\n");
        for name in names {
            let value = match self {
                Self::Calls => {
                    format!(
                        "// SAFETY: it takes nothing.\n            unsafe {{ {prefix}_{name}() }}"
                    )
                }
                Self::Link => format!("{prefix}_{name}"),
            };
            writeln!(text, "        \"{name}\" => Some({{\n            {value}\n        }}),")
                .expect("a string");
        }
        text.push_str("        _ => None,\n    }\n}\n");
        text
    }
}

struct Mutant {
    name: String,
    header: String,
    find: String,
    replace: String,
    symptom: String,
}

impl Mutant {
    fn parse(line: &str) -> Self {
        let line = line.replace("\\|", "\u{1}");
        let parts: Vec<String> =
            line.split('|').map(|part| part.trim().replace('\u{1}', "|")).collect();
        let [name, header, find, replace, symptom] = <[String; 5]>::try_from(parts)
            .unwrap_or_else(|parts| panic!("mutants.txt: {parts:?} has not five parts"));
        assert!(!symptom.contains(['"', '\\']), "mutants.txt: {symptom} is put into a literal");
        Self { name, header, find, replace, symptom }
    }

    fn source(&self) -> Source {
        if ["ibgda_link.h", "put_get.cuh"].contains(&self.header.as_str()) {
            Source::Link
        } else {
            Source::Calls
        }
    }

    fn apply(&self, comm: &Path) {
        let path = comm.join(&self.header);
        let text = std::fs::read_to_string(&path).expect("a copied header");
        // Preprocessor lines and comments stay on lines of their own.
        let mut joined = String::new();
        for line in text.lines() {
            let trimmed = line.trim();
            if trimmed.starts_with('#') {
                writeln!(joined, "\n{trimmed}").expect("a string");
            } else if !trimmed.starts_with("//") && !trimmed.is_empty() {
                joined.push_str(trimmed.split(" //").next().unwrap_or(trimmed));
                joined.push(' ');
            }
        }
        let num_found = joined.matches(&self.find).count();
        assert!(
            num_found == 1,
            "mutants.txt: `{}` occurs {num_found} times in {}, so mutant {} cannot be made",
            self.find,
            self.header,
            self.name
        );
        std::fs::write(&path, joined.replace(&self.find, &self.replace)).expect("OUT_DIR");
    }
}

fn compile(here: &Path, include: &Path, source: Source, name: &str) {
    let shim = here.join("../../kernels/host/shim");
    let (symbol, prefix) = source.symbol();
    let mut build = cc::Build::new();
    build
        .cpp(true)
        .std("c++17")
        .flag("-fno-exceptions")
        .flag("-fno-rtti")
        .warnings(name == "product")
        .warnings_into_errors(name == "product")
        // Instructions of a GPU stand there as functions of the host.
        .include(&shim)
        .include(include)
        // Inline functions of two variants must not be taken for each other by the linker, and those for plain
        // threads not for those for fibres.
        .define("switchyard", format!("switchyard_{}_{name}", source.space()).as_str())
        .define(symbol, format!("{prefix}_{name}").as_str())
        .file(here.join(source.file()));
    match source {
        // Leaves out the C++ library: compiling it would take most of the time of building a mutant.
        Source::Calls => {
            build.cpp_link_stdlib(None).opt_level(if name == "product" { 2 } else { 1 })
        }
        Source::Link => build
            .opt_level(1)
            // Loops of GPUs.
            .flag("-Wno-unknown-pragmas")
            .flag("-include")
            .flag(shim.join("simt.hpp")),
    };
    build.compile(&format!("{prefix}_{name}"));
}

/// The NICs of GPUs for a processor, over streams and fibres of the host.
fn compile_gpu_nic(here: &Path, include: &Path) {
    cc::Build::new()
        .cpp(true)
        .std("c++17")
        .opt_level(1)
        .flag("-fno-rtti")
        .warnings_into_errors(true)
        .include(here.join("shim"))
        .include(here.join("../../kernels/host/shim"))
        .include(here.join("../gpu"))
        .include(include)
        // As for the others: its inline functions are compiled for fibres.
        .define("switchyard", "switchyard_gpu_nic")
        .define("simt", "simt_gpu_nic")
        .file(here.join("gpu_nic.cpp"))
        .compile("sy_gpu_nic");
}

/// Whether clippy runs this script: cargo names it in this variable.
fn is_clippy() -> bool {
    std::env::var("RUSTC_WORKSPACE_WRAPPER").is_ok_and(|wrapper| wrapper.ends_with("clippy-driver"))
}

fn has_compiler() -> bool {
    let compiler = std::env::var_os("CXX").unwrap_or_else(|| "c++".into());
    std::process::Command::new(compiler)
        .arg("--version")
        .output()
        .is_ok_and(|output| output.status.success())
}

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).expect("OUT_DIR");
    for entry in std::fs::read_dir(from).expect("the headers") {
        let entry = entry.expect("the headers");
        let target = to.join(entry.file_name());
        if entry.path().is_dir() {
            copy(&entry.path(), &target);
        } else {
            std::fs::write(&target, std::fs::read(entry.path()).expect("a header"))
                .expect("OUT_DIR");
        }
    }
}
