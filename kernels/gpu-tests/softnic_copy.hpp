// A NIC as a thread of the host: it reads requests out of queues in mapped host memory and has copy engines
// carry them out, in order on a stream that a few queue pairs share. Completions are stores of the host, made once the
// copies before them are done.
//
// Adds are read-modify-writes of the thread, so they are atomic among the requests of one NIC only.
#pragma once

#include <atomic>
#include <deque>
#include <thread>

#include "softnic_nic.hpp"

class CopyNic : public Nic {
  public:
    explicit CopyNic(int device) : Nic(device) {}
    ~CopyNic() override { end(); }

    void prepare(bool is_fresh) override {
        CHECK_CUDA(cudaSetDevice(device));
        while (streams_.size() < kNumStreams) {
            cudaStream_t stream;
            CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
            streams_.push_back(stream);
        }
        for (size_t i = lanes_.size(); i < queues_.size(); ++i) {
            Lane lane = {};
            lane.stream = streams_[i % kNumStreams];
            CHECK_CUDA(cudaEventCreateWithFlags(&lane.event, cudaEventDisableTiming));
            void* pointer = nullptr;
            CHECK_CUDA(cudaHostAlloc(&pointer, uint64_t{queues_[i].sq_depth} * kStageBytes, 0));
            lane.stage = static_cast<uint8_t*>(pointer);
            lanes_.push_back(lane);
        }
        if (is_fresh)
            for (Lane& lane : lanes_) {
                lane.state = {};
                lane.due.clear();
                lane.is_recorded = false;
            }
        counts_ = {};
        control_->stop = 0;
    }

    void start() override {
        thread_ = std::thread([this] { run(); });
    }

    softnic::Counts stop() override {
        end();
        return counts_;
    }

  private:
    static constexpr uint64_t kStageBytes = 64;
    // NOTES: the GPU has few channels. With more streams than those, copies would stand in one behind a
    // kernel that waits for them.
    static constexpr size_t kNumStreams = 4;
    // Most requests that one event covers.
    static constexpr uint32_t kMostPerEvent = 256;

    struct Completion {
        uint32_t opcode, syndrome;
        uint64_t position;
    };
    struct Lane {
        cudaStream_t stream;
        cudaEvent_t event;
        uint8_t* stage; // bytes that travel in requests and old values of adds, by block
        softnic::QueueState state;
        std::deque<Completion> due; // when the event is over
        bool is_recorded;
    };

    void end() {
        if (!thread_.joinable())
            return;
        __atomic_store_n(&control_->stop, 1u, __ATOMIC_RELEASE);
        thread_.join();
    }

    void run() {
        CHECK_CUDA(cudaSetDevice(device));
        const double start_s = now_s();
        for (bool is_idle = false;;) {
            const bool must_stop = __atomic_load_n(&control_->stop, __ATOMIC_ACQUIRE) != 0 ||
                                   now_s() - start_s > kNicLifeNs * 1e-9;
            if (must_stop && is_idle)
                return;
            is_idle = true;
            for (size_t i = 0; i < queues_.size(); ++i) {
                if ((__atomic_load_n(&control_->stalled, __ATOMIC_ACQUIRE) >> i % 32 & 1) != 0)
                    continue;
                is_idle &= !serve(queues_[i], lanes_[i]);
            }
        }
    }

    static double now_s() {
        timespec time;
        clock_gettime(CLOCK_MONOTONIC, &time);
        return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
    }

    void note(uint32_t what, uint32_t qpn, uint64_t position, uint64_t found) {
        if (counts_.num_violations++ == 0)
            counts_.first = {what, qpn, position, found};
    }

    // Whether anything was done or is under way.
    bool serve(const softnic::Queue& queue, Lane& lane) {
        if (lane.is_recorded) {
            const cudaError_t code = cudaEventQuery(lane.event);
            if (code == cudaErrorNotReady)
                return true;
            CHECK_CUDA(code);
            lane.is_recorded = false;
            for (; !lane.due.empty(); lane.due.pop_front())
                complete(queue, lane.state, lane.due.front());
        }
        take_doorbell(queue, lane.state);
        uint32_t num_done = 0;
        for (; lane.state.executed < lane.state.produced && num_done < kMostPerEvent; ++num_done)
            execute(queue, lane);
        if (num_done == 0)
            return false;
        CHECK_CUDA(cudaEventRecord(lane.event, lane.stream));
        lane.is_recorded = true;
        return true;
    }

    // SYNC POINT doorbell.
    void take_doorbell(const softnic::Queue& queue, softnic::QueueState& state) {
        const uint64_t word = __atomic_load_n(reinterpret_cast<uint64_t*>(queue.doorbell), __ATOMIC_ACQUIRE);
        const uint32_t end = softnic::swap(static_cast<uint32_t>(word)) >> 8 & 0xffff;
        const uint32_t qpn = softnic::swap(static_cast<uint32_t>(word >> 32)) >> 8;
        const uint32_t advance = (end - static_cast<uint32_t>(state.produced)) & 0xffff;
        if (word == 0 || advance == 0)
            return;
        if (qpn != queue.qpn || advance > 1 << 15) {
            if (!state.is_error)
                note(qpn != queue.qpn ? softnic::kQueuePair : softnic::kBackwards, queue.qpn, state.produced,
                     qpn != queue.qpn ? qpn : end);
            state.is_error = 1;
            return;
        }
        const uint32_t record =
            softnic::swap(__atomic_load_n(reinterpret_cast<uint32_t*>(queue.dbrec) + SY_MLX5_DBREC_SEND,
                                          __ATOMIC_ACQUIRE)) &
            0xffff;
        if (((record - end) & 0xffff) > 1 << 15) {
            note(softnic::kStaleRecord, queue.qpn, state.produced, record);
            state.is_error = 1;
        }
        state.produced += advance;
        if (state.produced - state.reported > queue.sq_depth) {
            note(softnic::kOverrun, queue.qpn, state.produced, state.produced - state.reported);
            state.is_error = 1;
        }
    }

    void execute(const softnic::Queue& queue, Lane& lane) {
        softnic::QueueState& state = lane.state;
        const uint64_t position = state.executed++;
        const uint32_t* block = reinterpret_cast<const uint32_t*>(
            queue.sq + (position & (queue.sq_depth - 1)) * SY_MLX5_BLOCK_BYTES);
        uint32_t words[16];
        for (uint32_t i = 0; i < 16; ++i)
            words[i] = __atomic_load_n(block + i, __ATOMIC_RELAXED);
        softnic::Request request;
        const bool can_read = softnic::decode(words, &request);
        uint64_t local = 0, remote = 0;
        uint32_t syndrome = 0;
        if (state.is_error) {
            syndrome = SY_MLX5_SYNDROME_FLUSHED;
        } else if (queue.fail_syndrome != 0 && state.num_requests == queue.fail_at) {
            syndrome = queue.fail_syndrome;
        } else if (request.qpn != queue.qpn || request.index != (position & 0xffff) || !can_read) {
            const uint32_t what = request.qpn != queue.qpn              ? softnic::kQueuePair
                                  : request.index != (position & 0xffff) ? softnic::kIndex
                                                                         : softnic::kMalformed;
            note(what, queue.qpn, position, request.opcode << 8 | request.num_segments);
            syndrome = SY_MLX5_SYNDROME_LOCAL_QP_OP;
        } else {
            syndrome = softnic::resolve(request, keys_.data(), static_cast<uint32_t>(keys_.size()), &local,
                                        &remote);
        }
        ++state.num_requests;
        ++counts_.num_requests;
        if (syndrome == 0) {
            counts_.num_bytes += request.num_bytes;
            carry_out(request, lane, lane.stage + (position & (queue.sq_depth - 1)) * kStageBytes, local,
                      remote);
        } else {
            state.is_error = 1;
        }
        if (syndrome != 0 || (request.flags & SY_MLX5_CE_MASK) == SY_MLX5_CE_ALWAYS)
            lane.due.push_back({request.opcode, syndrome, position});
    }

    static void copy(Lane& lane, uint64_t to, const void* from, uint64_t num_bytes) {
        CHECK_CUDA(cudaMemcpyAsync(reinterpret_cast<void*>(to), from, num_bytes, cudaMemcpyDefault,
                                   lane.stream));
    }

    void carry_out(const softnic::Request& request, Lane& lane, uint8_t* stage, uint64_t local,
                   uint64_t remote) {
        switch (request.opcode) {
        case SY_MLX5_OPCODE_WRITE:
            if (request.num_bytes == 0)
                break;
            if (request.is_inline)
                memcpy(stage, request.data, request.num_bytes);
            copy(lane, remote, request.is_inline ? stage : reinterpret_cast<const void*>(local),
                 request.num_bytes);
            break;
        case SY_MLX5_OPCODE_READ:
            copy(lane, local, reinterpret_cast<const void*>(remote), request.num_bytes);
            break;
        case SY_MLX5_OPCODE_ATOMIC_FA:
        case SY_MLX5_OPCODE_ATOMIC_CS:
        case SY_MLX5_OPCODE_MASKED_FA:
            run_atomic(request, lane, stage, local, remote);
            break;
        default: // NOP, DUMP
            break;
        }
    }

    void run_atomic(const softnic::Request& request, Lane& lane, uint8_t* stage, uint64_t local,
                    uint64_t remote) {
        copy(lane, reinterpret_cast<uint64_t>(stage), reinterpret_cast<const void*>(remote),
             request.num_bytes);
        CHECK_CUDA(cudaStreamSynchronize(lane.stream));
        uint64_t before = 0;
        memcpy(&before, stage, request.num_bytes);
        uint64_t after = before + request.add;
        if (request.opcode == SY_MLX5_OPCODE_ATOMIC_CS)
            after = before == request.compare ? request.add : before;
        else if (request.opcode == SY_MLX5_OPCODE_MASKED_FA)
            after = softnic::masked_sum(before, request.add, request.compare, request.num_bytes * 8);
        // Narrow old values land big-endian.
        if (request.num_bytes == 4)
            before = softnic::swap(static_cast<uint32_t>(before));
        memcpy(stage, &after, 8);
        memcpy(stage + 8, &before, 8);
        copy(lane, remote, stage, request.num_bytes);
        copy(lane, local, stage + 8, request.num_bytes);
    }

    // SYNC POINT completion: body first, then the 8 bytes that end with counter and owner.
    void complete(const softnic::Queue& queue, softnic::QueueState& state, const Completion& completion) {
        if (!queue.is_collapsed) {
            const uint32_t consumed =
                softnic::swap(__atomic_load_n(reinterpret_cast<uint32_t*>(queue.cq_dbrec), __ATOMIC_ACQUIRE));
            if (((static_cast<uint32_t>(state.cq_index) - consumed) & 0xffffff) >= queue.cq_depth) {
                note(softnic::kFullCq, queue.qpn, completion.position, consumed);
                state.is_error = 1;
                return;
            }
        }
        const uint64_t slot = queue.is_collapsed ? 0 : state.cq_index & (queue.cq_depth - 1);
        const uint64_t cqe = queue.cq + slot * SY_MLX5_CQE_BYTES;
        __atomic_store_n(reinterpret_cast<uint32_t*>(cqe) + 13, completion.syndrome << 24, __ATOMIC_RELAXED);
        __atomic_store_n(reinterpret_cast<uint64_t*>(cqe) + 7,
                         softnic::tail_of(queue, completion.opcode, completion.position, state.cq_index,
                                          completion.syndrome != 0),
                         __ATOMIC_RELEASE);
        ++state.cq_index;
        state.reported = completion.position + 1;
    }

    std::vector<cudaStream_t> streams_;
    std::vector<Lane> lanes_;
    std::thread thread_;
    softnic::Counts counts_ = {};
};
