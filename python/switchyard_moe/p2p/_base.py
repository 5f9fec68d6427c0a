"""Connections, registrations and outcomes of an endpoint, and the helpers of its transfers."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from switchyard_moe._native import P2pEndpoint
from switchyard_moe.p2p import _local
from switchyard_moe.p2p._errors import ArgumentError, ConnectError, Error, TransferTimeoutError
from switchyard_moe.p2p._memory import place_of

_T = TypeVar("_T")

#: How much longer than a transfer's timeout a wait takes before the engine counts as stuck, in seconds.
_GRACE = 15.0


class ConnectionInfo(NamedTuple):
    """A connection and its peer."""

    ip: str
    port: int
    #: The peer's GPU, or -1 if it publishes none.
    gpu_idx: int
    #: The PCI address of that GPU, or a name of the peer's engine.
    device: str
    engine_id: int
    #: `cma`, `shm` or `tcp`.
    transport: str
    #: Why the connection has ended; `None` while it is open.
    closed: str | None


class EndpointBase:
    """The parts of `Endpoint` that all of its calls use."""

    def __init__(
        self,
        local_gpu_idx: int | None = None,
        num_cpus: int | None = None,
        *,
        bind: str = "0.0.0.0",
        port: int = 0,
        advertise: str | None = None,
        transports: Sequence[str] | str | None = None,
        pci_bdf: str | None = None,
        ticket: str | None = None,
        timeout: float = 30.0,
        eager_bytes: int = 0,
        max_transfers: int = 16384,
        raise_errors: bool = True,
    ) -> None:
        del num_cpus
        self._published: list[Path] = []
        self._held: dict[int, object] = {}
        self._ipc: dict[tuple[int, int], int] = {}
        self._timeout = float(timeout)
        self._raises = raise_errors
        self._last_error: Error | None = None
        self._native = P2pEndpoint(
            gpu_index=local_gpu_idx,
            pci_bdf=pci_bdf,
            bind=bind,
            port=port,
            advertise=advertise,
            transports=_names_of(transports),
            ticket=ticket,
            eager_bytes=eager_bytes,
            max_transfers=max_transfers,
        )

    # Connections.

    def get_metadata(self) -> bytes:
        """Returns what peers need to connect; below 1 KiB. Its content is Switchyard's, not UCCL's."""
        return self._native.metadata()

    @staticmethod
    def parse_metadata(metadata: bytes) -> tuple[str, int, str]:
        """Returns IP address, port and device of an endpoint.

        The device is the PCI address of its GPU. Without one it is a name of the endpoint that `connect_local` takes.
        """
        ip, port, _, pci_bdf, engine_id = P2pEndpoint.parse_metadata(metadata)
        return ip, port, _local.device_name(pci_bdf, engine_id)

    def connect(
        self,
        remote_ip_addr: str | bytes,
        remote_gpu: int | str = 0,
        remote_port: int = -1,
        *,
        remote_gpu_idx: int | None = None,
        timeout: float | None = None,
    ) -> tuple[bool, int]:
        """Connects to an endpoint. Returns `(True, conn_id)`.

        `remote_ip_addr` is an address or host name with a port, or an endpoint's metadata. The GPU is accepted for
        UCCL's callers, and ignored: the port names the endpoint.
        """
        del remote_gpu, remote_gpu_idx
        try:
            if isinstance(remote_ip_addr, (bytes, bytearray, memoryview)):
                ip, port = P2pEndpoint.parse_metadata(bytes(remote_ip_addr))[:2]
            else:
                ip, port = _resolve(remote_ip_addr), remote_port
            if not 0 < port < 65536:
                raise ArgumentError(f"remote_port is {port}, expected the second part of the peer's parse_metadata()")
        except (Error, TypeError, OverflowError) as error:
            self._fail(error)
            return False, 0
        return self._attempt(0, self._native.connect, ip, port, self._limit(timeout))

    def accept(self, *, timeout: float | None = None) -> tuple[bool, str, int, int]:
        """Takes the next connection that a peer has made. Returns `(True, ip, gpu_idx, conn_id)`.

        Waits for one until the timeout. `gpu_idx` is -1 if the peer publishes no GPU.
        """
        ok, conn_id = self._attempt(0, self._native.accept, self._limit(timeout))
        if not ok:
            return False, "", -1, 0
        info = self.connection(conn_id)
        return True, info.ip, info.gpu_idx, conn_id

    def start_passive_accept(self) -> bool:
        """Takes all connections from here on, without `accept`. Peers can use them at once in any case."""
        self._native.start_passive_accept()
        return True

    def add_remote_endpoint(self, metadata_bytes: bytes, *, timeout: float | None = None) -> tuple[bool, int]:
        """Returns `(True, conn_id)` of the connection to an endpoint, and connects only if there is none yet."""
        limit = self._limit(timeout)
        return self._attempt(0, lambda: self._native.add_remote_endpoint(bytes(metadata_bytes), limit))

    def remove_remote_endpoint(self, conn_id: int) -> bool:
        """Closes a connection. Its pending transfers fail."""
        return self._native.remove_connection(conn_id)

    def connections(self) -> list[int]:
        """Returns the numbers of the open connections that this side has made or accepted."""
        return self._native.connections()

    def connection(self, conn_id: int) -> ConnectionInfo:
        """Describes a connection and its peer."""
        (ip, port, gpu_idx, pci_bdf, engine_id), transport, closed = self._native.connection(conn_id)
        device = _local.device_name(pci_bdf, engine_id)
        return ConnectionInfo(ip, port, -1 if gpu_idx is None else gpu_idx, device, engine_id, transport, closed)

    # Memory.

    def reg(self, ptr: int | object, size: int | None = None, *, access: str | None = None) -> tuple[bool, int]:
        """Registers memory. Returns `(True, mr_id)`, a number that never comes back.

        Args:
            ptr: Address, buffer or CPU tensor. The endpoint holds an object until `dereg`.
            size: Length in bytes, for an address.
            access: What peers may do: `"rw"`, `"ro"` (only read), or `"local"` (nothing). `None` means `"rw"`, and
                `"ro"` for a read-only buffer, which takes no other. A buffer that receives messages is registered as
                `"rw"` or `"local"`.
        """
        holder: object = None
        if not isinstance(ptr, int):
            place = place_of(ptr)
            if place.is_read_only and access in ("rw", "local"):
                raise ArgumentError('the buffer is read-only: register it with access "ro"')
            access = access or ("ro" if place.is_read_only else "rw")
            ptr, size, holder = place.ptr, place.size, place.holder
        elif size is None:
            raise ArgumentError("an address needs a size")
        ok, mr_id = self._attempt(0, self._native.register, ptr, size, access or "rw")
        if ok and holder is not None:
            self._held[mr_id] = holder
        return ok, mr_id

    def regv(self, ptrs: Sequence[int | object], sizes: Sequence[int] | None = None) -> tuple[bool, list[int]]:
        """Registers several ranges, all or none. Returns `(True, mr_ids)`."""
        if sizes is not None and len(sizes) != len(ptrs):
            raise ArgumentError(f"{len(ptrs)} addresses with {len(sizes)} sizes")
        mr_ids: list[int] = []
        try:
            for idx, ptr in enumerate(ptrs):
                ok, mr_id = self.reg(ptr, None if sizes is None else sizes[idx])
                if not ok:
                    break
                mr_ids.append(mr_id)
            else:
                return True, mr_ids
        except BaseException:
            self._dereg_all(mr_ids)
            raise
        self._dereg_all(mr_ids)
        return False, []

    def dereg(self, mr_id: int) -> bool:
        """Deregisters memory. When it has returned, no peer reaches the memory by this registration.

        Peers in the middle of a copy get a second to end it. It fails while transfers use the memory, or while ranges
        within it are registered, too. The memory stays registered then, and must stay mapped.
        """
        ok, _ = self._attempt(False, self._native.deregister, mr_id)
        if ok:
            self._held.pop(mr_id, None)
        return ok

    # Outcomes.

    def poll_async(self, transfer_id: int) -> tuple[bool, bool]:
        """Returns `(True, False)` while a transfer is under way, and `(True, True)` once it is done.

        A failed transfer raises its error, or returns `(False, True)` with `raise_errors=False`. It is never reported
        as done. The call that finds the end takes it: the number is unknown afterwards, and raises `ArgumentError`.
        """
        try:
            return True, self._native.poll(transfer_id) is not None
        except Error as error:
            self._fail(error)
            return False, True

    def wait(self, transfer_id: int, timeout: float | None = None) -> int:
        """Waits until a transfer has ended. Returns the bytes moved, for a receive the length of the message.

        Not in UCCL. Without a timeout it waits for the end of the transfer, which its own timeout bounds. With one it
        raises `TransferTimeoutError` when that passes, and the transfer goes on. It always raises errors.
        """
        while True:
            moved = self.try_wait(transfer_id, 3600.0 if timeout is None else timeout)
            if moved is not None:
                return moved
            if timeout is not None:
                raise TransferTimeoutError(f"transfer {transfer_id} is under way after {timeout} s")

    def try_wait(self, transfer_id: int, timeout: float) -> int | None:
        """As `wait`, but returns `None` if the transfer is under way after `timeout` seconds."""
        return self._native.wait(transfer_id, timeout)

    @property
    def last_error(self) -> Error | None:
        """The last failure that was returned as `False`."""
        return self._last_error

    @property
    def timeout(self) -> float:
        """Seconds after which a call fails that is given no other timeout."""
        return self._timeout

    # Helpers.

    def _limit(self, timeout: float | None) -> float:
        return self._timeout if timeout is None else timeout

    def _run(
        self,
        op: str,
        conn_id: int,
        mr_id: int,
        ptr: int | object,
        size: int | None,
        meta: bytes | None,
        timeout: float | None,
    ) -> bool:
        if type(ptr) is not int or size is None:
            ptr, size = range_of(ptr, size)
        limit = self._timeout if timeout is None else timeout
        try:
            self._native.run(op, conn_id, mr_id, ptr, size, meta, limit)
        except (Error, TypeError, OverflowError) as error:
            self._fail(error)
            return False
        return True

    def _start(
        self,
        op: str,
        conn_id: int,
        mr_id: int,
        ptr: int | object,
        size: int | None,
        meta: bytes | None,
        timeout: float | None,
    ) -> tuple[bool, int]:
        if type(ptr) is not int or size is None:
            ptr, size = range_of(ptr, size)
        limit = self._timeout if timeout is None else timeout
        return self._attempt(0, self._native.start, op, conn_id, mr_id, ptr, size, meta, limit)

    def _startv(
        self,
        op: str,
        conn_id: int,
        mr_id_v: Sequence[int],
        ptr_v: Sequence[int],
        size_v: Sequence[int],
        metas: Sequence[bytes] | None,
        num_iovs: int | None,
        timeout: float | None,
    ) -> tuple[bool, int]:
        ranges = ranges_of(mr_id_v, ptr_v, size_v, num_iovs)
        return self._attempt(0, self._native.startv, op, conn_id, ranges, list(metas or ()), self._limit(timeout))

    def _start_ipc(
        self, op: str, conn_id: int, ranges: list[tuple[int, int]], infos: Sequence[bytes], timeout: float | None
    ) -> tuple[bool, int]:
        limit = self._limit(timeout)

        def start() -> int:
            known = [self._native.find_region(ptr, size, "rw") for ptr, size in ranges]
            if all(mr_id is not None for mr_id in known):
                triples = [(mr_id or 0, ptr, size) for mr_id, (ptr, size) in zip(known, ranges, strict=True)]
                return self._native.startv(op, conn_id, triples, list(infos), limit)
            return self._native.start_unregistered(op, conn_id, ranges, list(infos), limit)

        return self._attempt(0, start)

    def _await(self, started: tuple[bool, int], timeout: float | None) -> bool:
        ok, transfer_id = started
        if not ok:
            return False
        try:
            if self._native.wait(transfer_id, self._limit(timeout) + _GRACE) is None:
                raise TransferTimeoutError(f"transfer {transfer_id} does not end: the engine is stuck")
        except Error as error:
            self._fail(error)
            return False
        return True

    def _dereg_all(self, mr_ids: Sequence[int]) -> None:
        for mr_id in mr_ids:
            self._native.deregister(mr_id)
            self._held.pop(mr_id, None)

    def _attempt(self, failed: _T, call: Callable[..., _T], *args: object) -> tuple[bool, _T]:
        """Returns `(True, result)` of a call. A failure raises, or is kept and returns `(False, failed)`."""
        try:
            return True, call(*args)
        except (Error, TypeError, OverflowError) as error:
            self._fail(error)
            return False, failed

    def _fail(self, error: Exception) -> None:
        """Raises the error, or keeps it if this endpoint returns failures."""
        if isinstance(error, (TypeError, OverflowError)):
            raise ArgumentError(f"{error}: expected ints from 0 to 2**64 - 1, and bytes as metadata") from error
        if self._raises or not isinstance(error, Error) or isinstance(error, ArgumentError):
            raise error
        self._last_error = error


def _names_of(transports: Sequence[str] | str | None) -> list[str] | None:
    """Returns the names in a list, or in a text that separates them by commas."""
    if isinstance(transports, str):
        return [name.strip() for name in transports.split(",")]
    return None if transports is None else list(transports)


def range_of(ptr: int | object, size: int | None) -> tuple[int, int]:
    """Returns address and size of an address, a buffer or a tensor."""
    if isinstance(ptr, int):
        if size is None:
            raise ArgumentError("an address needs a size")
        return ptr, size
    place = place_of(ptr)
    if size is not None and not 0 <= size <= place.size:
        raise ArgumentError(f"size is {size}, the buffer has {place.size} bytes")
    return place.ptr, place.size if size is None else size


def writable_range(ptr: int | object, size: int | None) -> tuple[int, int]:
    if not isinstance(ptr, int) and place_of(ptr).is_read_only:
        raise ArgumentError("the buffer is read-only, and this transfer writes into it")
    return range_of(ptr, size)


def ranges_of(
    mr_id_v: Sequence[int], ptr_v: Sequence[int], size_v: Sequence[int], num_iovs: int | None
) -> list[tuple[int, int, int]]:
    lengths = {len(mr_id_v), len(ptr_v), len(size_v), len(size_v) if num_iovs is None else num_iovs}
    if len(lengths) != 1:
        raise ArgumentError(
            f"{len(mr_id_v)} regions, {len(ptr_v)} addresses, {len(size_v)} sizes and "
            f"num_iovs {num_iovs}: expected one number"
        )
    return list(zip(mr_id_v, ptr_v, size_v, strict=True))


def pairs_of(ptr_v: Sequence[int], size_v: Sequence[int]) -> list[tuple[int, int]]:
    if len(ptr_v) != len(size_v):
        raise ArgumentError(f"{len(ptr_v)} addresses with {len(size_v)} sizes")
    return list(zip(ptr_v, size_v, strict=True))


def all_of(described: Iterable[tuple[bool, bytes]]) -> tuple[bool, list[bytes]]:
    """Returns `(True, descriptions)`, or `(False, [])` at the first that failed."""
    found: list[bytes] = []
    for ok, one in described:
        if not ok:
            return False, []
        found.append(one)
    return True, found


def _resolve(host: str) -> str:
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise ConnectError(f"cannot resolve {host!r}: {error}") from error
