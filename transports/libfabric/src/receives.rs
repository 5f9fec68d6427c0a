//! Receive buffers.

use super::fi_endpoint::{Descriptor, PostStatus};
use super::link::Context;
use super::owner::CallError;
use super::port::{MemoryRegistration, Port, Rights};
use p2p_core::region::Region;

/// All receive buffers of a device. Most of them are posted; the others are spare.
#[derive(Debug)]
pub(super) struct Receives {
    // Dropped before the memory.
    registered: Option<MemoryRegistration>,
    memory: Region,
    contexts: Box<[Context]>,
    buffer_bytes: usize,
    spare: Vec<u32>,
}

impl Receives {
    pub(super) fn new(port: &Port, buffer_bytes: usize) -> Result<Self, CallError> {
        let num_buffers = NUM_BUFFERS.min(port.traits().num_receives.max(1));
        let memory = Region::anonymous(num_buffers * buffer_bytes).map_err(|error| CallError {
            op: "make receive buffers",
            code: 12,
            text: error.to_string(),
        })?;
        let registered = if port.needs_local() {
            Some(port.register_region(&memory, Rights::Local)?)
        } else {
            None
        };
        let num_buffers = num_buffers as u32;
        Ok(Self {
            registered,
            memory,
            contexts: (0..num_buffers).map(|idx| Context::new(true, idx)).collect(),
            buffer_bytes,
            spare: (0..num_buffers).collect(),
        })
    }

    /// The first `len` bytes of a completed buffer that is not spare yet.
    pub(super) fn message(&self, buffer: u32, len: usize) -> &[u8] {
        let (buffer, len) = (buffer as usize, len.min(self.buffer_bytes));
        if buffer >= self.contexts.len() {
            return &[];
        }
        // SAFETY: within the memory; the library writes a buffer only between `post` and its
        // completion, and this one is completed and not posted again before `give_back`, which
        // needs `&mut self`. No peer can write it.
        unsafe {
            let first = self.memory.as_ptr().add(buffer * self.buffer_bytes);
            std::slice::from_raw_parts(first.as_ptr(), len)
        }
    }

    /// Makes a buffer spare once its message was read.
    pub(super) fn give_back(&mut self, buffer: u32) {
        self.spare.push(buffer);
    }

    pub(super) fn has_spare(&self) -> bool {
        !self.spare.is_empty()
    }

    /// True if less than half of the buffers are posted.
    pub(super) fn is_low(&self) -> bool {
        self.spare.len() * 2 > self.contexts.len()
    }

    /// Posts the spare buffers until the library has no room for more.
    pub(super) fn post(&mut self, port: &Port) -> Result<(), CallError> {
        let descriptor =
            self.registered.as_ref().map_or(Descriptor::NONE, MemoryRegistration::descriptor);
        while let Some(buffer) = self.spare.last().copied() {
            let context = &self.contexts[buffer as usize];
            // SAFETY: a spare buffer: no thread reads it. Memory and contexts live as long as the
            // device's port, which is closed first.
            let taken = unsafe {
                let first = self.memory.as_ptr().add(buffer as usize * self.buffer_bytes);
                port.endpoint().receive(
                    (first.as_ptr(), self.buffer_bytes),
                    descriptor,
                    context.as_ptr(),
                )?
            };
            if taken == PostStatus::Again {
                break;
            }
            self.spare.pop();
        }
        Ok(())
    }
}

const NUM_BUFFERS: usize = 256;
