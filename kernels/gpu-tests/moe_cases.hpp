// What moe_bench measures: the cases of each set, and how a case's kernels are started.
#pragma once

#include <algorithm>
#include <cstdint>
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
    // 0, 1 = PDL, 2 = PDL with early start, 3 = also combine beside the server's kernel before it, 4 = also the
    // server's first kernel beside dispatch, -1 = by size
    int pdl;
    uint32_t dispatch_blocks, answer_blocks, combine_blocks;
    uint32_t num_replays;
    uint32_t num_sms; // 0 = all
};

bool has_lists(const Case& test) { return std::string(test.server) == "lists"; }

// Two ranks with about this many tokens: few blocks of each kernel beside one another are faster than many in turn.
// What more ranks gain was not measured.
bool has_few_beside(const Case& test) {
    const bool is_asked = (test.dispatch_blocks | test.answer_blocks | test.combine_blocks) != 0;
    return test.pdl < 0 && !is_asked && test.topology.is_colocated() &&
           test.topology.servers.size() == 2 && !has_lists(test) && test.num_tokens > 96 &&
           test.num_tokens <= 128;
}

int pdl_of(const Case& test) {
    if (test.pdl >= 0)
        return test.pdl;
    // Of lists 4,096 tokens gain 1 to 3 %, with 1,024 it hardly matters.
    if (!test.topology.is_colocated())
        return has_lists(test) && test.num_tokens >= 1024 ? 0 : 2;
    const bool is_many = test.topology.servers.size() > 2;
    // A server's first kernel beside dispatch gains where dispatch takes long, and takes its multiprocessors.
    if (has_lists(test))
        return test.num_tokens >= (is_many ? 512 : 1024) ? 4 : 3;
    if (test.num_tokens > 2048)
        return 4;
    if (is_many)
        return test.num_tokens >= 64 ? 3 : 2;
    return test.num_tokens > 128 || test.num_tokens == 1 || has_few_beside(test) ? 3 : 2;
}

// One block per multiprocessor, which leaves room for one of another kernel. On split shapes two of the same kernel are
// slower than one.
constexpr uint32_t kBlocksBeside = 132, kFewBeside = 32;

uint32_t blocks_of(const Case& test, uint32_t asked) {
    if (has_few_beside(test))
        return kFewBeside;
    const bool is_beside = pdl_of(test) >= 3 || (test.pdl < 0 && !test.topology.is_colocated());
    return asked == 0 && is_beside && test.num_tokens > 128 ? kBlocksBeside : asked;
}

uint32_t dispatch_blocks_of(const Case& test) {
    // Rows that come one after the other are looked at as they come.
    const bool is_one_to_one = test.topology.clients.size() * test.topology.servers.size() == 1;
    if (test.dispatch_blocks == 0 && !test.topology.is_colocated() && has_lists(test) &&
        test.num_tokens > 96 && test.num_tokens <= (is_one_to_one ? 256 : 128))
        return (test.num_tokens + 7) / 8;
    return has_few_beside(test) ? blocks_of(test, test.dispatch_blocks) : test.dispatch_blocks;
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
        } else if (set == "lists") {
            for (const uint32_t tokens : {1u, 8u, 32u, 128u}) {
                add(topology, tokens, true, false, "echo", -1);
                add(topology, tokens, true, false, "lists", -1);
                if (topology.is_colocated())
                    add(topology, tokens, true, false, "lists", 4);
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
                for (const uint32_t blocks : {16u, 22u, 26u, 32u, 43u, 64u, 96u, 128u}) {
                    add(topology, 128, true, false, server, -1, blocks, 0, 0);
                    add(topology, 128, true, false, server, -1, 0, blocks, 0);
                    add(topology, 128, true, false, server, -1, 0, 0, blocks);
                }
                for (const uint32_t tokens : {1024u, 4096u})
                    for (const int pdl : starts)
                        for (const uint32_t blocks : {0u, 64u, 96u, 132u, 264u})
                            add(topology, tokens, true, false, server, pdl, blocks, blocks, blocks);
            }
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
                // dispatch has one block more. Of the kernel for few blocks, at most 64, one fits a multiprocessor.
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
