"""The metrics of clients, for ``prometheus_client``.

::

    prometheus_client.REGISTRY.register(switchyard_moe.metrics.ClientCollector(client))

Needs the package ``prometheus_client``, which the extra ``metrics`` of the wheel brings.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from switchyard_moe._errors import ClosedError, ForkedError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from prometheus_client import Metric

    from switchyard_moe._client import Client

__all__ = ["ClientCollector"]


class ClientCollector(Collector):
    """Collects the metrics of a client each time that its registry is scraped.

    A client that is closed, or that belongs to the parent of a forked process, has no metrics.

    :param client: the client.
    :param labels: labels to add to every sample, to tell several clients of one registry apart.
    """

    def __init__(self, client: Client, labels: dict[str, str] | None = None) -> None:
        self._client = client
        self._labels = dict(labels or {})

    def collect(self) -> Iterator[Metric]:
        """Return the metric families."""
        try:
            text = self._client.metrics_text()
        except (ClosedError, ForkedError):
            return
        families: Iterable[Metric] = text_string_to_metric_families(text)
        for family in families:
            if self._labels:
                family.samples = [
                    sample._replace(labels={**sample.labels, **self._labels}) for sample in family.samples
                ]
            yield family

    def describe(self) -> list[Metric]:
        """Return nothing, so that registering does not collect."""
        return []
