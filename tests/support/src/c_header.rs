//! Comparison of a C header with its counterpart in Rust, by the C and C++ compilers of this machine.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;
use std::process::Command;

use crate::skip;

/// Sizes of C types, and offsets and sizes of their fields, as Rust has them.
///
/// `c_fields! { Rust as "c_name": field, field; … }` lists every type with its fields.
#[macro_export]
macro_rules! c_fields {
    ($($rust:ty as $c:literal: $($field:ident),*;)*) => {{
        let mut expected = std::collections::BTreeMap::new();
        $(
            expected.insert(format!("sizeof {}", $c), size_of::<$rust>() as u64);
            $(
                let field = format!("{}.{}", $c, stringify!($field));
                let bytes = $crate::c_header::field_bytes(|s: &$rust| &s.$field);
                let offset = std::mem::offset_of!($rust, $field);
                expected.insert(format!("offset {field}"), offset as u64);
                expected.insert(format!("bytes {field}"), bytes as u64);
            )*
        )*
        expected
    }};
}

/// Bytes of the field that a function picks.
pub fn field_bytes<S, F>(_: fn(&S) -> &F) -> usize {
    size_of::<F>()
}

/// Compares `fields`, of [`c_fields!`], and `values`, C expressions with their values in Rust, with `header` in the
/// folder `include`, as C11 and as C++17.
///
/// # Panics
/// On a difference, or without a C compiler. A missing C++ compiler is skipped.
pub fn check_c_header(
    include: &Path,
    header: &str,
    fields: BTreeMap<String, u64>,
    values: Vec<(String, u64)>,
) {
    let mut expected = fields;
    expected.extend(values.into_iter().map(|(text, value)| (format!("value {text}"), value)));
    let program = program(header, &expected);
    let compilers = [("cc", "-std=c11", "c", true), ("g++", "-std=c++17", "cpp", false)];
    for (compiler, standard, extension, required) in compilers {
        let Some(found) = compile_and_run(compiler, standard, extension, include, &program) else {
            assert!(!required, "no {compiler}, which building this project needs");
            skip("cxx", &format!("{header} as {standard}: there is no {compiler}"));
            continue;
        };
        assert_eq!(found, expected, "{compiler} {standard}");
    }
}

fn program(header: &str, expected: &BTreeMap<String, u64>) -> String {
    let mut body = String::new();
    for key in expected.keys() {
        let (what, name) = key.split_once(' ').expect("keys have two words");
        let value = match (what, name.split_once('.')) {
            ("sizeof", _) => format!("sizeof({name})"),
            ("offset", Some((ty, field))) => format!("offsetof({ty}, {field})"),
            ("bytes", Some((ty, field))) => format!("sizeof((({ty} *)0)->{field})"),
            ("value", _) => name.to_owned(),
            _ => unreachable!("no other keys are made"),
        };
        writeln!(body, "    show(\"{key}\", {value});").expect("String");
    }
    format!(
        "#include <stdio.h>\n#include <{header}>\n\n\
         static void show(const char *name, unsigned long long value) {{\n    \
         printf(\"%s %llu\\n\", name, value);\n}}\n\nint main(void) {{\n{body}    return 0;\n}}\n"
    )
}

/// The output of the program, or `None` without the compiler.
fn compile_and_run(
    compiler: &str,
    standard: &str,
    extension: &str,
    include: &Path,
    program: &str,
) -> Option<BTreeMap<String, u64>> {
    let folder = tempfile::tempdir().expect("temporary folder");
    let source = folder.path().join(format!("layout.{extension}"));
    let binary = folder.path().join("layout");
    std::fs::write(&source, program).expect("source");
    let compiled = Command::new(compiler)
        .args([standard, "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-I"])
        .arg(include)
        .arg("-o")
        .arg(&binary)
        .arg(&source)
        .output();
    let compiled = match compiled {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return None,
        other => other.expect("compiler starts"),
    };
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    let output = Command::new(&binary).output().expect("program starts");
    assert!(output.status.success());
    let text = String::from_utf8(output.stdout).expect("names and numbers");
    let pairs = text.lines().map(|line| {
        let (name, value) = line.rsplit_once(' ').expect("name and value");
        (name.to_owned(), value.parse().expect("number"))
    });
    Some(pairs.collect())
}
