"""The documented packing, in numpy: decodes a folder without any library."""

import json
import re
import types

import numpy as np

PREFIX = "model.layers.0.mlp."
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def read_safetensors(path):
    """Returns {name: (type name, shape, bytes)}."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__", None)
    return {
        name: (e["dtype"], tuple(e["shape"]), data[8 + size :][slice(*e["data_offsets"])])
        for name, e in header.items()
    }


def e4m3_table():
    """Values of the 256 bytes of float8_e4m3fn."""
    table = np.empty(256, np.float32)
    for byte in range(256):
        sign, exponent, mantissa = byte >> 7, (byte >> 3) & 15, byte & 7
        value = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        if byte & 127 == 127:
            value = np.nan
        table[byte] = -value if sign else value
    return table


E4M3 = e4m3_table()
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
E8M0 = np.append(np.ldexp(1.0, np.arange(255) - 127), np.nan).astype(np.float32)


def decode(tensor):
    """Returns an array: floating types as f32 (f16 as f16), integers as they are."""
    dtype, shape, data = tensor
    if dtype == "BF16":
        flat = (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    elif dtype == "F8_E4M3":
        flat = E4M3[np.frombuffer(data, np.uint8)]
    elif dtype == "F8_E8M0":
        flat = E8M0[np.frombuffer(data, np.uint8)]
    else:
        kinds = dict(F32="<f4", F16="<f2", I64="<i8", I32="<i4", I8="i1", U8="u1")
        flat = np.frombuffer(data, kinds[dtype])
    return flat.reshape(shape)


def round_bf16(x):
    """Rounds f32 to bf16, nearest even; the result is held in f32."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    bits = bits + 0x7FFF + ((bits >> 16) & 1)
    return (bits & np.uint32(0xFFFF0000)).view(np.float32)


def fields(words, bits, axis, count):
    """Splits i32 words into fields of `bits` (4 or 8), lowest bits first, along an axis."""
    words = np.moveaxis(words.view(np.uint32), axis, -1)
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    split = (words[..., None] >> shifts) & np.uint32((1 << bits) - 1)
    split = split.reshape(*words.shape[:-1], -1)[..., :count]
    return np.moveaxis(split, -1, axis).astype(np.int32)


def nibbles(packed):
    """Codes of u8 [N, K/2]: the low nibble is the even column."""
    return np.stack([packed & 15, packed >> 4], -1).reshape(packed.shape[0], -1)


def spread(scales, rows, cols, block):
    """Repeats block scales [⌈rows/bn⌉, ⌈cols/bk⌉] to [rows, cols]."""
    return scales.repeat(block[0], 0).repeat(block[1], 1)[:rows, :cols]


def from_compressed_tensors(t, quantization):
    args = quantization["config_groups"]["group_0"]["weights"]
    layout = quantization["format"]
    if layout == "pack-quantized":
        bits = args["num_bits"]
        rows, cols = (int(v) for v in t["weight_shape"])
        offset = 1 << (bits - 1)
        scales = t["weight_scale"]
        groups = scales.shape[1]
        column_group = t.get("weight_g_idx", np.array([-1]))
        if -1 in column_group:
            column_group = np.arange(cols) // (cols // groups)
        q = fields(t["weight_packed"], bits, 1, cols)
        if args["symmetric"]:
            z = np.full((rows, groups), offset, np.int32)
        else:
            z = fields(t["weight_zero_point"], bits, 0, rows)
        return round_bf16((q - z[:, column_group]).astype(np.float32) * scales[:, column_group])
    if layout in ("int-quantized", "float-quantized"):
        weight, scales = t["weight"].astype(np.float32), t["weight_scale"]
        if args["strategy"] == "block":
            scales = spread(scales, *weight.shape, args["block_structure"])
        return round_bf16(weight * scales)
    if layout == "nvfp4-pack-quantized":
        scales = t["weight_scale"] / t["weight_global_scale"]
        return round_bf16(E2M1[nibbles(t["weight_packed"])] * scales.repeat(16, 1))
    if layout == "mxfp4-pack-quantized":
        return E2M1[nibbles(t["weight_packed"])] * E8M0[t["weight_scale"]].repeat(32, 1)
    if layout == "mxfp8-quantized":
        return t["weight"] * E8M0[t["weight_scale"]].repeat(32, 1)
    raise ValueError(layout)


def from_fp8(t, quantization):
    if quantization.get("expert_dtype") == "fp4":
        codes = nibbles(t["weight"].view(np.uint8))
        return E2M1[codes] * t["weight_scale_inv"].repeat(32, 1)
    weight = t["weight"]
    scales = t["weight_scale_inv"] if "weight_scale_inv" in t else t["weight_scale"]
    block = quantization.get("weight_block_size")
    return weight * (scales if block is None else spread(scales, *weight.shape, block))


def from_gptq(t, quantization):
    bits = quantization["bits"]
    groups, cols = t["scales"].shape
    words = t["qzeros"].view(np.uint32)
    if quantization.get("checkpoint_format", "gptq") == "gptq":
        # One to every field, with the carry between fields that the writer's subtraction borrowed.
        words = words + np.uint32(0x11111111 if bits == 4 else 0x01010101)
    z = fields(words, bits, 1, cols)
    q = fields(t["qweight"], bits, 0, len(t["g_idx"]))
    group = t["g_idx"]
    # A product of f16 and a small integer is exact in f32: one rounding to f16.
    product = t["scales"][group].astype(np.float32) * (q - z[group]).astype(np.float32)
    return product.astype(np.float16).T


def from_awq(t, quantization):
    order = [0, 4, 1, 5, 2, 6, 3, 7]

    def unpack(words):
        split = fields(words, 4, 1, words.shape[1] * 8)
        return split.reshape(len(split), -1, 8)[:, :, order].reshape(len(split), -1)

    size = quantization["group_size"]
    scales, z = t["scales"].repeat(size, 0), unpack(t["qzeros"]).repeat(size, 0)
    product = (unpack(t["qweight"]) - z).astype(np.float32) * scales.astype(np.float32)
    return product.astype(np.float16).T


def from_modelopt(t, quantization):
    if quantization["quant_algo"] == "FP8":
        return t["weight"] * t["weight_scale"]
    scales = t["weight_scale"] * t["weight_scale_2"]
    return E2M1[nibbles(t["weight"])] * scales.repeat(16, 1)


READERS = {
    "compressed-tensors": from_compressed_tensors,
    "fp8": from_fp8,
    "gptq": from_gptq,
    "awq": from_awq,
    "modelopt": from_modelopt,
}


def numpy_dequantise(folder):
    """Returns {(expert, projection): weight [out, in]} from the bytes of a folder."""
    quantization = json.loads((folder / "config.json").read_text())["quantization_config"]
    parts = {}
    for name, tensor in read_safetensors(folder / "model.safetensors").items():
        match = re.fullmatch(re.escape(PREFIX) + r"experts\.(\d+)\.(\w+_proj)\.(\w+)", name)
        if match:
            expert, projection, part = match.groups()
            parts.setdefault((int(expert), projection), {})[part] = decode(tensor)
    read = READERS[quantization["quant_method"]]
    return {key: read(tensors, quantization) for key, tensors in parts.items()}


def same_bits(ours, theirs):
    """Compares values in f32, which holds f16 and bf16 exactly; zeros may differ in sign."""
    return ours.shape == theirs.shape and np.array_equal(
        ours.astype(np.float32), theirs.astype(np.float32)
    )


def check(folder):
    weights = numpy_dequantise(folder)
    reference = {k: decode(v) for k, v in read_safetensors(folder / "reference.safetensors").items()}
    stored = read_safetensors(folder / "reference.safetensors")["dequant.gate"][0]
    for name, projection in zip(("gate", "up", "down"), PROJECTIONS):
        ours, theirs = weights[0, projection], reference["dequant." + name]
        if stored == "BF16":
            ours = round_bf16(ours)
        assert same_bits(ours, theirs), (folder.name, projection)
    x, out = reference["x"], np.zeros_like(reference["x"])
    for token in range(len(x)):
        for expert, weight in zip(reference["topk_idx"][token], reference["topk_weights"][token]):
            gate, up, down = (weights[expert, p].astype(np.float32) for p in PROJECTIONS)
            hidden = gate @ x[token]
            hidden = hidden / (1 + np.exp(-hidden)) * (up @ x[token])
            out[token] += weight * (down @ hidden)
    error = np.abs(out - reference["routed_out"]).max() / np.abs(out).max()
    assert error < 1e-5, (folder.name, error)
    size = sum(f.stat().st_size for f in folder.iterdir())
    print(f"{folder.name}: expert 0 equal bit for bit in {stored}, output within {error:.1e}, {size} bytes")
