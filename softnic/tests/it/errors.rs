//! Every kind of failed request: the poller names it, and a reset restores the queue.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::common::{DATA_BYTES, Rig, RigConfig, Wait, status, word};
use switchyard_softnic::format::{MAX_MESSAGE_BYTES, Syndrome};
use switchyard_softnic::{Access, Fault, QpState, QueueSizes, Violation};

/// Completion code and syndrome of the queue's error word.
fn error_of(rig: &Rig) -> (u32, u8) {
    let error = rig.queue.error();
    ((error & 0xff) as u32, (error >> 8) as u8)
}

/// Their posters do not keep to the most bytes of a request.
fn rigs() -> impl Iterator<Item = Rig> {
    [true, false].into_iter().filter_map(|is_collapsed| {
        let max_message_bytes = MAX_MESSAGE_BYTES + 4096;
        let sizes = QueueSizes { is_collapsed, max_message_bytes, ..QueueSizes::default() };
        Rig::new(RigConfig { sizes, ..RigConfig::default() })
    })
}

/// A put of 8 bytes. All fields are valid except those that the test changes.
struct Put {
    local: u64,
    lkey: u32,
    remote: u64,
    rkey: u32,
    num_bytes: u64,
}

impl Put {
    fn good(rig: &Rig) -> Self {
        Self {
            local: rig.source_keys.address,
            lkey: rig.source_keys.lkey,
            remote: rig.target_keys.address,
            rkey: rig.target_keys.rkey,
            num_bytes: 8,
        }
    }

    fn post(&self, rig: &Rig, wait: &Wait, is_get: bool) -> u32 {
        let call = if is_get { rig.driver.get } else { rig.driver.put };
        let Self { local, lkey, remote, rkey, num_bytes } = *self;
        // SAFETY: handle and bound are valid; the NIC checks the rest.
        unsafe { call(rig.handle(), local, lkey, remote, rkey, num_bytes, wait.as_ptr()) }
    }
}

#[test]
fn what_is_wrong_with_a_request_is_what_its_completion_says() {
    type Break = fn(&mut Put, &Rig);
    let cases: [(&str, Syndrome, bool, Break); 12] = [
        ("unknown remote key", Syndrome::RemoteAccess, false, |put, _| put.rkey ^= 1 << 20),
        ("remote key of old", Syndrome::RemoteAccess, false, |put, _| put.rkey ^= 0x80),
        ("remote key 0", Syndrome::RemoteAccess, false, |put, _| put.rkey = 0),
        ("local key as remote one", Syndrome::RemoteAccess, false, |put, rig| {
            put.rkey = rig.source_keys.lkey;
        }),
        ("beyond the end", Syndrome::RemoteAccess, false, |put, _| {
            put.remote += DATA_BYTES as u64 - 7;
        }),
        ("before the begin", Syndrome::RemoteAccess, true, |put, _| put.remote -= 1),
        ("address that wraps", Syndrome::RemoteAccess, false, |put, _| put.remote = u64::MAX - 3),
        ("unknown local key", Syndrome::LocalProtection, false, |put, _| put.lkey ^= 1 << 8),
        ("local range", Syndrome::LocalProtection, true, |put, _| put.num_bytes += 1 << 20),
        ("as long as may be", Syndrome::LocalProtection, false, |put, _| {
            put.num_bytes = MAX_MESSAGE_BYTES.into();
        }),
        ("put that is too long", Syndrome::LocalLength, false, |put, _| {
            put.num_bytes = u64::from(MAX_MESSAGE_BYTES) + 1;
        }),
        ("get that is too long", Syndrome::LocalLength, true, |put, _| {
            put.num_bytes = u64::from(MAX_MESSAGE_BYTES) + 1;
        }),
    ];
    for rig in rigs() {
        for (what, expected, is_get, change) in &cases {
            let wait = Wait::patient();
            let mut put = Put::good(&rig);
            change(&mut put, &rig);
            assert_eq!(put.post(&rig, &wait, *is_get), status::OK, "{what}");
            assert_eq!(rig.quiet(&wait), status::COMPLETION, "{what}");
            assert_eq!(error_of(&rig), (status::COMPLETION, *expected as u8), "{what}");
            let error = wait.error();
            assert_eq!((error.tag, error.reason), (35, 3), "{what}");
            assert_eq!((error.observed >> 8) as u8, *expected as u8, "{what}");
            assert_eq!(rig.client.lock().qp_state(rig.queue.qpn()).unwrap(), QpState::Error);
            recovers(&rig, what);
        }
        rig.assert_clean();
    }
}

/// After a reset of both sides everything works as on the first day.
fn recovers(rig: &Rig, what: &str) {
    rig.recover();
    static VALUE: AtomicU64 = AtomicU64::new(1);
    let value = VALUE.fetch_add(1, Ordering::Relaxed);
    let wait = Wait::patient();
    for offset in 0..300 {
        assert_eq!(rig.signal(offset * 8, value, &wait), status::OK, "after {what}");
    }
    assert_eq!(rig.quiet(&wait), status::OK, "after {what}");
    for offset in 0..300 {
        assert_eq!(rig.target_word(offset * 8).load(Ordering::Acquire), value, "after {what}");
    }
    // The next case starts with block 0.
    rig.recover();
}

#[test]
fn rights_are_checked_one_by_one() {
    type Call = fn(&Rig, &Wait) -> u32;
    let needs: [(Access, Call); 3] = [
        (Access::REMOTE_WRITE, |rig, wait| rig.put(0, 8, wait)),
        (Access::REMOTE_READ, |rig, wait| rig.get(0, 8, wait)),
        (Access::REMOTE_ATOMIC, |rig, wait| rig.add8(0, 1, wait)),
    ];
    for (needed, call) in needs {
        for (granted, _) in needs {
            let config = RigConfig { target_access: granted, ..RigConfig::default() };
            let Some(rig) = Rig::new(config) else { return };
            let wait = Wait::patient();
            assert_eq!(call(&rig, &wait), status::OK);
            let found = rig.quiet(&wait);
            if granted == needed {
                assert_eq!(found, status::OK);
            } else {
                assert_eq!(found, status::COMPLETION);
                assert_eq!(error_of(&rig).1, Syndrome::RemoteAccess as u8);
                assert_eq!(rig.target_word(0).load(Ordering::Acquire), 0);
            }
        }
    }
}

#[test]
fn a_get_needs_the_right_to_write_its_target() {
    for rig in rigs() {
        let keys = rig
            .client
            .lock()
            .register(rig.domain, &rig.source, 0, 4096, Access::default())
            .unwrap();
        let put = Put { lkey: keys.lkey, ..Put::good(&rig) };
        let wait = Wait::patient();
        assert_eq!(put.post(&rig, &wait, false), status::OK);
        assert_eq!(rig.quiet(&wait), status::OK);
        assert_eq!(put.post(&rig, &wait, true), status::OK);
        assert_eq!(rig.quiet(&wait), status::COMPLETION);
        assert_eq!(error_of(&rig).1, Syndrome::LocalProtection as u8);
    }
}

#[test]
fn memory_of_another_domain_is_out_of_reach() {
    for rig in rigs() {
        let keys = {
            let mut server = rig.server.lock();
            let other = server.alloc_domain();
            server.register(other, &rig.target, 0, 4096, Access::ALL).unwrap()
        };
        let put = Put { rkey: keys.rkey, ..Put::good(&rig) };
        let wait = Wait::patient();
        assert_eq!(put.post(&rig, &wait, false), status::OK);
        assert_eq!(rig.quiet(&wait), status::COMPLETION);
        assert_eq!(error_of(&rig).1, Syndrome::RemoteAccess as u8);
        recovers(&rig, "a foreign domain");
    }
}

#[test]
fn a_revoked_key_is_dead_at_once_and_never_fits_again() {
    for rig in rigs() {
        let wait = Wait::patient();
        assert_eq!(rig.put(0, 8, &wait), status::OK);
        assert_eq!(rig.quiet(&wait), status::OK);
        let again = {
            let mut server = rig.server.lock();
            server.deregister(rig.target_keys.lkey).unwrap();
            server.deregister(rig.target_keys.lkey).unwrap_err();
            server.register(rig.remote_domain, &rig.target, 0, 4096, Access::ALL).unwrap()
        };
        assert_ne!(again.rkey, rig.target_keys.rkey);
        assert_eq!(rig.put(0, 8, &wait), status::OK);
        assert_eq!(rig.quiet(&wait), status::COMPLETION);
        assert_eq!(error_of(&rig).1, Syndrome::RemoteAccess as u8);
        rig.recover();
        let put = Put { rkey: again.rkey, ..Put::good(&rig) };
        let wait = Wait::patient();
        assert_eq!(put.post(&rig, &wait, false), status::OK);
        assert_eq!(rig.quiet(&wait), status::OK);
    }
}

#[test]
fn a_peer_without_a_receive_is_not_ready() {
    for rig in rigs() {
        let wait = Wait::patient();
        put_imm(&rig, 7, &wait);
        assert_eq!(rig.quiet(&wait), status::COMPLETION);
        assert_eq!(error_of(&rig).1, Syndrome::RnrExceeded as u8);
        recovers(&rig, "receiver not ready");
    }
}

#[test]
fn a_peer_that_is_gone_does_not_answer() {
    for rig in rigs() {
        let qpn = rig.queue.qpn();
        rig.client.lock().inject(Fault::Disconnect { qpn }).unwrap();
        let wait = Wait::patient();
        assert_eq!(rig.put(0, 8, &wait), status::OK);
        assert_eq!(rig.quiet(&wait), status::COMPLETION);
        assert_eq!(error_of(&rig).1, Syndrome::RetryExceeded as u8);
        recovers(&rig, "a lost link");

        // The peer's queue pair in reset, and the peer's NIC gone altogether.
        rig.remote_queue.reset(&mut rig.server.lock()).unwrap();
        assert_eq!(rig.put(0, 8, &wait), status::OK);
        assert_eq!(rig.quiet(&wait), status::COMPLETION);
        assert_eq!(error_of(&rig).1, Syndrome::RetryExceeded as u8);
        recovers(&rig, "a peer in reset");

        let Rig { driver, queue, server, client, source_keys, target_keys, .. } = rig;
        drop(server);
        let handle = std::ptr::from_ref(queue.handle()).cast();
        let bound = wait.as_ptr();
        let (from, to) = (source_keys.address, target_keys.address);
        // SAFETY: handle and bound are valid.
        unsafe {
            let posted =
                (driver.put)(handle, from, source_keys.lkey, to, target_keys.rkey, 8, bound);
            assert_eq!(posted, status::OK);
            assert_eq!((driver.quiet)(handle, bound), status::COMPLETION);
        }
        assert_eq!((queue.error() >> 8) as u8, Syndrome::RetryExceeded as u8);
        drop(client);
    }
}

#[test]
fn every_syndrome_reaches_the_poster() {
    for rig in rigs() {
        let qpn = rig.queue.qpn();
        for syndrome in Syndrome::ALL {
            let fault = Fault::Fail { qpn, nth: 3, syndrome };
            rig.client.lock().inject(fault).unwrap();
            let wait = Wait::patient();
            for offset in 0..3 {
                assert_eq!(rig.signal(offset * 8, 1, &wait), status::OK);
            }
            assert_eq!(rig.quiet(&wait), status::OK);
            assert_eq!(rig.signal(24, 99, &wait), status::OK);
            assert_eq!(rig.quiet(&wait), status::COMPLETION);
            assert_eq!(error_of(&rig), (status::COMPLETION, syndrome as u8));
            // Index and opcode of the request that failed, as the completion has them.
            let error = rig.queue.error();
            assert_eq!((error >> 32 & 0xffff, error >> 24 & 0xff), (3, 0x08));
            // From now on every call says so, and posts nothing.
            assert_eq!(rig.signal(24, 98, &Wait::patient()), status::COMPLETION);
            while rig.client.lock().progress() != 0 {}
            assert!(![98, 99].contains(&rig.target_word(24).load(Ordering::Relaxed)));
            recovers(&rig, &format!("{syndrome:?}"));
        }
    }
}

#[test]
fn requests_behind_a_failed_one_are_flushed_not_executed() {
    for rig in rigs() {
        let qpn = rig.queue.qpn();
        {
            let mut client = rig.client.lock();
            client.inject(Fault::Stall { qpn }).unwrap();
            let syndrome = Syndrome::RemoteOp;
            let addresses = rig.target_keys.address + 80..rig.target_keys.address + 88;
            client.inject(Fault::FailRange { qpn, addresses, syndrome }).unwrap();
        }
        let wait = Wait::patient();
        for offset in 0..20 {
            assert_eq!(rig.signal(offset * 8, 5, &wait), status::OK);
        }
        rig.client.lock().inject(Fault::Resume { qpn }).unwrap();
        // No poll before all are flushed: in a collapsed queue the flushes overwrite the cause.
        while rig.client.lock().progress() != 0 {}
        assert_eq!(rig.quiet(&wait), status::COMPLETION);
        let is_collapsed = rig.queue.handle().cq_depth == 1;
        let seen = if is_collapsed { Syndrome::Flushed } else { Syndrome::RemoteOp };
        assert_eq!(error_of(&rig).1, seen as u8);
        // The request flushed last, or the one that failed.
        let counter = rig.queue.error() >> 32 & 0xffff;
        assert_eq!(counter, if is_collapsed { 19 } else { 10 });
        for offset in 0..20 {
            let expected = if offset < 10 { 5 } else { 0 };
            assert_eq!(rig.target_word(offset * 8).load(Ordering::Acquire), expected);
        }
        recovers(&rig, "a flush");
    }
}

#[test]
fn bytes_that_no_driver_writes_are_refused() {
    let Some(rig) = Rig::new(RigConfig::default()) else { return };
    // Corrupts a request in the queue before the NIC reads it.
    let spoil: [(&str, usize, u8); 7] = [
        ("opcode", 3, 0x77),
        ("modifier", 0, 0x08),
        ("queue pair", 6, 0x5a),
        ("segments", 7, 0x3f),
        ("signature", 8, 1),
        ("reserved bits of the flags", 11, 0x09),
        ("reserved word of the address", 28, 1),
    ];
    let qpn = rig.queue.qpn();
    for (what, byte, value) in spoil {
        rig.client.lock().inject(Fault::Stall { qpn }).unwrap();
        let wait = Wait::patient();
        assert_eq!(rig.signal(0, 1, &wait), status::OK);
        // SAFETY: the queue's first block; no other thread accesses it while the NIC is stopped.
        unsafe {
            (rig.queue.handle().sq as *mut u8).add(byte).write(value);
        }
        rig.client.lock().inject(Fault::Resume { qpn }).unwrap();
        assert_eq!(rig.quiet(&wait), status::COMPLETION, "{what}");
        assert_eq!(error_of(&rig).1, Syndrome::LocalQpOp as u8, "{what}");
        let client = rig.client.lock();
        let violation = client.violations().last().unwrap();
        println!("{what}: {violation}");
        let fits = match violation {
            Violation::QueuePair { .. } => what == "queue pair",
            Violation::Malformed { .. } => what != "queue pair",
            _ => false,
        };
        assert!(fits, "{what}: {violation}");
        drop(client);
        recovers(&rig, what);
    }
}

/// The receiving side, with this number of receives posted from Rust.
fn receiving(rig: &Rig, num_receives: u32) -> switchyard_softnic::Poster {
    let receiver = {
        let mut server = rig.server.lock();
        let sizes = QueueSizes { recv_depth: num_receives, ..QueueSizes::default() };
        switchyard_softnic::HostQueue::create(&mut server, rig.remote_domain, sizes).unwrap()
    };
    let mut receiver = {
        let (mut client, mut server) = (rig.client.lock(), rig.server.lock());
        rig.queue.reset(&mut client).unwrap();
        let (here, there) = (client.address(), server.address());
        rig.queue.connect(&mut client, there, receiver.qpn()).unwrap();
        receiver.connect(&mut server, here, rig.queue.qpn()).unwrap();
        switchyard_softnic::Poster::new(receiver).unwrap()
    };
    receiver.post_receives(num_receives);
    rig.server.lock().progress();
    receiver
}

fn put_imm(rig: &Rig, imm: u32, wait: &Wait) {
    let put = Put::good(rig);
    // SAFETY: handle and bound are valid.
    let posted = unsafe {
        (rig.driver.put_imm)(
            rig.handle(),
            put.local,
            put.lkey,
            put.remote,
            put.rkey,
            8,
            imm,
            wait.as_ptr(),
        )
    };
    assert_eq!(posted, status::OK);
}

#[test]
fn a_peer_whose_nic_takes_nothing_in_is_lost() {
    for rig in rigs() {
        let mut receiver = receiving(&rig, 128);
        let wait = Wait::patient();
        // Arrived data waits in the 64 entries of the inbox for the peer's NIC, which is stopped meanwhile.
        let mut still = rig.server.lock();
        for imm in 0..64 {
            put_imm(&rig, imm, &wait);
        }
        assert_eq!(rig.quiet(&wait), status::OK, "{:?}", wait.error());
        put_imm(&rig, 64, &wait);
        assert_eq!(rig.quiet(&wait), status::COMPLETION);
        assert_eq!(error_of(&rig).1, Syndrome::RetryExceeded as u8);
        // No arrived data is lost, and no other data arrives.
        still.progress();
        drop(still);
        for imm in 0..64 {
            assert_eq!(receiver.take_imm(), Some((imm, 8)));
        }
        assert_eq!(receiver.take_imm(), None);
    }
}

#[test]
fn immediate_data_arrives_behind_its_bytes_in_order() {
    for rig in rigs() {
        let mut receiver = receiving(&rig, 64);
        let wait = Wait::patient();
        for round in 0..200u32 {
            word(&rig.source, 0).store(u64::from(round) + 1000, Ordering::Relaxed);
            put_imm(&rig, round, &wait);
            assert_eq!(rig.quiet(&wait), status::OK, "{:?}", wait.error());
            rig.server.lock().progress();
            assert_eq!(receiver.take_imm(), Some((round, 8)));
            assert_eq!(rig.target_word(0).load(Ordering::Acquire), u64::from(round) + 1000);
            receiver.post_receives(1);
            rig.server.lock().progress();
        }
        rig.assert_clean();
    }
}

/// The verbs reset a queue pair and leave its ring of completions as it is. Posters continue behind the flushed
/// requests, as with `switchyard-ibgda`.
#[test]
fn posters_go_on_in_a_ring_that_was_not_reset_with_its_queue_pair() {
    let sizes = QueueSizes { is_collapsed: false, ..QueueSizes::default() };
    let Some(rig) = Rig::new(RigConfig { sizes, ..RigConfig::default() }) else { return };
    let qpn = rig.queue.qpn();
    // The ring has 128 entries: every round ends at another place of it, over several turns.
    for round in 0..40 {
        let wait = Wait::patient();
        let fault = Fault::Fail { qpn, nth: 7 * round, syndrome: Syndrome::RemoteOp };
        rig.client.lock().inject(fault).unwrap();
        let mut num_posted = 0;
        while num_posted < 7 * round + 11 && rig.signal(0, round + 1, &wait) == status::OK {
            num_posted += 1;
        }
        while rig.queue.error() == 0 {
            let found = rig.quiet(&wait);
            assert_eq!(found, status::COMPLETION, "round {round}: {:?}", wait.error());
        }
        assert_eq!(error_of(&rig), (status::COMPLETION, Syndrome::RemoteOp as u8));

        rig.client.lock().reset_pair(qpn).unwrap();
        rig.remote_queue.reset(&mut rig.server.lock()).unwrap();
        restore(&rig);
        rig.connect();
        let wait = Wait::patient();
        for offset in 0..60 {
            assert_eq!(rig.signal(offset * 8, round + 100, &wait), status::OK);
        }
        assert_eq!(rig.quiet(&wait), status::OK, "round {round}: {:?}", wait.error());
        for offset in 0..60 {
            let found = rig.target_word(offset * 8).load(Ordering::Acquire);
            assert_eq!(found, round + 100, "round {round}");
        }
    }
    rig.assert_clean();
}

/// Counts of posters to 0, except for that of the completions, which goes to where the NIC goes on.
fn restore(rig: &Rig) {
    use std::mem::offset_of;
    use switchyard_softnic::abi::QueueState;
    let handle = rig.queue.handle();
    let place = |address: u64| std::ptr::with_exposed_provenance_mut::<u64>(address as usize);
    // SAFETY: no thread posts and the NIC is idle, so the queue's memory belongs to this thread.
    unsafe {
        let cq_index = place(handle.state + offset_of!(QueueState, cq_index) as u64);
        let depth = u64::from(handle.cq_depth);
        let is_written = |index: &u64| {
            let last = place(handle.cq + (index % depth) * 64 + 56).read().to_ne_bytes()[7];
            last >> 4 != 0xf && last & 1 == u8::from(index & depth != 0)
        };
        let first = cq_index.read();
        let next = (first..first + depth).find(|index| !is_written(index)).unwrap_or(first + depth);
        for offset in (0..size_of::<QueueState>() as u64).step_by(8) {
            place(handle.state + offset).write(0);
        }
        cq_index.write(next);
        place(handle.cq_dbrec).cast::<u32>().write((next as u32 & 0xff_ffff).to_be());
    }
}
