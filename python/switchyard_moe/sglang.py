"""Experts of SGLang models as a service: ``SGLANG_PLUGINS=switchyard``.

SGLang finds this module by its entry point ``sglang.srt.plugins`` and calls `register` in every process. The plugin
acts only if ``SGLANG_PLUGINS`` names it. SGLang itself ignores a plugin that is not installed; ``python -m
switchyard_moe.sglang`` in place of ``python -m sglang.launch_server`` sets the variable and fails in that case.

Settings come from the environment, see `docs/reference/engines.md`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

from switchyard_moe import ConfigError, Error
from switchyard_moe import _engine as engine

__all__ = ["NAME", "SUPPORTED", "main", "register"]

#: Name of the plugin in ``SGLANG_PLUGINS``.
NAME = "switchyard"
#: Versions of SGLang, as pairs of a first version and the first one beyond.
SUPPORTED = (("0.5.23", "0.5.24"),)

_TARGET = "sglang.srt.layers.moe.fused_moe_triton.layer.FusedMoE.__init__"
_VARIABLE = "SGLANG_PLUGINS"
_service: engine.Service | None = None
_places: dict[str, engine.Place] = {}


def register() -> None:
    """Registers the hook on SGLang's layer of experts. Does nothing unless ``SGLANG_PLUGINS`` names the plugin.

    SGLang only logs an exception of a plugin and goes on with experts of its own. An unsupported version therefore
    ends the process.
    """
    if NAME not in _named_plugins():
        return
    try:
        import sglang
        from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE  # noqa: F401
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        engine.check_version("SGLang", sglang.__version__, SUPPORTED)
    except (ImportError, Error) as error:
        sys.exit(f"{_VARIABLE}={NAME}: {error}")
    HookRegistry.register(_TARGET, _before_init, HookType.BEFORE)


def main() -> None:
    """Runs ``sglang.launch_server`` with this plugin."""
    import runpy

    names = _named_plugins()
    if NAME not in names:
        os.environ[_VARIABLE] = ",".join([*names, NAME])
    # SGLang starts its workers by `spawn`, which imports the main module again under another name.
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)


def _named_plugins() -> list[str]:
    return [name.strip() for name in os.environ.get(_VARIABLE, "").split(",") if name.strip()]


def _before_init(layer: Any, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Gives the layer our method, an argument of its constructor, and checks what the layer is asked to do."""
    kwargs["quant_method"] = _method(kwargs)
    return (layer, *args), kwargs


def _method(arguments: dict[str, Any]) -> Any:
    import torch
    from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput
    from sglang.srt.layers.moe.utils import get_moe_a2a_backend
    from sglang.srt.layers.quantization.base_config import FusedMoEMethodBase

    if not get_moe_a2a_backend().is_none():
        raise ConfigError("--moe-a2a-backend is set, expected none: no expert is in this engine")
    if arguments.get("num_fused_shared_experts"):
        raise ConfigError(
            "shared experts are fused into the routed ones, which the servers do not hold: "
            "give --disable-shared-experts-fusion"
        )

    class SwitchyardMethod(FusedMoEMethodBase):  # type: ignore[misc]
        """Sends a layer's tokens to the service. The layer has no parameters."""

        # Otherwise the runner would have to scale the output.
        fuse_routed_scaling_factor_in_topk = True

        def create_weights(self, layer: Any, *_: Any, **__: Any) -> None:
            _check_parallel(layer)
            service = _connect()
            path = layer.layer_name or f"layers.{layer.layer_id}.experts"
            place = service.place(path, hidden=layer.hidden_size, num_experts=layer.num_experts)
            if place.layer != layer.layer_id:
                raise ConfigError(f"{path} has the layer id {layer.layer_id}, expected the number in its name")
            _places[path] = place
            engine.refuse_collisions("SGLang", "this model", _places)
            self.place = place

        def create_moe_runner(self, layer: Any, moe_runner_config: Any) -> None:
            pass

        def process_weights_after_loading(self, layer: Any) -> None:
            pass

        def apply(self, layer: Any, dispatch_output: Any) -> Any:
            x, topk = dispatch_output.hidden_states, dispatch_output.topk_output
            weights = topk.topk_weights
            if layer.moe_runner_config.apply_router_weight_on_input:
                x, weights = x * weights.to(x.dtype), torch.ones_like(weights)
            rank, size, rows = layer.moe_tp_rank, layer.moe_tp_size, x.shape[0]
            service = _connect()
            if size == 1:
                return StandardCombineInput(service.experts(self.place, x, topk.topk_ids, weights))
            # Every rank has all tokens, and SGLang adds up the outputs of all ranks.
            first, end = rows * rank // size, rows * (rank + 1) // size
            out = torch.zeros_like(x)
            out[first:end] = service.experts(self.place, x[first:end], topk.topk_ids[first:end], weights[first:end])
            return StandardCombineInput(out)

    return SwitchyardMethod()


def _connect() -> engine.Service:
    """Returns the engine's service. The first call checks the engine's device and waits for the service."""
    global _service
    if _service is None:
        from sglang.srt.runtime_context import get_device, get_server_args

        # Unlike the argument, it is known if SGLang chose the device itself.
        engine.refuse_gpu("SGLang", str(get_device().device))
        args = get_server_args()
        folder = engine.checkpoint_folder(args.model_path, getattr(args, "revision", None))
        _warn_of_tied_embeddings(folder)
        settings = engine.Settings.load({})
        if settings.model is None:
            settings = dataclasses.replace(settings, model=folder)
        _service = engine.Service(settings, "SGLang")
    _service.client()
    return _service


def _check_parallel(layer: Any) -> None:
    if layer.moe_ep_size > 1:
        raise ConfigError(f"--ep-size is {layer.moe_ep_size}, expected 1: no expert is in this engine")


def _warn_of_tied_embeddings(folder: str | None) -> None:
    if folder is None:
        return
    config = json.loads((Path(folder) / "config.json").read_text())
    if config.get("tie_word_embeddings") and config.get("model_type") == "qwen3_moe":
        engine.log.warning(
            "SGLang ignores tie_word_embeddings of qwen3_moe, with or without this plugin, and answers with token 0: "
            "write lm_head.weight into the checkpoint and set tie_word_embeddings to false"
        )


if __name__ == "__main__":
    main()
