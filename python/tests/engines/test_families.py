"""Random tiny checkpoints of several families: the same ids with experts of the engine and of the servers."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
from pathlib import Path
from typing import Any

import harness
import pytest
from conftest import is_long

import switchyard_moe

PROMPTS = [[5, 9, 100, 41, 17], [7, 7, 7, 300, 2, 90], [450, 33, 8, 77, 201, 3, 4]]
# vLLM computes fp8 on a CPU with AMX only, with or without the plugin.
FAMILIES = {
    "transformers": ["qwen2_moe", "mixtral", "olmoe", "deepseek_v3", "glm4_moe", "gpt_oss", "fp8"],
    "vllm": ["deepseek_v3", "gpt_oss"],
}
MORE_OF_VLLM = ["qwen2_moe", "mixtral", "olmoe", "glm4_moe"]


def make(folder: Path, *families: str) -> int:
    """Writes checkpoints with a fresh seed. `SWITCHYARD_TEST_SEED` repeats a failed test."""
    seed = int(os.environ.get("SWITCHYARD_TEST_SEED") or secrets.randbits(32))
    print(f"SWITCHYARD_TEST_SEED={seed}")
    command = [sys.executable, str(harness.HERE / "checkpoints.py"), str(folder), str(seed), *families]
    subprocess.run(command, check=True, capture_output=True, timeout=harness.TIMEOUT)
    return seed


def settings(cluster: switchyard_moe.LocalCluster, folder: Path) -> dict[str, Any]:
    file = folder / f"token-{secrets.token_hex(4)}"
    file.write_text(cluster.token)
    return {"control_plane": cluster.url, "token_file": str(file), "ready_timeout": 60}


def drive(engine: str, jobs: list[dict[str, Any]], folder: Path, timeout: float = 1200.0) -> list[dict[str, Any]]:
    """Runs jobs in one process of an engine and returns their results."""
    file = folder / "jobs.json"
    file.write_text(json.dumps(jobs))
    code, rows, errors = harness.run(
        harness.HERE / "drive.py", engine, file, env=harness.environment(), timeout=timeout
    )
    assert code == 0 and len(rows) == len(jobs), errors[-4000:]
    return rows


@pytest.mark.parametrize("engine", FAMILIES)
def test_families_are_token_identical(engine: str, tmp_path: Path) -> None:
    families = FAMILIES[engine] + (MORE_OF_VLLM if engine == "vllm" and is_long() else [])
    make(tmp_path, *families)
    jobs = []
    with contextlib.ExitStack() as stack:
        for family in families:
            model = tmp_path / family
            cluster = stack.enter_context(switchyard_moe.LocalCluster(model, servers=1))
            job = {"model": str(model), "prompts": PROMPTS, "tokens": 32}
            jobs += [{**job, "served": False}, {**job, "served": True, "settings": settings(cluster, tmp_path)}]
        rows = drive(engine, jobs, tmp_path)
    for number, family in enumerate(families):
        local, served = rows[2 * number], rows[2 * number + 1]
        assert "error" not in local and "error" not in served, (family, local, served)
        assert served["ids"] == local["ids"], family
        assert len({token for ids in local["ids"] for token in ids}) > 10, f"{family} repeats itself"


def test_fp8_experts_of_transformers_are_served(tmp_path: Path) -> None:
    # Without a GPU, transformers widens a checkpoint instead of using these modules.
    make(tmp_path, "fp8")
    with switchyard_moe.LocalCluster(tmp_path / "fp8", servers=1) as cluster:
        job = {"model": str(tmp_path / "fp8"), "served": True, "settings": settings(cluster, tmp_path)}
        rows = drive("transformers", [{**job, "fp8_experts": True}], tmp_path)
    assert rows == [{"job": 0, "ids": []}]


def test_two_modules_of_experts_in_a_layer(tmp_path: Path) -> None:
    make(tmp_path, "ernie4_5_moe")
    model = tmp_path / "ernie4_5_moe"
    with switchyard_moe.LocalCluster(model, servers=1) as cluster:
        given = {**settings(cluster, tmp_path), "model": str(model)}
        job = {"model": str(model), "served": True, "settings": given}
        rows = drive("transformers", [{**job, "two_modules": True}], tmp_path)
    assert rows == [{"job": 0, "ids": []}]
