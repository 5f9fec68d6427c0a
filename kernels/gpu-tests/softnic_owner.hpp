// Queues that one warp owns, with a doorbell record and without: wraps of the 16-bit counters, puts
// with flags under a polling kernel, and the queue's state before and after as a shared one.
#pragma once

#include "softnic_rig.hpp"

namespace {

constexpr uint64_t kFlagAt = kFieldsAt + 64;

struct OwnerParams {
    JobParams job;
    uint32_t num_wraps, num_puts;
};

// First groups of 32, 31 signals and an add; then puts with an add each.
__global__ void __launch_bounds__(32) owner_kernel(const __grid_constant__ OwnerParams params) {
    const JobParams& p = params.job;
    const RemoteBuffer target{p.remote, kRemoteKey}, word{p.remote + kWordAt, kRemoteKey},
        flag{p.remote + kFlagAt, kRemoteKey};
    OwnedQueue<Scope::kSys> queue(p.qp, p.bound);
    Status status = SY_MLX5_OK;
    for (uint32_t i = 0; i < params.num_wraps && status == SY_MLX5_OK; ++i)
        status = queue.post(32, [&](uint32_t lane, const mlx5::Control& control) {
            const RemoteBuffer mine{p.remote + kWordAt + (1 + lane) * 8, kRemoteKey};
            return lane < 31
                       ? mlx5::make_write_inline(control, mine, i + 1, 8)
                       : mlx5::make_fetch_add(control, {p.qp.scratch, p.qp.scratch_lkey}, word, 1);
        });
    for (uint32_t i = 0; i < params.num_puts && status == SY_MLX5_OK; ++i)
        status = i % 2 == 0 ? put_add_nbi(queue, p.local, target, p.num_bytes, flag, 1)
                            : put_signal_nbi(queue, p.local, target, p.num_bytes, flag, i + 1);
    if (status == SY_MLX5_OK)
        status = quiet(queue);
    if (threadIdx.x == 0)
        *p.status = status;
}

// Expected counts of the posters once everything is complete.
void expect_counts(const Rig& rig, uint64_t expected) {
    const sy_mlx5_queue_state state = rig.queue.state();
    CHECK(state.reserved == expected && state.published == expected && state.posted == expected,
          "reserved %" PRIu64 ", published %" PRIu64 ", posted %" PRIu64 ", expected %" PRIu64,
          state.reserved, state.published, state.posted, expected);
}

void own(const Backend& backend, const QueueSizes& sizes, int num_gpus) {
    constexpr uint32_t kNumWraps = 3 * 65536 / 32 + 3, kNumPuts = 50, kNumBytes = 14336;
    Rig rig(backend, sizes, num_gpus);
    CHECK_CUDA(cudaSetDevice(rig.target_gpu));
    uint32_t* num_wrong = device_alloc<uint32_t>(1);
    cudaStream_t watcher;
    CHECK_CUDA(cudaStreamCreateWithFlags(&watcher, cudaStreamNonBlocking));
    CHECK_CUDA(cudaSetDevice(0));
    rig.begin();
    // By all, by its owner, by all.
    const auto before = rig.post(Job::kFields, 4, 25);
    CHECK_CUDA(cudaSetDevice(rig.target_gpu));
    watch_kernel<<<1, 256, 0, watcher>>>(reinterpret_cast<uint64_t*>(rig.target + kFlagAt),
                                         reinterpret_cast<uint64_t*>(rig.target), kNumBytes / 8,
                                         kNumPuts, g_seed, 20'000'000'000, num_wrong);
    CHECK_CUDA(cudaGetLastError());
    CHECK_CUDA(cudaSetDevice(0));
    const OwnerParams params = {{rig.queue.handle,
                                 {rig.error, nullptr, 3'000'000'000},
                                 {reinterpret_cast<uint64_t>(rig.source), kLocalKey},
                                 kRemoteBase,
                                 Job::kAdds,
                                 0,
                                 kNumBytes,
                                 rig.status},
                                kNumWraps,
                                kNumPuts};
    owner_kernel<<<1, 32, 0, rig.stream>>>(params);
    CHECK_CUDA(cudaGetLastError());
    CHECK_CUDA(cudaStreamSynchronize(rig.stream));
    const uint32_t status = from_device(rig.status);
    CHECK_CUDA(cudaSetDevice(rig.target_gpu));
    CHECK_CUDA(cudaStreamSynchronize(watcher));
    const uint32_t wrong = from_device(num_wrong);
    CHECK_CUDA(cudaSetDevice(0));
    const auto behind = rig.post(Job::kGets, 1, 5, kNumBytes);
    const softnic::Counts counts = rig.nic.stop();
    rig.expect_clean(counts);
    rig.expect_all(before, SY_MLX5_OK);
    rig.expect_all({status}, SY_MLX5_OK);
    rig.expect_all(behind, SY_MLX5_OK);
    CHECK(wrong == 0, "%u words were wrong behind their flag", wrong);
    expect_counts(rig, 4 * 25 + uint64_t{kNumWraps} * 32 + 2 * kNumPuts + 5 * 3);
    CHECK(rig.words(kWordAt, 1)[0] == kNumWraps + 5, "counter %" PRIu64 ", expected %u",
          rig.words(kWordAt, 1)[0], kNumWraps + 5);
    for (const uint64_t word : rig.words(kWordAt + 8, 31))
        CHECK(word == kNumWraps, "word %" PRIu64 ", expected %u", word, kNumWraps);
    uint32_t record[2];
    rig.queue.load_bytes(rig.queue.handle.dbrec, record, sizeof(record));
    CHECK((record[SY_MLX5_DBREC_SEND] != 0) == sizes.has_record, "the record is %08x",
          record[SY_MLX5_DBREC_SEND]);
    printf("{\"test\":\"owner\",\"nic\":\"%s\",\"queues\":\"%s\",\"collapsed\":%d,\"record\":%d,"
           "\"requests\":%" PRIu64 "}\n",
           backend.name(), name_of(backend.where), sizes.is_collapsed, sizes.has_record,
           counts.num_requests);
}

void owner(int num_gpus) {
    for (const Backend& backend : kBackends)
        for (const bool is_collapsed : {true, false})
            for (const bool has_record : {true, false}) {
                QueueSizes sizes;
                sizes.is_collapsed = is_collapsed;
                sizes.has_record = has_record;
                own(backend, sizes, num_gpus);
            }
}

} // namespace
