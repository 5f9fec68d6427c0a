#!/usr/bin/env python3
"""Make small quantised MoE layers with the libraries that define the schemes, and check them.

    make_reference_formats.py OUT_DIR [SCHEME ...]     write the folders (all schemes by default)
    make_reference_formats.py --check DIR [SCHEME ...] read them back with numpy alone

Versions that wrote the committed folders, on a CPU, Python 3.11: torch 2.15.0, transformers 5.23.0,
safetensors 0.8.0, compressed-tensors 0.20.0, gptqmodel 7.7.0, autoawq 0.2.9, nvidia-modelopt 0.47.0.
`ct-int4-g-idx` needs compressed-tensors 0.12.2 instead, so it runs only when named:

    PYTHONPATH=DIR_WITH_0.12.2 make_reference_formats.py OUT_DIR ct-int4-g-idx

autoawq and gptqmodel install with `pip install --no-deps` (gptqmodel: `--no-build-isolation` too).

README.md describes the folders. The part below "The documented packing, in numpy" uses no library:
it decodes the files from their bytes and `config.json`. Each folder is checked against it when it
is made: every expert, bit for bit against the library's own dequantisation.
"""

import importlib.util
import json
import pathlib
import re
import sys
import tempfile
import types

import numpy as np

NUM_TOKENS = 12
NUM_EXPERTS = 4
TOP_K = 2
PREFIX = "model.layers.0.mlp."
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
# Module names that stay unquantised, as the libraries' configurations name them.
ROUTER = "model.layers.0.mlp.gate"


# ---------------------------------------------------------------------------------------------
# The documented packing, in numpy.
# ---------------------------------------------------------------------------------------------


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


# ---------------------------------------------------------------------------------------------
# The common part: a layer with seeded weights, and its outputs.
# ---------------------------------------------------------------------------------------------


class Layer:
    """The weights that a scheme quantises, in bf16, and the configuration of the model."""

    def __init__(self, scheme, hidden=128, width=64):
        import torch
        from transformers import Qwen3MoeConfig

        self.scheme, self.hidden, self.width = scheme, hidden, width
        self.config = Qwen3MoeConfig(
            vocab_size=64,
            hidden_size=hidden,
            intermediate_size=128,
            moe_intermediate_size=width,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            num_experts=NUM_EXPERTS,
            num_experts_per_tok=TOP_K,
            norm_topk_prob=True,
            max_position_embeddings=128,
            bos_token_id=0,
            eos_token_id=1,
        )
        self.config.architectures = ["Qwen3MoeForCausalLM"]
        self.config.dtype = "bfloat16"
        self.config._experts_implementation = "eager"
        self.generator = torch.Generator().manual_seed(sum(map(ord, scheme)))
        self.router = self.draw(NUM_EXPERTS, hidden, gain=2.0)
        self.experts = {}
        for expert in range(NUM_EXPERTS):
            for projection in PROJECTIONS:
                shape = (hidden, width) if projection == "down_proj" else (width, hidden)
                self.experts[expert, projection] = self.draw(*shape, uneven=True)

    def draw(self, rows, cols, gain=1.0, uneven=False):
        import torch

        weight = torch.randn(rows, cols, generator=self.generator) * gain / cols**0.5
        if uneven:
            # Uneven sizes and offsets of the blocks of 16 × 16 show a reader that mixes up groups.
            blocks = (-(-rows // 16), -(-cols // 16))
            factor = torch.exp2(2 * torch.rand(blocks, generator=self.generator) - 1)
            offset = 2 * torch.randn(blocks, generator=self.generator) / cols**0.5
            full = [b.repeat_interleave(16, 0).repeat_interleave(16, 1) for b in (factor, offset)]
            weight = weight * full[0][:rows, :cols] + full[1][:rows, :cols] * (gain / 2)
        return weight.to(torch.bfloat16)

    def names(self):
        """Yields (expert, projection, module name)."""
        for expert, projection in self.experts:
            yield expert, projection, f"{PREFIX}experts.{expert}.{projection}"

    def linear(self, expert, projection, dtype):
        import torch

        weight = self.experts[expert, projection].to(dtype)
        linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        linear.weight = torch.nn.Parameter(weight.clone(), requires_grad=False)
        return linear

    def model(self, **overrides):
        """Modules under the Hub's names: one `Linear` per expert and projection."""
        import torch

        def module(**children):
            parent = torch.nn.Module()
            for name, child in children.items():
                parent.add_module(name, child)
            return parent

        experts = torch.nn.ModuleList(
            module(**{p: self.linear(e, p, torch.bfloat16) for p in PROJECTIONS})
            for e in range(NUM_EXPERTS)
        )
        gate = torch.nn.Linear(self.hidden, NUM_EXPERTS, bias=False)
        gate.weight = torch.nn.Parameter(self.router.clone(), requires_grad=False)
        layer = module(mlp=module(gate=gate, experts=experts))
        head = torch.nn.Linear(8, 8, bias=False)
        return module(model=module(layers=torch.nn.ModuleList([layer])), lm_head=head)

    def save(self, out, tensors, dequantised, quantization, extra=None):
        """Writes a folder and checks it. `tensors` are the experts' by their full names,
        `dequantised` the library's weights [out, in] by (expert, projection)."""
        import torch
        from safetensors.torch import save_file
        from transformers import Qwen3MoeForCausalLM

        folder = out / self.scheme
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {PREFIX + "gate.weight": self.router, **tensors}
        save_file(
            {k: v.detach().contiguous() for k, v in tensors.items()},
            folder / "model.safetensors",
            metadata={"format": "pt"},
        )
        self.config.save_pretrained(folder)
        path = folder / "config.json"
        config = json.loads(path.read_text())
        if quantization is not None:
            config["quantization_config"] = quantization
        path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        for name, content in (extra or {}).items():
            (folder / name).write_text(json.dumps(content, indent=4) + "\n")

        block = Qwen3MoeForCausalLM(self.config).float().eval().model.layers[0].mlp
        x = torch.randn(NUM_TOKENS, self.hidden, generator=self.generator)
        with torch.no_grad():
            block.gate.weight.copy_(self.router.float())
            for expert in range(NUM_EXPERTS):
                gate, up, down = (dequantised[expert, p].float() for p in PROJECTIONS)
                block.experts.gate_up_proj[expert].copy_(torch.cat([gate, up]))
                block.experts.down_proj[expert].copy_(down)
            _, weights, idx = block.gate(x)
            routed = block.experts(x, idx, weights)
        assert idx.unique().numel() == NUM_EXPERTS and torch.isfinite(routed).all()
        reference = dict(x=x, topk_idx=idx.to(torch.int32), topk_weights=weights, routed_out=routed)
        for name, projection in zip(("gate", "up", "down"), PROJECTIONS):
            reference["dequant." + name] = dequantised[0, projection].detach().contiguous()
        save_file(reference, folder / "reference.safetensors")

        ours = numpy_dequantise(folder)
        for key, theirs in dequantised.items():
            mine = round_bf16(ours[key]) if theirs.dtype == torch.bfloat16 else ours[key]
            assert same_bits(mine, theirs.float().numpy()), (self.scheme, key)
            # The quantised weight must be near the weight that was drawn.
            drawn = self.experts[key].float()
            error = ((theirs.float() - drawn).norm() / drawn.norm()).item()
            assert error < 0.2, (self.scheme, key, error)
        check(folder)


# ---------------------------------------------------------------------------------------------
# compressed-tensors.
# ---------------------------------------------------------------------------------------------


def compressed_tensors_args():
    """Returns {scheme: (hidden, width, weights, input activations, format)}."""
    group = dict(num_bits=4, type="int", symmetric=True, strategy="group")
    int8 = dict(num_bits=8, type="int", symmetric=True, strategy="channel")
    fp8 = dict(num_bits=8, type="float", symmetric=True)
    token = dict(strategy="token", dynamic=True, symmetric=True)
    mx = dict(symmetric=True, strategy="group", group_size=32, type="float", scale_dtype="torch.uint8",
              zp_dtype="torch.uint8")
    nv = dict(num_bits=4, type="float", strategy="tensor_group", group_size=16, symmetric=True,
              scale_dtype="torch.float8_e4m3fn", zp_dtype="torch.float8_e4m3fn")
    return {
        "ct-int4-g32": (128, 64, dict(group, group_size=32), None),
        "ct-int4-g128": (128, 128, dict(group, group_size=128), None),
        "ct-int4-asym": (128, 64, dict(group, group_size=32, symmetric=False), None),
        "ct-int4-channel": (128, 64, dict(int8, num_bits=4), None),
        "ct-int8-w8a8": (128, 64, int8, dict(token, num_bits=8, type="int")),
        "ct-int8-w8a16": (128, 64, int8, None),
        "ct-int8-g32-asym": (128, 64, dict(group, num_bits=8, group_size=32, symmetric=False), None),
        "ct-fp8-channel": (128, 64, dict(fp8, strategy="channel"), dict(token, num_bits=8, type="float")),
        "ct-fp8-tensor-static": (128, 64, dict(fp8, strategy="tensor"), dict(fp8, strategy="tensor")),
        "ct-fp8-tensor-dynamic": (
            128, 64, dict(fp8, strategy="tensor"), dict(token, num_bits=8, type="float")),
        # Ragged blocks: 192 = 128 + 64.
        "ct-fp8-block": (
            192, 64, dict(fp8, strategy="block", block_structure=[128, 128]),
            dict(fp8, strategy="group", group_size=128, dynamic=True)),
        "ct-nvfp4": (128, 64, nv, dict(nv, dynamic="local")),
        "ct-nvfp4a16": (128, 64, nv, None),
        "ct-mxfp4": (128, 64, dict(mx, num_bits=4), None),
        "ct-mxfp8": (128, 64, dict(mx, num_bits=8), None),
    }


def observe(weight, args, helpers):
    """Scales and zero points of a weight by the library's own `calculate_qparams`."""
    import torch

    strategy = args.strategy
    if strategy == "tensor":
        low, high = weight.min().reshape(1), weight.max().reshape(1)
    elif strategy == "channel":
        low, high = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    elif strategy == "block":
        rows, cols = args.block_structure
        padded = torch.nn.functional.pad(
            weight, (0, -weight.shape[1] % cols, 0, -weight.shape[0] % rows))
        tiles = padded.unflatten(1, (-1, cols)).unflatten(0, (-1, rows))
        low, high = tiles.amin((1, 3)), tiles.amax((1, 3))
    else:
        groups = weight.unflatten(1, (-1, args.group_size))
        low, high = groups.amin(2), groups.amax(2)
    kwargs = {}
    if strategy == "tensor_group":
        kwargs["global_scale"] = helpers.generate_gparam(weight.min(), weight.max())
    scale, zero = helpers.calculate_qparams(low, high, args, **kwargs)
    return scale, zero, kwargs.get("global_scale")


def written_config(compressor):
    """The `quantization_config` that the library writes into a `config.json`."""
    with tempfile.TemporaryDirectory() as tmp:
        path = pathlib.Path(tmp) / "config.json"
        path.write_text("{}")
        compressor.update_config(tmp)
        return json.loads(path.read_text())["quantization_config"]


def make_compressed_tensors(scheme, out):
    import torch
    from compressed_tensors.compressors import BaseCompressor, ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationConfig,
        apply_quantization_config,
    )
    from compressed_tensors.quantization.utils import helpers

    hidden, width, weights, inputs = compressed_tensors_args()[scheme]
    layer = Layer(scheme, hidden, width)
    model = layer.model()
    group = dict(targets=["Linear"], weights=weights)
    if inputs is not None:
        group["input_activations"] = inputs
    config = QuantizationConfig(config_groups={"group_0": group}, ignore=[ROUTER, "lm_head"])
    apply_quantization_config(model, config)
    for index, (_, _, name) in enumerate(layer.names()):
        module = model.get_submodule(name)
        scale, zero, global_scale = observe(module.weight, module.quantization_scheme.weights, helpers)
        values = dict(weight_scale=scale, weight_zero_point=zero, weight_global_scale=global_scale,
                      input_scale=torch.tensor([0.01 + 0.001 * index]),
                      input_global_scale=torch.tensor([300.0 + index]))
        for key, value in values.items():
            parameter = getattr(module, key, None)
            if parameter is not None:
                assert parameter.shape == value.shape, (key, parameter.shape, value.shape)
                parameter.data.copy_(value)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    tensors = {k: v for k, v in model.state_dict().items() if ".experts." in k}
    quantization = written_config(compressor)
    reader = BaseCompressor.get_value_from_registry(quantization["format"])
    dequantised = {}
    for expert, projection, name in layer.names():
        local = {k[len(name) + 1 :]: v for k, v in tensors.items() if k.startswith(name + ".")}
        module_scheme = model.get_submodule(name).quantization_scheme
        dequantised[expert, projection] = reader.decompress(local, module_scheme)["weight"]
    layer.save(out, tensors, dequantised, quantization)


def make_compressed_tensors_g_idx(scheme, out):
    """Groups by a column permutation, as versions before its removal in 2026 wrote them."""
    import torch
    from compressed_tensors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
    from compressed_tensors.quantization.utils import helpers

    layer = Layer(scheme)
    model = layer.model()
    args = dict(num_bits=4, type="int", symmetric=True, strategy="group", group_size=32,
                actorder="group")
    config = QuantizationConfig(
        config_groups={"group_0": dict(targets=["Linear"], weights=args)}, ignore=[ROUTER, "lm_head"])
    apply_quantization_config(model, config)
    for _, _, name in layer.names():
        module = model.get_submodule(name)
        args = module.quantization_scheme.weights
        cols = module.weight.shape[1]
        g_idx = (torch.randperm(cols, generator=layer.generator) // args.group_size).int()
        ordered = module.weight[:, torch.argsort(g_idx)]
        module.weight_scale.data.copy_(observe(ordered, args, helpers)[0])
        module.weight_zero_point.data.zero_()
        module.weight_g_idx.data.copy_(g_idx)
        module.quantization_status = "frozen"
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    tensors = {k: v.clone() for k, v in model.state_dict().items() if ".experts." in k}
    quantization = written_config(compressor)
    compressor.decompress_model(model)
    dequantised = {
        (expert, projection): model.get_submodule(name).weight.detach()
        for expert, projection, name in layer.names()
    }
    layer.save(out, tensors, dequantised, quantization)


# ---------------------------------------------------------------------------------------------
# Hugging Face `fp8`.
# ---------------------------------------------------------------------------------------------

ACTIVATION_NAMES = {"weight_scale_inv": "activation_scale", "weight_scale": "input_scale"}


def make_fp8(scheme, out):
    import torch
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

    block, scale_dtype, width = {
        "hf-fp8-block128": ((128, 128), torch.float32, 128),
        "hf-fp8-block64": ((64, 64), torch.float32, 64),
        "hf-fp8-block32x64": ((32, 64), torch.float32, 64),
        "hf-fp8-bf16-scales": ((64, 64), torch.bfloat16, 64),
        "hf-fp8-ue8m0": ((64, 64), torch.float8_e8m0fnu, 64),
        "hf-fp4-experts": ((1, 32), torch.float8_e8m0fnu, 64),
        "hf-fp8-tensor-static": (None, torch.float32, 64),
        "autofp8-tensor-static": (None, torch.float32, 64),
    }[scheme]
    layer = Layer(scheme, width=width)
    config = FineGrainedFP8Config(
        activation_scheme="dynamic" if block else "static",
        # Experts in fp4 have blocks of their own; the size belongs to the other layers.
        weight_block_size=(128, 128) if scheme == "hf-fp4-experts" else block,
        modules_to_not_convert=[ROUTER, "lm_head"],
        scale_fmt="ue8m0" if scale_dtype == torch.float8_e8m0fnu else "float",
        expert_dtype="fp4" if scheme == "hf-fp4-experts" else "fp8",
    )
    quantizer = types.SimpleNamespace(quantization_config=config)
    quantise, dequantise = Fp8Quantize(quantizer), Fp8Dequantize(quantizer)
    quantization = json.loads(json.dumps(config.to_dict()))
    scale_name = "weight_scale_inv"
    if scheme == "autofp8-tensor-static":
        # AutoFP8 is on no package index: its arithmetic and its configuration, written out.
        scale_name = "weight_scale"
        quantization = dict(
            quant_method="fp8", activation_scheme="static", ignored_layers=["lm_head", ROUTER])
    tensors, dequantised = {}, {}
    for index, (expert, projection, name) in enumerate(layer.names()):
        weight = layer.experts[expert, projection]
        if scale_name == "weight_scale":
            limits = torch.finfo(torch.float8_e4m3fn)
            factor = limits.max / torch.maximum(*(v.abs() for v in weight.aminmax())).clamp(min=1e-12)
            stored = (weight * factor).clamp(limits.min, limits.max).to(torch.float8_e4m3fn)
            scales = factor.float().reciprocal()
        elif scheme == "hf-fp4-experts":
            # The library reads fp4 but does not write it: nearest code, packed as it reads them.
            tiles = weight.float().unflatten(1, (-1, 32))
            scales = torch.exp2(torch.ceil(torch.log2(tiles.abs().amax(2) / 6)))
            values = (tiles / scales.unsqueeze(2)).flatten(1)
            table = torch.tensor(E2M1[:8])
            codes = (values.abs().unsqueeze(2) - table).abs().argmin(2) + 8 * (values < 0)
            stored = (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8).view(torch.int8)
            scales = scales.to(scale_dtype)
        else:
            stored, scales = quantise.convert({"weight": weight}).values()
            if scale_dtype == torch.bfloat16:
                # The library divides by scales in f32; files of the Hub round them to bf16.
                scales = scales.to(torch.bfloat16)
        if block is None:
            scales = scales.reshape([])
            tensors[f"{name}.{ACTIVATION_NAMES[scale_name]}"] = torch.tensor(0.01 + 0.001 * index)
        assert scales.dtype == scale_dtype, scales.dtype
        tensors[name + ".weight"], tensors[f"{name}.{scale_name}"] = stored, scales
        if scale_name == "weight_scale":
            dequantised[expert, projection] = stored.float() * scales
        else:
            dequantised[expert, projection] = dequantise._dequantize_one(
                stored, scales, output_dtype=torch.float32)
    layer.save(out, tensors, dequantised, quantization)


# ---------------------------------------------------------------------------------------------
# GPTQ.
# ---------------------------------------------------------------------------------------------


def make_gptq(scheme, out):
    import torch
    from gptqmodel import QuantizeConfig
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.quantization import FORMAT
    from gptqmodel.quantization.quantizer import Quantizer
    from gptqmodel.utils.model import (
        convert_gptq_v1_to_v2_format_module,
        convert_gptq_v2_to_v1_format_module,
    )

    bits, group, sym, desc_act, version, width = {
        "gptq-int4": (4, 32, True, False, FORMAT.GPTQ, 64),
        "gptq-int4-g128": (4, 128, True, False, FORMAT.GPTQ, 128),
        "gptq-int4-desc-act": (4, 32, True, True, FORMAT.GPTQ, 64),
        "gptq-int4-asym": (4, 32, False, False, FORMAT.GPTQ, 64),
        "gptq-int8": (8, 32, True, False, FORMAT.GPTQ, 64),
        "gptq-int8-asym-desc-act": (8, 32, False, True, FORMAT.GPTQ, 64),
        "gptq-v2-int4-asym": (4, 32, False, False, FORMAT.GPTQ_V2, 64),
        "gptq-v2-int4-desc-act": (4, 32, True, True, FORMAT.GPTQ_V2, 64),
    }[scheme]
    layer = Layer(scheme, width=width)
    config = QuantizeConfig(bits=bits, group_size=group, sym=sym, desc_act=desc_act, format=version,
                            offload_to_disk=False)
    tensors, dequantised = {}, {}

    def new_linear(linear):
        return TorchLinear(
            bits=bits, group_size=group, sym=sym, desc_act=desc_act, bias=False, format=version,
            in_features=linear.in_features, out_features=linear.out_features).eval()

    for expert, projection, name in layer.names():
        linear = layer.linear(expert, projection, torch.float32)
        # The order in which GPTQ visits columns: by the Hessian's diagonal, here drawn.
        cols = linear.in_features
        order = torch.arange(cols)
        if desc_act:
            order = torch.randperm(cols, generator=layer.generator)
        g_idx = torch.empty(cols, dtype=torch.int32)
        g_idx[order] = torch.arange(cols, dtype=torch.int32) // group
        scales, zeros = [], []
        for start in range(0, cols, group):
            quantizer = Quantizer(config)
            quantizer.configure(perchannel=True)
            quantizer.find_params(linear.weight[:, order[start : start + group]], weight=True)
            scales.append(quantizer.scale.reshape(-1, 1))
            zeros.append(quantizer.zero.reshape(-1, 1))
        packed = new_linear(linear)
        packed.pack_block(linear, torch.cat(scales, 1), torch.cat(zeros, 1), g_idx)
        if version == FORMAT.GPTQ:
            convert_gptq_v2_to_v1_format_module(packed, config)
        stored = {k: v.clone() for k, v in packed.state_dict().items()}
        tensors.update({f"{name}.{k}": v for k, v in stored.items()})

        loaded = new_linear(linear)
        loaded.load_state_dict(stored)
        if version == FORMAT.GPTQ:
            convert_gptq_v1_to_v2_format_module(loaded, bits, torch.int32)
        dequantised[expert, projection] = loaded.dequantize_weight().T
    with tempfile.TemporaryDirectory() as tmp:
        config.save_pretrained(tmp)
        written = json.loads((pathlib.Path(tmp) / "quantize_config.json").read_text())
    layer.save(out, tensors, dequantised, written, {"quantize_config.json": written})


# ---------------------------------------------------------------------------------------------
# AWQ.
# ---------------------------------------------------------------------------------------------


def import_awq():
    """Imports parts of autoawq without its model classes, which need an older transformers."""
    if "awq" in sys.modules:
        return
    root = pathlib.Path(importlib.util.find_spec("awq").submodule_search_locations[0])
    package = types.ModuleType("awq")
    package.__path__ = [str(root)]
    sys.modules["awq"] = package
    # The quantiser imports a loader of calibration texts, which this script does not call.
    calibration = types.ModuleType("awq.utils.calib_data")
    calibration.get_calib_dataset = None
    sys.modules["awq.utils.calib_data"] = calibration


def make_awq(scheme, out):
    import torch

    import_awq()
    from awq.models._config import AwqConfig
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.quantize.quantizer import AwqQuantizer
    from awq.utils.packing_utils import dequantize_gemm

    group, width = {"awq-g128": (128, 128), "awq-g32": (32, 64)}[scheme]
    layer = Layer(scheme, width=width)
    quantizer = AwqQuantizer.__new__(AwqQuantizer)
    quantizer.w_bit, quantizer.group_size, quantizer.zero_point = 4, group, True
    tensors, dequantised = {}, {}
    for expert, projection, name in layer.names():
        linear = layer.linear(expert, projection, torch.float16)
        linear.weight.data, scales, zeros = quantizer.pseudo_quantize_tensor(linear.weight.data)
        packed = WQLinear_GEMM.from_linear(
            linear, 4, group, scales=scales.t().contiguous(), zeros=zeros.t().contiguous())
        tensors.update({f"{name}.{k}": v for k, v in packed.state_dict().items()})
        dequantised[expert, projection] = dequantize_gemm(
            packed.qweight, packed.qzeros, packed.scales, 4, group).T
    config = AwqConfig(q_group_size=group, modules_to_not_convert=["gate"])
    layer.save(out, tensors, dequantised, config.to_transformers_dict())


# ---------------------------------------------------------------------------------------------
# nvidia-modelopt.
# ---------------------------------------------------------------------------------------------


def make_modelopt(scheme, out):
    import modelopt.torch.quantization as mtq
    import torch
    from modelopt.torch.export import export_hf_checkpoint
    from modelopt.torch.quantization.qtensor import FP8QTensor, NVFP4QTensor
    from safetensors.torch import load_file
    from transformers import Qwen3MoeForCausalLM

    layer = Layer(scheme)
    layer.config.dtype = torch.bfloat16
    torch.manual_seed(1)
    model = Qwen3MoeForCausalLM(layer.config).bfloat16().eval()
    block = model.model.layers[0].mlp
    with torch.no_grad():
        block.gate.weight.copy_(layer.router)
        for expert in range(NUM_EXPERTS):
            gate, up, down = (layer.experts[expert, p] for p in PROJECTIONS)
            block.experts.gate_up_proj[expert].copy_(torch.cat([gate, up]))
            block.experts.down_proj[expert].copy_(down)

    def calibrate(model):
        with torch.no_grad():
            model(torch.randint(0, 64, (4, 64), generator=layer.generator))

    recipe = mtq.NVFP4_DEFAULT_CFG if scheme == "modelopt-nvfp4" else mtq.FP8_DEFAULT_CFG
    model = mtq.quantize(model, recipe, calibrate)
    with tempfile.TemporaryDirectory() as tmp:
        export_hf_checkpoint(model, export_dir=tmp)
        written = load_file(pathlib.Path(tmp) / "model.safetensors")
        quantization = json.loads((pathlib.Path(tmp) / "config.json").read_text())
        beside = json.loads((pathlib.Path(tmp) / "hf_quant_config.json").read_text())
    assert torch.equal(written[PREFIX + "gate.weight"], layer.router)
    tensors = {k: v for k, v in written.items() if ".experts." in k}
    dequantised = {}
    for expert, projection, name in layer.names():
        stored, scale = tensors[name + ".weight"], tensors[name + ".weight_scale"]
        shape = layer.experts[expert, projection].shape
        if scheme == "modelopt-nvfp4":
            weight = NVFP4QTensor(shape, torch.bfloat16, stored).dequantize(
                torch.float32, scale=scale, double_scale=tensors[name + ".weight_scale_2"],
                block_sizes={-1: 16})
        else:
            weight = FP8QTensor(shape, torch.bfloat16, stored).dequantize(torch.float32, scale=scale)
        dequantised[expert, projection] = weight
    layer.config.dtype = "bfloat16"
    layer.config._experts_implementation = "eager"
    layer.save(out, tensors, dequantised, quantization["quantization_config"],
               {"hf_quant_config.json": beside})


MAKERS = {scheme: make_compressed_tensors for scheme in compressed_tensors_args()}
MAKERS["ct-int4-g-idx"] = make_compressed_tensors_g_idx
for _scheme in ("hf-fp8-block128", "hf-fp8-block64", "hf-fp8-block32x64", "hf-fp8-bf16-scales",
                "hf-fp8-ue8m0", "hf-fp4-experts", "hf-fp8-tensor-static", "autofp8-tensor-static"):
    MAKERS[_scheme] = make_fp8
for _scheme in ("gptq-int4", "gptq-int4-g128", "gptq-int4-desc-act", "gptq-int4-asym", "gptq-int8",
                "gptq-int8-asym-desc-act", "gptq-v2-int4-asym", "gptq-v2-int4-desc-act"):
    MAKERS[_scheme] = make_gptq
MAKERS.update({"awq-g128": make_awq, "awq-g32": make_awq})
MAKERS.update({"modelopt-nvfp4": make_modelopt, "modelopt-fp8": make_modelopt})


def main():
    arguments = sys.argv[1:]
    checking = arguments[:1] == ["--check"]
    out, *schemes = arguments[checking:]
    out = pathlib.Path(out)
    if checking:
        for folder in sorted(p for p in out.iterdir() if p.is_dir() and p.name != "__pycache__"):
            if not schemes or folder.name in schemes:
                check(folder)
        return
    for scheme in schemes or [s for s in MAKERS if s != "ct-int4-g-idx"]:
        MAKERS[scheme](scheme, out)


if __name__ == "__main__":
    main()
