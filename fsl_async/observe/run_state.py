"""The state of a run, rebuilt from a node's journal alone. Pure.

`fsl-node status`, the lines of a server and `demo` show it. `RunState.apply(line)`
takes one line as `JournalReader` yields it, in order, and returns what is worth telling a person.
It never fails on a line: one of a newer release, or with fields of another type, changes nothing.
Time comes from the lines (`t`, seconds since 1970) or as the argument `now`. The method
`_on_<type>` of a state or of a part of it takes the lines of that type.

    line                                     what changes
    note   so_far                            everything: a segment of the journal begins
    note   node_started, node_ended          the process; every client must say hello again
    effect finish, note                      the end, and lines for people
    note   unreadable_messages               bytes from the network that were no message of ours
    note   traffic                           bytes by category, see `accounts`
  what clients do, and report (`run`)
    fact   client                            what it does, the outcome of a delta
    event  heartbeat_received                what it has trained, how it goes
  of a parameter server (`rounds`)
    fact   round, version                    where rounds are, what is in a version
    event  delta_meta                        what a client has trained, by its delta
    event  model_attached, delta_stored, version_sent      sizes and bytes
    note   version_found                     what a version had that the last process made
  of a split server
    event  upload_trained, round_done
  of a client
    note   leaving                           its run, and which data leaves its machine, to where
    event  rebased                           the version that it trains from

What a server decides, it states (`fsl_async.roles.sync.facts`); what clients report is in events.
A killed server loses up to a second of journal. What the disk has for certain (version, tokens) the
first fact `version` of the next process puts right; bytes and counts of single clients may then
lack a delta.
"""

from __future__ import annotations

import math
import re
from typing import Any

from attrs import asdict, field, fields, mutable

from fsl_async.accounting.sizes import Account
from fsl_async.observe import segments
from fsl_async.observe.clients import (
    REASONS,
    ClientState,
    Line,
    News,
    NodeAndClients,
    NodeState,
    client_dict,
    mean,
)
from fsl_async.observe.rounds import ParameterServerFigures
from fsl_async.roles.client_facts import ClientFact
from fsl_async.roles.phrasing import counted


@mutable
class GroupFigures:
    """Figures of a parameter server in a roster. round: of the global weights held; -1: none."""

    is_on: bool = False
    round: int = -1
    digest: str = ""
    here: list[str] = field(factory=list)
    """The other servers with a session; at a member at most the coordinator, which has no name."""
    decided: int = 0
    """Global rounds decided here, so at the coordinator only."""
    failed: int = 0
    """Attempts that failed here."""
    members: list[str] = field(factory=list)
    """The contributors of the newest decision here."""

    def _on_groups_recovered(self, run: NodeAndClients, line: Line) -> None:
        self.is_on, self.here = True, []
        self._take(line["adopted"] or {"round": -1, "digest": ""})

    def _on_adopted(self, run: NodeAndClients, line: Line) -> None:
        self._take(line["decision"])

    def _take(self, decision: Line) -> None:
        self.round, self.digest = int(decision["round"]), str(decision["digest"])

    def _on_group_here(self, run: NodeAndClients, line: Line) -> None:
        self.here = sorted({*self.here, str(line["peer"])})

    def _on_group_gone(self, run: NodeAndClients, line: Line) -> None:
        self.here = [name for name in self.here if name != str(line["peer"])]

    def _on_reduction_failed(self, run: NodeAndClients, line: Line) -> None:
        self.failed += 1

    def _on_done(self, run: NodeAndClients, line: Line) -> None:
        if line["of"]["type"] == "keep_decision" and not line["problem"]:
            self.decided += 1
            self.members = sorted(map(str, line["of"]["contributors"]))

    def as_dict(self) -> dict[str, Any] | None:
        """Plain values for --json; None for a parameter server alone."""
        return asdict(self) if self.is_on else None

    def words(self) -> list[str]:
        """A line for people, if there are other groups."""
        if not self.is_on:
            return []
        held = f"global weights {self.round} ({self.digest})" if self.round >= 0 else "none yet"
        parts = [f"groups: {held}"]
        if self.decided:
            rounds = counted(self.decided, "round")
            parts.append(f"{rounds} decided here, the newest of {', '.join(self.members)}")
        if self.failed:
            parts.append(f"{counted(self.failed, 'attempt')} failed here")
        named = [name or "the coordinator" for name in self.here]
        parts.append(f"connected: {', '.join(named) or 'none'}")
        return ["; ".join(parts)]


PS, SPLIT_SERVER, CLIENT = "ps", "server", "client"
"""Roles, as `fsl-node --role` has them."""

# Notes of the parameter server's machine whose content other lines have already.
_IN_OTHER_WORDS = re.compile(r" left \(.*goes on without it$|^version 0 is durable")


@mutable
class SplitServerFigures:
    """What a split server's journal adds up to; outcomes of uploads are in its ledger."""

    method: str = ""
    round: int = -1
    loss: float | None = None
    """Of the newest upload."""
    errors: dict[str, dict[str, float]] = field(factory=dict)
    """Coding errors that clients report of what they send, by client."""


@mutable
class SiteFigures:
    """What a client's own journal adds up to."""

    version: int = -1
    """That it trains from."""
    leaving: tuple[str, ...] = ()
    """Kinds of data that leave its machine, for `leaving_to`."""
    leaving_to: str = ""


@mutable
class RunState(NodeAndClients):
    """All figures of a run; those of the node's role in `ps`, `split_server` or `site`."""

    account: Account = field(factory=Account)
    ps: ParameterServerFigures = field(factory=ParameterServerFigures)
    split_server: SplitServerFigures = field(factory=SplitServerFigures)
    site: SiteFigures = field(factory=SiteFigures)
    groups: GroupFigures = field(factory=GroupFigures)
    lines_odd: int = 0

    def apply(self, line: Line) -> list[News]:
        """Take one line of the journal; returns its news, which `news` keeps too."""
        self.account.apply(line)
        kind, stamp = line.get("type"), line.get("t")
        if isinstance(stamp, int | float):
            self.node.last_t = float(stamp)
        try:
            if (own := getattr(self, f"_on_{kind}", None)) is not None:
                own(line)
            for part in (self.ps, self.groups):
                if (handler := getattr(part, f"_on_{kind}", None)) is not None:
                    handler(self, line)
        except (KeyError, TypeError, ValueError, AttributeError):
            self.lines_odd += 1  # of another release, or not ours
        return self.take_news()

    def _refused(self, name: str) -> None:
        """Forget a client that is refused; one that took part before is gone."""
        client = self.clients.get(name)
        if client is None or client.version >= 0:
            return
        if client.tokens or client.uploads:  # of earlier processes
            client.lose(self.node.last_t, "refused")
        else:
            del self.clients[name]

    # --- the journal's lines ---

    def _on_node_started(self, line: Line) -> None:
        node = self.node
        node.start(line)
        self.ps.start(line)
        self.split_server.method = str(line.get("method", ""))
        names = {PS: "the parameter server", SPLIT_SERVER: "the split server"}
        self.repeats_may_be_news()
        for client in self.clients.values():
            if client.doing != "gone":
                client.lose(node.last_t, f"{names.get(node.role, 'the server')} was restarted")
        what = "listens" if node.starts == 1 else f"is back (start {node.starts}), listens"
        if node.role in names:
            of_run = f", run {node.run}" if node.run else ""
            self.tell("server", f"{names[node.role]} {what} at {node.address}{of_run}")

    def _on_finish(self, line: Line) -> None:
        node = self.node
        node.phase = "ended"
        node.ending = str(line.get("reason", ""))
        node.exit_code = int(line.get("exit_code", 0))
        self.ps.next_sync_at = None
        level = "warning" if node.exit_code else "info"
        self.tell("end", f"the run ends: {node.ending}", level=level)

    def _on_node_ended(self, line: Line) -> None:
        node = self.node
        node.phase = "ended"
        node.ending = node.ending or "stopped at once"
        node.ended_at = node.last_t
        node.count_garbage(line)
        self.ps.end()
        for client in self.clients.values():
            if client.connected:
                client.connected, client.doing = False, "done"

    def _on_so_far(self, line: Line) -> None:
        found = segments.restored(RunState, line["state"])
        for each in fields(RunState):
            if each.init:
                setattr(self, each.name, getattr(found, each.name))
        self.node.last_t = float(line["t"])

    def _on_note(self, line: Line) -> None:
        text = str(line.get("text", ""))
        if not (self.ps.noted(self, line) or _IN_OTHER_WORDS.search(text)):
            self.tell_once(text, str(line.get("level", "info")))

    def _on_upload_trained(self, line: Line) -> None:
        if line.get("problem") is not None:
            return
        name, _, number, _ = str(line["key"]).split("/")
        split, loss = self.split_server, float(line["loss"])
        split.loss, split.round = loss, max(split.round, int(number))
        if name in self.clients:
            self.clients[name].uploads += 1
            self.clients[name].saw_loss(loss)

    def _on_round_done(self, line: Line) -> None:
        told = {k: float(v) for k, v in line["errors"].items() if k.endswith(" up")}
        self.split_server.errors.setdefault(str(line["peer"]), {}).update(told)

    def _on_split_hello(self, line: Line) -> None:
        self.node.run = self.node.run or str(line.get("run", ""))

    def _on_split_recovered(self, _: Line) -> None:
        self.node.phase = "serving"

    def _on_leaving(self, line: Line) -> None:
        self.node.run = str(line["run"])
        self.site.leaving = tuple(map(str, line["kinds"]))
        self.site.leaving_to = str(line["to"])

    def _on_rebased(self, line: Line) -> None:
        self.site.version = int(line["version"])

    def _on_unreadable_messages(self, line: Line) -> None:
        self.node.count_garbage(line)

    # --- the journal's lines about clients and their sessions ---

    def _connected_words(self) -> str:
        """How many clients have a session now, for lines about those that come and go."""
        self.repeats_may_be_news()
        here = sum(client.connected for client in self.clients.values())
        return f"{counted(here, 'client')} connected"

    def _on_client(self, line: Line) -> None:
        fact = segments.restored(ClientFact, line)
        if fact.state == "refused":
            if fact.why:
                text = f"refused {fact.peer}: {fact.why}"
                self.tell("refused", text, fact.peer, "warning")
            self._refused(fact.peer)
        elif fact.outcome:
            self.ps.settled(self, fact)
        elif fact.state == "gone" and fact.peer not in self.clients:
            return  # it was refused
        else:
            client = self.client_of(line)
            if fact.state == "gone":
                self._left(client, fact)
                return
            if fact.begins:
                self._arrived(client, fact)
            client.doing, client.version = fact.state, max(fact.version, client.version)
            is_current = client.version == self.ps.version
            if client.returning and client.doing == "training" and is_current:
                client.returning = False
                if self.node.keeps_deltas:
                    text = f"{client.name} has caught up: it holds version {client.version}"
                    self.tell("caught up", text, client.name)

    def _arrived(self, client: ClientState, fact: ClientFact) -> None:
        """A session begins."""
        how = client.arrive(fact.incarnation, in_run=fact.in_run)
        words = {
            "joined": "joins",
            "relaunched": f"is back as a new process (relaunch {client.relaunches})",
            "reconnected": "is connected again",
        }
        if how:
            self.tell(how, f"{client.name} {words[how]}, {self._connected_words()}", client.name)

    def _left(self, client: ClientState, fact: ClientFact) -> None:
        """A session ended."""
        if fact.incarnation != client.incarnation or not client.connected:
            return
        if self.node.phase == "ended":
            client.connected, client.doing = False, "done"
            return
        client.lose(self.node.last_t, REASONS.get(fact.why, fact.why))
        if fact.why == "bye":
            client.training.end(fact.goodbye or client.gone_why)
        client.violation = fact.goodbye if fact.why == "protocol" else ""
        level = "info" if fact.why == "bye" else "warning"
        text = f"{client.name} left: {client.gone_words}, {self._connected_words()}"
        self.tell("gone", text, client.name, level)

    def _on_heartbeat_received(self, line: Line) -> None:
        client = self.client_of(line)
        payload = line["payload"]
        client.step = int(payload.get("step", client.step))
        client.tokens = client.tokens_before + int(payload.get("tokens", 0))
        if self.node.keeps_deltas:
            client.training.has_trained(client.tokens - client.tokens_before)
        client.tokens_per_s = float(payload.get("tokens_per_s", 0.0))
        client.left_out = client.left_out_before + int(payload.get("left_out", 0))
        lag = payload.get("lag_p99_ms")
        client.lag_p99_ms = float(lag) if isinstance(lag, int | float) else client.lag_p99_ms
        client.tells_loss = client.tells_loss or payload.get("loss") is not None
        client.saw_loss(payload.get("loss"))
        # Without a loss (its site keeps that) the heartbeat alone can tell that it is over.
        self.look_for_trouble(client, payload, may_end="loss" not in payload)
        hung_s = payload.get("hung_s")
        hangs = isinstance(hung_s, int | float) and not isinstance(hung_s, bool)
        if hangs and not client.hangs:
            text = f"{client.name} hangs: its training has made no step for {hung_s:.0f} s"
            self.tell("hangs", text, client.name, "warning")
        elif client.hangs and not hangs:
            self.tell("hangs no more", f"{client.name} makes steps again", client.name)
        client.hangs = hangs

    # --- what follows from the figures ---

    @property
    def relaunches(self) -> int:
        """How often a client's name came back as a new process."""
        return sum(client.relaunches for client in self.clients.values())

    @property
    def loss_first(self) -> float | None:
        """Mean of the first loss that each client reported."""
        return mean(client.loss_first for client in self.clients.values())

    @property
    def loss_last(self) -> float | None:
        """Mean of the last loss that each client reported."""
        return mean(client.loss for client in self.clients.values())

    def traffic(self) -> dict[str, dict[str, Any]]:
        """The account; of a split server with the mean square of the errors that clients report."""
        found = self.account.as_dict()
        errors = self.split_server.errors.values()
        for name in sorted({name for told in errors for name in told}):
            squares = [told[name] ** 2 for told in errors if name in told]
            found["error"][name] = float(f"{math.sqrt(sum(squares) / len(squares)):.4g}")
        return found

    def as_dict(self, now: float) -> dict[str, Any]:
        """Plain values for --json, of a parameter server."""
        ps, made = self.ps, _plain(self.node) | _plain(self.ps)
        del made["name"], made["up"], made["down"]
        for name in ("rounds", "participation", "participation_alive", "bytes_raw", "bytes_sent"):
            made[name] = getattr(ps, name)
        return made | {
            "ratio": ps.ratio,
            "pending": ps.pending,
            "relaunches": self.relaunches,
            "loss_first": self.loss_first,
            "loss_last": self.loss_last,
            "lines_odd": self.lines_odd,
            "groups": self.groups.as_dict(),
            "bytes_up": asdict(ps.up),
            "bytes_down": asdict(ps.down),
            "evaluations": [asdict(one) for one in self.ps.evaluations],
            "cosines": list(self.ps.cosines),
            "shares": ps.shares.of_clients(),
            "traffic": self.traffic(),
            "clients": [client_dict(client, now) for client in self.clients.values()],
            "news": [asdict(one) for one in list(self.news)[-20:]],
        }


def _plain(figures: NodeState | ParameterServerFigures) -> dict[str, Any]:
    found = asdict(figures, recurse=False)
    return {name: value for name, value in found.items() if not name.startswith("_")}


_TYPES = frozenset(
    name.removeprefix("_on_")
    for part in (RunState, ParameterServerFigures, GroupFigures)
    for name in dir(part)
    if name.startswith("_on_")
)


def tells_something(kind: str) -> bool:
    """Whether lines of this type change a state: most of a journal does not."""
    return kind in _TYPES
