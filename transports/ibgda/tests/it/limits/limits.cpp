// Posts more than a queue or a block takes, on queues that no NIC reads. Reports each call that was
// not refused, or refused with another status. With simt.hpp in front of it a warp is 32 fibres,
// otherwise one thread stands for it.
#include <cstdio>
#include <cstring>
#include <optional>

#include "switchyard/comm/ibgda.h"

namespace {

using namespace switchyard::comm;

#if defined(SY_SIMT)
uint32_t lane_idx() { return threadIdx.x & 31; }
#else
uint32_t lane_idx() { return 0; }
#endif

int num_wrong = 0;

#define EXPECT(condition)                                                                          \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            printf("line %d, depth %u: %s\n", __LINE__, queue.qp.sq_depth, #condition);            \
            ++num_wrong;                                                                           \
        }                                                                                          \
    } while (0)

// A queue and who posts on it; its memory is never completed to.
struct Queue {
    alignas(64) uint8_t sq[1024 * SY_MLX5_BLOCK_BYTES];
    alignas(64) uint8_t cq[SY_MLX5_CQE_BYTES];
    alignas(64) sy_mlx5_queue_state state;
    alignas(8) uint32_t dbrec[2];
    uint64_t doorbell, scratch;
    sy_error_word error;
    sy_mlx5_qp qp;
    sy_mlx5_bound bound;

    void reset(uint32_t depth) {
        memset(this, 0, sizeof(*this));
        memset(cq, SY_MLX5_CQE_FILL, sizeof(cq));
        qp.sq = reinterpret_cast<uint64_t>(sq);
        qp.cq = reinterpret_cast<uint64_t>(cq);
        qp.dbrec = qp.cq_dbrec = reinterpret_cast<uint64_t>(dbrec);
        qp.doorbell = reinterpret_cast<uint64_t>(&doorbell);
        qp.state = reinterpret_cast<uint64_t>(&state);
        qp.scratch = reinterpret_cast<uint64_t>(&scratch);
        qp.qpn = 0x41;
        qp.sq_depth = depth;
        qp.cq_depth = 1;
        qp.flags = SY_MLX5_CQ_COLLAPSED;
        qp.batch = depth / 4;
        qp.max_message_bytes = 4096;
        bound = {&error, nullptr, 1'000'000'000};
    }
};

Queue queue;

// The leader's word, behind the work of all lanes.
template <class Group> uint64_t seen(const uint64_t& word) {
    return Group::leader([&] { return word; });
}

// By `post(num_wqes, build)`, on a queue that is fresh for every case.
template <class Group, class Fresh, class Post> void groups(Fresh&& fresh, Post&& post) {
    const auto nop = [](uint32_t, const mlx5::Control& control) { return mlx5::make_nop(control); };
    const uint32_t quarter = queue.qp.sq_depth / 4;
    const uint32_t most = quarter < Group::kMostRequests ? quarter : Group::kMostRequests;
    for (const uint32_t num : {0u, most + 1, quarter + 1, 4 * quarter + 1, UINT32_MAX}) {
        fresh();
        EXPECT(post(num, nop) == SY_MLX5_ARGUMENT);
        EXPECT(seen<Group>(queue.state.reserved) == 0 && seen<Group>(queue.state.published) == 0);
        EXPECT(seen<Group>(queue.state.error) == 0 && seen<Group>(queue.doorbell) == 0);
        // The queue is of use as before.
        EXPECT(post(most, nop) == SY_MLX5_OK);
        EXPECT(seen<Group>(queue.state.published) == most && seen<Group>(queue.doorbell) != 0);
    }
    for (const uint32_t num_bytes : {28u, 29u, 1u << 20, UINT32_MAX}) {
        fresh();
        const uint8_t bytes[28] = {1, 2, 3};
        const uint32_t status = post(8, [&](uint32_t lane, const mlx5::Control& control) {
            return mlx5::make_write_inline_bytes(control, {64, 7}, bytes,
                                                 lane == 5 ? num_bytes : 4);
        });
        if (num_bytes == 28) {
            EXPECT(status == SY_MLX5_OK && seen<Group>(queue.state.published) == 8);
            continue;
        }
        EXPECT(status == SY_MLX5_ARGUMENT);
        EXPECT(SY_MLX5_ERROR_CODE(seen<Group>(queue.state.error)) == SY_MLX5_ARGUMENT);
        // Nothing of the group, and nothing that comes behind it.
        EXPECT(post(1, nop) == SY_MLX5_ARGUMENT);
        EXPECT(seen<Group>(queue.state.published) == 0 && seen<Group>(queue.doorbell) == 0);
        // The replacement there would do nothing.
        const uint32_t head = *reinterpret_cast<const uint32_t*>(queue.sq + 5 * 64);
        EXPECT((__builtin_bswap32(head) & 0xff) == SY_MLX5_OPCODE_NOP);
    }
}

template <class Group> void all(uint32_t depth) {
    const auto reset = [&] {
        Group::leader([&] {
            queue.reset(depth);
            return uint64_t{0};
        });
    };
    reset();
    groups<Group>(reset, [&](uint32_t num_wqes, auto&& build) {
        return mlx5::post<Scope::kSys, Group>(queue.qp, queue.bound, num_wqes, build);
    });
    std::optional<OwnedQueue<Scope::kSys, Group>> owned;
    const auto own = [&] {
        reset();
        owned.emplace(queue.qp, queue.bound);
    };
    own();
    groups<Group>(own,
                  [&](uint32_t num_wqes, auto&& build) { return owned->post(num_wqes, build); });
}

void run(uint32_t depth) {
    all<Warp>(depth);
    if (lane_idx() == 0)
        all<Thread>(depth);
}

} // namespace

// Of an array the compiler says so.
mlx5::Wqe of_an_array(const mlx5::Control& control) {
#if defined(SY_TOO_LONG)
    const uint8_t bytes[SY_MLX5_MAX_INLINE_BYTES + 1] = {};
#else
    const uint8_t bytes[SY_MLX5_MAX_INLINE_BYTES] = {};
#endif
    return mlx5::make_write_inline_bytes(control, {64, 7}, bytes);
}

int main() {
    for (const uint32_t depth : {128u, 1024u}) {
#if defined(SY_SIMT)
        simt::run(run, depth, 1, 32, false);
#else
        run(depth);
#endif
    }
    if (of_an_array({1, 2, 0}).num_segments != 4)
        ++num_wrong;
    return num_wrong != 0;
}
