"""Connector for vLLM's afd-plugin: the FFN side of attention-FFN disaggregation is the expert service.

The plugin has no release on PyPI; this module follows the interface of its repository, ``AFDConnectorBase`` and
``AFDConnectorFactory`` of September 2026. `register` makes the connector known under the name ``switchyard``::

    import switchyard_moe.afd
    switchyard_moe.afd.register()

Only the attention side runs: no FFN worker is started. The plugin must compute the router on the attention side and
pass ``topk_ids`` and ``topk_weights`` with the hidden states. Shared experts stay with the caller.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from afd_plugin.connectors.base import AFDConnectorBase, ConnectorExtraInfo

from switchyard_moe import ArgumentError, ClosedError, ConfigError, Error
from switchyard_moe import _engine as engine

__all__ = ["NAME", "SwitchyardAFDConnector", "SwitchyardExtraInfo", "register"]

#: Name of the connector in the plugin's configuration.
NAME = "switchyard"


def register() -> None:
    """Registers the connector with the plugin's factory. May run several times."""
    from afd_plugin.connectors.factory import AFDConnectorFactory

    AFDConnectorFactory.register_connector(NAME, __name__, SwitchyardAFDConnector.__name__, replace=True)


@dataclasses.dataclass(frozen=True)
class SwitchyardExtraInfo(ConnectorExtraInfo):
    """Settings of the service, from the connector's extra configuration and the environment."""

    settings: engine.Settings

    @classmethod
    def from_mapping(cls, raw: Mapping[str, Any] | None) -> SwitchyardExtraInfo:
        return cls(engine.Settings.load(raw or {}))

    def to_mapping(self) -> dict[str, Any]:
        # Without the token: the plugin prints its configuration.
        return {key: value for key, value in dataclasses.asdict(self.settings).items() if key != "token"}


class SwitchyardAFDConnector(AFDConnectorBase):
    """Sends the tokens of a stage to the expert servers and takes their outputs, with stages overlapping."""

    extra_info: SwitchyardExtraInfo

    @classmethod
    def parse_extra_config(cls, raw: Mapping[str, Any] | None) -> SwitchyardExtraInfo:
        return SwitchyardExtraInfo.from_mapping(raw)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        role = getattr(self.afd_config, "role", "attention")
        if str(role) != "attention":
            raise ConfigError(f"the AFD role is {role!r}, expected 'attention': expert servers take the place of FFN")
        self._service: engine.Service | None = None
        # Arguments and handle of the call that each stage waits for.
        self._calls: dict[int, tuple[tuple[Any, ...], Any]] = {}

    @property
    def is_initialized(self) -> bool:
        return self._service is not None

    def init_afd_connector(self) -> None:
        """Connects, and blocks up to ``ready_timeout`` until every expert has a replica."""
        settings = self.extra_info.settings
        if settings.model is None:
            model = self.vllm_config.model_config
            folder = engine.checkpoint_folder(model.model, getattr(model, "revision", None))
            settings = dataclasses.replace(settings, model=folder)
        service = engine.Service(settings, "afd-plugin")
        service.connect()
        self._service = service

    def close(self) -> None:
        """Drops outstanding calls and disconnects."""
        service, self._service = self._service, None
        self._calls.clear()
        if service is not None:
            service.client().close()

    def send_attn_output(self, hidden_states: Any, context: Any, **kwargs: Any) -> None:
        """Dispatches ``hidden_states`` ``[tokens, hidden]`` of a layer. Does not wait for the outputs.

        ``topk_ids`` and ``topk_weights`` are ``[tokens, k]``. The tensors must stay unchanged until
        `recv_ffn_output` of the same stage returns.
        """
        client = self._connected().client()
        metadata = context.metadata
        ids, weights = kwargs.get("topk_ids"), kwargs.get("topk_weights")
        if ids is None or weights is None:
            raise ArgumentError(
                f"layer {metadata.layer_idx}: topk_ids and topk_weights are missing: let the attention side compute "
                "the router (compute_gate_on_attention)"
            )
        if hidden_states.shape[0] != metadata.total_tokens:
            raise ArgumentError(
                f"layer {metadata.layer_idx}: hidden_states has {hidden_states.shape[0]} rows, "
                f"expected {metadata.total_tokens}"
            )
        if not hidden_states.is_cpu:
            engine.refuse_gpu("afd-plugin", str(hidden_states.device))
        stage = metadata.stage_idx
        if stage in self._calls:
            raise ArgumentError(f"stage {stage} has a call outstanding: receive its output first")
        arguments = (metadata.layer_idx, hidden_states.contiguous(), ids.contiguous(), weights.contiguous())
        try:
            handle = client.dispatch(*arguments)
        except engine.LASTING:
            raise
        except Error:
            handle = None
        self._calls[stage] = (arguments, handle)

    def recv_ffn_output(self, ref_tensor: Any, ubatch_idx: int = 0, **_: Any) -> Any:
        """Writes the experts' weighted sum of a stage into ``ref_tensor`` and returns it. Waits for the servers."""
        service = self._connected()
        if ubatch_idx not in self._calls:
            raise ArgumentError(f"stage {ubatch_idx} has no call outstanding: send its hidden states first")
        arguments, handle = self._calls.pop(ubatch_idx)
        if handle is not None:
            try:
                return service.client().combine(handle, out=ref_tensor)
            except engine.LASTING:
                raise
            except Error as error:
                engine.log.warning("afd-plugin: a call is repeated: %s", error)
        # Waits for a replica.
        ref_tensor.copy_(service.experts(engine.Place(arguments[0]), *arguments[1:]))
        return ref_tensor

    def recv_attn_output(self, ubatch_idx: int = 0, **_: Any) -> Any:
        raise ConfigError("the switchyard connector has no FFN worker: start the attention side only")

    def send_ffn_output(self, ffn_output: Any, context: Any, **_: Any) -> None:
        raise ConfigError("the switchyard connector has no FFN worker: start the attention side only")

    def _connected(self) -> engine.Service:
        if self._service is None:
            raise ClosedError("the connector is not connected: call init_afd_connector first")
        return self._service
