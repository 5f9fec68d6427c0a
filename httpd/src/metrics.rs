//! Metrics of a listener.

use prometheus::{IntCounter, IntCounterVec, IntGauge, Opts};

/// Metrics of a listener. The caller registers them.
#[derive(Clone, Debug)]
pub struct Metrics {
    /// Open connections.
    pub connections: IntGauge,
    /// Connections closed by the listener, by `reason`: `refused`, `silent`, `slow` or `crowded`.
    pub culled: IntCounterVec,
    /// TLS handshakes that failed, and connections that spoke TLS or plain HTTP to a port for the other.
    pub tls_failures: IntCounter,
}

impl Metrics {
    /// Metrics named `{prefix}_connections` and `{prefix}_connections_culled_total`, with every reason
    /// present from the start.
    ///
    /// # Errors
    /// [`prometheus::Error`] when `prefix` is not a valid metric name.
    pub fn new(prefix: &str) -> Result<Self, prometheus::Error> {
        let connections = IntGauge::new(format!("{prefix}_connections"), "Open HTTP connections.")?;
        let culled = IntCounterVec::new(
            Opts::new(
                format!("{prefix}_connections_culled_total"),
                "HTTP connections closed by the server, by reason: refused (limit reached), silent (no complete request in time), slow (the peer reads too slowly), crowded. A crowded one gave way to another connection at the limit.",
            ),
            &["reason"],
        )?;
        for reason in ["refused", "silent", "slow", "crowded"] {
            culled.with_label_values(&[reason]);
        }
        let tls_failures = IntCounter::new(
            format!("{prefix}_tls_failures_total"),
            "TLS handshakes that failed, and connections with plain HTTP where HTTPS is spoken or the other way round.",
        )?;
        Ok(Self { connections, culled, tls_failures })
    }
}
