#!/usr/bin/env python3
"""Bandwidth of single transfers of the message engine, one at a time, against baselines in the same turns.

usage: engine_baseline.py [--rounds N] [--switchyard PATH] [--json FILE]

Needs a release build of `switchyard`. All write and read memory of another process, one transfer at a time.
Over `cma` the baseline is the bare system call between two processes, over `tcp` a bare stream socket whose
receiver answers every transfer with a byte (a read is asked for with one). Prints medians, and medians of
the ratios within a round, as Markdown; exits with 1 when a tool fails.
"""

import argparse
import ctypes
import json
import mmap
import os
import signal
import socket
import statistics
import subprocess
import sys
import time

SIZES = [64 << 10, 1 << 20, 8 << 20]
MODES = ["write", "read"]
COPIES = {"write": "process_vm_writev", "read": "process_vm_readv"}
TIMEOUT_S = 120
NUM_TRANSFERS = 200


def switchyard(program, transport, mode):
    """Bytes per second, in 10^9, by size."""
    sizes = ",".join(map(str, SIZES))
    command = [program, "bench", "p2p", "--transport", transport, "--mode", mode, "--sizes", sizes]
    command += ["--num-iovs", "1", "--iterations", str(NUM_TRANSFERS), "--json"]
    output = subprocess.run(command, stdout=subprocess.PIPE, timeout=TIMEOUT_S, check=True).stdout
    return {row["bytes"]: row["gb_per_s"] for row in json.loads(output)["rows"]}


def receive(end, view):
    """Fills the view from a socket."""
    while view:
        num = end.recv_into(view)
        if num == 0:
            raise ConnectionError("the other process closed the connection")
        view = view[num:]


def stream(mode, size):
    """Bytes per second over one connection of the loopback interface, in 10^9."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        child = os.fork()
        if child == 0:
            with socket.create_connection(listener.getsockname()) as end:
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                memory = bytearray(b"\x02" * size)
                for _ in range(NUM_TRANSFERS):
                    if mode == "write":
                        receive(end, memoryview(memory))
                        end.sendall(b"x")
                    else:
                        receive(end, memoryview(bytearray(1)))
                        end.sendall(memory)
            os._exit(0)
        try:
            listener.settimeout(TIMEOUT_S)
            end, _ = listener.accept()
            with end:
                end.settimeout(TIMEOUT_S)
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                memory, times = bytearray(b"\x01" * size), []
                for _ in range(NUM_TRANSFERS):
                    start = time.perf_counter()
                    if mode == "write":
                        end.sendall(memory)
                        receive(end, memoryview(bytearray(1)))
                    else:
                        end.sendall(b"x")
                        receive(end, memoryview(memory))
                    times.append(time.perf_counter() - start)
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    return size * len(times) / sum(times) / 1e9


class Vector(ctypes.Structure):
    """`struct iovec`."""

    _fields_ = [("base", ctypes.c_void_p), ("len", ctypes.c_size_t)]


def copy(mode, size):
    """Bytes per second of the bare system call, in 10^9; both buffers were touched before."""
    call = getattr(ctypes.CDLL(None, use_errno=True), COPIES[mode])
    near = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    near.write(b"\x01" * size)
    near.seek(0)
    ready, is_ready = os.pipe()
    child = os.fork()
    if child == 0:
        # Private pages of its own at the address that both know.
        near.write(b"\x02" * size)
        os.write(is_ready, b"x")
        signal.pause()
        os._exit(0)
    try:
        os.read(ready, 1)
        address = ctypes.addressof(ctypes.c_char.from_buffer(near))
        local, distant = Vector(address, size), Vector(address, size)
        times = []
        for _ in range(NUM_TRANSFERS):
            start = time.perf_counter()
            done = call(child, ctypes.byref(local), 1, ctypes.byref(distant), 1, 0)
            times.append(time.perf_counter() - start)
            if done != size:
                raise OSError(ctypes.get_errno(), f"{COPIES[mode]} copied {done} of {size} bytes")
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(ready)
        os.close(is_ready)
    return size * len(times) / sum(times) / 1e9


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--switchyard", default="target/release/switchyard")
    parser.add_argument("--json", help="file for every figure of every round")
    args = parser.parse_args()
    found = {}
    for round_idx in range(args.rounds):
        print(f"round {round_idx + 1} of {args.rounds}", file=sys.stderr, flush=True)
        for transport in ("cma", "tcp"):
            for mode in MODES:
                ours = switchyard(args.switchyard, transport, mode)
                for size in SIZES:
                    theirs = copy(mode, size) if transport == "cma" else stream(mode, size)
                    found.setdefault((transport, mode, size), []).append((ours[size], theirs))
    if args.json:
        rows = [
            {"transport": transport, "mode": mode, "bytes": size, "engine_gb_per_s": a, "baseline_gb_per_s": b}
            for (transport, mode, size), pairs in found.items()
            for a, b in pairs
        ]
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)
    print("| | bytes | engine, GB/s | baseline, GB/s | ratio |\n|---|--:|--:|--:|--:|")
    for (transport, mode, size), pairs in found.items():
        ours, theirs = (statistics.median(values) for values in zip(*pairs))
        ratios = sorted(a / b for a, b in pairs)
        span = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        print(f"| {transport} {mode} | {size:,} | {ours:.2f} | {theirs:.2f} | {span} |")


if __name__ == "__main__":
    try:
        main()
    except (OSError, subprocess.SubprocessError, StopIteration, KeyError, ValueError) as error:
        sys.exit(f"engine_baseline.py: {type(error).__name__}: {error}")
