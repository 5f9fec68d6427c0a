// combine by few blocks, which have many tokens each: the shares of a token's first parts are
// loaded as soon as those of the token before are added up, so that they are under way while holes
// and the sum are stored.
#pragma once

#include <cstdint>

#include "switchyard/device_abi.h"
#include "switchyard/impls/combine_parts.cuh"
#include "switchyard/impls/combine_token.cuh"
#include "switchyard/impls/rows.cuh"
#include "switchyard/layout/slot.cuh"

namespace switchyard::impls {

// A block's loop over its tokens, with `kParts` parts of the next one under way. Routes are one per
// lane.
template <class Config, uint32_t kParts> struct FewTokens {
    // A token behind the one that is summed, and the shares of its first parts.
    struct Ahead {
        uint32_t routes;
        Shares<Config, kParts> shares;
    };
    static_assert(Config::kHidden != 0, "a pass is a row");

    const sy_combine_params& params;
    CombineShared& shared;
    const uint32_t num_tokens;
    uint32_t lost; // servers that this warp does without
    uint32_t token_idx; // the next one to sum
    uint32_t routes; // of the first token without loaded parts

    __device__ __forceinline__ uint32_t routes_of_token(uint32_t idx) const {
        const uint32_t top_k = params.geometry.top_k, lane_idx = threadIdx.x & 31;
        return lane_idx < top_k && idx < num_tokens
                   ? layout::routes_of(params.handle)[uint64_t{idx} * top_k + lane_idx]
                   : SY_NO_ROUTE;
    }

    // Loads the arrived parts of a token, and requests the routes of the one behind it.
    __device__ __forceinline__ void load(Ahead& ahead, uint32_t following_idx) {
        ahead.routes = routes;
        ahead.shares.load(params, shared, routes, 0, {threadIdx.x, true}, 0);
        routes = routes_of_token(following_idx);
    }

    // Sums the next token, which `ahead` is of, and loads the one behind it. False when there is none.
    __device__ __forceinline__ bool sum_next(Ahead& ahead) {
        if (token_idx >= num_tokens)
            return false;
        const RowPlace place{threadIdx.x, true};
        const uint32_t mine = ahead.routes;
        const uint32_t num_parts = __popc(__ballot_sync(kFullWarp, mine != SY_NO_ROUTE));
        if (threadIdx.x == 0 && params.token_missing != nullptr)
            params.token_missing[token_idx] = 0;
        const uint64_t out = reinterpret_cast<uint64_t>(params.out) +
                             (uint64_t{token_idx} * (Config::kHidden / 8) + threadIdx.x) * 16;
        float sum[Config::kChunks][8];
        begin_sum<Config, Pass::kSum>(out, place, sum);
        // Parts from a server that was given up meanwhile count as lost.
        bool is_done = lost == 0 && take_parts<Config, Pass::kSum>(params, shared, mine, 0, place,
                                                                   ahead.shares, sum);
        const Shares<Config, kParts> taken = ahead.shares; // addresses; the rest is not used
        load(ahead, token_idx + 2 * gridDim.x);
        if (is_done && num_parts > kParts)
            is_done = take_rest<Config, Pass::kSum>(params, shared, mine, num_parts, kParts, place,
                                                    0, sum);
        if (is_done) {
            taken.clear(shared, mine, 0);
            clear_parts<Config>(params, shared, mine, num_parts, kParts, place, 0);
        } else
            lost = sum_token<Config, Pass::kSum>(params, shared, mine, num_parts, place, token_idx,
                                                 lost, out, sum);
        store_sum<Config>(out, place, sum);
        token_idx += gridDim.x;
        return true;
    }

    __device__ __forceinline__ void sum_all() {
        Ahead ahead;
        load(ahead, token_idx + gridDim.x);
        while (sum_next(ahead)) {
        }
    }
};

// Sums a block's tokens; `routes` are those of its first one.
// NOTES: with two tokens ahead of two servers, 128 tokens of 24 blocks take 0.9 us of 17 longer
// from one to one. A likely reason: data requested that early has not arrived yet, and is requested
// again.
template <class Config>
__device__ __forceinline__ void sum_few(const sy_combine_params& params, CombineShared& shared,
                                        uint32_t num_tokens, uint32_t routes) {
    const uint32_t first_routes = blockIdx.x < num_tokens ? routes : SY_NO_ROUTE;
    if (params.num_servers <= kPartsTogether)
        FewTokens<Config, kPartsTogether>{params,     shared,      num_tokens, shared.lost_before,
                                          blockIdx.x, first_routes}
            .sum_all();
    else
        FewTokens<Config, kMostParts>{params,     shared,      num_tokens, shared.lost_before,
                                      blockIdx.x, first_routes}
            .sum_all();
}

} // namespace switchyard::impls
