//! A network that fails towards one peer while the processes at both ends are well, and recorded layers.

use std::sync::atomic::{AtomicBool, Ordering};

use attention_client::device::ReplayReport;
use kernels::gpu::Graph;
use p2p_core::PostError;
use test_support::endpoint::{Fault, FaultyNetwork, Op, injected};

use super::*;

/// The switch that makes the first connection of a network fail. Later connections never fail.
#[derive(Debug, Default)]
pub struct Breaker {
    has_failed: Arc<AtomicBool>,
}

impl Breaker {
    /// The network `inner` with this switch.
    pub fn over(&self, inner: Arc<dyn Network>) -> Arc<dyn Network> {
        let has_failed = Arc::clone(&self.has_failed);
        let is_next_first = AtomicBool::new(true);
        Arc::new(FaultyNetwork::new(inner, move || {
            let is_first = is_next_first.swap(false, Ordering::SeqCst);
            is_first.then(|| Breaking { has_failed: Arc::clone(&has_failed) })
        }))
    }

    /// Makes the connection fail from here on.
    pub fn fail(&self) {
        self.has_failed.store(true, Ordering::SeqCst);
    }
}

#[derive(Debug)]
struct Breaking {
    has_failed: Arc<AtomicBool>,
}

impl Fault for Breaking {
    fn post(&mut self, op: Op) -> Result<bool, PostError> {
        match self.has_failed.load(Ordering::SeqCst) {
            true => Err(injected(op.name())),
            false => Ok(true),
        }
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
