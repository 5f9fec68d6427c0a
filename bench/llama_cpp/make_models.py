#!/usr/bin/env python3
"""Writes models of Qwen3-30B-A3B's layer shape, for compare.py: GGUF files for llama.cpp, checkpoints for Switchyard.

    make_models.py OUT_DIR

Needs numpy and gguf. Writes about 7 GB. Weights are random blocks that repeat: times do not depend on values.

Token v of a GGUF has an embedding that is large in the dimensions of eight experts, and the router reads these
dimensions. So each token's experts are known, in every layer, and compare.py can choose batches by their number of
distinct experts. `experts.json` has the experts of each token. A second GGUF of each format has experts that are
THIN_INTER wide in place of INTER; the difference of both times is that of the experts' products.
"""

import json
import pathlib
import sys

import gguf
import numpy as np

HIDDEN, INTER, THIN_INTER, EXPERTS, TOP_K = 2048, 768, 32, 128, 8
HEADS, KV_HEADS, HEAD_DIM, VOCAB, LAYERS = 32, 4, 128, 2048, 2
FORMATS = ("BF16", "Q8_0", "Q4_0")
# Far above what attention and experts add to the residual, so that the router's choice is that of the embedding.
PICK, NOISE = 1000.0, 60.0
SAMPLE = 1 << 20


def quantised(rng, shape, kind):
    """An array of `shape` in a GGUF format: one quantised sample, repeated."""
    count = int(np.prod(shape))
    sample = rng.standard_normal(SAMPLE, dtype=np.float32) * 0.02
    packed = gguf.quants.quantize(sample, gguf.GGMLQuantizationType[kind]).reshape(-1).view(np.uint8)
    total = packed.size * count // SAMPLE
    return np.resize(packed, total).reshape(*shape[:-1], -1)


def write_gguf(path, kind, inter, picks):
    rng = np.random.default_rng(1)
    out = gguf.GGUFWriter(str(path), "qwen3moe")
    out.add_context_length(4096)
    out.add_embedding_length(HIDDEN)
    out.add_block_count(LAYERS)
    out.add_feed_forward_length(6144)
    out.add_head_count(HEADS)
    out.add_head_count_kv(KV_HEADS)
    out.add_key_length(HEAD_DIM)
    out.add_value_length(HEAD_DIM)
    out.add_layer_norm_rms_eps(1e-6)
    out.add_rope_freq_base(1e6)
    out.add_expert_count(EXPERTS)
    out.add_expert_used_count(TOP_K)
    out.add_expert_feed_forward_length(inter)
    out.add_vocab_size(VOCAB)
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre("default")
    out.add_token_list([f"t{idx}" for idx in range(VOCAB)])
    out.add_token_types([1] * VOCAB)
    out.add_token_merges(["t 0"])
    out.add_bos_token_id(0)
    out.add_eos_token_id(1)

    def packed(name, shape, kind):
        dtype = gguf.GGMLQuantizationType[kind]
        out.add_tensor(name, quantised(rng, shape, kind), raw_dtype=dtype)

    def ones(name, width):
        out.add_tensor(name, np.ones(width, dtype=np.float32))

    embedding = rng.standard_normal((VOCAB, HIDDEN), dtype=np.float32) * NOISE
    embedding[:, :EXPERTS] = 0
    np.put_along_axis(embedding, picks, PICK, axis=1)
    bf16 = gguf.GGMLQuantizationType.BF16
    out.add_tensor("token_embd.weight", gguf.quants.quantize(embedding, bf16), raw_dtype=bf16)
    ones("output_norm.weight", HIDDEN)
    packed("output.weight", (VOCAB, HIDDEN), "BF16")
    router = np.eye(EXPERTS, HIDDEN, dtype=np.float32)
    for layer in range(LAYERS):
        at = f"blk.{layer}."
        for name, width in (("attn_norm", HIDDEN), ("ffn_norm", HIDDEN)):
            ones(f"{at}{name}.weight", width)
        for name in ("attn_q_norm", "attn_k_norm"):
            ones(f"{at}{name}.weight", HEAD_DIM)
        for name, shape in (
            ("attn_q", (HEADS * HEAD_DIM, HIDDEN)),
            ("attn_k", (KV_HEADS * HEAD_DIM, HIDDEN)),
            ("attn_v", (KV_HEADS * HEAD_DIM, HIDDEN)),
            ("attn_output", (HIDDEN, HEADS * HEAD_DIM)),
        ):
            packed(f"{at}{name}.weight", shape, "BF16")
        out.add_tensor(f"{at}ffn_gate_inp.weight", router)
        packed(f"{at}ffn_gate_exps.weight", (EXPERTS, inter, HIDDEN), kind)
        packed(f"{at}ffn_up_exps.weight", (EXPERTS, inter, HIDDEN), kind)
        packed(f"{at}ffn_down_exps.weight", (EXPERTS, HIDDEN, inter), kind)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def repeated(data, size):
    return np.resize(data, size).tobytes()


def linear(kind, rng, rows, cols):
    """Tensors of one linear layer, by suffix: dtype, shape, bytes."""
    codes = rng.integers(0, 256, SAMPLE, dtype=np.uint8)
    if kind == "bf16":
        values = rng.standard_normal(SAMPLE, dtype=np.float32) * 0.02
        upper = (values.view(np.uint32) >> 16).astype(np.uint16)
        return {"weight": ("BF16", [rows, cols], repeated(upper, rows * cols))}
    if kind == "fp8":
        codes[codes & 0x7F == 0x7F] ^= 1
        blocks = [rows // 128, cols // 128]
        return {
            "weight": ("F8_E4M3", [rows, cols], repeated(codes, rows * cols)),
            "weight_scale_inv": ("F32", blocks, np.full(blocks, 1e-3, np.float32).tobytes()),
        }
    groups = rows * cols // 32
    if kind == "int4":
        scale = ("BF16", [rows, cols // 32], np.full(groups, 0x3B00, np.uint16).tobytes())
        packed = ("I32", [rows, cols // 8], repeated(codes, rows * cols // 2))
    else:
        scale = ("U8", [rows, cols // 32], np.full(groups, 119, np.uint8).tobytes())
        packed = ("U8", [rows, cols // 2], repeated(codes, rows * cols // 2))
    return {"weight_packed": packed, "weight_scale": scale}


def write_checkpoint(folder, kind):
    """One layer's experts. The served tensors alone are enough to load them."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": 6144,
        "moe_intermediate_size": INTER,
        "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "norm_topk_prob": True,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "num_hidden_layers": 1,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 151936,
    }
    if kind == "fp8":
        config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    elif kind != "bf16":
        config["quantization_config"] = {"quant_method": "compressed-tensors"}
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    rng = np.random.default_rng(2)
    shapes = {"gate_proj": (INTER, HIDDEN), "up_proj": (INTER, HIDDEN), "down_proj": (HIDDEN, INTER)}
    parts = {name: linear(kind, rng, *shape) for name, shape in shapes.items()}
    header, offset, blobs = {}, 0, []
    for expert in range(EXPERTS):
        for name, tensors in parts.items():
            for suffix, (dtype, shape, data) in tensors.items():
                full = f"model.layers.0.mlp.experts.{expert}.{name}.{suffix}"
                end = offset + len(data)
                header[full] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
                blobs.append(data)
                offset = end
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % 64)
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for blob in blobs:
            file.write(blob)


def main():
    out = pathlib.Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(3)
    picks = np.stack([rng.choice(EXPERTS, TOP_K, replace=False) for _ in range(VOCAB)])
    # The second half of the vocabulary: tokens of class j share experts 8 j to 8 j + 7.
    half = VOCAB // 2
    classes = np.arange(half) % (EXPERTS // TOP_K)
    picks[half:] = classes[:, None] * TOP_K + np.arange(TOP_K)
    (out / "experts.json").write_text(json.dumps(picks.tolist()))
    for kind in FORMATS:
        write_gguf(out / f"{kind}.gguf", kind, INTER, picks)
        write_gguf(out / f"{kind}-thin.gguf", kind, THIN_INTER, picks)
    for kind in ("bf16", "fp8", "int4", "mxfp4"):
        write_checkpoint(out / kind, kind)


if __name__ == "__main__":
    main()
