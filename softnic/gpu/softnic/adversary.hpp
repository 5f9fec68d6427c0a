// A seeded source of disorder for the NICs of GPUs. It uses exactly the freedom that a reliable
// connection leaves.
//
// Every NIC keeps this order on one queue pair, whatever the random numbers are. Requests are
// executed one after the other. A write's bytes are in place before its completion and before any
// effect of a later request. The answers to reads and atomics are in place before their completion
// and before a later fenced request. Completions come in the order of their requests. Aligned words
// of 8 bytes are never torn. Nothing is ordered across queue pairs.
#pragma once

#include "softnic/model.hpp"

namespace softnic {

// Starts the disorder of a queue pair. `seed` 0 is none.
SOFTNIC_BOTH uint64_t start_random(uint64_t seed, uint32_t queue) {
    if (seed == 0)
        return 0;
    // splitmix64. Its output is 0 for one input in 2^64.
    uint64_t mixed = seed + (uint64_t{queue} + 1) * 0x9e3779b97f4a7c15u;
    mixed = (mixed ^ mixed >> 30) * 0xbf58476d1ce4e5b9u;
    mixed = (mixed ^ mixed >> 27) * 0x94d049bb133111ebu;
    mixed ^= mixed >> 31;
    return mixed == 0 ? 1 : mixed;
}

// A number below `end`, by xorshift64*.
SOFTNIC_BOTH uint32_t draw(uint64_t* random, uint32_t end) {
    uint64_t next = *random;
    next ^= next >> 12;
    next ^= next << 25;
    next ^= next >> 27;
    *random = next;
    return static_cast<uint32_t>(next * 0x2545f4914f6cdd1du >> 33) % end;
}

// A range cut into pieces of `step` bytes, the first up to a multiple of 8, in an order that is neither
// forwards nor backwards.
struct Cut {
    uint32_t step, head, num_pieces;
    uint32_t factor, start, mask; // piece `i * factor + start & mask`, where there is one
};

constexpr uint32_t kMostPieces = 16;

// Cuts the bytes that are to land at `to`. A single piece when the range is short.
SOFTNIC_BOTH Cut cut(uint64_t* random, uint64_t to, uint32_t num_bytes) {
    Cut pieces = {};
    pieces.head = static_cast<uint32_t>(-to & 7);
    const uint32_t wanted = 1 + draw(random, kMostPieces - 1);
    pieces.step = (num_bytes / wanted + 7) / 8 * 8;
    if (pieces.step == 0 || num_bytes <= pieces.head + pieces.step)
        return {num_bytes, 0, 1, 1, 0, 0};
    const uint32_t num_rest = num_bytes - pieces.head;
    pieces.num_pieces = (pieces.head != 0) + (num_rest + pieces.step - 1) / pieces.step;
    pieces.mask = 1;
    while (pieces.mask + 1 < pieces.num_pieces)
        pieces.mask = pieces.mask * 2 + 1;
    pieces.factor = 1 + 2 * draw(random, 8);
    pieces.start = draw(random, pieces.mask + 1);
    return pieces;
}

// First byte and bytes of the `i`-th piece to be served, `i` up to `mask`. No bytes: there is none.
SOFTNIC_BOTH uint32_t piece(const Cut& pieces, uint32_t num_bytes, uint32_t i, uint32_t* at) {
    const uint32_t index = (i * pieces.factor + pieces.start) & pieces.mask;
    *at = 0;
    if (index >= pieces.num_pieces)
        return 0;
    if (pieces.head == 0)
        *at = index * pieces.step;
    else if (index != 0)
        *at = pieces.head + (index - 1) * pieces.step;
    const uint32_t wanted = pieces.head != 0 && index == 0 ? pieces.head : pieces.step;
    return wanted < num_bytes - *at ? wanted : num_bytes - *at;
}

} // namespace softnic
