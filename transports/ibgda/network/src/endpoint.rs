//! The host's endpoint: that of the network underneath, with the name of the network above, shared with the health
//! monitor.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError, Weak};

use p2p_core::endpoint::{Batch, Endpoint, Progress};
use p2p_core::region::SlotKey;
use p2p_core::wait::Driver;
use p2p_core::{AnyEndpoint, PostError, TransportKind};

/// See the [module](self). Dropping it ends the endpoint.
#[derive(Debug)]
pub(crate) struct HostEndpoint {
    inner: Arc<Mutex<AnyEndpoint>>,
    driver: Option<Arc<dyn Driver>>,
    wait_fd: Option<OwnedFd>,
}

/// Monitors an endpoint as long as it exists. The monitor's thread serves other endpoints as well, so it never
/// waits for a call of this one: a quiet may take long. The thread in that call gets the error itself.
#[derive(Debug)]
pub(crate) struct HostHealth(Weak<Mutex<AnyEndpoint>>);

impl HostEndpoint {
    pub(crate) fn new(inner: AnyEndpoint) -> std::io::Result<Self> {
        let driver = inner.driver();
        let wait_fd = inner.wait_fd().map(|fd| fd.try_clone_to_owned()).transpose()?;
        Ok(Self { inner: Arc::new(Mutex::new(inner)), driver, wait_fd })
    }

    pub(crate) fn health_of(&self) -> HostHealth {
        HostHealth(Arc::downgrade(&self.inner))
    }

    fn lock(&self) -> MutexGuard<'_, AnyEndpoint> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl HostHealth {
    /// State of the endpoint. An endpoint that is gone, or that another thread uses, counts as healthy.
    pub(crate) fn check(&self) -> Result<(), PostError> {
        let Some(inner) = self.0.upgrade() else { return Ok(()) };
        match inner.try_lock() {
            Ok(inner) => inner.health(),
            Err(TryLockError::Poisoned(inner)) => inner.into_inner().health(),
            Err(TryLockError::WouldBlock) => Ok(()),
        }
    }
}

impl Endpoint for HostEndpoint {
    type RemoteKey = SlotKey;

    p2p_core::forward_endpoint! {
        register, direct, put, get, add_flag, fence, quiet, wake => self.lock()
    }

    fn kind(&self) -> TransportKind {
        TransportKind::Ibgda
    }

    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        self.wait_fd.as_ref().map(AsFd::as_fd)
    }
}

impl Batch for HostEndpoint {
    p2p_core::forward_endpoint! { begin_batch, flush => self.lock() }
}

impl Progress for HostEndpoint {
    p2p_core::forward_endpoint! {
        health, add_flag_lazily, has_room, has_room_to_spare, try_fence, is_settled, marks
        => self.lock()
    }

    fn driver(&self) -> Option<Arc<dyn Driver>> {
        self.driver.clone()
    }
}
