// The same mathematics in plain C++ on the host, written apart from the kernels: inputs, routing,
// quantisation by search in the table of codes, and the sums in the order that the kernels promise.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

#include "switchyard/device_abi.h"

namespace reference {

class Random {
  public:
    explicit Random(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15ull + 0x1234567) {}
    uint64_t next() {
        // splitmix64
        uint64_t z = state_ += 0x9e3779b97f4a7c15ull;
        z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
        z = (z ^ z >> 27) * 0x94d049bb133111ebull;
        return z ^ z >> 31;
    }
    uint32_t below(uint32_t limit) { return static_cast<uint32_t>(next() % limit); }
    float unit() { return static_cast<float>(next() >> 40) * (1.0f / 16777216.0f); }

  private:
    uint64_t state_;
};

inline float from_bf16(uint16_t bits) {
    const uint32_t wide = uint32_t{bits} << 16;
    float value;
    memcpy(&value, &wide, sizeof(value));
    return value;
}

inline uint16_t to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof(bits));
    if ((bits & 0x7fffffffu) > 0x7f800000u)
        return 0x7fff;
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline float from_e4m3(uint8_t code) {
    const int exponent = code >> 3 & 15, mantissa = code & 7;
    float value = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -9)
                                : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
    if ((code & 0x7f) == 0x7f)
        value = NAN;
    return (code & 0x80) != 0 ? -value : value;
}

// Nearest code, ties to the even one; saturates; NaN and infinity become NaN.
inline uint8_t to_e4m3(float value) {
    static const std::vector<float> table = [] {
        std::vector<float> values;
        for (int code = 0; code < 0x7f; ++code)
            values.push_back(from_e4m3(static_cast<uint8_t>(code)));
        return values;
    }();
    if (!std::isfinite(value))
        return 0x7f;
    const float magnitude = std::fabs(value);
    const uint8_t sign = std::signbit(value) ? 0x80 : 0;
    if (magnitude >= table.back())
        return sign | 0x7e;
    const size_t above = std::upper_bound(table.begin(), table.end(), magnitude) - table.begin();
    const size_t below = above - 1;
    // Both gaps are exact in double.
    const double to_below = double{magnitude} - table[below],
                 to_above = double{table[above]} - magnitude;
    const size_t code =
        to_below < to_above || (to_below == to_above && below % 2 == 0) ? below : above;
    return sign | static_cast<uint8_t>(code);
}

struct Shape {
    uint32_t num_tokens, hidden, top_k, num_experts;
};

struct Input {
    Shape shape;
    std::vector<uint16_t> hidden_states;
    std::vector<int32_t> topk_idx;
    std::vector<float> topk_weights;
};

inline void parallel(uint32_t count, const std::function<void(uint32_t)>& body) {
    const uint32_t num_threads =
        std::clamp(std::thread::hardware_concurrency() / 4, 1u, std::max(1u, std::min(count, 16u)));
    std::vector<std::thread> threads;
    for (uint32_t i = 0; i < num_threads; ++i)
        threads.emplace_back([=, &body] {
            for (uint32_t item = i; item < count; item += num_threads)
                body(item);
        });
    for (auto& thread : threads)
        thread.join();
}

// `zipf`: expert popularity falls as 1 / rank. `masked`: about one choice in 16 is -1.
inline Input make_input(const Shape& shape, uint64_t seed, bool zipf, bool masked) {
    Input input;
    input.shape = shape;
    input.hidden_states.resize(size_t{shape.num_tokens} * shape.hidden);
    input.topk_idx.resize(size_t{shape.num_tokens} * shape.top_k);
    input.topk_weights.resize(size_t{shape.num_tokens} * shape.top_k);
    std::vector<float> upto(shape.num_experts);
    float total = 0;
    for (uint32_t i = 0; i < shape.num_experts; ++i)
        upto[i] = total += zipf ? 1.0f / static_cast<float>(i + 1) : 1.0f;
    // Popular experts lie scattered, not all on the first server.
    std::vector<uint32_t> order(shape.num_experts);
    for (uint32_t i = 0; i < shape.num_experts; ++i)
        order[i] = i;
    Random shuffle(17);
    for (uint32_t i = shape.num_experts; i-- > 1;)
        std::swap(order[i], order[shuffle.below(i + 1)]);
    parallel(shape.num_tokens, [&](uint32_t token) {
        Random random(seed << 24 ^ token);
        float sum = 0;
        for (uint32_t i = 0; i < shape.top_k; ++i) {
            int32_t expert;
            bool is_new;
            do {
                const float at = random.unit() * total;
                const size_t rank =
                    std::min<size_t>(std::upper_bound(upto.begin(), upto.end(), at) - upto.begin(),
                                     shape.num_experts - 1);
                expert = static_cast<int32_t>(order[rank]);
                is_new = true;
                for (uint32_t j = 0; j < i; ++j)
                    is_new &= input.topk_idx[token * shape.top_k + j] != expert;
            } while (!is_new);
            input.topk_idx[token * shape.top_k + i] = expert;
            sum += input.topk_weights[token * shape.top_k + i] = 0.05f + random.unit();
        }
        for (uint32_t i = 0; i < shape.top_k; ++i) {
            input.topk_weights[token * shape.top_k + i] /= sum;
            if (masked && random.below(16) == 0)
                input.topk_idx[token * shape.top_k + i] = -1;
        }
        const float magnitude = 0.1f + 10.0f * random.unit();
        for (uint32_t i = 0; i < shape.hidden; i += 2) {
            const uint64_t bits = random.next();
            for (uint32_t k = 0; k < 2; ++k) {
                const float low = static_cast<float>(bits >> (32 * k) & 0xffff),
                            high = static_cast<float>(bits >> (32 * k + 16) & 0xffff);
                input.hidden_states[size_t{token} * shape.hidden + i + k] =
                    to_bf16(((low + high) / 65536.0f - 1.0f) * magnitude);
            }
        }
        // Some blocks of zeros: their scale is 1.
        if (masked && token % 5 == 0)
            std::fill_n(input.hidden_states.begin() + size_t{token} * shape.hidden, 128,
                        uint16_t{0});
    });
    return input;
}

// Experts dealt to servers in runs; every `replicate_every`-th also to the next server.
inline sy_placement make_placement(uint32_t num_experts, uint32_t num_servers,
                                   uint32_t replicate_every, uint64_t epoch) {
    sy_placement placement = {};
    placement.epoch = epoch;
    placement.num_experts = num_experts;
    for (uint32_t expert = 0; expert < num_experts; ++expert) {
        sy_replica_set& set = placement.experts[expert];
        set.server[set.num_replicas++] = static_cast<uint8_t>(expert * num_servers / num_experts);
        if (replicate_every != 0 && expert % replicate_every == 0 && num_servers > 1)
            set.server[set.num_replicas++] =
                static_cast<uint8_t>((expert * num_servers / num_experts + 1) % num_servers);
    }
    return placement;
}

// Server of a (token, expert) pair; -1 when masked or without replica.
inline int pick_server(const sy_placement& placement, uint32_t token, int32_t expert) {
    if (expert < 0 || static_cast<uint32_t>(expert) >= placement.num_experts)
        return -1;
    const sy_replica_set& set = placement.experts[expert];
    if (set.num_replicas == 0)
        return -1;
    return set.server[(token * 37 + static_cast<uint32_t>(expert)) % 256 * set.num_replicas / 256];
}

// A token as the server sees it.
inline std::vector<float> on_the_wire(const Input& input, uint32_t token, bool fp8) {
    const uint32_t hidden = input.shape.hidden;
    std::vector<float> row(hidden);
    for (uint32_t block = 0; block < hidden; block += 128) {
        const uint16_t* source = &input.hidden_states[size_t{token} * hidden + block];
        float largest = 0;
        for (int i = 0; i < 128; ++i)
            if (const float value = std::fabs(from_bf16(source[i])); std::isfinite(value))
                largest = std::max(largest, value);
        const float scale = largest == 0 ? 1.0f : std::max(largest / 448.0f, 1.17549435e-38f);
        const float inverse = 1.0f / scale;
        for (int i = 0; i < 128; ++i) {
            const float value = from_bf16(source[i]);
            row[block + i] = fp8 ? from_e4m3(to_e4m3(value * inverse)) * scale : value;
        }
    }
    return row;
}

// Result of combine when every expert is the identity: bf16 [num_tokens, hidden].
inline std::vector<uint16_t> identity_layer(const Input& input, const sy_placement& placement,
                                            uint32_t num_servers, bool fp8) {
    const Shape& shape = input.shape;
    std::vector<uint16_t> out(size_t{shape.num_tokens} * shape.hidden);
    parallel(shape.num_tokens, [&](uint32_t token) {
        const std::vector<float> row = on_the_wire(input, token, fp8);
        std::vector<float> weight(num_servers, 0.0f);
        std::vector<bool> serves(num_servers, false);
        for (uint32_t i = 0; i < shape.top_k; ++i) {
            const int server =
                pick_server(placement, token, input.topk_idx[token * shape.top_k + i]);
            if (server >= 0) {
                weight[server] += input.topk_weights[token * shape.top_k + i];
                serves[server] = true;
            }
        }
        for (uint32_t i = 0; i < shape.hidden; ++i) {
            float sum = 0;
            for (uint32_t server = 0; server < num_servers; ++server)
                if (serves[server])
                    sum += from_bf16(to_bf16(row[i] * weight[server]));
            out[size_t{token} * shape.hidden + i] = to_bf16(sum);
        }
    });
    return out;
}

// Rows that go to each server, and of those the ones that leave the client's GPU are the caller's to say.
inline std::vector<uint32_t> rows_per_server(const Input& input, const sy_placement& placement,
                                             uint32_t num_servers) {
    std::vector<uint32_t> rows(num_servers, 0);
    for (uint32_t token = 0; token < input.shape.num_tokens; ++token) {
        uint32_t mask = 0;
        for (uint32_t i = 0; i < input.shape.top_k; ++i)
            if (const int server =
                    pick_server(placement, token, input.topk_idx[token * input.shape.top_k + i]);
                server >= 0)
                mask |= 1u << server;
        for (uint32_t server = 0; server < num_servers; ++server)
            rows[server] += mask >> server & 1;
    }
    return rows;
}

} // namespace reference
