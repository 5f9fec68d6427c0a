"""Throughput of an inference engine with experts as a service ÷ with its own experts, on the same cores.

Two processes load the engine, one in each way, and take turns: each round generates one batch in each. The expert
servers share the cores with both. Tokens per second count generated tokens, prompts included in the time.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

import switchyard_moe

__all__ = ["main"]

MODES = ("local", "served")


@dataclasses.dataclass(frozen=True)
class Row:
    """One batch of one round."""

    engine: str
    mode: str
    round: int
    batch: int
    prompt_tokens: int
    tokens: int
    seconds: float
    tokens_per_s: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs from the command line. Prints a summary as JSON."""
    parser = argparse.ArgumentParser("python -m switchyard_moe.bench engine", description=__doc__)
    parser.add_argument("--engine", choices=("vllm", "transformers"), required=True)
    parser.add_argument("--model", required=True, help="folder of the checkpoint")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64, help="generated per sequence")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--server-threads", type=int, default=1)
    parser.add_argument("--cores", help="such as 0,1; default: all that this process may use")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--local-experts", default="grouped_mm", help="transformers' own implementation")
    parser.add_argument("--compile", action="store_true", help="let vLLM compile")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", choices=MODES, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.child:
        _child(given, sys.stdin, sys.stdout)
        return 0
    if given.cores:
        os.sched_setaffinity(0, {int(core) for core in given.cores.split(",")})
    rows = _run(given, list(sys.argv[2:] if arguments is None else arguments))
    speeds = {mode: [row.tokens_per_s for row in rows if row.mode == mode] for mode in MODES}
    medians = {mode: statistics.median(values) for mode, values in speeds.items()}
    result = {
        "engine": given.engine,
        "model": given.model,
        "batch": given.batch,
        "tokens": given.tokens,
        "cores": sorted(os.sched_getaffinity(0)),
        "tokens_per_s": medians,
        "served_over_local": medians["served"] / medians["local"],
        "ratio_of_each_round": [a / b for a, b in zip(speeds["served"], speeds["local"], strict=True)],
    }
    if given.csv:
        with given.csv.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow([field.name for field in dataclasses.fields(Row)])
            writer.writerows(dataclasses.astuple(row) for row in rows)
    if given.json:
        given.json.write_text(json.dumps({**result, "rows": [dataclasses.asdict(row) for row in rows]}, indent=1))
    print(json.dumps(result))
    return 0


def _run(given: argparse.Namespace, arguments: list[str]) -> list[Row]:
    rows = []
    with switchyard_moe.LocalCluster(given.model, servers=given.servers, threads=given.server_threads) as cluster:
        env = {**os.environ, "SWITCHYARD_CONTROL_PLANE": cluster.url, "SWITCHYARD_TOKEN": cluster.token}
        children = {mode: _start(mode, arguments, env) for mode in MODES}
        try:
            for number in range(given.rounds + 1):
                # The order alternates, so that a slow drift of the host's speed cancels out.
                for mode in MODES if number % 2 else reversed(MODES):
                    seconds = _turn(children[mode], mode)
                    if number == 0:
                        continue
                    speed = given.batch * given.tokens / seconds
                    rows.append(
                        Row(
                            given.engine,
                            mode,
                            number,
                            given.batch,
                            given.prompt_tokens,
                            given.tokens,
                            seconds,
                            speed,
                        )
                    )
        finally:
            for child in children.values():
                child.kill()
                child.wait()
    return rows


def _start(mode: str, arguments: list[str], env: dict[str, str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "switchyard_moe.bench", "engine", *arguments, "--child", mode]
    return subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _turn(child: subprocess.Popen[str], mode: str) -> float:
    assert child.stdin is not None and child.stdout is not None
    child.stdin.write("go\n")
    child.stdin.flush()
    # Engines print to standard output, too.
    for line in child.stdout:
        if line.startswith("SECONDS "):
            return float(line.split()[1])
    raise switchyard_moe.Error(f"the process with {mode} experts ended with exit code {child.wait()}")


def _child(given: argparse.Namespace, commands: TextIO, answers: TextIO) -> None:
    import time

    generator = random.Random(given.seed)
    vocabulary = int(json.loads((Path(given.model) / "config.json").read_text()).get("vocab_size", 1000))
    prompts = [[generator.randrange(2, vocabulary) for _ in range(given.prompt_tokens)] for _ in range(given.batch)]
    generate = {"vllm": _vllm, "transformers": _transformers}[given.engine](given, given.child == "served")
    for _ in commands:
        started = time.perf_counter()
        generate(prompts)
        print(f"\nSECONDS {time.perf_counter() - started}", file=answers, flush=True)


def _transformers(given: argparse.Namespace, served: bool) -> Callable[[list[list[int]]], None]:
    import torch
    from transformers import AutoModelForCausalLM

    import switchyard_moe.transformers

    model: Any = AutoModelForCausalLM.from_pretrained(
        given.model,
        dtype=getattr(torch, given.dtype),
        experts_implementation=switchyard_moe.transformers.IMPLEMENTATION if served else given.local_experts,
    ).eval()

    def generate(prompts: list[list[int]]) -> None:
        model.generate(
            torch.tensor(prompts),
            max_new_tokens=given.tokens,
            min_new_tokens=given.tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )

    return generate


def _vllm(given: argparse.Namespace, served: bool) -> Callable[[list[list[int]]], None]:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    options = {"load_format": "switchyard", "quantization": "switchyard"} if served else {}
    llm: Any = LLM(
        model=given.model,
        skip_tokenizer_init=True,
        dtype=given.dtype,
        max_model_len=given.prompt_tokens + given.tokens,
        max_num_seqs=given.batch,
        enforce_eager=not given.compile,
        # A second round would find its prompts in the cache.
        enable_prefix_caching=False,
        distributed_executor_backend="uni",
        **options,
    )
    sampling = SamplingParams(temperature=0, max_tokens=given.tokens, ignore_eos=True, detokenize=False)

    def generate(prompts: list[list[int]]) -> None:
        llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)

    return generate
