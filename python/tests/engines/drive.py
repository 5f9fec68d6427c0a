"""Runs a list of jobs with one engine in one process: starting an engine takes longer than a job.

Usage: python drive.py transformers|vllm JOBS.json

A job has `model`, `served`, `prompts`, `tokens`, `settings` and `options`. The script prints one JSON object per job,
with `ids` or with the type and text of an `error`.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import json
import os
import sys
from typing import Any


def transformers_job(job: dict[str, Any]) -> list[list[int]]:
    import torch
    import transformers
    from transformers import AutoModelForCausalLM

    import switchyard_moe.transformers

    options = dict(job.get("options", {}))
    if job["served"]:
        switchyard_moe.transformers.configure(**job["settings"])
        options.setdefault("experts_implementation", switchyard_moe.transformers.IMPLEMENTATION)
    if job.get("two_modules"):
        compare_two_modules(job["model"])
        return []
    if "class" in job:
        # Without weights: what the plugin refuses, it refuses while the model is built.
        model_class = getattr(transformers, job["class"])
        with torch.device("meta"):
            model_class._from_config(model_class.config_class(**job["config"]), **options)
        return []
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32, **options).eval()
    if job["served"]:
        left = [n for n, _ in model.named_parameters() if ".experts." in n and "bias" not in n]
        assert not left, f"experts in this process: {left[:3]}"
    if job.get("fp8_experts"):
        replace_by_fp8_experts(model)
        return []
    with contextlib.nullcontext() if job.get("grad") else torch.no_grad():
        if job.get("grad"):
            model(torch.tensor([job["prompts"][0]]))
        outputs = [
            model.generate(
                torch.tensor([prompt]), max_new_tokens=job["tokens"], do_sample=False, eos_token_id=None, pad_token_id=0
            )
            for prompt in job["prompts"]
        ]
    return [out[0, len(prompt) :].tolist() for out, prompt in zip(outputs, job["prompts"], strict=True)]


def compare_two_modules(folder: str) -> None:
    """Gives a model with experts for text and for images those of a checkpoint, and compares local and served outputs.

    The checkpoint has the experts of both in one layer, text first, as those of this family do.
    """
    import torch
    from safetensors.torch import load_file
    from transformers import Ernie4_5_VLMoeTextConfig, Ernie4_5_VLMoeTextModel

    with open(f"{folder}/config.json") as file:
        given = json.load(file)
    layers, half = given["num_hidden_layers"], given["moe_num_experts"] // 2
    kept = ("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size", "moe_k")
    config = Ernie4_5_VLMoeTextConfig(
        **{key: given[key] for key in kept},
        num_hidden_layers=layers,
        moe_num_experts=half,
        moe_intermediate_size=[given["moe_intermediate_size"]] * 2,
        moe_num_shared_experts=1,
        mlp_layer_types=["sparse"] * layers,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [6, 6, 4]},
    )
    local = Ernie4_5_VLMoeTextModel._from_config(copy.deepcopy(config), experts_implementation="eager").eval()
    tensors = load_file(f"{folder}/model.safetensors")
    with torch.no_grad():
        for layer in range(layers):
            for part, module in enumerate((local.layers[layer].mlp.text_moe, local.layers[layer].mlp.vision_moe)):
                module.gate.weight.normal_()
                for expert in range(half):
                    name = f"model.layers.{layer}.mlp.experts.{part * half + expert}"
                    gate, up, down = (tensors[f"{name}.{which}_proj.weight"] for which in ("gate", "up", "down"))
                    module.experts.gate_up_proj[expert] = torch.cat([gate, up])
                    module.experts.down_proj[expert] = down
        served = Ernie4_5_VLMoeTextModel._from_config(config, experts_implementation="switchyard").eval()
        assert not [name for name, _ in served.named_parameters() if ".experts." in name]
        missing, unexpected = served.load_state_dict(local.state_dict(), strict=False)
        assert not missing and all(".experts." in name for name in unexpected), (missing, unexpected)
        prompt = torch.randint(0, given["vocab_size"], (2, 12))
        # Text, images, and both.
        for kinds in (torch.zeros(2, 12), torch.ones(2, 12), torch.tensor([[0, 1] * 6, [1] * 5 + [0] * 7])):
            options = {"input_ids": prompt, "moe_mm_token_type_ids": kinds.int(), "use_cache": False}
            expected = local(**options).last_hidden_state
            found = served(**options).last_hidden_state
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
            assert not torch.allclose(found, served(input_ids=prompt.flip(1)).last_hidden_state)


def replace_by_fp8_experts(model: Any) -> None:
    """Replaces the layers as transformers does on a GPU, and compares the experts' outputs before and after."""
    import torch
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import FP8Experts, replace_with_fp8_linear

    name = next(name for name, module in model.named_modules() if name.endswith(".experts"))
    x, ids = torch.randn(5, model.config.hidden_size), torch.tensor([[0, 3]] * 5)
    weights = torch.rand(5, 2)
    with torch.no_grad():
        before = model.get_submodule(name)(x, ids, weights)
        quantization = FineGrainedFP8Config(weight_block_size=(128, 128))
        replace_with_fp8_linear(model, quantization_config=quantization, pre_quantized=True)
        experts = model.get_submodule(name)
        assert isinstance(experts, FP8Experts), type(experts)
        assert not list(experts.parameters())
        torch.testing.assert_close(experts(x, ids, weights), before)
    assert before.abs().max() > 0


def vllm_job(job: dict[str, Any]) -> list[list[int]]:
    from vllm import LLM, SamplingParams
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    options = dict(job.get("options", {}))
    if job["served"]:
        options.setdefault("load_format", "switchyard")
        options["additional_config"] = {"switchyard": job["settings"]}
    llm = None
    try:
        llm = LLM(
            model=job["model"],
            skip_tokenizer_init=True,
            dtype=job.get("dtype", "float32"),
            max_model_len=128,
            max_num_seqs=4,
            max_num_batched_tokens=128,
            enforce_eager=True,
            distributed_executor_backend="uni",
            **options,
        )
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in job["prompts"]],
            SamplingParams(temperature=0, max_tokens=job["tokens"], ignore_eos=True, detokenize=False),
            use_tqdm=False,
        )
        return [list(output.outputs[0].token_ids) for output in outputs]
    finally:
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def main() -> None:
    run = {"transformers": transformers_job, "vllm": vllm_job}[sys.argv[1]]
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    with open(sys.argv[2]) as file:
        jobs = json.load(file)
    for number, job in enumerate(jobs):
        try:
            row: dict[str, Any] = {"job": number, "ids": run(job)}
        except Exception as error:
            row = {"job": number, "error": type(error).__name__, "text": str(error)}
            cause = error.__cause__ or error.__context__
            if cause is not None:
                row["text"] += f" | {cause}"
        print("\n" + json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
