//! Immediate data, sent and taken by the device functions.

use crate::common;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use crate::common::{PATIENCE, Rig, RigConfig, Wait, adversarial, fresh_seed, status, strict};
use softnic_driver::Immediate;
use switchyard_softnic::format::Syndrome;
use switchyard_softnic::{NicConfig, QueueSizes, Violation};

/// `SY_TAG_MLX5_RECEIVE`
const TAG_RECEIVE: u32 = 38;
/// Receives, and completions of them.
const DEPTH: u32 = 4;

/// Requests wait for receives as long as anything.
fn patient(nic: NicConfig) -> NicConfig {
    NicConfig { rnr_timeout: PATIENCE, ..nic }
}

fn rig(nic: NicConfig) -> Option<Rig> {
    Rig::new(RigConfig { nic, recv_depth: DEPTH, ..RigConfig::default() })
}

/// The record of receives has 16 bits, the ring four entries: both go around.
#[test]
fn immediate_data_comes_once_in_order_through_every_wrap() {
    const NUM: u32 = 66_000;
    let Some(rig) = rig(patient(strict())) else { return };
    let receives = rig.receives(DEPTH);
    let qpn = rig.remote_queue.qpn();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let wait = Wait::patient();
            for number in 0..NUM {
                let imm = number.wrapping_mul(0x9e37_79b9);
                let posted = rig.put_imm(u64::from(number % 3) * 8, imm, &wait);
                assert_eq!(posted, status::OK, "{number}: {:?}", wait.error());
            }
            assert_eq!(rig.quiet(&wait), status::OK, "{:?}", wait.error());
        });
        let wait = Wait::patient();
        for number in 0..NUM {
            let imm = number.wrapping_mul(0x9e37_79b9);
            let expected = Immediate { qpn, imm, num_bytes: number % 3 * 8 };
            assert_eq!(receives.take(&wait), Ok(expected), "{number}: {:?}", wait.error());
        }
    });
    assert_eq!((receives.try_take(), receives.error()), (None, 0));
    rig.assert_clean();
}

/// The bytes are there when the immediate data is, in whatever order the NIC moves them.
#[test]
fn bytes_are_there_before_their_immediate_data() {
    for _ in 0..4 {
        let Some(rig) = rig(patient(adversarial(fresh_seed()))) else { return };
        let receives = rig.receives(DEPTH);
        let wait = Wait::patient();
        for round in 1..200 {
            common::fill(&rig.source, 0, 4096, round);
            assert_eq!(rig.put_imm(4096, 7, &wait), status::OK);
            assert_eq!(receives.take(&wait).map(|taken| taken.num_bytes), Ok(4096));
            assert_eq!(common::mismatch(&rig.target, 0, 4096, round), None, "round {round}");
            assert_eq!(rig.quiet(&wait), status::OK);
        }
        rig.assert_clean();
    }
}

#[test]
fn a_put_beyond_the_receives_fails_and_a_reset_mends_it() {
    for rnr_timeout in [Duration::ZERO, Duration::from_millis(20)] {
        let Some(rig) = rig(NicConfig { rnr_timeout, ..strict() }) else { return };
        for round in 0..3 {
            let receives = rig.receives(DEPTH);
            // Until the peer's NIC has seen them.
            while rig.server.lock().progress() != 0 {}
            let wait = Wait::patient();
            for imm in 0..DEPTH + 2 {
                assert_eq!(rig.put_imm(8, imm, &wait), status::OK);
            }
            assert_eq!(rig.quiet(&wait), status::COMPLETION, "round {round}");
            let error = rig.queue.error();
            assert_eq!((error >> 8) as u8, Syndrome::RnrExceeded as u8, "{error:#x}");
            assert_eq!(error >> 32 & 0xffff, u64::from(DEPTH), "the first without a receive");
            // Data that found a receive has arrived.
            for imm in 0..DEPTH {
                assert_eq!(receives.take(&Wait::patient()).map(|taken| taken.imm), Ok(imm));
            }
            let brief = Wait::new(Duration::from_millis(5));
            assert_eq!(receives.take(&brief), Err(status::TIMEOUT));
            rig.recover();
        }
        rig.assert_clean();
    }
}

#[test]
fn waits_end_and_lose_nothing() {
    let Some(rig) = rig(patient(strict())) else { return };
    let receives = rig.receives(DEPTH);
    let brief = Wait::new(Duration::from_millis(5));
    assert_eq!(receives.take(&brief), Err(status::TIMEOUT));
    let error = brief.error();
    assert_eq!((error.tag, error.observed, error.expected), (TAG_RECEIVE, 0, 1));
    let abort = AtomicU32::new(1);
    let aborted = Wait::patient().with_abort(&abort);
    assert_eq!(receives.take(&aborted), Err(status::ABORTED));
    // Another thread takes data. This one gets nothing and does not wait. SAFETY: the lock of the state, behind
    // two counts.
    let lock = unsafe { AtomicU32::from_ptr((receives.handle.state + 16) as *mut u32) };
    lock.store(1, Ordering::Relaxed);
    let wait = Wait::patient();
    assert_eq!(rig.put_imm(0, 5, &wait), status::OK);
    assert_eq!(rig.quiet(&wait), status::OK);
    assert_eq!(receives.try_take(), None);
    lock.store(0, Ordering::Relaxed);
    assert_eq!(receives.take(&wait).map(|taken| (taken.imm, taken.num_bytes)), Ok((5, 0)));
    assert_eq!(receives.error(), 0);
    rig.assert_clean();
}

/// Violations by posters of receives, as the model records them.
#[test]
fn receives_that_are_none_are_noted() {
    let Some(rig) = rig(strict()) else { return };
    let sizes = QueueSizes { recv_depth: DEPTH, ..QueueSizes::default() };
    for (num_receives, is_spoiled) in [(DEPTH + 1, false), (65_535, false), (1, true)] {
        let queue = {
            let mut server = rig.server.lock();
            let queue =
                switchyard_softnic::HostQueue::create(&mut server, rig.remote_domain, sizes)
                    .unwrap();
            let here = server.address();
            queue.connect(&mut server, here, queue.qpn()).unwrap();
            if is_spoiled {
                queue.spoil_receive();
            }
            queue
        };
        queue.post_receives(num_receives);
        let begin = std::time::Instant::now();
        let noted = loop {
            let violation = rig.server.lock().violations().last().cloned();
            let is_of_it = violation.as_ref().is_some_and(|violation| match violation {
                Violation::ReceiveOverrun { qpn, outstanding, .. } => {
                    *qpn == queue.qpn() && *outstanding == u64::from(num_receives)
                }
                Violation::Receive { qpn, number, .. } => *qpn == queue.qpn() && *number == 0,
                _ => false,
            });
            if is_of_it {
                break violation.unwrap();
            }
            assert!(begin.elapsed() < PATIENCE, "{num_receives}: {violation:?}");
        };
        println!("{noted}");
        assert_eq!(matches!(noted, Violation::Receive { .. }), is_spoiled);
        queue.destroy(&mut rig.server.lock()).unwrap();
    }
}
