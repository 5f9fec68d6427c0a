"""`Endpoint`: UCCL P2P's method names over the message engine."""

from __future__ import annotations

import socket
import struct
import warnings
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Sequence

from . import _local
from ._binding import P2pEndpoint
from ._errors import ArgumentError, ConnectError, Error, TransferTimeoutError
from ._memory import place_of

#: How much longer than a transfer's timeout a wait takes before the engine counts as stuck, in seconds.
_GRACE = 15.0
_NAMED = b"SYN1"


class Notification(NamedTuple):
    """Bytes that a peer has sent with `Endpoint.send_notif`."""

    conn_id: int
    name: bytes
    msg: bytes


class ConnectionInfo(NamedTuple):
    """A connection and its peer."""

    ip: str
    port: int
    #: The peer's GPU, or -1 if it publishes none.
    gpu_idx: int
    #: The PCI address of that GPU, or a name of the peer's engine.
    device: str
    engine_id: int
    #: `cma` or `tcp`.
    transport: str
    #: Why the connection has ended; `None` while it is open.
    closed: str | None


class Endpoint:
    """One side of transfers between processes, with the method names of UCCL P2P.

    Addresses and sizes are ints, in bytes, of 64 bits: sizes of 4 GiB and more are right. Every `ptr` may be a buffer or a
    CPU tensor instead; its `size` can be left out then.

    **Memory.** `reg` takes the address on trust. The caller keeps the memory mapped until `dereg` or `close` has returned.
    The endpoint does so itself for buffers and tensors that it was given as objects. Addresses that are not mapped are
    refused. Other wrong addresses cannot be told from right ones, and transfers through them corrupt the process.

    **Errors.** A call that fails raises an exception of `switchyard_moe.p2p`. With `raise_errors=False` it returns UCCL's
    shape with `False` first, and `last_error` has the exception. Wrong arguments always raise.

    **Waiting.** Blocking calls release the interpreter's lock, end at their timeout, and can be interrupted by a signal.
    A transfer that misses its timeout fails. If the peer could still reach its buffer, the connection is closed.

    **Fork.** A forked child cannot use its parent's endpoint. Its calls raise `ForkedError`.

    Args:
        local_gpu_idx: GPU that the metadata names. `None` names none. The endpoint moves host memory in any case.
        num_cpus: Accepted for UCCL's callers, and ignored: an endpoint has one thread.
        bind: Address to listen on. `127.0.0.1` keeps other hosts out.
        port: Port to listen on. 0 selects a free one.
        advertise: Address in the metadata, if it is not that of `bind` or of the default route.
        transports: `cma` (processes of one user on one host) and `tcp`, the best first. `None` means both.
        pci_bdf: PCI address of the GPU, such as `0000:3b:00.0`, for the metadata.
        ticket: Secret that peers must have, too.
        timeout: Seconds after which a call fails that is given no other timeout.
        eager_bytes: Longest message that may arrive before its receive. With 0 the sender always learns if the receive
            is too short. Above 0 short messages are faster, and only the receiver learns it.
        max_transfers: Most transfers whose outcome was not taken.
        raise_errors: Whether failures raise, or return `False`.
    """

    def __init__(
        self,
        local_gpu_idx: int | None = None,
        num_cpus: int | None = None,
        *,
        bind: str = "0.0.0.0",
        port: int = 0,
        advertise: str | None = None,
        transports: Sequence[str] | None = None,
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
            transports=None if transports is None else list(transports),
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

        `remote_ip_addr` is an address or host name with a port, or an endpoint's metadata. The GPU is accepted for UCCL's
        callers, and ignored: the port names the endpoint.
        """
        del remote_gpu, remote_gpu_idx
        try:
            if isinstance(remote_ip_addr, (bytes, bytearray, memoryview)):
                ip, port = P2pEndpoint.parse_metadata(bytes(remote_ip_addr))[:2]
            else:
                ip, port = _resolve(remote_ip_addr), remote_port
            if not 0 < port < 65536:
                raise ArgumentError(f"remote_port is {port}, expected the second part of the peer's parse_metadata()")
            return True, self._native.connect(ip, port, self._limit(timeout))
        except (Error, TypeError, OverflowError) as error:
            self._fail(error)
            return False, 0

    def accept(self, *, timeout: float | None = None) -> tuple[bool, str, int, int]:
        """Takes the next connection that a peer has made. Returns `(True, ip, gpu_idx, conn_id)`.

        Waits for one until the timeout. `gpu_idx` is -1 if the peer publishes no GPU.
        """
        try:
            conn_id = self._native.accept(self._limit(timeout))
        except Error as error:
            self._fail(error)
            return False, "", -1, 0
        info = self.connection(conn_id)
        return True, info.ip, info.gpu_idx, conn_id

    def start_passive_accept(self) -> bool:
        """Takes all connections from here on, without `accept`. Peers can use them at once in any case."""
        self._native.start_passive_accept()
        return True

    def add_remote_endpoint(self, metadata_bytes: bytes, *, timeout: float | None = None) -> tuple[bool, int]:
        """Returns `(True, conn_id)` of the connection to an endpoint, and connects only if there is none yet."""
        try:
            return True, self._native.add_remote_endpoint(bytes(metadata_bytes), self._limit(timeout))
        except (Error, TypeError) as error:
            self._fail(error)
            return False, 0

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
            access: What peers may do: `"rw"`, `"ro"` (only read), or `"local"` (nothing). `None` means `"rw"`, and `"ro"` for
                a read-only buffer. A buffer that receives messages is registered as `"rw"`.
        """
        holder: object = None
        if not isinstance(ptr, int):
            place = place_of(ptr)
            if place.is_read_only and access == "rw":
                raise ArgumentError('the buffer is read-only: register it with access "ro"')
            access = access or ("ro" if place.is_read_only else "rw")
            ptr, size, holder = place.ptr, place.size, place.holder
        elif size is None:
            raise ArgumentError("an address needs a size")
        try:
            mr_id = self._native.register(ptr, size, access or "rw")
        except (Error, TypeError, OverflowError) as error:
            self._fail(error)
            return False, 0
        if holder is not None:
            self._held[mr_id] = holder
        return True, mr_id

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

        Peers in the middle of a copy get a second to end it. It fails while transfers use the memory, or while ranges within it
        are registered, too. The memory stays registered then, and must stay mapped.
        """
        try:
            self._native.deregister(mr_id)
        except Error as error:
            self._fail(error)
            return False
        self._held.pop(mr_id, None)
        return True

    # Messages.

    def send(
        self, conn_id: int, mr_id: int, ptr: int | object, size: int | None = None, *, timeout: float | None = None
    ) -> bool:
        """Sends a message. Returns when it is in the buffer of the peer's receive. Messages of a connection keep their order."""
        return self._run("send", conn_id, mr_id, ptr, size, None, timeout)

    def recv(
        self, conn_id: int, mr_id: int, ptr: int | object, size: int | None = None, *, timeout: float | None = None
    ) -> bool:
        """Receives a message of up to `size` bytes. A longer one is an error for both sides, and changes nothing.

        `recv_async` with `wait` returns the length of the message.
        """
        return self._run("recv", conn_id, mr_id, ptr, size, None, timeout)

    def send_async(
        self, conn_id: int, mr_id: int, ptr: int | object, size: int | None = None, *, timeout: float | None = None
    ) -> tuple[bool, int]:
        """Starts `send`. Returns `(True, transfer_id)`."""
        return self._start("send", conn_id, mr_id, ptr, size, None, timeout)

    def recv_async(
        self, conn_id: int, mr_id: int, ptr: int | object, size: int | None = None, *, timeout: float | None = None
    ) -> tuple[bool, int]:
        """Starts `recv`. Returns `(True, transfer_id)`."""
        return self._start("recv", conn_id, mr_id, ptr, size, None, timeout)

    def sendv(
        self,
        conn_id: int,
        mr_id_v: Sequence[int],
        data_ptr_v: Sequence[int],
        size_v: Sequence[int],
        num_iovs: int | None = None,
        *,
        timeout: float | None = None,
    ) -> bool:
        """Sends one message per range."""
        return self._await(self.sendv_async(conn_id, mr_id_v, data_ptr_v, size_v, num_iovs, timeout=timeout), timeout)

    def recvv(
        self,
        conn_id: int,
        mr_id_v: Sequence[int],
        data_ptr_v: Sequence[int],
        size_v: Sequence[int],
        num_iovs: int | None = None,
        *,
        timeout: float | None = None,
    ) -> bool:
        """Receives one message per range."""
        return self._await(self.recvv_async(conn_id, mr_id_v, data_ptr_v, size_v, num_iovs, timeout=timeout), timeout)

    def sendv_async(
        self,
        conn_id: int,
        mr_id_v: Sequence[int],
        data_ptr_v: Sequence[int],
        size_v: Sequence[int],
        num_iovs: int | None = None,
        *,
        timeout: float | None = None,
    ) -> tuple[bool, int]:
        """Starts `sendv`. Returns `(True, transfer_id)`."""
        return self._startv("send", conn_id, mr_id_v, data_ptr_v, size_v, None, num_iovs, timeout)

    def recvv_async(
        self,
        conn_id: int,
        mr_id_v: Sequence[int],
        data_ptr_v: Sequence[int],
        size_v: Sequence[int],
        num_iovs: int | None = None,
        *,
        timeout: float | None = None,
    ) -> tuple[bool, int]:
        """Starts `recvv`. Returns `(True, transfer_id)`."""
        return self._startv("recv", conn_id, mr_id_v, data_ptr_v, size_v, None, num_iovs, timeout)

    # One-sided transfers.

    def advertise(self, conn_id: int, mr_id: int, ptr: int | object, size: int | None = None) -> tuple[bool, bytes]:
        """Describes a range for the peer to read or write. Returns `(True, meta)` of 64 bytes, to be sent to it by any means.

        The description opens the range until its memory is deregistered, to every peer that is connected and shows it.
        """
        ptr, size = _range(ptr, size)
        try:
            return True, self._native.advertise(conn_id, mr_id, ptr, size)
        except (Error, TypeError, OverflowError) as error:
            self._fail(error)
            return False, b""

    def advertisev(
        self,
        conn_id: int,
        mr_id_v: Sequence[int],
        ptr_v: Sequence[int],
        size_v: Sequence[int],
        num_iovs: int | None = None,
    ) -> tuple[bool, list[bytes]]:
        """Describes several ranges. Returns `(True, metas)`."""
        metas: list[bytes] = []
        for mr_id, ptr, size in _ranges(mr_id_v, ptr_v, size_v, num_iovs):
            ok, meta = self.advertise(conn_id, mr_id, ptr, size)
            if not ok:
                return False, []
            metas.append(meta)
        return True, metas

    def write(
        self,
        conn_id: int,
        mr_id: int,
        ptr: int | object,
        size: int | None,
        meta: bytes,
        *,
        timeout: float | None = None,
    ) -> bool:
        """Writes into memory that the peer has advertised. The bytes are visible there when it returns.

        `size` may be smaller than the advertised range, which is written from its start then.
        """
        return self._run("write", conn_id, mr_id, ptr, size, meta, timeout)

    def read(
        self,
        conn_id: int,
        mr_id: int,
        ptr: int | object,
        size: int | None,
        meta: bytes,
        *,
        timeout: float | None = None,
    ) -> bool:
        """Reads memory that the peer has advertised, as `write` writes it."""
        return self._run("read", conn_id, mr_id, ptr, size, meta, timeout)

    def write_async(
        self,
        conn_id: int,
        mr_id: int,
        ptr: int | object,
        size: int | None,
        meta: bytes,
        *,
        timeout: float | None = None,
    ) -> tuple[bool, int]:
        """Starts `write`. Returns `(True, transfer_id)`."""
        return self._start("write", conn_id, mr_id, ptr, size, meta, timeout)

    def read_async(
        self,
        conn_id: int,
        mr_id: int,
        ptr: int | object,
        size: int | None,
        meta: bytes,
        *,
        timeout: float | None = None,
    ) -> tuple[bool, int]:
        """Starts `read`. Returns `(True, transfer_id)`."""
        return self._start("read", conn_id, mr_id, ptr, size, meta, timeout)

    def writev(
        self,
        conn_id: int,
        mr_id_v: Sequence[int],
        ptr_v: Sequence[int],
        size_v: Sequence[int],
        meta_blob_v: Sequence[bytes],
        num_iovs: int | None = None,
        *,
        timeout: float | None = None,
    ) -> bool:
        """Writes each range into the advertised range with the same index."""
        started = self.writev_async(conn_id, mr_id_v, ptr_v, size_v, meta_blob_v, num_iovs, timeout=timeout)
        return self._await(started, timeout)

    def readv(
        self,
        conn_id: int,
        mr_id_v: Sequence[int],
        ptr_v: Sequence[int],
        size_v: Sequence[int],
        meta_blob_v: Sequence[bytes],
        num_iovs: int | None = None,
        *,
        timeout: float | None = None,
    ) -> bool:
        """Reads each advertised range into the range with the same index."""
        started = self.readv_async(conn_id, mr_id_v, ptr_v, size_v, meta_blob_v, num_iovs, timeout=timeout)
        return self._await(started, timeout)

    def writev_async(
        self,
        conn_id: int,
        mr_id_v: Sequence[int],
        ptr_v: Sequence[int],
        size_v: Sequence[int],
        meta_blob_v: Sequence[bytes],
        num_iovs: int | None = None,
        *,
        timeout: float | None = None,
    ) -> tuple[bool, int]:
        """Starts `writev`. Returns `(True, transfer_id)`."""
        return self._startv("write", conn_id, mr_id_v, ptr_v, size_v, meta_blob_v, num_iovs, timeout)

    def readv_async(
        self,
        conn_id: int,
        mr_id_v: Sequence[int],
        ptr_v: Sequence[int],
        size_v: Sequence[int],
        meta_blob_v: Sequence[bytes],
        num_iovs: int | None = None,
        *,
        timeout: float | None = None,
    ) -> tuple[bool, int]:
        """Starts `readv`. Returns `(True, transfer_id)`."""
        return self._startv("read", conn_id, mr_id_v, ptr_v, size_v, meta_blob_v, num_iovs, timeout)

    # Outcomes.

    def poll_async(self, transfer_id: int) -> tuple[bool, bool]:
        """Returns `(True, False)` while a transfer is under way, and `(True, True)` once it is done.

        A failed transfer raises its error, or returns `(False, True)` with `raise_errors=False`. It is never reported as done.
        The call that finds the end takes it: the number is unknown afterwards, and raises `ArgumentError`.
        """
        try:
            return True, self._native.poll(transfer_id) is not None
        except Error as error:
            self._fail(error)
            return False, True

    def wait(self, transfer_id: int, timeout: float | None = None) -> int:
        """Waits until a transfer has ended. Returns the bytes moved, for a receive the length of the message.

        Not in UCCL. Without a timeout it waits for the end of the transfer, which its own timeout bounds. With one it raises
        `TransferTimeoutError` when that passes, and the transfer goes on. It always raises errors.
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

    # Notifications.

    def send_notif(self, conn_id: int, msg: bytes, name: bytes | str = b"", *, timeout: float | None = None) -> bool:
        """Sends a notification. Returns when it waits at the peer's endpoint. Neither part is cut off.

        Notifications of a connection keep their order. They wait at this side, until the timeout, while the peer takes none.
        """
        label = name.encode() if isinstance(name, str) else bytes(name)
        content = b"".join((_NAMED, struct.pack("<I", len(label)), label, msg))
        limit = self._limit(timeout)
        try:
            started = True, self._native.start_notify(conn_id, content, limit)
        except (Error, TypeError, OverflowError) as error:
            self._fail(error)
            return False
        return self._await(started, timeout)

    def get_notifs(self) -> list[Notification]:
        """Takes all notifications that have arrived, in the order of each connection. Does not wait."""
        return [Notification(conn_id, *_unpack(content)) for conn_id, content in self._native.take_notifications()]

    # Processes of one host.

    def connect_local(self, remote_gpu_bdf: str, *, timeout: float | None = None) -> tuple[bool, int]:
        """Connects to the process of this host that has published a device by `accept_local`. Returns `(True, conn_id)`.

        `remote_gpu_bdf` is the third part of its `parse_metadata`. If several processes publish one GPU, the newest is taken.
        """
        limit = self._limit(timeout)
        try:
            error: Error | None = None
            for metadata in _local.find(remote_gpu_bdf, limit):
                try:
                    return True, self._native.add_remote_endpoint(metadata, limit)
                except Error as failure:
                    error = failure
            raise error or ConnectError(f"no endpoint for {remote_gpu_bdf!r}")
        except Error as error:
            self._fail(error)
            return False, 0

    def accept_local(self, *, timeout: float | None = None) -> tuple[bool, str, int]:
        """Publishes this endpoint under its device, and takes the next connection. Returns `(True, remote_device, conn_id)`."""
        try:
            if not self._published:
                metadata = self.get_metadata()
                self._published.append(_local.publish(self.parse_metadata(metadata)[2], metadata))
            conn_id = self._native.accept(self._limit(timeout))
        except Error as error:
            self._fail(error)
            return False, "", 0
        return True, self.connection(conn_id).device, conn_id

    def advertise_ipc(self, conn_id: int, ptr: int | object, size: int | None = None) -> tuple[bool, bytes]:
        """As `advertise`, for memory that need not be registered. It stays open to peers until `dereg_ipc` or `close`."""
        holder = None if isinstance(ptr, int) else place_of(ptr).holder
        ptr, size = _range(ptr, size)
        try:
            mr_id = self._ipc.get((ptr, size))
            if mr_id is None:
                mr_id = self._ipc[ptr, size] = self._native.register(ptr, size, "rw")
                self._held[mr_id] = holder
            return True, self._native.advertise(conn_id, mr_id, ptr, size)
        except (Error, TypeError, OverflowError) as error:
            self._fail(error)
            return False, b""

    def advertisev_ipc(self, conn_id: int, ptr_v: Sequence[int], size_v: Sequence[int]) -> tuple[bool, list[bytes]]:
        """As `advertise_ipc`, for several ranges."""
        infos: list[bytes] = []
        for ptr, size in _pairs(ptr_v, size_v):
            ok, info = self.advertise_ipc(conn_id, ptr, size)
            if not ok:
                return False, []
            infos.append(info)
        return True, infos

    def dereg_ipc(self, ptr: int | object, size: int | None = None) -> bool:
        """Takes back what `advertise_ipc` has opened, as `dereg` does. Not in UCCL.

        Returns false if there is nothing to take back. Ranges within a range are taken back before it.
        """
        place = _range(ptr, size)
        mr_id = self._ipc.get(place)
        if mr_id is None or not self.dereg(mr_id):
            return False
        del self._ipc[place]
        return True

    def send_ipc(
        self, conn_id: int, ptr: int | object, size: int | None = None, *, timeout: float | None = None
    ) -> bool:
        """As `send`, for memory that need not be registered."""
        return self._await(self.send_ipc_async(conn_id, ptr, size, timeout=timeout), timeout)

    def recv_ipc(
        self, conn_id: int, ptr: int | object, size: int | None = None, *, timeout: float | None = None
    ) -> bool:
        """As `recv`, for memory that need not be registered."""
        return self._await(self.recv_ipc_async(conn_id, ptr, size, timeout=timeout), timeout)

    def send_ipc_async(
        self, conn_id: int, ptr: int | object, size: int | None = None, *, timeout: float | None = None
    ) -> tuple[bool, int]:
        """Starts `send_ipc`. The caller keeps the memory until the transfer has ended."""
        return self._start_ipc("send", conn_id, [_range(ptr, size)], [], timeout)

    def recv_ipc_async(
        self, conn_id: int, ptr: int | object, size: int | None = None, *, timeout: float | None = None
    ) -> tuple[bool, int]:
        """Starts `recv_ipc`. The caller keeps the memory until the transfer has ended."""
        return self._start_ipc("recv", conn_id, [_writable(ptr, size)], [], timeout)

    def write_ipc(
        self, conn_id: int, ptr: int | object, size: int | None, info: bytes, *, timeout: float | None = None
    ) -> bool:
        """As `write`, from memory that need not be registered."""
        return self._await(self.write_ipc_async(conn_id, ptr, size, info, timeout=timeout), timeout)

    def read_ipc(
        self, conn_id: int, ptr: int | object, size: int | None, info: bytes, *, timeout: float | None = None
    ) -> bool:
        """As `read`, into memory that need not be registered."""
        return self._await(self.read_ipc_async(conn_id, ptr, size, info, timeout=timeout), timeout)

    def write_ipc_async(
        self, conn_id: int, ptr: int | object, size: int | None, info: bytes, *, timeout: float | None = None
    ) -> tuple[bool, int]:
        """Starts `write_ipc`. The caller keeps the memory until the transfer has ended."""
        return self._start_ipc("write", conn_id, [_range(ptr, size)], [info], timeout)

    def read_ipc_async(
        self, conn_id: int, ptr: int | object, size: int | None, info: bytes, *, timeout: float | None = None
    ) -> tuple[bool, int]:
        """Starts `read_ipc`. The caller keeps the memory until the transfer has ended."""
        return self._start_ipc("read", conn_id, [_writable(ptr, size)], [info], timeout)

    def writev_ipc(
        self,
        conn_id: int,
        ptr_v: Sequence[int],
        size_v: Sequence[int],
        info_v: Sequence[bytes],
        *,
        timeout: float | None = None,
    ) -> bool:
        """As `writev`, from memory that need not be registered."""
        return self._await(self.writev_ipc_async(conn_id, ptr_v, size_v, info_v, timeout=timeout), timeout)

    def readv_ipc(
        self,
        conn_id: int,
        ptr_v: Sequence[int],
        size_v: Sequence[int],
        info_v: Sequence[bytes],
        *,
        timeout: float | None = None,
    ) -> bool:
        """As `readv`, into memory that need not be registered."""
        return self._await(self.readv_ipc_async(conn_id, ptr_v, size_v, info_v, timeout=timeout), timeout)

    def writev_ipc_async(
        self,
        conn_id: int,
        ptr_v: Sequence[int],
        size_v: Sequence[int],
        info_v: Sequence[bytes],
        *,
        timeout: float | None = None,
    ) -> tuple[bool, int]:
        """Starts `writev_ipc`. The caller keeps the memory until the transfer has ended."""
        return self._start_ipc("write", conn_id, _pairs(ptr_v, size_v), info_v, timeout)

    def readv_ipc_async(
        self,
        conn_id: int,
        ptr_v: Sequence[int],
        size_v: Sequence[int],
        info_v: Sequence[bytes],
        *,
        timeout: float | None = None,
    ) -> tuple[bool, int]:
        """Starts `readv_ipc`. The caller keeps the memory until the transfer has ended."""
        return self._start_ipc("read", conn_id, _pairs(ptr_v, size_v), info_v, timeout)

    # The endpoint itself.

    @property
    def last_error(self) -> Error | None:
        """The last failure that was returned as `False`."""
        return self._last_error

    @property
    def timeout(self) -> float:
        """Seconds after which a call fails that is given no other timeout."""
        return self._timeout

    @property
    def is_closed(self) -> bool:
        """Whether the endpoint was closed, or belongs to the parent of this process."""
        return not self._native.is_open()

    def close(self) -> None:
        """Closes all connections, fails their transfers, and takes all memory back. May be called again.

        Calls that wait in other threads raise `ClosedError`. It waits for at most 5 s until they have.
        """
        is_stopped = self._native.close()
        for path in self._published:
            path.unlink(missing_ok=True)
        self._published.clear()
        self._ipc.clear()
        if is_stopped:
            self._held.clear()

    def __enter__(self) -> Endpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        native = getattr(self, "_native", None)
        if native is not None and native.is_open():
            warnings.warn(f"{self!r} was not closed", ResourceWarning, stacklevel=2)
            self.close()

    def __repr__(self) -> str:
        if self.is_closed:
            return "<switchyard_moe.p2p.Endpoint, closed>"
        ip, port, device = self.parse_metadata(self.get_metadata())
        return f"<switchyard_moe.p2p.Endpoint {ip}:{port} {device}>"

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
            ptr, size = _range(ptr, size)
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
            ptr, size = _range(ptr, size)
        limit = self._timeout if timeout is None else timeout
        try:
            return True, self._native.start(op, conn_id, mr_id, ptr, size, meta, limit)
        except (Error, TypeError, OverflowError) as error:
            self._fail(error)
            return False, 0

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
        ranges = _ranges(mr_id_v, ptr_v, size_v, num_iovs)
        try:
            return True, self._native.startv(op, conn_id, ranges, list(metas or ()), self._limit(timeout))
        except (Error, TypeError, OverflowError) as error:
            self._fail(error)
            return False, 0

    def _start_ipc(
        self, op: str, conn_id: int, ranges: list[tuple[int, int]], infos: Sequence[bytes], timeout: float | None
    ) -> tuple[bool, int]:
        limit = self._limit(timeout)
        try:
            known = [self._native.find_region(ptr, size, "rw") for ptr, size in ranges]
            if all(mr_id is not None for mr_id in known):
                triples = [(mr_id or 0, ptr, size) for mr_id, (ptr, size) in zip(known, ranges)]
                return True, self._native.startv(op, conn_id, triples, list(infos), limit)
            return True, self._native.start_unregistered(op, conn_id, ranges, list(infos), limit)
        except (Error, TypeError, OverflowError) as error:
            self._fail(error)
            return False, 0

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

    def _fail(self, error: Exception) -> None:
        """Raises the error, or keeps it if this endpoint returns failures."""
        if isinstance(error, (TypeError, OverflowError)):
            raise ArgumentError(f"{error}: expected ints from 0 to 2**64 - 1, and bytes as metadata") from error
        if self._raises or not isinstance(error, Error) or isinstance(error, ArgumentError):
            raise error
        self._last_error = error


def _range(ptr: int | object, size: int | None) -> tuple[int, int]:
    """Returns address and size of an address, a buffer or a tensor."""
    if isinstance(ptr, int):
        if size is None:
            raise ArgumentError("an address needs a size")
        return ptr, size
    place = place_of(ptr)
    if size is not None and not 0 <= size <= place.size:
        raise ArgumentError(f"size is {size}, the buffer has {place.size} bytes")
    return place.ptr, place.size if size is None else size


def _writable(ptr: int | object, size: int | None) -> tuple[int, int]:
    if not isinstance(ptr, int) and place_of(ptr).is_read_only:
        raise ArgumentError("the buffer is read-only, and this transfer writes into it")
    return _range(ptr, size)


def _ranges(
    mr_id_v: Sequence[int], ptr_v: Sequence[int], size_v: Sequence[int], num_iovs: int | None
) -> list[tuple[int, int, int]]:
    lengths = {len(mr_id_v), len(ptr_v), len(size_v)} | (set() if num_iovs is None else {num_iovs})
    if len(lengths) != 1:
        raise ArgumentError(
            f"{len(mr_id_v)} regions, {len(ptr_v)} addresses, {len(size_v)} sizes and num_iovs {num_iovs}: expected one number"
        )
    return list(zip(mr_id_v, ptr_v, size_v))


def _pairs(ptr_v: Sequence[int], size_v: Sequence[int]) -> list[tuple[int, int]]:
    if len(ptr_v) != len(size_v):
        raise ArgumentError(f"{len(ptr_v)} addresses with {len(size_v)} sizes")
    return list(zip(ptr_v, size_v))


def _unpack(content: bytes) -> tuple[bytes, bytes]:
    """Splits a notification into name and message. Bytes of peers without names are all message."""
    if content[:4] == _NAMED and len(content) >= 8:
        end = 8 + int.from_bytes(content[4:8], "little")
        if end <= len(content):
            return content[8:end], content[end:]
    return b"", content


def _resolve(host: str) -> str:
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise ConnectError(f"cannot resolve {host!r}: {error}") from error
