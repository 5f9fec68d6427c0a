"""`Endpoint`: UCCL P2P's method names over the message engine."""

from __future__ import annotations

import struct
import warnings
from types import TracebackType
from typing import NamedTuple

from switchyard_moe.p2p._ipc import LocalTransfers
from switchyard_moe.p2p._transfers import Transfers

_NAMED = b"SYN1"


class Notification(NamedTuple):
    """Bytes that a peer has sent with `Endpoint.send_notif`."""

    conn_id: int
    name: bytes
    msg: bytes


class Endpoint(Transfers, LocalTransfers):
    """One side of transfers between processes, with the method names of UCCL P2P.

    Addresses and sizes are ints, in bytes, of 64 bits: sizes of 4 GiB and more are right. Every `ptr` may be a buffer
    or a CPU tensor instead; its `size` can be left out then.

    **Memory.** `reg` takes the address on trust. The caller keeps the memory mapped until `dereg` or `close` has
    returned. The endpoint does so itself for buffers and tensors that it was given as objects. Addresses that are not
    mapped are refused. Other wrong addresses cannot be found, and transfers through them corrupt the
    process.

    **Errors.** A call that fails raises an exception of `switchyard_moe.p2p`. With `raise_errors=False` it returns
    UCCL's shape with `False` first, and `last_error` has the exception. Wrong arguments always raise.

    **Waiting.** Blocking calls release the interpreter's lock, end at their timeout, and can be interrupted by a
    signal. A transfer that misses its timeout fails. If the peer could still reach its buffer, the connection is
    closed. The same holds for a `write` or `read` that a signal ends.

    **Fork.** A forked child cannot use its parent's endpoint. Its calls raise `ForkedError`.

    Args:
        local_gpu_idx: GPU that the metadata names. `None` names none. The endpoint moves host memory in any case.
        num_cpus: Accepted for UCCL's callers, and ignored: an endpoint has one thread.
        bind: Address to listen on. `127.0.0.1` keeps other hosts out.
        port: Port to listen on. 0 selects a free one.
        advertise: Address in the metadata, if it is not that of `bind` or of the default route.
        transports: `cma` (copies between processes of one user on one host), `shm` (shared memory between them, where
            copies are forbidden) and `tcp`, the best first. `None` means all, and a connection takes the first that
            works.
        pci_bdf: PCI address of the GPU, such as `0000:3b:00.0`, for the metadata.
        ticket: Secret that peers must have, too.
        timeout: Seconds after which a call fails that is given no other timeout.
        eager_bytes: Longest message that may arrive before its receive. With 0 the sender always learns if the receive
            is too short. Above 0 short messages are faster, and only the receiver learns it.
        max_transfers: Most transfers whose outcome was not taken.
        raise_errors: Whether failures raise, or return `False`.
    """

    # Notifications.

    def send_notif(self, conn_id: int, msg: bytes, name: bytes | str = b"", *, timeout: float | None = None) -> bool:
        """Sends a notification. Returns when it waits at the peer's endpoint. Neither part is cut off.

        Notifications of a connection keep their order. They wait at this side, until the timeout, while the peer takes
        none.
        """
        label = name.encode() if isinstance(name, str) else bytes(name)
        content = b"".join((_NAMED, struct.pack("<I", len(label)), label, msg))
        started = self._attempt(0, self._native.start_notify, conn_id, content, self._limit(timeout))
        return self._await(started, timeout)

    def get_notifs(self) -> list[Notification]:
        """Takes all notifications that have arrived, in the order of each connection. Does not wait."""
        return [Notification(conn_id, *_unpack(content)) for conn_id, content in self._native.take_notifications()]

    # The endpoint itself.

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


def _unpack(content: bytes) -> tuple[bytes, bytes]:
    """Splits a notification into name and message. Bytes of peers without names are all message."""
    if content[:4] == _NAMED and len(content) >= 8:
        end = 8 + int.from_bytes(content[4:8], "little")
        if end <= len(content):
            return content[8:end], content[end:]
    return b"", content
