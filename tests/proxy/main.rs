//! Dispatch and combine with failover. Every operation of client and servers goes through lanes and threads of a proxy
//! over libfabric, or with the feature `verbs` and `SWITCHYARD_TEST_TRANSPORT=verbs` over RDMA.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use libfabric_transport::FabricNetwork;
use p2p_core::network::Network;
use p2p_core::{PostError, Transports};
use proxy::{LaneConfig, Proxy, ProxyConfig, ProxyNetwork, ThreadStats};
use switchyard_tests::replicas::{Party, Replicas};
use test_support::endpoint::{Fault, FaultyNetwork, Op, injected};

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
    // An answer of it may be missing or not.
    rig.check(1);
}

#[test]
fn a_post_that_fails_loses_and_doubles_nothing() {
    for (op, nth) in [(Op::Put, 2), (Op::AddFlag, 4)] {
        let Some(mut rig) = Rig::start() else { return };
        rig.replicas.forward(0..3);
        rig.fault.set(op, nth, Loss::Refused);
        rig.replicas.forward(3..10);
        assert!(rig.fault.has_happened(), "{op:?} {nth}");
        // A client that learns of it before the frame is out has sent nothing twice. No call may wait for a credit.
        rig.check(1);
    }
}

#[test]
fn a_request_that_gets_lost_behind_its_post_is_sent_to_a_replica() {
    let Some(mut rig) = Rig::start() else { return };
    rig.replicas.forward(0..3);
    rig.fault.set(Op::Put, 1, Loss::Late);
    rig.replicas.forward(3..10);
    assert!(rig.fault.has_happened());
    rig.check(1);
    assert_eq!(rig.replicas.num_failovers(), 1);
}

/// Servers and a client behind proxies; the client's operations can fail.
struct Rig {
    replicas: Replicas,
    /// The client's proxy.
    proxy: Arc<Proxy>,
    fault: Arc<NextFault>,
}

impl Rig {
    /// `None`, with a skip, if the transport is missing.
    fn start() -> Option<Self> {
        let fault = Arc::new(NextFault::default());
        let mut proxy_of_client = None;
        let replicas = Replicas::start(|party| {
            let network = transport()?;
            if party != Party::Client {
                return Some(behind_proxy(network).0);
            }
            let next = Arc::clone(&fault);
            let make_fault = move || Some(OperationFault { next: Arc::clone(&next), lost: None });
            let faulty = FaultyNetwork::new(network, make_fault);
            let (transports, proxy) = behind_proxy(Arc::new(faulty));
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
                test_support::skip("rdma", &error.to_string());
                None
            }
        };
    }
    let provider = if name.is_empty() { "tcp;ofi_rxm" } else { name.as_str() };
    match FabricNetwork::open(provider) {
        Ok(network) => Some(Arc::new(network)),
        Err(error) => {
            test_support::skip("libfabric", &error.to_string());
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

/// The next operation of a client, behind its lanes, that fails.
#[derive(Debug, Default)]
struct NextFault(Mutex<Option<(Op, u32, Loss)>>);

/// How an operation fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Loss {
    /// The transport refuses it.
    Refused,
    /// The transport accepts it, and nothing arrives from then on. The error comes [`LATE`] afterwards, like that of a
    /// completion.
    Late,
}

/// Longer than a client takes between the bytes of a frame and the note that it is out.
const LATE: Duration = Duration::from_millis(500);

impl NextFault {
    /// The `nth` operation `op` from now on fails; 1 is the next.
    fn set(&self, op: Op, nth: u32, loss: Loss) {
        *self.0.lock().expect("whole") = Some((op, nth, loss));
    }

    /// Whether the fault has happened.
    fn has_happened(&self) -> bool {
        self.0.lock().expect("whole").is_none()
    }

    /// Counts an operation.
    fn count(&self, op: Op) -> Option<Loss> {
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

/// The fault of one connection.
#[derive(Debug)]
struct OperationFault {
    next: Arc<NextFault>,
    /// Time since which nothing arrives.
    lost: Option<Instant>,
}

impl Fault for OperationFault {
    fn post(&mut self, op: Op) -> Result<bool, PostError> {
        match self.next.count(op) {
            Some(Loss::Refused) => return Err(injected(op.name())),
            Some(Loss::Late) => self.lost = Some(Instant::now()),
            None => {}
        }
        self.completions()
    }

    fn completions(&self) -> Result<bool, PostError> {
        match self.lost {
            Some(since) if since.elapsed() >= LATE => Err(injected("a completion")),
            lost => Ok(lost.is_none()),
        }
    }
}
