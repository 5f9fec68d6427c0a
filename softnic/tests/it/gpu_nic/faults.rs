//! Faults other than wrong requests, as seen by the device functions that post.

use std::sync::atomic::Ordering;
use std::time::Duration;

use softnic_driver::Driver;
use softnic_driver::gpu_nic::{Backend, Counts};
use switchyard_softnic::format::Syndrome;

use super::world::{Gpu, Model, Names};
use crate::common::raw::word64;
use crate::common::{Wait, driver, fresh_seed, status};

/// Words that groups of requests write in turn.
const RING: u64 = 4096;

struct Rig {
    driver: Driver,
    names: Names,
    gpu: Gpu,
    // Its memory gives keys and addresses.
    _model: Model,
}

impl Rig {
    fn new(backend: Backend, is_collapsed: bool, seed: u64) -> Option<Self> {
        let driver = driver("product")?;
        let model = Model::new(is_collapsed, None);
        let gpu = Gpu::new(backend, is_collapsed, seed, &model.names)?;
        Some(Self { driver, names: model.names, gpu, _model: model })
    }

    fn begin(&mut self) {
        self.gpu.clear(0);
        self.gpu.start();
    }

    fn signal_words(&self, first: u64, value: u64, num: u32, wait: &Wait) -> u32 {
        let address = self.names.remote + first * 8;
        // SAFETY: handle and bound are valid; addresses are checked by the NIC.
        unsafe {
            (self.driver.signal_words)(
                self.gpu.handle(),
                address,
                self.names.rkeys[0],
                value,
                num,
                std::ptr::null(),
                wait.as_ptr(),
            )
        }
    }

    fn quiet(&self, wait: &Wait) -> u32 {
        // SAFETY: as above.
        unsafe { (self.driver.quiet)(self.gpu.handle(), wait.as_ptr()) }
    }

    /// A group of requests, and the wait for it.
    fn signal_and_wait(&self, wait: &Wait) -> u32 {
        match self.signal_words(0, 7, 16, wait) {
            status::OK => self.quiet(wait),
            status => status,
        }
    }

    fn word(&self, at: u64) -> u64 {
        word64(self.gpu.remote.address(at as usize * 8)).load(Ordering::Acquire)
    }

    /// After a reset everything works.
    fn expect_recovery(&mut self) -> Counts {
        self.begin();
        let wait = Wait::patient();
        assert_eq!(self.signal_and_wait(&wait), status::OK, "{:?}", wait.error());
        assert_eq!((self.word(0), self.word(15)), (7, 22));
        self.gpu.run()
    }
}

/// Tag of an expired wait for completions, and of an error completion.
const TAG_QUIET: u32 = 34;
const TAG_COMPLETION: u32 = 35;

#[test]
fn counters_wrap() {
    let seed = fresh_seed();
    for backend in Backend::ALL {
        for (is_collapsed, seed) in [(true, 0), (false, seed | 1)] {
            let Some(mut rig) = Rig::new(backend, is_collapsed, seed) else { return };
            rig.begin();
            let (wait, mut next) = (Wait::patient(), 0);
            let mut num = 0u64;
            while next < 65_536 + 100 {
                num = num % 32 + 1;
                let first = next % RING;
                let group = num.min(RING - first) as u32;
                let status = rig.signal_words(first, next, group, &wait);
                assert_eq!(status, status::OK, "{:?}", wait.error());
                next += u64::from(group);
            }
            assert_eq!(rig.quiet(&wait), status::OK, "{:?}", wait.error());
            let counts = rig.gpu.run();
            assert_eq!((counts.num_requests, counts.num_violations), (next, 0), "{counts:?}");
            for index in next - RING..next {
                assert_eq!(rig.word(index % RING), index, "{backend:?}");
            }
        }
    }
}

#[test]
fn every_syndrome_reaches_the_poster() {
    for backend in Backend::ALL {
        let Some(mut rig) = Rig::new(backend, false, 0) else { return };
        for syndrome in Syndrome::ALL {
            rig.gpu.nic.fail(rig.gpu.number, 9, syndrome as u32);
            rig.begin();
            let wait = Wait::patient();
            assert_eq!(rig.signal_and_wait(&wait), status::COMPLETION);
            let error = wait.error();
            assert_eq!((error.tag, error.peer), (TAG_COMPLETION, 5));
            assert_eq!(error.observed >> 8 & 0xff, syndrome as u64);
            assert_eq!(error.observed >> 32 & 0xffff, 9, "of another request");
            rig.gpu.run();
            rig.gpu.nic.fail(rig.gpu.number, 0, 0);
            assert_eq!(rig.expect_recovery().num_violations, 0);
        }
    }
}

#[test]
fn a_dead_peer_exceeds_retries() {
    for backend in Backend::ALL {
        let Some(mut rig) = Rig::new(backend, false, 0) else { return };
        rig.begin();
        let wait = Wait::patient();
        assert_eq!(rig.signal_and_wait(&wait), status::OK);
        rig.gpu.nic.set_dead(1 << rig.gpu.number);
        assert_eq!(rig.signal_and_wait(&wait), status::COMPLETION);
        assert_eq!(wait.error().observed >> 8 & 0xff, Syndrome::RetryExceeded as u64);
        assert_eq!(rig.gpu.run().num_violations, 0);
        rig.gpu.nic.set_dead(0);
        rig.expect_recovery();
    }
}

#[test]
fn a_lost_doorbell_is_noticed_and_made_good_by_the_next() {
    for backend in Backend::ALL {
        let Some(mut rig) = Rig::new(backend, false, 0) else { return };
        rig.gpu.nic.drop_doorbells(rig.gpu.number, 1);
        rig.begin();
        let wait = Wait::new(Duration::from_millis(50));
        assert_eq!(rig.signal_and_wait(&wait), status::TIMEOUT);
        assert_eq!(wait.error().tag, TAG_QUIET);
        let counts = rig.gpu.run();
        assert_eq!((counts.num_requests, counts.num_dropped), (0, 1));
        // A later doorbell, of another group, announces both. The order in which the NIC sees them is not defined.
        rig.begin();
        let wait = Wait::patient();
        assert_eq!(rig.signal_words(0, 7, 16, &wait), status::OK);
        while rig.word(16) != 30 {
            std::thread::sleep(Duration::from_millis(2));
            assert_eq!(rig.signal_words(16, 30, 1, &wait), status::OK, "{:?}", wait.error());
        }
        assert_eq!(rig.quiet(&wait), status::OK, "{:?}", wait.error());
        assert_eq!((rig.word(0), rig.word(15)), (7, 22));
        let counts = rig.gpu.run();
        assert_eq!((counts.num_dropped, counts.num_violations), (1, 0));
    }
}

#[test]
fn posters_wait_for_a_stalled_nic_within_their_bound() {
    for backend in Backend::ALL {
        let Some(mut rig) = Rig::new(backend, true, 0) else { return };
        rig.gpu.nic.stall(1 << rig.gpu.number);
        rig.begin();
        let wait = Wait::new(Duration::from_millis(50));
        let mut last = status::OK;
        for _ in 0..8 {
            last = rig.signal_words(0, 1, 32, &wait);
        }
        assert_eq!(last, status::TIMEOUT, "256 blocks found room in a queue of 128");
        // Nothing of them is done while it stands still.
        assert_eq!(rig.gpu.run().num_requests, 0);
        rig.gpu.nic.stall(0);
        assert_eq!(rig.expect_recovery().num_violations, 0);
    }
}
