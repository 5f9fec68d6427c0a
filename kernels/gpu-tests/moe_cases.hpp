// The cases of each set that moe_bench measures, and the starts of their kernels.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "rank.hpp"
#include "switchyard/starts.h"

namespace {

struct Case {
    Topology topology;
    uint32_t num_tokens;
    bool fp8, zipf;
    // "echo": one kernel at the server; "lists": expert_recv, then expert_send.
    const char* server;
    // 0, 1 = PDL, 2 = PDL with early start, 3 = also combine beside the server's kernel before it,
    // 4 = also the server's first kernel beside dispatch, -1 = by size
    int pdl;
    uint32_t dispatch_blocks, answer_blocks, combine_blocks;
    uint32_t num_replays;
    uint32_t num_sms; // 0 = all
};

bool has_lists(const Case& test) { return std::string(test.server) == "lists"; }

// Where a case requests nothing, the table that services use, too, chooses.

sy_starts chosen(const Case& test) {
    return sy_starts_for({test.num_tokens, static_cast<uint32_t>(test.topology.clients.size()),
                          static_cast<uint32_t>(test.topology.servers.size()),
                          test.topology.is_colocated(), has_lists(test)});
}

int pdl_of(const Case& test) {
    return test.pdl >= 0 ? test.pdl : static_cast<int>(chosen(test).start);
}

bool asks_for_blocks(const Case& test) {
    return (test.dispatch_blocks | test.answer_blocks | test.combine_blocks) != 0;
}

// Of the requested start, where a case requests one: kernels beside one another leave each other
// room.
uint32_t blocks_of(const Case& test, uint32_t asked) {
    const bool is_beside = pdl_of(test) >= SY_START_COMBINE_AHEAD ||
                           (test.pdl < 0 && !test.topology.is_colocated());
    return asked == 0 && is_beside && test.num_tokens > 128 ? SY_BLOCKS_BESIDE : asked;
}

uint32_t dispatch_blocks_of(const Case& test) {
    return test.pdl < 0 && !asks_for_blocks(test) ? chosen(test).dispatch_blocks
                                                  : test.dispatch_blocks;
}

uint32_t answer_blocks_of(const Case& test) {
    return test.pdl < 0 && !asks_for_blocks(test) ? chosen(test).answer_blocks
                                                  : blocks_of(test, test.answer_blocks);
}

uint32_t combine_blocks_of(const Case& test) {
    return test.pdl < 0 && !asks_for_blocks(test) ? chosen(test).combine_blocks
                                                  : blocks_of(test, test.combine_blocks);
}

uint32_t pdl_flags(const Case& test) { return sy_flags_of_start(pdl_of(test)); }

std::vector<Case> cases_of(const std::string& set, const std::string& shape, uint32_t num_ranks) {
    std::vector<Case> cases;
    const auto add = [&](const Topology& topology, uint32_t tokens, bool fp8, bool zipf,
                         const char* server, int pdl, uint32_t dispatch_blocks = 0,
                         uint32_t answer_blocks = 0, uint32_t combine_blocks = 0,
                         uint32_t num_sms = 0) {
        cases.push_back({topology, tokens, fp8, zipf, server, pdl, dispatch_blocks, answer_blocks,
                         combine_blocks, tokens > 512 ? 70u : 200u, num_sms});
    };
    for (const Topology& topology : topologies(num_ranks)) {
        if (!shape.empty() && shape != topology.name)
            continue;
        const size_t first = cases.size();
        if (set == "check") {
            for (const uint32_t tokens : {1u, 8u, 33u, 128u, 300u})
                for (const bool fp8 : {true, false})
                    for (const char* server : {"echo", "lists"})
                        add(topology, tokens, fp8, tokens == 33, server, -1);
            // By the kernel for few blocks.
            for (const char* server : {"echo", "lists"})
                add(topology, 128, true, false, server, -1, 24, 24, 24);
        } else if (set == "table") {
            // Cases of the same input after one another.
            for (const uint32_t tokens : {1u, 8u, 32u, 64u, 128u, 256u, 1024u, 4096u})
                for (const bool zipf : {false, true})
                    for (const bool fp8 : {true, false})
                        for (const char* server : {"echo", "lists"})
                            add(topology, tokens, fp8, zipf, server, -1);
        } else if (set == "sizes") {
            // No size may be slower than the next larger one.
            for (const uint32_t tokens :
                 {1u, 2u, 4u, 8u, 16u, 32u, 48u, 64u, 96u, 128u, 192u, 256u})
                for (const char* server : {"echo", "lists"})
                    add(topology, tokens, true, false, server, -1);
        } else if (set == "least") {
            // Starts and blocks of the smallest sizes.
            for (const uint32_t tokens : {1u, 2u, 4u, 8u})
                for (const int pdl : {-1, 0, 2, 3, 4})
                    for (const uint32_t blocks : {0u, 1u, 2u, 4u})
                        if (pdl < 3 || topology.is_colocated())
                            add(topology, tokens, true, false, "lists", pdl, blocks, blocks,
                                blocks);
        } else if (set == "lists") {
            for (const uint32_t tokens : {1u, 8u, 32u, 128u}) {
                add(topology, tokens, true, false, "echo", -1);
                add(topology, tokens, true, false, "lists", -1);
                if (topology.is_colocated())
                    add(topology, tokens, true, false, "lists", 3);
            }
        } else if (set == "short") {
            for (const uint32_t tokens : {1u, 8u, 32u, 128u, 256u, 1024u, 4096u}) {
                add(topology, tokens, true, false, "echo", -1);
                if (tokens < 4096)
                    add(topology, tokens, true, false, "lists", -1);
            }
            for (const uint32_t tokens : {128u, 256u, 1024u})
                add(topology, tokens, true, false, "echo", -1, 24, 24, 24);
        } else if (set == "tune") {
            // Starts beyond the second one are of GPUs that have both sides.
            const std::vector<int> starts =
                topology.is_colocated() ? std::vector<int>{0, 2, 3, 4} : std::vector<int>{0, 2};
            for (const char* server : {"echo", "lists"}) {
                for (const uint32_t tokens : {1u, 8u, 32u, 64u, 96u, 128u, 192u, 256u, 512u})
                    for (const int pdl : starts)
                        for (const uint32_t blocks : {0u, 24u, 32u, 40u, 48u, 64u, 132u})
                            if (pdl >= 3 || pdl == starts.back() || blocks == 0 || blocks == 132)
                                add(topology, tokens, true, false, server, pdl, blocks, blocks,
                                    blocks);
                // One kernel at a time.
                for (const uint32_t tokens : {64u, 128u, 256u})
                    for (const uint32_t blocks : {16u, 22u, 26u, 32u, 43u, 64u, 96u, 128u}) {
                        add(topology, tokens, true, false, server, starts.back(), blocks, 0, 0);
                        add(topology, tokens, true, false, server, starts.back(), 0, blocks, 0);
                        add(topology, tokens, true, false, server, starts.back(), 0, 0, blocks);
                    }
                for (const uint32_t tokens : {1024u, 4096u})
                    for (const int pdl : starts)
                        for (const uint32_t blocks : {0u, 64u, 96u, 132u, 264u})
                            add(topology, tokens, true, false, server, pdl, blocks, blocks, blocks);
            }
            // Tokens that a block of dispatch sends, where servers make lists.
            for (const uint32_t tokens : {32u, 64u, 96u, 128u, 192u, 256u, 512u})
                for (const uint32_t run : {4u, 6u, 8u, 9u, 10u, 12u})
                    for (const uint32_t answers : {0u, 96u})
                        add(topology, tokens, true, false, "lists", starts.back(),
                            (tokens + run - 1) / run, answers, 0);
        } else if (set == "sms") {
            for (const uint32_t tokens : {128u, 1024u, 4096u})
                for (const uint32_t blocks : {8u, 16u, 24u, 32u, 48u, 64u, 96u, 132u})
                    add(topology, tokens, true, false, "echo", -1, blocks, blocks, blocks);
        } else if (set == "few") {
            for (const uint32_t tokens : {128u, 1024u, 4096u})
                for (const uint32_t blocks : {0u, 24u})
                    for (const char* server : {"echo", "lists"})
                        add(topology, tokens, true, false, server, -1, blocks, blocks, blocks);
        } else if (set == "partition") {
            for (const uint32_t tokens : {128u, 1024u, 4096u}) {
                add(topology, tokens, true, false, "echo", -1);
                // dispatch has one block more. Of the kernel for few blocks, at most 64, one fits a
                // multiprocessor.
                for (const uint32_t num_sms : {16u, 24u, 32u, 48u, 64u, 96u, 128u})
                    for (const int pdl : {2, 3, 4})
                        for (const uint32_t blocks : {num_sms - 1, num_sms, 2 * num_sms})
                            if (pdl == 2 || topology.is_colocated())
                                add(topology, tokens, true, false, "echo", pdl, blocks, blocks,
                                    blocks, num_sms);
            }
        }
        // The host's work is that of a case's input, which is kept for the next one.
        std::stable_sort(cases.begin() + first, cases.end(),
                         [](const Case& a, const Case& b) { return a.num_tokens < b.num_tokens; });
    }
    return cases;
}

} // namespace
