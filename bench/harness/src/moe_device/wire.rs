//! The connection between a role and its parent, as the role uses it.

use std::io::Write;
use std::sync::mpsc::{Receiver, Sender};

use anyhow::Result;
use serde_json::Value;

/// The connection from a role to the parent that started it.
pub(super) trait Wire {
    /// Sends a value to the parent. Does nothing if the parent is gone.
    fn send(&mut self, value: &Value);

    /// Waits for the parent's next request. Returns `None` if the parent is gone.
    fn receive(&mut self) -> Result<Option<String>>;
}

/// Standard input and output of a child process.
pub(super) struct Pipes;

/// Channels between two threads of a process.
pub(super) struct Channels {
    pub(super) input: Receiver<String>,
    pub(super) out: Sender<Value>,
}

impl Wire for Pipes {
    fn send(&mut self, value: &Value) {
        let mut out = std::io::stdout().lock();
        let _ = writeln!(out, "{value}");
        let _ = out.flush();
    }

    fn receive(&mut self) -> Result<Option<String>> {
        Ok(std::io::stdin().lines().next().transpose()?)
    }
}

impl Wire for Channels {
    fn send(&mut self, value: &Value) {
        let _ = self.out.send(value.clone());
    }

    fn receive(&mut self) -> Result<Option<String>> {
        Ok(self.input.recv().ok())
    }
}
