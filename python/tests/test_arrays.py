"""Arrays of libraries that are neither numpy nor torch."""

from __future__ import annotations

import pytest
from arrays import FrozenArray, OldArray
from reference import Experts
from support import Inputs, assert_close, poisoned

import switchyard_moe


def test_the_result_is_of_the_library_of_x(client: switchyard_moe.Client, experts: Experts, inputs: Inputs) -> None:
    call = inputs.call(5)
    expected = experts.forward(call.layer, call.x, call.topk_idx, call.topk_weights)
    arguments = (FrozenArray(call.x), FrozenArray(call.topk_idx), FrozenArray(call.topk_weights))
    found = client.forward(call.layer, *arguments)
    assert type(found) is FrozenArray
    assert_close(found.numpy(), expected)
    handle = client.dispatch(call.layer, *arguments)
    assert_close(client.combine(handle).numpy(), expected)
    with pytest.raises(switchyard_moe.ArgumentError, match="out is read-only"):
        client.forward(call.layer, *arguments, out=FrozenArray(call.x))


def test_an_old_library_needs_out(client: switchyard_moe.Client, experts: Experts, inputs: Inputs) -> None:
    call = inputs.call(5)
    arguments = (OldArray(call.x), OldArray(call.topk_idx), OldArray(call.topk_weights))
    with pytest.raises(switchyard_moe.ArgumentError, match="pass out"):
        client.forward(call.layer, *arguments)
    values = poisoned(call.x.shape)
    out = OldArray(values)
    out._values = values
    assert client.forward(call.layer, *arguments, out=out) is out
    assert_close(values, experts.forward(call.layer, call.x, call.topk_idx, call.topk_weights))


def test_a_capsule_of_another_kind_is_refused(client: switchyard_moe.Client, inputs: Inputs) -> None:
    class Liar(OldArray):
        def __dlpack__(self, stream: object = None) -> object:
            return 5

    call = inputs.call(1)
    with pytest.raises(switchyard_moe.ArgumentTypeError, match="int"):
        client.forward(call.layer, Liar(call.x), call.topk_idx, call.topk_weights)
