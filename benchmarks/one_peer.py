"""Measures how far one attacker of five clients gets, by aggregation rule and guard.

    python benchmarks/one_peer.py                   all rows (under 3 minutes on two cores)
    python benchmarks/one_peer.py --only "flood*/*" rows whose attack/rule is like this
    python benchmarks/one_peer.py > rows.jsonl; python benchmarks/one_peer.py --docs rows.jsonl
        write the tables of docs/SECURITY.md from the rows (--table: print them)

Real: `fsl-node --role ps` in its own process, and five clients in this one with their sessions,
streams, codec and decisions (`sync_clients.py`). They train a network of 1,097 weights on five
classes of points, 16 rounds (`sync.trigger = rounds`) of 10 steps of SGD; all else is a default
unless RULES or ATTACKS set it. Client 2 attacks: it answers each call first, and with as many
deltas as the attack has. The others answer when all of those are settled. Chance is 0.2.

    x 1e6               its own delta, times a million
    values of 1e18      random signs
    sign flip, x -10    its delta negated; and times -10
    flood, tiny         36 deltas a version, of a thousandth of its own
    flood, growing      36 deltas a version: its own negated, times 3 to the version
    first round x 1e6   honest afterwards
    10^12 tokens        its delta negated, with that claim, in a run that ends by run.tokens
    10 x tokens         its delta negated, with a claim of ten times its tokens
    10^12 steps         its delta times a million, with that claim, weighed by tokens
    x -6, lies about    its delta negated and as long as four times the steps allow, claimed with
    work                ten times the tokens a step
    one label each      no attack, but each site has one of the five labels, weighed by tokens
    balance lie         there, the attacker claims a balance of 1 and negates its delta

Columns: held-out accuracy at the end; `moved`, the distance from version 0; `share`, the most that
the attacker had of a version's weights in a mean; honest deltas clipped (their weight in the ledger
is below that of their work); deltas quarantined, honest and hostile; warnings of the parameter
server by kind, numbers left out. "stuck": no version for PATIENCE_S seconds. `settings`: a digest
of the whole configuration, defaults included.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import multiprocessing
import re
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import attrs
import click
import numpy as np
from attrs import frozen
from node_process import serving
from numpy.typing import NDArray
from sync_clients import Crowd, LightClient, LightLearner, SharedModel
from under_attack import drain

from fsl_async.config.load import load
from fsl_async.observe.ledger_audit import LEDGER, read_ledger
from fsl_async.roles.machine import SERVER, Received
from fsl_async.roles.sync import events as ev
from fsl_async.roles.sync import messages as msg
from fsl_async.roles.sync.delta import BALANCE
from fsl_async.roles.sync.weighting import LEAST_BALANCE
from fsl_async.store.model.manifest import Manifest
from fsl_codecs import CodecSpec, encode
from fsl_transport.loop import run as run_loop

Vector = NDArray[np.float32]

CLIENTS, LIAR, ROUNDS, STEPS, BATCH = 5, 2, 16, 10, 32
INPUTS, HIDDEN, CLASSES, CLUSTERS = 20, 42, 5, 4
POINTS, HELD_OUT, NOISE, RATE = 4000, 2000, 1.0, 0.4
FLOOD = 36
LIAR_NAME = f"client-{LIAR:02}/"
PATIENCE_S = 15.0
DOCS = Path(__file__).parents[1] / "docs" / "SECURITY.md"
MARKS = ("<!-- one_peer.py --docs -->\n", "<!-- end -->\n")
SHAPES = ((INPUTS, HIDDEN), (HIDDEN,), (HIDDEN, CLASSES), (CLASSES,))

OFF = {"guard.clip_median": 0, "guard.max_tokens_median": 0, "guard.max_share": 0}
GUARDED = "mean, by default"
RULES: dict[str, dict[str, Any]] = {
    "mean, guards off": OFF,
    GUARDED: {},
    "trimmed": {"outer.aggregation": "trimmed"},
    "median": {"outer.aggregation": "median"},
    "multi-krum": {"outer.aggregation": "multi-krum"},
}


@frozen
class Attack:
    """A way to attack. times: the factor of the attacker's own delta at a version.

    deltas: in a round. tokens, steps: claimed; 0: the truth. claims: the balance it claims, where
    sites have one label each. sets: settings of the run; a robust rule goes without its weighting.
    """

    times: Callable[[int], float] = lambda _: 1.0
    value: float = 0.0
    deltas: int = 1
    tokens: int = 0
    steps: int = 0
    one_label: bool = False
    claims: float = 0.0
    sets: Mapping[str, Any] = {}


_BY_TOKENS = {"sync.weighting": "tokens"}
ATTACKS = {
    "none": Attack(),
    "x 1e6": Attack(lambda _: 1e6),
    "values of 1e18": Attack(value=1e18),
    "sign flip": Attack(lambda _: -1.0),
    "x -10": Attack(lambda _: -10.0),
    "flood, tiny": Attack(lambda _: 1e-3, deltas=FLOOD),
    "flood, growing": Attack(lambda version: -(3.0**version), deltas=FLOOD),
    "first round x 1e6": Attack(lambda version: 1.0 if version else 1e6),
    "10^12 tokens": Attack(
        lambda _: -1.0, tokens=10**12, sets={"run.tokens": 3 * ROUNDS * CLIENTS * STEPS * BATCH}
    ),
    "10 x tokens": Attack(lambda _: -1.0, tokens=10 * STEPS * BATCH),
    "10^12 steps": Attack(lambda _: 1e6, steps=10**12, sets=_BY_TOKENS),
    "x -6, lies about work": Attack(lambda _: -6.0, tokens=40 * STEPS * BATCH, steps=4 * STEPS),
    "one label each": Attack(one_label=True, sets=_BY_TOKENS),
    "balance lie": Attack(lambda _: -1.0, one_label=True, claims=1.0, sets=_BY_TOKENS),
}


class Problem:
    """Points of CLASSES classes, each of CLUSTERS clusters, and a network of one hidden layer."""

    def __init__(self) -> None:
        rng = np.random.default_rng(1)
        self._centers = rng.standard_normal((CLASSES * CLUSTERS, INPUTS))
        self.points, self.labels = self._draw(rng, POINTS)
        self.held_out = self._draw(rng, HELD_OUT)
        parts = [rng.standard_normal(shape) / np.sqrt(shape[0]) for shape in SHAPES]
        self.initial = np.concatenate([part.ravel() for part in parts]).astype(np.float32)

    def _draw(self, rng: np.random.Generator, count: int) -> tuple[Any, Any]:
        clusters = rng.integers(0, len(self._centers), count)
        points = self._centers[clusters] + NOISE * rng.standard_normal((count, INPUTS))
        return points, clusters % CLASSES

    def train(self, weights: Vector, client: int, version: int, *, one_label: bool) -> Vector:
        """The delta after STEPS steps of SGD from `weights`; may be not finite."""
        mine = np.arange(client, POINTS, CLIENTS)
        if one_label:
            mine = np.flatnonzero(self.labels == client)
        rng = np.random.default_rng((client, version))
        moved = weights.astype(np.float64)
        with np.errstate(all="ignore"):
            for _ in range(STEPS):
                drawn = rng.choice(mine, BATCH)
                moved -= RATE * self._gradient(moved, self.points[drawn], self.labels[drawn])
            return np.asarray(weights - moved, np.float32)

    def accuracy(self, weights: Vector) -> float:
        """Share of held-out points."""
        points, labels = self.held_out
        with np.errstate(all="ignore"):
            *_, logits = self._forward(weights.astype(np.float64), points)
        return float((logits.argmax(1) == labels).mean())

    def _forward(self, weights: Any, points: Any) -> tuple[Any, Any, Any]:
        edges = np.cumsum([np.prod(shape) for shape in SHAPES])[:-1]
        parts = np.split(weights, edges)
        first, bias, second, last = (one.reshape(s) for one, s in zip(parts, SHAPES, strict=True))
        hidden = np.tanh(points @ first + bias)
        return second, hidden, hidden @ second + last

    def _gradient(self, weights: Any, points: Any, labels: Any) -> Any:
        second, hidden, logits = self._forward(weights, points)
        odds = np.exp(logits - logits.max(1, keepdims=True))
        error = odds / odds.sum(1, keepdims=True)
        error[np.arange(len(labels)), labels] -= 1
        error /= len(labels)
        below = (error @ second.T) * (1 - hidden**2)
        parts = (points.T @ below, below.sum(0), hidden.T @ error, error.sum(0))
        return np.concatenate([part.ravel() for part in parts])


class AskedLearner(LightLearner):
    """A learner whose rounds wait for `play`, which gives it its delta."""

    asked: tuple[int, int] | None = None
    """Sequence number and round of the delta that is due."""
    sent: Vector

    def begin_round(self, sequence: int, number: int) -> None:
        """Wait for the delta."""
        self.asked = sequence, number
        self._client.changed()

    def encode_delta(self, sequence: int, index: int) -> bytes:
        """Code what was given; the network is one chunk."""
        return encode(self.sent, self._model.spec)


def answer(
    client: LightClient, sent: Vector, work: tuple[int, int], facts: Mapping[str, float]
) -> None:
    """Let a client send this as the delta of its round; nothing where it is not finite.

    work: tokens and steps.
    """
    learner: Any = client.learner
    (sequence, number), learner.asked = learner.asked, None
    learner.sent = sent
    done = work if np.isfinite(sent).all() else (0, 0)
    client.feed_soon(ev.Snapshotted(sequence, number, *done, facts=dict(facts)))


class Run:
    """A run's clients and their rounds."""

    def __init__(self, crowd: Crowd, problem: Problem, attack: Attack) -> None:
        self._crowd, self._problem, self._attack = crowd, problem, attack
        self._liar = crowd.clients[LIAR]

    async def play(self) -> str:
        """Train to the end. Returns "ended" or "stuck"."""
        clients = self._crowd.clients
        for version in range(ROUNDS):
            if not await self._until(lambda: all(self._asked(one) for one in clients)):
                return "stuck"
            if self._is_over:
                return "ended"
            await self._round(version)
        # The run ends once all hold its last version.
        return "ended" if await self._until(lambda: self._is_over) else "stuck"

    @staticmethod
    def _asked(client: LightClient) -> bool:
        learner: Any = client.learner
        return learner.asked is not None

    @property
    def _is_over(self) -> bool:
        return any(one.machine.shutdown.asked for one in self._crowd.clients)

    async def _round(self, version: int) -> None:
        attack, weights = self._attack, self._crowd.model.base.copy()
        one_label, work = attack.one_label, (STEPS * BATCH, STEPS)
        claimed = attack.tokens or work[0], attack.steps or work[1]
        own = [
            self._problem.train(weights, index, version, one_label=one_label)
            for index in range(CLIENTS)
        ]
        facts = {BALANCE: 0.0} if one_label else {}
        hostile = {BALANCE: attack.claims} if one_label else {}
        for number in range(attack.deltas):
            if number:
                self._liar.feed_soon(Received(SERVER, msg.Turn(version)))
                if not await self._until(lambda: self._asked(self._liar)):
                    break
            sent = own[LIAR] * np.float32(attack.times(version))
            if attack.value:
                sent = np.where(sent < 0, -1, 1).astype(np.float32) * np.float32(attack.value)
            answer(self._liar, sent, claimed, hostile)
            await asyncio.sleep(0)
            await self._until(lambda: self._liar.machine.delta is None)
        for index, client in enumerate(self._crowd.clients):
            if index != LIAR:
                answer(client, own[index], work, facts)

    async def _until(self, true: Callable[[], bool]) -> bool:
        """Wait until it holds or the run is over; False after PATIENCE_S."""
        limit = time.monotonic() + PATIENCE_S
        while not (true() or self._is_over):
            if time.monotonic() > limit:
                return False
            await asyncio.sleep(0.003)
        return True


def settings_of(attack: str, rule: str) -> dict[str, Any]:
    """The settings of a row."""
    sets = dict(ATTACKS[attack].sets)
    if "outer.aggregation" in RULES[rule]:
        sets.pop("sync.weighting", None)
    return {
        "run.name": "one-peer",
        "run.rounds": ROUNDS,
        "sync.trigger": "rounds",
        "sync.clients": CLIENTS,
        "sync.min_clients": CLIENTS,
        **sets,
        **RULES[rule],
    }


def digest_of(settings: Mapping[str, Any]) -> str:
    """8 hexadecimal characters over the whole configuration, defaults included."""
    config = load(None, [f"{name}={json.dumps(value)}" for name, value in settings.items()])
    text = json.dumps(attrs.asdict(config), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def kinds(journal: Path) -> dict[str, int]:
    """Count the parameter server's warnings, by their text without names and numbers."""
    lines = (json.loads(line) for line in journal.read_text().splitlines())
    texts = [str(line.get("text", "")) for line in lines if line.get("level") == "warning"]
    short = (re.sub(r"client-\S+", "CLIENT", text) for text in texts)
    return dict(Counter(re.sub(r"-?\d[\d.,e+]*", "#", text)[:160] for text in short))


def measure(attack_name: str, rule: str) -> dict[str, Any]:
    """One row."""
    attack, problem, begun = ATTACKS[attack_name], Problem(), time.monotonic()
    settings = settings_of(attack_name, rule)
    spec = CodecSpec(format="uniform")
    manifest = Manifest.from_shapes([(f"w{n}", shape) for n, shape in enumerate(SHAPES)])

    async def play(address: str) -> tuple[str, Vector]:
        model = SharedModel(manifest, spec)
        model.base[:] = problem.initial
        crowd = Crowd(model, address, CLIENTS, 0.0, AskedLearner)
        try:
            await crowd.start()
            end = await Run(crowd, problem, attack).play()
            return end, model.base.copy()
        finally:
            await crowd.close()

    with tempfile.TemporaryDirectory(prefix="one-peer-") as folder:
        run_dir = Path(folder, "run")
        with serving(run_dir, settings) as server:
            threading.Thread(target=drain, args=(server,), daemon=True).start()
            end, weights = run_loop(play(server.address))
        facts = read_ledger(run_dir / LEDGER)[0]
        warnings = kinds(run_dir / "journal.jsonl")
    with np.errstate(all="ignore"):
        moved = float(np.linalg.norm(weights.astype(np.float64) - problem.initial))
    return {
        "bench": "one_peer",
        "attack": attack_name,
        "rule": rule,
        "accuracy": round(problem.accuracy(weights), 3),
        "moved": float(f"{moved:.3g}"),
        "end": end,
        **counted(
            facts,
            usual_weight(settings, one_label=attack.one_label),
            is_robust="outer.aggregation" in settings,
        ),
        "warnings": warnings,
        "settings": digest_of(settings),
        "seconds": round(time.monotonic() - begun, 1),
    }


def counted(
    facts: list[dict[str, Any]], usual: float, *, is_robust: bool = False
) -> dict[str, Any]:
    """Versions, the attacker's greatest share of one, and deltas clipped and quarantined.

    usual: the weight of an honest delta that is not clipped.
    """
    versions = [one["merged"] for one in facts if one["fact"] == "version" and one["version"]]
    shares, clipped = [0.0], 0
    for merged in versions:
        weights = [(one["key"].startswith(LIAR_NAME), one["weight"]) for one in merged]
        total = sum(weight for _, weight in weights)
        shares.append(sum(weight for hostile, weight in weights if hostile) / (total or 1.0))
        clipped += sum(0 < weight < 0.999 * usual for hostile, weight in weights if not hostile)
    out = [one["key"].startswith(LIAR_NAME) for one in facts if one["fact"] == "quarantined"]
    return {
        "versions": len(versions),
        "share": None if is_robust else round(max(shares), 3),
        "honest_clipped": clipped,
        "honest_quarantined": out.count(False),
        "hostile_quarantined": out.count(True),
    }


def usual_weight(settings: Mapping[str, Any], *, one_label: bool) -> float:
    """The weight of an honest delta that is not clipped (`fsl_async.roles.sync.weighting`)."""
    if "outer.aggregation" in settings:
        return 1.0
    if settings.get("sync.weighting") == "tokens":
        return STEPS * BATCH * (LEAST_BALANCE if one_label else 1.0)
    return float(BATCH)


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Accuracy by attack and rule; how far the weights moved, where that is 3 x an honest run."""
    found = {(row["attack"], row["rule"]): row for row in rows}
    yield "| one of five clients | " + " | ".join(RULES) + " |"
    yield "| --- |" + " ---: |" * len(RULES)
    for attack in ATTACKS:
        cells = [_cell(found, attack, rule) for rule in RULES]
        if any(cells):
            yield f"| {attack} | " + " | ".join(cells) + " |"
    yield ""
    yield f"| one of five clients | warnings with {GUARDED}, and how many |"
    yield "| --- | --- |"
    for attack in ATTACKS:
        lines = found.get((attack, GUARDED), {}).get("warnings", {})
        yield (
            f"| {attack} | "
            + "; ".join(f"{text} ({count})" for text, count in lines.items())
            + " |"
        )


def _cell(found: Mapping[tuple[str, str], dict[str, Any]], attack: str, rule: str) -> str:
    row = found.get((attack, rule))
    if row is None:
        return ""
    text = f"{row['accuracy']:.2f}"
    honest = found.get(("one label each" if ATTACKS[attack].one_label else "none", rule))
    if honest is not None and not row["moved"] <= 3 * honest["moved"]:
        text += f", moved {row['moved'] / honest['moved']:.0e} x".replace("e+0", "e")
    if row["versions"] < ROUNDS:
        text += f", {row['end']} at version {row['versions']}"
    for name in ("clipped", "quarantined"):
        if row[f"honest_{name}"]:
            text += f", {row[f'honest_{name}']} honest deltas {name}"
    return text


@click.command()
@click.option("--only", default="*", help="Rows whose attack/rule is like this.")
@click.option("--jobs", default=2, show_default=True, help="Rows at a time.")
@click.option("--table", "path", type=click.Path(path_type=Path), help="Print the tables of rows.")
@click.option("--docs", type=click.Path(path_type=Path), help="Write the tables of rows.")
def main(only: str, jobs: int, path: Path | None, docs: Path | None) -> None:
    """Print a JSON line for each row."""
    rows = path or docs
    if rows is not None:
        made = "\n".join(table([json.loads(line) for line in rows.read_text().splitlines()]))
        if docs is None:
            print(made)
            return
        before, _, rest = DOCS.read_text().partition(MARKS[0])
        DOCS.write_text(before + MARKS[0] + made + "\n" + MARKS[1] + rest.partition(MARKS[1])[2])
        return
    wanted = [(one, rule) for one in ATTACKS for rule in RULES if fnmatch(f"{one}/{rule}", only)]
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        for row in pool.map(measure, *zip(*wanted, strict=True)):
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
