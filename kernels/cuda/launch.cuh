// What the launchers share: checks of parameters, choice of blocks, and the launch itself.
#pragma once

#include <cstdint>

#include <cuda_runtime.h>

#include "switchyard/launch.h"
#include "switchyard/layout/geometry.h"

namespace switchyard {

[[nodiscard]] inline bool is_aligned(const void* pointer) {
    return reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
}

[[nodiscard]] inline int check_geometry(const sy_frame_geometry& geometry) {
    sy_frame_geometry expected;
    const int code = sy_make_geometry(geometry.hidden, geometry.top_k, geometry.dtype,
                                      geometry.max_tokens, geometry.num_frames, &expected);
    if (code != SY_OK)
        return code;
    const bool is_same = geometry.row_stride_bytes == expected.row_stride_bytes &&
                         geometry.scales_per_row == expected.scales_per_row &&
                         geometry.response_stride_bytes == expected.response_stride_bytes &&
                         geometry.flags_offset == expected.flags_offset &&
                         geometry.entries_offset == expected.entries_offset &&
                         geometry.scales_offset == expected.scales_offset &&
                         geometry.payload_offset == expected.payload_offset &&
                         geometry.frame_bytes == expected.frame_bytes &&
                         geometry.slot_bytes == expected.slot_bytes &&
                         geometry.control_offset == expected.control_offset &&
                         geometry.response_flags_offset == expected.response_flags_offset &&
                         geometry.response_payload_offset == expected.response_payload_offset &&
                         geometry.response_frame_bytes == expected.response_frame_bytes &&
                         geometry.response_slot_bytes == expected.response_slot_bytes &&
                         geometry.response_control_offset == expected.response_control_offset;
    // Offsets in a header are 32 bits.
    return is_same && geometry.payload_offset <= UINT32_MAX ? SY_OK : SY_LAUNCH_GEOMETRY;
}

[[nodiscard]] inline int check_link(const sy_link& link) {
    if (link.way != SY_WAY_DIRECT)
        return SY_LAUNCH_WAY;
    if (link.window == 0)
        return SY_LAUNCH_NULL;
    return link.window % 16 == 0 ? SY_OK : SY_LAUNCH_ALIGNMENT;
}

[[nodiscard]] inline int check_table(const void* table, uint32_t num_peers) {
    if (num_peers == 0 || num_peers > SY_MAX_PEERS)
        return SY_LAUNCH_PEERS;
    if (table == nullptr)
        return SY_LAUNCH_NULL;
    return is_aligned(table) ? SY_OK : SY_LAUNCH_ALIGNMENT;
}

[[nodiscard]] inline int check_capacity(const sy_frame_geometry& geometry, uint32_t capacity) {
    return capacity != 0 && capacity <= geometry.max_tokens ? SY_OK : SY_LAUNCH_TOKENS;
}

template <class Params>
[[nodiscard]] int launch(void (*kernel)(Params), const Params& params, uint32_t num_blocks,
                         uint32_t num_threads, sy_stream stream) {
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(num_blocks);
    config.blockDim = dim3(num_threads);
    config.stream = stream;
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    config.attrs = &attribute;
    config.numAttrs = (params.flags & SY_LAUNCH_FLAG_PDL) != 0 ? 1 : 0;
    return cudaLaunchKernelEx(&config, kernel, params) == cudaSuccess ? SY_OK : SY_LAUNCH_CUDA;
}

// Blocks for `num_units` of work: one each as long as every multiprocessor has at most one, then two
// per multiprocessor.
[[nodiscard]] inline uint32_t choose_blocks(uint32_t asked, uint64_t num_units,
                                            uint64_t units_for_two) {
    constexpr uint32_t kMultiprocessors = 132;
    const uint32_t most = asked != 0 ? asked
                                     : (num_units >= units_for_two ? 2 * kMultiprocessors
                                                                   : kMultiprocessors);
    return static_cast<uint32_t>(num_units < most ? (num_units == 0 ? 1 : num_units) : most);
}

// Threads of the kernels whose hidden size is only known at run time.
constexpr uint32_t kGenericThreads = 256;

} // namespace switchyard
