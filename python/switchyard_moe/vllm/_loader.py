"""The model loader: it reads no routed expert, and checks that none is computed in the engine."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.utils import get_model_architecture

from switchyard_moe import ConfigError
from switchyard_moe import _engine as engine
from switchyard_moe.vllm import NAME, _method, _service

# Tensors of routed experts. `shared_experts.` has no dot in front of `experts`; routers keep their biases.
_EXPERT = re.compile(r"(?:^|\.)experts\.(?!.*(?:correction_bias|router))")


class SwitchyardLoader(DefaultModelLoader):
    """``--load-format switchyard``: safetensors without the routed experts."""

    def __init__(self, load_config: Any) -> None:
        _service.check_version()
        load_config = copy.copy(load_config)
        load_config.load_format = "safetensors"
        super().__init__(load_config)

    def create_model(self, vllm_config: Any, model_config: Any, *args: Any, **kwargs: Any) -> Any:
        """Waits for the service, then builds the model without experts."""
        engine.refuse_gpu("vLLM", str(vllm_config.device_config.device_type))
        _service.service(_service.handle(vllm_config)).connect()
        # This imports the model's module, which may define a class of routed experts of its own.
        get_model_architecture(model_config)
        _method.replace_layer_classes()
        model = super().create_model(vllm_config, model_config, *args, **kwargs)
        _check_model(model)
        return model

    def _init_ep_weight_filter(self, model_config: Any) -> None:
        # No expert is local, so the reader skips all tensors that are named by expert.
        self.local_expert_ids: set[int] | None = set()

    def _get_weights_iterator(self, source: Any) -> Iterator[tuple[str, Any]]:
        # Fused tensors, scales and biases have names that the filter above does not know.
        for name, tensor in super()._get_weights_iterator(source):
            if not _EXPERT.search(name):
                yield name, tensor


def _check_model(model: Any) -> None:
    """Raises ConfigError if a layer keeps its experts, or if two layers are one to the service."""
    places: dict[str, engine.Place] = {}
    for name, module in model.named_modules():
        if not isinstance(module, RoutedExperts):
            continue
        method = module.quant_method
        if not isinstance(method, _method.SwitchyardMethod):
            raise ConfigError(
                f"{name} ({type(module).__name__}) computes its experts in this process by {type(method).__name__}: "
                "this model cannot be served"
            )
        places[name] = method.place
    engine.refuse_collisions("vLLM", type(model).__name__, places)
    if not places:
        raise ConfigError(f"{type(model).__name__} has no layer of routed experts: --load-format {NAME} serves nothing")
