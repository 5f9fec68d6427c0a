//! The queue of commands to a data thread, without locks.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};

use crossbeam_queue::SegQueue;

/// Commands for a data thread. The sender wakes the thread.
pub(crate) struct Inbox<C> {
    commands: SegQueue<C>,
    next_id: AtomicU64,
    is_closed: AtomicBool,
}

impl<C> Inbox<C> {
    pub(crate) const fn new() -> Self {
        let (next_id, is_closed) = (AtomicU64::new(1), AtomicBool::new(false));
        Self { commands: SegQueue::new(), next_id, is_closed }
    }

    /// A new number for a link.
    pub(crate) fn next_id(&self) -> LinkId {
        LinkId(self.next_id.fetch_add(1, Ordering::Relaxed))
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.commands.is_empty()
    }

    pub(crate) fn pop(&self) -> Option<C> {
        self.commands.pop()
    }

    /// Queues a command, or drops it when the thread is gone. Dropping an attach command closes its channel,
    /// so that no client waits for an answer.
    ///
    /// `push` and [`close`](Self::close) are sequentially consistent: either the sender sees that the inbox is
    /// closed, or the closing thread sees the command.
    pub(crate) fn push(&self, command: C) {
        self.commands.push(command);
        fence(Ordering::SeqCst);
        if self.is_closed.load(Ordering::SeqCst) {
            self.drop_all();
        }
    }

    pub(crate) fn close(&self) {
        self.is_closed.store(true, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        self.drop_all();
    }

    fn drop_all(&self) {
        while self.pop().is_some() {}
    }
}

impl<C> fmt::Debug for Inbox<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Inbox").field("num_commands", &self.commands.len()).finish_non_exhaustive()
    }
}

/// Number of a link, unique within its data thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct LinkId(u64);

impl LinkId {
    #[cfg(feature = "device")]
    pub(crate) const fn number(self) -> u64 {
        self.0
    }
}

impl fmt::Display for LinkId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
