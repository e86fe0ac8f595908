"""Decides when a process is launched again: a child, or a remote client. Pure; `now` is passed in.

One machine for each process.

    state      call                     -> state     result
    ready      launch                   -> running   True
    running    exited(0)                -> ended     End("done")
    running    exited(2)                -> ended     End("bad input"): it would fail again
    running    exited(else), budget     -> waiting   Wait(seconds), then launch
    running    exited(else), no budget  -> ended     End("gave up")
    waiting    launch                   -> running   True
    waiting    stop                     -> ended     -
    running    stop                     -> stopping  -
    stopping   exited(any)              -> ended     End("stopped")
    ready      stop                     -> ended     -
    any        seen                     -> running   -: it runs, however it was launched
    stopping   seen                     -> stopping  -
    ended      launch                   -> ended     False

The wait doubles from `first_wait_s` to `longest_wait_s`. After a process ran for `healthy_after_s`,
or was started by hand after its end, the next wait is `first_wait_s` and the budget is full again.
Exit code 64, which requests a relaunch, is treated like a crash, so that a program that exits with
it at once does not spin. Where a process ends `ALIKE` times in a row with one error, each further
Wait quotes that error. Any other pair of state and call is an error of the shell and raises
AssertionError.

The parameter server cannot observe the exit of a remote client, so `Relaunches` reads it from the
client's session:

    what happens                           -> call
    its session begins                     seen
    its session expires                    exited: Wait, then launch once; the next launch needs a
                                             session first
    it leaves with a request to be         exited(64); the wait begins at the end of its machine, if
      launched again                         the goodbye has that time
    its process exits (kind "local")       exited(code) at once; the end of its session counts for
                                             the old process
    another process takes its name         none; the end of the old process, which is refused, is
                                             not the end of the new one
    the parameter server restarts          exited; the wait begins when a session would have expired
    its launcher fails                     exited: a longer wait, as long as the budget lasts

A session that ends for another reason begins again at once. A client that leaves without such a
request (done, Ctrl-C, its task failed) is not launched. Nor is one that joins again during the
wait: its own site may act on exit code 64 first. A client without a rule in the launch file is
never launched.

`read_launching` reads the launch file (TOML, `--launchers FILE`), which has a launcher by client:

    first_wait_s = 5              # and longest_wait_s, healthy_after_s, budget

    [[launcher]]
    clients = "a100-*"            # the first entry whose pattern matches a client's name counts
    kind = "slurm"                # arguments after `sbatch --job-name=fsl-NAME`; the script derives
    command = [                   # the client's name from the job's
        "--export=ALL,FSL_SERVER=fsl://ps.example.org:7100?key=...",
        "bin/fsl-node.sbatch", "--task", "train.py:train",
    ]

    [[launcher]]
    clients = "edge"
    kind = "command"              # succeeds when it exits with 0
    command = ["ssh", "edge", "systemctl", "--user", "restart", "fsl-node@{name}"]

    [[launcher]]
    clients = "*"
    kind = "local"                # a child process of the parameter server; it ends with it
    command = ["bin/fsl-node", "--role", "client", "--name", "{name}", "{address}"]

{address} is the parameter server's listen address: other machines cannot dial it when it is
0.0.0.0. A command is run without a shell, word by word; names of clients have no character that is
special to a shell.
"""

import tomllib
from collections.abc import Callable, Iterable, Sequence
from enum import Enum, auto
from fnmatch import fnmatchcase
from typing import Any

from attrs import field, fields_dict, frozen

from fsl_async.errors import ConfigError, ExitCode
from fsl_async.roles.goodbye import Goodbye

ALIKE = 3
"""After so many ends in a row with one error, the operator's line quotes the error."""

LONGEST_AWAY_S = 600.0
"""Longest time to its machine's end that a goodbye may state; Slurm and EC2 give minutes."""

NO_GOODBYE = Goodbye("")

MOST_MEMBERS = 10_000
"""Limit of members. Without encryption, unauthenticated peers may add names."""


@frozen(kw_only=True)
class RestartRules:
    """Waits in seconds; `budget` limits relaunches in a row without a healthy time."""

    first_wait_s: float = 0.5
    factor: float = 2.0
    longest_wait_s: float = 60.0
    healthy_after_s: float = 60.0
    budget: int = 20


@frozen
class Wait:
    """The process is launched in `seconds`, unless a client joins first.

    why: the reason of a client's goodbye, or the error that repeats, or empty.
    """

    seconds: float
    why: str = ""


@frozen
class End:
    """The process will not be launched again; messages say `why`."""

    why: str


class State(Enum):
    """State of a process."""

    READY = auto()
    RUNNING = auto()
    WAITING = auto()
    STOPPING = auto()
    ENDED = auto()


class Restarts:
    """The machine of one process; see the first table above."""

    def __init__(self, rules: RestartRules) -> None:
        self.state = State.READY
        self.launches = 0
        self._rules = rules
        self._in_a_row = 0
        self._error, self._alike = "", 0
        self._launched_at = 0.0
        # Since the last launch.
        self._is_seen = False

    def launch(self, now: float) -> bool:
        """Begin, or go on after a wait; returns whether to start the process now."""
        if self.state is State.ENDED:
            return False
        assert self.state in {State.READY, State.WAITING}, self.state
        self.state = State.RUNNING
        self.launches += 1
        self._launched_at = now
        self._is_seen = False
        return True

    def stop(self) -> None:
        """Do not launch the process again."""
        is_running = self.state in {State.RUNNING, State.STOPPING}
        self.state = State.STOPPING if is_running else State.ENDED

    def seen(self, now: float) -> None:
        """Take that the process runs."""
        if self.state is State.STOPPING:
            return
        # The first sighting counts: a job may be queued for hours before it runs, and a running one
        # may begin several sessions.
        if self.state is not State.RUNNING or not self._is_seen:
            self._launched_at = now
        if self.state is State.ENDED:
            self._in_a_row = self._alike = 0
        self._is_seen = True
        self.state = State.RUNNING

    def exited(self, code: int, now: float, error: str = "") -> Wait | End:
        """Take the exit of the process.

        code: negative for the signal that killed it. error: its last error line; empty: unknown.
        """
        assert self.state in {State.RUNNING, State.STOPPING}, self.state
        if self.state is State.STOPPING:
            return self._end("stopped")
        if code == ExitCode.DONE:
            return self._end("done")
        if code == ExitCode.BAD_INPUT:
            return self._end("bad input" + (f": {error}" if error else ""))
        self._alike = 0 if not error else self._alike + 1 if error == self._error else 1
        self._error = error
        rules = self._rules
        if now - self._launched_at >= rules.healthy_after_s:
            self._in_a_row = 0
        if self._in_a_row >= rules.budget:
            last = f"; its last error: {error}" if error else ""
            return self._end(f"gave up after {self._in_a_row} relaunches in a row{last}")
        # The exponent is capped because a float power overflows long before a large budget is used.
        wait = rules.first_wait_s * rules.factor ** min(self._in_a_row, 64)
        self._in_a_row += 1
        self.state = State.WAITING
        why = f"it ended {self._alike} times in a row with: {error}" if self._alike >= ALIKE else ""
        return Wait(min(wait, rules.longest_wait_s), why)

    def _end(self, why: str) -> End:
        self.state = State.ENDED
        return End(why)


class _Client(Restarts):
    """A client with a launcher. due: when it is launched, while it waits."""

    due: float | None = None
    has_exited = False
    """Whether its process has exited since its last session."""
    is_overtaken = False
    """Another process took its name."""


class Relaunches:
    """Decides for all clients of a run; see the second table above.

    rules_of: of a client; None for one that is never launched.
    """

    def __init__(self, rules_of: Callable[[str], RestartRules | None]) -> None:
        self._rules_of = rules_of
        self._clients: dict[str, _Client] = {}
        self.members: set[str] = set()
        """Clients that joined and have not left for good, with a rule or without."""

    def recovered(self, members: Iterable[str], away_s: float, now: float) -> dict[str, Wait | End]:
        """Take the members at a restart of the parameter server; returns the decisions.

        away_s: clients that run join within it.
        """
        for client in members:
            self.seen(client, now)
        found = {name: self._ended(name, now, after_s=away_s) for name in sorted(members)}
        return {name: decided for name, decided in found.items() if decided is not None}

    def seen(self, client: str, now: float) -> None:
        """Take the beginning of a client's session."""
        if len(self.members) < MOST_MEMBERS:
            self.members.add(client)
        rules = self._rules_of(client)
        if rules is not None:
            one = self._clients.setdefault(client, _Client(rules))
            one.seen(now)
            one.due, one.has_exited = None, False

    def left(
        self, client: str, reason: str, now: float, goodbye: Goodbye = NO_GOODBYE
    ) -> Wait | End | None:
        """Take the end of its session. reason: the transport's. goodbye: where that is "bye"."""
        one = self._clients.get(client)
        if one is not None:
            one.is_overtaken = reason == "superseded"
            if one.has_exited:
                return None
        if reason == "bye" and goodbye.relaunch_in_s is not None:
            away_s = min(goodbye.relaunch_in_s, LONGEST_AWAY_S)
            return self._ended(client, now, ExitCode.RELAUNCH, after_s=away_s, why=goodbye.reason)
        if reason in {"bye", "revoked"}:
            self._forget(client)
        return self._ended(client, now) if reason == "expired" else None

    def exited(self, client: str, code: int, now: float, error: str = "") -> Wait | End | None:
        """Take the exit of its process, which was launched locally. error: its last error line.

        After a goodbye, too, the exit code decides whether it is launched again.
        """
        one = self._clients.get(client)
        if code == ExitCode.BAD_INPUT and one is not None and one.is_overtaken:
            one.is_overtaken = False
            return None
        # A person ended it, whether its goodbye has arrived or not.
        if code == ExitCode.INTERRUPTED:
            self._forget(client)
        if code in {ExitCode.DONE, ExitCode.BAD_INPUT}:
            self.members.discard(client)
        if one is None and code == ExitCode.RELAUNCH:
            self.seen(client, now)
        # Preemptions are no failures, even if they are reported by the same text.
        error = "" if code == ExitCode.RELAUNCH else error
        decided = self._ended(client, now, code, error=error)
        if decided is not None:
            self._clients[client].has_exited = True
        return decided

    def failed(self, client: str, now: float) -> Wait | End | None:
        """Take the failure of its launcher."""
        return self._ended(client, now)

    def next_due(self) -> float | None:
        """Return the time of the next launch, or None."""
        return min((one.due for one in self._clients.values() if one.due is not None), default=None)

    def take_due(self, now: float) -> list[str]:
        """Return the clients to launch now, once each."""
        waiting = sorted(self._clients.items())
        ready = [name for name, one in waiting if one.due is not None and one.due <= now]
        for name in ready:
            self._clients[name].due = None
            self._clients[name].launch(now)
        return ready

    def _forget(self, client: str) -> None:
        self.members.discard(client)
        self._clients.pop(client, None)

    def _ended(
        self,
        client: str,
        now: float,
        code: int = ExitCode.BUG,
        *,
        after_s: float = 0.0,
        why: str = "",
        error: str = "",
    ) -> Wait | End | None:
        """Take the end of a client's process; None where that is known, or it has no launcher."""
        one = self._clients.get(client)
        if one is None or one.state is not State.RUNNING:
            return None
        decided = one.exited(code, now, error)
        if isinstance(decided, End):
            return decided
        one.due = now + after_s + decided.seconds
        return Wait(after_s + decided.seconds, why or decided.why)


KINDS = ("local", "slurm", "command")
_MOST_RULES = 1000


@frozen
class LaunchRule:
    """The launcher of the clients whose names match the pattern `clients`."""

    clients: str
    kind: str
    command: tuple[str, ...]

    def words(self, name: str, address: str) -> tuple[str, ...]:
        """Return the command for one client."""
        return tuple(
            word.replace("{name}", name).replace("{address}", address) for word in self.command
        )


@frozen
class Launching:
    """The content of a launch file."""

    rules: tuple[LaunchRule, ...] = ()
    restarts: RestartRules = field(factory=lambda: RestartRules(first_wait_s=5.0, budget=5))

    def rule_of(self, name: str) -> LaunchRule | None:
        """Return the first rule that matches a client, or None if it has no launcher."""
        return next((rule for rule in self.rules if fnmatchcase(name, rule.clients)), None)

    def restarts_of(self, name: str) -> RestartRules | None:
        """Return the rules of a client's relaunches, or None if it has no launcher."""
        return None if self.rule_of(name) is None else self.restarts


def read_launching(text: str, where: str) -> Launching:
    """Read the text of a launch file. Raises ConfigError, which begins with `where`."""
    try:
        found = tomllib.loads(text)
    # Numbers of 5,000 digits and deep nesting raise these too.
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not TOML: {error}") from None
    tables = found.pop("launcher", [])
    if not isinstance(tables, list) or not tables or len(tables) > _MOST_RULES:
        raise ConfigError(f"{where}: give at least one [[launcher]] table")
    rules = tuple(_rule(table, f"{where}: launcher {n}") for n, table in enumerate(tables, 1))
    return Launching(rules, _restarts(found, where))


def _rule(table: Any, where: str) -> LaunchRule:
    if not isinstance(table, dict) or set(table) != {"clients", "kind", "command"}:
        raise ConfigError(f"{where}: must have exactly the keys clients, kind and command")
    clients, kind, command = table["clients"], table["kind"], table["command"]
    if not isinstance(clients, str) or not clients:
        raise ConfigError(f'{where}: clients must be a pattern of names, like "a100-*"')
    if kind not in KINDS:
        raise ConfigError(f"{where}: kind must be one of {', '.join(KINDS)}")
    words: Sequence[Any] = command if isinstance(command, list) else ()
    if not words or not all(isinstance(word, str) and word for word in words):
        raise ConfigError(
            f'{where}: command must be an array of words, like ["ssh", "host", "..."]'
        )
    if kind == "slurm" and any(word.startswith(("--job-name", "-J")) for word in words):
        raise ConfigError(
            f"{where}: leave --job-name (-J) out: the job is named after its client, and found"
            " again by that name"
        )
    return LaunchRule(clients, kind, tuple(words))


def _restarts(found: dict[str, Any], where: str) -> RestartRules:
    known = fields_dict(RestartRules)
    for key, value in found.items():
        if key not in known:
            raise ConfigError(f"{where}: {key}: unknown key; known: launcher, {', '.join(known)}")
        kind = int if key == "budget" else int | float
        is_number = isinstance(value, kind) and not isinstance(value, bool)
        if not is_number or not (1 if key == "factor" else 0) <= value <= 1e6:
            raise ConfigError(
                f"{where}: {key}: must be a number from 0 to 1,000,000, factor from 1"
            )
    return RestartRules(**{"first_wait_s": 5.0, "budget": 5, **found})
