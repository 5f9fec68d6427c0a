//! One-sided transfers on the caller's thread, for transports that need no thread of their own.

use std::time::Instant;

use super::connection::Connection;
use super::descriptor::Descriptor;
use super::error::{CloseReason, OpError, SubmitError, TransferError};
use super::memory::Span;
use crate::fabric::{DirectError, DirectWait, MAX_DIRECT_BYTES, RemoteSegment};

impl Connection {
    /// Writes `local` into the peer's memory on the caller's thread, which saves the way to the engine's thread and
    /// back. Returns the bytes moved. They are visible there then. `wait` is a deadline, or a [`DirectWait`].
    ///
    /// Returns `None`, without effect, where this way does not exist. `cma`, `shm` and `tcp` have it. It is not for memory
    /// of another device, for more than a MiB over `shm` and `tcp`, or while another thread uses it towards the same
    /// peer. [`start_write`](Self::start_write) serves these.
    ///
    /// Blocks until it is done, at the latest at the deadline. Over `cma` it looks at the deadline after every MiB. A
    /// transfer over `shm` or `tcp` that misses its deadline, or is cancelled, closes the connection, because bytes of
    /// it may still arrive. No credits are asked for: nothing leaves the host over `cma` and `shm`, and over `tcp` one
    /// such transfer of at most a MiB is under way at a time.
    ///
    /// # Errors
    /// [`OpError`].
    pub fn write_directly<'a>(
        &self,
        local: &Span,
        remote: &Descriptor,
        wait: impl Into<DirectWait<'a>>,
    ) -> Option<Result<u64, OpError>> {
        self.copy_directly(true, local, remote, &wait.into())
    }

    /// Reads the peer's memory into `local` on the caller's thread. See [`write_directly`](Self::write_directly).
    ///
    /// # Errors
    /// [`OpError`].
    pub fn read_directly<'a>(
        &self,
        local: &Span,
        remote: &Descriptor,
        wait: impl Into<DirectWait<'a>>,
    ) -> Option<Result<u64, OpError>> {
        self.copy_directly(false, local, remote, &wait.into())
    }

    fn copy_directly(
        &self,
        is_write: bool,
        local: &Span,
        remote: &Descriptor,
        wait: &DirectWait<'_>,
    ) -> Option<Result<u64, OpError>> {
        let direct = self.shared.direct.as_ref()?;
        if local.bytes > direct.max_bytes() {
            return None;
        }
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
            let copied =
                unsafe { direct.copy(is_write, part, here.add(done as usize), bytes, wait) };
            match copied {
                Some(Ok(())) => done += bytes,
                Some(Err(error)) => return Some(Err(self.end_directly(op, error).into())),
                None if done == 0 => return None,
                // Another thread has taken its turn between two parts, and takes others soon.
                None => std::thread::yield_now(),
            }
            if done == local.bytes {
                return Some(Ok(done));
            }
            if Instant::now() >= wait.deadline {
                return Some(Err(TransferError::Deadline { op }.into()));
            }
        }
    }

    /// Closes the connection if bytes of the failed copy may still arrive. Returns the error of the transfer.
    fn end_directly(&self, op: &'static str, error: DirectError) -> TransferError {
        let shared = &self.shared.shared;
        match error {
            DirectError::Lost(error) => {
                shared.defer_lost(self.shared.key);
                TransferError::post(op, &error)
            }
            DirectError::Expired => {
                shared.defer_close(self.shared.key, CloseReason::Deadline(op));
                TransferError::Deadline { op }
            }
            DirectError::Post(error) => TransferError::post(op, &error),
            // A kind that this engine does not know closes the connection.
            other => {
                let detail = format!("{other:?}").into();
                shared.defer_close(self.shared.key, CloseReason::Local);
                TransferError::Fabric { op, code: 0, detail }
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
