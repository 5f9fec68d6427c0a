// Kernels of the proxy, by names that need no template arguments.
#include "switchyard/comm/proxy_link.h"
#include "switchyard/impls/link_calls.cuh"
#include "switchyard/impls/proxy.cuh"

extern "C" __global__ void __launch_bounds__(SY_PROXY_PRODUCE_THREADS)
    sy_proxy_produce(const __grid_constant__ sy_proxy_produce_params params) {
    switchyard::impls::proxy_produce(params);
}

extern "C" __global__ void __launch_bounds__(SY_PEER_COPY_THREADS)
    sy_peer_copy(const __grid_constant__ sy_peer_copy_params params) {
    switchyard::impls::peer_copy(params);
}

// The calls of a link, for tests; its path may be a proxy.
extern "C" __global__ void __launch_bounds__(32)
    sy_link_calls(const __grid_constant__ switchyard::impls::LinkCallsParams params) {
    switchyard::impls::link_calls<switchyard::comm::kAnyWay>(params);
}

// Every device function once: the check that they compile for a GPU.
extern "C" __global__ void sy_proxy_all_operations(const sy_proxy_peer* peer, const sy_link* link,
                                                   uint32_t* status) {
    namespace proxy = switchyard::comm::proxy;
    uint32_t result = proxy::put_nbi_warp(*peer, blockIdx.x, 0, 64);
    result |= proxy::put_add_nbi_warp(*peer, blockIdx.x, 0, 64, 128, 1);
    result |= proxy::put_signal_nbi_warp(*peer, blockIdx.x, 0, 64, 136, 7);
    result |= proxy::get_nbi_warp(*peer, blockIdx.x, 0, 64);
    const proxy::Send sends[2] = {{0, 4096, 0, false}, {4096, 512, 9, true}};
    proxy::send<switchyard::comm::Warp>(*link, blockIdx.x, sends);
    proxy::put_rows_warp(*link, blockIdx.x, threadIdx.x % 3 == 0, 64 * threadIdx.x, 64,
                         8192 + 8 * threadIdx.x, 5);
    if (threadIdx.x % 32 == 0) {
        proxy::set(*link, blockIdx.x, 128, 1);
        proxy::put_set(*link, blockIdx.x, 0, 64, 128, 1);
        proxy::add(*link, blockIdx.x, 128, 1);
        proxy::quiet(*link);
        result |= proxy::has_failed(*link, blockIdx.x) ? 1 : 0;
        result |= proxy::amo_nonfetch_add(*peer, blockIdx.x, 128, 1);
        result |= proxy::signal(*peer, blockIdx.x, 136, 8);
        result |= proxy::quiet(*peer, blockIdx.x);
        result |= proxy::failure(*peer);
        *status = result;
    }
}
