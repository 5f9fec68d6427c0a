//! A connection as users see it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::PeerInfo;
use super::descriptor::Descriptor;
use super::error::{CloseReason, OpError, SubmitError};
use super::memory::Span;
use super::pending::{PendingTransfer, TransferKind};
use super::shared::{Command, ConnShared};
use super::transfer::Transfer;
use p2p_core::network::Offer;

/// Both directions to one peer. Clones share it; it is closed when the last one is dropped.
///
/// Every transfer has three forms. `start_…` returns a [`Transfer`] at once. The plain form blocks until the transfer
/// ends. `…_async` awaits its end. The transfer fails when `deadline` passes. If the peer could still reach the
/// buffer then, the connection is closed, because only that frees the buffer with certainty. Otherwise the connection
/// stays open.
#[derive(Debug, Clone)]
pub struct Connection {
    pub(super) shared: Arc<ConnShared>,
}

impl Connection {
    /// The peer's description of itself, from the handshake.
    #[must_use]
    pub fn peer(&self) -> &PeerInfo {
        &self.shared.peer
    }

    /// Transport that carries the bytes of transfers.
    #[must_use]
    pub fn transport(&self) -> &Offer {
        &self.shared.transport
    }

    /// Number of the connection within its engine.
    #[must_use]
    pub fn id(&self) -> u64 {
        self.shared.key.serial
    }

    /// Reason of its end; `None` while it is open.
    #[must_use]
    pub fn closed(&self) -> Option<CloseReason> {
        self.shared.closed.get().cloned()
    }

    /// Closes it. Pending transfers fail. Returns before the engine's thread has closed it.
    pub fn close(&self) {
        self.shared.shared.defer_close(self.shared.key, CloseReason::Local);
    }

    /// Describes a range of this side's memory, for the peer to read or write. The caller sends the descriptor, for
    /// example as a [notification](Self::notify).
    ///
    /// # Errors
    /// [`SubmitError::Unregistered`] if peers may not reach the memory, [`SubmitError::ForeignMemory`].
    pub fn advertise(&self, span: &Span) -> Result<Descriptor, SubmitError> {
        self.check_memory(span)?;
        let region = span.wire(self.shared.fabric).ok_or_else(|| self.unregistered())?;
        Ok(Descriptor {
            engine_id: self.shared.shared.metadata.engine_id,
            transport: self.shared.transport.kind,
            region,
            offset: span.offset,
            bytes: span.bytes,
        })
    }

    /// Describes several ranges.
    ///
    /// # Errors
    /// As for [`advertise`](Self::advertise), for the first range that fails.
    pub fn advertisev(&self, spans: &[Span]) -> Result<Vec<Descriptor>, SubmitError> {
        spans.iter().map(|span| self.advertise(span)).collect()
    }

    /// Starts to send a message. The peer's receives take messages in order.
    ///
    /// When the transfer is done, a message of up to [`eager_bytes`](super::EngineConfig::eager_bytes) is at the peer's
    /// engine. A longer one is in the buffer of the peer's receive.
    ///
    /// ```
    /// # use std::time::{Duration, Instant};
    /// # use switchyard_message_engine::{Access, Engine, EngineConfig};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let deadline = Instant::now() + Duration::from_secs(30);
    /// # let (here, there) = (Engine::start(EngineConfig::local())?, Engine::start(EngineConfig::local())?);
    /// # let out = here.connect(there.endpoint().addr, deadline)?;
    /// # let back = there.accept(deadline)?;
    ///
    /// let source = here.alloc(64, Access::Local)?;
    /// let target = there.alloc(64, Access::RemoteReadWrite)?;
    /// source.copy_in(0, b"hello")?;
    /// let received = back.start_recv(&target.whole(), deadline)?;
    /// let sent = out.start_send(&source.span(0, 5)?, deadline)?;
    /// assert_eq!((sent.wait()?, received.wait()?), (5, 5));
    /// let mut bytes = [0; 5];
    /// target.copy_out(0, &mut bytes)?;
    /// assert_eq!(&bytes, b"hello");
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`SubmitError`].
    pub fn start_send(&self, span: &Span, deadline: Instant) -> Result<Transfer, SubmitError> {
        Ok(self.begin(std::slice::from_ref(span), TransferKind::Send, deadline)?.block())
    }

    /// Starts to receive a message into `span`. The transfer returns the length of the message in bytes. See
    /// [`start_send`](Self::start_send) for an example.
    ///
    /// # Errors
    /// [`SubmitError`].
    pub fn start_recv(&self, span: &Span, deadline: Instant) -> Result<Transfer, SubmitError> {
        Ok(self.begin(std::slice::from_ref(span), TransferKind::Recv, deadline)?.block())
    }

    /// Starts to send one message per span, as one transfer.
    ///
    /// # Errors
    /// [`SubmitError`].
    pub fn start_sendv(&self, spans: &[Span], deadline: Instant) -> Result<Transfer, SubmitError> {
        Ok(self.begin(spans, TransferKind::Send, deadline)?.block())
    }

    /// Starts to receive one message per span, as one transfer.
    ///
    /// # Errors
    /// [`SubmitError`].
    pub fn start_recvv(&self, spans: &[Span], deadline: Instant) -> Result<Transfer, SubmitError> {
        Ok(self.begin(spans, TransferKind::Recv, deadline)?.block())
    }

    /// Starts to write `local` into the peer's memory. The bytes are visible there when the transfer is done.
    ///
    /// ```
    /// # use std::time::{Duration, Instant};
    /// # use switchyard_message_engine::{Access, Engine, EngineConfig};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let deadline = Instant::now() + Duration::from_secs(30);
    /// # let (here, there) = (Engine::start(EngineConfig::local())?, Engine::start(EngineConfig::local())?);
    /// # let out = here.connect(there.endpoint().addr, deadline)?;
    /// # let back = there.accept(deadline)?;
    ///
    /// let source = here.alloc(64, Access::Local)?;
    /// let target = there.alloc(64, Access::RemoteReadWrite)?;
    /// source.copy_in(0, &[7; 64])?;
    /// // The owner of the memory advertises it, and sends the descriptor to the peer.
    /// let remote = back.advertise(&target.whole())?;
    /// out.start_write(&source.whole(), &remote, deadline)?.wait()?;
    /// let copy = here.alloc(64, Access::Local)?;
    /// out.start_read(&copy.whole(), &remote, deadline)?.wait()?;
    /// let mut bytes = [0; 64];
    /// copy.copy_out(0, &mut bytes)?;
    /// assert_eq!(bytes, [7; 64]);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`SubmitError`].
    pub fn start_write(
        &self,
        local: &Span,
        remote: &Descriptor,
        deadline: Instant,
    ) -> Result<Transfer, SubmitError> {
        self.start_writev(std::slice::from_ref(local), std::slice::from_ref(remote), deadline)
    }

    /// Starts to write each range of `local` into the range of `remote` with the same index, as one transfer.
    ///
    /// # Errors
    /// [`SubmitError`].
    pub fn start_writev(
        &self,
        local: &[Span],
        remote: &[Descriptor],
        deadline: Instant,
    ) -> Result<Transfer, SubmitError> {
        Ok(self.begin(local, TransferKind::Write(remote), deadline)?.block())
    }

    /// Starts to read the peer's memory into `local`. See [`start_write`](Self::start_write) for an example.
    ///
    /// # Errors
    /// [`SubmitError`].
    pub fn start_read(
        &self,
        local: &Span,
        remote: &Descriptor,
        deadline: Instant,
    ) -> Result<Transfer, SubmitError> {
        self.start_readv(std::slice::from_ref(local), std::slice::from_ref(remote), deadline)
    }

    /// Starts to read each range of `remote` into the range of `local` with the same index, as one transfer.
    ///
    /// # Errors
    /// [`SubmitError`].
    pub fn start_readv(
        &self,
        local: &[Span],
        remote: &[Descriptor],
        deadline: Instant,
    ) -> Result<Transfer, SubmitError> {
        Ok(self.begin(local, TransferKind::Read(remote), deadline)?.block())
    }

    /// Starts to send a notification: bytes that the peer takes in order, at any time. The transfer is done when the
    /// notification waits at the peer's engine. It waits on this side while the peer's window for notifications is
    /// full.
    ///
    /// # Errors
    /// [`SubmitError`]; [`SubmitError::TooLong`] above the peer's limit.
    pub fn start_notify(&self, bytes: &[u8], deadline: Instant) -> Result<Transfer, SubmitError> {
        Ok(self.begin_notify(bytes, deadline)?.block())
    }

    fn begin_notify(
        &self,
        bytes: &[u8],
        deadline: Instant,
    ) -> Result<PendingTransfer<'_>, SubmitError> {
        self.check_open()?;
        let (found, limit) = (bytes.len() as u64, self.shared.theirs.max_notification);
        if found > limit {
            return Err(SubmitError::TooLong { bytes: found, limit });
        }
        let shared = &self.shared.shared;
        let id = shared.begin(1)?;
        let command = Command::Notify {
            conn: self.shared.key,
            transfer: id.0 as u32,
            deadline_ns: shared.ns(deadline),
            notification: bytes.to_vec(),
        };
        if shared.push(command).is_err() {
            shared.transfers.finish(id.0 as u32, Ok(0));
            shared.transfers.release(id);
            return Err(SubmitError::Busy);
        }
        Ok(PendingTransfer::pushed(&self.shared, id))
    }

    fn begin<'a>(
        &'a self,
        spans: &'a [Span],
        kind: TransferKind<'a>,
        deadline: Instant,
    ) -> Result<PendingTransfer<'a>, SubmitError> {
        if let TransferKind::Write(remote) | TransferKind::Read(remote) = kind {
            self.check_remote(spans, remote)?;
        }
        self.check_open()?;
        for span in spans {
            self.check_span(span)?;
        }
        PendingTransfer::new(&self.shared, spans, kind, deadline)
    }

    pub(super) fn check_span(&self, span: &Span) -> Result<(), SubmitError> {
        self.check_memory(span)?;
        if span.region(self.shared.fabric).is_none() {
            return Err(self.unregistered());
        }
        Ok(())
    }

    pub(super) fn check_open(&self) -> Result<(), SubmitError> {
        match self.shared.closed.get() {
            Some(reason) => Err(SubmitError::Closed(reason.clone())),
            None => Ok(()),
        }
    }

    fn check_memory(&self, span: &Span) -> Result<(), SubmitError> {
        if Arc::ptr_eq(&span.handle.shared, &self.shared.shared) {
            Ok(())
        } else {
            Err(SubmitError::ForeignMemory)
        }
    }

    pub(super) fn check_remote(
        &self,
        local: &[Span],
        remote: &[Descriptor],
    ) -> Result<(), SubmitError> {
        if local.len() != remote.len() {
            let (local, remote) = (local.len() as u64, remote.len() as u64);
            return Err(SubmitError::SizeMismatch { local, remote });
        }
        for (local, remote) in local.iter().zip(remote) {
            remote.check(self.shared.peer.engine_id, self.shared.transport.kind)?;
            if local.bytes != remote.bytes {
                let (local, remote) = (local.bytes, remote.bytes);
                return Err(SubmitError::SizeMismatch { local, remote });
            }
        }
        Ok(())
    }

    fn unregistered(&self) -> SubmitError {
        SubmitError::Unregistered {
            transport: self.shared.transport.to_string(),
            detail: "register it with the access that peers need, and for this transport",
        }
    }
}

/// Blocking and awaited forms of the transfers above.
macro_rules! forms {
    ($(
        $(#[$doc:meta])*
        $start:ident, $block:ident, $await:ident($this:ident, $deadline:ident; $($arg:ident: $type:ty),*)
            => $begin:expr;
    )*) => {
        impl Connection {
            $(
                $(#[$doc])*
                ///
                /// Blocks until the transfer ends. Returns the bytes moved.
                ///
                /// # Errors
                /// [`OpError`].
                pub fn $block(&self, $($arg: $type,)* deadline: Instant) -> Result<u64, OpError> {
                    let mut pause = Duration::from_micros(10);
                    loop {
                        match self.$start($($arg,)* deadline) {
                            Ok(transfer) => return Ok(transfer.wait()?),
                            Err(SubmitError::Busy) if Instant::now() < deadline => {
                                std::thread::sleep(pause);
                                pause = (pause * 2).min(MAX_PAUSE);
                            }
                            Err(error) => return Err(error.into()),
                        }
                    }
                }

                $(#[$doc])*
                ///
                /// Awaits the end of the transfer. Returns the bytes moved. If the future is dropped, parts that were
                /// submitted run on, and their buffers stay in use until they end.
                ///
                /// # Errors
                /// [`OpError`].
                pub async fn $await(
                    &self,
                    $($arg: $type,)*
                    $deadline: Instant,
                ) -> Result<u64, OpError> {
                    let $this = self;
                    let mut pause = Duration::from_millis(1);
                    loop {
                        match $begin {
                            Ok(pending) => return Ok(pending.wait().await.await?),
                            Err(SubmitError::Busy) if Instant::now() < $deadline => {
                                tokio::time::sleep(pause).await;
                                pause = (pause * 2).min(MAX_PAUSE);
                            }
                            Err(error) => return Err(error.into()),
                        }
                    }
                }
            )*
        }
    };
}

forms! {
    /// As [`start_send`](Self::start_send).
    start_send, send, send_async(this, deadline; span: &Span)
        => this.begin(std::slice::from_ref(span), TransferKind::Send, deadline);
    /// As [`start_recv`](Self::start_recv).
    start_recv, recv, recv_async(this, deadline; span: &Span)
        => this.begin(std::slice::from_ref(span), TransferKind::Recv, deadline);
    /// As [`start_sendv`](Self::start_sendv).
    start_sendv, sendv, sendv_async(this, deadline; spans: &[Span])
        => this.begin(spans, TransferKind::Send, deadline);
    /// As [`start_recvv`](Self::start_recvv).
    start_recvv, recvv, recvv_async(this, deadline; spans: &[Span])
        => this.begin(spans, TransferKind::Recv, deadline);
    /// As [`start_write`](Self::start_write).
    start_write, write, write_async(this, deadline; local: &Span, remote: &Descriptor)
        => this.begin(std::slice::from_ref(local), TransferKind::Write(std::slice::from_ref(remote)), deadline);
    /// As [`start_writev`](Self::start_writev).
    start_writev, writev, writev_async(this, deadline; local: &[Span], remote: &[Descriptor])
        => this.begin(local, TransferKind::Write(remote), deadline);
    /// As [`start_read`](Self::start_read).
    start_read, read, read_async(this, deadline; local: &Span, remote: &Descriptor)
        => this.begin(std::slice::from_ref(local), TransferKind::Read(std::slice::from_ref(remote)), deadline);
    /// As [`start_readv`](Self::start_readv).
    start_readv, readv, readv_async(this, deadline; local: &[Span], remote: &[Descriptor])
        => this.begin(local, TransferKind::Read(remote), deadline);
    /// As [`start_notify`](Self::start_notify).
    start_notify, notify, notify_async(this, deadline; bytes: &[u8])
        => this.begin_notify(bytes, deadline);
}

const MAX_PAUSE: Duration = Duration::from_millis(5);
