"""The quantization method of routed experts, and the layer classes that use it."""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from switchyard_moe import ConfigError
from switchyard_moe.vllm import NAME, _service


class SwitchyardMethod(FusedMoEMethodBase):
    """Sends a layer's tokens to the service. The layer has no parameters."""

    # Nothing moves to a device after loading.
    requires_device_loading = False

    def __init__(self, moe: Any, layer_name: str) -> None:
        super().__init__(moe)
        _check_parallel(moe.moe_parallel_config)
        self.layer_name = layer_name
        self.handle = _service.handle(get_current_vllm_config())
        # `hidden_dim` is the width of the experts' input: the latent width where the model has one.
        self.place = _service.service(self.handle).place(
            layer_name, hidden=moe.hidden_dim, num_experts=moe.num_logical_experts
        )

    @property
    def topk_indices_dtype(self) -> torch.dtype:
        return torch.int32

    @property
    def skip_forward_padding(self) -> bool:
        return True

    def maybe_roundup_sizes(
        self, hidden_size: int, intermediate_size_per_partition: int, *_: Any, **__: Any
    ) -> tuple[int, int]:
        return hidden_size, intermediate_size_per_partition

    def create_weights(self, layer: Any, *_: Any, **__: Any) -> None:
        pass

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        return None

    def process_weights_after_loading(self, layer: Any) -> None:
        pass

    def apply(
        self,
        layer: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any = None,
        shared_experts_input: Any = None,
    ) -> torch.Tensor:
        if layer.apply_router_weight_on_input:
            if topk_weights.shape[1] != 1:
                raise ConfigError(
                    f"{self.layer_name} scales the experts' input by the routing weight and chooses "
                    f"{topk_weights.shape[1]} experts per token, expected 1"
                )
            x, topk_weights = x * topk_weights.to(x.dtype), torch.ones_like(topk_weights)
        out: torch.Tensor = torch.ops.switchyard.experts(
            x,
            topk_weights,
            topk_ids,
            self.handle,
            self.place.layer,
            self.place.first_expert,
            self.moe.tp_rank,
            self.moe.tp_size,
        )
        return out


class SwitchyardConfig(QuantizationConfig):
    """``--quantization switchyard``: routed experts are served, every other layer stays as it is."""

    def __init__(self) -> None:
        super().__init__()
        _service.check_version()
        # The first process of an engine makes this object before it starts the others.
        _service.limit_spinning()

    def get_name(self) -> Any:
        return NAME

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.float32, torch.bfloat16, torch.float16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> SwitchyardConfig:
        return cls()

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        if isinstance(layer, RoutedExperts):
            if not _service.is_on(get_current_vllm_config()):
                raise ConfigError(
                    f"--quantization {NAME} without --load-format {NAME}: vLLM would read the experts' weights; "
                    "give both options"
                )
            return SwitchyardMethod(layer.moe_config, layer.layer_name)
        return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None


class _Served:
    """Mixed into each class of routed experts. An engine with another load format keeps its experts."""

    def _get_quant_method(self, prefix: str, quant_config: Any, moe_config: Any) -> Any:
        if _service.is_on(get_current_vllm_config()):
            return SwitchyardMethod(moe_config, prefix)
        return super()._get_quant_method(prefix, quant_config, moe_config)  # type: ignore[misc]


def replace_layer_classes() -> None:
    """Registers a substitute for every known class of routed experts.

    vLLM looks substitutes up by the exact class name, so each subclass of a model needs one. Raises ConfigError if
    another plugin replaces one of them.
    """
    for base in _classes(RoutedExperts):
        known = op_registry_oot.get(base.__name__)
        if known is None:
            base.register_oot(type(f"Switchyard{base.__name__}", (_Served, base), {}))
        elif not issubclass(known, _Served):
            raise ConfigError(f"another plugin replaces vLLM's layer {base.__name__} by {known.__qualname__}")


def _classes(base: Any) -> list[Any]:
    children: list[Any] = [child for child in base.__subclasses__() if not issubclass(child, _Served)]
    return [base, *(found for child in children for found in _classes(child))]


def _check_parallel(parallel: Any) -> None:
    for what, size in (
        ("data_parallel_size", parallel.dp_size),
        ("prefill_context_parallel_size", getattr(parallel, "pcp_size", 1)),
    ):
        if size > 1:
            raise ConfigError(f"{what} is {size}, expected 1: start one engine per replica, they share the service")
    if parallel.use_ep:
        raise ConfigError("enable_expert_parallel is set, but no expert is in this engine: leave it out")
    if getattr(parallel, "enable_eplb", False):
        raise ConfigError("enable_eplb is set, but the control plane places the experts: leave it out")
