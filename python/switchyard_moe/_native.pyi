import os
from typing import Generic, TypeVar, final

from typing_extensions import Self, disjoint_base

from switchyard_moe._arrays import Array

__all__ = [
    "Client",
    "Handle",
    "P2pEndpoint",
    "Report",
    "ServerReport",
    "__version__",
    "p2p_compress",
    "p2p_compress_bound",
    "p2p_decompress",
    "p2p_decompressed_size",
]

_ArrayT = TypeVar("_ArrayT", bound=Array)

__version__: str

@disjoint_base
class Client:
    def __new__(
        cls,
        control_plane: str,
        *,
        token: str | None = None,
        token_file: str | os.PathLike[str] | None = None,
        model: str | os.PathLike[str] | None = None,
        device: str = "cpu",
        wire_dtype: str | None = None,
        response_dtype: str | None = None,
        transports: str = "auto",
        max_lanes: int = 16,
        timeout: float = 30.0,
        deadline: float = 0.1,
        work_limit: float = 60.0,
        on_missing: str = "fail",
        name: str | None = None,
        slot_bytes: int | None = None,
        slot_frames: int | None = None,
        hedge_budget: float = 0.05,
        tls: str | os.PathLike[str] | None = None,
        insecure: bool = False,
        otlp_endpoint: str | None = None,
        trace_sample_ratio: float = 0.001,
    ) -> Self: ...
    @property
    def hidden(self) -> int:
        """Values per token."""
    @property
    def num_experts(self) -> int:
        """Routed experts of a layer."""
    @property
    def top_k(self) -> int:
        """Most experts of a token."""
    @property
    def layers(self) -> list[int]:
        """Numbers of the layers with experts, ascending, as in the checkpoint."""
    @property
    def architecture(self) -> str:
        """Architecture of the model, such as ``qwen3_moe``."""
    @property
    def control_plane(self) -> str:
        """URL of the control plane."""
    @property
    def device(self) -> str:
        """Memory of the arrays that calls take: ``cpu``, or ``cuda:N``."""
    @property
    def epoch(self) -> int:
        """Version of the placement in force; 0 before the first."""
    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
    @property
    def last_report(self) -> Report | None:
        """Report of the call that ended last, on any thread. ``None`` before the first."""
    def wait_ready(self, timeout: float = 30.0) -> None:
        """Wait until the client is connected with a live replica of every expert.

        :param timeout: longest time to wait, in seconds.
        :raises NotReady: at the timeout, or at once if all replicas of an expert refuse this client. The text names
            an expert and what is known about its replicas.
        """
    def warm_up(self, tokens: int, *, calls: int = 1, dtype: str = "f32", timeout: float = 30.0) -> None:
        """Prepare for ``calls`` calls at a time with up to ``tokens`` tokens each.

        The first real calls then find their connections, and allocate no memory in the client as long as no server
        fails. The method waits as :meth:`wait_ready`, connects ``calls`` lanes with all servers, and grows their
        buffers. Each lane then carries calls with all experts of the first layer, as many as a slot has frames, with
        tokens of zeros. The metrics count these calls.

        Call it on the thread that makes the calls, because the buffers for conversions belong to a thread. On a GPU it
        waits only: staging memory for conversions grows in the first calls.

        :param tokens: most tokens of a later call.
        :param calls: most later calls that are outstanding at a time, at most ``max_lanes``.
        :param dtype: element type of later ``x``: ``f32``, ``bf16`` or ``f16``.
        :param timeout: longest time in seconds until every expert has a live replica.

        :raises ArgumentError: an argument is out of range.
        :raises NotReady: at the timeout, or at once if all replicas of an expert refuse this client.
        :raises ClosedError: the client is closed.
        """
    def replicas(self, layer: int, expert: int) -> list[str]:
        """Return the names of the servers that hold an expert. Empty if there is no such layer or expert."""
    def forward(
        self,
        layer: int,
        x: _ArrayT,
        topk_idx: Array,
        topk_weights: Array,
        *,
        out: _ArrayT | None = None,
        report: Report | None = None,
        traceparent: str | None = None,
    ) -> _ArrayT:
        """Return the weighted sums of the experts' answers, ``[tokens, hidden]``, of the type of ``x``.

        The call blocks until every answer is there, and meanwhile lets other Python threads run. It resends tokens of
        failed servers to replicas. An expert without a live replica ends it after the client's ``timeout``. A signal
        whose handler raises, such as that of Ctrl-C, ends it as well.

        On a GPU the call works on the current stream of the library of ``x``, behind the stream's earlier work. The
        result is complete when it returns. The wait for a replica is not ended by a signal there.

        :param layer: number of the layer, as in the checkpoint.
        :param x: ``[tokens, hidden]`` of float32, bfloat16 or float16, in C order in the memory of the client's
            ``device``. It must not be written during the call.
        :param topk_idx: ``[tokens, k]`` of int32 or int64: experts of each token. -1 masks an entry.
        :param topk_weights: ``[tokens, k]`` of float32, bfloat16 or float16: their weights.
        :param out: array for the result, of shape and type of ``x``. Default: a new one.
        :param report: report to fill in.
        :param traceparent: trace that the call belongs to, as W3C Trace Context writes it. Default: the current span of
            the package ``opentelemetry``, if it is installed. Counts only with ``otlp_endpoint``.

        :raises ArgumentError: an argument cannot be used. Nothing was sent.
        :raises NoReplicaError: no live server holds an expert.
        :raises BusyError: all lanes are in use.
        :raises RefusedError: a server refuses the request.
        :raises ClosedError: the client is closed.
        :raises ForkedError: the client belongs to the parent process.
        """
    def dispatch(
        self, layer: int, x: _ArrayT, topk_idx: Array, topk_weights: Array, *, traceparent: str | None = None
    ) -> Handle[_ArrayT]:
        """Send the tokens of a layer and return without waiting for answers. Arguments as for :meth:`forward`.

        ``x`` stays alive, and must not be written, until the handle is combined or deleted. Each outstanding handle
        takes a lane. Deleting a handle abandons its call.

        On a GPU this holds for ``topk_idx`` and ``topk_weights`` as well, and the current stream must live as long as
        the handle. At most ``slot_frames`` handles can be outstanding. They are combined in the order of their
        dispatch, and :meth:`forward` needs all of them to be combined.
        """
    def combine(self, handle: Handle[_ArrayT], *, out: _ArrayT | None = None, report: Report | None = None) -> _ArrayT:
        """Wait for the answers to ``handle`` and return their weighted sums. Blocks and raises as :meth:`forward`."""
    def _begin_combine(self, handle: Handle[_ArrayT], *, out: _ArrayT | None = None) -> None: ...
    def _end_combine(self, handle: Handle[_ArrayT], *, report: Report | None = None) -> _ArrayT: ...
    def metrics_text(self) -> str:
        """Return the client's metrics in the text format of Prometheus."""
    def stats(self) -> dict[str, int]:
        """Return counters of arrays that calls had to convert in a copy.

        The keys are ``x_copies``, ``topk_idx_copies``, ``topk_weights_copies`` and ``out_copies``.
        """
    def close(self) -> None:
        """End the connections. Calls in progress go on.

        Blocks for 2 s at most, and with traces for 3 s more, until the collector has the last spans.
        """

@final
class Handle(Generic[_ArrayT]):
    """A dispatched layer, to be passed to :meth:`Client.combine` once."""

    @property
    def layer(self) -> int:
        """Number of the layer."""
    @property
    def num_tokens(self) -> int:
        """Tokens of the call."""
    @property
    def done(self) -> bool:
        """Whether the handle was combined."""

@final
class Report:
    """Times and counts of one call. Times are in microseconds."""

    def __new__(cls) -> Self: ...
    @property
    def dispatch_us(self) -> float:
        """Choosing replicas, and writing and publishing frames."""
    @property
    def wait_us(self) -> float:
        """Waiting for answers, resends included."""
    @property
    def combine_us(self) -> float:
        """Reading answers and summing them."""
    @property
    def total_us(self) -> float:
        """Sum of dispatch, wait and combine."""
    @property
    def server_queue_us(self) -> float:
        """Longest time that an answered frame waited in its server's queue."""
    @property
    def server_compute_us(self) -> float:
        """Longest time that a server computed an answered frame."""
    @property
    def stall_us(self) -> float:
        """Time lost to failures, from a failed server's last sign of life until its tokens were resent."""
    @property
    def frames(self) -> int:
        """Frames published."""
    @property
    def servers(self) -> list[ServerReport]:
        """Servers contacted, in the order of their first frames."""
    @property
    def failovers(self) -> int:
        """Connections that failed with tokens unanswered."""
    @property
    def hedges(self) -> int:
        """Frames sent to another replica because an answer was late."""

    @property
    def resends(self) -> int:
        """(token, expert) pairs resent."""
    @property
    def missing(self) -> int:
        """(token, expert) pairs left out for want of a live replica."""

@final
class ServerReport:
    """The part of one server in a call. Times are in microseconds."""

    @property
    def name(self) -> str:
        """Name of the server. A server that restarted during the call has two parts."""
    @property
    def frames(self) -> int:
        """Frames published to it."""
    @property
    def pairs(self) -> int:
        """(token, expert) pairs that it answered."""
    @property
    def resends(self) -> int:
        """(token, expert) pairs that were resent, because it failed or refused."""
    @property
    def failovers(self) -> int:
        """Connections to it that failed with tokens unanswered."""
    @property
    def wait_us(self) -> float:
        """Longest time from publishing a frame until its answer was read. :meth:`Client.combine` reads answers."""
    @property
    def queue_us(self) -> float:
        """Longest time that an answered frame waited in the server's queue."""
    @property
    def compute_us(self) -> float:
        """Longest time that the server computed an answered frame."""

_P2pIdentity = tuple[str, int, int | None, str | None, int]
"""IP address, port, GPU, its PCI address, and the engine's number."""

@final
class P2pEndpoint:
    """The engine behind `switchyard_moe.p2p.Endpoint`. Times are in seconds, sizes in bytes; every wait is bounded."""

    def __new__(
        cls,
        *,
        gpu_index: int | None,
        pci_bdf: str | None,
        bind: str,
        port: int,
        advertise: str | None,
        transports: list[str] | None,
        ticket: str | None,
        eager_bytes: int,
        max_transfers: int,
    ) -> Self: ...
    def metadata(self) -> bytes: ...
    @staticmethod
    def parse_metadata(metadata: bytes) -> _P2pIdentity: ...
    def connect(self, ip: str, port: int, timeout: float) -> int: ...
    def add_remote_endpoint(self, metadata: bytes, timeout: float) -> int: ...
    def accept(self, timeout: float) -> int: ...
    def start_passive_accept(self) -> None: ...
    def connections(self) -> list[int]: ...
    def connection(self, conn_id: int) -> tuple[_P2pIdentity, str, str | None]: ...
    def remove_connection(self, conn_id: int) -> bool: ...
    def register(self, ptr: int, size: int, access: str) -> int: ...
    def deregister(self, mr_id: int) -> bool: ...
    def region(self, mr_id: int) -> tuple[int, int]: ...
    def find_region(self, ptr: int, size: int, access: str) -> int | None: ...
    def advertise(self, conn_id: int, mr_id: int, ptr: int, size: int) -> bytes: ...
    def run(
        self, op: str, conn_id: int, mr_id: int, ptr: int, size: int, meta: bytes | None, timeout: float
    ) -> int: ...
    def start(
        self, op: str, conn_id: int, mr_id: int, ptr: int, size: int, meta: bytes | None, timeout: float
    ) -> int: ...
    def startv(
        self, op: str, conn_id: int, ranges: list[tuple[int, int, int]], metas: list[bytes], timeout: float
    ) -> int: ...
    def start_unregistered(
        self, op: str, conn_id: int, ranges: list[tuple[int, int]], metas: list[bytes], timeout: float
    ) -> int: ...
    def start_notify(self, conn_id: int, content: bytes, timeout: float) -> int: ...
    def take_notifications(self) -> list[tuple[int, bytes]]: ...
    def poll(self, transfer_id: int) -> int | None: ...
    def wait(self, transfer_id: int, timeout: float) -> int | None: ...
    def counts(self) -> tuple[int, int, int]: ...
    def is_open(self) -> bool: ...
    def close(self) -> bool: ...

def p2p_compress_bound(dtype: str, size: int) -> int: ...
def p2p_compress(dtype: str, src: int, size: int, dst: int, capacity: int) -> int: ...
def p2p_decompressed_size(dtype: str, src: int, size: int) -> int: ...
def p2p_decompress(dtype: str, src: int, size: int, dst: int, capacity: int) -> int: ...
