"""Runs the rules one after the other, and what they are compared with."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import attrs

from fsl_async.errors import FslError
from fsl_async.learn.tune.base import quiet
from fsl_async.process.stopper import Stopper
from fsl_async.roles.phrasing import figure
from fsl_async.tools.compare.comparison import Run
from fsl_async.tools.compare.outcome import Point
from fsl_async.tools.compare.places import Loopback
from fsl_async.tools.compare.processes import Emit
from fsl_async.tools.compare.tuning import client
from fsl_async.tools.compare.tuning.alone import train_alone
from fsl_async.tools.compare.tuning.choices import LOCAL, POOLED, TuningChoices
from fsl_async.tools.compare.tuning.outcome import Result, is_at_target, traffic_of
from fsl_async.tools.compare.tuning.records import SiteRecords
from fsl_async.tools.compare.tuning.scores import Score, Scorer, TunedModel

_MODULES = "fsl_async.tools.compare.tuning"
_CENTRAL = "fedit"
"""The rule of training alone: both factors train, in one basis."""


class TuningComparison:
    """Compares methods, one run after the other. `say` is called with lines for people."""

    def __init__(
        self,
        choices: TuningChoices,
        records: SiteRecords,
        folder: Path,
        make_places: Callable[[], Loopback],
        *,
        say: Callable[[str], None],
        stop: Stopper,
    ) -> None:
        self.choices, self.records, self.folder = choices, records, folder
        self._make_places, self._say, self._stop = make_places, say, stop

    def results(self) -> Iterator[Result]:
        """Run all methods, then train on all records in one process, then each site alone."""
        for method in self.choices.methods:
            yield self.run(method)
        yield self.pooled()
        yield self.local()

    def run(self, method: str) -> Result:
        """Run a method to its last round or to the target. Raises the error of a node that failed,
        and the stopper's.
        """
        choices = self.choices
        places = self._make_places()
        run = TuningRun(
            choices, method, self.folder / method, places, say=self._say, stop=self._stop
        )
        # Sites load their models at the same time, so that transformers is quiet for all of them.
        with contextlib.closing(places), contextlib.closing(run), quiet():
            run.scorer = Scorer(choices.config(method), choices.base, self.records.held)
            run.play()
        return attrs.evolve(
            self._result(method),
            points=run.gathered.points(),
            sites=traffic_of(run.gathered),
            memory=run.memory,
            problem=run.problem,
        )

    def pooled(self) -> Result:
        """Train one process on all records, as many steps as all sites make."""
        choices = self.choices
        steps = choices.steps * len(choices.data)
        score, seconds = self._alone(POOLED, POOLED, self.records.all_trained, steps)
        return attrs.evolve(self._result(POOLED), points=(self._end([score], seconds),))

    def local(self) -> Result:
        """Train each site alone, as many steps as it makes in a run; the mean over sites."""
        found = [
            self._alone(LOCAL, name, data, self.choices.steps)
            for name, data in zip(self.choices.names, self.records.trained, strict=True)
        ]
        scores = [score for score, _ in found]
        return attrs.evolve(
            self._result(LOCAL),
            # Sites alone would train at the same time, each on its own machine.
            points=(self._end(scores, max(seconds for _, seconds in found)),),
            parts=tuple((score.accuracy, score.loss) for score in scores),
        )

    def _alone(self, method: str, name: str, data: Any, steps: int) -> tuple[Score, float]:
        choices = self.choices
        tuned = TunedModel(
            choices.config(_CENTRAL), choices.base, name, steps=steps, layers=choices.layers
        )
        seconds = train_alone(tuned, data, stop=self._stop)
        found = tuned.score(self.records.held), seconds
        whose = "" if method == name else f" {name}"
        self._say(f"{method}:{whose} {steps} steps, {words_of(found[0])}, {found[1]:,.1f} s")
        return found

    def _result(self, method: str) -> Result:
        choices = self.choices
        return Result(
            method=method,
            seed=choices.seed,
            ranks=choices.ranks_of(method),
            points=(),
            by_loss=choices.by_loss,
            target=choices.target,
        )

    def _end(self, scores: list[Score], seconds: float) -> Point:
        known = [score.accuracy for score in scores if score.accuracy is not None]
        return Point(
            round=self.choices.rounds,
            accuracy=fmean(known) if known else None,
            loss=fmean(score.loss for score in scores),
            seconds=round(seconds, 3),
            coded={},
            payload={},
            sockets={},
            waited=0.0,
            trained=0.0,
        )


def words_of(score: Score | Point) -> str:
    """A score for people."""
    loss = "" if score.loss is None else f"loss {figure(score.loss, 4)}"
    return loss if score.accuracy is None else f"accuracy {score.accuracy:.1%}, {loss}"


class TuningRun(Run):
    """The nodes of a rule: the parameter server in a process of its own, and the sites."""

    end_s = 600.0
    """Sites that hold records back measure the last version on them."""
    scorer: Scorer
    memory: int | None = None
    """The parameter server's peak, bytes."""

    def __init__(self, choices: TuningChoices, *more: Any, **rest: Any) -> None:
        super().__init__(choices, *more, **rest)
        self._choices = choices

    def start_server(self) -> None:
        """Start the parameter server."""
        given = {
            "choices": self._choices.as_dict(),
            "method": self.method,
            "folder": str(self.folder),
            "listen": self.places.listen(),
        }
        prefix = self.places.prefix("server") or ()
        self.start("server", (f"{_MODULES}.server", "server"), _no_thread, given, prefix)

    def start_client(self, name: str) -> None:
        """Start a site."""
        choices = self._choices
        number = choices.names.index(name)
        given: dict[str, Any] = {
            "address": self.address,
            "name": name,
            "data": choices.data[number],
            "base": choices.base,
            "rank": choices.ranks_of(self.method)[number],
            "order": choices.order_of(number),
            "layers": choices.layers,
            "columns": choices.columns,
        }
        tuning = client.tuning_of(given)

        def job(emit: Emit, stop: Stopper) -> None:
            client.join(self.address, name, choices.data[number], tuning, emit=emit, stop=stop)

        prefix = self.places.prefix(name)
        self.start(name, (f"{_MODULES}.client", "client"), job, given, prefix)

    def took(self, record: Mapping[str, Any]) -> None:
        """Score a version before it is announced; note the memory of the parameter server."""
        if record["event"] == "memory":
            self.memory = int(record["bytes"])
        elif record["event"] == "committed":
            begun = time.monotonic()
            try:
                score = self.scorer(self.folder)
            except FslError as error:  # the run itself is fine
                self.problem = f"version {record['version']} was not scored: {error}"
            else:
                self.take(
                    {
                        "event": "scored",
                        "version": record["version"],
                        "at": record["at"],
                        "seconds": time.monotonic() - begun,
                        **score._asdict(),
                    }
                )
            self.tell_server("scored")

    def line(self, point: Point) -> str:
        """Scores so far."""
        return f"{words_of(point)}, {point.seconds:,.1f} s"

    def is_at_target(self, point: Point) -> bool:
        """Whether the accuracy, or with lm the loss, is that of the target."""
        return is_at_target(point, self._choices.target, by_loss=self._choices.by_loss)


def _no_thread(emit: Emit, stop: Stopper) -> None:
    raise NotImplementedError("the parameter server is a process of its own")
