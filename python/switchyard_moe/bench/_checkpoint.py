"""Checkpoints with random weights in the shapes of known models, for throughput."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["SHAPES", "write"]

#: Configurations as their authors publish them, without the number of layers.
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "decoder_sparse_step": 1,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 6144,
        "max_position_embeddings": 40960,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
}


def write(shape: str, layers: int, folder: Path, device: str = "cpu", seed: int = 1) -> None:
    """Writes a checkpoint of ``layers`` layers into ``folder``, one file per layer. Weights are drawn on ``device``."""
    import torch
    from safetensors.torch import save_file

    config = {**SHAPES[shape], "num_hidden_layers": layers}
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator(device).manual_seed(seed)
    names: dict[str, str] = {}
    total = 0

    def draw(*size: int) -> Any:
        values = torch.randn(*size, generator=generator, device=device, dtype=torch.bfloat16)
        return values.mul_(config["initializer_range"]).cpu()

    def save(name: str, tensors: dict[str, Any]) -> None:
        nonlocal total
        save_file(tensors, folder / name, metadata={"format": "pt"})
        names.update(dict.fromkeys(tensors, name))
        total += sum(tensor.nbytes for tensor in tensors.values())

    hidden, head, inner = config["hidden_size"], config["head_dim"], config["moe_intermediate_size"]
    heads, kv_heads = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    ones = torch.ones(hidden, dtype=torch.bfloat16)
    outer = {"model.embed_tokens.weight": draw(config["vocab_size"], hidden)}
    outer |= {"lm_head.weight": draw(config["vocab_size"], hidden), "model.norm.weight": ones}
    save("outer.safetensors", outer)
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        tensors = {f"{prefix}.{norm}_layernorm.weight": ones.clone() for norm in ("input", "post_attention")}
        for name, rows, cols in (
            ("q_proj", heads, hidden),
            ("k_proj", kv_heads, hidden),
            ("v_proj", kv_heads, hidden),
            ("o_proj", hidden, heads),
        ):
            tensors[f"{prefix}.self_attn.{name}.weight"] = draw(rows, cols)
        for norm in ("q_norm", "k_norm"):
            tensors[f"{prefix}.self_attn.{norm}.weight"] = torch.ones(head, dtype=torch.bfloat16)
        tensors[f"{prefix}.mlp.gate.weight"] = draw(config["num_experts"], hidden)
        for expert in range(config["num_experts"]):
            for name, rows, cols in (("gate_proj", inner, hidden), ("up_proj", inner, hidden)):
                tensors[f"{prefix}.mlp.experts.{expert}.{name}.weight"] = draw(rows, cols)
            tensors[f"{prefix}.mlp.experts.{expert}.down_proj.weight"] = draw(hidden, inner)
        save(f"layer-{layer:02}.safetensors", tensors)
    index = {"metadata": {"total_size": total}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config, indent=1))
