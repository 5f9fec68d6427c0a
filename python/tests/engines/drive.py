"""Runs a list of jobs with one engine in one process: starting an engine takes longer than a job.

Usage: python drive.py transformers|vllm JOBS.json

A job has `model`, `served`, `prompts`, `tokens`, `settings` and `options`. The script prints one JSON object per job,
with `ids` or with the type and text of an `error`.
"""

from __future__ import annotations

import contextlib
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
        options["experts_implementation"] = switchyard_moe.transformers.IMPLEMENTATION
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
