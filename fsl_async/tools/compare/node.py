"""A node of a run, in a process of its own: a client, or the server.

    python -m fsl_async.tools.compare.node client MARK
        a client, with what a file MARK holds once it is there, in JSON: {"address", "name",
         "run_dir", "data" and `SiteChoices`}, as `ClientOptions` takes them. Clients load their
         libraries at the same time, and join in the order of shards
    python -m fsl_async.tools.compare.node server JSON
        {"sets": of the run, "folder", "listen": {"ps", "split", "reach"}, "scored": [every, rounds,
         turns], as `choices.is_scored` takes them}

The server is the parameter server, and in its loop a split server where the method has one. It
differs from `--role ps` and `--role server` in one thing: a version that is to be scored is
announced to clients only after a file `scored-VERSION` has appeared in the folder. So no client
trains meanwhile. If that file holds `DRAIN`, the run ends in good order. Lines of JSON report:

    {"event": "listening", "role", "address"}       the parameter server, or the split server
    {"event": "committed", "version", "at"}         it waits; at: seconds of CLOCK_MONOTONIC
    {"event": "memory", "bytes"}                    its peak, at the end

Without a split server it does not import torch, so its memory is that of `--role ps`.
"""

import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs

from fsl_async.config.load import load
from fsl_async.config.site_policy import KINDS, SitePolicy
from fsl_async.errors import FslError
from fsl_async.files.private_files import make_folder
from fsl_async.process.memory import keep_freed_blocks, peak_bytes
from fsl_async.process.stopper import Stopper
from fsl_async.tools.compare.choices import is_scored

LOOK_S = 0.01
"""Seconds from one look for a file to the next."""
DRAIN = "drain"


def put(mark: Path, text: str) -> None:
    """Write a file that a node waits for, at once as a whole."""
    begun = mark.with_suffix(".new")
    begun.write_text(text, encoding="utf-8")
    begun.replace(mark)


def _awaited(mark: Path) -> str:
    while not mark.exists():
        time.sleep(LOOK_S)
    return mark.read_text(encoding="utf-8")


def mark_of(folder: Path, version: int) -> Path:
    """Return the file that lets a version go."""
    return folder / f"scored-{version}"


def _log(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _emit(event: str, **fields: Any) -> None:
    _log(json.dumps({"event": event, **fields}))


def _join(mark: Path) -> None:
    from fsl_async.nodes.client.joining import join_run
    from fsl_async.nodes.client.parts import ClientOptions

    given = json.loads(_awaited(mark))
    options = ClientOptions(
        given.pop("address"),
        run_dir=Path(given.pop("run_dir")),
        policy=SitePolicy(frozenset(KINDS)),  # all nodes are this machine's
        **given,
    )
    join_run(options, stop=Stopper(), log=_log)


def _serve(given: Mapping[str, Any]) -> None:
    folder, listen, stop = Path(given["folder"]), given["listen"], Stopper()
    config = load(None, given["sets"])
    config = attrs.evolve(
        config,
        listen=attrs.evolve(config.listen, address=listen["ps"], insecure=True),
        split=attrs.evolve(config.split, listen=listen["split"], server=listen["reach"]),
    )

    def committed(version: int, weights: Callable[[], Mapping[str, Any]] = dict) -> None:
        if not is_scored(version, *given["scored"]):
            return
        at = time.monotonic()
        if config.split.has_server:
            from fsl_async.tools.compare.split import keep_weights

            keep_weights(folder, weights())
        _emit("committed", version=version, at=at)
        if _awaited(mark_of(folder, version)) == DRAIN:
            stop.request(reason="the target is reached")

    def announce(role: str, address: str) -> None:
        _emit("listening", role=role, address=address)

    make_folder(folder)
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


def main(arguments: list[str]) -> int:
    """Run a node; returns its exit code."""
    role, given = arguments
    keep_freed_blocks()  # as the commands do
    try:
        if role == "client":
            _join(Path(given))
        else:
            _serve(json.loads(given))
            _emit("memory", bytes=peak_bytes())
    except FslError as error:
        _log(f"error: {error.message}")
        return int(error.exit_code)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
