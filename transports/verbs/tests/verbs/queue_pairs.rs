//! A fabric with several queue pairs per peer, at one port or at those of several devices.

use std::time::Instant;

use p2p_core::Region;
use p2p_core::fabric::{Access, Fabric, LocalSegment, PeerId, PostOutcome, RemoteSegment, Token};
use rand::Rng;
use switchyard_verbs::{VerbsConfig, VerbsFabric};

use crate::common::{LIMIT, bytes_of, is_possible, join, register, seeded, store};

/// Opens the ports of two devices if the test names them, as `rxe0+rxe1`. Otherwise opens the first device's port.
fn open(queue_pairs_per_port: u32) -> VerbsFabric {
    let ports = std::env::var("SWITCHYARD_TEST_PORTS");
    let base = ports.map_or_else(|_| VerbsConfig::default(), |ports| VerbsConfig::on(&ports));
    let config = VerbsConfig {
        queue_pairs_per_port,
        stripe_bytes: STRIPE as usize,
        ack_timeout: 16,
        retry_count: 3,
        ..base
    };
    VerbsFabric::open(config).unwrap()
}

const STRIPE: u64 = 64 << 10;
const DEPTH: usize = 128;

/// Moves `parts` parts of one stripe each in both directions. Returns the maximum number of operations under way.
fn exchange(a: &mut VerbsFabric, at_a: PeerId, b: &mut VerbsFabric, parts: u64) -> usize {
    let bytes = (parts * STRIPE) as usize;
    let mut rng = seeded();
    let mut expected = vec![0; bytes];
    rng.fill_bytes(&mut expected);
    let (near, far) = (Region::anonymous(bytes).unwrap(), Region::anonymous(bytes).unwrap());
    let (from, into) =
        (register(a, &near, Access::Local), register(b, &far, Access::RemoteReadWrite));
    let wire = b.describe(into).unwrap();
    let mut most = 0;
    for is_read in [false, true] {
        if is_read {
            // SAFETY: nothing is under way.
            unsafe { near.as_ptr().write_bytes(0xa5, bytes) };
        } else {
            store(&near, &expected);
        }
        let (mut next, mut done, mut out) = (0, 0, Vec::new());
        let deadline = Instant::now() + LIMIT;
        while done < parts {
            assert!(Instant::now() < deadline, "{done} of {parts} parts");
            while next < parts {
                let here = LocalSegment { region: from, offset: next * STRIPE, bytes: STRIPE };
                let there = RemoteSegment { region: wire, offset: next * STRIPE };
                // SAFETY: every part is moved once, and no other code uses either memory meanwhile.
                let posted = unsafe {
                    if is_read {
                        a.read(at_a, here, there, Token(next))
                    } else {
                        a.write(at_a, there, here, Token(next))
                    }
                };
                if posted.unwrap() == PostOutcome::Full {
                    break;
                }
                next += 1;
                most = most.max((next - done) as usize);
            }
            a.poll(&mut out);
            done += out.len() as u64;
            out.drain(..).for_each(|part| part.result.unwrap());
            std::thread::yield_now();
        }
        assert!(bytes_of(if is_read { &near } else { &far }) == expected, "is_read: {is_read}");
    }
    a.deregister(from).unwrap();
    b.deregister(into).unwrap();
    most
}

#[test]
fn large_transfers_use_all_queue_pairs() {
    if !is_possible() {
        return;
    }
    let (mut a, mut b) = (open(3), open(3));
    println!("{}", a.ports());
    let num_queue_pairs = 3 * a.ports().split('+').count();
    assert_eq!(a.max_operation_bytes(), STRIPE, "so that a transfer is split for all of them");
    let (at_a, at_b) = join(&mut a, &mut b);
    // More at the same time than fit into all queue pairs but one.
    let most = exchange(&mut a, at_a, &mut b, 800);
    assert!(
        most > (num_queue_pairs - 1) * DEPTH && most <= num_queue_pairs * DEPTH,
        "{most} under way"
    );
    a.close_peer(at_a);
    b.close_peer(at_b);
}

#[test]
fn sides_with_different_numbers_of_queue_pairs_use_what_both_have() {
    if !is_possible() {
        return;
    }
    for (of_a, of_b) in [(3, 1), (1, 3), (2, 3)] {
        let (mut a, mut b) = (open(of_a), open(of_b));
        let (at_a, at_b) = join(&mut a, &mut b);
        let num_ports = a.ports().split('+').count();
        let shared = of_a.min(of_b) as usize * num_ports;
        let most = exchange(&mut a, at_a, &mut b, 200);
        assert!(most <= shared * DEPTH, "{most} under way by {shared}");
        exchange(&mut b, at_b, &mut a, 200);
    }
    // Also with all ports of one side against one port of the other.
    let (mut a, mut b) = (open(1), VerbsFabric::open(VerbsConfig::default()).unwrap());
    let (at_a, at_b) = join(&mut a, &mut b);
    exchange(&mut a, at_a, &mut b, 100);
    exchange(&mut b, at_b, &mut a, 100);
}

#[test]
fn a_failure_on_one_queue_pair_ends_all_of_the_peers() {
    if !is_possible() {
        return;
    }
    let (mut a, mut b) = (open(3), open(3));
    let (at_a, _at_b) = join(&mut a, &mut b);
    let (near, far) = (Region::anonymous(1 << 20).unwrap(), Region::anonymous(1 << 20).unwrap());
    let (from, into) =
        (register(&mut a, &near, Access::Local), register(&mut b, &far, Access::RemoteReadWrite));
    let good = RemoteSegment { region: b.describe(into).unwrap(), offset: 0 };
    let mut bad = good;
    bad.region.key ^= 0xff00_0000_ff00;
    let src = LocalSegment { region: from, offset: 0, bytes: STRIPE };
    let mut num_posted = 0;
    for token in 0..30 {
        let dst = if token == 15 { bad } else { good };
        // SAFETY: the source is not written.
        match unsafe { a.write(at_a, dst, src, Token(token)) } {
            Ok(PostOutcome::Accepted) => num_posted += 1,
            // The peer has failed already.
            Ok(PostOutcome::Full) | Err(_) => break,
        }
    }
    let (mut out, deadline) = (Vec::new(), Instant::now() + LIMIT);
    while out.len() < num_posted {
        assert!(Instant::now() < deadline, "{} of {num_posted} ended", out.len());
        a.poll(&mut out);
        std::thread::yield_now();
    }
    // Every operation ended once. The bad one ended as a failure that names it.
    let mut tokens: Vec<u64> = out.iter().map(|done| done.token.0).collect();
    tokens.sort_unstable();
    assert_eq!(tokens, (0..num_posted as u64).collect::<Vec<_>>());
    let failed = out.iter().find(|done| done.token == Token(15)).expect("it was accepted");
    let text = failed.result.as_ref().unwrap_err().to_string();
    assert!(text.contains(&format!("{:#x}", bad.region.key)), "{text}");
    // SAFETY: nothing is posted.
    assert!(unsafe { a.write(at_a, good, src, Token(99)) }.is_err());
}
