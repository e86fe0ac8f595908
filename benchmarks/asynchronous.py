"""Loss of the built-in GPT with rounds and without, on clients of unequal speed, with churn.

    python benchmarks/asynchronous.py            every row, three seeds; rows that exist are kept
    python benchmarks/asynchronous.py --quick    one short row of each kind, to standard output
    python benchmarks/asynchronous.py --table    the rows so far

Real: both roles' machines and shells, sessions, the store with its outer optimizer, the exchange of
a client, codec, triggers, weightings and paces, and the training. Emulated: the network, the clock
and the speeds, as in `fsl-node sim`, all in one process, so that a row is the same for the same
seed. The fastest clients make a step in one emulated second; an evaluation takes no time. A run
that ends by tokens merges in its last round what was trained besides: see "tokens" of a row.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import torch
from attrs import field, frozen
from quality_spec import code_digest

from fsl_async.config.load import load, to_wire
from fsl_async.learn.client import pretrain
from fsl_async.learn.client.buffers import ModelWeights
from fsl_async.learn.client.delta_coder import DeltaCoder
from fsl_async.learn.client.exchange import Exchange
from fsl_async.learn.client.fed import Fed
from fsl_async.learn.client.fed_base import ClientContext
from fsl_async.learn.client.orders import Orders
from fsl_async.learn.client.ports import RebaseOrder
from fsl_async.learn.client.schedule import RunClock
from fsl_async.learn.client.training import Training
from fsl_async.learn.models.gpt import GPT, gpt_config
from fsl_async.roles.machine import Event
from fsl_async.roles.sync.progress import RunLimits, RunPosition
from fsl_async.roles.sync.ps import ParameterServerMachine, ParameterServerRules
from fsl_async.roles.sync.ps_state import PaceRules
from fsl_async.store.aggregation import Latest, Mean, Rule
from fsl_async.store.checkpoint import Checkpoints
from fsl_async.store.files import Files
from fsl_async.store.outer import OuterSettings
from fsl_async.store.reading import read_version
from fsl_async.store.records import StoreSettings
from fsl_async.store.store import Store
from fsl_async.tools.sim.counting import CountingLearner
from fsl_async.tools.sim.faults import FaultProfile
from fsl_async.tools.sim.simulation import (
    SERVER_NAME,
    Simulation,
    SimulationSettings,
)
from fsl_async.tools.sim.world import ProcessClock

RESULTS = Path(__file__).parent / "results" / "asynchronous.jsonl"
STEP_S = (1.0, 1.0, 2.0, 4.0)
"""Emulated seconds of a step, of each client."""
LOCAL_STEPS = 20
"""Of the fastest client in a round, or between two deltas."""
BATCH, CONTEXT = 4, 64
STEPS = 4800
"""Of all clients together."""
MAX_STALENESS = 20
"""Versions that a delta may be old, where clients send by themselves."""
CURVE_POINTS = 24
CHURN_S = 400.0
"""Emulated seconds from one kill of a client to the next, in the mean; it is back in 5 to 40."""
SEEDS = (0, 1, 2)


AVERAGE, NESTEROV = OuterSettings("average"), OuterSettings("nesterov", 0.7, 0.9)


@frozen(kw_only=True)
class Way:
    """One way to merge. steps: of a delta of clients that send by themselves; 0: at their own."""

    trigger: str = "buffer"
    outer: OuterSettings = AVERAGE
    weighting: str = "batch"
    buffer: int = 2
    steps: int = LOCAL_STEPS
    by_speed: bool = False
    own: bool = False
    rule: Rule = field(factory=Mean)


WAYS = {
    "timer": Way(trigger="clock", outer=OuterSettings()),
    "waits": Way(trigger="rounds", outer=OuterSettings()),
    "buffer": Way(),
    "buffer, all": Way(buffer=len(STEP_S)),
    "buffer, DyLU": Way(by_speed=True),
    "anarchic": Way(weighting="anarchic", own=True),
    "latest": Way(weighting="latest", own=True, rule=Latest()),
    "Nesterov per arrival": Way(buffer=1, outer=NESTEROV),
}


@frozen(kw_only=True)
class Row:
    """What is measured. end: what ends the run, "tokens" or "time"."""

    way: str
    seed: int = 0
    end: str = "tokens"
    churn: bool = False
    steps: int = STEPS

    @property
    def key(self) -> str:
        """One line that identifies it."""
        return json.dumps(attrs.asdict(self), sort_keys=True)

    @property
    def limits(self) -> RunLimits:
        """Of the run: the tokens of all steps, or the time in which no client idles for them."""
        if self.end == "tokens":
            return RunLimits(tokens=self.steps * BATCH * CONTEXT)
        return RunLimits(seconds=round(self.steps / sum(1 / each for each in STEP_S), 1))


class GptLearner(CountingLearner):
    """A client that trains for real, when a snapshot or a version needs what it trained."""

    def __init__(
        self,
        clock: Any,
        on_event: Callable[[Event], None],
        *,
        row: Row,
        index: int,
        step_s: float,
        own_pace: Callable[[], int] | None,
    ) -> None:
        super().__init__(
            clock, on_event, step_s=step_s, tokens_per_step=1, initial=0, own_pace=own_pace
        )
        self._orders = Orders()
        self._exchange = Exchange(self._orders, DeltaCoder(), on_event)
        self._training = Training(self._orders, self._exchange)
        self._training.clock = RunClock(clock.time)
        tables = tables_of()
        context = ClientContext(
            f"client-{index}", row.seed, config=tables, shard_index=index, shard_count=len(STEP_S)
        )
        fed = Fed(self._training, context)
        self.module = GPT(gpt_config(tables), seed=row.seed)
        corpus = pretrain.open_corpus(tables, self.module.config.context)
        self._batches: Iterator[torch.Tensor] = fed.shard(corpus, batch=BATCH)
        self._optimizer = fed.optimizer(self.module)
        self._scheduler = fed.scheduler(self._optimizer)
        self._trained = 0

    def announced(self, position: RunPosition) -> None:
        """Take the position of the run."""
        self._training.clock.announced(position)

    def attach(self) -> None:
        """Hand the model over without a wait."""
        weights = ModelWeights(self.module)
        own = self._exchange.free_vector(weights.layout.values)
        weights.copy_out(own)
        self._training._hold(weights)  # noqa: SLF001 - Training.attach waits for a version
        self._orders.attached()
        self.manifest = weights.manifest
        self._exchange.attach(weights.manifest, own)

    def _train(self) -> None:
        """Make the steps that the clock has passed."""
        while self._trained < self.steps:
            self._trained += 1
            loss = self.module.loss(next(self._batches))
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
            self._optimizer.step()
            self._optimizer.zero_grad()
            self._scheduler.step()
            self._training.meter.count(BATCH * CONTEXT, {"loss": loss.item()})

    def begin_round(self, sequence: int, number: int) -> None:
        """Train LOCAL_STEPS steps from now on, and wait."""
        assert self._started_at is not None
        at = self._started_at + (self._sent_steps + LOCAL_STEPS) * self._step_s
        self._clock.call_at(
            max(at, self._clock.time()), lambda: self._snapshot(sequence, hold=True)
        )

    def _snapshot(self, sequence: int, *, hold: bool) -> None:
        if hold and self._held_at is None:
            self._held_at = self._clock.time()
        self._train()
        self._sent_steps = self.steps
        self._await_pace()
        self._exchange.request_snapshot(sequence)
        self._training.attend()

    def request_rebase(self, version: int, digest: str, *, discard: bool = False) -> None:
        """Rebase at the next step."""
        self._at_next_step(lambda: self._move(discard=discard))

    def _move(self, *, discard: bool) -> None:
        if self._started_at is None:
            self._started_at = self._clock.time()
            self._await_pace()
        self._train()
        self._orders.ask(RebaseOrder(discard))
        self._training.attend()

    def stop(self) -> None:
        """End training at the next step."""
        self._orders.stop()
        super().stop()


for _name in (
    "encode_initial", "adopt_initial", "scalars_frame", "delta_frames", "encode_delta",
    "finish_encoding", "drop_delta", "begin_fetch", "put_fetch", "finish_fetch",
):  # fmt: skip
    # The exchange has the vectors; the class that it replaces only counts.
    setattr(GptLearner, _name, functools.partialmethod(
        lambda self, name, *args: getattr(self._exchange, name)(*args), _name
    ))  # fmt: skip


class NoChecks:
    """Instead of the simulator's invariants, which read its own store."""

    def __init__(self) -> None:
        self.violations: list[str] = []

    def __getattr__(self, _: str) -> Callable[..., None]:
        return lambda *_: None

    def violated(self, text: str, now: float) -> None:
        """Fail: nothing may go wrong here."""
        raise AssertionError(f"at {now:.1f} s: {text}")


def tables_of() -> dict[str, dict[str, Any]]:
    """The configuration of the training."""
    sizes = {"layers": 2, "width": 64, "heads": 4, "context": CONTEXT}
    given = [f"model.{name}={value}" for name, value in sizes.items()]
    made: dict[str, dict[str, Any]] = to_wire(load(None, [*given, f"train.batch={BATCH}"]))
    return made


class Play(Simulation):
    """A run of GptLearners with a Store on disk."""

    def __init__(self, row: Row, folder: Path) -> None:
        way = WAYS[row.way]
        clients = len(STEP_S)
        every_s = LOCAL_STEPS * STEP_S[0]
        super().__init__(SimulationSettings(clients, 1.0, row.seed, "none", every_s))
        self.row, self.way, self._folder = row, way, folder
        if row.churn:
            self.profile = FaultProfile(client_kill_every_s=CHURN_S, client_return_s=(5.0, 40.0))
        self.invariants = NoChecks()  # type: ignore[assignment]
        leads = way.trigger == "buffer"
        self._rules = ParameterServerRules(
            trigger=way.trigger,
            every_s=every_s,
            round_cap_s=10 * every_s,
            min_clients=clients,
            max_staleness=MAX_STALENESS if leads else 4,
            reuses=way.rule.reuses,
            buffer=way.buffer,
            least_s=0.02 * every_s,
            pace=PaceRules(0 if way.own else way.steps, by_speed=way.by_speed) if leads else None,
            limits=row.limits,
            decays_from=0.5,
            shards=clients,
        )
        self._weighting = way.weighting
        self._ending = True  # clients may end by themselves
        self.curve: list[tuple[float, int, float]] = []
        self.real: Store | None = None

    def _store(self, clock: ProcessClock) -> Any:
        rule = self.way.rule
        settings = StoreSettings(
            2,
            outer=self.way.outer,
            may_keep_mean=False,
            rule=rule,
            reuse=MAX_STALENESS if rule.reuses else 0,
        )
        self.real = Store(self._folder, settings)
        return self.real

    def _learner(
        self, clock: ProcessClock, on_event: Callable[[Event], None], chance: random.Random
    ) -> CountingLearner:
        index = self._launching
        own = functools.partial(chance.randint, 1, 2 * LOCAL_STEPS) if self.way.own else None
        return GptLearner(
            clock, on_event, row=self.row, index=index, step_s=STEP_S[index], own_pace=own
        )

    def _launch_client(self, name: str) -> None:
        self._launching = self.names.index(name)
        super()._launch_client(name)
        shell = self.processes[name].shell
        shell._announced = shell.learner.announced  # type: ignore[union-attr]  # noqa: SLF001

    def play(self) -> None:
        """Run to the end, evaluating versions on the way."""
        self._launch_server()
        for name in self.names:
            self._launch_client(name)
            self._plan_client_faults(name)
        machine = self.processes[SERVER_NAME].shell.machine
        assert isinstance(machine, ParameterServerMachine)
        began_s, done = None, 0
        while not machine.ended:
            self.scheduler.run_until(self.scheduler.time() + STEP_S[0])
            now = self.scheduler.time()
            assert now < 1e6, "the run does not end"
            if began_s is None and machine.version >= 0:
                began_s = now
            part = CURVE_POINTS * machine.tokens_total // (self.row.steps * BATCH * CONTEXT)
            if began_s is not None and part > done:
                done = part
                self.curve.append((now - began_s, machine.tokens_total, self._loss(1 << 15)))
        assert began_s is not None
        self.curve.append(
            (self.scheduler.time() - began_s, machine.tokens_total, self._loss(1 << 17))
        )
        self.version, self.tokens = machine.version, machine.tokens_total

    def _loss(self, limit_bytes: int) -> float:
        assert self.real is not None
        files = Files()
        version, manifest = self.real.version, self.real.manifest
        self.real.finish_snapshot()
        vector = read_version(files, Checkpoints(files, self._folder), version, manifest).weights
        tables = tables_of()
        model = GPT(gpt_config(tables))
        ModelWeights(model).copy_in(vector)
        corpus = pretrain.open_corpus(tables, CONTEXT)
        limit_bytes = min(limit_bytes, 8 * self.row.steps)  # a quick row needs less
        return round(pretrain.evaluate(model, corpus, limit_bytes=limit_bytes), 5)


def measure(row: Row) -> dict[str, Any]:
    """Run one row."""
    torch.set_num_threads(1)
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="asynchronous-") as folder:
        play = Play(row, Path(folder))
        play.play()
        assert play.real is not None
        play.real.close()
    return {
        "bench": "asynchronous",
        "code": code_digest(),
        "spec": attrs.asdict(row),
        "eval_loss": play.curve[-1][2],
        "emulated_s": round(play.curve[-1][0], 1),
        "tokens": play.tokens,
        "versions": play.version,
        "killed": play.counts.relaunches,
        "curve": [(round(at, 1), tokens, loss) for at, tokens, loss in play.curve],
        "seconds": round(time.perf_counter() - begun, 1),
        "torch": torch.__version__,
    }


def rows() -> Iterator[Row]:
    """Every row, those that rank the ways first."""
    for churn in (False, True):
        for end in ("tokens", "time"):
            for seed in SEEDS:
                for way in WAYS:
                    yield Row(way=way, seed=seed, end=end, churn=churn)


def stored() -> dict[str, dict[str, Any]]:
    """The rows of this code on disk, by key."""
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    found = [json.loads(line) for line in lines]
    return {Row(**one["spec"]).key: one for one in found if one["code"] == code_digest()}


def table() -> Iterator[dict[str, Any]]:
    """Means over seeds, and the time to the loss of rounds that wait, over theirs."""
    found = list(stored().values())
    for end in ("tokens", "time"):
        for churn in (False, True):
            mine = [
                one for one in found if (one["spec"]["end"], one["spec"]["churn"]) == (end, churn)
            ]
            waits = {one["spec"]["seed"]: one for one in mine if one["spec"]["way"] == "waits"}
            for way in WAYS:
                some = [one for one in mine if one["spec"]["way"] == way]
                if not some:
                    continue
                shares = [_share(one, waits[one["spec"]["seed"]]) for one in some
                          if one["spec"]["seed"] in waits]  # fmt: skip
                yield {
                    "way": way,
                    "end": end,
                    "churn": churn,
                    "seeds": len(some),
                    "eval_loss": round(statistics.mean(one["eval_loss"] for one in some), 4),
                    "emulated_s": round(statistics.mean(one["emulated_s"] for one in some)),
                    "time_to_loss_of_waits": round(statistics.mean(shares), 3) if shares else None,
                }


def _share(row: dict[str, Any], waits: dict[str, Any]) -> float:
    """Time to the last loss of `waits`, over its time; infinite where it is never reached."""
    target, at = waits["curve"][-1][2], waits["curve"][-1][0]
    return next((time_s / at for time_s, _, loss in row["curve"] if loss <= target), math.inf)


def main() -> int:
    """Run what is missing."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--way", default="", help="only this one")
    parser.add_argument("--steps", type=int, default=0)
    given = parser.parse_args()
    if given.table:
        for line in table():
            print(json.dumps(line))
        return 0
    if given.quick:
        for name, way in WAYS.items():
            if given.way in ("", name):
                row = Row(way=name, churn=way.own, steps=given.steps or 240)
                print(json.dumps(measure(row)), flush=True)
        return 0
    done = stored()
    for row in rows():
        if row.key in done or given.way not in ("", row.way):
            continue
        found = measure(row)
        RESULTS.parent.mkdir(exist_ok=True)
        with RESULTS.open("a") as file:
            file.write(json.dumps(found) + "\n")
        print(json.dumps({name: found[name] for name in ("spec", "eval_loss", "seconds")}))
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
