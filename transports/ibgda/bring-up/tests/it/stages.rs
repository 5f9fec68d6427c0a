//! Both sides as two processes over NICs in software: every stage, and the reports of failures.

use crate::run;
use crate::run::{Ended, alone, complete_host, connect, listen};

const STAGES: [&str; 16] = [
    "probe",
    "device",
    "domain",
    "queues",
    "connect",
    "nop",
    "put",
    "flag",
    "get",
    "add",
    "masked",
    "wrap",
    "many",
    "immediate",
    "error",
    "reset",
];

/// Runs both sides with the same options.
fn pair(options: &[&str]) -> [Ended; 2] {
    let (listener, address) = listen(options);
    let connector = connect(address, options).end();
    [listener.end(), connector]
}

/// Whether this build can post; where it cannot, that is noted, and the program says so as well.
fn can_post() -> bool {
    let can = softnic_driver::Driver::product().is_some();
    if !can {
        test_support::skip("cxx", "there is no C++ compiler: install g++");
        let options = ["listen", "127.0.0.1:0", "--json", "--software-nic"];
        alone(&options).expect_failure(3, "probe", &["C++ compiler"]);
    }
    can
}

#[test]
fn every_stage_passes_on_both_paths() {
    if !can_post() {
        return;
    }
    let kinds = [
        ("plain", "record", "3"),
        ("devx", "record", "2"),
        ("devx", "register", "2"),
        ("plain", "record", "1"),
    ];
    for (path, doorbell, queues) in kinds {
        let options = ["--json", "--software-nic", "--path", path, "--queues", queues];
        let options = [&options[..], &["--doorbell", doorbell]].concat();
        let [listener, connector] = pair(&options);
        for side in [&listener, &connector] {
            assert_eq!(side.code, Some(0), "{path}: {}\n{}", side.out, side.err);
            let is_alone = side.detail("queues").ends_with(", doorbells by the register alone");
            assert_eq!(is_alone, doorbell == "register", "{}", side.detail("queues"));
            let mut expected: Vec<_> =
                STAGES.iter().map(|stage| ((*stage).to_owned(), "ok".to_owned())).collect();
            expected.push(("fused".to_owned(), "left out".to_owned()));
            assert_eq!(side.stages(), expected);
            assert_eq!(side.detail("fused"), "no --gpu on this side");
            assert_eq!(side.lines().last().unwrap()["result"], "passed");
        }
        assert!(connector.detail("wrap").contains("196708 requests at depth 128, 3 wraps"));
        // One put more than there are receives.
        let num = 9 * 16 * queues.parse::<u32>().unwrap();
        for side in [&listener, &connector] {
            let sent = format!("{num} puts with immediate data, 16 receives per queue; ");
            assert!(side.detail("immediate").starts_with(&sent), "{}", side.out);
        }
        assert!(connector.detail("immediate").contains("syndrome 0x16"), "{}", connector.out);
        let expected = if queues == "1" { "the peer's to fail on" } else { "syndrome 0x16" };
        assert!(listener.detail("immediate").contains(expected), "{}", listener.out);
        // The queue itself reports the wrong key.
        assert!(connector.detail("error").contains("syndrome 0x13"), "{}", connector.out);
        let expected = if queues == "1" { "the peer's to fail on" } else { "syndrome 0x13" };
        assert!(listener.detail("error").contains(expected), "{}", listener.out);
    }
}

#[test]
fn slots_may_be_a_gpus() {
    if !can_post() {
        return;
    }
    let options = ["--json", "--software-nic", "--gpu", "emulated:0", "--wraps", "1"];
    for side in pair(&options) {
        assert_eq!(side.code, Some(0), "{}\n{}", side.out, side.err);
        assert!(side.detail("device").contains("slots of emulated:0"), "{}", side.out);
        assert!(side.detail("connect").contains("slot as a GPU's memory by its address"));
    }
    // One side's choice is none of the other's business.
    let (listener, address) = listen(&["--json", "--software-nic", "--stage", "..add"]);
    let options = ["--json", "--software-nic", "--stage", "..add", "--gpu", "emulated:3"];
    let connector = connect(address, &options).end();
    assert_eq!((listener.end().code, connector.code), (Some(0), Some(0)), "{}", connector.out);
}

#[test]
fn a_gpu_posts_whole_layers_on_both_paths() {
    if !can_post() {
        return;
    }
    let kinds = [
        ("plain", "record", "host", "2"),
        ("devx", "record", "host", "1"),
        ("devx", "register", "gpu", "3"),
    ];
    for (path, doorbell, memory, queues) in kinds {
        let common = ["--json", "--software-nic", "--path", path, "--queues", queues];
        let stage = ["--doorbell", doorbell, "--queue-memory", memory, "--stage", "fused"];
        let options = [&common[..], &stage].concat();
        // Each side has a GPU of its own, which does not reach the other's memory.
        let (listener, address) = listen(&[&options[..], &["--gpu", "emulated:0"]].concat());
        let connector = connect(address, &[&options[..], &["--gpu", "emulated:9"]].concat()).end();
        let listener = listener.end();
        for (side, gpu) in [(&listener, "emulated:0"), (&connector, "emulated:9")] {
            assert_eq!(side.code, Some(0), "{path}: {}\n{}", side.out, side.err);
            let place = if memory == "gpu" { "the GPU's memory" } else { "host memory" };
            let parts = [
                format!("posted by {gpu} on {queues} queues in each direction in {place}"),
                "6 layers of up to 16 tokens of 7168 values".to_owned(),
                "2 of them after a reset: bit for bit as by stores".to_owned(),
            ];
            for part in parts {
                assert!(side.detail("fused").contains(&part), "{}", side.detail("fused"));
            }
            assert_eq!(side.lines().last().unwrap()["result"], "passed");
        }
    }
}

#[test]
fn layers_need_a_gpu_on_both_sides() {
    if !can_post() {
        return;
    }
    let options = ["--json", "--software-nic", "--queues", "1", "--timeout", "5"];
    let run = |stages: &str| {
        let options = [&options[..], &["--stage", stages]].concat();
        let (listener, address) = listen(&options);
        let connector = connect(address, &[&options[..], &["--gpu", "emulated:0"]].concat());
        [connector.end(), listener.end()]
    };
    let whys = ["no --gpu on the peer's side", "no --gpu on this side"];
    // Beside others the stage is left out, and said to be.
    for (side, why) in run("reset..").iter().zip(whys) {
        assert_eq!(side.code, Some(0), "{}", side.out);
        assert_eq!(side.detail("fused"), why);
        let stages = side.stages();
        assert_eq!(stages.last().unwrap(), &("fused".to_owned(), "left out".to_owned()));
    }
    for (side, why) in run("fused").iter().zip(whys) {
        side.expect_failure(3, "fused", &[why, "give both sides `--gpu`"]);
    }
}

#[test]
fn layers_over_a_nic_that_fails_end_with_a_reason() {
    if !can_post() {
        return;
    }
    let options =
        ["--json", "--software-nic", "--queues", "1", "--timeout", "2", "--stage", "fused"];
    let options = [&options[..], &["--gpu", "emulated:0"]].concat();
    for (fault, part) in [
        ("--stall-at", "combine: error word: tag "),
        ("--fail-at", "syndrome 0x14 (remote operation)"),
    ] {
        let (listener, address) = listen(&options);
        let connector = connect(address, &[&options[..], &[fault, "fused"]].concat()).end();
        let listener = listener.end();
        listener.expect_failure(1, "fused", &["layer 0", "frame 1 did not come within 2 s"]);
        connector.expect_failure(
            1,
            "fused",
            &["layer 0", part, "the peer failed at stage `fused`"],
        );
    }
}

#[test]
fn a_part_of_the_stages_can_be_run() {
    if !can_post() {
        return;
    }
    for side in pair(&["--json", "--software-nic", "--stage", "get..add"]) {
        assert_eq!(side.code, Some(0), "{}\n{}", side.out, side.err);
        let stages = side.stages();
        let state = |name: &str| {
            stages.iter().find(|(stage, _)| stage == name).map(|(_, state)| state.as_str())
        };
        assert_eq!(
            [state("connect"), state("nop"), state("flag")],
            [Some("ok"), Some("left out"), Some("left out")]
        );
        assert_eq!([state("get"), state("add"), state("masked")], [Some("ok"), Some("ok"), None]);
    }
    // Stages before the connection need no other side.
    let options = ["listen", "127.0.0.1:0", "--json", "--software-nic", "--stage", "..queues"];
    let side = alone(&options);
    assert_eq!(side.code, Some(0), "{}", side.out);
    assert_eq!(side.stages().len(), 4);
}

/// A NIC that stops at the beginning of a stage must not pass it, and both sides must say so.
#[test]
fn a_nic_that_stands_still_fails_the_stage() {
    if !can_post() {
        return;
    }
    let cases = [
        ("nop", "blocks are complete of"),
        ("flag", "quiet: a time-out after 2 s"),
        ("wrap", "no room in the queue"),
        ("many", "time-out"),
        ("immediate", "no immediate data of the peer's came within 2 s"),
        ("error", "expected syndrome 0x13"),
    ];
    std::thread::scope(|scope| {
        for (stage, part) in cases {
            scope.spawn(move || stand_still_at(stage, part));
        }
    });
}

fn stand_still_at(stage: &str, part: &str) {
    let range = format!("{stage}..");
    let options =
        ["--json", "--software-nic", "--timeout", "2", "--queues", "2", "--stage", &range];
    let (listener, address) = listen(&options);
    let stalled = [&options[..], &["--stall-at", stage]].concat();
    let connector = connect(address, &stalled).end();
    connector.expect_failure(1, stage, &[part]);
    // The other side either noticed missing data or got this side's report.
    let listener = listener.end();
    listener.expect_failure(1, stage, &["peer"]);
    let told = format!("the peer failed at stage `{stage}`: ");
    let detail = listener.detail(stage);
    // A queue that stands still from the first may not have seen that receives are posted.
    let is_missing = ["the peer's flag", "data of the peer's came", "peer has posted no receive"];
    let is_seen = is_missing.iter().any(|part| detail.contains(part));
    assert!(detail.contains(&told) || is_seen, "{stage}: {detail}");
}

/// A request that the NIC fails names its syndrome, also where another one is expected.
#[test]
fn requests_that_the_nic_fails_are_named() {
    if !can_post() {
        return;
    }
    for stage in ["nop", "get", "wrap", "immediate", "error", "reset"] {
        let range = format!("{stage}..");
        let options = ["--json", "--software-nic", "--queues", "2", "--stage", &range];
        let (listener, address) = listen(&options);
        // After the reset of the queues, nothing of the forced failure remains.
        let code = if stage == "reset" { 0 } else { 1 };
        let connector = connect(address, &[&options[..], &["--fail-at", stage]].concat()).end();
        let listener = listener.end();
        assert_eq!([connector.code, listener.code], [Some(code); 2], "{}", connector.out);
        if code == 1 {
            let parts = ["syndrome 0x14 (remote operation)", "queue pair 0x40"];
            connector.expect_failure(1, stage, &parts);
            let told = format!("the peer failed at stage `{stage}`: ");
            listener.expect_failure(1, stage, &[&told, "syndrome 0x14"]);
        }
    }
}

#[test]
fn what_a_host_lacks_is_named_with_status_3() {
    if !can_post() {
        return;
    }
    let root = tempfile::tempdir().unwrap();
    let root_name = root.path().to_str().unwrap();
    let run = |options: &[&str]| {
        let arguments = ["listen", "127.0.0.1:0", "--json", "--stage", "..queues"];
        alone(&[&arguments[..], options].concat())
    };
    // Nothing at all.
    let parts =
        ["mlx5 NIC: no RDMA device", "modprobe mlx5_core mlx5_ib ib_uverbs", "/dev/infiniband"];
    run(&["--root", root_name]).expect_failure(3, "probe", &parts);
    complete_host(root.path());
    let software = ["--software-nic", "--root", root_name];
    let complete = run(&software);
    assert_eq!(complete.code, Some(0), "{}", complete.out);
    assert!(complete.detail("device").contains("(MT4129, firmware 28.39.1002)"));
    // Files are there, but no NIC behind them, or no library: which of both depends on this machine.
    let hardware = run(&["--root", root_name, "--device", "none_7"]);
    hardware.expect_failure(3, "device", &[]);
    // A driver option matters once a GPU comes in, and not before.
    let params = root.path().join("proc/driver/nvidia/params");
    std::fs::write(&params, "EnableStreamMemOPs: 1\nRegistryDwords: \"\"\n").unwrap();
    assert_eq!(run(&software).code, Some(0));
    let gpu = [&software[..], &["--gpu", "emulated:0"]].concat();
    let parts = ["RegistryDwords", "NVreg_RegistryDwords=\"PeerMappingOverride=1;\"", "1 of"];
    run(&gpu).expect_failure(3, "probe", &parts);
    std::fs::write(&params, run::GOOD_OPTIONS).unwrap();
    assert_eq!(run(&gpu).code, Some(0));

    let parts = ["no mlx5 device `mlx5_9`: found softnic_0"];
    run(&["--software-nic", "--device", "mlx5_9"]).expect_failure(3, "device", &parts);
    let parts = ["no address of index 9"];
    run(&["--software-nic", "--gid-index", "9"]).expect_failure(3, "device", &parts);
    run(&["--software-nic", "--gpu", "emulated:4000"]).expect_failure(3, "device", &["4000"]);
    // A port that is not there is a call that fails.
    let parts = ["ibv_query_port failed", "does the device have this port?"];
    run(&["--software-nic", "--port", "2"]).expect_failure(1, "device", &parts);
}

#[test]
fn wrong_usage_has_status_2() {
    let cases: [(&[&str], &str); 11] = [
        (&["listen", "--queue-memory", "gpu"], "needs `--path devx`"),
        (&["listen", "--doorbell", "register"], "needs `--path devx`"),
        (&["listen", "--software-nic", "--gpu", "0"], "`--gpu emulated:N`"),
        (&[], "Usage"),
        (&["connect"], "<ADDRESS>"),
        (&["connect", "nowhere:there"], "expected HOST or HOST:PORT"),
        (&["listen", "--depth", "100"], "a power of two from 128 to 32768"),
        (&["listen", "--queues", "65"], "65"),
        (&["listen", "--stage", "reset..nop"], "comes after"),
        (&["listen", "--timeout", "0"], "from 0.01"),
        (&["listen", "--stall-at", "nop"], "--software-nic"),
    ];
    for (arguments, part) in cases {
        let ended = alone(arguments);
        assert_eq!(ended.code, Some(2), "{arguments:?}: {}", ended.err);
        assert!(ended.err.contains(part), "{arguments:?}: {}", ended.err);
        assert!(ended.out.is_empty());
    }
    let help = alone(&["--help"]);
    assert_eq!(help.code, Some(0));
    assert!(help.out.contains("3 this host lacks something"), "{}", help.out);
}

/// The guide shows the program's output, except for numbers.
#[test]
fn the_guide_shows_what_is_printed() {
    if !can_post() {
        return;
    }
    let guide = concat!(env!("CARGO_MANIFEST_DIR"), "/../../../docs/how-to/ibgda-bring-up.md");
    let guide = std::fs::read_to_string(guide).unwrap();
    let after =
        guide.split_once("ibgda-bring-up connect 127.0.0.1:18515 --software-nic\n").unwrap().1;
    let shown: Vec<String> = after.lines().take_while(|line| *line != "```").map(blur).collect();
    let [_, connector] = pair(&["--software-nic"]);
    assert_eq!(connector.code, Some(0), "{}\n{}", connector.out, connector.err);
    let printed: Vec<String> = connector.out.lines().map(blur).collect();
    assert_eq!(shown, printed, "{}", connector.out);
}

/// A line without its numbers and addresses.
fn blur(line: &str) -> String {
    let is_number = |word: &str| {
        let word = word.trim_matches([',', ';', ':', '.', '(', ')']);
        let digits = word.strip_prefix("0x").unwrap_or(word);
        !digits.is_empty()
            && digits.chars().all(|c| c.is_ascii_hexdigit() || c == ':')
            && digits.contains(|c: char| c.is_ascii_digit() || c == ':')
    };
    let blurred = |word: &str| if is_number(word) { "#".to_owned() } else { word.to_owned() };
    line.split(' ').map(blurred).collect::<Vec<_>>().join(" ")
}
