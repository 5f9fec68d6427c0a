//! Layout of device frames, and other values that follow from shapes. Mirrors
//! `include/switchyard/layout/geometry.h`.

use std::mem::size_of;

use bytemuck::Zeroable;

use crate::abi::{
    BATCH_STAMPS, CONTROL_BYTES, DEVICE_ABI_VERSION, DTYPE_BF16, DTYPE_F8_E4M3, DevicePtr,
    ExpertLists, FrameGeometry, Handle, MAX_FRAME_TOKENS, MAX_FRAMES, MAX_HIDDEN, MAX_REPLICAS,
    MAX_TOP_K, Placement, ROUTE_SHIFT, SCALE_BLOCK, STAMPS_OFFSET,
};
use crate::check::CheckError;

/// Bytes of the header of every frame.
pub const HEADER_BYTES: u64 = 128;
/// Bytes of an entry: expert and weight.
pub const ENTRY_BYTES: u64 = 8;

impl FrameGeometry {
    /// Geometry of slots of `num_frames` frames of up to `max_tokens` tokens of `hidden` values, each
    /// with `top_k` experts; `dtype` is [`DTYPE_BF16`] or [`DTYPE_F8_E4M3`].
    ///
    /// # Errors
    /// [`CheckError`], naming the value that is out of range.
    pub fn new(
        hidden: u32,
        top_k: u32,
        dtype: u32,
        max_tokens: u32,
        num_frames: u32,
    ) -> Result<Self, CheckError> {
        if hidden == 0 || !hidden.is_multiple_of(SCALE_BLOCK) || hidden > MAX_HIDDEN {
            return Err(CheckError::Hidden);
        }
        if top_k == 0 || top_k > MAX_TOP_K {
            return Err(CheckError::TopK);
        }
        if dtype != DTYPE_BF16 && dtype != DTYPE_F8_E4M3 {
            return Err(CheckError::Dtype);
        }
        if max_tokens == 0 || max_tokens > MAX_FRAME_TOKENS {
            return Err(CheckError::Tokens);
        }
        if num_frames > MAX_FRAMES || !num_frames.is_power_of_two() {
            return Err(CheckError::Geometry);
        }
        let tokens = u64::from(max_tokens);
        let is_bf16 = dtype == DTYPE_BF16;
        let row_stride_bytes = if is_bf16 { hidden * 2 } else { hidden };
        let scales_per_row = if is_bf16 { 0 } else { hidden / SCALE_BLOCK };
        let flags_offset = HEADER_BYTES;
        let entries_offset = (flags_offset + tokens * 8).next_multiple_of(PAYLOAD_ALIGN);
        let scales_offset = (entries_offset + tokens * u64::from(top_k) * ENTRY_BYTES)
            .next_multiple_of(PAYLOAD_ALIGN);
        let payload_offset = (scales_offset + tokens * u64::from(scales_per_row) * 4)
            .next_multiple_of(PAYLOAD_ALIGN);
        let frame_bytes =
            (payload_offset + tokens * u64::from(row_stride_bytes)).next_multiple_of(FRAME_ALIGN);
        let control_offset = frame_bytes * u64::from(num_frames);
        let response_payload_offset = (tokens * 8).next_multiple_of(PAYLOAD_ALIGN);
        let response_frame_bytes = (response_payload_offset + tokens * u64::from(hidden) * 2)
            .next_multiple_of(FRAME_ALIGN);
        let response_control_offset = response_frame_bytes * u64::from(num_frames);
        Ok(Self {
            hidden,
            top_k,
            dtype,
            num_frames,
            max_tokens,
            row_stride_bytes,
            scales_per_row,
            response_stride_bytes: hidden * 2,
            flags_offset,
            entries_offset,
            scales_offset,
            payload_offset,
            frame_bytes,
            slot_bytes: control_offset + CONTROL_BYTES,
            control_offset,
            response_flags_offset: 0,
            response_payload_offset,
            response_frame_bytes,
            response_slot_bytes: response_control_offset + CONTROL_BYTES,
            response_control_offset,
        })
    }

    /// The numbers that both sides of a connection must have alike, for people and to be compared.
    #[must_use]
    pub fn describe(&self) -> String {
        let Self { hidden, top_k, num_frames, max_tokens, .. } = self;
        let dtype = if self.dtype == DTYPE_F8_E4M3 { "fp8" } else { "bf16" };
        format!(
            "hidden {hidden}, top-{top_k}, {dtype}, {num_frames} frames of {max_tokens} tokens, device ABI {DEVICE_ABI_VERSION}"
        )
    }

    /// Most tokens per frame of a slot of `slot_bytes`, such that request and answer both fit. 0 when
    /// none do, or when another argument is out of range.
    #[must_use]
    pub fn tokens_for_slot(
        hidden: u32,
        top_k: u32,
        dtype: u32,
        num_frames: u32,
        slot_bytes: u64,
    ) -> u32 {
        let (mut fits, mut too_many) = (0, MAX_FRAME_TOKENS + 1);
        while too_many - fits > 1 {
            let middle = fits + (too_many - fits) / 2;
            let Ok(geometry) = Self::new(hidden, top_k, dtype, middle, num_frames) else {
                return 0;
            };
            if geometry.slot_bytes <= slot_bytes && geometry.response_slot_bytes <= slot_bytes {
                fits = middle;
            } else {
                too_many = middle;
            }
        }
        fits
    }

    /// Rows of each answer in a response slot, as offset and length in bytes. If the server's link is direct, they
    /// must be full of [`ANSWER_HOLE`](crate::abi::ANSWER_HOLE) before the first request.
    pub fn answer_rows(&self) -> impl Iterator<Item = (u64, u64)> {
        let (frame, begin) = (self.response_frame_bytes, self.response_payload_offset);
        (0..u64::from(self.num_frames)).map(move |place| (place * frame + begin, frame - begin))
    }

    /// Bytes of a handle with its routes.
    #[must_use]
    pub const fn handle_bytes(&self) -> u64 {
        size_of::<Handle>() as u64 + self.max_tokens as u64 * self.top_k as u64 * 4
    }

    /// Lists for up to `max_rows` rows in memory that starts at `base` (aligned to 256), and their
    /// bytes. With a null `base` only the bytes mean something.
    #[must_use]
    pub fn lists_at(
        &self,
        base: DevicePtr,
        num_local_experts: u32,
        max_rows: u32,
    ) -> (ExpertLists, u64) {
        let max_entries = u64::from(max_rows) * u64::from(self.top_k);
        let mut at = base.0;
        let mut take = |bytes: u64| {
            let here = DevicePtr(at);
            at = (at + bytes).next_multiple_of(256);
            here
        };
        let lists = ExpertLists {
            batch: take(STAMPS_OFFSET + BATCH_STAMPS as u64 * 8),
            expert_begin: take((u64::from(num_local_experts) + 1) * 4),
            list_row: take(max_entries * 4),
            list_weight: take(max_entries * 4),
            row_source: take(u64::from(max_rows) * 4),
            row_position: take(max_entries * 4),
            max_rows,
            usual_rows: 0,
            stamps: DevicePtr::NULL,
        };
        (lists, at - base.0)
    }

    /// Bytes of one of the expert stage's scratch buffers. Its rows have `row_values` values of the weights' type:
    /// `hidden` for [`ExpertComputeParams::rows`](crate::abi::ExpertComputeParams), the intermediate size for
    /// `activation`.
    #[must_use]
    pub fn expert_scratch_bytes(
        &self,
        num_local_experts: u32,
        max_rows: u32,
        weights_dtype: u32,
        row_values: u32,
    ) -> u64 {
        // Rows by expert, each expert's beginning at a multiple of eight; 128-byte panels and their scales.
        let num_rows = (u64::from(max_rows) * u64::from(self.top_k)).next_multiple_of(8)
            + 8 * u64::from(num_local_experts);
        if weights_dtype == DTYPE_F8_E4M3 {
            u64::from(row_values.div_ceil(128)) * num_rows * (128 + 4)
        } else {
            u64::from(row_values.div_ceil(64)) * num_rows * 128
        }
    }
}

impl Placement {
    /// A table of `experts`, each with the indices of the servers that have it.
    ///
    /// # Errors
    /// [`CheckError::Experts`] with no experts, too many, or more than [`MAX_REPLICAS`] of one.
    pub fn new(epoch: u64, experts: &[Vec<u8>]) -> Result<Self, CheckError> {
        let mut table = Self::zeroed();
        if experts.is_empty() || experts.len() > table.experts.len() {
            return Err(CheckError::Experts);
        }
        table.epoch = epoch;
        table.num_experts = experts.len() as u32;
        for (set, servers) in table.experts.iter_mut().zip(experts) {
            if servers.len() > MAX_REPLICAS {
                return Err(CheckError::Experts);
            }
            set.num_replicas = servers.len() as u8;
            set.server[..servers.len()].copy_from_slice(servers);
        }
        Ok(table)
    }

    /// Server to which dispatch sends a (token, expert) pair: `None` when the expert is masked or out
    /// of range, or has no replica below `num_servers`. The tokens of an expert spread evenly.
    #[must_use]
    pub fn pick_server(&self, token_idx: u32, expert: i32, num_servers: u32) -> Option<u32> {
        let expert_idx = u32::try_from(expert).ok().filter(|idx| *idx < self.num_experts)?;
        let set = self.experts.get(expert_idx as usize)?;
        let num_replicas = u32::from(set.num_replicas).min(MAX_REPLICAS as u32);
        let spread = token_idx.wrapping_mul(37).wrapping_add(expert_idx) & 0xff;
        let server = u32::from(set.server[((spread * num_replicas) >> 8) as usize]);
        (num_replicas != 0 && server < num_servers).then_some(server)
    }
}

/// A route as dispatch writes it: the row of a token in the frame to a server.
#[must_use]
pub const fn route(server: u32, row: u32) -> u32 {
    (server << ROUTE_SHIFT) | row
}

const PAYLOAD_ALIGN: u64 = 128;
const FRAME_ALIGN: u64 = 4096;
