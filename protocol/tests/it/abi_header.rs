//! `abi.h`, compiled by the C and C++ compilers of this machine, agrees with `abi.rs`.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::mem::offset_of;
use std::path::Path;
use std::process::Command;

use switchyard_protocol::abi::{self, Entry, ErrorBody, FrameHeader, TokenRange};
use switchyard_protocol::{ErrorCode, WireDtype};

/// Bytes of the field that `_` picks.
fn field_bytes<S, F>(_: fn(&S) -> &F) -> usize {
    size_of::<F>()
}

macro_rules! fields {
    ($($rust:ty as $c:literal: $($field:ident),*;)*) => {{
        let mut expected = BTreeMap::new();
        $(
            expected.insert(format!("sizeof {}", $c), size_of::<$rust>() as u64);
            $(
                let field = format!("{}.{}", $c, stringify!($field));
                let bytes = field_bytes(|s: &$rust| &s.$field);
                expected.insert(format!("offset {field}"), offset_of!($rust, $field) as u64);
                expected.insert(format!("bytes {field}"), bytes as u64);
            )*
        )*
        expected
    }};
}

#[test]
fn header_and_rust_agree_field_by_field() {
    let mut expected = fields! {
        FrameHeader as "sy_frame_header": epoch, client_id, sequence, generation, layer, magic,
            version, kind, dtype, response_dtype, flags, num_tokens, num_entries, hidden, frame_idx,
            num_frames, row_stride_bytes, tokens_offset, entries_offset, scales_offset,
            payload_offset, total_bytes, header_crc, payload_crc, server_queue_ns,
            server_compute_ns, reserved;
        TokenRange as "sy_token": entry_begin, entry_count;
        Entry as "sy_entry": expert, weight;
        ErrorBody as "sy_error_body": code, message_len, detail, message;
    };
    let layout: Vec<String> = expected.keys().cloned().collect();
    expected.extend(constants().into_iter().map(|(name, value)| (format!("value {name}"), value)));

    let program = program(&layout);
    let compilers = [("cc", "-std=c11", "c", true), ("g++", "-std=c++17", "cpp", false)];
    for (compiler, standard, extension, required) in compilers {
        let Some(found) = compile_and_run(compiler, standard, extension, &program) else {
            assert!(!required, "no {compiler}, which building this project needs");
            test_support::skip(compiler, &format!("abi.h as {standard}: there is no {compiler}"));
            continue;
        };
        assert_eq!(found, expected, "{compiler} {standard}");
    }
}

/// Every constant of the header with its counterpart.
fn constants() -> Vec<(&'static str, u64)> {
    let mut constants = vec![
        ("SY_FRAME_MAGIC", abi::FRAME_MAGIC.into()),
        ("SY_FRAME_VERSION", abi::FRAME_VERSION.into()),
        ("SY_KIND_DISPATCH", abi::KIND_DISPATCH.into()),
        ("SY_KIND_COMBINE", abi::KIND_COMBINE.into()),
        ("SY_KIND_ERROR", abi::KIND_ERROR.into()),
        ("SY_DTYPE_F32", WireDtype::F32.code().into()),
        ("SY_DTYPE_F16", WireDtype::F16.code().into()),
        ("SY_DTYPE_BF16", WireDtype::Bf16.code().into()),
        ("SY_DTYPE_F8_E4M3", WireDtype::F8E4m3.code().into()),
        ("SY_FLAG_PAYLOAD_CRC", abi::FLAG_PAYLOAD_CRC.into()),
        ("SY_MAX_HIDDEN", abi::MAX_HIDDEN.into()),
    ];
    let sizes = [
        ("SY_SCALE_BLOCK", abi::SCALE_BLOCK),
        ("SY_PAYLOAD_ALIGN", abi::PAYLOAD_ALIGN),
        ("SY_TABLE_ALIGN", abi::TABLE_ALIGN),
        ("SY_ROW_ALIGN", abi::ROW_ALIGN),
        ("SY_MAX_ERROR_MESSAGE", abi::MAX_ERROR_MESSAGE),
        ("SY_CONTROL_BYTES", p2p_core::slot::CONTROL_BYTES),
        ("SY_CONTROL_STRIDE", p2p_core::slot::CONTROL_STRIDE),
        ("SY_WORD_PUBLISHED", p2p_core::slot::PUBLISHED),
        ("SY_WORD_CONSUMED", p2p_core::slot::CONSUMED),
        ("SY_WORD_PROGRESS", p2p_core::slot::PROGRESS),
        ("SY_WORD_WAITING", p2p_core::slot::WAITING),
    ];
    constants.extend(sizes.map(|(name, value)| (name, value as u64)));
    let codes = [
        ("SY_ERROR_BAD_FRAME", ErrorCode::BadFrame),
        ("SY_ERROR_UNKNOWN_EXPERT", ErrorCode::UnknownExpert),
        ("SY_ERROR_WRONG_LAYER", ErrorCode::WrongLayer),
        ("SY_ERROR_NOT_MY_EXPERT", ErrorCode::NotMyExpert),
        ("SY_ERROR_STALE_EPOCH", ErrorCode::StaleEpoch),
        ("SY_ERROR_STALE_CHANNEL", ErrorCode::StaleChannel),
        ("SY_ERROR_OVERLOADED", ErrorCode::Overloaded),
        ("SY_ERROR_SHUTTING_DOWN", ErrorCode::ShuttingDown),
        ("SY_ERROR_INTERNAL", ErrorCode::Internal),
        ("SY_ERROR_VERSION", ErrorCode::Version),
    ];
    constants.extend(codes.map(|(name, code)| (name, code.to_u32().into())));
    constants
}

fn program(layout: &[String]) -> String {
    let mut body = String::new();
    for key in layout {
        let (what, name) = key.split_once(' ').expect("keys have two words");
        let value = match (what, name.split_once('.')) {
            ("sizeof", _) => format!("sizeof({name})"),
            ("offset", Some((ty, field))) => format!("offsetof({ty}, {field})"),
            ("bytes", Some((ty, field))) => format!("sizeof((({ty} *)0)->{field})"),
            _ => unreachable!("no other keys are made"),
        };
        writeln!(body, "    show(\"{key}\", {value});").expect("String");
    }
    for (name, _) in constants() {
        writeln!(body, "    show(\"value {name}\", {name});").expect("String");
    }
    format!(
        "#include <stdio.h>\n#include <switchyard/abi.h>\n\n\
         static void show(const char *name, unsigned long long value) {{\n    \
         printf(\"%s %llu\\n\", name, value);\n}}\n\nint main(void) {{\n{body}    return 0;\n}}\n"
    )
}

/// The output of the program, or `None` without the compiler.
fn compile_and_run(
    compiler: &str,
    standard: &str,
    extension: &str,
    program: &str,
) -> Option<BTreeMap<String, u64>> {
    let include = Path::new(env!("CARGO_MANIFEST_DIR")).join("../kernels/include");
    let folder = tempfile::tempdir().expect("temporary folder");
    let source = folder.path().join(format!("layout.{extension}"));
    let binary = folder.path().join("layout");
    std::fs::write(&source, program).expect("source");
    let compiled = Command::new(compiler)
        .args([standard, "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-I"])
        .arg(&include)
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
