use std::fmt::Debug;

use super::{SlotArgs, TransportArgs};

/// A value of each option that is not its default.
fn sample(option: &str) -> &'static str {
    match option {
        "slot-bytes" => "16777216",
        "slot-frames" => "3",
        "transport" => "libfabric:tcp;ofi_rxm,shm",
        "verbs-config" => r#"{"gid_index": 3, "traffic_class": 106}"#,
        "ibgda-slots" => "host",
        "ibgda-path" => "devx",
        "ibgda-doorbell" => "register",
        "ibgda-queues" => "7",
        "ibgda-wait-limit-ms" => "1234",
        _ => panic!("--{option} is new: add it to to_args, and add a value here"),
    }
}

/// `to_args` passes on every option of `A`.
fn survive<A: clap::Args + Debug>(to_args: impl Fn(&A) -> Vec<String>) {
    let command = A::augment_args(clap::Command::new("child").no_binary_name(true));
    let parse = |line: &[String]| {
        let matches = command.clone().try_get_matches_from(line).expect("a good command line");
        A::from_arg_matches(&matches).expect("values of these options")
    };
    let options: Vec<[String; 2]> = command
        .get_arguments()
        .map(|arg| {
            let option = arg.get_long().expect("options have long names");
            [format!("--{option}"), sample(option).to_owned()]
        })
        .collect();
    for option in &options {
        let (given, default) = (parse(option), parse(&[]));
        assert_ne!(format!("{given:?}"), format!("{default:?}"), "{option:?} is the default");
    }
    let given = parse(&options.concat());
    assert_eq!(format!("{:?}", parse(&to_args(&given))), format!("{given:?}"));
}

#[test]
fn options_of_transports_reach_children() {
    survive::<TransportArgs>(|given| given.to_args(&given.transport));
}

/// After 15 s the server drops all clients over networks, so a queue's wait must be shorter.
#[cfg(feature = "ibgda")]
#[test]
fn kernels_wait_for_no_queue_longer_than_a_batch_may_take() {
    let parse = |limit: &str| {
        let command = clap::Command::new("child").no_binary_name(true);
        let command = <TransportArgs as clap::Args>::augment_args(command);
        command.try_get_matches_from(["--ibgda-wait-limit-ms", limit]).map(drop)
    };
    for (limit, is_good) in [("1", true), ("9000", true), ("9001", false), ("0", false)] {
        assert_eq!(parse(limit).is_ok(), is_good, "{limit} ms");
    }
}

#[test]
fn options_of_slots_reach_children() {
    survive::<SlotArgs>(SlotArgs::to_args);
}
