"""Fork, spawn, signals, threads and asyncio."""

from __future__ import annotations

import asyncio
import gc
import logging
import multiprocessing
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from reference import TINY, Experts
from support import Inputs, assert_close, in_fork, poisoned

import switchyard_moe


def test_a_fork_after_connect_is_refused_in_the_child(
    client: switchyard_moe.Client, experts: Experts, inputs: Inputs
) -> None:
    call = inputs.call(4)
    arguments = (call.layer, call.x, call.topk_idx, call.topk_weights)
    handle = client.dispatch(*arguments)
    for use in (
        lambda: str(client.forward(*arguments)),
        lambda: str(client.dispatch(*arguments)),
        lambda: str(client.combine(handle)),
        lambda: str(client.wait_ready(1)),
        lambda: client.metrics_text(),
    ):
        text = in_fork(use)
        assert text.startswith("ForkedError: ") and str(os.getpid()) in text, text

    def close() -> str:
        # Neither waits for the parent's threads, nor takes the parent's connections with it.
        nonlocal handle
        client.close()
        del handle
        gc.collect()
        return "closed"

    assert in_fork(close) == "closed"
    assert_close(client.combine(handle), experts.forward(*arguments))
    assert_close(client.forward(*arguments), experts.forward(*arguments))


def test_a_child_makes_a_client_of_its_own(
    client: switchyard_moe.Client, cluster: switchyard_moe.LocalCluster, experts: Experts, inputs: Inputs
) -> None:
    call = inputs.call(4)
    arguments = (call.layer, call.x, call.topk_idx, call.topk_weights)
    expected = experts.forward(*arguments)

    def run() -> str:
        with switchyard_moe.Client(cluster.url, token=cluster.token) as own:
            own.wait_ready(30)
            assert_close(own.forward(*arguments), expected)
        return "done"

    assert in_fork(run) == "done"
    assert_close(client.forward(*arguments), expected)


def spawned(url: str, token: str, arguments: Any, queue: Any) -> None:
    with switchyard_moe.Client(url, token=token) as client:
        client.wait_ready(30)
        queue.put(client.forward(*arguments))


def test_spawn_works(cluster: switchyard_moe.LocalCluster, experts: Experts, inputs: Inputs) -> None:
    call = inputs.call(4)
    arguments = (call.layer, call.x, call.topk_idx, call.topk_weights)
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=spawned, args=(cluster.url, cluster.token, arguments, queue))
    process.start()
    found = queue.get(timeout=60)
    process.join(30)
    assert process.exitcode == 0
    assert_close(found, experts.forward(*arguments))


def interrupt_soon(delay: float = 0.3) -> threading.Thread:
    def run() -> None:
        time.sleep(delay)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def not_ready(client: switchyard_moe.Client) -> switchyard_moe.NotReady | None:
    try:
        client.wait_ready(0.05)
    except switchyard_moe.NotReady as error:
        return error
    return None


def test_an_interrupt_ends_a_blocked_call(experts: Experts, inputs: Inputs) -> None:
    with switchyard_moe.LocalCluster(TINY, servers=1) as cluster, cluster.client(deadline=60.0) as client:
        call = inputs.call(4, masked=0)
        arguments = (call.layer, call.x, call.topk_idx, call.topk_weights)
        cluster.freeze("server-0")
        handle = client.dispatch(*arguments)
        for block in (lambda: client.forward(*arguments), lambda: client.combine(handle)):
            thread = interrupt_soon()
            with pytest.raises(KeyboardInterrupt):
                block()
            thread.join()
        cluster.thaw("server-0")
        # The client is usable, and answers to the abandoned calls are dropped.
        assert_close(client.forward(*arguments), experts.forward(*arguments))
        cluster.kill("server-0")
        # Until the client knows that the server is gone, it counts as ready.
        while not_ready(client) is None:
            pass
        thread = interrupt_soon()
        with pytest.raises(KeyboardInterrupt):
            client.wait_ready(3000)
        thread.join()


def test_an_interrupt_within_a_log_handler_ends_the_call() -> None:
    class Interrupting(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            logger.removeHandler(self)
            os.kill(os.getpid(), signal.SIGINT)
            # The handler of the signal runs here.
            time.sleep(1)

    logger = logging.getLogger("switchyard_moe")
    handler = Interrupting()
    with switchyard_moe.LocalCluster(TINY, servers=1) as cluster, cluster.client() as client:
        cluster.kill("server-0")
        while not_ready(client) is None:
            pass
        logger.addHandler(handler)
        try:
            with pytest.raises(KeyboardInterrupt):
                client.wait_ready(30)
        finally:
            logger.removeHandler(handler)


def test_an_interrupt_ends_the_search_for_a_control_plane() -> None:
    thread = interrupt_soon()
    with pytest.raises(KeyboardInterrupt):
        switchyard_moe.Client("http://127.0.0.1:1", timeout=3000)
    thread.join()


def test_other_threads_run_while_a_call_blocks(inputs: Inputs) -> None:
    with switchyard_moe.LocalCluster(TINY, servers=1) as cluster, cluster.client(deadline=60.0) as client:
        call = inputs.call(1, masked=0)
        cluster.freeze("server-0")
        with ThreadPoolExecutor(1) as pool:
            blocked = pool.submit(client.forward, call.layer, call.x, call.topk_idx, call.topk_weights)
            # This thread has the interpreter while the other one is blocked in its call.
            for _ in range(20):
                time.sleep(0.01)
            assert not blocked.done()
            cluster.thaw("server-0")
            assert np.isfinite(blocked.result(30)).all()


def test_threads_share_a_client(client: switchyard_moe.Client, experts: Experts, inputs: Inputs) -> None:
    calls = [inputs.call(tokens) for tokens in range(1, 17)]

    def run(idx: int) -> None:
        call = calls[idx % len(calls)]
        out = poisoned(call.x.shape)
        client.forward(call.layer, call.x, call.topk_idx, call.topk_weights, out=out)
        assert_close(out, experts.forward(call.layer, call.x, call.topk_idx, call.topk_weights))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(run, range(64)))


def test_more_calls_than_lanes_say_so(cluster: switchyard_moe.LocalCluster, inputs: Inputs) -> None:
    with cluster.client(max_lanes=2, timeout=0.3) as client:
        call = inputs.call(1, masked=0)
        arguments = (call.layer, call.x, call.topk_idx, call.topk_weights)
        handles = [client.dispatch(*arguments) for _ in range(2)]
        with pytest.raises(switchyard_moe.BusyError, match="2 lanes"):
            client.dispatch(*arguments)
        # A handle that goes abandons its call and gives its lane back.
        del handles
        gc.collect()
        client.forward(*arguments)


def test_the_asyncio_forms(client: switchyard_moe.Client, experts: Experts, inputs: Inputs) -> None:
    calls = [inputs.call(tokens) for tokens in (1, 8, 3)]

    async def run() -> None:
        await client.await_ready(30)
        report = switchyard_moe.Report()
        founds = await asyncio.gather(
            *(client.aforward(call.layer, call.x, call.topk_idx, call.topk_weights) for call in calls)
        )
        for call, found in zip(calls, founds, strict=True):
            assert_close(found, experts.forward(call.layer, call.x, call.topk_idx, call.topk_weights))
        call = calls[0]
        handle = client.dispatch(call.layer, call.x, call.topk_idx, call.topk_weights)
        out = poisoned(call.x.shape)
        assert await client.acombine(handle, out=out, report=report) is out
        assert_close(out, experts.forward(call.layer, call.x, call.topk_idx, call.topk_weights))
        assert report.total_us > 0
        with pytest.raises(switchyard_moe.ArgumentError):
            await client.aforward(99, call.x, call.topk_idx, call.topk_weights)

    asyncio.run(run())


def test_events_reach_logging(inputs: Inputs, caplog: pytest.LogCaptureFixture) -> None:
    with switchyard_moe.LocalCluster(TINY, servers=2) as cluster, cluster.client() as client:
        call = inputs.call(16, masked=0)
        arguments = (call.layer, call.x, call.topk_idx, call.topk_weights)
        cluster.freeze("server-0")
        with caplog.at_level(logging.WARNING, logger="switchyard_moe"):
            for _ in range(20):
                client.forward(*arguments)
        records = [record for record in caplog.records if record.name == "switchyard_moe"]
        assert any("server-0" in record.getMessage() for record in records), records
        assert all(abs(record.created - time.time()) < 60 for record in records)
