use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{Rng, RngExt, SeedableRng};

use super::grants::Limits;
use super::*;
use p2p_core::region::Region;
use test_support::skip;

const LIMIT: Duration = Duration::from_secs(30);

/// A fabric, or `None` with a skip message that gives the reason.
fn open(provider: &str) -> Option<LibfabricFabric> {
    match LibfabricFabric::open(provider, Some([127, 0, 0, 1].into())) {
        Ok(fabric) => Some(fabric),
        // No library, or no such provider in it.
        Err(error) if matches!(error.op, "load" | "fi_getinfo") => {
            skip("libfabric", &error.to_string());
            None
        }
        Err(error) => panic!("{provider} is here and does not open: {error}"),
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

/// Retries a post until it is accepted, while both sides make progress.
fn insist(
    a: &mut LibfabricFabric,
    b: &mut LibfabricFabric,
    done: &mut Vec<Completion>,
    mut post: impl FnMut(&mut LibfabricFabric) -> Result<PostOutcome, PostError>,
) {
    let deadline = Instant::now() + LIMIT;
    while post(a).unwrap() == PostOutcome::Full {
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
    // Another registration reuses its place: the old id does not name it.
    let (_memory, next) = memory(&mut a, 4096, Access::RemoteReadWrite);
    let error = a.deregister(id).unwrap_err().to_string();
    assert!(error.contains("was deregistered, and generation"), "{error}");
    assert!(a.describe(id).is_none() && a.describe(next).is_some());
    // SAFETY: refused.
    let stale =
        unsafe { a.write(peer, RemoteSegment { region, offset: 0 }, local(0, 8), Token(1)) };
    assert!(matches!(stale, Err(PostError::Unregistered { .. })), "{stale:?}");
    let stale = a.grant(peer, local(0, 8));
    assert!(matches!(stale, Err(PostError::Unregistered { .. })), "{stale:?}");
    a.deregister(next).unwrap();
}

/// A working provider has no failing queue, so the test makes the failure up.
#[test]
fn what_a_failed_queue_held_comes_back_with_the_word_of_its_failure() {
    let (Some(mut a), Some(mut b)) = (open("tcp;ofi_rxm"), open("tcp;ofi_rxm")) else { return };
    let (to_b, _) = joined(&mut a, &mut b);
    let (_back, back_id) = memory(&mut a, 1 << 20, Access::Local);
    let (_target, target_id) = memory(&mut b, 1 << 20, Access::RemoteReadWrite);
    let remote = RemoteSegment { region: b.describe(target_id).unwrap(), offset: 0 };
    let dst = LocalSegment { region: back_id, offset: 0, bytes: 1 << 20 };
    let mut done = Vec::new();
    for nth in 0..4 {
        insist(&mut a, &mut b, &mut done, |a| {
            // SAFETY: `back` is not touched before the peer is closed.
            unsafe { a.read(to_b, dst, remote, Token(nth)) }
        });
    }
    let error = CallError { op: "fi_cq_read", code: 5, text: "made up".to_owned() };
    for _ in 0..2 {
        a.fail_queue(Some(to_b.0 as usize), &error, &mut done);
    }
    let mut tokens: Vec<u64> = done.iter().map(|completion| completion.token.0).collect();
    tokens.sort_unstable();
    assert_eq!(tokens, [0, 1, 2, 3], "{done:?}");
    assert_eq!(a.free.len(), NUM_CONTEXTS as usize, "the library may still use the rest");
    assert_eq!(a.lost(), Some(to_b));
    done.clear();
    // SAFETY: refused.
    let refused = unsafe { a.read(to_b, dst, remote, Token(9)) };
    assert!(matches!(refused, Err(PostError::Disconnected { .. })), "{refused:?}");
    a.poll(&mut done);
    a.deregister(back_id).unwrap();
    a.close_peer(to_b);
    a.poll(&mut done);
    assert!(done.is_empty(), "reported twice: {done:?}");
    assert_eq!(a.lost(), None);
}

#[test]
fn a_granted_key_ends_with_its_peer_and_takes_nothing_from_others() {
    let (Some(mut a), Some(mut b)) = (open("tcp;ofi_rxm"), open("tcp;ofi_rxm")) else { return };
    let Some(mut c) = open("tcp;ofi_rxm") else { return };
    let ((to_b, from_a), (to_b_too, from_c)) = (joined(&mut a, &mut b), joined(&mut c, &mut b));
    let (source, source_id) = memory(&mut a, 4096, Access::Local);
    let (_, source_id_too) = memory(&mut c, 4096, Access::Local);
    let (target, target_id) = memory(&mut b, 4096, Access::RemoteReadWrite);
    let (_, private) = memory(&mut b, 4096, Access::Local);
    let part = LocalSegment { region: target_id, offset: 0, bytes: 100 };
    let (for_a, for_c) = (b.grant(from_a, part).unwrap(), b.grant(from_c, part).unwrap());
    let (for_a, for_c) = (for_a.region, for_c.region);
    let of_all = b.describe(target_id).unwrap();
    assert!(for_a.key != for_c.key && for_a.key != of_all.key && for_c.key != of_all.key);
    let later = LocalSegment { offset: 77, ..part };
    let again = b.grant(from_a, later).unwrap();
    assert_eq!((again.region, again.offset), (for_a, 77), "one for each peer");
    let beyond = LocalSegment { offset: 4000, ..part };
    let not_for_peers = LocalSegment { region: private, ..part };
    for refused in [(from_a, not_for_peers), (from_a, beyond), (PeerId(77), part)] {
        assert!(b.grant(refused.0, refused.1).is_err(), "{refused:?}");
    }
    fill(&source, &[7; 4096]);
    let mut done = Vec::new();
    let src = |region| LocalSegment { region, offset: 0, bytes: 4096 };
    let at = |region| RemoteSegment { region, offset: 0 };
    insist(&mut a, &mut b, &mut done, |a| {
        // SAFETY: the source is not written.
        unsafe { a.write(to_b, at(for_a), src(source_id), Token(1)) }
    });
    collect(&mut a, &mut b, &mut done, 1);
    assert!(done[0].result.is_ok() && bytes_of(&target) == [7; 4096], "{done:?}");
    b.close_peer(from_a);
    done.clear();
    // Another peer cannot use the key.
    for (region, is_allowed) in [(for_c, true), (of_all, true), (for_a, false)] {
        insist(&mut c, &mut b, &mut done, |c| {
            // SAFETY: as above.
            unsafe { c.write(to_b_too, at(region), src(source_id_too), Token(2)) }
        });
        collect(&mut c, &mut b, &mut done, 1);
        assert_eq!(done.pop().unwrap().result.is_ok(), is_allowed, "{region:?}");
    }
    b.deregister(target_id).unwrap();
}

#[test]
fn keys_of_ended_messages_make_room_and_those_in_use_work_on() {
    let (Some(mut a), Some(mut b)) = (open("tcp;ofi_rxm"), open("tcp;ofi_rxm")) else { return };
    let (to_b, from_a) = joined(&mut a, &mut b);
    let (source, source_id) = memory(&mut a, 4096, Access::Local);
    let targets: Vec<_> = (0..3).map(|_| memory(&mut b, 4096, Access::RemoteReadWrite)).collect();
    let part = |nth: usize| LocalSegment { region: targets[nth].1, offset: 0, bytes: 4096 };
    b.grants.limits = Limits { bytes: 8192, num_keys: 16 };
    let first = b.grant(from_a, part(0)).unwrap();
    let second = b.grant(from_a, part(1)).unwrap();
    let error = b.grant(from_a, part(2)).unwrap_err().to_string();
    assert!(error.contains("no room to open a buffer of 4096 bytes"), "{error}");
    b.end_grant(from_a, part(0));
    let third = b.grant(from_a, part(2)).unwrap();
    fill(&source, &[7; 4096]);
    let (mut done, src) = (Vec::new(), LocalSegment { region: source_id, offset: 0, bytes: 4096 });
    // A write with a revoked key loses the connection, so that comes last.
    for (to, nth, is_allowed) in [(second, 1, true), (third, 2, true), (first, 0, false)] {
        insist(&mut a, &mut b, &mut done, |a| {
            // SAFETY: the source is not written.
            unsafe { a.write(to_b, to, src, Token(1)) }
        });
        collect(&mut a, &mut b, &mut done, 1);
        assert_eq!(done.pop().unwrap().result.is_ok(), is_allowed, "{nth}");
        let expected = if is_allowed { 7 } else { 0 };
        assert!(bytes_of(&targets[nth].0) == [expected; 4096], "{nth}");
    }
    // The key is only used for memory that is present.
    b.deregister(targets[1].1).unwrap();
    b.end_grant(from_a, part(1));
    b.end_grant(PeerId(77), part(2));
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
    // The other side makes no progress from now on, so at least the last ones cannot complete.
    a.close_peer(to_b);
    let deadline = Instant::now() + LIMIT;
    while done.len() < 4 || a.free.len() < NUM_CONTEXTS as usize {
        assert!(Instant::now() < deadline, "{} contexts are back: {done:?}", a.free.len());
        a.poll(&mut done);
    }
    // No completion comes a second time.
    for _ in 0..100 {
        a.poll(&mut done);
    }
    let mut tokens: Vec<u64> = done.iter().map(|completion| completion.token.0).collect();
    tokens.sort_unstable();
    assert_eq!(tokens, [0, 1, 2, 3], "{done:?}");
    assert!(done.iter().any(|completion| completion.result.is_err()));
    assert_eq!(a.free.len(), NUM_CONTEXTS as usize, "a context came back twice");
    // The fabric continues with a new peer.
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

/// Imitates a provider whose registrations belong to the endpoint. The code is the same.
fn share_the_endpoint(fabric: &mut LibfabricFabric) {
    fabric.is_shared = true;
    fabric.watch(fabric.port.queue(), SHARED_QUEUE).unwrap();
}

#[test]
fn what_ends_after_its_peer_was_closed_counts_for_nobody_else() {
    let (Some(mut a), Some(mut b)) = (open("tcp;ofi_rxm"), open("tcp;ofi_rxm")) else { return };
    share_the_endpoint(&mut a);
    share_the_endpoint(&mut b);
    let (to_b, _) = joined(&mut a, &mut b);
    let (_back, back_id) = memory(&mut a, 1 << 20, Access::Local);
    let (_target, target_id) = memory(&mut b, 1 << 20, Access::RemoteReadWrite);
    let remote = RemoteSegment { region: b.describe(target_id).unwrap(), offset: 0 };
    let dst = LocalSegment { region: back_id, offset: 0, bytes: 1 << 20 };
    let mut done = Vec::new();
    for nth in 0..4 {
        insist(&mut a, &mut b, &mut done, |a| {
            // SAFETY: `back` is not touched before the completions.
            unsafe { a.read(to_b, dst, remote, Token(nth)) }
        });
    }
    // At least the last operations still run when the peer is closed and another one takes its
    // number.
    assert!(done.len() < 4, "{done:?}");
    a.close_peer(to_b);
    let error = a.deregister(back_id).unwrap_err().to_string();
    assert!(error.contains("a read of 1048576 bytes is under way"), "{error}");
    let (again, _) = joined(&mut a, &mut b);
    assert_eq!(again, to_b, "numbers are used again");
    let num_operations =
        |a: &LibfabricFabric| a.peers[again.0 as usize].as_ref().unwrap().num_operations;
    assert_eq!(num_operations(&a), 0);
    collect(&mut a, &mut b, &mut done, 4);
    let mut tokens: Vec<u64> = done.iter().map(|completion| completion.token.0).collect();
    tokens.sort_unstable();
    assert_eq!(tokens, [0, 1, 2, 3], "{done:?}");
    assert_eq!(num_operations(&a), 0, "nobody counts below nothing");
    assert_eq!(a.free.len(), NUM_CONTEXTS as usize, "contexts came back");
    done.clear();
    insist(&mut a, &mut b, &mut done, |a| {
        // SAFETY: as above.
        unsafe { a.read(again, dst, remote, Token(9)) }
    });
    collect(&mut a, &mut b, &mut done, 1);
    assert!(done[0].result.is_ok(), "{done:?}");
    a.deregister(back_id).unwrap();
}

/// Makes the library refuse to close a registration until it is dropped.
struct Refusing {
    fid: *mut sys::Fid,
    real: *mut sys::Ops,
}

unsafe extern "C" fn refuse(_: *mut sys::Fid) -> std::ffi::c_int {
    -16
}

impl Refusing {
    fn at(registered: &MemoryRegistration) -> Self {
        let fid = registered.fid();
        // SAFETY: a live object that only this thread uses; its table is copied bit by bit, and the
        // copy stays for ever.
        unsafe {
            let real = (*fid).ops;
            let copy = Box::leak(Box::new(sys::Ops { close: refuse, ..std::ptr::read(real) }));
            (*fid).ops = copy;
            Self { fid, real }
        }
    }
}

impl Drop for Refusing {
    fn drop(&mut self) {
        // SAFETY: as above; it refused, so the object lives.
        unsafe { (*self.fid).ops = self.real };
    }
}

#[test]
fn memory_that_the_library_does_not_let_go_of_stays_registered_and_can_be_given_back_later() {
    let Some(mut a) = open("tcp;ofi_rxm") else { return };
    let (_memory, id) = memory(&mut a, 8192, Access::RemoteReadWrite);
    let before = a.describe(id).unwrap();
    let refusing = Refusing::at(&a.regions.get(id).unwrap().registered);
    for _ in 0..2 {
        let error = a.deregister(id).unwrap_err();
        assert!(matches!(error, PostError::Register { bytes: 8192, .. }), "{error:?}");
        let text = error.to_string();
        assert!(text.contains("must stay mapped") && text.contains("fi_close"), "{text}");
        assert_eq!(a.describe(id).map(|region| region.key), Some(before.key), "still in force");
    }
    drop(refusing);
    a.deregister(id).unwrap();
    assert!(a.describe(id).is_none() && a.deregister(id).is_err());
}

#[test]
fn a_region_whose_key_cannot_be_revoked_stays_mapped() {
    let Some(a) = open("tcp;ofi_rxm") else { return };
    let page = Region::anonymous(4096).unwrap();
    let (ptr, owner) = (page.as_ptr(), std::sync::Arc::new(page));
    let watch = std::sync::Arc::downgrade(&owner);
    // SAFETY: the owner keeps the page mapped.
    let region = unsafe { Region::of_owner(ptr.as_ptr(), 4096, owner) }.unwrap();
    let registered = a.port.register_region(&region, Rights::ReadWrite).unwrap();
    drop(a.port.register_region(&region, Rights::Read).unwrap());
    let refusing = Refusing::at(&registered);
    drop((region, registered));
    assert_eq!(watch.strong_count(), 1, "whoever has the key may still write");
    drop(refusing);
}
