"""Tiny checkpoints with random weights, as `save_pretrained` writes them. Run by the engines' Python.

Usage: python checkpoints.py FOLDER SEED FAMILY...
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

COMMON: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
    "initializer_range": 0.12,
}
SPARSE: dict[str, Any] = {"moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2}
# Keys that vLLM reads and transformers does not write.
EXTRA: dict[str, dict[str, Any]] = {"deepseek_v3": {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}}
BLOCK = 128


def config(family: str) -> Any:
    """Returns the configuration of a family, small enough for a test of seconds."""
    match family:
        case "qwen2_moe":
            return transformers.Qwen2MoeConfig(
                **COMMON,
                **SPARSE,
                num_key_value_heads=2,
                intermediate_size=256,
                shared_expert_intermediate_size=96,
                norm_topk_prob=False,
                decoder_sparse_step=1,
            )
        case "mixtral":
            return transformers.MixtralConfig(
                **COMMON, num_key_value_heads=2, intermediate_size=64, num_local_experts=8, num_experts_per_tok=2
            )
        case "olmoe":
            return transformers.OlmoeConfig(
                **COMMON, num_key_value_heads=4, intermediate_size=64, num_experts=8, num_experts_per_tok=2
            )
        case "deepseek_v3":
            # vLLM's attention on a CPU takes no smaller heads.
            return transformers.DeepseekV3Config(
                **COMMON,
                num_key_value_heads=4,
                intermediate_size=256,
                moe_intermediate_size=64,
                n_routed_experts=16,
                n_shared_experts=1,
                num_experts_per_tok=4,
                n_group=4,
                topk_group=2,
                norm_topk_prob=True,
                routed_scaling_factor=2.5,
                first_k_dense_replace=1,
                q_lora_rank=64,
                kv_lora_rank=512,
                qk_rope_head_dim=64,
                qk_nope_head_dim=128,
                v_head_dim=128,
            )
        case "glm4_moe":
            return transformers.Glm4MoeConfig(
                **COMMON,
                num_key_value_heads=2,
                head_dim=32,
                intermediate_size=256,
                moe_intermediate_size=64,
                n_routed_experts=8,
                n_shared_experts=1,
                num_experts_per_tok=2,
                n_group=1,
                topk_group=1,
                norm_topk_prob=True,
                routed_scaling_factor=1.5,
                first_k_dense_replace=1,
            )
        case "gpt_oss":
            return transformers.GptOssConfig(
                **COMMON,
                num_key_value_heads=2,
                head_dim=32,
                intermediate_size=64,
                num_local_experts=8,
                num_experts_per_tok=2,
                layer_types=["full_attention"] * 3,
                sliding_window=128,
            )
        case "ernie4_5_moe":
            return transformers.Ernie4_5_MoeConfig(
                **COMMON,
                num_key_value_heads=2,
                intermediate_size=256,
                moe_intermediate_size=64,
                moe_num_experts=16,
                moe_k=2,
                moe_num_shared_experts=1,
                moe_layer_start_index=0,
                moe_layer_interval=1,
            )
        case "qwen3_moe" | "fp8":
            # Widths that blocks of 128 divide.
            return transformers.Qwen3MoeConfig(
                **{**COMMON, **SPARSE, "hidden_size": 256, "moe_intermediate_size": 128},
                num_key_value_heads=2,
                head_dim=64,
                intermediate_size=256,
                norm_topk_prob=True,
                decoder_sparse_step=1,
                mlp_only_layers=[],
                tie_word_embeddings=False,
            )
    raise ValueError(f"unknown family {family}")


def make(family: str, folder: Path, seed: int) -> None:
    """Writes the checkpoint of a family into ``folder``. Values fit bf16 exactly."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config(family), dtype=torch.bfloat16)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "experts" in name and tensor.ndim >= 2:
                tensor.normal_(0, 0.15)
            elif "correction_bias" in name or name.endswith("_bias"):
                tensor.normal_(0, 0.05)
    model.save_pretrained(folder)
    extra = dict(EXTRA.get(family, {}))
    if family == "fp8":
        extra["quantization_config"] = quantize(folder / "model.safetensors")
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **extra}))


def quantize(path: Path) -> dict[str, Any]:
    """Stores every matrix of attention and experts as e4m3 with one scale per block. Returns the configuration."""
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(path).items():
        if not name.endswith("_proj.weight"):
            tensors[name] = tensor
            continue
        rows, columns = tensor.shape
        blocks = tensor.float().view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
        scale = blocks.abs().amax(dim=(1, 3)) / torch.finfo(torch.float8_e4m3fn).max
        tensors[name] = (blocks / scale[:, None, :, None]).view(rows, columns).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scale
    save_file(tensors, path, metadata={"format": "pt"})
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": ["lm_head"],
    }


if __name__ == "__main__":
    for family in sys.argv[3:]:
        make(family, Path(sys.argv[1]) / family, int(sys.argv[2]))
