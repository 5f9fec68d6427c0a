//! The boards of all editions of the model, and the clients that follow each.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::board::Board;

/// The placement of one edition, and its followers.
#[derive(Debug)]
pub(crate) struct EditionBoard {
    /// Fingerprint that the edition is for, as long as its table names no model.
    declared: Mutex<Option<String>>,
    pub(crate) board: Arc<Board>,
    num_clients: AtomicU64,
    /// Watches of clients so far. A change shows a client that has come and gone between two looks.
    num_opened: AtomicU64,
}

impl EditionBoard {
    pub(crate) fn new(fingerprint: Option<String>) -> Self {
        Self {
            declared: Mutex::new(fingerprint),
            board: Arc::new(Board::new()),
            num_clients: AtomicU64::new(0),
            num_opened: AtomicU64::new(0),
        }
    }

    /// Fingerprint of the model. `None` before the first member of a new fleet has registered.
    pub(crate) fn fingerprint(&self) -> Option<String> {
        let published = self.board.latest().and_then(|latest| latest.fingerprint.clone());
        published.or_else(|| lock(&self.declared).clone())
    }

    /// Counts a client for as long as the result lives.
    pub(crate) fn count_client(self: &Arc<Self>) -> CountedClient {
        self.num_clients.fetch_add(1, Ordering::Relaxed);
        self.num_opened.fetch_add(1, Ordering::Relaxed);
        CountedClient(Arc::clone(self))
    }

    /// Clients that follow this process.
    pub(crate) fn num_clients(&self) -> u64 {
        self.num_clients.load(Ordering::Relaxed)
    }

    pub(crate) fn num_opened(&self) -> u64 {
        self.num_opened.load(Ordering::Relaxed)
    }
}

/// See [`EditionBoard::count_client`].
#[derive(Debug)]
pub(crate) struct CountedClient(Arc<EditionBoard>);

impl Drop for CountedClient {
    fn drop(&mut self) {
        self.0.num_clients.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The boards of this process, the current edition's first. They outlive the terms of a leader.
#[derive(Debug)]
pub(crate) struct Boards {
    editions: Mutex<Vec<Arc<EditionBoard>>>,
}

impl Boards {
    pub(crate) fn new() -> Self {
        Self { editions: Mutex::new(vec![Arc::new(EditionBoard::new(None))]) }
    }

    pub(crate) fn current(&self) -> Arc<EditionBoard> {
        Arc::clone(&lock(&self.editions)[0])
    }

    /// The board of the model with this fingerprint; `None` asks for the current one. A fleet without a model yet takes
    /// any client: its first server may bring the client's model.
    pub(crate) fn of(&self, fingerprint: Option<&str>) -> Option<Arc<EditionBoard>> {
        let editions = lock(&self.editions);
        let current = &editions[0];
        let Some(wanted) = fingerprint else { return Some(Arc::clone(current)) };
        let found =
            editions.iter().find(|edition| edition.fingerprint().as_deref() == Some(wanted));
        let found =
            found.or_else(|| Some(current).filter(|edition| edition.fingerprint().is_none()));
        found.cloned()
    }

    /// Replaces the list, the current edition first, and returns the boards in its order. The board of a fingerprint that
    /// is in both lists stays. Streams that follow a board which is no longer in the list end.
    pub(crate) fn set(&self, fingerprints: &[Option<String>]) -> Vec<Arc<EditionBoard>> {
        let mut editions = lock(&self.editions);
        let mut old = std::mem::take(&mut *editions);
        let mut take = |wanted: &Option<String>| {
            // A board without a fingerprint is that of a fleet whose model was not known yet.
            let at = old
                .iter()
                .position(|edition| edition.fingerprint() == *wanted)
                .or_else(|| old.iter().position(|edition| edition.fingerprint().is_none()));
            let edition = match at {
                Some(at) => old.remove(at),
                None => Arc::new(EditionBoard::new(None)),
            };
            lock(&edition.declared).clone_from(wanted);
            edition
        };
        *editions = fingerprints.iter().map(&mut take).collect();
        if editions.is_empty() {
            editions.push(Arc::new(EditionBoard::new(None)));
        }
        old.iter().for_each(|edition| edition.board.set_fresh(false));
        editions.clone()
    }

    /// Adds the board of an edition behind the others.
    pub(crate) fn push(&self, edition: Arc<EditionBoard>) {
        lock(&self.editions).push(edition);
    }

    /// Replaces the boards, the current edition's first. Streams that follow a board which is no longer there end.
    pub(crate) fn replace(&self, new: Vec<Arc<EditionBoard>>) {
        let old = std::mem::replace(&mut *lock(&self.editions), new);
        let editions = lock(&self.editions);
        for gone in old.iter().filter(|old| !editions.iter().any(|new| Arc::ptr_eq(new, old))) {
            gone.board.set_fresh(false);
        }
    }

    /// As [`Board::set_fresh`], for all boards.
    pub(crate) fn set_fresh(&self, is_fresh: bool) {
        lock(&self.editions).iter().for_each(|edition| edition.board.set_fresh(is_fresh));
    }

    /// The boards, the current edition's first.
    pub(crate) fn all(&self) -> Vec<Arc<EditionBoard>> {
        lock(&self.editions).clone()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
