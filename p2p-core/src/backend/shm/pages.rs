//! The kind of pages under a slot.

use rustix::mm::{Advice, madvise};

use crate::region::Region;

/// The kind of pages under a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum PageKind {
    /// 2 MiB pages from the system's pool.
    HugeTlb,
    /// Huge pages if the system finds some on first access.
    Transparent,
    /// Small pages.
    Plain,
}

impl PageKind {
    /// The name in logs and reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::HugeTlb => "hugetlb",
            Self::Transparent => "transparent",
            Self::Plain => "plain",
        }
    }
}

/// True if `bytes` is a number of whole huge pages and the pool has that many free.
pub(super) fn huge_pages_fit(bytes: usize) -> bool {
    if !bytes.is_multiple_of(HUGE_PAGE_BYTES) {
        return false;
    }
    let pool = |name: &str| {
        std::fs::read_to_string(format!("/sys/kernel/mm/hugepages/hugepages-2048kB/{name}"))
            .ok()
            .and_then(|text| text.trim().parse::<usize>().ok())
            .unwrap_or(0)
    };
    // Reserved pages count as free until first access, but belong to another mapping.
    pool("free_hugepages").saturating_sub(pool("resv_hugepages")) >= bytes / HUGE_PAGE_BYTES
}

/// Requests huge pages, if the system gives them to shared memory on request.
pub(super) fn advise_huge(region: &Region) -> PageKind {
    let setting = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
        .unwrap_or_default();
    match chosen(&setting) {
        Some("always" | "within_size" | "force") => PageKind::Transparent,
        Some("advise") => {
            // SAFETY: the advice changes how the kernel allocates pages, not their content.
            let advised = unsafe {
                madvise(region.as_ptr().as_ptr().cast(), region.len(), Advice::LinuxHugepage)
            };
            if advised.is_ok() { PageKind::Transparent } else { PageKind::Plain }
        }
        _ => PageKind::Plain,
    }
}

/// The word in brackets of a sysfs setting: `always [never]` gives `never`.
fn chosen(setting: &str) -> Option<&str> {
    setting.split_once('[')?.1.split_once(']').map(|(word, _)| word)
}

const HUGE_PAGE_BYTES: usize = 2 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_chosen_setting_is_the_bracketed_one() {
        assert_eq!(chosen("always within_size [advise] never deny force\n"), Some("advise"));
        assert_eq!(chosen(""), None);
    }

    #[test]
    fn odd_sizes_never_ask_the_pool() {
        assert!(!huge_pages_fit(HUGE_PAGE_BYTES + 4096));
        assert!(!huge_pages_fit(usize::MAX / HUGE_PAGE_BYTES * HUGE_PAGE_BYTES));
    }
}
