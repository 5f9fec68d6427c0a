// Faults other than wrong requests: a NIC that stops, lost doorbells, peers that do not answer, a
// NIC that delays and reorders within the rules, and processes with a NIC each.
#pragma once

#include <algorithm>
#include <cinttypes>

#include "softnic_rig.hpp"

namespace {

// A stalled NIC: posters wait for room, give up in time and say so; once reset the queue works again.
void back_pressure(int num_gpus) {
    for (const Backend& backend : kBackends) {
        QueueSizes sizes;
        sizes.sq_depth = 128;
        Rig rig(backend, sizes, num_gpus);
        rig.nic.stall(1);
        rig.begin();
        const double start_s = now_s();
        const auto statuses = rig.post(Job::kAdds, 4, 10, 64, 20'000'000);
        const double ms = (now_s() - start_s) * 1e3;
        const sy_error_word error = from_device(rig.error);
        for (const uint32_t found : statuses)
            CHECK(found == SY_MLX5_TIMEOUT, "status %u, expected a time-out", found);
        // The first wait to expire is recorded. It may be one for room, for the turn or for the
        // end.
        CHECK(error.tag >= SY_TAG_MLX5_SLOT && error.tag <= SY_TAG_MLX5_QUIET && error.peer == 5 &&
                  error.reason == SY_REASON_TIMEOUT,
              "tag %u peer %u reason %u", error.tag, error.peer, error.reason);
        CHECK(ms < 5000, "%.1f ms", ms);
        rig.nic.stall(0);
        rig.nic.stop();
        // Stalled only for a while, nothing is lost.
        rig.clear();
        rig.begin();
        rig.nic.stall(1);
        const JobParams params = {rig.queue.handle,
                                  {rig.error, nullptr, 3'000'000'000},
                                  {reinterpret_cast<uint64_t>(rig.source), kLocalKey},
                                  kRemoteBase,
                                  Job::kAdds,
                                  20,
                                  64,
                                  rig.status};
        job_kernel<<<4, 32, 0, rig.stream>>>(params);
        CHECK_CUDA(cudaGetLastError());
        usleep(20000);
        CHECK(cudaStreamQuery(rig.stream) == cudaErrorNotReady, "posters did not wait for room");
        rig.nic.stall(0);
        CHECK_CUDA(cudaStreamSynchronize(rig.stream));
        rig.expect_clean(rig.nic.stop());
        for (const uint64_t sum : rig.words(kWordAt, 4))
            CHECK(sum == 20, "counter %" PRIu64 ", expected 20", sum);
        printf("{\"test\":\"back_pressure\",\"nic\":\"%s\",\"queues\":\"%s\","
               "\"gave_up_after_ms\":%.1f}\n",
               backend.name(), name_of(backend.where), ms);
    }
}

// The poster notices within its bound that its announcement was lost; a later doorbell announces
// both.
void lost_doorbells(int num_gpus) {
    for (const Backend& backend : kBackends) {
        Rig rig(backend, QueueSizes{}, num_gpus);
        rig.nic.drop_doorbells(rig.number, 1);
        rig.begin();
        const auto alone = rig.post(Job::kAdds, 1, 1, 64, 20'000'000);
        const softnic::Counts counts = rig.nic.stop();
        rig.expect_all(alone, SY_MLX5_TIMEOUT);
        CHECK(from_device(rig.error).tag == SY_TAG_MLX5_QUIET, "tag %u",
              from_device(rig.error).tag);
        CHECK(counts.num_dropped == 1 && counts.num_requests == 0,
              "%" PRIu64 " doorbells dropped, %" PRIu64 " requests", counts.num_dropped,
              counts.num_requests);
        uint32_t* status = device_alloc<uint32_t>(1);
        cudaStream_t early;
        CHECK_CUDA(cudaStreamCreateWithFlags(&early, cudaStreamNonBlocking));
        // The NIC checks the place of the last doorbell, so the one that it drops must be old by
        // the time of the next one.
        rig.clear();
        rig.begin();
        rig.launch(Job::kAdds, 1, 1, 64, 3'000'000'000, status, early);
        usleep(50000);
        CHECK(cudaStreamQuery(early) == cudaErrorNotReady, "who was not announced did not wait");
        const auto others = rig.post(Job::kAdds, 1, 199);
        CHECK_CUDA(cudaStreamSynchronize(early));
        const softnic::Counts after = rig.nic.stop();
        rig.expect_clean(after);
        rig.expect_all({from_device(status)}, SY_MLX5_OK);
        rig.expect_all(others, SY_MLX5_OK);
        CHECK_CUDA(cudaStreamDestroy(early));
        CHECK_CUDA(cudaFree(status));
        CHECK(after.num_dropped == 1 && rig.words(kWordAt, 1)[0] == 200,
              "%" PRIu64 " doorbells dropped, counter %" PRIu64, after.num_dropped,
              rig.words(kWordAt, 1)[0]);
        printf("{\"test\":\"lost_doorbells\",\"nic\":\"%s\",\"queues\":\"%s\"}\n", backend.name(),
               name_of(backend.where));
    }
}

// A peer that stops answering midway: retries are exceeded, all posters get the error, and once it
// is back a reset queue works.
void dead_peer(int num_gpus) {
    for (const Backend& backend : kBackends) {
        QueueSizes sizes;
        sizes.is_collapsed = false;
        Rig rig(backend, sizes, num_gpus);
        rig.begin();
        const JobParams params = {rig.queue.handle,
                                  {rig.error, nullptr, 3'000'000'000},
                                  {reinterpret_cast<uint64_t>(rig.source), kLocalKey},
                                  kRemoteBase,
                                  Job::kAdds,
                                  1u << 20,
                                  64,
                                  rig.status};
        job_kernel<<<4, 32, 0, rig.stream>>>(params);
        CHECK_CUDA(cudaGetLastError());
        usleep(10000);
        CHECK(cudaStreamQuery(rig.stream) == cudaErrorNotReady, "posters ended before the peer");
        rig.nic.set_dead(1);
        CHECK_CUDA(cudaStreamSynchronize(rig.stream));
        rig.expect_clean(rig.nic.stop());
        std::vector<uint32_t> statuses(4);
        CHECK_CUDA(cudaMemcpy(statuses.data(), rig.status, 4 * 4, cudaMemcpyDeviceToHost));
        rig.expect_all(statuses, SY_MLX5_COMPLETION);
        const uint32_t syndrome = SY_MLX5_ERROR_SYNDROME(rig.queue.state().error);
        CHECK(syndrome == SY_MLX5_SYNDROME_RETRY_EXCEEDED, "syndrome %02x", syndrome);
        rig.nic.set_dead(0);
        rig.clear();
        rig.begin();
        const auto after = rig.post(Job::kAdds, 2, 10);
        rig.expect_clean(rig.nic.stop());
        rig.expect_all(after, SY_MLX5_OK);
        printf("{\"test\":\"dead_peer\",\"nic\":\"%s\",\"queues\":\"%s\"}\n", backend.name(),
               name_of(backend.where));
    }
}

// Flags stay behind their payload, adds are made once each and gets return the put bytes, for all
// random numbers of the NIC; and the NIC does draw some.
void adversary(int num_gpus) {
    for (const Backend& backend : kBackends)
        for (const uint32_t num_bytes : {64u, 4104u, 1u << 18}) {
            Rig rig(backend, QueueSizes{}, num_gpus);
            rig.nic.set_adversary(g_seed * 16 + num_bytes);
            CHECK_CUDA(cudaSetDevice(rig.target_gpu));
            uint32_t* num_wrong = device_alloc<uint32_t>(1);
            cudaStream_t watcher;
            CHECK_CUDA(cudaStreamCreateWithFlags(&watcher, cudaStreamNonBlocking));
            CHECK_CUDA(cudaSetDevice(0));
            rig.begin();
            CHECK_CUDA(cudaSetDevice(rig.target_gpu));
            watch_kernel<<<1, 256, 0, watcher>>>(reinterpret_cast<uint64_t*>(rig.target + kWordAt),
                                                 reinterpret_cast<uint64_t*>(rig.target),
                                                 num_bytes / 8, 20, g_seed, 5'000'000'000,
                                                 num_wrong);
            CHECK_CUDA(cudaGetLastError());
            CHECK_CUDA(cudaSetDevice(0));
            const auto statuses = rig.post(Job::kPutFlags, 1, 20, num_bytes);
            CHECK_CUDA(cudaSetDevice(rig.target_gpu));
            CHECK_CUDA(cudaStreamSynchronize(watcher));
            const uint32_t wrong = from_device(num_wrong);
            CHECK_CUDA(cudaSetDevice(0));
            const auto gets = rig.post(Job::kGets, 1, 3, num_bytes);
            const auto adds = rig.post(Job::kAdds, 4, 40);
            const softnic::Counts counts = rig.nic.stop();
            rig.expect_clean(counts);
            rig.expect_all(statuses, SY_MLX5_OK);
            rig.expect_all(gets, SY_MLX5_OK);
            rig.expect_all(adds, SY_MLX5_OK);
            CHECK(wrong == 0, "%u words were wrong behind their flag", wrong);
            std::vector<uint64_t> back(num_bytes / 8);
            CHECK_CUDA(
                cudaMemcpy(back.data(), rig.source + kWordAt, num_bytes, cudaMemcpyDeviceToHost));
            for (size_t i = 0; i < back.size(); ++i)
                CHECK(back[i] == g_seed * (i + 1), "word %zu was got wrong", i);
            // 20 flags, 3 adds of gets, 40 of the first warp.
            const auto sums = rig.words(kWordAt, 4);
            for (uint32_t warp = 0; warp < 4; ++warp)
                CHECK(sums[warp] == (warp == 0 ? 63 : 40), "counter %u is %" PRIu64, warp,
                      sums[warp]);
            CHECK(counts.num_held != 0 && counts.num_late != 0 &&
                      (num_bytes == 64 || counts.num_cut != 0),
                  "nothing was held (%" PRIu64 "), late (%" PRIu64 ") or cut (%" PRIu64 ")",
                  counts.num_held, counts.num_late, counts.num_cut);
            CHECK_CUDA(cudaStreamDestroy(watcher));
            printf("{\"test\":\"adversary\",\"nic\":\"%s\",\"queues\":\"%s\",\"bytes\":%u,"
                   "\"held\":%" PRIu64 ",\"late\":%" PRIu64 ",\"cut\":%" PRIu64 "}\n",
                   backend.name(), name_of(backend.where), num_bytes, counts.num_held,
                   counts.num_late, counts.num_cut);
        }
}

// Payload and a page of words that another process maps.
constexpr uint64_t kSharedBytes = 4 << 20;

// Two processes put into each other's memory, with a NIC each; then one dies, and the other's NIC
// gets a notice.
int one_process(Comrade& comrade, const Backend& backend) {
    int num_gpus = 0;
    CHECK_CUDA(cudaGetDeviceCount(&num_gpus));
    const int gpu = comrade.rank == 0 ? 0 : num_gpus - 1;
    CHECK_CUDA(cudaSetDevice(gpu));
    uint8_t* source = device_alloc<uint8_t>(kSharedBytes);
    uint8_t* mine = device_alloc<uint8_t>(kSharedBytes);
    const uint64_t pattern = g_seed + comrade.rank, peers_pattern = g_seed + 1 - comrade.rank;
    std::vector<uint64_t> words(kSharedBytes / 8);
    for (size_t i = 0; i < words.size(); ++i)
        words[i] = pattern * (i + 1);
    upload(source, words.data(), kSharedBytes);
    cudaIpcMemHandle_t key;
    CHECK_CUDA(cudaIpcGetMemHandle(&key, mine));
    const auto keys = comrade.gather(&key, sizeof(key));
    memcpy(&key, keys[1 - comrade.rank].data(), sizeof(key));
    void* theirs = nullptr;
    CHECK_CUDA(cudaIpcOpenMemHandle(&theirs, key, cudaIpcMemLazyEnablePeerAccess));

    const auto nic = make_nic(gpu, backend.has_copy_engines);
    QueueSizes sizes;
    sizes.is_collapsed = false;
    SendQueue queue(backend.where, sizes, 0x41 + comrade.rank, 1 - comrade.rank);
    nic->add_queue(queue);
    nic->add_key(kLocalKey, reinterpret_cast<uint64_t>(source), kSharedBytes, source);
    nic->add_key(kRemoteKey, kRemoteBase, kSharedBytes, theirs,
                 softnic::kRemoteWrite | softnic::kRemoteAtomic);
    uint32_t* status = device_alloc<uint32_t>(1);
    uint32_t* num_wrong = device_alloc<uint32_t>(1);
    sy_error_word* error = device_alloc<sy_error_word>(1);
    cudaStream_t poster, watcher;
    CHECK_CUDA(cudaStreamCreateWithFlags(&poster, cudaStreamNonBlocking));
    CHECK_CUDA(cudaStreamCreateWithFlags(&watcher, cudaStreamNonBlocking));
    const JobParams params = {queue.handle,
                              {error, nullptr, 3'000'000'000},
                              {reinterpret_cast<uint64_t>(source), kLocalKey},
                              kRemoteBase,
                              Job::kPutFlags,
                              50,
                              14336,
                              status};
    const auto post = [&] {
        job_kernel<<<1, 32, 0, poster>>>(params);
        CHECK_CUDA(cudaGetLastError());
        CHECK_CUDA(cudaStreamSynchronize(poster));
        uint32_t found = 0;
        CHECK_CUDA(cudaMemcpy(&found, status, sizeof(found), cudaMemcpyDeviceToHost));
        return found;
    };
    nic->prepare();
    comrade.barrier();
    nic->start();
    watch_kernel<<<1, 256, 0, watcher>>>(reinterpret_cast<uint64_t*>(mine + kWordAt),
                                         reinterpret_cast<uint64_t*>(mine), 14336 / 8, 50,
                                         peers_pattern, 5'000'000'000, num_wrong);
    CHECK_CUDA(cudaGetLastError());
    const uint32_t found = post();
    CHECK(found == SY_MLX5_OK, "rank %u: status %u", comrade.rank, found);
    CHECK_CUDA(cudaStreamSynchronize(watcher));
    const softnic::Counts counts = nic->stop();
    CHECK(counts.num_violations == 0, "rank %u: violation %u", comrade.rank, counts.first.what);
    const uint32_t wrong = from_device(num_wrong);
    CHECK(wrong == 0, "rank %u: %u words were wrong behind their flag", comrade.rank, wrong);
    comrade.barrier();
    if (comrade.rank == 1)
        return 0; // without closing anything
    nic->set_dead(1);
    queue.reset();
    nic->prepare();
    nic->start();
    const uint32_t refused = post();
    nic->stop();
    const uint32_t syndrome = SY_MLX5_ERROR_SYNDROME(queue.state().error);
    CHECK(refused == SY_MLX5_COMPLETION && syndrome == SY_MLX5_SYNDROME_RETRY_EXCEEDED,
          "status %u syndrome %02x", refused, syndrome);
    CHECK_CUDA(cudaIpcCloseMemHandle(theirs));
    return 0;
}

// Before this process uses CUDA. True when all went well.
bool processes() {
    for (const Backend& backend : kBackends) {
        const int code =
            run_ranks(2, 25, -1, [&](Comrade& comrade) { return one_process(comrade, backend); });
        if (code != 0) {
            fprintf(stderr, "processes, %s: exit code %d\n", backend.name(), code);
            return false;
        }
        printf("{\"test\":\"processes\",\"nic\":\"%s\",\"queues\":\"%s\"}\n", backend.name(),
               name_of(backend.where));
    }
    return true;
}

} // namespace
