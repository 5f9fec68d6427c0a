//! One-sided transfers on the caller's thread, for transports that need no thread of their own.

use std::time::Instant;

use super::connection::Connection;
use super::descriptor::Descriptor;
use super::error::{OpError, SubmitError, TransferError};
use super::memory::Span;
use crate::fabric::{MAX_DIRECT_BYTES, RemoteSegment};

impl Connection {
    /// Writes `local` into the peer's memory on the caller's thread, which saves the way to the engine's thread and
    /// back. Returns the bytes moved. They are visible there then.
    ///
    /// Returns `None`, without effect, if the transport needs the engine's thread (all but `cma` do), if another
    /// thread copies to the same peer, or for memory of another device. [`start_write`](Self::start_write) serves
    /// these.
    ///
    /// Blocks while it copies. It looks at the deadline after every MiB. No credits are asked for, because nothing
    /// leaves the host.
    ///
    /// # Errors
    /// [`OpError`].
    pub fn write_directly(
        &self,
        local: &Span,
        remote: &Descriptor,
        deadline: Instant,
    ) -> Option<Result<u64, OpError>> {
        self.copy_directly(true, local, remote, deadline)
    }

    /// Reads the peer's memory into `local` on the caller's thread. See [`write_directly`](Self::write_directly).
    ///
    /// # Errors
    /// [`OpError`].
    pub fn read_directly(
        &self,
        local: &Span,
        remote: &Descriptor,
        deadline: Instant,
    ) -> Option<Result<u64, OpError>> {
        self.copy_directly(false, local, remote, deadline)
    }

    fn copy_directly(
        &self,
        is_write: bool,
        local: &Span,
        remote: &Descriptor,
        deadline: Instant,
    ) -> Option<Result<u64, OpError>> {
        let direct = self.shared.direct.as_ref()?;
        let here = local.host_address()?;
        if let Err(error) = self.check_one_sided(local, remote) {
            return Some(Err(error.into()));
        }
        let op = if is_write { "write" } else { "read" };
        let mut done = 0;
        loop {
            let bytes = (local.bytes - done).min(MAX_DIRECT_BYTES);
            let RemoteSegment { region, offset } = remote.segment();
            let part = RemoteSegment { region, offset: offset + done };
            // SAFETY: the span was checked when it was made, so the part lies in its registration, and the span keeps
            // that in force. The user who registered it has promised that transfers may write it.
            let copied = unsafe { direct.copy(is_write, part, here.add(done as usize), bytes) };
            match copied {
                Some(Ok(())) => done += bytes,
                Some(Err(error)) => return Some(Err(TransferError::post(op, &error).into())),
                None if done == 0 => return None,
                // Another thread has taken its turn between two parts, and takes others soon.
                None => std::thread::yield_now(),
            }
            if done == local.bytes {
                return Some(Ok(done));
            }
            if Instant::now() >= deadline {
                return Some(Err(TransferError::Deadline { op }.into()));
            }
        }
    }

    /// The checks of [`start_write`](Self::start_write).
    fn check_one_sided(&self, local: &Span, remote: &Descriptor) -> Result<(), SubmitError> {
        self.check_remote(std::slice::from_ref(local), std::slice::from_ref(remote))?;
        self.check_open()?;
        self.check_span(local)
    }
}
