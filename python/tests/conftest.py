"""What the tests share: a cluster of the small model, its reference, and random input with a printed seed."""

from __future__ import annotations

import os
import secrets
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from reference import TINY, Experts

import switchyard_moe


@dataclass
class Call:
    """Arguments of one call."""

    layer: int
    x: npt.NDArray[np.float32]
    topk_idx: npt.NDArray[np.int32]
    topk_weights: npt.NDArray[np.float32]


class Inputs:
    """Random calls. ``SWITCHYARD_TEST_SEED`` repeats a failed test."""

    def __init__(self, experts: Experts) -> None:
        self.seed = int(os.environ.get("SWITCHYARD_TEST_SEED") or secrets.randbits(32))
        self.rng = np.random.default_rng(self.seed)
        self._experts = experts
        print(f"SWITCHYARD_TEST_SEED={self.seed}")

    def call(self, tokens: int, *, masked: float = 0.1) -> Call:
        experts = self._experts
        order = self.rng.random((tokens, experts.num_experts)).argsort(axis=1)
        topk_idx = order[:, : experts.top_k].astype(np.int32)
        topk_idx[self.rng.random(topk_idx.shape) < masked] = -1
        weights = self.rng.random(topk_idx.shape, np.float32)
        x = self.rng.standard_normal((tokens, experts.hidden), np.float32)
        return Call(int(self.rng.integers(experts.num_layers)), x, topk_idx, weights)


@pytest.fixture(scope="session")
def experts() -> Experts:
    return Experts()


@pytest.fixture
def inputs(experts: Experts) -> Inputs:
    return Inputs(experts)


@pytest.fixture(scope="session")
def cluster() -> Iterator[switchyard_moe.LocalCluster]:
    """Two servers, each with every expert. Tests that kill processes make a cluster of their own."""
    with switchyard_moe.LocalCluster(TINY, servers=2, replicas=2) as cluster:
        yield cluster


@pytest.fixture
def client(cluster: switchyard_moe.LocalCluster) -> Iterator[switchyard_moe.Client]:
    with cluster.client() as client:
        yield client


def poisoned(shape: tuple[int, ...], dtype: type = np.float32) -> npt.NDArray[np.float32]:
    """Return an array of NaN, so that a value that is not written shows."""
    return np.full(shape, np.nan, dtype)


def assert_close(found: npt.NDArray[np.float32], expected: npt.NDArray[np.float32], tolerance: float = 2e-5) -> None:
    scale = max(float(np.abs(expected).max()), 1e-6)
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * scale)


def in_fork(run: Any) -> str:
    """Return what ``run`` returns in a forked child, which must end within 30 s."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writer, run().encode())
        except BaseException as error:
            os.write(writer, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(writer)
    deadline = time.monotonic() + 30
    while os.waitpid(pid, os.WNOHANG)[0] == 0:
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            pytest.fail("the forked child hangs")
        time.sleep(0.01)
    with os.fdopen(reader) as text:
        return text.read()
