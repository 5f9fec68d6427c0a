"""Measures what `switchyard_moe.Client.forward` costs beside the call of the Rust client within it.

Each call takes its own time from outside, by the clock of Python, and from inside, by the report of the Rust client.
The difference is the cost of arguments, checks, the interpreter's lock and the result.

    python bench/python/overhead.py [--model data/tiny-moe] [--calls 20000] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import switchyard_moe


def measure(call: Callable[[switchyard_moe.Report], Any], calls: int) -> dict[str, float]:
    """Return medians in microseconds, and the quartiles of the difference."""
    report = switchyard_moe.Report()
    whole: list[float] = []
    inner: list[float] = []
    for idx in range(calls + calls // 10):
        begin = time.perf_counter_ns()
        call(report)
        end = time.perf_counter_ns()
        if idx >= calls // 10:
            whole.append((end - begin) / 1e3)
            inner.append(report.total_us)
    beside = sorted(a - b for a, b in zip(whole, inner, strict=True))
    return {
        "forward_us": statistics.median(whole),
        "rust_us": statistics.median(inner),
        "overhead_us": statistics.median(beside),
        "overhead_p25_us": beside[len(beside) // 4],
        "overhead_p75_us": beside[3 * len(beside) // 4],
    }


def clock(calls: int) -> float:
    """Return the median of what reading the clock costs, in microseconds."""
    times: list[float] = []
    for _ in range(calls):
        begin = time.perf_counter_ns()
        end = time.perf_counter_ns()
        times.append((end - begin) / 1e3)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="data/tiny-moe")
    parser.add_argument("--calls", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    rng = np.random.default_rng()
    rows: list[dict[str, Any]] = []
    with switchyard_moe.LocalCluster(arguments.model, servers=1) as cluster, cluster.client() as client:
        layer = client.layers[0]
        x = rng.standard_normal((1, client.hidden), np.float32)
        topk_idx = np.arange(client.top_k, dtype=np.int32)[None]
        topk_weights = np.full((1, client.top_k), 1 / client.top_k, np.float32)
        kinds: dict[str, tuple[Any, ...]] = {"numpy": (x, topk_idx, topk_weights, np.empty_like(x))}
        try:
            import torch
        except ImportError:
            print("torch is not installed: only numpy is measured")
        else:
            kinds["torch"] = tuple(torch.from_numpy(array.copy()) for array in kinds["numpy"])
        for turn in range(arguments.rounds):
            for name, (a, b, c, out) in kinds.items():
                forms: dict[str, Callable[[switchyard_moe.Report], Any]] = {
                    "out given": lambda report, a=a, b=b, c=c, out=out: client.forward(
                        layer, a, b, c, out=out, report=report
                    ),
                    "new result": lambda report, a=a, b=b, c=c: client.forward(layer, a, b, c, report=report),
                }
                for form, call in forms.items():
                    row = {"turn": turn, "arrays": name, "form": form, **measure(call, arguments.calls)}
                    rows.append(row)
                    values = "  ".join(f"{key} {value:.2f}" for key, value in row.items() if isinstance(value, float))
                    print(f"{turn} {name:<6} {form:<11} {values}", flush=True)
        print("copies:", client.stats(), " clock:", round(clock(10_000), 3), "us")
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
