//! Options of a GPU client.

use kernels::abi::{DTYPE_BF16, DTYPE_F8_E4M3, FrameGeometry, MAX_EXPERTS, MAX_PEERS};
use kernels::check::CheckError;
use p2p_core::SlotConfig;
use protocol::WireDtype;

use super::DeviceBuildError;
use crate::model::ClientModel;

/// Options that only a GPU client has.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct DeviceOptions {
    /// Element type of requests: bf16, or fp8 with a scale per 128 values. Servers must have the same. Answers are
    /// bf16. Default bf16.
    pub dtype: WireDtype,
    /// Most connected servers, up to 32. Kernels take longer with a larger number. Default 8.
    pub max_servers: usize,
    /// Thread blocks of dispatch and combine; 0 chooses by size. Fewer blocks leave more of the GPU to other kernels.
    pub num_blocks: u32,
    /// Lets a kernel start while the one before it in the stream ends (programmatic dependent launch). Default on.
    pub overlap: bool,
    /// Calls whose steps are noted, for [`DeviceClient::call_stamps`](super::DeviceClient::call_stamps); 0 for none.
    /// Each thread block of a kernel then stores a time. Without it each tests a pointer.
    pub timeline: u32,
    /// Threads that post for kernels to servers over a network. Default 0: a quarter of the processors next to GPU
    /// and NIC, one to four.
    pub proxy_threads: usize,
}

impl Default for DeviceOptions {
    fn default() -> Self {
        Self {
            dtype: WireDtype::Bf16,
            max_servers: 8,
            num_blocks: 0,
            overlap: true,
            timeline: 0,
            proxy_threads: 0,
        }
    }
}

/// The largest frames for the model's shape and the options that a slot holds.
pub(super) fn geometry_of(
    model: &ClientModel,
    slot: SlotConfig,
    options: &DeviceOptions,
) -> Result<FrameGeometry, DeviceBuildError> {
    let dtype = match options.dtype {
        WireDtype::Bf16 => DTYPE_BF16,
        WireDtype::F8E4m3 => DTYPE_F8_E4M3,
        other => {
            let what = format!("element type of requests {}", other.name());
            return Err(DeviceBuildError::Shape { what, source: CheckError::Dtype });
        }
    };
    if options.max_servers == 0 || options.max_servers > MAX_PEERS {
        let what = format!("max_servers {}", options.max_servers);
        return Err(DeviceBuildError::Shape { what, source: CheckError::Peers });
    }
    let shape = &model.shape;
    if shape.num_experts as usize > MAX_EXPERTS {
        let what = format!("{} experts per layer", shape.num_experts);
        return Err(DeviceBuildError::Shape { what, source: CheckError::Experts });
    }
    let num_frames = u32::try_from(slot.num_frames).unwrap_or(u32::MAX);
    // With one token a frame always fits, so an error here is one of the shape.
    FrameGeometry::new(shape.hidden, shape.top_k, dtype, 1, num_frames).map_err(|source| {
        let what = format!(
            "hidden size {}, top-{}, {} frames per slot",
            shape.hidden, shape.top_k, slot.num_frames
        );
        DeviceBuildError::Shape { what, source }
    })?;
    let bytes = slot.slot_bytes as u64;
    let max_tokens =
        FrameGeometry::tokens_for_slot(shape.hidden, shape.top_k, dtype, num_frames, bytes);
    FrameGeometry::new(shape.hidden, shape.top_k, dtype, max_tokens, num_frames).map_err(|_| {
        DeviceBuildError::Setting {
            setting: "slot_bytes",
            found: bytes.to_string(),
            expected: format!(
                "room for {num_frames} frames of one token of hidden size {}",
                shape.hidden
            ),
        }
    })
}
