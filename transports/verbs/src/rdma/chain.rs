//! Requests of a queue pair that go to the device together.

use super::qp::Work;

/// What is kept back while a batch is open, in order. Outside of one nothing is.
#[derive(Debug, Default)]
pub(super) struct Chain {
    held: Vec<Work>,
    is_open: bool,
}

impl Chain {
    /// From here on requests are kept back.
    pub(super) fn open(&mut self) {
        // Memory is taken once, and by those alone that ever batch.
        self.held.reserve_exact(MAX_CHAIN);
        self.is_open = true;
    }

    /// From here on each request goes by itself. Whoever closes has flushed.
    pub(super) fn close(&mut self) {
        debug_assert!(self.held.is_empty(), "{} requests are kept back for good", self.held.len());
        self.is_open = false;
    }

    /// Gives `post` what is due with another request: nothing, that request, or everything up to it.
    #[inline]
    pub(super) fn add<E>(
        &mut self,
        work: Work,
        post: impl FnOnce(&[Work]) -> Result<(), E>,
    ) -> Result<(), E> {
        if !self.is_open {
            return post(std::slice::from_ref(&work));
        }
        self.held.push(work);
        if self.held.len() < MAX_CHAIN { Ok(()) } else { self.flush(post) }
    }

    /// Gives `post` what was kept back. Nothing of it stays, whatever comes of it.
    #[inline]
    pub(super) fn flush<E>(
        &mut self,
        post: impl FnOnce(&[Work]) -> Result<(), E>,
    ) -> Result<(), E> {
        if self.held.is_empty() {
            return Ok(());
        }
        let posted = post(&self.held);
        self.held.clear();
        posted
    }
}

/// Requests of one call at most.
pub(super) const MAX_CHAIN: usize = 32;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rdma::qp::Verb;

    fn work(id: u64) -> Work {
        Work {
            id,
            verb: Verb::Write,
            flags: 0,
            local_address: 0,
            local_key: 0,
            bytes: 0,
            remote_address: 0,
            remote_key: 0,
        }
    }

    /// A device that writes down what each call gave it.
    #[derive(Debug, Default)]
    struct Device(Vec<Vec<u64>>);

    impl Device {
        fn post(&mut self, works: &[Work]) -> Result<(), &'static str> {
            self.0.push(works.iter().map(|work| work.id).collect());
            Ok(())
        }
    }

    #[test]
    fn a_batch_is_few_calls_in_order_and_leaves_nothing() {
        for num in [0u64, 1, 31, 32, 33, 100] {
            let (mut chain, mut device) = (Chain::default(), Device::default());
            chain.open();
            (0..num).for_each(|id| chain.add(work(id), |works| device.post(works)).unwrap());
            chain.flush(|works| device.post(works)).unwrap();
            chain.close();
            assert_eq!(device.0.len() as u64, num.div_ceil(MAX_CHAIN as u64));
            assert_eq!(device.0.concat(), (0..num).collect::<Vec<_>>());
        }
    }

    #[test]
    fn outside_of_a_batch_each_request_goes_by_itself() {
        let (mut chain, mut device) = (Chain::default(), Device::default());
        chain.add(work(1), |works| device.post(works)).unwrap();
        chain.open();
        chain.add(work(2), |works| device.post(works)).unwrap();
        chain.add(work(3), |works| device.post(works)).unwrap();
        assert_eq!(device.0, [[1]]);
        // In the middle of a batch, too.
        chain.flush(|works| device.post(works)).unwrap();
        chain.add(work(4), |works| device.post(works)).unwrap();
        chain.flush(|works| device.post(works)).unwrap();
        chain.close();
        chain.add(work(5), |works| device.post(works)).unwrap();
        assert_eq!(device.0, [vec![1], vec![2, 3], vec![4], vec![5]]);
    }

    #[test]
    fn what_was_refused_is_not_posted_again() {
        let (mut chain, mut device) = (Chain::default(), Device::default());
        chain.open();
        chain.add(work(1), |works| device.post(works)).unwrap();
        assert_eq!(chain.flush(|_| Err("refused")), Err("refused"));
        chain.flush(|works| device.post(works)).unwrap();
        chain.close();
        assert!(device.0.is_empty());
    }
}
