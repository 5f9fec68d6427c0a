// Checks of the launchers of the transport measurements. kernels/src/p2p.rs is the same in Rust.
#pragma once

#include <cstdint>

#include "check.hpp"

namespace switchyard {

[[nodiscard]] inline int check_p2p(const sy_p2p_params& params) {
    if (params.version != SY_DEVICE_ABI_VERSION)
        return SY_LAUNCH_VERSION;
    if (params.num_peers == 0 || params.num_peers > SY_MAX_PEERS || params.blocks_per_peer == 0)
        return SY_LAUNCH_PEERS;
    if (params.timeout_ns == 0)
        return SY_LAUNCH_BOUND;
    if (params.elapsed_ns == nullptr || params.error == nullptr)
        return SY_LAUNCH_NULL;
    const uint64_t unit = params.num_bytes < 16 ? 4 : 16;
    if (params.num_bytes == 0 || params.num_bytes % unit != 0)
        return SY_LAUNCH_ALIGNMENT;
    for (uint32_t i = 0; i < params.num_peers; ++i) {
        const sy_link& link = params.links[i];
        if (params.counters[i] == 0 || link.window == 0)
            return SY_LAUNCH_NULL;
        if (link.path != SY_PATH_DIRECT)
            return SY_LAUNCH_PATH;
        if (link.window % 16 != 0)
            return SY_LAUNCH_ALIGNMENT;
    }
    return SY_OK;
}

[[nodiscard]] inline LaunchPlan plan_p2p(const sy_p2p_params& params) {
    return {params.num_peers * params.blocks_per_peer, SY_P2P_THREADS, false};
}

} // namespace switchyard
