"""What the tests share: a cluster of the small model, a client, and the reference."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from reference import TINY, Experts
from support import Inputs

import switchyard_moe


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
