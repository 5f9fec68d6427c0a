"""Folders that autoawq packs."""

import importlib.util
import pathlib
import sys
import types

from layer import Layer


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


MAKERS = {"awq-g128": make_awq, "awq-g32": make_awq}
