"""The small model through each engine: the ids are those of `golden.json`, while servers are killed."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
import pytest

import switchyard_moe
from switchyard_moe.bench.soak import Server, soak

EXPECTED = [ids for _, ids in harness.golden()]


def settings(cluster: switchyard_moe.LocalCluster) -> dict[str, str]:
    return harness.environment(SWITCHYARD_CONTROL_PLANE=cluster.url, SWITCHYARD_TOKEN=cluster.token)


def disturb(cluster: switchyard_moe.LocalCluster, row: dict[str, Any]) -> None:
    """Kills and restarts servers and the control plane after some of the prompts, while the next one is computed."""
    match row.get("prompt"):
        case 0:
            cluster.kill("server-0")
        case 1:
            cluster.restart("server-0")
        case 3:
            # A client that is not connected with the new server cannot find it afterwards.
            cluster.wait_connected("server-0")
            cluster.stop_control_plane()
        case 4:
            cluster.kill("server-1")


def test_transformers_goes_on_through_deaths(
    tiny_cluster: switchyard_moe.LocalCluster, tiny: Path, prompts: Path
) -> None:
    code, rows, errors = harness.run(
        harness.EXAMPLES / "transformers_generate.py",
        tiny,
        prompts,
        env=settings(tiny_cluster),
        on_row=lambda row: disturb(tiny_cluster, row),
    )
    assert harness.ids(code, rows, errors) == EXPECTED
    # 17.1 MiB with experts.
    assert rows[0]["parameter_bytes"] < 6 << 20
    assert tiny_cluster.running == ["server-0"]


def test_vllm_server_goes_on_through_deaths(tiny_cluster: switchyard_moe.LocalCluster, tiny: Path) -> None:
    options = ["--quantization", "switchyard", "--load-format", "switchyard", "--dtype", "float32"]
    options += ["--max-model-len", "256", "--max-num-seqs", "8", "--skip-tokenizer-init"]
    answers: dict[int, list[int]] = {}
    failures: list[str] = []
    counted, half = 0, threading.Event()
    lock = threading.Lock()

    def ask(number: int) -> None:
        nonlocal counted
        found = answers.setdefault(number, [])
        try:
            for token in server.stream(harness.golden()[number][0], 64):
                found.append(token)
                with lock:
                    counted += 1
                    if counted >= 4 * 64:
                        half.set()
        except (OSError, ValueError) as error:
            failures.append(f"prompt {number}: {error}")
            half.set()

    def round_of_clients() -> list[threading.Thread]:
        threads = [threading.Thread(target=ask, args=(number,), daemon=True) for number in range(8)]
        for thread in threads:
            thread.start()
        return threads

    def check(server: Server) -> None:
        assert not failures, f"{failures}; the server's output:\n{server.log(20_000)}"
        assert [answers.get(number) for number in range(8)] == EXPECTED, server.log()

    with Server(str(tiny), options, settings(tiny_cluster)) as server:
        server.wait()
        clients = round_of_clients()
        assert half.wait(harness.TIMEOUT)
        tiny_cluster.kill("server-0")
        for client in clients:
            client.join(harness.TIMEOUT)
        check(server)
        tiny_cluster.restart("server-0")
        # A client that is not connected with the new server cannot find it afterwards.
        tiny_cluster.wait_connected("server-0")
        answers.clear()
        failures.clear()
        counted = 0
        half.clear()
        # Without a control plane, and then without the server that was there from the start.
        tiny_cluster.stop_control_plane()
        clients = round_of_clients()
        assert half.wait(harness.TIMEOUT)
        tiny_cluster.kill("server-1")
        for client in clients:
            client.join(harness.TIMEOUT)
        check(server)


def test_vllm_layer_class(tiny_cluster: switchyard_moe.LocalCluster, tiny: Path, prompts: Path) -> None:
    env = {**settings(tiny_cluster), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    script = harness.EXAMPLES / "vllm_generate.py"
    result = harness.run(script, tiny, prompts, "--layer-class", "--enforce-eager", env=env)
    assert harness.ids(*result) == EXPECTED


@pytest.mark.long
def test_vllm_tensor_parallel(tiny_cluster: switchyard_moe.LocalCluster, tiny: Path, prompts: Path) -> None:
    script = harness.EXAMPLES / "vllm_generate.py"
    arguments = ["--enforce-eager", "--tensor-parallel-size", "2"]
    result = harness.run(script, tiny, prompts, *arguments, env=settings(tiny_cluster), timeout=1200.0)
    assert harness.ids(*result) == EXPECTED


@pytest.mark.long
def test_vllm_soak(tiny_cluster: switchyard_moe.LocalCluster, tiny: Path) -> None:
    options = ["--quantization", "switchyard", "--load-format", "switchyard", "--dtype", "float32"]
    options += ["--max-model-len", "256", "--max-num-seqs", "8", "--skip-tokenizer-init"]
    with Server(str(tiny), options, settings(tiny_cluster)) as server:
        server.wait()
        tally = soak(server, tiny_cluster, harness.golden(), clients=8, seconds=300.0, kill_every=5.0)
    print(tally)
    assert tally.failed == 0 and tally.wrong == 0, tally.errors[:5]
    assert tally.requests > 0 and tally.kills > 0


@pytest.mark.long
def test_next_vllm(tiny_cluster: switchyard_moe.LocalCluster, tiny: Path, prompts: Path) -> None:
    # Its Python files over the compiled code of the version before.
    path = [os.environ["SWITCHYARD_TEST_VLLM_NEXT"], os.environ.get("PYTHONPATH", "")]
    env = {
        **settings(tiny_cluster),
        "PYTHONPATH": os.pathsep.join(path),
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    script = harness.EXAMPLES / "vllm_generate.py"
    result = harness.run(script, tiny, prompts, "--enforce-eager", env=env)
    assert harness.ids(*result) == EXPECTED


def run_sglang(
    model: Path,
    prompts: Path,
    cluster: switchyard_moe.LocalCluster,
    *arguments: str,
    on_row: Callable[[dict[str, Any]], None] = lambda row: None,
) -> list[list[int]]:
    cores = sorted(os.sched_getaffinity(0))
    path = [str(harness.HERE / "no_sgl_kernel"), os.environ["SWITCHYARD_TEST_SGLANG"], os.environ.get("PYTHONPATH", "")]
    env = {
        **settings(cluster),
        "PYTHONPATH": os.pathsep.join(path),
        "SGLANG_USE_CPU_ENGINE": "1",
        # SGLang takes a NUMA node for each rank otherwise, and ends if there are fewer.
        "SGLANG_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}",
        "SGLANG_PLUGINS": "switchyard",
    }
    script = harness.EXAMPLES / "sglang_generate.py"
    result = harness.run(script, model, prompts, "--device", "cpu", *arguments, env=env, on_row=on_row, timeout=1200.0)
    return harness.ids(*result)


@pytest.fixture
def untied(tiny: Path, tmp_path: Path) -> Path:
    """The small model for SGLang, which ignores tied embeddings of this family."""
    return harness.untie(tiny, tmp_path / "untied")


@pytest.mark.long
@pytest.mark.sglang
def test_sglang_goes_on_through_deaths(untied: Path, prompts: Path) -> None:
    with switchyard_moe.LocalCluster(untied) as cluster:
        # One prompt after another: the next one is computed while a server dies.
        found = run_sglang(untied, prompts, cluster, "--batch", "1", on_row=lambda row: disturb(cluster, row))
        assert cluster.running == ["server-0"]
    assert found == EXPECTED


@pytest.mark.long
@pytest.mark.sglang
def test_sglang_tensor_parallel(untied: Path, prompts: Path) -> None:
    with switchyard_moe.LocalCluster(untied) as cluster:
        assert run_sglang(untied, prompts, cluster, "--tensor-parallel-size", "2") == EXPECTED
