"""`python -m switchyard_moe.bench p2p`: one-sided transfers between two processes, beside other libraries.

Every library gets two processes of its own, one after the other, in rounds. Memory is private and anonymous, touched
before, of huge or small pages. The target's memory is poisoned and the initiator's is random before every row, and
every row's bytes are compared after it. *warm* repeats one range, *cold* walks through a pool that no cache holds.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import mmap
import multiprocessing as mp
import os
import platform
import random
import socket
import statistics
import sys
import time
import traceback
from collections.abc import Sequence
from multiprocessing import connection
from typing import Any

from . import _p2p_report
from ._p2p_peers import NAMES, Library, MissingLibrary, Slot, make

_POISON = 0xA5
_POOL = 128 << 20
_LIMIT = 300.0
#: Fewer ranges than this are gone through several times.
_FEW = 16


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark. Returns the exit status."""
    args = _parser().parse_args(argv)
    seed = args.seed or int.from_bytes(os.urandom(4), "little")
    print(f"seed {seed}", file=sys.stderr)
    own: list[str] = args.transport or NAMES["switchyard"]
    peers: list[str] = args.peer or []
    contenders = [("switchyard", transport) for transport in own]
    for peer in peers:
        name, _, transport = peer.partition(":")
        if name not in NAMES or name == "switchyard":
            print(f"--peer {peer}: expected one of {', '.join(sorted(set(NAMES) - {'switchyard'}))}", file=sys.stderr)
            return 2
        contenders += [(name, chosen) for chosen in ([transport] if transport else NAMES[name])]
    rows: list[dict[str, Any]] = []
    missing: set[str] = set()
    for round_idx in range(args.rounds):
        for name, transport in contenders:
            if f"{name}:{transport}" in missing:
                continue
            try:
                rows += _measure(name, transport, args, seed + round_idx, round_idx)
            except MissingLibrary as error:
                print(f"SKIPPED: {name}: {error}", file=sys.stderr)
                missing.add(f"{name}:{transport}")
    report = {"environment": _environment(args, seed), "skipped": sorted(missing), "rows": rows}
    print(_p2p_report.table(rows))
    if args.json:
        with open(args.json, "w") as file:
            json.dump(report, file, indent=1)
    if args.csv:
        _p2p_report.write_csv(args.csv, rows)
    if args.plot:
        _p2p_report.write_plot(args.plot, rows)
    return 1 if missing else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m switchyard_moe.bench p2p", description=__doc__)
    parser.add_argument(
        "--peer",
        action="append",
        metavar="NAME[:TRANSPORT]",
        help="library to measure beside this one: nixl, mooncake, gloo, nccl or ucx. May be repeated",
    )
    parser.add_argument(
        "--transport", action="append", choices=["cma", "shm", "tcp", "auto"], help="own transport. May be repeated"
    )
    parser.add_argument(
        "--sizes", type=_sizes, default=_sizes("4K,64K,1M,64M"), help="bytes of a transfer, with K, M or G"
    )
    parser.add_argument(
        "--ops", type=lambda text: text.split(","), default=["write", "read"], help="write, read or both"
    )
    parser.add_argument("--pages", choices=["huge", "small"], default="huge", help="pages of the memory (madvise)")
    parser.add_argument("--rounds", type=int, default=3, help="times that every library has its turn")
    parser.add_argument("--seconds", type=float, default=0.5, help="time for a row, after a warm-up of a tenth of it")
    parser.add_argument("--json", metavar="FILE", help="report with the environment and all rows")
    parser.add_argument("--csv", metavar="FILE", help="all rows")
    parser.add_argument("--plot", metavar="FILE", help="median times by size, as SVG")
    parser.add_argument(
        "--pool", type=_size, default=_POOL, help="bytes that cold transfers walk through, with K, M or G"
    )
    parser.add_argument("--seed", type=int, default=0, help="repeats the random bytes of a run")
    return parser


def _sizes(text: str) -> list[int]:
    return [_size(one) for one in text.split(",")]


def _size(text: str) -> int:
    shift = {"K": 10, "M": 20, "G": 30}.get(text[-1:], 0)
    number = text[:-1] if shift else text
    if not number.isdecimal() or int(number) == 0:
        raise argparse.ArgumentTypeError(f"{text!r}: expected bytes, with K, M or G, as 64K")
    return int(number) << shift


class _Memory:
    """Private memory with every page in place."""

    def __init__(self, size: int, pages: str) -> None:
        self.size = size
        self._map = mmap.mmap(-1, size + (2 << 20), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        first = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._start = -first % (2 << 20)
        self.address = first + self._start
        self._map.madvise(mmap.MADV_HUGEPAGE if pages == "huge" else mmap.MADV_NOHUGEPAGE)
        self.view = memoryview(self._map)[self._start : self._start + size]
        self.fill(_POISON)

    def fill(self, byte: int) -> None:
        ctypes.memset(self.address, byte, self.size)


def _slots(size: int, pool: int, is_cold: bool) -> list[Slot]:
    """The ranges of a row: one, or as many as the pool has room for."""
    return [(at, size) for at in range(0, pool - size + 1, size)] if is_cold else [(0, size)]


def _measure(name: str, transport: str, args: argparse.Namespace, seed: int, round_idx: int) -> list[dict[str, Any]]:
    """Measures one library over one transport in two processes."""
    context = mp.get_context("spawn")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ends = [context.Pipe() for _ in range(2)]
    settings = (name, transport, max([args.pool, *args.sizes]), args.pages, port)
    # The processes talk by a pipe of their own, and to this one by another.
    here, there = context.Pipe()
    work = (args.sizes, args.ops, args.seconds, seed)
    processes = [
        context.Process(target=_target, args=(ends[0][1], there, settings), daemon=True),
        context.Process(target=_initiator, args=(ends[1][1], here, settings, work), daemon=True),
    ]
    for process in processes:
        process.start()
    try:
        rows: list[dict[str, Any]] = []
        while True:
            ready = connection.wait([end[0] for end in ends], timeout=_LIMIT)
            if not ready:
                raise RuntimeError(f"{name} over {transport}: nothing happens for {_LIMIT} s")
            end: Any = ready[0]
            kind, content = end.recv()
            if kind == "row":
                rows.append(
                    {"library": name, "transport": transport, "round": round_idx, "pages": args.pages, **content}
                )
                print(_p2p_report.line(rows[-1]), file=sys.stderr)
            elif kind == "end":
                return rows
            elif kind == "missing":
                raise MissingLibrary(content)
            else:
                raise RuntimeError(f"{name} over {transport}: {content}")
    finally:
        for process in processes:
            process.kill()
            process.join()


def _target(up: Any, pipe: Any, settings: tuple[str, str, int, str, int]) -> None:
    """Owns the memory that the initiator writes and reads."""
    name, transport, size, pages, port = settings
    try:
        memory = _Memory(size, pages)
        library = make(name, transport, memory.address, size, True, port)
        pipe.send(library.describe())
        while True:
            order = pipe.recv()
            if order[0] == "fill":
                _fill(memory, order[1], order[2])
                pipe.send(None)
            elif order[0] == "offer":
                pipe.send(library.offer(order[1]))
            elif order[0] == "serve":
                library.serve(*order[1:])
            elif order[0] == "digest":
                pipe.send(_digest(memory, order[1]))
            else:
                return
    except MissingLibrary as error:
        up.send(("missing", str(error)))
    except Exception:
        up.send(("failed", traceback.format_exc()))


def _initiator(
    up: Any, pipe: Any, settings: tuple[str, str, int, str, int], work: tuple[list[int], list[str], float, int]
) -> None:
    name, transport, size, pages, port = settings
    try:
        memory = _Memory(size, pages)
        library = make(name, transport, memory.address, size, False, port)
        library.join(pipe.recv())
        sizes, ops, seconds, seed = work
        for bytes_ in sizes:
            for op in ops:
                for is_cold in (False, True):
                    seed += 1
                    up.send(("row", _row(library, memory, pipe, op, bytes_, is_cold, seconds, seed)))
        library.close()
        pipe.send(("end",))
        up.send(("end", None))
    except MissingLibrary as error:
        up.send(("missing", str(error)))
    except Exception:
        up.send(("failed", traceback.format_exc()))


def _row(
    library: Library, memory: _Memory, pipe: Any, op: str, size: int, is_cold: bool, seconds: float, seed: int
) -> dict[str, Any]:
    """Measures one operation, size and temperature."""
    slots = _slots(size, memory.size, is_cold)
    # The fill touches the whole pool, in order, which evicts what a former row left in caches.
    source, poisoned = (seed, None) if op == "write" else (None, seed)
    _fill(memory, source, slots)
    pipe.send(("fill", poisoned, slots))
    pipe.recv()
    # The last ranges tell how many transfers the time allows. The first ones are measured, each once if there are many.
    num_warm = 3
    last = slots[-num_warm:]
    each = _time(library, pipe, op, last, num_warm)[num_warm // 2] / 1e9
    num = max(5, min(20_000, int(seconds / max(each, 1e-6))))
    if is_cold and len(slots) >= _FEW:
        num = min(num, len(slots))
        slots = slots[:num]
    times = _time(library, pipe, op, slots, num)
    pipe.send(("digest", slots))
    theirs, ours = pipe.recv(), _digest(memory, slots)
    if theirs != ours:
        raise RuntimeError(f"the bytes of a {op} of {size} are wrong, seed {seed}")
    times.sort()
    median = statistics.median(times)
    return {
        "op": op,
        "bytes": size,
        "memory": "cold" if is_cold else "warm",
        "num": num,
        "median_us": median / 1e3,
        "p10_us": times[num // 10] / 1e3,
        "p99_us": times[min(num - 1, num * 99 // 100)] / 1e3,
        "gb_per_s": size / median,
    }


def _time(library: Library, pipe: Any, op: str, slots: list[Slot], num: int) -> list[int]:
    """Makes transfers of the slots in turn. Returns the nanoseconds of each."""
    pipe.send(("offer", slots))
    offered = pipe.recv()
    transfers = [library.prepare(op, slot, part) for slot, part in zip(slots, offered, strict=True)]
    pipe.send(("serve", op, slots, num))
    times: list[int] = []
    clock, num_slots = time.perf_counter_ns, len(transfers)
    for idx in range(num):
        transfer = transfers[idx % num_slots]
        begin = clock()
        transfer()
        times.append(clock() - begin)
    return times


def _fill(memory: _Memory, seed: int | None, slots: list[Slot]) -> None:
    """Fills the memory with poison, or the slots with random bytes that differ from slot to slot."""
    if seed is None:
        memory.fill(_POISON)
        return
    block = random.Random(seed).randbytes(4 << 20)
    view = memory.view
    for at, size in slots:
        # Each slot begins elsewhere in the block.
        shift = at // 4096 * 61 % (3 << 20)
        for done in range(0, size, 1 << 20):
            part = min(1 << 20, size - done)
            view[at + done : at + done + part] = block[shift : shift + part]
            shift = (shift + 4097) % (3 << 20)


def _digest(memory: _Memory, slots: list[Slot]) -> str:
    found = hashlib.blake2b()
    for at, size in slots:
        found.update(memory.view[at : at + size])
    return found.hexdigest()


def _environment(args: argparse.Namespace, seed: int) -> dict[str, Any]:
    versions = {}
    from importlib import metadata

    for name in ("switchyard-moe", "nixl", "mooncake-transfer-engine-non-cuda", "torch"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    with open("/proc/cpuinfo") as file:
        models = [text.split(":", 1)[1].strip() for text in file if text.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.processor(),
        "num_cpus": os.cpu_count(),
        "load": os.getloadavg(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": versions,
        "pages": args.pages,
        "seed": seed,
    }


if __name__ == "__main__":
    sys.exit(main())
