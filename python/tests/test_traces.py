"""Spans of Python clients, and of the servers that they share traces with, at a collector of this process."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from opentelemetry import trace
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags
from otlp import Collector, Span
from reference import TINY, Experts
from support import Inputs, assert_close

import switchyard_moe


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


@pytest.fixture(scope="module")
def traced(collector: Collector) -> Iterator[switchyard_moe.LocalCluster]:
    """Two servers that record all calls."""
    env = {"SWITCHYARD_OTLP_ENDPOINT": collector.endpoint, "SWITCHYARD_TRACE_SAMPLE_RATIO": "1"}
    with switchyard_moe.LocalCluster(TINY, servers=2, replicas=1, env=env) as cluster:
        yield cluster


class Caller:
    """A span of the caller, as a header and as a context of the package ``opentelemetry``."""

    def __init__(self, *, sampled: bool = True) -> None:
        self.trace_id = secrets.randbits(128) | 1
        self.span_id = secrets.randbits(64) | 1
        self.sampled = sampled

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{int(self.sampled):02x}"

    def as_current(self) -> Any:
        flags = TraceFlags(TraceFlags.SAMPLED if self.sampled else TraceFlags.DEFAULT)
        context = SpanContext(self.trace_id, self.span_id, is_remote=False, trace_flags=flags)
        return trace.use_span(NonRecordingSpan(context))


def arguments(inputs: Inputs, tokens: int = 5) -> tuple[int, Any, Any, Any]:
    call = inputs.call(tokens, masked=0.0)
    return call.layer, call.x, call.topk_idx, call.topk_weights


def check_in_trace_of(caller: Caller, spans: list[Span]) -> Span:
    """Check that a layer and its frames are children of the caller's span, and return the layer's span."""
    own = [span for span in spans if span.trace_id == caller.trace_id]
    [layer] = [span for span in own if span.name == "layer"]
    assert layer.parent_id == caller.span_id
    frames = [span for span in own if span.name == "frame"]
    assert len(frames) == layer.attributes["switchyard.frames"] >= 1
    assert {span.parent_id for span in own if span is not layer} == {layer.span_id}
    assert {span.attributes["switchyard.server"] for span in frames} <= {"server-0", "server-1"}
    return layer


def test_a_call_is_one_trace_across_client_and_servers_and_a_part_of_the_callers(
    traced: switchyard_moe.LocalCluster, collector: Collector, inputs: Inputs, experts: Experts
) -> None:
    caller, name = Caller(), f"engine-{secrets.token_hex(4)}"
    with traced.client(otlp_endpoint=collector.endpoint, trace_sample_ratio=1.0, name=name) as client:
        collector.clear()
        layer, x, topk_idx, topk_weights = arguments(inputs)
        out = client.forward(layer, x, topk_idx, topk_weights, traceparent=caller.traceparent)
        assert_close(out, experts.forward(layer, x, topk_idx, topk_weights))
    own = [span for span in collector.spans if span.instance == name]
    assert {span.service for span in own} == {"switchyard-client"}
    in_callers = check_in_trace_of(caller, own)
    [shared] = [span for span in own if span.name == "layer" and span.trace_id != caller.trace_id]
    # The two spans of the layer link to each other.
    assert shared.links == ((caller.trace_id, caller.span_id),)
    assert in_callers.links == ((shared.trace_id, shared.span_id),)
    # Servers export once a second.
    frames = {span.span_id: span for span in own if span.name == "frame" and span.trace_id == shared.trace_id}
    served = collector.wait(len(frames), name="serve")
    assert {span.parent_id for span in served} == set(frames)
    for span in served:
        assert span.trace_id == shared.trace_id
        assert span.instance == frames[span.parent_id].attributes["switchyard.server"]
    for phase in ("queue", "gather", "compute"):
        found = [span for span in collector.spans if span.name == phase and span.trace_id == shared.trace_id]
        assert {span.parent_id for span in found} == {span.span_id for span in served}


@pytest.mark.parametrize("sampled", [True, False])
def test_the_current_span_of_opentelemetry_is_the_caller(
    traced: switchyard_moe.LocalCluster, collector: Collector, inputs: Inputs, sampled: bool
) -> None:
    callers = [Caller(sampled=sampled) for _ in range(4)]
    other, name = Caller(), f"engine-{secrets.token_hex(4)}"
    with traced.client(otlp_endpoint=collector.endpoint, trace_sample_ratio=0.0, name=name) as client:

        async def in_tasks() -> None:
            async def task(caller: Caller, *, split: bool) -> None:
                with caller.as_current():
                    if split:
                        await client.acombine(client.dispatch(*arguments(inputs)))
                    else:
                        await client.aforward(*arguments(inputs))

            await asyncio.gather(task(callers[2], split=False), task(callers[3], split=True))

        with callers[0].as_current():
            client.forward(*arguments(inputs))
        with callers[1].as_current():
            handle = client.dispatch(*arguments(inputs))
        # The dispatch decides.
        with other.as_current():
            client.combine(handle)
        asyncio.run(in_tasks())
        # An argument counts more than the current span.
        argument = Caller()
        with other.as_current():
            client.forward(*arguments(inputs), traceparent=argument.traceparent)
        client.forward(*arguments(inputs))
    own = [span for span in collector.spans if span.instance == name]
    check_in_trace_of(argument, own)
    expected = {argument.trace_id} | ({caller.trace_id for caller in callers} if sampled else set())
    assert {span.trace_id for span in own} == expected
    for caller in callers if sampled else []:
        check_in_trace_of(caller, own)


def test_settings_come_from_the_environment_and_arguments_replace_them(
    traced: switchyard_moe.LocalCluster, collector: Collector, inputs: Inputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    def num_layers(**settings: Any) -> int:
        name = f"engine-{secrets.token_hex(4)}"
        with traced.client(name=name, **settings) as client:
            for _ in range(3):
                client.forward(*arguments(inputs))
        return sum(span.name == "layer" and span.instance == name for span in collector.spans)

    assert num_layers() == 0
    monkeypatch.setenv("SWITCHYARD_TRACE_SAMPLE_RATIO", "1")
    assert num_layers() == 0
    assert num_layers(otlp_endpoint=collector.endpoint) == 3
    for variable in ("OTEL_EXPORTER_OTLP_ENDPOINT", "SWITCHYARD_OTLP_ENDPOINT"):
        monkeypatch.setenv(variable, collector.endpoint)
        assert num_layers() == 3
        assert num_layers(otlp_endpoint="") == 0
        assert num_layers(trace_sample_ratio=0.0) == 0
        monkeypatch.delenv(variable)
    # Switchyard's own variable counts more.
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("SWITCHYARD_OTLP_ENDPOINT", collector.endpoint)
    assert num_layers() == 3


def test_a_collector_of_other_programs_that_cannot_be_used_is_a_warning(
    cluster: switchyard_moe.LocalCluster, inputs: Inputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "collector:4317")
    with pytest.warns(RuntimeWarning, match="'collector:4317' and not used"):
        client = switchyard_moe.Client(cluster.url, token=cluster.token)
    with client:
        client.forward(*arguments(inputs))


@pytest.mark.parametrize(
    ("settings", "env", "expected"),
    [
        ({"otlp_endpoint": "127.0.0.1:4318"}, {}, "expected a URL such as http"),
        ({"otlp_endpoint": "http://127.0.0.1:1", "trace_sample_ratio": 1.5}, {}, "expected 0 to 1"),
        ({}, {"SWITCHYARD_OTLP_ENDPOINT": "ftp://host"}, "expected a URL such as http"),
        ({}, {"SWITCHYARD_TRACE_SAMPLE_RATIO": "much"}, "SWITCHYARD_TRACE_SAMPLE_RATIO is 'much'"),
    ],
)
def test_a_wrong_setting_is_refused(
    cluster: switchyard_moe.LocalCluster,
    settings: dict[str, Any],
    env: dict[str, str],
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(switchyard_moe.ConfigError, match=expected):
        switchyard_moe.Client(cluster.url, token=cluster.token, **settings)


@pytest.mark.parametrize("text", ["", "00", "00-" + "0" * 32 + "-" + "1" * 16 + "-01", "ü" * 200])
def test_a_malformed_traceparent_is_refused_before_anything_is_sent(
    client: switchyard_moe.Client, inputs: Inputs, text: str
) -> None:
    layer, x, topk_idx, topk_weights = arguments(inputs)
    out = np.full_like(x, 7.0)
    with pytest.raises(switchyard_moe.ArgumentError, match="traceparent"):
        client.forward(layer, x, topk_idx, topk_weights, out=out, traceparent=text)
    with pytest.raises(switchyard_moe.ArgumentError, match="traceparent"):
        client.dispatch(layer, x, topk_idx, topk_weights, traceparent=text)
    assert (out == 7.0).all()


def test_a_collector_that_is_gone_costs_spans_only(
    cluster: switchyard_moe.LocalCluster, inputs: Inputs, experts: Experts
) -> None:
    with cluster.client(otlp_endpoint="http://127.0.0.1:1", trace_sample_ratio=1.0) as client:
        for _ in range(5):
            layer, x, topk_idx, topk_weights = arguments(inputs)
            out = client.forward(layer, x, topk_idx, topk_weights, traceparent=Caller().traceparent)
            assert_close(out, experts.forward(layer, x, topk_idx, topk_weights))
