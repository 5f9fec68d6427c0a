"""The service of each engine in this process, and the operator that calls it."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import torch

from switchyard_moe import ConfigError
from switchyard_moe import _engine as engine
from switchyard_moe.vllm import NAME, SUPPORTED

#: Polls of an OpenMP thread before it sleeps: about 0.1 ms, which covers the gaps between two operators.
SPINS = 5000

_services: list[engine.Service] = []


def check_version() -> None:
    """Raises ConfigError if this vLLM is not supported."""
    import vllm

    engine.check_version("vLLM", vllm.__version__, SUPPORTED)


def limit_spinning() -> None:
    """Lets the OpenMP threads of processes that this one starts sleep soon after they run out of work.

    By default they spin for milliseconds, and so take cores from expert servers of the same host during a call. A
    choice of the user is kept. Processes that run already keep theirs, because OpenMP reads it when it is loaded.
    """
    if not any(name in os.environ for name in ("GOMP_SPINCOUNT", "KMP_BLOCKTIME", "OMP_WAIT_POLICY")):
        os.environ["GOMP_SPINCOUNT"] = str(SPINS)


def is_on(vllm_config: Any) -> bool:
    """Returns whether this engine's experts are served."""
    return str(vllm_config.load_config.load_format) == NAME


def handle(vllm_config: Any) -> int:
    """Returns the number of the engine's service in this process. Does not connect."""
    given = vllm_config.additional_config
    given = given.get(NAME, {}) if isinstance(given, dict) else {}
    if not isinstance(given, dict):
        raise ConfigError(f"additional_config[{NAME!r}] is {given!r}, expected an object with settings")
    if "token" in given:
        raise ConfigError(
            f"additional_config[{NAME!r}] holds a token, and vLLM prints its configuration: "
            "use token_file, or the variable SWITCHYARD_TOKEN"
        )
    settings = engine.Settings.load(given)
    if settings.model is None:
        model = vllm_config.model_config
        settings = dataclasses.replace(settings, model=engine.checkpoint_folder(model.model, model.revision))
    for number, known in enumerate(_services):
        if known.settings == settings:
            return number
    _services.append(engine.Service(settings, "vLLM"))
    return len(_services) - 1


def service(number: int) -> engine.Service:
    """Returns the service that `handle` numbered."""
    return _services[number]


# vLLM's compiler traces into the layer on a CPU, so the call is one opaque operator. Its fake form gives the shape.
@torch.library.custom_op("switchyard::experts", mutates_args=())
def experts(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    service: int,
    layer: int,
    first_expert: int,
    rank: int,
    size: int,
) -> torch.Tensor:
    """Routed experts of a layer for ``x`` ``[tokens, hidden]``; ``topk_*`` are ``[tokens, k]``.

    With tensor parallelism every rank has all tokens, and vLLM adds up the outputs of all ranks. Rank ``rank`` of
    ``size`` therefore asks for its share of the rows only and leaves zeros in the others.
    """
    target, place = _services[service], engine.Place(layer, first_expert)
    if size == 1:
        out: torch.Tensor = target.experts(place, x, topk_ids, topk_weights)
        # An operator must not return one of its inputs.
        return out if out is not x else out.clone()
    rows = x.shape[0]
    first, end = rows * rank // size, rows * (rank + 1) // size
    share = torch.zeros_like(x)
    if end > first:
        share[first:end] = target.experts(place, x[first:end], topk_ids[first:end], topk_weights[first:end])
    return share


@experts.register_fake
def _fake(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    service: int,
    layer: int,
    first_expert: int,
    rank: int,
    size: int,
) -> torch.Tensor:
    return torch.empty_like(x)
