"""Rounds, deltas and versions as the parameter server's journal shows them. Pure.

called   clients that were called in a round
needed   as many of the called that are here must send a delta before it may merge (sync.quorum)
merged   called clients whose delta of this round is in the new version
late     called, still connected, and no delta when the round merged: it comes into a later version
left     called, and gone since
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from typing import Any

from attrs import field, mutable

from fsl_async.observe.client_lines import look_for_trouble
from fsl_async.observe.clients import ClientState, Line, Volume, mean
from fsl_async.observe.evaluations import SHOWN, Evaluation
from fsl_async.observe.idle_clients import saw_alike, saw_norm
from fsl_async.observe.run import Run
from fsl_async.observe.tuning import FAR, far_movers, norms_of, saw_delta
from fsl_async.roles.phrasing import counted, figure, megabytes
from fsl_async.roles.sync.delta import EPSILON

LOW_COSINE = -0.1
"""Median cosine of the newest rounds at which averaging takes away what clients train.

Healthy runs begin at 0.25 to 0.7 and end at -0.04 to 0.1 (`quality.py`, rows of 10 to 200 steps).
"""
ADVICE_ROUNDS = 10

MAX_LOSS = 1e6
"""Reported evaluations above it are left out."""

MAX_OFFERED = 4096
"""Deltas whose loss is kept until they are merged: a peer's offers must not grow the state."""

NAMED = 5
"""More names than these are a number."""


@mutable
class OpenRound:
    """The clients of the open round. number: the version that it starts from."""

    number: int = -1
    asked: dict[str, int] = field(factory=dict)  # client -> incarnation
    empty: set[str] = field(factory=set)  # answered, but with nothing that can be merged

    def open(self, number: int) -> None:
        """A round begins: no client is called yet."""
        self.number = number
        self.asked.clear()
        self.empty.clear()

    def alive(self, clients: Mapping[str, ClientState]) -> list[str]:
        """The called that are here, as the same process."""
        return [
            name
            for name, incarnation in self.asked.items()
            if (client := clients.get(name)) is not None
            and client.connected
            and client.incarnation == incarnation
        ]

    def words(
        self, rounds: Mapping[str, int], clients: Mapping[str, ClientState], quorum: float
    ) -> str:
        """Which clients are in the version that was just made of it, and which are not.

        rounds: delta key -> the round that it answered, of all deltas that were merged. quorum: of
        the run; 0 = not known.
        """
        if rounds and not self.asked:  # clients sent by themselves
            names_of = _some({_client(key): None for key in rounds})
            return f"{counted(len(rounds), 'delta')} merged, from {names_of}"
        merged = {_client(key) for key, number in rounds.items() if number == self.number}
        merged &= set(self.asked)
        others = [key for key in rounds if _client(key) not in merged]
        others += [key for key, n in rounds.items() if n != self.number and _client(key) in merged]
        alive = self.alive(clients)
        expected = {*alive, *merged}  # a client that has answered may leave
        needed = max(1, math.ceil(quorum * len(expected))) if quorum else 0
        parts = [f"{len(merged)} of {counted(len(self.asked), 'called client')} merged"]
        if needed:
            parts[0] += f" ({needed} needed)"
        missing = [name for name in self.asked if name not in merged]
        here = [name for name in missing if name in alive]
        for word, names in (
            ("late", [name for name in here if name not in self.empty]),
            ("nothing to merge from", [name for name in here if name in self.empty]),
            ("left", [name for name in missing if name not in alive]),
        ):
            if names:
                parts.append(f"{word}: {_some(names)}")
        if others:
            names_of = _some({_client(key): None for key in others})
            parts.append(f"and {counted(len(others), 'delta')} of earlier rounds, from {names_of}")
        return ", ".join(parts)


@mutable
class ParameterServerFigures:
    """What a parameter server's journal adds up to. Bytes are those of whole transfers."""

    every_s: float = 0.0
    quorum: float = 0.0
    grace: tuple[float, ...] = ()
    """Of the grace window: MADs after the median, least seconds, seconds while none are known."""
    needs: tuple[str, ...] = ()
    """Kinds of data that every client of the run sends (`fsl_async.config.site_policy`)."""
    counts: str = "tokens"
    """What `tokens`, here and of clients, are: tokens, or in split learning samples."""
    version: int = -1
    digest: str = ""
    values: int = 0
    tokens: int = 0
    round: int = -1
    round_called_at: float = 0.0
    next_sync_at: float | None = None
    called: int = 0
    answered: int = 0
    called_alive: int = 0
    deltas_merged: int = 0
    up: Volume = field(factory=Volume)
    down: Volume = field(factory=Volume)
    held: dict[str, str] = field(factory=dict)
    """Deltas that are kept out for now, and why."""
    evaluations: deque[Evaluation] = field(factory=lambda: deque(maxlen=SHOWN))
    """Of versions, as a client reported them."""
    cosines: deque[float] = field(factory=lambda: deque(maxlen=SHOWN))
    """Mean cosine between clients' deltas in the newest rounds."""
    alike: dict[str, int] = field(factory=dict)
    """Pairs of clients whose deltas are almost the same, and for how many rounds."""
    loss: float | None = None
    """Of the clients whose deltas are in the newest version, as its line has it."""
    staleness_mean: float | None = None
    """Of the deltas in the newest version: versions between their base and that before it."""
    staleness_max: int | None = None
    alarms: int = 0
    """Damage found on the disk, lost deltas and versions, and digests of clients that differ."""
    gone: int = 0
    """Versions that clients held and a restored run directory lacks, by their reports."""
    alarm: str = ""
    """The newest of them, or its cause as the parameter server found it."""
    _pending: dict[str, int] = field(factory=dict)  # key -> tokens
    _merging: dict[str, int] = field(factory=dict)
    _adopting: list[int] = field(factory=list)
    """A version of global weights that is being made, and their number; else empty."""
    _tokens_of: dict[str, int] = field(factory=dict)
    _round_of: dict[str, int] = field(factory=dict)
    # key -> bytes, of deltas that an earlier process stored
    _uncounted: dict[str, int] = field(factory=dict)
    _far: set[str] = field(factory=set)  # clients that moved weights far in the newest version
    _norms: dict[str, float] = field(factory=dict)  # by client, of the version being made
    _clipped: dict[str, int] = field(factory=dict)  # by client, deltas of that version
    _opposite: list[str] = field(factory=list)
    """For each of the newest versions, the client opposite to the rest, or empty."""
    _again: set[str] = field(factory=set)  # keys that the last start found pending
    _loss_of: dict[str, float] = field(factory=dict)
    _advised: bool = False
    _open: OpenRound = field(factory=OpenRound)
    _bytes_told: tuple[int, int] = (0, 0)  # raw, sent

    @property
    def rounds(self) -> int:
        """Rounds that made a version."""
        return max(0, self.version)

    @property
    def participation(self) -> float | None:
        """Deltas in a merged round over the clients called for it."""
        return self.answered / self.called if self.called else None

    @property
    def participation_alive(self) -> float | None:
        """The same over those of the called that were still there when it merged."""
        return self.answered / self.called_alive if self.called_alive else None

    @property
    def bytes_raw(self) -> int:
        """Both directions, 4 bytes for each value."""
        return self.up.raw + self.down.raw

    @property
    def bytes_sent(self) -> int:
        """Both directions, as they were sent."""
        return self.up.sent + self.down.sent

    @property
    def ratio(self) -> float | None:
        """Raw over sent bytes."""
        return self.bytes_raw / self.bytes_sent if self.bytes_sent else None

    @property
    def pending(self) -> int:
        """Deltas that are acknowledged and not merged yet."""
        return len(self._pending)

    def start(self, line: Line) -> None:
        """A new process of the parameter server."""
        self.every_s = float(line.get("every_s", 0.0))
        self.quorum = float(line.get("quorum", 0.0))
        grace = line.get("grace")
        self.grace = tuple(map(float, grace)) if isinstance(grace, list) else ()
        needs = line.get("needs")
        self.needs = tuple(map(str, needs)) if isinstance(needs, list) else ()
        self.counts = "samples" if line.get("counts") == "samples" else "tokens"
        self.next_sync_at = None
        self._open.open(-1)

    # --- the journal's lines; `run` has the clients ---

    def offered(self, run: Run, line: Line) -> None:
        """A delta is offered. A client may end between two heartbeats: deltas count its work too.

        Steps without a delta are in heartbeats only.
        """
        client = run.client_of(line)
        client.doing = "sending"
        delta = line["delta"]
        key = str(delta["key"])
        sequence = int(key.rpartition("/")[2])
        if sequence <= client.sequence_offered:  # offered again after a loss
            return
        client.offered(key, sequence, steps=int(delta["steps"]), tokens=int(delta["tokens"]))
        epsilon = _small((delta.get("facts") or {}).get(EPSILON))
        client.epsilon = client.epsilon if epsilon is None else epsilon
        metrics = delta.get("metrics") or {}
        look_for_trouble(run, client, metrics, may_end="loss" in metrics)
        self._evaluated(metrics)
        warning = saw_delta(client, delta)
        if warning:
            run.tell("labels", warning, client.name, "warning")
        loss = metrics.get("loss")
        if isinstance(loss, int | float):
            self._keep_loss(key, float(loss))
        if not client.tells_loss:  # its heartbeats carry running means; this is a round's mean
            client.saw_loss(loss)

    def _evaluated(self, metrics: Mapping[str, Any]) -> None:
        # A client may report any number: what is no loss of a version of this run is left out.
        loss, bits = _small(metrics.get("eval_loss")), _small(metrics.get("eval_bits_per_byte"))
        version = _small(metrics.get("eval_version"), self.version)
        accuracy = _small(metrics.get("eval_accuracy"), 1.0)
        if loss is not None and version is not None:
            self.evaluations.append(
                Evaluation(int(version), loss, bits_per_byte=bits, accuracy=accuracy)
            )

    def _keep_loss(self, key: str, loss: float) -> None:
        """Keep the loss of an offered delta until it is merged; those of declined ones fall out."""
        self._loss_of[key] = loss
        while len(self._loss_of) > MAX_OFFERED:
            del self._loss_of[next(iter(self._loss_of))]

    def held_by(self, run: Run, line: Line) -> None:
        """A client holds a version, and trains from it."""
        client = run.client_of(line)
        client.version = int(line["version"])
        client.doing = "training"
        if client.version == self.version and client.returning:
            client.returning = False
            text = f"{client.name} has caught up: it holds version {client.version}"
            run.tell("caught up", text, client.name)

    def recovered(self, run: Run, line: Line) -> None:
        """Version, tokens and pending deltas, as they are on disk."""
        self.version = int(line["version"])
        self.digest = str(line.get("digest", ""))
        self.tokens = int(line.get("tokens_total", 0))
        run.node.phase = "ready" if self.version >= 0 else "waiting"
        self._pending.clear()  # an Accumulate follows for each that is pending
        self._merging.clear()
        pending = line.get("pending", [])
        held = line.get("held", [])
        keys = set(self.held)
        if isinstance(held, list):
            keys = {str(entry["delta"]["key"]) for entry in held}
        self.held = {key: self.held.get(key, "held back before the restart") for key in keys}
        self._again.clear()
        self._uncounted.clear()
        for entry in pending if isinstance(pending, list) else []:
            delta = entry["delta"]
            key = str(delta["key"])
            if key not in self._round_of:
                self._uncounted[key] = int(entry.get("bytes", 0))
            self._tokens_of[key] = int(delta["tokens"])
            self._round_of[key] = int(delta["round"])
            self._again.add(key)
        waited_s = min(max(0.0, float(line.get("since_version_s", 0.0))), self.every_s)
        self._plan_sync(run.node.last_t - waited_s)

    def found(self, run: Run, line: Line) -> None:
        """A version of a process that was killed after making it and before writing so."""
        version = int(line["version"])
        if not 0 <= self.version < version:
            return
        keys = [str(key) for key in line["merged"]]
        self._count_merged(run, dict.fromkeys(keys, 0))
        words = counted(len(keys), "delta")
        run.tell("version", f"version {version} was made before the restart, of {words}")

    def _count_merged(self, run: Run, merged: Mapping[str, int]) -> None:
        for key, tokens in merged.items():
            self._pending.pop(key, None)
            self.tokens += tokens
            self.deltas_merged += 1
            sent = self._uncounted.pop(key, 0)
            client = run.clients.get(_client(key))
            if client is not None:
                client.deltas_merged += 1
            if sent:
                self.up.add(self.values, sent)
                if client is not None:
                    client.up.add(self.values, sent)

    def _plan_sync(self, begun_at: float) -> None:
        self.next_sync_at = begun_at + self.every_s if self.every_s else None

    def attached(self, run: Run, line: Line) -> None:
        """The size of the model; the client fetches."""
        client = run.client_of(line)
        if line.get("difference") is None:
            self.values = int(line["values"])
            client.doing = "fetching" if self.version >= 0 else "joining"

    def sent(self, run: Run, line: Line) -> None:
        """A message to a client: a call, the order to publish, a refused delta."""
        message = line["message"]
        kind = message.get("type")
        peer = str(line["peer"])
        client = run.clients.get(peer)
        if kind in {"call/1", "turn/1"}:
            if run.node.phase != "collecting" or self.round != int(message["round"]):
                self._open.open(int(message["round"]))
                self.round_called_at = run.node.last_t
            run.node.phase, self.round = "collecting", int(message["round"])
            self.next_sync_at = None
            self._open.asked[peer] = client.incarnation if client is not None else -1
        elif kind == "reject/1":  # its model is another one
            run.refused(peer)
        elif kind == "publish/1" and client is not None:
            client.doing = "publishing"
        elif kind == "accepted/1" and client is not None:
            client.training.settle(str(message["key"]))
        elif kind == "declined/1" and client is not None and message.get("code") != "later":
            client.training.settle(str(message.get("key", "")))
            self._open.empty.add(peer)
            if message.get("code") == "quarantined":
                client.deltas_quarantined += 1
            else:
                client.deltas_refused += 1

    def quarantined(self, run: Run, line: Line) -> None:
        """A delta is held back. One that is kept out for good is declined and counted there."""
        if line.get("held"):
            self.held[str(line["key"])] = str(line["reason"])

    def released(self, run: Run, line: Line) -> None:
        """A delta is held back no longer."""
        self.held.pop(str(line["key"]), None)

    def noted(self, run: Run, line: Line) -> bool:
        """A note about rounds or damage; whether that is all that there is to tell of it."""
        text, facts = str(line.get("text", "")), line.get("facts") or {}
        if "called" in facts:
            self.called += int(facts["called"])
            self.answered += int(facts["answered"])
            self.called_alive += len(self._open.alive(run.clients))
            return True
        if " closes without a new version" in text:
            run.node.phase = "ready"
            self._plan_sync(self.round_called_at)
        if "alarm" in facts:
            self.alarms += facts["alarm"] != "verdict"
            self.alarm = text
            self.gone = max(self.gone, int(facts.get("gone", 0)))
            level = str(line.get("level", "info"))
            run.tell("alarm", text, str(facts.get("client", "")), level=level)
            return True
        return False

    def skipped(self, run: Run, line: Line) -> None:
        """A called client has nothing to send."""
        self._open.empty.add(run.client_of(line).name)

    def stored(self, run: Run, line: Line) -> None:
        """A delta is durable."""
        client = run.client_of(line)
        client.doing = "training"
        stored = line["stored"]
        delta, sent = stored["delta"], int(stored["bytes"])
        self.up.add(self.values, sent)
        client.up.add(self.values, sent)
        client.training.settle(str(delta["key"]))
        if line.get("problem") is None:
            saw_norm(run, client, stored)
        self._tokens_of[str(delta["key"])] = int(delta["tokens"])
        self._round_of[str(delta["key"])] = int(delta.get("round", -1))

    def served(self, run: Run, line: Line) -> None:
        """A version was sent."""
        self.down.add(self.values, int(line["bytes_coded"]))

    def accumulated(self, run: Run, line: Line) -> None:
        """A delta is pending."""
        key = str(line["key"])
        self._pending[key] = self._tokens_of.pop(key, 0)

    def merging(self, run: Run, line: Line) -> None:
        """A version is being made of what is pending."""
        run.node.phase = "merging"
        self._merging = dict(self._pending)
        merged = line.get("merged") or []
        self._norms = norms_of(merged)
        clipped = (_client(one["delta"]["key"]) for one in merged if one.get("clip", 1.0) < 1.0)
        self._clipped = dict(Counter(clipped))

    def commit_failed(self, run: Run, line: Line) -> None:
        """It could not be written."""
        self._merging.clear()

    def adopting(self, run: Run, line: Line) -> None:
        """A version of global weights is being made."""
        self._adopting = [int(line["version"]), int(line["round"])]

    def committed(self, run: Run, line: Line) -> None:
        """A version is durable."""
        self.version, self.digest = int(line["version"]), str(line["digest"])
        run.node.phase = "ready"
        if self._adopting[:1] == [self.version]:
            run.tell("version", f"version {self.version}: global weights {self._adopting[1]}")
            if self.every_s and self.version:
                self.next_sync_at = run.node.last_t + self.every_s
            self._adopting = []
            return
        if self.version == 0:
            self._plan_sync(run.node.last_t)
            text = "version 0, the first client's weights, is here: training starts"
            if self.every_s:
                text += f"; the first sync comes after {self.every_s:g} s"
            run.tell("version", text)
            return
        merged, self._merging = self._merging, {}
        self._count_merged(run, merged)
        stale = [max(0, self.version - 1 - _base(key)) for key in merged]
        self.staleness_mean = statistics.fmean(stale) if stale else None
        self.staleness_max = max(stale, default=None)
        # The machine's own rule: by the clock, but never at once after a round that took too long.
        if self.every_s:
            earliest = run.node.last_t + 0.1 * self.every_s
            self.next_sync_at = max(self.round_called_at + self.every_s, earliest)
        cosine = line.get("cosine")
        if isinstance(cosine, int | float):
            self.cosines.append(float(cosine))
        run.tell("version", f"version {self.version}: {self._merge_words(run, merged)}")
        self._moved(run, line.get("product_norms") or {})
        for name, count in self._clipped.items():
            if (client := run.clients.get(name)) is not None:
                client.deltas_clipped += count
        saw_alike(run, self.alike, map(_client, merged), line.get("alike") or {})
        opposite = str(line.get("opposite") or "")
        self._opposite = [*self._opposite, opposite][-ADVICE_ROUNDS:]
        advice = self._advice()
        if advice:
            run.tell("advice", advice)
        run.repeats_may_be_news()

    def _moved(self, run: Run, norms: Mapping[str, float]) -> None:
        """How far each client has moved the products of adapters."""
        for name, norm in norms.items():
            if (client := run.clients.get(name)) is not None:
                client.product_norm = float(norm)
        far = set(far_movers(norms or self._norms))
        what = "adapters" if norms else "weights"
        for name in sorted(far - self._far):
            text = f"{name} moves the {what} {FAR:g} times as far as the median site or more"
            run.tell("moves far", text, name, "warning")
        self._far = far

    def _advice(self) -> str:
        """A line on clients that train too long between syncs; empty, and at most once a start."""
        recent = list(self.cosines)[-ADVICE_ROUNDS:]
        if self._advised or len(recent) < ADVICE_ROUNDS or statistics.median(recent) > LOW_COSINE:
            return ""
        self._advised = True
        name, rounds = Counter(self._opposite).most_common(1)[0]
        whose = f": {name}'s are opposite to the rest" if name and 2 * rounds > len(recent) else ""
        return (
            f"clients' changes cancel each other (median cosine {statistics.median(recent):.2f}"
            f" over {ADVICE_ROUNDS} rounds){whose}: sync more often, use larger batches or lower"
            " rates, and look whether the sites' data have anything in common"
        )

    def _merge_words(self, run: Run, merged: Mapping[str, int]) -> str:
        """Which clients were merged, their loss, tokens, and the bytes since the version before."""
        rounds = {key: self._round_of.pop(key, -1) for key in merged}
        parts = [self._open.words(rounds, run.clients, self.quorum)]
        again = len(self._again & set(merged))
        if again:
            total = counted(len(merged), "delta")
            parts.append(f"{total} in all, {again:,} of them stored before the restart")
            self._again -= set(merged)
        loss, what = mean(self._loss_of.pop(key, None) for key in merged), "mean over the round"
        if loss is None:  # its deltas carried none
            names = {_client(key) for key in merged}
            known = [one for name, one in run.clients.items() if name in names]
            loss = mean(one.loss for one in known if one.tells_loss and not one.trouble)
            what = "running mean"
            if loss is None and any(one.trouble for one in known):
                parts.append("no finite loss")
        self.loss = loss
        if loss is not None:
            parts.append(f"loss {figure(loss)} ({what})")
        if self.evaluations and self.evaluations[-1].version >= self.version - 2:
            last = self.evaluations[-1]
            parts.append(f"held-out loss {figure(last.loss)} at version {last.version}")
        parts.append(f"{self.tokens:,} {self.counts} (+{sum(merged.values()):,})")
        raw, sent = self.bytes_raw - self._bytes_told[0], self.bytes_sent - self._bytes_told[1]
        self._bytes_told = self.bytes_raw, self.bytes_sent
        if sent:
            parts.append(f"{megabytes(raw)} as {megabytes(sent)} ({raw / sent:.1f}x)")
        return "; ".join(parts)


def _small(value: Any, most: float = MAX_LOSS) -> float | None:
    """The number if it is one from 0 to `most`."""
    is_one = isinstance(value, int | float) and 0 <= value <= most
    return float(value) if is_one else None


def _client(key: str) -> str:
    return key.partition("/")[0]


def _base(key: str) -> int:
    return int(key.rpartition("/")[0].rpartition("/")[2])


def _some(names: Iterable[str]) -> str:
    found = sorted(names)
    more = f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
    return ", ".join(found[:NAMED]) + more


LINES = {
    "recovered": "recovered",
    "version_found": "found",
    "model_attached": "attached",
    "send": "sent",
    "quarantine": "quarantined",
    "release": "released",
    "round_skipped": "skipped",
    "delta_offered": "offered",
    "delta_stored": "stored",
    "version_sent": "served",
    "version_held": "held_by",
    "accumulate": "accumulated",
    "average": "merging",
    "commit_failed": "commit_failed",
    "commit_global": "adopting",
    "version_committed": "committed",
}
"""Type of a line -> the method of ParameterServerFigures that takes it."""
