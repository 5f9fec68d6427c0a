"""The plugin of vLLM and OpenMP threads, without an engine."""

from __future__ import annotations

import os

import pytest

from switchyard_moe.vllm import _service

VARIABLES = ("GOMP_SPINCOUNT", "KMP_BLOCKTIME", "OMP_WAIT_POLICY")


@pytest.fixture(autouse=True)
def no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        # Set first, so that the end of the test removes what the plugin sets.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def test_threads_of_later_processes_sleep_soon() -> None:
    _service.limit_spinning()
    assert os.environ["GOMP_SPINCOUNT"] == str(_service.SPINS)


@pytest.mark.parametrize("name", VARIABLES)
def test_a_choice_of_the_user_is_kept(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "chosen")
    _service.limit_spinning()
    assert {other: os.environ.get(other) for other in VARIABLES} == {
        other: "chosen" if other == name else None for other in VARIABLES
    }
