//! Every violation by a driver, one by one. The NIC names it and takes the queue pair out of service. The poster
//! learns of it by a syndrome where a NIC can report one.

use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::common::raw::{word32, word64};
use crate::common::{Rig, RigConfig, Wait, status};
use switchyard_softnic::abi::QueueHandle;
use switchyard_softnic::format::{Syndrome, doorbell_word};
use switchyard_softnic::{DoorbellMode, Fault, NicConfig, QpState, QueueSizes, Violation};

/// Damages a queue with two requests that the NIC has not seen yet.
type Spoil = fn(&QueueHandle);

fn ring(queue: &QueueHandle, qpn: u32, end: u64) {
    word64(queue.doorbell).store(doorbell_word(qpn, end), Ordering::Release);
}

/// Changes a byte of the first request.
fn spoil_byte(queue: &QueueHandle, byte: u64, value: u8) {
    let word = word64(queue.sq + byte / 8 * 8);
    let mut bytes = word.load(Ordering::Relaxed).to_ne_bytes();
    bytes[(byte % 8) as usize] = value;
    word.store(u64::from_ne_bytes(bytes), Ordering::Release);
}

/// Strict mode alone, with any source of announcements.
fn rig(has_record: bool, is_collapsed: bool) -> Option<Rig> {
    let sizes = QueueSizes { has_record, is_collapsed, ..QueueSizes::default() };
    let nic = NicConfig { is_strict: true, ..NicConfig::default() };
    Rig::new(RigConfig { nic, sizes, ..RigConfig::default() })
}

/// Posts two requests while the NIC is stopped, and damages them before it continues. Returns the result of the
/// wait for them.
fn post_spoilt(rig: &Rig, spoil: Spoil, wait: &Wait) -> u32 {
    let qpn = rig.queue.qpn();
    rig.client.lock().inject(Fault::Stall { qpn }).unwrap();
    for offset in [0, 8] {
        assert_eq!(rig.signal(offset, 1, &Wait::patient()), status::OK);
    }
    spoil(rig.queue.handle());
    rig.client.lock().inject(Fault::Resume { qpn }).unwrap();
    rig.quiet(wait)
}

fn name_of(violation: &Violation) -> &'static str {
    match violation {
        Violation::Index { .. } => "index",
        Violation::QueuePair { what, .. } => what,
        Violation::StaleRecord { .. } => "record",
        Violation::Overrun { .. } => "overrun",
        Violation::Backwards { .. } => "backwards",
        Violation::Malformed { .. } => "malformed",
        Violation::Receive { .. } => "receive",
        Violation::ReceiveOverrun { .. } => "receive overrun",
        Violation::CompletionOverrun { .. } => "completion overrun",
        _ => "a new one",
    }
}

/// Returns the first recorded violation. Then both sides start anew.
fn first_of(rig: &Rig, nic: &switchyard_softnic::NicThread, num_known: usize) -> &'static str {
    let name = nic.lock().violations().get(num_known).map_or("none", name_of);
    rig.recover();
    name
}

#[test]
fn whoever_posts_learns_of_a_violation_by_a_syndrome() {
    let cases: [(&str, Syndrome, Spoil); 8] = [
        ("index", Syndrome::LocalQpOp, |queue| spoil_byte(queue, 2, 9)),
        ("a request", Syndrome::LocalQpOp, |queue| spoil_byte(queue, 6, 0x5a)),
        ("malformed", Syndrome::LocalQpOp, |queue| spoil_byte(queue, 3, 0x77)),
        ("a doorbell", Syndrome::Flushed, |queue| ring(queue, queue.qpn + 1, 2)),
        ("backwards", Syndrome::Flushed, |queue| ring(queue, queue.qpn, 0xffff)),
        ("record", Syndrome::Flushed, |queue| {
            word32(queue.dbrec + 4).store(1u32.to_be(), Ordering::Release);
        }),
        // A record that is as wrong as the doorbell.
        ("overrun", Syndrome::Flushed, |queue| {
            let end = queue.sq_depth + 1;
            word32(queue.dbrec + 4).store(end.to_be(), Ordering::Release);
            ring(queue, queue.qpn, end.into());
        }),
        ("overrun", Syndrome::Flushed, |queue| {
            let end = 1 << 15;
            word32(queue.dbrec + 4).store(u32::to_be(end), Ordering::Release);
            ring(queue, queue.qpn, end.into());
        }),
    ];
    for is_collapsed in [true, false] {
        let Some(rig) = rig(true, is_collapsed) else { return };
        for (name, expected, spoil) in cases {
            let num_known = rig.client.lock().violations().len();
            let wait = Wait::patient();
            assert_eq!(post_spoilt(&rig, spoil, &wait), status::COMPLETION, "{name}");
            // In a collapsed queue the flush behind it may have come over the cause.
            let found = (wait.error().observed >> 8) as u8;
            let is_flush = is_collapsed && found == Syndrome::Flushed as u8;
            assert!(found == expected as u8 || is_flush, "{name}: syndrome {found:#04x}");
            assert_eq!(rig.client.lock().qp_state(rig.queue.qpn()).unwrap(), QpState::Error);
            assert_eq!([0, 8].map(|at| rig.target_word(at).load(Ordering::Acquire)), [0; 2]);
            assert_eq!(first_of(&rig, &rig.client, num_known), name);
        }
    }
}

/// Where the register alone counts, and where a completion finds no room, a NIC cannot report to the poster. It
/// records the violation, and the wait ends at its time limit.
#[test]
fn violations_that_no_completion_can_tell_of_are_noted() {
    let cases: [(&str, bool, Spoil); 3] = [
        ("a doorbell", false, |queue| ring(queue, queue.qpn + 1, 2)),
        ("backwards", false, |queue| ring(queue, queue.qpn, 0xffff)),
        ("completion overrun", true, |queue| {
            // As if a whole round of the ring had never been given back.
            let consumed = 0u32.wrapping_sub(queue.cq_depth) & 0xff_ffff;
            word32(queue.cq_dbrec).store(consumed.to_be(), Ordering::Release);
        }),
    ];
    for (name, has_record, spoil) in cases {
        let Some(rig) = rig(has_record, false) else { return };
        let wait = Wait::new(Duration::from_millis(20));
        assert_eq!(post_spoilt(&rig, spoil, &wait), status::TIMEOUT, "{name}");
        assert_eq!(rig.client.lock().qp_state(rig.queue.qpn()).unwrap(), QpState::Error);
        assert_eq!(first_of(&rig, &rig.client, 0), name);
    }
}

/// Violations by a receiver.
type SpoilReceives = fn(&Rig);

/// A receiver that errs is out of service: its peer is not answered.
#[test]
fn whoever_sends_to_receives_that_are_wrong_is_not_answered() {
    let cases: [(&str, SpoilReceives); 2] = [
        ("receive", |rig| {
            rig.remote_queue.spoil_receive();
            rig.remote_queue.post_receives(1);
        }),
        ("receive overrun", |rig| rig.remote_queue.post_receives(65)),
    ];
    for is_collapsed in [true, false] {
        let Some(rig) = rig(true, is_collapsed) else { return };
        for (name, spoil) in cases {
            let num_known = rig.server.lock().violations().len();
            spoil(&rig);
            rig.server.lock().progress();
            let wait = Wait::patient();
            assert_eq!(rig.put_imm(8, 1, &wait), status::OK);
            assert_eq!(rig.quiet(&wait), status::COMPLETION, "{name}");
            let found = (wait.error().observed >> 8) as u8;
            assert_eq!(found, Syndrome::RetryExceeded as u8, "{name}");
            assert_eq!(first_of(&rig, &rig.server, num_known), name);
        }
    }
}

/// A NIC that is not strict notes the same and goes on.
#[test]
fn a_lenient_nic_notes_a_record_that_is_behind_if_it_looks() {
    for doorbell in [DoorbellMode::Register, DoorbellMode::Checked] {
        let nic = NicConfig { doorbell, ..NicConfig::default() };
        let Some(rig) = Rig::new(RigConfig { nic, ..RigConfig::default() }) else { return };
        let wait = Wait::patient();
        let found = post_spoilt(
            &rig,
            |queue| word32(queue.dbrec + 4).store(1u32.to_be(), Ordering::Release),
            &wait,
        );
        assert_eq!(found, status::OK);
        let names: Vec<_> = rig.client.lock().violations().iter().map(name_of).collect();
        let expected: &[&str] = if doorbell == DoorbellMode::Checked { &["record"] } else { &[] };
        assert_eq!(names, expected);
    }
}
