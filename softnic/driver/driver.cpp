// The device functions, callable from Rust. One thread stands for a warp.
#include "switchyard/comm/ibgda.h"
#include "switchyard/comm/mlx5/receive.h"

#ifndef SY_DRIVER
#define SY_DRIVER sy_driver_product
#endif

namespace {

using namespace switchyard::comm;

struct Fields {
    uint32_t qpn;
    uint32_t index;
    uint32_t flags;
    uint32_t lkey;
    uint64_t local;
    uint64_t remote;
    uint32_t rkey;
    uint32_t num_bytes;
    uint64_t value;
    uint64_t boundary;
};

// Kinds as in `Kind` of lib.rs. Words that a request does not have are left alone.
void build(uint32_t kind, const Fields& f, const uint8_t* bytes, uint8_t* out) {
    const mlx5::Control control{f.qpn, f.index, f.flags};
    const LocalBuffer local{f.local, f.lkey};
    const RemoteBuffer remote{f.remote, f.rkey};
    const uint32_t value = static_cast<uint32_t>(f.value);
    const uint32_t boundary = static_cast<uint32_t>(f.boundary);
    mlx5::Wqe wqe = mlx5::make_nop(control);
    switch (kind) {
    case 1:
        wqe = mlx5::make_dump(control, local, f.num_bytes);
        break;
    case 2:
        wqe = mlx5::make_write(control, local, remote, f.num_bytes);
        break;
    case 3:
        wqe = mlx5::make_write_inline(control, remote, f.value, f.num_bytes);
        break;
    case 4:
        wqe = mlx5::make_write_inline_bytes(control, remote, bytes, f.num_bytes);
        break;
    case 5:
        wqe = mlx5::make_write_imm(control, local, remote, f.num_bytes, value);
        break;
    case 6:
        wqe = mlx5::make_read(control, local, remote, f.num_bytes);
        break;
    case 7:
        wqe = mlx5::make_fetch_add(control, local, remote, f.value);
        break;
    case 8:
        wqe = mlx5::make_masked_fetch_add4(control, local, remote, value, boundary);
        break;
    case 9:
        wqe = mlx5::make_masked_fetch_add8(control, local, remote, f.value, f.boundary);
        break;
    case 10:
        wqe = mlx5::make_write_inline_words(control, remote, f.value, f.num_bytes / 8);
        break;
    default:
        break;
    }
    sy_mlx5_qp qp{};
    qp.sq = reinterpret_cast<uint64_t>(out);
    qp.sq_depth = 1;
    mlx5::store_wqe<Scope::kSys>(qp, 0, wqe);
}

uint32_t put(const sy_mlx5_qp* qp, uint64_t local, uint32_t lkey, uint64_t remote, uint32_t rkey,
             uint64_t num_bytes, const sy_mlx5_bound* bound) {
    return put_nbi_warp(*qp, {local, lkey}, {remote, rkey}, num_bytes, *bound);
}

uint32_t get(const sy_mlx5_qp* qp, uint64_t local, uint32_t lkey, uint64_t remote, uint32_t rkey,
             uint64_t num_bytes, const sy_mlx5_bound* bound) {
    return get_nbi_warp(*qp, {local, lkey}, {remote, rkey}, num_bytes, *bound);
}

uint32_t put_add(const sy_mlx5_qp* qp, uint64_t local, uint32_t lkey, uint64_t remote,
                 uint32_t rkey, uint64_t num_bytes, uint64_t counter, uint64_t value,
                 const sy_mlx5_bound* bound) {
    return put_add_nbi_warp(*qp, {local, lkey}, {remote, rkey}, num_bytes, {counter, rkey}, value,
                            *bound);
}

uint32_t add8(const sy_mlx5_qp* qp, uint64_t counter, uint32_t rkey, uint64_t value,
              const sy_mlx5_bound* bound) {
    return amo_nonfetch_add(*qp, {counter, rkey}, value, *bound);
}

uint32_t add4(const sy_mlx5_qp* qp, uint64_t counter, uint32_t rkey, uint64_t value,
              const sy_mlx5_bound* bound) {
    return amo_nonfetch_add32(*qp, {counter, rkey}, static_cast<uint32_t>(value), *bound);
}

uint32_t add_fields(const sy_mlx5_qp* qp, uint64_t word, uint32_t rkey, uint64_t value,
                    uint64_t boundary, const sy_mlx5_bound* bound) {
    return amo_nonfetch_add_fields(*qp, {word, rkey}, value, boundary, *bound);
}

uint32_t set_word(const sy_mlx5_qp* qp, uint64_t word, uint32_t rkey, uint64_t value,
                  const sy_mlx5_bound* bound) {
    return signal(*qp, {word, rkey}, value, *bound);
}

uint32_t put_imm(const sy_mlx5_qp* qp, uint64_t local, uint32_t lkey, uint64_t remote,
                 uint32_t rkey, uint64_t num_bytes, uint32_t imm, const sy_mlx5_bound* bound) {
    return put_imm_nbi(*qp, {local, lkey}, {remote, rkey}, static_cast<uint32_t>(num_bytes), imm,
                       *bound);
}

// A request that moves nothing.
uint32_t nop(const sy_mlx5_qp* qp, const sy_mlx5_bound* bound) {
    return mlx5::post<Scope::kSys, Thread>(
        *qp, *bound, 1,
        [](uint32_t, const mlx5::Control& control) { return mlx5::make_nop(control); });
}

uint32_t wait_all(const sy_mlx5_qp* qp, const sy_mlx5_bound* bound) { return quiet(*qp, *bound); }

uint32_t wait_gets(const sy_mlx5_qp* qp, uint64_t local, uint32_t lkey,
                   const sy_mlx5_bound* bound) {
    return quiet_gets(*qp, {local, lkey}, *bound);
}

uint64_t poll_once(const sy_mlx5_qp* qp) { return mlx5::poll<Scope::kSys>(*qp); }

// `num_words` signals to consecutive words in one group: the lanes of a real warp. Between
// reservation and publication the warp waits until `*gate` is not 0, if there is a gate.
uint32_t signal_words(const sy_mlx5_qp* qp, uint64_t first, uint32_t rkey, uint64_t value,
                      uint32_t num_words, const uint32_t* gate, const sy_mlx5_bound* bound) {
    return mlx5::post<Scope::kSys, Warp>(
        *qp, *bound, num_words, [&](uint32_t lane_idx, const mlx5::Control& control) {
            while (gate != nullptr && ld_relaxed<Scope::kSys>(gate) == 0)
                pause_poll();
            const RemoteBuffer word{first + lane_idx * 8, rkey};
            return mlx5::make_write_inline(control, word, value + lane_idx, 8);
        });
}

// Posts `num_groups` groups of `num_lanes` signals from the only owner of the queue, to a ring of
// `num_words` words. The words are set to consecutive values that begin with `value`. Waits with
// each group until it is allowed, and counts the signals that were posted.
uint32_t own_signals(const sy_mlx5_qp* qp, uint64_t first, uint32_t rkey, uint64_t value,
                     uint64_t num_groups, uint32_t num_lanes, uint64_t num_words,
                     const uint64_t* num_allowed, uint64_t* num_posted,
                     const sy_mlx5_bound* bound) {
    OwnedQueue<Scope::kSys> queue(*qp, *bound);
    for (uint64_t group = 0; group < num_groups; ++group) {
        while (__atomic_load_n(num_allowed, __ATOMIC_ACQUIRE) <= group)
            pause_poll();
        const Status status =
            queue.post(num_lanes, [&](uint32_t lane_idx, const mlx5::Control& control) {
                const uint64_t number = group * num_lanes + lane_idx;
                const RemoteBuffer word{first + number % num_words * 8, rkey};
                return mlx5::make_write_inline(control, word, value + number, 8);
            });
        if (status != SY_MLX5_OK)
            return status;
        __atomic_store_n(num_posted, group + 1, __ATOMIC_RELEASE);
    }
    return queue.quiet();
}

// One call of each kind by who has the queue to itself, which waits until it is complete.
uint32_t own_move(const sy_mlx5_qp* qp, uint32_t kind, uint64_t local, uint32_t lkey,
                  uint64_t remote, uint32_t rkey, uint64_t num_bytes, uint64_t word, uint64_t value,
                  const sy_mlx5_bound* bound) {
    OwnedQueue<Scope::kSys> queue(*qp, *bound);
    const LocalBuffer here{local, lkey};
    const RemoteBuffer there{remote, rkey}, flag{word, rkey};
    const Status status = kind == 0   ? put_nbi(queue, here, there, num_bytes)
                          : kind == 1 ? get_nbi(queue, here, there, num_bytes)
                          : kind == 2 ? put_add_nbi(queue, here, there, num_bytes, flag, value)
                          : kind == 3 ? put_signal_nbi(queue, here, there, num_bytes, flag, value)
                          : kind == 4 ? amo_nonfetch_add(queue, flag, value)
                                      : signal(queue, flag, value);
    return status != SY_MLX5_OK ? status : quiet(queue);
}

uint32_t put_signal(const sy_mlx5_qp* qp, uint64_t local, uint32_t lkey, uint64_t remote,
                    uint32_t rkey, uint64_t num_bytes, uint64_t word, uint64_t value,
                    const sy_mlx5_bound* bound) {
    return put_signal_nbi_warp(*qp, {local, lkey}, {remote, rkey}, num_bytes, {word, rkey}, value,
                               *bound);
}

uint32_t take_imm(const sy_mlx5_rq* rq, Immediate* taken) {
    return try_receive(*rq, taken) ? 1 : 0;
}

uint32_t wait_imm(const sy_mlx5_rq* rq, Immediate* taken, const sy_mlx5_bound* bound) {
    return receive_imm(*rq, *bound, taken);
}

uint64_t doorbell(uint32_t qpn, uint64_t end) { return mlx5::doorbell_word(qpn, end); }
uint32_t dbrec(uint64_t end) { return mlx5::dbrec_word(end); }
uint64_t completed_after(uint64_t known, uint32_t counter) {
    return mlx5::completed_after(known, counter);
}

// Opcode, owner, counter and error word of a completion.
void decode_cqe(const uint8_t* cqe, uint64_t* out) {
    const uint32_t* words = reinterpret_cast<const uint32_t*>(cqe);
    const mlx5::CqeTail tail = mlx5::load_tail<Scope::kSys>(words);
    out[0] = tail.opcode();
    out[1] = tail.owner();
    out[2] = tail.counter();
    out[3] = mlx5::error_of<Scope::kSys>(words, tail);
}

uint32_t poll_turn(uint64_t* polled_at) { return takes_poll_turn(polled_at) ? 1 : 0; }

const char* check(const sy_mlx5_qp* qp) { return sy_mlx5_check_qp(qp); }
const char* check_receives(const sy_mlx5_rq* rq) { return sy_mlx5_check_rq(rq); }

const void* const kTable[] = {
    reinterpret_cast<const void*>(build),        reinterpret_cast<const void*>(put),
    reinterpret_cast<const void*>(get),          reinterpret_cast<const void*>(put_add),
    reinterpret_cast<const void*>(add8),         reinterpret_cast<const void*>(add4),
    reinterpret_cast<const void*>(add_fields),   reinterpret_cast<const void*>(set_word),
    reinterpret_cast<const void*>(put_imm),      reinterpret_cast<const void*>(wait_all),
    reinterpret_cast<const void*>(wait_gets),    reinterpret_cast<const void*>(poll_once),
    reinterpret_cast<const void*>(signal_words), reinterpret_cast<const void*>(doorbell),
    reinterpret_cast<const void*>(dbrec),        reinterpret_cast<const void*>(completed_after),
    reinterpret_cast<const void*>(decode_cqe),   reinterpret_cast<const void*>(check),
    reinterpret_cast<const void*>(nop),          reinterpret_cast<const void*>(take_imm),
    reinterpret_cast<const void*>(wait_imm),     reinterpret_cast<const void*>(check_receives),
    reinterpret_cast<const void*>(own_signals),  reinterpret_cast<const void*>(own_move),
    reinterpret_cast<const void*>(put_signal),   reinterpret_cast<const void*>(poll_turn),
};

} // namespace

extern "C" const void* const* SY_DRIVER() { return kTable; }
