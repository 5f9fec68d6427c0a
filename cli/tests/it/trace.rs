//! Collectors of traces that cannot be used.

use std::process::{Command, Output};

fn generate(variable: &str) -> Output {
    let args = ["generate", "--prompt", "An", "--max-new-tokens", "1"];
    Command::new(env!("CARGO_BIN_EXE_switchyard"))
        .args(args)
        .args(["--servers", "1", "--replicas", "1"])
        .env_remove("SWITCHYARD_LOG")
        .env(variable, "collector:4317")
        .output()
        .expect("start")
}

/// The standard variable is set for whole hosts, often with the port of gRPC.
#[test]
fn a_collector_is_an_error_only_if_it_was_meant_for_this_program() {
    let standard = generate("OTEL_EXPORTER_OTLP_ENDPOINT");
    let text = String::from_utf8_lossy(&standard.stderr);
    assert!(standard.status.success(), "{text}");
    assert!(text.contains("collector:4317") && text.contains("is not used"), "{text}");

    let own = generate("SWITCHYARD_OTLP_ENDPOINT");
    let text = String::from_utf8_lossy(&own.stderr);
    assert!(!own.status.success() && text.contains("collector:4317"), "{text}");
}
