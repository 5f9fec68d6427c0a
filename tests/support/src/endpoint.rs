//! Faults of a network: an endpoint that forwards every call, except where a [`Fault`] intervenes.

use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use p2p_core::endpoint::{Batch, Endpoint, Marks, Progress};
use p2p_core::network::{JoinedSide, Network, NetworkError, OpenSide, Route, SideDescription};
use p2p_core::region::{LocalRange, RemoteRange, SlotKey};
use p2p_core::{AnyEndpoint, PostError, QuietError, SlotLayout, TransportKind};

/// The points at which a fault intervenes. The defaults change nothing.
pub trait Fault: fmt::Debug + Send + 'static {
    /// Called before an operation is posted. `Ok(false)` loses it: it counts as posted and never happens.
    ///
    /// # Errors
    /// The error of the operation, which is not posted then.
    fn post(&mut self, op: Op) -> Result<bool, PostError> {
        let _ = op;
        Ok(true)
    }

    /// Called before a flag is added to. Returns the value to add instead of `value`, or `None` to lose the operation.
    ///
    /// # Errors
    /// The error of the operation, which is not posted then.
    fn add_flag(
        &mut self,
        dst: RemoteRange<SlotKey>,
        value: u64,
    ) -> Result<Option<u64>, PostError> {
        let _ = dst;
        Ok(self.post(Op::AddFlag)?.then_some(value))
    }

    /// Called before calls that wait for operations or ask about them. With `Ok(false)` operations never complete.
    ///
    /// # Errors
    /// The error of that call.
    fn completions(&self) -> Result<bool, PostError> {
        Ok(true)
    }
}

/// Operations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Op {
    /// `put`.
    Put,
    /// `get`.
    Get,
    /// `add_flag`, at once or lazily.
    AddFlag,
}

impl Op {
    /// The operation's name in errors.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Put => "put",
            Self::Get => "get",
            Self::AddFlag => "add_flag",
        }
    }
}

/// An error of the transport, with code −5, for faults.
#[must_use]
pub fn injected(op: &'static str) -> PostError {
    PostError::Transport { op, code: -5, detail: "injected".to_owned() }
}

type MakeFault<F> = Box<dyn Fn() -> Option<F> + Send + Sync>;

/// A network whose connections have faults. It carries no slots of GPUs.
pub struct FaultyNetwork<F> {
    inner: Arc<dyn Network>,
    make_fault: MakeFault<F>,
}

impl<F: Fault> FaultyNetwork<F> {
    /// Asks `make_fault` for the fault of every connection. A connection without one is the network's own.
    pub fn new(
        inner: Arc<dyn Network>,
        make_fault: impl Fn() -> Option<F> + Send + Sync + 'static,
    ) -> Self {
        Self { inner, make_fault: Box::new(make_fault) }
    }
}

impl<F> fmt::Debug for FaultyNetwork<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("FaultyNetwork").field(&self.inner).finish()
    }
}

impl<F: Fault> Network for FaultyNetwork<F> {
    fn kind(&self) -> TransportKind {
        self.inner.kind()
    }

    fn flavour(&self) -> &str {
        self.inner.flavour()
    }

    fn open(&self, layout: &SlotLayout, route: Route) -> Result<Box<dyn OpenSide>, NetworkError> {
        let inner = self.inner.open(layout, route)?;
        Ok(match (self.make_fault)() {
            Some(fault) => Box::new(FaultySide { inner, fault }),
            None => inner,
        })
    }
}

#[derive(Debug)]
struct FaultySide<F> {
    inner: Box<dyn OpenSide>,
    fault: F,
}

impl<F: Fault> OpenSide for FaultySide<F> {
    fn description(&self) -> SideDescription {
        self.inner.description()
    }

    fn join(self: Box<Self>, peer: &SideDescription) -> Result<JoinedSide, NetworkError> {
        let JoinedSide { endpoint, slot } = self.inner.join(peer)?;
        let endpoint = FaultyEndpoint { inner: endpoint, fault: self.fault };
        Ok(JoinedSide { endpoint: AnyEndpoint::Other(Box::new(endpoint)), slot })
    }
}

#[derive(Debug)]
struct FaultyEndpoint<F> {
    inner: AnyEndpoint,
    fault: F,
}

impl<F: Fault> Endpoint for FaultyEndpoint<F> {
    type RemoteKey = SlotKey;

    p2p_core::forward_endpoint! { kind, register, direct, fence, wake, wait_fd => self.inner }

    unsafe fn put(&mut self, dst: RemoteRange<SlotKey>, src: LocalRange) -> Result<(), PostError> {
        if !self.fault.post(Op::Put)? {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        unsafe { self.inner.put(dst, src) }
    }

    unsafe fn get(&mut self, dst: LocalRange, src: RemoteRange<SlotKey>) -> Result<(), PostError> {
        if !self.fault.post(Op::Get)? {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        unsafe { self.inner.get(dst, src) }
    }

    fn add_flag(&mut self, dst: RemoteRange<SlotKey>, value: u64) -> Result<(), PostError> {
        match self.fault.add_flag(dst, value)? {
            Some(value) => self.inner.add_flag(dst, value),
            None => Ok(()),
        }
    }

    fn quiet(&mut self, deadline: Instant) -> Result<(), QuietError> {
        if !self.fault.completions()? {
            return Err(QuietError::Deadline { outstanding: 1 });
        }
        self.inner.quiet(deadline)
    }
}

impl<F: Fault> Batch for FaultyEndpoint<F> {
    p2p_core::forward_endpoint! { begin_batch, flush => self.inner }
}

impl<F: Fault> Progress for FaultyEndpoint<F> {
    p2p_core::forward_endpoint! { driver, has_room, has_room_to_spare => self.inner }

    fn health(&self) -> Result<(), PostError> {
        self.fault.completions()?;
        self.inner.health()
    }

    fn add_flag_lazily(&mut self, dst: RemoteRange<SlotKey>, value: u64) -> Result<(), PostError> {
        match self.fault.add_flag(dst, value)? {
            Some(value) => self.inner.add_flag_lazily(dst, value),
            None => Ok(()),
        }
    }

    fn try_fence(&mut self) -> Result<bool, PostError> {
        Ok(self.fault.completions()? && self.inner.try_fence()?)
    }

    fn is_settled(&mut self) -> Result<bool, PostError> {
        Ok(self.fault.completions()? && self.inner.is_settled()?)
    }

    fn marks(&mut self) -> Result<Option<Marks>, PostError> {
        if !self.fault.completions()? {
            return Ok(None);
        }
        self.inner.marks()
    }
}
