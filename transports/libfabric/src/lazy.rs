//! A network that is opened when the first peer needs it.

use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::Instant;

use p2p_core::endpoint::TransportKind;
use p2p_core::network::{Network, NetworkError, OpenSide, Route};
use p2p_core::slot::SlotLayout;

use crate::{DEFAULT_PROVIDER, FabricNetwork};

/// A value that one caller opens while the others wait. All callers that waited share a failure.
/// Later callers retry, because the cause may be gone by then.
#[derive(Debug)]
pub(super) struct RetryOnce<T> {
    opened: OnceLock<T>,
    failed: Mutex<Option<(Instant, NetworkError)>>,
}

impl<T> Default for RetryOnce<T> {
    fn default() -> Self {
        Self { opened: OnceLock::new(), failed: Mutex::default() }
    }
}

impl<T> RetryOnce<T> {
    pub(super) fn get(
        &self,
        open: impl FnOnce() -> Result<T, NetworkError>,
    ) -> Result<&T, NetworkError> {
        if let Some(opened) = self.opened.get() {
            return Ok(opened);
        }
        let asked = Instant::now();
        let mut failed = self.failed.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(opened) = self.opened.get() {
            return Ok(opened);
        }
        if let Some((_, error)) = failed.as_ref().filter(|(at, _)| *at >= asked) {
            return Err(error.clone());
        }
        match open() {
            Ok(opened) => Ok(self.opened.get_or_init(|| opened)),
            Err(error) => {
                *failed = Some((Instant::now(), error.clone()));
                Err(error)
            }
        }
    }
}

/// The default provider.
#[derive(Debug, Default)]
pub(super) struct LazyDefault {
    network: RetryOnce<FabricNetwork>,
}

impl Network for LazyDefault {
    fn kind(&self) -> TransportKind {
        TransportKind::Libfabric
    }

    fn flavour(&self) -> &str {
        DEFAULT_PROVIDER
    }

    fn open(&self, layout: &SlotLayout, route: Route) -> Result<Box<dyn OpenSide>, NetworkError> {
        self.network.get(|| FabricNetwork::open(DEFAULT_PROVIDER))?.open(layout, route)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    use super::*;

    /// Number of times that simultaneous callers open.
    fn storm(place: &RetryOnce<u32>, works: bool) -> usize {
        const NUM_THREADS: usize = 64;
        let (start, opened) = (Barrier::new(NUM_THREADS), AtomicUsize::new(0));
        let open = || {
            opened.fetch_add(1, Ordering::SeqCst);
            std::thread::sleep(Duration::from_millis(100));
            let detail = "not here".to_owned();
            let network = "n".to_owned();
            if works {
                Ok(7)
            } else {
                Err(NetworkError { network, op: "open", code: None, detail })
            }
        };
        std::thread::scope(|scope| {
            for _ in 0..NUM_THREADS {
                scope.spawn(|| {
                    start.wait();
                    match place.get(open) {
                        Ok(&found) => assert!(works && found == 7),
                        Err(error) => assert!(!works && error.detail == "not here"),
                    }
                });
            }
        });
        opened.into_inner()
    }

    #[test]
    fn a_crowd_opens_once_and_a_failure_is_no_verdict_for_ever() {
        let place = RetryOnce::default();
        // A thread that starts late by the length of one attempt makes another.
        let num_searches = storm(&place, false);
        assert!((1..16).contains(&num_searches), "{num_searches} searches");
        assert_eq!(storm(&place, true), 1);
        assert_eq!(storm(&place, true), 0, "it is open");
    }
}
