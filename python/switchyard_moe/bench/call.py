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
    parser.add_argument("--csv", type=Path, help="file for every round: medians and 90th percentiles")
    given = parser.parse_args(arguments)
    devices = given.server_devices.split(",")
    rows: list[dict[str, Any]] = []
    with switchyard_moe.LocalCluster(given.model, servers=len(devices), devices=devices, timeout=180) as cluster:
        environment = {**os.environ, "SWITCHYARD_TOKEN": cluster.token}
        for tokens in map(int, given.tokens.split(",")):
            # One client at a time is connected, so that the servers have the same to do.
            for number in range(given.rounds):
                command = [str(given.rust.absolute()), cluster.url, given.device, str(tokens), str(given.calls)]
                output = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
                rust = [float(field) for field in output.stdout.split()]
                with cluster.client(device=given.device) as client:
                    python, inside = _python(client, tokens, given.calls)
                for side, times in (("rust", rust), ("python", python), ("python, as its report says", inside)):
                    rows.append(
                        {
                            "tokens": tokens,
                            "round": number,
                            "side": side,
                            "median_us": round(statistics.median(times), 3),
                            "p90_us": round(statistics.quantiles(times, n=10)[8], 3),
                        }
                    )
    if given.csv:
        with given.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    result = {}
    for tokens in sorted({row["tokens"] for row in rows}):
        medians = {
            side: statistics.median(row["median_us"] for row in rows if (row["tokens"], row["side"]) == (tokens, side))
            for side in ("rust", "python", "python, as its report says")
        }
        result[tokens] = {**medians, "python_minus_rust_us": round(medians["python"] - medians["rust"], 3)}
    print(json.dumps(result))
    return 0


def _python(client: switchyard_moe.Client, tokens: int, calls: int) -> tuple[list[float], list[float]]:
    import torch

    device = client.device
    x: Any = torch.randn(tokens, client.hidden, device=device).to(torch.bfloat16)
    at: Any = torch.arange(tokens * client.top_k, device=device)
    topk_idx: Any = ((at * 7 + at // client.top_k) % client.num_experts).to(torch.int32).view(tokens, client.top_k)
    topk_weights: Any = torch.full((tokens, client.top_k), 1.0 / client.top_k, device=device)
    out: Any = torch.empty_like(x)
    layer = client.layers[0]
    report = switchyard_moe.Report()
    torch.cuda.synchronize()
    times, inside = [], []
    for number in range(calls + calls // 10):
        start = time.perf_counter_ns()
        client.forward(layer, x, topk_idx, topk_weights, out=out, report=report)
        took = time.perf_counter_ns() - start
        if number >= calls // 10:
            times.append(took / 1e3)
            inside.append(report.total_us)
    return times, inside
