//! The trace context of a caller, as W3C Trace Context writes it.

use std::str::FromStr;

/// The caller's trace and span. Parsed from the header `traceparent` (<https://www.w3.org/TR/trace-context/>).
///
/// ```
/// use switchyard_telemetry::TraceContext;
///
/// let context: TraceContext =
///     "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01".parse()?;
/// assert_eq!(context.span_id, 0x00f0_67aa_0ba9_02b7);
/// assert!(context.is_sampled);
/// # Ok::<(), switchyard_telemetry::TraceContextError>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TraceContext {
    /// Not zero.
    pub trace_id: u128,
    /// Not zero.
    pub span_id: u64,
    /// True if the caller records the trace.
    pub is_sampled: bool,
}

/// A text that is no `traceparent`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "traceparent {found:?}: expected VERSION-TRACE-SPAN-FLAGS with 2, 32, 16 and 2 lowercase hex digits, and neither \
     id zero"
)]
pub struct TraceContextError {
    /// The text, cut to 80 characters.
    pub found: String,
}

impl FromStr for TraceContext {
    type Err = TraceContextError;

    fn from_str(text: &str) -> Result<Self, TraceContextError> {
        parse(text).ok_or_else(|| TraceContextError { found: text.chars().take(80).collect() })
    }
}

fn parse(text: &str) -> Option<TraceContext> {
    let mut parts = text.trim().split('-');
    let version = hex(parts.next()?, 2)?;
    let trace_id = hex(parts.next()?, 32)?;
    let span_id = u64::try_from(hex(parts.next()?, 16)?).ok()?;
    let flags = hex(parts.next()?, 2)?;
    // Version ff is invalid. Version 0 has no more parts, later ones may.
    if version == 0xff || (version == 0 && parts.next().is_some()) || trace_id == 0 || span_id == 0
    {
        return None;
    }
    Some(TraceContext { trace_id, span_id, is_sampled: flags & 1 == 1 })
}

fn hex(text: &str, num_digits: usize) -> Option<u128> {
    let is_digit = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
    let is_valid = text.len() == num_digits && text.bytes().all(is_digit);
    is_valid.then(|| u128::from_str_radix(text, 16).ok())?
}

#[cfg(test)]
mod tests {
    use super::*;

    const VALID: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00";

    #[test]
    fn valid_contexts_are_read_and_all_others_are_refused() {
        let context: TraceContext = VALID.parse().unwrap();
        assert_eq!(context.trace_id, 0x4bf9_2f35_77b3_4da6_a3ce_929d_0e0e_4736);
        assert!(!context.is_sampled);
        let later = VALID.replacen("00", "cc", 1) + "-what-the-future-will-be-like";
        assert!(later.parse::<TraceContext>().is_ok());
        for bad in [
            "",
            "00",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7",
            "ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00-more",
            "00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-00",
            "00-00000000000000000000000000000000-00f067aa0ba902b7-00",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-00",
            "00-4bf92f3577b34da6a3ce929d0e0e473-00f067aa0ba902b7-00",
            "00-+bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00",
            "00-４bf92f3577b34da6a3ce929d0e0e47-00f067aa0ba902b7-00",
        ] {
            assert!(bad.parse::<TraceContext>().is_err(), "{bad}");
        }
    }
}
