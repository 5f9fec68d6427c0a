//! Memory for the bodies of requests: a limit for each body, and one for all bodies at a time.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use axum::body::Body;
use axum::http::HeaderMap;
use axum::http::header::CONTENT_LENGTH;
use control_api::code;
use futures_util::StreamExt;

use super::error::HttpError;
use crate::access::metrics::{AccessMetrics, RefusalReason};
use crate::config::Limits;

/// Largest body of a route.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum BodySize {
    /// A few names and numbers.
    #[default]
    Small,
    /// Numbers about each expert of a server.
    PerExpert,
    /// The digests of the model's tensors.
    Digests,
}

impl BodySize {
    pub(super) fn max_bytes(self, limits: &Limits) -> usize {
        match self {
            Self::Small => limits.max_body_bytes.min(MAX_SMALL_BYTES),
            Self::PerExpert => limits.max_body_bytes,
            Self::Digests => limits.max_digests_bytes,
        }
    }
}

/// Bytes of the bodies that requests hold, by caller.
#[derive(Debug)]
pub(super) struct BodyMemory {
    max_bytes: usize,
    held: Mutex<Held>,
    metrics: AccessMetrics,
}

#[derive(Debug, Default)]
struct Held {
    total: usize,
    by_caller: HashMap<String, usize>,
}

impl BodyMemory {
    pub(super) fn new(max_bytes: usize, metrics: AccessMetrics) -> Arc<Self> {
        Arc::new(Self { max_bytes, held: Mutex::default(), metrics })
    }

    fn lock(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The part of [`BodyMemory`] that one request holds, and the limit of its body.
#[derive(Debug)]
pub(super) struct BodyShare {
    memory: Arc<BodyMemory>,
    caller: String,
    max_body_bytes: usize,
    num_bytes: Mutex<usize>,
}

impl BodyShare {
    /// The share of a request of `caller`. It holds nothing yet.
    pub(super) fn new(
        memory: &Arc<BodyMemory>,
        caller: String,
        max_body_bytes: usize,
    ) -> Arc<Self> {
        let memory = Arc::clone(memory);
        Arc::new(Self { memory, caller, max_body_bytes, num_bytes: Mutex::new(0) })
    }

    /// Refuses a body that is announced as too large, before it is read.
    pub(super) fn check_announced(&self, headers: &HeaderMap) -> Result<(), HttpError> {
        let announced = headers.get(CONTENT_LENGTH).and_then(|value| value.to_str().ok());
        let announced = announced.and_then(|length| length.parse::<u64>().ok());
        match announced {
            Some(length) if length > self.max_body_bytes as u64 => {
                Err(HttpError::body_too_large(self.max_body_bytes))
            }
            _ => Ok(()),
        }
    }

    /// Reads a body. The memory counts until the share is dropped. A peer that sends slowly counts with the bytes that
    /// have come.
    pub(super) async fn read(&self, body: Body) -> Result<Vec<u8>, HttpError> {
        let mut stream = body.into_data_stream();
        let mut bytes = Vec::new();
        while let Some(chunk) = stream.next().await {
            let chunk = chunk.map_err(|err| {
                HttpError::new(code::BAD_REQUEST, format!("the body cannot be read: {err}"))
            })?;
            if bytes.len() + chunk.len() > self.max_body_bytes {
                return Err(HttpError::body_too_large(self.max_body_bytes));
            }
            self.take(chunk.len())?;
            // A copy: a chunk keeps the whole buffer of the connection alive.
            bytes.extend_from_slice(&chunk);
        }
        Ok(bytes)
    }

    /// Takes memory, but no more than is then left for the other callers. With `n` callers that want all of it, each
    /// gets one part of `n + 1`, and one part is free for the next caller.
    fn take(&self, num_bytes: usize) -> Result<(), HttpError> {
        let mut held = self.memory.lock();
        let own = held.by_caller.get(&self.caller).copied().unwrap_or(0) + num_bytes;
        let total = held.total + num_bytes;
        if self.memory.max_bytes.checked_sub(total).is_none_or(|free| own > free) {
            drop(held);
            self.memory.metrics.count_refusal(RefusalReason::BodyMemory);
            let text = format!(
                "{} has too many large requests under way: send fewer at a time, and wait {RETRY_AFTER_S} s",
                self.caller
            );
            return Err(HttpError::new(code::RATE_LIMITED, text).with_retry_after(RETRY_AFTER_S));
        }
        held.total = total;
        held.by_caller.insert(self.caller.clone(), own);
        *self.num_bytes.lock().unwrap_or_else(PoisonError::into_inner) += num_bytes;
        Ok(())
    }
}

impl Drop for BodyShare {
    fn drop(&mut self) {
        let num_bytes = *self.num_bytes.get_mut().unwrap_or_else(PoisonError::into_inner);
        if num_bytes == 0 {
            return;
        }
        let mut held = self.memory.lock();
        held.total -= num_bytes;
        match held.by_caller.get_mut(&self.caller) {
            Some(own) if *own > num_bytes => *own -= num_bytes,
            _ => drop(held.by_caller.remove(&self.caller)),
        }
    }
}

/// The largest text in such a body, the reason for a suspicion, has at most 512 characters.
const MAX_SMALL_BYTES: usize = 16 << 10;
const RETRY_AFTER_S: u64 = 1;

#[cfg(test)]
mod tests {
    use axum::body::Bytes;
    use prometheus::Registry;

    use super::*;

    fn memory(max_bytes: usize) -> Arc<BodyMemory> {
        BodyMemory::new(max_bytes, AccessMetrics::new(&Registry::new()).unwrap())
    }

    fn share(memory: &Arc<BodyMemory>, caller: &str) -> Arc<BodyShare> {
        BodyShare::new(memory, caller.to_owned(), 1 << 20)
    }

    #[test]
    fn one_caller_gets_half_and_each_further_one_a_part_of_the_rest() {
        let memory = memory(1000);
        let (first, second) = (share(&memory, "a"), share(&memory, "a"));
        first.take(400).unwrap();
        second.take(100).unwrap();
        second.take(1).unwrap_err();
        let other = share(&memory, "b");
        other.take(250).unwrap();
        other.take(1).unwrap_err();
        // A third one still finds room.
        share(&memory, "c").take(125).unwrap();
        drop(first);
        second.take(200).unwrap();
        drop((second, other));
        let held = memory.lock();
        assert_eq!((held.total, held.by_caller.len()), (0, 0));
    }

    #[tokio::test]
    async fn a_body_counts_until_its_request_ends_and_not_beyond_its_limit() {
        let memory = memory(1 << 20);
        let size = rand::random_range(1..2000);
        let chunks = |num: usize| {
            let chunk = |_| Ok::<_, std::io::Error>(Bytes::from_static(b"x"));
            Body::from_stream(futures_util::stream::iter((0..num).map(chunk)))
        };
        let request = BodyShare::new(&memory, "a".to_owned(), size);
        assert_eq!(request.read(chunks(size)).await.unwrap().len(), size);
        assert_eq!(memory.lock().total, size, "{size} bytes");
        drop(request);
        assert_eq!(memory.lock().total, 0, "{size} bytes");
        let request = BodyShare::new(&memory, "a".to_owned(), size);
        request.read(chunks(size + 1)).await.unwrap_err();
    }
}
