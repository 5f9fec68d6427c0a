"""Calls with tensors in GPU memory, against the reference in numpy."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from devices import DEVICE
from reference import Experts
from support import Call, Inputs

import switchyard_moe
from switchyard_moe import ArgumentError, ArgumentTypeError, BusyError, ClosedError

#: Tokens, products and answers are bf16. Errors are relative to the largest value of the result.
TOLERANCE = 2e-2


def tensors(
    call: Call,
    dtype: torch.dtype = torch.bfloat16,
    idx_dtype: torch.dtype = torch.int32,
    weights_dtype: torch.dtype = torch.float32,
) -> dict[str, Any]:
    return {
        "layer": call.layer,
        "x": torch.tensor(call.x, dtype=dtype, device=DEVICE),
        "topk_idx": torch.tensor(call.topk_idx, dtype=idx_dtype, device=DEVICE),
        "topk_weights": torch.tensor(call.topk_weights, dtype=weights_dtype, device=DEVICE),
    }


def expected(experts: Experts, call: Call, arguments: dict[str, Any]) -> npt.NDArray[np.float32]:
    x = arguments["x"].to(torch.bfloat16).float().cpu().numpy()
    weights = arguments["topk_weights"].float().cpu().numpy()
    return experts.forward(call.layer, x, call.topk_idx, weights)


def assert_close(found: torch.Tensor, wanted: npt.NDArray[np.float32]) -> None:
    result = found.float().cpu().numpy()
    assert np.isfinite(result).all()
    scale = max(float(np.abs(wanted).max()), 1e-6)
    np.testing.assert_allclose(result, wanted, rtol=0, atol=TOLERANCE * scale)


@pytest.mark.parametrize("tokens", [1, 3, 64, 700])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_type_matches_the_reference(
    client: switchyard_moe.Client, inputs: Inputs, experts: Experts, dtype: torch.dtype, tokens: int
) -> None:
    before = client.stats()
    for idx_dtype in (torch.int32, torch.int64):
        for weights_dtype in (torch.float32, torch.bfloat16, torch.float16):
            call = inputs.call(tokens)
            arguments = tensors(call, dtype, idx_dtype, weights_dtype)
            out = torch.full_like(arguments["x"], float("nan"))
            result = client.forward(**arguments, out=out)
            assert result is out
            assert_close(out, expected(experts, call, arguments))
            again = client.forward(**arguments)
            assert (again.dtype, again.device, again.shape) == (dtype, out.device, out.shape)
            assert torch.equal(again, out)
    copies = {name: count - before[name] for name, count in client.stats().items()}
    converted = 0 if dtype == torch.bfloat16 else 12
    assert copies == {
        "x_copies": converted,
        "topk_idx_copies": 6,
        "topk_weights_copies": 8,
        "out_copies": converted,
    }


def test_parts_of_tensors_and_fewer_experts(client: switchyard_moe.Client, inputs: Inputs, experts: Experts) -> None:
    """Rows that begin at any address, and fewer experts than the model's top-k."""
    call = inputs.call(9)
    call.topk_idx, call.topk_weights = call.topk_idx[:, :3].copy(), call.topk_weights[:, :3].copy()
    whole = tensors(call)
    out = torch.full((10, call.x.shape[1]), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    flat = out.view(-1)[1 : 1 + 8 * call.x.shape[1]].view(8, -1)
    part = {name: value[1:] if isinstance(value, torch.Tensor) else value for name, value in whole.items()}
    client.forward(**part, out=flat)
    cut = Call(call.layer, call.x[1:], call.topk_idx[1:], call.topk_weights[1:])
    assert_close(flat, expected(experts, cut, part))
    assert out.view(-1)[:1].isnan().all() and out.view(-1)[1 + flat.numel() :].isnan().all()


def test_no_tokens(client: switchyard_moe.Client, inputs: Inputs) -> None:
    arguments = tensors(inputs.call(1))
    empty = {name: value[:0] if isinstance(value, torch.Tensor) else value for name, value in arguments.items()}
    assert client.forward(**empty).shape == (0, client.hidden)


def test_calls_are_ordered_by_the_current_stream(
    client: switchyard_moe.Client, inputs: Inputs, experts: Experts
) -> None:
    """Tensors that slow earlier work of a stream writes, on streams that change from call to call."""
    for _ in range(6):
        call = inputs.call(16)
        source = tensors(call)
        target = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in source.items()}
        target["x"].zero_()
        target["topk_idx"].fill_(-1)
        torch.cuda.synchronize()
        stream = torch.cuda.Stream(DEVICE)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
            target["x"].copy_(source["x"])
            target["topk_idx"].copy_(source["topk_idx"])
            result = client.forward(**target)
            assert_close(result, expected(experts, call, source))


def test_handles_overlap_and_end_in_order(
    cluster: switchyard_moe.LocalCluster, inputs: Inputs, experts: Experts
) -> None:
    calls = [inputs.call(5), inputs.call(8)]
    arguments = [tensors(call, torch.float32, torch.int64) for call in calls]
    streams = [torch.cuda.Stream(DEVICE) for _ in calls]
    torch.cuda.synchronize()
    handles = []
    with cluster.client(device=DEVICE, timeout=2.0) as client:
        for stream, given in zip(streams, arguments, strict=True):
            with torch.cuda.stream(stream):
                handles.append(client.dispatch(**given))
            if len(handles) == 1:
                with pytest.raises(ArgumentError, match="was dispatched before it"):
                    client.forward(**arguments[0])
        # As many as slots have frames.
        assert [handle.num_tokens for handle in handles] == [5, 8] and not any(handle.done for handle in handles)
        with pytest.raises(BusyError, match="finish one first"):
            client.dispatch(**arguments[0])
        for handle, call, given in zip(handles, calls, arguments, strict=True):
            assert_close(client.combine(handle), expected(experts, call, given))
            with pytest.raises(ArgumentError, match="combined before"):
                client.combine(handle)
        # An abandoned call, and a later one.
        handle = client.dispatch(**arguments[0])
        del handle
        assert_close(client.forward(**arguments[1]), expected(experts, calls[1], arguments[1]))


def test_asyncio(client: switchyard_moe.Client, inputs: Inputs, experts: Experts) -> None:
    calls = [inputs.call(4) for _ in range(2)]

    async def run() -> list[tuple[torch.Tensor, dict[str, Any]]]:
        found = []
        for call in calls:
            with torch.cuda.stream(torch.cuda.Stream(DEVICE)):
                torch.cuda._sleep(5_000_000)
                arguments = tensors(call)
                found.append((await client.aforward(**arguments), arguments))
        return found

    for call, (result, arguments) in zip(calls, asyncio.run(run()), strict=True):
        assert_close(result, expected(experts, call, arguments))


def test_threads_share_a_client(client: switchyard_moe.Client, inputs: Inputs, experts: Experts) -> None:
    wrong: list[BaseException] = []
    work = [(call, tensors(call)) for call in (inputs.call(tokens) for tokens in (1, 7, 30, 2))]

    def run(call: Call, arguments: dict[str, Any]) -> None:
        try:
            wanted = expected(experts, call, arguments)
            with torch.cuda.stream(torch.cuda.Stream(DEVICE)):
                for _ in range(20):
                    assert_close(client.forward(**arguments), wanted)
        except BaseException as failure:
            wrong.append(failure)

    torch.cuda.synchronize()
    threads = [threading.Thread(target=run, args=pair) for pair in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not wrong, wrong[0]


def test_cupy(client: switchyard_moe.Client, inputs: Inputs, experts: Experts) -> None:
    import cupy

    call = inputs.call(12)
    with cupy.cuda.Device(0):
        x, idx, weights = cupy.asarray(call.x), cupy.asarray(call.topk_idx), cupy.asarray(call.topk_weights)
        result = client.forward(call.layer, x, idx, weights)
        assert isinstance(result, cupy.ndarray) and result.dtype == np.float32
        wanted = expected(experts, call, tensors(call, torch.float32))
        assert_close(torch.tensor(cupy.asnumpy(result)), wanted)


def test_a_server_dies_and_comes_back(
    cluster: switchyard_moe.LocalCluster, client: switchyard_moe.Client, inputs: Inputs, experts: Experts
) -> None:
    call = inputs.call(24, masked=0)
    arguments = tensors(call)
    wanted = expected(experts, call, arguments)
    report = switchyard_moe.Report()
    for name in cluster.names:
        killer = threading.Timer(0.2, cluster.kill, [name])
        killer.start()
        failovers, left = 0, 50
        while left:
            is_over = not killer.is_alive()
            assert_close(client.forward(**arguments, report=report), wanted)
            failovers += report.failovers
            left -= is_over
        cluster.restart(name)
        client.wait_ready(60)
        assert failovers <= 1
    assert report.total_us > 0 and report.frames > 0
    text = client.metrics_text()
    assert "switchyard_client_tensor_copies_total" in text and "switchyard_client_requests_total" in text


def strided(call: Call) -> dict[str, Any]:
    x = tensors(call)["x"]
    return {"x": torch.cat((x, x), dim=1)[:, ::2]}


def with_gradient(call: Call) -> dict[str, Any]:
    return {"x": tensors(call)["x"].requires_grad_()}


def index(value: int) -> Any:
    def change(call: Call) -> dict[str, Any]:
        idx = tensors(call, idx_dtype=torch.int64)["topk_idx"]
        idx[1, 0] = value
        return {"topk_idx": idx}

    return change


REFUSALS: dict[str, tuple[Any, type[Exception], list[str]]] = {
    "x in host memory": (lambda c: {"x": tensors(c)["x"].cpu()}, ArgumentError, ["x is", "on cpu", "on cuda:0"]),
    "x of numpy": (lambda c: {"x": c.x}, ArgumentError, ["x is", "on cpu", "on cuda:0"]),
    "topk_idx in host memory": (
        lambda c: {"topk_idx": tensors(c)["topk_idx"].cpu()},
        ArgumentError,
        ["topk_idx is", "on cpu", "on cuda:0"],
    ),
    "out in host memory": (lambda c: {"out": tensors(c)["x"].cpu()}, ArgumentError, ["out is", "on cpu"]),
    "x of float64": (lambda c: {"x": tensors(c)["x"].double()}, ArgumentTypeError, ["float64", "bfloat16"]),
    "x with strides": (strided, ArgumentError, ["with strides [512, 2]", "C order"]),
    "x that requires grad": (with_gradient, ArgumentError, ["x requires grad", "detach"]),
    "x too narrow": (lambda c: {"x": tensors(c)["x"][:, :128].contiguous()}, ArgumentError, ["[3, 128]", "256]"]),
    "a layer that does not exist": (lambda _: {"layer": 4}, ArgumentError, ["layer 4", "0, 1, 2, 3"]),
    "an expert that does not exist": (index(16), ArgumentError, ["token 1", "16", "0 to 15"]),
    "an index beyond 32 bits": (index(1 << 40), ArgumentError, ["token 1", "0 to 15"]),
    "an expert below the mask": (index(-2), ArgumentError, ["token 1", "-2", "0 to 15"]),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_wrong_argument_is_named(client: switchyard_moe.Client, inputs: Inputs, experts: Experts, name: str) -> None:
    change, kind, words = REFUSALS[name]
    call = inputs.call(3, masked=0)
    with pytest.raises(kind) as caught:
        client.forward(**(tensors(call) | change(call)))
    for word in words:
        assert word in str(caught.value)
    # The client is as before.
    arguments = tensors(call)
    assert_close(client.forward(**arguments), expected(experts, call, arguments))


def test_memory_of_another_gpu_is_named(client: switchyard_moe.Client, inputs: Inputs) -> None:
    assert torch.cuda.device_count() > 1, "this test needs two GPUs"
    arguments = tensors(inputs.call(2))
    with pytest.raises(ArgumentError, match=r"x is .* on cuda:1, expected .* on cuda:0"):
        client.forward(**(arguments | {"x": arguments["x"].to("cuda:1")}))
    with pytest.raises(ArgumentError, match=r"topk_idx is .* on cuda:1, expected .* on cuda:0"):
        client.forward(**(arguments | {"topk_idx": arguments["topk_idx"].to("cuda:1")}))


def test_a_capture_is_refused(client: switchyard_moe.Client, inputs: Inputs, experts: Experts) -> None:
    call = inputs.call(2)
    arguments = tensors(call)
    out = torch.empty_like(arguments["x"])
    torch.cuda.synchronize()
    with pytest.raises(ArgumentError, match="captured into a CUDA graph"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        client.forward(**arguments, out=out)
    torch.cuda.synchronize()
    assert_close(client.forward(**arguments), expected(experts, call, arguments))


def test_settings_that_a_gpu_client_does_not_have(cluster: switchyard_moe.LocalCluster) -> None:
    def client(**settings: Any) -> switchyard_moe.Client:
        return switchyard_moe.Client(cluster.url, token=cluster.token, **settings)

    with pytest.raises(switchyard_moe.ConfigError, match=r"device is cuda:99, .* there is no GPU 99"):
        client(device="cuda:99")
    with pytest.raises(switchyard_moe.ConfigError, match="wire_dtype is f32, expected bf16 or fp8 with device cuda:0"):
        client(device=DEVICE, wire_dtype="f32")
    with pytest.raises(switchyard_moe.ConfigError, match="response_dtype is f32, expected bf16"):
        client(device=DEVICE, response_dtype="f32")


def test_a_closed_client(cluster: switchyard_moe.LocalCluster, inputs: Inputs, experts: Experts) -> None:
    client = cluster.client(device=DEVICE)
    assert client.device == DEVICE and client.replicas(0, 0)
    call = inputs.call(2)
    arguments = tensors(call)
    handle = client.dispatch(**arguments)
    client.close()
    with pytest.raises(ClosedError):
        client.forward(**arguments)
    # A closed client still ends the calls that it began.
    assert_close(client.combine(handle), expected(experts, call, arguments))


def test_a_client_of_host_memory_names_the_device(cluster: switchyard_moe.LocalCluster, inputs: Inputs) -> None:
    with switchyard_moe.Client(cluster.url, token=cluster.token) as client:
        with pytest.raises(ArgumentError, match=r"x is .* on cuda:0, expected .* on cpu: .* device=\"cuda:0\""):
            client.forward(**tensors(inputs.call(2)))
        # Servers on GPUs take clients on GPUs only.
        with pytest.raises(switchyard_moe.NotReady):
            client.wait_ready(2)
