// The cost of posting: work requests per second by queues, warps and the place of the queues, and
// beside it the same rows by direct stores. Prints one JSON line per case.
//
//   ibgda_bench [--quick]
//
// Queues are filled once per run without a reader, so that only the posters are measured. With
// "nic":"sink" a kernel of one block takes the doorbells and completes all requests immediately.
// With "nic":"host" a thread of the host does, which like a NIC reads queues in host memory without
// the GPU.
#include <algorithm>
#include <atomic>
#include <cinttypes>
#include <optional>
#include <string>
#include <thread>

#include "check.hpp"
#include "softnic/queue.hpp"
#include "stay_near.hpp"
#include "switchyard/comm/ibgda.h"
#include "switchyard/ptx/memory.cuh"
#include "switchyard/ptx/sync.cuh"

namespace {

using namespace switchyard::comm;
using softnic::QueueSizes;
using softnic::SendQueue;
using softnic::Where;

enum class Kind { kPutAdd, kPutSignal, kLanes, kPairs };

const char* name_of(Kind kind) {
    switch (kind) {
    case Kind::kPutAdd:
        return "put+add";
    case Kind::kPutSignal:
        return "put+signal";
    case Kind::kLanes:
        return "32 signals";
    default:
        return "16 puts+16 signals";
    }
}

template <Kind kKind>
constexpr uint32_t kWqes = kKind == Kind::kPutAdd || kKind == Kind::kPutSignal ? 2 : 32;

struct PostParams {
    const sy_mlx5_qp* qps;
    uint32_t num_qps, posts_per_warp;
    sy_mlx5_bound bound;
    LocalBuffer local;
    RemoteBuffer remote, word;
    uint32_t num_bytes;
    uint64_t *start_ns, *end_ns;
    uint32_t* status;
};

// Concurrent posters on a queue, and whether a record stands beside its doorbell.
enum class Posters { kAnyBlocks, kOneBlock, kOwner };

const char* name_of(Posters posters) {
    return posters == Posters::kAnyBlocks  ? "any"
           : posters == Posters::kOneBlock ? "one block"
                                           : "owner";
}

template <Scope kScope, Kind kKind>
__device__ Status post_once(const PostParams& params, const sy_mlx5_qp& qp) {
    if constexpr (kKind == Kind::kPutAdd)
        return put_add_nbi_warp<kScope>(qp, params.local, params.remote, params.num_bytes,
                                        params.word, 1, params.bound);
    if constexpr (kKind == Kind::kPutSignal)
        return put_signal_nbi_warp<kScope>(qp, params.local, params.remote, params.num_bytes,
                                           params.word, 1, params.bound);
    return mlx5::post<kScope, Warp>(
        qp, params.bound, kWqes<kKind>, [&](uint32_t lane_idx, const mlx5::Control& control) {
            if (kKind != Kind::kLanes && lane_idx % 2 == 0)
                return mlx5::make_write(control, params.local, params.remote, params.num_bytes);
            return mlx5::make_write_inline(control, params.word, lane_idx, 8);
        });
}

// Blocks of one warp or of several; blocks take the queues in turn.
template <Scope kScope, Kind kKind>
__global__ void __launch_bounds__(512, 1) post_kernel(const __grid_constant__ PostParams params) {
    const uint32_t warp = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
    const sy_mlx5_qp qp = params.qps[blockIdx.x % params.num_qps];
    const uint64_t start_ns = now_ns();
    Status status = SY_MLX5_OK;
    for (uint32_t i = 0; i < params.posts_per_warp && status == SY_MLX5_OK; ++i)
        status = post_once<kScope, kKind>(params, qp);
    if (threadIdx.x % 32 == 0) {
        params.start_ns[warp] = start_ns;
        params.end_ns[warp] = now_ns();
        if (status != SY_MLX5_OK)
            *params.status = status;
    }
}

// One warp per queue, which it has to itself.
template <Scope kScope, Kind kKind>
__global__ void __launch_bounds__(32) own_kernel(const __grid_constant__ PostParams params) {
    static_assert(kKind == Kind::kPutAdd || kKind == Kind::kPutSignal);
    const sy_mlx5_qp qp = params.qps[blockIdx.x];
    const uint64_t start_ns = now_ns();
    OwnedQueue<kScope> queue(qp, params.bound);
    Status status = SY_MLX5_OK;
    for (uint32_t i = 0; i < params.posts_per_warp && status == SY_MLX5_OK; ++i)
        status = kKind == Kind::kPutAdd ? put_add_nbi(queue, params.local, params.remote,
                                                      params.num_bytes, params.word, 1)
                                        : put_signal_nbi(queue, params.local, params.remote,
                                                         params.num_bytes, params.word, i + 1);
    if (threadIdx.x == 0) {
        params.start_ns[blockIdx.x] = start_ns;
        params.end_ns[blockIdx.x] = now_ns();
        if (status != SY_MLX5_OK)
            *params.status = status;
    }
}

// Two requests and their doorbell, without reservation and turn: the lower bound of any protocol
// between posters.
template <Scope kScope>
__global__ void __launch_bounds__(32) bell_kernel(const __grid_constant__ PostParams params) {
    const sy_mlx5_qp qp = params.qps[0];
    const uint64_t start_ns = now_ns();
    for (uint32_t i = 0; i < params.posts_per_warp; ++i) {
        Warp::each_lane(2, [&](uint32_t lane_idx) {
            const uint64_t index = 2 * uint64_t{i} + lane_idx;
            const mlx5::Control control{qp.qpn, static_cast<uint32_t>(index & 0xffff),
                                        SY_MLX5_CE_ERROR_ONLY};
            mlx5::store_wqe<kScope>(
                qp, index,
                lane_idx == 0
                    ? mlx5::make_write(control, params.local, params.remote, params.num_bytes)
                    : mlx5::make_write_inline(control, params.word, i, 8));
        });
        if (threadIdx.x == 0)
            mlx5::ring_doorbell<kScope>(qp, 2 * uint64_t{i} + 2);
        __syncwarp();
    }
    if (threadIdx.x == 0) {
        *params.start_ns = start_ns;
        *params.end_ns = now_ns();
    }
}

// A NIC that executes nothing: a lane per queue takes doorbells and completes the announced
// requests.
struct SinkParams {
    const sy_mlx5_qp* qps;
    uint32_t num_qps;
    const uint32_t* stop;
    uint64_t life_ns;
};

__global__ void __launch_bounds__(32) sink_kernel(const __grid_constant__ SinkParams params) {
    if (threadIdx.x >= params.num_qps)
        return;
    const sy_mlx5_qp qp = params.qps[threadIdx.x];
    uint32_t known = 0;
    const uint64_t start_ns = now_ns();
    for (uint32_t num_polls = 1;; ++num_polls) {
        const uint64_t doorbell = ld_acquire<Scope::kSys>(at_address<uint64_t>(qp.doorbell));
        const uint32_t end = be32(static_cast<uint32_t>(doorbell)) >> 8 & 0xffff;
        if (end != known) {
            known = end;
            const uint32_t counter = (end - 1) & 0xffff;
            st_release<Scope::kSys>(at_address<uint32_t>(qp.cq) + 15,
                                    counter >> 8 | (counter & 0xff) << 8);
        }
        if (num_polls % 64 == 0 &&
            (ld_relaxed<Scope::kSys>(params.stop) != 0 || now_ns() - start_ns > params.life_ns))
            return;
    }
}

enum class Sink { kNone, kKernel, kHost };

const char* name_of(Sink sink) {
    return sink == Sink::kNone ? "none" : sink == Sink::kKernel ? "sink" : "host";
}

// The same by a thread of the host, for queues in host memory.
class HostSink {
  public:
    HostSink(const std::vector<sy_mlx5_qp>& handles)
        : thread_([this, handles] {
              std::vector<uint32_t> known(handles.size());
              while (!must_stop_.load(std::memory_order_relaxed))
                  for (size_t i = 0; i < handles.size(); ++i)
                      serve(handles[i], known[i]);
          }) {}
    ~HostSink() {
        must_stop_ = true;
        thread_.join();
    }

  private:
    static void serve(const sy_mlx5_qp& qp, uint32_t& known) {
        const uint64_t doorbell =
            __atomic_load_n(reinterpret_cast<const uint64_t*>(qp.doorbell), __ATOMIC_ACQUIRE);
        const uint32_t end = __builtin_bswap32(static_cast<uint32_t>(doorbell)) >> 8 & 0xffff;
        if (end == known)
            return;
        known = end;
        const uint32_t counter = (end - 1) & 0xffff;
        __atomic_store_n(reinterpret_cast<uint32_t*>(qp.cq) + 15,
                         counter >> 8 | (counter & 0xff) << 8, __ATOMIC_RELEASE);
    }
    std::atomic<bool> must_stop_{false};
    std::thread thread_; // last: it uses the others
};

struct Bench {
    uint8_t *local, *remote;
    uint64_t *start_ns, *end_ns;
    uint32_t *status, *stop;
    sy_error_word* error;
    cudaStream_t posters, nic;
    uint32_t num_bad = 0;
};

constexpr uint32_t kMostWarps = 256;
constexpr uint32_t kRowBytes = 7168 + 224 + 64;

PostParams params_of(const Bench& bench, const sy_mlx5_qp* table, uint32_t num_qps,
                     uint32_t posts_per_warp) {
    PostParams params = {};
    params.qps = table;
    params.num_qps = num_qps;
    params.posts_per_warp = posts_per_warp;
    params.bound = {bench.error, nullptr, 500'000'000};
    params.local = {reinterpret_cast<uint64_t>(bench.local), 0x100};
    params.remote = {reinterpret_cast<uint64_t>(bench.remote), 0x200};
    params.word = {reinterpret_cast<uint64_t>(bench.remote), 0x200};
    params.num_bytes = kRowBytes;
    params.start_ns = bench.start_ns;
    params.end_ns = bench.end_ns;
    params.status = bench.status;
    return params;
}

template <Scope kScope> void run_bell(const Bench& bench, Where where, bool has_record) {
    QueueSizes sizes;
    sizes.sq_depth = 1024;
    sizes.has_record = has_record;
    SendQueue queue(where, sizes, 0x30, 0);
    sy_mlx5_qp* table = device_alloc<sy_mlx5_qp>(1);
    to_device(table, queue.handle);
    const PostParams params = params_of(bench, table, 1, 4000);
    std::vector<double> times_us;
    for (int repeat = 0; repeat < 5; ++repeat) {
        bell_kernel<kScope><<<1, 32, 0, bench.posters>>>(params);
        CHECK_CUDA(cudaGetLastError());
        CHECK_CUDA(cudaStreamSynchronize(bench.posters));
        times_us.push_back(
            static_cast<double>(from_device(bench.end_ns) - from_device(bench.start_ns)) * 1e-3);
    }
    std::sort(times_us.begin(), times_us.end());
    printf(
        "{\"bench\":\"doorbell\",\"queues\":\"%s\",\"scope\":\"%s\",\"record\":%d,\"us_per_post\":%.3f}\n",
        name_of(where), kScope == Scope::kSys ? "sys" : "gpu", has_record,
        times_us[2] / params.posts_per_warp);
    fflush(stdout);
}

// The warps of a queue are of as many blocks, of one block, or a single one that owns the queue.
template <Scope kScope, Kind kKind>
void run(Bench& bench, Where where, uint32_t num_qps, uint32_t warps_per_qp, Sink sink,
         Posters posters = Posters::kAnyBlocks, bool has_record = true) {
    const bool is_of_one_block = posters == Posters::kOneBlock;
    QueueSizes sizes;
    sizes.sq_depth = SY_MLX5_MAX_DEPTH;
    static std::vector<SendQueue> host, device;
    std::vector<SendQueue>& pool = where == Where::kHost ? host : device;
    while (pool.size() < num_qps)
        pool.emplace_back(where, sizes, 0x40 + static_cast<uint32_t>(pool.size()), 0);
    static sy_mlx5_qp* tables[2] = {};
    sy_mlx5_qp*& table = tables[where == Where::kDevice];
    if (table == nullptr)
        table = device_alloc<sy_mlx5_qp>(kMostWarps);
    std::vector<sy_mlx5_qp> handles;
    for (uint32_t i = 0; i < num_qps; ++i) {
        handles.push_back(pool[i].handle);
        if (is_of_one_block)
            handles[i].flags |= SY_MLX5_ONE_BLOCK;
        if (!has_record)
            handles[i].flags |= SY_MLX5_NO_RECORD;
    }
    upload(table, handles.data(), num_qps * sizeof(sy_mlx5_qp));

    const uint32_t num_warps = num_qps * warps_per_qp;
    // Without a NIC no block is used twice.
    const uint32_t posts_per_warp =
        (sink != Sink::kNone ? 4 : 1) * sizes.sq_depth / kWqes<kKind> / warps_per_qp;
    std::vector<double> times_us;
    uint32_t status = SY_MLX5_OK;
    for (int repeat = 0; repeat < 5 && status == SY_MLX5_OK; ++repeat) {
        for (uint32_t i = 0; i < num_qps; ++i)
            pool[i].reset();
        to_device(bench.status, uint32_t{SY_MLX5_OK});
        to_device(bench.error, sy_error_word{});
        *bench.stop = 0;
        std::optional<HostSink> host_sink;
        if (sink == Sink::kHost)
            host_sink.emplace(handles);
        if (sink == Sink::kKernel) {
            const SinkParams params = {table, num_qps, bench.stop, 2'000'000'000};
            sink_kernel<<<1, 32, 0, bench.nic>>>(params);
            CHECK_CUDA(cudaGetLastError());
        }
        const PostParams params = params_of(bench, table, num_qps, posts_per_warp);
        const uint32_t num_threads = is_of_one_block ? 32 * warps_per_qp : 32;
        if constexpr (kKind == Kind::kPutAdd || kKind == Kind::kPutSignal) {
            if (posters == Posters::kOwner)
                own_kernel<kScope, kKind><<<num_warps, 32, 0, bench.posters>>>(params);
        }
        if (posters != Posters::kOwner)
            post_kernel<kScope, kKind>
                <<<num_warps * 32 / num_threads, num_threads, 0, bench.posters>>>(params);
        CHECK_CUDA(cudaGetLastError());
        CHECK_CUDA(cudaStreamSynchronize(bench.posters));
        *static_cast<volatile uint32_t*>(bench.stop) = 1;
        CHECK_CUDA(cudaStreamSynchronize(bench.nic));
        std::vector<uint64_t> start(num_warps), end(num_warps);
        CHECK_CUDA(cudaMemcpy(start.data(), bench.start_ns, num_warps * 8, cudaMemcpyDeviceToHost));
        CHECK_CUDA(cudaMemcpy(end.data(), bench.end_ns, num_warps * 8, cudaMemcpyDeviceToHost));
        times_us.push_back(static_cast<double>(*std::max_element(end.begin(), end.end()) -
                                               *std::min_element(start.begin(), start.end())) *
                           1e-3);
        status = from_device(bench.status);
        // Everything was published in order, and the last doorbell covers it.
        const uint64_t expected = uint64_t{posts_per_warp} * warps_per_qp * kWqes<kKind>;
        for (uint32_t i = 0; i < num_qps && status == SY_MLX5_OK; ++i) {
            const sy_mlx5_queue_state state = pool[i].state();
            if (state.published != expected || state.posted != expected)
                status = SY_MLX5_DESYNC;
        }
    }
    bench.num_bad += status != SY_MLX5_OK;
    std::sort(times_us.begin(), times_us.end());
    const double us = times_us[times_us.size() / 2];
    const double posts = static_cast<double>(posts_per_warp) * num_warps;
    printf(
        "{\"bench\":\"ibgda_post\",\"kind\":\"%s\",\"queues\":\"%s\",\"scope\":\"%s\",\"nic\":\"%s\","
        "\"num_qps\":%u,\"warps_per_qp\":%u,\"posters\":\"%s\",\"record\":%d,\"us_per_post\":%.3f,"
        "\"posts_per_s_per_qp\":%.0f,\"wqes_per_s\":%.0f,\"status\":%u}\n",
        name_of(kKind), name_of(where), kScope == Scope::kSys ? "sys" : "gpu", name_of(sink),
        num_qps, warps_per_qp, name_of(posters), has_record, us / posts_per_warp,
        posts / num_qps / us * 1e6, posts * kWqes<kKind> / us * 1e6, status);
    fflush(stdout);
}

template <Scope kScope> void run_scope(Bench& bench, Where where, bool is_quick) {
    run_bell<kScope>(bench, where, true);
    run_bell<kScope>(bench, where, false);
    for (const bool has_record : {true, false}) {
        run<kScope, Kind::kPutAdd>(bench, where, 1, 1, Sink::kNone, Posters::kOwner, has_record);
        for (const Sink sink : {Sink::kNone, Sink::kKernel})
            run<kScope, Kind::kPutSignal>(bench, where, 1, 1, sink, Posters::kOwner, has_record);
        if (where == Where::kHost)
            run<kScope, Kind::kPutSignal>(bench, where, 1, 1, Sink::kHost, Posters::kOwner,
                                          has_record);
    }
    for (const uint32_t num_qps : {8u, 32u})
        run<kScope, Kind::kPutSignal>(bench, where, num_qps, 1, Sink::kNone, Posters::kOwner,
                                      false);
    for (const Posters posters : {Posters::kAnyBlocks, Posters::kOneBlock})
        for (const uint32_t warps : {1u, 4u})
            run<kScope, Kind::kPutSignal>(bench, where, 1, warps, Sink::kNone, posters, false);
    run<kScope, Kind::kPutAdd>(bench, where, 1, 1, Sink::kNone);
    run<kScope, Kind::kPutSignal>(bench, where, 1, 1, Sink::kNone);
    run<kScope, Kind::kPutSignal>(bench, where, 1, 1, Sink::kKernel);
    for (const uint32_t warps : {2u, 4u, 8u, 16u, 32u})
        run<kScope, Kind::kPutSignal>(bench, where, 1, warps, Sink::kNone);
    for (const uint32_t warps : {1u, 2u, 4u, 8u, 16u})
        run<kScope, Kind::kPutSignal>(bench, where, 1, warps, Sink::kNone, Posters::kOneBlock);
    if (is_quick)
        return;
    run<kScope, Kind::kPutSignal>(bench, where, 1, 8, Sink::kKernel);
    run<kScope, Kind::kPutSignal>(bench, where, 8, 1, Sink::kNone);
    run<kScope, Kind::kPutSignal>(bench, where, 32, 1, Sink::kNone);
    for (const uint32_t warps : {1u, 2u, 4u, 8u, 16u, 32u}) {
        run<kScope, Kind::kLanes>(bench, where, 8, warps, Sink::kNone);
        run<kScope, Kind::kPairs>(bench, where, 8, warps, Sink::kNone);
    }
    for (const uint32_t warps : {1u, 4u})
        run<kScope, Kind::kPairs>(bench, where, 1, warps, Sink::kNone);
    for (const uint32_t warps : {1u, 4u})
        run<kScope, Kind::kLanes>(bench, where, 8, warps, Sink::kNone, Posters::kOneBlock);
    run<kScope, Kind::kLanes>(bench, where, 8, 4, Sink::kKernel);
    if (where == Where::kHost) {
        run<kScope, Kind::kPutSignal>(bench, where, 1, 1, Sink::kHost);
        run<kScope, Kind::kPutSignal>(bench, where, 1, 8, Sink::kHost);
        run<kScope, Kind::kLanes>(bench, where, 8, 4, Sink::kHost);
    }
}

// The same row and flag by stores of one warp, or of a block of 448 threads as dispatch does it.
struct StoreParams {
    const uint4* source;
    uint8_t* target;
    uint64_t* flag;
    uint32_t num_posts, num_places;
    uint64_t *start_ns, *end_ns;
};

__global__ void __launch_bounds__(448) store_kernel(const __grid_constant__ StoreParams params) {
    using namespace switchyard;
    constexpr uint32_t kUnits = kRowBytes / 16;
    const uint64_t start_ns = ptx::mov_globaltimer();
    for (uint32_t i = 0; i < params.num_posts; ++i) {
        const uint64_t place =
            reinterpret_cast<uint64_t>(params.target) + uint64_t{i % params.num_places} * kRowBytes;
        for (uint32_t unit = threadIdx.x; unit < kUnits; unit += blockDim.x)
            ptx::st_weak_global_v4(place + unit * 16, params.source[unit]);
        __syncthreads();
        if (threadIdx.x == 0)
            ptx::st_release_sys(params.flag, i + 1);
    }
    if (threadIdx.x == 0) {
        *params.start_ns = start_ns;
        *params.end_ns = ptx::mov_globaltimer();
    }
}

void run_stores(Bench& bench, const char* to, uint8_t* target) {
    for (const uint32_t num_threads : {32u, 448u}) {
        StoreParams params = {reinterpret_cast<const uint4*>(bench.local),
                              target + 4096,
                              reinterpret_cast<uint64_t*>(target),
                              4000,
                              64,
                              bench.start_ns,
                              bench.end_ns};
        std::vector<double> times_us;
        for (int repeat = 0; repeat < 5; ++repeat) {
            store_kernel<<<1, num_threads, 0, bench.posters>>>(params);
            CHECK_CUDA(cudaGetLastError());
            CHECK_CUDA(cudaStreamSynchronize(bench.posters));
            times_us.push_back(
                static_cast<double>(from_device(bench.end_ns) - from_device(bench.start_ns)) *
                1e-3);
        }
        std::sort(times_us.begin(), times_us.end());
        printf(
            "{\"bench\":\"stores\",\"to\":\"%s\",\"threads\":%u,\"row_bytes\":%u,\"us_per_post\":%.3f}\n",
            to, num_threads, kRowBytes, times_us[2] / params.num_posts);
        fflush(stdout);
    }
}

} // namespace

int main(int argc, char** argv) {
    const bool is_quick = argc > 1 && std::string(argv[1]) == "--quick";
    CHECK(argc == 1 || (argc == 2 && is_quick), "unknown argument %s", argv[1]);
    int num_gpus = 0;
    CHECK_CUDA(cudaGetDeviceCount(&num_gpus));
    CHECK(num_gpus > 0, "no GPU");
    CHECK_CUDA(cudaSetDevice(0));
    const std::string cpus = stay_near(0);
    printf("{\"bench\":\"ibgda_host\",\"cpus_near_gpu\":\"%s\"}\n", cpus.c_str());
    Bench bench = {};
    bench.local = device_alloc<uint8_t>(1 << 20);
    bench.remote = device_alloc<uint8_t>(1 << 20);
    bench.start_ns = device_alloc<uint64_t>(kMostWarps * 4);
    bench.end_ns = device_alloc<uint64_t>(kMostWarps * 4);
    bench.status = device_alloc<uint32_t>(1);
    bench.error = device_alloc<sy_error_word>(1);
    void* stop = nullptr;
    CHECK_CUDA(cudaHostAlloc(&stop, sizeof(uint32_t), cudaHostAllocMapped));
    bench.stop = static_cast<uint32_t*>(stop);
    CHECK_CUDA(cudaStreamCreateWithFlags(&bench.posters, cudaStreamNonBlocking));
    CHECK_CUDA(cudaStreamCreateWithFlags(&bench.nic, cudaStreamNonBlocking));
    run_scope<Scope::kSys>(bench, Where::kHost, is_quick);
    run_scope<Scope::kSys>(bench, Where::kDevice, is_quick);
    run_scope<Scope::kGpu>(bench, Where::kDevice, is_quick);
    run_stores(bench, "own memory", bench.remote);
    int can_reach = 0;
    if (num_gpus > 1)
        CHECK_CUDA(cudaDeviceCanAccessPeer(&can_reach, 0, 1));
    if (can_reach != 0) {
        CHECK_CUDA(cudaSetDevice(1));
        uint8_t* far = device_alloc<uint8_t>(1 << 20);
        CHECK_CUDA(cudaSetDevice(0));
        CHECK_CUDA(cudaDeviceEnablePeerAccess(1, 0));
        run_stores(bench, "NVLink", far);
    } else {
        fprintf(stderr, "ibgda_bench: no second GPU in reach: no figures for NVLink\n");
    }
    fprintf(stderr, "ibgda_bench: %s\n", bench.num_bad == 0 ? "all right" : "FAILED");
    return bench.num_bad == 0 ? 0 : 1;
}
