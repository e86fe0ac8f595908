"""A site of a comparison, a blocking function that reports by `emit`.

For a thread, or as a process (where a network laboratory has a site for each node):

    python -m fsl_async.tools.compare.tuning.client client JSON    {"address", "name", "data",
                                                                    "base", "rank", "order",
                                                                    "layers"}

How a process reports and is ended: `fsl_async.tools.compare.processes`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
from torch import nn

from fsl_async.config.site_policy import KINDS, SitePolicy
from fsl_async.config.site_tuning import SiteTuning
from fsl_async.learn.client.fed import Fed
from fsl_async.learn.client.fed_base import ClientContext
from fsl_async.learn.client.script_values import NOT_GIVEN, Metrics, Whole
from fsl_async.nodes.client import joining
from fsl_async.nodes.client.node import ClientRuntime
from fsl_async.nodes.client.parts import ClientOptions
from fsl_async.process.stopper import Stopper
from fsl_async.tools.compare.processes import Emit, leave, play


class ReportingFed(Fed):
    """Fed that reports each version that it trains from, with the client's counters."""

    def __init__(self, runtime: ClientRuntime, context: ClientContext, emit: Emit) -> None:
        super().__init__(runtime.training, context, runtime)
        self._runtime, self._emit = runtime, emit
        self._began = self._at = 0.0
        self._waited = 0.0

    def lora(
        self, model: nn.Module, *, heads: Sequence[str] = (), site_rank: int | None = None
    ) -> nn.Module:
        """Attach the model as `Fed` does; time counts from here."""
        made = super().lora(model, heads=heads, site_rank=site_rank)
        self._began = self._at = time.monotonic()
        self._emit({"event": "began", "client": self.client_name, "at": self._began})
        self.report()
        return made

    def step(self, *, tokens: Whole = NOT_GIVEN, metrics: Metrics | None = None) -> bool:
        """Step as `Fed` does; the last step of a round waits for the next version."""
        before, begun = self.version, time.monotonic()
        goes_on = super().step(tokens=tokens, metrics=metrics)
        if self.version != before:
            self._at = time.monotonic()
            self._waited += self._at - begun
            self.report()
        return goes_on

    def report(self) -> None:
        """Report the counters so far, with the times of the newest version's arrival."""
        self._emit(
            {
                "event": "round",
                "client": self.client_name,
                "version": max(0, self.version),
                "holds": True,
                "at": self._at,
                "waited": self._waited,
                "trained": self._at - self._began,
                **self._runtime.traffic.as_dict(),
            }
        )


def join(
    address: str, name: str, data: str, tuning: SiteTuning, *, emit: Emit, stop: Stopper
) -> None:
    """Train as one site until the run ends. Blocks. Raises FslError."""
    made: list[ReportingFed] = []

    def make(runtime: ClientRuntime, context: ClientContext) -> Fed:
        emit({"event": "joined", "client": name})
        made.append(ReportingFed(runtime, context, emit))
        return made[0]

    joining.join_run(
        ClientOptions(
            address,
            name,
            data=data,
            tuning=tuning,
            policy=SitePolicy(frozenset(KINDS)),  # all nodes are this machine's
        ),
        stop=stop,
        log=lambda text: emit({"event": "line", "text": text}),
        make_fed=make,
    )
    for fed in made:
        if fed.version >= 0:  # bytes after the last version's arrival are counted too
            fed.report()


def tuning_of(given: Mapping[str, Any]) -> SiteTuning:
    """A site's own choices, from what a process is given."""
    return SiteTuning(**{field.name: given[field.name] for field in attrs.fields(SiteTuning)})


def main(arguments: list[str]) -> int:
    """Run a site as a process; see the module."""
    given = json.loads(arguments[1])
    tuning = tuning_of(given)
    address, name, data = given["address"], given["name"], given["data"]
    return play(lambda emit, stop: join(address, name, data, tuning, emit=emit, stop=stop))


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
