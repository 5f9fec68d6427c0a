"""The forms for processes of one host, which need no registration."""

from __future__ import annotations

from collections.abc import Sequence

from switchyard_moe.p2p import _local
from switchyard_moe.p2p._base import EndpointBase, all_of, pairs_of, range_of, writable_range
from switchyard_moe.p2p._errors import ConnectError, Error
from switchyard_moe.p2p._memory import place_of


class LocalTransfers(EndpointBase):
    """The calls of `Endpoint` whose names contain `local` or `ipc`."""

    # Processes of one host.

    def connect_local(self, remote_gpu_bdf: str, *, timeout: float | None = None) -> tuple[bool, int]:
        """Connects to the process of this host that has published a device by `accept_local`. Returns `(True,
        conn_id)`.

        `remote_gpu_bdf` is the third part of its `parse_metadata`. If several processes publish one GPU, the newest is
        taken.
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
        """Publishes this endpoint under its device, and takes the next connection. Returns `(True, remote_device,
        conn_id)`.
        """
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
        """As `advertise`, for memory that need not be registered. It stays open until `dereg_ipc` or `close`.

        Peers may read and write it, and only read a read-only buffer.
        """
        place = None if isinstance(ptr, int) else place_of(ptr)
        access = "ro" if place is not None and place.is_read_only else "rw"
        ptr, size = range_of(ptr, size)
        mr_id = self._ipc.get((ptr, size))
        if mr_id is None:
            ok, added = self._attempt(0, self._native.register, ptr, size, access)
            if not ok:
                return False, b""
            mr_id = self._ipc[ptr, size] = added
            self._held[mr_id] = None if place is None else place.holder
        return self._attempt(b"", self._native.advertise, conn_id, mr_id, ptr, size)

    def advertisev_ipc(self, conn_id: int, ptr_v: Sequence[int], size_v: Sequence[int]) -> tuple[bool, list[bytes]]:
        """As `advertise_ipc`, for several ranges."""
        return all_of(self.advertise_ipc(conn_id, *place) for place in pairs_of(ptr_v, size_v))

    def dereg_ipc(self, ptr: int | object, size: int | None = None) -> bool:
        """Takes back what `advertise_ipc` has opened, as `dereg` does. Not in UCCL.

        Returns false if there is nothing to take back. Ranges within a range are taken back before it.
        """
        place = range_of(ptr, size)
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
        return self._start_ipc("send", conn_id, [range_of(ptr, size)], [], timeout)

    def recv_ipc_async(
        self, conn_id: int, ptr: int | object, size: int | None = None, *, timeout: float | None = None
    ) -> tuple[bool, int]:
        """Starts `recv_ipc`. The caller keeps the memory until the transfer has ended."""
        return self._start_ipc("recv", conn_id, [writable_range(ptr, size)], [], timeout)

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
        return self._start_ipc("write", conn_id, [range_of(ptr, size)], [info], timeout)

    def read_ipc_async(
        self, conn_id: int, ptr: int | object, size: int | None, info: bytes, *, timeout: float | None = None
    ) -> tuple[bool, int]:
        """Starts `read_ipc`. The caller keeps the memory until the transfer has ended."""
        return self._start_ipc("read", conn_id, [writable_range(ptr, size)], [info], timeout)

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
        return self._start_ipc("write", conn_id, pairs_of(ptr_v, size_v), info_v, timeout)

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
        return self._start_ipc("read", conn_id, pairs_of(ptr_v, size_v), info_v, timeout)
