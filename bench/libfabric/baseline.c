/* What libfabric itself reaches between two processes, to be measured beside `switchyard bench p2p`:
 * half round trips of 8 bytes, by write and by message, and the bandwidth of 1 MiB writes.
 *
 *   cc -O2 -o baseline baseline.c -lfabric
 *   ./baseline server PROVIDER PORT & ./baseline client PROVIDER PORT
 */
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define CHECK(call)                                                                                \
    do {                                                                                           \
        long result_ = (long)(call);                                                               \
        if (result_ < 0) {                                                                         \
            fprintf(stderr, "%s: %s\n", #call, fi_strerror((int)-result_));                        \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)
#define POST(call)                                                                                 \
    do {                                                                                           \
        long taken_;                                                                               \
        while ((taken_ = (long)(call)) == -FI_EAGAIN)                                              \
            progress();                                                                            \
        CHECK(taken_);                                                                             \
    } while (0)

enum { num_rounds = 20000, num_buffers = 64, window = 8, num_writes = 256, num_repeats = 5 };
static const size_t write_bytes = 1 << 20;

static struct fid_cq* queue;
static struct fid_ep* endpoint;
static char buffers[num_buffers][64];
static struct fi_context2 receives[num_buffers], writes[window];
static long num_received, num_written;

static double now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec * 1e-3;
}

static void offer(long idx) {
    CHECK(
        fi_recv(endpoint, buffers[idx], sizeof buffers[idx], NULL, FI_ADDR_UNSPEC, &receives[idx]));
}

static void progress(void) {
    struct fi_cq_data_entry entries[16];
    ssize_t num = fi_cq_read(queue, entries, 16);
    if (num == -FI_EAGAIN)
        return;
    CHECK(num);
    for (ssize_t nth = 0; nth < num; nth++) {
        if (entries[nth].flags & FI_RECV) {
            num_received++;
            offer((struct fi_context2*)entries[nth].op_context - receives);
        } else if (entries[nth].flags & FI_WRITE) {
            num_written++;
        }
    }
}

static int compare(const void* a, const void* b) {
    double x = *(const double*)a, y = *(const double*)b;
    return (x > y) - (x < y);
}

int main(int argc, char** argv) {
    if (argc != 4)
        return fprintf(stderr, "usage: %s server|client PROVIDER PORT\n", argv[0]), 2;
    int is_server = !strcmp(argv[1], "server"), one = 1, meeting = -1;
    int has_address = strncmp(argv[2], "shm", 3) != 0;
    struct sockaddr_in address = {.sin_family = AF_INET,
                                  .sin_port = htons((uint16_t)atoi(argv[3]))};
    inet_pton(AF_INET, "127.0.0.1", &address.sin_addr);
    if (is_server) {
        int listener = socket(AF_INET, SOCK_STREAM, 0);
        setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
        if (bind(listener, (void*)&address, sizeof address) || listen(listener, 1))
            return perror("listen"), 1;
        meeting = accept(listener, NULL, NULL);
    } else {
        for (int attempt = 0; attempt < 100; attempt++) {
            meeting = socket(AF_INET, SOCK_STREAM, 0);
            if (!connect(meeting, (void*)&address, sizeof address))
                break;
            close(meeting);
            meeting = -1;
            usleep(50000);
        }
    }
    if (meeting < 0)
        return perror("meet"), 1;
    setsockopt(meeting, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);

    struct fi_info *hints = fi_allocinfo(), *info;
    hints->ep_attr->type = FI_EP_RDM;
    hints->caps = FI_RMA | FI_MSG;
    hints->mode = FI_CONTEXT | FI_CONTEXT2;
    hints->fabric_attr->prov_name = strdup(argv[2]);
    hints->domain_attr->mr_mode = FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
    hints->domain_attr->threading = FI_THREAD_DOMAIN;
    CHECK(fi_getinfo(FI_VERSION(1, 17), has_address ? "127.0.0.1" : NULL, NULL,
                     has_address ? FI_SOURCE : 0, hints, &info));
    struct fid_fabric* fabric;
    struct fid_domain* domain;
    struct fid_av* addresses;
    struct fi_cq_attr queue_attr = {.format = FI_CQ_FORMAT_DATA, .size = 1024};
    struct fi_av_attr addresses_attr = {.type = FI_AV_TABLE, .count = 1};
    CHECK(fi_fabric(info->fabric_attr, &fabric, NULL));
    CHECK(fi_domain(fabric, info, &domain, NULL));
    CHECK(fi_cq_open(domain, &queue_attr, &queue, NULL));
    CHECK(fi_av_open(domain, &addresses_attr, &addresses, NULL));
    CHECK(fi_endpoint(domain, info, &endpoint, NULL));
    CHECK(fi_ep_bind(endpoint, &queue->fid, FI_TRANSMIT | FI_RECV));
    CHECK(fi_ep_bind(endpoint, &addresses->fid, 0));
    CHECK(fi_enable(endpoint));

    size_t memory_bytes = 4096 + window * write_bytes;
    char* memory = aligned_alloc(4096, memory_bytes);
    memset(memory, 0, memory_bytes);
    struct fid_mr* registration;
    CHECK(fi_mr_reg(domain, memory, memory_bytes,
                    FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE, 0, 1, 0, &registration,
                    NULL));
    struct {
        uint64_t key, base;
        char name[256];
    } ours = {0}, theirs;
    size_t name_bytes = sizeof ours.name;
    ours.key = fi_mr_key(registration);
    ours.base = info->domain_attr->mr_mode & FI_MR_VIRT_ADDR ? (uint64_t)(uintptr_t)memory : 0;
    CHECK(fi_getname(&endpoint->fid, ours.name, &name_bytes));
    if (write(meeting, &ours, sizeof ours) != sizeof ours)
        return 1;
    if (recv(meeting, &theirs, sizeof theirs, MSG_WAITALL) != sizeof theirs)
        return 1;
    fi_addr_t peer;
    if (fi_av_insert(addresses, theirs.name, 1, &peer, 0, NULL) != 1)
        return 1;
    for (long idx = 0; idx < num_buffers; idx++)
        offer(idx);
    char here = 1;
    if (write(meeting, &here, 1) != 1 || recv(meeting, &here, 1, MSG_WAITALL) != 1)
        return 1;

    static double samples[num_rounds];
    volatile uint64_t* word = (volatile uint64_t*)memory;
    for (int by_message = 0; by_message < 2; by_message++) {
        for (long round = 1; round <= num_rounds; round++) {
            uint64_t value = (uint64_t)round;
            double start = now_us();
            for (int turn = 0; turn < 2; turn++) {
                if (turn == is_server) {
                    if (by_message)
                        POST(fi_inject(endpoint, &value, sizeof value, peer));
                    else
                        POST(fi_inject_write(endpoint, &value, sizeof value, peer, theirs.base,
                                             theirs.key));
                } else if (by_message) {
                    while (num_received < round)
                        progress();
                } else {
                    while (*word < value)
                        progress();
                }
            }
            samples[round - 1] = (now_us() - start) / 2;
        }
        qsort(samples, num_rounds, sizeof *samples, compare);
        if (!is_server)
            printf("%s of 8 bytes: half round trip %.2f us p50, %.2f us p99\n",
                   by_message ? "message" : "write", samples[num_rounds / 2],
                   samples[num_rounds * 99 / 100]);
    }
    /* Delivery-complete writes in a window; the server only makes progress. */
    for (int repeat = 0; repeat < num_repeats; repeat++) {
        double start = now_us();
        long begun = num_written;
        for (long nth = 0; !is_server && nth < num_writes; nth++) {
            while (begun + nth - num_written >= window)
                progress();
            struct iovec source = {memory + 4096 + (size_t)(nth % window) * write_bytes,
                                   write_bytes};
            struct fi_rma_iov target = {theirs.base + 4096 + (size_t)(nth % window) * write_bytes,
                                        write_bytes, theirs.key};
            struct fi_msg_rma message = {.msg_iov = &source,
                                         .iov_count = 1,
                                         .addr = peer,
                                         .rma_iov = &target,
                                         .rma_iov_count = 1,
                                         .context = &writes[nth % window]};
            POST(fi_writemsg(endpoint, &message, FI_COMPLETION | FI_DELIVERY_COMPLETE));
        }
        while (!is_server && num_written < begun + num_writes)
            progress();
        samples[repeat] = (double)num_writes * (double)write_bytes / (now_us() - start) / 1e3;
        if (!is_server && write(meeting, &here, 1) != 1)
            return 1;
        while (is_server && recv(meeting, &here, 1, MSG_DONTWAIT) != 1)
            progress();
    }
    qsort(samples, num_repeats, sizeof *samples, compare);
    if (!is_server)
        printf("1 MiB writes: %.2f GB/s\n", samples[num_repeats / 2]);
    return 0;
}
