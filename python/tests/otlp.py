"""A collector of OpenTelemetry in this process, which keeps the spans that it receives."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True)
class Span:
    """A span, with the service and instance of its process. Ids are numbers; 0 stands for none."""

    service: str
    instance: str
    name: str
    trace_id: int
    span_id: int
    parent_id: int
    links: tuple[tuple[int, int], ...]
    attributes: dict[str, Any]


class Collector:
    """Listens on a free port of the loopback address until it is closed."""

    def __init__(self) -> None:
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.path == "/v1/traces":
                    collector._take(body)
                self.send_response(200 if self.path == "/v1/traces" else 404)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._spans: list[Span] = []
        self._changed = threading.Condition()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"

    @property
    def spans(self) -> list[Span]:
        with self._changed:
            return list(self._spans)

    def wait(self, count: int, *, name: str, instance: str | None = None, timeout: float = 30.0) -> list[Span]:
        """Wait for ``count`` spans of a name and return all of that name, fewer after ``timeout`` seconds."""

        def found() -> list[Span]:
            return [span for span in self._spans if span.name == name and instance in (None, span.instance)]

        with self._changed:
            self._changed.wait_for(lambda: len(found()) >= count, timeout)
            return found()

    def clear(self) -> None:
        with self._changed:
            self._spans.clear()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _take(self, body: bytes) -> None:
        request = ExportTraceServiceRequest.FromString(body)
        spans = []
        for resource_spans in request.resource_spans:
            resource = {pair.key: pair.value.string_value for pair in resource_spans.resource.attributes}
            for scope_spans in resource_spans.scope_spans:
                for span in scope_spans.spans:
                    attributes = {
                        pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in span.attributes
                    }
                    links = tuple((_number(link.trace_id), _number(link.span_id)) for link in span.links)
                    spans.append(
                        Span(
                            resource["service.name"],
                            resource["service.instance.id"],
                            span.name,
                            _number(span.trace_id),
                            _number(span.span_id),
                            _number(span.parent_span_id),
                            links,
                            attributes,
                        )
                    )
        with self._changed:
            self._spans += spans
            self._changed.notify_all()


def _number(identifier: bytes) -> int:
    return int.from_bytes(identifier, "big")
