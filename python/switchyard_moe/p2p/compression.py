"""A lossless codec for arrays of floats: bf16, f16 and f32.

The exponents of weights and activations take few values. The codec entropy-codes them and stores the other bits. Every
bit pattern comes back as it was, NaNs and subnormal numbers among them. bf16 of normal distribution shrinks to about
two thirds, f32 and f16 to about five sixths. Data without redundancy grow by 4 bytes per 131,072 elements and 16 in
all.

A frame is checked when it is decoded. Bytes that are no frame raise `CodecError`. There is no checksum: changed
mantissa bits are not found.
"""

from __future__ import annotations

from typing import Literal

from switchyard_moe import _native
from switchyard_moe.p2p._errors import ArgumentError
from switchyard_moe.p2p._memory import place_of

Dtype = Literal["bf16", "f16", "f32"]

__all__ = ["Dtype", "compress", "compress_bound", "decompress", "decompress_into", "decompressed_size"]


def compress_bound(dtype: Dtype, size: int) -> int:
    """Returns the most bytes of the frame of an array of `size` bytes."""
    return _native.p2p_compress_bound(dtype, size)


def compress(data: object, dtype: Dtype) -> bytearray:
    """Returns the frame of a C-contiguous buffer or CPU tensor.

    A length that is no multiple of the element's is allowed: the bytes behind the last whole element are stored.
    """
    source = place_of(data)
    frame = bytearray(compress_bound(dtype, source.size))
    target = place_of(frame)
    written = _native.p2p_compress(dtype, source.ptr, source.size, target.ptr, target.size)
    # The view of `target` keeps the frame from being cut.
    del target
    del frame[written:]
    return frame


def decompressed_size(frame: object, dtype: Dtype) -> int:
    """Returns the length in bytes of the array whose frame this is."""
    source = place_of(frame)
    return _native.p2p_decompressed_size(dtype, source.ptr, source.size)


def decompress(frame: object, dtype: Dtype) -> bytearray:
    """Returns the bytes of the array whose frame this is."""
    out = bytearray(decompressed_size(frame, dtype))
    decompress_into(frame, dtype, out)
    return out


def decompress_into(frame: object, dtype: Dtype, out: object) -> int:
    """Writes the array into a writable buffer or CPU tensor. Returns its length in bytes.

    After an error the content of `out` is undefined.
    """
    source, target = place_of(frame), place_of(out)
    if target.is_read_only:
        raise ArgumentError("the destination is read-only")
    return _native.p2p_decompress(dtype, source.ptr, source.size, target.ptr, target.size)
