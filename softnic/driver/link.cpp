// Calls of links over IBGDA, and copies over them and over stores, made by a warp of 32 fibres and
// callable from Rust. Compiled with `simt.hpp` in front, like kernels that run on the host.
#include "switchyard/comm/ibgda_link.h"
#include "switchyard/comm/put_get.cuh"

#ifndef SY_LINK
#define SY_LINK sy_link_product
#endif

namespace {

using namespace switchyard::comm;

// As `Job` in lib.rs.
struct Job {
    const sy_ibgda_peer* peer;
    uint32_t call, lane;
    uint64_t offset, num_bytes;
    uint64_t word_offset, value;
    uint64_t stride;
    uint32_t num_words, rows;
    uint32_t* answer;
    uint8_t* local; // of copies: source or target
    uint8_t* stores; // of copies over stores: the peer's slot
};

// The last byte is another lane's.
bool has_come(const uint8_t* to, const uint8_t* from, uint64_t num_bytes) {
    return num_bytes == 0 || to[num_bytes - 1] == from[num_bytes - 1];
}

void make(const Job job) {
    const sy_link link = {job.peer->mirror, reinterpret_cast<uint64_t>(job.peer), SY_PATH_IBGDA, 0};
    const uint32_t lane_idx = threadIdx.x & 31;
    switch (job.call) {
    case 0:
        if (lane_idx == 0)
            ibgda::set(link, job.lane, job.word_offset, job.value);
        break;
    case 1:
        if (lane_idx == 0)
            ibgda::add(link, job.lane, job.word_offset, job.value);
        break;
    case 2:
        if (lane_idx == 0)
            ibgda::put_set(link, job.lane, job.offset, job.num_bytes, job.word_offset, job.value);
        break;
    case 3: {
        const ibgda::Send sends[2] = {
            {job.offset, job.num_bytes, 0, false},
            {job.word_offset, uint64_t{job.num_words} * 8, job.value, true}};
        ibgda::send<Warp>(link, job.lane, sends);
        break;
    }
    case 4:
        ibgda::put_rows_warp(link, job.lane, (job.rows >> lane_idx & 1) != 0,
                             job.offset + lane_idx * job.stride, job.num_bytes,
                             job.word_offset + lane_idx * 8, job.value);
        break;
    case 5:
        if (lane_idx == 0)
            ibgda::quiet(link);
        break;
    case 6:
        if (lane_idx == 0)
            *job.answer = ibgda::has_failed(link);
        break;
    case 7:
        put_nbi_warp<kAnyWay>(link, job.offset, job.local, job.num_bytes);
        break;
    case 8:
        get_nbi_warp<kAnyWay>(link, job.offset, job.local, job.num_bytes);
        break;
    case 9:
        if (lane_idx == 0)
            *job.answer = quiet<kAnyWay>(link);
        break;
    case 10:
        if (lane_idx == 0)
            *job.answer = quiet_gets<kAnyWay>(link, job.local);
        break;
    case 11: {
        const sy_link direct = {reinterpret_cast<uint64_t>(job.stores), 0, SY_PATH_DIRECT, 0};
        put_nbi_warp<kAnyWay>(direct, job.offset, job.local, job.num_bytes);
        if (lane_idx == 0)
            *job.answer = has_come(job.stores + job.offset, job.local, job.num_bytes);
        break;
    }
    case 12: {
        const sy_link direct = {reinterpret_cast<uint64_t>(job.stores), 0, SY_PATH_DIRECT, 0};
        get_nbi_warp<kAnyWay>(direct, job.offset, job.local, job.num_bytes);
        if (lane_idx == 0)
            *job.answer = has_come(job.local, job.stores + job.offset, job.num_bytes);
        break;
    }
    default:
        break;
    }
}

// Copies take their block's index for the lane.
void make_in_lane(const Job job) {
    if (blockIdx.x == job.lane)
        make(job);
}

} // namespace

extern "C" void SY_LINK(const void* job) {
    const Job& asked = *static_cast<const Job*>(job);
    simt::run(make_in_lane, asked, asked.lane + 1, 32, false);
}
