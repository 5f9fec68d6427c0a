//! Dispatch and combine with failover, every operation of client and servers through lanes and threads of
//! a proxy, over libfabric; with the feature `verbs` and `SWITCHYARD_TEST_TRANSPORT=verbs` over RDMA.

use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use libfabric_transport::FabricNetwork;
use p2p_core::endpoint::Endpoint;
use p2p_core::network::{Joined, Network, NetworkError, OpenSide, Route, SideDescription};
use p2p_core::region::{LocalRange, RemoteRange, SlotKey};
use p2p_core::wait::Driver;
use p2p_core::{AnyEndpoint, PostError, QuietError, Region, SlotLayout, TransportKind, Transports};
use proxy::{LaneConfig, Proxy, ProxyConfig, ProxyNetwork, ThreadStats};
use switchyard_tests::replicas::{Party, Replicas};

#[path = "../support/src/skip.rs"]
mod skip;

#[test]
fn layers_are_computed_through_the_proxies() {
    let Some(mut rig) = Rig::start() else { return };
    rig.replicas.forward(0..20);
    rig.check(0);
}

#[test]
fn a_server_that_goes_is_replaced() {
    let Some(mut rig) = Rig::start() else { return };
    rig.replicas.lose_a_server();
    // It may have owed an answer or not.
    rig.check(1);
}

#[test]
fn a_post_that_fails_loses_and_doubles_nothing() {
    for (op, nth) in [("put", 2), ("add_flag", 4)] {
        let Some(mut rig) = Rig::start() else { return };
        rig.replicas.forward(0..3);
        rig.fault.set(op, nth, Loss::Refused);
        rig.replicas.forward(3..10);
        assert!(rig.fault.is_met(), "{op} {nth}");
        // A client that hears of it before the frame is out has sent nothing twice; nothing may wait for a
        // credit.
        rig.check(1);
    }
}

#[test]
fn a_request_that_gets_lost_behind_its_post_is_sent_to_a_replica() {
    let Some(mut rig) = Rig::start() else { return };
    rig.replicas.forward(0..3);
    rig.fault.set("put", 1, Loss::Late);
    rig.replicas.forward(3..10);
    assert!(rig.fault.is_met());
    rig.check(1);
    assert_eq!(rig.replicas.num_failovers(), 1);
}

/// Servers and a client behind proxies; the client's operations can fail.
struct Rig {
    replicas: Replicas,
    /// The client's.
    proxy: Arc<Proxy>,
    fault: Arc<Fault>,
}

impl Rig {
    /// `None`, loudly, where the transport is not.
    fn start() -> Option<Self> {
        let fault = Arc::new(Fault::default());
        let mut proxy_of_client = None;
        let replicas = Replicas::start(|party| {
            let network = transport()?;
            if party != Party::Client {
                return Some(behind_proxy(network).0);
            }
            let faulty = Arc::new(FaultyNetwork { inner: network, fault: Arc::clone(&fault) });
            let (transports, proxy) = behind_proxy(faulty);
            proxy_of_client = Some(proxy);
            Some(transports)
        })?;
        Some(Self { replicas, proxy: proxy_of_client?, fault })
    }

    fn check(&self, most_failovers: u32) {
        self.replicas.check(most_failovers);
        let commands: u64 =
            self.proxy.stats().iter().map(|stats: &ThreadStats| stats.commands).sum();
        assert!(commands > 100, "{commands} commands: the client's operations went another way");
    }
}

/// The network under test, opened anew for every party.
fn transport() -> Option<Arc<dyn Network>> {
    let name = std::env::var("SWITCHYARD_TEST_TRANSPORT").unwrap_or_default();
    #[cfg(feature = "verbs")]
    if name == "verbs" {
        use verbs_transport::{VerbsConfig, VerbsNetwork};
        return match VerbsNetwork::open(VerbsConfig::default()) {
            Ok(network) => Some(Arc::new(network)),
            Err(error) => {
                skip::skip("rdma", &error.to_string());
                None
            }
        };
    }
    let provider = if name.is_empty() { "tcp;ofi_rxm" } else { name.as_str() };
    match FabricNetwork::open(provider) {
        Ok(network) => Some(Arc::new(network)),
        Err(error) => {
            skip::skip("libfabric", &error.to_string());
            None
        }
    }
}

fn behind_proxy(inner: Arc<dyn Network>) -> (Transports, Arc<Proxy>) {
    let kind = inner.kind();
    let proxy = Arc::new(Proxy::start(&ProxyConfig::default()).expect("threads"));
    // Shallow, so that lanes wrap and fill.
    let lanes = LaneConfig { num_lanes: 1, depth: 64, budget: 48 };
    let network = ProxyNetwork::new(inner, Arc::clone(&proxy), lanes);
    let networks = vec![Arc::new(network) as Arc<dyn Network>];
    (Transports { kinds: vec![kind], networks, missing: Vec::new() }, proxy)
}

/// One operation of a client, behind its lanes, that fails.
#[derive(Debug, Default)]
struct Fault(Mutex<Option<(&'static str, u32, Loss)>>);

/// How it fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Loss {
    /// It is not taken.
    Refused,
    /// It is, and nothing arrives from there on, which is said [`LATE`] afterwards: as completions do.
    Late,
}

/// Longer than a client takes between the bytes of a frame and the note that it is out.
const LATE: Duration = Duration::from_millis(500);

impl Fault {
    /// The `nth` operation `op` from now on fails; 1 is the next.
    fn set(&self, op: &'static str, nth: u32, loss: Loss) {
        *self.0.lock().expect("whole") = Some((op, nth, loss));
    }

    /// Whether nothing is left to fail.
    fn is_met(&self) -> bool {
        self.0.lock().expect("whole").is_none()
    }

    /// Counts an operation.
    fn count(&self, op: &str) -> Option<Loss> {
        let mut next = self.0.lock().expect("whole");
        let (_, left, loss) = next.as_mut().filter(|(failing, ..)| *failing == op)?;
        *left -= 1;
        let is_due = *left == 0;
        let loss = is_due.then_some(*loss);
        if is_due {
            *next = None;
        }
        loss
    }
}

#[derive(Debug)]
struct FaultyNetwork {
    inner: Arc<dyn Network>,
    fault: Arc<Fault>,
}

#[derive(Debug)]
struct FaultySide(Box<dyn OpenSide>, Arc<Fault>);

#[derive(Debug)]
struct FaultyEndpoint {
    inner: AnyEndpoint,
    fault: Arc<Fault>,
    /// Since when nothing arrives.
    lost: Option<Instant>,
}

impl Network for FaultyNetwork {
    fn kind(&self) -> TransportKind {
        self.inner.kind()
    }

    fn flavour(&self) -> &str {
        self.inner.flavour()
    }

    fn open(&self, layout: &SlotLayout, route: Route) -> Result<Box<dyn OpenSide>, NetworkError> {
        Ok(Box::new(FaultySide(self.inner.open(layout, route)?, Arc::clone(&self.fault))))
    }
}

impl OpenSide for FaultySide {
    fn description(&self) -> SideDescription {
        self.0.description()
    }

    fn join(self: Box<Self>, peer: &SideDescription) -> Result<Joined, NetworkError> {
        let Joined { endpoint, slot } = self.0.join(peer)?;
        let endpoint = FaultyEndpoint { inner: endpoint, fault: self.1, lost: None };
        let endpoint = AnyEndpoint::Other(Box::new(endpoint));
        Ok(Joined { endpoint, slot })
    }
}

impl FaultyEndpoint {
    /// Whether the operation is to be done.
    fn count(&mut self, op: &'static str) -> Result<bool, PostError> {
        match self.fault.count(op) {
            Some(Loss::Refused) => return Err(injected(op)),
            Some(Loss::Late) => self.lost = Some(Instant::now()),
            None => {}
        }
        self.lost().map(|is_lost| !is_lost)
    }

    fn lost(&self) -> Result<bool, PostError> {
        match self.lost {
            Some(since) if since.elapsed() >= LATE => Err(injected("a completion")),
            lost => Ok(lost.is_some()),
        }
    }
}

fn injected(op: &'static str) -> PostError {
    PostError::Transport { op, code: -5, detail: "injected".to_owned() }
}

impl Endpoint for FaultyEndpoint {
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
        self.lost()?;
        self.inner.health()
    }

    fn direct(&self, key: SlotKey) -> Option<NonNull<u8>> {
        self.inner.direct(key)
    }

    unsafe fn put(&mut self, dst: RemoteRange<SlotKey>, src: LocalRange) -> Result<(), PostError> {
        if !self.count("put")? {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        unsafe { self.inner.put(dst, src) }
    }

    unsafe fn get(&mut self, dst: LocalRange, src: RemoteRange<SlotKey>) -> Result<(), PostError> {
        if !self.count("get")? {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        unsafe { self.inner.get(dst, src) }
    }

    fn add_flag(&mut self, dst: RemoteRange<SlotKey>, value: u64) -> Result<(), PostError> {
        if !self.count("add_flag")? {
            return Ok(());
        }
        self.inner.add_flag(dst, value)
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
        Ok(!self.lost()? && self.inner.try_fence()?)
    }

    fn quiet(&mut self, deadline: Instant) -> Result<(), QuietError> {
        if self.lost()? {
            return Err(QuietError::Deadline { outstanding: 1 });
        }
        self.inner.quiet(deadline)
    }

    fn is_settled(&mut self) -> Result<bool, PostError> {
        Ok(!self.lost()? && self.inner.is_settled()?)
    }

    fn wake(&mut self, key: SlotKey, waiting_offset: usize) -> Result<(), PostError> {
        self.inner.wake(key, waiting_offset)
    }

    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        self.inner.wait_fd()
    }
}
