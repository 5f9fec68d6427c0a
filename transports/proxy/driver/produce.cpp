// The producers' kernel with fibres for threads, for a GPU in software. Compiled with simt.hpp in
// front.
#include "switchyard/impls/proxy.cuh"

extern "C" void sy_proxy_test_produce(const sy_proxy_produce_params* params) {
    const auto kernel = [](sy_proxy_produce_params all) { switchyard::impls::proxy_produce(all); };
    simt::run<sy_proxy_produce_params>(kernel, *params, params->num_blocks,
                                       SY_PROXY_PRODUCE_THREADS, false);
}
