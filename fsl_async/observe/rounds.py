"""Deltas and versions as the parameter server's journal shows them. Pure."""

import statistics
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from typing import Any

from attrs import field, mutable

from fsl_async.observe.clients import Line, Volume, mean
from fsl_async.observe.evaluations import SHOWN, Evaluation
from fsl_async.observe.odd_clients import FAR, far_movers, norms_of, saw_alike, saw_delta, saw_norm
from fsl_async.observe.open_round import OpenRound, base_of, client_of
from fsl_async.observe.run import Run
from fsl_async.roles.phrasing import counted, figure, megabytes
from fsl_async.roles.sync.delta import EPSILON

LOW_COSINE = -0.1
"""Median cosine of the newest rounds at which averaging takes away what clients train.

Healthy runs begin at 0.25 to 0.7 and end at -0.04 to 0.1 (`quality.py`, rows of 10 to 200 steps).
"""
ADVICE_ROUNDS = 10

MAX_LOSS = 1e6
"""Reported evaluations above it are left out."""


@mutable
class StoredDelta:
    """A delta that is durable, until a version has it."""

    tokens: int = 0
    round: int = -1
    loss: float | None = None
    uncounted: int = 0
    """Its bytes, if the journal of the process that stored it lacks it."""
    is_again: bool = False
    """The last start found it pending."""


def _stored_of(delta: Mapping[str, Any], **others: Any) -> StoredDelta:
    loss = (delta.get("metrics") or {}).get("loss")
    loss = float(loss) if isinstance(loss, int | float) else None
    return StoredDelta(int(delta["tokens"]), int(delta.get("round", -1)), loss, **others)


def _newest(values: Iterable[Any]) -> deque[Any]:
    return deque(values, SHOWN)


@mutable
class ParameterServerFigures:
    """What a parameter server's journal adds up to. Bytes are those of whole transfers."""

    every_s: float = 0.0
    quorum: float = 0.0
    grace: tuple[float, ...] = ()
    """Of the grace window: MADs after the median, least seconds, seconds while none are known."""
    needs: tuple[str, ...] = ()
    """Kinds of data that every client of the run sends (`fsl_async.config.site_policy`)."""
    rules: dict[str, str] = field(factory=dict)
    """The operator's own rules by setting: class, file, and the first digits of its digest."""
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
    evaluations: deque[Evaluation] = field(factory=deque, converter=_newest)
    """Of versions, as a client reported them."""
    cosines: deque[float] = field(factory=deque, converter=_newest)
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
    _stored: dict[str, StoredDelta] = field(factory=dict)
    """By key, deltas that are held back; below, those that are pending."""
    _waiting: dict[str, StoredDelta] = field(factory=dict)
    _merging: list[str] = field(factory=list)
    _adopting: list[int] = field(factory=list)
    """A version of global weights that is being made, and their number; else empty."""
    _far: set[str] = field(factory=set)  # clients that moved weights far in the newest version
    _norms: dict[str, float] = field(factory=dict)  # by client, of the version being made
    _clipped: dict[str, int] = field(factory=dict)  # by client, deltas of that version
    _opposite: list[str] = field(factory=list)
    """For each of the newest versions, the client opposite to the rest, or empty."""
    _advised: bool = False
    _window: OpenRound = field(factory=OpenRound)
    _bytes_told: tuple[int, int] = (0, 0)  # raw, sent

    @property
    def window(self) -> OpenRound:
        """The open round; not a figure of its own."""
        return self._window

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
        return len(self._waiting)

    def start(self, line: Line) -> None:
        """A new process of the parameter server."""
        self.every_s = float(line.get("every_s", 0.0))
        self.quorum = float(line.get("quorum", 0.0))
        grace = line.get("grace")
        self.grace = tuple(map(float, grace)) if isinstance(grace, list) else ()
        needs = line.get("needs")
        self.needs = tuple(map(str, needs)) if isinstance(needs, list) else ()
        self.rules = {
            str(key): f"{one['class']} of {one['file']} (SHA-256 {str(one['sha256'])[:8]})"
            for key, one in line.get("rules", {}).items()
        }
        self.counts = "samples" if line.get("counts") == "samples" else "tokens"
        self.next_sync_at = None
        self._window.restart()

    # --- the journal's lines, by their types; `run` has the clients ---

    def on_delta_offered(self, run: Run, line: Line) -> None:
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
        run.look_for_trouble(client, metrics, may_end="loss" in metrics)
        self._evaluated(metrics)
        warning = saw_delta(client, delta)
        if warning:
            run.tell("labels", warning, client.name, "warning")
        if not client.tells_loss:  # its heartbeats carry running means; this is a round's mean
            client.saw_loss(metrics.get("loss"))

    def _evaluated(self, metrics: Mapping[str, Any]) -> None:
        # A client may report any number: what is no loss of a version of this run is left out.
        loss, bits = _small(metrics.get("eval_loss")), _small(metrics.get("eval_bits_per_byte"))
        version = _small(metrics.get("eval_version"), self.version)
        accuracy = _small(metrics.get("eval_accuracy"), 1.0)
        if loss is not None and version is not None:
            self.evaluations.append(
                Evaluation(int(version), loss, bits_per_byte=bits, accuracy=accuracy)
            )

    def on_version_held(self, run: Run, line: Line) -> None:
        """A client holds a version, and trains from it."""
        client = run.client_of(line)
        client.version = int(line["version"])
        client.doing = "training"
        if client.version == self.version and client.returning:
            client.returning = False
            text = f"{client.name} has caught up: it holds version {client.version}"
            run.tell("caught up", text, client.name)

    def on_recovered(self, run: Run, line: Line) -> None:
        """Version, tokens and pending deltas, as they are on disk."""
        self.version = int(line["version"])
        self.digest = str(line.get("digest", ""))
        self.tokens = int(line.get("tokens_total", 0))
        run.node.phase = "ready" if self.version >= 0 else "waiting"
        self._window.calls_again = True
        self._merging.clear()
        held, pending = line.get("held"), line.get("pending")
        keys = set(self.held)
        if isinstance(held, list):
            keys = {str(entry["delta"]["key"]) for entry in held}
        self.held = {key: self.held.get(key, "held back before the restart") for key in keys}
        if isinstance(pending, list):  # of many the line has only the number
            before, self._waiting = self._waiting, {}
            for entry in pending:
                key = str(entry["delta"]["key"])
                uncounted = 0 if key in before else int(entry.get("bytes", 0))
                self._waiting[key] = _stored_of(entry["delta"], uncounted=uncounted)
        for one in self._waiting.values():
            one.is_again = True
        waited_s = min(max(0.0, float(line.get("since_version_s", 0.0))), self.every_s)
        self._plan_sync(run.node.last_t - waited_s)

    def on_version_found(self, run: Run, line: Line) -> None:
        """A version of a process that was killed after making it and before writing so."""
        version = int(line["version"])
        if not 0 <= self.version < version:
            return
        keys = [str(key) for key in line["merged"]]
        self._take_merged(run, keys)
        words = counted(len(keys), "delta")
        run.tell("version", f"version {version} was made before the restart, of {words}")

    def _take_merged(self, run: Run, keys: Iterable[str]) -> dict[str, StoredDelta]:
        """Count deltas that a version has, which are pending no more."""
        merged = {}
        for key in keys:
            one = merged[key] = self._waiting.pop(key, StoredDelta())
            self.tokens += one.tokens
            self.deltas_merged += 1
            client = run.clients.get(client_of(key))
            if client is not None:
                client.deltas_merged += 1
            if one.uncounted:
                self.up.add(self.values, one.uncounted)
                if client is not None:
                    client.up.add(self.values, one.uncounted)
        return merged

    def _plan_sync(self, begun_at: float) -> None:
        self.next_sync_at = begun_at + self.every_s if self.every_s else None

    def on_model_attached(self, run: Run, line: Line) -> None:
        """The size of the model; the client fetches."""
        client = run.client_of(line)
        if line.get("difference") is None:
            self.values = int(line["values"])
            client.doing = "fetching" if self.version >= 0 else "joining"

    def on_send(self, run: Run, line: Line) -> None:
        """A message to a client: a call, the order to publish, a refused delta."""
        message = line["message"]
        kind = message.get("type")
        peer = str(line["peer"])
        client = run.clients.get(peer)
        if kind in {"call/1", "turn/1"}:
            incarnation = client.incarnation if client is not None else -1
            self._called(run, peer, incarnation, int(message["round"]))
        elif kind == "reject/1":  # its model is another one
            run.refused(peer)
        elif kind == "publish/1" and client is not None:
            client.doing = "publishing"
        elif kind == "accepted/1" and client is not None:
            client.training.settle(str(message["key"]))
        elif kind == "declined/1" and client is not None and message.get("code") != "later":
            client.training.settle(str(message.get("key", "")))
            self._answered(run, peer, self._window.number, contributed=False)
            if message.get("code") == "quarantined":
                client.deltas_quarantined += 1
            else:
                client.deltas_refused += 1

    def _called(self, run: Run, peer: str, incarnation: int, number: int) -> None:
        if not self._window.is_open or self.round != number:
            self.round_called_at = run.node.last_t
        run.node.phase, self.round = "collecting", number
        self.next_sync_at = None
        self._window.call(peer, incarnation, number, run.node.last_t, self.every_s)
        self._window.evaluate(self.quorum, self.grace, run.node.last_t)

    def _answered(self, run: Run, peer: str, number: int, *, contributed: bool) -> None:
        now = run.node.last_t
        self._window.answer(peer, now, number=number, contributed=contributed)
        self._window.evaluate(self.quorum, self.grace, now)

    def on_client_hello(self, run: Run, line: Line) -> None:
        """A session begins: its client is expected again, if it was called as this process."""
        self._window.arrived(str(line["peer"]), int(line["incarnation"]))
        self._window.evaluate(self.quorum, self.grace, run.node.last_t)

    def on_client_left(self, run: Run, line: Line) -> None:
        """A session ended: its client is expected no more."""
        name = str(line["peer"])
        client = run.clients.get(name)
        is_gone = client is None or not client.connected
        self._window.left(name, int(line["incarnation"]), is_gone=is_gone)
        self._window.evaluate(self.quorum, self.grace, run.node.last_t)

    def on_quarantine(self, run: Run, line: Line) -> None:
        """A delta is held back. One that is kept out for good is declined and counted there."""
        key = str(line["key"])
        stored = self._waiting.pop(key, StoredDelta())
        if line.get("held"):
            self.held[key], self._stored[key] = str(line["reason"]), stored

    def on_release(self, run: Run, line: Line) -> None:
        """A delta is held back no longer."""
        key = str(line["key"])
        self.held.pop(key, None)
        self._waiting[key] = self._stored.pop(key, StoredDelta())

    def noted(self, run: Run, line: Line) -> bool:
        """A note about rounds or damage; whether that is all that there is to tell of it."""
        text, facts = str(line.get("text", "")), line.get("facts") or {}
        if "called" in facts:
            self.called += int(facts["called"])
            self.answered += int(facts["answered"])
            self.called_alive += len(self._window.alive(run.clients))
            return True
        if " closes without a new version" in text:
            run.node.phase = "ready"
            self._window.close()
            self._plan_sync(self.round_called_at)
        if "alarm" in facts:
            self.alarms += facts["alarm"] != "verdict"
            self.alarm = text
            self.gone = max(self.gone, int(facts.get("gone", 0)))
            level = str(line.get("level", "info"))
            run.tell("alarm", text, str(facts.get("client", "")), level=level)
            return True
        return False

    def on_round_skipped(self, run: Run, line: Line) -> None:
        """A called client has nothing to send."""
        name = run.client_of(line).name
        self._answered(run, name, self._window.number, contributed=False)

    def on_delta_stored(self, run: Run, line: Line) -> None:
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
            self._waiting[str(delta["key"])] = _stored_of(delta)
        number, is_good = int(delta.get("round", -1)), line.get("problem") is None
        self._answered(run, client.name, number, contributed=is_good)

    def on_version_sent(self, run: Run, line: Line) -> None:
        """A version was sent."""
        self.down.add(self.values, int(line["bytes_coded"]))

    def on_commit(self, run: Run, line: Line) -> None:
        """A version is being made of what is pending."""
        run.node.phase = "merging"
        self._merging = list(self._waiting)
        merged = line.get("merged")
        merged = merged if isinstance(merged, list) else []  # a large one is a count
        self._norms = norms_of(merged)
        clipped = (client_of(one["delta"]["key"]) for one in merged if one.get("clip", 1.0) < 1.0)
        self._clipped = dict(Counter(clipped))

    def on_commit_failed(self, run: Run, line: Line) -> None:
        """It could not be written."""
        self._merging.clear()

    def on_commit_global(self, run: Run, line: Line) -> None:
        """A version of global weights is being made."""
        self._adopting = [int(line["version"]), int(line["round"])]

    def on_version_committed(self, run: Run, line: Line) -> None:
        """A version is durable."""
        self.version, self.digest = int(line["version"]), str(line["digest"])
        run.node.phase = "ready"
        if self._adopting[:1] == [self.version]:
            self._window.commit(0)
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
        merged = self._take_merged(run, self._merging)
        self._merging = []
        self._window.commit(len(merged), mean(one.loss for one in merged.values()))
        stale = [max(0, self.version - 1 - base_of(key)) for key in merged]
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
        saw_alike(run, self.alike, map(client_of, merged), line.get("alike") or {})
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

    def _merge_words(self, run: Run, merged: Mapping[str, StoredDelta]) -> str:
        """Which clients were merged, their loss, tokens, and the bytes since the version before."""
        rounds = {key: one.round for key, one in merged.items()}
        parts = [self._window.words(rounds, run.clients, self.quorum)]
        again = sum(one.is_again for one in merged.values())
        if again:
            total = counted(len(merged), "delta")
            parts.append(f"{total} in all, {again:,} of them stored before the restart")
        loss, what = self._window.loss, "mean over the round"
        if loss is None:  # its deltas carried none
            names = set(map(client_of, merged))
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
        gained = sum(one.tokens for one in merged.values())
        parts.append(f"{self.tokens:,} {self.counts} (+{gained:,})")
        raw, sent = self.bytes_raw - self._bytes_told[0], self.bytes_sent - self._bytes_told[1]
        self._bytes_told = self.bytes_raw, self.bytes_sent
        if sent:
            parts.append(f"{megabytes(raw)} as {megabytes(sent)} ({raw / sent:.1f}x)")
        return "; ".join(parts)


def _small(value: Any, most: float = MAX_LOSS) -> float | None:
    """The number if it is one from 0 to `most`."""
    is_one = isinstance(value, int | float) and 0 <= value <= most
    return float(value) if is_one else None
