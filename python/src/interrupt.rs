//! Python signals during a call that blocks without the interpreter.

use std::cell::{Cell, RefCell};
use std::time::{Duration, Instant};

use pyo3::prelude::*;

use crate::logs;

/// Looks for signals while a call blocks, and keeps the exception of their handler.
///
/// Python runs handlers on its main thread only. On other threads this does nothing.
#[derive(Debug)]
pub struct Interrupt {
    next: Cell<Instant>,
    raised: RefCell<Option<PyErr>>,
}

impl Interrupt {
    pub fn new() -> Self {
        Self { next: Cell::new(Instant::now() + PERIOD), raised: RefCell::new(None) }
    }

    /// Returns true once a signal's handler has raised an exception. Attaches to the interpreter every [`PERIOD`].
    pub fn is_due(&self) -> bool {
        // A handler runs once, and every wait of the call must end.
        if self.raised.borrow().is_some() {
            return true;
        }
        let now = Instant::now();
        if now < self.next.get() {
            return false;
        }
        self.next.set(now + PERIOD);
        if rustix::thread::gettid() != rustix::process::getpid() {
            return false;
        }
        let checked = Python::try_attach(|py| {
            logs::flush(py);
            py.check_signals()
        });
        match checked {
            Some(Err(raised)) => {
                self.raised.replace(Some(raised));
                true
            }
            _ => false,
        }
    }

    /// The exception that a handler raised.
    pub fn check(self) -> PyResult<()> {
        self.raised.into_inner().map_or(Ok(()), Err)
    }
}

/// Time between two looks: short for a person who presses Ctrl-C, long beside a look.
const PERIOD: Duration = Duration::from_millis(20);
