"""Fixtures of the tests on GPUs. They need torch and a wheel with kernels, and one GPU at least.

    pytest -c python/pyproject.toml --rootdir python python/tests/gpu

They are run by name only, and a host without a GPU fails them. With three GPUs or more, each server has one of its own.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from devices import DEVICE, server_devices
from reference import TINY, Experts
from support import Inputs

import switchyard_moe


def pytest_configure(config: pytest.Config) -> None:
    # torch and transformers warn.
    config.addinivalue_line("filterwarnings", "default")


@pytest.fixture(scope="session")
def experts() -> Experts:
    return Experts()


@pytest.fixture
def inputs(experts: Experts) -> Inputs:
    return Inputs(experts)


@pytest.fixture(scope="session")
def cluster() -> Iterator[switchyard_moe.LocalCluster]:
    """Two servers on GPUs, each with every expert. Tests that kill processes restart them."""
    with switchyard_moe.LocalCluster(TINY, servers=2, replicas=2, devices=server_devices()) as cluster:
        yield cluster


@pytest.fixture
def client(cluster: switchyard_moe.LocalCluster) -> Iterator[switchyard_moe.Client]:
    with cluster.client(device=DEVICE) as client:
        yield client
