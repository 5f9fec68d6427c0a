"""The libraries that `bench p2p` measures, behind one interface.

A target process owns memory. An initiator process writes and reads it. Both make a library's object, the target's
`describe` goes to the initiator, and `prepare` returns a call that makes one transfer and returns when it is done.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol

Transfer = Callable[[], None]
Slot = tuple[int, int]
"""Offset and length of a transfer in the buffers of both sides."""


class MissingLibrary(Exception):
    """A library is not installed, or does not work on this host. The text says what to do."""


class Library(Protocol):
    """One side of a library's connection."""

    def describe(self) -> Any:
        """What the other side needs."""
        ...

    def join(self, peer: Any) -> None:
        """Connects to what the other side has described."""
        ...

    def offer(self, slots: Sequence[Slot]) -> Any:
        """At the target: what the initiator needs to know of these ranges."""
        ...

    def prepare(self, op: str, slot: Slot, offered: Any) -> Transfer:
        """At the initiator: one transfer of the range, any number of times."""
        ...

    def serve(self, op: str, slots: Sequence[Slot], num: int) -> None:
        """At the target: takes part in `num` transfers of these ranges in turn, if the library is two-sided."""
        ...

    def close(self) -> None:
        """Ends it."""
        ...


class _OneSided:
    """A library whose target has nothing to do."""

    def serve(self, op: str, slots: Sequence[Slot], num: int) -> None:
        del op, slots, num

    def join(self, peer: Any) -> None:
        del peer


class Switchyard(_OneSided):
    """`switchyard_moe.p2p.Endpoint`."""

    def __init__(self, transport: str, address: int, size: int, is_target: bool) -> None:
        from switchyard_moe.p2p import Endpoint

        transports = None if transport == "auto" else [transport]
        self._endpoint = Endpoint(bind="127.0.0.1", transports=transports, timeout=120.0)
        self._address = address
        self._mr_id = self._endpoint.reg(address, size)[1]
        self._conn_id = 0
        del is_target

    def describe(self) -> Any:
        self._endpoint.start_passive_accept()
        return self._endpoint.get_metadata()

    def join(self, peer: Any) -> None:
        self._conn_id = self._endpoint.add_remote_endpoint(peer)[1]

    def offer(self, slots: Sequence[Slot]) -> Any:
        conn_id = self._endpoint.connections()[0]
        return [self._endpoint.advertise(conn_id, self._mr_id, self._address + at, size)[1] for at, size in slots]

    def prepare(self, op: str, slot: Slot, offered: Any) -> Transfer:
        call = self._endpoint.write if op == "write" else self._endpoint.read
        conn_id, mr_id, ptr, size = self._conn_id, self._mr_id, self._address + slot[0], slot[1]

        def transfer() -> None:
            call(conn_id, mr_id, ptr, size, offered)

        return transfer

    def close(self) -> None:
        self._endpoint.close()


class Nixl(_OneSided):
    """NVIDIA's nixl with its UCX backend. `transport` is a value of `UCX_TLS`, or `auto`."""

    def __init__(self, transport: str, address: int, size: int, is_target: bool) -> None:
        if transport != "auto":
            os.environ["UCX_TLS"] = transport
        api = _load(
            "nixl._api",
            "pip install nixl numpy torch (nixl loads nixl-cu12 or nixl-cu13 by torch's CUDA version)",
        )
        name = "target" if is_target else "initiator"
        self._agent = api.nixl_agent(name, api.nixl_agent_config(backends=["UCX"]))
        self._address = address
        self._agent.register_memory([(address, size, 0, "")], "DRAM")
        self._peer = ""
        self._handles: list[Any] = []

    def describe(self) -> Any:
        return self._agent.get_agent_metadata(), self._address

    def join(self, peer: Any) -> None:
        self._peer = self._agent.add_remote_agent(peer[0])
        self._base = peer[1]

    def offer(self, slots: Sequence[Slot]) -> Any:
        return [None] * len(slots)

    def prepare(self, op: str, slot: Slot, offered: Any) -> Transfer:
        del offered
        agent = self._agent
        here = agent.get_xfer_descs([(self._address + slot[0], slot[1], 0)], "DRAM")
        there = agent.get_xfer_descs([(self._base + slot[0], slot[1], 0)], "DRAM")
        handle = agent.initialize_xfer(op.upper(), here, there, self._peer)
        self._handles.append(handle)

        def transfer() -> None:
            state = agent.transfer(handle)
            while state == "PROC":
                state = agent.check_xfer_state(handle)
            if state != "DONE":
                raise RuntimeError(f"nixl: the {op} ended as {state}")

        return transfer

    def close(self) -> None:
        for handle in self._handles:
            self._agent.release_xfer_handle(handle)


class Mooncake(_OneSided):
    """mooncake's transfer engine, with a handshake between peers in place of a metadata server."""

    def __init__(self, transport: str, address: int, size: int, is_target: bool) -> None:
        del is_target
        engine = _load(
            "mooncake.engine", "pip install mooncake-transfer-engine-non-cuda (or the plain wheel with CUDA 12)"
        )
        self._engine = engine.TransferEngine()
        protocol = "tcp" if transport == "auto" else transport
        _must(self._engine.initialize("127.0.0.1", "P2PHANDSHAKE", protocol, ""), "initialize")
        _must(self._engine.register_memory(address, size), "register_memory")
        self._address = address

    def describe(self) -> Any:
        return f"127.0.0.1:{self._engine.get_rpc_port()}", self._address

    def join(self, peer: Any) -> None:
        self._peer, self._base = peer

    def offer(self, slots: Sequence[Slot]) -> Any:
        return [None] * len(slots)

    def prepare(self, op: str, slot: Slot, offered: Any) -> Transfer:
        del offered
        call = self._engine.transfer_sync_write if op == "write" else self._engine.transfer_sync_read
        peer, here, there, size = self._peer, self._address + slot[0], self._base + slot[0], slot[1]

        def transfer() -> None:
            _must(call(peer, here, there, size), op)

        return transfer

    def close(self) -> None:
        self._engine.unregister_memory(self._address)


class TorchDistributed:
    """torch.distributed with gloo or nccl, which have no one-sided transfers.

    A write is a message with an answer of one byte, and a read is a request of one byte with the message as its answer.
    """

    def __init__(self, backend: str, address: int, size: int, is_target: bool, port: int) -> None:
        torch: Any = _load("torch", "pip install torch")
        dist: Any = _load("torch.distributed", "pip install torch")
        if backend == "nccl" and torch.cuda.device_count() < 2:
            raise MissingLibrary(f"nccl needs two GPUs, this host has {torch.cuda.device_count()}: use --peer gloo")
        rank = 1 if is_target else 0
        dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
        self._dist, self._other = dist, 1 - rank
        import ctypes

        raw = (ctypes.c_uint8 * size).from_address(address)
        self._host = torch.frombuffer(raw, dtype=torch.uint8)
        device = f"cuda:{rank}" if backend == "nccl" else "cpu"
        self._memory = self._host.to(device) if backend == "nccl" else self._host
        self._byte = torch.zeros(1, dtype=torch.uint8, device=device)
        self._sync = torch.cuda.synchronize if backend == "nccl" else None

    def describe(self) -> Any:
        return None

    def join(self, peer: Any) -> None:
        del peer

    def offer(self, slots: Sequence[Slot]) -> Any:
        if self._sync:
            self._memory.copy_(self._host)
        return [None] * len(slots)

    def prepare(self, op: str, slot: Slot, offered: Any) -> Transfer:
        del offered
        if self._sync:
            self._memory.copy_(self._host)
        dist, other, byte, sync = self._dist, self._other, self._byte, self._sync
        part = self._memory[slot[0] : slot[0] + slot[1]]
        first, second = (part, byte) if op == "write" else (byte, part)

        def transfer() -> None:
            dist.send(first, other)
            dist.recv(second, other)
            if sync:
                sync()

        return transfer

    def serve(self, op: str, slots: Sequence[Slot], num: int) -> None:
        for idx in range(num):
            at, size = slots[idx % len(slots)]
            part = self._memory[at : at + size]
            if op == "write":
                self._dist.recv(part, self._other)
                self._dist.send(self._byte, self._other)
            else:
                self._dist.recv(self._byte, self._other)
                self._dist.send(part, self._other)
        if self._sync:
            self._sync()
            self._host.copy_(self._memory)

    def close(self) -> None:
        if self._sync:
            self._host.copy_(self._memory)
        self._dist.destroy_process_group()


class Ucx:
    """UCX's Python module ucxx: tagged messages, used as those of `TorchDistributed`. `transport` is a `UCX_TLS`."""

    def __init__(self, transport: str, address: int, size: int, is_target: bool, port: int) -> None:
        if transport != "auto":
            os.environ["UCX_TLS"] = transport
        self._ucxx: Any = _load("ucxx", "pip install ucxx-cu12 (RAPIDS' Python module of UCX; it needs numpy)")
        numpy: Any = _load("numpy", "pip install numpy")
        import asyncio
        import ctypes

        self._loop = asyncio.new_event_loop()
        raw = (ctypes.c_uint8 * size).from_address(address)
        self._memory = numpy.frombuffer(raw, dtype=numpy.uint8)
        self._byte = numpy.zeros(1, dtype=numpy.uint8)
        self._port = port
        self._endpoint: Any = None
        self._listener: Any = None
        if is_target:

            async def listen() -> None:
                async def take(endpoint: Any) -> None:
                    self._endpoint = endpoint

                self._listener = self._ucxx.create_listener(take, port)

            self._loop.run_until_complete(listen())

    def describe(self) -> Any:
        return None

    def join(self, peer: Any) -> None:
        del peer
        self._endpoint = self._loop.run_until_complete(self._ucxx.create_endpoint("127.0.0.1", self._port))

    def offer(self, slots: Sequence[Slot]) -> Any:
        return [None] * len(slots)

    def prepare(self, op: str, slot: Slot, offered: Any) -> Transfer:
        del offered
        part = self._memory[slot[0] : slot[0] + slot[1]]
        first, second = (part, self._byte) if op == "write" else (self._byte, part)

        async def both() -> None:
            await self._endpoint.send(first)
            await self._endpoint.recv(second)

        return lambda: self._loop.run_until_complete(both())

    def serve(self, op: str, slots: Sequence[Slot], num: int) -> None:
        async def run() -> None:
            import asyncio

            while self._endpoint is None:
                await asyncio.sleep(0.001)
            for idx in range(num):
                at, size = slots[idx % len(slots)]
                part = self._memory[at : at + size]
                first, second = (part, self._byte) if op == "write" else (self._byte, part)
                await self._endpoint.recv(first)
                await self._endpoint.send(second)

        self._loop.run_until_complete(run())

    def close(self) -> None:
        async def end() -> None:
            if self._endpoint is not None:
                await self._endpoint.close()

        self._loop.run_until_complete(end())


#: Libraries by name, and the transports that each one is measured with unless the user names others.
NAMES = {
    "switchyard": ["cma", "shm", "tcp"],
    "nixl": ["auto", "tcp"],
    "mooncake": ["tcp"],
    "gloo": ["tcp"],
    "nccl": ["auto"],
    "ucx": ["auto", "tcp"],
}


def make(name: str, transport: str, address: int, size: int, is_target: bool, port: int) -> Library:
    """Makes one side of a library's connection, over `size` bytes at `address`.

    Raises `MissingLibrary` if it is not installed.
    """
    if name == "switchyard":
        return Switchyard(transport, address, size, is_target)
    if name == "nixl":
        return Nixl(transport, address, size, is_target)
    if name == "mooncake":
        return Mooncake(transport, address, size, is_target)
    if name == "ucx":
        return Ucx(transport, address, size, is_target, port)
    return TorchDistributed(name, address, size, is_target, port)


def _load(module: str, remedy: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingLibrary(f"{module} cannot be imported ({error}): {remedy}") from error


def _must(code: int, what: str) -> None:
    if code != 0:
        raise RuntimeError(f"mooncake: {what} returned {code}")
