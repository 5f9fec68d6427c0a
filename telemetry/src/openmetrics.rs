//! Metrics in the text format of OpenMetrics 1.0, with exemplars.
//!
//! The crate `prometheus` writes the older text format of Prometheus only, which has no exemplars
//! (<https://github.com/prometheus/OpenMetrics/blob/v1.0.0/specification/OpenMetrics.md>).

use std::fmt::Write as _;
use std::time::SystemTime;

use prometheus::proto::{LabelPair, Metric, MetricFamily, MetricType};

use crate::Exemplars;

/// The content type of [`encode`]'s text.
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Returns true if a scraper that sends this `Accept` header prefers OpenMetrics to the text format of Prometheus.
#[must_use]
pub fn is_preferred(accept: &str) -> bool {
    let (mut open_metrics, mut plain) = (0.0, 0.0);
    for range in accept.split(',') {
        let mut parts = range.split(';').map(str::trim);
        let media = parts.next().unwrap_or_default();
        let (mut weight, mut version) = (1.0f64, "");
        for (name, value) in parts.filter_map(|part| part.split_once('=')) {
            match name.trim() {
                "q" => weight = value.trim().parse().unwrap_or(0.0),
                "version" => version = value.trim(),
                _ => {}
            }
        }
        if media.eq_ignore_ascii_case("application/openmetrics-text") {
            if matches!(version, "" | "1.0.0" | "0.0.1") {
                open_metrics = weight.max(open_metrics);
            }
        } else if media.eq_ignore_ascii_case("text/plain") {
            plain = weight.max(plain);
        }
    }
    open_metrics > 0.0 && open_metrics >= plain
}

/// The families as text. Buckets of a histogram that has a label `phase` carry the newest exemplar of that phase within
/// their bounds.
#[must_use]
pub fn encode(families: &[MetricFamily], exemplars: Option<&Exemplars>) -> String {
    let mut text = String::new();
    for family in families {
        // A counter's family has a name without the suffix, and its samples have one with it.
        let name = family.name();
        let (name, kind) = match family.get_field_type() {
            MetricType::COUNTER => match name.strip_suffix("_total") {
                Some(name) => (name, "counter"),
                None => (name, "unknown"),
            },
            MetricType::GAUGE => (name, "gauge"),
            MetricType::HISTOGRAM => (name, "histogram"),
            // No metric of Switchyard has these types.
            MetricType::SUMMARY | MetricType::UNTYPED => continue,
        };
        let _ = writeln!(text, "# TYPE {name} {kind}");
        if !family.help().is_empty() {
            let _ = writeln!(text, "# HELP {name} {}", escaped(family.help()));
        }
        for metric in family.get_metric() {
            let labels = metric.get_label();
            match kind {
                "counter" => {
                    sample(&mut text, &[name, "_total"], labels, metric.get_counter().get_value());
                }
                "unknown" => sample(&mut text, &[name], labels, metric.get_counter().get_value()),
                "gauge" => sample(&mut text, &[name], labels, metric.get_gauge().get_value()),
                _ => histogram(&mut text, name, metric, exemplars),
            }
        }
    }
    text.push_str("# EOF\n");
    text
}

fn histogram(text: &mut String, name: &str, metric: &Metric, exemplars: Option<&Exemplars>) {
    let (labels, histogram) = (metric.get_label(), metric.get_histogram());
    let phase = labels.iter().find(|pair| pair.name() == "phase").map(LabelPair::value);
    let count = histogram.get_sample_count();
    let finite = histogram.get_bucket().iter().filter(|bucket| bucket.upper_bound().is_finite());
    let buckets = finite.map(|bucket| (bucket.upper_bound(), bucket.cumulative_count()));
    let (mut above, mut below) = (f64::NEG_INFINITY, 0);
    for (upto, cumulative) in buckets.chain([(f64::INFINITY, count)]) {
        let _ = write!(text, "{name}_bucket");
        write_labels(text, labels, Some(upto));
        let _ = write!(text, " {cumulative}");
        // The exemplar of an observation that the bucket does not count yet would be an error.
        let newest = exemplars.zip(phase).filter(|_| cumulative > below);
        if let Some(exemplar) = newest.and_then(|(all, phase)| all.between(phase, above, upto)) {
            let at = exemplar.at.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
            let _ = write!(
                text,
                " # {{trace_id=\"{:032x}\"}} {} {:.3}",
                exemplar.trace_id,
                exemplar.seconds,
                at.as_secs_f64()
            );
        }
        text.push('\n');
        (above, below) = (upto, cumulative);
    }
    sample(text, &[name, "_count"], labels, count as f64);
    sample(text, &[name, "_sum"], labels, histogram.get_sample_sum());
}

fn sample(text: &mut String, name: &[&str], labels: &[LabelPair], value: f64) {
    name.iter().for_each(|part| text.push_str(part));
    write_labels(text, labels, None);
    let _ = writeln!(text, " {}", number(value));
}

fn write_labels(text: &mut String, labels: &[LabelPair], le: Option<f64>) {
    let mut separator = '{';
    for pair in labels {
        let _ = write!(text, "{separator}{}=\"{}\"", pair.name(), escaped(pair.value()));
        separator = ',';
    }
    if let Some(le) = le {
        let _ = write!(text, "{separator}le=\"{}\"", number(le));
        separator = ',';
    }
    if separator == ',' {
        text.push('}');
    }
}

fn number(value: f64) -> String {
    match value {
        f64::INFINITY => "+Inf".to_owned(),
        f64::NEG_INFINITY => "-Inf".to_owned(),
        // `NaN` for one that is none.
        value => format!("{value:?}"),
    }
}

fn escaped(text: &str) -> String {
    text.replace('\\', r"\\").replace('\n', r"\n").replace('"', "\\\"")
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use prometheus::{HistogramOpts, HistogramVec, IntCounterVec, IntGauge, Opts, Registry};

    use super::*;

    #[test]
    fn every_kind_of_metric_is_written_with_its_suffixes_and_exemplars() {
        let registry = Registry::new();
        let counter = IntCounterVec::new(Opts::new("a_total", "Says \"a\\b\"."), &["x"]).unwrap();
        let gauge = IntGauge::new("b", "B.").unwrap();
        let opts = HistogramOpts::new("c_seconds", "C.").buckets(vec![1e-6, 0.5, 2.0]);
        let histogram = HistogramVec::new(opts, &["phase"]).unwrap();
        registry.register(Box::new(counter.clone())).unwrap();
        registry.register(Box::new(gauge.clone())).unwrap();
        registry.register(Box::new(histogram.clone())).unwrap();
        counter.with_label_values(&["quote \" back \\ line \n"]).inc_by(3);
        gauge.set(-7);
        let exemplars = Exemplars::default();
        for nanos in [400_000_000, 1_500_000_000] {
            let took = Duration::from_nanos(nanos);
            histogram.with_label_values(&["wait"]).observe(took.as_secs_f64());
            exemplars.note("wait", took, 0xabc);
        }
        // Nothing was observed in this bucket, so it shows no exemplar.
        exemplars.note("wait", Duration::from_nanos(10), 0xdef);
        let found = encode(&registry.gather(), Some(&exemplars));
        let lines: Vec<&str> = found.lines().collect();
        let trace = "# {trace_id=\"00000000000000000000000000000abc\"}";
        let expected = [
            "# TYPE a counter",
            "# HELP a Says \\\"a\\\\b\\\".",
            "a_total{x=\"quote \\\" back \\\\ line \\n\"} 3.0",
            "# TYPE b gauge",
            "# HELP b B.",
            "b -7.0",
            "# TYPE c_seconds histogram",
            "# HELP c_seconds C.",
            "c_seconds_bucket{phase=\"wait\",le=\"1e-6\"} 0",
            &format!("c_seconds_bucket{{phase=\"wait\",le=\"0.5\"}} 1 {trace} 0.4 "),
            &format!("c_seconds_bucket{{phase=\"wait\",le=\"2.0\"}} 2 {trace} 1.5 "),
            "c_seconds_bucket{phase=\"wait\",le=\"+Inf\"} 2",
            "c_seconds_count{phase=\"wait\"} 2.0",
            "c_seconds_sum{phase=\"wait\"} 1.9",
            "# EOF",
        ];
        assert_eq!(lines.len(), expected.len(), "{found}");
        for (line, expected) in lines.iter().zip(expected) {
            // The time of an exemplar differs from run to run.
            let is_same = match expected.strip_suffix(' ') {
                Some(_) => {
                    line.strip_prefix(expected).is_some_and(|time| time.parse::<f64>().is_ok())
                }
                None => *line == expected,
            };
            assert!(is_same, "{line}\nexpected\n{expected}");
        }
    }

    #[test]
    fn the_accept_header_decides() {
        let of_prometheus = "application/openmetrics-text;version=1.0.0;q=0.5,\
                             application/openmetrics-text;version=0.0.1;q=0.4,\
                             text/plain;version=0.0.4;q=0.3,*/*;q=0.2";
        for preferred in
            [of_prometheus, "application/openmetrics-text", "Application/OpenMetrics-Text; q=0.1"]
        {
            assert!(is_preferred(preferred), "{preferred}");
        }
        for other in [
            "",
            "*/*",
            "text/plain",
            "application/openmetrics-text;q=0",
            "application/openmetrics-text;q=nonsense",
            "application/openmetrics-text;version=9.0.0",
            "application/openmetrics-text;q=0.1, text/plain",
        ] {
            assert!(!is_preferred(other), "{other}");
        }
    }
}
