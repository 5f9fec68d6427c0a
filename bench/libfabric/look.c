/* What one look at the completion queue of an endpoint with many idle peers costs: with a descriptor (`busy`),
 * and without (`none`).
 *   cc -O2 -o look look.c -lfabric; ./look PROVIDER PEERS busy|none
 * The child opens PEERS endpoints, each sends one message; then all are idle. */
#include <poll.h>
#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>
#define CHK(x)                                                                                     \
    do {                                                                                           \
        long r_ = (long)(x);                                                                       \
        if (r_ < 0) {                                                                              \
            fprintf(stderr, "%s: %ld %s\n", #x, r_, fi_strerror((int)-r_));                        \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)
static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e9 + t.tv_nsec;
}
static struct fi_info* info;
static struct fid_fabric* fabric;
static struct fid_domain* domain;
struct side {
    struct fid_ep* ep;
    struct fid_cq* cq;
    struct fid_av* av;
};
static struct side make(int wait) {
    struct side s;
    struct fi_av_attr aa = {.type = FI_AV_TABLE, .count = 4};
    struct fi_cq_attr ca = {
        .format = FI_CQ_FORMAT_DATA, .size = 256, .wait_obj = wait ? FI_WAIT_FD : FI_WAIT_NONE};
    CHK(fi_av_open(domain, &aa, &s.av, NULL));
    CHK(fi_cq_open(domain, &ca, &s.cq, NULL));
    CHK(fi_endpoint(domain, info, &s.ep, NULL));
    CHK(fi_ep_bind(s.ep, &s.cq->fid, FI_TRANSMIT | FI_RECV));
    CHK(fi_ep_bind(s.ep, &s.av->fid, 0));
    CHK(fi_enable(s.ep));
    return s;
}
static int cmp(const void* a, const void* b) {
    double x = *(double*)a, y = *(double*)b;
    return (x > y) - (x < y);
}
int main(int argc, char** argv) {
    int num = atoi(argv[2]);
    (void)argc;
    struct rlimit lim = {65536, 65536};
    setrlimit(RLIMIT_NOFILE, &lim);
    int sv[2];
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, sv))
        return 1;
    pid_t child = fork();
    struct fi_info* h = fi_allocinfo();
    h->ep_attr->type = FI_EP_RDM;
    h->caps = FI_MSG | FI_RMA;
    h->mode = FI_CONTEXT | FI_CONTEXT2;
    h->fabric_attr->prov_name = strdup(argv[1]);
    h->domain_attr->threading = FI_THREAD_SAFE;
    h->domain_attr->resource_mgmt = FI_RM_ENABLED;
    CHK(fi_getinfo(FI_VERSION(1, 17), "127.0.0.1", NULL, FI_SOURCE, h, &info));
    CHK(fi_fabric(info->fabric_attr, &fabric, NULL));
    CHK(fi_domain(fabric, info, &domain, NULL));
    char name[64] = {0}, c = 1;
    size_t len = sizeof name;
    if (child) {
        struct side s = make(strcmp(argv[3], "none") != 0);
        CHK(fi_getname(&s.ep->fid, name, &len));
        if (write(sv[0], name, sizeof name) < 0)
            return 1;
        static char buf[64];
        static struct fi_context2 ctx[8192];
        for (int i = 0; i < num; i++) {
            long r;
            while ((r = fi_recv(s.ep, buf, sizeof buf, NULL, FI_ADDR_UNSPEC, &ctx[i])) ==
                   -FI_EAGAIN)
                fi_cq_read(s.cq, NULL, 0);
            CHK(r);
        }
        int got = 0;
        double start = now();
        while (got < num) {
            struct fi_cq_data_entry e[16];
            ssize_t n = fi_cq_read(s.cq, e, 16);
            if (n > 0)
                got += n;
            else if (n != -FI_EAGAIN) {
                struct fi_cq_err_entry ee = {0};
                fi_cq_readerr(s.cq, &ee, 0);
                fprintf(stderr, "err %s\n", fi_strerror(ee.err));
                return 1;
            }
            if (now() - start > 60e9) {
                fprintf(stderr, "only %d\n", got);
                return 1;
            }
        }
        if (strcmp(argv[3], "sleep") == 0) {
            int fd;
            struct fid* f = &s.cq->fid;
            fi_control(f, FI_GETWAIT, &fd);
            fi_trywait(fabric, &f, 1);
            struct pollfd p = {fd, POLLIN, 0};
            poll(&p, 1, 10);
        }
        enum { R = 31 };
        double t[R];
        int inner = num > 100 ? 300 : 3000;
        for (int r = 0; r < R; r++) {
            struct fi_cq_data_entry e[16];
            double a = now();
            for (int i = 0; i < inner; i++)
                fi_cq_read(s.cq, e, 16);
            t[r] = (now() - a) / inner;
        }
        qsort(t, R, sizeof *t, cmp);
        printf(
            "{\"provider\": \"%s\", \"wait_obj\": \"%s\", \"peers\": %d, \"after\": \"%s\", \"look_ns\": %.0f, \"look_ns_min\": %.0f}\n",
            argv[1],
            getenv("FI_OFI_RXM_DEF_TCP_WAIT_OBJ") ? getenv("FI_OFI_RXM_DEF_TCP_WAIT_OBJ") : "fd",
            num, argv[3], t[R / 2], t[0]);
        kill(child, SIGKILL);
    } else {
        if (recv(sv[1], name, sizeof name, MSG_WAITALL) != sizeof name)
            return 1;
        struct side* s = calloc(num, sizeof *s);
        for (int i = 0; i < num; i++) {
            s[i] = make(0);
            fi_addr_t a;
            CHK(fi_av_insert(s[i].av, name, 1, &a, 0, NULL));
            long r;
            while ((r = fi_inject(s[i].ep, &c, 1, a)) == -FI_EAGAIN)
                fi_cq_read(s[i].cq, NULL, 0);
            CHK(r);
            for (int k = 0; k < 3; k++)
                fi_cq_read(s[i].cq, NULL, 0);
        }
        pause();
    }
    return 0;
}
