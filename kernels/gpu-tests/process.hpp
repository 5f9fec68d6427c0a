// Processes of a multi-GPU test: forked before CUDA starts, joined by Unix sockets to the parent.
// The parent passes messages on, keeps barriers, and ends all processes when the time is up.
#pragma once

#include <cerrno>
#include <cinttypes>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

inline double now_s() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

// A process's end of the socket to its parent.
class Comrade {
  public:
    Comrade(int fd, uint32_t rank, uint32_t num_ranks)
        : rank(rank), num_ranks(num_ranks), fd_(fd) {}
    const uint32_t rank, num_ranks;

    // The bytes of all ranks, in order of rank. All must call it with the same size.
    std::vector<std::vector<uint8_t>> gather(const void* bytes, size_t size) {
        send_all(bytes, size);
        std::vector<std::vector<uint8_t>> all(num_ranks, std::vector<uint8_t>(size));
        for (auto& one : all)
            receive_all(one.data(), size);
        return all;
    }
    void barrier() {
        const uint8_t nothing = 0;
        gather(&nothing, 1);
    }

  private:
    void send_all(const void* bytes, size_t size) {
        for (size_t done = 0; done < size;) {
            const ssize_t n = write(fd_, static_cast<const uint8_t*>(bytes) + done, size - done);
            if (n <= 0)
                _Exit(3); // the parent is gone or gives up
            done += static_cast<size_t>(n);
        }
    }
    void receive_all(void* bytes, size_t size) {
        for (size_t done = 0; done < size;) {
            const ssize_t n = read(fd_, static_cast<uint8_t*>(bytes) + done, size - done);
            if (n <= 0)
                _Exit(3);
            done += static_cast<size_t>(n);
        }
    }
    int fd_;
};

// Runs `body` in `num_ranks` processes. Returns 0 when all succeeded, else the first bad exit code;
// 124 when `limit_s` passed. `may_die` is a rank whose death is part of the test, or -1. While they
// run, `on_gather(count)` is called after every exchange.
inline int
run_ranks(uint32_t num_ranks, double limit_s, int may_die, const std::function<int(Comrade&)>& body,
          const std::function<void(uint32_t, const std::vector<pid_t>&)>& on_gather = {}) {
    std::vector<int> sockets(num_ranks);
    std::vector<pid_t> pids(num_ranks);
    fflush(stdout);
    for (uint32_t rank = 0; rank < num_ranks; ++rank) {
        int pair[2];
        if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) != 0)
            return 2;
        const pid_t pid = fork();
        if (pid == 0) {
            for (uint32_t earlier = 0; earlier < rank; ++earlier)
                close(sockets[earlier]);
            close(pair[0]);
            signal(SIGPIPE, SIG_IGN);
            alarm(static_cast<unsigned>(limit_s) + 5); // should the parent die
            Comrade comrade(pair[1], rank, num_ranks);
            const int code = body(comrade);
            fflush(stdout);
            _Exit(code);
        }
        close(pair[1]);
        sockets[rank] = pair[0];
        pids[rank] = pid;
    }
    const double deadline = now_s() + limit_s;
    std::vector<std::vector<uint8_t>> pending(num_ranks);
    std::vector<bool> is_open(num_ranks, true);
    std::vector<int> codes(num_ranks, -1);
    uint32_t num_gathers = 0;
    int result = 0;
    const auto alive = [&] {
        uint32_t count = 0;
        for (const int code : codes)
            count += code == -1;
        return count;
    };
    while (alive() != 0) {
        if (now_s() > deadline) {
            result = 124;
            break;
        }
        std::vector<pollfd> polls;
        for (uint32_t rank = 0; rank < num_ranks; ++rank)
            polls.push_back({is_open[rank] ? sockets[rank] : -1, POLLIN, 0});
        poll(polls.data(), polls.size(), 20);
        for (uint32_t rank = 0; rank < num_ranks; ++rank) {
            if ((polls[rank].revents & (POLLIN | POLLHUP)) == 0)
                continue;
            uint8_t buffer[65536];
            const ssize_t n = read(sockets[rank], buffer, sizeof(buffer));
            if (n > 0)
                pending[rank].insert(pending[rank].end(), buffer, buffer + n);
            else
                is_open[rank] = false;
        }
        // An exchange is complete when every open rank has sent as much as the shortest message.
        size_t size = SIZE_MAX;
        for (uint32_t rank = 0; rank < num_ranks; ++rank)
            if (is_open[rank] || !pending[rank].empty())
                size = std::min(size, pending[rank].size());
        if (size != 0 && size != SIZE_MAX) {
            std::vector<uint8_t> all;
            for (uint32_t rank = 0; rank < num_ranks; ++rank) {
                pending[rank].resize(std::max(pending[rank].size(), size));
                all.insert(all.end(), pending[rank].begin(),
                           pending[rank].begin() + static_cast<ptrdiff_t>(size));
            }
            bool is_whole = true;
            for (uint32_t rank = 0; rank < num_ranks; ++rank)
                is_whole &= pending[rank].size() == size;
            if (is_whole) {
                if (on_gather)
                    on_gather(num_gathers, pids);
                ++num_gathers;
                for (uint32_t rank = 0; rank < num_ranks; ++rank) {
                    pending[rank].clear();
                    if (is_open[rank])
                        for (size_t done = 0; done < all.size();) {
                            const ssize_t n = send(sockets[rank], all.data() + done,
                                                   all.size() - done, MSG_NOSIGNAL);
                            if (n <= 0)
                                break;
                            done += static_cast<size_t>(n);
                        }
                }
            }
        }
        for (uint32_t rank = 0; rank < num_ranks; ++rank) {
            int status;
            if (codes[rank] != -1 || waitpid(pids[rank], &status, WNOHANG) != pids[rank])
                continue;
            codes[rank] = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
            if (codes[rank] != 0 && static_cast<int>(rank) != may_die && result == 0) {
                fprintf(stderr, "rank %u ended with %d\n", rank, codes[rank]);
                result = codes[rank];
            }
        }
        if (result != 0)
            break;
    }
    for (uint32_t rank = 0; rank < num_ranks; ++rank) {
        if (codes[rank] == -1) {
            kill(pids[rank], SIGKILL);
            int status;
            waitpid(pids[rank], &status, 0);
        }
        close(sockets[rank]);
    }
    return result;
}
