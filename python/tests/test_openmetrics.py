"""A strict parser accepts the metrics of servers and control plane as OpenMetrics."""

from __future__ import annotations

import json
import urllib.request

from prometheus_client.openmetrics.parser import text_string_to_metric_families
from support import Inputs

import switchyard_moe

ACCEPT = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"


def get(url: str, headers: dict[str, str]) -> tuple[str, str]:
    """Return content type and body."""
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=20) as response:
        return response.headers["content-type"], response.read().decode()


def test_metrics_are_openmetrics_if_the_scraper_prefers_that(
    cluster: switchyard_moe.LocalCluster, client: switchyard_moe.Client, inputs: Inputs
) -> None:
    call = inputs.call(6, masked=0)
    client.forward(call.layer, call.x, call.topk_idx, call.topk_weights)
    control = cluster.url
    _, members = get(f"{control}/v1/members", {"authorization": f"Bearer {cluster.token}"})
    addresses = [member["metrics_addr"] for member in json.loads(members)["members"]]
    servers = [f"http://{address}" for address in addresses]
    for url in [control, *servers]:
        kind, text = get(f"{url}/metrics", {"accept": ACCEPT})
        assert kind == "application/openmetrics-text; version=1.0.0; charset=utf-8"
        names = {family.name for family in text_string_to_metric_families(text)}
        assert "switchyard_build_info" in names
        assert names & {"switchyard_server_tokens", "switchyard_control_placement_changes"}
        kind, text = get(f"{url}/metrics", {})
        assert kind.startswith("text/plain; version=0.0.4")
        assert "# EOF" not in text
