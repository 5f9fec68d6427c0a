//! A GPU posts: [`Access`] over CUDA. *Not yet run with a ConnectX.*
//!
//! NOTES: `CU_POINTER_ATTRIBUTE_SYNC_MEMOPS` is not set on memory that a NIC reaches. It makes CUDA's
//! *synchronous* copies and fills wait for their end; without it, some return before they are done. This crate
//! uses none of these. It zeroes, writes and reads memory by asynchronous operations on a stream of its own, and
//! [`Access::alloc`], [`SharedMemory::write`] and [`SharedMemory::read`] return once that stream is empty. So the
//! data is in place before the NIC learns of it. A user that copies to or from a slot by `cudaMemcpy` must set the
//! attribute, or wait.

mod memory;

use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::Arc;

use kernels::gpu::{DeviceName, Gpu, GpuBuffer, GpuError};

pub use self::memory::GpuMemory;
use super::{Access, AccessError, Guard, HostAccess, HostRange, Mapping, SharedMemory, Space};
use crate::missing::missing_for_doorbells;

/// Place of queues and slots.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// The GPU's memory. Queues there need the DevX path.
    Gpu,
    /// Page-locked host memory that the GPU reaches.
    Host,
}

/// Kernels of this GPU post.
#[derive(Debug, Clone)]
pub struct GpuAccess {
    gpu: Gpu,
    place: Place,
    /// Place of slots, if not with the queues.
    slots: Option<Box<Self>>,
    /// The GPU's own memory, for data of its kernels alone, if queues lie elsewhere.
    counts: Option<Box<Self>>,
    /// Access of the GPU to a NIC's doorbell register.
    register: HostRange,
    /// Source of page-locked memory, if it is not fresh memory of the process.
    pages: Option<Arc<dyn Access>>,
    /// Below which `proc` is, if not `/`.
    root: Option<PathBuf>,
}

impl GpuAccess {
    /// For kernels of `gpu`, with memory at `place`.
    #[must_use]
    pub fn new(gpu: Gpu, place: Place) -> Self {
        let counts = (place == Place::Host).then(|| Box::new(Self::new(gpu.clone(), Place::Gpu)));
        let register = HostRange::Register;
        Self { gpu, place, slots: None, counts, register, pages: None, root: None }
    }

    /// The same with slots at `place`, wherever queues lie: those of libibverbs are in host memory, and
    /// frames are best in the GPU's.
    #[must_use]
    pub fn with_slots(self, place: Place) -> Self {
        let of_slots = || Self { pages: self.pages.clone(), ..Self::new(self.gpu.clone(), place) };
        let slots = (place != self.place).then(|| Box::new(of_slots()));
        Self { slots, ..self }
    }

    /// The same with page-locked memory, that of slots, too, on pages of `pages`: of a NIC in software, which
    /// would put others in the place of the process's own.
    #[must_use]
    pub fn with_pages(self, pages: Arc<dyn Access>) -> Self {
        let slots = self.slots.map(|slots| Box::new(slots.with_pages(Arc::clone(&pages))));
        Self { slots, pages: Some(pages), ..self }
    }

    /// The same beside a NIC in software. Its registers are memory.
    #[must_use]
    pub fn with_software_nic(self) -> Self {
        Self { register: HostRange::Memory, ..self }
    }

    /// The same on a host whose `proc` is below `root`, for tests. Errors read options of the driver there.
    #[must_use]
    pub fn with_root(self, root: PathBuf) -> Self {
        Self { root: Some(root), ..self }
    }
}

impl Access for GpuAccess {
    /// Registers pages for all GPUs of the process together. All reach them at the same address.
    fn space(&self) -> Space {
        Space(match self.gpu.name() {
            DeviceName::Cuda(_) => "CUDA",
            DeviceName::Emulated(_) => "GPUs in software",
        })
    }

    fn slots(&self) -> Option<&dyn Access> {
        self.slots.as_deref().map(|slots| slots as &dyn Access)
    }

    fn counts(&self) -> Option<&dyn Access> {
        // In one piece with the slots where these are there, too.
        let with_slots = self.slots.as_deref().filter(|slots| slots.place == Place::Gpu);
        let counts = self.counts.as_deref()?;
        Some(with_slots.unwrap_or(counts))
    }

    fn alloc(&self, bytes: usize) -> Result<Box<dyn SharedMemory>, AccessError> {
        let pages = self.pages.as_deref().unwrap_or(&HostAccess);
        Ok(Box::new(GpuMemory::new(&self.gpu, self.place, pages, bytes)?))
    }

    unsafe fn map(
        &self,
        pages: NonNull<u8>,
        bytes: usize,
        kind: HostRange,
    ) -> Result<Mapping, AccessError> {
        let is_register = (kind, self.register) == (HostRange::Register, HostRange::Register);
        // SAFETY: the caller keeps the pages mapped.
        let mapped = unsafe { self.gpu.register_host(pages, bytes as u64, is_register) };
        let root = self.root.as_deref().unwrap_or(Path::new("/"));
        let buffer =
            mapped.map_err(|source| unreachable_pages(source, is_register, bytes, root))?;
        Ok(Mapping { address: buffer.ptr().0, guard: Some(Box::new(PageRegistration(buffer))) })
    }
}

#[derive(Debug)]
struct PageRegistration(#[allow(dead_code, reason = "held until drop")] GpuBuffer);

impl Guard for PageRegistration {}

/// Explains why the GPU does not reach pages of this process. Reads options of the driver where their absence can
/// cause the call's error code.
fn unreachable_pages(
    source: GpuError,
    is_register: bool,
    bytes: usize,
    root: &Path,
) -> AccessError {
    let what = if is_register {
        "the NIC's doorbell register for the GPU"
    } else {
        "a queue's host memory for the GPU"
    };
    let code = match &source {
        GpuError::Driver { code, .. } => Some(*code),
        _ => None,
    };
    if code == Some(ALREADY_REGISTERED) {
        return AccessError::Registered { what, bytes, source };
    }
    if is_register && code.is_some_and(|code| NOT_MAPPABLE.contains(&code)) {
        let missing = missing_for_doorbells(root);
        if !missing.is_empty() {
            return AccessError::DriverOption { bytes, missing, source };
        }
    }
    AccessError::Gpu { what: what.to_owned(), bytes, source }
}

/// `CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED`
const ALREADY_REGISTERED: u32 = 712;
/// How a driver without the options refuses registers: `CUDA_ERROR_INVALID_VALUE`, `CUDA_ERROR_NOT_PERMITTED` (the
/// usual one), `CUDA_ERROR_NOT_SUPPORTED`; and GPUs in software, `EOPNOTSUPP`.
const NOT_MAPPABLE: [u32; 4] = [1, 800, 801, 95];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::missing::MissingPart;

    fn driver(code: u32) -> GpuError {
        GpuError::Driver { call: "cuMemHostRegister", code, name: format!("error {code}") }
    }

    fn host_with(params: &str) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("proc/driver/nvidia");
        std::fs::create_dir_all(&dir).unwrap();
        std::fs::write(dir.join("params"), params).unwrap();
        root
    }

    #[test]
    fn exactly_the_options_that_are_missing_are_named() {
        let (stream, peer) = (MissingPart::StreamMemOps, MissingPart::PeerMapping);
        let cases: [(&str, &[MissingPart]); 4] = [
            ("EnableStreamMemOPs: 0\nRegistryDwords: \"\"\n", &[stream, peer]),
            ("EnableStreamMemOPs: 1\nRegistryDwords: \"\"\n", &[peer]),
            ("EnableStreamMemOPs: 0\nRegistryDwords: \"PeerMappingOverride=1;\"\n", &[stream]),
            ("EnableStreamMemOPs: 1\nRegistryDwords: \"PeerMappingOverride=1;\"\n", &[]),
        ];
        for (params, expected) in cases {
            let root = host_with(params);
            let error = unreachable_pages(driver(800), true, 4096, root.path());
            let text = error.to_string();
            for (missing, setting) in
                [(stream, "NVreg_EnableStreamMemOPs=1"), (peer, "PeerMappingOverride=1")]
            {
                assert_eq!(text.contains(setting), expected.contains(&missing), "{text}");
            }
            assert!(text.contains("cuMemHostRegister failed: error 800 (800)"), "{text}");
            match error {
                AccessError::DriverOption { bytes: 4096, missing, source } => {
                    assert_eq!(missing, expected);
                    assert!(matches!(source, GpuError::Driver { code: 800, .. }));
                }
                AccessError::Gpu { .. } => assert!(expected.is_empty(), "{text}"),
                _ => panic!("{text}"),
            }
        }
    }

    #[test]
    fn what_no_option_mends_names_none() {
        let root = host_with("EnableStreamMemOPs: 0\n");
        for (code, is_register) in [(2, true), (712, true), (712, false), (800, false)] {
            let error = unreachable_pages(driver(code), is_register, 64, root.path());
            let is_known = matches!(error, AccessError::Registered { .. });
            assert_eq!(is_known, code == ALREADY_REGISTERED, "{error}");
            let text = error.to_string();
            assert!(!text.contains("NVreg") && text.contains(&format!("({code})")), "{text}");
        }
    }
}
