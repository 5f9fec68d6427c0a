//! Anonymous memory for weights.

use std::io;
use std::ptr::NonNull;

use memmap2::MmapMut;

/// Memory of this process for weights, in huge pages if the system has them. Starts at a boundary of a huge page. The
/// system commits a page when it is first written.
#[derive(Debug)]
pub struct WeightMemory {
    map: MmapMut,
    offset: usize,
    bytes: usize,
}

impl WeightMemory {
    /// Maps `bytes` zeroed bytes.
    ///
    /// # Errors
    /// The system has no room for the mapping.
    pub fn new(bytes: usize) -> io::Result<Self> {
        let map = MmapMut::map_anon(bytes.saturating_add(HUGE_PAGE_BYTES))?;
        // Best effort: without huge pages the memory is only slower.
        #[cfg(target_os = "linux")]
        let _ = map.advise(memmap2::Advice::HugePage);
        // The memory before the boundary is never touched.
        let offset = map.as_ptr().align_offset(HUGE_PAGE_BYTES).min(HUGE_PAGE_BYTES);
        Ok(Self { map, offset, bytes })
    }

    /// The first byte, for a device or an engine that fills the memory. No slice of it may be made meanwhile.
    #[must_use]
    pub fn as_mut_ptr(&mut self) -> NonNull<u8> {
        NonNull::from(self.as_mut_slice()).cast()
    }

    /// The bytes.
    #[must_use]
    pub fn as_slice(&self) -> &[u8] {
        &self.map[self.offset..self.offset + self.bytes]
    }

    /// The bytes, to be filled.
    #[must_use]
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        &mut self.map[self.offset..self.offset + self.bytes]
    }
}

/// Usual size of huge pages.
pub(crate) const HUGE_PAGE_BYTES: usize = 2 << 20;
