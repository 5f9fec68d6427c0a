// The calls of a link (put_get.cuh) over queues that a NIC executes: random bytes from the mirror
// and from elsewhere to a poisoned slot on the last GPU and back, at every alignment, and the calls
// that a link refuses.
#pragma once

#include <cinttypes>
#include <random>

#include "link_calls_test.hpp"
#include "softnic_rig.hpp"

namespace {

// A link from GPU 0 to a slot on the last GPU, and the NIC of its queues. Puts, puts that are in the mirror
// already and gets have a third of slot and mirror each. Behind them are a word and a counter.
struct LinkRig {
    static constexpr uint64_t kPart = 1 << 16, kTail = 64, kSlotBytes = 3 * kPart + kTail;
    static constexpr uint64_t kWord = kSlotBytes - 16, kMaxMessage = 1024;
    static constexpr uint8_t kSlotPoison = 0x5a, kMirrorPoison = 0xa5;
    std::unique_ptr<Nic> owner;
    Nic& nic;
    int target_gpu;
    uint8_t *slot, *elsewhere;
    uint32_t* good;
    sy_error_word* error;
    cudaStream_t stream;
    Path path;
    bool is_fresh = true;

    LinkRig(const Backend& backend, bool is_collapsed, int num_gpus)
        : owner(make_nic(0, backend.has_copy_engines)), nic(*owner), target_gpu(num_gpus - 1) {
        CHECK_CUDA(cudaSetDevice(target_gpu));
        slot = device_alloc<uint8_t>(sy_round_up(kSlotBytes, kSlotAlign));
        CHECK_CUDA(cudaSetDevice(0));
        elsewhere = device_alloc<uint8_t>(kPart);
        good = device_alloc<uint32_t>(3);
        error = device_alloc<sy_error_word>(1);
        CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
        WorldSizes sizes;
        sizes.num_qps = 2;
        sizes.where = backend.where;
        sizes.access |= softnic::kRemoteRead;
        // Long copies take several groups of requests, and all of them go around the queue many times.
        sizes.queue.sq_depth = 128;
        sizes.queue.max_message_bytes = kMaxMessage;
        sizes.queue.is_collapsed = is_collapsed;
        path = make_path(nic, sizes, 0, slot, kSlotBytes, 5, error);
        // Over stores: the kernel must run once before the NIC does.
        clear();
        const sy_link direct = {reinterpret_cast<uint64_t>(slot), 0, SY_PATH_DIRECT, 0};
        launch(params(direct, elsewhere, elsewhere, 0, 64, 1, false));
        CHECK_CUDA(cudaSetDevice(target_gpu));
        CHECK_CUDA(cudaMemset(slot + kSlotBytes - kTail, 0, kTail));
        CHECK_CUDA(cudaDeviceSynchronize());
        CHECK_CUDA(cudaSetDevice(0));
    }
    ~LinkRig() {
        CHECK_CUDA(cudaStreamDestroy(stream));
        for (uint8_t* pointer : {slot, elsewhere, path.mirror})
            CHECK_CUDA(cudaFree(pointer));
    }

    // Poisons all but the words behind the parts. Not while the NIC runs.
    void clear() {
        CHECK_CUDA(cudaSetDevice(target_gpu));
        CHECK_CUDA(cudaMemset(slot, kSlotPoison, kSlotBytes - kTail));
        CHECK_CUDA(cudaDeviceSynchronize());
        CHECK_CUDA(cudaSetDevice(0));
        CHECK_CUDA(cudaMemset(path.mirror, kMirrorPoison, kSlotBytes));
        CHECK_CUDA(cudaMemset(good, 0xff, 3 * sizeof(uint32_t)));
        CHECK_CUDA(cudaDeviceSynchronize());
    }

    // The calls of link_calls_kernel, with or without a wait for the word at the peer.
    switchyard::impls::LinkCallsParams params(const sy_link& link, const void* source, void* back,
                                              uint64_t offset, uint64_t num_bytes, uint64_t value,
                                              bool awaits_word) const {
        switchyard::impls::LinkCallsParams params = {};
        params.link = link;
        params.source = source;
        params.back = back;
        params.offset = offset;
        params.num_bytes = num_bytes;
        params.word_offset = kWord;
        params.counter_offset = kWord + 8;
        params.value = value;
        params.echo = awaits_word ? reinterpret_cast<const uint64_t*>(slot + kWord) : nullptr;
        params.error = error;
        params.timeout_ns = 2'000'000'000;
        params.good = good;
        return params;
    }
    void launch(const switchyard::impls::LinkCallsParams& params) {
        switchyard::impls::link_calls_kernel<kAnyWay><<<1, 32, 0, stream>>>(params);
        CHECK_CUDA(cudaGetLastError());
        CHECK_CUDA(cudaStreamSynchronize(stream));
    }
    // Makes the calls beside the NIC, counts its requests, and compares the results.
    uint64_t call(const switchyard::impls::LinkCallsParams& params, const uint32_t (&expected)[3]) {
        // Indices go on from call to call.
        nic.prepare(is_fresh);
        is_fresh = false;
        nic.start();
        launch(params);
        const softnic::Counts counts = nic.stop();
        CHECK(counts.num_violations == 0, "violation %u at block %" PRIu64 ": found %" PRIu64,
              counts.first.what, counts.first.position, counts.first.found);
        uint32_t found[3];
        CHECK_CUDA(cudaMemcpy(found, good, sizeof(found), cudaMemcpyDeviceToHost));
        const sy_error_word word = from_device(error);
        for (uint32_t i = 0; i < 3; ++i)
            CHECK(found[i] == expected[i],
                  "wait %u of the calls with %" PRIu64 " bytes said %u, expected %u; tag %u "
                  "observed %" PRIx64,
                  i, params.num_bytes, found[i], expected[i], word.tag, word.observed);
        return counts.num_requests;
    }
    std::vector<uint8_t> bytes_of(const uint8_t* pointer, uint64_t num_bytes) const {
        std::vector<uint8_t> bytes(num_bytes);
        CHECK_CUDA(cudaMemcpy(bytes.data(), pointer, num_bytes, cudaMemcpyDefault));
        return bytes;
    }
    void expect_refused(uint64_t offset, uint64_t num_bytes) const {
        const sy_error_word word = from_device(error);
        CHECK(word.tag == SY_TAG_MLX5_ARGUMENT && word.peer == 5 && word.observed == offset &&
                  word.expected == num_bytes,
              "tag %u peer %u observed %" PRIx64 " expected %" PRIx64, word.tag, word.peer,
              word.observed, word.expected);
    }
};

void bytes_go_through_a_nic_and_back(LinkRig& rig, std::mt19937_64& random) {
    constexpr uint64_t kPart = LinkRig::kPart, kMost = kPart - 16, kMax = LinkRig::kMaxMessage;
    uint8_t* const mirror = rig.path.mirror;
    uint64_t sum = 0;
    std::vector<uint64_t> lengths = {0, 1, 15, 16, 17, 511, 512, 529, kMax, kMax + 1, kMost};
    for (int i = 0; i < 8; ++i)
        lengths.push_back(random() % kMost);
    for (const uint64_t num_bytes : lengths)
        for (uint32_t round = 0; round < 4; ++round) {
            const bool is_in_mirror = round % 2 != 0;
            const uint64_t to = round < 2 ? 0 : random() % 16, from = round < 2 ? 0 : random() % 16,
                           back = round < 2 ? 0 : random() % 16;
            std::vector<uint8_t> bytes(num_bytes);
            for (uint8_t& byte : bytes)
                byte = static_cast<uint8_t>(random());
            rig.clear();
            uint8_t* source = (is_in_mirror ? mirror + kPart : rig.elsewhere) + from;
            upload(source, bytes.data(), num_bytes);
            const uint64_t value = random() >> 1;
            sum += value;
            const auto params = rig.params(rig.path.link, source, mirror + 2 * kPart + back, to,
                                           num_bytes, value, true);
            const uint64_t num_requests = rig.call(params, {1, 1, 1});
            // Puts, an add and a signal; gets, and the read behind them.
            const uint64_t expected = 2 * ((num_bytes + kMax - 1) / kMax) + 3;
            CHECK(num_requests == expected, "%" PRIu64 " requests, expected %" PRIu64, num_requests,
                  expected);
            const auto slot = rig.bytes_of(rig.slot, LinkRig::kSlotBytes);
            expect_bytes(slot, to, bytes, LinkRig::kSlotBytes - LinkRig::kTail,
                         LinkRig::kSlotPoison, "slot");
            uint64_t words[2];
            memcpy(words, slot.data() + LinkRig::kWord, sizeof(words));
            CHECK(words[0] == value && words[1] == sum, "word or counter is wrong");
            expect_bytes(rig.bytes_of(mirror + 2 * kPart, kPart), back, bytes, kPart,
                         LinkRig::kMirrorPoison, "what came back");
        }
}

// A copy that leaves the slot, or that would land outside of the mirror, moves nothing, and the
// link reports that it is out of service.
void links_refuse(const Backend& backend, bool is_collapsed, int num_gpus) {
    LinkRig beyond(backend, is_collapsed, num_gpus);
    const uint64_t last = LinkRig::kSlotBytes - 32;
    const uint64_t num_requests = beyond.call(
        beyond.params(beyond.path.link, beyond.elsewhere, beyond.path.mirror, last, 64, 7, false),
        {0, 1, 0});
    CHECK(num_requests == 0, "%" PRIu64 " requests", num_requests);
    beyond.expect_refused(last, 64);

    LinkRig into_other(backend, is_collapsed, num_gpus);
    CHECK_CUDA(cudaMemset(into_other.elsewhere, 1, 64));
    CHECK_CUDA(cudaDeviceSynchronize());
    into_other.call(into_other.params(into_other.path.link, into_other.elsewhere,
                                      into_other.elsewhere + 1024, 0, 64, 7, false),
                    {1, 1, 0});
    into_other.expect_refused(0, 64);
    const auto bytes = into_other.bytes_of(into_other.elsewhere + 1024, 64);
    expect_bytes(bytes, 0, {}, 64, 0, "memory that is no mirror");
    // The bytes put before are there.
    const std::vector<uint8_t> ones(64, 1);
    expect_bytes(into_other.bytes_of(into_other.slot, 128), 0, ones, 128, LinkRig::kSlotPoison,
                 "slot");
}

void link_calls(int num_gpus) {
    for (const Backend& backend : kBackends)
        for (const bool is_collapsed : {true, false}) {
            std::mt19937_64 random(g_seed);
            LinkRig rig(backend, is_collapsed, num_gpus);
            bytes_go_through_a_nic_and_back(rig, random);
            links_refuse(backend, is_collapsed, num_gpus);
            printf("{\"test\":\"link_calls\",\"nic\":\"%s\",\"queues\":\"%s\",\"collapsed\":%d}\n",
                   backend.name(), name_of(backend.where), is_collapsed);
        }
}

} // namespace
