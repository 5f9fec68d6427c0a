// A queue from one GPU to memory on another, a NIC, and kernels that post on it and poll for
// arrivals.
#pragma once

#include <cinttypes>
#include <string>

#include "process.hpp"
#include "softnic_world.hpp"
#include "switchyard/comm/ibgda.h"

namespace {

using namespace switchyard::comm;

uint64_t g_seed = 1;

constexpr uint64_t kRemoteBase = 0x700000000000;
constexpr uint32_t kLocalKey = 0x100, kRemoteKey = 0x200, kReadOnlyKey = 0x300;
constexpr uint64_t kDataBytes = 4 << 20;
constexpr uint64_t kWordAt = 2 << 20; // words behind the payload, in the target

constexpr uint64_t kFieldsAt = kWordAt + 65536;
// Four fields of 16 bits, and the values added to them in one operation.
constexpr uint64_t kFieldEnds = 0x0000800080008000;
constexpr uint64_t kFieldAdds = 0x0003ffff80010001;

enum class Job : uint32_t {
    kAdds,
    kPutFlags,
    kGets,
    kFields,
    kImmediate,
    kBadRkey,
    kBadLkey,
    kBadRange,
    kMisaligned,
    kNoRight
};

struct JobParams {
    sy_mlx5_qp qp;
    sy_mlx5_bound bound;
    LocalBuffer local;
    uint64_t remote;
    Job job;
    uint32_t num_posts, num_bytes;
    uint32_t* status; // one per warp
};

// Warps, of one block or of one each, post on the same queue.
__global__ void __launch_bounds__(256) job_kernel(const __grid_constant__ JobParams p) {
    const uint32_t warp = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane_idx = threadIdx.x % 32;
    const uint32_t num_warps = gridDim.x * blockDim.x / 32;
    const RemoteBuffer target{p.remote, kRemoteKey},
        word{p.remote + kWordAt + warp * 8, kRemoteKey};
    Status status = SY_MLX5_OK;
    for (uint32_t i = 0; i < p.num_posts && status == SY_MLX5_OK; ++i) {
        switch (p.job) {
        case Job::kAdds: // 31 words of this warp are signalled, then its counter is added to
            status = mlx5::post<Scope::kSys, Warp>(
                p.qp, p.bound, 32, [&](uint32_t lane, const mlx5::Control& control) {
                    const RemoteBuffer mine{p.remote + kWordAt +
                                                (uint64_t{num_warps} + warp * 31 + lane) * 8,
                                            kRemoteKey};
                    return lane < 31 ? mlx5::make_write_inline(control, mine, i + 1, 8)
                                     : mlx5::make_fetch_add(
                                           control, {p.qp.scratch, p.qp.scratch_lkey}, word, 1);
                });
            break;
        case Job::kPutFlags:
            status = put_add_nbi_warp(p.qp, p.local, target, p.num_bytes, word, 1, p.bound);
            break;
        case Job::kGets:
            status = get_nbi_warp(p.qp, {p.local.address + kWordAt, p.local.lkey}, target,
                                  p.num_bytes, p.bound);
            if (lane_idx == 0 && status == SY_MLX5_OK)
                status = amo_nonfetch_add32(p.qp, word, 1, p.bound);
            if (lane_idx == 0 && status == SY_MLX5_OK)
                status = quiet_gets(p.qp, p.local, p.bound);
            status = __shfl_sync(0xffffffffu, status, 0);
            break;
        case Job::kFields:
            if (lane_idx == 0)
                status = amo_nonfetch_add_fields(p.qp, {p.remote + kFieldsAt, kRemoteKey},
                                                 kFieldAdds, kFieldEnds, p.bound);
            status = __shfl_sync(0xffffffffu, status, 0);
            break;
        case Job::kImmediate:
            if (lane_idx == 0)
                status = put_imm_nbi(p.qp, p.local, target, i % 2 == 0 ? p.num_bytes : 0, 1000 + i,
                                     p.bound);
            status = __shfl_sync(0xffffffffu, status, 0);
            break;
        case Job::kBadRkey:
            status = put_nbi_warp(p.qp, p.local, {p.remote, 0x999}, 64, p.bound);
            break;
        case Job::kBadLkey:
            status = put_nbi_warp(p.qp, {p.local.address, 0x999}, target, 64, p.bound);
            break;
        case Job::kBadRange:
            status =
                put_nbi_warp(p.qp, p.local, {p.remote + kDataBytes - 32, kRemoteKey}, 64, p.bound);
            break;
        case Job::kNoRight:
            status = put_nbi_warp(p.qp, p.local, {p.remote, kReadOnlyKey}, 64, p.bound);
            break;
        case Job::kMisaligned:
            status = mlx5::post<Scope::kSys, Warp>(
                p.qp, p.bound, 1, [&](uint32_t, const mlx5::Control& control) {
                    return mlx5::make_fetch_add(control, {p.qp.scratch, p.qp.scratch_lkey},
                                                {p.remote + kWordAt + 4, kRemoteKey}, 1);
                });
            break;
        }
    }
    if (lane_idx == 0) {
        if (status == SY_MLX5_OK)
            status = quiet(p.qp, p.bound);
        p.status[warp] = status;
    }
}

// Waits for flags beside the posters and checks the bytes before each: count of wrong words.
__global__ void __launch_bounds__(256)
    watch_kernel(const uint64_t* flag, const uint64_t* payload, uint32_t num_words,
                 uint64_t num_flags, uint64_t pattern, uint64_t limit_ns, uint32_t* num_wrong) {
    __shared__ bool is_late;
    const uint64_t start_ns = now_ns();
    if (threadIdx.x == 0)
        is_late = false;
    for (uint64_t expected = 1; expected <= num_flags; ++expected) {
        __syncthreads();
        if (threadIdx.x == 0)
            while (ld_acquire<Scope::kSys>(flag) < expected && !is_late)
                is_late = now_ns() - start_ns > limit_ns;
        __syncthreads();
        if (is_late) {
            if (threadIdx.x == 0)
                atomicAdd(num_wrong, 1u << 30);
            return;
        }
        for (uint32_t i = threadIdx.x; i < num_words; i += blockDim.x)
            if (ld_relaxed<Scope::kSys>(payload + i) != pattern * (i + 1))
                atomicAdd(num_wrong, 1);
    }
}

// The executor of requests, and the place of the queues.
struct Backend {
    Where where;
    bool has_copy_engines;
    const char* name() const { return has_copy_engines ? "copy engines" : "kernel"; }
};
constexpr Backend kBackends[] = {
    {Where::kHost, false}, {Where::kDevice, false}, {Where::kHost, true}};

// A queue from GPU 0 to memory on the last GPU, a NIC, and a kernel that posts.
struct Rig {
    std::unique_ptr<Nic> owner;
    Nic& nic;
    uint8_t *source, *target;
    SendQueue queue;
    uint32_t number;
    uint32_t* status;
    sy_error_word* error;
    cudaStream_t stream;
    int target_gpu;

    Rig(const Backend& backend, const QueueSizes& sizes, int num_gpus)
        : owner(make_nic(0, backend.has_copy_engines)), nic(*owner),
          source(device_alloc<uint8_t>(kDataBytes)), target(nullptr),
          queue(backend.where, sizes, 0x41, 5), number(nic.add_queue(queue)),
          target_gpu(num_gpus - 1) {
        CHECK_CUDA(cudaSetDevice(target_gpu));
        target = device_alloc<uint8_t>(kDataBytes);
        CHECK_CUDA(cudaSetDevice(0));
        status = device_alloc<uint32_t>(64);
        error = device_alloc<sy_error_word>(1);
        CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
        nic.add_key(kLocalKey, reinterpret_cast<uint64_t>(source), kDataBytes, source);
        nic.add_key(kRemoteKey, kRemoteBase, kDataBytes, target);
        nic.add_key(kReadOnlyKey, kRemoteBase, kDataBytes, target, softnic::kRemoteRead);
        std::vector<uint64_t> words(kDataBytes / 8);
        for (size_t i = 0; i < words.size(); ++i)
            words[i] = g_seed * (i + 1);
        upload(source, words.data(), kDataBytes);
        clear();
    }
    ~Rig() {
        CHECK_CUDA(cudaFree(source));
        CHECK_CUDA(cudaFree(target));
    }
    void clear() {
        CHECK_CUDA(cudaSetDevice(target_gpu));
        CHECK_CUDA(cudaMemset(target, 0xff, kWordAt));
        CHECK_CUDA(cudaMemset(target + kWordAt, 0, kDataBytes - kWordAt));
        CHECK_CUDA(cudaDeviceSynchronize());
        CHECK_CUDA(cudaSetDevice(0));
        CHECK_CUDA(cudaMemset(error, 0, sizeof(sy_error_word)));
        CHECK_CUDA(cudaDeviceSynchronize());
    }
    void begin() {
        queue.reset();
        nic.prepare();
        nic.start();
    }
    // Begins to post on a stream; `status` has a word for each warp.
    void launch(Job job, uint32_t num_warps, uint32_t num_posts, uint32_t num_bytes,
                uint64_t timeout_ns, uint32_t* status, cudaStream_t stream) {
        const JobParams params = {queue.handle,
                                  {error, nullptr, timeout_ns},
                                  {reinterpret_cast<uint64_t>(source), kLocalKey},
                                  kRemoteBase,
                                  job,
                                  num_posts,
                                  num_bytes,
                                  status};
        const bool is_one = queue.sizes.is_of_one_block;
        job_kernel<<<is_one ? 1 : num_warps, is_one ? 32 * num_warps : 32, 0, stream>>>(params);
        CHECK_CUDA(cudaGetLastError());
    }
    // Statuses of the warps, once all have ended.
    std::vector<uint32_t> post(Job job, uint32_t num_warps, uint32_t num_posts,
                               uint32_t num_bytes = 64, uint64_t timeout_ns = 3'000'000'000) {
        launch(job, num_warps, num_posts, num_bytes, timeout_ns, status, stream);
        CHECK_CUDA(cudaStreamSynchronize(stream));
        std::vector<uint32_t> statuses(num_warps);
        CHECK_CUDA(cudaMemcpy(statuses.data(), status, num_warps * 4, cudaMemcpyDeviceToHost));
        return statuses;
    }
    std::vector<uint64_t> words(uint64_t offset, uint32_t count) const {
        std::vector<uint64_t> values(count);
        CHECK_CUDA(cudaMemcpy(values.data(), target + offset, count * 8, cudaMemcpyDeviceToHost));
        return values;
    }
    void expect_clean(const softnic::Counts& counts) const {
        CHECK(counts.num_violations == 0, "violation %u at block %" PRIu64 ": found %" PRIu64,
              counts.first.what, counts.first.position, counts.first.found);
    }
    void expect_all(const std::vector<uint32_t>& statuses, uint32_t expected) const {
        for (const uint32_t found : statuses)
            CHECK(found == expected, "status %u, expected %u; error tag %u observed %" PRIx64,
                  found, expected, from_device(error).tag, from_device(error).observed);
    }
};

} // namespace
