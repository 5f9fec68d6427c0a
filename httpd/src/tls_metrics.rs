//! Metrics of the TLS files of a process.

use std::sync::{Mutex, PoisonError};

use prometheus::core::{Collector, Desc};
use prometheus::proto::MetricFamily;
use prometheus::{Gauge, IntCounter, IntGauge, Registry};
use trust::tls::Tls;

/// End of the certificate in force, in seconds since 1970. Processes without a certificate do not have it.
pub const TLS_CERTIFICATE_EXPIRY: &str = "switchyard_tls_certificate_expiry_timestamp_seconds";
/// 1 while the files on the disk cannot be used.
pub const TLS_FILES_UNUSABLE: &str = "switchyard_tls_files_unusable";
/// Changes of the files that came into force.
pub const TLS_RELOADS_TOTAL: &str = "switchyard_tls_reloads_total";

/// Adds metrics of `tls` to `registry`: the end of the certificate, and the state of the files.
///
/// # Errors
/// [`prometheus::Error`] when the registry has them already.
pub fn register_tls_metrics(registry: &Registry, tls: Tls) -> Result<(), prometheus::Error> {
    let expiry = Gauge::new(
        TLS_CERTIFICATE_EXPIRY,
        "End of the TLS certificate of this process, in seconds since 1970.",
    )?;
    let unusable = IntGauge::new(
        TLS_FILES_UNUSABLE,
        "1 while the TLS files on the disk cannot be used and the previous ones stay in force, and once the certificate in force has expired.",
    )?;
    let reloads =
        IntCounter::new(TLS_RELOADS_TOTAL, "Changes of the TLS files that came into force.")?;
    let descs = [expiry.desc(), unusable.desc(), reloads.desc()];
    let descs = descs.into_iter().flatten().cloned().collect();
    registry.register(Box::new(TlsMetrics {
        tls,
        expiry,
        unusable,
        descs,
        reloads: Mutex::new(reloads),
    }))
}

struct TlsMetrics {
    tls: Tls,
    expiry: Gauge,
    unusable: IntGauge,
    descs: Vec<Desc>,
    /// Locked from the comparison to the increment, because scrapes may overlap.
    reloads: Mutex<IntCounter>,
}

impl Collector for TlsMetrics {
    fn desc(&self) -> Vec<&Desc> {
        self.descs.iter().collect()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        let status = self.tls.status();
        self.unusable.set(status.problem.is_some().into());
        let reloads = self.reloads.lock().unwrap_or_else(PoisonError::into_inner);
        reloads.inc_by(status.num_reloads.saturating_sub(reloads.get()));
        let mut families = [self.unusable.collect(), reloads.collect()].concat();
        drop(reloads);
        if let Some(expires_at) = status.expires_at {
            self.expiry.set(expires_at as f64);
            families.extend(self.expiry.collect());
        }
        families
    }
}
