#!/usr/bin/env python3
"""Make small MoE blocks with reference outputs from Hugging Face transformers.

Usage: python3 make_reference_blocks.py OUT_DIR      (needs torch, transformers 5, safetensors)

For every block below, OUT_DIR/<name>/ becomes a checkpoint of one decoder layer that holds only
the tensors of its MoE block, under the names the Hub uses:

    config.json            as transformers writes it (fp8: with the fields that the Hub adds)
    model.safetensors      the router, the routed experts and the shared expert
    reference.safetensors  what transformers computes in float32, on the CPU, from those weights:
        x              [tokens, hidden]   f32  input of the block
        router_logits  [tokens, experts]  f32
        topk_idx       [tokens, top_k]    i32  experts chosen, in transformers' order
        topk_weights   [tokens, top_k]    f32  their weights, scaling included
        routed_out     [tokens, hidden]   f32  weighted sum over the routed experts
        block_out      [tokens, hidden]   f32  the whole block, with the shared expert

Weights are rounded to what the file stores before transformers runs. The names are checked
against those that transformers itself writes with `save_pretrained`, and the outputs against a
plain loop over the tensors as read back from the file.
"""

import json
import pathlib
import sys
import tempfile

import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

NUM_TOKENS = 24
FP8_BLOCK = 128
FP8_MAX = 448.0

SMALL = dict(
    vocab_size=64,
    num_hidden_layers=1,
    num_attention_heads=4,
    max_position_embeddings=128,
    pad_token_id=None,
    bos_token_id=0,
    eos_token_id=1,
)
LATENT = dict(
    q_lora_rank=32, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16
)
V3 = dict(
    SMALL,
    **LATENT,
    num_key_value_heads=4,
    first_k_dense_replace=0,
    n_shared_experts=1,
    n_group=4,
    topk_group=2,
    num_experts_per_tok=4,
    norm_topk_prob=True,
    routed_scaling_factor=2.5,
    intermediate_size=128,
)


def blocks():
    """Yields (name, model class, configuration, whether linear layers are stored as fp8)."""
    yield (
        "mixtral",
        MixtralForCausalLM,
        MixtralConfig(
            **SMALL,
            hidden_size=128,
            intermediate_size=96,
            num_key_value_heads=2,
            num_local_experts=8,
            num_experts_per_tok=2,
        ),
        False,
    )
    yield (
        "qwen3-moe-plain-topk",
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig(
            **SMALL,
            hidden_size=128,
            intermediate_size=128,
            moe_intermediate_size=64,
            num_key_value_heads=2,
            head_dim=32,
            num_experts=8,
            num_experts_per_tok=3,
            norm_topk_prob=False,
        ),
        False,
    )
    yield (
        "deepseek-v2-grouped",
        DeepseekV2ForCausalLM,
        DeepseekV2Config(
            **SMALL,
            **LATENT,
            num_key_value_heads=4,
            first_k_dense_replace=0,
            hidden_size=128,
            intermediate_size=128,
            moe_intermediate_size=32,
            n_routed_experts=16,
            n_shared_experts=2,
            n_group=4,
            topk_group=2,
            num_experts_per_tok=4,
            topk_method="group_limited_greedy",
            norm_topk_prob=False,
            routed_scaling_factor=1.5,
        ),
        False,
    )
    yield (
        "deepseek-v3",
        DeepseekV3ForCausalLM,
        DeepseekV3Config(**V3, hidden_size=128, moe_intermediate_size=64, n_routed_experts=16),
        False,
    )
    # Two blocks by two, the second row or column of blocks ragged.
    yield (
        "deepseek-v3-fp8",
        DeepseekV3ForCausalLM,
        DeepseekV3Config(**V3, hidden_size=256, moe_intermediate_size=136, n_routed_experts=12),
        True,
    )


def quantise(weight):
    """Returns (fp8 values, scale per 128×128 block, dequantised weight in float32)."""
    rows, cols = weight.shape
    scales = torch.empty(-(-rows // FP8_BLOCK), -(-cols // FP8_BLOCK))
    stored = torch.empty_like(weight, dtype=torch.float8_e4m3fn)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            at = (
                slice(i * FP8_BLOCK, (i + 1) * FP8_BLOCK),
                slice(j * FP8_BLOCK, (j + 1) * FP8_BLOCK),
            )
            # Uneven factors show a reader that mixes up blocks.
            scales[i, j] = weight[at].abs().max() / FP8_MAX * (1 + i + 2 * j)
            stored[at] = (weight[at] / scales[i, j]).to(torch.float8_e4m3fn)
    return stored, scales, dequantise(stored, scales)


def dequantise(stored, scales):
    full = scales.repeat_interleave(FP8_BLOCK, 0).repeat_interleave(FP8_BLOCK, 1)
    return stored.float() * full[: stored.shape[0], : stored.shape[1]]


def set_weights(block, fp8, generator):
    """Draws every weight of the block and returns what a file stores: {local name: tensor}.

    Local names are those of Qwen3-MoE and DeepSeek: `experts.E.gate_proj.weight`.
    """
    stored = {}

    def draw(name, rows, cols, gain=1.0):
        weight = torch.randn(rows, cols, generator=generator) * gain / cols**0.5
        if fp8 and not name.startswith("gate."):
            stored[name], stored[name + "_scale_inv"], weight = quantise(weight)
            return weight
        stored[name] = weight.to(torch.bfloat16)
        return stored[name].float()

    with torch.no_grad():
        # A gain above 1 spreads the scores, so that weights of a token differ clearly.
        block.gate.weight.copy_(draw("gate.weight", *block.gate.weight.shape, gain=2.0))
        if hasattr(block.gate, "e_score_correction_bias"):
            bias = 0.1 * torch.randn(block.gate.weight.shape[0], generator=generator)
            block.gate.e_score_correction_bias.copy_(bias)
            stored["gate.e_score_correction_bias"] = bias
        # transformers fuses the experts: gate above up in one [experts, 2 × width, hidden].
        width, hidden = block.experts.gate_up_proj.shape[1] // 2, block.experts.hidden_dim
        for e in range(block.experts.num_experts):
            gate = draw(f"experts.{e}.gate_proj.weight", width, hidden)
            up = draw(f"experts.{e}.up_proj.weight", width, hidden)
            block.experts.gate_up_proj[e].copy_(torch.cat([gate, up]))
            block.experts.down_proj[e].copy_(
                draw(f"experts.{e}.down_proj.weight", hidden, width)
            )
        if hasattr(block, "shared_experts"):
            for proj in ("gate_proj", "up_proj", "down_proj"):
                weight = getattr(block.shared_experts, proj).weight
                weight.copy_(draw(f"shared_experts.{proj}.weight", *weight.shape))
    return stored


def hub_name(model_type, local):
    if model_type != "mixtral":
        return "model.layers.0.mlp." + local
    for ours, theirs in (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")):
        local = local.replace(ours, theirs)
    return "model.layers.0.block_sparse_moe." + local


def check_names(model, tensors):
    """Our names and values against those that transformers writes for the whole model."""
    with tempfile.TemporaryDirectory() as tmp:
        model.save_pretrained(tmp)
        theirs = load_file(pathlib.Path(tmp) / "model.safetensors")
    for name, ours in tensors.items():
        if name.endswith("_scale_inv"):
            continue
        scales = tensors.get(name + "_scale_inv")
        ours = ours.float() if scales is None else dequantise(ours, scales)
        assert name in theirs, (name, sorted(n for n in theirs if "layers.0.mlp" in n)[:8])
        assert torch.equal(ours, theirs[name].float()), name


def plain_loop(read, prefix, x, topk_idx, topk_weights):
    """Experts one token and one choice at a time, from tensors by name."""
    names = ("w1", "w3", "w2") if "block_sparse" in prefix else ("gate_proj", "up_proj", "down_proj")
    out = torch.zeros_like(x)
    for t in range(x.shape[0]):
        for expert, weight in zip(topk_idx[t].tolist(), topk_weights[t].tolist()):
            gate, up, down = (read(f"{prefix}experts.{expert}.{n}.weight") for n in names)
            out[t] += weight * (down @ (F.silu(gate @ x[t]) * (up @ x[t])))
    return out


def write_config(model, directory, fp8):
    model.config.architectures = [type(model).__name__]
    model.config.dtype = "bfloat16"
    model.config.save_pretrained(directory)
    path = directory / "config.json"
    config = json.loads(path.read_text())
    if fp8:
        config.update(
            moe_layer_freq=1,
            scoring_func="sigmoid",
            topk_method="noaux_tc",
            quantization_config=dict(
                activation_scheme="dynamic",
                fmt="e4m3",
                quant_method="fp8",
                weight_block_size=[FP8_BLOCK, FP8_BLOCK],
            ),
        )
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def make(name, model_class, config, fp8, seed, out):
    torch.manual_seed(seed)
    config._experts_implementation = "eager"
    model = model_class(config).float().eval()
    block = model.model.layers[0].mlp
    generator = torch.Generator().manual_seed(seed)
    stored = set_weights(block, fp8, generator)
    tensors = {hub_name(config.model_type, k): v.contiguous() for k, v in stored.items()}
    check_names(model, tensors)

    x = torch.randn(NUM_TOKENS, config.hidden_size, generator=generator)
    with torch.no_grad():
        logits, weights, idx = block.gate(x)
        routed = block.experts(x, idx, weights)
        whole = block(x[None])[0]
    reference = dict(
        x=x,
        router_logits=logits,
        topk_idx=idx.to(torch.int32),
        topk_weights=weights,
        routed_out=routed,
        block_out=whole,
    )
    directory = out / name
    directory.mkdir(parents=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    save_file({k: v.float() if v.is_floating_point() else v for k, v in reference.items()},
              directory / "reference.safetensors")
    write_config(model, directory, fp8)

    file = load_file(directory / "model.safetensors")

    def read(tensor):
        scales = file.get(tensor + "_scale_inv")
        return file[tensor].float() if scales is None else dequantise(file[tensor], scales)

    again = plain_loop(read, hub_name(config.model_type, ""), x, idx, weights)
    error = ((again - routed).abs().max() / routed.abs().max()).item()
    shared = (whole - routed).abs().max().item()
    size = sum(f.stat().st_size for f in directory.iterdir())
    print(f"{name}: {len(tensors)} tensors, {size} bytes, plain loop differs by {error:.1e}, "
          f"|routed| {routed.abs().max():.2f}, |shared| {shared:.2f}, "
          f"experts used {idx.unique().numel()}")
    assert error < 1e-5, name
    assert torch.isfinite(whole).all(), name


def main():
    out = pathlib.Path(sys.argv[1])
    print("torch", torch.__version__, "transformers", transformers.__version__)
    for seed, (name, model_class, config, fp8) in enumerate(blocks(), start=1):
        make(name, model_class, config, fp8, seed, out)


if __name__ == "__main__":
    main()
