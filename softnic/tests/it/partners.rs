//! Queue pairs connected to a missing partner, or to one that is connected elsewhere.

use crate::common::{Rig, RigConfig, Wait, status};
use switchyard_softnic::format::Syndrome;
use switchyard_softnic::{ControlError, HostQueue, QueueSizes};

/// Joins the client's queue pair with this one of the server; how a put ends.
fn put_to(rig: &Rig, remote_qpn: u32) -> u8 {
    rig.queue.reset(&mut rig.client.lock()).unwrap();
    let there = rig.server.lock().address();
    rig.queue.connect(&mut rig.client.lock(), there, remote_qpn).unwrap();
    let wait = Wait::patient();
    assert_eq!(rig.put(0, 8, &wait), status::OK);
    assert_eq!(rig.quiet(&wait), status::COMPLETION, "{remote_qpn:#x}");
    (wait.error().observed >> 8) as u8
}

#[test]
fn a_partner_that_is_not_there_or_not_ready_does_not_answer() {
    const NOT_ANSWERED: u8 = Syndrome::RetryExceeded as u8;
    for is_collapsed in [true, false] {
        let sizes = QueueSizes { is_collapsed, ..QueueSizes::default() };
        let Some(rig) = Rig::new(RigConfig { sizes, ..RigConfig::default() }) else { return };
        let make = || {
            let mut server = rig.server.lock();
            HostQueue::create(&mut server, rig.remote_domain, QueueSizes::default()).unwrap()
        };
        let (here, unused) = (rig.client.lock().address(), rig.remote_queue.qpn() + 100);
        assert_eq!(put_to(&rig, unused), NOT_ANSWERED, "one that never was");

        let partner = make();
        assert_eq!(put_to(&rig, partner.qpn()), NOT_ANSWERED, "one in reset");
        partner.connect(&mut rig.server.lock(), here, rig.queue.qpn() + 1).unwrap();
        assert_eq!(put_to(&rig, partner.qpn()), NOT_ANSWERED, "one connected elsewhere");
        {
            let mut server = rig.server.lock();
            partner.reset(&mut server).unwrap();
            partner.connect(&mut server, here, rig.queue.qpn()).unwrap();
            partner.reset(&mut server).unwrap();
        }
        assert_eq!(put_to(&rig, partner.qpn()), NOT_ANSWERED, "one that was ready before");
        let qpn = partner.qpn();
        partner.destroy(&mut rig.server.lock()).unwrap();
        assert_eq!(put_to(&rig, qpn), NOT_ANSWERED, "one that is gone");

        // A partner on the same NIC, where the NIC could check.
        let own = rig.client.lock().address();
        rig.queue.reset(&mut rig.client.lock()).unwrap();
        rig.queue.connect(&mut rig.client.lock(), own, rig.queue.qpn() + 100).unwrap();
        let wait = Wait::patient();
        assert_eq!(rig.put(0, 8, &wait), status::OK);
        assert_eq!(rig.quiet(&wait), status::COMPLETION);
        assert_eq!((wait.error().observed >> 8) as u8, NOT_ANSWERED);
        rig.recover();
        rig.assert_clean();
    }
}

#[test]
fn a_number_that_no_queue_pair_can_have_is_refused() {
    let Some(rig) = Rig::new(RigConfig::default()) else { return };
    rig.queue.reset(&mut rig.client.lock()).unwrap();
    let there = rig.server.lock().address();
    for remote_qpn in [0, 1, 0x3f, 0x240, 0xff_ffff, u32::MAX] {
        let error = rig.queue.connect(&mut rig.client.lock(), there, remote_qpn).unwrap_err();
        let ControlError::Unknown { what: "remote queue pair", number } = error else {
            panic!("{remote_qpn:#x}: {error}");
        };
        assert_eq!(number, remote_qpn);
    }
    rig.connect();
    let wait = Wait::patient();
    assert_eq!(rig.put(0, 8, &wait), status::OK);
    assert_eq!(rig.quiet(&wait), status::OK);
}
