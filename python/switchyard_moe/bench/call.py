"""Time of one call: ``Client.forward`` from Python beside ``DeviceClient::forward`` from Rust, at the same servers.

The program in Rust is the example ``device_forward`` of ``attention-client``, built with the feature ``cuda``. Both
take turns. Tensors are torch's, of the types that need no conversion.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import switchyard_moe

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line. Print a summary as JSON."""
    parser = argparse.ArgumentParser("python -m switchyard_moe.bench call", description=__doc__)
    parser.add_argument("--model", required=True, help="folder of the checkpoint")
    parser.add_argument("--rust", type=Path, required=True, help="path of the example device_forward")
    parser.add_argument("--device", default="cuda:0", help="GPU of the clients")
    parser.add_argument("--server-devices", default="cuda:1", help="GPU of each server, such as cuda:1,cuda:2")
    parser.add_argument("--tokens", default="1,64")
    parser.add_argument("--calls", type=int, default=2000, help="calls of a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--csv", type=Path, help="file for every round")
    parser.add_argument("--child", nargs=3, metavar=("URL", "TOKENS", "SIDE"), help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.child:
        _python(given.device, given.calls, *given.child)
        return 0
    devices = given.server_devices.split(",")
    rows: list[dict[str, Any]] = []
    with switchyard_moe.LocalCluster(given.model, servers=len(devices), devices=devices, timeout=180) as cluster:
        environment = {**os.environ, "SWITCHYARD_TOKEN": cluster.token}
        for tokens in given.tokens.split(","):
            rust = [str(given.rust.absolute()), cluster.url, given.device, tokens, str(given.calls)]
            python = [sys.executable, "-m", "switchyard_moe.bench", "call", "--model", given.model, "--rust", rust[0]]
            python += ["--device", given.device, "--calls", str(given.calls), "--child", cluster.url, tokens]
            # One client at a time is connected, so that the servers have the same to do.
            for number in range(given.rounds):
                for side in SIDES:
                    command = rust if side == "rust" else [*python, side]
                    output = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
                    calls = [[float(part) for part in call.split(":")] for call in output.stdout.split()]
                    whole, dispatch, wait = ([call[part] for call in calls] for part in range(3))
                    lower, median, _ = statistics.quantiles(whole, n=4)
                    rows.append(
                        {
                            "tokens": int(tokens),
                            "round": number,
                            "side": side,
                            "median_us": round(median, 3),
                            "lower_quartile_us": round(lower, 3),
                            "dispatch_us": round(statistics.median(dispatch), 3),
                            "wait_us": round(statistics.median(wait), 3),
                        }
                    )
                    # After each, so that an interrupted run leaves its rows.
                    _write(given.csv, rows)
    result: dict[str, dict[str, float]] = {}
    for num_tokens in sorted({row["tokens"] for row in rows}):
        for side in SIDES:
            of = [row for row in rows if (row["tokens"], row["side"]) == (num_tokens, side)]
            numbers = {name: statistics.median(row[name] for row in of) for name in of[0] if name.endswith("_us")}
            result[f"{num_tokens} tokens, {side}"] = numbers
            base = result[f"{num_tokens} tokens, rust"]
            numbers["over_rust_us"] = round(numbers["median_us"] - base["median_us"], 3)
            numbers["lower_over_rust_us"] = round(numbers["lower_quartile_us"] - base["lower_quartile_us"], 3)
    print(json.dumps(result))
    return 0


def _write(path: Path | None, rows: list[dict[str, Any]]) -> None:
    if path:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)


def _python(device: str, calls: int, url: str, tokens_text: str, side: str) -> None:
    """Prints the times of each call in microseconds, as the program in Rust does."""
    import torch

    tokens = int(tokens_text)
    with switchyard_moe.Client(url, device=device) as client:
        client.wait_ready(30)
        # The values of the program in Rust: a GPU's clock depends on the bits that it multiplies.
        at: Any = torch.arange(tokens * client.hidden, device=device)
        bits = (((at * 2_654_435_761) & 0xFFFFFFFF) >> 16) & 0x807F | 0x3F80
        x: Any = bits.to(torch.uint16).view(torch.bfloat16).view(tokens, client.hidden)
        at = torch.arange(tokens * client.top_k, device=device)
        topk_idx: Any = ((at * 7 + at // client.top_k) % client.num_experts).to(torch.int32).view(tokens, client.top_k)
        topk_weights: Any = torch.full((tokens, client.top_k), 1.0 / client.top_k, device=device)
        out: Any = torch.empty_like(x)
        layer = client.layers[0]
        torch.cuda.synchronize()
        stream = torch.cuda.default_stream(device) if side == DEFAULT else torch.cuda.Stream(device)
        times = []
        report = switchyard_moe.Report()
        with torch.cuda.stream(stream):
            for number in range(calls + calls // 10):
                start = time.perf_counter_ns()
                client.forward(layer, x, topk_idx, topk_weights, out=out, report=report)
                took = time.perf_counter_ns() - start
                if number >= calls // 10:
                    times.append(f"{took / 1e3:.3f}:{report.dispatch_us:.3f}:{report.wait_us:.3f}")
        print(" ".join(times))


DEFAULT = "python, default stream"
#: A stream of its own is what the program in Rust has.
SIDES = ("rust", "python, own stream", DEFAULT)
