"""A client whose token is replaced in its file goes on; one with a fixed token learns of no new server."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from reference import TINY, Experts
from support import Inputs, assert_close

import switchyard_moe
from switchyard_moe._binary import find_binary


class Tokens:
    """The token file of a control plane, and the file of one client."""

    def __init__(self, folder: Path) -> None:
        self.table = folder / "tokens"
        self.client = folder / "client.token"

    def new(self) -> str:
        """Add a token of the client and return it."""
        return self._run("new", "--role", "client", "--name", "engine").strip()

    def identities(self) -> list[str]:
        """Return what names each token in the file, the oldest first."""
        return [line.split()[0] for line in self._run("list").splitlines() if " client " in f" {line} "]

    def remove(self, identity: str) -> None:
        self._run("remove", identity)

    def hand_out(self, token: str) -> None:
        """Replace the client's file as a whole."""
        fresh = self.client.with_suffix(".new")
        fresh.write_text(f"{token}\n")
        fresh.replace(self.client)

    def _run(self, command: str, *words: str) -> str:
        arguments = [find_binary(), "token", command, "--file", str(self.table), *words]
        env = {key: value for key, value in os.environ.items() if not key.startswith("SWITCHYARD_")}
        return subprocess.run(arguments, check=True, capture_output=True, text=True, timeout=30, env=env).stdout


def test_a_rotation_under_load_costs_no_call(tmp_path: Path, inputs: Inputs, experts: Experts) -> None:
    tokens = Tokens(tmp_path)
    first = tokens.new()
    tokens.hand_out(first)
    # The cluster's own token is that of its servers.
    arguments = ["--tokens", str(tokens.table)]
    calls = [inputs.call(3) for _ in range(16)]
    expected = [experts.forward(call.layer, call.x, call.topk_idx, call.topk_weights) for call in calls]
    with (
        switchyard_moe.LocalCluster(TINY, servers=2, replicas=2, control_plane_args=arguments) as cluster,
        switchyard_moe.Client(cluster.url, token_file=tokens.client) as client,
        switchyard_moe.Client(cluster.url, token=first) as fixed,
    ):
        client.wait_ready(30)
        fixed.wait_ready(30)
        stop, failures, counts = threading.Event(), [], [0, 0]

        def load(worker: int) -> None:
            while not stop.is_set():
                number = (counts[worker] * 2 + worker) % len(calls)
                call = calls[number]
                try:
                    out = client.forward(call.layer, call.x, call.topk_idx, call.topk_weights)
                    assert_close(out, expected[number])
                except BaseException as failure:
                    failures.append(failure)
                    return
                counts[worker] += 1

        workers = [threading.Thread(target=load, args=(worker,)) for worker in range(2)]
        for worker in workers:
            worker.start()
        try:
            [old] = tokens.identities()
            second = tokens.new()
            tokens.hand_out(second)
            tokens.remove(old)
            wait_until_refused(cluster.url, first)
            # A new process of each server needs a new placement and a new ticket, which the first token does not give.
            for name in cluster.names:
                cluster.restart(name)
                wait_for_epoch(client, fixed.epoch + 1)
                client.wait_ready(30)
            before = list(counts)
            wait_for(lambda: all(count > start for count, start in zip(counts, before, strict=True)) or failures)
        finally:
            stop.set()
            for worker in workers:
                worker.join(60)
        assert not failures
        assert fixed.epoch < client.epoch
        # Neither token is in the client's texts.
        assert not any(token in f"{client!r}{client.metrics_text()}" for token in (first, second))


@pytest.mark.parametrize("content", [b"", b"\xff\xfe"])
def test_a_file_without_a_token_is_refused_by_name(
    cluster: switchyard_moe.LocalCluster, tmp_path: Path, content: bytes
) -> None:
    file = tmp_path / "token"
    file.write_bytes(content)
    with pytest.raises(switchyard_moe.ConfigError, match=str(file)):
        switchyard_moe.Client(cluster.url, token_file=file)


def test_a_token_counts_more_than_a_file(cluster: switchyard_moe.LocalCluster, tmp_path: Path) -> None:
    switchyard_moe.Client(cluster.url, token=cluster.token, token_file=tmp_path / "absent").close()


def wait_until_refused(url: str, token: str) -> None:
    def is_refused() -> bool:
        try:
            switchyard_moe.Client(url, token=token, timeout=5).close()
        except switchyard_moe.ControlPlaneError:
            return True
        return False

    wait_for(is_refused)


def wait_for_epoch(client: switchyard_moe.Client, epoch: int) -> None:
    wait_for(lambda: client.epoch >= epoch)


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.02)
