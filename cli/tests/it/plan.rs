//! `switchyard plan` as a user runs it.

use crate::commands::{fails, run};

const GIVEN: [&str; 8] =
    ["--preset", "deepseek-v3", "--base-us", "60", "--expert-us", "12", "--pair-us", "1.1"];

fn plan(more: &[&str]) -> serde_json::Value {
    let output = run(&[&["plan", "--json"], &GIVEN[..], more].concat(), &[]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("JSON")
}

#[test]
fn a_day_is_planned_from_a_file() {
    let dir = tempfile::tempdir().expect("folder");
    let (trace, plot) = (dir.path().join("day.csv"), dir.path().join("day.svg"));
    std::fs::write(&trace, "time,tokens_per_s\n0,500\n43200,4000\n").expect("trace");
    let (trace, plot) = (trace.to_str().expect("path"), plot.to_str().expect("path"));
    let args = ["--trace", trace, "--server-memory-gb", "80", "--plot", plot];
    let report = plan(&args);
    let steps = report["steps"].as_array().expect("steps");
    assert_eq!(steps.len(), 2);
    assert_eq!(report["moe_layers"], 58);
    // 58 · 256 experts of 44 MB.
    assert_eq!(report["min_servers"], 9, "{report}");
    let servers: Vec<u64> = steps.iter().map(|step| step["servers"].as_u64().unwrap()).collect();
    assert!(servers[0] >= 9 && servers[1] > servers[0], "{servers:?}");
    assert_eq!(report["servers"], servers[1]);
    assert_eq!(report["server_hours"], (servers[0] + servers[1]) as f64 * 12.0);
    assert!(report["busiest_share"].as_f64().unwrap() <= 0.6);
    assert!(std::fs::read_to_string(plot).expect("plot").starts_with("<svg"));
    // The same input gives the same plan.
    assert_eq!(plan(&args), report);
}

#[test]
fn a_report_of_a_model_of_another_shape_is_named() {
    let report =
        concat!(env!("CARGO_MANIFEST_DIR"), "/../bench/runs/2026-11-27-plan/bench-fit.json");
    for (preset, differs) in [("deepseek-v3", true), ("qwen3-30b-a3b", false)] {
        let output = std::process::Command::new(env!("CARGO_BIN_EXE_switchyard"))
            .args(["--json", "plan", "--preset", preset, "--bench", report, "--peak", "1"])
            .output()
            .expect("start");
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{text}");
        let sentence = "measured top-8 of 128 experts, hidden 2048";
        assert_eq!(text.starts_with("warning: ") && text.contains(sentence), differs, "{text}");
        let report: serde_json::Value = serde_json::from_slice(&output.stdout).expect("a report");
        assert_eq!(report["assumptions"].to_string().contains(sentence), differs, "{report}");
    }
}

#[test]
fn wrong_input_is_named() {
    let dir = tempfile::tempdir().expect("folder");
    let file = |name: &str, text: &str| {
        let path = dir.path().join(name);
        std::fs::write(&path, text).expect("file");
        path.to_str().expect("path").to_owned()
    };
    let with = |more: &[&str]| fails(&[&["plan"], &GIVEN[..], more].concat(), &[]);
    let line = fails(&["plan", "--preset", "deepseek-v3"], &[]);
    assert!(line.contains("no hardware given: use --bench"), "{line}");
    let line = fails(&["plan", "--base-us", "1", "--expert-us", "1", "--pair-us", "1"], &[]);
    assert!(line.contains("no model given: use --model PATH or --preset NAME"), "{line}");
    let line = with(&["--trace", &file("a.csv", "0,1\nx,2\n")]);
    assert!(line.contains("a.csv:2"), "{line}");
    let line = with(&["--trace", "/nonexistent.csv"]);
    assert!(line.contains("cannot read the trace /nonexistent.csv"), "{line}");
    let line = with(&["--server-memory-gb", "0.01"]);
    assert!(line.contains("has no memory for one expert"), "{line}");
    let line = with(&["--peak", "1e12"]);
    assert!(line.contains("need more than 1024 servers"), "{line}");
    let line = with(&["--check", &file("b.json", "{}")]);
    assert!(line.contains("not a report of `switchyard --json bench moe`"), "{line}");
    let config = file("config.json", r#"{"model_type": "bert"}"#);
    let line = fails(&["plan", "--model", &config], &[]);
    assert!(line.contains("cannot be planned"), "{line}");
    for wrong in [["--target-share", "2"], ["--zipf", "-1"], ["--peak", "nan"], ["--traffic", "x"]]
    {
        let output = run(&[&["plan"], &GIVEN[..], &wrong].concat(), &[]);
        assert_eq!(output.status.code(), Some(2), "{wrong:?}");
    }
}
