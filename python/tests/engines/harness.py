"""Runs engines in processes of their own, and reads what they print."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
HERE = Path(__file__).parent
EXAMPLES = ROOT / "examples/engines"
GOLDEN = ROOT / "data/tiny-moe/golden.json"
# An engine takes up to a minute to start on a host that does other work too.
TIMEOUT = 600.0

#: Settings of vLLM for a small host without a GPU and without a network.
VLLM_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}


def golden() -> list[tuple[list[int], list[int]]]:
    """Returns pairs of a prompt and the ids that follow it, as transformers computed them in float32."""
    prompts = json.loads(GOLDEN.read_text())["prompts"]
    return [(prompt["ids"], prompt["greedy_f32"][len(prompt["ids"]) :]) for prompt in prompts]


def tiny_folder(folder: Path) -> Path:
    """Links the small model into ``folder``, without the reference tensors: vLLM loads every safetensors file."""
    for name in ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json"):
        (folder / name).symlink_to(ROOT / "data/tiny-moe" / name)
    return folder


def untie(source: Path, target: Path) -> Path:
    """Writes a copy of a checkpoint whose output matrix is stored beside the equal embedding."""
    data = (source / "model.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8 : 8 + size]), data[8 + size :]
    embedding = header["model.embed_tokens.weight"]
    first, end = embedding["data_offsets"]
    header["lm_head.weight"] = {**embedding, "data_offsets": [len(body), len(body) + end - first]}
    text = json.dumps(header).encode()
    target.mkdir()
    (target / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + body + body[first:end])
    config = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    for name in ("generation_config.json", "tokenizer.json"):
        (target / name).symlink_to((source / name).resolve())
    return target


def environment(**more: str) -> dict[str, str]:
    """Returns this environment without settings of a service, with `more` and those for vLLM."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("SWITCHYARD_")}
    return {**kept, **VLLM_ENVIRONMENT, **more}


def run(
    script: Path,
    *arguments: str | Path,
    env: Mapping[str, str],
    on_row: Callable[[dict[str, Any]], None] = lambda row: None,
    timeout: float = TIMEOUT,
) -> tuple[int, list[dict[str, Any]], str]:
    """Runs a script. Returns its exit code, the JSON objects that it printed, and its standard error.

    Calls ``on_row`` with each object as soon as it is printed. Kills the script after ``timeout`` seconds.
    """
    child = subprocess.Popen(
        [sys.executable, str(script), *map(str, arguments)],
        env=dict(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    assert child.stdout is not None and child.stderr is not None
    errors: list[str] = []
    stream = child.stderr
    reader = threading.Thread(target=lambda: errors.extend(stream), daemon=True)
    reader.start()
    clock = threading.Timer(timeout, child.kill)
    clock.start()
    rows = []
    try:
        for line in child.stdout:
            if line.startswith("{"):
                row = json.loads(line)
                rows.append(row)
                on_row(row)
        code = child.wait()
    finally:
        clock.cancel()
        child.kill()
        child.wait()
        reader.join(10.0)
        child.stdout.close()
        child.stderr.close()
    return code, rows, "".join(errors)


def ids(code: int, rows: Sequence[Mapping[str, Any]], errors: str) -> list[list[int]]:
    """Returns the ids of every prompt in order. Fails with the end of standard error if the script failed."""
    assert code == 0, errors[-4000:]
    found = {row["prompt"]: row["ids"] for row in rows if "prompt" in row}
    return [found[number] for number in range(len(found))]
