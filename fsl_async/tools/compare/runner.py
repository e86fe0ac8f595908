"""Plays one run of a comparison: starts its nodes as processes, and follows their journals.

All nodes end with this process. A node that fails ends the run: none is started again.

Nodes run in one of these places, with these links between them:

Loopback     every node is on this machine, nothing between them
Lagging      the same, with a `Proxy` in front of each server: "--net RATE,DELAY"
Sites        the network laboratory: a site for the servers and one for each client,
             "--net PROFILE[:KEY=VALUE...]"
"""

import asyncio
import contextlib
import json
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from attrs import frozen

from fsl_async.cluster.restarts import RestartRules
from fsl_async.cluster.supervisor import Child, ChildExited, ChildStarted, Supervisor
from fsl_async.config.address import parse
from fsl_async.errors import ExitCode, FslError, TaskError, UsageError
from fsl_async.files.files import make_folder
from fsl_async.observe.journal import JOURNAL, JournalReader
from fsl_async.plan.link import LinkSpec, parse_link
from fsl_async.process.program import need_benchmarks
from fsl_async.process.stopper import Stopper
from fsl_async.roles.phrasing import figure
from fsl_async.tools.compare.choices import Choices, Run
from fsl_async.tools.compare.node import DRAIN, mark_of, put
from fsl_async.tools.compare.outcome import LINES, ClientCosts, Curve, Outcome, Point, Score, Scored
from fsl_async.tools.proxy import Proxy

ANY = "tcp://127.0.0.1:0"
SERVERS = "server"
"""The servers' node; clients have their own names."""


class Loopback:
    """All nodes on this machine. Made for each run, and closed after it."""

    def prefix(self, node: str) -> tuple[str, ...]:
        """Return the words before a node's command, which enter its site."""
        return ()

    def listen(self) -> dict[str, str]:
        """Where the servers listen ("ps", "split"), and clients reach the split server ("reach").

        "reach" is empty where they reach it where it listens.
        """
        return {"ps": ANY, "split": ANY, "reach": ""}

    def listening(self, role: str, address: str) -> str:
        """A server ("ps" or "server") listens at `address`; returns where clients reach it."""
        return address

    def close(self) -> None:
        """Release what the run used."""


class Lagging(Loopback):
    """A slow link to both servers, by proxies in this process."""

    def __init__(self, link: LinkSpec) -> None:
        self._links = {role: Proxy(link=link) for role in ("ps", "server")}

    def listen(self) -> dict[str, str]:
        """Return the addresses; clients reach the split server by its proxy."""
        return {"ps": ANY, "split": ANY, "reach": self._links["server"].address}

    def listening(self, role: str, address: str) -> str:
        """Point the parameter server's proxy to `address`."""
        found = parse(address)
        link = self._links[role]
        link.target = (found.host, found.port)
        return link.address

    def close(self) -> None:
        """Close the proxies."""
        for link in self._links.values():
            link.close()


class Sites(Loopback):
    """A laboratory with the servers in its middle. Raises LabError where there can be none."""

    def __init__(self, profile: str, clients: Sequence[str], changes: Sequence[str] = ()) -> None:
        from netlab.laboratory import Laboratory

        self._lab = Laboratory([SERVERS, *clients], profile=profile)
        self._lab.up()
        if changes:
            self._lab.set("all", *changes)

    def prefix(self, node: str) -> tuple[str, ...]:
        """Enter the node's site."""
        return self._lab.command(node, ())

    def listen(self) -> dict[str, str]:
        """Return the addresses in the site in the middle, which has no other program."""
        host = self._lab.address(SERVERS)
        return {"ps": f"tcp://{host}:7100", "split": f"tcp://{host}:7101", "reach": ""}

    def close(self) -> None:
        """Take the laboratory down."""
        self._lab.down()


@frozen
class Net:
    """A description of the links between the nodes, and a function that makes them for a run."""

    words: str
    make: Callable[[], Loopback]


def net_of(text: str | None, clients: Sequence[str] = ()) -> Net:
    """Read `--net`.

    Raises UsageError for what is neither link nor profile, LabError where there can be no
    laboratory.
    """
    if text is None:
        return Net("loopback, nothing between the nodes", Loopback)
    try:
        link = parse_link(text)
    except UsageError:
        return _laboratory(text, clients)
    rate, delay = link.bits_per_s / 1e6, link.delay_s * 1e3
    words = (
        f"a proxy in this process: {rate:g} Mbit/s for each connection, {delay:g} ms each way,"
        " no loss"
    )
    return Net(words, lambda: Lagging(link))


def _laboratory(text: str, clients: Sequence[str]) -> Net:
    """Read PROFILE[:KEY=VALUE...]."""
    need_benchmarks(f"--net {text[:80]}, which is not RATE,DELAY like 200mbit,45ms,")
    from netlab import profiles
    from netlab.laboratory import which

    profile, *changes = text.split(":")
    settings = profiles.profiles().get(profile)
    if settings is None:
        raise UsageError(
            f"--net {text[:80]!r}: a profile of the network laboratory"
            f" ({', '.join(profiles.profiles())}), or RATE,DELAY (one way) like 200mbit,45ms for a"
            " line that a proxy in this process makes"
        )
    for change in changes:
        settings = profiles.changed(settings, change)
    words = f"network laboratory ({which()}), {profile} links: {profiles.words(settings)}"
    return Net(words, lambda: Sites(profile, clients, changes))


START_S = 300.0
"""Seconds that the server has to listen, and then each client to join."""
END_S = 600.0
"""Seconds that clients have to end after the server: sites that hold records back measure the last
version on them.
"""
_LOOK_S = 0.1
_LOG = "nodes.log"
_JOINED = "joined run "
"""A client prints it when it is welcomed, and has its shard."""

Scorer = Callable[[Path], Score]
"""Scores the newest version of a run directory."""


def words_of(score: Score | Point) -> str:
    """Return a score in words."""
    loss = "" if score.loss is None else f"loss {figure(score.loss, 4)}"
    return loss if score.accuracy is None else f"accuracy {score.accuracy:.1%}, {loss}"


@frozen
class Stage:
    """Places for the nodes, the sink of text lines, and the request to stop, for all runs."""

    make_places: Callable[[], Loopback]
    say: Callable[[str], None]
    stop: Stopper


class Runner:
    """Plays one run."""

    def __init__(  # noqa: PLR0917 - what a run is
        self,
        choices: Choices,
        run: Run,
        folder: Path,
        places: Loopback,
        scorer: Scorer,
        stage: Stage,
    ) -> None:
        self.curve = Curve(run.turns, {name: ClientCosts() for name in run.clients})
        self._choices, self._run, self._folder, self._places = choices, run, folder, places
        self._scorer, self._say, self._stop = scorer, stage.say, stage.stop
        paths = {name: self._of_client(name) / JOURNAL for name in run.clients}
        self._readers = {name: JournalReader(path, LINES) for name, path in paths.items()}
        self._news = asyncio.Event()
        self._address = ""
        self._joined: set[str] = set()
        self._running: set[str] = set()
        self._committed: list[tuple[int, float]] = []
        self._unsaid: list[int] = []
        """Versions that are scored, whose line is not printed."""
        self._problem = ""
        self._memory: int | None = None
        self._error: FslError | None = None

    async def play(self) -> Outcome:
        """Play the run to its last round or to the target; no process is left behind.

        Raises the error of a node that failed, and the stopper's. For the main thread: the nodes
        end with the thread that has launched them.
        """
        nodes = Supervisor(
            log_path=self._folder / _LOG,
            on_line=self._line,
            on_change=self._changed,
            rules=RestartRules(budget=0),
        )
        try:
            await self._play(nodes)
        finally:
            await nodes.stop(grace_s=0.0)
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

    async def _play(self, nodes: Supervisor) -> None:
        choices, run = self._choices, self._run
        given = {
            "sets": run.sets,
            "folder": str(self._folder),
            "listen": self._places.listen(),
            "scored": [choices.score_every, choices.rounds, run.turns],
        }
        self._start(nodes, SERVERS, "server", json.dumps(given))
        for name in run.clients:
            make_folder(self._of_client(name))
            self._start(nodes, name, "client", str(self._mark_of(name)))
        await self._until(lambda: bool(self._address), "the parameter server did not listen")
        for name, client in run.clients.items():  # one by one: shards go by arrival
            site = {"address": self._address, "name": name, "run_dir": str(self._of_client(name))}
            put(self._mark_of(name), json.dumps({**site, **client}))
            await self._until(lambda name=name: name in self._joined, f"{name} did not join")  # type: ignore[misc]
        await self._until(lambda: SERVERS not in self._running)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                await self._until(lambda: not self._running)
        if self._running:
            self._problem = self._problem or "not every node ended by itself"
        self._read(is_over=True)

    def _of_client(self, name: str) -> Path:
        return self._folder / "clients" / name

    def _mark_of(self, name: str) -> Path:
        return self._of_client(name) / "options.json"

    def _start(self, nodes: Supervisor, name: str, role: str, given: str) -> None:
        # -P: files of the current directory must not be imported instead of ours.
        module = (sys.executable, "-P", "-m", "fsl_async.tools.compare.node")
        # Processes share the cores.
        env = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self._running.add(name)
        nodes.start(Child(name, (*self._places.prefix(name), *module, role, given), env=env))

    async def _until(self, ready: Callable[[], bool], problem: str = "") -> None:
        """Wait; with a `problem` at most START_S. Raises what ends the run."""
        deadline = time.monotonic() + START_S
        while not ready():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), _LOOK_S)
            self._news.clear()
            self._read()
            while self._committed:
                self._score(*self._committed.pop(0))
            if self._error is not None:
                raise self._error
            if self._stop.requested:
                raise self._stop.error(f"the comparison was ended by {self._stop.reason}")
            if problem and time.monotonic() > deadline:
                raise TaskError(f"{self._run.method}: {problem} within {START_S:.0f} s")

    def _read(self, *, is_over: bool = False) -> None:
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
        try:
            score = self._scorer(self._folder)
        except Exception as error:  # noqa: BLE001 - see above
            self._problem = f"version {version} was not scored: {error}"
        else:
            self.curve.scores[version] = Scored(at, time.monotonic() - at, score)
            self._unsaid.append(version)
            # Clients may not have written down yet what the round cost.
            at_target = self._outcome().is_at_target(self.curve.point(version))
            answer = DRAIN if self._choices.stops_at_target and at_target else ""
        put(mark_of(self._folder, version), answer)

    def _line(self, name: str, text: str) -> None:
        """Take a line that a node has printed."""
        if name != SERVERS:
            if _JOINED in text:
                self._joined.add(name)
        elif text.startswith("{"):
            record = json.loads(text)
            match record.get("event"):
                case "listening":
                    reached = self._places.listening(record["role"], record["address"])
                    self._address = reached if record["role"] == "ps" else self._address
                case "committed":
                    self._committed.append((int(record["version"]), float(record["at"])))
                case "memory":
                    self._memory = int(record["bytes"])
        self._news.set()

    def _changed(self, change: ChildStarted | ChildExited) -> None:
        if isinstance(change, ChildStarted):
            return
        self._running.discard(change.name)
        if change.code and self._error is None:
            if change.code == ExitCode.BAD_INPUT:
                self._error = TaskError(change.error, change.code)
            else:
                self._error = TaskError(
                    f"{change.name} ended ({change.why}): {change.error}; all that it wrote:"
                    f" {self._folder / _LOG}"
                )
        self._news.set()


class Comparison(ABC):
    """Plays the runs of a comparison, one after the other. choices: may be exchanged between."""

    def __init__(self, choices: Choices) -> None:
        self.choices = choices

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
        """Play the run of a method in `folder`. Raises as `Runner.play` does."""
        run = self.choices.run(method)
        scorer = self.scorer(run)
        with contextlib.closing(stage.make_places()) as places:
            return asyncio.run(Runner(self.choices, run, folder, places, scorer, stage).play())

    def row(self, outcome: Outcome) -> dict[str, Any]:
        """Return one JSON object with all figures of a run, and its choices."""
        method = outcome.method if outcome.method in self.choices.methods else ""
        run = self.choices.run(method or self.choices.methods[0])
        return outcome.row(self.choices.used(run))
