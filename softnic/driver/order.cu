// One kernel for each agreement that posters reach by memory alone, and for each scope that a NIC
// may read from; and one for the order that copies by stores must establish. The step `mlx5` of
// `cargo xtask test` compares their machine code: it must have these fences, acquires, releases and
// accesses in this order and no others.
#include "switchyard/comm/ibgda.h"
#include "switchyard/comm/mlx5/receive.h"
#include "switchyard/comm/proxy.h"
#include "switchyard/comm/put_get.cuh"

namespace {

using namespace switchyard::comm;

struct Params {
    sy_mlx5_qp qp;
    sy_mlx5_bound bound;
    sy_proxy_peer peer;
    sy_proxy_lane lane;
    sy_mlx5_rq rq;
    sy_link link;
    Immediate* taken;
    uint64_t end;
    uint64_t* result;
};

} // namespace

extern "C" __global__ void poll_one_entry(const __grid_constant__ Params p) {
    *p.result = mlx5::poll_collapsed<Scope::kSys>(p.qp);
}

extern "C" __global__ void poll_a_ring(const __grid_constant__ Params p) {
    *p.result = mlx5::poll_ring<Scope::kSys>(p.qp);
}

// The same where the NIC is the GPU's own.
extern "C" __global__ void poll_one_entry_of_this_gpu(const __grid_constant__ Params p) {
    *p.result = mlx5::poll_collapsed<Scope::kGpu>(p.qp);
}

extern "C" __global__ void poll_a_ring_of_this_gpu(const __grid_constant__ Params p) {
    *p.result = mlx5::poll_ring<Scope::kGpu>(p.qp);
}

extern "C" __global__ void take_immediate_data(const __grid_constant__ Params p) {
    *p.result = try_receive<Scope::kSys>(p.rq, p.taken);
}

extern "C" __global__ void take_immediate_data_of_this_gpu(const __grid_constant__ Params p) {
    *p.result = try_receive<Scope::kGpu>(p.rq, p.taken);
}

extern "C" __global__ void take_the_turn(const __grid_constant__ Params p) {
    *p.result = mlx5::load_turn(p.qp);
}

extern "C" __global__ void pass_the_turn(const __grid_constant__ Params p) {
    mlx5::pass_turn(p.qp, p.end);
}

extern "C" __global__ void announce_as_the_owner(const __grid_constant__ Params p) {
    mlx5::announce<Scope::kSys>(p.qp, p.end);
}

extern "C" __global__ void wait_for_commands(const __grid_constant__ Params p) {
    *p.result = proxy::detail::wait_completed(p.peer, p.lane, p.end, SY_TAG_PROXY_ROOM);
}

extern "C" __global__ void post_a_command(const __grid_constant__ Params p) {
    sy_proxy_lane lane = p.lane;
    lane.budget = UINT32_MAX;
    *p.result = proxy::post<Warp>(
        p.peer, lane, 1, [&](uint32_t) { return proxy::detail::head(p.peer, SY_PROXY_NOP, 0); });
}

extern "C" __global__ void put_by_stores(const __grid_constant__ Params p) {
    put_nbi_warp(p.link, 0, p.taken, p.end);
}

extern "C" __global__ void wait_for_stores(const __grid_constant__ Params p) {
    *p.result = quiet(p.link);
}
