"""Nodes in threads of this process: a parameter server, or a split server with one, and clients."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fsl_async.config.settings import Config
from fsl_async.config.site_policy import KINDS, SitePolicy
from fsl_async.nodes.client import joining
from fsl_async.nodes.client.parts import ClientOptions
from fsl_async.nodes.ps import node as node_ps
from fsl_async.nodes.split_server import node as node_server
from fsl_async.process.stopper import Stopper


def play(
    config: Config,
    folder: Path,
    names: Sequence[str],
    *,
    with_split_server: bool,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    watch: Callable[[], object] = lambda: None,
    limit_s: float = 600.0,
) -> None:
    """Run to the end; clients join in the order of their names, so shards are in that order.

    options: of clients by name, instead of the run's data. `watch` is called every 50 ms. Raises
    what a node raised.
    """
    stop, listening, lines = Stopper(), threading.Event(), list[str]()
    address, failures = list[str](), list[BaseException]()

    def announce(bound: str) -> None:
        address.append(bound)
        listening.set()

    def serve() -> None:
        rest: dict[str, Any] = {"log": lines.append, "stop": stop}
        if not with_split_server:
            node_ps.serve(config, folder, from_version=None, announce=announce, **rest)
            return
        only_ps = lambda role, bound: announce(bound) if role == "ps" else None  # noqa: E731
        node_server.serve(config, folder, with_ps=True, announce=only_ps, **rest)

    def join(name: str) -> None:
        everything = SitePolicy(frozenset(KINDS))
        given = {"data": config.data.path or None} if options is None else options[name]
        chosen = ClientOptions(address[0], name, policy=everything, **given)
        joining.join_run(chosen, stop=stop, log=lines.append)

    def start(job: Any, *arguments: str) -> threading.Thread:
        def work() -> None:
            try:
                job(*arguments)
            except BaseException as error:  # noqa: BLE001 - raised below
                failures.append(error)
                listening.set()

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        return thread

    threads, deadline = [start(serve)], time.monotonic() + limit_s
    listening.wait(60)
    for name in names if address else ():
        threads.append(start(join, name))
        while not any(f"as {name}" in line for line in lines) and not failures:
            threads[-1].join(0.02)
    while any(one.is_alive() for one in threads) and not failures and time.monotonic() < deadline:
        threads[0].join(0.05)
        watch()
    if failures:
        raise failures[0]
