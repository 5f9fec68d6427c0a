// Launcher of the expert stage.
#include <cstring>

#include <cuda.h>

#include "launch.cuh"

#include "switchyard/impls/expert_gather.cuh"
#include "switchyard/impls/expert_product.cuh"

using namespace switchyard;

namespace {

// Kernels of more shared memory than the default ask for it once per device.
template <class Kernel> int allow_shared(Kernel kernel) {
    return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                impls::kGemmSharedBytes) == cudaSuccess
               ? SY_OK
               : SY_LAUNCH_CUDA;
}

template <class Kernel>
int launch_one(Kernel kernel, const sy_expert_compute_params& params, const LaunchPlan& size,
               uint32_t shared_bytes, bool overlaps, sy_stream stream) {
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(size.num_blocks);
    config.blockDim = dim3(size.num_threads);
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    config.attrs = &attribute;
    config.numAttrs = overlaps ? 1 : 0;
    return cudaLaunchKernelEx(&config, kernel, params) == cudaSuccess ? SY_OK : SY_LAUNCH_CUDA;
}

template <bool kFp8> int launch_gemms(const sy_expert_compute_params& params, sy_stream stream) {
    const bool is_direct = params.geometry.dtype == params.weights_dtype;
    const auto gate_up = is_direct ? impls::expert_gemm_kernel<kFp8, true, true>
                                   : impls::expert_gemm_kernel<kFp8, true, false>;
    const auto down = impls::expert_gemm_kernel<kFp8, false, false>;
    for (const auto kernel : {gate_up, down})
        if (const int code = allow_shared(kernel); code != SY_OK)
            return code;
    if (!is_direct) {
        const auto gather = impls::expert_gather_kernel<!kFp8>;
        if (const int code = launch_one(gather, params, plan(params), 0,
                                        (params.flags & SY_LAUNCH_FLAG_PDL) != 0, stream);
            code != SY_OK)
            return code;
    }
    const LaunchPlan size = plan_products(params);
    if (const int code = launch_one(gate_up, params, size, impls::kGemmSharedBytes,
                                    !is_direct || (params.flags & SY_LAUNCH_FLAG_PDL) != 0, stream);
        code != SY_OK)
        return code;
    return launch_one(down, params, size, impls::kGemmSharedBytes, true, stream);
}

using Encode = decltype(&cuTensorMapEncodeTiled);

Encode find_encode() {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                         cudaEnableDefault, &found) != cudaSuccess ||
        found != cudaDriverEntryPointSuccess)
        return nullptr;
    return reinterpret_cast<Encode>(function);
}

bool encode(uint64_t (&map)[16], uint32_t dtype, uint64_t base, const sy_map_shape& shape) {
    static const Encode encode_tiled = find_encode();
    const uint32_t element_strides[5] = {1, 1, 1, 1, 1};
    alignas(64) CUtensorMap encoded;
    if (encode_tiled == nullptr ||
        encode_tiled(&encoded,
                     dtype == SY_DTYPE_F8_E4M3 ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                                               : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                     shape.rank, reinterpret_cast<void*>(base), shape.dims, shape.strides,
                     shape.extent, element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE,
                     CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                     CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) != CUDA_SUCCESS)
        return false;
    static_assert(sizeof(encoded) == sizeof(map), "128 bytes");
    memcpy(map, &encoded, sizeof(map));
    return true;
}

} // namespace

extern "C" int sy_describe_layer(sy_layer_weights* layer, uint32_t hidden, uint32_t inter,
                                 uint32_t num_local_experts) {
    if (layer == nullptr || layer->gate_up == 0 || layer->down == 0)
        return SY_LAUNCH_NULL;
    if (layer->dtype != SY_DTYPE_BF16 && layer->dtype != SY_DTYPE_F8_E4M3)
        return SY_LAUNCH_DTYPE;
    const auto gate_up = sy_gate_up_map(hidden, inter, num_local_experts, layer->dtype);
    const auto down = sy_down_map(hidden, inter, num_local_experts, layer->dtype);
    return encode(layer->gate_up_map, layer->dtype, layer->gate_up, gate_up) &&
                   encode(layer->down_map, layer->dtype, layer->down, down)
               ? SY_OK
               : SY_LAUNCH_CUDA;
}

extern "C" int sy_launch_expert_compute(const sy_expert_compute_params* params, sy_stream stream) {
    if (params == nullptr)
        return SY_LAUNCH_NULL;
    if (const int code = check(*params); code != SY_OK)
        return code;
    return params->weights_dtype == SY_DTYPE_F8_E4M3 ? launch_gemms<true>(*params, stream)
                                                     : launch_gemms<false>(*params, stream);
}
