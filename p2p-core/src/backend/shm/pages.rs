//! Which pages a slot lies on.

use rustix::mm::{Advice, madvise};

use crate::region::Region;

/// Pages behind a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum PageKind {
    /// 2 MiB pages from the system's pool.
    HugeTlb,
    /// Huge pages if the system finds some when the memory is touched.
    Transparent,
    /// Small pages.
    Plain,
}

impl PageKind {
    /// Name as used in logs and reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::HugeTlb => "hugetlb",
            Self::Transparent => "transparent",
            Self::Plain => "plain",
        }
    }
}

/// Whether `bytes` is made of whole huge pages and the pool has that many to give.
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
    // Reserved pages count as free until they are touched, but are promised to somebody.
    pool("free_hugepages").saturating_sub(pool("resv_hugepages")) >= bytes / HUGE_PAGE_BYTES
}

/// Asks for huge pages where the system gives them to shared memory on request.
pub(super) fn advise_huge(region: &Region) -> PageKind {
    let setting = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
        .unwrap_or_default();
    match chosen(&setting) {
        Some("always" | "within_size" | "force") => PageKind::Transparent,
        Some("advise") => {
            // SAFETY: the advice changes how pages are found, not what they hold.
            let advised = unsafe {
                madvise(region.as_ptr().as_ptr().cast(), region.len(), Advice::LinuxHugepage)
            };
            if advised.is_ok() { PageKind::Transparent } else { PageKind::Plain }
        }
        _ => PageKind::Plain,
    }
}

/// The bracketed word of a sysfs choice: `always [never]` gives `never`.
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
