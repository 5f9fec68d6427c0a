"""Messages and one-sided transfers of registered memory."""

from __future__ import annotations

from collections.abc import Sequence

from switchyard_moe.p2p._base import EndpointBase, all_of, range_of, ranges_of


class Transfers(EndpointBase):
    """The transfers of `Endpoint` that name registrations."""

    # Messages.

    def send(
        self, conn_id: int, mr_id: int, ptr: int | object, size: int | None = None, *, timeout: float | None = None
    ) -> bool:
        """Sends a message. Returns when it is in the buffer of the peer's receive. Messages of a connection keep their
        order.
        """
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
        """Describes a range for the peer to read or write. Returns `(True, meta)` of 64 bytes, to be sent to it by any
        means.

        The description opens the range until its memory is deregistered, to every peer that is connected and shows it.
        """
        ptr, size = range_of(ptr, size)
        return self._attempt(b"", self._native.advertise, conn_id, mr_id, ptr, size)

    def advertisev(
        self,
        conn_id: int,
        mr_id_v: Sequence[int],
        ptr_v: Sequence[int],
        size_v: Sequence[int],
        num_iovs: int | None = None,
    ) -> tuple[bool, list[bytes]]:
        """Describes several ranges. Returns `(True, metas)`."""
        return all_of(self.advertise(conn_id, *place) for place in ranges_of(mr_id_v, ptr_v, size_v, num_iovs))

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
