// Waiting for clients' frames.
#pragma once

#include <cstdint>

#include "switchyard/comm/wait.cuh"
#include "switchyard/device_abi.h"
#include "switchyard/ptx/memory.cuh"

namespace switchyard::impls {

struct FrameSeen {
    uint64_t published; // value of the frame's counter that completes it
    uint32_t num_rows;
    bool is_ready;
};

__device__ __forceinline__ const uint64_t* control_word(const sy_frame_geometry& geometry,
                                                        const sy_client_peer& client,
                                                        uint64_t word) {
    return reinterpret_cast<const uint64_t*>(client.request + geometry.control_offset + word);
}

// Looks once whether frame `number` has arrived whole. The counter of its ring place stood at
// `published_before`, and grows by the rows and one for the header.
__device__ __forceinline__ FrameSeen look_for_frame(const sy_frame_geometry& geometry,
                                                    const sy_client_peer& client, uint64_t number,
                                                    uint32_t place, uint64_t published_before) {
    FrameSeen seen;
    const uint64_t announced =
        ptx::ld_relaxed_sys(control_word(geometry, client, SY_WORD_ANNOUNCE(place)));
    // SYNC POINT accept
    const uint64_t published =
        ptx::ld_acquire_sys(control_word(geometry, client, SY_WORD_FRAME_PUBLISHED(place)));
    seen.num_rows = static_cast<uint32_t>(announced & ((1u << SY_ANNOUNCE_SHIFT) - 1));
    seen.published = published_before + seen.num_rows + 1;
    // NOTES: the two words are read one after the other and need no order: the announcement names its
    // frame, and the counter never falls.
    seen.is_ready = announced >> SY_ANNOUNCE_SHIFT == number && published >= seen.published;
    return seen;
}

} // namespace switchyard::impls
