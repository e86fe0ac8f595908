"""The server and a client of a comparison, each a blocking function that reports by `emit`.

For a thread, or as a process (where a network laboratory has a site for each node):

    python -m fsl_async.tools.compare.nodes server JSON    {"choices", "method", "folder", "listen"}
    python -m fsl_async.tools.compare.nodes client JSON    {"address", "name", "data", "code"}

How it then reports and is ended: `fsl_async.tools.compare.processes`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import SupportsFloat

import attrs
import torch

from fsl_async.config.site_code import SiteCode
from fsl_async.config.site_policy import KINDS, SitePolicy
from fsl_async.files.private_files import make_folder
from fsl_async.learn.client.fed import Fed
from fsl_async.learn.client.fed_base import ClientContext
from fsl_async.learn.client.ports import Vector
from fsl_async.nodes.client import joining
from fsl_async.nodes.client.node import ClientRuntime
from fsl_async.nodes.client.parts import ClientOptions
from fsl_async.nodes.ps import node as node_ps
from fsl_async.nodes.split_server import node as node_server
from fsl_async.process.stopper import Stopper
from fsl_async.roles.split.methods import METHODS
from fsl_async.tools.compare.choices import Choices
from fsl_async.tools.compare.problem import Scorer, config_of
from fsl_async.tools.compare.processes import Emit, leave, play


class ReportingFed(Fed):
    """Fed that reports each round's end with the client's counters."""

    def __init__(self, runtime: ClientRuntime, place: ClientContext, emit: Emit) -> None:
        super().__init__(runtime.training, place, runtime)
        self._runtime, self._emit = runtime, emit
        self._began = -1.0
        self._waited_before = 0.0
        self._last = (0.0, 0.0)  # when the newest round ended, and the seconds waited until then
        self.newest = 0

    def rounds(self) -> Iterator[int]:
        """Yield the rounds of `Fed`; time counts from the first one."""
        for number in super().rounds():
            if self._began < 0:
                self._began, self._waited_before = time.monotonic(), self.waited_s
                self._emit({"event": "began", "client": self.client_name, "at": self._began})
            self.newest = number + 1
            yield number

    def end_round(
        self,
        *,
        samples: int,
        metrics: Mapping[str, SupportsFloat] | None = None,
        scalars: Vector | None = None,
    ) -> bool:
        """End the round as `Fed` does, and report it."""
        self._note()
        self.report(holds=False)
        going = super().end_round(samples=samples, metrics=metrics, scalars=scalars)
        self._note()
        self.report()
        return going

    def _note(self) -> None:
        self._last = (time.monotonic(), self.waited_s - self._waited_before)

    def report(self, *, holds: bool = True) -> None:
        """Report the counters so far, with the times of the newest round's end.

        holds: the version made of the round is fetched.
        """
        at, waited = self._last
        traffic = self._runtime.traffic.as_dict()
        self._emit(
            {
                "event": "round",
                "client": self.client_name,
                "version": self.newest,
                "holds": holds,
                "at": at,
                "waited": waited,
                "trained": at - self._began,
                **traffic,
            }
        )


def serve(  # noqa: PLR0917 - what a run is, in the order of its making
    choices: Choices,
    method: str,
    folder: Path,
    emit: Emit,
    stop: Stopper,
    listen: Mapping[str, str],
) -> None:
    """Run the parameter server, and the split server where the method has one, in one loop. Blocks.

    listen: "ps", "split" -> where to listen; "reach" -> where clients reach the split server, ""
    for where it listens. Raises FslError.
    """
    torch.set_num_threads(1)
    config = config_of(choices, method)
    config = attrs.evolve(
        config,
        listen=attrs.evolve(config.listen, address=listen["ps"], insecure=True),
        split=attrs.evolve(config.split, listen=listen["split"], server=listen["reach"]),
    )
    has_server = METHODS[method].has_server

    def announce(role: str, address: str) -> None:
        emit({"event": "listening", "role": role, "address": address})

    def log(text: str) -> None:
        emit({"event": "line", "text": text})

    ps_dir = folder / node_server.PS if has_server else folder
    scorer = Scorer(config, ps_dir, choices.turns(method), emit) if choices.evaluates else None
    if has_server:
        node_server.serve(
            config, folder, with_ps=True, announce=announce, log=log, stop=stop, scored=scorer
        )
        return
    make_folder(folder)
    node_ps.serve(
        config,
        folder,
        from_version=None,
        announce=lambda address: announce("ps", address),
        log=log,
        stop=stop,
        after_commit=scorer,
    )


EVERYTHING = SitePolicy(frozenset(KINDS))
"""The policy of a comparison's clients: everything may leave, because all nodes are this
machine's.
"""


def join(
    address: str,
    name: str,
    emit: Emit,
    stop: Stopper,
    *,
    data: str = "",
    threads: int = 1,
    code: Mapping[str, str] | None = None,
) -> None:
    """Train as one client on `data` (empty: the built-in text) until the run ends. Blocks.

    code: the fields of `SiteCode`. Raises FslError.
    """
    made: list[ReportingFed] = []

    def make(runtime: ClientRuntime, place: ClientContext) -> Fed:
        emit({"event": "joined", "client": name})
        made.append(ReportingFed(runtime, place, emit))
        return made[0]

    joining.join_run(
        ClientOptions(
            address,
            name,
            data=data or None,
            threads=threads,
            policy=EVERYTHING,
            code=SiteCode(**code or {}),
        ),
        stop=stop,
        log=lambda text: emit({"event": "line", "text": text}),
        make_fed=make,
    )
    for fed in made:
        if fed.newest:  # bytes after the last round's end are counted too
            fed.report()


def main(arguments: list[str]) -> int:
    """Run a node as a process; see the module."""
    role, given = arguments[0], json.loads(arguments[1])

    def job(emit: Emit, stop: Stopper) -> None:
        if role == "server":
            choices = Choices.from_dict(given["choices"])
            serve(choices, given["method"], Path(given["folder"]), emit, stop, given["listen"])
        else:
            data, threads = given.get("data", ""), given.get("threads", 1)
            join(
                given["address"], given["name"], emit, stop,
                data=data, threads=threads, code=given.get("code"),
            )  # fmt: skip

    return play(job)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
