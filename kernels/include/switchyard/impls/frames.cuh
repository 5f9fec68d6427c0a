// Words by which clients announce arrived data.
#pragma once

#include <cstdint>

#include "switchyard/comm/wait.cuh"
#include "switchyard/device_abi.h"
#include "switchyard/layout/slot.cuh"
#include "switchyard/ptx/memory.cuh"

namespace switchyard::impls {

// A frame of a client, as seen at its server.
struct FrameAt {
    uint64_t number;
    uint64_t address;
    const uint64_t* header_word;
};

__device__ __forceinline__ FrameAt frame_at(const sy_frame_geometry& geometry,
                                            const sy_client_peer& client, uint64_t number) {
    const uint32_t place = layout::ring_place(geometry, number);
    const uint64_t control = client.request + geometry.control_offset;
    return {number, client.request + layout::request_frame(geometry, place),
            reinterpret_cast<const uint64_t*>(control + SY_WORD_HEADER(place))};
}

constexpr uint32_t kRowsUnknown = 0xffffffffu;

// Number of the frame that a header word announces.
__device__ __forceinline__ uint64_t number_said(uint64_t word) { return word >> SY_ANNOUNCE_SHIFT; }

// Rows of the frame, kRowsUnknown before the client has said.
__device__ __forceinline__ uint32_t rows_said(const FrameAt& frame, uint64_t word) {
    return number_said(word) == frame.number
               ? static_cast<uint32_t>(word & ((1u << SY_ANNOUNCE_SHIFT) - 1))
               : kRowsUnknown;
}

// Their number only; orders no other arrivals.
__device__ __forceinline__ uint32_t announced_rows(const FrameAt& frame) {
    return rows_said(frame, ptx::ld_relaxed_sys(frame.header_word));
}

// SYNC POINT accept: once they are known, header and entries are there.
__device__ __forceinline__ uint32_t accepted_rows(const FrameAt& frame) {
    return rows_said(frame, ptx::ld_acquire_sys(frame.header_word));
}

// Number of the frame that was announced last, for error words. Orders nothing.
__device__ __forceinline__ uint64_t announced_number(const FrameAt& frame) {
    return number_said(ptx::ld_relaxed_sys(frame.header_word));
}

// SYNC POINT accept
__device__ __forceinline__ bool row_arrived(const sy_frame_geometry& geometry, const FrameAt& frame,
                                            uint32_t row) {
    return ptx::ld_acquire_sys(reinterpret_cast<const uint64_t*>(
               layout::request_flag_at(geometry, frame.address, row))) >= frame.number;
}

} // namespace switchyard::impls
