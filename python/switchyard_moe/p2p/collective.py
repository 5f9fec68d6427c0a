"""Point-to-point calls by rank and copy-only collectives, with the names of UCCL P2P's `collective`.

Every rank makes a `CollectiveContext`, and all of them call `init`. Tensors are C-contiguous buffers or CPU tensors.
Calls between two ranks are matched in order, and all ranks make the same collective calls in the same order.

`compression="float"` sends the frames of `switchyard_moe.p2p.compression` in place of the bytes. It pays off where the
codec is faster than the network, and needs the element type.

No collective adds: `reduce_scatter` delivers the parts of all ranks, and the caller reduces them.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple, Protocol

from switchyard_moe._native import P2pEndpoint
from switchyard_moe.p2p._endpoint import Endpoint
from switchyard_moe.p2p._errors import ArgumentError, ClosedError, Error, TransferTimeoutError
from switchyard_moe.p2p._memory import Place, place_of
from switchyard_moe.p2p.compression import Dtype, compress, compress_bound, decompress_into

__all__ = [
    "Algorithm",
    "CollectiveContext",
    "Compression",
    "Exchange",
    "P2POp",
    "all_gather",
    "all_to_all",
    "batch_isend_irecv",
    "broadcast",
    "deregister_tensor",
    "file_exchange",
    "finalize_collective",
    "get_collective",
    "init_collective",
    "irecv",
    "isend",
    "recv",
    "reduce_scatter",
    "register_tensor",
    "send",
    "test",
    "torch_exchange",
    "wait",
    "wait_all",
]

Algorithm = Literal["direct", "ring"]
Compression = Literal["none", "float"]


class Exchange(Protocol):
    """Gives every rank the bytes of all ranks, in the order of ranks. It is called once, by all of them."""

    def __call__(self, rank: int, world_size: int, mine: bytes, timeout: float) -> Sequence[bytes]: ...


def file_exchange(folder: str | os.PathLike[str]) -> Exchange:
    """Exchanges by files in a folder that all ranks share. The folder is empty before, and serves one `init`."""

    def exchange(rank: int, world_size: int, mine: bytes, timeout: float) -> Sequence[bytes]:
        base = Path(folder)
        base.mkdir(parents=True, exist_ok=True)
        draft = base / f".{rank}.{os.getpid()}"
        draft.write_bytes(mine)
        draft.replace(base / f"rank-{rank}")
        end = time.monotonic() + timeout
        found: list[bytes] = []
        for other in range(world_size):
            path = base / f"rank-{other}"
            while not path.exists():
                if time.monotonic() >= end:
                    raise TransferTimeoutError(f"rank {other} has not written {path} within {timeout} s")
                time.sleep(0.002)
            found.append(path.read_bytes())
        return found

    return exchange


def torch_exchange() -> Exchange:
    """Exchanges by `torch.distributed`, which the caller has initialised with a backend for CPU, such as gloo."""

    def exchange(rank: int, world_size: int, mine: bytes, timeout: float) -> Sequence[bytes]:
        del rank, timeout
        found: list[bytes | None] = [None] * world_size
        _torch_distributed().all_gather_object(found, mine)
        return [part or b"" for part in found]

    return exchange


@dataclass
class _Request:
    """A transfer under way, and what its end is to do."""

    transfer_id: int | None
    #: Called once with the bytes moved.
    finish: Callable[[int], None]


class P2POp(NamedTuple):
    """One call of `batch_isend_irecv`: `isend` or `irecv`, the tensor, and the peer's rank."""

    op: Callable[..., int]
    tensor: object
    peer: int


class CollectiveContext:
    """The ranks of one job, and a connection to each of them.

    Args:
        num_cpus: Accepted for UCCL's callers, and ignored.
        local_gpu_idx: GPU that the endpoint's metadata names.
        rank: This process's number, from 0. `None` takes that of `torch.distributed`.
        world_size: Number of ranks. `None` takes that of `torch.distributed`.
        exchange: How ranks learn each other's addresses. `None` means `torch_exchange()`.
        timeout: Seconds after which a call fails.
        compression: `"none"`, or `"float"` for all calls that name a `dtype`.
        endpoint: Settings of the `Endpoint`, such as `bind` or `ticket`.
    """

    def __init__(
        self,
        num_cpus: int | None = None,
        local_gpu_idx: int | None = None,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        exchange: Exchange | None = None,
        timeout: float = 60.0,
        compression: Compression = "none",
        endpoint: dict[str, object] | None = None,
    ) -> None:
        if compression not in ("none", "float"):
            raise ArgumentError(f'compression is {compression!r}, expected "none" or "float"')
        if rank is None or world_size is None:
            dist = _torch_distributed()
            rank, world_size = int(dist.get_rank()), int(dist.get_world_size())
        if not 0 <= rank < world_size:
            raise ArgumentError(f"rank is {rank} of {world_size}")
        self.rank = rank
        self.world_size = world_size
        self.compression: Compression = compression
        self._exchange = exchange or torch_exchange()
        self._timeout = timeout
        self._settings = {"local_gpu_idx": local_gpu_idx, "num_cpus": num_cpus, "timeout": timeout} | (endpoint or {})
        self._endpoint: Endpoint | None = None
        self._conn_ids: dict[int, int] = {}
        self._registered: dict[tuple[int, int], tuple[int, int]] = {}
        self._requests: dict[int, _Request] = {}
        self._last_request = 0

    # Set-up.

    def init(self) -> None:
        """Makes the endpoint and connects to all ranks. Every rank calls it once."""
        if self._endpoint is not None:
            return
        endpoint = Endpoint(**self._settings)  # type: ignore[arg-type]
        try:
            metadata = self._exchange(self.rank, self.world_size, endpoint.get_metadata(), self._timeout)
            if len(metadata) != self.world_size:
                raise ArgumentError(
                    f"the exchange gave the metadata of {len(metadata)} ranks, expected {self.world_size}"
                )
            # The higher rank connects to the lower one, so each pair has one connection.
            for other in range(self.rank):
                self._conn_ids[other] = endpoint.add_remote_endpoint(metadata[other])[1]
            # A connection names its engine, so the order of arrival does not matter.
            by_engine = {P2pEndpoint.parse_metadata(theirs)[4]: other for other, theirs in enumerate(metadata)}
            if len(by_engine) != self.world_size:
                raise ArgumentError("two ranks have one endpoint: give every rank its own")
            while len(self._conn_ids) < self.world_size - 1:
                conn_id = endpoint.accept()[3]
                found = by_engine.get(endpoint.connection(conn_id).engine_id)
                if found is None or found <= self.rank:
                    endpoint.remove_remote_endpoint(conn_id)
                else:
                    self._conn_ids[found] = conn_id
        except BaseException:
            endpoint.close()
            self._conn_ids.clear()
            raise
        self._endpoint = endpoint

    def finalize(self) -> None:
        """Closes the endpoint. Pending transfers fail. May be called again."""
        if self._endpoint is not None:
            self._endpoint.close()
        self._endpoint = None
        self._conn_ids.clear()
        self._registered.clear()
        self._requests.clear()

    def __enter__(self) -> CollectiveContext:
        self.init()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.finalize()

    def register_tensor(self, tensor: object) -> None:
        """Registers a tensor, so that its transfers need no registration of their own. May be called more than once."""
        place = place_of(tensor)
        if place.size == 0:
            return
        mr_id, uses = self._registered.get((place.ptr, place.size), (0, 0))
        if uses == 0:
            mr_id = self._open().reg(tensor)[1]
        self._registered[place.ptr, place.size] = mr_id, uses + 1

    def deregister_tensor(self, tensor: object) -> None:
        """Undoes one `register_tensor`. Does nothing for a tensor that is not registered."""
        place = place_of(tensor)
        mr_id, uses = self._registered.get((place.ptr, place.size), (0, 0))
        if uses == 1:
            self._open().dereg(mr_id)
            del self._registered[place.ptr, place.size]
        elif uses > 1:
            self._registered[place.ptr, place.size] = mr_id, uses - 1

    # Between two ranks.

    def send(self, tensor: object, dst: int, *, dtype: Dtype | None = None) -> None:
        """Sends a tensor. Returns when it is in the buffer of the peer's `recv`. A send to this rank does nothing."""
        self.wait(self.isend(tensor, dst, dtype=dtype))

    def recv(self, tensor: object, src: int, *, dtype: Dtype | None = None) -> None:
        """Receives a tensor of exactly this length. From this rank itself it does nothing."""
        self.wait(self.irecv(tensor, src, dtype=dtype))

    def isend(self, tensor: object, dst: int, *, dtype: Dtype | None = None) -> int:
        """Starts `send`. Returns the number of a request. The tensor stays unchanged until its end."""
        if dst == self.rank:
            return -1
        return self._isend(place_of(tensor), dst, dtype)

    def irecv(self, tensor: object, src: int, *, dtype: Dtype | None = None) -> int:
        """Starts `recv`. Returns the number of a request."""
        if src == self.rank:
            return -1
        place = place_of(tensor)
        if place.is_read_only:
            raise ArgumentError("the buffer is read-only, and a receive writes into it")
        return self._irecv(place, src, dtype)

    def wait(self, request: int) -> None:
        """Waits until a request has ended."""
        while not self._try_wait(request, 3600.0):
            pass

    def wait_all(self, requests: Sequence[int]) -> None:
        """Waits until all requests have ended. Raises the first failure after the end of all."""
        failure: Exception | None = None
        for request in requests:
            try:
                self.wait(request)
            except Exception as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def test(self, request: int) -> bool:
        """Returns whether a request has ended. A failed one raises. The call that finds the end takes it."""
        return self._try_wait(request, 0.0)

    def batch_isend_irecv(self, ops: Sequence[P2POp]) -> list[int]:
        """Starts several calls. Returns their requests."""
        return [op.op(op.tensor, op.peer) for op in ops]

    # Collectives.

    def all_gather(
        self, out: object, tensor: object, *, algorithm: Algorithm = "direct", dtype: Dtype | None = None
    ) -> None:
        """Copies the tensor of every rank into `out`, one after the other in the order of ranks.

        `direct` sends to every rank, `ring` passes the parts on from rank to rank.
        """
        mine, target = place_of(tensor), _writable(out)
        parts = self._parts(target, mine.size, "out")
        _copy(parts[self.rank], mine)
        if algorithm == "direct":
            self._trade([mine] * self.world_size, parts, dtype)
        elif algorithm == "ring":
            left, right = (self.rank - 1) % self.world_size, (self.rank + 1) % self.world_size
            for step in range(self.world_size - 1):
                passed = parts[(self.rank - step) % self.world_size]
                next_part = parts[(self.rank - step - 1) % self.world_size]
                self._together([self._irecv(next_part, left, dtype), self._isend(passed, right, dtype)])
        else:
            raise _unknown(algorithm)

    def all_to_all(
        self, out: object, tensor: object, *, algorithm: Algorithm = "direct", dtype: Dtype | None = None
    ) -> None:
        """Sends part `i` of the tensor to rank `i`, and receives the part of rank `i` into part `i` of `out`.

        `ring` exchanges with one pair of ranks at a time, at growing distance.
        """
        source, target = place_of(tensor), _writable(out)
        if source.size != target.size or source.size % self.world_size:
            raise ArgumentError(
                f"{source.size} bytes to {target.size}: expected one length, a multiple of {self.world_size} ranks"
            )
        size = source.size // self.world_size
        sent, parts = self._parts(source, size, "tensor"), self._parts(target, size, "out")
        _copy(parts[self.rank], sent[self.rank])
        if algorithm == "direct":
            self._trade(sent, parts, dtype)
        elif algorithm == "ring":
            for step in range(1, self.world_size):
                dst, src = (self.rank + step) % self.world_size, (self.rank - step) % self.world_size
                self._together([self._irecv(parts[src], src, dtype), self._isend(sent[dst], dst, dtype)])
        else:
            raise _unknown(algorithm)

    def reduce_scatter(
        self, out: object, tensor: object, *, algorithm: Algorithm = "direct", dtype: Dtype | None = None
    ) -> None:
        """Delivers part `rank` of every rank's tensor into `out`, in the order of ranks. The caller reduces them.

        It moves the bytes of a reduce-scatter, and does no arithmetic.
        """
        self.all_to_all(out, tensor, algorithm=algorithm, dtype=dtype)

    def broadcast(
        self, tensor: object, root: int, *, algorithm: Algorithm = "direct", dtype: Dtype | None = None
    ) -> None:
        """Copies the tensor of rank `root` into that of every rank.

        `direct` sends from the root to every rank, `ring` passes pieces of 1 MiB on from rank to rank.
        """
        self._check_rank(root)
        place = place_of(tensor) if self.rank == root else _writable(tensor)
        if self.world_size == 1:
            return
        if algorithm == "direct":
            if self.rank == root:
                others = [other for other in range(self.world_size) if other != root]
                self._together([self._isend(place, other, dtype) for other in others])
            else:
                self._together([self._irecv(place, root, dtype)])
        elif algorithm == "ring":
            left, right = (self.rank - 1) % self.world_size, (self.rank + 1) % self.world_size
            pieces = [_part(place, at, min(_PIECE, place.size - at)) for at in range(0, place.size, _PIECE)]
            arriving = [self._irecv(piece, left, dtype) for piece in pieces] if self.rank != root else []
            leaving: list[int] = []
            for idx, piece in enumerate(pieces):
                if arriving:
                    self.wait(arriving[idx])
                if right != root:
                    leaving.append(self._isend(piece, right, dtype))
            self._together(leaving)
        else:
            raise _unknown(algorithm)

    # Helpers.

    def _open(self) -> Endpoint:
        if self._endpoint is None:
            raise ClosedError("the collective is not initialised: call init()")
        return self._endpoint

    def _request(self, request: int) -> _Request:
        found = self._requests.get(request)
        if found is None:
            raise ArgumentError(f"there is no request {request}: its outcome was taken already")
        return found

    def _try_wait(self, request: int, timeout: float) -> bool:
        """Waits for a request. Returns false if it goes on. An interrupted one goes on, too, and keeps its buffers."""
        if request == -1:
            return True
        found = self._request(request)
        moved: int | None = 0
        if found.transfer_id is not None:
            try:
                moved = self._open().try_wait(found.transfer_id, timeout)
            except Error:
                del self._requests[request]
                raise
            if moved is None:
                return False
        del self._requests[request]
        found.finish(moved or 0)
        return True

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise ArgumentError(f"rank {rank} does not exist: there are {self.world_size}")

    def _conn_id(self, rank: int) -> int:
        self._check_rank(rank)
        self._open()
        return self._conn_ids[rank]

    def _keep(self, request: _Request) -> int:
        self._last_request += 1
        self._requests[self._last_request] = request
        return self._last_request

    def _start(self, op: str, conn_id: int, place: Place) -> int:
        """Starts a message by the registration of the tensor, or by one for this message only."""
        endpoint = self._open()
        registered = self._registered.get((place.ptr, place.size))
        if registered is not None:
            start = endpoint.send_async if op == "send" else endpoint.recv_async
            return start(conn_id, registered[0], place.ptr, place.size)[1]
        start_ipc = endpoint.send_ipc_async if op == "send" else endpoint.recv_ipc_async
        return start_ipc(conn_id, place.ptr, place.size)[1]

    def _isend(self, place: Place, dst: int, dtype: Dtype | None) -> int:
        conn_id = self._conn_id(dst)
        # Both sides know the length, so nothing is sent for a tensor without bytes.
        if place.size == 0:
            return self._keep(_Request(None, lambda _: None))
        holder: object = place.holder
        if self._compresses(dtype):
            frame = compress(_View(place), dtype or "f32")
            place, holder = place_of(frame), frame
        held = [place, holder]
        return self._keep(_Request(self._start("send", conn_id, place), lambda _: held.clear()))

    def _irecv(self, place: Place, src: int, dtype: Dtype | None) -> int:
        conn_id = self._conn_id(src)
        if place.size == 0:
            return self._keep(_Request(None, lambda _: None))
        if not self._compresses(dtype):
            return self._keep(_Request(self._start("recv", conn_id, place), _exactly(place)))
        frame = bytearray(compress_bound(dtype or "f32", place.size))
        staging = place_of(frame)

        def finish(moved: int) -> None:
            size = decompress_into(memoryview(frame)[:moved], dtype or "f32", _View(place))
            _exactly(place)(size)

        return self._keep(_Request(self._start("recv", conn_id, staging), finish))

    def _compresses(self, dtype: Dtype | None) -> bool:
        return self.compression == "float" and dtype is not None

    def _trade(self, sent: Sequence[Place], parts: Sequence[Place], dtype: Dtype | None) -> None:
        """Exchanges one part with every other rank. Every rank begins with another one."""
        others = [(self.rank + step) % self.world_size for step in range(1, self.world_size)]
        requests = [self._irecv(parts[other], other, dtype) for other in others]
        requests += [self._isend(sent[other], other, dtype) for other in others]
        self._together(requests)

    def _together(self, requests: Sequence[int]) -> None:
        self.wait_all(requests)

    def _parts(self, place: Place, size: int, what: str) -> list[Place]:
        if place.size != size * self.world_size:
            raise ArgumentError(f"{what} has {place.size} bytes, expected {size} for each of {self.world_size} ranks")
        return [_part(place, size * rank, size) for rank in range(self.world_size)]


class _View:
    """A place, in the form that `place_of` takes."""

    device = "cpu"

    def __init__(self, place: Place) -> None:
        self._place = place

    def data_ptr(self) -> int:
        return self._place.ptr

    def numel(self) -> int:
        return self._place.size

    def element_size(self) -> int:
        return 1

    def is_contiguous(self) -> bool:
        return True


def _torch_distributed() -> Any:
    # Imported by name: type checkers need no torch.
    return importlib.import_module("torch.distributed")


def _exactly(place: Place) -> Callable[[int], None]:
    def check(moved: int) -> None:
        if moved != place.size:
            raise ArgumentError(
                f"the peer sent {moved} bytes, this rank expects {place.size}: give tensors of one length"
            )

    return check


def _writable(memory: object) -> Place:
    place = place_of(memory)
    if place.is_read_only:
        raise ArgumentError("the buffer is read-only, and this call writes into it")
    return place


def _part(place: Place, offset: int, size: int) -> Place:
    return Place(place.ptr + offset, size, place.is_read_only, place.holder)


def _copy(target: Place, source: Place) -> None:
    if target.ptr != source.ptr:
        ctypes.memmove(target.ptr, source.ptr, source.size)


def _unknown(algorithm: str) -> ArgumentError:
    return ArgumentError(f'algorithm is {algorithm!r}, expected "direct" or "ring"')


#: Length of the pieces of a broadcast around a ring.
_PIECE = 1 << 20

# The process's own context, for UCCL's module-level calls.

_context: CollectiveContext | None = None


def init_collective(
    num_cpus: int | None = None, local_gpu_idx: int | None = None, **settings: object
) -> CollectiveContext:
    """Makes and initialises this process's context. The settings are those of `CollectiveContext`."""
    global _context
    if _context is not None:
        raise ArgumentError("the collective is initialised already: call finalize_collective() first")
    context = CollectiveContext(num_cpus, local_gpu_idx, **settings)  # type: ignore[arg-type]
    context.init()
    _context = context
    return context


def finalize_collective() -> None:
    """Ends this process's context."""
    global _context
    if _context is not None:
        _context.finalize()
    _context = None


def get_collective() -> CollectiveContext:
    """Returns this process's context."""
    if _context is None:
        raise ClosedError("the collective is not initialised: call init_collective()")
    return _context


def register_tensor(tensor: object) -> None:
    """As `CollectiveContext.register_tensor`."""
    get_collective().register_tensor(tensor)


def deregister_tensor(tensor: object) -> None:
    """As `CollectiveContext.deregister_tensor`."""
    get_collective().deregister_tensor(tensor)


def send(tensor: object, dst: int, *, dtype: Dtype | None = None) -> None:
    """As `CollectiveContext.send`."""
    get_collective().send(tensor, dst, dtype=dtype)


def recv(tensor: object, src: int, *, dtype: Dtype | None = None) -> None:
    """As `CollectiveContext.recv`."""
    get_collective().recv(tensor, src, dtype=dtype)


def isend(tensor: object, dst: int, *, dtype: Dtype | None = None) -> int:
    """As `CollectiveContext.isend`."""
    return get_collective().isend(tensor, dst, dtype=dtype)


def irecv(tensor: object, src: int, *, dtype: Dtype | None = None) -> int:
    """As `CollectiveContext.irecv`."""
    return get_collective().irecv(tensor, src, dtype=dtype)


def batch_isend_irecv(ops: Sequence[P2POp]) -> list[int]:
    """As `CollectiveContext.batch_isend_irecv`."""
    return get_collective().batch_isend_irecv(ops)


def wait(request: int) -> None:
    """As `CollectiveContext.wait`."""
    get_collective().wait(request)


def wait_all(requests: Sequence[int]) -> None:
    """As `CollectiveContext.wait_all`."""
    get_collective().wait_all(requests)


def test(request: int) -> bool:
    """As `CollectiveContext.test`."""
    return get_collective().test(request)


def all_gather(out: object, tensor: object, *, algorithm: Algorithm = "direct", dtype: Dtype | None = None) -> None:
    """As `CollectiveContext.all_gather`."""
    get_collective().all_gather(out, tensor, algorithm=algorithm, dtype=dtype)


def all_to_all(out: object, tensor: object, *, algorithm: Algorithm = "direct", dtype: Dtype | None = None) -> None:
    """As `CollectiveContext.all_to_all`."""
    get_collective().all_to_all(out, tensor, algorithm=algorithm, dtype=dtype)


def reduce_scatter(out: object, tensor: object, *, algorithm: Algorithm = "direct", dtype: Dtype | None = None) -> None:
    """As `CollectiveContext.reduce_scatter`."""
    get_collective().reduce_scatter(out, tensor, algorithm=algorithm, dtype=dtype)


def broadcast(tensor: object, root: int, *, algorithm: Algorithm = "direct", dtype: Dtype | None = None) -> None:
    """As `CollectiveContext.broadcast`."""
    get_collective().broadcast(tensor, root, algorithm=algorithm, dtype=dtype)
