"""A scenario: processes, settings, faults as (whom, when, what), checks and lines to show.

`Runner` plays it. A demo is a function in a file of its own that makes a scenario from the user's
choices; `commands/demo.py` lists these functions. Times are in seconds after the start of the run,
which includes the start of Python and torch.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import Factory, field, frozen, mutable

from fsl_async.cluster.restarts import RestartRules
from fsl_async.cluster.supervisor import Child, ChildExited, Supervisor
from fsl_async.errors import FslError, program
from fsl_async.observe.ledger_audit import Audit, audit_run
from fsl_async.observe.run_state import RunState
from fsl_async.process.stopper import INTERRUPTED_BY, Stopper
from fsl_async.roles.phrasing import counted
from fsl_async.tools.demo.places import HERE, SERVER, Places

if TYPE_CHECKING:
    from fsl_async.observe.clients import Line, News
    from fsl_async.tools.chaos.report import Recovery

Settings = Mapping[str, str | float | int]
"""A run's configuration by dotted key."""

RULES = RestartRules(first_wait_s=0.5, longest_wait_s=4.0, budget=6)
# Processes share the cores, and waiting threads would cost more than they gain.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


@frozen
class Stage:
    """The sink of text lines, the request to stop, and the places of nodes, for all that is played.

    what, note: what such a request ends, and the end of its line.
    """

    say: Callable[[str], None]
    stop: Stopper
    make_places: Callable[[], Places] = Places
    what: str = "comparison"
    note: str = ""
    begun: float = field(factory=time.time)
    """Seconds since 1970."""

    def check(self) -> None:
        """Raise the stopper's error if an end was requested."""
        if self.stop.requested:
            raise self.stop.error(f"the {self.what} was ended by {self.stop.reason}{self.note}")


@frozen(kw_only=True)
class Choices:
    """The user's options; 0 or empty where the scenario has a default of its own."""

    data: tuple[str, ...] = ()
    seconds: float = 0.0
    clients: int = 0
    format: str = "uniform"
    every_s: float = 0.0
    seed: int = 0
    preset: str = ""
    rounds: int = 12
    method: str = "fsl-sage"
    base: str = ""
    rule: str = "fedit"
    rank: int = 0
    late_s: float = 0.0
    """A round trip's time beyond what the default times allow for."""
    run_dir: Path = Path()
    places: Places = HERE

    def common(self, clients: int, coder: str = "codec") -> Settings:
        """Settings of all scenarios. coder: the table that has the number formats."""
        return {
            "run.seed": self.seed,
            "sync.clients": clients,
            f"{coder}.up": self.format,
            f"{coder}.down": self.format,
            "session.heartbeat_every_s": 0.5,
            "session.expire_after_s": 3.0 + 4 * self.late_s,
            "train.batch": 8,
            "train.threads": 1,
            "train.device": "cpu",
        }

    @property
    def text(self) -> str:
        """The text to train on; empty for the standard library's source."""
        return next(iter(self.data), "")

    def of_text(self) -> Settings:
        """Settings to train on one text."""
        return {"data.source": "site" if self.text else "built-in", "data.path": self.text}


@frozen(kw_only=True)
class Node:
    """A process of `fsl-node`, or of another module.

    at: of a server, where it listens; of a client, the name of the server that it dials.
    journal: of a server, below its run directory.
    when: whether to start a server now.
    module: of another program than `fsl-node`; `options` are all of its words then.
    """

    name: str
    role: str
    at: str
    run_dir: Path
    options: tuple[str, ...] = ()
    journal: str = "journal.jsonl"
    when: Callable[[Played], bool] = lambda _: True
    module: str = ""

    def child(self, places: Places = HERE, address: str = "") -> Child:
        """The node as a child process, in its site. address: where a client dials."""
        words = ["--role", self.role, address or self.at, "--run-dir", str(self.run_dir), "--json"]
        if not places.is_here:
            words.append("--insecure")  # plain traffic is safe inside a laboratory
        head = (self.module,) if self.module else ("fsl_async.cli", *words)
        # -P: files of the current directory must not be imported instead of ours.
        argv = (sys.executable, "-P", "-m", *head, *self.options)
        # Nodes have no keys, and the user's site policy (site.toml beside them) is not theirs.
        env = {"FSL_KEYS": str(self.run_dir / "keys"), INTERRUPTED_BY: "the demo is over"}
        return Child(self.name, (*places.command(self.name), *argv), env=ONE_THREAD | env)


def names_of(clients: int, prefix: str = "") -> list[str]:
    """Names of clients."""
    return [f"{prefix}client-{number}" for number in range(1, clients + 1)]


def victim_of(names: Sequence[str]) -> str:
    """The client that is killed: not the first, which often publishes the first weights."""
    return names[min(1, len(names) - 1)]


def server(chosen: Choices, settings: Settings, *options: str, role: str = "ps") -> Node:
    """The parameter server of a scenario with one, on a free port."""
    words = (*options, *set_words(settings))
    return Node(
        name=SERVER, role=role, at=chosen.places.listen, run_dir=chosen.run_dir, options=words
    )


def client(
    name: str, run_dir: Path, allow: str, *options: str, data: str = "", at: str = SERVER
) -> Node:
    """A client that lets out what `allow` lists. run_dir: of its server."""
    folder = run_dir / "clients" / name
    words = ("--name", name, "--allow", allow, *options, *(("--data", data) if data else ()))
    return Node(name=name, role="client", at=at, run_dir=folder, options=words)


def overrides(settings: Settings) -> list[str]:
    """Settings in the form of --set."""
    return [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in settings.items()]


def set_words(settings: Settings) -> tuple[str, ...]:
    """The same as words of a command line."""
    return tuple(word for each in overrides(settings) for word in ("--set", each))


def kill(children: Supervisor, name: str) -> str:
    """Send SIGKILL to a node. Returns a sentence, or "" where the node does not run."""
    pid = children.pid(name)
    return f"SIGKILL to {name} (process {pid})" if children.kill(name) else ""


@frozen
class Fault:
    """A fault, injected once: as soon as `when` holds, `what` is done to the node `whom`.

    what: returns what it did in words; "" where that cannot be done yet.
    """

    whom: str
    when: Callable[[Played], bool]
    what: Callable[[Supervisor, str], str] = kill


def by_rounds(chosen: Choices, victim: str, kill_at: int, limit_s: float) -> dict[str, Any]:
    """Return the fault, the end and `drain_s` of a scenario by rounds.

    The victim gets SIGKILL at version `kill_at`. The run ends after its rounds, when the victim
    takes part again, or after `limit_s`.
    """

    def is_time(played: Played) -> bool:
        return played.has_joined(victim) and played.state.ps.version >= kill_at

    def is_over(played: Played) -> bool:
        version, fault = played.state.ps.version, played.fault(victim)
        # The killed client takes part in the round after the one that it missed.
        is_back = fault is not None and fault.back is not None and version > fault.back_version
        limit = chosen.seconds or limit_s
        return (is_back and version >= chosen.rounds) or played.elapsed() >= limit

    drain_s = 9.0 + 40.0 * chosen.late_s
    return {"faults": [Fault(victim, is_time)], "is_over": is_over, "drain_s": drain_s}


@mutable(slots=False)
class Played:
    """The record of a run so far. Values of servers are kept by the server's name."""

    scenario: Scenario
    states: dict[str, RunState] = field(
        default=Factory(
            lambda self: {node.name: RunState() for node in self.scenario.servers},
            takes_self=True,
        )
    )
    """Server -> the state that its journal gives."""
    created: float = field(factory=time.time)
    """When its preparation began; seconds since 1970, as `begun`."""
    begun: float = field(factory=time.time)
    joined_s: float | None = None
    """When the first client had published the weights."""
    faults: list[Recovery] = field(factory=list)
    """The injected faults."""
    addresses: dict[str, str] = field(factory=dict)
    """Parameter server -> where clients reach it, once it listens."""
    launched: dict[str, float] = field(factory=dict)
    """Node -> when the supervisor launched it again."""
    lost: list[str] = field(factory=list)
    """Clients that failed too often to be launched again."""
    late: list[str] = field(factory=list)
    """Nodes that did not end by themselves after the servers."""
    printed: dict[str, list[dict[str, Any]]] = field(factory=dict)
    """Process -> the JSON objects that it printed, without events."""
    problems: list[str] = field(factory=list)

    @property
    def state(self) -> RunState:
        """The first server's."""
        return next(iter(self.states.values()))

    @property
    def seconds(self) -> float:
        """Seconds since the scenario began, its preparation included."""
        return round(time.time() - self.created, 1)

    def elapsed(self) -> float:
        """Seconds since the start of the run."""
        return time.time() - self.begun

    def fault(self, name: str) -> Recovery | None:
        """The fault of a node; None before it."""
        return next((one for one in self.faults if one.name == name), None)

    def has_joined(self, name: str) -> bool:
        """Whether a client has a session and holds a version."""
        found = self.state.clients.get(name)
        return found is not None and found.version >= 0 and found.connected

    @cached_property
    def audit(self) -> Audit | None:
        """The audit of the run, when it is over; None where there is no ledger."""
        try:
            return audit_run(self.scenario.chosen.run_dir)
        except OSError:
            return None

    def counts(self) -> dict[str, int]:
        """Members of a summary: relaunches by the journal, deltas by the ledger."""
        return {"relaunches": self.state.relaunches, **delta_counts(self.audit)}

    def common_problems(self, more: str = "") -> list[str]:
        """Return one line for each failed check of the run, its victim and its deltas.

        more: what a user can do about a victim that was not killed, or is not back.
        """
        victim, audit = self.scenario.victim, self.audit
        fault, found = self.fault(victim), list(self.problems)
        is_blamed = any(victim in problem for problem in found)
        if fault is None:
            found += [] if is_blamed else [f"{victim} was not killed: it never trained{more}"]
        elif fault.detected is None:
            found.append(f"{victim} was killed, and the parameter server did not detect it")
        elif fault.back is None:
            found.append(f"{victim} was killed and did not catch up in time{more}")
        return found + (["there is no ledger to audit"] if audit is None else audit.complaints())

    def last_lines(self) -> list[str]:
        """Return text lines about deltas, the victim's return and the run directory."""
        run_dir, audit = self.scenario.chosen.run_dir, self.audit
        lines = [f"run directory: {run_dir}", f"for details: {program()} status {run_dir}"]
        fault = self.fault(self.scenario.victim)
        if fault is not None and fault.back is not None:
            steps = {"detected": fault.detected, "back": fault.resumed, "caught up": fault.back}
            after = [
                f"{what} after {'-' if at is None else f'{at - fault.begun:.1f} s'}"
                for what, at in steps.items()
            ]
            at_s = fault.begun - self.begun
            lines.insert(0, f"{fault.name}: killed at {at_s:.1f} s, {', '.join(after)}")
        if audit is not None:
            counts = (
                f"{counted(audit.acknowledged, 'delta')} acknowledged, {audit.merged} merged,"
                f" {audit.pending} waiting, {len(audit.lost)} lost,"
                f" {len(audit.doubled)} merged twice (counted in the ledger)"
            )
            lines.insert(0, counts)
        return lines


@frozen
class Conclusion:
    """The result: the object of --json, text lines, and one line for each failed check."""

    summary: Mapping[str, Any]
    lines: list[str]
    problems: list[str]


@frozen(kw_only=True)
class Scenario:
    """A run for the runner to play.

    settings: the configuration of the run, to check it.
    is_over: whether to end the servers, which may also end by themselves.
    drain_s: how long servers may take to end, in seconds; 0: a request to stop kills all nodes.
    leave_s: how long clients may take to end after the servers. listen_s: a server, to listen.
    rules: of new launches. log: a file in the run directory, with all that nodes print.
    fails: returns the error of an end of a node that ends the run, besides those of the runner.
    ends_at_s: when the run will be over, where that is known.
    is_begun: whether the run got so far that nodes that died are a problem, not its error.
    prepare: writes what the nodes read. Raises FslError, as `check`. conclude: also what is done
    after the run.
    sees: takes each line of a server's journal.
    reads: takes each line that a node prints, but for the address of a parameter server. Returns
        news that the node is back, or "".
    shows: whether news of a server are shown.
    """

    chosen: Choices
    settings: Settings
    nodes: Sequence[Node]
    faults: Sequence[Fault]
    is_over: Callable[[Played], bool]
    introduction: Sequence[str] = ()
    conclude: Callable[[Played, Stage], Conclusion] = lambda *_: Conclusion({}, [], [])
    drain_s: float = 9.0
    leave_s: float = 10.0
    listen_s: float = 60.0
    rules: RestartRules = RULES
    log: str = "children.log"
    fails: Callable[[ChildExited], FslError | None] = lambda _: None
    ends_at_s: float | None = None
    is_begun: Callable[[Played], bool] = lambda played: played.state.ps.rounds > 0
    check: Callable[[], None] = lambda: None
    prepare: Callable[[Stage], None] = lambda _: None
    sees: Callable[[str, Line], None] = lambda _name, _line: None
    reads: Callable[[Played, str, str], str] = lambda _played, _name, _text: ""
    shows: Callable[[str, News], bool] = lambda _name, _news: True

    @property
    def clients(self) -> list[Node]:
        """The nodes that dial a server."""
        return [node for node in self.nodes if node.role == "client"]

    @property
    def servers(self) -> list[Node]:
        """The other nodes."""
        return [node for node in self.nodes if node.role != "client"]

    @property
    def names(self) -> list[str]:
        """The clients' names."""
        return [node.name for node in self.clients]

    @property
    def victim(self) -> str:
        """The node of the first fault."""
        return next(fault.whom for fault in self.faults)


def failed(*checks: tuple[bool, str]) -> list[str]:
    """The sentences of the checks that do not hold."""
    return [problem for holds, problem in checks if not holds]


def delta_counts(*audits: Audit | None) -> dict[str, int]:
    """Members of a summary about deltas, counted in the ledgers; without one they are 0."""
    found = [audit for audit in audits if audit is not None]
    return {
        "deltas_merged": sum(audit.merged for audit in found),
        "deltas_lost": sum(len(audit.lost) for audit in found),
        "deltas_doubled": sum(len(audit.doubled) for audit in found),
    }
