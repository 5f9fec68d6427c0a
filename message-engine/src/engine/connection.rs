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
/// Every transfer comes in three forms: `start_…` returns at once with a [`Transfer`]; the plain form
/// blocks; `…_async` is for tasks. `deadline` bounds the transfer itself: when it passes, the transfer
/// fails. If the peer could still reach the buffer then, the connection is closed, because nothing else
/// gives the buffer back for sure; otherwise the connection goes on.
#[derive(Debug, Clone)]
pub struct Connection {
    pub(super) shared: Arc<ConnShared>,
}

impl Connection {
    /// What the peer said of itself.
    #[must_use]
    pub fn peer(&self) -> &PeerInfo {
        &self.shared.peer
    }

    /// Transport of the bytes.
    #[must_use]
    pub fn transport(&self) -> &Offer {
        &self.shared.transport
    }

    /// Number of the connection within its engine.
    #[must_use]
    pub fn id(&self) -> u64 {
        self.shared.key.serial
    }

    /// Why it is over; `None` while it stands.
    #[must_use]
    pub fn closed(&self) -> Option<CloseReason> {
        self.shared.closed.get().cloned()
    }

    /// Closes it. Transfers under way fail.
    pub fn close(&self) {
        self.shared.shared.defer_close(self.shared.key);
    }

    /// Describes a range of this side's memory to the peer.
    ///
    /// # Errors
    /// [`SubmitError::Unregistered`] where peers may not reach it, [`SubmitError::ForeignMemory`].
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

    /// The same for several ranges.
    ///
    /// # Errors
    /// As for [`advertise`](Self::advertise), of the first that cannot be described.
    pub fn advertisev(&self, spans: &[Span]) -> Result<Vec<Descriptor>, SubmitError> {
        spans.iter().map(|span| self.advertise(span)).collect()
    }

    /// Starts to send a message. The peer's receives take messages in order.
    ///
    /// Done means: a short message (see [`EngineConfig`](super::EngineConfig)) is at the peer's engine, a
    /// longer one in the buffer of the peer's receive.
    ///
    /// # Errors
    /// [`SubmitError`].
    pub fn start_send(&self, span: &Span, deadline: Instant) -> Result<Transfer, SubmitError> {
        Ok(self.begin(std::slice::from_ref(span), TransferKind::Send, deadline)?.block())
    }

    /// Starts to receive a message into `span`. The transfer gives its length.
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

    /// Starts to write `local` into the peer's memory. Done means visible there.
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

    /// Starts to write each of `local` into the range of `remote` in the same place, as one transfer.
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

    /// Starts to read the peer's memory into `local`.
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

    /// Starts to read each range of `remote` into the one of `local` in the same place, as one transfer.
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

    /// Starts to send a notification: bytes that the peer takes when it likes, in order. Done means: it
    /// waits at the peer's engine. While more waits there than the peer allows, this one waits here.
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
            self.check_memory(span)?;
            if span.region(self.shared.fabric).is_none() {
                return Err(self.unregistered());
            }
        }
        PendingTransfer::new(&self.shared, spans, kind, deadline)
    }

    fn check_open(&self) -> Result<(), SubmitError> {
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

    fn check_remote(&self, local: &[Span], remote: &[Descriptor]) -> Result<(), SubmitError> {
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

/// Blocking and awaited forms of the transfers above: the same, to the end.
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
                /// Blocks. Gives the bytes moved.
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
                /// Gives the bytes moved.
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
                            Ok(starting) => return Ok(starting.wait().await.await?),
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
