"""The metrics of a client."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest
from support import Inputs

import switchyard_moe
from switchyard_moe.metrics import ClientCollector


def test_a_collector_shows_the_clients_metrics(client: switchyard_moe.Client, inputs: Inputs) -> None:
    registry = CollectorRegistry()
    registry.register(ClientCollector(client, {"engine": "test"}))
    call = inputs.call(6, masked=0)
    for _ in range(3):
        client.forward(call.layer, call.x, call.topk_idx, call.topk_weights)

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, {"engine": "test", **labels})

    assert value("switchyard_client_requests_total", outcome="ok") == 3
    assert value("switchyard_client_tokens_total") == 18
    assert value("switchyard_client_pairs_total") == 72
    assert value("switchyard_client_phase_seconds_count", phase="wait") == 3
    assert value("switchyard_client_tensor_copies_total", tensor="x") == 0
    assert value("switchyard_client_lost_requests_total") == 0
    # A registry writes them in its own format.
    assert b'switchyard_client_tokens_total{engine="test"} 18' in generate_latest(registry)
    client.close()
    assert value("switchyard_client_tokens_total") is None
