"""Chooses the benchmark by the first argument. Each has a ``main(arguments)``, which returns the exit code."""

from __future__ import annotations

import importlib
import sys

BENCHMARKS = {
    "p2p": "one-sided transfers beside those of other libraries",
    "call": "Client.forward on a GPU beside the client in Rust",
    "engine": "an engine's throughput with experts as a service and with its own",
    "soak": "a vLLM server under clients while expert servers are killed",
}


def main() -> int:
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in BENCHMARKS:
        print("usage: python -m switchyard_moe.bench BENCHMARK [OPTIONS]\n", file=sys.stderr)
        for known, about in BENCHMARKS.items():
            print(f"  {known:8} {about}", file=sys.stderr)
        return 0 if name in ("-h", "--help") else 2
    code = importlib.import_module(f"switchyard_moe.bench.{name}").main(sys.argv[2:])
    return int(code or 0)


if __name__ == "__main__":
    sys.exit(main())
