//! The host's endpoint: that of the network underneath, with the name of the network above, shared with the health
//! monitor.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError, Weak};
use std::time::Instant;

use p2p_core::endpoint::{Endpoint, Marks};
use p2p_core::region::{LocalRange, RemoteRange, SlotKey};
use p2p_core::wait::Driver;
use p2p_core::{AnyEndpoint, PostError, QuietError, Region, TransportKind};

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

    fn kind(&self) -> TransportKind {
        TransportKind::Ibgda
    }

    fn register(&mut self, region: &Region) -> Result<(), PostError> {
        self.lock().register(region)
    }

    fn driver(&self) -> Option<Arc<dyn Driver>> {
        self.driver.clone()
    }

    fn health(&self) -> Result<(), PostError> {
        self.lock().health()
    }

    fn direct(&self, key: SlotKey) -> Option<NonNull<u8>> {
        self.lock().direct(key)
    }

    unsafe fn put(&mut self, dst: RemoteRange<SlotKey>, src: LocalRange) -> Result<(), PostError> {
        // SAFETY: the caller's promise.
        unsafe { self.lock().put(dst, src) }
    }

    unsafe fn get(&mut self, dst: LocalRange, src: RemoteRange<SlotKey>) -> Result<(), PostError> {
        // SAFETY: the caller's promise.
        unsafe { self.lock().get(dst, src) }
    }

    fn add_flag(&mut self, dst: RemoteRange<SlotKey>, value: u64) -> Result<(), PostError> {
        self.lock().add_flag(dst, value)
    }

    fn add_flag_lazily(&mut self, dst: RemoteRange<SlotKey>, value: u64) -> Result<(), PostError> {
        self.lock().add_flag_lazily(dst, value)
    }

    fn fence(&mut self) -> Result<(), PostError> {
        self.lock().fence()
    }

    fn quiet(&mut self, deadline: Instant) -> Result<(), QuietError> {
        self.lock().quiet(deadline)
    }

    fn is_settled(&mut self) -> Result<bool, PostError> {
        self.lock().is_settled()
    }

    fn marks(&mut self) -> Result<Option<Marks>, PostError> {
        self.lock().marks()
    }

    fn wake(&mut self, key: SlotKey, waiting_offset: usize) -> Result<(), PostError> {
        self.lock().wake(key, waiting_offset)
    }

    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        self.wait_fd.as_ref().map(AsFd::as_fd)
    }
}
