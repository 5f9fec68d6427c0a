// Times CUTLASS's grouped matrix products for Hopper on the shapes of MoE experts, for comparison
// with the expert kernel of this repository. Prints one JSON line per product and variant, and one
// per case with the sum of the best. Every expert has the same number of tokens.
//
//   cutlass_experts [--model NAME,..] [--dtype bf16,fp8] [--tokens 1,4,..] [--replays N] [--check]
//
//   --check  compares 65536 elements of each variant's output with the reference, not 4096
//
// The exit status is 1 if a variant was wrong or failed. The other variants are still timed, unless
// the CUDA context is lost or 30 s pass without progress. Both end the program.
//
// The program does less than a layer needs, which is an advantage for CUTLASS. The tokens already
// lie in the experts' order. Between the two products there is neither SwiGLU nor quantisation, so
// the second product reads an input of its own.
//
//   bf16  bf16 inputs, f32 sums, bf16 output
//   fp8   e4m3 inputs, tokens with an f32 scale per row and 128 of K, weights with one per
//         128 x 128, bf16 output
//
// "us" is the median of one launch as a CUDA graph. A variant gets a tenth of the replays if it
// takes more than twice the time of the best variant before it. A case's "us" is the sum of its two
// best. Its "both_us" is the median of one graph with these two after one another.
//
// A variant's name has its tile, its schedule and its cluster. "swapped" computes the transposed
// product. The weights are then the operand with tiles of 128 rows or more. The tokens are the
// other operand, and its tiles can be narrow. CUTLASS's C is void (beta 0), so no variant reads it
// or keeps room for it.
//
// $CUTLASS is the include directory of CUTLASS 4.2, cutlass_library/source/include in the PyPI
// package nvidia-cutlass 4.2.0.0:
//
//   nvcc -O3 -std=c++17 -gencode=arch=compute_90a,code=sm_90a --expt-relaxed-constexpr -DNDEBUG \
//        -I$CUTLASS -cudart static -o cutlass_experts cutlass_experts.cu
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/detail/blockwise_scale_layout.hpp"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/device/gemm_universal_adapter.h"
#include "cutlass/gemm/dispatch_policy.hpp"
#include "cutlass/gemm/group_array_problem_shape.hpp"
#include "cutlass/gemm/kernel/gemm_universal.hpp"
#include "cutlass/version.h"

#include "cutlass_options.hpp"

namespace {

constexpr int kScaleBlock = 128;
constexpr int kNumWarmUps = 4;
// Tolerances of an element's error, relative to the larger of two values: the element, and the root
// of its products' sum of squares. Half a bf16 step is 0.002. The tensor cores keep about 14 bits
// of a sum of e4m3 products.
constexpr double kTolerance = 0.01, kToleranceFp8 = 0.03;
constexpr const char* kWithout = "\"gather, SwiGLU, quantisation\"";
constexpr unsigned kHangSeconds = 30;

constexpr const char* kProducts[] = {"gate_up", "down"};

// --- Device memory -------------------------------------------------------------------------------

using Failure = std::runtime_error;

void check(cudaError_t error, const char* what) {
    if (error != cudaSuccess)
        throw Failure(std::string(what) + ": " + cudaGetErrorString(error));
}

void check(cutlass::Status status, const char* what) {
    if (status != cutlass::Status::kSuccess)
        throw Failure(std::string(what) + ": " + cutlass::cutlassGetStatusString(status));
}

struct DeviceFree {
    void operator()(void* data) const { cudaFree(data); }
};

template <class T> class DeviceArray {
  public:
    DeviceArray() = default;
    explicit DeviceArray(size_t count) {
        void* data;
        check(cudaMalloc(&data, std::max<size_t>(count, 1) * sizeof(T)), "cudaMalloc");
        data_.reset(static_cast<T*>(data));
    }
    explicit DeviceArray(const std::vector<T>& values) : DeviceArray(values.size()) {
        check(cudaMemcpy(get(), values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice),
              "cudaMemcpy to the device");
    }
    DeviceArray(size_t count, const T& value) : DeviceArray(std::vector<T>(count, value)) {}
    T* get() const { return data_.get(); }
    std::vector<T> read(size_t count) const {
        std::vector<T> values(count);
        check(cudaMemcpy(values.data(), get(), count * sizeof(T), cudaMemcpyDeviceToHost),
              "cudaMemcpy to the host");
        return values;
    }

  private:
    std::unique_ptr<T, DeviceFree> data_;
};

// --- Inputs and reference ------------------------------------------------------------------------

__device__ uint64_t random_bits(uint64_t seed, uint64_t index) {
    uint64_t x = seed * 0xd1342543de82ef95ull + index * 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

__global__ void fill(void* out, bool fp8, size_t count, uint64_t seed) {
    for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < count;
         i += size_t{gridDim.x} * blockDim.x) {
        const uint32_t bits = random_bits(seed, i / 4) >> (16 * (i % 4)) & 0xffff;
        if (fp8) {
            // 254 codes: 0x7f and 0xff are NaN.
            const uint32_t code = bits % 254;
            static_cast<uint8_t*>(out)[i] = code + (code >= 0x7f);
        } else {
            static_cast<__nv_bfloat16*>(out)[i] =
                __float2bfloat16_rn(static_cast<int16_t>(bits) / 32768.0f);
        }
    }
}

__global__ void fill_scales(float* out, size_t count, uint64_t seed) {
    for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < count;
         i += size_t{gridDim.x} * blockDim.x)
        out[i] = float((random_bits(seed, i) & 0xffffff) + 1) * (0.01f / 16777216.0f);
}

// One of the two products of a case's experts: out[e][t][c] is the sum over k of in[e][t][k] times
// weights[e][c][k]. in_scales is [expert][k / 128][token], weight_scales is [expert][k /
// 128][column / 128]. CUTLASS's layouts for Hopper have the index along K outside.
struct Product {
    int num_experts, num_tokens, num_columns, depth;
    bool fp8;
    const void* in = nullptr;
    const void* weights = nullptr;
    const float* in_scales = nullptr;
    const float* weight_scales = nullptr;
    __nv_bfloat16* out = nullptr;
};

struct Position {
    int expert, token, column;
};

__device__ Position position_of(const Product& product, uint32_t index) {
    // The corners of the first and the last expert, then random positions.
    if (index < 8)
        return {index & 1 ? product.num_experts - 1 : 0, index & 2 ? product.num_tokens - 1 : 0,
                index & 4 ? product.num_columns - 1 : 0};
    const uint64_t bits = random_bits(77, index);
    return {int((bits & 0xffff) % product.num_experts),
            int((bits >> 16 & 0xffff) % product.num_tokens),
            int((bits >> 32 & 0xffffff) % product.num_columns)};
}

struct Reference {
    double value;
    double scale; // divides the error
};

__device__ double load(const void* data, size_t index, bool fp8) {
    return fp8 ? float(static_cast<const __nv_fp8_e4m3*>(data)[index])
               : float(static_cast<const __nv_bfloat16*>(data)[index]);
}

// Computes one position per block of one warp.
__global__ void reference_at(Product product, Reference* references) {
    const Position at = position_of(product, blockIdx.x);
    const size_t in_row = (size_t(at.expert) * product.num_tokens + at.token) * product.depth;
    const size_t weight_row = (size_t(at.expert) * product.num_columns + at.column) * product.depth;
    double sum = 0, squares = 0;
    for (int k = threadIdx.x; k < product.depth; k += 32) {
        double term = load(product.in, in_row + k, product.fp8) *
                      load(product.weights, weight_row + k, product.fp8);
        if (product.fp8) {
            const size_t block =
                size_t(at.expert) * (product.depth / kScaleBlock) + k / kScaleBlock;
            term *= product.in_scales[block * product.num_tokens + at.token];
            term *= product.weight_scales[block * (product.num_columns / kScaleBlock) +
                                          at.column / kScaleBlock];
        }
        sum += term;
        squares += term * term;
    }
    for (int step = 16; step > 0; step /= 2) {
        sum += __shfl_xor_sync(0xffffffff, sum, step);
        squares += __shfl_xor_sync(0xffffffff, squares, step);
    }
    if (threadIdx.x == 0)
        references[blockIdx.x] = {sum, fmax(fabs(sum), sqrt(squares))};
}

__global__ void errors_at(Product product, const Reference* references, double* errors) {
    const uint32_t index = blockIdx.x * blockDim.x + threadIdx.x;
    const Position at = position_of(product, index);
    const size_t row = size_t(at.expert) * product.num_tokens + at.token;
    const double value = load(product.out, row * product.num_columns + at.column, false);
    const Reference reference = references[index];
    const double error = fabs(value - reference.value);
    errors[index] = reference.scale > 0 ? error / reference.scale : error;
}

// The output is set to NaN before a check, so this also finds elements that were never written.
__global__ void count_not_finite(const uint16_t* out, size_t count, unsigned long long* total) {
    unsigned long long found = 0;
    for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < count;
         i += size_t{gridDim.x} * blockDim.x)
        found += (out[i] & 0x7f80) == 0x7f80;
    if (found != 0)
        atomicAdd(total, found);
}

// --- Variants ------------------------------------------------------------------------------------

// A grouped product, ready for launch.
class Launcher {
  public:
    virtual ~Launcher() = default;
    virtual void launch(cudaStream_t stream) = 0;
};

template <class Stride> Stride stride_of(int64_t leading) {
    constexpr bool first_is_static =
        cute::is_static_v<cute::remove_cvref_t<decltype(cute::get<0>(Stride{}))>>;
    Stride stride{};
    cute::get<first_is_static ? 1 : 0>(stride) = leading;
    return stride;
}

// Pointers to the first element of each group: the groups are step apart.
template <class T> DeviceArray<T*> each(T* first, size_t num_groups, size_t step) {
    std::vector<T*> pointers(num_groups);
    for (size_t g = 0; g < num_groups; ++g)
        pointers[g] = first + g * step;
    return DeviceArray(pointers);
}

using GroupShape = cutlass::gemm::GroupProblemShape<cute::Shape<int, int, int>>;

struct Cooperative {
    static constexpr const char* kName = "cooperative";
    using Bf16 = cutlass::gemm::KernelPtrArrayTmaWarpSpecializedCooperative;
    using Fp8 = cutlass::gemm::KernelPtrArrayTmaWarpSpecializedCooperativeFP8Blockwise;
    using Epilogue = cutlass::epilogue::PtrArrayTmaWarpSpecializedCooperative;
};

struct Pingpong {
    static constexpr const char* kName = "pingpong";
    using Bf16 = cutlass::gemm::KernelPtrArrayTmaWarpSpecializedPingpong;
    using Fp8 = cutlass::gemm::KernelPtrArrayTmaWarpSpecializedPingpongFP8Blockwise;
    using Epilogue = cutlass::epilogue::PtrArrayTmaWarpSpecializedPingpong;
};

template <bool fp8, bool swapped, class Schedule, int tile_m, int tile_n, int tile_k, int cluster_m,
          int cluster_n>
class GroupedGemm : public Launcher {
    using Element = std::conditional_t<fp8, cutlass::float_e4m3_t, cutlass::bfloat16_t>;
    using Out = cutlass::bfloat16_t;
    using Tile = cute::Shape<cute::Int<tile_m>, cute::Int<tile_n>, cute::Int<tile_k>>;
    using Cluster = cute::Shape<cute::Int<cluster_m>, cute::Int<cluster_n>, cute::_1>;
    using LayoutA = cutlass::layout::RowMajor;
    using LayoutB = cutlass::layout::ColumnMajor;
    // The output of the transposed product is column-major, which is the same memory.
    using LayoutD =
        std::conditional_t<swapped, cutlass::layout::ColumnMajor, cutlass::layout::RowMajor>;
    static constexpr int kAlignment = 16 / sizeof(Element), kAlignmentOut = 16 / sizeof(Out);

    using Scales =
        cutlass::detail::Sm90BlockwiseScaleConfig<swapped ? kScaleBlock : 1,
                                                  swapped ? 1 : kScaleBlock, kScaleBlock>;
    using LayoutScalesA = decltype(Scales::deduce_layoutSFA());
    using LayoutScalesB = decltype(Scales::deduce_layoutSFB());
    using TagA = std::conditional_t<fp8, cute::tuple<LayoutA*, LayoutScalesA*>, LayoutA*>;
    using TagB = std::conditional_t<fp8, cute::tuple<LayoutB*, LayoutScalesB*>, LayoutB*>;

    using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
        cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster,
        cutlass::epilogue::collective::EpilogueTileAuto, float, float, void, LayoutD*,
        kAlignmentOut, Out, LayoutD*, kAlignmentOut, typename Schedule::Epilogue,
        cutlass::epilogue::fusion::LinearCombination<Out, float, void>>::CollectiveOp;
    using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
        cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Element, TagA, kAlignment, Element,
        TagB, kAlignment, float, Tile, Cluster,
        cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(
            sizeof(typename Epilogue::SharedStorage))>,
        std::conditional_t<fp8, typename Schedule::Fp8, typename Schedule::Bf16>>::CollectiveOp;
    using Kernel = cutlass::gemm::kernel::GemmUniversal<GroupShape, Mainloop, Epilogue>;
    using Gemm = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;
    using StrideA = typename Kernel::InternalStrideA;
    using StrideB = typename Kernel::InternalStrideB;
    using StrideD = typename Kernel::InternalStrideD;

  public:
    static std::string name() {
        return std::string(swapped ? "swapped " : "") + std::to_string(tile_m) + "x" +
               std::to_string(tile_n) + "x" + std::to_string(tile_k) + " " + Schedule::kName + " " +
               std::to_string(cluster_m) + "x" + std::to_string(cluster_n);
    }

    explicit GroupedGemm(const Product& product) {
        const size_t groups = product.num_experts;
        const size_t tokens = product.num_tokens, columns = product.num_columns,
                     depth = product.depth;
        const int m = swapped ? columns : tokens, n = swapped ? tokens : columns;
        a_ = each(static_cast<const Element*>(product.in), groups, tokens * depth);
        b_ = each(static_cast<const Element*>(product.weights), groups, columns * depth);
        d_ = each(reinterpret_cast<Out*>(product.out), groups, tokens * columns);
        if constexpr (fp8) {
            const size_t blocks = depth / kScaleBlock;
            scales_a_ = each(product.in_scales, groups, blocks * tokens);
            scales_b_ = each(product.weight_scales, groups, blocks * (columns / kScaleBlock));
        }
        if constexpr (swapped) {
            std::swap(a_, b_);
            std::swap(scales_a_, scales_b_);
        }
        host_shapes_.assign(groups, cute::make_shape(m, n, int(depth)));
        shapes_ = DeviceArray(host_shapes_);
        stride_a_ = DeviceArray(groups, stride_of<StrideA>(depth));
        stride_b_ = DeviceArray(groups, stride_of<StrideB>(depth));
        stride_d_ = DeviceArray(groups, stride_of<StrideD>(columns));

        typename Gemm::Arguments arguments{};
        arguments.mode = cutlass::gemm::GemmUniversalMode::kGrouped;
        arguments.problem_shape = {int(groups), shapes_.get(), host_shapes_.data()};
        arguments.mainloop.ptr_A = a_.get();
        arguments.mainloop.dA = stride_a_.get();
        arguments.mainloop.ptr_B = b_.get();
        arguments.mainloop.dB = stride_b_.get();
        if constexpr (fp8) {
            const auto shape = cute::make_shape(m, n, int(depth), 1);
            layout_a_ = DeviceArray<LayoutScalesA>(groups, Scales::tile_atom_to_shape_SFA(shape));
            layout_b_ = DeviceArray<LayoutScalesB>(groups, Scales::tile_atom_to_shape_SFB(shape));
            arguments.mainloop.ptr_SFA = scales_a_.get();
            arguments.mainloop.layout_SFA = layout_a_.get();
            arguments.mainloop.ptr_SFB = scales_b_.get();
            arguments.mainloop.layout_SFB = layout_b_.get();
        }
        arguments.epilogue.thread.alpha = 1.0f;
        arguments.epilogue.thread.beta = 0.0f;
        arguments.epilogue.ptr_D = d_.get();
        arguments.epilogue.dD = stride_d_.get();
        arguments.hw_info = cutlass::KernelHardwareInfo::make_kernel_hardware_info<Kernel>(0);
        cudaGetLastError(); // CUTLASS continues after a failed query
        // Puts tiles of the same weights next to one another, so that memory delivers these weights
        // once.
        using Raster = decltype(arguments.scheduler.raster_order);
        arguments.scheduler.raster_order = swapped ? Raster::AlongN : Raster::AlongM;

        check(Gemm::can_implement(arguments), "can_implement");
        workspace_ = DeviceArray<uint8_t>(Gemm::get_workspace_size(arguments));
        check(gemm_.initialize(arguments, workspace_.get()), "initialize");
        check(cudaDeviceSynchronize(), "initialize");
    }

    void launch(cudaStream_t stream) override { check(gemm_.run(stream), "run"); }

  private:
    std::vector<typename GroupShape::UnderlyingProblemShape> host_shapes_;
    DeviceArray<typename GroupShape::UnderlyingProblemShape> shapes_;
    DeviceArray<const Element*> a_, b_;
    DeviceArray<Out*> d_;
    DeviceArray<const float*> scales_a_, scales_b_;
    DeviceArray<StrideA> stride_a_;
    DeviceArray<StrideB> stride_b_;
    DeviceArray<StrideD> stride_d_;
    DeviceArray<LayoutScalesA> layout_a_;
    DeviceArray<LayoutScalesB> layout_b_;
    DeviceArray<uint8_t> workspace_;
    Gemm gemm_;
};

struct Variant {
    std::string name;
    int min_tokens, max_tokens;
    std::unique_ptr<Launcher> (*make)(const Product&);
};

template <class Gemm> Variant variant(int min_tokens, int max_tokens) {
    return {Gemm::name(), min_tokens, max_tokens,
            [](const Product& product) -> std::unique_ptr<Launcher> {
                return std::make_unique<Gemm>(product);
            }};
}

template <class Schedule, int m, int n, int k, int cluster_m = 1, int cluster_n = 1>
using Bf16 = GroupedGemm<false, false, Schedule, m, n, k, cluster_m, cluster_n>;
template <class Schedule, int m, int n, int k, int cluster_m = 1, int cluster_n = 1>
using Bf16Swapped = GroupedGemm<false, true, Schedule, m, n, k, cluster_m, cluster_n>;
template <class Schedule, int m, int n, int cluster_m = 1, int cluster_n = 1>
using Fp8 = GroupedGemm<true, false, Schedule, m, n, kScaleBlock, cluster_m, cluster_n>;
template <class Schedule, int m, int n, int cluster_m = 1, int cluster_n = 1>
using Fp8Swapped = GroupedGemm<true, true, Schedule, m, n, kScaleBlock, cluster_m, cluster_n>;

// Omits variants that can't be the best: mostly empty tiles, and tiles that read the weights many
// times.
const std::vector<Variant>& variants_of(bool fp8) {
    static const std::vector<Variant> bf16_variants = {
        variant<Bf16<Pingpong, 64, 128, 64>>(1, 256),
        variant<Bf16<Pingpong, 128, 128, 64>>(1, 1024),
        variant<Bf16<Pingpong, 64, 256, 64>>(1, 256),
        variant<Bf16<Cooperative, 128, 256, 64>>(16, 1024),
        variant<Bf16<Pingpong, 128, 128, 64, 2, 1>>(256, 1024),
        variant<Bf16<Cooperative, 128, 256, 64, 2, 1>>(256, 1024),
        variant<Bf16<Cooperative, 256, 128, 64, 1, 2>>(256, 1024),
        variant<Bf16Swapped<Pingpong, 128, 16, 128>>(1, 16),
        variant<Bf16Swapped<Pingpong, 128, 32, 64>>(1, 64),
        variant<Bf16Swapped<Pingpong, 128, 64, 64>>(16, 256),
        variant<Bf16Swapped<Cooperative, 256, 128, 64, 2, 1>>(64, 1024),
    };
    static const std::vector<Variant> fp8_variants = {
        variant<Fp8<Pingpong, 64, 128>>(1, 1024),
        variant<Fp8<Pingpong, 64, 128, 2, 1>>(256, 1024),
        variant<Fp8<Cooperative, 128, 128>>(1, 1024),
        variant<Fp8<Cooperative, 128, 128, 2, 1>>(256, 1024),
        variant<Fp8<Cooperative, 128, 128, 1, 2>>(64, 1024),
        variant<Fp8Swapped<Pingpong, 128, 16>>(1, 16),
        variant<Fp8Swapped<Pingpong, 128, 32>>(1, 64),
        variant<Fp8Swapped<Pingpong, 128, 64>>(16, 1024),
        variant<Fp8Swapped<Cooperative, 128, 128>>(64, 1024),
    };
    return fp8 ? fp8_variants : bf16_variants;
}

// --- Timing --------------------------------------------------------------------------------------

void give_up(int) {
    constexpr char kMessage[] = "cutlass_experts: no progress, given up\n";
    (void)!write(STDERR_FILENO, kMessage, sizeof kMessage - 1);
    _exit(1);
}

// Restarts the watchdog, which ends the process unless it is restarted in time.
void watch() { alarm(kHangSeconds); }

struct Timing {
    double median_us, p10_us, p90_us;
    int num_replays;
};

struct GraphDestroy {
    void operator()(cudaGraphExec_t graph) const { cudaGraphExecDestroy(graph); }
};
using Graph = std::unique_ptr<std::remove_pointer_t<cudaGraphExec_t>, GraphDestroy>;

Graph capture(cudaStream_t stream, const std::vector<Launcher*>& launchers) {
    cudaGraph_t captured;
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "begin capture");
    try {
        for (Launcher* launcher : launchers)
            launcher->launch(stream);
    } catch (...) {
        cudaStreamEndCapture(stream, &captured);
        throw;
    }
    check(cudaStreamEndCapture(stream, &captured), "end capture");
    cudaGraphExec_t graph;
    check(cudaGraphInstantiate(&graph, captured, 0), "cudaGraphInstantiate");
    cudaGraphDestroy(captured);
    return Graph(graph);
}

class Timer {
  public:
    Timer() {
        check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
        check(cudaEventCreate(&begin_), "cudaEventCreate");
        check(cudaEventCreate(&end_), "cudaEventCreate");
    }

    cudaStream_t stream() const { return stream_; }

    // best_us is the best of the variants before, or 0. A variant far from it gets a tenth of the
    // replays.
    Timing time(const Graph& graph, int num_replays, double best_us) {
        double warm_us = 0;
        for (int i = 0; i < kNumWarmUps; ++i)
            warm_us = once(graph);
        if (best_us > 0 && warm_us > 2 * best_us)
            num_replays = std::max(std::min(num_replays, 10), num_replays / 10);
        std::vector<double> us(num_replays);
        for (double& value : us)
            value = once(graph);
        std::sort(us.begin(), us.end());
        const size_t count = us.size();
        return {us[count / 2], us[count / 10], us[count * 9 / 10], num_replays};
    }

  private:
    double once(const Graph& graph) {
        watch();
        check(cudaEventRecord(begin_, stream_), "cudaEventRecord");
        check(cudaGraphLaunch(graph.get(), stream_), "cudaGraphLaunch");
        check(cudaEventRecord(end_, stream_), "cudaEventRecord");
        check(cudaEventSynchronize(end_), "replay");
        float ms;
        check(cudaEventElapsedTime(&ms, begin_, end_), "cudaEventElapsedTime");
        return ms * 1e3;
    }

    cudaStream_t stream_;
    cudaEvent_t begin_, end_;
};

// --- Output --------------------------------------------------------------------------------------

std::string json_string(const std::string& text) {
    std::string out = "\"";
    for (const char c : text) {
        if (c == '"' || c == '\\')
            out += '\\';
        out += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
    }
    return out + "\"";
}

std::string head_of(const char* bench, const Case& test) {
    return "{\"bench\":" + json_string(bench) + ",\"model\":" + json_string(test.model.name) +
           ",\"dtype\":" + json_string(test.fp8 ? "fp8" : "bf16") +
           ",\"experts\":" + std::to_string(test.model.num_experts) +
           ",\"tokens_per_expert\":" + std::to_string(test.num_tokens);
}

std::string head_of(const char* bench, const Case& test, int product, const std::string& variant) {
    return head_of(bench, test) + ",\"product\":" + json_string(kProducts[product]) +
           ",\"variant\":" + json_string(variant);
}

// Ends the process if the CUDA context is lost: nothing works without it.
void fail(const std::string& head, const std::exception& failure) {
    printf("%s,\"error\":%s}\n", head.c_str(), json_string(failure.what()).c_str());
    cudaGetLastError();
    if (cudaDeviceSynchronize() != cudaSuccess) {
        fprintf(stderr, "cutlass_experts: the CUDA context is lost\n");
        _exit(1);
    }
}

// --- A case --------------------------------------------------------------------------------------

class Data {
  public:
    Data(const Case& test, int num_positions) : num_positions_(num_positions) {
        const Model& model = test.model;
        for (int p = 0; p < 2; ++p) {
            Product& product = products_[p];
            product = {model.num_experts, test.num_tokens, p == 0 ? 2 * model.inter : model.hidden,
                       p == 0 ? model.hidden : model.inter, test.fp8};
            const size_t rows = size_t(model.num_experts) * test.num_tokens;
            const size_t weight_rows = size_t(model.num_experts) * product.num_columns;
            product.in = matrix(rows * product.depth, test.fp8, 11 + p);
            product.weights = matrix(weight_rows * product.depth, test.fp8, 21 + p);
            const size_t blocks = product.depth / kScaleBlock;
            product.in_scales = test.fp8 ? scales(rows * blocks, 31 + p) : nullptr;
            product.weight_scales =
                test.fp8 ? scales(weight_rows / kScaleBlock * blocks, 41 + p) : nullptr;
            out_counts_[p] = rows * product.num_columns;
            product.out = reinterpret_cast<__nv_bfloat16*>(bytes(out_counts_[p] * 2));
            references_[p] = DeviceArray<Reference>(num_positions);
            reference_at<<<num_positions, 32>>>(product, references_[p].get());
            check(cudaGetLastError(), "inputs and reference");
        }
        errors_ = DeviceArray<double>(num_positions);
        num_not_finite_ = DeviceArray<unsigned long long>(1);
        check(cudaDeviceSynchronize(), "inputs and reference");
    }

    const Product& product(int index) const { return products_[index]; }

    // The largest error in the graph's output.
    double max_error(int index, const Graph& graph, cudaStream_t stream) {
        const Product& product = products_[index];
        check(cudaMemset(product.out, 0xff, out_counts_[index] * 2), "cudaMemset");
        check(cudaMemset(num_not_finite_.get(), 0, sizeof(unsigned long long)), "cudaMemset");
        check(cudaDeviceSynchronize(), "cudaMemset");
        check(cudaGraphLaunch(graph.get(), stream), "cudaGraphLaunch");
        check(cudaStreamSynchronize(stream), "first launch");
        errors_at<<<num_positions_ / 256, 256>>>(product, references_[index].get(), errors_.get());
        count_not_finite<<<1024, 256>>>(reinterpret_cast<const uint16_t*>(product.out),
                                        out_counts_[index], num_not_finite_.get());
        check(cudaGetLastError(), "check");
        const unsigned long long num_not_finite = num_not_finite_.read(1)[0];
        if (num_not_finite != 0)
            throw Failure(std::to_string(num_not_finite) + " of " +
                          std::to_string(out_counts_[index]) +
                          " elements are not written or not finite");
        const std::vector<double> errors = errors_.read(num_positions_);
        return *std::max_element(errors.begin(), errors.end());
    }

  private:
    uint8_t* bytes(size_t count) {
        memory_.emplace_back(count);
        return memory_.back().get();
    }

    void* matrix(size_t count, bool fp8, uint64_t seed) {
        uint8_t* data = bytes(count * (fp8 ? 1 : 2));
        fill<<<2048, 256>>>(data, fp8, count, seed);
        return data;
    }

    float* scales(size_t count, uint64_t seed) {
        auto* data = reinterpret_cast<float*>(bytes(count * sizeof(float)));
        fill_scales<<<256, 256>>>(data, count, seed);
        return data;
    }

    int num_positions_;
    Product products_[2];
    size_t out_counts_[2];
    DeviceArray<Reference> references_[2];
    DeviceArray<double> errors_;
    DeviceArray<unsigned long long> num_not_finite_;
    std::vector<DeviceArray<uint8_t>> memory_;
};

// The best variants of a product so far.
struct Best {
    const Variant* variant = nullptr;
    double us = 0;
};

void run_variant(const Case& test, int p, const Variant& variant, Data& data, Timer& timer,
                 const Options& options, Best& best) {
    const std::unique_ptr<Launcher> launcher = variant.make(data.product(p));
    const Graph graph = capture(timer.stream(), {launcher.get()});
    // The check covers the timed object: the graph.
    const double error = data.max_error(p, graph, timer.stream());
    const bool right = error <= (test.fp8 ? kToleranceFp8 : kTolerance);
    printf("%s,\"positions\":%d,\"max_rel\":%.3g%s}\n",
           head_of("cutlass_check", test, p, variant.name).c_str(), options.num_positions, error,
           right ? "" : ",\"error\":\"wrong\"");
    if (!right)
        throw Failure("wrong");

    const Timing timing = timer.time(graph, options.num_replays, best.us);
    if (best.variant == nullptr || timing.median_us < best.us)
        best = {&variant, timing.median_us};
    printf("%s,\"us\":%.2f,\"p10_us\":%.2f,\"p90_us\":%.2f,\"replays\":%d,\"without\":%s}\n",
           head_of("cutlass", test, p, variant.name).c_str(), timing.median_us, timing.p10_us,
           timing.p90_us, timing.num_replays, kWithout);
}

void run_both(const Case& test, const Best (&best)[2], const Data& data, Timer& timer,
              const Options& options) {
    if (best[0].variant == nullptr || best[1].variant == nullptr)
        throw Failure("no variant was right");
    char both[128] = "";
    std::string error;
    try {
        const std::unique_ptr<Launcher> first = best[0].variant->make(data.product(0));
        const std::unique_ptr<Launcher> second = best[1].variant->make(data.product(1));
        const Graph graph = capture(timer.stream(), {first.get(), second.get()});
        const Timing pair = timer.time(graph, options.num_replays, 0);
        snprintf(both, sizeof both, ",\"both_us\":%.2f,\"both_p10_us\":%.2f,\"both_p90_us\":%.2f",
                 pair.median_us, pair.p10_us, pair.p90_us);
    } catch (const std::exception& failure) {
        error = failure.what();
    }
    printf("%s,\"us\":%.2f%s,\"variants\":[%s,%s],\"without\":%s}\n",
           head_of("cutlass_both", test).c_str(), best[0].us + best[1].us, both,
           json_string(best[0].variant->name).c_str(), json_string(best[1].variant->name).c_str(),
           kWithout);
    if (!error.empty())
        throw Failure(error);
}

// Returns the number of failures.
int run_case(const Case& test, Timer& timer, const Options& options) {
    int num_failed = 0;
    try {
        watch();
        Data data(test, options.num_positions);
        Best best[2];
        for (int p = 0; p < 2; ++p) {
            for (const Variant& variant : variants_of(test.fp8)) {
                if (test.num_tokens < variant.min_tokens || test.num_tokens > variant.max_tokens)
                    continue;
                try {
                    watch();
                    run_variant(test, p, variant, data, timer, options, best[p]);
                } catch (const std::exception& failure) {
                    ++num_failed;
                    fail(head_of("cutlass", test, p, variant.name), failure);
                }
            }
        }
        watch();
        run_both(test, best, data, timer, options);
    } catch (const std::exception& failure) {
        ++num_failed;
        fail(head_of("cutlass_both", test), failure);
    }
    return num_failed;
}

int run(const Options& options) {
    int num_failed = 0;
    setvbuf(stdout, nullptr, _IOLBF, BUFSIZ);
    try {
        signal(SIGALRM, give_up);
        watch();
        cudaDeviceProp properties;
        check(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties");
        if (properties.major != 9)
            throw Failure(std::string(properties.name) + " is not of compute capability 9.0");
        Timer timer;
        printf("{\"bench\":\"cutlass_device\",\"device\":%s,\"sms\":%d,\"cutlass\":"
               "\"%d.%d.%d\",\"replays\":%d}\n",
               json_string(properties.name).c_str(), properties.multiProcessorCount, CUTLASS_MAJOR,
               CUTLASS_MINOR, CUTLASS_PATCH, options.num_replays);
        for (const Case& test : options.cases)
            num_failed += run_case(test, timer, options);
    } catch (const std::exception& failure) {
        ++num_failed;
        printf("{\"bench\":\"cutlass\",\"error\":%s}\n", json_string(failure.what()).c_str());
    }
    return num_failed == 0 ? 0 : 1;
}

} // namespace

int main(int argc, char** argv) { return run(parse(argc, argv)); }
