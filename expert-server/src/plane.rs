//! The handle to a data thread, on CPUs or on a GPU, and the life of its links.

use std::any::Any;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;

use p2p_core::device::DeviceSlots;
use p2p_core::{AnyEndpoint, Channel};
use protocol::DispatchExpect;
use tokio::sync::oneshot;

use crate::error::DataError;
use crate::inbox::{Inbox, LinkId};
use crate::metrics::DropReason;
use crate::status::{DataStatus, LoadCounters};

/// The operations of a data thread that control tasks use. No method waits for the thread.
pub(crate) trait DataPlane: Send + Sync + fmt::Debug {
    /// Hands a connected client's slots to the data thread. `None` if the slots are of the other kind (a GPU's
    /// for CPUs, or the reverse), which the handshake excludes.
    fn attach(
        &self,
        channel: Channel<AnyEndpoint>,
        device: Option<DeviceSlots>,
        expect: DispatchExpect,
    ) -> Option<(LinkId, LinkEnd)>;

    /// Closes the link of a client that is gone. Has no effect on a closed link.
    fn detach(&self, id: LinkId);

    /// Closes every link and ends the thread.
    fn stop(&self);

    fn status(&self) -> &Arc<DataStatus>;

    fn load(&self) -> &Arc<LoadCounters>;
}

/// A link that has closed, with its slots. Dropping it unmaps them, which takes too long for the data thread.
pub struct ClosedLink<S> {
    /// Why the link closed.
    pub reason: DropReason,
    /// The slots, which no thread uses any more.
    pub slots: S,
}

impl<S: Send + 'static> ClosedLink<S> {
    fn boxed(self) -> ClosedLink<Box<dyn Send>> {
        ClosedLink { reason: self.reason, slots: Box::new(self.slots) }
    }
}

impl<S> fmt::Debug for ClosedLink<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClosedLink").field("reason", &self.reason).finish_non_exhaustive()
    }
}

/// Completes when a link has closed; without a value when the data thread is gone.
pub(crate) type LinkEnd = Pin<Box<dyn Future<Output = Option<ClosedLink<Box<dyn Send>>>> + Send>>;

/// The [`LinkEnd`] of a link with slots of one type.
pub(crate) fn link_end<S: Send + 'static>(closed: oneshot::Receiver<ClosedLink<S>>) -> LinkEnd {
    Box::pin(async move { closed.await.ok().map(ClosedLink::boxed) })
}

/// The end of a data thread: `Ok` after a stop, an error when the thread ended on its own.
pub type ThreadEnd = oneshot::Receiver<Result<(), DataError>>;

/// The body of a data thread: calls `run` and reports its end.
///
/// `run` owns every link and drops them on its way out, also when it panics. Clients that wait for an answer
/// then see their connections close.
pub(crate) fn run_to_end<C>(
    run: impl FnOnce() -> Result<(), DataError>,
    status: &DataStatus,
    inbox: &Inbox<C>,
    end: oneshot::Sender<Result<(), DataError>>,
) {
    let result = catch_unwind(AssertUnwindSafe(run));
    status.set_over();
    inbox.close();
    let result = result.unwrap_or_else(|panic| {
        let message = panic_message(panic.as_ref());
        tracing::error!(%message, "the data thread panicked");
        Err(DataError::Panicked { message })
    });
    // The receiver may be gone.
    let _ = end.send(result);
}

fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "?".to_owned())
}
