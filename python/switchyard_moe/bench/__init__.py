"""Benchmarks: ``python -m switchyard_moe.bench p2p|engine|soak``."""
