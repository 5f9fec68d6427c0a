"""Peers that die, bad arguments, closed and forked endpoints, signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from peers import LIMIT, Child, Pipe, local, seeded, until

from switchyard_moe.p2p import (
    ArgumentError,
    ClosedError,
    ConfigError,
    ConnectError,
    Endpoint,
    Error,
    ForkedError,
    MemoryRegionError,
    PeerLostError,
    TransferError,
    TransferTimeoutError,
)

Start = Callable[..., Child]


def silent(pipe: Pipe, transports: list[str], size: int) -> None:
    """Accepts, advertises memory, and then does nothing."""
    endpoint = local(transports=transports)
    pipe.put(endpoint.get_metadata())
    conn_id = endpoint.accept()[3]
    memory = bytearray(size)
    _, mr_id = endpoint.reg(memory)
    pipe.put(endpoint.advertise(conn_id, mr_id, memory)[1])
    time.sleep(10 * LIMIT)


@pytest.mark.parametrize("transports", [["cma"], ["shm"], ["tcp"]])
@pytest.mark.parametrize("op", ["send", "recv", "write", "read"])
def test_a_killed_peer_fails_transfers_under_way(children: Start, transports: list[str], op: str) -> None:
    size = 256 << 20
    child = children(silent, transports, 64 << 20)
    with local(transports=transports) as endpoint:
        _, conn_id = endpoint.add_remote_endpoint(child.get())
        meta = child.get()
        memory = bytearray(size)
        _, mr_id = endpoint.reg(memory)
        started = []
        for _ in range(32):
            if op in ("write", "read"):
                start = endpoint.write_async if op == "write" else endpoint.read_async
                started.append(start(conn_id, mr_id, memory, 64 << 20, meta)[1])
            else:
                start = endpoint.send_async if op == "send" else endpoint.recv_async
                started.append(start(conn_id, mr_id, memory, size)[1])
        child.kill()
        outcomes = []
        for transfer_id in started:
            try:
                outcomes.append(endpoint.wait(transfer_id, LIMIT))
            except PeerLostError as error:
                outcomes.append(error)
        # The first ones may have ended before the kill, and with all of their bytes.
        lost = [outcome for outcome in outcomes if isinstance(outcome, PeerLostError)]
        assert lost and outcomes[-len(lost) :] == lost, outcomes
        assert all(outcome == 64 << 20 for outcome in outcomes[: -len(lost)])
        assert op in ("write", "read") or len(lost) == len(outcomes)
        with pytest.raises(PeerLostError):
            endpoint.send(conn_id, mr_id, memory, 10)
        assert endpoint.connection(conn_id).closed
        assert endpoint.dereg(mr_id)


def test_failures_can_be_returned(children: Start) -> None:
    child = children(silent, ["cma"], 1000)
    with local(raise_errors=False) as endpoint:
        assert endpoint.connect("127.0.0.1", 0, 1, timeout=5) == (False, 0)
        assert isinstance(endpoint.last_error, ConnectError)
        assert endpoint.accept(timeout=0.01) == (False, "", -1, 0)
        assert isinstance(endpoint.last_error, TransferTimeoutError)
        _, conn_id = endpoint.add_remote_endpoint(child.get())
        memory = bytearray(100_000)
        _, mr_id = endpoint.reg(memory)
        ok, pending = endpoint.send_async(conn_id, mr_id, memory)
        assert ok and endpoint.poll_async(pending) == (True, False)
        child.kill()
        until(lambda: endpoint.connection(conn_id).closed is not None, "the connection ends")
        # Failed is neither pending nor done.
        assert endpoint.poll_async(pending) == (False, True)
        assert isinstance(endpoint.last_error, PeerLostError)
        assert endpoint.send(conn_id, mr_id, memory) is False
        assert endpoint.send_async(conn_id, mr_id, memory) == (False, 0)


def pair(**settings: Any) -> tuple[Endpoint, Endpoint, int, int]:
    here, there = local(**settings), local(**settings)
    _, out = here.add_remote_endpoint(there.get_metadata())
    return here, there, out, there.accept()[3]


def test_ranges_outside_a_registration_are_named() -> None:
    here, there, out, back = pair()
    with here, there:
        memory = bytearray(seeded().randbytes(1000))
        _, mr_id = here.reg(memory)
        base = here._native.region(mr_id)[0]
        _, mr_in = there.reg(bytearray(1000))
        _ok, meta = there.advertise(back, mr_in, there._native.region(mr_in)[0], 1000)
        for ptr, size in [(base - 1, 10), (base, 1001), (base + 999, 2), (base + 2**63, 1), (0, 1), (base, 2**64 - 1)]:
            with pytest.raises(ArgumentError, match=f"{size} bytes at {ptr:#x} leave memory region {mr_id}"):
                here.write(out, mr_id, ptr, size, meta)
            with pytest.raises(ArgumentError, match="register the whole range"):
                here.advertise(out, mr_id, ptr, size)
        with pytest.raises(ArgumentError, match="no memory region 77"):
            here.send(out, 77, base, 1)
        with pytest.raises(ArgumentError, match="no connection 88"):
            here.send(88, mr_id, base, 1)
        _, big = here.reg(bytearray(2000))
        with pytest.raises(ArgumentError, match="advertised 1000"):
            here.write(out, big, here._native.region(big)[0], 1001, meta)
        for bad in [-1, 2**64, "4", None, 1.5]:
            with pytest.raises(ArgumentError):
                here.send(out, mr_id, bad, 1)
        for bad in [b"", bytes(63), bytes(64), os.urandom(64), meta[:-1] + b"\1"]:
            with pytest.raises(ArgumentError, match="description"):
                here.write(out, mr_id, base, 10, bad)
        with pytest.raises(ArgumentError, match="num_iovs 3"):
            here.sendv(out, [mr_id], [base], [1], 3)


def test_memory_that_cannot_be_used_is_refused() -> None:
    with local() as endpoint:
        with pytest.raises(ArgumentError, match="address is 0"):
            endpoint.reg(0, 10)
        with pytest.raises(ArgumentError, match="nothing to register"):
            endpoint.reg(0x1000, 0)
        with pytest.raises(ArgumentError, match="address is 0"):
            endpoint.reg(bytearray())
        with pytest.raises(ArgumentError, match="not memory that this process can read"):
            endpoint.reg(0x1000, 10)
        with pytest.raises(ArgumentError, match="leaves the address space"):
            endpoint.reg(2**63, 2**63)
        with pytest.raises(ArgumentError, match="needs a size"):
            endpoint.reg(0x1000)
        for access in ("rw", "local"):
            with pytest.raises(ArgumentError, match="read-only"):
                endpoint.reg(b"constant", access=access)
        with pytest.raises(ArgumentError, match="C-contiguous"):
            endpoint.reg(memoryview(bytearray(10))[::2])
        with pytest.raises(ArgumentError, match="dict"):
            endpoint.reg({})
        with pytest.raises(ArgumentError, match="access"):
            endpoint.reg(bytearray(10), access="rx")


def test_read_only_memory_is_not_written() -> None:
    here, there, out, back = pair()
    with here, there:
        constant = bytes(range(100))
        _, mr_id = there.reg(constant)
        _ok, meta = there.advertise(back, mr_id, constant)
        target = bytearray(100)
        _, mr_here = here.reg(target)
        assert here.read(out, mr_here, target, None, meta) and target == constant
        with pytest.raises(TransferError, match="does not allow it"):
            here.write(out, mr_here, target, None, meta)
        ok, meta = there.advertise_ipc(back, memoryview(constant)[10:])
        assert ok and here.read_ipc(out, memoryview(target)[:90], None, meta) and target[:90] == constant[10:]
        with pytest.raises(TransferError, match="does not allow it"):
            here.write_ipc(out, bytes(90), None, meta)
        assert constant == bytes(range(100))
        with pytest.raises(ArgumentError, match="for reading only"):
            there.recv(back, mr_id, constant)
        _, private = there.reg(bytearray(50), access="local")
        with pytest.raises(ArgumentError, match="not registered"):
            there.advertise(back, private, *there._native.region(private))


def test_buffers_stay_until_they_are_deregistered() -> None:
    with local() as endpoint:
        memory = bytearray(100)
        _, mr_id = endpoint.reg(memory)
        with pytest.raises(BufferError):
            memory.extend(b"more")
        assert endpoint.dereg(mr_id)
        memory.extend(b"more")
        with pytest.raises(ArgumentError, match="no memory region"):
            endpoint.dereg(mr_id)


def test_memory_of_a_pending_receive_is_not_deregistered() -> None:
    here, there, out, _ = pair()
    with here, there:
        memory = bytearray(100)
        _, mr_id = here.reg(memory)
        _, receive = here.recv_async(out, mr_id, memory)
        with pytest.raises(MemoryRegionError, match="use it"):
            here.dereg(mr_id)
        assert here.remove_remote_endpoint(out)
        with pytest.raises(ClosedError):
            here.wait(receive)
        until(lambda: _try(lambda: here.dereg(mr_id)), "the memory is free")


def _try(call: Callable[[], bool]) -> bool:
    try:
        return call()
    except MemoryRegionError:
        return False


def test_revoked_descriptions_open_nothing() -> None:
    here, there, out, back = pair()
    with here, there:
        target, source = bytearray(100), bytearray(seeded().randbytes(100))
        _, mr_in = there.reg(target)
        _, meta = there.advertise(back, mr_in, target)
        _, mr_out = here.reg(source)
        assert there.dereg(mr_in)
        with pytest.raises(TransferError, match="revoked"):
            here.write(out, mr_out, source, None, meta)
        assert target == bytes(100)


def test_bad_metadata_and_settings() -> None:
    for bad in [b"", b"x" * 10, os.urandom(100)]:
        with pytest.raises(ArgumentError, match="metadata"):
            Endpoint.parse_metadata(bad)
    with pytest.raises(ConfigError, match="no such transport"):
        local(transports=["carrier pigeon"])
    with pytest.raises(ConfigError, match="no such transport"):
        local(transports="tcp,carrier pigeon")
    local(transports="cma, tcp").close()
    with pytest.raises(ConfigError, match="eager_bytes"):
        local(eager_bytes=1 << 20)
    with pytest.raises(ArgumentError, match="bind"):
        Endpoint(bind="nowhere")
    with local() as endpoint:
        with pytest.raises(ArgumentError, match="remote_port"):
            endpoint.connect("127.0.0.1", 0)
        with pytest.raises(ConnectError):
            endpoint.connect("127.0.0.1", 0, 1)
        for bad in [-1.0, float("nan"), float("inf"), 1e9]:
            with pytest.raises(ArgumentError, match="timeout"):
                endpoint.accept(timeout=bad)
        with local(ticket="secret") as closed, pytest.raises(ConnectError):
            endpoint.add_remote_endpoint(closed.get_metadata())


def test_a_closed_endpoint_says_so() -> None:
    endpoint = local()
    endpoint.close()
    endpoint.close()
    assert endpoint.is_closed and "closed" in repr(endpoint)
    for call in (endpoint.get_metadata, endpoint.get_notifs, endpoint.accept, endpoint.start_passive_accept):
        with pytest.raises(ClosedError, match="endpoint is closed"):
            call()


@pytest.mark.parametrize("what", ["accept", "recv", "wait"])
def test_closing_ends_the_waits_of_other_threads(what: str) -> None:
    here, there, out, _ = pair()
    memory = bytearray(100)
    _, mr_id = here.reg(memory)
    _, pending = here.recv_async(out, mr_id, memory)
    calls = {
        "accept": here.accept,
        "recv": lambda: here.recv(out, mr_id, memory),
        "wait": lambda: here.wait(pending),
    }
    found: list[BaseException] = []

    def run() -> None:
        try:
            calls[what]()
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    time.sleep(0.05)
    here.close()
    thread.join(LIMIT)
    assert not thread.is_alive() and isinstance(found[0], Error), found
    there.close()


def interrupted(pipe: Pipe, what: str) -> None:
    endpoint = local()
    with local() as other:
        _, conn_id = endpoint.add_remote_endpoint(other.get_metadata())
        memory = bytearray(100)
        _, mr_id = endpoint.reg(memory)
        pipe.put(os.getpid())
        try:
            endpoint.accept() if what == "accept" else endpoint.recv(conn_id, mr_id, memory)
        except KeyboardInterrupt:
            pipe.put("interrupted")
        endpoint.close()


@pytest.mark.parametrize("what", ["accept", "recv"])
def test_a_signal_ends_a_blocked_call(children: Start, what: str) -> None:
    child = children(interrupted, what)
    pid = child.get()
    time.sleep(0.1)
    os.kill(pid, signal.SIGINT)
    assert child.get() == "interrupted"
    child.end()


def test_a_forked_child_is_told(children: Start) -> None:
    child = children(_forks)
    child.end()


def _forks(pipe: Pipe) -> None:
    here, there, out, _ = pair()
    metadata = there.get_metadata()
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            here.send_notif(out, b"from the child")
            answer = b"sent"
        except ForkedError:
            # Another endpoint works, and closing the parent's does it no harm.
            here.close()
            with local() as fresh:
                fresh.add_remote_endpoint(metadata)
            answer = b"refused"
        os.write(write, answer)
        os._exit(0)
    assert os.read(read, 100) == b"refused"
    os.waitpid(pid, 0)
    # The parent's endpoints go on.
    assert here.send_notif(out, b"from the parent")
    until(lambda: [n.msg for n in there.get_notifs()] == [b"from the parent"], "the notification arrives")
    here.close()
    there.close()


def test_importing_starts_nothing() -> None:
    code = (
        "import threading, os; before = len(os.listdir('/proc/self/fd'));"
        "import switchyard_moe.p2p; assert threading.active_count() == 1;"
        "assert len(os.listdir('/proc/self/task')) == 1; assert len(os.listdir('/proc/self/fd')) == before"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=LIMIT)
