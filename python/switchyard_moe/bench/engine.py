"""Throughput of an inference engine with experts as a service ÷ with its own experts, on the same cores.

Two processes load the engine, one in each way, and take turns: each round generates one batch in each. The expert
servers share the cores with both. Tokens per second count generated tokens, prompts included in the time.

With ``--device`` and ``--server-devices``, transformers and the servers are on GPUs. With ``--kill``, one more batch is
served while a server is killed, and its tokens are compared with those of the batches before.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import hashlib
import json
import os
import random
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

import switchyard_moe
from switchyard_moe.bench import _checkpoint

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
    digests: str
    """Of the ids of each sequence."""


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
    parser.add_argument("--device", default="cpu", help="of the engine: cpu or cuda:N")
    parser.add_argument("--server-devices", default="cpu", help="of the servers, such as cuda:1,cuda:2")
    parser.add_argument("--kill", action="store_true", help="kill a server during one more batch")
    parser.add_argument("--shape", choices=sorted(_checkpoint.SHAPES), help="write random weights to --model first")
    parser.add_argument("--layers", type=int, default=8, help="layers of --shape")
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
    if given.engine == "vllm" and given.device != "cpu":
        parser.error("--device: only transformers runs on a GPU here")
    if given.kill and given.servers < 2:
        parser.error("--kill: two servers are needed")
    if given.child:
        _child(given, sys.stdin, sys.stdout)
        return 0
    if given.cores:
        os.sched_setaffinity(0, {int(core) for core in given.cores.split(",")})
    if given.shape and not (Path(given.model) / "config.json").exists():
        _checkpoint.write(given.shape, given.layers, Path(given.model), given.device, given.seed)
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
        "device": given.device,
        "server_devices": given.server_devices,
    }
    last = {
        mode: [row for row in rows if row.mode == mode][-1] for mode in (*MODES, *(["killed"] if given.kill else []))
    }
    for mode, row in last.items():
        same = {other.digests == row.digests for other in rows if other.mode == mode}
        result[f"{mode}_rounds_are_the_same"] = same == {True}
    result["sequences_equal_to_local"] = _equal(last["served"], last["local"])
    if given.kill:
        result["tokens_per_s_while_killed"] = last["killed"].tokens_per_s
        result["sequences_equal_through_the_kill"] = _equal(last["served"], last["killed"])
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
    with switchyard_moe.LocalCluster(
        given.model,
        servers=given.servers,
        threads=given.server_threads,
        devices=given.server_devices.split(","),
        timeout=300.0,
    ) as cluster:
        env = {**os.environ, "SWITCHYARD_CONTROL_PLANE": cluster.url, "SWITCHYARD_TOKEN": cluster.token}
        if "cuda" in given.server_devices:
            env["SWITCHYARD_ENGINE_DEVICE"] = given.device
        children = {mode: _start(mode, arguments, env) for mode in MODES}
        try:
            for number in range(given.rounds + 1):
                # The order alternates, so that a slow drift of the host's speed cancels out.
                for mode in MODES if number % 2 else reversed(MODES):
                    seconds, digests = _turn(children[mode], mode)
                    if number > 0:
                        rows.append(_row(given, mode, number, seconds, digests))
            if given.kill:
                # In the middle of the batch, as the rounds before let expect.
                middle = statistics.median(row.seconds for row in rows if row.mode == "served") / 2
                killer = threading.Timer(middle, cluster.kill, [cluster.names[0]])
                killer.start()
                seconds, digests = _turn(children["served"], "served")
                killer.join()
                rows.append(_row(given, "killed", given.rounds + 1, seconds, digests))
        finally:
            for child in children.values():
                child.kill()
                child.wait()
    return rows


def _row(given: argparse.Namespace, mode: str, number: int, seconds: float, digests: str) -> Row:
    speed = given.batch * given.tokens / seconds
    return Row(given.engine, mode, number, given.batch, given.prompt_tokens, given.tokens, seconds, speed, digests)


def _equal(first: Row, second: Row) -> int:
    """Returns how many sequences two rounds have in common."""
    return sum(a == b for a, b in zip(first.digests.split(), second.digests.split(), strict=True))


def _start(mode: str, arguments: list[str], env: dict[str, str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "switchyard_moe.bench", "engine", *arguments, "--child", mode]
    return subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _turn(child: subprocess.Popen[str], mode: str) -> tuple[float, str]:
    assert child.stdin is not None and child.stdout is not None
    child.stdin.write("go\n")
    child.stdin.flush()
    # Engines print to standard output, too.
    for line in child.stdout:
        if line.startswith("SECONDS "):
            return float(line.split()[1]), " ".join(line.split()[2:])
    raise switchyard_moe.Error(f"the process with {mode} experts ended with exit code {child.wait()}")


def _child(given: argparse.Namespace, commands: TextIO, answers: TextIO) -> None:
    import time

    generator = random.Random(given.seed)
    vocabulary = int(json.loads((Path(given.model) / "config.json").read_text()).get("vocab_size", 1000))
    prompts = [[generator.randrange(2, vocabulary) for _ in range(given.prompt_tokens)] for _ in range(given.batch)]
    generate = {"vllm": _vllm, "transformers": _transformers}[given.engine](given, given.child == "served")
    for _ in commands:
        started = time.perf_counter()
        ids = generate(prompts)
        seconds = time.perf_counter() - started
        digests = " ".join(hashlib.sha256(json.dumps(sequence).encode()).hexdigest()[:8] for sequence in ids)
        print(f"\nSECONDS {seconds} {digests}", file=answers, flush=True)


def _transformers(given: argparse.Namespace, served: bool) -> Callable[[list[list[int]]], list[list[int]]]:
    import torch
    from transformers import AutoModelForCausalLM

    import switchyard_moe.transformers

    model: Any = AutoModelForCausalLM.from_pretrained(
        given.model,
        dtype=getattr(torch, given.dtype),
        experts_implementation=switchyard_moe.transformers.IMPLEMENTATION if served else given.local_experts,
    ).eval()
    model = model.to(given.device)

    def generate(prompts: list[list[int]]) -> list[list[int]]:
        ids = model.generate(
            torch.tensor(prompts, device=given.device),
            max_new_tokens=given.tokens,
            min_new_tokens=given.tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        found: list[list[int]] = ids.tolist()
        return found

    return generate


def _vllm(given: argparse.Namespace, served: bool) -> Callable[[list[list[int]]], list[list[int]]]:
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

    def generate(prompts: list[list[int]]) -> list[list[int]]:
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        return [list(found.outputs[0].token_ids) for found in llm.generate(requests, sampling, use_tqdm=False)]

    return generate
