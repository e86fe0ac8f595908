"""What one delta there and back runs: files, Python calls and hops between files, on both loops.

    python benchmarks/one_delta.py                     (ten seconds)
    python benchmarks/one_delta.py --rounds 20

A parameter server and one client, as `fsl-node` makes them, in threads of this process: production
machines, shells, sockets on loopback, spool and checkpoints. The client trains a small model, of
one chunk unless --values says otherwise.

Counting begins with the copy of the client's weights (the event `snapshotted`, which offers the
delta) and ends when the parameter server has received that the client holds the version made of it
(`Holding`). Only the two threads that run the event loops are counted, with `sys.setprofile`:
heartbeats are included, the workers of the store and the client are not.

Each number is the median over --rounds deltas after the first two:
    files   of this project's packages in which at least one function was called
    calls   of Python functions of this project's packages
    hops    of these, calls from one file of them into another
    all     of Python functions, those of libraries and generated ones included
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from attrs import define, field
from torch import nn, optim

import fsl_codecs
import fsl_transport
from fsl_async.config.load import load
from fsl_async.config.site_policy import KINDS, SitePolicy
from fsl_async.nodes.client import joining
from fsl_async.nodes.client.parts import ClientOptions
from fsl_async.nodes.ps import node as node_ps
from fsl_async.nodes.runtime import Node
from fsl_async.process.stopper import Stopper
from fsl_async.roles.sync.messages import Holding

PACKAGES = (
    str(Path(node_ps.__file__).parents[2]),
    *(str(Path(str(one.__file__)).parent) for one in (fsl_transport, fsl_codecs)),
)
SKIPPED = 2
VALUES = "ONE_DELTA_VALUES"
"""Passes the model's size to the task, which is loaded as its own file."""
SIDES = {"ParameterServerMachine": "parameter server", "ClientMachine": "client"}


@define
class Counts:
    """Counts of one side and one delta."""

    files: set[str] = field(factory=set)
    calls: int = 0
    hops: int = 0
    all: int = 0

    def row(self) -> dict[str, int]:
        """The counts as numbers."""
        return {"files": len(self.files), "calls": self.calls, "hops": self.hops, "all": self.all}


class Meter:
    """Counts while a delta is under way. `deltas` has the counts, by side, of finished ones."""

    def __init__(self) -> None:
        self.deltas: list[dict[str, Counts]] = []
        self._open: dict[str, Counts] | None = None
        self._seen = threading.local()

    def watch(self, node: Node, event: Any) -> None:
        """An event begins. The first one in a thread sets the thread's profile function."""
        side = SIDES.get(type(node.machine).__name__)
        if side is None:
            return
        if not hasattr(self._seen, "side"):
            self._seen.side = side
            sys.setprofile(self._profile(side))
        if event.tag == "snapshotted":
            self._open = {one: Counts() for one in SIDES.values()}

    def watched(self, event: Any) -> None:
        """An event has been handled, and its effects carried out."""
        if event.topic is Holding and self._open is not None:
            found, self._open = self._open, None
            self.deltas.append(found)

    def _profile(self, side: str) -> Callable[[FrameType, str, Any], None]:
        def profile(frame: FrameType, what: str, _: Any) -> None:
            opened = self._open
            if opened is None or what != "call":
                return
            counts = opened[side]
            counts.all += 1
            file = frame.f_code.co_filename
            if not file.startswith(PACKAGES):
                return
            counts.files.add(file)
            counts.calls += 1
            caller = frame.f_back
            if caller is not None:
                before = caller.f_code.co_filename
                counts.hops += before != file and before.startswith(PACKAGES)

        return profile


def train(fed: Any) -> None:
    """The task: a matrix that moves a little at each step."""
    module = nn.Linear(int(os.environ[VALUES]) // 64, 64, bias=False)
    fed.attach(module)
    steps = optim.SGD(module.parameters(), lr=1e-3)
    while True:
        loss = module.weight.square().sum()
        steps.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        steps.step()
        if not fed.step(tokens=64, metrics={"loss": loss.item()}):
            return


def run(rounds: int, folder: Path) -> None:
    """A complete run of that many rounds."""
    sets = {
        "run.rounds": rounds + SKIPPED + 1,  # the run may end before its last report
        "sync.every_s": 0.25,
        "sync.clients": 1,
        "listen.address": "127.0.0.1:0",
        "session.heartbeat_every_s": 5.0,
        "train.task": "one_delta.py:train",
    }
    config = load(None, [f"{key}={json.dumps(value)}" for key, value in sets.items()])
    stop, listening = Stopper(), threading.Event()
    address: list[str] = []
    failures: list[BaseException] = []

    def announce(bound: str) -> None:
        address.append(bound)
        listening.set()

    def serve() -> None:
        try:
            node_ps.serve(
                config, folder, from_version=None, announce=announce, log=lambda _: None, stop=stop
            )
        except BaseException as error:  # noqa: BLE001 - raised below
            failures.append(error)
            listening.set()

    server = threading.Thread(target=serve)
    server.start()
    listening.wait(60)
    if address:
        options = ClientOptions(
            address[0],
            "a",
            task=f"{Path(__file__)}:train",
            run_dir=folder / "client",
            policy=SitePolicy(frozenset(KINDS)),
        )
        joining.join_run(options, stop=stop, log=lambda _: None)
    server.join(60)
    if failures:
        raise failures[0]


def main() -> None:
    """Print one row for each side."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=10, help="deltas that count")
    parser.add_argument("--values", type=int, default=64 * 64, help="of the model")
    arguments = parser.parse_args()
    meter = Meter()
    step = Node._step  # noqa: SLF001 - the one place through which every event goes

    def watched(node: Node, event: Any, cause: int | None) -> None:
        meter.watch(node, event)
        step(node, event, cause)
        meter.watched(event)

    os.environ[VALUES] = str(arguments.values)
    Node._step = watched  # type: ignore[method-assign,assignment]  # noqa: SLF001
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        run(arguments.rounds, Path(folder))
    counted = meter.deltas[SKIPPED : SKIPPED + arguments.rounds]
    for side in SIDES.values():
        rows = [delta[side].row() for delta in counted]
        medians = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
        print(json.dumps({"side": side, "deltas": len(counted), **medians}))


if __name__ == "__main__":
    main()
