"""The local cluster, and calls while its processes die."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from reference import TINY, Experts
from support import Inputs, assert_close, in_fork

import switchyard_moe


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 20
    while any(is_alive(pid) for pid in pids):
        assert time.monotonic() < deadline, "processes are left"
        time.sleep(0.02)


def test_calls_survive_a_killed_and_restarted_server(experts: Experts, inputs: Inputs) -> None:
    with switchyard_moe.LocalCluster(TINY, servers=2) as cluster, cluster.client() as client:
        stop = threading.Event()
        finished = 0
        failures: list[BaseException] = []

        def run() -> None:
            nonlocal finished
            try:
                while not stop.is_set():
                    call = inputs.call(int(inputs.rng.integers(1, 40)))
                    arguments = (call.layer, call.x, call.topk_idx, call.topk_weights)
                    assert_close(client.forward(*arguments), experts.forward(*arguments))
                    finished += 1
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        for name in cluster.names:
            before = finished
            cluster.kill(name)
            assert name not in cluster.running
            while finished < before + 20 and not failures:
                time.sleep(0.01)
            cluster.restart(name)
            assert name in cluster.running
            client.wait_ready(30)
        stop.set()
        thread.join(30)
        assert not failures, failures
        assert finished > 40


def test_dead_servers_are_restarted_one_by_one(experts: Experts, inputs: Inputs) -> None:
    with switchyard_moe.LocalCluster(TINY, servers=2) as cluster, cluster.client() as client:
        for name in cluster.names:
            cluster.kill(name)
        for count, name in enumerate(cluster.names, 1):
            cluster.restart(name)
            assert cluster.running == cluster.names[:count]
            client.wait_ready(30)
            call = inputs.call(8)
            arguments = (call.layer, call.x, call.topk_idx, call.topk_weights)
            assert_close(client.forward(*arguments), experts.forward(*arguments))


def test_calls_go_on_without_the_control_plane(experts: Experts, inputs: Inputs) -> None:
    with switchyard_moe.LocalCluster(TINY, servers=2) as cluster, cluster.client() as client:
        url = cluster.url
        cluster.stop_control_plane()
        for _ in range(10):
            call = inputs.call(8)
            arguments = (call.layer, call.x, call.topk_idx, call.topk_weights)
            assert_close(client.forward(*arguments), experts.forward(*arguments))
        cluster.kill("server-1")
        assert_close(client.forward(*arguments), experts.forward(*arguments))
        for name in cluster.names:
            with pytest.raises(switchyard_moe.ClusterError, match=f"{name} cannot register, because the control plane"):
                cluster.restart(name)
        # A server that runs is left alone then.
        assert cluster.running == ["server-0"]
        with pytest.raises(switchyard_moe.ControlPlaneError):
            switchyard_moe.Client(url, token=cluster.token, timeout=0.3)
        cluster.start_control_plane()
        assert cluster.url == url
        cluster.restart("server-1")
        with cluster.client() as other:
            assert_close(other.forward(*arguments), experts.forward(*arguments))


def test_a_restarted_server_is_connected_before_the_control_plane_ends(experts: Experts, inputs: Inputs) -> None:
    with switchyard_moe.LocalCluster(TINY, servers=2) as cluster, cluster.client() as client:
        cluster.restart("server-0")
        cluster.wait_connected("server-0")
        cluster.stop_control_plane()
        cluster.kill("server-1")
        call = inputs.call(8)
        arguments = (call.layer, call.x, call.topk_idx, call.topk_weights)
        assert_close(client.forward(*arguments), experts.forward(*arguments))
        with pytest.raises(switchyard_moe.ClusterError, match="server-1 is not running"):
            cluster.wait_connected("server-1")


def test_a_wait_for_connections_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    with switchyard_moe.LocalCluster(TINY, servers=1) as cluster, cluster.client():
        cluster.wait_connected("server-0", connections=1)
        monkeypatch.setattr(cluster, "_timeout", 0.2)
        with pytest.raises(switchyard_moe.ClusterError, match=r"server-0 has 1 of 2 connections after 0\.2 s"):
            cluster.wait_connected("server-0", connections=2)


def test_an_expert_without_a_replica_ends_the_call(inputs: Inputs) -> None:
    with switchyard_moe.LocalCluster(TINY, servers=1) as cluster:
        with cluster.client(timeout=0.5) as client:
            call = inputs.call(2, masked=0)
            cluster.kill("server-0")
            with pytest.raises(switchyard_moe.NoReplicaError, match="server-0"):
                client.forward(call.layer, call.x, call.topk_idx, call.topk_weights)
            with pytest.raises(switchyard_moe.NotReady, match="not ready"):
                client.wait_ready(0.2)
        with pytest.raises(switchyard_moe.NotReady):
            cluster.client(ready_timeout=0.2)


def test_readiness_knows_of_a_kill_at_once() -> None:
    with switchyard_moe.LocalCluster(TINY, servers=2, replicas=1) as cluster, cluster.client() as client:
        for name in cluster.names * 2:
            cluster.kill(name)
            # The client's own threads may not have run since, and the control plane still names the server.
            with pytest.raises(switchyard_moe.NotReady, match=name):
                client.wait_ready(0)
            with pytest.raises(switchyard_moe.NotReady, match=name):
                cluster.client(ready_timeout=0.1)
            cluster.restart(name)
            client.wait_ready(30)
            cluster.client().close()


def test_a_report_names_the_server_that_failed(experts: Experts, inputs: Inputs) -> None:
    with switchyard_moe.LocalCluster(TINY, servers=2) as cluster, cluster.client() as client:
        cluster.freeze("server-0")
        call = inputs.call(40, masked=0)
        arguments = (call.layer, call.x, call.topk_idx, call.topk_weights)
        report = switchyard_moe.Report()
        assert_close(client.forward(*arguments, report=report), experts.forward(*arguments))
        parts = {server.name: server for server in report.servers}
        assert sorted(parts) == cluster.names
        assert parts["server-0"].failovers == report.failovers == 1
        assert parts["server-0"].resends == report.resends > 0
        assert (parts["server-0"].pairs, parts["server-1"].pairs) == (0, call.topk_idx.size)
        assert parts["server-1"].failovers == 0
        cluster.thaw("server-0")


def test_a_drained_server_ends_well(experts: Experts, inputs: Inputs) -> None:
    with switchyard_moe.LocalCluster(TINY, servers=2) as cluster, cluster.client() as client:
        cluster.drain("server-0")
        call = inputs.call(8)
        arguments = (call.layer, call.x, call.topk_idx, call.topk_weights)
        assert_close(client.forward(*arguments), experts.forward(*arguments))


def test_nothing_is_left_behind() -> None:
    with switchyard_moe.LocalCluster(TINY, servers=2) as cluster:
        pids = [cluster.pid(name) for name in [*cluster.names, "control-plane"]]
        assert all(is_alive(pid) for pid in pids)
        assert "server-1" in repr(cluster)
    wait_gone(pids)
    with pytest.raises(switchyard_moe.ClosedError):
        cluster.client()
    assert "closed" in repr(cluster)


def test_children_end_with_a_killed_parent() -> None:
    code = (
        "import os, signal, switchyard_moe\n"
        f"cluster = switchyard_moe.LocalCluster({str(TINY)!r}, servers=1)\n"
        "print(cluster.pid('server-0'), cluster.pid('control-plane'), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=120, check=False)
    wait_gone([int(pid) for pid in done.stdout.split()])


def test_the_thread_that_starts_a_cluster_may_end(inputs: Inputs) -> None:
    clusters: list[switchyard_moe.LocalCluster] = []
    thread = threading.Thread(target=lambda: clusters.append(switchyard_moe.LocalCluster(TINY, servers=1)))
    thread.start()
    thread.join(60)
    with clusters[0] as cluster, cluster.client() as client:
        call = inputs.call(2)
        client.forward(call.layer, call.x, call.topk_idx, call.topk_weights)


def test_a_failed_start_quotes_the_reason(tmp_path: Path) -> None:
    with pytest.raises(switchyard_moe.ClusterError, match=r"config\.json"):
        switchyard_moe.LocalCluster(tmp_path, servers=1)
    with pytest.raises(switchyard_moe.ClusterError, match="/nowhere"):
        switchyard_moe.LocalCluster(TINY, binary="/nowhere")
    with pytest.raises(switchyard_moe.ConfigError, match="replicas is 3"):
        switchyard_moe.LocalCluster(TINY, servers=2, replicas=3)
    with pytest.raises(switchyard_moe.ConfigError, match="lease_ttl is -1"):
        switchyard_moe.LocalCluster(TINY, lease_ttl=-1)
    with pytest.raises(switchyard_moe.ConfigError, match="threads is -1"):
        switchyard_moe.LocalCluster(TINY, threads=-1)
    with pytest.raises(switchyard_moe.ConfigError, match="timeout is 0"):
        switchyard_moe.LocalCluster(TINY, timeout=0)
    with pytest.raises(switchyard_moe.ConfigError, match="servers is 0"):
        switchyard_moe.LocalCluster(TINY, servers=0)


def test_a_forked_child_leaves_the_cluster_alone(cluster: switchyard_moe.LocalCluster) -> None:
    def run() -> str:
        with pytest.raises(switchyard_moe.ForkedError, match=str(os.getppid())):
            cluster.kill("server-0")
        with pytest.raises(switchyard_moe.ForkedError):
            cluster.restart("server-0")
        cluster.close()
        return "left alone"

    assert in_fork(run) == "left alone"
    assert cluster.running == cluster.names


def test_names_and_states_are_checked(cluster: switchyard_moe.LocalCluster) -> None:
    with pytest.raises(switchyard_moe.ConfigError, match="server-9"):
        cluster.kill("server-9")
    with pytest.raises(switchyard_moe.ClusterError, match="running already"):
        cluster.start_control_plane()
    assert cluster.running == cluster.names


def test_the_binary_comes_with_the_package() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "switchyard_moe", "--version"], stdout=subprocess.PIPE, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == ["switchyard", switchyard_moe.__version__]
    wrong = subprocess.run(
        [sys.executable, "-m", "switchyard_moe", "fly"], capture_output=True, timeout=60, check=False
    )
    assert wrong.returncode == 2
    env = {**os.environ, "SWITCHYARD_BINARY": "/nowhere"}
    wrong = subprocess.run(
        [sys.executable, "-m", "switchyard_moe"], capture_output=True, text=True, env=env, timeout=60, check=False
    )
    assert wrong.returncode == 1 and "/nowhere" in wrong.stderr
