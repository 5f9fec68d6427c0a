//! Load of the busiest experts of each layer, with a bounded number of time series.

use std::sync::{Arc, Mutex, PoisonError};

use prometheus::core::{Collector, Desc};
use prometheus::{GaugeVec, Opts, proto};

use super::names;

/// Load of one layer, in tokens per second.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct LayerLoad {
    pub(crate) layer: u32,
    /// Experts with the highest rates, the busiest first.
    pub(crate) busiest: Vec<(u32, f64)>,
    /// Sum of all others.
    pub(crate) others: f64,
}

/// The metric. Its samples are replaced as a whole, so a scrape never sees a part of them. An expert that is not among
/// the busiest any more leaves no series behind.
#[derive(Clone, Debug)]
pub(crate) struct ExpertLoad {
    current: Arc<Mutex<GaugeVec>>,
}

impl ExpertLoad {
    pub(crate) fn new() -> Result<Self, prometheus::Error> {
        Ok(Self { current: Arc::new(Mutex::new(gauges()?)) })
    }

    pub(crate) fn set(&self, loads: &[LayerLoad]) {
        // The names are constant, so this cannot fail.
        let Ok(next) = gauges() else { return };
        for LayerLoad { layer, busiest, others } in loads {
            let layer = layer.to_string();
            for (expert, rate) in busiest {
                next.with_label_values(&[layer.as_str(), expert.to_string().as_str()]).set(*rate);
            }
            next.with_label_values(&[layer.as_str(), OTHERS]).set(*others);
        }
        *self.current.lock().unwrap_or_else(PoisonError::into_inner) = next;
    }

    fn current(&self) -> GaugeVec {
        self.current.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Collector for ExpertLoad {
    fn desc(&self) -> Vec<&Desc> {
        // Without a description of its own the registry checks the samples' names only.
        Vec::new()
    }

    fn collect(&self) -> Vec<proto::MetricFamily> {
        self.current().collect()
    }
}

fn gauges() -> Result<GaugeVec, prometheus::Error> {
    let help = "Tokens per second of the busiest experts of each layer, by the servers' reports, averaged with a \
                half-life of 30 s. The label expert is `other` for the sum of all other experts.";
    GaugeVec::new(Opts::new(names::EXPERT_TOKENS_PER_SECOND, help), &["layer", "expert"])
}

/// Value of the label `expert` for the sum.
const OTHERS: &str = "other";

#[cfg(test)]
mod tests {
    use prometheus::Registry;

    use super::*;

    #[test]
    fn an_expert_that_is_no_longer_busy_leaves_no_series() {
        let registry = Registry::new();
        let metric = ExpertLoad::new().unwrap();
        registry.register(Box::new(metric.clone())).unwrap();
        let text = || {
            let text = prometheus::TextEncoder::new().encode_to_string(&registry.gather());
            let text = text.unwrap();
            let samples = text.lines().filter(|line| !line.starts_with('#'));
            samples.map(str::to_owned).collect::<Vec<_>>()
        };
        assert!(text().is_empty());
        metric.set(&[LayerLoad { layer: 3, busiest: vec![(7, 2.5), (1, 1.0)], others: 0.25 }]);
        let name = names::EXPERT_TOKENS_PER_SECOND;
        assert_eq!(
            text(),
            [
                format!("{name}{{expert=\"1\",layer=\"3\"}} 1"),
                format!("{name}{{expert=\"7\",layer=\"3\"}} 2.5"),
                format!("{name}{{expert=\"other\",layer=\"3\"}} 0.25"),
            ]
        );
        metric.set(&[LayerLoad { layer: 3, busiest: vec![(1, 4.0)], others: 0.0 }]);
        let found = text();
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(!found.iter().any(|line| line.contains("\"7\"")), "{found:?}");
    }
}
