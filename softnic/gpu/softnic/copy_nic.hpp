// A NIC as a thread of the host. It reads requests out of queues in mapped host memory. Copy
// engines execute them in order, on a stream that a few queue pairs share. The host stores
// completions once the copies before them are done.
//
// Adds are read-modify-writes of the thread, so they are atomic among the requests of one NIC only.
#pragma once

#include <atomic>
#include <cstring>
#include <deque>
#include <thread>

#include <time.h>

#include "softnic/nic.hpp"

namespace softnic {

class CopyNic : public Nic {
  public:
    explicit CopyNic(int device) : Nic(device) {}
    ~CopyNic() override { end(); }

    void prepare(bool is_fresh) override {
        SOFTNIC_CUDA(cudaSetDevice(device));
        while (streams_.size() < kNumStreams) {
            cudaStream_t stream;
            SOFTNIC_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
            streams_.push_back(stream);
        }
        for (size_t i = lanes_.size(); i < queues_.size(); ++i) {
            Lane lane = {};
            lane.stream = streams_[i % kNumStreams];
            SOFTNIC_CUDA(cudaEventCreateWithFlags(&lane.event, cudaEventDisableTiming));
            lane.stage = allocate_mapped<uint8_t>(uint64_t{queues_[i].sq_depth} * kStageBytes);
            lanes_.push_back(lane);
        }
        if (is_fresh)
            for (size_t i = 0; i < lanes_.size(); ++i) {
                Lane& lane = lanes_[i];
                lane.state = {};
                lane.state.random = start_random(seed_, static_cast<uint32_t>(i));
                lane.due.clear();
                lane.held.clear();
                lane.late.clear();
                lane.is_recorded = false;
            }
        counts_ = {};
        __atomic_store_n(&control_->stop, uint64_t{0}, __ATOMIC_RELEASE);
    }

    void start() override {
        thread_ = std::thread([this] { run(); });
    }

    Counts stop() override {
        end();
        return counts_;
    }

  private:
    static constexpr uint64_t kStageBytes = 64;
    // NOTES: the GPU has few channels. With more streams than those, copies would stand in one behind a
    // kernel that waits for them.
    static constexpr size_t kNumStreams = 4;
    // Most requests that one event covers, and most that it covers under the adversary.
    static constexpr uint32_t kMostPerEvent = 256, kMostUnderAdversary = 8;

    struct Completion {
        Held held;
        uint32_t imm;
        uint64_t receive; // which of the peer's receives it takes
        bool is_reported, is_delivered, is_flushed;
    };
    struct Copy {
        uint64_t to, from;
        uint32_t num_bytes;
    };
    struct Lane {
        cudaStream_t stream;
        cudaEvent_t event;
        uint8_t* stage; // bytes that travel in requests and old values of adds, by block
        QueueState state;
        std::deque<Completion> due; // when the event is over
        std::deque<Held> held; // to be reported, once the adversary likes
        std::vector<Copy> late; // answers that land before the event, in any order
        bool is_recorded;
    };

    void end() {
        if (!thread_.joinable())
            return;
        __atomic_store_n(&control_->stop, uint64_t{1}, __ATOMIC_RELEASE);
        thread_.join();
    }

    void run() {
        SOFTNIC_CUDA(cudaSetDevice(device));
        const double start_s = now_s();
        while (now_s() - start_s < kNicLifeNs * 1e-9) {
            // Read before the doorbells: the round that follows sees every doorbell rung before the
            // stop order.
            const bool must_stop = __atomic_load_n(&control_->stop, __ATOMIC_ACQUIRE) != 0;
            bool is_idle = true;
            for (size_t i = 0; i < queues_.size(); ++i)
                if (!is_set(&control_->stalled, queues_[i]))
                    is_idle &= !serve(queues_[i], lanes_[i]);
            if (must_stop && is_idle)
                return;
            if (is_idle)
                std::this_thread::yield();
        }
    }

    static bool is_set(const uint32_t* mask, const Queue& queue) {
        return (__atomic_load_n(mask, __ATOMIC_ACQUIRE) >> queue.control_bit & 1) != 0;
    }

    static double now_s() {
        timespec time;
        clock_gettime(CLOCK_MONOTONIC, &time);
        return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
    }

    void note(const Violation& violation) {
        if (violation.what != kNone && counts_.num_violations++ == 0)
            counts_.first = violation;
    }

    // Whether any work was done or is under way.
    bool serve(const Queue& queue, Lane& lane) {
        if (seed_ != 0 && draw(&lane.state.random, 4) == 0)
            return true;
        if (lane.is_recorded) {
            const cudaError_t code = cudaEventQuery(lane.event);
            if (code == cudaErrorNotReady)
                return true;
            SOFTNIC_CUDA(code);
            lane.is_recorded = false;
            for (; !lane.due.empty(); lane.due.pop_front()) {
                const Completion& completion = lane.due.front();
                if (completion.is_delivered)
                    deliver(queue, completion);
                if (completion.is_reported)
                    lane.held.push_back(completion.held);
            }
        }
        const size_t num_reports =
            seed_ == 0 ? lane.held.size()
                       : draw(&lane.state.random, static_cast<uint32_t>(lane.held.size()) + 1);
        counts_.num_held += num_reports < lane.held.size();
        for (size_t i = 0; i < num_reports; ++i, lane.held.pop_front())
            complete(queue, lane.state, lane.held.front());
        look_at_doorbell(queue, lane.state);
        const uint32_t most =
            seed_ == 0 ? kMostPerEvent : 1 + draw(&lane.state.random, kMostUnderAdversary);
        uint32_t num_done = 0;
        for (; lane.state.executed < lane.state.produced && num_done < most; ++num_done)
            execute(queue, lane);
        if (num_done == 0)
            return !lane.held.empty();
        land(lane);
        SOFTNIC_CUDA(cudaEventRecord(lane.event, lane.stream));
        lane.is_recorded = true;
        return true;
    }

    // SYNC POINT doorbell.
    void look_at_doorbell(const Queue& queue, QueueState& state) {
        const uint64_t word =
            __atomic_load_n(reinterpret_cast<uint64_t*>(queue.doorbell), __ATOMIC_ACQUIRE);
        const uint32_t record = __atomic_load_n(
            reinterpret_cast<uint32_t*>(queue.dbrec) + SY_MLX5_DBREC_SEND, __ATOMIC_ACQUIRE);
        const uint32_t num_dropped = state.num_dropped;
        note(take_doorbell(queue, state, word, record, true));
        counts_.num_dropped += state.num_dropped - num_dropped;
    }

    void execute(const Queue& queue, Lane& lane) {
        QueueState& state = lane.state;
        const uint64_t position = state.executed;
        const uint32_t* block = reinterpret_cast<const uint32_t*>(
            queue.sq + (position & (queue.sq_depth - 1)) * SY_MLX5_BLOCK_BYTES);
        uint32_t words[16];
        for (uint32_t i = 0; i < 16; ++i)
            words[i] = __atomic_load_n(block + i, __ATOMIC_RELAXED);
        Request request;
        const bool can_read = decode(words, &request);
        const uint32_t posted =
            queue.recv_cq == 0
                ? 0
                : __atomic_load_n(reinterpret_cast<uint32_t*>(queue.recv_dbrec), __ATOMIC_ACQUIRE);
        const Verdict verdict = judge(queue, state, request, can_read, position, keys_.data(),
                                      static_cast<uint32_t>(keys_.size()), true,
                                      is_set(&control_->dead, queue), posted);
        note(verdict.violation);
        state.executed += num_blocks(request, state.produced - position);
        ++state.num_requests;
        ++counts_.num_requests;
        const bool is_good = verdict.syndrome == 0;
        if (is_good) {
            counts_.num_bytes += request.num_bytes;
            if (is_fenced(request))
                land(lane);
            carry_out(request, lane, lane.stage + (position & (queue.sq_depth - 1)) * kStageBytes,
                      verdict);
        } else {
            state.is_error = 1;
        }
        const bool is_reported = !is_good || is_signalled(request);
        const bool is_delivered = is_good && request.opcode == SY_MLX5_OPCODE_WRITE_IMM;
        if (is_reported || is_delivered)
            lane.due.push_back(
                {{position, request.opcode, verdict.syndrome, is_good ? request.num_bytes : 0, 0},
                 request.imm,
                 is_delivered ? state.num_received++ : 0,
                 is_reported,
                 is_delivered,
                 false});
        if (verdict.is_refused && queue.recv_cq != 0)
            flush_receives(queue, lane, posted);
    }

    // Completes the peer's posted receives as flushed, behind data that is delivered already.
    static void flush_receives(const Queue& queue, Lane& lane, uint32_t posted) {
        // More than there is room for is a matter of the record.
        for (uint32_t i = 0; i < queue.recv_cq_depth && has_receive(lane.state, posted); ++i)
            lane.due.push_back({{}, 0, lane.state.num_received++, false, true, true});
    }

    static void copy(Lane& lane, uint64_t to, uint64_t from, uint64_t num_bytes) {
        if (num_bytes != 0)
            SOFTNIC_CUDA(cudaMemcpyAsync(reinterpret_cast<void*>(to),
                                         reinterpret_cast<const void*>(from), num_bytes,
                                         cudaMemcpyDefault, lane.stream));
    }

    // Lands an answer: immediately, or later if the adversary defers it.
    void copy_answer(Lane& lane, uint64_t to, uint64_t from, uint32_t num_bytes) {
        if (seed_ == 0 || num_bytes == 0 || draw(&lane.state.random, 3) == 0)
            return copy(lane, to, from, num_bytes);
        lane.late.push_back({to, from, num_bytes});
        ++counts_.num_late;
    }

    static void land(Lane& lane) {
        while (!lane.late.empty()) {
            const size_t i = draw(&lane.state.random, static_cast<uint32_t>(lane.late.size()));
            copy(lane, lane.late[i].to, lane.late[i].from, lane.late[i].num_bytes);
            lane.late.erase(lane.late.begin() + static_cast<ptrdiff_t>(i));
        }
    }

    void carry_out(const Request& request, Lane& lane, uint8_t* stage, const Verdict& verdict) {
        switch (request.opcode) {
        case SY_MLX5_OPCODE_WRITE:
        case SY_MLX5_OPCODE_WRITE_IMM:
            if (request.is_inline) {
                memcpy(stage, request.data, request.num_bytes);
                copy(lane, verdict.remote, reinterpret_cast<uint64_t>(stage), request.num_bytes);
            } else if (seed_ == 0 || request.num_bytes == 0) {
                copy(lane, verdict.remote, verdict.local, request.num_bytes);
            } else {
                copy_in_pieces(request, lane, verdict);
            }
            break;
        case SY_MLX5_OPCODE_READ:
            copy_answer(lane, verdict.local, verdict.remote, request.num_bytes);
            break;
        case SY_MLX5_OPCODE_ATOMIC_FA:
        case SY_MLX5_OPCODE_ATOMIC_CS:
        case SY_MLX5_OPCODE_MASKED_FA:
            run_atomic(request, lane, stage, verdict);
            break;
        default: // NOP, DUMP
            break;
        }
    }

    void copy_in_pieces(const Request& request, Lane& lane, const Verdict& verdict) {
        const Cut pieces = cut(&lane.state.random, verdict.remote, request.num_bytes);
        counts_.num_cut += pieces.num_pieces > 1;
        for (uint32_t i = 0; i <= pieces.mask; ++i) {
            uint32_t at;
            const uint32_t num_bytes = piece(pieces, request.num_bytes, i, &at);
            copy(lane, verdict.remote + at, verdict.local + at, num_bytes);
        }
    }

    void run_atomic(const Request& request, Lane& lane, uint8_t* stage, const Verdict& verdict) {
        copy(lane, reinterpret_cast<uint64_t>(stage), verdict.remote, request.num_bytes);
        SOFTNIC_CUDA(cudaStreamSynchronize(lane.stream));
        uint64_t before = 0;
        memcpy(&before, stage, request.num_bytes);
        const uint64_t after = changed(request, before), answer = answer_of(request, before);
        memcpy(stage, &after, 8);
        memcpy(stage + 8, &answer, 8);
        copy(lane, verdict.remote, reinterpret_cast<uint64_t>(stage), request.num_bytes);
        copy_answer(lane, verdict.local, reinterpret_cast<uint64_t>(stage + 8), request.num_bytes);
    }

    // Hands immediate data to the peer, behind the written bytes, or returns a receive to it.
    static void deliver(const Queue& queue, const Completion& completion) {
        const uint64_t slot = completion.receive & (queue.recv_cq_depth - 1);
        uint32_t* cqe = reinterpret_cast<uint32_t*>(queue.recv_cq + slot * SY_MLX5_CQE_BYTES);
        __atomic_store_n(cqe + 9, completion.imm, __ATOMIC_RELAXED);
        __atomic_store_n(cqe + 11, swap(completion.held.num_bytes), __ATOMIC_RELAXED);
        if (completion.is_flushed)
            __atomic_store_n(cqe + 13, uint32_t{SY_MLX5_SYNDROME_FLUSHED} << 24, __ATOMIC_RELAXED);
        __atomic_store_n(reinterpret_cast<uint64_t*>(cqe) + 7,
                         receive_tail_of(queue, completion.receive, completion.is_flushed),
                         __ATOMIC_RELEASE);
    }

    // SYNC POINT completion: body first, then the 8 bytes that end with counter and owner.
    void complete(const Queue& queue, QueueState& state, const Held& held) {
        if (!queue.is_collapsed) {
            const uint32_t consumed = swap(
                __atomic_load_n(reinterpret_cast<uint32_t*>(queue.cq_dbrec), __ATOMIC_ACQUIRE));
            if (((static_cast<uint32_t>(state.cq_index) - consumed) & 0xffffff) >= queue.cq_depth) {
                note({kFullCq, queue.qpn, held.position, consumed});
                state.is_error = 1;
                return;
            }
        }
        const uint64_t slot = queue.is_collapsed ? 0 : state.cq_index & (queue.cq_depth - 1);
        uint32_t* cqe = reinterpret_cast<uint32_t*>(queue.cq + slot * SY_MLX5_CQE_BYTES);
        __atomic_store_n(cqe + 11, swap(held.num_bytes), __ATOMIC_RELAXED);
        __atomic_store_n(cqe + 13, held.syndrome << 24, __ATOMIC_RELAXED);
        __atomic_store_n(
            reinterpret_cast<uint64_t*>(cqe) + 7,
            tail_of(queue, held.opcode, held.position, state.cq_index, held.syndrome != 0),
            __ATOMIC_RELEASE);
        ++state.cq_index;
        state.reported = held.position + 1;
    }

    std::vector<cudaStream_t> streams_;
    std::vector<Lane> lanes_;
    std::thread thread_;
    Counts counts_ = {};
};

} // namespace softnic
