"""Messages, reads and writes between two processes: distinct random bytes on both sides, poisoned destinations."""

from __future__ import annotations

import ctypes
import mmap
import os
import random as generators
from collections.abc import Callable
from typing import Any

import pytest
from peers import LIMIT, Child, Pipe, ended, local, seeded

from switchyard_moe.p2p import ArgumentError, Endpoint, TransferTimeoutError, TruncatedError
from switchyard_moe.p2p._memory import place_of

Start = Callable[..., Child]
TRANSPORTS = [["cma"], ["shm"], ["tcp"]]
SIZES = [1, 2, 4095, 4096, 8192, 8193, 100_003, 1 << 20, (5 << 20) + 7]
POISON = 0xA5


def connected(pipe: Pipe, **settings: Any) -> tuple[Endpoint, int]:
    """The child's side of a connection."""
    endpoint = local(**settings)
    pipe.put(endpoint.get_metadata())
    ok, ip, gpu_idx, conn_id = endpoint.accept()
    assert (ok, ip, gpu_idx) == (True, "127.0.0.1", -1)
    return endpoint, conn_id


def echo(pipe: Pipe, transports: list[str], seed: int) -> None:
    """Receives messages, and sends other ones."""
    endpoint, conn_id = connected(pipe, transports=transports)
    for size in SIZES:
        got = bytearray([POISON]) * (size + 64)
        _, mr_in = endpoint.reg(got)
        assert endpoint.recv(conn_id, mr_in, got, size)
        pipe.put(bytes(got))
        answer = generators.Random(seed ^ size).randbytes(size)
        _, mr_out = endpoint.reg(answer)
        ok, transfer_id = endpoint.send_async(conn_id, mr_out, answer)
        assert ok and ended(endpoint, transfer_id)
        assert endpoint.dereg(mr_in) and endpoint.dereg(mr_out)
    pipe.get()
    endpoint.close()


@pytest.mark.parametrize("transports", TRANSPORTS)
def test_messages_go_both_ways(children: Start, transports: list[str]) -> None:
    random = seeded()
    seed = random.getrandbits(40)
    child = children(echo, transports, seed)
    with local(transports=transports) as endpoint:
        ok, conn_id = endpoint.connect(child.get())
        assert ok and endpoint.connection(conn_id).transport == transports[0]
        for size in SIZES:
            sent = random.randbytes(size)
            _, mr_out = endpoint.reg(sent)
            assert endpoint.send(conn_id, mr_out, sent)
            arrived = child.get()
            assert arrived[:size] == sent and arrived[size:] == bytes([POISON]) * 64
            got = bytearray([POISON]) * (size + 1)
            _, mr_in = endpoint.reg(got)
            ok, transfer_id = endpoint.recv_async(conn_id, mr_in, got)
            assert ok and endpoint.wait(transfer_id) == size
            assert got[:size] == generators.Random(seed ^ size).randbytes(size) and got[size] == POISON
        child.put("done")
        child.end()


def target(pipe: Pipe, transports: list[str], size: int, seed: int) -> None:
    """Advertises memory with random content, and shows it when asked."""
    endpoint, conn_id = connected(pipe, transports=transports)
    memory = bytearray(generators.Random(seed).randbytes(size))
    _, mr_id = endpoint.reg(memory)
    ok, meta = endpoint.advertise(conn_id, mr_id, memory)
    assert ok and len(meta) == 64
    ok, parts = endpoint.advertisev(
        conn_id, [mr_id] * 3, [endpoint_address(memory) + 100 * i for i in range(3)], [50] * 3, 3
    )
    assert ok
    pipe.put((meta, parts))
    while (order := pipe.get()) != "end":
        assert order == "show"
        pipe.put(bytes(memory))
    endpoint.close()


def endpoint_address(memory: bytearray) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


@pytest.mark.parametrize("transports", TRANSPORTS)
@pytest.mark.parametrize("size", [1000, 70_001, (3 << 20) + 5])
def test_reads_and_writes_reach_what_was_advertised(children: Start, transports: list[str], size: int) -> None:
    random = seeded()
    seed = random.getrandbits(40)
    theirs = generators.Random(seed).randbytes(size)
    child = children(target, transports, size, seed)
    with local(transports=transports) as endpoint:
        _, conn_id = endpoint.connect(child.get())
        meta, parts = child.get()
        here = bytearray([POISON]) * size
        _, mr_id = endpoint.reg(here)
        assert endpoint.read(conn_id, mr_id, here, None, meta)
        assert here == theirs
        # A part of the range, from its start; the rest keeps its content.
        ours = random.randbytes(size)
        here[:] = ours
        part = size // 3
        assert endpoint.write(conn_id, mr_id, here, part, meta)
        child.put("show")
        assert child.get() == ours[:part] + theirs[part:]
        ok, transfer_id = endpoint.write_async(conn_id, mr_id, endpoint_address(here), size, meta)
        assert ok and ended(endpoint, transfer_id)
        child.put("show")
        assert child.get() == ours
        # Several ranges, in another order than they lie.
        pieces = [endpoint_address(here) + 50 * i for i in (2, 0, 1)]
        expected = bytearray(ours)
        for i, source in enumerate((2, 0, 1)):
            expected[100 * i : 100 * i + 50] = ours[50 * source : 50 * source + 50]
        assert endpoint.writev(conn_id, [mr_id] * 3, pieces, [50] * 3, parts, 3)
        child.put("show")
        assert child.get() == expected
        here[:] = bytes([POISON]) * size
        ok, transfer_id = endpoint.readv_async(conn_id, [mr_id] * 3, pieces, [50] * 3, parts, 3)
        assert ok and endpoint.wait(transfer_id) == 150
        for i, source in enumerate((2, 0, 1)):
            assert here[50 * source : 50 * source + 50] == expected[100 * i : 100 * i + 50]
        assert here[150:] == bytes([POISON]) * (size - 150)
        child.put("end")
        child.end()


def test_vectors_of_messages() -> None:
    """`sendv` is one message per range."""
    random = seeded()
    with local() as here, local() as there:
        _, out = here.add_remote_endpoint(there.get_metadata())
        _, _, _, back = there.accept()
        sizes = [10, 70_000, 3]
        sources = [random.randbytes(size) for size in sizes]
        targets = [bytearray([POISON]) * size for size in sizes]
        ok, mrs_out = here.regv(sources)
        assert ok
        ok, mrs_in = there.regv(targets)
        assert ok
        ok, transfer_id = there.recvv_async(back, mrs_in, [endpoint_address(t) for t in targets], sizes, 3)
        assert ok
        assert here.sendv(out, mrs_out, [place_of(s).ptr for s in sources], sizes, 3)
        assert there.wait(transfer_id) == sum(sizes)
        assert [bytes(t) for t in targets] == sources


@pytest.mark.parametrize("size", [9, 4096, 1 << 20])
def test_a_receive_that_is_too_small_fails_on_both_sides(size: int) -> None:
    random = seeded()
    with local() as here, local() as there:
        _, out = here.add_remote_endpoint(there.get_metadata())
        _, _, _, back = there.accept()
        source, target = random.randbytes(size), bytearray([POISON]) * (size - 1)
        _, mr_out = here.reg(source)
        _, mr_in = there.reg(target)
        _, receive = there.recv_async(back, mr_in, target)
        with pytest.raises(TruncatedError, match=rf"{size} bytes for a buffer of {size - 1} bytes"):
            here.send(out, mr_out, source)
        with pytest.raises(TruncatedError):
            there.wait(receive)
        assert target == bytes([POISON]) * (size - 1), "a refused message changed its destination"
        # The connection goes on.
        _, receive = there.recv_async(back, mr_in, target)
        assert here.send(out, mr_out, source, size - 1)
        assert there.wait(receive) == size - 1 and target == source[:-1]


class Long:
    """Memory of any length that costs 64 MiB: one file, mapped over and over, and a tail of its own."""

    WINDOW = 64 << 20

    def __init__(self, size: int, tail: int) -> None:
        self.size = size
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p
        self._libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        self._libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self.address = self._map(None, size, -1)
        self._file = os.memfd_create("window")
        os.ftruncate(self._file, self.WINDOW)
        for at in range(0, size - tail, self.WINDOW):
            self._map(self.address + at, min(self.WINDOW, size - tail - at), self._file)
        self.window = mmap.mmap(self._file, self.WINDOW)
        self.tail = (ctypes.c_char * tail).from_address(self.address + size - tail)

    def _map(self, at: int | None, size: int, file: int) -> int:
        flags = mmap.MAP_SHARED if file >= 0 else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000
        found = self._libc.mmap(at, size, mmap.PROT_READ | mmap.PROT_WRITE, flags | (0x10 if at else 0), file, 0)
        assert found not in (None, 2**64 - 1), os.strerror(ctypes.get_errno())
        return int(found)

    def free(self) -> None:
        self._libc.munmap(self.address, self.size)
        self.window.close()
        os.close(self._file)


@pytest.mark.parametrize("transports", TRANSPORTS)
def test_more_than_four_gib_in_one_transfer(transports: list[str]) -> None:
    """Lengths and offsets are not taken modulo 2**32."""
    random = seeded()
    size = (4 << 30) + 4096
    source, target = Long(size, 4096), Long(size, 4096)
    with local(transports=transports) as here, local(transports=transports) as there:
        _, out = here.add_remote_endpoint(there.get_metadata())
        _, _, _, back = there.accept()
        _, mr_out = here.reg(source.address, size)
        _, mr_in = there.reg(target.address, size)
        source.window[:8], target.window[:8] = b"source!!", b"target!!"
        source.tail.raw, target.tail.raw = random.randbytes(4096), bytes([POISON]) * 4096
        ok, short = there.advertise(back, mr_in, target.address, size - 1)
        with pytest.raises(ArgumentError, match=str(size)):
            here.write(out, mr_out, source.address, size, short)
        # Modulo 2**32 this would be a transfer of 4 KiB.
        assert (target.window[:8], target.tail.raw) == (b"target!!", bytes([POISON]) * 4096)
        ok, meta = there.advertise(back, mr_in, target.address, size)
        ok, transfer_id = here.write_async(out, mr_out, source.address, size, meta, timeout=300)
        assert ok and here.wait(transfer_id) == size
        assert target.window[:8] == b"source!!" and target.tail.raw == source.tail.raw
    source.free()
    target.free()


def test_deadlines_are_kept_and_name_the_operation() -> None:
    with local() as here, local() as there:
        _, out = here.add_remote_endpoint(there.get_metadata())
        source = bytearray(100_000)
        _, mr_id = here.reg(source)
        with pytest.raises(TransferTimeoutError, match="send"):
            here.send(out, mr_id, source, timeout=0.05)
        with pytest.raises(TimeoutError):
            here.recv(out, mr_id, source, timeout=0.05)
        with pytest.raises(TransferTimeoutError, match="connected"):
            here.accept(timeout=0.05)
        _, pending = here.recv_async(out, mr_id, source, timeout=LIMIT)
        assert here.poll_async(pending) == (True, False)
        with pytest.raises(TransferTimeoutError, match="under way"):
            here.wait(pending, timeout=0.01)
        assert here.poll_async(pending) == (True, False)


def test_outcomes_are_taken_once() -> None:
    with local() as here, local() as there:
        _, out = here.add_remote_endpoint(there.get_metadata())
        _, _, _, back = there.accept()
        source, target = bytearray(seeded().randbytes(500)), bytearray(500)
        _, mr_out = here.reg(source)
        _, mr_in = there.reg(target)
        _, receive = there.recv_async(back, mr_in, target)
        here.send(out, mr_out, source)
        assert ended(there, receive) and source == target
        with pytest.raises(ArgumentError, match="taken already"):
            there.poll_async(receive)
        with pytest.raises(ArgumentError):
            there.wait(receive)
