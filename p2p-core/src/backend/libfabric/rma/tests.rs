use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{Rng, RngExt, SeedableRng};

use super::*;
use crate::backend::skip::skip;
use crate::region::Region;

const LIMIT: Duration = Duration::from_secs(30);

/// A fabric, or the reason why there is none, loudly.
fn open(provider: &str) -> Option<LibfabricFabric> {
    match LibfabricFabric::open(provider, Some([127, 0, 0, 1].into())) {
        Ok(fabric) => Some(fabric),
        Err(error) => {
            skip("libfabric", &error.to_string());
            None
        }
    }
}

fn joined(a: &mut LibfabricFabric, b: &mut LibfabricFabric) -> (PeerId, PeerId) {
    let (to_b, of_a) = a.open_peer().unwrap();
    let (to_a, of_b) = b.open_peer().unwrap();
    a.join_peer(to_b, &of_b).unwrap();
    b.join_peer(to_a, &of_a).unwrap();
    (to_b, to_a)
}

fn memory(fabric: &mut LibfabricFabric, bytes: usize, access: Access) -> (Region, RegionId) {
    let region = Region::anonymous(bytes).unwrap();
    // SAFETY: the tests keep their regions as long as the fabric.
    let id = unsafe { fabric.register(region.as_ptr(), bytes, access).unwrap() };
    (region, id)
}

fn bytes_of(region: &Region) -> Vec<u8> {
    let mut out = vec![0; region.len()];
    // SAFETY: nothing is under way.
    unsafe {
        std::ptr::copy_nonoverlapping(region.as_ptr().as_ptr(), out.as_mut_ptr(), out.len());
    }
    out
}

fn fill(region: &Region, bytes: &[u8]) {
    assert!(bytes.len() <= region.len());
    // SAFETY: nothing is under way.
    unsafe {
        std::ptr::copy_nonoverlapping(bytes.as_ptr(), region.as_ptr().as_ptr(), bytes.len());
    }
}

/// Posts until it is taken, while both sides go on.
fn insist(
    a: &mut LibfabricFabric,
    b: &mut LibfabricFabric,
    done: &mut Vec<Completion>,
    mut post: impl FnMut(&mut LibfabricFabric) -> Result<Posted, PostError>,
) {
    let deadline = Instant::now() + LIMIT;
    while post(a).unwrap() == Posted::Full {
        assert!(Instant::now() < deadline, "not taken");
        a.poll(done);
        b.poll(&mut Vec::new());
    }
}

fn collect(
    a: &mut LibfabricFabric,
    b: &mut LibfabricFabric,
    done: &mut Vec<Completion>,
    num: usize,
) {
    let deadline = Instant::now() + LIMIT;
    while done.len() < num {
        assert!(Instant::now() < deadline, "{} of {num} completions", done.len());
        a.poll(done);
        b.poll(&mut Vec::new());
    }
}

fn round_trips(provider: &str) {
    let (Some(mut a), Some(mut b)) = (open(provider), open(provider)) else { return };
    let seed = rand::random();
    println!("seed {seed}");
    let mut rng = StdRng::seed_from_u64(seed);
    let (to_b, _) = joined(&mut a, &mut b);
    let bytes = 3 << 20;
    let (source, source_id) = memory(&mut a, bytes, Access::Local);
    let (back, back_id) = memory(&mut a, bytes, Access::Local);
    let (target, target_id) = memory(&mut b, bytes, Access::RemoteReadWrite);
    let region = b.describe(target_id).unwrap();
    assert!(a.describe(source_id).is_none(), "a local registration has no description");
    let mut expected = vec![0xa5; bytes];
    fill(&target, &expected);
    let mut data = vec![0; bytes];
    rng.fill_bytes(&mut data);
    fill(&source, &data);
    let mut done = Vec::new();
    // Pieces that tile the target, in a random order, some of them empty.
    let mut cuts: Vec<usize> = (0..60).map(|_| rng.random_range(0..=bytes)).collect();
    cuts.extend([0, bytes]);
    cuts.sort_unstable();
    let num = cuts.len() - 1;
    for (nth, ends) in cuts.windows(2).enumerate() {
        if nth % 3 == 2 {
            done.push(Completion { token: Token(nth as u64), result: Ok(()) });
            continue;
        }
        let (offset, len) = (ends[0] as u64, (ends[1] - ends[0]) as u64);
        expected[ends[0]..ends[1]].copy_from_slice(&data[ends[0]..ends[1]]);
        let src = LocalSegment { region: source_id, offset, bytes: len };
        insist(&mut a, &mut b, &mut done, |a| {
            // SAFETY: `source` is not written.
            unsafe { a.write(to_b, RemoteSegment { region, offset }, src, Token(nth as u64)) }
        });
    }
    collect(&mut a, &mut b, &mut done, num);
    let mut tokens: Vec<u64> = done
        .iter()
        .map(|completion| {
            assert!(completion.result.is_ok(), "{completion:?}");
            completion.token.0
        })
        .collect();
    tokens.sort_unstable();
    assert_eq!(tokens, (0..num as u64).collect::<Vec<_>>(), "each once");
    assert!(bytes_of(&target) == expected, "seed {seed}");
    done.clear();
    let dst = LocalSegment { region: back_id, offset: 0, bytes: bytes as u64 };
    insist(&mut a, &mut b, &mut done, |a| {
        // SAFETY: `back` is not touched before the completion.
        unsafe { a.read(to_b, dst, RemoteSegment { region, offset: 0 }, Token(7)) }
    });
    collect(&mut a, &mut b, &mut done, 1);
    assert!(done[0].result.is_ok() && bytes_of(&back) == expected, "seed {seed}");
}

#[test]
fn writes_and_reads_over_tcp() {
    round_trips("tcp;ofi_rxm");
}

#[test]
fn writes_and_reads_over_shm() {
    round_trips("shm");
}

#[test]
fn a_wrong_key_fails_the_operation_and_touches_nothing() {
    let (Some(mut a), Some(mut b)) = (open("tcp;ofi_rxm"), open("tcp;ofi_rxm")) else { return };
    let (to_b, _) = joined(&mut a, &mut b);
    let (_source, source_id) = memory(&mut a, 4096, Access::Local);
    let (target, target_id) = memory(&mut b, 4096, Access::RemoteReadWrite);
    fill(&target, &[0xa5; 4096]);
    let mut region = b.describe(target_id).unwrap();
    region.key ^= 1 << 7;
    let mut done = Vec::new();
    let src = LocalSegment { region: source_id, offset: 0, bytes: 4096 };
    insist(&mut a, &mut b, &mut done, |a| {
        // SAFETY: `source` is not written.
        unsafe { a.write(to_b, RemoteSegment { region, offset: 0 }, src, Token(1)) }
    });
    collect(&mut a, &mut b, &mut done, 1);
    assert!(done[0].result.is_err(), "{done:?}");
    assert!(bytes_of(&target).iter().all(|byte| *byte == 0xa5));
}

#[test]
fn ranges_and_peers_that_do_not_exist_are_refused_at_once() {
    let Some(mut a) = open("tcp;ofi_rxm") else { return };
    let (_memory, id) = memory(&mut a, 4096, Access::RemoteReadWrite);
    let (peer, _) = a.open_peer().unwrap();
    let mut region = a.describe(id).unwrap();
    region.bytes = 4096;
    let local = |offset, bytes| LocalSegment { region: id, offset, bytes };
    let mut write = |offset, src, peer| {
        // SAFETY: nothing is posted: every call is refused.
        unsafe { a.write(peer, RemoteSegment { region, offset }, src, Token(1)) }.unwrap_err()
    };
    for offset in [1, 4096, u64::MAX] {
        let error = write(offset, local(0, 4096), peer);
        assert!(matches!(error, PostError::RemoteRange { .. }), "{error}");
    }
    for (offset, bytes) in [(1, 4096), (u64::MAX, 2), (4097, 0)] {
        let error = write(0, local(offset, bytes), peer);
        assert!(matches!(error, PostError::Unregistered { .. }), "{error}");
    }
    let error = write(0, local(0, 8), peer);
    assert!(matches!(error, PostError::Disconnected { .. }), "not joined: {error}");
    let error = write(0, local(0, 8), PeerId(77));
    assert!(matches!(error, PostError::Disconnected { .. }), "unknown: {error}");
    for detail in [&b""[..], b"SYL1", b"XXXXaddress", &[b'S'; 600]] {
        assert!(a.join_peer(peer, detail).is_err());
    }
    a.deregister(id).unwrap();
    assert!(a.deregister(id).is_err() && a.describe(id).is_none());
}

#[test]
fn closing_a_silent_peer_fails_what_is_under_way_exactly_once() {
    let (Some(mut a), Some(mut b)) = (open("tcp;ofi_rxm"), open("tcp;ofi_rxm")) else { return };
    let (to_b, _) = joined(&mut a, &mut b);
    let (_back, back_id) = memory(&mut a, 1 << 20, Access::Local);
    let (_target, target_id) = memory(&mut b, 1 << 20, Access::RemoteReadWrite);
    let region = b.describe(target_id).unwrap();
    let (mut done, remote) = (Vec::new(), RemoteSegment { region, offset: 0 });
    let dst = LocalSegment { region: back_id, offset: 0, bytes: 1 << 20 };
    for nth in 0..4 {
        insist(&mut a, &mut b, &mut done, |a| {
            // SAFETY: `back` is not touched before the completion.
            unsafe { a.read(to_b, dst, remote, Token(nth)) }
        });
    }
    // The other side does nothing from now on, so at least the last ones cannot complete.
    a.close_peer(to_b);
    let deadline = Instant::now() + Duration::from_millis(200);
    while Instant::now() < deadline {
        a.poll(&mut done);
    }
    let mut tokens: Vec<u64> = done.iter().map(|completion| completion.token.0).collect();
    tokens.sort_unstable();
    assert_eq!(tokens, [0, 1, 2, 3], "{done:?}");
    assert!(done.iter().any(|completion| completion.result.is_err()));
    assert_eq!(a.free.len(), NUM_CONTEXTS as usize, "contexts came back");
    // And the fabric goes on with a new peer.
    done.clear();
    let (again, _) = joined(&mut a, &mut b);
    insist(&mut a, &mut b, &mut done, |a| {
        // SAFETY: as above.
        unsafe { a.read(again, dst, remote, Token(9)) }
    });
    collect(&mut a, &mut b, &mut done, 1);
    assert!(done[0].result.is_ok(), "{done:?}");
}

#[test]
fn revoking_memory_in_use_ends_the_operations_that_use_it() {
    let (Some(mut a), Some(mut b)) = (open("tcp;ofi_rxm"), open("tcp;ofi_rxm")) else { return };
    let (to_b, _) = joined(&mut a, &mut b);
    let (_back, back_id) = memory(&mut a, 1 << 20, Access::Local);
    let (_target, target_id) = memory(&mut b, 1 << 20, Access::RemoteReadWrite);
    let (region, mut done) = (b.describe(target_id).unwrap(), Vec::new());
    let dst = LocalSegment { region: back_id, offset: 0, bytes: 1 << 20 };
    insist(&mut a, &mut b, &mut done, |a| {
        // SAFETY: `back` is not touched before the completion.
        unsafe { a.read(to_b, dst, RemoteSegment { region, offset: 0 }, Token(3)) }
    });
    a.deregister(back_id).unwrap();
    a.poll(&mut done);
    assert!(matches!(&done[..], [Completion { token: Token(3), .. }]), "{done:?}");
}
