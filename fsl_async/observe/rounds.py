"""Rounds, deltas and versions as the parameter server's journal shows them. Pure.

Also what sets clients apart. Clients whose training brings the run nothing have deltas of norm 0,
or deltas alike. Both are told when they have lasted some rounds, and again only after they have
ceased. Ranks and orders come with every delta, shares of labels where a site allows metrics, norms
of products from the parameter server's merge.
"""

from __future__ import annotations

import statistics
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from typing import Any

from attrs import field, mutable

from fsl_async.observe.clients import ClientState, Line, NodeAndClients, Volume, mean
from fsl_async.observe.evaluations import SHOWN, Evaluation
from fsl_async.observe.segments import restored
from fsl_async.roles.client_facts import ClientFact
from fsl_async.roles.phrasing import counted, figure, megabytes
from fsl_async.roles.sync.delta import EPSILON, UNSENT
from fsl_async.roles.sync.facts import RoundFact, VersionFact
from fsl_async.roles.sync.training_trouble import ALARM_AFTER, CAUSES

LOW_COSINE = -0.1
"""Median cosine of the newest rounds at which averaging takes away what clients train.

Healthy runs begin at 0.25 to 0.7 and end at -0.04 to 0.1 (`quality.py`, rows of 10 to 200 steps).
"""
ADVICE_ROUNDS = 10
NAMED = 5
"""More names than these are a number."""

MAX_LOSS = 1e6
"""Reported evaluations above it are left out."""


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
    secure: bool = False
    """Whether deltas are masked, and their sum alone is read."""
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
    _far: set[str] = field(factory=set)  # clients that moved weights far in the newest version
    _opposite: list[str] = field(factory=list)
    """For each of the newest versions, the client opposite to the rest, or empty."""
    _advised: bool = False
    _window: RoundFact = field(factory=RoundFact)
    _clock: float = 0.0  # seconds from the process's clock to that of the lines
    _newest: VersionFact | None = None
    _bytes_told: tuple[int, int] = (0, 0)  # raw, sent

    @property
    def newest(self) -> VersionFact | None:
        """The newest version that this journal has the making of."""
        return self._newest

    @property
    def late(self) -> tuple[str, ...]:
        """Connected clients without an answer since a round that merged without them."""
        return self._window.late

    def window(self) -> dict[str, Any]:
        """Return the open round as plain values; times in seconds since 1970."""
        now = self._window
        names = ("number", "called", "answered", "waiting", "waited_for", "late")
        times = ("called_at", "quorum_at", "closes_at")
        return {
            "open": now.is_open,
            **{name: getattr(now, name) for name in names},
            **{name: self._time(getattr(now, name)) for name in times},
        }

    def _time(self, moment: float | None) -> float | None:
        return None if moment is None else self._clock + moment

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
        return self._window.pending

    def start(self, line: Line) -> None:
        """A new process of the parameter server."""
        self.every_s = float(line.get("every_s", 0.0))
        self.quorum = float(line.get("quorum", 0.0))
        self.grace = tuple(map(float, line.get("grace", ())))
        self.needs = tuple(map(str, line.get("needs", ())))
        self.rules = {
            str(key): f"{one['class']} of {one['file']} (SHA-256 {str(one['sha256'])[:8]})"
            for key, one in line.get("rules", {}).items()
        }
        self.secure = line.get("secure") is True
        self.counts = "samples" if line.get("counts") == "samples" else "tokens"
        self.end()

    def end(self) -> None:
        """The process begins or ends: it has no open round."""
        self.next_sync_at = None
        self._window = RoundFact(pending=self.pending, number=self._window.number)

    # --- the journal's lines, by their types; `run` has the clients ---

    def _on_delta_meta(self, run: NodeAndClients, line: Line) -> None:
        """A delta is offered. A client may end between two heartbeats: deltas count its work too.

        Steps without a delta are in heartbeats only.
        """
        client, delta = run.client_of(line), line["delta"]
        key = str(delta["key"])
        sequence = int(key.rpartition("/")[2])
        if sequence <= client.sequence_offered:  # offered again after a loss
            return
        client.offered(key, sequence, steps=int(delta["steps"]), tokens=int(delta["tokens"]))
        facts = delta.get("facts") or {}
        epsilon, unsent = _small(facts.get(EPSILON)), _small(facts.get(UNSENT))
        client.epsilon = client.epsilon if epsilon is None else epsilon
        if unsent is not None and saw_unsent(client, unsent):
            run.tell("unsent", unsent_words(client), client.name, "warning")
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

    def _on_version_found(self, run: NodeAndClients, line: Line) -> None:
        version = int(line["version"])
        if not 0 <= self.version < version:
            return
        keys = [str(key) for key in line["merged"]]
        self._count(run, Counter(key.partition("/")[0] for key in keys))
        words = counted(len(keys), "delta")
        run.tell("version", f"version {version} was made before the restart, of {words}")

    def _count(self, run: NodeAndClients, deltas: Mapping[str, int]) -> None:
        """Count deltas that a version has."""
        self.deltas_merged += sum(deltas.values())
        for name, count in deltas.items():
            if (client := run.clients.get(name)) is not None:
                client.deltas_merged += count

    def _on_model_attached(self, run: NodeAndClients, line: Line) -> None:
        if line.get("difference") is None:
            self.values = int(line["values"])

    def settled(self, run: NodeAndClients, fact: ClientFact) -> None:
        """A delta has an outcome."""
        self.held.pop(fact.key, None)
        if fact.outcome == "held":
            self.held[fact.key] = fact.why
        client = run.clients.get(fact.peer)
        if client is None or fact.outcome in {"held", "released"}:
            return
        client.training.settle(fact.key)
        client.deltas_quarantined += fact.outcome == "quarantined"
        client.deltas_refused += fact.outcome not in {"accepted", "quarantined"}

    def noted(self, run: NodeAndClients, line: Line) -> bool:
        """A note about a round or damage; whether that is all that there is to tell of it."""
        text, facts = str(line.get("text", "")), line.get("facts") or {}
        if "called" in facts:
            return True
        if "alarm" in facts:
            self.alarms += facts["alarm"] != "verdict"
            self.alarm = text
            self.gone = max(self.gone, int(facts.get("gone", 0)))
            level = str(line.get("level", "info"))
            run.tell("alarm", text, str(facts.get("client", "")), level=level)
            return True
        return False

    def _on_delta_stored(self, run: NodeAndClients, line: Line) -> None:
        client, stored = run.client_of(line), line["stored"]
        for volume in (self.up, client.up):
            volume.add(self.values, int(stored["bytes"]))
        client.training.settle(str(stored["delta"]["key"]))
        if line.get("problem") is None:
            saw_norm(run, client, stored)

    def _on_version_sent(self, run: NodeAndClients, line: Line) -> None:
        self.down.add(self.values, int(line["bytes_coded"]))

    def _on_round(self, run: NodeAndClients, line: Line) -> None:
        self._window = now = restored(RoundFact, line)
        self._clock = run.node.last_t - float(line["now"])
        run.node.phase, self.round = now.phase, now.number
        self.next_sync_at = self._time(now.next_at)
        self.round_called_at = self._time(now.called_at) or self.round_called_at

    def _on_version(self, run: NodeAndClients, line: Line) -> None:
        made = restored(VersionFact, line)
        self.version, self.digest, self.tokens = made.version, made.digest, made.tokens
        if made.made_of == "disk":
            self.held = {key: self.held.get(key, "held back before the restart")
                         for key in made.held}  # fmt: skip
            return
        self._newest = made
        if made.made_of != "deltas":
            run.tell("version", f"version {made.version}: global weights {made.global_round}")
            return
        if made.version == 0:
            text = "version 0, the first client's weights, is here: training starts"
            if self.every_s:
                text += f"; the first sync comes after {self.every_s:g} s"
            run.tell("version", text)
            return
        self._count(run, made.deltas)
        self.called += made.called
        self.answered += made.answered
        self.called_alive += made.alive
        self.staleness_mean, self.staleness_max = made.staleness_mean, made.staleness_max
        if made.cosine is not None:
            self.cosines.append(made.cosine)
        run.tell("version", f"version {made.version}: {self._merge_words(run, made)}")
        self._moved(run, made)
        saw_alike(run, self.alike, made.deltas, made.alike)
        self._opposite = [*self._opposite, made.opposite][-ADVICE_ROUNDS:]
        advice = self._advice()
        if advice:
            run.tell("advice", advice)
        run.repeats_may_be_news()

    def _moved(self, run: NodeAndClients, made: VersionFact) -> None:
        """How far each client has moved weights, or products of adapters, and how much counts."""
        for name, norm in made.product_norms.items():
            if (client := run.clients.get(name)) is not None:
                client.product_norm = norm
        far = set(far_movers(made.product_norms or made.norms))
        what = "adapters" if made.product_norms else "weights"
        for name in sorted(far - self._far):
            text = f"{name} moves the {what} {FAR:g} times as far as the median site or more"
            run.tell("moves far", text, name, "warning")
        self._far = far
        for name, count in made.clipped.items():
            if (client := run.clients.get(name)) is not None:
                client.deltas_clipped += count
        for name, is_refused in made.scored.items():
            client = run.clients.get(name)
            if client is not None and (line := client.saw_score(is_refused=is_refused)):
                run.tell("refused", line, name, "warning")

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

    def _merge_words(self, run: NodeAndClients, made: VersionFact) -> str:
        """Which clients were merged, their loss, tokens, and the bytes since the version before."""
        parts = [_round_words(made)]
        if made.before:
            total = counted(sum(made.deltas.values()), "delta")
            parts.append(f"{total} in all, {made.before:,} of them stored before the restart")
        loss, what = made.loss, "mean over the round"
        if loss is None:  # its deltas carried none
            known = [one for name, one in run.clients.items() if name in made.deltas]
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
        parts.append(f"{self.tokens:,} {self.counts} (+{made.gained:,})")
        raw, sent = self.bytes_raw - self._bytes_told[0], self.bytes_sent - self._bytes_told[1]
        self._bytes_told = self.bytes_raw, self.bytes_sent
        if sent:
            parts.append(f"{megabytes(raw)} as {megabytes(sent)} ({raw / sent:.1f}x)")
        return "; ".join(parts)


def _round_words(made: VersionFact) -> str:
    """Which of the called clients are in a version, and which are not."""
    if not made.asked:  # clients sent by themselves
        deltas = counted(sum(made.deltas.values()), "delta")
        return f"{deltas} merged, from {_some(made.deltas)}"
    words = f"{made.in_time} of {counted(made.asked, 'called client')} merged"
    words += f" ({made.needed} needed)"
    absent = {"late": made.late, "nothing to merge from": made.nothing, "left": made.left}
    words += "".join(f", {what}: {_some(names)}" for what, names in absent.items() if names)
    if made.earlier:
        earlier = counted(made.earlier, "delta")
        words += f", and {earlier} of earlier rounds, from {_some(made.earlier_of)}"
    return words


def _some(names: Iterable[str]) -> str:
    found = sorted(names)
    more = f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
    return ", ".join(found[:NAMED]) + more


def _small(value: Any, most: float = MAX_LOSS) -> float | None:
    """The number if it is one from 0 to `most`."""
    is_one = isinstance(value, int | float) and 0 <= value <= most
    return float(value) if is_one else None


ALIKE_ROUNDS = 3
"""Rounds in a row in which two clients' deltas are alike (`fsl_async.store.deltas.spool`)."""
MOST_PAIRS = 4096
_SHOWN = 4
SHARE = "share_"
"""A metric's name begins with it; the name of a label follows."""
ONE_CLASS = 0.95
"""Share of one label from which a site counts as one of a single class."""
GROWS, MOST_KEPT = 10, 0.8
"""Deltas in a row with which the share that is kept back grows, until people are told."""
FAR = 3.0
"""A site that moves weights or products this many times as far as the median is named."""
MEASURED = ("accuracy", "eval_accuracy", "reward", "eval_reward", "kl", "flat")
"""Metrics of fine-tuning that a site's line shows; of two with a name the held-out one counts."""
MOST_LABELS = 16
_FACTS = ("rank", "order")


# --- training that brings nothing ---


def saw_norm(run: NodeAndClients, client: ClientState, stored: Mapping[str, Any]) -> None:
    """Count a stored delta. stored: as in the journal's line delta_stored."""
    if not stored["delta"].get("steps"):
        return
    was_told = client.unmoved >= ALARM_AFTER
    client.unmoved = client.unmoved + 1 if stored.get("norm") == 0 else 0
    if client.unmoved == ALARM_AFTER:
        run.tell("does not move", unmoved_words(client), client.name, "warning")
    elif was_told and not client.unmoved:
        run.tell("moves again", f"{client.name} changes weights again", client.name)


def unmoved_words(client: ClientState) -> str:
    """A line about a client that changes nothing."""
    return (
        f"{client.name} trains, but its last {client.unmoved} deltas change no weight, and do not"
        f" count: {CAUSES}"
    )


def saw_alike(
    run: NodeAndClients, counts: dict[str, int], clients: Iterable[str], found: Mapping[str, Any]
) -> None:
    """Count the pairs of a version.

    counts: pair -> rounds in a row; changed in place. clients: whose deltas it merged. found: pair
    -> cosine, of those alike.
    """
    here = set(clients)
    for pair in [pair for pair in counts if pair not in found and here >= set(pair.split("/"))]:
        del counts[pair]
    for pair in list(found)[:MOST_PAIRS]:
        counts[pair] = min(counts.get(pair, 0), ALIKE_ROUNDS) + 1
    for text in _alike_words(pair for pair in found if counts.get(pair) == ALIKE_ROUNDS):
        run.tell("alike", text, level="warning")


def idle_lines(clients: Iterable[ClientState], counts: Mapping[str, int]) -> list[str]:
    """Lines about all of them that are told and have not ceased."""
    still = [unmoved_words(one) for one in clients if one.unmoved >= ALARM_AFTER]
    still += [unsent_words(one) for one in clients if one.unsent_grew >= GROWS]
    return still + _alike_words(pair for pair, rounds in counts.items() if rounds >= ALIKE_ROUNDS)


def _alike_words(pairs: Iterable[str]) -> list[str]:
    """A line for each group of clients that train the same."""
    groups: list[set[str]] = []
    for pair in pairs:
        names = set(pair.split("/"))
        names |= set().union(*(one for one in groups if one & names))
        groups = [*(one for one in groups if not one & names), names]
    return [_words(sorted(names)) for names in groups]


def _words(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return (
        f"{', '.join(names[:_SHOWN])}{more} send almost the same deltas, as clients do that train"
        " the same batches: take the data through fed.shard, and seed by fed.part or the client's"
        " name"
    )


# --- what coding keeps back ---


def saw_unsent(client: ClientState, share: float) -> bool:
    """Keep the share of a delta that was not sent; return whether it has grown, or been most of the
    delta, for too long.
    """
    grows = share >= MOST_KEPT or (client.unsent is not None and share > client.unsent)
    client.unsent, client.unsent_grew = share, client.unsent_grew + 1 if grows else 0
    return client.unsent_grew == GROWS


def unsent_words(client: ClientState) -> str:
    """A line about a client that keeps back more and more."""
    return (
        f"{client.name} keeps back more with each delta, or most of it, {client.unsent_grew} times"
        f" in a row, now {client.unsent or 0.0:.0%} of its norm: codec.up = uniform with a smaller"
        " codec.up_step sends more at once"
    )


# --- ranks, labels and movement ---


def saw_delta(client: ClientState, delta: Mapping[str, Any]) -> str:
    """Keep the figures of a delta. Return a warning once per client process, or ""."""
    facts, metrics = delta.get("facts") or {}, delta.get("metrics") or {}
    for name in _FACTS:
        value = facts.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            client.facts[name] = float(value)
    shares = {
        str(name).removeprefix(SHARE): float(value)
        for name, value in metrics.items()
        if str(name).startswith(SHARE) and isinstance(value, int | float)
    }
    for name in MEASURED:
        if (value := _small(metrics.get(name))) is not None:
            client.measured[name.removeprefix("eval_")] = value
    was_known = bool(client.label_shares)
    client.label_shares = dict(list(shares.items())[:MOST_LABELS]) or client.label_shares
    label, share = max(client.label_shares.items(), key=lambda each: each[1], default=("", 0.0))
    if share < ONE_CLASS or was_known:
        return ""
    return (
        f"{client.name} has {share:.0%} {label} among its records: sites of one class pull a"
        " classifier apart (docs/TUNING.md, Ranks and labels)"
    )


def far_movers(norms: Mapping[str, float]) -> list[str]:
    """The clients that change weights, or products, much further than the median."""
    if len(norms) < 3:
        return []
    usual = statistics.median(norms.values())
    return [name for name, norm in sorted(norms.items()) if usual and norm > FAR * usual]


def site_lines(clients: Iterable[ClientState]) -> list[str]:
    """A line for each client that reported anything of this."""
    return [f"{client.name}: {words}" for client in clients if (words := _site_words(client))]


def _site_words(client: ClientState) -> str:
    parts = []
    if "rank" in client.facts:
        parts.append(f"rank {client.facts['rank']:.0f}")
    if client.facts.get("order") == 0:
        parts.append("zeroth order")
    if client.product_norm is not None:
        parts.append(f"moves products by {client.product_norm:.3g}")
    if client.deltas_clipped:
        parts.append(f"{counted(client.deltas_clipped, 'delta')} counted as shorter")
    if client.scored:
        parts.append(f"used in {client.scored - client.refused} of {client.scored} scored rounds")
    if client.is_often_refused:
        parts.append("often refused of late")
    parts += [f"{name} {figure(value, 2)}" for name, value in client.measured.items()]
    parts += [f"{share:.0%} {label}" for label, share in client.label_shares.items()]
    return ", ".join(parts)
