"""Collectives of three processes: random content per rank, poisoned destinations."""

from __future__ import annotations

import array
import random as generators
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from peers import LIMIT, Child, Pipe, seeded

from switchyard_moe.p2p import ArgumentError, ClosedError, PeerLostError, TruncatedError, collective
from switchyard_moe.p2p.collective import CollectiveContext, P2POp, file_exchange

Start = Callable[..., Child]
WORLD = 3
POISON = 0xA5


def content(seed: int, rank: int, size: int, dtype: str | None = None) -> bytes:
    random = generators.Random(seed * 1000 + rank)
    if dtype is None:
        return random.randbytes(size)
    floats = struct.pack(f"<{size // 4 + 1}f", *(random.gauss(0, 1) for _ in range(size // 4 + 1)))
    return floats[:size]


def context(rank: int, folder: str, **settings: Any) -> CollectiveContext:
    made = CollectiveContext(
        rank=rank,
        world_size=WORLD,
        exchange=file_exchange(folder),
        timeout=LIMIT,
        endpoint={"bind": "127.0.0.1"},
        **settings,
    )
    made.init()
    return made


def ranks(pipe: Pipe, rank: int, folder: str, seed: int, compression: str, registers: bool) -> None:
    dtype = "f32" if compression == "float" else None
    with context(rank, folder, compression=compression) as group:
        for algorithm in ("direct", "ring"):
            for size in (0, 1, 4, 1000, 70_003, 2_500_000 if dtype is None else 200_002):
                mine = bytearray(content(seed, rank, size, dtype))
                all_of_them = [content(seed, other, size, dtype) for other in range(WORLD)]
                out = bytearray([POISON]) * (WORLD * size)
                if registers:
                    group.register_tensor(mine)
                group.all_gather(out, mine, algorithm=algorithm, dtype=dtype)
                assert out == b"".join(all_of_them), (algorithm, size, "all_gather")
                for root in range(WORLD):
                    tensor = bytearray(mine) if rank == root else bytearray([POISON]) * size
                    group.broadcast(tensor, root, algorithm=algorithm, dtype=dtype)
                    assert tensor == all_of_them[root], (algorithm, size, "broadcast")
                if registers:
                    group.deregister_tensor(mine)
                whole = [content(seed + 1, other, WORLD * size, dtype) for other in range(WORLD)]
                for call in (group.all_to_all, group.reduce_scatter):
                    out = bytearray([POISON]) * (WORLD * size)
                    call(out, whole[rank], algorithm=algorithm, dtype=dtype)
                    expected = b"".join(theirs[size * rank : size * (rank + 1)] for theirs in whole)
                    assert out == expected, (algorithm, size, call.__name__)
        # A barrier, so that no rank leaves while others receive.
        group.all_gather(bytearray(WORLD), b"x")


@pytest.mark.parametrize(("compression", "registers"), [("none", True), ("none", False), ("float", False)])
def test_collectives(children: Start, tmp_path: Path, compression: str, registers: bool) -> None:
    seed = seeded().getrandbits(40)
    started = [children(ranks, rank, str(tmp_path), seed, compression, registers) for rank in range(WORLD)]
    for child in started:
        child.end()


def pairs(pipe: Pipe, rank: int, folder: str, seed: int) -> None:
    """UCCL's module-level calls."""
    collective.init_collective(
        4, None, rank=rank, world_size=WORLD, exchange=file_exchange(folder), endpoint={"bind": "127.0.0.1"}
    )
    with pytest.raises(ArgumentError, match="already"):
        collective.init_collective(rank=rank, world_size=WORLD)
    left, right = (rank - 1) % WORLD, (rank + 1) % WORLD
    sent = array.array("B", content(seed, rank, 50_000))
    got = array.array("B", bytes([POISON]) * 50_000)
    collective.register_tensor(sent)
    collective.register_tensor(got)
    for _ in range(3):
        handles = collective.batch_isend_irecv(
            [P2POp(collective.isend, sent, right), P2POp(collective.irecv, got, left)]
        )
        collective.wait_all(handles)
        assert got.tobytes() == content(seed, left, 50_000)
        with pytest.raises(ArgumentError, match="taken already"):
            collective.wait(handles[0])
    request = collective.irecv(got, left)
    outgoing = collective.isend(sent, right)
    while not collective.test(request):
        time.sleep(0.001)
    collective.wait(outgoing)
    # A rank's own calls to itself do nothing.
    collective.send(sent, rank)
    collective.recv(got, rank)
    for bad in (-1, WORLD):
        with pytest.raises(ArgumentError, match="does not exist"):
            collective.send(sent, bad)
    # Another length is an error for the receiver, and for the sender too if it is longer.
    if rank == 0:
        with pytest.raises(TruncatedError):
            collective.send(sent, 1)
        collective.send(array.array("B", b"short"), 1)
    elif rank == 1:
        with pytest.raises(TruncatedError):
            collective.recv(bytearray(49_999), 0)
        with pytest.raises(ArgumentError, match="sent 5 bytes"):
            collective.recv(bytearray(6), 0)
    collective.all_gather(bytearray(WORLD), b"x")
    collective.finalize_collective()
    with pytest.raises(ClosedError):
        collective.send(sent, right)


def test_calls_between_two_ranks(children: Start, tmp_path: Path) -> None:
    seed = seeded().getrandbits(40)
    started = [children(pairs, rank, str(tmp_path), seed) for rank in range(WORLD)]
    for child in started:
        child.end()


def survivor(pipe: Pipe, rank: int, folder: str) -> None:
    group = context(rank, folder)
    pipe.put("ready")
    if rank == 2:
        pipe.get()
    with pytest.raises(PeerLostError):
        group.all_gather(bytearray(WORLD * 1_000_000), bytes(1_000_000))
    pipe.put("failed as it must")
    pipe.get()
    group.finalize()


def test_a_killed_rank_fails_the_others(children: Start, tmp_path: Path) -> None:
    started = [children(survivor, rank, str(tmp_path)) for rank in range(WORLD)]
    for child in started:
        assert child.get() == "ready"
    started[2].kill()
    for child in started[:2]:
        assert child.get() == "failed as it must"
    for child in started[:2]:
        child.put("end")
        child.end()


def test_bad_arguments(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="rank is 3 of 3"):
        CollectiveContext(rank=3, world_size=3)
    with pytest.raises(ArgumentError, match="compression"):
        CollectiveContext(rank=0, world_size=1, compression="zip")  # type: ignore[arg-type]
    alone = CollectiveContext(rank=0, world_size=1, exchange=file_exchange(tmp_path), endpoint={"bind": "127.0.0.1"})
    with pytest.raises(ClosedError, match="init"):
        alone.register_tensor(bytearray(1))
    with alone:
        out = bytearray(10)
        alone.all_gather(out, bytes(range(10)))
        assert out == bytes(range(10))
        alone.broadcast(out, 0)
        with pytest.raises(ArgumentError, match="expected 9"):
            alone.all_gather(out, bytes(9))
        with pytest.raises(ArgumentError, match="algorithm"):
            alone.all_gather(out, bytes(10), algorithm="tree")  # type: ignore[arg-type]
        with pytest.raises(ArgumentError, match="read-only"):
            alone.all_gather(bytes(10), bytes(10))
