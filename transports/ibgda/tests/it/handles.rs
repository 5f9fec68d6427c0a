//! Errors in a handle, found in Rust and in C.

use crate::mock;
use std::collections::BTreeSet;
use std::fs::File;
use std::process::{Command, Stdio};
use std::ptr;

use kernels::mlx5::{Bound, CQ_COLLAPSED, ONE_BLOCK, PeerHandle, QueueHandle, ReceiveHandle};
use switchyard_ibgda::queue::{check_peer, check_queue, check_receives};

const PROGRAM: &str = r#"
#include <stdio.h>
#include <switchyard/comm/mlx5/receive_queue.h>

int main(int num_args, char** args) {
    sy_mlx5_qp qp;
    sy_ibgda_peer peer;
    if (num_args > 1 && args[1][0] == 'p') {
        while (fread(&peer, sizeof peer, 1, stdin) == 1) {
            const char* what = sy_ibgda_check_peer(&peer);
            puts(what ? what : "");
        }
        return 0;
    }
    sy_mlx5_rq rq;
    if (num_args > 1 && args[1][0] == 'r') {
        while (fread(&rq, sizeof rq, 1, stdin) == 1) {
            const char* what = sy_mlx5_check_rq(&rq);
            puts(what ? what : "");
        }
        return 0;
    }
    while (fread(&qp, sizeof qp, 1, stdin) == 1) {
        const char* what = sy_mlx5_check_qp(&qp);
        puts(what ? what : "");
    }
    return 0;
}
"#;

const GOOD: QueueHandle = QueueHandle {
    sq: 0x1_0000,
    dbrec: 0x2_0008,
    doorbell: 0x3_0800,
    cq: 0x4_0040,
    cq_dbrec: 0x5_0010,
    state: 0x6_0000,
    scratch: 0x6_0400,
    host_error: 0x7_0000,
    scratch_lkey: 7,
    qpn: 0x1a0,
    sq_depth: 256,
    cq_depth: 512,
    flags: 0,
    batch: 64,
    max_message_bytes: 1 << 30,
    peer: 3,
};
const ADDRESSES: [u64; 8] = [0, 1, 4, 8, 32, 64, 0x1008, u64::MAX - 63];
const NUMBERS: [u32; 22] = [
    0,
    1,
    2,
    3,
    31,
    32,
    33,
    64,
    65,
    100,
    127,
    128,
    129,
    256,
    384,
    32_768,
    65_536,
    0xff_ffff,
    0x100_0000,
    1 << 30,
    (1 << 30) + 1,
    u32::MAX,
];

/// Valid handles, and handles with one to three changed fields.
fn handles() -> Vec<QueueHandle> {
    let mut seed = 1_u64;
    let mut choose = move |num: usize| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(seed >> 33).unwrap() % num
    };
    let mut handles = vec![GOOD];
    while handles.len() < 20_000 {
        let mut handle = GOOD;
        if choose(2) == 0 {
            (handle.flags, handle.cq_depth) = (CQ_COLLAPSED | ONE_BLOCK, 1);
        }
        for _ in 0..choose(4) {
            let (address, number) = (ADDRESSES[choose(8)], NUMBERS[choose(22)]);
            match choose(14) {
                0 => handle.sq = address,
                1 => handle.dbrec = address,
                2 => handle.doorbell = address,
                3 => handle.cq = address,
                4 => handle.cq_dbrec = address,
                5 => handle.state = address,
                6 => handle.scratch = address,
                7 => handle.qpn = number,
                8 => handle.sq_depth = number,
                9 => handle.cq_depth = number,
                10 => handle.flags = number,
                11 => handle.batch = number,
                12 => handle.host_error = address,
                _ => handle.max_message_bytes = number,
            }
        }
        handles.push(handle);
    }
    handles
}

/// Results of C for each handle, given as bytes.
fn in_c(what: &str, bytes: &[u8]) -> Vec<String> {
    let dir = tempfile::tempdir().unwrap();
    let [source, program, input] =
        ["check.c", "check", "handles"].map(|name| dir.path().join(name));
    std::fs::write(&source, PROGRAM).unwrap();
    let flags = ["-std=c11", "-Wall", "-Wextra", "-Werror", "-I", kernels::INCLUDE_DIR];
    mock::compile(&flags, &source, &program);
    std::fs::write(&input, bytes).unwrap();
    let stdin = Stdio::from(File::open(&input).unwrap());
    let output = Command::new(&program).arg(what).stdin(stdin).output().unwrap();
    assert!(output.status.success());
    let text = String::from_utf8(output.stdout).unwrap();
    text.lines().map(str::to_owned).collect()
}

#[test]
fn rust_and_c_say_the_same_of_queues() {
    let handles = handles();
    let bytes: Vec<u8> = handles
        .iter()
        .flat_map(|handle| {
            // SAFETY: the structure has no padding: eight addresses and eight words.
            unsafe { std::mem::transmute::<QueueHandle, [u8; 96]>(*handle) }
        })
        .collect();
    let in_c = in_c("queues", &bytes);
    assert_eq!(in_c.len(), handles.len());
    for (handle, in_c) in handles.iter().zip(&in_c) {
        assert_eq!(check_queue(handle).unwrap_or(""), in_c, "{handle:?}");
    }
    // Each of the thirteen objections, and none.
    let seen: BTreeSet<String> = in_c.into_iter().collect();
    assert_eq!(seen.len(), 14, "{seen:?}");
}

const GOOD_RECEIVES: ReceiveHandle = ReceiveHandle {
    dbrec: 0x2_0008,
    cq: 0x4_0040,
    cq_dbrec: 0x5_0010,
    state: 0x6_0800,
    qpn: 0x1a0,
    cq_depth: 64,
    num_receives: 33,
    peer: 3,
};

#[test]
fn rust_and_c_say_the_same_of_receives() {
    let mut all = vec![GOOD_RECEIVES];
    for address in ADDRESSES {
        let good = GOOD_RECEIVES;
        all.push(ReceiveHandle { dbrec: address, ..good });
        all.push(ReceiveHandle { cq: address, ..good });
        all.push(ReceiveHandle { cq_dbrec: address, ..good });
        all.push(ReceiveHandle { state: address, ..good });
    }
    for number in NUMBERS {
        all.push(ReceiveHandle { qpn: number, ..GOOD_RECEIVES });
        for cq_depth in NUMBERS.into_iter().chain([1 << 22, 1 << 23]) {
            all.push(ReceiveHandle { num_receives: number, cq_depth, ..GOOD_RECEIVES });
        }
    }
    let bytes: Vec<u8> = all
        .iter()
        .flat_map(|handle| {
            // SAFETY: the structure has no padding: four addresses and four words.
            unsafe { std::mem::transmute::<ReceiveHandle, [u8; 48]>(*handle) }
        })
        .collect();
    let in_c = in_c("receives", &bytes);
    assert_eq!(in_c.len(), all.len());
    for (handle, in_c) in all.iter().zip(&in_c) {
        assert_eq!(check_receives(handle).unwrap_or(""), in_c, "{handle:?}");
    }
    // Each of the six objections, and none.
    let seen: BTreeSet<String> = in_c.into_iter().collect();
    assert_eq!(seen.len(), 7, "{seen:?}");
}

const GOOD_PEER: PeerHandle = PeerHandle {
    qps: 0x1000,
    mirror: 0x1_0000,
    remote: 0x2_0040,
    slot_bytes: 4096,
    lkey: 1,
    rkey: 2,
    num_qps: 1,
    reserved: 0,
    bound: Bound { error: ptr::null_mut(), abort_mask: ptr::null(), timeout_ns: 1 },
};

/// Kernels divide by the number of queues: neither side lets 0 pass.
#[test]
fn rust_and_c_say_the_same_of_peers() {
    let mut peers = Vec::new();
    for num_qps in [0, 1, 64] {
        for qps in ADDRESSES {
            for (mirror, remote) in ADDRESSES.iter().flat_map(|m| ADDRESSES.map(|r| (*m, r))) {
                for slot_bytes in [0, 1, 63, 64, 4096, u64::MAX - 63, u64::MAX] {
                    let good = GOOD_PEER;
                    peers.push(PeerHandle { qps, mirror, remote, slot_bytes, num_qps, ..good });
                }
            }
        }
    }
    let bytes: Vec<u8> = peers
        .iter()
        .flat_map(|peer| {
            // SAFETY: the structure has no padding: seven addresses and numbers, and four words.
            unsafe { std::mem::transmute::<PeerHandle, [u8; 72]>(*peer) }
        })
        .collect();
    let in_c = in_c("peers", &bytes);
    assert_eq!(in_c.len(), peers.len());
    for (peer, in_c) in peers.iter().zip(&in_c) {
        assert_eq!(check_peer(peer).unwrap_or(""), in_c, "{peer:?}");
    }
    // Each of the six objections, and none.
    let seen: BTreeSet<String> = in_c.into_iter().collect();
    assert_eq!(seen.len(), 7, "{seen:?}");
}

#[test]
fn a_peer_that_kernels_cannot_use_is_named_by_field() {
    let good = GOOD_PEER;
    assert_eq!(check_peer(&good), None);
    let cases = [
        ("num_qps is 0", PeerHandle { num_qps: 0, ..good }),
        ("qps is null", PeerHandle { qps: 0, ..good }),
        ("qps is null or not aligned", PeerHandle { qps: 12, ..good }),
        ("mirror", PeerHandle { mirror: 32, ..good }),
        ("remote", PeerHandle { remote: 0, ..good }),
        ("slot_bytes is 0", PeerHandle { slot_bytes: 0, ..good }),
        ("beyond the last address", PeerHandle { remote: u64::MAX - 4095, ..good }),
        ("beyond the last address", PeerHandle { mirror: u64::MAX - 63, ..good }),
    ];
    for (part, handle) in cases {
        assert!(check_peer(&handle).is_some_and(|what| what.contains(part)), "{part}");
    }
}
