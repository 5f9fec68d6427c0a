"""Tensors of torch, where it is installed: its C functions instead of capsules, and element types that numpy lacks.

The environment of the inference engines has it, and there ``SWITCHYARD_REQUIRE`` makes its absence a failure.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from reference import Experts
from support import Inputs, assert_close

import switchyard_moe

if "torch" in os.environ.get("SWITCHYARD_REQUIRE", "").split(","):
    import torch
else:
    torch = pytest.importorskip("torch")


def tensors(inputs: Inputs, tokens: int, dtype: Any) -> tuple[int, Any, Any, Any]:
    call = inputs.call(tokens)
    return (
        call.layer,
        torch.from_numpy(call.x).to(dtype),
        torch.from_numpy(call.topk_idx),
        torch.from_numpy(call.topk_weights),
    )


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_every_element_type_equals_the_reference(
    client: switchyard_moe.Client, experts: Experts, inputs: Inputs, name: str
) -> None:
    dtype = getattr(torch, name)
    layer, x, topk_idx, topk_weights = tensors(inputs, 12, dtype)
    found = client.forward(layer, x, topk_idx, topk_weights)
    assert type(found) is torch.Tensor
    assert found.dtype == dtype
    expected = experts.forward(layer, x.float().numpy(), topk_idx.numpy(), topk_weights.numpy())
    assert_close(found.float().numpy(), expected, {"float32": 2e-5, "bfloat16": 8e-3, "float16": 1e-3}[name])
    copies = 0 if name == "float32" else 1
    assert client.stats() == {
        "x_copies": copies,
        "topk_idx_copies": 0,
        "topk_weights_copies": 0,
        "out_copies": copies,
    }


def test_a_handle_outlives_the_callers_tensor(client: switchyard_moe.Client, experts: Experts, inputs: Inputs) -> None:
    layer, x, topk_idx, topk_weights = tensors(inputs, 200, torch.float32)
    expected = experts.forward(layer, x.numpy().copy(), topk_idx.numpy(), topk_weights.numpy())
    handle = client.dispatch(layer, x, topk_idx, topk_weights)
    del x, topk_idx, topk_weights
    # Takes the memory over, if it was freed.
    noise = [torch.full((200, experts.hidden), float("nan")) for _ in range(4)]
    assert_close(client.combine(handle).numpy(), expected)
    del noise


def test_wrong_tensors_are_named(client: switchyard_moe.Client, inputs: Inputs) -> None:
    layer, x, topk_idx, topk_weights = tensors(inputs, 3, torch.float32)
    with pytest.raises(switchyard_moe.ArgumentError, match="requires grad"):
        client.forward(layer, x.clone().requires_grad_(), topk_idx, topk_weights)
    with pytest.raises(switchyard_moe.ArgumentError, match="out requires grad"):
        client.forward(layer, x, topk_idx, topk_weights, out=x.clone().requires_grad_())
    with pytest.raises(switchyard_moe.ArgumentError, match=r"with strides \[1, 3\]"):
        client.forward(layer, x.t().contiguous().t(), topk_idx, topk_weights)
    with pytest.raises(switchyard_moe.ArgumentTypeError, match="float64"):
        client.forward(layer, x.double(), topk_idx, topk_weights)
    with pytest.raises(switchyard_moe.ArgumentError) as caught:
        client.forward(layer, x.to("meta"), topk_idx, topk_weights)
    assert "\n" not in str(caught.value), "torch's stack"
    with pytest.raises(switchyard_moe.ArgumentError):
        client.forward(layer, x.to_sparse(), topk_idx, topk_weights)
    with pytest.raises(switchyard_moe.ArgumentError, match="shares memory"):
        client.forward(layer, x, topk_idx, topk_weights, out=x)
    parameter = torch.nn.Parameter(x.clone(), requires_grad=False)
    found = client.forward(layer, parameter, topk_idx, topk_weights)
    np.testing.assert_array_equal(found.numpy(), client.forward(layer, x.numpy(), topk_idx, topk_weights))
