"""Experts of vLLM models as a service: ``--quantization switchyard --load-format switchyard``.

vLLM finds this package by its entry point ``vllm.general_plugins`` and calls `register` in every process. The load
format turns the service on: it reads no tensor of a routed expert, and every layer of routed experts calls the
servers. ``--quantization switchyard`` is the way for checkpoints that are not quantized. Leave it out where
quantization is taken, for example by fp8 attention; then the class of the layer is replaced. In both cases a vLLM
without this plugin refuses to start, since it knows neither value.

Settings come from ``--additional-config '{"switchyard": {…}}'`` and from the environment, see
`docs/reference/engines.md`.
"""

from __future__ import annotations

__all__ = ["NAME", "SUPPORTED", "register"]

#: Value of ``quantization`` and ``load_format``.
NAME = "switchyard"
#: Versions of vLLM, as pairs of a first version and the first one beyond.
SUPPORTED = (("0.32", "0.34"),)


def register() -> None:
    """Registers the quantization method and the model loader. May run several times in a process.

    Does not connect and does not judge vLLM's version: the loader and the quantization method do both at the start of
    an engine that uses them, so other engines are not affected.
    """
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, register_quantization_config
    from vllm.model_executor.model_loader import register_model_loader

    if NAME in QUANTIZATION_METHODS:
        return
    from switchyard_moe.vllm import _loader, _method

    register_quantization_config(NAME)(_method.SwitchyardConfig)
    register_model_loader(NAME)(_loader.SwitchyardLoader)
