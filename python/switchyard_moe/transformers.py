"""Experts of Hugging Face transformers models as a service.

Importing this module registers the experts implementation ``switchyard``::

    import switchyard_moe.transformers
    from transformers import AutoModelForCausalLM

    switchyard_moe.transformers.configure(control_plane="http://127.0.0.1:7070")
    model = AutoModelForCausalLM.from_pretrained("…", experts_implementation="switchyard")

Weights of routed experts are neither allocated nor read. The router, shared experts and all scaling of routing
weights stay in the model. The import registers one hook on torch's module registration; it acts on models with this
implementation only.
"""

from __future__ import annotations

import dataclasses
import os
import threading
from typing import Any

import torch
import transformers
from torch.nn.modules.module import register_module_module_registration_hook
from transformers.integrations.finegrained_fp8 import FP8ExpertsInterface
from transformers.integrations.moe import ExpertsInterface

from switchyard_moe import ConfigError
from switchyard_moe import _engine as engine

__all__ = ["IMPLEMENTATION", "SUPPORTED", "configure"]

#: Value of ``experts_implementation``.
IMPLEMENTATION = "switchyard"
#: Versions of transformers, as pairs of a first version and the first one beyond.
SUPPORTED = (("5.17", "6"),)

_NAME = "transformers"
_given: dict[str, Any] = {}
_services: dict[engine.Settings, engine.Service] = {}
_lock = threading.Lock()


def configure(
    control_plane: str | None = None,
    *,
    token: str | None = None,
    token_file: str | os.PathLike[str] | None = None,
    model: str | os.PathLike[str] | None = None,
    wire_dtype: str | None = None,
    device: str | None = None,
    timeout: float | None = None,
    ready_timeout: float | None = None,
    outage_timeout: float | None = None,
) -> None:
    """Sets the service for models that are loaded from here on. Does not connect.

    An argument that is None falls back to the environment, as `docs/reference/engines.md` lists. ``model`` is the
    checkpoint folder whose experts the servers must have; by default it is the folder that ``from_pretrained`` loads.
    ``device`` is ``cuda:N`` for a model on that GPU with expert servers on GPUs. With ``cpu``, the default, the servers
    are on processors, and a model may be on either.
    Raises ConfigError if a value is out of range or no control plane is set.
    """
    given = {
        "control_plane": control_plane,
        "token": token,
        "token_file": token_file,
        "model": model,
        "wire_dtype": wire_dtype,
        "device": device,
        "timeout": timeout,
        "ready_timeout": ready_timeout,
        "outage_timeout": outage_timeout,
    }
    engine.Settings.load(given)
    with _lock:
        _given.clear()
        _given.update(given)


class _Binding:
    """The service and the layer of one experts module."""

    def __init__(self) -> None:
        self.path = ""
        self.place: engine.Place | None = None
        self.service: engine.Service | None = None

    def connect(self, module: torch.nn.Module, folder: str | None) -> engine.Service:
        settings = engine.Settings.load(_given)
        if settings.model is None:
            settings = dataclasses.replace(settings, model=folder)
        with _lock:
            service = _services.setdefault(settings, engine.Service(settings, _NAME))
        service.connect()
        self.place = service.place(
            self.path,
            hidden=_number(module, "hidden_dim", "hidden_size"),
            num_experts=_number(module, "num_experts"),
        )
        self.service = service
        return service


def _experts(
    module: Any, hidden_states: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, *_: Any, **__: Any
) -> torch.Tensor:
    """Implementation for `ExpertsInterface`: ``[tokens, hidden]``, ``[tokens, k]``, ``[tokens, k]``."""
    binding: _Binding | None = module.__dict__.get("_switchyard")
    if binding is None or not binding.path:
        raise ConfigError(
            f"{type(module).__name__} was built without experts_implementation={IMPLEMENTATION!r}: "
            "pass it to from_pretrained, since a loaded model keeps its weights"
        )
    if hidden_states.device.type not in ("cpu", "cuda"):
        engine.refuse_gpu(_NAME, str(hidden_states.device))
    service = binding.service or binding.connect(module, None)
    engine.refuse_gradients(_NAME, hidden_states)
    assert binding.place is not None
    out: torch.Tensor = service.experts(binding.place, hidden_states.detach(), topk_idx, topk_weights.detach())
    return out


def _is_wanted(module: Any) -> bool:
    return getattr(getattr(module, "config", None), "_experts_implementation", None) == IMPLEMENTATION


def _is_experts(module: Any) -> bool:
    # Every instance of a class that `use_experts_implementation` decorates has these attributes.
    return all(hasattr(module, name) for name in ("has_gate", "has_bias"))


def _on_registration(parent: torch.nn.Module, name: str, module: torch.nn.Module | None) -> None:
    """Runs when ``parent`` takes ``module`` in, so before any weight of it is loaded."""
    if module is None:
        return
    if _is_experts(module) and _is_wanted(module):
        _strip(parent, name, module)
    elif isinstance(parent, transformers.PreTrainedModel) and _is_wanted(parent):
        _adopt(parent, name, module)


def _strip(parent: torch.nn.Module, name: str, module: torch.nn.Module) -> None:
    # A parameter set to None keeps its name, so code that asks for it sees None, and no state is expected for it.
    for parameter in list(module._parameters):
        module._parameters[parameter] = None
    # Otherwise `_init_weights` looks for the parameters.
    module._is_hf_initialized = True  # type: ignore[assignment]
    if "_switchyard" in module.__dict__:
        return
    binding = _Binding()
    # A quantizer replaces the module after the model is complete.
    replaced = parent._modules.get(name)
    if replaced is not None and "_switchyard" in replaced.__dict__:
        binding = replaced.__dict__["_switchyard"]
    module.__dict__["_switchyard"] = binding


def _adopt(parent: transformers.PreTrainedModel, name: str, module: torch.nn.Module) -> None:
    found: list[tuple[_Binding, torch.nn.Module]] = []
    places: dict[str, engine.Place] = {}
    for path, child in module.named_modules(prefix=name):
        binding: _Binding | None = child.__dict__.get("_switchyard")
        if binding is None:
            _refuse_local(path, child)
            continue
        engine.refuse_unserved(_NAME, path, type(child).__name__)
        # Tells two modules of a layer apart. The real number of the first expert is known once there is a client.
        places[path] = engine.Place(engine.layer_number(path), engine.part_of_layer(path) or 0)
        binding.path = path
        found.append((binding, child))
    if not found:
        return
    engine.refuse_collisions(_NAME, type(parent).__name__, places)
    ignored = parent._keys_to_ignore_on_load_unexpected
    parent._keys_to_ignore_on_load_unexpected = {*(ignored or ()), r"(^|\.)experts\."}
    config = parent.config
    folder = engine.checkpoint_folder(getattr(config, "_name_or_path", None), getattr(config, "_commit_hash", None))
    if folder is not None or _given.get("model") or os.environ.get("SWITCHYARD_MODEL"):
        for binding, child in found:
            if binding.service is None:
                binding.connect(child, folder)


def _refuse_local(path: str, module: torch.nn.Module) -> None:
    """Raises ConfigError if ``module`` keeps routed experts that servers could hold, or has no hook for them."""
    if _is_experts(module) and not engine.is_unserved(path, type(module).__name__):
        raise ConfigError(
            f"{path} ({type(module).__name__}) would keep its experts in this process: name {IMPLEMENTATION!r} in "
            "experts_implementation for this part of the model, too"
        )
    if path.rsplit(".", 1)[-1] == "experts" and not _is_experts(module) and any(True for _ in module.parameters()):
        raise ConfigError(
            f"{path} ({type(module).__name__}) computes its experts without transformers' ExpertsInterface, "
            "so they would stay in this process: this model cannot be served"
        )


def _number(module: Any, *names: str) -> int | None:
    for name in names:
        value = getattr(module, name, None)
        if isinstance(value, int):
            return value
    return None


engine.check_version(_NAME, transformers.__version__, SUPPORTED)
ExpertsInterface.register(IMPLEMENTATION, _experts)
FP8ExpertsInterface.register(IMPLEMENTATION, _experts)
register_module_module_registration_hook(_on_registration)
