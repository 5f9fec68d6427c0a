"""Addresses of buffers and tensors."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

from switchyard_moe.p2p._errors import ArgumentError


class Place(NamedTuple):
    """Where an object's bytes lie, and what keeps them there."""

    ptr: int
    size: int
    is_read_only: bool
    #: Holding it keeps the memory mapped.
    holder: object


def place_of(memory: object) -> Place:
    """Returns the place of a C-contiguous buffer or CPU tensor.

    Takes objects of the buffer protocol (`bytearray`, `memoryview`, `array`, `mmap`, numpy arrays) and objects with
    torch's `data_ptr`, `numel`, `element_size`, `is_contiguous` and `device`.
    """
    if hasattr(memory, "data_ptr"):
        return _place_of_tensor(memory)
    try:
        view = memoryview(memory)  # type: ignore[arg-type]
    except (TypeError, BufferError) as error:
        raise ArgumentError(
            f"{type(memory).__name__} is no address, buffer or tensor: give an int with a size, a C-contiguous buffer, "
            "or a CPU tensor"
        ) from error
    if not view.c_contiguous:
        raise ArgumentError(
            f"the buffer has shape {view.shape} and strides {view.strides}, expected C-contiguous memory"
        )
    return Place(_address(view), view.nbytes, view.readonly, view)


def _place_of_tensor(tensor: Any) -> Place:
    device = str(getattr(tensor, "device", "cpu"))
    if device.split(":")[0] != "cpu":
        raise ArgumentError(f"the tensor is on {device}, expected cpu: copy it to host memory first")
    if not tensor.is_contiguous():
        raise ArgumentError("the tensor is not contiguous: call contiguous() first")
    return Place(int(tensor.data_ptr()), int(tensor.numel()) * int(tensor.element_size()), False, tensor)


class _PyBuffer(ctypes.Structure):
    """`Py_buffer` of the C API. Its layout has been the same since Python 3.3, and is part of the stable ABI."""

    _fields_ = [
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    ]


def _address(view: memoryview) -> int:
    """Returns the address of a view's first byte. The view itself keeps the memory mapped."""
    if view.nbytes == 0:
        return 0
    raw = _PyBuffer()
    api = ctypes.pythonapi
    if api.PyObject_GetBuffer(ctypes.py_object(view), ctypes.byref(raw), 0) != 0:
        raise ArgumentError("the buffer gives no address")
    try:
        return int(raw.buf or 0)
    finally:
        api.PyBuffer_Release(ctypes.byref(raw))
