//! `benchmark_local` as people start it: what it is told is checked before anything begins.
#![cfg(not(loom))]

use std::process::{Command, Output};

fn benchmark(flags: &[&str]) -> Output {
    let short = [["--threads", "1"], ["--commands", "200"], ["--idle-seconds", "0"]];
    let short = short.iter().filter(|[name, _]| !flags.contains(name)).flatten();
    let mut command = Command::new(env!("CARGO_BIN_EXE_benchmark_local"));
    command.args(short).args(flags).output().unwrap()
}

#[test]
fn each_value_that_cannot_be_is_named() {
    let cases: [(&[&str], &str); 21] = [
        (&["--threads", "0"], "threads is 0"),
        (&["--threads", "1,65"], "threads is 65"),
        (&["--lanes", "0"], "lanes is 0"),
        (&["--lanes", "257"], "lanes is 257"),
        (&["--batch", "0"], "batch is 0"),
        (&["--batch", "1,65"], "batch is 65: expected 1 to the budget"),
        (&["--batch", "16", "--budget", "64,15"], "batch is 16"),
        (&["--budget", "0"], "budget is 0"),
        (&["--budget", "1", "--batch", "1"], "budget is 1"),
        (&["--budget", "65537"], "budget is 65537"),
        (&["--budget", "2147483649"], "budget is 2147483649"),
        (&["--budget", "4294967295"], "budget is 4294967295"),
        (&["--object-bytes", "0"], "object-bytes is 0"),
        (&["--object-bytes", "8"], "object-bytes is 8: expected a multiple of 16"),
        (&["--object-bytes", "10752,10760"], "object-bytes is 10760"),
        (&["--object-bytes", "4294967280"], "expected at most 4294967296"),
        (&["--lanes", "256", "--budget", "65536"], "expected at most 4294967296"),
        (&["--commands", "0"], "commands is 0"),
        (&["--commands", "18446744073709551615"], "commands is 18446744073709551615"),
        (&["--idle-seconds", "inf"], "idle-seconds is inf"),
        (&["--idle-seconds", "1e300"], "idle-seconds is 1"),
    ];
    for (flags, expected) in cases {
        let output = benchmark(flags);
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{flags:?}: {said}");
        assert!(said.contains(expected), "{flags:?}: {said}");
        assert!(output.stdout.is_empty(), "{flags:?} measured something");
    }
}

/// Batches that divide neither the budget nor each other, and the smallest budget that there is.
#[test]
fn odd_batches_and_small_budgets_are_measured_and_compared() {
    for (batch, budget, num_rows) in [("24,7,1", "64", 3), ("1,2", "2", 2), ("3", "3,4096", 2)] {
        let output = benchmark(&[
            "--batch",
            batch,
            "--budget",
            budget,
            "--lanes",
            "2",
            "--object-bytes",
            "48",
        ]);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "batch {batch}, budget {budget}: {said}");
        let lines = String::from_utf8(output.stdout).unwrap();
        // Both posts in a rate and a round trip each, and all of it compared.
        assert_eq!(lines.lines().count(), 5 * num_rows, "{lines}");
        let mut num_checks = 0;
        for line in lines.lines() {
            let figures: serde_json::Value = serde_json::from_str(line).unwrap();
            if figures["bench"] == "check" {
                num_checks += 1;
                assert_eq!(
                    (&figures["bad"], &figures["checked"]),
                    (&0.into(), &figures["objects"])
                );
                assert!(figures["checked"].as_u64().unwrap() >= 2 * 4096, "{line}");
            }
        }
        assert_eq!(num_checks, num_rows, "{lines}");
    }
}
