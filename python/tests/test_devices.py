"""Clients of GPUs on a host without one, and tensors in GPU memory that a client of host memory gets."""

from __future__ import annotations

import ctypes
import os
from typing import Any

import numpy as np
import pytest
from reference import TINY
from support import Inputs

import switchyard_moe
from switchyard_moe import ArgumentError, ConfigError

NOWHERE = "http://127.0.0.1:9"


def has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


@pytest.mark.parametrize("name", ["", "gpu", "cuda:", "cuda:-1", "cuda:x", "cpu:0", "CUDA:0", "emulated:0", "cuda:0,1"])
def test_a_malformed_device_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match='expected "cpu" or "cuda:N"') as caught:
        switchyard_moe.Client(NOWHERE, device=name)
    assert repr(name)[1:-1] in str(caught.value)


@pytest.mark.parametrize("name", ["cuda", "cuda:0", "cuda:7"])
def test_a_gpu_that_cannot_be_used_is_named_before_anything_is_asked(name: str) -> None:
    """The wheel under test has no kernels, or this host has no driver: one of two texts, whatever the control plane."""
    assert not has_driver() or os.environ.get("CUDA_VISIBLE_DEVICES") == "", "hide this host's GPUs from these tests"
    with pytest.raises(ConfigError) as caught:
        switchyard_moe.Client(NOWHERE, device=name)
    text = str(caught.value)
    assert f"device is {name if ':' in name else 'cuda:0'}" in text
    assert (
        "has no kernels for GPUs: install a wheel that has them" in text or "libcuda.so.1 is not on this host" in text
    )


def test_a_client_of_host_memory_has_that_device(client: switchyard_moe.Client) -> None:
    assert client.device == "cpu"


class OnGpu:
    """An array that says that it is in GPU memory. A capsule of numpy's is changed for it."""

    def __init__(self, array: np.ndarray[Any, Any], kind: int, number: int) -> None:
        self._array, self._kind, self._number = array, kind, number

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._kind, self._number

    def __dlpack__(self, **arguments: Any) -> Any:
        assert "stream" not in arguments, "a client of host memory has no stream"
        capsule = self._array.__dlpack__()
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        # The address of the data comes first, the device behind it.
        device = ctypes.cast(pointer(capsule, b"dltensor") + 8, ctypes.POINTER(ctypes.c_int32))
        device[0], device[1] = self._kind, self._number
        return capsule


@pytest.mark.parametrize("argument", ["x", "topk_idx", "topk_weights", "out"])
@pytest.mark.parametrize(
    ("kind", "found"), [(2, "on cuda:3"), (13, "in managed memory of cuda:3"), (10, "on rocm:3")], ids=str
)
def test_a_tensor_in_gpu_memory_is_named_by_its_device(
    client: switchyard_moe.Client, inputs: Inputs, argument: str, kind: int, found: str
) -> None:
    call = inputs.call(3)
    arguments = vars(call) | {"out": np.empty_like(call.x)}
    arguments[argument] = OnGpu(arguments[argument], kind, 3)
    with pytest.raises(ArgumentError) as caught:
        client.forward(**arguments)
    text = str(caught.value)
    assert text.startswith(f"{argument} is [3, ") and found in text and "in C order on cpu" in text
    assert ('make a client with device="cuda:3"' in text) == (kind != 10)


def test_devices_of_a_cluster_reach_the_servers() -> None:
    with pytest.raises(switchyard_moe.ClusterError, match="cannot use cuda:99"):
        switchyard_moe.LocalCluster(TINY, servers=1, devices=["cuda:99"], timeout=30.0)
