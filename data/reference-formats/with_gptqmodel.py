"""Folders that gptqmodel packs."""

import json
import pathlib
import tempfile

from layer import Layer


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


MAKERS = {scheme: make_gptq for scheme in (
    "gptq-int4",
    "gptq-int4-g128",
    "gptq-int4-desc-act",
    "gptq-int4-asym",
    "gptq-int8",
    "gptq-int8-asym-desc-act",
    "gptq-v2-int4-asym",
    "gptq-v2-int4-desc-act",
)}
