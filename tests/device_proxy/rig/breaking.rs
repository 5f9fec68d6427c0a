//! A network that fails towards one peer while the processes at both ends are well, and recorded layers.

use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};

use attention_client::device::ReplayReport;
use kernels::gpu::Graph;
use p2p_core::endpoint::{Endpoint, Marks};
use p2p_core::network::{Joined, NetworkError, OpenSide, Route, SideDescription};
use p2p_core::region::{LocalRange, RemoteRange, SlotKey};
use p2p_core::wait::Driver;
use p2p_core::{AnyEndpoint, PostError, QuietError, Region, SlotLayout};

use super::*;

/// Its first connection fails from [`fail`](Self::fail) on, the others never.
#[derive(Debug)]
pub struct BreakingNetwork {
    inner: Arc<dyn Network>,
    has_failed: Arc<AtomicBool>,
    is_next_first: AtomicBool,
}

impl BreakingNetwork {
    pub fn over(inner: Arc<dyn Network>) -> Self {
        Self { inner, has_failed: Arc::default(), is_next_first: AtomicBool::new(true) }
    }

    pub fn fail(&self) {
        self.has_failed.store(true, Ordering::SeqCst);
    }
}

impl Network for BreakingNetwork {
    fn kind(&self) -> TransportKind {
        self.inner.kind()
    }

    fn flavour(&self) -> &str {
        self.inner.flavour()
    }

    fn open(&self, layout: &SlotLayout, route: Route) -> Result<Box<dyn OpenSide>, NetworkError> {
        let inner = self.inner.open(layout, route)?;
        let has_failed = match self.is_next_first.swap(false, Ordering::SeqCst) {
            true => Arc::clone(&self.has_failed),
            false => Arc::default(),
        };
        Ok(Box::new(Side { inner, has_failed }))
    }
}

#[derive(Debug)]
struct Side {
    inner: Box<dyn OpenSide>,
    has_failed: Arc<AtomicBool>,
}

impl OpenSide for Side {
    fn description(&self) -> SideDescription {
        self.inner.description()
    }

    fn join(self: Box<Self>, peer: &SideDescription) -> Result<Joined, NetworkError> {
        let Joined { endpoint, slot } = self.inner.join(peer)?;
        let endpoint = Breaking { inner: endpoint, has_failed: self.has_failed };
        Ok(Joined { endpoint: AnyEndpoint::Other(Box::new(endpoint)), slot })
    }
}

#[derive(Debug)]
struct Breaking {
    inner: AnyEndpoint,
    has_failed: Arc<AtomicBool>,
}

impl Breaking {
    fn check(&self, op: &'static str) -> Result<(), PostError> {
        match self.has_failed.load(Ordering::SeqCst) {
            true => Err(PostError::Transport { op, code: -5, detail: "as told".to_owned() }),
            false => Ok(()),
        }
    }
}

impl Endpoint for Breaking {
    type RemoteKey = SlotKey;

    fn kind(&self) -> TransportKind {
        self.inner.kind()
    }

    fn register(&mut self, region: &Region) -> Result<(), PostError> {
        self.inner.register(region)
    }

    fn driver(&self) -> Option<Arc<dyn Driver>> {
        self.inner.driver()
    }

    fn health(&self) -> Result<(), PostError> {
        self.inner.health()
    }

    fn direct(&self, key: SlotKey) -> Option<NonNull<u8>> {
        self.inner.direct(key)
    }

    unsafe fn put(&mut self, dst: RemoteRange<SlotKey>, src: LocalRange) -> Result<(), PostError> {
        self.check("put")?;
        // SAFETY: the caller's promise.
        unsafe { self.inner.put(dst, src) }
    }

    unsafe fn get(&mut self, dst: LocalRange, src: RemoteRange<SlotKey>) -> Result<(), PostError> {
        self.check("get")?;
        // SAFETY: the caller's promise.
        unsafe { self.inner.get(dst, src) }
    }

    fn add_flag(&mut self, dst: RemoteRange<SlotKey>, value: u64) -> Result<(), PostError> {
        self.check("add_flag")?;
        self.inner.add_flag(dst, value)
    }

    fn add_flag_lazily(&mut self, dst: RemoteRange<SlotKey>, value: u64) -> Result<(), PostError> {
        self.check("add_flag_lazily")?;
        self.inner.add_flag_lazily(dst, value)
    }

    fn has_room(&mut self) -> bool {
        self.inner.has_room()
    }

    fn has_room_to_spare(&mut self) -> bool {
        self.inner.has_room_to_spare()
    }

    fn fence(&mut self) -> Result<(), PostError> {
        self.inner.fence()
    }

    fn try_fence(&mut self) -> Result<bool, PostError> {
        self.inner.try_fence()
    }

    fn quiet(&mut self, deadline: Instant) -> Result<(), QuietError> {
        self.inner.quiet(deadline)
    }

    fn is_settled(&mut self) -> Result<bool, PostError> {
        self.inner.is_settled()
    }

    fn marks(&mut self) -> Result<Option<Marks>, PostError> {
        self.inner.marks()
    }

    fn wake(&mut self, key: SlotKey, waiting_offset: usize) -> Result<(), PostError> {
        self.inner.wake(key, waiting_offset)
    }

    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        self.inner.wait_fd()
    }
}

impl Caller {
    /// The layer of a request, with its tokens or with others.
    pub fn record(&mut self, request: &Request) -> Graph {
        let input = self.load(request);
        let Self { client, stream, out, .. } = self;
        let out = DeviceTensor::new(out.ptr(), TensorType::Bf16);
        let graph = stream.capture(|stream| {
            // SAFETY: the tensors have these sizes and live as long as the client.
            unsafe {
                let handle = client.dispatch(stream, request.layer, &input).expect("dispatch");
                drop(client.combine(stream, handle, out).expect("combine"));
            }
            Ok(())
        });
        graph.expect("a graph")
    }

    /// Replays a recorded layer until it is complete.
    pub fn replay(&mut self, graph: &Graph, request: &Request) -> (Vec<u16>, ReplayReport) {
        self.load(request);
        let report = self.client.replay(&self.stream, graph).expect("replay");
        (self.rows(request), report)
    }

    /// Servers that were given up with calls outstanding, for `reason`.
    pub fn num_failovers(&self, reason: &str) -> f64 {
        self.metric("switchyard_client_failovers_total", Some(reason))
    }
}
