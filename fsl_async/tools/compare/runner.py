"""Runs of a comparison: each is a scenario without faults, of nodes that are started once.

A node that fails ends the run. Clients are what `--role client` runs, and load their libraries at
the same time.
"""

import asyncio
import contextlib
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fsl_async.cluster.restarts import RestartRules
from fsl_async.cluster.supervisor import ChildExited
from fsl_async.config.site_policy import KINDS, listed
from fsl_async.errors import ExitCode, FslError, TaskError
from fsl_async.observe.journal import JOURNAL, JournalReader
from fsl_async.roles.phrasing import figure
from fsl_async.tools.compare import server
from fsl_async.tools.compare.choices import Choices, Run
from fsl_async.tools.compare.outcome import LINES, ClientCosts, Curve, Outcome, Point, Score, Scored
from fsl_async.tools.demo import scenario
from fsl_async.tools.demo.places import SERVER, Places
from fsl_async.tools.demo.runner import Runner
from fsl_async.tools.demo.scenario import Node, Played, Scenario, Stage

START_S = 300.0
"""Seconds that the server has to listen, and then the clients to train."""
END_S = 600.0
"""Seconds that clients have to end after the server: sites that hold records back measure the last
version on them.
"""
_LOG = "nodes.log"

Scorer = Callable[[Path], Score]
"""Scores the newest version of a run directory."""


def words_of(score: Score | Point) -> str:
    """Return a score in words."""
    loss = "" if score.loss is None else f"loss {figure(score.loss, 4)}"
    return loss if score.accuracy is None else f"accuracy {score.accuracy:.1%}, {loss}"


class ComparedRun:
    """One run: its scenario, and what its nodes report."""

    def __init__(
        self, choices: Choices, run: Run, folder: Path, scorer: Scorer, say: Callable[[str], None]
    ) -> None:
        self.curve = Curve(run.turns, {name: ClientCosts() for name in run.clients})
        self._choices, self._run, self._folder = choices, run, folder
        self._scorer, self._say = scorer, say
        allowed = listed(KINDS)  # all nodes are this machine's
        self._clients = [
            scenario.client(name, folder, allowed, *words) for name, words in run.clients.items()
        ]
        self._readers = {
            one.name: JournalReader(one.run_dir / JOURNAL, LINES) for one in self._clients
        }
        self._unsaid: list[int] = []
        """Versions that are scored, whose line is not printed."""
        self._problem = ""
        self._memory: int | None = None

    def scenario(self, places: Places) -> Scenario:
        """Return the run, for the runner."""
        choices, run, folder = self._choices, self._run, self._folder
        given = {
            "sets": run.sets,
            "folder": str(folder),
            "clients": list(run.clients),
            "listen": [places.listen, places.split_server],
            "scored": [choices.score_every, choices.rounds, run.turns],
        }
        servers = Node(
            name=SERVER,
            role="server",
            at="",
            run_dir=folder,
            options=(json.dumps(given),),
            module=server.__name__,
        )
        return Scenario(
            chosen=scenario.Choices(run_dir=folder, places=places),
            settings={},
            nodes=[servers, *self._clients],
            faults=[],
            is_over=self._look,
            drain_s=0.0,
            leave_s=END_S,
            listen_s=START_S,
            rules=RestartRules(budget=0),
            log=_LOG,
            fails=self._failure,
            reads=self._read_line,
        )

    async def play(self, stage: Stage, places: Places) -> Outcome:
        """Play it to its last round or to the target; no process is left behind.

        Raises the error of a node that failed, and the stopper's. For the main thread: the nodes
        end with the thread that has launched them.
        """
        played = await Runner(self.scenario(places), stage, lambda *_: None).play()
        stage.check()
        if played.problems:
            raise TaskError(f"{self._run.method}: {'; '.join(played.problems)}")
        if played.late:
            self._problem = self._problem or "not every node ended by itself"
        self._read_journals(is_over=True)
        return self._outcome()

    def _outcome(self) -> Outcome:
        choices = self._choices
        return Outcome(
            method=self._run.method,
            seed=choices.seed,
            ranks=self._run.ranks,
            points=self.curve.points(),
            by_loss=choices.by_loss,
            target=choices.target,
            sites=self.curve.sites(),
            memory=self._memory,
            problem=self._problem,
        )

    def _look(self, played: Played) -> bool:
        """Read journals; the run ends by itself. Raises TaskError where no client begins to."""
        self._read_journals()
        is_begun = any(client.began is not None for client in self.curve.clients.values())
        if not is_begun and played.elapsed() > 2 * START_S:
            raise TaskError(f"{self._run.method}: no client trains within {2 * START_S:.0f} s")
        return False

    def _read_journals(self, *, is_over: bool = False) -> None:
        """Read what is new in the clients' journals, and print the rounds that are complete."""
        for name, reader in self._readers.items():
            with contextlib.suppress(FileNotFoundError):
                for line in reader.read():
                    self.curve.clients[name].apply(line)
        while self._unsaid and (is_over or self.curve.is_complete(self._unsaid[0])):
            point = self.curve.point(self._unsaid.pop(0))
            self._say(
                f"{self._run.method}: round {point.round} of {self._choices.rounds},"
                f" {words_of(point)}, {point.bytes / 1e6:,.2f} MB, {point.seconds:,.1f} s"
            )

    def _score(self, version: int, at: float) -> None:
        """Score a version; a failure is reported, not raised, because the run itself is fine."""
        answer = ""
        self._read_journals()
        try:
            score = self._scorer(self._folder)
        except Exception as error:  # noqa: BLE001 - see above
            self._problem = f"version {version} was not scored: {error}"
        else:
            self.curve.scores[version] = Scored(at, time.monotonic() - at, score)
            self._unsaid.append(version)
            # Clients may not have written down yet what the round cost.
            at_target = self._outcome().is_at_target(self.curve.point(version))
            answer = server.DRAIN if self._choices.stops_at_target and at_target else ""
        server.let_go(self._folder, version, answer)

    def _read_line(self, _: Played, name: str, text: str) -> str:
        """Take a line that a node has printed."""
        if name == SERVER and text.startswith("{"):
            record = json.loads(text)
            match record.get("event"):
                case "committed":
                    self._score(int(record["version"]), float(record["at"]))
                case "memory":
                    self._memory = int(record["bytes"])
        return ""

    def _failure(self, change: ChildExited) -> FslError | None:
        """Return the error of a node that failed: none is started again."""
        if change.code in {ExitCode.DONE, ExitCode.BAD_INPUT}:
            return TaskError(change.error, change.code) if change.code else None
        return TaskError(
            f"{change.name} ended ({change.why}): {change.error}; all that it wrote:"
            f" {self._folder / _LOG}"
        )


class Comparison(ABC):
    """Plays the runs of a comparison, one after the other. choices: may be exchanged between."""

    def __init__(self, choices: Choices) -> None:
        self.choices = choices

    @abstractmethod
    def check(self) -> None:
        """Build everything once, so that errors are raised before anything is started.

        Raises FslError in one line.
        """

    @abstractmethod
    def scorer(self, run: Run) -> Scorer:
        """Return what scores the versions of a run."""

    def alone(self, stage: Stage) -> Iterator[Outcome]:
        """Train what needs no network. Raises the stopper's error."""
        del stage
        return iter(())

    def outcomes(self, folder: Path, stage: Stage) -> Iterator[Outcome]:
        """Play all methods, then train what needs no network."""
        for method in self.choices.methods:
            yield self.play(method, folder / method, stage)
        yield from self.alone(stage)

    def play(self, method: str, folder: Path, stage: Stage) -> Outcome:
        """Play the run of a method in `folder`. Raises as `ComparedRun.play` does."""
        run = self.choices.run(method)
        played = ComparedRun(self.choices, run, folder, self.scorer(run), stage.say)
        with contextlib.closing(stage.make_places()) as places:
            return asyncio.run(played.play(stage, places))

    def row(self, outcome: Outcome) -> dict[str, Any]:
        """Return one JSON object with all figures of a run, and its choices."""
        method = outcome.method if outcome.method in self.choices.methods else ""
        run = self.choices.run(method or self.choices.methods[0])
        return outcome.row(self.choices.used(run))
