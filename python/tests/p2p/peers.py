"""Two processes with an endpoint each, for tests. A child runs one function, with a pipe to the test."""

from __future__ import annotations

import multiprocessing as mp
import os
import random
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest

from switchyard_moe.p2p import Endpoint

#: Seconds after which a test's waits fail. No test passes by reaching it.
LIMIT = 60.0
SPAWN = mp.get_context("spawn")


def seeded() -> random.Random:
    """Returns a generator with a printed seed. `SWITCHYARD_TEST_SEED` repeats a run."""
    seed = int(os.environ.get("SWITCHYARD_TEST_SEED", 0)) or int.from_bytes(os.urandom(6), "little")
    print(f"SWITCHYARD_TEST_SEED={seed}")
    return random.Random(seed)


def local(**settings: Any) -> Endpoint:
    """An endpoint that no other host reaches."""
    return Endpoint(bind="127.0.0.1", **({"timeout": LIMIT} | settings))


class Child:
    """A process that runs `role(pipe, *args)`."""

    def __init__(self, role: Callable[..., None], *args: Any) -> None:
        self.pipe, there = SPAWN.Pipe()
        self.process = SPAWN.Process(target=_run, args=(role, there, args), daemon=True)
        self.process.start()
        there.close()

    def get(self, limit: float = LIMIT) -> Any:
        """Returns what the child has sent next. A failure of the child raises here."""
        assert self.pipe.poll(limit), "the child sends nothing"
        kind, content = self.pipe.recv()
        assert kind == "ok", content
        return content

    def put(self, content: Any) -> None:
        self.pipe.send(content)

    def kill(self) -> None:
        self.process.kill()
        self.process.join(LIMIT)

    def end(self) -> None:
        """Waits until the child has returned from its role."""
        assert self.get() == "end"
        self.process.join(LIMIT)
        assert self.process.exitcode == 0


class Pipe:
    """The child's end of the pipe."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def put(self, content: Any) -> None:
        self._pipe.send(("ok", content))

    def get(self) -> Any:
        assert self._pipe.poll(LIMIT), "the test sends nothing"
        return self._pipe.recv()


def _run(role: Callable[..., None], pipe: Connection, args: tuple[Any, ...]) -> None:
    import traceback

    try:
        role(Pipe(pipe), *args)
        pipe.send(("ok", "end"))
    except BaseException:
        pipe.send(("failed", traceback.format_exc()))
        raise


@pytest.fixture
def children() -> Iterator[Callable[..., Child]]:
    """Starts children, and kills the ones that a failed test leaves."""
    started: list[Child] = []

    def start(role: Callable[..., None], *args: Any) -> Child:
        started.append(Child(role, *args))
        return started[-1]

    yield start
    for child in started:
        if child.process.is_alive():
            child.kill()


def until(condition: Callable[[], bool], what: str) -> None:
    """Waits for a condition, within a bound."""
    end = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < end, f"never: {what}"
        time.sleep(0.001)


def ended(endpoint: Endpoint, transfer_id: int) -> bool:
    """Polls a transfer to its end, as a user of UCCL does."""
    end = time.monotonic() + LIMIT
    while True:
        ok, is_done = endpoint.poll_async(transfer_id)
        assert ok
        if is_done:
            return True
        assert time.monotonic() < end, "the transfer is under way for ever"
