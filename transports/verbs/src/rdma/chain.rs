//! Buffers requests of a queue pair and posts them to the device by one call.

use super::qp::{MAX_CHAIN, Work};

/// Requests buffered while a batch is open, in order. The buffer is empty outside a batch.
#[derive(Debug, Default)]
pub(super) struct Chain {
    held: Vec<Work>,
    is_open: bool,
}

impl Chain {
    /// Opens a batch: requests are buffered from here on.
    pub(super) fn open(&mut self) {
        // Reserves memory once, and only on queue pairs that use batches.
        self.held.reserve_exact(MAX_CHAIN);
        self.is_open = true;
    }

    /// Closes the batch: each later request is posted by itself. The caller has flushed before.
    pub(super) fn close(&mut self) {
        debug_assert!(self.held.is_empty(), "{} requests are kept back for good", self.held.len());
        self.is_open = false;
    }

    /// Adds a request and passes the due requests to `post`: none, this request, or all buffered ones with it.
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

    /// Passes all buffered requests to `post`. The buffer is empty afterwards, even if `post` fails.
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

    /// A device that records the requests of each call.
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
        // A flush also works in the middle of a batch.
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
