// How soon after a SIGKILL another process can know of it: by the end of a connection, and by the word of a robust
// mutex that a thread of the dying process held.
//
//   cc -O2 -pthread death.c -o death && ./death [GiB of touched memory] [times] [huge]
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static pthread_mutex_t* mutex;

static double now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e3 + t.tv_nsec * 1e-6;
}

static void* hold(void* unused) {
    pthread_mutex_lock(mutex);
    for (;;)
        pause();
    return unused;
}

int main(int argc, char** argv) {
    const double gib = argc > 1 ? atof(argv[1]) : 1;
    const int times = argc > 2 ? atoi(argv[2]) : 5;
    for (int i = 0; i < times; ++i) {
        mutex = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        pthread_mutexattr_t attr;
        pthread_mutexattr_init(&attr);
        pthread_mutexattr_setpshared(&attr, PTHREAD_PROCESS_SHARED);
        pthread_mutexattr_setrobust(&attr, PTHREAD_MUTEX_ROBUST);
        pthread_mutex_init(mutex, &attr);
        int ends[2];
        if (socketpair(AF_UNIX, SOCK_STREAM, 0, ends) != 0)
            return 1;
        const pid_t child = fork();
        if (child == 0) {
            close(ends[0]);
            const size_t bytes = (size_t)(gib * (1 << 30)) + 4096;
            char* memory =
                mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            if (argc > 3)
                madvise(memory, bytes, MADV_HUGEPAGE);
            for (size_t at = 0; at < bytes; at += 4096)
                memory[at] = 1;
            pthread_t thread;
            pthread_create(&thread, NULL, hold, NULL);
            usleep(20000);
            if (write(ends[1], "x", 1) != 1)
                _exit(1);
            for (;;)
                pause();
        }
        close(ends[1]);
        char byte;
        if (read(ends[0], &byte, 1) != 1)
            return 1;
        fcntl(ends[0], F_SETFL, O_NONBLOCK);
        const _Atomic unsigned* word =
            (const _Atomic unsigned*)mutex; // glibc: the futex is the first word
        const double start = now_ms();
        kill(child, SIGKILL);
        double by_word = 0, by_end = 0;
        while (by_word == 0 || by_end == 0) {
            if (by_word == 0 && (atomic_load(word) & 0x40000000u) != 0) // FUTEX_OWNER_DIED
                by_word = now_ms() - start;
            if (by_end == 0 && read(ends[0], &byte, 1) == 0)
                by_end = now_ms() - start;
            if (now_ms() - start > 10000)
                return 2;
        }
        const double by_parent = (waitpid(child, NULL, 0), now_ms() - start);
        printf("%.2f GiB: word %.2f ms, end of the connection %.2f ms, process gone %.2f ms\n", gib,
               by_word, by_end, by_parent);
        close(ends[0]);
        munmap(mutex, 4096);
    }
    return 0;
}
