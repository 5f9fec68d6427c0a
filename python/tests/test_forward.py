"""Results of calls against the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from reference import Experts
from support import Inputs, assert_close, poisoned

import switchyard_moe


@pytest.mark.parametrize("tokens", [1, 7, 300])
def test_forward_equals_the_reference(
    client: switchyard_moe.Client, experts: Experts, inputs: Inputs, tokens: int
) -> None:
    call = inputs.call(tokens)
    expected = experts.forward(call.layer, call.x, call.topk_idx, call.topk_weights)
    found = client.forward(call.layer, call.x, call.topk_idx, call.topk_weights)
    assert isinstance(found, np.ndarray)
    assert found.dtype == np.float32
    assert_close(found, expected)


def test_a_given_out_is_written_whole_and_returned(
    client: switchyard_moe.Client, experts: Experts, inputs: Inputs
) -> None:
    call = inputs.call(5)
    call.topk_idx[2] = -1
    out = poisoned(call.x.shape)
    found = client.forward(call.layer, call.x, call.topk_idx, call.topk_weights, out=out)
    assert found is out
    assert_close(out, experts.forward(call.layer, call.x, call.topk_idx, call.topk_weights))
    assert not out[2].any()


def test_float32_is_not_copied(client: switchyard_moe.Client, inputs: Inputs) -> None:
    call = inputs.call(3)
    before = call.x.copy()
    for _ in range(10):
        client.forward(call.layer, call.x, call.topk_idx, call.topk_weights, out=poisoned(call.x.shape))
        handle = client.dispatch(call.layer, call.x, call.topk_idx, call.topk_weights)
        client.combine(handle)
    none = {"x_copies": 0, "topk_idx_copies": 0, "topk_weights_copies": 0, "out_copies": 0}
    assert client.stats() == none
    np.testing.assert_array_equal(call.x, before)
    client.forward(call.layer, call.x, call.topk_idx.astype(np.int64), call.topk_weights)
    assert client.stats() == none | {"topk_idx_copies": 1}


def test_float16_is_widened_and_counted(client: switchyard_moe.Client, experts: Experts, inputs: Inputs) -> None:
    call = inputs.call(9)
    x = call.x.astype(np.float16)
    weights = call.topk_weights.astype(np.float16)
    found = client.forward(call.layer, x, call.topk_idx.astype(np.int64), weights)
    assert found.dtype == np.float16
    expected = experts.forward(call.layer, x.astype(np.float32), call.topk_idx, weights.astype(np.float32))
    assert_close(found.astype(np.float32), expected, 1e-3)
    assert client.stats() == {"x_copies": 1, "topk_idx_copies": 1, "topk_weights_copies": 1, "out_copies": 1}


def test_handles_overlap_and_end_in_any_order(client: switchyard_moe.Client, experts: Experts, inputs: Inputs) -> None:
    calls = [inputs.call(tokens) for tokens in (1, 20, 4)]
    handles = [client.dispatch(call.layer, call.x, call.topk_idx, call.topk_weights) for call in calls]
    assert [handle.num_tokens for handle in handles] == [1, 20, 4]
    for call, handle in list(zip(calls, handles, strict=True))[::-1]:
        assert not handle.done
        out = poisoned(call.x.shape)
        assert client.combine(handle, out=out) is out
        assert handle.done
        assert_close(out, experts.forward(call.layer, call.x, call.topk_idx, call.topk_weights))
    with pytest.raises(switchyard_moe.ArgumentError, match="combined before"):
        client.combine(handles[0])


def test_no_tokens_are_no_error(client: switchyard_moe.Client, experts: Experts) -> None:
    x = np.zeros((0, experts.hidden), np.float32)
    found = client.forward(0, x, np.zeros((0, 4), np.int32), np.zeros((0, 4), np.float32))
    assert found.shape == x.shape


def test_sizes_are_the_models(client: switchyard_moe.Client, experts: Experts) -> None:
    assert client.hidden == experts.hidden
    assert client.num_experts == experts.num_experts
    assert client.top_k == experts.top_k
    assert client.layers == list(range(experts.num_layers))
    assert client.architecture == "qwen3_moe"
    assert client.epoch > 0
    assert sorted(client.replicas(0, 0)) == ["server-0", "server-1"]
    assert client.replicas(99, 0) == client.replicas(-1, 0) == client.replicas(0, -1) == []


def test_a_client_without_a_checkpoint_takes_the_model_of_the_servers(
    cluster: switchyard_moe.LocalCluster, experts: Experts, inputs: Inputs
) -> None:
    with switchyard_moe.Client(cluster.url, token=cluster.token) as client:
        client.wait_ready(30)
        call = inputs.call(4)
        found = client.forward(call.layer, call.x, call.topk_idx, call.topk_weights)
        assert_close(found, experts.forward(call.layer, call.x, call.topk_idx, call.topk_weights))


def test_reports_tell_times_and_counts(client: switchyard_moe.Client, inputs: Inputs) -> None:
    assert client.last_report is None
    call = inputs.call(40, masked=0)
    report = switchyard_moe.Report()
    client.forward(call.layer, call.x, call.topk_idx, call.topk_weights, report=report)
    assert report.total_us > 0
    assert report.total_us == pytest.approx(report.dispatch_us + report.wait_us + report.combine_us)
    names = [server.name for server in report.servers]
    assert set(names) <= {"server-0", "server-1"}
    assert len(set(names)) == len(names) >= 1
    assert sum(server.frames for server in report.servers) == report.frames
    assert sum(server.pairs for server in report.servers) == call.topk_idx.size
    for server in report.servers:
        assert (server.failovers, server.resends) == (0, 0)
        assert server.queue_us <= report.server_queue_us
        assert 0 < server.compute_us <= report.server_compute_us
        assert server.wait_us >= server.compute_us
        assert server.name in repr(report)
        assert server.name in repr(server)
    assert (report.resends, report.failovers, report.missing, report.stall_us) == (0, 0, 0, 0)
    last = client.last_report
    assert last is not None
    assert repr(last) == repr(report)


def metric(client: switchyard_moe.Client, name: str) -> float:
    lines = [line for line in client.metrics_text().splitlines() if line.startswith(name)]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_a_warm_up_connects_all_lanes_with_all_servers(
    client: switchyard_moe.Client, experts: Experts, inputs: Inputs, dtype: str
) -> None:
    client.warm_up(64, calls=3, dtype=dtype)
    assert metric(client, "switchyard_client_lanes ") == 3
    assert metric(client, "switchyard_client_links") == 3 * 2
    assert metric(client, "switchyard_client_lanes_busy") == 0
    report = client.last_report
    assert report is None, "calls of the warm-up are not the caller's"
    before = metric(client, "switchyard_client_requests_total")
    assert before >= 3
    calls = [inputs.call(64) for _ in range(3)]
    kind = np.float32 if dtype == "f32" else np.float16
    handles = [client.dispatch(c.layer, c.x.astype(kind), c.topk_idx, c.topk_weights) for c in calls]
    for call, handle in zip(calls, handles, strict=True):
        expected = experts.forward(call.layer, call.x.astype(kind).astype(np.float32), call.topk_idx, call.topk_weights)
        assert_close(client.combine(handle).astype(np.float32), expected, 2e-5 if dtype == "f32" else 1e-3)
    # No call of these needed a lane or a link that was not there.
    assert metric(client, "switchyard_client_lanes ") == 3
    assert metric(client, "switchyard_client_links") == 3 * 2
    assert metric(client, "switchyard_client_requests_total") == before + 3


def test_a_warm_up_of_wrong_size_is_refused(client: switchyard_moe.Client) -> None:
    wrong: list[tuple[tuple[int, ...], dict[str, Any], str]] = [
        ((-1,), {}, "tokens is -1"),
        ((1 << 40,), {}, "tokens is 1099511627776"),
        ((1,), {"calls": 0}, "0 calls at a time, expected 1 to 16"),
        ((1,), {"calls": 17}, "17 calls at a time, expected 1 to 16"),
        ((1,), {"calls": -1}, "calls is -1"),
        ((1,), {"dtype": "fp8"}, "fp8"),
    ]
    for arguments, settings, text in wrong:
        with pytest.raises(switchyard_moe.ArgumentError, match=text):
            client.warm_up(*arguments, **settings)
    with pytest.raises(switchyard_moe.ConfigError, match="timeout"):
        client.warm_up(1, timeout=-1)
    client.close()
    with pytest.raises(switchyard_moe.ClosedError):
        client.warm_up(1)


def test_every_member_has_a_docstring() -> None:
    for kind in (
        switchyard_moe.Client,
        switchyard_moe.Handle,
        switchyard_moe.Report,
        switchyard_moe.ServerReport,
        switchyard_moe.LocalCluster,
    ):
        assert kind.__doc__
        for name in dir(kind):
            if not name.startswith("_"):
                assert getattr(kind, name).__doc__, f"{kind.__name__}.{name}"
