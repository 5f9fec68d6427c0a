//! A whole device as a fabric, and its counters.

use std::os::fd::AsFd;
use std::ptr::NonNull;
use std::time::Instant;

use p2p_core::Region;
use p2p_core::endpoint::{Endpoint, PostError};
use p2p_core::fabric::{Access, Fabric, LocalSegment, PostOutcome, RegionId, RemoteSegment, Token};
use rand::{Rng, RngExt};
use switchyard_verbs::{DeviceAccess, DmaBuf, device_names};

use crate::common::{
    LIMIT, bytes_of, counter, counter_from, fabric, is_possible, join, layout, network, pair, put,
    register, seeded, store, wait_one,
};
use test_support::skip;

#[test]
fn a_device_moves_what_its_tokens_say() {
    if !is_possible() {
        return;
    }
    let mut rng = seeded();
    let (mut a, mut b) = (fabric(), fabric());
    let (at_a, at_b) = join(&mut a, &mut b);
    let longest = a.max_operation_bytes() as usize;
    let bytes = 2 * longest;
    let (source, target) = (Region::anonymous(bytes).unwrap(), Region::anonymous(bytes).unwrap());
    let (from, into) = (
        register(&mut a, &source, Access::Local),
        register(&mut b, &target, Access::RemoteReadWrite),
    );
    let wire = b.describe(into).unwrap();
    assert!(a.describe(from).is_none());
    for len in [0, 1, 7, 64, 4096, 5000, 100_000, longest] {
        let mut expected = vec![0; len];
        rng.fill_bytes(&mut expected);
        store(&source, &expected);
        // SAFETY: no other code touches the target.
        unsafe { target.as_ptr().write_bytes(0xa5, bytes) };
        let offset = rng.random_range(0..=(bytes - len) as u64);
        let dst = RemoteSegment { region: wire, offset };
        let src = LocalSegment { region: from, offset: 0, bytes: len as u64 };
        // SAFETY: the source is not written before the completion.
        let posted = unsafe { a.write(at_a, dst, src, Token(len as u64)) }.unwrap();
        assert_eq!(posted, PostOutcome::Accepted);
        let done = wait_one(&mut a);
        assert_eq!((done.token, done.result.is_ok()), (Token(len as u64), true));
        let found = bytes_of(&target);
        let (start, end) = (offset as usize, offset as usize + len);
        assert_eq!(&found[start..end], &expected[..], "{len} bytes at {offset}");
        assert!(found[..start].iter().chain(&found[end..]).all(|byte| *byte == 0xa5));
        // Read the bytes back, into another place of the source.
        let back = LocalSegment { region: from, offset: longest as u64, bytes: len as u64 };
        // SAFETY: no code touches that part before the completion.
        let posted = unsafe { a.read(at_a, back, dst, Token(1)) }.unwrap();
        assert_eq!(posted, PostOutcome::Accepted);
        assert!(wait_one(&mut a).result.is_ok());
        assert_eq!(&bytes_of(&source)[longest..longest + len], &expected[..]);
    }
    // A full queue is reported, and every accepted request completes.
    let src = LocalSegment { region: from, offset: 0, bytes: 64 };
    let dst = RemoteSegment { region: wire, offset: 0 };
    let mut num_posted = 0;
    // SAFETY: the source is not written from here on.
    while unsafe { a.write(at_a, dst, src, Token(num_posted)) }.unwrap() == PostOutcome::Accepted {
        num_posted += 1;
        assert!(num_posted <= 1000, "the queue has no end");
    }
    for token in 0..num_posted {
        let done = wait_one(&mut a);
        assert_eq!((done.token, done.result.is_ok()), (Token(token), true));
    }
    // Ranges are checked before anything is posted.
    for (offset, len) in [(bytes as u64, 1), (u64::MAX, 1), (bytes as u64 - 10, 11)] {
        let dst = RemoteSegment { region: wire, offset };
        let src = LocalSegment { region: from, offset: 0, bytes: len };
        // SAFETY: nothing is posted.
        let refused = unsafe { a.write(at_a, dst, src, Token(0)) };
        assert!(matches!(refused, Err(PostError::RemoteRange { .. })), "{refused:?}");
    }
    let src = LocalSegment { region: from, offset: bytes as u64 - 1, bytes: 2 };
    // SAFETY: nothing is posted.
    let refused = unsafe { a.write(at_a, dst, src, Token(0)) };
    assert!(matches!(refused, Err(PostError::Unregistered { .. })), "{refused:?}");
    assert!(a.deregister(RegionId(99)).is_err());
    a.close_peer(at_a);
    // SAFETY: nothing is posted.
    assert!(unsafe { a.write(at_a, dst, src, Token(0)) }.is_err());
    b.close_peer(at_b);
}

#[test]
fn what_was_accepted_completes_once_whatever_happens() {
    if !is_possible() {
        return;
    }
    let (mut a, mut b) = (fabric(), fabric());
    let (source, target) =
        (Region::anonymous(1 << 20).unwrap(), Region::anonymous(1 << 20).unwrap());
    let from = register(&mut a, &source, Access::Local);
    let into = register(&mut b, &target, Access::RemoteReadWrite);
    let wire = b.describe(into).unwrap();
    let src = LocalSegment { region: from, offset: 0, bytes: 60_000 };
    let dst = RemoteSegment { region: wire, offset: 0 };
    enum End {
        ClosedHere,
        ClosedThere,
        Revoked,
    }
    for (round, end) in [End::ClosedHere, End::ClosedThere, End::Revoked].into_iter().enumerate() {
        let (at_a, at_b) = join(&mut a, &mut b);
        let first = round as u64 * 100;
        let mut accepted = first + 20;
        for token in first..accepted {
            // SAFETY: the source is not written.
            let posted = unsafe { a.write(at_a, dst, src, Token(token)) }.unwrap();
            assert_eq!(posted, PostOutcome::Accepted);
        }
        match end {
            End::ClosedHere => a.close_peer(at_a),
            End::ClosedThere => b.close_peer(at_b),
            End::Revoked => b.deregister(into).unwrap(),
        }
        for token in accepted..accepted + 10 {
            // SAFETY: the source is not written.
            match unsafe { a.write(at_a, dst, src, Token(token)) } {
                Ok(PostOutcome::Accepted) => accepted += 1,
                Ok(PostOutcome::Full) | Err(_) => break,
            }
        }
        let mut seen = Vec::new();
        let deadline = Instant::now() + LIMIT;
        let mut out = Vec::new();
        while (seen.len() as u64) < accepted - first {
            assert!(Instant::now() < deadline, "only {seen:?} completed of {accepted}");
            a.poll(&mut out);
            seen.extend(out.drain(..).map(|done| done.token.0));
            std::thread::yield_now();
        }
        seen.sort_unstable();
        assert_eq!(seen, (first..accepted).collect::<Vec<_>>());
        a.close_peer(at_a);
        b.close_peer(at_b);
    }
}

#[test]
fn a_sleeper_is_woken_by_the_end_of_its_operation() {
    if !is_possible() {
        return;
    }
    let (mut a, mut b) = (fabric(), fabric());
    let (at_a, _) = join(&mut a, &mut b);
    let (source, target) = (Region::anonymous(4096).unwrap(), Region::anonymous(4096).unwrap());
    let from = register(&mut a, &source, Access::Local);
    let into = register(&mut b, &target, Access::RemoteReadWrite);
    let dst = RemoteSegment { region: b.describe(into).unwrap(), offset: 0 };
    let src = LocalSegment { region: from, offset: 0, bytes: 4096 };
    for round in 0..200 {
        // SAFETY: the source is not written.
        let posted = unsafe { a.write(at_a, dst, src, Token(round)) }.unwrap();
        assert_eq!(posted, PostOutcome::Accepted);
        let mut out = Vec::new();
        let deadline = Instant::now() + LIMIT;
        while out.is_empty() {
            if a.may_sleep() {
                let fd = a.wait_fd().unwrap();
                let mut watched =
                    [rustix::event::PollFd::from_borrowed_fd(fd, rustix::event::PollFlags::IN)];
                let timeout = rustix::event::Timespec { tv_sec: 30, tv_nsec: 0 };
                let num_ready = rustix::event::poll(&mut watched, Some(&timeout)).unwrap();
                assert_ne!(num_ready, 0, "nobody woke the sleeper in round {round}");
            }
            assert!(Instant::now() < deadline);
            a.poll(&mut out);
        }
    }
}

#[test]
fn memory_without_a_working_dma_buf_is_registered_by_address() {
    if !is_possible() {
        return;
    }
    let mut fabric = fabric();
    let memory = Region::anonymous(1 << 16).unwrap();
    // A file is no dma-buf, and a software device accepts none anyway.
    let file = std::fs::File::open("/proc/self/exe").unwrap();
    for dma_buf in [None, Some(DmaBuf { fd: file.as_fd(), offset: 0 })] {
        // SAFETY: `memory` outlives `fabric`'s use of it.
        let registered = unsafe {
            fabric.register_device_memory(
                memory.as_ptr(),
                memory.len(),
                Access::RemoteRead,
                dma_buf,
            )
        };
        let (id, how) = registered.unwrap();
        assert_eq!(how, DeviceAccess::PeerMemory);
        assert_eq!(fabric.describe(id).unwrap().bytes, 1 << 16);
        fabric.deregister(id).unwrap();
    }
    // SAFETY: nothing is registered there.
    let refused = unsafe {
        let nowhere = NonNull::new(0x1000 as *mut u8).unwrap();
        fabric.register_device_memory(nowhere, 4096, Access::Local, None)
    };
    let text = refused.unwrap_err().to_string();
    assert!(text.contains("dma-buf") && text.contains("by address"), "{text}");
}

#[test]
fn the_device_counts_what_was_put() {
    if !is_possible() {
        return;
    }
    let device = &device_names()[0];
    let Some(before) = counter("sent_pkts") else {
        skip("rdma", &format!("{device} does not count packets"));
        return;
    };
    let network = network(1);
    let layout = layout(4 << 20);
    let (mut here, _there) = pair(&network, &layout);
    let source = Region::anonymous(1 << 20).unwrap();
    here.endpoint.register(&source).unwrap();
    put(&mut here.endpoint, &source, 0, 1 << 20).unwrap();
    here.endpoint.quiet(Instant::now() + LIMIT).unwrap();
    // No packet carries more than 4 KiB.
    let sent = counter_from("sent_pkts", before + 256) - before;
    println!("{sent} packets for 1 MiB");
    let errors = ["packet_seq_err", "out_of_seq_request", "rx_icrc_errors"];
    assert!(errors.iter().all(|name| counter(name).unwrap_or(0) == 0));
}
