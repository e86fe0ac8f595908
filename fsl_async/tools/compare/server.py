"""The server of a compared run, in a process of its own.

    python -m fsl_async.tools.compare.server JSON
        {"sets": of the run, "folder", "clients": in the order of their shards, "listen": [where
         both servers listen, where clients reach the split server if elsewhere], "scored": [every,
         rounds, turns], as `choices.is_scored` takes them}

The server is the parameter server, and in its loop a split server where the method has one. It
differs from `--role ps` and `--role server` in one thing: a version that is to be scored is
announced to clients only after a file `scored-VERSION` has appeared in the folder. So no client
trains meanwhile. If that file holds `DRAIN`, the run ends in good order. Lines of JSON report:

    {"event": "listening", "role", "address"}       the parameter server, or the split server
    {"event": "committed", "version", "at"}         it waits; at: seconds of CLOCK_MONOTONIC
    {"event": "memory", "bytes"}                    its peak, at the end

Without a split server it does not import torch, so its memory is that of `--role ps`.
"""

import contextlib
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from fsl_async.config.load import load
from fsl_async.config.settings import Config
from fsl_async.errors import FslError
from fsl_async.files.files import make_folder
from fsl_async.nodes.ps.node import store_settings_of
from fsl_async.process.memory import keep_freed_blocks, peak_bytes
from fsl_async.process.stopper import Stopper
from fsl_async.store.store import Store
from fsl_async.tools.compare.choices import is_scored

LOOK_S = 0.01
"""Seconds from one look for a file to the next."""
DRAIN = "drain"
PS = "ps"
"""The parameter server's folder in the run directory, where there is a split server too."""
WEIGHTS = "server-weights.npz"
"""The split server's weights at the version that is scored, float32: of all, or of each client."""
_OF_ALL = "all"
_OF_CLIENT = "of "


def _awaited(mark: Path) -> str:
    while not mark.exists():
        time.sleep(LOOK_S)
    return mark.read_text(encoding="utf-8")


def let_go(folder: Path, version: int, text: str) -> None:
    """Let a version go, which waits for its score. text: "", or `DRAIN`."""
    mark = mark_of(folder, version)
    begun = mark.with_suffix(".new")
    begun.write_text(text, encoding="utf-8")
    begun.replace(mark)  # at once as a whole


def read_weights(folder: Path) -> tuple[Any, dict[str, Any]]:
    """Return the split server's weights of all clients, or None, and those of each client."""
    with np.load(folder / WEIGHTS) as file:
        found = {name: file[name] for name in file.files}
    of_all = found.pop(_OF_ALL, None)
    return of_all, {name.removeprefix(_OF_CLIENT): one for name, one in found.items()}


def mark_of(folder: Path, version: int) -> Path:
    """Return the file that lets a version go."""
    return folder / f"scored-{version}"


def _log(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _emit(event: str, **fields: Any) -> None:
    _log(json.dumps({"event": event, **fields}))


def _serve(given: Mapping[str, Any]) -> None:
    folder, stop = Path(given["folder"]), Stopper()
    listen, reached = given["listen"]
    config = load(None, given["sets"])
    config = attrs.evolve(
        config,
        listen=attrs.evolve(config.listen, address=listen, insecure=True),
        split=attrs.evolve(config.split, listen=listen, server=reached),
    )

    def committed(version: int, weights: Callable[[], Mapping[str, Any]] = dict) -> None:
        if not is_scored(version, *given["scored"]):
            return
        at = time.monotonic()
        if config.split.has_server:
            vectors = {_OF_CLIENT + name if name else _OF_ALL: x for name, x in weights().items()}
            np.savez(folder / WEIGHTS, **vectors)
        _emit("committed", version=version, at=at)
        if _awaited(mark_of(folder, version)) == DRAIN:
            stop.request(reason="the target is reached")

    def announce(role: str, address: str) -> None:
        _emit("listening", role=role, address=address)

    make_folder(folder)
    _lease(config, folder / PS if config.split.has_server else folder, given["clients"])
    if config.split.has_server:
        from fsl_async.nodes.split_server import node as split_server

        split_server.serve(
            config, folder, with_ps=True, announce=announce, log=_log, stop=stop, scored=committed
        )
        return
    from fsl_async.nodes.ps import node

    node.serve(
        config,
        folder,
        from_version=None,
        announce=lambda address: announce("ps", address),
        log=_log,
        stop=stop,
        after_commit=committed,
    )


def _lease(config: Config, folder: Path, clients: Sequence[str]) -> None:
    """Lease the shards in the order of clients: all runs divide the data alike."""
    make_folder(folder)
    with contextlib.closing(Store(folder, store_settings_of(config))) as store:
        store.recover()
        for number, name in enumerate(clients):
            store.run.lease(name, config.shards, number)


def main(arguments: list[str]) -> int:
    """Run the server; returns its exit code."""
    keep_freed_blocks()  # as the commands do
    try:
        _serve(json.loads(arguments[0]))
        _emit("memory", bytes=peak_bytes())
    except FslError as error:
        _log(f"error: {error.message}")
        return int(error.exit_code)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
