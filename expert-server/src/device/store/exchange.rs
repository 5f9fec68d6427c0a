//! Experts of this GPU for peers, and experts of peers' GPUs for this one.
//!
//! On one host a peer maps the block of a layer and copies an expert from GPU to GPU. Elsewhere it reads a copy in this
//! host's memory.

use std::any::Any;
use std::collections::HashMap;
use std::time::Instant;

use checkpoint::WeightFormat;
use cuda_ipc::{BlockShare, INVITATION_BYTES, request_block};
use kernels::gpu::{Checksum, ChecksumRange, GpuBuffer, Stream};
use p2p_core::host::HostIdentity;
use tokio::runtime::Handle;

use super::block::BlockLayout;
use super::shape::BLOCK_FP8;
use super::*;
use crate::compute::{Weight, WeightBytes, WeightMemory, WeightScales};
use crate::experts::{CopyError, DevicePlace, PeerMemory, Share};
use crate::peers::{hex, unhex};

/// Computes checksums on the GPU.
#[derive(Debug)]
pub(super) struct Summer {
    stream: Stream,
    sum: GpuBuffer,
}

impl DeviceStore {
    fn checksum_at(&self, memory: &LayerMemory, local_idx: usize) -> Result<[u64; 2], GpuError> {
        let mut summer = lock(&self.summer);
        let made = match summer.take() {
            Some(made) => made,
            None => Summer {
                stream: self.gpu.stream()?,
                sum: self.gpu.alloc(size_of::<Checksum>() as u64)?,
            },
        };
        let mut ranges = Vec::with_capacity(Part::ALL.len());
        for part in Part::ALL {
            let bytes = memory.layout().part_bytes(part);
            ranges.push(ChecksumRange::new(memory.at(part, local_idx)?, bytes));
        }
        // SAFETY: the ranges lie in the block, and nothing writes them: the expert is loaded, or its copies have ended.
        // The sum is used by one call at a time.
        unsafe { made.stream.checksum(&ranges, made.sum.ptr())? };
        if let Err(error) = made.stream.wait(Instant::now() + SUM_LIMIT) {
            // The kernel may still write it.
            std::mem::forget(made);
            return Err(error);
        }
        let mut bytes = [0; size_of::<Checksum>()];
        self.gpu.read(&made.sum, 0, &mut bytes, Instant::now() + SUM_LIMIT)?;
        *summer = Some(made);
        Ok(bytemuck::pod_read_unaligned::<Checksum>(&bytes).0)
    }

    fn held(&self, layer: u32, expert: u32) -> Result<(Arc<LayerMemory>, usize), LoadError> {
        let tables = self.served.load();
        let found = tables.find(layer, expert);
        let found = found.and_then(|(table, idx)| Some((Arc::clone(table.memory.as_ref()?), idx)));
        let missing = || format!("expert {expert} of layer {layer} is not loaded");
        found.ok_or_else(|| LoadError::Device(missing().into()))
    }

    /// Keeps the uploader of a copy to the host if few are kept already, because its buffers are page-locked.
    pub(super) fn keep_some(&self, uploader: Uploader) {
        let mut kept = lock(&self.uploaders);
        if kept.len() < MAX_KEPT {
            kept.push(uploader);
        }
    }

    /// The form of matrices in GPU memory.
    pub(super) const fn format(&self) -> WeightFormat {
        if self.shape.is_fp8 { BLOCK_FP8 } else { WeightFormat::Bf16 }
    }

    /// Whether the GPU holds an expert in the form of the model's files.
    fn is_as_stored(&self, layer: u32, expert: u32) -> bool {
        match self.checkpoint.expert(layer, expert) {
            Ok(tensors) => tensors.matrices().all(|matrix| matrix.format() == self.format()),
            Err(_) => !lock(&self.widened).contains(&(layer, expert)),
        }
    }
}

impl DeviceExperts for DeviceStore {
    fn size_bytes(&self, layer: u32, expert: u32) -> Option<u64> {
        self.has(layer, expert).then(|| self.shape.expert_bytes())
    }

    fn copy_to_host(&self, layer: u32, expert: u32) -> Result<ExpertWeights, LoadError> {
        if !self.is_as_stored(layer, expert) {
            let what = "the GPU holds it widened to bf16, the model's files do not";
            return Err(LoadError::Device(what.into()));
        }
        let (memory, local_idx) = self.held(layer, expert)?;
        let host = WeightMemory::new(self.shape.expert_bytes() as usize);
        let mut host = host.map_err(|error| LoadError::Device(error.into()))?;
        let uploader = lock(&self.uploaders).pop();
        let mut uploader =
            uploader.map_or_else(|| Uploader::new(&self.gpu), Ok).map_err(refused)?;
        let mut begins = [0; Part::ALL.len()];
        let mut end = 0;
        for (begin, part) in begins.iter_mut().zip(Part::ALL) {
            let bytes = memory.layout().part_bytes(part) as usize;
            *begin = end;
            end += bytes;
            let from = memory.at(part, local_idx).map_err(refused)?;
            // SAFETY: the part of a loaded expert, which is never written again.
            unsafe { uploader.read(from, &mut host.as_mut_slice()[*begin..end]) }
                .map_err(refused)?;
        }
        self.keep_some(uploader);
        let host = Arc::new(host);
        let (matrix, scales) =
            (self.shape.matrix_bytes() as usize, self.shape.num_scales() as usize * 4);
        let WeightShape { hidden, inter, is_fp8 } = self.shape;
        let bytes = |begin: usize, len: usize| {
            WeightBytes::new(Arc::clone(&host), |host| &host.as_slice()[begin..begin + len])
        };
        let weight = |rows, cols, (part, idx): (usize, usize)| {
            let scales = is_fp8.then(|| WeightScales {
                dtype: checkpoint::DType::F32,
                data: bytes(begins[part + 2] + idx * scales, scales),
                factor: 1.0,
                minima: Arc::new([]),
            });
            let codes = bytes(begins[part] + idx * matrix, matrix);
            Weight::new(self.format(), rows, cols, codes, scales)
                .map_err(|source| LoadError::Weight { layer, expert, source })
        };
        Ok(ExpertWeights {
            gate: Some(weight(inter, hidden, (0, 0))?),
            up: weight(inter, hidden, (0, 1))?,
            down: weight(hidden, inter, (1, 0))?,
            biases: None,
        })
    }

    fn form(&self) -> String {
        let host = HostIdentity::of_this_process();
        let (boot, net) = (hex(&host.boot_id), host.net_namespace);
        let kind = if matches!(self.plan.device, kernels::gpu::DeviceName::Cuda(_)) {
            "cuda"
        } else {
            "emulated"
        };
        let WeightShape { hidden, inter, .. } = self.shape;
        format!("{boot} {net:?} {kind} {} {hidden} {inter}", self.format())
    }

    fn place(&self, layer: u32, expert: u32) -> Option<(DevicePlace, Arc<dyn Any + Send + Sync>)> {
        let (memory, local_idx) = self.held(layer, expert).ok()?;
        let place = DevicePlace {
            block: memory.id(),
            capacity: u32::try_from(memory.capacity()).ok()?,
            local_idx: u32::try_from(local_idx).ok()?,
            is_widened: !self.is_as_stored(layer, expert),
        };
        Some((place, memory))
    }

    fn checksum(&self, layer: u32, expert: u32) -> Result<[u64; 2], LoadError> {
        let (memory, local_idx) = self.held(layer, expert)?;
        self.checksum_at(&memory, local_idx).map_err(refused)
    }

    fn share(self: Arc<Self>) -> Result<Share, LoadError> {
        let share = BlockShare::open().map_err(|error| LoadError::Device(Box::new(error)))?;
        let text = hex(&share.to_bytes());
        let find = move |number: u64| {
            let memory = lock(&self.blocks).get(&number)?.upgrade()?;
            match memory.block().export() {
                Ok(descriptor) => Some((descriptor, memory.block().len())),
                Err(error) => {
                    tracing::warn!(%error, "peers cannot map this GPU's memory");
                    None
                }
            }
        };
        Ok((text, Box::pin(share.serve(find))))
    }

    fn reach(self: Arc<Self>, share: &str) -> Result<Box<dyn PeerMemory>, LoadError> {
        let wrong = |what: &str| LoadError::Device(what.into());
        let share = unhex::<INVITATION_BYTES>(share).ok_or_else(|| wrong("a malformed share"))?;
        let runtime = Handle::try_current().map_err(|error| LoadError::Device(error.into()))?;
        Ok(Box::new(PeerBlocks { store: self, share, runtime, mapped: Mutex::default() }))
    }
}

/// The blocks of a peer on this host.
struct PeerBlocks {
    store: Arc<DeviceStore>,
    share: [u8; INVITATION_BYTES],
    runtime: Handle,
    /// By number. A block that could not be mapped is not tried again.
    mapped: Mutex<HashMap<u64, Arc<OnceLock<Mapping>>>>,
}

/// A mapped block, or the reason why there is none.
type Mapping = Result<Arc<GpuBuffer>, String>;

impl PeerBlocks {
    /// The block of this number, mapped. Callers that need it at the same time wait together for the peer, up to
    /// [`REQUEST_LIMIT`], and share the outcome.
    fn map(&self, number: u64, layout: &BlockLayout) -> Result<Arc<GpuBuffer>, CopyError> {
        let place = Arc::clone(lock(&self.mapped).entry(number).or_default());
        let block = place.get_or_init(|| self.request(number)).clone();
        let block = block.map_err(CopyError::Unreachable)?;
        if block.len() < layout.bytes() {
            let text = format!("a block of {} bytes, expected {}", block.len(), layout.bytes());
            return Err(CopyError::Unreachable(text));
        }
        Ok(block)
    }

    fn request(&self, number: u64) -> Mapping {
        let requested = request_block(&self.share, number, REQUEST_LIMIT);
        let requested = self.runtime.block_on(requested);
        let (descriptor, bytes) = requested.map_err(|error| error.to_string())?;
        let block = self.store.gpu.import_shared(descriptor, bytes);
        block.map(Arc::new).map_err(|error| error.to_string())
    }
}

impl PeerMemory for PeerBlocks {
    fn take(
        &self,
        layer: u32,
        expert: u32,
        place: &DevicePlace,
        expected: [u64; 2],
        deadline: Instant,
    ) -> Result<u64, CopyError> {
        let (shape, capacity) = (self.store.shape, place.capacity as usize);
        let is_within = place.local_idx < place.capacity
            && place.capacity as usize <= kernels::abi::MAX_EXPERTS;
        if !is_within {
            return Err(CopyError::Unreachable(format!("an impossible place: {place:?}")));
        }
        let from_layout = BlockLayout { shape, capacity };
        let block = self.map(place.block, &from_layout)?;
        let Some(mut reservation) = self.store.reserve(layer, expert)? else { return Ok(0) };
        reservation.is_widened = place.is_widened;
        let (uploader, memory, local_idx) = reservation.parts();
        // The peer's host may still give what its device does not.
        let failed = |error: GpuError| CopyError::Unreachable(error.to_string());
        for part in Part::ALL {
            sabotage!("server::in_device_copy", { continue });
            let bytes = from_layout.part_bytes(part);
            let from = block.at(from_layout.offset(part, place.local_idx as usize), bytes);
            let (from, to) = (from.map_err(failed)?, memory.at(part, local_idx).map_err(failed)?);
            // SAFETY: both ranges lie in their blocks. The peer promises not to write a loaded expert; if it does, the
            // checksum differs. No kernel uses this place yet. The reservation keeps its block until the copy has
            // ended, and `block` lives as long.
            unsafe { uploader.copy_within_gpu(to, from, bytes).map_err(failed)? };
        }
        if let Err(error) = uploader.wait() {
            std::mem::forget(block);
            return Err(failed(error));
        }
        if Instant::now() >= deadline {
            let text = "the grant ended before the expert was copied";
            return Err(CopyError::Unreachable(text.to_owned()));
        }
        let found = self.store.checksum_at(memory, local_idx).map_err(failed)?;
        if found != expected {
            return Err(CopyError::Damaged { found, expected });
        }
        Ok(reservation.publish()?)
    }
}

/// Most uploaders that copies to the host leave for later ones. Copies beyond them lock pages anew.
const MAX_KEPT: usize = 2;
/// Longest wait for a checksum, which takes less than a millisecond.
const SUM_LIMIT: Duration = Duration::from_secs(10);
/// Longest wait for a peer's descriptor.
const REQUEST_LIMIT: Duration = Duration::from_secs(3);
