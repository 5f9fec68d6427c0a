"""`python -m switchyard_moe.bench NAME`."""

from __future__ import annotations

import importlib
import sys

_BENCHES = {
    "p2p": "transfers between two processes, beside other libraries",
    "engine": "inference engines with and without the expert service",
}


def main() -> int:
    """Runs the benchmark that the first argument names."""
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in _BENCHES:
        print("usage: python -m switchyard_moe.bench {" + ",".join(_BENCHES) + "} [--help]")
        for bench, what in _BENCHES.items():
            print(f"  {bench}: {what}")
        return 0 if name in ("-h", "--help") else 2
    return int(importlib.import_module(f"switchyard_moe.bench.{name}").main(sys.argv[2:]) or 0)


if __name__ == "__main__":
    sys.exit(main())
