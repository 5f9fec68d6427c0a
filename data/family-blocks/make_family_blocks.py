#!/usr/bin/env python3
"""Make one small MoE block per model family, with reference outputs from Hugging Face transformers.

Usage: python3 make_family_blocks.py OUT_DIR [--options] [NAME …]
(needs torch, transformers 5.23, safetensors, scipy; `--options` tries many more configurations)

For every family, OUT_DIR/<name>/ becomes a checkpoint that holds the tensors of one MoE layer only:

    config.json            as `save_pretrained` writes it
    model.safetensors      router, routed experts, shared experts; names and layout as `save_pretrained`
                           writes them for the whole model
    reference.safetensors  what transformers computes in float32, on the CPU, from those weights:
        x              [tokens, hidden]   f32  input of the router and of the block
        experts_x      [tokens, width]    f32  input of the experts, if it is not x
        token_ids      [tokens]           i32  only where the router hashes them
        router_logits  [tokens, experts]  f32
        topk_idx       [tokens, top_k]    i32  experts chosen, in transformers' order
        topk_weights   [tokens, top_k]    f32  their weights as the experts' module receives them
        routed_out     [tokens, width]    f32  output of the experts' module, nothing else
        block_out      [tokens, hidden]   f32  the whole block, with the shared experts
        metadata: model_type, layer, transformers, torch

Every block is computed a second time by `plain_blocks.py` from the files and `families.json` alone.
A block for which any result differs by more than 1e-5 of its largest value is not written. The
script also compares `families.json` with the defaults and aliases of transformers' configurations.
"""

import json
import pathlib
import re
import sys
import tempfile
import zlib

import torch
import transformers
from family_settings import BASE, OTHER_CONFIGS, SETTINGS, VARIANTS, mix, without
from huggingface_hub.errors import StrictDataclassError
from plain_blocks import PlainBlock
from safetensors.torch import load_file, save_file
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

NUM_TOKENS = 12
MXFP4_GROUP = 32
TOLERANCE = 1e-5
HERE = pathlib.Path(__file__).parent


def table():
    families = json.loads((HERE / "families.json").read_text())["families"]
    return {family["folder"]: family for family in families}


def blocks():
    """Yields (folder, family, settings of the text configuration)."""
    families = table()
    for name, family in families.items():
        yield name, family, SETTINGS[name]
        for variant, (of, changes) in VARIANTS.items():
            if of == name:
                yield variant, family, mix(SETTINGS[name], changes)


# Table against configurations


def check_table(family):
    """Compares keys, their precedence and defaults with transformers' configuration class."""

    def text_config(settings):
        for key in filter(None, reversed(family["config"].split("."))):
            settings = {key: settings}
        settings = dict(settings, model_type=family["model_type"])
        return CONFIG_MAPPING[family["model_type"]].from_dict(settings).get_text_config()

    def check(value):
        if isinstance(value, dict):
            if "keys" in value and "default" in value and hasattr(defaults, value["keys"][0]):
                for key in value["keys"]:
                    found = getattr(defaults, key, value["default"])
                    special = key in ("moe_layer_end_index", "mlp_only_layers")
                    assert special or found == value["default"], (family["folder"], key, found, value)
                first, *others = value["keys"]
                for other in others:
                    a, b = (True, False) if isinstance(value["default"], bool) else (24, 36)
                    both = text_config({other: b, first: a})
                    assert getattr(both, first) == a, (family["folder"], first, other)
            for inner in value.values():
                check(inner)

    defaults = text_config({})
    check(family)


LAYER_SETTINGS = [
    {},
    dict(first_k_dense_replace=2),
    dict(num_dense_layers=3),
    dict(dense_mlp_idx=2),
    dict(mlp_layer_types=["sparse", "dense", "sparse", "dense", "sparse"]),
    dict(mlp_layer_types=["sparse", "dense", "sparse", "dense", "sparse"], first_k_dense_replace=3),
    dict(decoder_sparse_step=2),
    dict(mlp_only_layers=[1, 3]),
    dict(decoder_sparse_step=2, mlp_only_layers=[3]),
    dict(moe_layers=[1, 2]),
    dict(interleave_moe_layer_step=2),
    dict(moe_layer_freq=2),
    dict(moe_layer_freq=[0, 1, 1, 0, 1]),
    dict(moe_layer_interval=2),
    dict(moe_layer_start_index=2, moe_layer_end_index=3),
    dict(expert_layer_period=3, expert_layer_offset=2),
    dict(hybrid_override_pattern="*E-E*"),
    dict(layers_block_type=["full_attention", "moe", "moe", "full_attention", "moe"]),
    dict(enable_moe_block=False),
    dict(num_hash_layers=2),
]
LAYER_KEYS = {key for settings in LAYER_SETTINGS for key in settings} | {"layer_types"}


def check_layers(family):
    """Compares the layers with experts, as the table gives them, with those that transformers builds.

    Every key is tried with every family: families ignore most of them. Returns the number of models.
    """
    checked = 0
    base = without(SETTINGS[family["folder"]], *LAYER_KEYS - {"enable_moe_block"})
    for settings in LAYER_SETTINGS:
        text = mix(base, num_hidden_layers=5, **settings)
        if family["folder"] == "lfm2_moe":
            text["layer_types"] = ["full_attention"] * 5
        config = as_file(family, text)
        try:
            found = CONFIG_MAPPING[family["model_type"]].from_dict(config)
            with torch.device("meta"):
                model = getattr(transformers, family["architectures"][0])(found)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, StrictDataclassError) as error:
            print(f"  {family['folder']} {settings}: transformers refuses: {type(error).__name__}")
            continue
        actual = sorted(int(re.search(r"layers\.(\d+)", name).group(1)) for name in expert_modules(model))
        block = PlainBlock(family, config, {}, 0)
        described = block.moe_layers()
        assert described == actual, (family["folder"], settings, described, actual)
        if "hash" in family["router"]:
            hashed = [
                int(re.search(r"layers\.(\d+)", n).group(1))
                for n in model.state_dict()
                if n.endswith("tid2eid")
            ]
            own = [i for i in range(5) if PlainBlock(family, config, {}, i).is_hash_layer()]
            assert own == hashed, (settings, own, hashed)
        checked += 1
    return checked


# Building


def as_file(family, settings):
    """`config.json` with these settings and no others."""
    if family["folder"] == "kimi_k25":
        settings = mix(settings, model_type="kimi_k2")
    if family["config"]:
        settings = mix(OTHER_CONFIGS.get(family["folder"], {}), text_config=settings)
    if family["config"].startswith("thinker_config."):
        settings = dict(thinker_config=settings, enable_audio_output=False)
    return json.loads(json.dumps(mix(settings, model_type=family["model_type"])))


def build(family, settings):
    """Returns transformers' model of these settings, float32, with random weights."""
    config = CONFIG_MAPPING[family["model_type"]].from_dict(as_file(family, settings))
    for part in (config, config.get_text_config()):
        part._experts_implementation = "eager"
        part._attn_implementation = "eager"
    model_class = getattr(transformers, family["architectures"][0])
    return model_class(config).float().eval()


def expert_modules(model):
    return [
        name
        for name, module in model.named_modules()
        if name.endswith(".experts") and (hasattr(module, "gate_up_proj") or hasattr(module, "up_proj"))
    ]


def moe_parts(model):
    """Returns the index of the layer with experts, its name and the name of the experts' module."""
    found = expert_modules(model)
    assert len(found) == 1, found
    layer_name = re.match(r".*?layers\.\d+", found[0]).group()
    return int(layer_name.rsplit(".", 1)[1]), layer_name, found[0]


def block_names(model, layer_name, block_name):
    """Names of the block's tensors in transformers' model."""
    prefixes = [block_name + "."]
    if block_name == layer_name:
        prefixes = [layer_name + ".router.", layer_name + ".experts."]
    prefixes.append(layer_name + ".shared_mlp.")
    return [name for name in model.state_dict() if name.startswith(tuple(prefixes))]


def rounded(values):
    """Values that bf16 holds exactly, so that a loader may narrow them."""
    return values.to(torch.bfloat16).float()


def fill(model, names, experts_name, num_experts, generator):
    """Draws the block's weights. Gains spread the scores, so that weights of a token differ clearly."""
    state = model.state_dict()
    experts = model.get_submodule(experts_name)
    transposed = getattr(experts, "is_transposed", type(experts).__name__ == "Llama4TextExperts")
    for name in names:
        tensor = state[name]
        draw = torch.randn(tensor.shape, generator=generator)
        if name.endswith(".tid2eid"):
            rows = [torch.randperm(num_experts, generator=generator) for _ in tensor]
            tensor.copy_(torch.stack(rows)[:, : tensor.shape[1]])
            continue
        if tensor.dim() == 1 or "bias" in name:
            draw = 0.1 * draw + (1.0 if "norm" in name or "scale" in name else 0.0)
        else:
            fan_in = tensor.shape[-2] if transposed and tensor.dim() == 3 else tensor.shape[-1]
            draw = draw * (2.0 if ".gate." in name or ".router." in name else 1.0) / fan_in**0.5
        tensor.copy_(rounded(draw))


# Running


def run(model, layer_name, block_name, experts_name, top_k, x, token_ids):
    """Runs transformers' block on x and returns the tensors of `reference.safetensors`."""
    layer, block = model.get_submodule(layer_name), model.get_submodule(block_name)
    router = block.gate if hasattr(block, "gate") else block.router
    seen = {}

    def watch(key, module):
        module.register_forward_hook(lambda _module, args, output: seen.update({key: (args, output)}))

    watch("router", router)
    watch("experts", model.get_submodule(experts_name))
    if hasattr(router, "proj"):
        watch("logits", router.proj)
    with torch.no_grad():
        if block is layer:
            # Gemma 4 has no module for the block: its layer calls router and experts.
            _, weights, idx = router(x)
            out = block.experts(layer.pre_feedforward_layernorm_2(x), idx, weights)
        else:
            out = block(x[None]) if token_ids is None else block(x[None], token_ids[None])
            out = out[0] if isinstance(out, tuple) else out
            out = out.reshape(len(x), -1)
            if getattr(layer, "shared_mlp", None) is not None:
                out = out + layer.shared_mlp(x)
    args, routed = seen["experts"]
    if len(args) == 1:
        # Llama 4 runs all experts on weighted rows.
        scores, logits = seen["router"][1]
        weights, idx = scores.topk(top_k, -1)
        experts_x, routed = x, routed.view(scores.shape[1], len(x), -1).sum(0)
    else:
        experts_x, idx, weights = args
        logits = seen["logits"][1] if "logits" in seen else seen["router"][1][0]
    reference = dict(
        x=x,
        router_logits=logits,
        topk_idx=idx.to(torch.int32),
        topk_weights=weights,
        routed_out=routed,
        block_out=out,
    )
    if experts_x.shape != x.shape or not torch.equal(experts_x, x):
        reference["experts_x"] = experts_x
    if token_ids is not None:
        reference["token_ids"] = token_ids.to(torch.int32)
    return {k: v.detach().clone().contiguous() for k, v in reference.items()}


def saved(model):
    """Returns (tensors, config.json's text) of the whole model as transformers writes them."""
    with tempfile.TemporaryDirectory() as tmp:
        model.save_pretrained(tmp)
        tensors = {}
        for path in sorted(pathlib.Path(tmp).glob("*.safetensors")):
            tensors.update(load_file(path))
        config = json.loads((pathlib.Path(tmp) / "config.json").read_text())
    return tensors, config


# Checking and writing


def difference(a, b):
    return ((a - b).abs().max() / b.abs().max()).item()


def by_expert(idx, weights):
    """Experts and weights of each token in the order of the experts."""
    idx, order = idx.sort(-1)
    return idx, weights.gather(-1, order)


def check_block(family, config, tensors, reference, layer):
    """Compares the plain computation with the reference; returns the largest difference."""
    block = PlainBlock(family, config, tensors, layer)
    assert layer in block.moe_layers(), (layer, block.moe_layers())
    experts_x, ids = reference.get("experts_x"), reference.get("token_ids")
    idx, weights = reference["topk_idx"].long(), reference["topk_weights"]
    inner = reference["x"] if experts_x is None else experts_x
    routed = block.experts(inner, idx, weights)
    worst = {"routed_out": difference(routed, reference["routed_out"])}

    gemma = "input" in family["router"]
    logits, own_idx, own_weights, _, out = block.block(reference["x"], experts_x if gemma else None, ids)
    worst["router_logits"] = difference(logits, reference["router_logits"])
    worst["block_out"] = difference(out, reference["block_out"])
    (own_idx, own_weights), (idx, weights) = by_expert(own_idx, own_weights), by_expert(idx, weights)
    assert torch.equal(own_idx, idx), (own_idx, idx)
    worst["topk_weights"] = difference(own_weights, weights)
    for key, found in worst.items():
        assert found < TOLERANCE, (key, found)
    unused = set(tensors) - block.used - block.expert_names()
    assert not unused, ("not described", unused)
    return max(worst.values())


def sort_metadata(path):
    """safetensors writes the entries of `__metadata__` in random order."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":")).encode().ljust(length)
    assert len(text) == length
    path.write_bytes(data[:8] + text + data[8 + length :])


def write(directory, config, tensors, reference, model_type, layer):
    directory.mkdir(parents=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    metadata = dict(
        model_type=model_type,
        layer=str(layer),
        transformers=transformers.__version__,
        torch=torch.__version__,
    )
    save_file(reference, directory / "reference.safetensors", metadata=metadata)
    sort_metadata(directory / "reference.safetensors")
    text = json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False)
    (directory / "config.json").write_text(text + "\n")


def drawn(family, settings, seed):
    """A model with drawn weights in its block; returns what the other functions need of it."""
    generator = torch.Generator().manual_seed(zlib.crc32(seed.encode()))
    torch.manual_seed(0)
    model = build(family, settings)
    layer, layer_name, experts_name = moe_parts(model)
    block_name = experts_name.rsplit(".", 1)[0]
    names = block_names(model, layer_name, block_name)
    reader = PlainBlock(family, model.config.to_dict(), {}, layer)
    with torch.no_grad():
        fill(model, names, experts_name, reader.num_experts, generator)
    state = model.state_dict()
    tensors = revert_weight_conversion(model, {n: state[n].clone() for n in names})
    return model, tensors, reader, (layer_name, block_name, experts_name), generator


def reference_of(model, reader, parts, generator):
    x = rounded(torch.randn(NUM_TOKENS, model.config.get_text_config().hidden_size, generator=generator))
    token_ids = None
    if reader.is_hash_layer():
        token_ids = torch.randint(BASE["vocab_size"], (NUM_TOKENS,), generator=generator)
    return run(model, *parts, reader.top_k, x, token_ids)


def make(name, family, settings, out):
    model, block_tensors, reader, parts, generator = drawn(family, settings, name)
    kept = list(block_tensors)
    whole, config = saved(model)
    if name in HUB_LAYOUTS:
        whole, kept, config = HUB_LAYOUTS[name](whole, kept, config, generator)
        model = reload(model, whole, config)

    reference = reference_of(model, reader, parts, generator)
    tensors = {n: whole[n].contiguous() for n in kept}
    finish(name, family, config, tensors, reference, reader.layer, out)


OPTIONS = [
    *(dict(norm_topk_prob=v) for v in (True, False)),
    *(dict(moe_renormalize=v) for v in (True, False)),
    *({key: 3.0} for key in ("routed_scaling_factor", "router_scaling_factor", "route_scale")),
    dict(routed_scaling_factor=None),
    *({key: 1} for key in ("n_group", "num_expert_group")),
    *({key: 2} for key in ("topk_group", "n_shared_experts", "num_shared_experts", "moe_num_shared_experts")),
    *({key: 0} for key in ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")),
    *(dict(shared_intermediate_size=v) for v in (0, 24)),
    *(
        {key: 3}
        for key in ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
    ),
    *(dict(hidden_act=v) for v in ("relu2", "gelu_pytorch_tanh")),
    dict(hidden_activation="silu"),
    dict(mlp_hidden_act="silu"),
    *(dict(scoring_func=v) for v in ("sigmoid", "softmax")),
    dict(score_func="softmax"),
    dict(moe_router_activation_func="softmax"),
    dict(route_norm=False),
    dict(use_routing_bias=False),
    dict(use_expert_bias=False),
    dict(topk_method="noaux_tc"),
    dict(moe_norm_min=2.0),
    dict(moe_routed_scaling_factor=0.5),
    dict(swiglu_limit=0.5),
    dict(swiglu_alpha=2.0),
    dict(dense_intermediate_size=36),
    dict(num_experts=10),
    dict(num_local_experts=10),
    dict(n_routed_experts=10),
    dict(moe_intermediate_size=22),
    dict(rms_norm_eps=0.1),
    dict(mlp_bias=True),
    dict(use_bias=True),
    dict(moe_latent_size=24, mlp_bias=True),
]


def check_options(family):
    """Tries every option with every family, without writing files. Returns the number of models."""
    checked = 0
    for options in OPTIONS:
        settings = mix(SETTINGS[family["folder"]], options)
        config = as_file(family, settings)
        try:
            model, tensors, reader, parts, generator = drawn(family, settings, family["folder"])
            reference = reference_of(model, reader, parts, generator)
        except (ValueError, TypeError, KeyError, RuntimeError, AssertionError, StrictDataclassError) as error:
            print(
                f"  {family['folder']} {options}: transformers refuses: {type(error).__name__}: {str(error)[:90]!r}"
            )
            continue
        except UnboundLocalError as error:
            print(f"  {family['folder']} {options}: transformers fails: {error}")
            continue
        if family["folder"] in HUB_LAYOUTS:
            tensors = kimi_names(tensors, [], config, generator)[0]
        try:
            check_block(family, config, tensors, reference, reader.layer)
        except Exception as error:
            print(
                f"  {family['folder']} {options}: TABLE IS WRONG: {type(error).__name__}: {str(error)[:200]}"
            )
        checked += 1
    return checked


# Layouts of the Hub's files that transformers reads but does not write. Each function takes the whole
# model's tensors, the names of the block and the configuration, and returns them changed.


def reload(model, tensors, config):
    """The model as transformers loads it from these files, dequantised to float32."""
    quantised = {}
    if "quantization_config" in config:
        quantised["quantization_config"] = transformers.Mxfp4Config(dequantize=True)
    with tempfile.TemporaryDirectory() as tmp:
        save_file(tensors, pathlib.Path(tmp) / "model.safetensors", metadata={"format": "pt"})
        (pathlib.Path(tmp) / "config.json").write_text(json.dumps(config))
        loaded, info = type(model).from_pretrained(
            tmp,
            dtype=torch.float32,
            experts_implementation="eager",
            attn_implementation="eager",
            output_loading_info=True,
            **quantised,
        )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    return loaded.eval()


def kimi_names(tensors, kept, config, _generator):
    """transformers 5.23 writes `blocks` for `layers` in the language model, too."""

    def rename(name):
        return name.replace("language_model.model.blocks.", "language_model.model.layers.")

    return {rename(n): t for n, t in tensors.items()}, [rename(n) for n in kept], config


def transposed_experts(tensors, kept, config, _generator):
    tensors = {
        n: t.transpose(1, 2).contiguous() if n in kept and t.dim() == 3 else t for n, t in tensors.items()
    }
    return tensors, kept, config


def mxfp4_experts(tensors, kept, config, generator):
    """Random 4-bit values and exponents; the experts' shapes with rows and columns exchanged."""
    tensors = dict(tensors)
    for name in [n for n in kept if n.endswith("_proj")]:
        experts, cols, rows = tensors.pop(name).shape
        shape = (experts, rows, cols // MXFP4_GROUP)
        blocks = torch.randint(256, (*shape, MXFP4_GROUP // 2), generator=generator)
        tensors[name + "_blocks"] = blocks.to(torch.uint8)
        tensors[name + "_scales"] = torch.randint(120, 125, shape, generator=generator).to(torch.uint8)
        kept = [n for n in kept if n != name] + [name + "_blocks", name + "_scales"]
    skipped = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    quantization = dict(quant_method="mxfp4", modules_to_not_convert=skipped)
    return tensors, kept, dict(config, quantization_config=quantization)


HUB_LAYOUTS = {
    "kimi_k25": kimi_names,
    "gpt_oss-mxfp4": mxfp4_experts,
    "qwen3_vl_moe-transposed": transposed_experts,
}


def finish(name, family, config, tensors, reference, layer, out):
    for value in reference.values():
        assert torch.isfinite(value).all()
    worst = check_block(family, config, tensors, reference, layer)
    directory = out / name
    write(directory, config, tensors, reference, family["model_type"], layer)
    file, stored = (load_file(directory / f"{part}.safetensors") for part in ("model", "reference"))
    check_block(family, json.loads((directory / "config.json").read_text()), file, stored, layer)
    size = sum(path.stat().st_size for path in directory.iterdir())
    used = reference["topk_idx"].unique().numel()
    print(
        f"{name}: layer {layer}, {len(tensors)} tensors, {size} bytes, differs by {worst:.1e}, "
        f"experts used {used}"
    )


def main():
    arguments = [a for a in sys.argv[1:] if a != "--options"]
    out, only = pathlib.Path(arguments[0]), arguments[1:]
    print("torch", torch.__version__, "transformers", transformers.__version__)
    failed = []
    for family in table().values():
        if only and family["folder"] not in only:
            continue
        check_table(family)
        print(f"{family['folder']}: {check_layers(family)} rules for layers")
        if "--options" in sys.argv:
            print(f"{family['folder']}: {check_options(family)} options")
    for name, family, settings in blocks():
        if only and name not in only:
            continue
        try:
            make(name, family, settings, out)
        except Exception as error:  # every family is tried
            print(f"{name}: NOT WRITTEN: {type(error).__name__}: {str(error)[:300]}")
            failed.append(name)
    sys.exit(f"not written: {failed}" if failed else 0)


if __name__ == "__main__":
    main()
