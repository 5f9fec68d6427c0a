// The cases of each set that moe_bench measures, and the start of a case's kernels.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <string>
#include <vector>

#include "rank.hpp"

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

// Choices where a case requests nothing (blocks also where it requests only a start): the fastest
// on four H200s.

int pdl_of(const Case& test) {
    if (test.pdl >= 0)
        return test.pdl;
    // With lists, 4,096 tokens gain 1 to 3 % where each kernel starts after the one before; with 1,024 it hardly
    // matters.
    if (!test.topology.is_colocated())
        return has_lists(test) && test.num_tokens >= 1024 ? 0 : 2;
    return !has_lists(test) && test.num_tokens > 256 && test.num_tokens <= 2048 ? 3 : 4;
}

// One block per multiprocessor, which leaves room for one of another kernel. On split shapes two of the same kernel are
// slower than one.
constexpr uint32_t kBlocksBeside = 132;

uint32_t blocks_of(const Case& test, uint32_t asked) {
    const bool is_beside = pdl_of(test) >= 3 || (test.pdl < 0 && !test.topology.is_colocated());
    return asked == 0 && is_beside && test.num_tokens > 128 ? kBlocksBeside : asked;
}

bool asks_nothing(const Case& test) {
    return test.pdl < 0 && (test.dispatch_blocks | test.answer_blocks | test.combine_blocks) == 0;
}

// Blocks that answer are few enough for combine's to find room beside them.
uint32_t answer_blocks_of(const Case& test) {
    constexpr uint32_t kAnswersBeside = 64;
    const bool is_some = test.num_tokens > 48 && test.num_tokens <= 128;
    if (asks_nothing(test) && test.topology.is_colocated() && !has_lists(test) && is_some)
        return kAnswersBeside;
    return blocks_of(test, test.answer_blocks);
}

// Tokens that a block of dispatch sends one after the other, 0 where the launcher chooses. Header and entries of a
// frame leave by one block, which has its share of the link only: with fewer blocks beside it a server that makes lists
// begins sooner.
uint32_t tokens_per_block(const Case& test) {
    struct Runs {
        uint32_t num_clients, num_servers;
        bool is_colocated;
        uint32_t of[6];
    };
    static constexpr uint32_t kFrom[] = {24, 48, 96, 160, 224, 384};
    static constexpr Runs kRuns[] = {
        {4, 4, true, {0, 6, 9, 14, 14, 14}},   {2, 2, true, {0, 0, 4, 8, 10, 14}},
        {2, 2, false, {0, 6, 8, 12, 14, 14}},  {1, 3, false, {4, 6, 10, 14, 8, 8}},
        {3, 1, false, {4, 8, 12, 14, 14, 14}}, {1, 1, false, {0, 0, 8, 8, 10, 14}},
    };
    if (!has_lists(test) || test.num_tokens < kFrom[0] || test.num_tokens >= 1024)
        return 0;
    const uint32_t place =
        std::upper_bound(std::begin(kFrom), std::end(kFrom), test.num_tokens) - kFrom - 1;
    for (const Runs& runs : kRuns)
        if (runs.num_clients == test.topology.clients.size() &&
            runs.num_servers == test.topology.servers.size() &&
            runs.is_colocated == test.topology.is_colocated())
            return runs.of[place];
    return 0;
}

uint32_t dispatch_blocks_of(const Case& test) {
    const uint32_t run = asks_nothing(test) ? tokens_per_block(test) : 0;
    return run == 0 ? test.dispatch_blocks : (test.num_tokens + run - 1) / run;
}

uint32_t pdl_flags(const Case& test) {
    const int pdl = pdl_of(test);
    return pdl == 0 ? 0 : pdl == 1 ? SY_LAUNCH_FLAG_PDL : SY_LAUNCH_FLAG_PDL | SY_LAUNCH_FLAG_EARLY;
}

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
