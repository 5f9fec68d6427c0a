"""Benchmarks: `python -m switchyard_moe.bench p2p` and `python -m switchyard_moe.bench engine`."""
