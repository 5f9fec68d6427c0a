//! Environment variables that `ofi_rxm` needs to carry slots over `verbs`.
//!
//! Each need was observed on Soft-RoCE with libfabric 1.17. `tests/rxe/ofi_rxm.c` reproduces them
//! without this crate.

use super::port::core_of;

/// True if `provider` is `ofi_rxm` over `verbs`.
pub(super) fn is_over_verbs(provider: &str) -> bool {
    let core = core_of(provider);
    core == "verbs" && core.len() < provider.len()
}

/// Why `provider` must not be used in this environment. `None` if it may.
pub(super) fn refusal(provider: &str) -> Option<String> {
    if !is_over_verbs(provider) {
        return None;
    }
    missing(|name| std::env::var(name).ok())
        .map(|missing| format!("`{provider}` needs {missing}; or use the transport `verbs`"))
}

fn missing(value: impl Fn(&str) -> Option<String>) -> Option<String> {
    let mut missing = Vec::new();
    if !value(SHARED_RECEIVES).is_some_and(|value| is_true(&value)) {
        missing.push(format!(
            "{SHARED_RECEIVES}=1 (it uses connections that it has freed, otherwise)"
        ));
    }
    let has_cache = value(CACHE_COUNT).is_none_or(|count| count.trim() != "0")
        && value(CACHE_MONITOR).is_none_or(|name| !name.eq_ignore_ascii_case("disabled"));
    if has_cache {
        missing
            .push(format!("{CACHE_COUNT}=0 (it writes into memory that was unmapped, otherwise)"));
    }
    (!missing.is_empty()).then(|| missing.join(" and "))
}

/// The values that the library reads as true.
fn is_true(value: &str) -> bool {
    ["1", "true", "yes", "on"].iter().any(|word| value.eq_ignore_ascii_case(word))
}

/// Lets the connections of an endpoint share their receives.
const SHARED_RECEIVES: &str = "FI_OFI_RXM_USE_SRX";
/// The registration cache and its monitor of unmapped memory. The monitor sees calls of the C
/// library, but not the system calls that unmap slots.
const CACHE_COUNT: &str = "FI_MR_CACHE_MAX_COUNT";
const CACHE_MONITOR: &str = "FI_MR_CACHE_MONITOR";

#[cfg(test)]
mod tests {
    use super::*;

    fn with(set: &[(&str, &str)]) -> Option<String> {
        let find = |name: &str| set.iter().find(|(known, _)| *known == name);
        missing(|name| find(name).map(|(_, value)| (*value).to_owned()))
    }

    #[test]
    fn only_ofi_rxm_over_verbs_needs_anything() {
        for provider in ["tcp;ofi_rxm", "shm", "verbs", "efa", "cxi"] {
            assert_eq!(refusal(provider), None, "{provider}");
        }
        assert!(is_over_verbs("verbs;ofi_rxm"));
    }

    #[test]
    fn what_is_missing_is_named() {
        let all = with(&[]).unwrap();
        assert!(
            all.contains("FI_OFI_RXM_USE_SRX=1") && all.contains("FI_MR_CACHE_MAX_COUNT=0"),
            "{all}"
        );
        for off in ["0", "no", ""] {
            let text = with(&[(SHARED_RECEIVES, off), (CACHE_COUNT, "0")]).unwrap();
            assert!(text.contains("FI_OFI_RXM_USE_SRX") && !text.contains("CACHE"), "{text}");
        }
        for on in ["1", "yes", "TRUE", "on"] {
            assert_eq!(with(&[(SHARED_RECEIVES, on), (CACHE_COUNT, "0")]), None, "{on}");
            assert_eq!(with(&[(SHARED_RECEIVES, on), (CACHE_MONITOR, "disabled")]), None, "{on}");
        }
        let text = with(&[(SHARED_RECEIVES, "1"), (CACHE_COUNT, "10")]).unwrap();
        assert!(text.contains("FI_MR_CACHE_MAX_COUNT=0") && !text.contains("SRX"), "{text}");
    }
}
