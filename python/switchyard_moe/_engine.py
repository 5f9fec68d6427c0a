"""Settings, connection and checks that all engine plugins share."""

from __future__ import annotations

import dataclasses
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import switchyard_moe
from switchyard_moe import (
    ArgumentError,
    ClosedError,
    ConfigError,
    ControlPlaneUnavailableError,
    Error,
    ForkedError,
    ModelMismatchError,
    NoReplicaError,
    NotReady,
    RefusedError,
)
from switchyard_moe._client import read_token

log = logging.getLogger("switchyard_moe.engines")

#: Seconds between two messages about a service that is not ready.
MESSAGE_INTERVAL = 3.0
#: Set to 1, it turns the refusal of an engine version into a warning.
ANY_ENGINE = "SWITCHYARD_ANY_ENGINE_VERSION"

#: Failures of a call that every repetition would meet again.
LASTING = (ArgumentError, ClosedError, ConfigError, ForkedError, ModelMismatchError, RefusedError)
WIRE_DTYPES = ("f32", "bf16", "f16", "fp8")
_LAYER = re.compile(r"(?:^|\.)(?:layers|layer|blocks|h)\.(\d+)(?=\.|$)")

# Names of modules that share the experts of a layer: those of transformers, and those of vLLM.
_PARTS = (
    re.compile(r"(?:^|\.)text_(?:moe|experts)(?:\.|$)"),
    re.compile(r"(?:^|\.)vision_(?:moe|experts)(?:\.|$)"),
)
# The second model of `qwen3_omni_moe`, whose layers have the same numbers.
_UNSERVED = "talker"


@dataclasses.dataclass(frozen=True)
class Settings:
    """Connection of an engine to the expert service.

    A field without a value comes from the environment variable that the ``switchyard`` command reads as well.
    """

    control_plane: str = ""
    """URL of the control plane: ``SWITCHYARD_CONTROL_PLANE``."""
    token: str | None = dataclasses.field(default=None, repr=False)
    """Cluster token: ``SWITCHYARD_TOKEN``."""
    model: str | None = None
    """Checkpoint folder whose experts the servers must have: ``SWITCHYARD_MODEL``. None: the engine's folder."""
    wire_dtype: str | None = None
    """Type of rows on the wire, ``f32``, ``bf16``, ``f16`` or ``fp8``: ``SWITCHYARD_WIRE_DTYPE``. None: that of the
    client, ``f32``, or ``bf16`` on a GPU."""
    device: str = "cpu"
    """Memory that servers exchange rows with, ``cpu`` or ``cuda:N``: ``SWITCHYARD_ENGINE_DEVICE``. With ``cpu`` the
    servers are on processors, and tensors of an engine on a GPU are copied through host memory."""
    timeout: float = 3.0
    """Seconds that one attempt waits for the control plane or a replica: ``SWITCHYARD_ENGINE_TIMEOUT``.

    An attempt that fails is logged, as often as every few seconds, and repeated.
    """
    ready_timeout: float = 120.0
    """Seconds that the engine's start waits for a replica of every expert: ``SWITCHYARD_READY_TIMEOUT``."""
    outage_timeout: float = 60.0
    """Seconds that a call repeats attempts that fail: ``SWITCHYARD_OUTAGE_TIMEOUT``."""
    token_file: str | None = None
    """File with the token, if there is no token: ``SWITCHYARD_TOKEN_FILE``. It is read again when the control plane
    refuses the token."""

    @classmethod
    def load(cls, given: Mapping[str, Any], env: Mapping[str, str] | None = None) -> Settings:
        """Merges ``given`` over the environment.

        Raises ConfigError for an unknown key, a value out of range, a token file that cannot be read, and a missing
        control plane.
        """
        env = os.environ if env is None else env
        given = dict(given)
        names = {field.name for field in dataclasses.fields(cls)}
        if unknown := sorted(set(given) - names):
            raise ConfigError(
                f"setting {unknown[0]!r} of switchyard is unknown, expected one of {', '.join(sorted(names))}"
            )
        values: dict[str, Any] = {
            "control_plane": _pick(given, "control_plane", env, "SWITCHYARD_CONTROL_PLANE") or "",
            "model": _pick(given, "model", env, "SWITCHYARD_MODEL"),
            "wire_dtype": _pick(given, "wire_dtype", env, "SWITCHYARD_WIRE_DTYPE"),
            "device": _pick(given, "device", env, "SWITCHYARD_ENGINE_DEVICE") or cls.device,
        }
        values["token"], values["token_file"] = _token(given, env)
        for name, variable in (
            ("timeout", "SWITCHYARD_ENGINE_TIMEOUT"),
            ("ready_timeout", "SWITCHYARD_READY_TIMEOUT"),
            ("outage_timeout", "SWITCHYARD_OUTAGE_TIMEOUT"),
        ):
            values[name] = _seconds(name, _pick(given, name, env, variable), getattr(cls, name))
        if values["wire_dtype"] is not None and values["wire_dtype"] not in WIRE_DTYPES:
            raise ConfigError(f"wire_dtype is {values['wire_dtype']!r}, expected one of {', '.join(WIRE_DTYPES)}")
        if not re.fullmatch(r"cpu|cuda:\d+", str(values["device"])):
            raise ConfigError(f"device is {values['device']!r}, expected cpu or cuda:N, such as cuda:0")
        if not values["control_plane"]:
            raise ConfigError(
                "no control plane is set: give the plugin's setting control_plane, or set "
                "SWITCHYARD_CONTROL_PLANE to a URL such as http://127.0.0.1:7070"
            )
        if values["model"] is not None:
            values["model"] = os.fspath(values["model"])
        return cls(**values)


@dataclasses.dataclass(frozen=True)
class Place:
    """Experts of one module of an engine, as the servers number them."""

    layer: int
    first_expert: int = 0


class Service:
    """Experts of one model for one engine. Threads may share it.

    Each process connects on its first use, so an engine may create it before it forks its workers.
    """

    def __init__(self, settings: Settings, engine: str) -> None:
        self.settings = settings
        self.engine = engine
        self._client: Any = None
        self._pid = 0
        self._lock = threading.Lock()

    def client(self) -> Any:
        """Returns this process's client. The first call connects as `connect` does."""
        if self._pid == os.getpid():
            return self._client
        return self.connect()

    def connect(self) -> Any:
        """Connects and waits until every expert has a replica.

        Blocks up to ``ready_timeout`` and logs the reason every few seconds. Raises NotReady with the last reason
        after that time, and any other error of the connection at once.
        """
        with self._lock:
            if self._pid != os.getpid():
                self._client = _connect(self.settings, self.engine)
                self._pid = os.getpid()
            return self._client

    def place(self, path: str, *, hidden: int | None, num_experts: int | None) -> Place:
        """Returns where the servers have the experts of the module ``path``.

        Raises ModelMismatchError with both values if they have no such layer, or one of another size, and ConfigError
        if they never hold this module's experts.
        """
        client = self.client()
        refuse_unserved(self.engine, path)
        layer, layers = layer_number(path), list(client.layers)
        if layer not in layers:
            raise ModelMismatchError(
                f"{self.engine}: {path} is MoE layer {layer}, but the servers have the layers {_ranges(layers)}: "
                f"serve the checkpoint that the engine loads"
            )
        if hidden is not None and int(hidden) != int(client.hidden):
            raise ModelMismatchError(
                f"{self.engine}: {path} has a hidden size of {hidden}, but the servers' experts have {client.hidden}: "
                f"serve the checkpoint that the engine loads"
            )
        part, served = part_of_layer(path), int(client.num_experts)
        if num_experts is None or (part is None and int(num_experts) == served):
            return Place(layer, 0)
        if part is None:
            raise ModelMismatchError(
                f"{self.engine}: {path} has a number of experts of {num_experts}, but the servers' experts have "
                f"{served}: serve the checkpoint that the engine loads"
            )
        if int(num_experts) >= served:
            raise ModelMismatchError(
                f"{self.engine}: {path} has {num_experts} experts and is one of two modules of layer {layer}, but the "
                f"servers have {served} experts in this layer, expected those of both: this model cannot be served"
            )
        return Place(layer, 0 if part == 0 else served - int(num_experts))

    def experts(self, place: Place, x: Any, topk_idx: Any, topk_weights: Any) -> Any:
        """Returns the weighted sum of the experts' outputs, ``[tokens, hidden]`` in the dtype of ``x``.

        ``x`` is ``[tokens, hidden]``, ``topk_idx`` and ``topk_weights`` are ``[tokens, k]`` torch tensors on one
        device. If that is a GPU and the client's is the CPU, they go through host memory.
        The indices count from the first expert of ``place``.
        Dead servers are replaced inside the call. A failure that may pass is logged, and the call is repeated for up
        to ``outage_timeout``; then the last failure is raised, mostly NoReplicaError.
        """
        if x.shape[0] == 0:
            return x.new_empty(x.shape)
        client, layer = self.client(), place.layer
        device = x.device if x.is_cuda and self.settings.device == "cpu" else None
        if device is not None:
            x, topk_idx, topk_weights = x.cpu(), topk_idx.cpu(), topk_weights.cpu()
        if place.first_expert:
            topk_idx = topk_idx.where(topk_idx < 0, topk_idx + place.first_expert)
        x, topk_idx, topk_weights = x.contiguous(), topk_idx.contiguous(), topk_weights.contiguous()
        try:
            out = client.forward(layer, x, topk_idx, topk_weights)
        except LASTING:
            raise
        except Error as error:
            out = self._retry(error, lambda: client.forward(layer, x, topk_idx, topk_weights))
        return out if device is None else out.to(device)

    def _retry(self, error: Error, call: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + self.settings.outage_timeout
        said = -MESSAGE_INTERVAL
        while True:
            now = time.monotonic()
            if now >= deadline:
                raise error
            if now - said >= MESSAGE_INTERVAL:
                said = now
                log.warning("%s: a call is repeated for %.0f s more: %s", self.engine, deadline - now, error)
            time.sleep(0.05)
            try:
                return call()
            except LASTING:
                raise
            except Error as next_error:
                error = next_error


def check_version(engine: str, found: str, ranges: Iterable[tuple[str, str]]) -> None:
    """Refuses a version of ``engine`` outside of ``ranges``, pairs of a first version and the first one beyond.

    Raises ConfigError. The variable ``SWITCHYARD_ANY_ENGINE_VERSION=1`` turns it into a warning.
    """
    number = _version(found)
    ranges = list(ranges)
    if any(_version(low) <= number < _version(high) for low, high in ranges):
        return
    expected = " or ".join(f">={low},<{high}" for low, high in ranges)
    text = f"{engine} {found} is not supported by this version of switchyard-moe, expected {expected}"
    if os.environ.get(ANY_ENGINE) == "1":
        log.warning("%s; %s=1 lets it start", text, ANY_ENGINE)
        return
    raise ConfigError(f"{text}; {ANY_ENGINE}=1 lets it start untested")


def layer_number(path: str) -> int:
    """Returns the layer's number in a module path such as ``model.layers.3.mlp.experts``.

    Raises ConfigError if the path has none.
    """
    if found := _LAYER.findall(path):
        return int(found[-1])
    raise ConfigError(f"module {path!r} has no layer number, expected a path such as model.layers.3.mlp.experts")


def part_of_layer(path: str) -> int | None:
    """Returns 0 or 1 for the first and second of two modules that share the experts of a layer, else None.

    Checkpoints of ``ernie4_5_vl_moe`` number the experts for text first, and then those for images.
    """
    for part, names in enumerate(_PARTS):
        if names.search(path):
            return part
    return None


def is_unserved(path: str, kind: str) -> bool:
    """Returns whether a module is in a part of a model whose experts no server reads.

    ``kind`` is the module's class: such a part may be loaded alone, without its name in the path.
    """
    return _UNSERVED in f"{path} {kind}".lower()


def refuse_unserved(engine: str, path: str, kind: str = "") -> None:
    """Raises ConfigError for a module as `is_unserved` finds it."""
    if is_unserved(path, kind):
        raise ConfigError(
            f"{engine}: {path} is in the {_UNSERVED} of the model, and the servers hold the experts of its thinker "
            f"only: keep the experts of the {_UNSERVED} in the engine, or load the thinker alone"
        )


def refuse_collisions(engine: str, model: str, places: Mapping[str, Place]) -> None:
    """Raises ConfigError if two modules, by their paths, have the same experts of the servers."""
    paths: dict[Place, str] = {}
    for path, place in places.items():
        if place in paths:
            raise ConfigError(
                f"{engine}: layer {place.layer} has two modules of experts, {paths[place]} and {path}, and the servers "
                f"hold one set of experts in a layer: {model} cannot be served"
            )
        paths[place] = path


def checkpoint_folder(name: str | None, revision: str | None = None) -> str | None:
    """Returns the local folder of a checkpoint: a path as it is, or the cache entry of a name of the Hub.

    Returns None if there is none. Downloads nothing.
    """
    if not name:
        return None
    if (Path(name) / "config.json").is_file():
        return name
    try:
        from huggingface_hub import try_to_load_from_cache

        file = try_to_load_from_cache(name, "config.json", revision=revision)
    except (ImportError, ValueError):
        return None
    return os.path.dirname(file) if isinstance(file, str) else None


def refuse_gradients(engine: str, x: Any) -> None:
    """Raises ArgumentError if autograd would record the call: the service computes no gradients."""
    if x.requires_grad:
        import torch

        if torch.is_grad_enabled():
            raise ArgumentError(
                f"{engine}: hidden states require a gradient, and the service computes none: "
                "run the model under torch.no_grad() or torch.inference_mode()"
            )


def refuse_gpu(engine: str, device: str) -> None:
    """Raises ConfigError unless the device of the engine's tensors is a CPU."""
    if device.split(":")[0] != "cpu":
        raise ConfigError(
            f"{engine}: the model is on {device}, expected cpu: this plugin does not support tensors on GPUs yet"
        )


def _connect(settings: Settings, engine: str) -> Any:
    deadline = time.monotonic() + settings.ready_timeout
    said = time.monotonic()
    client = None
    while True:
        left = max(0.1, deadline - time.monotonic())
        try:
            if client is None:
                client = switchyard_moe.Client(
                    settings.control_plane,
                    token=settings.token,
                    token_file=settings.token_file,
                    model=settings.model,
                    device=settings.device,
                    wire_dtype=settings.wire_dtype,
                    # The client repeats what fails for this long, and says nothing meanwhile.
                    timeout=min(settings.timeout, left),
                )
            client.wait_ready(timeout=min(MESSAGE_INTERVAL, left))
            return client
        except (NotReady, NoReplicaError, ControlPlaneUnavailableError) as error:
            reason: Error = error
        now = time.monotonic()
        if now >= deadline:
            if client is not None:
                client.close()
            raise NotReady(
                f"{engine}: the expert service at {settings.control_plane} was not ready in "
                f"{settings.ready_timeout:.0f} s: {reason}"
            ) from reason
        if now - said >= MESSAGE_INTERVAL:
            said = now
            log.warning(
                "%s waits for the expert service at %s, %.0f s left: %s",
                engine,
                settings.control_plane,
                deadline - now,
                reason,
            )
        time.sleep(min(0.2, max(0.0, deadline - now)))


def _pick(given: Mapping[str, Any], name: str, env: Mapping[str, str], variable: str) -> Any:
    value = given.get(name)
    return value if value is not None else env.get(variable) or None


def _token(given: Mapping[str, Any], env: Mapping[str, str]) -> tuple[str | None, str | None]:
    """Returns the token, or else its file, which can be read."""
    if given.get("token") is not None:
        return str(given["token"]), None
    file = given.get("token_file")
    if file is None:
        if token := env.get("SWITCHYARD_TOKEN"):
            return token, None
        file = env.get("SWITCHYARD_TOKEN_FILE")
    if not file:
        return None, None
    read_token(file)
    return None, os.fspath(file)


def _seconds(name: str, value: Any, default: float) -> float:
    if value is None:
        return default
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = -1.0
    if not 0.0 < seconds < 86400.0:
        raise ConfigError(f"{name} is {value!r}, expected seconds between 0 and 86400")
    return seconds


def _version(text: str) -> tuple[int, ...]:
    numbers = re.match(r"\d+(?:\.\d+)*", text)
    found = [int(part) for part in numbers.group().split(".")] if numbers else []
    return tuple([*found, 0, 0, 0][:3])


def _ranges(layers: list[int]) -> str:
    if len(layers) > 2 and layers == list(range(layers[0], layers[-1] + 1)):
        return f"{layers[0]} to {layers[-1]}"
    return ", ".join(map(str, layers)) or "none"
