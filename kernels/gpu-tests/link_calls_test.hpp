// put_nbi_warp and get_nbi_warp over direct stores: random bytes to a poisoned slot on this GPU and
// back, at every alignment, by the kernel for direct stores alone and by the one for any path.
#pragma once

#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "check.hpp"
#include "switchyard/impls/link_calls.cuh"

namespace {

// Of `found`, bytes of `expected` at `offset` and poison before and behind them, up to `end`.
inline void expect_bytes(const std::vector<uint8_t>& found, uint64_t offset,
                         const std::vector<uint8_t>& expected, uint64_t end, uint8_t poison,
                         const char* what) {
    for (uint64_t i = 0; i < end; ++i) {
        const bool is_inside = i >= offset && i < offset + expected.size();
        const uint8_t byte = is_inside ? expected[i - offset] : poison;
        CHECK(found[i] == byte, "%s: byte %llu is %02x, expected %02x", what,
              static_cast<unsigned long long>(i), found[i], byte);
    }
}

inline void bytes_go_to_a_slot_and_back(uint64_t seed) {
    using namespace switchyard;
    constexpr uint64_t kSlotBytes = 1 << 18, kTail = 64, kMost = kSlotBytes - kTail - 16;
    std::mt19937_64 random(seed);
    uint8_t* slot = device_alloc<uint8_t>(kSlotBytes);
    uint8_t* source = device_alloc<uint8_t>(kSlotBytes);
    uint8_t* back = device_alloc<uint8_t>(kSlotBytes);
    uint32_t* good = device_alloc<uint32_t>(3);
    sy_error_word* error = device_alloc<sy_error_word>(1);
    cudaStream_t stream;
    CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    uint64_t sum = 0;
    std::vector<uint64_t> lengths = {0, 1, 15, 16, 17, 511, 512, 529, kMost};
    for (int i = 0; i < 16; ++i)
        lengths.push_back(random() % kMost);
    for (const uint64_t num_bytes : lengths)
        for (uint32_t round = 0; round < 4; ++round) {
            const uint64_t to = round < 2 ? 0 : random() % 16, from = round < 2 ? 0 : random() % 16;
            std::vector<uint8_t> bytes(num_bytes), found(kSlotBytes);
            for (uint8_t& byte : bytes)
                byte = static_cast<uint8_t>(random());
            CHECK_CUDA(cudaMemset(slot, 0x5a, kSlotBytes - kTail));
            CHECK_CUDA(cudaMemset(back, 0xa5, kSlotBytes));
            CHECK_CUDA(cudaMemset(good, 0xff, 3 * sizeof(uint32_t)));
            upload(source + from, bytes.data(), num_bytes);
            const uint64_t value = random() >> 1;
            sum += value;
            impls::LinkCallsParams params = {};
            params.link = {reinterpret_cast<uint64_t>(slot), 0, SY_PATH_DIRECT, 0};
            params.source = source + from;
            params.back = back + from;
            params.offset = to;
            params.num_bytes = num_bytes;
            params.word_offset = kSlotBytes - 16;
            params.counter_offset = kSlotBytes - 8;
            params.value = value;
            params.echo = reinterpret_cast<const uint64_t*>(slot + params.word_offset);
            params.error = error;
            params.timeout_ns = 2'000'000'000;
            params.good = good;
            if (round % 2 == 0)
                impls::link_calls_kernel<comm::kDirectOnly><<<1, 32, 0, stream>>>(params);
            else
                impls::link_calls_kernel<comm::kAnyWay><<<1, 32, 0, stream>>>(params);
            CHECK_CUDA(cudaGetLastError());
            CHECK_CUDA(cudaStreamSynchronize(stream));
            uint32_t goods[3];
            CHECK_CUDA(cudaMemcpy(goods, good, sizeof(goods), cudaMemcpyDeviceToHost));
            for (const uint32_t flag : goods)
                CHECK(flag == 1, "a wait of the call with %llu bytes failed",
                      static_cast<unsigned long long>(num_bytes));
            CHECK_CUDA(cudaMemcpy(found.data(), slot, kSlotBytes, cudaMemcpyDeviceToHost));
            expect_bytes(found, to, bytes, kSlotBytes - kTail, 0x5a, "slot");
            uint64_t words[2];
            memcpy(words, found.data() + params.word_offset, sizeof(words));
            CHECK(words[0] == value && words[1] == sum, "word or counter is wrong");
            CHECK_CUDA(cudaMemcpy(found.data(), back, kSlotBytes, cudaMemcpyDeviceToHost));
            expect_bytes(found, from, bytes, kSlotBytes, 0xa5, "what came back");
        }
    CHECK_CUDA(cudaStreamDestroy(stream));
    for (void* pointer :
         {static_cast<void*>(slot), static_cast<void*>(source), static_cast<void*>(back),
          static_cast<void*>(good), static_cast<void*>(error)})
        CHECK_CUDA(cudaFree(pointer));
}

} // namespace
