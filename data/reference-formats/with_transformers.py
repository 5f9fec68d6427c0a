"""Folders of Hugging Face's `fp8`, which transformers packs."""

import json
import types

from layer import ROUTER, Layer


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


MAKERS = {scheme: make_fp8 for scheme in (
    "hf-fp8-block128",
    "hf-fp8-block64",
    "hf-fp8-block32x64",
    "hf-fp8-bf16-scales",
    "hf-fp8-ue8m0",
    "hf-fp4-experts",
    "hf-fp8-tensor-static",
    "autofp8-tensor-static",
)}
