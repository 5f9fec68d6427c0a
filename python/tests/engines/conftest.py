"""What the tests of engines share. They run in the environment that `install.py` makes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import harness
import pytest

import switchyard_moe


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small model, in a folder that every engine can load."""
    return harness.tiny_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def tiny_cluster(tiny: Path) -> Iterator[switchyard_moe.LocalCluster]:
    """A cluster that a test may damage: two servers, each with every expert."""
    with switchyard_moe.LocalCluster(tiny) as cluster:
        yield cluster


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """The file with the golden prompts that the examples read."""
    path = tmp_path / "prompts.json"
    path.write_text(str([ids for ids, _ in harness.golden()]))
    return path


def is_long() -> bool:
    """Whether `cargo xtask test --all` runs the tests."""
    return os.environ.get("SWITCHYARD_LONG") == "1"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "long: belongs to `cargo xtask test --all`")
    config.addinivalue_line("markers", "sglang: needs SGLang, whose folder is SWITCHYARD_TEST_SGLANG")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if is_long():
        return
    left_out = [item for item in items if item.get_closest_marker("long")]
    items[:] = [item for item in items if not item.get_closest_marker("long")]
    config.hook.pytest_deselected(items=left_out)
