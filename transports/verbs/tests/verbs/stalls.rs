//! A device that neither answers nor reports a failure. Retries alone would take minutes here, so the stall limit
//! ends the wait.

use std::time::Instant;

use p2p_core::Region;
use p2p_core::endpoint::{Endpoint, PostError, Progress, QuietError};
use p2p_core::fabric::{
    Access, Completion, Fabric, LocalSegment, PostOutcome, RemoteSegment, Token,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use switchyard_verbs::{VerbsConfig, VerbsFabric, VerbsNetwork};

use crate::common::{
    LIMIT, bytes_of, is_possible, join, layout, pair, put, register, store, wait_one,
};

/// Far longer than completions take on a busy machine, far shorter than the retries.
const STALL_MS: u64 = 3000;

fn said() -> String {
    format!("nothing completed for {STALL_MS} ms")
}

fn config() -> VerbsConfig {
    // 17 s for the first of seven retries.
    VerbsConfig {
        ack_timeout: 22,
        retry_count: 7,
        stall_timeout_ms: STALL_MS,
        ..Default::default()
    }
}

fn check(error: &PostError) {
    let text = error.to_string();
    let code = i64::from(libc::ETIMEDOUT);
    assert!(matches!(error, PostError::Transport { op: "put", code: found, .. } if *found == code));
    for part in ["127.0.0.1", &said(), "stall_timeout_ms"] {
        assert!(text.contains(part), "{text} lacks {part}");
    }
}

#[test]
fn operations_of_a_fabric_fail_within_the_limit() {
    if !is_possible() {
        return;
    }
    let (mut a, mut b) =
        (VerbsFabric::open(config()).unwrap(), VerbsFabric::open(config()).unwrap());
    let (source, target) = (Region::anonymous(4096).unwrap(), Region::anonymous(4096).unwrap());
    let from = register(&mut a, &source, Access::Local);
    let into = register(&mut b, &target, Access::RemoteReadWrite);
    let wire = b.describe(into).unwrap();
    let dst = RemoteSegment { region: wire, offset: 0 };
    let src = LocalSegment { region: from, offset: 0, bytes: 4096 };
    let (bystander, _) = join(&mut a, &mut b);
    for sleeps in [false, true] {
        let (at_a, at_b) = join(&mut a, &mut b);
        // SAFETY: the source is not written before the completion.
        assert_eq!(unsafe { a.write(at_a, dst, src, Token(1)) }.unwrap(), PostOutcome::Accepted);
        assert!(wait_one(&mut a).result.is_ok());
        b.close_peer(at_b);
        for token in 0..20 {
            // SAFETY: as above.
            let posted = unsafe { a.write(at_a, dst, src, Token(token)) }.unwrap();
            assert_eq!(posted, PostOutcome::Accepted);
        }
        let ended = ends(&mut a, 20, sleeps);
        for (expected, Completion { token, result }) in ended.into_iter().enumerate() {
            assert_eq!(token, Token(expected as u64));
            let error = result.unwrap_err();
            check(&error);
            // The error names the range and the key of the operation under way.
            let range = format!("4096 bytes at {:#x} with key {:#x}", wire.address, wire.key);
            assert!(error.to_string().contains(&range), "{error} lacks {range}");
        }
        // The peer stays failed and its number is not reused. Other peers continue with the same memory.
        // SAFETY: nothing is posted.
        check(&unsafe { a.write(at_a, dst, src, Token(0)) }.unwrap_err());
        a.close_peer(at_a);
        let (next, _) = join(&mut a, &mut b);
        assert_ne!(next, at_a);
        // SAFETY: nothing is posted.
        let gone = unsafe { a.write(at_a, dst, src, Token(0)) };
        assert!(matches!(gone, Err(PostError::Disconnected { .. })), "{gone:?}");
        store(&source, &[7 + u8::from(sleeps); 4096]);
        for peer in [bystander, next] {
            // SAFETY: no other code uses the target any more.
            unsafe { target.as_ptr().write_bytes(0xa5, 4096) };
            // SAFETY: the source is not written before the completion.
            let posted = unsafe { a.write(peer, dst, src, Token(2)) }.unwrap();
            assert_eq!(posted, PostOutcome::Accepted);
            assert!(wait_one(&mut a).result.is_ok());
            assert_eq!(bytes_of(&target), bytes_of(&source));
        }
    }
}

/// Waits for the next `count` completions, by busy polling or by sleeping as long as allowed.
fn ends(fabric: &mut VerbsFabric, count: usize, sleeps: bool) -> Vec<Completion> {
    let deadline = Instant::now() + LIMIT;
    let mut out = Vec::new();
    while out.len() < count {
        assert!(Instant::now() < deadline, "only {} of {count} have ended", out.len());
        if sleeps && fabric.may_sleep() {
            let longest = fabric.max_sleep().min(LIMIT);
            let timeout = Timespec {
                tv_sec: longest.as_secs().cast_signed(),
                tv_nsec: longest.subsec_nanos().into(),
            };
            let fd = fabric.wait_fd().unwrap();
            poll(&mut [PollFd::from_borrowed_fd(fd, PollFlags::IN)], Some(&timeout)).unwrap();
        }
        fabric.poll(&mut out);
        std::thread::yield_now();
    }
    out
}

#[test]
fn waits_of_an_endpoint_end_within_the_limit() {
    if !is_possible() {
        return;
    }
    let network = VerbsNetwork::open(config()).unwrap();
    let layout = layout(64 << 10);
    for fills_the_queue in [false, true] {
        let (mut here, there) = pair(&network, &layout);
        let source = Region::anonymous(4096).unwrap();
        here.endpoint.register(&source).unwrap();
        put(&mut here.endpoint, &source, 0, 4096).unwrap();
        here.endpoint.quiet(Instant::now() + LIMIT).unwrap();
        drop(there);
        let deadline = Instant::now() + LIMIT;
        let failed = if fills_the_queue {
            // At some point there is no room, and the put waits for it.
            loop {
                assert!(Instant::now() < deadline, "the queue has no end");
                if let Err(error) = put(&mut here.endpoint, &source, 0, 4096) {
                    break error;
                }
            }
        } else {
            put(&mut here.endpoint, &source, 0, 4096).unwrap();
            match here.endpoint.quiet(deadline) {
                Err(QuietError::Post(error)) => error,
                other => panic!("{other:?}"),
            }
        };
        let code = i64::from(libc::ETIMEDOUT);
        assert!(
            matches!(failed, PostError::Transport { code: found, .. } if found == code),
            "{failed}"
        );
        assert!(failed.to_string().contains(&said()), "{failed}");
        assert!(here.endpoint.health().is_err());
        // This side may use the memory again.
        drop(here);
        store(&source, &[1; 4096]);
    }
}
