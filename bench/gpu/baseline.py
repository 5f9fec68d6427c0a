#!/usr/bin/env python3
"""What others' dispatch and combine cost on the same GPUs: NCCL, PyTorch's symmetric memory, and DeepEP.

    python3 bench/gpu/baseline.py [--out FILE] [--limit SECONDS] [--tokens 1,128]

Hidden 7168, top-8 of 256 experts, fp8 with one f32 scale per 128 values out, bf16 back. The times include
packing before and summing after. They use CUDA graphs and are the slowest client's median of 200 replays.
Prints one JSON object per line. Needs two or four GPUs, and torch with NCCL. Each section runs in processes
of its own and is ended at its time limit. DeepEP is left out if Python does not find it.
"""

import argparse
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time

HIDDEN, TOP_K, EXPERTS = 7168, 8, 256
FP8_ROW_BYTES = HIDDEN + HIDDEN // 128 * 4
NUM_REPLAYS = 200
# NVLink multicast stays off: on shared hosts it can take GPUs out of service.
ENVIRONMENT = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "NVSHMEM_REMOTE_TRANSPORT": "none",
    "NVSHMEM_SYMMETRIC_SIZE": "4294967296",
    "NVSHMEM_DISABLE_MNNVL": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "OMP_NUM_THREADS": "4",
    "PYTHONUNBUFFERED": "1",
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out")
    parser.add_argument("--limit", type=float, default=60, help="seconds per section")
    parser.add_argument("--tokens", default="1,8,32,64,128,256,1024,4096")
    parser.add_argument("--sections", default="nccl_all_to_all,nccl_split,symmetric_memory,deepep")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    tokens = [int(count) for count in args.tokens.split(",")]
    if args.worker:
        work(args.worker, tokens)
        return 0
    listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30)
    num_gpus = listing.stdout.count("GPU ")
    num_ranks = 4 if num_gpus >= 4 else 2
    if num_gpus < 2:
        print(f"baseline: needs two GPUs, found {num_gpus}", file=sys.stderr)
        return 3
    out = open(args.out, "w") if args.out else sys.stdout
    return max(run_section(name, num_ranks, args, out) for name in args.sections.split(","))


def run_section(name, num_ranks, args, out):
    if name == "deepep" and importlib.util.find_spec("deep_ep") is None:
        print("baseline deepep: not measured, since this Python has no module deep_ep", file=sys.stderr)
        return 0
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = dict(os.environ, **ENVIRONMENT, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
                       WORLD_SIZE=str(num_ranks))
    command = [sys.executable, os.path.abspath(__file__), "--worker", name, "--tokens", args.tokens]
    ranks = [
        subprocess.Popen(command, env=dict(environment, RANK=str(rank), LOCAL_RANK=str(rank)),
                         stdout=out if rank == 0 else subprocess.DEVNULL,
                         stderr=None if rank == 0 else subprocess.DEVNULL, start_new_session=True)
        for rank in range(num_ranks)
    ]
    deadline = time.monotonic() + args.limit
    while time.monotonic() < deadline and any(rank.poll() is None for rank in ranks):
        if any(rank.poll() not in (None, 0) for rank in ranks):
            time.sleep(2)
            break
        time.sleep(0.1)
    late = [rank for rank in ranks if rank.poll() is None]
    for rank in late:
        os.killpg(rank.pid, signal.SIGKILL)
    codes = [rank.wait() for rank in ranks]
    print(f"baseline {name}: {'all right' if not any(codes) else f'exit codes {codes}'}", file=sys.stderr)
    return 1 if any(codes) else 0


class World:
    """This rank's device and process group."""

    def __init__(self):
        import datetime

        import torch
        import torch.distributed as dist

        self.torch, self.dist = torch, dist
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.device = torch.device("cuda", self.rank)
        torch.cuda.set_device(self.device)
        dist.init_process_group("nccl", device_id=self.device,
                                timeout=datetime.timedelta(seconds=60))

    def slowest_median_us(self, step, clients):
        """Captures `step` and times its replays; the slowest client's median."""
        torch = self.torch
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        self.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            step()
        self.barrier()
        for _ in range(10):
            graph.replay()
        self.barrier()
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(NUM_REPLAYS)]
        for begin, end in events:
            begin.record()
            graph.replay()
            end.record()
        torch.cuda.synchronize()
        times = sorted(begin.elapsed_time(end) * 1e3 for begin, end in events)
        mine = torch.tensor([times[len(times) // 2]], device=self.device, dtype=torch.float64)
        everybody = [torch.zeros_like(mine) for _ in range(self.size)]
        self.dist.all_gather(everybody, mine)
        return max(everybody[rank].item() for rank in clients), graph

    def barrier(self):
        self.dist.barrier()
        self.torch.cuda.synchronize()


def work(section, tokens):
    world = World()
    {"nccl_all_to_all": nccl_all_to_all, "nccl_split": nccl_split,
     "symmetric_memory": symmetric_memory, "deepep": deepep}[section](world, tokens)
    world.barrier()
    world.dist.destroy_process_group()


def report(world, **fields):
    if world.rank == 0:
        print(json.dumps({"bench": "baseline", **fields}), flush=True)


def routing(torch, num_tokens, client):
    generator = torch.Generator().manual_seed(1000 + client)
    return torch.rand(num_tokens, EXPERTS, generator=generator).topk(TOP_K, dim=1).indices


def rows_by_server(topk, num_servers):
    """Token indices for each server; a token goes to a server once."""
    server = (topk * num_servers).div(EXPERTS, rounding_mode="floor")
    return [(server == s).any(1).nonzero().flatten() for s in range(num_servers)]


def nccl_all_to_all(world, tokens):
    torch, dist = world.torch, world.dist
    for count in tokens:
        plans = [rows_by_server(routing(torch, count, rank), world.size) for rank in range(world.size)]
        mine = torch.cat(plans[world.rank]).to(world.device)
        sent = [len(rows) for rows in plans[world.rank]]
        received = [len(plan[world.rank]) for plan in plans]
        x = torch.randint(0, 255, (count, FP8_ROW_BYTES), device=world.device, dtype=torch.uint8)
        packed = x.index_select(0, mine)
        arrived = torch.empty(sum(received), FP8_ROW_BYTES, device=world.device, dtype=torch.uint8)
        answer = torch.randn(sum(received), HIDDEN, device=world.device).to(torch.bfloat16)
        back = torch.empty(sum(sent), HIDDEN, device=world.device, dtype=torch.bfloat16)
        total = torch.zeros(count, HIDDEN, device=world.device, dtype=torch.bfloat16)

        def step():
            torch.index_select(x, 0, mine, out=packed)
            dist.all_to_all_single(arrived, packed, received, sent)
            dist.all_to_all_single(back, answer, sent, received)
            total.zero_()
            total.index_add_(0, mine, back)

        us, _ = world.slowest_median_us(step, range(world.size))
        report(world, what="nccl", shape=f"{world.size}r", tokens=count, dtype="fp8", median_us=round(us, 2),
               nccl=str(torch.cuda.nccl.version()), torch=torch.__version__)


def nccl_split(world, tokens):
    torch, dist = world.torch, world.dist
    splits = [(2, 2), (1, 3), (3, 1)] if world.size == 4 else [(1, 1)]
    for num_clients, num_servers in splits:
        for count in tokens:
            plans = [rows_by_server(routing(torch, count, c), num_servers) for c in range(num_clients)]
            device, is_client = world.device, world.rank < num_clients
            if is_client:
                counts = [len(rows) for rows in plans[world.rank]]
                mine = torch.cat(plans[world.rank]).to(device)
                x = torch.randint(0, 255, (count, FP8_ROW_BYTES), device=device, dtype=torch.uint8)
                outgoing = x.index_select(0, mine)
                incoming = torch.empty(sum(counts), HIDDEN, device=device, dtype=torch.bfloat16)
                total = torch.zeros(count, HIDDEN, device=device, dtype=torch.bfloat16)
                peers = [num_clients + s for s in range(num_servers)]
            else:
                counts = [len(plan[world.rank - num_clients]) for plan in plans]
                incoming = torch.empty(sum(counts), FP8_ROW_BYTES, device=device, dtype=torch.uint8)
                outgoing = torch.randn(sum(counts), HIDDEN, device=device).to(torch.bfloat16)
                peers = list(range(num_clients))

            def exchange(make, parts):
                operations = [dist.P2POp(make, part, peer)
                              for part, peer in zip(parts, peers) if part.shape[0]]
                for request in dist.batch_isend_irecv(operations) if operations else []:
                    request.wait()

            outgoing_parts, incoming_parts = outgoing.split(counts), incoming.split(counts)

            def step():
                if is_client:
                    torch.index_select(x, 0, mine, out=outgoing)
                    exchange(dist.isend, outgoing_parts)
                    exchange(dist.irecv, incoming_parts)
                    total.zero_()
                    total.index_add_(0, mine, incoming)
                else:
                    exchange(dist.irecv, incoming_parts)
                    exchange(dist.isend, outgoing_parts)

            us, _ = world.slowest_median_us(step, range(num_clients))
            report(world, what="nccl", shape=f"{num_clients}to{num_servers}", tokens=count, dtype="fp8",
                   median_us=round(us, 2))


def symmetric_memory(world, tokens):
    """PyTorch's expert-major all-to-all over NVSHMEM, which sends a copy per (token, expert)."""
    import torch.distributed._symmetric_memory as symmetric

    torch, device = world.torch, world.device
    symmetric.set_backend("NVSHMEM")
    group = world.dist.group.WORLD.group_name
    tokens = [count for count in tokens if count <= 1024]
    most = max(tokens) * TOP_K
    # The operator takes few experts per rank; the rows that leave a rank are the same.
    experts = 16 * world.size
    x_rows = symmetric.empty(most, FP8_ROW_BYTES, dtype=torch.uint8, device=device)
    arrived = symmetric.empty(most * 2 + 1024, FP8_ROW_BYTES, dtype=torch.uint8, device=device)
    answer = symmetric.empty(most * 2 + 1024, HIDDEN, dtype=torch.bfloat16, device=device)
    back = symmetric.empty(most + 1024, HIDDEN, dtype=torch.bfloat16, device=device)
    splits = symmetric.empty(experts, dtype=torch.int64, device=device)
    out_splits = symmetric.empty(2, experts, dtype=torch.int64, device=device)
    back_splits = symmetric.empty(2, experts, dtype=torch.int64, device=device)
    for tensor in (x_rows, arrived, answer, back, splits, out_splits, back_splits):
        symmetric.rendezvous(tensor, group=group)
    for count in tokens:
        flat = (routing(torch, count, world.rank) * experts // EXPERTS).flatten()
        order = flat.argsort(stable=True)
        token = torch.arange(count).repeat_interleave(TOP_K)[order].to(device)
        rows = count * TOP_K
        splits.copy_(torch.bincount(flat, minlength=experts))
        x = torch.randint(0, 255, (count, FP8_ROW_BYTES), device=device, dtype=torch.uint8)
        total = torch.zeros(count, HIDDEN, device=device, dtype=torch.bfloat16)

        def step():
            x_rows[:rows].copy_(x.index_select(0, token))
            torch.ops.symm_mem.all_to_all_vdev_2d(x_rows, arrived, splits, out_splits, group)
            torch.ops.symm_mem.all_to_all_vdev_2d_offset(answer, back, out_splits, back_splits, group)
            total.zero_()
            total.index_add_(0, token, back[:rows])

        us, _ = world.slowest_median_us(step, range(world.size))
        report(world, what="torch symmetric memory", shape=f"{world.size}r", tokens=count, dtype="fp8",
               median_us=round(us, 2))


def deepep(world, tokens):
    """DeepEP's kernels for few tokens: fp8 out, bf16 back. They quantise, and sum with weights, themselves."""
    import deep_ep

    torch, device = world.torch, world.device
    # DeepEP's buffers hold this number of rows for every expert and rank.
    most = 128
    size = deep_ep.Buffer.get_low_latency_rdma_size_hint(most, HIDDEN, world.size, EXPERTS)
    buffer = deep_ep.Buffer(world.dist.group.WORLD, 0, size, low_latency_mode=True,
                            num_qps_per_rank=EXPERTS // world.size)
    # Stands for the output of an expert stage. It is the same for every number of tokens.
    answer = torch.randn(EXPERTS // world.size, most * world.size, HIDDEN, device=device).to(torch.bfloat16)
    # Older versions have 64 bits, and no name for the type.
    idx_type = getattr(deep_ep, "topk_idx_t", torch.int64)
    for count in (count for count in tokens if count <= most):
        topk = routing(torch, count, world.rank).to(device, idx_type)
        weights = torch.rand(count, TOP_K, device=device)
        x = torch.randn(count, HIDDEN, device=device).to(torch.bfloat16)
        total = torch.empty(count, HIDDEN, device=device, dtype=torch.bfloat16)

        def step():
            handle = buffer.low_latency_dispatch(x, topk, most, EXPERTS, use_fp8=True)[2]
            buffer.low_latency_combine(answer, topk, weights, handle, out=total)

        us, _ = world.slowest_median_us(step, range(world.size))
        report(world, what="deepep", shape=f"{world.size}r", tokens=count, dtype="fp8", median_us=round(us, 2))


if __name__ == "__main__":
    sys.exit(main())
