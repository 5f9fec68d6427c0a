// Kernels on a host without a GPU: every CUDA thread is a fibre, and every block an operating
// system thread. This file has the parts of CUDA that the device functions need. The others are in
// the files beside it, which stand before the real ones on the include path. Compiled by g++ with
// `-include simt.hpp`.
//
// It tests arithmetic, indices, layouts and waits; it does not test memory order or speed.
#pragma once

// Says to headers that also serve plain host code that there are warps here.
#define SY_SIMT 1

#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

// A thread's elements of a table are chosen at run time, which g++ does not analyse.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

#include <sys/mman.h>
#include <unistd.h>
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

struct uint2 {
    uint32_t x, y;
};
struct alignas(16) uint4 {
    uint32_t x, y, z, w;
};
struct alignas(16) int4 {
    int32_t x, y, z, w;
};
struct float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct dim3 {
    uint32_t x = 1, y = 1, z = 1;
};

inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
template <class T> T min(T a, T b) { return b < a ? b : a; }
template <class T> T max(T a, T b) { return a < b ? b : a; }

namespace simt {

constexpr size_t kStackBytes = 64 << 10;
// Rounds in which threads only polled words that another thread changes, before the processor is
// yielded to that thread, and the length of that pause.
constexpr uint32_t kQuietRounds = 256;
constexpr uint32_t kQuietPauseUs = 20;
// Where a read of the clock advances it, a pause would only cost time.
#if defined(SIMT_REAL_CLOCK)
constexpr bool kPauses = true;
#else
constexpr bool kPauses = false;
#endif
// Rounds of the scheduler without a runnable thread before the program counts as stuck.
constexpr uint64_t kStuckRounds = 200'000'000;

// A barrier: a fibre that waits for `turn` to advance is not scheduled before.
struct Barrier {
    std::atomic<uint32_t> arrived{0}, turn{0};
};

// Saved position of a fibre.
#if defined(__x86_64__)
struct Context {
    void* stack = nullptr;
};

// Callee-saved registers go onto the stack of the fibre that leaves and come from that of the one
// that continues. That takes a tenth of the time of swapcontext, which also asks the kernel for
// signal masks.
extern "C" void simt_switch(void** from, void* to);
asm(R"(
.text
.type simt_switch, @function
simt_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size simt_switch, .-simt_switch
)");

inline void switch_to(Context& from, Context& to) { simt_switch(&from.stack, to.stack); }

inline void prepare(Context& context, char* stack, void (*entry)()) {
    void** top = reinterpret_cast<void**>(stack + kStackBytes);
    *--top = nullptr; // keeps the alignment that a call has
    *--top = reinterpret_cast<void*>(entry);
    for (int i = 0; i < 6; ++i)
        *--top = nullptr;
    context.stack = top;
}
#else
struct Context {
    ucontext_t context;
};

inline void switch_to(Context& from, Context& to) { swapcontext(&from.context, &to.context); }

inline void prepare(Context& context, char* stack, void (*entry)()) {
    getcontext(&context.context);
    context.context.uc_stack.ss_sp = stack;
    context.context.uc_stack.ss_size = kStackBytes;
    context.context.uc_link = nullptr;
    makecontext(&context.context, entry, 0);
}
#endif

// Stacks of this thread's fibres, kept from block to block: fresh ones cost a page fault each.
class Stacks {
  public:
    Stacks() = default;
    Stacks(const Stacks&) = delete;
    Stacks& operator=(const Stacks&) = delete;
    ~Stacks() { release(); }
    char* get(uint32_t num_fibres) {
        if (num_fibres * kStackBytes <= num_bytes_)
            return base_;
        release();
        num_bytes_ = num_fibres * kStackBytes;
        void* base = mmap(nullptr, num_bytes_, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (base == MAP_FAILED)
            abort();
        return base_ = static_cast<char*>(base);
    }

  private:
    void release() {
        if (base_ != nullptr)
            munmap(base_, num_bytes_);
        base_ = nullptr;
    }
    char* base_ = nullptr;
    size_t num_bytes_ = 0;
};

struct Fibre {
    Context context;
    dim3 thread;
    const std::atomic<uint32_t>* waits_for = nullptr;
    uint32_t seen_turn = 0;
    bool is_done = false;
};

struct Warp {
    Barrier barrier;
    uint64_t values[32];
    uint32_t num_live = 0;
};

struct Cluster {
    Barrier barrier;
    uint32_t num_threads = 0;
    std::vector<std::atomic<char*>> marker;
    explicit Cluster(uint32_t num_blocks) : marker(num_blocks) {}
};

struct Block {
    std::vector<Fibre> fibres;
    std::vector<Warp> warps;
    Barrier barrier;
    Barrier named_barriers[16]; // of some of the warps; none leaves while others wait at one
    uint32_t num_live = 0;
    // Since the scheduler last checked: whether a thread reached a block barrier or left, and
    // whether one polled a word that others change.
    bool has_moved = false, has_polled = false;
    Context scheduler;
    Fibre* current = nullptr;
    std::function<void()> body;
    Cluster* cluster = nullptr;
    uint32_t rank = 0;
};

inline thread_local Block* block = nullptr;
// Blocks of a cluster find one another's shared memory by its distance from this.
inline thread_local char marker = 0;
inline std::atomic<uint64_t> clock_ns{0};

inline void yield() { switch_to(block->current->context, block->scheduler); }

inline void yield_polling() {
    block->has_polled = true;
    yield();
}

inline void complete(Barrier& barrier) {
    barrier.arrived = 0;
    barrier.turn.fetch_add(1);
}

inline void meet(Barrier& barrier, uint32_t num_expected) {
    const uint32_t turn = barrier.turn;
    if (barrier.arrived.fetch_add(1) + 1 == num_expected) {
        complete(barrier);
        return;
    }
    block->current->waits_for = &barrier.turn;
    block->current->seen_turn = turn;
    yield();
}

inline uint32_t lane_idx() { return block->current->thread.x & 31; }
inline Warp& warp() { return block->warps[block->current->thread.x / 32]; }
inline void meet_warp() { meet(warp().barrier, warp().num_live); }

// Passes every lane's value to all.
template <class T, class Take> auto exchange(T mine, Take take) {
    Warp& all = warp();
    all.values[lane_idx()] = 0;
    memcpy(&all.values[lane_idx()], &mine, sizeof(T));
    meet_warp();
    const auto at = [&all](uint32_t lane) {
        T value;
        memcpy(&value, &all.values[lane & 31], sizeof(T));
        return value;
    };
    const auto result = take(at);
    meet_warp();
    return result;
}

inline void run_fibre() {
    Block& mine = *block;
    mine.body();
    Fibre& self = *mine.current;
    self.is_done = true;
    mine.has_moved = true;
    // A thread that left counts as arrived everywhere.
    Warp& my_warp = warp();
    if (--my_warp.num_live != 0 && my_warp.barrier.arrived == my_warp.num_live)
        complete(my_warp.barrier);
    if (--mine.num_live != 0 && mine.barrier.arrived == mine.num_live)
        complete(mine.barrier);
    yield();
}

inline void run_block(Block& self, uint32_t num_threads) {
    block = &self;
    if (self.cluster != nullptr)
        self.cluster->marker[self.rank] = &marker;
    self.fibres = std::vector<Fibre>(num_threads);
    self.warps = std::vector<Warp>((num_threads + 31) / 32);
    self.num_live = num_threads;
    static thread_local Stacks kept;
    char* stacks = kept.get(num_threads);
    for (uint32_t i = 0; i < num_threads; ++i) {
        Fibre& fibre = self.fibres[i];
        fibre.thread.x = i;
        ++self.warps[i / 32].num_live;
        prepare(fibre.context, stacks + kStackBytes * i, run_fibre);
    }
    uint32_t quiet_rounds = 0;
    uint64_t idle_rounds = 0;
    for (uint32_t num_done = 0; num_done < num_threads;) {
        bool any = false;
        num_done = 0;
        for (Fibre& fibre : self.fibres) {
            if (fibre.is_done) {
                ++num_done;
                continue;
            }
            if (fibre.waits_for != nullptr && *fibre.waits_for == fibre.seen_turn)
                continue;
            fibre.waits_for = nullptr;
            self.current = &fibre;
            any = true;
            switch_to(self.scheduler, fibre.context);
        }
        if (any || num_done == num_threads) {
            idle_rounds = 0;
            quiet_rounds = self.has_moved ? 0 : quiet_rounds + uint32_t{self.has_polled};
            self.has_moved = self.has_polled = false;
            if (kPauses && quiet_rounds > kQuietRounds)
                usleep(kQuietPauseUs);
            continue;
        }
        if (self.cluster == nullptr || ++idle_rounds > kStuckRounds) {
            fprintf(stderr, "block %u is stuck: its threads wait for one another\n", self.rank);
            abort();
        }
        std::this_thread::yield();
    }
}

} // namespace simt

#define threadIdx (simt::block->current->thread)
inline thread_local dim3 blockIdx, gridDim;

namespace simt {

// Runs a kernel: blocks one after the other, those of a cluster side by side.
template <class Params>
void run(void (*kernel)(Params), const Params& params, uint32_t num_blocks, uint32_t num_threads,
         bool is_cluster) {
    Cluster cluster(num_blocks);
    cluster.num_threads = num_blocks * num_threads;
    const auto run_one = [&](uint32_t rank) {
        blockIdx.x = rank;
        gridDim.x = num_blocks;
        Block self;
        self.rank = rank;
        self.cluster = is_cluster ? &cluster : nullptr;
        self.body = [&] { kernel(params); };
        run_block(self, num_threads);
    };
    if (!is_cluster || num_blocks == 1) {
        for (uint32_t rank = 0; rank < num_blocks; ++rank)
            run_one(rank);
        return;
    }
    std::vector<std::thread> threads;
    for (uint32_t rank = 0; rank < num_blocks; ++rank)
        threads.emplace_back(run_one, rank);
    for (auto& thread : threads)
        thread.join();
}

} // namespace simt

inline void __syncthreads() {
    simt::block->has_moved = true;
    simt::meet(simt::block->barrier, simt::block->num_live);
}
inline void __syncwarp() { simt::meet_warp(); }
inline void __nanosleep(uint32_t) { simt::yield_polling(); }

template <class T> T __shfl_sync(uint32_t, T value, uint32_t lane) {
    return simt::exchange(value, [lane](const auto& at) { return at(lane); });
}
template <class T> T __shfl_xor_sync(uint32_t, T value, uint32_t mask) {
    const uint32_t lane = simt::lane_idx() ^ mask;
    return simt::exchange(value, [lane](const auto& at) { return at(lane); });
}
template <class T> T __shfl_up_sync(uint32_t, T value, uint32_t delta) {
    const uint32_t lane = simt::lane_idx();
    const uint32_t from = lane >= delta ? lane - delta : lane;
    return simt::exchange(value, [from](const auto& at) { return at(from); });
}
inline uint32_t __ballot_sync(uint32_t, uint32_t predicate) {
    return simt::exchange(predicate, [](const auto& at) {
        uint32_t mask = 0;
        for (uint32_t lane = 0; lane < 32; ++lane)
            mask |= uint32_t{at(lane) != 0} << lane;
        return mask;
    });
}
inline bool __any_sync(uint32_t mask, uint32_t predicate) {
    return __ballot_sync(mask, predicate) != 0;
}
inline bool __all_sync(uint32_t mask, uint32_t predicate) {
    return __ballot_sync(mask, predicate) == 0xffffffffu;
}
inline uint32_t __reduce_or_sync(uint32_t, uint32_t value) {
    return simt::exchange(value, [](const auto& at) {
        uint32_t all = 0;
        for (uint32_t lane = 0; lane < 32; ++lane)
            all |= at(lane);
        return all;
    });
}
inline uint32_t __reduce_add_sync(uint32_t, uint32_t value) {
    return simt::exchange(value, [](const auto& at) {
        uint32_t sum = 0;
        for (uint32_t lane = 0; lane < 32; ++lane)
            sum += at(lane);
        return sum;
    });
}
inline uint32_t __reduce_max_sync(uint32_t, uint32_t value) {
    return simt::exchange(value, [](const auto& at) {
        uint32_t most = 0;
        for (uint32_t lane = 0; lane < 32; ++lane)
            most = max(most, at(lane));
        return most;
    });
}

template <class T> T __ldg(const T* address) { return *address; }
inline uint32_t __popc(uint32_t value) { return __builtin_popcount(value); }
inline uint32_t __ffs(uint32_t value) { return __builtin_ffs(static_cast<int>(value)); }
inline float __uint_as_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof(value));
    return value;
}
inline uint32_t __float_as_uint(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof(bits));
    return bits;
}
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fmaf_rn(float a, float b, float c) { return std::fmaf(a, b, c); }
inline uint32_t __vmaxu2(uint32_t a, uint32_t b) {
    return max(a & 0xffffu, b & 0xffffu) | max(a >> 16, b >> 16) << 16;
}
template <class T> T atomicAdd(T* address, T value) {
    return __atomic_fetch_add(address, value, __ATOMIC_RELAXED);
}
inline uint32_t atomicOr(uint32_t* address, uint32_t value) {
    return __atomic_fetch_or(address, value, __ATOMIC_RELAXED);
}
inline uint32_t atomicMax(uint32_t* address, uint32_t value) {
    uint32_t before = __atomic_load_n(address, __ATOMIC_RELAXED);
    while (before < value && !__atomic_compare_exchange_n(address, &before, value, false,
                                                          __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
    return before;
}
inline uint32_t atomicMin(uint32_t* address, uint32_t value) {
    uint32_t before = __atomic_load_n(address, __ATOMIC_RELAXED);
    while (before > value && !__atomic_compare_exchange_n(address, &before, value, false,
                                                          __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
    return before;
}

// Last: the C++ library's headers use some of these words themselves.
#define __device__
#define __global__
#define __grid_constant__
#define __shared__ static thread_local
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
