"""Secrets show up nowhere in what a Python program and its cluster write, spans and metrics included."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from otlp import Collector
from reference import TINY

import switchyard_moe
from switchyard_moe._binary import find_binary

# Runs in an interpreter of its own, because the package logs to the first configuration of a process.
PROGRAM = """
import logging, os, sys, traceback, warnings
import numpy as np
import switchyard_moe

logging.basicConfig(level=1, format="%(levelno)s %(name)s %(message)s")
url, token_file, model = sys.argv[1:]
wrong = os.environ["WRONG"]

def failing(**settings):
    try:
        switchyard_moe.Client(**settings).close()
    except switchyard_moe.Error as error:
        print("FAILED", type(error).__name__, error, repr(error), error.args)
        traceback.print_exc()
    else:
        raise SystemExit(f"accepted: {sorted(settings)}")

def call(client):
    client.wait_ready(30)
    x = np.ones((2, client.hidden), np.float32)
    idx, weights = np.zeros((2, client.top_k), np.int32), np.ones((2, client.top_k), np.float32)
    idx[:] = np.arange(client.top_k)
    report = switchyard_moe.Report()
    client.forward(client.layers[0], x, idx, weights, report=report)
    print("CALLED", repr(client), repr(report), client.stats(), client.metrics_text())
    try:
        client.forward(client.layers[0], x[:, :3].copy(), idx, weights)
    except switchyard_moe.Error as error:
        print(error)

with switchyard_moe.Client(url, token_file=token_file) as client:
    call(client)
with switchyard_moe.Client(url) as client:
    call(client)
failing(control_plane=url, token=wrong, timeout=3)
failing(control_plane=url, token=f"{wrong}\\n", timeout=3)
failing(control_plane=f"http://u:{wrong}@127.0.0.1:1", timeout=3)
failing(control_plane=f"dns://u:{wrong}@127.0.0.1:1", timeout=3)
failing(control_plane=url, otlp_endpoint=f"u:{wrong}@127.0.0.1:1")
failing(control_plane=url, otlp_endpoint=f"http://u:{wrong}@127.0.0.1:1")
del os.environ["SWITCHYARD_OTLP_ENDPOINT"]
os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = f"u:{wrong}@127.0.0.1:1"
with warnings.catch_warnings(record=True) as caught, switchyard_moe.Client(url) as client:
    warnings.simplefilter("always")
    call(client)
print([str(warning.message) for warning in caught])

for arguments in ([], ["--no-such-flag"]):
    try:
        with switchyard_moe.LocalCluster(model, servers=1, server_args=arguments) as cluster:
            print("CLUSTER", repr(cluster), cluster.running)
            assert cluster.token not in repr(cluster)
    except switchyard_moe.Error as error:
        print("FAILED", error)
"""


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


def test_secrets_show_up_nowhere(tmp_path: Path, collector: Collector) -> None:
    table, wrong = tmp_path / "tokens", secrets.token_hex(24)
    arguments = [find_binary(), "token", "new", "--file", str(table), "--role", "client", "--name", "engine"]
    plain = {key: value for key, value in os.environ.items() if not key.startswith(("SWITCHYARD_", "OTEL_"))}
    by_file, by_variable = (
        subprocess.run(arguments, check=True, capture_output=True, text=True, timeout=30, env=plain).stdout.strip()
        for _ in range(2)
    )
    token_file = tmp_path / "client.token"
    token_file.write_text(f"{by_file}\n")
    of_collector = secrets.token_hex(24)
    traces = {
        "SWITCHYARD_OTLP_ENDPOINT": collector.endpoint,
        "SWITCHYARD_TRACE_SAMPLE_RATIO": "1",
        "OTEL_EXPORTER_OTLP_HEADERS": f"authorization=Bearer {of_collector}",
    }
    logs = {"SWITCHYARD_LOG": "trace"}
    with switchyard_moe.LocalCluster(
        TINY, servers=1, replicas=1, env=traces | logs, control_plane_args=["--tokens", str(table)]
    ) as cluster:
        env = plain | traces | logs | {"SWITCHYARD_TOKEN": by_variable, "WRONG": wrong}
        command = [sys.executable, "-c", PROGRAM, cluster.url, str(token_file), str(TINY)]
        program = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env, check=False)
        written = program.stdout + program.stderr
        assert program.returncode == 0, written
        collector.wait(2, name="layer")
        collector.wait(2, name="compute")
        # The last lines of the servers' logs, which errors of the cluster quote.
        quoted = "\n".join(line for name in cluster.names for line in cluster._processes.get(name).tail)
        hidden = [by_file, by_variable, wrong, of_collector, cluster.token]
    assert written.count("CALLED") == 3 and written.count("FAILED") == 7, written
    assert "TRACE" in quoted and "10 switchyard_moe" in written, (quoted, written)
    spans = collector.spans
    assert {"layer", "frame", "compute"} <= {span.name for span in spans}
    for label, text in {"program": written, "servers": quoted, "traces": repr(spans)}.items():
        for secret in hidden:
            found = [line for line in text.splitlines() if secret[-16:] in line]
            assert not found, f"{label} has the secret {secret}: {found[:3]}"
