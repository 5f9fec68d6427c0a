"""Notifications, and the forms for processes of one host."""

from __future__ import annotations

import ctypes
import random as generators
from collections.abc import Callable

import pytest
from peers import Child, Pipe, ended, local, seeded, until

from switchyard_moe.p2p import ArgumentError, MemoryRegionError, Notification, TransferError, TransferTimeoutError

Start = Callable[..., Child]
POISON = 0xA5


def test_notifications_are_whole_and_in_order() -> None:
    random = seeded()
    with local() as here, local() as there:
        there.start_passive_accept()
        _, out = here.add_remote_endpoint(there.get_metadata())
        sent = [
            (random.randbytes(random.randrange(400)), random.randbytes(random.randrange(200_000))) for _ in range(50)
        ]
        sent += [(b"", b""), (b"name", b""), (b"", b"SYN1"), (b"\xff" * 5000, b"x")]
        for name, msg in sent:
            assert here.send_notif(out, msg, name)
        got: list[Notification] = []

        def all_here() -> bool:
            got.extend(there.get_notifs())
            return len(got) == len(sent)

        until(all_here, "all notifications arrive")
        assert [(notification.name, notification.msg) for notification in got] == sent
        # The number of the connection serves for an answer.
        assert there.connections() == [got[0].conn_id]
        assert there.send_notif(got[0].conn_id, b"answer", "text")
        until(lambda: (out, b"text", b"answer") in here.get_notifs(), "the answer arrives")
        with pytest.raises(ArgumentError, match="takes all connections"):
            there.accept(timeout=0)


def peer(pipe: Pipe, seed: int) -> None:
    """A process that publishes its endpoint, and opens memory."""

    endpoint = local()
    pipe.put(endpoint.get_metadata())
    ok, device, conn_id = endpoint.accept_local()
    assert ok and device.startswith("cpu-")
    memory = bytearray(generators.Random(seed).randbytes(100_000))
    ok, info = endpoint.advertise_ipc(conn_id, memory)
    assert ok and endpoint.advertise_ipc(conn_id, memory) == (True, info)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    ok, parts = endpoint.advertisev_ipc(conn_id, [base, base + 50_000], [1000, 2000])
    pipe.put((info, parts))
    pipe.get()
    pipe.put(bytes(memory))
    got = bytearray(500)
    assert endpoint.recv_ipc(conn_id, got)
    assert endpoint.send_ipc(conn_id, bytes(reversed(got)))
    with pytest.raises(MemoryRegionError, match="2 regions within it"):
        endpoint.dereg_ipc(memory)
    assert endpoint.dereg_ipc(base, 1000) and endpoint.dereg_ipc(base + 50_000, 2000)
    assert endpoint.dereg_ipc(memory) and not endpoint.dereg_ipc(memory)
    pipe.put("revoked")
    pipe.get()
    endpoint.close()


def test_ipc_forms_need_no_registration(children: Start) -> None:
    random = seeded()
    seed = random.getrandbits(40)
    child = children(peer, seed)
    theirs = bytearray(generators.Random(seed).randbytes(100_000))
    with local() as endpoint:
        device = endpoint.parse_metadata(child.get())[2]
        ok, conn_id = endpoint.connect_local(device)
        assert ok and endpoint.connection(conn_id).device == device
        info, parts = child.get()
        here = bytearray([POISON]) * 100_000
        assert endpoint.read_ipc(conn_id, here, None, info) and here == theirs
        ours = random.randbytes(3000)
        base = ctypes.addressof(ctypes.c_char.from_buffer(here))
        here[:3000] = ours
        assert endpoint.writev_ipc(conn_id, [base + 2000, base], [1000, 2000], parts)
        theirs[:1000], theirs[50_000:52_000] = ours[2000:], ours[:2000]
        ok, transfer_id = endpoint.readv_ipc_async(conn_id, [base + 5000, base + 7000], [1000, 2000], parts)
        assert ok and ended(endpoint, transfer_id)
        assert here[5000:6000] == ours[2000:] and here[7000:9000] == ours[:2000]
        ok, transfer_id = endpoint.write_ipc_async(conn_id, here, 10, info)
        assert ok and endpoint.wait(transfer_id) == 10
        theirs[:10] = here[:10]
        child.put("show")
        assert child.get() == theirs
        message = random.randbytes(500)
        assert endpoint.send_ipc(conn_id, message)
        got = bytearray(600)
        ok, transfer_id = endpoint.recv_ipc_async(conn_id, got)
        assert ok and endpoint.wait(transfer_id) == 500 and got[:500] == message[::-1] and got[500:] == bytes(100)
        assert child.get() == "revoked"
        with pytest.raises(TransferError, match="revoked"):
            endpoint.read_ipc(conn_id, here, None, info)
        with pytest.raises(ArgumentError, match="read-only"):
            endpoint.read_ipc(conn_id, bytes(10), None, info)
        # Nothing stays registered behind transfers of memory that was not.
        until(lambda: endpoint._native.counts()[1:] == (0, 0), "nothing is left")
        child.put("end")
        child.end()


def test_a_device_that_is_not_published_ends_in_time() -> None:
    with local() as endpoint, pytest.raises(TransferTimeoutError, match="accept_local"):
        endpoint.connect_local("0000:ff:00.0", timeout=0.05)


def test_the_gpu_is_published() -> None:
    with local(local_gpu_idx=3, pci_bdf="0000:3b:00.0") as here, local() as there:
        ip, port, device = here.parse_metadata(here.get_metadata())
        assert (ip, device) == ("127.0.0.1", "0000:3b:00.0") and port > 0
        _, out = there.connect("localhost", 3, port)
        info = there.connection(out)
        assert (info.gpu_idx, info.device, info.transport, info.closed) == (3, "0000:3b:00.0", "cma", None)
