"""The figures as a page for Prometheus, on loopback. Needs `prometheus_client`.

Requests are answered from the newest snapshot by threads of the library's server: a scrape never
waits for the journal. Only /metrics is served, only to a Host that is this machine's: so no page in
a browser reads it through a name of its own.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

from fsl_async.tools.trackers.catalog import CATALOG, COUNTER, Reading

PORT = 9720
"""The default port."""
HOST = "127.0.0.1"
TIMEOUT_S = 10.0
"""A connection that sends nothing for so long is closed."""
_HOSTS = frozenset({HOST, "localhost", "[::1]"})

App = Callable[[dict[str, Any], Any], Iterable[bytes]]


def families(readings: Sequence[Reading]) -> list[Any]:
    """Metric families; each sample has the label role, because a process may hold two servers."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    made = []
    for figure in CATALOG:
        kind = CounterMetricFamily if figure.kind == COUNTER else GaugeMetricFamily
        family = kind(figure.name, figure.help, labels=("role", *figure.labels))
        for reading in readings:
            for labels, value in figure.samples(reading):
                family.add_metric((reading.role, *labels), value)
        if family.samples:
            made.append(family)
    return made


def is_for_us(path: str, host: str) -> bool:
    """Whether a request is answered: by its path and its header Host."""
    name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
    return path == "/metrics" and name.lower() in _HOSTS


class Page:
    """Serves the newest readings at `url` until `close`: a collector of prometheus_client.

    port: 0 for any. Raises ImportError or OSError.
    """

    def __init__(self, port: int = PORT) -> None:
        from prometheus_client import CollectorRegistry
        from prometheus_client.exposition import ThreadingWSGIServer, make_wsgi_app

        self._families: list[Any] = []
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        answer: App = make_wsgi_app(registry)

        def app(environ: dict[str, Any], start: Any) -> Iterable[bytes]:
            if is_for_us(environ.get("PATH_INFO", ""), environ.get("HTTP_HOST", "")):
                return answer(environ, start)
            start("404 Not Found", [("Content-Type", "text/plain")])
            return [b"this server has /metrics\n"]

        self._server = make_server(HOST, port, app, ThreadingWSGIServer, _Quiet)
        self.url = f"http://{HOST}:{self._server.server_port}/metrics"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), daemon=True)
        self._thread.start()

    def show(self, readings: Sequence[Reading]) -> None:
        """Take a snapshot, one reading a journal, from the thread that changes the runs' states."""
        self._families = families(readings)

    def collect(self) -> list[Any]:
        """The snapshot, for prometheus_client."""
        return self._families

    def describe(self) -> list[Any]:
        """Nothing is registered in advance."""
        return []

    def close(self) -> None:
        """Answer no more."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Quiet(WSGIRequestHandler):
    timeout = TIMEOUT_S

    def log_message(self, *args: Any) -> None:
        """Requests are no news."""
