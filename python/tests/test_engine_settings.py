"""What the engines' plugins share, without an engine."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

import switchyard_moe
from switchyard_moe import _engine as engine

URL = "http://127.0.0.1:7070"


def test_settings_come_from_arguments_then_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("abc\n")
    env = {"SWITCHYARD_CONTROL_PLANE": URL, "SWITCHYARD_TOKEN_FILE": str(file), "SWITCHYARD_READY_TIMEOUT": "7"}
    found = engine.Settings.load({"wire_dtype": "bf16", "control_plane": None}, env)
    assert found == engine.Settings(URL, None, None, "bf16", ready_timeout=7.0, token_file=str(file))
    assert engine.Settings.load({"control_plane": "http://other:1"}, env).control_plane == "http://other:1"
    first = engine.Settings.load({}, {**env, "SWITCHYARD_TOKEN": "first"})
    assert (first.token, first.token_file) == ("first", None)
    assert "first" not in repr(first)
    assert engine.Settings.load({"control_plane": URL}, {}).device == "cpu"
    assert engine.Settings.load({"control_plane": URL}, {"SWITCHYARD_ENGINE_DEVICE": "cuda:1"}).device == "cuda:1"


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({}, "no control plane is set"),
        ({"control_plane": URL, "colour": 1}, "setting 'colour' of switchyard is unknown, expected one of"),
        ({"control_plane": URL, "timeout": "soon"}, "timeout is 'soon', expected seconds"),
        ({"control_plane": URL, "timeout": -1}, "timeout is -1, expected seconds"),
        ({"control_plane": URL, "timeout": float("nan")}, "timeout is nan, expected seconds"),
        ({"control_plane": URL, "wire_dtype": "f64"}, "wire_dtype is 'f64', expected"),
        ({"control_plane": URL, "device": "gpu"}, "device is 'gpu', expected cpu or cuda:N"),
        ({"control_plane": URL, "device": "cuda"}, "device is 'cuda', expected cpu or cuda:N"),
        ({"control_plane": URL, "token_file": "/does/not/exist"}, "/does/not/exist cannot be read"),
    ],
)
def test_settings_name_what_is_wrong(given: dict[str, Any], text: str) -> None:
    with pytest.raises(switchyard_moe.ConfigError, match=text):
        engine.Settings.load(given, {})


def test_engine_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ("0.32.0", "0.32.1rc1", "0.33.9+cpu"):
        engine.check_version("vLLM", version, [("0.32", "0.34")])
    for version in ("0.31.9", "0.34.0", "1.0", "dev"):
        with pytest.raises(switchyard_moe.ConfigError, match=r"is not supported .* expected >=0.32,<0.34"):
            engine.check_version("vLLM", version, [("0.32", "0.34")])
    monkeypatch.setenv(engine.ANY_ENGINE, "1")
    engine.check_version("vLLM", "0.34.0", [("0.32", "0.34")])


def test_layer_numbers() -> None:
    assert engine.layer_number("model.layers.3.mlp.experts") == 3
    assert engine.layer_number("thinker.layers.1.block.layers.12.experts") == 12
    assert engine.layer_number("transformer.blocks.7.ffn.experts") == 7
    with pytest.raises(switchyard_moe.ConfigError, match="no layer number"):
        engine.layer_number("model.experts")


def test_only_a_cpu_is_accepted() -> None:
    for device in ("cpu", "cpu:0"):
        engine.refuse_gpu("vLLM", device)
    for device in ("cuda", "cuda:1", "xpu", ""):
        with pytest.raises(switchyard_moe.ConfigError, match=f"vLLM: the model is on {device}, expected cpu"):
            engine.refuse_gpu("vLLM", device)


def test_a_service_that_is_not_there_ends_the_wait_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    settings = engine.Settings("http://127.0.0.1:9", ready_timeout=0.5, timeout=0.2)
    started = time.monotonic()
    with pytest.raises(switchyard_moe.NotReady, match=r"127\.0\.0\.1:9 was not ready in 0 s|was not ready") as error:
        engine.Service(settings, "test").connect()
    assert error.value.__cause__ is not None
    assert time.monotonic() - started >= 0.4


def test_a_wrong_token_ends_the_wait_at_once(cluster: switchyard_moe.LocalCluster) -> None:
    # A wait until the end of the time would raise NotReady.
    with pytest.raises(switchyard_moe.ControlPlaneError, match="token"):
        engine.Service(engine.Settings(cluster.url, "wrong", ready_timeout=20.0), "test").connect()


def test_a_layer_that_the_servers_do_not_have(cluster: switchyard_moe.LocalCluster) -> None:
    service = engine.Service(engine.Settings(cluster.url, cluster.token), "test")
    client = service.connect()
    try:
        found = service.place("layers.0.experts", hidden=client.hidden, num_experts=client.num_experts)
        assert found == engine.Place(0, 0)
        for layer, hidden, experts, text in (
            (99, None, None, "layers.99.experts is MoE layer 99, but the servers have"),
            (0, client.hidden + 1, None, "has a hidden size of"),
            (0, None, client.num_experts + 1, "has a number of experts of"),
        ):
            with pytest.raises(switchyard_moe.ModelMismatchError, match=text):
                service.place(f"layers.{layer}.experts", hidden=hidden, num_experts=experts)
    finally:
        client.close()


def test_two_modules_share_the_experts_of_a_layer(cluster: switchyard_moe.LocalCluster) -> None:
    service = engine.Service(engine.Settings(cluster.url, cluster.token), "test")
    client = service.connect()
    try:
        few = client.num_experts // 4
        for text, vision in (
            ("layers.1.mlp.text_moe.experts", "layers.1.mlp.vision_moe.experts"),
            ("layers.1.mlp.text_experts", "layers.1.mlp.vision_experts.routed_experts"),
        ):
            places = {
                path: service.place(path, hidden=client.hidden, num_experts=count)
                for path, count in ((text, client.num_experts - few), (vision, few))
            }
            assert list(places.values()) == [engine.Place(1, 0), engine.Place(1, client.num_experts - few)]
            engine.refuse_collisions("test", "model", places)
            with pytest.raises(switchyard_moe.ModelMismatchError, match=r"expected those of both: .* cannot be served"):
                service.place(vision, hidden=client.hidden, num_experts=client.num_experts)
    finally:
        client.close()


def test_modules_that_the_servers_cannot_tell_apart() -> None:
    places = {"encoder.layers.2.experts": engine.Place(2), "decoder.layers.2.experts": engine.Place(2)}
    with pytest.raises(
        switchyard_moe.ConfigError, match=r"layer 2 has two modules of experts, encoder\.layers.* and decoder\.layers"
    ):
        engine.refuse_collisions("test", "model", places)
    for path, kind in (("talker.model.layers.0.experts", "Experts"), ("layers.0.experts", "OmniTalkerExperts")):
        with pytest.raises(switchyard_moe.ConfigError, match="experts of its thinker only"):
            engine.refuse_unserved("test", path, kind)
    engine.refuse_unserved("test", "thinker.model.layers.0.experts", "OmniThinkerExperts")


def test_a_wait_says_why_every_few_seconds(caplog: pytest.LogCaptureFixture) -> None:
    # With the usual time for one attempt.
    settings = engine.Settings("http://127.0.0.1:9", ready_timeout=engine.MESSAGE_INTERVAL + 1.0)
    with pytest.raises(switchyard_moe.NotReady):
        engine.Service(settings, "test").connect()
    said = [record.getMessage() for record in caplog.records if "waits for the expert service" in record.getMessage()]
    assert said and "127.0.0.1:9" in said[0]


class Rows:
    shape = (1, 4)
    is_cuda = False

    def contiguous(self) -> Rows:
        return self


@pytest.mark.parametrize("kind", [switchyard_moe.BusyError, switchyard_moe.PeerError, switchyard_moe.Error])
def test_a_call_is_repeated(kind: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    class Client:
        calls = 0

        def forward(self, layer: int, *_: Any) -> int:
            self.calls += 1
            if self.calls == 1:
                raise kind("it may pass")
            return layer

    client = Client()
    service = engine.Service(engine.Settings(URL), "test")
    monkeypatch.setattr(service, "client", lambda: client)
    assert service.experts(engine.Place(3), Rows(), Rows(), Rows()) == 3


@pytest.mark.parametrize("kind", engine.LASTING)
def test_a_call_that_would_fail_again_is_not_repeated(kind: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    class Client:
        calls = 0

        def forward(self, *_: Any) -> None:
            self.calls += 1
            raise kind("it will not pass")

    client = Client()
    service = engine.Service(engine.Settings(URL), "test")
    monkeypatch.setattr(service, "client", lambda: client)
    with pytest.raises(kind):
        service.experts(engine.Place(0), Rows(), Rows(), Rows())
    assert client.calls == 1


def test_a_call_waits_for_a_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    class Client:
        calls = 0

        def forward(self, layer: int, *_: Any) -> str:
            self.calls += 1
            if self.calls < 4:
                raise switchyard_moe.NoReplicaError("no live replica")
            return "rows"

    client = Client()
    service = engine.Service(engine.Settings(URL, outage_timeout=30.0), "test")
    monkeypatch.setattr(service, "client", lambda: client)
    assert service.experts(engine.Place(0), Rows(), Rows(), Rows()) == "rows"
    client.calls = -(10**9)
    brief = engine.Service(engine.Settings(URL, outage_timeout=0.2), "test")
    monkeypatch.setattr(brief, "client", lambda: client)
    with pytest.raises(switchyard_moe.NoReplicaError):
        brief.experts(engine.Place(0), Rows(), Rows(), Rows())
