//! Locks of the names of members.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, Weak};

use super::lock;

/// A lock for every name that is being registered.
#[derive(Debug, Default)]
pub(super) struct Names(Mutex<HashMap<String, Weak<tokio::sync::Mutex<()>>>>);

impl Names {
    /// The lock of a name. Callers of the same name get the same one while any of them has it.
    pub(super) fn lock_of(&self, name: &str) -> Arc<tokio::sync::Mutex<()>> {
        let mut locks = lock(&self.0);
        if let Some(found) = locks.get(name).and_then(Weak::upgrade) {
            return found;
        }
        locks.retain(|_, lock| lock.strong_count() > 0);
        let new = Arc::default();
        locks.insert(name.to_owned(), Arc::downgrade(&new));
        new
    }
}
