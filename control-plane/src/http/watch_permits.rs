//! Permits for placement watches. A watch holds its connection for as long as its client likes.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::access::Caller;
use crate::config::Limits;

/// The permits of one control plane.
#[derive(Debug)]
pub(super) struct WatchPermits {
    limit: usize,
    /// Most watches of one identity.
    share: usize,
    permits: Arc<Semaphore>,
    /// Open watches by name of the identity.
    open: Mutex<HashMap<String, usize>>,
}

impl WatchPermits {
    /// Watches take at most three quarters of the connections, so that members and probes find one.
    pub(super) fn new(limits: &Limits) -> Arc<Self> {
        let num_places = limits.http().num_places();
        let limit = limits.max_watchers.min((num_places - num_places / 4).max(1));
        let permits = Arc::new(Semaphore::new(limit));
        Arc::new(Self { limit, share: limit.div_ceil(2), permits, open: Mutex::default() })
    }

    /// A permit for one more watch of `caller`, or the reason against it.
    pub(super) fn take(self: &Arc<Self>, caller: &Caller) -> Result<WatchPermit, String> {
        let name = caller.own_name().map(str::to_owned);
        let mut open = self.lock();
        let count = name.as_ref().map_or(0, |name| open.get(name).copied().unwrap_or(0));
        if count >= self.share {
            let (name, share) = (&caller.name, self.share);
            return Err(format!(
                "{name} has {share} placement watches open, the limit of one identity"
            ));
        }
        let permit = Arc::clone(&self.permits).try_acquire_owned().map_err(|_| {
            format!("{} placement watches are open, which is the limit", self.limit)
        })?;
        if let Some(name) = &name {
            open.insert(name.clone(), count + 1);
        }
        drop(open);
        Ok(WatchPermit { name, permits: Arc::clone(self), _permit: permit })
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, usize>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Counts a watch for as long as it is open.
#[derive(Debug)]
pub(super) struct WatchPermit {
    /// `None` for callers without a limit of their own.
    name: Option<String>,
    permits: Arc<WatchPermits>,
    _permit: OwnedSemaphorePermit,
}

impl Drop for WatchPermit {
    fn drop(&mut self) {
        let Some(name) = &self.name else { return };
        let mut open = self.permits.lock();
        match open.get_mut(name) {
            Some(count) if *count > 1 => *count -= 1,
            _ => drop(open.remove(name)),
        }
    }
}
