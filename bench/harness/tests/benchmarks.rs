//! The benchmark programs as users start them. They check their arguments before anything else, and print tables or
//! lines of JSON.

use std::process::{Command, Output};

use serde_json::Value;

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
        assert_one_line(&said);
        assert!(output.stdout.is_empty(), "{flags:?} measured something");
    }
}

/// Batches that divide neither the budget nor each other, and the smallest possible budget.
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
            "--json",
        ]);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "batch {batch}, budget {budget}: {said}");
        let lines = String::from_utf8(output.stdout).unwrap();
        // A rate and a round trip for each of two posts, and one check.
        assert_eq!(lines.lines().count(), 5 * num_rows, "{lines}");
        let mut num_checks = 0;
        for line in lines.lines() {
            let figures: Value = serde_json::from_str(line).unwrap();
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

#[test]
fn a_table_has_a_head_and_a_line_for_each_measurement() {
    let output = benchmark(&["--idle-seconds", "0.01", "--threads", "1,2"]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    // Standard error is no terminal, so it has no progress.
    assert!(!said.contains('\r') && said.lines().count() == 2, "{said}");
    let text = String::from_utf8(output.stdout).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    assert!(lines[0].starts_with("commands from threads of this host"), "{text}");
    // Two tables, one for each number of threads, with a head, five rows and a sentence on idle threads.
    assert_eq!(lines.len(), 1 + 2 * 7, "{text}");
    for (threads, table) in ["1", "2"].into_iter().zip(lines[1..].chunks(7)) {
        for head in [
            "object bytes",
            " objects ",
            " ms ",
            "M objects/s",
            "Gbit/s",
            "µs p50",
            "µs p90",
            "µs p99",
            "µs max",
        ] {
            assert!(table[0].contains(head), "{text}");
        }
        let names = ["check", "rate", "round_trip", "rate", "round_trip"];
        for (name, row) in names.into_iter().zip(&table[1..6]) {
            let cells: Vec<&str> = row.split_whitespace().collect();
            assert_eq!((cells.len(), cells[0], cells[2]), (17, name, threads), "{text}");
            assert!(cells[7].parse::<u64>().unwrap() >= 200, "{text}");
            assert!(cells[8].parse::<f64>().unwrap() > 0.0, "{text}");
            assert_eq!(row.chars().count(), table[0].chars().count(), "{text}");
        }
        assert!(table[6].starts_with(&format!("idle threads: {threads}, with 8 lanes")), "{text}");
    }
    assert!(lines.iter().all(|line| serde_json::from_str::<Value>(line).is_err()), "{text}");
}

#[test]
fn each_lane_has_a_row_where_that_is_asked_for() {
    let flags = ["--per-lane", "--lanes", "2", "--threads", "2", "--post", "null"];
    let output = benchmark(&flags);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    let rows: Vec<Vec<&str>> =
        text.lines().skip(2).map(|row| row.split_whitespace().collect()).collect();
    // Three measurements with a row for all lanes and a row for each of four lanes.
    assert_eq!(rows.len(), 3 * 5, "{text}");
    for rows in rows.chunks(5) {
        let lanes: Vec<_> = rows.iter().map(|row| (row.len(), [row[17], row[18]])).collect();
        let expected = [["-", "-"], ["0", "0"], ["0", "1"], ["1", "0"], ["1", "1"]];
        assert_eq!(lanes, expected.map(|lane| (19, lane)), "{text}");
        let objects: Vec<u64> = rows.iter().map(|row| row[7].parse().unwrap()).collect();
        assert_eq!(objects[0], objects[1..].iter().sum::<u64>(), "{text}");
        // Producers of the host time a batch in round trips only.
        assert!(rows.iter().all(|row| (row[11] != "-") == (row[0] == "round_trip")), "{text}");
    }

    let output = benchmark(&[&flags[..], &["--json"]].concat());
    let text = String::from_utf8(output.stdout).unwrap();
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines.len(), 3 * 5, "{text}");
    assert_eq!(
        keys(&lines[4]),
        "batch bench budget lane lanes latency object_bytes objects post producer thread threads"
    );
    assert_eq!((&lines[4]["thread"], &lines[4]["lane"]), (&1.into(), &1.into()));
}

/// Scripts read old and new records by the same names.
#[test]
fn lines_of_json_have_their_keys() {
    let output = benchmark(&["--idle-seconds", "0.01", "--post", "copy", "--json"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let names: Vec<_> = lines.iter().map(|line| line["bench"].as_str().unwrap()).collect();
    assert_eq!(names, ["check", "rate", "round_trip", "idle"]);
    for line in &lines[..3] {
        assert_eq!(
            keys(line),
            "bad batch bench budget checked gbps lanes latency mops object_bytes objects post producer threads wall_ms"
        );
    }
    // Producers of the host time a batch in round trips only.
    assert!(lines[1]["latency"].is_null());
    assert_eq!(keys(&lines[2]["latency"]), "max_us mean_us p50_us p90_us p99_us");
    assert_eq!(keys(&lines[3]), "bench cpu_percent_per_thread lanes max_sleep_us threads");
}

#[test]
fn figures_that_nobody_reads_any_more_are_no_error() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_benchmark_local"));
    command.args(["--threads", "1", "--commands", "200", "--idle-seconds", "0"]);
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let output = command.stdout(writer).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{said}");
    assert!(!said.contains("error") && !said.contains("panic"), "{said}");
}

#[test]
fn a_relay_without_gpus_is_an_error_of_one_line() {
    for flags in [&["--near", "9999"][..], &["--near", "9999", "--json"]] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_benchmark_relay"));
        let output = command.args(flags).output().unwrap();
        assert_eq!(output.status.code(), Some(1));
        assert_one_line(&String::from_utf8_lossy(&output.stderr));
        assert!(output.stdout.is_empty());
    }
}

#[test]
fn both_sides_between_hosts_print_tables_or_json() {
    if let Err(error) = switchyard_bench_harness::proxy::remote::open("libfabric") {
        test_support::skip("libfabric", &error.to_string());
        return;
    }
    let [sent, received] = between_processes(&[]);
    assert!(sent.starts_with("objects to 127.0.0.1:"), "{sent}");
    assert!(received.starts_with("objects received over libfabric"), "{received}");
    for (text, name, num_cells) in [(&sent, "remote", 15), (&received, "received", 7)] {
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 3, "{text}");
        assert!(lines[1].starts_with("bench") && lines[1].ends_with("checked"), "{text}");
        let cells: Vec<&str> = lines[2].split_whitespace().collect();
        assert_eq!((cells.len(), cells[0]), (num_cells, name), "{text}");
        // Two rounds of both threads, the timed objects left by both, and those left by one thread's single objects.
        assert_eq!(cells[num_cells - 2..], ["32", "24"], "{text}");
    }
    let [sent, received] = between_processes(&["--json"]).map(|text| {
        assert_eq!(text.lines().count(), 1, "{text}");
        serde_json::from_str::<Value>(&text).unwrap()
    });
    assert_eq!(
        keys(&sent),
        "batch bench budget checked checked_timed checks commands gbps is_gpu latency mops object_bytes objects one producer threads transport wall_ms"
    );
    assert_eq!(
        keys(&received),
        "batch bench budget checked checked_timed checks commands is_gpu object_bytes threads transport"
    );
    for line in [&sent, &received] {
        assert_eq!((&line["checked"], &line["threads"]), (&32.into(), &2.into()), "{line}");
        assert_eq!(line["checked_timed"], 24, "{line}");
    }
}

#[test]
fn a_side_that_cannot_begin_is_an_error_of_one_line() {
    for flags in [&["--connect", "x", "--transport", "nothing"][..], &["--listen", "nowhere"]] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_benchmark_remote"));
        let output = command.args(flags).output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{flags:?}");
        assert_one_line(&String::from_utf8_lossy(&output.stderr));
        assert!(output.stdout.is_empty());
    }
}

/// Returns the output of sender and receiver.
fn between_processes(flags: &[&str]) -> [String; 2] {
    use std::io::{BufRead as _, BufReader};
    use std::process::Stdio;

    let program = || {
        let mut command = Command::new(env!("CARGO_BIN_EXE_benchmark_remote"));
        command.args(flags);
        command
    };
    let mut receiver = program()
        .args(["--listen", "127.0.0.1:0", "--patience-s", "60"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut said = BufReader::new(receiver.stderr.take().unwrap());
    let mut line = String::new();
    said.read_line(&mut line).unwrap();
    let address = line.trim().strip_prefix("listening on ").expect(&line);
    let output = program()
        .args(["--connect", address, "--threads", "2", "--object-bytes", "48", "--budget", "8"])
        .args(["--batch", "4", "--commands", "100", "--checks", "2"])
        .output()
        .unwrap();
    // Without a sender the receiver ends by itself.
    let received = receiver.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(received.status.success());
    [output.stdout, received.stdout].map(|text| String::from_utf8(text).unwrap())
}

/// Returns the keys in alphabetical order.
fn keys(line: &Value) -> String {
    let mut keys: Vec<_> = line.as_object().unwrap().keys().map(String::as_str).collect();
    keys.sort_unstable();
    keys.join(" ")
}

fn assert_one_line(said: &str) {
    assert!(said.starts_with("error: ") && said.lines().count() == 1, "{said}");
}
