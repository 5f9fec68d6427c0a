// The device functions, callable from Rust. One thread stands for a warp.
#include "switchyard/comm/proxy_link.h"

using namespace switchyard::comm;

extern "C" {

uint32_t sy_proxy_test_put(const sy_proxy_peer* peer, uint32_t lane, uint64_t offset,
                           uint64_t num_bytes) {
    return proxy::put_nbi_warp(*peer, lane, offset, num_bytes);
}

uint32_t sy_proxy_test_put_from(const sy_proxy_peer* peer, uint32_t lane, uint64_t offset,
                                uint32_t source, uint64_t source_offset, uint64_t num_bytes) {
    return proxy::put_from_nbi_warp(*peer, lane, offset, source, source_offset, num_bytes);
}

uint32_t sy_proxy_test_put_add(const sy_proxy_peer* peer, uint32_t lane, uint64_t offset,
                               uint64_t num_bytes, uint64_t counter, uint64_t value) {
    return proxy::put_add_nbi_warp(*peer, lane, offset, num_bytes, counter, value);
}

uint32_t sy_proxy_test_put_signal(const sy_proxy_peer* peer, uint32_t lane, uint64_t offset,
                                  uint64_t num_bytes, uint64_t word, uint64_t value) {
    return proxy::put_signal_nbi_warp(*peer, lane, offset, num_bytes, word, value);
}

uint32_t sy_proxy_test_get(const sy_proxy_peer* peer, uint32_t lane, uint64_t offset,
                           uint64_t num_bytes) {
    return proxy::get_nbi_warp(*peer, lane, offset, num_bytes);
}

uint32_t sy_proxy_test_add(const sy_proxy_peer* peer, uint32_t lane, uint64_t offset,
                           uint64_t value) {
    return proxy::amo_nonfetch_add(*peer, lane, offset, value);
}

uint32_t sy_proxy_test_signal(const sy_proxy_peer* peer, uint32_t lane, uint64_t offset,
                              uint64_t value) {
    return proxy::signal(*peer, lane, offset, value);
}

uint32_t sy_proxy_test_quiet(const sy_proxy_peer* peer, uint32_t lane) {
    return proxy::quiet(*peer, lane);
}

uint32_t sy_proxy_test_is_quiet(const sy_proxy_peer* peer, uint32_t lane) {
    return proxy::is_quiet(*peer, lane);
}

const char* sy_proxy_test_check(const sy_proxy_lane* lane) { return sy_proxy_check_lane(lane); }

const char* sy_proxy_test_check_peer(const sy_proxy_peer* peer) {
    return sy_proxy_check_peer(peer);
}

// Sizes and offsets of the layout, in the order that the test knows.
void sy_proxy_test_layout(uint64_t* out) {
    const uint64_t values[] = {
        sizeof(sy_proxy_command),
        sizeof(sy_proxy_lane_words),
        offsetof(sy_proxy_lane_words, error),
        sizeof(sy_proxy_lane_state),
        offsetof(sy_proxy_lane_state, seen),
        offsetof(sy_proxy_lane_state, error),
        offsetof(sy_proxy_lane_state, asked),
        sizeof(sy_proxy_lane),
        offsetof(sy_proxy_lane, words),
        offsetof(sy_proxy_lane, depth_shift),
        offsetof(sy_proxy_lane, budget),
        sizeof(sy_proxy_peer),
        offsetof(sy_proxy_peer, slot_bytes),
        offsetof(sy_proxy_peer, abort_mask),
        offsetof(sy_proxy_peer, timeout_ns),
        offsetof(sy_proxy_peer, num_lanes),
        offsetof(sy_proxy_peer, peer),
        SY_PROXY_VERSION,
        SY_PROXY_MIN_DEPTH,
        SY_PROXY_MAX_DEPTH,
        SY_PROXY_MAX_LANES,
        SY_PROXY_MAX_SOURCES,
        SY_PROXY_MAX_WINDOWS,
        SY_PROXY_MAX_BYTES,
        SY_PROXY_MAX_SLOT_BYTES,
        offsetof(sy_proxy_peer, window),
        offsetof(sy_proxy_peer, version),
    };
    for (uint64_t i = 0; i < sizeof(values) / sizeof(values[0]); ++i)
        out[i] = values[i];
}
}
