//! Settings of a CPU client.

use std::fmt;
use std::num::NonZeroUsize;

use p2p_core::SpinPolicy;
use protocol::WireDtype;

use super::{Inner, MoeClient};
use crate::error::BuildError;
use crate::fleet::builder::{FleetBuilder, fleet_setters};
use crate::model::ClientModel;

/// Makes a [`MoeClient`]. See [`MoeClient::builder`].
#[must_use = "a builder does nothing until `build`"]
pub struct MoeClientBuilder {
    fleet: FleetBuilder,
}

impl MoeClientBuilder {
    pub(super) fn new(model: ClientModel) -> Self {
        Self { fleet: FleetBuilder::new(model) }
    }

    fleet_setters!();

    /// Element type of requests on the wire. Default f32.
    pub fn wire_dtype(mut self, dtype: WireDtype) -> Self {
        self.fleet.dtype = dtype;
        self
    }

    /// Element type of answers on the wire. Default f32.
    pub fn response_dtype(mut self, dtype: WireDtype) -> Self {
        self.fleet.response_dtype = dtype;
        self
    }

    /// Most lanes: calls that can be outstanding at the same time, 1024 at most. Each lane has a slot pair with
    /// every server, whose memory is committed as it is touched. Default 16.
    pub fn max_lanes(mut self, max_lanes: NonZeroUsize) -> Self {
        self.fleet.max_lanes = max_lanes;
        self
    }

    /// How long a call polls for answers before it sleeps. Default 20 µs.
    pub fn spin(mut self, spin: SpinPolicy) -> Self {
        self.fleet.settings.spin = spin;
        self
    }

    /// Whether request rows carry a checksum. Headers and tables always do. Default off: shared memory does not
    /// flip bits.
    pub fn payload_checksum(mut self, on: bool) -> Self {
        self.fleet.settings.payload_checksum = on;
        self
    }

    /// Most hedges per frame, 0 to 1. Default 0.05.
    ///
    /// A frame whose answer is late is sent to other replicas of its experts too, and the answer that is complete
    /// first counts. A frame is late after twice the 95th percentile of frames of its size.
    /// Slow servers also get less. 0 turns both off: the choice of replicas then depends on no time.
    pub fn hedge_budget(mut self, budget: f64) -> Self {
        self.fleet.settings.hedge_budget = budget;
        self
    }

    /// Starts the client and returns at once. Connections are made in the background: see
    /// [`MoeClient::wait_ready`].
    ///
    /// # Errors
    /// [`BuildError`]: a setting out of range, no placement, or metrics that the registry has already.
    pub fn build(self) -> Result<MoeClient, BuildError> {
        let max_lanes = self.fleet.max_lanes.get();
        Ok(MoeClient::new(Inner::new(self.fleet.start()?, max_lanes)))
    }
}

impl fmt::Debug for MoeClientBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The token stays out of logs.
        f.debug_struct("MoeClientBuilder").field("model", &self.fleet.model).finish_non_exhaustive()
    }
}
