// The header of a client's frame, as expert_recv checks it.
//
// Every block waits for this check, so one warp compares four headers at a time with the expected
// ones, a piece of 16 bytes per lane. Field by field it takes a lane half a microsecond more. Only
// headers that fail this comparison are checked field by field.
#pragma once

#include <cstdint>
#include <cstring>

#include "switchyard/device_abi.h"
#include "switchyard/impls/rows.cuh"
#include "switchyard/ptx/memory.cuh"

namespace switchyard::impls {

// A good header of a frame without rows, the increment for each row, and the mask of bits that
// count here: all but those of epoch, client, sequence, generation and layer.
struct GoodHead {
    static constexpr uint32_t kPieces = sizeof(sy_frame_header) / sizeof(uint4);
    uint4 base[kPieces], per_row[kPieces], mask[kPieces];
};
static_assert(GoodHead::kPieces == 8, "four clients' headers per warp");

// SY_ERROR_* of a header, 0 when it is good.
__device__ __forceinline__ uint32_t check_header(const sy_expert_recv_params& params,
                                                 const sy_client_peer& client, uint64_t frame,
                                                 uint64_t min_epoch, uint32_t num_rows,
                                                 uint32_t* layer) {
    const sy_frame_geometry& geometry = params.geometry;
    // NOTES: every field is read once, and none is kept in a register, for this is rarely needed.
    const volatile sy_frame_header& header =
        *reinterpret_cast<const volatile sy_frame_header*>(frame);
    const uint32_t its_layer = header.layer;
    *layer = its_layer;
    if (header.magic != SY_DEVICE_FRAME_MAGIC || header.kind != SY_KIND_DISPATCH)
        return SY_ERROR_BAD_FRAME;
    if (header.version != SY_DEVICE_ABI_VERSION)
        return SY_ERROR_VERSION;
    if (header.client_id != client.client_id || header.generation != client.generation)
        return SY_ERROR_STALE_CHANNEL;
    if (header.epoch < min_epoch)
        return SY_ERROR_STALE_EPOCH;
    if (its_layer >= params.num_layers)
        return SY_ERROR_WRONG_LAYER;
    const bool is_good =
        num_rows <= geometry.max_tokens && header.num_tokens == num_rows &&
        header.num_entries == num_rows * geometry.top_k && header.hidden == geometry.hidden &&
        header.dtype == geometry.dtype && header.response_dtype == SY_DTYPE_BF16 &&
        header.flags == 0 && header.frame_idx == 0 && header.num_frames == 1 &&
        header.row_stride_bytes == geometry.row_stride_bytes && header.tokens_offset == 0 &&
        header.entries_offset == geometry.entries_offset &&
        header.scales_offset == geometry.scales_offset &&
        header.payload_offset == geometry.payload_offset &&
        header.total_bytes ==
            geometry.payload_offset + uint64_t{num_rows} * geometry.row_stride_bytes &&
        (header.header_crc | header.payload_crc | header.server_queue_ns |
         header.server_compute_ns | header.reserved[0] | header.reserved[1] | header.reserved[2] |
         header.reserved[3]) == 0;
    return is_good ? 0 : SY_ERROR_BAD_FRAME;
}

// One thread, before any header is read. Barrier afterwards.
__device__ __forceinline__ void make_good_head(GoodHead& head, const sy_frame_geometry& geometry) {
    sy_frame_header base = {}, per_row = {}, mask;
    memset(&mask, 0xff, sizeof(mask));
    // Where 32 bits hold no frame's size, no header passes the comparison.
    base.magic =
        geometry.frame_bytes <= UINT32_MAX ? SY_DEVICE_FRAME_MAGIC : ~SY_DEVICE_FRAME_MAGIC;
    base.version = SY_DEVICE_ABI_VERSION;
    base.kind = SY_KIND_DISPATCH;
    base.dtype = static_cast<uint16_t>(geometry.dtype);
    base.response_dtype = SY_DTYPE_BF16;
    base.hidden = geometry.hidden;
    base.num_frames = 1;
    base.row_stride_bytes = geometry.row_stride_bytes;
    base.entries_offset = static_cast<uint32_t>(geometry.entries_offset);
    base.scales_offset = static_cast<uint32_t>(geometry.scales_offset);
    base.payload_offset = static_cast<uint32_t>(geometry.payload_offset);
    base.total_bytes = geometry.payload_offset;
    per_row.num_tokens = 1;
    per_row.num_entries = geometry.top_k;
    per_row.total_bytes = geometry.row_stride_bytes;
    mask.epoch = mask.client_id = mask.sequence = 0;
    mask.generation = mask.layer = 0;
    memcpy(head.base, &base, sizeof(base));
    memcpy(head.per_row, &per_row, sizeof(per_row));
    memcpy(head.mask, &mask, sizeof(mask));
}

__device__ __forceinline__ uint32_t differs(uint32_t word, uint32_t base, uint32_t per_row,
                                            uint32_t mask, uint32_t num_rows) {
    return (word ^ (base + num_rows * per_row)) & mask;
}

// Mask of the headers of `ready` that pass the comparison, and this lane's client's layer. A lane
// has a piece of a header. check_header reads all others and reports the error.
__device__ __forceinline__ uint32_t good_at_sight(
    const GoodHead& head, const sy_client_peer* clients, const sy_expert_recv_params& params,
    uint32_t ready, uint64_t frame, uint64_t min_epoch, uint32_t num_rows, uint32_t* layer) {
    constexpr uint32_t kTogether = 32 / GoodHead::kPieces;
    const uint32_t lane_idx = threadIdx.x & 31, piece = lane_idx % GoodHead::kPieces;
    uint32_t good = 0;
#pragma unroll 1
    for (uint32_t first = 0; first < params.num_clients; first += kTogether) {
        const uint32_t client_idx = first + lane_idx / GoodHead::kPieces;
        const uint64_t address = __shfl_sync(kFullWarp, frame, client_idx);
        const uint32_t rows = __shfl_sync(kFullWarp, num_rows, client_idx);
        uint32_t wrong = 1;
        uint4 words = {};
        if ((ready >> client_idx & 1) != 0) {
            words = ptx::ld_weak_global_v4(address + piece * sizeof(uint4));
            const uint4 base = head.base[piece], per_row = head.per_row[piece],
                        mask = head.mask[piece];
            wrong = differs(words.x, base.x, per_row.x, mask.x, rows) |
                    differs(words.y, base.y, per_row.y, mask.y, rows) |
                    differs(words.z, base.z, per_row.z, mask.z, rows) |
                    differs(words.w, base.w, per_row.w, mask.w, rows);
            const sy_client_peer& client = clients[client_idx];
            const uint64_t low = uint64_t{words.y} << 32 | words.x;
            const uint64_t high = uint64_t{words.w} << 32 | words.z;
            if (piece == 0)
                wrong |= low < min_epoch || high != client.client_id;
            if (piece == 1)
                wrong |= words.z != client.generation || words.w >= params.num_layers;
        }
        const uint32_t right = __ballot_sync(kFullWarp, wrong == 0);
        const uint32_t mine = lane_idx - first; // of those at hand
        const uint32_t its_layer =
            __shfl_sync(kFullWarp, words.w, mine % kTogether * GoodHead::kPieces + 1);
        const bool is_good = mine < kTogether && num_rows <= params.geometry.max_tokens &&
                             (right >> mine * GoodHead::kPieces & 0xff) == 0xff;
        *layer = is_good ? its_layer : *layer;
        good |= __ballot_sync(kFullWarp, is_good);
    }
    return good;
}

} // namespace switchyard::impls
