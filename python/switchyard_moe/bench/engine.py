"""Throughput of an inference engine with experts as a service ÷ with its own experts, on the same cores.

Two processes load the engine, one in each way, and take turns: each round generates one batch in each. The expert
servers share the cores with both. Tokens per second count generated tokens, prompts included in the time.

Both processes also measure the time inside the layers of experts. The one with served experts splits it: the client's
dispatch, its wait, the part of that wait in which a server computes, and its sums. On a GPU these are times of the
host.

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
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import switchyard_moe
from switchyard_moe import _engine as engine
from switchyard_moe.bench import _checkpoint

__all__ = ["draw", "main"]

MODES = ("local", "served")


@dataclasses.dataclass(frozen=True)
class Row:
    """One batch of one round. Times are sums over all layers and steps."""

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
    calls: int
    """Calls of layers of experts."""
    experts_s: float
    """Time in the layers of experts. Zero where the engine compiles the layer."""
    dispatch_s: float
    wait_s: float
    combine_s: float
    queue_s: float
    """Of the wait: frames were in the queue of the slower server."""
    compute_s: float
    """Of the wait: the slower server computed."""


#: The times of a row that a process measures in its layers of experts.
PARTS = ("calls", "experts_s", "dispatch_s", "wait_s", "combine_s", "queue_s", "compute_s")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs from the command line. Prints a summary as JSON."""
    parser = argparse.ArgumentParser("python -m switchyard_moe.bench engine", description=__doc__)
    parser.add_argument("--engine", choices=("vllm", "transformers"), required=True)
    parser.add_argument("--model", required=True, help="folder of the checkpoint")
    parser.add_argument(
        "--random",
        metavar="HIDDENxWIDTHxEXPERTSxTOPKxLAYERS",
        help="write a Qwen3-MoE with random bf16 weights of this shape into the folder, if it does not exist",
    )
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
    parser.add_argument(
        "--batch-servers", action="store_true", help="servers do not preempt the engine when they wake (SCHED_BATCH)"
    )
    parser.add_argument("--cores", help="such as 0,1; default: all that this process may use")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--local-experts", default="grouped_mm", help="transformers' own implementation")
    parser.add_argument("--compile", action="store_true", help="let vLLM compile")
    parser.add_argument(
        "--served-env", action="append", default=[], metavar="NAME=VALUE", help="variable of the served engine only"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="bars of both modes and their parts, as SVG")
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
    if given.random and not Path(given.model).exists():
        _write_random(given.random, Path(given.model), given.seed)
    if given.shape and not (Path(given.model) / "config.json").exists():
        _checkpoint.write(given.shape, given.layers, Path(given.model), given.device, given.seed)
    rows = _run(given, list(sys.argv[2:] if arguments is None else arguments))
    speeds = {mode: [row.tokens_per_s for row in rows if row.mode == mode] for mode in MODES}
    medians = {mode: statistics.median(values) for mode, values in speeds.items()}
    result = {
        "engine": given.engine,
        "model": given.model,
        "dtype": given.dtype,
        "batch": given.batch,
        "tokens": given.tokens,
        "servers": given.servers,
        "server_threads": given.server_threads,
        "batch_servers": given.batch_servers,
        "served_env": given.served_env,
        "cores": sorted(os.sched_getaffinity(0)),
        "tokens_per_s": medians,
        "served_over_local": medians["served"] / medians["local"],
        "ratio_of_each_round": [a / b for a, b in zip(speeds["served"], speeds["local"], strict=True)],
        "seconds": {mode: _median(rows, mode, "seconds") for mode in MODES},
        "parts": {mode: {part: _median(rows, mode, part) for part in PARTS} for mode in MODES},
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
    if given.plot:
        given.plot.write_text(draw(result))
    print(json.dumps(result))
    return 0


def draw(result: Mapping[str, Any]) -> str:
    """Returns an SVG of the time of one batch in both modes, cut into parts."""
    parts: dict[str, list[tuple[str, float]]] = {}
    for mode in MODES:
        seconds, of = result["seconds"][mode], result["parts"][mode]
        rest = [("attention and the rest", seconds - of["experts_s"])]
        if mode == "local":
            rest.append(("experts in the engine", of["experts_s"]))
        else:
            client = of["dispatch_s"] + of["wait_s"] + of["combine_s"]
            transit = max(0.0, of["wait_s"] - of["queue_s"] - of["compute_s"])
            rest += [
                ("servers compute", of["compute_s"]),
                ("frames, wake-ups and queues", transit + of["queue_s"]),
                ("client: dispatch and sums", of["dispatch_s"] + of["combine_s"]),
                ("plugin", max(0.0, of["experts_s"] - client)),
            ]
        parts[mode] = rest
    names = list(dict.fromkeys(name for rest in parts.values() for name, _ in rest))
    longest = max(result["seconds"].values())
    width, left, bar = 700, 70, 40
    title = (
        f"{result['engine']}, batch {result['batch']}, {result['dtype']}: seconds for {result['tokens']} tokens per "
        f"sequence; served / local throughput {result['served_over_local']:.2f}"
    )
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + width + 90}" height="{150 + 18 * len(names)}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="10" y="20" font-weight="bold">{title}</text>',
    ]
    for place, mode in enumerate(MODES):
        x, y = float(left), 35 + place * (bar + 10)
        out.append(f'<text x="10" y="{y + bar / 2 + 4}">{mode}</text>')
        for name, seconds in parts[mode]:
            size = width * seconds / longest
            out.append(
                f'<rect x="{x:.1f}" y="{y}" width="{size:.1f}" height="{bar}" fill="{_COLOURS[names.index(name)]}"/>'
            )
            x += size
        out.append(f'<text x="{x + 6:.1f}" y="{y + bar / 2 + 4}">{result["seconds"][mode]:.3f} s</text>')
    for place, name in enumerate(names):
        y = 145 + place * 18
        out.append(f'<rect x="{left}" y="{y - 10}" width="12" height="12" fill="{_COLOURS[place]}"/>')
        times = ", ".join(
            f"{mode} {seconds:.3f} s" for mode in MODES for other, seconds in parts[mode] if other == name
        )
        out.append(f'<text x="{left + 18}" y="{y}">{name}: {times}</text>')
    out.append("</svg>")
    return "\n".join(out) + "\n"


_COLOURS = ("#9aa5b1", "#1f77b4", "#2ca02c", "#ff7f0e", "#d62728", "#9467bd")


def _median(rows: Sequence[Row], mode: str, part: str) -> float:
    return float(statistics.median(getattr(row, part) for row in rows if row.mode == mode))


def _run(given: argparse.Namespace, arguments: list[str]) -> list[Row]:
    rows = []
    served_env = dict(pair.split("=", 1) for pair in given.served_env)
    if "cuda" in given.server_devices:
        served_env.setdefault("SWITCHYARD_ENGINE_DEVICE", given.device)
    with switchyard_moe.LocalCluster(
        given.model,
        servers=given.servers,
        threads=given.server_threads,
        devices=given.server_devices.split(","),
        timeout=300.0,
    ) as cluster:
        if given.batch_servers:
            _schedule_as_batch(cluster)
        env = {**os.environ, "SWITCHYARD_CONTROL_PLANE": cluster.url, "SWITCHYARD_TOKEN": cluster.token}
        children = {
            mode: _start(mode, arguments, {**env, **(served_env if mode == "served" else {})}) for mode in MODES
        }
        try:
            for number in range(given.rounds + 1):
                # The order alternates, so that a slow drift of the host's speed cancels out.
                for mode in MODES if number % 2 else reversed(MODES):
                    found = _turn(children[mode], mode)
                    if number > 0:
                        rows.append(_row(given, mode, number, found))
            if given.kill:
                # In the middle of the batch, as the rounds before let expect.
                middle = statistics.median(row.seconds for row in rows if row.mode == "served") / 2
                killer = threading.Timer(middle, cluster.kill, [cluster.names[0]])
                killer.start()
                found = _turn(children["served"], "served")
                killer.join()
                rows.append(_row(given, "killed", given.rounds + 1, found))
        finally:
            for child in children.values():
                child.kill()
                child.wait()
    return rows


def _row(given: argparse.Namespace, mode: str, number: int, found: dict[str, Any]) -> Row:
    seconds = found.pop("seconds")
    speed = given.batch * given.tokens / seconds
    sizes = (given.batch, given.prompt_tokens, given.tokens)
    return Row(given.engine, mode, number, *sizes, seconds, speed, **found)


def _schedule_as_batch(cluster: switchyard_moe.LocalCluster) -> None:
    for name in cluster.names:
        for thread in os.listdir(f"/proc/{cluster.pid(name)}/task"):
            os.sched_setscheduler(int(thread), os.SCHED_BATCH, os.sched_param(0))


def _equal(first: Row, second: Row) -> int:
    """Returns how many sequences two rounds have in common."""
    return sum(a == b for a, b in zip(first.digests.split(), second.digests.split(), strict=True))


def _start(mode: str, arguments: list[str], env: dict[str, str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "switchyard_moe.bench", "engine", *arguments, "--child", mode]
    return subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _turn(child: subprocess.Popen[str], mode: str) -> dict[str, Any]:
    assert child.stdin is not None and child.stdout is not None
    child.stdin.write("go\n")
    child.stdin.flush()
    # Engines print to standard output, too.
    for line in child.stdout:
        if line.startswith("FOUND "):
            found: dict[str, Any] = json.loads(line.removeprefix("FOUND "))
            return found
    raise switchyard_moe.Error(f"the process with {mode} experts ended with exit code {child.wait()}")


def _child(given: argparse.Namespace, commands: TextIO, answers: TextIO) -> None:
    generator = random.Random(given.seed)
    vocabulary = int(json.loads((Path(given.model) / "config.json").read_text()).get("vocab_size", 1000))
    prompts = [[generator.randrange(2, vocabulary) for _ in range(given.prompt_tokens)] for _ in range(given.batch)]
    clock = _Clock()
    if given.child == "served":
        clock.split(engine.Service)
    generate = {"vllm": _vllm, "transformers": _transformers}[given.engine](given, given.child == "served", clock)
    for _ in commands:
        clock.reset()
        started = time.perf_counter()
        ids = generate(prompts)
        seconds = time.perf_counter() - started
        digests = " ".join(hashlib.sha256(json.dumps(sequence).encode()).hexdigest()[:8] for sequence in ids)
        found = {"seconds": seconds, "digests": digests, **clock.found}
        print(f"\nFOUND {json.dumps(found)}", file=answers, flush=True)


class _Clock:
    """Sums of the times in layers of experts."""

    def __init__(self) -> None:
        self.found: dict[str, float] = {}
        self.reset()

    def reset(self) -> None:
        self.found.update(dict.fromkeys(PARTS, 0.0))

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns ``function`` with its time counted as that of a layer of experts."""

        def timed(*arguments: Any, **keywords: Any) -> Any:
            started = time.perf_counter()
            result = function(*arguments, **keywords)
            self.found["experts_s"] += time.perf_counter() - started
            self.found["calls"] += 1
            return result

        return timed

    def split(self, service: Any) -> None:
        """Adds the client's report of each call."""
        plain = service.experts

        def experts(this: Any, *arguments: Any) -> Any:
            result = plain(this, *arguments)
            report = this.client().last_report
            for part in ("dispatch", "wait", "combine"):
                self.found[f"{part}_s"] += getattr(report, f"{part}_us") / 1e6
            for part in ("queue", "compute"):
                self.found[f"{part}_s"] += getattr(report, f"server_{part}_us") / 1e6
            return result

        service.experts = experts


def _write_random(shape: str, folder: Path, seed: int) -> None:
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    hidden, width, experts, top_k, layers = map(int, shape.split("x"))
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=16384,
        hidden_size=hidden,
        intermediate_size=width,
        moe_intermediate_size=width,
        num_experts=experts,
        num_experts_per_tok=top_k,
        norm_topk_prob=True,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        tie_word_embeddings=False,
    )
    torch.set_default_dtype(torch.bfloat16)
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    torch.set_default_dtype(torch.float32)


def _transformers(
    given: argparse.Namespace, served: bool, clock: _Clock
) -> Callable[[list[list[int]]], list[list[int]]]:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.integrations.moe import ExpertsInterface

    import switchyard_moe.transformers

    name = switchyard_moe.transformers.IMPLEMENTATION if served else given.local_experts
    interface = ExpertsInterface()
    ExpertsInterface.register(name, clock.around(interface[name]))
    model: Any = AutoModelForCausalLM.from_pretrained(
        given.model, dtype=getattr(torch, given.dtype), experts_implementation=name
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


def _vllm(given: argparse.Namespace, served: bool, clock: _Clock) -> Callable[[list[list[int]]], list[list[int]]]:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    if not given.compile:
        for form in ("forward_modular", "forward_monolithic"):
            setattr(RoutedExperts, form, clock.around(getattr(RoutedExperts, form)))

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
