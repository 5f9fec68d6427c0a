//! Compiles `driver.cpp` against the device headers, and once more for every mutant of them.
//!
//! Without a C++ compiler nothing is compiled, and the tests say that they were skipped.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

fn main() {
    println!("cargo:rustc-check-cfg=cfg(has_cxx)");
    let here = PathBuf::from(std::env::var_os("CARGO_MANIFEST_DIR").expect("set by cargo"));
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("set by cargo"));
    let include = here.join("../../../kernels/include");
    for input in [here.join("driver.cpp"), here.join("mutants.txt"), include.join("switchyard")] {
        println!("cargo:rerun-if-changed={}", input.display());
    }
    println!("cargo:rerun-if-env-changed=CXX");
    let mutants = std::fs::read_to_string(here.join("mutants.txt")).expect("mutants.txt");
    let mutants: Vec<Mutant> = mutants
        .lines()
        .filter(|line| !line.starts_with('#') && !line.trim().is_empty())
        .map(Mutant::parse)
        .collect();

    let mut table = String::from("pub(crate) const NAMES: &[&str] = &[\n    \"product\",\n");
    for mutant in &mutants {
        writeln!(table, "    \"{}\",", mutant.name).expect("a string");
    }
    table.push_str("];\n");
    if !has_compiler() {
        println!("cargo:warning=no C++ compiler: tests of the device functions will be skipped");
        std::fs::write(out.join("variants.rs"), table).expect("OUT_DIR");
        return;
    }
    println!("cargo:rustc-cfg=has_cxx");
    compile(&here, &include, "product");
    for mutant in &mutants {
        let headers = out.join(&mutant.name);
        copy(&include.join("switchyard"), &headers.join("switchyard"));
        mutant.apply(&headers.join("switchyard/comm"));
        compile(&here, &headers, &mutant.name);
    }
    let names = || std::iter::once("product").chain(mutants.iter().map(|m| m.name.as_str()));
    table.push_str("unsafe extern \"C\" {\n");
    for name in names() {
        writeln!(table, "    fn sy_driver_{name}() -> *const *const c_void;").expect("a string");
    }
    table.push_str("}\npub(crate) fn table(variant: &str) -> Option<*const *const c_void> {\n");
    table.push_str(
        "    // SAFETY: the functions take nothing and return constants.\n    unsafe {\n",
    );
    table.push_str("        match variant {\n");
    for name in names() {
        writeln!(table, "            \"{name}\" => Some(sy_driver_{name}()),").expect("a string");
    }
    table.push_str("            _ => None,\n        }\n    }\n}\n");
    std::fs::write(out.join("variants.rs"), table).expect("OUT_DIR");
}

struct Mutant {
    name: String,
    header: String,
    find: String,
    replace: String,
}

impl Mutant {
    fn parse(line: &str) -> Self {
        let line = line.replace("\\|", "\u{1}");
        let parts: Vec<String> =
            line.split('|').map(|part| part.trim().replace('\u{1}', "|")).collect();
        let [name, header, find, replace] = <[String; 4]>::try_from(parts)
            .unwrap_or_else(|parts| panic!("mutants.txt: {parts:?} has not four parts"));
        Self { name, header, find, replace }
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

fn compile(here: &Path, include: &Path, name: &str) {
    cc::Build::new()
        .cpp(true)
        // Nothing of the C++ library is used.
        .cpp_link_stdlib(None)
        .std("c++17")
        .flag("-fno-exceptions")
        .flag("-fno-rtti")
        .opt_level(2)
        .warnings(name == "product")
        .warnings_into_errors(name == "product")
        .include(include)
        // Inline functions of two variants must not be taken for each other by the linker.
        .define("switchyard", format!("switchyard_{name}").as_str())
        .define("SY_DRIVER", format!("sy_driver_{name}").as_str())
        .file(here.join("driver.cpp"))
        .compile(&format!("sy_driver_{name}"));
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
