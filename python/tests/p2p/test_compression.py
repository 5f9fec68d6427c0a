"""The codec of floats: every bit pattern comes back, and bad frames raise."""

from __future__ import annotations

import math
import struct

import pytest
from peers import seeded

from switchyard_moe.p2p import ArgumentError, CodecError
from switchyard_moe.p2p.compression import (
    Dtype,
    compress,
    compress_bound,
    decompress,
    decompress_into,
    decompressed_size,
)

DTYPES: list[Dtype] = ["bf16", "f16", "f32"]
WIDTH = {"bf16": 2, "f16": 2, "f32": 4}


def encoded(dtype: str, values: list[float]) -> bytes:
    """Values in the given type, by another way than the codec's."""
    if dtype == "f16":
        return struct.pack(f"<{len(values)}e", *values)
    words = struct.pack(f"<{len(values)}f", *values)
    return words if dtype == "f32" else b"".join(words[i + 2 : i + 4] for i in range(0, len(words), 4))


@pytest.mark.parametrize("dtype", DTYPES)
def test_normal_numbers_shrink(dtype: Dtype) -> None:
    random = seeded()
    array = encoded(dtype, [random.gauss(0, 0.02) for _ in range(300_001)])
    frame = compress(array, dtype)
    assert decompress(frame, dtype) == array
    limit = {"bf16": 0.70, "f16": 0.90, "f32": 0.86}[dtype]
    assert len(frame) < limit * len(array), len(frame) / len(array)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_bit_pattern_comes_back(dtype: Dtype) -> None:
    random = seeded()
    width = WIDTH[dtype]
    specials = [0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 6e-8, -6e-8, 65504.0]
    if dtype != "f16":
        specials += [1e-40, -1e-45, 3.4e38]
    samples = [
        b"",
        bytes(1),
        bytes(width),
        b"\xff" * width,
        encoded(dtype, specials),
        encoded(dtype, specials * 1000),
        bytes(1_000_000),
        b"".join(bits.to_bytes(2, "little") for bits in range(1 << 16)),
        random.randbytes(1_000_003),
        random.randbytes(262_144 * width) + b"abc"[: width - 1],
    ]
    samples += [random.randbytes(random.randrange(5000)) for _ in range(50)]
    # Few values, so that blocks are coded, of every length around a multiple of the coder's eight states.
    samples += [bytes(random.choices(b"\x3f\x40\x41\x42", k=4000 + extra)) for extra in range(40)]
    for array in samples:
        frame = compress(array, dtype)
        assert len(frame) <= compress_bound(dtype, len(array))
        assert decompressed_size(frame, dtype) == len(array)
        assert decompress(frame, dtype) == array
        out = bytearray(b"\xa5" * (len(array) + 8))
        assert decompress_into(frame, dtype, memoryview(out)[: len(array)]) == len(array)
        assert out[len(array) :] == b"\xa5" * 8
    assert len(compress(bytes(1_000_000), "bf16")) < 510_000


@pytest.mark.parametrize("dtype", DTYPES)
def test_bad_frames_raise(dtype: Dtype) -> None:
    random = seeded()
    array = encoded(dtype, [random.gauss(0, 1) for _ in range(5000)])
    frame = bytes(compress(array, dtype))
    for cut in [0, 1, 15, 16, 17, 19, 20, 300, 531, 532, 563, 564, len(frame) // 2, len(frame) - 1]:
        with pytest.raises(CodecError):
            decompress(frame[:cut], dtype)
    with pytest.raises(CodecError, match="follow"):
        decompress(frame + b"x", dtype)
    other = "f32" if dtype != "f32" else "bf16"
    with pytest.raises(CodecError, match="type"):
        decompress(frame, other)
    with pytest.raises(CodecError, match="announces"):
        decompress(frame[:8] + struct.pack("<Q", 2**64 - 1) + frame[16:], dtype)
    with pytest.raises(ArgumentError, match="destination"):
        decompress_into(frame, dtype, bytearray(len(array) - 1))
    with pytest.raises(ArgumentError, match="read-only"):
        decompress_into(frame, dtype, bytes(len(array)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_changed_frames_never_crash(dtype: Dtype) -> None:
    """Each change gives an error or an array of the announced length, never more bytes."""
    random = seeded()
    frame = bytes(compress(encoded(dtype, [random.gauss(0, 1) for _ in range(3000)]), dtype))
    num_refused = 0
    for _ in range(3000):
        changed = bytearray(frame)
        for _ in range(random.choice([1, 1, 2, 10])):
            # Most of what can go wrong is in the header and the tables.
            at = random.randrange(600) if random.random() < 0.8 else random.randrange(len(frame))
            changed[at] = random.randrange(256)
        if random.random() < 0.2:
            del changed[random.randrange(len(changed)) :]
        out = bytearray(b"\xa5" * (3000 * WIDTH[dtype] + 64))
        try:
            size = decompress_into(changed, dtype, memoryview(out)[:-64])
            assert size <= 3000 * WIDTH[dtype]
        except (CodecError, ArgumentError):
            num_refused += 1
        assert out[-64:] == b"\xa5" * 64
    assert num_refused > 1000


def test_bad_arguments() -> None:
    with pytest.raises(ArgumentError, match="dtype"):
        compress(b"", "f64")  # type: ignore[arg-type]
    with pytest.raises(CodecError):
        decompress(b"", "f32")
