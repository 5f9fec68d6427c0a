// One token of combine: its parts waited for, summed, and made holes again.
#pragma once

#include <cstdint>

#include "switchyard/device_abi.h"
#include "switchyard/impls/combine_parts.cuh"
#include "switchyard/impls/rows.cuh"
#include "switchyard/ptx/memory.cuh"

namespace switchyard::impls {

// A warp's work on its tokens.
enum class Pass {
    kSum, // waits for each and sums it
    kAwait, // waits only, and records missing parts
    kAdd, // adds the findings of kAwait in all warps to the existing ones
};

// Parts of a token whose loads are under way together: most tokens have no more between two ranks.
constexpr uint32_t kPartsTogether = 2;
// The same of tokens that have more than that.
constexpr uint32_t kMostParts = 4;
static_assert(SY_MAX_DEVICE_TOP_K + kMostParts - 1 <= 32, "there is a lane for each place");

// Adds shares of parts from place `first` on that are loaded. False when one does not come for a while.
template <class Config, Pass kPass, class SomeShares>
__device__ __forceinline__ bool take_parts(const sy_combine_params& params,
                                           const CombineShared& shared, uint32_t routes,
                                           uint32_t first, const RowPlace& place,
                                           SomeShares& shares, float (&sum)[Config::kChunks][8]) {
    if (kPass != Pass::kAdd && !shares.poll(params, shared, routes, first, place))
        return false;
    if constexpr (kPass != Pass::kAwait)
        shares.add_to(sum);
    return true;
}

// The same, and they are holes again then.
template <class Config, Pass kPass, uint32_t kParts>
__device__ __forceinline__ bool
take_all_parts(const sy_combine_params& params, const CombineShared& shared, uint32_t routes,
               const RowPlace& place, Shares<Config, kParts>& shares,
               float (&sum)[Config::kChunks][8]) {
    if (kPass != Pass::kAdd && !shares.poll(params, shared, routes, 0, place))
        return false;
    if constexpr (kPass != Pass::kAwait) {
        shares.clear(shared, routes, 0);
        shares.add_to(sum);
    }
    return true;
}

// take_parts for all that a token has from place `first` on.
template <class Config, Pass kPass>
__device__ __forceinline__ bool take_rest(const sy_combine_params& params,
                                          const CombineShared& shared, uint32_t routes,
                                          uint32_t num_parts, uint32_t first, const RowPlace& place,
                                          uint32_t lost, float (&sum)[Config::kChunks][8]) {
    for (; first < num_parts; first += kMostParts) {
        Shares<Config, kMostParts, false> shares;
        shares.load(params, shared, routes, first, place, lost);
        if (!take_parts<Config, kPass>(params, shared, routes, first, place, shares, sum))
            return false;
    }
    return true;
}

// Leaves holes where a token's parts from place `first` on were.
template <class Config>
__device__ __forceinline__ void
clear_parts(const sy_combine_params& params, const CombineShared& shared, uint32_t routes,
            uint32_t num_parts, uint32_t first, const RowPlace& place, uint32_t lost) {
    for (uint32_t i = first; i < num_parts; ++i) {
        const uint32_t route = __shfl_sync(kFullWarp, routes, static_cast<int>(i));
        const uint32_t server = server_of(route);
        if ((lost >> server & 1) == 0 && tells_by_rows<Config>(shared, server) && place.is_inside)
            store_holes<Config>(place.address(params, shared, route));
    }
}

// Adds all parts of a token. False when one does not come for a while; none has become holes then.
// NOTES: when rows come fast, a multiprocessor is busy with these instructions, so there are as many of them as
// a token has parts.
template <class Config, Pass kPass>
__device__ __forceinline__ bool take_token(const sy_combine_params& params,
                                           const CombineShared& shared, uint32_t routes,
                                           uint32_t num_parts, const RowPlace& place, uint32_t lost,
                                           float (&sum)[Config::kChunks][8]) {
    if (num_parts == 1) {
        Shares<Config, 1> shares;
        shares.load(params, shared, routes, 0, place, lost);
        return take_all_parts<Config, kPass>(params, shared, routes, place, shares, sum);
    }
    if (num_parts == kPartsTogether) {
        Shares<Config, kPartsTogether> shares;
        shares.load(params, shared, routes, 0, place, lost);
        return take_all_parts<Config, kPass>(params, shared, routes, place, shares, sum);
    }
    if (!take_rest<Config, kPass>(params, shared, routes, num_parts, 0, place, lost, sum))
        return false;
    if constexpr (kPass != Pass::kAwait)
        clear_parts<Config>(params, shared, routes, num_parts, 0, place, lost);
    return true;
}

// Initial value of a sum.
template <class Config, Pass kPass>
__device__ __forceinline__ void begin_sum(uint64_t out, const RowPlace& place,
                                          float (&sum)[Config::kChunks][8]) {
#pragma unroll
    for (uint32_t j = 0; j < Config::kChunks; ++j) {
#pragma unroll
        for (uint32_t k = 0; k < 8; ++k)
            sum[j][k] = 0.0f;
        if (kPass == Pass::kAdd && place.is_inside)
            add_chunk<false>(sum[j], ptx::ld_weak_global_v4(out + j * kChunkStride<Config>));
    }
}

template <class Config>
__device__ __forceinline__ void store_sum(uint64_t out, const RowPlace& place,
                                          const float (&sum)[Config::kChunks][8]) {
    if (place.is_inside)
#pragma unroll
        for (uint32_t j = 0; j < Config::kChunks; ++j)
            ptx::st_weak_global_v4(out + j * kChunkStride<Config>, round_chunk(sum[j]));
}

// Sums a token into `sum`, and waits for missing parts. Returns the servers that this warp
// excludes.
template <class Config, Pass kPass>
__device__ __forceinline__ uint32_t sum_token(const sy_combine_params& params,
                                              CombineShared& shared, uint32_t routes,
                                              uint32_t num_parts, const RowPlace& place,
                                              uint32_t token_idx, uint32_t lost, uint64_t out,
                                              float (&sum)[Config::kChunks][8]) {
    begin_sum<Config, kPass>(out, place, sum);
    while (!take_token<Config, kPass>(params, shared, routes, num_parts, place, lost, sum)) {
        lost = await_parts<Config>(params, shared, routes, place, token_idx, lost);
        begin_sum<Config, kPass>(out, place, sum);
    }
    return lost;
}

} // namespace switchyard::impls
