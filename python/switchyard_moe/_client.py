"""The client of the expert service."""

from __future__ import annotations

import asyncio
import contextvars
import os
import warnings
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, TypeVar

from switchyard_moe import _native
from switchyard_moe._arrays import Array
from switchyard_moe._errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from typing_extensions import Self, Unpack

    from switchyard_moe._native import Handle, Report

__all__ = ["Client", "Settings"]

ArrayT = TypeVar("ArrayT", bound=Array)
ResultT = TypeVar("ResultT")


class Settings(TypedDict, total=False):
    """Settings of a client by name: see :class:`Client`."""

    device: str
    wire_dtype: str | None
    response_dtype: str | None
    transports: str
    max_lanes: int
    timeout: float
    deadline: float
    work_limit: float
    on_missing: str
    name: str | None
    slot_bytes: int | None
    slot_frames: int | None
    hedge_budget: float
    insecure: bool
    otlp_endpoint: str | None
    trace_sample_ratio: float


class Client(_native.Client):
    """A client of the expert service.

    It asks the control plane which servers hold which experts, connects with them in the background, and sends the
    tokens of failed servers to replicas. Threads may share a client. After a fork, the child makes one of its own.

    Arrays are anything with ``__dlpack__``, in C order: numpy, torch, cupy, jax and others. With ``device="cpu"`` they
    are in host memory. float32 is read and written in place. bfloat16 and float16 are converted in a copy, which
    :meth:`stats` counts.

    With ``device="cuda:N"`` they are in the memory of that GPU, and all servers must be on GPUs that it reaches. Calls
    work on the current stream of the library of ``x``. bfloat16 is read and written in place, as are indices of int32
    and weights of float32. Other types are converted in a copy on the GPU: tokens and answers travel as bfloat16.

    :param control_plane: URL of the control plane, ``https://HOST:PORT``, or ``http://`` on this host. Several control
        planes of one fleet: a list of URLs, or a text with commas between them; ``dns://HOST:PORT``, every address of a
        name; or ``k8s://NAMESPACE/SERVICE[:PORT]``, every ready endpoint of a Service of Kubernetes. Default:
        ``SWITCHYARD_CONTROL_PLANE``.
    :param token: secret of the cluster. Default: ``SWITCHYARD_TOKEN``.
    :param token_file: file with the token, if no token is given. The client reads it again when the control plane
        refuses the token, so a rotation needs no new client. Default: ``SWITCHYARD_TOKEN_FILE``.
    :param tls: folder with ``ca.pem``, and with ``cert.pem`` and ``key.pem`` if the client has a certificate, as
        ``switchyard certs issue`` writes it. Changed files come into force by themselves. Default: ``SWITCHYARD_TLS``.
    :param insecure: sends the token to other hosts without TLS, too. Default: ``SWITCHYARD_INSECURE``.
    :param model: folder of the model's checkpoint. The servers must serve this model. Without experts in the folder,
        only sizes are compared, otherwise a sample of all experts. Default: the model that the servers serve.
    :param device: memory of the arrays, ``cpu`` or ``cuda:N``. A GPU is opened here, and so is its driver.
    :param wire_dtype: number format of tokens on their way to servers: ``f32``, ``bf16``, ``f16`` or ``fp8``. On a GPU
        ``bf16`` or ``fp8``, and the servers need the same. Default: ``f32``, on a GPU ``bf16``.
    :param response_dtype: number format of answers. Default: that of tokens, or ``bf16`` if that is ``fp8``. On a GPU
        ``bf16``.
    :param transports: ``auto``, or a list such as ``shm``.
    :param max_lanes: most calls that can be outstanding at a time, 1 to 1024. On a GPU it is ``slot_frames`` instead.
    :param timeout: longest time in seconds to reach the control plane; and to wait, in a call, for a live replica or
        for a lane.
    :param deadline: seconds after which a server without a sign of life counts as failed.
    :param work_limit: seconds after which a server that shows life, but takes and answers nothing, counts as failed.
    :param on_missing: ``fail``, or ``drop`` to leave out experts that no live server holds and to scale the others.
    :param name: name in the logs of servers. Default: ``client-PID``.
    :param slot_bytes: size of a slot. Clients and servers need the same. Default: the servers' default.
    :param slot_frames: frames per slot. Clients and servers need the same. Default: the servers' default.
    :param hedge_budget: most frames, per frame, that are sent to another replica because an answer is late. 0 turns
        that off.
    :param otlp_endpoint: URL of a collector of OpenTelemetry, such as ``http://127.0.0.1:4318``, which gets spans of
        sampled calls by OTLP over HTTP. An empty text turns traces off. Default: ``SWITCHYARD_OTLP_ENDPOINT``, or else
        ``OTEL_EXPORTER_OTLP_ENDPOINT``; without any there are no traces.
    :param trace_sample_ratio: share of the calls to trace, 0 to 1. Give servers the same. Calls in a sampled trace of
        the caller are recorded in that trace besides. Default: ``SWITCHYARD_TRACE_SAMPLE_RATIO``, or else 0.001.

    :raises ConfigError: a setting is malformed, or the GPU cannot be used: this build has no kernels, the host has no
        driver, or there is no such GPU.
    :raises ControlPlaneError: the control plane cannot be reached within ``timeout``, or refuses the token.
    :raises NotReady: no expert server registered within ``timeout``.
    :raises ModelMismatchError: the servers serve another model than ``model``.
    """

    def __new__(
        cls,
        control_plane: str | Sequence[str] | None = None,
        *,
        token: str | None = None,
        token_file: str | os.PathLike[str] | None = None,
        tls: str | os.PathLike[str] | None = None,
        model: str | os.PathLike[str] | None = None,
        **settings: Unpack[Settings],
    ) -> Self:
        if control_plane is None:
            control_plane = os.environ.get("SWITCHYARD_CONTROL_PLANE")
        if control_plane is None:
            raise ConfigError("no control plane given: pass control_plane, or set SWITCHYARD_CONTROL_PLANE to its URL")
        if not isinstance(control_plane, str):
            control_plane = ",".join(control_plane)
        if token is None:
            if token_file is None:
                token = os.environ.get("SWITCHYARD_TOKEN") or None
                token_file = os.environ.get("SWITCHYARD_TOKEN_FILE") or None
            if token is None and token_file is not None:
                # The process may change its folder before the file is read again.
                token_file = os.path.abspath(token_file)
                token = read_token(token_file)
            else:
                token_file = None
        else:
            token_file = None
        if tls is None:
            tls = os.environ.get("SWITCHYARD_TLS") or None
        settings.setdefault("insecure", _is_set("SWITCHYARD_INSECURE"))
        endpoint = settings.get("otlp_endpoint")
        if endpoint is None:
            endpoint = os.environ.get("SWITCHYARD_OTLP_ENDPOINT") or _standard_endpoint()
        settings["otlp_endpoint"] = endpoint or None
        settings.setdefault("trace_sample_ratio", _ratio("SWITCHYARD_TRACE_SAMPLE_RATIO", 0.001))
        return super().__new__(cls, control_plane, token=token, token_file=token_file, tls=tls, model=model, **settings)

    async def aforward(
        self,
        layer: int,
        x: ArrayT,
        topk_idx: Array,
        topk_weights: Array,
        *,
        out: ArrayT | None = None,
        report: Report | None = None,
        traceparent: str | None = None,
    ) -> ArrayT:
        """As :meth:`forward`, on a thread of the event loop's executor.

        On a GPU the kernels are launched here, on the current stream, and the thread only waits for them. Cancelling
        the task does not end the call: the arrays must stay unchanged until it has ended by itself.
        """
        if self.device != "cpu":
            handle = self.dispatch(layer, x, topk_idx, topk_weights, traceparent=traceparent)
            return await self.acombine(handle, out=out, report=report)
        call = partial(self.forward, layer, x, topk_idx, topk_weights, out=out, report=report, traceparent=traceparent)
        return await _in_thread(call)

    async def acombine(
        self, handle: Handle[ArrayT], *, out: ArrayT | None = None, report: Report | None = None
    ) -> ArrayT:
        """As :meth:`combine`, on a thread of the event loop's executor. Cancelling the task does not end the call."""
        if self.device != "cpu":
            # The current stream, and the order of launches, are those of this thread.
            self._begin_combine(handle, out=out)
            wait = partial(self._end_combine, handle, report=report)
            return await _in_thread(wait)
        return await _in_thread(partial(self.combine, handle, out=out, report=report))

    async def await_ready(self, timeout: float = 30.0) -> None:
        """As :meth:`wait_ready`, on a thread of the event loop's executor."""
        await _in_thread(partial(self.wait_ready, timeout))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else "open"
        return f"<switchyard_moe.Client of {self.control_plane}, {state}>"


def read_token(path: str | os.PathLike[str]) -> str:
    """Return the token in a file. Raises ConfigError if it cannot be read or is empty."""
    try:
        token = Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the token file {os.fspath(path)} cannot be read: {error}") from error
    if not token:
        raise ConfigError(f"the token file {os.fspath(path)} is empty: expected one line with the token")
    return token


async def _in_thread(call: Callable[[], ResultT]) -> ResultT:
    """Run ``call`` on a thread of the event loop's executor, with the context variables of the task."""
    context = contextvars.copy_context()
    return await asyncio.get_running_loop().run_in_executor(None, context.run, call)


def _standard_endpoint() -> str | None:
    """The standard variable's collector. The variable may be meant for other programs: a wrong value is a warning."""
    variable = "OTEL_EXPORTER_OTLP_ENDPOINT"
    endpoint = os.environ.get(variable)
    if endpoint and ("@" in endpoint or not endpoint.startswith(("http://", "https://"))):
        # A user name and a password stay out of the message.
        shown = endpoint.rpartition("@")[2]
        text = f"{variable} is {shown!r} and not used: expected a URL such as http://127.0.0.1:4318"
        warnings.warn(text, RuntimeWarning, stacklevel=3)
        return None
    return endpoint


def _ratio(variable: str, default: float) -> float:
    text = os.environ.get(variable)
    if not text:
        return default
    try:
        return float(text)
    except ValueError as error:
        raise ConfigError(f"{variable} is {text!r}, expected a number from 0 to 1") from error


def _is_set(variable: str) -> bool:
    """Whether a variable is set to something else than the words for no, as the binary reads it."""
    return os.environ.get(variable, "").lower() not in ("", "0", "n", "no", "f", "false", "off")
