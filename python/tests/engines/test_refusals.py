"""Wrong models, settings and engines: one error that names what was found and what was expected, at the start."""

from __future__ import annotations

import shutil
from pathlib import Path

import harness
import pytest
from test_families import PROMPTS, drive, make, settings

import switchyard_moe


def test_transformers_refuses(tmp_path: Path, tiny: Path) -> None:
    make(tmp_path, "qwen3_moe", "mixtral")
    first = tmp_path / "first"
    shutil.move(tmp_path / "qwen3_moe", first)
    make(tmp_path, "qwen3_moe")
    with switchyard_moe.LocalCluster(first, servers=1) as cluster:
        given = settings(cluster, tmp_path)
        job = {"served": True, "settings": given, "prompts": PROMPTS[:1], "tokens": 2}
        absent = {**given, "control_plane": "http://127.0.0.1:9", "ready_timeout": 1}
        text = {"num_hidden_layers": 1, "hidden_size": 64, "num_experts": 4, "vocab_size": 1000}
        talker = {"text_config": {**text, "shared_expert_intermediate_size": 64}, "spatial_merge_size": 2}
        omni = {
            "class": "Qwen3OmniMoeForConditionalGeneration",
            "config": {"thinker_config": {"text_config": text}, "talker_config": talker, "enable_audio_output": True},
        }
        vision = {"num_hidden_layers": 2, "moe_num_experts": 8, "hidden_size": 256, "num_attention_heads": 4}
        rows = drive(
            "transformers",
            [
                {**job, "model": str(first)},
                # The same shape, and other weights.
                {**job, "model": str(tmp_path / "qwen3_moe")},
                # Another shape.
                {**job, "model": str(tiny)},
                {**job, "model": str(first), "settings": absent},
                {**job, "model": str(first), "settings": {**given, "wire_dtype": "f64"}},
                {**job, "model": str(first), "grad": True},
                {**job, "class": "Llama4TextModel", "config": {"num_hidden_layers": 1, "hidden_size": 64}},
                {
                    **job,
                    "class": "Ernie4_5_VLMoeTextModel",
                    "config": vision,
                    "settings": {**given, "model": str(first)},
                },
                {**job, **omni},
                {**job, **omni, "options": {"experts_implementation": {"": "switchyard", "talker_config": "eager"}}},
                {**job, **omni, "options": {"experts_implementation": {"thinker_config": "switchyard"}}},
            ],
            tmp_path,
        )
    assert "ids" in rows[0]
    expected = [
        ("ModelMismatchError", "fingerprint"),
        ("ModelMismatchError", "number of experts is 8, expected 16"),
        ("NotReady", "127.0.0.1:9 was not ready in 1 s"),
        ("ConfigError", "wire_dtype is 'f64', expected"),
        ("ArgumentError", "torch.no_grad"),
        ("ConfigError", "Llama4TextExperts"),
        ("ModelMismatchError", "expected those of both: this model cannot be served"),
        ("ConfigError", "experts of its thinker only"),
        ("ConfigError", "for this part of the model, too"),
    ]
    for row, (error, text) in zip(rows[1:-1], expected, strict=True):
        assert row.get("error") == error and text in row["text"], row
    # The talker's experts may stay in the engine.
    assert "ids" in rows[-1], rows[-1]


def test_vllm_refuses(tmp_path: Path, tiny: Path) -> None:
    make(tmp_path, "qwen3_moe")
    with switchyard_moe.LocalCluster(tmp_path / "qwen3_moe", servers=1) as cluster:
        given = settings(cluster, tmp_path)
        job = {"model": str(tiny), "served": True, "settings": given, "prompts": PROMPTS[:1], "tokens": 2}
        rows = drive(
            "vllm",
            [
                job,
                {**job, "settings": {**given, "control_plane": "http://127.0.0.1:9", "ready_timeout": 1}},
                {**job, "settings": {**given, "token": "secret"}},
                {**job, "settings": {**given, "replicas": 2}},
                {**job, "options": {"quantization": "switchyard", "load_format": "auto"}},
            ],
            tmp_path,
        )
    expected = [
        ("ModelMismatchError", "number of experts is 8, expected 16"),
        ("NotReady", "127.0.0.1:9 was not ready in 1 s"),
        ("ConfigError", "vLLM prints its configuration"),
        ("ConfigError", "setting 'replicas' of switchyard is unknown"),
        ("ConfigError", "--load-format switchyard"),
    ]
    for row, (error, text) in zip(rows, expected, strict=True):
        assert row.get("error") == error and text in row["text"], row


@pytest.mark.parametrize("options", [["--layer-class"], []])
def test_vllm_without_the_plugin_does_not_start(options: list[str], tiny: Path, prompts: Path) -> None:
    env = harness.environment(VLLM_PLUGINS="none", VLLM_ENABLE_V1_MULTIPROCESSING="0")
    script = harness.EXAMPLES / "vllm_generate.py"
    code, rows, errors = harness.run(script, tiny, prompts, "--enforce-eager", *options, env=env)
    assert code != 0 and rows == [] and "switchyard" in errors
