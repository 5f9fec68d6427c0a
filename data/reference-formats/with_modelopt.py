"""Folders that nvidia-modelopt packs."""

import json
import pathlib
import tempfile

from layer import NUM_EXPERTS, Layer
from numpy_formats import PREFIX, PROJECTIONS


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


MAKERS = {"modelopt-nvfp4": make_modelopt, "modelopt-fp8": make_modelopt}
