// Every call of a link over IBGDA in one kernel. It checks that the calls compile for a GPU and
// that their order holds for NICs outside of it.
#include "switchyard/comm/ibgda_link.h"

namespace {

using namespace switchyard::comm;

struct Params {
    sy_link link;
    uint64_t offset, num_bytes, word_offset;
    uint32_t* has_failed;
};

} // namespace

__global__ void all_calls_of_a_link(const __grid_constant__ Params params) {
    const ibgda::Send sends[2] = {{params.offset, params.num_bytes, 0, false},
                                  {params.word_offset, sizeof(uint64_t), 1, true}};
    ibgda::send<Warp>(params.link, blockIdx.x, sends);
    ibgda::put_rows_warp(params.link, blockIdx.x, threadIdx.x % 2 == 0, params.offset,
                         params.num_bytes, params.word_offset, 1);
    if (threadIdx.x % 32 == 0) {
        ibgda::set(params.link, blockIdx.x, params.word_offset, 1);
        ibgda::add(params.link, blockIdx.x, params.word_offset, 1);
        ibgda::put_set(params.link, blockIdx.x, params.offset, params.num_bytes, params.word_offset,
                       1);
        ibgda::quiet(params.link);
        *params.has_failed = ibgda::has_failed(params.link);
    }
}
