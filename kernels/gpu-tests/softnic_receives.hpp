// Immediate data taken on a GPU. A kernel posts writes with immediate data, and a NIC executes
// them. Warps on the last GPU alternate at taking the data, check the bytes before it, and return
// the receives.
#pragma once

#include <cinttypes>

#include "softnic_rig.hpp"
#include "switchyard/comm/mlx5/receive.h"

namespace {

constexpr uint32_t kNumReceives = 16, kPlaceBytes = 256, kMostImmBytes = 128;

// Bytes that the put of a number carries: none of every third.
__host__ __device__ constexpr uint32_t imm_bytes(uint64_t number) {
    return number % 3 == 0 ? 0 : 8 + static_cast<uint32_t>(number % 16) * 8;
}
static_assert(imm_bytes(31) == kMostImmBytes, "the longest one");

struct ImmParams {
    sy_mlx5_qp qp; // of the sender
    sy_mlx5_rq rq; // of the receiver
    sy_mlx5_bound bound;
    LocalBuffer local;
    uint64_t remote; // as requests name it
    const uint64_t* target; // as the receiver reaches it
    uint64_t* taken; // mapped host memory: numbers that were checked, in order
    uint64_t first, end; // numbers
    uint64_t pattern;
    uint64_t* next; // of the receiver: the next warp's share
    uint32_t* num_wrong; // of the receiver: words, lengths and numbers
    uint32_t* status; // 0, or the error that ended the kernel first
};

// Waits until a word has a value, or until the bound.
__device__ bool reaches(const uint64_t* word, uint64_t value, uint64_t timeout_ns) {
    const uint64_t start_ns = now_ns();
    while (ld_acquire<Scope::kSys>(word) < value) {
        if (now_ns() - start_ns > timeout_ns)
            return false;
        pause_poll();
    }
    return true;
}

// One thread: as many puts as there are receives are under way at a time.
__global__ void __launch_bounds__(32) put_imm_kernel(const __grid_constant__ ImmParams p) {
    if (threadIdx.x != 0)
        return;
    Status status = SY_MLX5_OK;
    for (uint64_t number = p.first; number < p.end && status == SY_MLX5_OK; ++number) {
        if (number >= kNumReceives &&
            !reaches(p.taken, number - kNumReceives + 1, p.bound.timeout_ns)) {
            status = SY_MLX5_TIMEOUT;
            break;
        }
        const LocalBuffer source{p.local.address + number % 1024 * 8, p.local.lkey};
        const RemoteBuffer place{p.remote + number % kNumReceives * kPlaceBytes, kRemoteKey};
        status = put_imm_nbi(p.qp, source, place, imm_bytes(number), static_cast<uint32_t>(number),
                             p.bound);
    }
    *p.status = status == SY_MLX5_OK ? quiet(p.qp, p.bound) : status;
}

// Warps take in turn, half of them by each of the two calls.
__global__ void __launch_bounds__(32) take_kernel(const __grid_constant__ ImmParams p) {
    const uint32_t lane_idx = threadIdx.x;
    for (;;) {
        Immediate taken = {};
        Status status = SY_MLX5_OK;
        uint64_t share = 0;
        if (lane_idx == 0) {
            share = atomicAdd(reinterpret_cast<unsigned long long*>(p.next), 1ull);
            if (share < p.end && blockIdx.x % 2 == 0) {
                status = receive_imm(p.rq, p.bound, &taken);
            } else if (share < p.end) {
                const uint64_t start_ns = now_ns();
                while (status == SY_MLX5_OK && !try_receive(p.rq, &taken)) {
                    if (receive_error(p.rq) != 0)
                        status = SY_MLX5_ERROR_CODE(receive_error(p.rq));
                    else if (now_ns() - start_ns > p.bound.timeout_ns)
                        status = SY_MLX5_TIMEOUT;
                    pause_poll();
                }
            }
            if (status != SY_MLX5_OK)
                atomicCAS(p.status, SY_MLX5_OK, status);
        }
        __syncwarp();
        share = __shfl_sync(0xffffffffu, share, 0);
        status = __shfl_sync(0xffffffffu, status, 0);
        if (share >= p.end || status != SY_MLX5_OK)
            return;
        const uint64_t number = __shfl_sync(0xffffffffu, taken.imm, 0);
        const uint32_t num_bytes = __shfl_sync(0xffffffffu, taken.num_bytes, 0);
        const uint32_t qpn = __shfl_sync(0xffffffffu, taken.qpn, 0);
        if (lane_idx == 0 && (num_bytes != imm_bytes(number) || qpn != p.rq.qpn))
            atomicAdd(p.num_wrong, 1);
        const uint64_t* place = p.target + number % kNumReceives * (kPlaceBytes / 8);
        if (lane_idx < imm_bytes(number) / 8 &&
            ld_relaxed<Scope::kSys>(place + lane_idx) != p.pattern * (number % 1024 + lane_idx + 1))
            atomicAdd(p.num_wrong, 1);
        __syncwarp();
        // In the order of numbers, so that no place is written again before it was checked. A
        // number that comes twice or never ends here.
        if (lane_idx == 0) {
            if (reaches(p.taken, number, p.bound.timeout_ns) &&
                ld_relaxed<Scope::kSys>(p.taken) == number)
                st_release<Scope::kSys>(p.taken, number + 1);
            else
                atomicAdd(p.num_wrong, 1);
        }
        __syncwarp();
    }
}

// The receiver's queue pair, counts and records, which are on its side, and warps that take.
struct Receiver {
    Rig& rig;
    SendQueue peer;
    sy_mlx5_rq rq = {};
    // Results of the first readers and of later ones.
    uint64_t* next;
    uint32_t *num_wrong, *status;
    sy_error_word* error;
    cudaStream_t takers;
    ImmParams params = {}; // of both sides

    Receiver(const Backend& backend, const QueueSizes& sizes, Rig& rig)
        : rig(rig), peer(make_peer(backend, sizes, rig)) {
        CHECK_CUDA(cudaSetDevice(rig.target_gpu));
        rq.dbrec = peer.handle.dbrec;
        rq.cq = peer.handle.cq;
        rq.cq_dbrec = peer.handle.cq_dbrec;
        rq.state = reinterpret_cast<uint64_t>(device_alloc<sy_mlx5_rq_state>(1));
        rq.qpn = peer.handle.qpn;
        rq.cq_depth = peer.handle.cq_depth;
        rq.num_receives = kNumReceives;
        rq.peer = 7;
        const char* wrong = sy_mlx5_check_rq(&rq);
        CHECK(wrong == nullptr, "%s", wrong);
        next = device_alloc<uint64_t>(2);
        num_wrong = device_alloc<uint32_t>(1);
        status = device_alloc<uint32_t>(2);
        error = device_alloc<sy_error_word>(2);
        CHECK_CUDA(cudaStreamCreateWithFlags(&takers, cudaStreamNonBlocking));
        CHECK_CUDA(cudaSetDevice(0));
        rig.nic.set_receiver(rig.number, peer);
        params.qp = rig.queue.handle;
        params.rq = rq;
        params.local = {reinterpret_cast<uint64_t>(rig.source), kLocalKey};
        params.remote = kRemoteBase;
        params.target = reinterpret_cast<const uint64_t*>(rig.target);
        params.taken = softnic::allocate_mapped<uint64_t>(1);
        params.pattern = g_seed;
        params.num_wrong = num_wrong;
        post_receives();
    }
    ~Receiver() { CHECK_CUDA(cudaStreamDestroy(takers)); }
    Receiver(const Receiver&) = delete;
    Receiver& operator=(const Receiver&) = delete;

    // As the receiver's host does.
    void post_receives() {
        peer.store_word(peer.handle.dbrec + 4 * SY_MLX5_DBREC_RECEIVE,
                        __builtin_bswap32(kNumReceives));
    }
    // As after a reset of the queue pair: nothing was taken, nothing stands in the ring.
    void reset() {
        CHECK_CUDA(cudaSetDevice(rig.target_gpu));
        peer.reset();
        to_device(reinterpret_cast<sy_mlx5_rq_state*>(rq.state), sy_mlx5_rq_state{});
        CHECK_CUDA(cudaSetDevice(0));
        *params.taken = 0;
        post_receives();
        forget();
    }
    // NOTES: not while the NIC runs, which this would wait for.
    void forget() {
        for (uint32_t turn = 0; turn < 2; ++turn) {
            to_device(status + turn, uint32_t{SY_MLX5_OK});
            to_device(next + turn, uint64_t{0});
            to_device(error + turn, sy_error_word{});
        }
    }
    // Begins to take up to number `end`.
    void take(uint64_t end, uint64_t timeout_ns, uint32_t turn = 0) {
        CHECK_CUDA(cudaSetDevice(rig.target_gpu));
        ImmParams mine = params;
        mine.bound = {error + turn, nullptr, timeout_ns};
        mine.end = end;
        mine.next = next + turn;
        mine.status = status + turn;
        take_kernel<<<4, 32, 0, takers>>>(mine);
        CHECK_CUDA(cudaGetLastError());
        CHECK_CUDA(cudaSetDevice(0));
    }
    // Begins to put up to number `end`.
    void put(uint64_t end) {
        ImmParams mine = params;
        mine.bound = {rig.error, nullptr, 5'000'000'000};
        mine.end = end;
        mine.status = rig.status;
        put_imm_kernel<<<1, 32, 0, rig.stream>>>(mine);
        CHECK_CUDA(cudaGetLastError());
    }
    sy_mlx5_rq_state state() const {
        return from_device(reinterpret_cast<const sy_mlx5_rq_state*>(rq.state));
    }

  private:
    static SendQueue make_peer(const Backend& backend, const QueueSizes& sizes, const Rig& rig) {
        CHECK_CUDA(cudaSetDevice(rig.target_gpu));
        return SendQueue(backend.where, sizes, 0x61, 7);
    }
};

QueueSizes receive_sizes() {
    QueueSizes sizes;
    sizes.sq_depth = 128;
    sizes.is_collapsed = false;
    return sizes;
}

void receive(const Backend& backend, int num_gpus) {
    const QueueSizes sizes = receive_sizes();
    Rig rig(backend, sizes, num_gpus);
    Receiver receiver(backend, sizes, rig);
    // Copies that a host starts one by one take tens of microseconds each; the others take the numbers of
    // receives around their 16 bits.
    const uint64_t num_puts = backend.has_copy_engines ? 3000 : 65536 + 500;
    // Nothing comes: they give up within their bound, and lose nothing by it.
    receiver.take(4, 20'000'000);
    CHECK_CUDA(cudaStreamSynchronize(receiver.takers));
    const sy_error_word expired = from_device(receiver.error);
    CHECK(from_device(receiver.status) == SY_MLX5_TIMEOUT && expired.tag == SY_TAG_MLX5_RECEIVE &&
              expired.peer == 7 && expired.reason == SY_REASON_TIMEOUT && expired.expected == 1,
          "status %u tag %u peer %u reason %u", from_device(receiver.status), expired.tag,
          expired.peer, expired.reason);
    receiver.forget();
    rig.begin();
    const double start_s = now_s();
    receiver.take(num_puts, 5'000'000'000);
    receiver.put(num_puts);
    CHECK_CUDA(cudaStreamSynchronize(rig.stream));
    CHECK_CUDA(cudaStreamSynchronize(receiver.takers));
    const double us = (now_s() - start_s) * 1e6;
    const softnic::Counts counts = rig.nic.stop();
    rig.expect_clean(counts);
    rig.expect_all({from_device(rig.status)}, SY_MLX5_OK);
    CHECK(from_device(receiver.status) == SY_MLX5_OK, "status %u, tag %u observed %" PRIx64,
          from_device(receiver.status), from_device(receiver.error).tag,
          from_device(receiver.error).observed);
    const uint32_t num_wrong = from_device(receiver.num_wrong);
    CHECK(num_wrong == 0, "%u words, lengths or numbers are wrong", num_wrong);
    const uint64_t num_taken = *receiver.params.taken;
    CHECK(counts.num_requests == num_puts && num_taken == num_puts,
          "%" PRIu64 " requests, %" PRIu64 " taken, expected %" PRIu64, counts.num_requests,
          num_taken, num_puts);
    // Receives are given back one by one, and so is the room for their completions.
    const auto state = receiver.state();
    uint32_t records[2];
    const sy_mlx5_rq& rq = receiver.rq;
    receiver.peer.load_bytes(rq.dbrec + 4 * SY_MLX5_DBREC_RECEIVE, &records[0], 4);
    receiver.peer.load_bytes(rq.cq_dbrec + 4 * SY_MLX5_CQ_DBREC_CONSUMER, &records[1], 4);
    CHECK(state.taken == num_puts && state.cq_index == num_puts && state.error == 0 &&
              __builtin_bswap32(records[0]) == ((num_puts + kNumReceives) & 0xffff) &&
              __builtin_bswap32(records[1]) == (num_puts & 0xffffff),
          "taken %" PRIu64 ", records %08x %08x", state.taken, records[0], records[1]);
    printf("{\"test\":\"receives\",\"nic\":\"%s\",\"queues\":\"%s\",\"puts\":%" PRIu64
           ",\"us_per_put\":%.3f}\n",
           backend.name(), name_of(backend.where), num_puts, us / static_cast<double>(num_puts));
}

// A request that the receiver's side refuses takes its queue pair out of service. Earlier data is
// taken. All readers are told repeatedly that their receives returned flushed. After a reset it
// continues.
void receive_flushed(const Backend& backend, int num_gpus) {
    const QueueSizes sizes = receive_sizes();
    Rig rig(backend, sizes, num_gpus);
    Receiver receiver(backend, sizes, rig);
    constexpr uint64_t kNumPuts = kNumReceives / 2;
    for (uint32_t round = 0; round < 2; ++round) {
        rig.begin();
        receiver.take(kNumReceives, 5'000'000'000);
        receiver.put(kNumPuts);
        CHECK_CUDA(cudaStreamSynchronize(rig.stream));
        rig.expect_all({from_device(rig.status)}, SY_MLX5_OK);
        rig.expect_all(rig.post(Job::kBadRkey, 1, 1), SY_MLX5_COMPLETION);
        CHECK_CUDA(cudaStreamSynchronize(receiver.takers));
        // Later callers get the same result.
        receiver.take(1, 5'000'000'000, 1);
        CHECK_CUDA(cudaStreamSynchronize(receiver.takers));
        rig.expect_clean(rig.nic.stop());
        const uint32_t early = from_device(receiver.status);
        const uint32_t late = from_device(receiver.status + 1);
        const sy_error_word error = from_device(receiver.error);
        CHECK(early == SY_MLX5_COMPLETION && late == SY_MLX5_COMPLETION, "status %u, then %u",
              early, late);
        const auto state = receiver.state();
        CHECK(SY_MLX5_ERROR_SYNDROME(state.error) == SY_MLX5_SYNDROME_FLUSHED &&
                  state.taken == kNumPuts && *receiver.params.taken == kNumPuts,
              "error %" PRIx64 ", %" PRIu64 " taken", state.error, state.taken);
        // Of two calls, one says more than its status.
        CHECK(error.tag == SY_TAG_NONE ||
                  (error.tag == SY_TAG_MLX5_COMPLETION && error.peer == 7 &&
                   error.reason == SY_REASON_VALUE && error.observed == state.error),
              "tag %u peer %u reason %u", error.tag, error.peer, error.reason);
        const uint32_t num_wrong = from_device(receiver.num_wrong);
        CHECK(num_wrong == 0, "%u words, lengths or numbers are wrong", num_wrong);
        rig.clear();
        receiver.reset();
    }
    printf("{\"test\":\"receives_flushed\",\"nic\":\"%s\",\"queues\":\"%s\"}\n", backend.name(),
           name_of(backend.where));
}

void receives(int num_gpus) {
    for (const Backend& backend : kBackends)
        receive(backend, num_gpus);
    for (const Backend& backend : kBackends)
        receive_flushed(backend, num_gpus);
}

} // namespace
