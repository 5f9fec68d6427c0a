"""The connector for afd-plugin, against its interface: the plugin itself has no release."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

import switchyard_moe


class ConnectorExtraInfo:
    pass


class AFDConnectorBase(ABC):
    """The abstract methods and the constructor of the plugin's class."""

    def __init__(self, rank: int, local_rank: int, vllm_config: Any, afd_config: Any, role_rank: int) -> None:
        self.rank, self.local_rank, self.role_rank = rank, local_rank, role_rank
        self.vllm_config, self.afd_config = vllm_config, afd_config
        self.extra_info = self.parse_extra_config(afd_config.extra)

    @classmethod
    @abstractmethod
    def parse_extra_config(cls, raw: Any) -> Any: ...
    @abstractmethod
    def close(self) -> None: ...
    @abstractmethod
    def init_afd_connector(self) -> None: ...
    @property
    @abstractmethod
    def is_initialized(self) -> bool: ...
    @abstractmethod
    def send_attn_output(self, hidden_states: Any, context: Any, **kwargs: Any) -> None: ...
    @abstractmethod
    def recv_ffn_output(self, ref_tensor: Any, ubatch_idx: int = 0, **kwargs: Any) -> Any: ...
    @abstractmethod
    def recv_attn_output(self, ubatch_idx: int = 0, **kwargs: Any) -> Any: ...
    @abstractmethod
    def send_ffn_output(self, ffn_output: Any, context: Any, **kwargs: Any) -> None: ...


class AFDConnectorFactory:
    known: ClassVar[dict[str, tuple[str, str]]] = {}

    @classmethod
    def register_connector(cls, name: str, module_path: str, class_name: str, *, replace: bool = False) -> None:
        assert replace or name not in cls.known
        cls.known[name] = (module_path, class_name)


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    contents = {
        "afd_plugin": {},
        "afd_plugin.connectors": {},
        "afd_plugin.connectors.base": {
            "AFDConnectorBase": AFDConnectorBase,
            "ConnectorExtraInfo": ConnectorExtraInfo,
        },
        "afd_plugin.connectors.factory": {"AFDConnectorFactory": AFDConnectorFactory},
    }
    for name, members in contents.items():
        module = ModuleType(name)
        module.__dict__.update(members)
        monkeypatch.setitem(sys.modules, name, module)
    yield
    monkeypatch.delitem(sys.modules, "switchyard_moe.afd", raising=False)


def context(layer: int, stage: int, rows: int) -> Any:
    return SimpleNamespace(metadata=SimpleNamespace(layer_idx=layer, stage_idx=stage, total_tokens=rows), states=None)


def test_two_stages_overlap(plugin: None, tiny_cluster: switchyard_moe.LocalCluster, tiny: Path) -> None:
    import switchyard_moe.afd as afd

    afd.register()
    afd.register()
    assert AFDConnectorFactory.known == {"switchyard": ("switchyard_moe.afd", "SwitchyardAFDConnector")}
    vllm_config = SimpleNamespace(model_config=SimpleNamespace(model=str(tiny), revision=None))
    extra = {"control_plane": tiny_cluster.url, "token": tiny_cluster.token}
    config = SimpleNamespace(role="attention", extra=extra)
    connector = afd.SwitchyardAFDConnector(0, 0, vllm_config, config, 0)
    assert "token" not in connector.extra_info.to_mapping()
    with pytest.raises(switchyard_moe.ClosedError):
        connector.recv_ffn_output(torch.empty(1, 256))
    connector.init_afd_connector()
    assert connector.is_initialized

    generator = torch.Generator().manual_seed(torch.seed() % 2**32)
    calls = []
    for stage, (layer, rows) in enumerate(((0, 5), (3, 2))):
        x = torch.randn(rows, 256, generator=generator)
        ids = torch.stack([torch.randperm(16, generator=generator)[:4] for _ in range(rows)])
        weights = torch.rand(rows, 4, generator=generator)
        connector.send_attn_output(x, context(layer, stage, rows), topk_ids=ids, topk_weights=weights)
        calls.append((layer, x, ids, weights))
    tiny_cluster.kill("server-0")
    with tiny_cluster.client() as client:
        for stage in (1, 0):
            layer, x, ids, weights = calls[stage]
            out = torch.full_like(x, float("nan"))
            assert connector.recv_ffn_output(out, stage) is out
            torch.testing.assert_close(out, client.forward(layer, x, ids, weights))

    with pytest.raises(switchyard_moe.ArgumentError, match="topk_ids and topk_weights are missing"):
        connector.send_attn_output(calls[0][1], context(0, 0, 5), router_logits=None)
    with pytest.raises(switchyard_moe.ArgumentError, match="has 5 rows, expected 6"):
        connector.send_attn_output(calls[0][1], context(0, 0, 6), topk_ids=calls[0][2], topk_weights=calls[0][3])
    with pytest.raises(switchyard_moe.ConfigError, match="no FFN worker"):
        connector.recv_attn_output()
    connector.close()
    assert not connector.is_initialized
    with pytest.raises(switchyard_moe.ConfigError, match="expected 'attention'"):
        afd.SwitchyardAFDConnector(0, 0, vllm_config, SimpleNamespace(role="ffn", extra=extra), 0)
