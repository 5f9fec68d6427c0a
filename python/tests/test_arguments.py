"""Wrong arguments: one exception that names what was found and what was expected."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reference import TINY
from support import Call, Inputs

import switchyard_moe
from switchyard_moe import ArgumentError, ArgumentTypeError

Change = Callable[[Call], dict[str, Any]]


def strided(call: Call) -> dict[str, Any]:
    return {"x": np.repeat(call.x, 2, axis=1)[:, ::2]}


def unaligned(call: Call) -> dict[str, Any]:
    raw = np.zeros(call.x.nbytes + 1, np.uint8)
    return {"x": raw[1:].view(np.float32).reshape(call.x.shape)}


def read_only_out(call: Call) -> dict[str, Any]:
    out = np.empty_like(call.x)
    out.flags.writeable = False
    return {"out": out}


def big_endian(call: Call) -> dict[str, Any]:
    return {"x": call.x.astype(">f4")}


def nan_weight(call: Call) -> dict[str, Any]:
    weights = call.topk_weights.copy()
    weights[1, 2] = np.nan
    return {"topk_weights": weights}


def index(value: int, dtype: type = np.int32) -> Change:
    def change(call: Call) -> dict[str, Any]:
        topk_idx = call.topk_idx.astype(dtype)
        topk_idx[1, 0] = value
        return {"topk_idx": topk_idx}

    return change


CASES: dict[str, tuple[Change, type[Exception], list[str]]] = {
    "x of float64": (
        lambda c: {"x": c.x.astype(np.float64)},
        ArgumentTypeError,
        ["x is [3, 256] of float64", "float32"],
    ),
    "x of int32": (lambda c: {"x": c.x.astype(np.int32)}, ArgumentTypeError, ["int32", "expected [tokens, 256]"]),
    "x of one dimension": (lambda c: {"x": c.x[0]}, ArgumentError, ["[256]", "[tokens, 256]"]),
    "x too narrow": (lambda c: {"x": c.x[:, :255].copy()}, ArgumentError, ["[3, 255]", "[tokens, 256]"]),
    "x with strides": (strided, ArgumentError, ["with strides [512, 2]", "C order"]),
    "x transposed": (lambda c: {"x": np.asfortranarray(c.x)}, ArgumentError, ["with strides [1, 3]", "C order"]),
    "x unaligned": (unaligned, ArgumentError, ["x "]),
    "x in the other byte order": (big_endian, ArgumentError, ["x "]),
    "x a list": (lambda c: {"x": c.x.tolist()}, ArgumentTypeError, ["list", "__dlpack__"]),
    "x none": (lambda _: {"x": None}, ArgumentTypeError, ["NoneType"]),
    "topk_idx of float32": (
        lambda c: {"topk_idx": c.topk_weights},
        ArgumentTypeError,
        ["topk_idx", "float32", "int32"],
    ),
    "topk_idx of uint32": (lambda c: {"topk_idx": c.topk_idx.astype(np.uint32)}, ArgumentTypeError, ["uint32"]),
    "topk_idx too short": (lambda c: {"topk_idx": c.topk_idx[:2]}, ArgumentError, ["topk_idx is [2, 4]", "[3, k]"]),
    "too many experts": (
        lambda c: {"topk_idx": np.zeros((3, 5), np.int32), "topk_weights": np.ones((3, 5), np.float32)},
        ArgumentError,
        ["5 columns", "at most 4"],
    ),
    "topk_weights too narrow": (
        lambda c: {"topk_weights": c.topk_weights[:, :3].copy()},
        ArgumentError,
        ["[3, 3]", "[3, 4]"],
    ),
    "topk_weights of float64": (
        lambda c: {"topk_weights": c.topk_weights.astype(np.float64)},
        ArgumentTypeError,
        ["float64"],
    ),
    "an expert that does not exist": (index(16), ArgumentError, ["token 1", "16", "0 to 15"]),
    "an expert below the mask": (index(-2), ArgumentError, ["token 1", "-2", "0 to 15"]),
    "an index beyond 32 bits": (index(1 << 40, np.int64), ArgumentError, ["token 1", str(1 << 40)]),
    "a weight that is no number": (nan_weight, ArgumentError, ["token 1", "NaN"]),
    "a layer that does not exist": (lambda _: {"layer": 4}, ArgumentError, ["layer 4", "0, 1, 2, 3"]),
    "a negative layer": (lambda _: {"layer": -1}, ArgumentError, ["-1"]),
    "a layer of text": (lambda _: {"layer": "0"}, ArgumentTypeError, ["str"]),
    "out too short": (lambda c: {"out": np.empty_like(c.x[:2])}, ArgumentError, ["out is [2, 256]", "[3, 256]"]),
    "out of another type": (
        lambda c: {"out": c.x.astype(np.float16)},
        ArgumentTypeError,
        ["out", "float16", "float32"],
    ),
    "out read-only": (read_only_out, ArgumentError, ["out"]),
    "out that is x": (lambda c: {"out": c.x}, ArgumentError, ["shares memory with x"]),
}


@pytest.mark.parametrize("name", CASES)
def test_a_wrong_argument_is_named(client: switchyard_moe.Client, inputs: Inputs, name: str) -> None:
    change, kind, words = CASES[name]
    call = inputs.call(3, masked=0)
    arguments: dict[str, Any] = vars(call) | change(call)
    with pytest.raises(kind) as caught:
        client.forward(**arguments)
    assert isinstance(caught.value, switchyard_moe.Error)
    for word in words:
        assert word in str(caught.value)
    # The client is as before.
    client.forward(call.layer, call.x, call.topk_idx, call.topk_weights)


def test_dispatch_and_combine_check_as_well(
    client: switchyard_moe.Client, cluster: switchyard_moe.LocalCluster, inputs: Inputs
) -> None:
    call = inputs.call(3)
    with pytest.raises(ArgumentTypeError, match="float64"):
        client.dispatch(call.layer, call.x.astype(np.float64), call.topk_idx, call.topk_weights)
    handle = client.dispatch(call.layer, call.x, call.topk_idx, call.topk_weights)
    with pytest.raises(ArgumentError, match="shares memory"):
        client.combine(handle, out=call.x)
    with pytest.raises(ArgumentError, match=r"\[3, 255\]"):
        client.combine(handle, out=np.empty((3, 255), np.float32))
    with cluster.client() as other, pytest.raises(ArgumentError, match="another client"):
        other.combine(handle)
    # A refused argument leaves the handle usable.
    client.combine(handle)


def test_a_closed_client_says_so(cluster: switchyard_moe.LocalCluster, inputs: Inputs) -> None:
    client = cluster.client()
    call = inputs.call(2)
    handle = client.dispatch(call.layer, call.x, call.topk_idx, call.topk_weights)
    client.close()
    client.close()
    assert client.closed
    with pytest.raises(switchyard_moe.ClosedError, match="closed"):
        client.forward(call.layer, call.x, call.topk_idx, call.topk_weights)
    with pytest.raises(switchyard_moe.ClosedError):
        client.wait_ready()
    # Calls that began before go on.
    client.combine(handle)


def test_settings_are_checked(
    cluster: switchyard_moe.LocalCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"wire_dtype": "f64"}, "wire_dtype"),
        ({"response_dtype": "int8"}, "response_dtype"),
        ({"transports": "pigeon"}, "pigeon"),
        ({"max_lanes": 0}, "max_lanes"),
        ({"max_lanes": 5000}, "max_lanes"),
        ({"max_lanes": -1}, "max_lanes is -1"),
        ({"timeout": -1}, "timeout"),
        ({"timeout": float("nan")}, "timeout"),
        ({"deadline": 0}, "deadline"),
        ({"on_missing": "ignore"}, "ignore"),
        ({"slot_bytes": 5}, "slot"),
        ({"slot_bytes": -5}, "slot_bytes is -5"),
        ({"slot_frames": -1}, "slot_frames is -1"),
        ({"model": "/nowhere"}, "/nowhere"),
    ]
    for settings, word in wrong:
        with pytest.raises(switchyard_moe.ConfigError, match=word):
            switchyard_moe.Client(cluster.url, token=cluster.token, **settings)
    for url in ("not a url", "ftp://127.0.0.1:1", ""):
        with pytest.raises(switchyard_moe.ConfigError):
            switchyard_moe.Client(url)
    monkeypatch.delenv("SWITCHYARD_CONTROL_PLANE", raising=False)
    with pytest.raises(switchyard_moe.ConfigError, match="SWITCHYARD_CONTROL_PLANE"):
        switchyard_moe.Client()
    monkeypatch.setenv("SWITCHYARD_CONTROL_PLANE", cluster.url)
    monkeypatch.setenv("SWITCHYARD_TOKEN", cluster.token)
    switchyard_moe.Client().close()
    monkeypatch.delenv("SWITCHYARD_TOKEN")
    monkeypatch.setenv("SWITCHYARD_TOKEN_FILE", str(tmp_path / "token"))
    with pytest.raises(switchyard_moe.ConfigError, match="token file"):
        switchyard_moe.Client()
    (tmp_path / "token").write_text(f"{cluster.token}\n")
    switchyard_moe.Client().close()


def test_a_control_plane_that_is_not_there_is_named() -> None:
    with pytest.raises(switchyard_moe.ControlPlaneUnavailableError, match=r"127\.0\.0\.1:1"):
        switchyard_moe.Client("http://127.0.0.1:1", timeout=0.3)


def test_one_of_several_control_planes_is_enough(cluster: switchyard_moe.LocalCluster) -> None:
    gone = "http://127.0.0.1:1"
    for urls in ([gone, cluster.url], f"{gone},{cluster.url}"):
        switchyard_moe.Client(urls, token=cluster.token).close()


def test_a_wrong_token_is_refused_at_once(cluster: switchyard_moe.LocalCluster) -> None:
    with pytest.raises(switchyard_moe.ControlPlaneError, match="token"):
        switchyard_moe.Client(cluster.url, token="wrong", timeout=30)


def test_another_model_is_refused(cluster: switchyard_moe.LocalCluster, tmp_path: Any) -> None:
    for name in ("model.safetensors", "generation_config.json"):
        (tmp_path / name).symlink_to(TINY / name)
    text = (TINY / "config.json").read_text()
    (tmp_path / "config.json").write_text(text.replace('"num_experts_per_tok": 4', '"num_experts_per_tok": 2'))
    with pytest.raises(switchyard_moe.ModelMismatchError, match="top-k is 4, expected 2"):
        switchyard_moe.Client(cluster.url, token=cluster.token, model=tmp_path)


def test_other_weights_of_the_same_shape_are_refused(cluster: switchyard_moe.LocalCluster, tmp_path: Path) -> None:
    for name in ("config.json", "generation_config.json"):
        (tmp_path / name).symlink_to(TINY / name)
    data = bytearray((TINY / "model.safetensors").read_bytes())
    begin = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:begin])
    first, end = next(tensor["data_offsets"] for name, tensor in header.items() if ".experts." in name)
    data[begin + first : begin + end] = bytes(end - first)
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(switchyard_moe.ModelMismatchError, match="fingerprint"):
        switchyard_moe.Client(cluster.url, token=cluster.token, model=tmp_path)
    switchyard_moe.Client(cluster.url, token=cluster.token, model=TINY).close()


def test_importing_starts_nothing() -> None:
    import subprocess
    import sys

    code = (
        "import os, threading, switchyard_moe\n"
        "assert threading.active_count() == 1 and len(os.listdir('/proc/self/task')) == 1\n"
        "import signal; assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
