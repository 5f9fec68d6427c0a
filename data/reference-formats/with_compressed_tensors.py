"""Folders that compressed-tensors packs."""

import json
import pathlib
import tempfile

from layer import ROUTER, Layer


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


MAKERS = {scheme: make_compressed_tensors for scheme in compressed_tensors_args()}
MAKERS["ct-int4-g-idx"] = make_compressed_tensors_g_idx
