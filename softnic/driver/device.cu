// Every device function of the IBGDA path in one kernel per scope: the check that they compile for
// a GPU.
#include "switchyard/comm/ibgda.h"
#include "switchyard/comm/mlx5/receive.h"

namespace {

using namespace switchyard::comm;

struct Params {
    sy_mlx5_qp qp;
    sy_mlx5_bound bound;
    LocalBuffer local;
    RemoteBuffer remote;
    RemoteBuffer counter;
    uint64_t num_bytes;
    const sy_ibgda_peer* peer;
    sy_mlx5_rq rq;
    Immediate* taken;
    Status* status;
};

template <Scope kScope> __device__ void run(const Params& p) {
    Status status =
        put_add_nbi_warp<kScope>(p.qp, p.local, p.remote, p.num_bytes, p.counter, 1, p.bound);
    status |= get_nbi_warp<kScope>(p.qp, p.local, p.remote, p.num_bytes, p.bound);
    status |= put_nbi_warp<kScope>(p.qp, p.local, p.remote, p.num_bytes, p.bound);
    status |=
        put_signal_nbi_warp<kScope>(p.qp, p.local, p.remote, p.num_bytes, p.counter, 1, p.bound);
    status |= peer::put_nbi_warp<kScope>(*p.peer, blockIdx.x, 0, p.num_bytes);
    OwnedQueue<kScope> own(p.qp, p.bound);
    status |= put_nbi(own, p.local, p.remote, p.num_bytes);
    status |= get_nbi(own, p.local, p.remote, p.num_bytes);
    status |= put_add_nbi(own, p.local, p.remote, p.num_bytes, p.counter, 1);
    status |= put_signal_nbi(own, p.local, p.remote, p.num_bytes, p.counter, 1);
    status |= amo_nonfetch_add(own, p.counter, 1);
    status |= signal(own, p.counter, 1);
    status |= quiet(own);
    if (threadIdx.x % 32 == 0) {
        status |= amo_nonfetch_add<kScope>(p.qp, p.counter, 1, p.bound);
        status |= amo_nonfetch_add32<kScope>(p.qp, p.counter, 1, p.bound);
        status |= amo_nonfetch_add_fields<kScope>(p.qp, p.counter, 1, 1ull << 31, p.bound);
        status |= signal<kScope>(p.qp, p.counter, 1, p.bound);
        status |= put_imm_nbi<kScope>(p.qp, p.local, p.remote, 64, 7, p.bound);
        status |= quiet_gets<kScope>(p.qp, p.local, p.bound);
        status |= quiet<kScope>(p.qp, p.bound);
        status |= peer::amo_nonfetch_add<kScope>(*p.peer, blockIdx.x, 0, 1);
        status |= peer::signal<kScope>(*p.peer, blockIdx.x, 8, 1);
        status |= peer::quiet<kScope>(*p.peer, blockIdx.x);
        status |= receive_imm<kScope>(p.rq, p.bound, p.taken);
        *p.status = status;
    }
}

} // namespace

__global__ void all_operations_gpu_scope(const __grid_constant__ Params params) {
    run<Scope::kGpu>(params);
}

__global__ void all_operations_sys_scope(const __grid_constant__ Params params) {
    run<Scope::kSys>(params);
}

// The work of the fused kernels for each row: one put with its flag.
__global__ void put_with_flag(const __grid_constant__ Params params) {
    *params.status = put_add_nbi_warp(params.qp, params.local, params.remote, params.num_bytes,
                                      params.counter, 1, params.bound);
}

// The same by a warp that has the queue to itself, again and again.
__global__ void put_with_flag_by_the_owner(const __grid_constant__ Params params) {
    OwnedQueue<Scope::kSys> queue(params.qp, params.bound);
    Status status = SY_MLX5_OK;
    for (uint32_t i = 0; i < 1000 && status == SY_MLX5_OK; ++i)
        status = put_signal_nbi(queue, params.local, params.remote, params.num_bytes,
                                params.counter, i + 1);
    *params.status = status;
}
