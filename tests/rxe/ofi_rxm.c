/* Two errors of libfabric's ofi_rxm over verbs, shown without Switchyard by two processes of one host, or of a
 * Soft-RoCE guest.
 *
 *   cc -O1 -o ofi_rxm tests/rxe/ofi_rxm.c -lfabric
 *   tests/rxe/guest.sh -f ofi_rxm -f /usr/lib/x86_64-linux-gnu/libfabric.so.1 -e FI_UNIVERSE_SIZE=8 -- \
 *       './ofi_rxm "verbs;ofi_rxm" 10.7.0.1 note'
 *
 * note   writes 64 KiB with remote completion data: with FI_OFI_RXM_USE_SRX=1 the target gets no completion
 * remap  writes, then the target ends the registration, maps other memory at the same address by system
 *        calls, registers that and is written to again: with the cache of registrations on, which is the
 *        default, the bytes never come
 *
 * Exits with 0 when all bytes and completions came as libfabric's manual says, with 1 when any did not come in 5 s.
 */
#define _GNU_SOURCE
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
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define CHECK(call)                                                                                \
    do {                                                                                           \
        long result_ = (long)(call);                                                               \
        if (result_ < 0) {                                                                         \
            fprintf(stderr, "%s: %s: %s\n", who, #call, fi_strerror((int)-result_));               \
            exit(2);                                                                               \
        }                                                                                          \
    } while (0)

enum { target_bytes = 64 << 10, note = 0x01020304 };
static const uint64_t access_bits = FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE;

static const char* who;
static struct fid_domain* domain;
static struct fid_cq* queue;
static struct fid_ep* endpoint;
static struct fi_info* info;
static struct fi_context2 context;
static long num_written, num_notes;

/* The target's memory, for the writer. */
struct place {
    uint64_t address, key;
    char name[128];
};

static double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void progress(void) {
    struct fi_cq_data_entry entry;
    ssize_t num = fi_cq_read(queue, &entry, 1);
    if (num == -FI_EAGAIN)
        return;
    CHECK(num);
    num_written += !!(entry.flags & FI_WRITE);
    num_notes += (entry.flags & FI_REMOTE_WRITE) && entry.data == note;
}

static struct fid_mr* register_memory(void* memory, uint64_t key) {
    struct fid_mr* registration;
    CHECK(fi_mr_reg(domain, memory, target_bytes, access_bits, 0, key, 0, &registration, NULL));
    return registration;
}

static struct place place_of(void* memory, struct fid_mr* registration) {
    struct place place = {.key = fi_mr_key(registration)};
    if (info->domain_attr->mr_mode & FI_MR_VIRT_ADDR)
        place.address = (uint64_t)(uintptr_t)memory;
    size_t bytes = sizeof place.name;
    CHECK(fi_getname(&endpoint->fid, place.name, &bytes));
    return place;
}

static void open_all(const char* provider, const char* address) {
    struct fi_info* hints = fi_allocinfo();
    struct fid_fabric* fabric;
    struct fi_cq_attr attributes = {.format = FI_CQ_FORMAT_DATA, .size = 64};
    hints->ep_attr->type = FI_EP_RDM;
    hints->caps = FI_MSG | FI_RMA;
    hints->mode = FI_CONTEXT | FI_CONTEXT2;
    hints->fabric_attr->prov_name = strdup(provider);
    hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
    CHECK(fi_getinfo(FI_VERSION(1, 14), address, NULL, FI_SOURCE, hints, &info));
    CHECK(fi_fabric(info->fabric_attr, &fabric, NULL));
    CHECK(fi_domain(fabric, info, &domain, NULL));
    CHECK(fi_cq_open(domain, &attributes, &queue, NULL));
    CHECK(fi_endpoint(domain, info, &endpoint, NULL));
}

static fi_addr_t enable(const struct place* peer, struct fid_av* addresses) {
    fi_addr_t to;
    CHECK(fi_av_insert(addresses, peer->name, 1, &to, 0, NULL));
    return to;
}

/* Whether `memory` holds `value` everywhere within 5 s, and `notes` came. */
static int has_come(const volatile char* memory, char value, long notes) {
    for (double end = now_s() + 5; now_s() < end;) {
        size_t at = 0;
        while (at < target_bytes && memory[at] == value)
            at++;
        if (at == target_bytes && num_notes >= notes)
            return 1;
        progress();
    }
    fprintf(stderr, "target: after 5 s %ld of %ld notes, first byte %#x, expected %#x\n", num_notes,
            notes, memory[0], value);
    return 0;
}

static int be_target(int meeting, int remaps, struct fid_av* addresses) {
    int protection = PROT_READ | PROT_WRITE, flags = MAP_PRIVATE | MAP_ANONYMOUS;
    char* memory = mmap(NULL, target_bytes, protection, flags, -1, 0);
    int all_came = 1;
    for (int round = 0; round < 1 + remaps && all_came; round++) {
        if (round) {
            /* As some language runtimes do, past the C library. */
            syscall(SYS_munmap, memory, target_bytes);
            char* again = (char*)syscall(SYS_mmap, memory, target_bytes, protection,
                                         flags | MAP_FIXED, -1, 0);
            if (again != memory)
                return 2;
        }
        memset(memory, 0, target_bytes);
        struct fid_mr* registration = register_memory(memory, 1);
        struct place ours = place_of(memory, registration), theirs;
        if (write(meeting, &ours, sizeof ours) != sizeof ours)
            return 2;
        if (recv(meeting, &theirs, sizeof theirs, MSG_WAITALL) != sizeof theirs)
            return 2;
        if (!round)
            enable(&theirs, addresses);
        char ready = 1;
        if (write(meeting, &ready, 1) != 1)
            return 2;
        all_came = has_come(memory, (char)('a' + round), remaps ? 0 : 1);
        char done = (char)all_came;
        if (write(meeting, &done, 1) != 1)
            return 2;
        CHECK(fi_close(&registration->fid));
    }
    return !all_came;
}

static int be_writer(int meeting, int remaps, struct fid_av* addresses) {
    char* memory = aligned_alloc(4096, target_bytes);
    struct fid_mr* registration = register_memory(memory, 2);
    void* descriptor = fi_mr_desc(registration);
    fi_addr_t to = FI_ADDR_UNSPEC;
    for (int round = 0; round < 1 + remaps; round++) {
        struct place ours = place_of(memory, registration), theirs;
        char answer;
        if (recv(meeting, &theirs, sizeof theirs, MSG_WAITALL) != sizeof theirs)
            return 2;
        if (write(meeting, &ours, sizeof ours) != sizeof ours)
            return 2;
        if (!round)
            to = enable(&theirs, addresses);
        if (recv(meeting, &answer, 1, MSG_WAITALL) != 1)
            return 2;
        memset(memory, 'a' + round, target_bytes);
        struct iovec source = {memory, target_bytes};
        struct fi_rma_iov place = {theirs.address, target_bytes, theirs.key};
        struct fi_msg_rma message = {.msg_iov = &source,
                                     .desc = &descriptor,
                                     .iov_count = 1,
                                     .addr = to,
                                     .rma_iov = &place,
                                     .rma_iov_count = 1,
                                     .context = &context,
                                     .data = note};
        ssize_t taken;
        while ((taken = fi_writemsg(endpoint, &message,
                                    FI_COMPLETION | (remaps ? 0 : FI_REMOTE_CQ_DATA))) ==
               -FI_EAGAIN)
            progress();
        CHECK(taken);
        while (recv(meeting, &answer, 1, MSG_DONTWAIT) != 1)
            progress();
        for (double end = now_s() + 1; num_written <= round && now_s() < end;)
            progress();
        printf("write %d: %s, %s\n", round + 1, num_written > round ? "complete" : "not complete",
               answer ? "there" : "NOT THERE");
        if (!answer)
            return 1;
    }
    return 0;
}

int main(int argc, char** argv) {
    if (argc != 4)
        return fprintf(stderr, "usage: %s PROVIDER ADDRESS note|remap\n", argv[0]), 2;
    int ends[2], remaps = !strcmp(argv[3], "remap"), status;
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, ends))
        return perror("socketpair"), 2;
    setvbuf(stdout, NULL, _IOLBF, 0);
    pid_t target = fork();
    who = target ? "writer" : "target";
    open_all(argv[1], argv[2]);
    struct fid_av* addresses;
    struct fi_av_attr attributes = {.type = FI_AV_TABLE};
    CHECK(fi_av_open(domain, &attributes, &addresses, NULL));
    CHECK(fi_ep_bind(endpoint, &queue->fid, FI_TRANSMIT | FI_RECV));
    CHECK(fi_ep_bind(endpoint, &addresses->fid, 0));
    CHECK(fi_enable(endpoint));
    close(ends[target != 0]);
    if (!target)
        return be_target(ends[1], remaps, addresses);
    int result = be_writer(ends[0], remaps, addresses);
    waitpid(target, &status, 0);
    return result;
}
