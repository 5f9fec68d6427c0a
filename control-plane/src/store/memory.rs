//! A store in memory, for tests and short-lived clusters.

use std::sync::{Arc, Mutex, PoisonError};

use super::{Revision, Snapshot, Store, StoreError};

/// Keeps the snapshot in memory. Clones share it, so a test can restart a control plane on the same state.
#[derive(Clone, Debug, Default)]
pub struct MemoryStore {
    state: Arc<Mutex<(Option<Snapshot>, Revision)>>,
}

impl MemoryStore {
    /// An empty store.
    pub fn new() -> Self {
        Self::default()
    }
}

impl Store for MemoryStore {
    fn kind(&self) -> &'static str {
        "memory"
    }

    fn load(&mut self) -> Result<(Option<Snapshot>, Revision), StoreError> {
        Ok(self.state.lock().unwrap_or_else(PoisonError::into_inner).clone())
    }

    fn save(&mut self, snapshot: &Snapshot, expected: Revision) -> Result<Revision, StoreError> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.1 != expected {
            return Err(StoreError::Conflict { expected: expected.0, found: state.1.0 });
        }
        *state = (Some(snapshot.clone()), Revision(expected.0 + 1));
        Ok(state.1)
    }

    fn reserve_epoch(&mut self, epoch: u64) -> Result<(), StoreError> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(snapshot) = &mut state.0 {
            snapshot.reserved_epoch = snapshot.reserved_epoch.max(epoch);
        }
        Ok(())
    }
}
