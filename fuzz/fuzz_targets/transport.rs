//! Input from a peer that has joined, below the slots. This is messages and mail over libfabric and their order,
//! requests and answers of the engine over TCP, and the table that a peer on the same host shares.

#![no_main]

use libfabric_transport::fuzzing::{check_mail, check_message, check_order};
use libfuzzer_sys::fuzz_target;
use message_engine::fabric::fuzzing::{check_cma_table, check_tcp};

// The first byte is the kind of the rest.
fuzz_target!(|input: &[u8]| {
    let Some((kind, input)) = input.split_first() else { return };
    match kind % 5 {
        0 => check_message(input),
        1 => check_mail(input),
        2 => check_order(input),
        3 => check_tcp(input),
        _ => check_cma_table(input),
    }
});
