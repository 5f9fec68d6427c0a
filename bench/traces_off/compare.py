#!/usr/bin/env python3
"""Times a layer with traces off in the two commands of `build.sh`, in turns.

    bench/traces_off/compare.py FOLDER RAW.jsonl [--turns 20] [--seconds 1] [--preset tiny-qwen3-moe] [--tokens 1]

A turn runs `ordinary`, `without` and `ordinary` again, in an order that changes from turn to turn. Each appends its
medians to RAW.jsonl. Prints the quartiles over the turns of two ratios: the first run of `ordinary` to `without`, and,
as the noise of the method, the first to the second run of `ordinary`.
"""

import argparse
import itertools
import json
import pathlib
import statistics
import subprocess

ORDERS = list(itertools.permutations([("first", "ordinary"), ("without", "without"), ("second", "ordinary")]))
LIMIT_S = 60


def time_layer(command: pathlib.Path, arguments: argparse.Namespace) -> dict:
    words = ["--json", "bench", "moe", "--preset", arguments.preset, "--tokens", str(arguments.tokens)]
    words += ["--servers", "1", "--threads", "1", "--seconds", str(arguments.seconds)]
    output = subprocess.run([command, *words], check=True, capture_output=True, text=True, timeout=LIMIT_S).stdout
    [row] = json.loads(output)["rows"]
    return {key: row[key] for key in ("service_us_p50", "service_us_p99", "in_process_us_p50", "iterations")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("raw", type=pathlib.Path)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=1)
    parser.add_argument("--preset", default="tiny-qwen3-moe")
    parser.add_argument("--tokens", type=int, default=1)
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()

    turns = []
    with arguments.raw.open("a") as raw:
        for turn in range(arguments.turns):
            medians = {}
            for role, command in ORDERS[turn % len(ORDERS)]:
                figures = time_layer(folder / command, arguments)
                medians[role] = figures["service_us_p50"]
                print(json.dumps({"turn": turn, "role": role, **figures}), file=raw, flush=True)
            turns.append(medians)
    ratios = {
        "ordinary / without": [turn["first"] / turn["without"] for turn in turns],
        "ordinary / ordinary": [turn["first"] / turn["second"] for turn in turns],
    }
    for name, values in ratios.items():
        quartiles = statistics.quantiles(values, n=4)
        print(name, " ".join(f"{value:.4f}" for value in quartiles), f"of {len(values)} turns")
    for role in ("first", "without", "second"):
        print(f"{role}: median {statistics.median(turn[role] for turn in turns):.2f} µs")


if __name__ == "__main__":
    main()
