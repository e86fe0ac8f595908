"""Quality at equal tokens: one process alone against synchronizing clients, by format and period.

    python benchmarks/quality.py           run what is missing in benchmarks/results/quality.jsonl
    python benchmarks/quality.py --list    print what would be run, one JSON object a line
    python benchmarks/quality.py --table   print the tables of docs/BENCHMARKS.md from the rows
    python benchmarks/quality.py --docs    write them into docs/BENCHMARKS.md

Every row trains the built-in GPT (0.5m preset) on the source of Python's standard library, with the
same number of tokens in all, and reports the loss on held-out text. Real: the built-in training
function (`fsl_async.learn.client.pretrain.train`) under `fed`, the Learner (snapshot, coded delta,
update, rebase), the Store (spool, accumulator, outer step, checkpoint), codec, outer optimizer and
weighting. Not real, so that a row is fast and the same for the same seed: there is no network and
there are no processes, and a sync comes every `every_steps` steps of a client instead of by the
clock. The clients train one after another, in lockstep, and no client trains while a delta travels,
so no delta is ever stale. That is the DiLoCo schedule (Douillard et al., arXiv:2311.08105).

"alone" is the same function under LocalFed, without any synchronization: all the steps in sequence.
"alone, batch x k" is k clients with gradients averaged at each step: the same tokens in 1/k of the
steps.

A row is identified by what it measured (`spec`); rows in the results file are not run again. Rows
are ordered by table and seed, so that tables can be printed (with fewer seeds) before all is done;
several processes can share the work by --seed. Rows of other values of BUDGET_STEPS or
LEARNING_RATE (`quality_grid.py`) are ignored: after a change the tables start again.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, SupportsFloat

import attrs
import click
import torch
from quality_grid import SEEDS, Spec, grid, read_rows
from quality_tables import Tables

from fsl_async.learn.client import pretrain
from fsl_async.learn.client.delta_coder import DeltaCoder
from fsl_async.learn.client.exchange import Exchange
from fsl_async.learn.client.fed import ClientContext, Fed, LocalFed
from fsl_async.learn.client.orders import Orders
from fsl_async.learn.client.training import Training
from fsl_async.learn.models.gpt import GPT
from fsl_async.roles.machine import Event
from fsl_async.roles.sync.delta import Delta, DeltaKey, MergedDelta
from fsl_async.roles.sync.events import Attached, Snapshotted
from fsl_async.roles.sync.weighting import weighting_named
from fsl_async.store.outer import OuterSettings
from fsl_async.store.records import StoreSettings
from fsl_async.store.store import Store

RESULTS = Path(__file__).parent / "results" / "quality.jsonl"
DOCS = Path(__file__).parents[1] / "docs" / "BENCHMARKS.md"
MARKS = ("<!-- quality.py --docs -->\n", "<!-- end -->\n")
EVALUATED_BYTES = 1 << 17


def tables_of(spec: Spec) -> dict[str, dict[str, Any]]:
    """The run's configuration, as far as the built-in task reads it; the rest are its defaults."""
    train = {"batch": spec.batch, "learning_rate": spec.learning_rate, "threads": 1}
    data = {"sharding": spec.sharding}
    return {"train": train, "model": {"preset": spec.preset}, "data": data}


def silent(_: str) -> None:
    """Drop the task's own evaluation, on fewer bytes; this script reports its own."""


def held_out_loss(model: GPT, spec: Spec) -> float:
    """Nats per byte on EVALUATED_BYTES of held-out text."""
    corpus = pretrain.open_corpus(tables_of(spec), model.config.context)
    limit_bytes = min(EVALUATED_BYTES, 1024 * spec.budget_steps)  # a smoke test needs less
    return pretrain.evaluate(model, corpus, limit_bytes=limit_bytes)


class AloneFed(LocalFed):
    """LocalFed that evaluates on the way, at the steps that one of k clients would have made."""

    def __init__(self, place: ClientContext, spec: Spec) -> None:
        super().__init__(place, steps=spec.budget_steps)
        self.spec = spec
        self.losses: dict[int, float] = {}

    def step(self, *, tokens: int = 0, metrics: Mapping[str, SupportsFloat] | None = None) -> bool:
        """Count a step; evaluate after a quarter, a half and all of them."""
        running = super().step(tokens=tokens, metrics=metrics)
        done = len(self.history)
        if self.spec.budget_steps in {4 * done, 2 * done, done}:
            assert isinstance(self.model, GPT)
            self.losses[done] = held_out_loss(self.model, self.spec)
        return running


def run_alone(spec: Spec, name: str = "alone") -> dict[str, Any]:
    """Train in one process without synchronization. `name` and the seed select the windows."""
    fed = AloneFed(ClientContext(name, spec.seed, config=tables_of(spec), log=silent), spec)
    pretrain.train(fed)
    losses = {str(step): round(loss, 5) for step, loss in fed.losses.items()}
    return {"eval_loss": losses[str(spec.budget_steps)], "eval_loss_at_step": losses}


class LockstepFed(Fed):
    """Fed of one client: after `every` steps it takes a snapshot and waits for the coordinator."""

    def __init__(self, client: Client, place: ClientContext) -> None:
        super().__init__(client.training, place)
        self._client = client

    def attach(self, model: torch.nn.Module, *, exchange: Sequence[str] | None = None) -> None:
        """Keep the model for the evaluation, then attach."""
        self._client.model = model
        super().attach(model, exchange=exchange)

    def step(self, *, tokens: int = 0, metrics: Mapping[str, SupportsFloat] | None = None) -> bool:
        """Count a step; at the end of a round synchronize."""
        training = self._client.training
        due = (training.meter.steps + 1) % self._client.every == 0
        if due:
            self._client.sequence += 1
            self._client.learner.request_snapshot(self._client.sequence)
        running = super().step(tokens=tokens, metrics=metrics)
        if due:
            self._client.pause()
            running = training.attend()
        return running


class Client:
    """One client: the built-in task in its own thread, in turns with the coordinator."""

    def __init__(self, index: int, spec: Spec, server: Server) -> None:
        self.name = f"client-{index}"
        self.every = spec.steps_per_round[index]
        orders = Orders()
        coder = DeltaCoder(spec.codec, feedback=spec.feedback_up)
        self.learner = Exchange(orders, coder, self._take)
        self.training = Training(orders, self.learner)
        self.model: torch.nn.Module | None = None
        self.sequence = 0
        self.taken: Snapshotted | None = None
        self._server = server
        self._go, self._paused = threading.Semaphore(0), threading.Semaphore(0)
        self._error: BaseException | None = None
        self._place = ClientContext(
            self.name,
            spec.seed,
            config=tables_of(spec),
            shard_index=index,
            shard_count=spec.clients,
            log=silent,
        )
        self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
        self._thread.start()

    def turn(self) -> None:
        """Coordinator: let it train until its next snapshot (or its end)."""
        self._go.release()
        self._paused.acquire()
        if self._error is not None:
            raise self._error

    def pause(self) -> None:
        """Training thread: let the coordinator go on, and wait."""
        self._paused.release()
        self._go.acquire()

    def join(self) -> None:
        """Coordinator: end it."""
        self.learner.stop()
        self.turn()
        self._thread.join()

    def _run(self) -> None:
        self._go.acquire()
        try:
            pretrain.train(LockstepFed(self, self._place))
        except BaseException as error:  # noqa: BLE001 - handed to the coordinator, which raises it
            self._error = error
        self._paused.release()

    def _take(self, event: Event) -> None:
        if isinstance(event, Attached):
            self._server.welcome(self.learner)
        elif isinstance(event, Snapshotted):
            self.taken = event


class Server:
    """The store, and the messages of the two roles, without a network."""

    def __init__(self, run_dir: Path, spec: Spec) -> None:
        name, rate, momentum = spec.optimizer, spec.outer_learning_rate, spec.outer_momentum
        outer_settings = OuterSettings(name, rate, momentum)  # type: ignore[arg-type]
        settings = StoreSettings(
            keep_versions=1,
            codec_down=spec.codec,
            outer=outer_settings,
        )
        self.store = Store(run_dir, settings)
        self.store.recover()
        self.weighting = weighting_named(spec.weighting)
        self.bytes_up = 0
        self.bytes_down = 0

    def welcome(self, learner: Exchange) -> None:
        """Take the first client's weights as version 0 and give them to the others."""
        store, manifest = self.store, learner.manifest
        assert manifest is not None
        if store.version < 0:
            store.begin_initial(manifest)
            for index in range(manifest.chunks):
                store.write_initial(index, learner.encode_initial(index))
            digest = store.finish_initial().digest
            same = learner.adopt_initial() == digest
        else:
            learner.begin_fetch("full", store.version)
            for index in range(manifest.chunks):
                learner.put_fetch(
                    store.version, index, store.read_full(store.version, index) or b""
                )
            digest = learner.finish_fetch(store.version)
            same = digest == store.digest
        assert same, "a client's version 0 is not the parameter server's"
        learner.request_rebase(store.version, digest)

    def merge(self, clients: list[Client]) -> None:
        """One round: deltas up, outer step, update down."""
        store, version = self.store, self.store.version
        merged = []
        for client in clients:
            taken = client.taken
            assert taken is not None
            key = DeltaKey(client.name, 1, version, taken.sequence)
            delta = Delta(key, store.digest, taken.tokens, taken.steps)
            store.spool_begin(delta)
            for index in range(store.manifest.chunks):
                frame = client.learner.encode_delta(taken.sequence, index)
                self.bytes_up += len(frame)
                store.spool_write(key, index, frame)
            result = store.spool_finish(key)
            assert result.problem is None, result.problem
            client.learner.drop_delta(taken.sequence)
            weight = self.weighting.weight(delta, 0)
            store.accumulate(key, weight)
            merged.append(MergedDelta(delta, 0, weight))
        made = store.commit(version + 1, merged, self.weighting.scale(merged))
        self.bytes_down += made.update_bytes
        for client in clients:
            learner = client.learner
            learner.begin_fetch("update", made.version)
            for index in range(store.manifest.chunks):
                learner.put_fetch(
                    made.version, index, store.read_update(made.version, index) or b""
                )
            digest = learner.finish_fetch(made.version)
            assert digest == made.digest, f"{client.name} is not at the parameter server's version"
            learner.request_rebase(made.version, digest)


def run_clients(spec: Spec) -> dict[str, Any]:
    """Train with clients in lockstep, and evaluate the last version."""
    rounds, left = divmod(spec.budget_steps, sum(spec.steps_per_round))
    if left or not rounds:
        raise click.UsageError(f"{spec.budget_steps} steps are not a multiple of a round's")
    with tempfile.TemporaryDirectory(prefix="quality-") as folder:
        server = Server(Path(folder), spec)
        clients = [Client(index, spec, server) for index in range(spec.clients)]
        for _ in range(rounds):
            for client in clients:
                client.turn()
            server.merge(clients)
        for client in clients:
            client.join()  # answers the last rebase first
        values, tokens = server.store.manifest.values, server.store.tokens_total
        server.store.close()
    assert isinstance(clients[0].model, GPT)
    return {
        "eval_loss": round(held_out_loss(clients[0].model, spec), 5),
        "rounds": rounds,
        "tokens": tokens,
        "parameters": values,
        "bits_up": round(8 * server.bytes_up / (values * rounds * spec.clients), 4),
        "bits_down": round(8 * server.bytes_down / (values * rounds), 4),
    }


def measure(spec: Spec) -> dict[str, Any]:
    """Run one row."""
    begun = time.perf_counter()
    found = run_clients(spec) if spec.steps_per_round else run_alone(spec)
    seconds = round(time.perf_counter() - begun, 1)
    return {"bench": "quality", "spec": attrs.asdict(spec), **found, "seconds": seconds}


def check() -> dict[str, Any]:
    """Check that one averaged client in fp32 agrees with one process on the same batches."""
    spec = Spec(0, budget_steps=60)
    lone = run_alone(spec, "client-0")["eval_loss"]
    averaged = attrs.evolve(spec, steps_per_round=(20,), format="fp32", optimizer="average")
    synced = run_clients(averaged)["eval_loss"]
    losses = {"alone": lone, "one_client_averaged": synced, "difference": round(synced - lone, 5)}
    return {"bench": "quality", "check": "one client, averaging, fp32", **losses}


@click.command()
@click.option("--results", type=click.Path(path_type=Path), default=RESULTS, show_default=True)
@click.option("--seed", "seeds", multiple=True, type=int, default=SEEDS, show_default=True)
@click.option("--rows", default=0, help="Stop after this many rows; 0 = all that are missing.")
@click.option("--list", "only_list", is_flag=True, help="Print what is missing, run nothing.")
@click.option("--table", is_flag=True, help="Print the markdown tables, run nothing.")
@click.option("--docs", is_flag=True, help="Write the tables into docs/BENCHMARKS.md.")
@click.option("--check", "only_check", is_flag=True, help="Check that one client equals alone.")
@click.option("--smoke", is_flag=True, help="Two tiny rows on standard output, nothing kept.")
def main(
    results: Path,
    seeds: tuple[int, ...],
    rows: int,
    *,
    only_list: bool,
    table: bool,
    docs: bool,
    only_check: bool,
    smoke: bool,
) -> None:
    """Compare losses at equal tokens."""
    torch.set_num_threads(1)
    if only_check:
        print(json.dumps(check()))
        return
    if smoke:
        tiny = Spec(0, budget_steps=4, batch=2)
        for spec in (tiny, attrs.evolve(tiny, steps_per_round=(1, 1), format="e4m3")):
            print(json.dumps(measure(spec)))
        return
    kept = read_rows(results)
    if table:
        print(Tables(kept, seeds).text())
        return
    if docs:
        before, _, rest = DOCS.read_text().partition(MARKS[0])
        after = rest.partition(MARKS[1])[2]
        tables = f"\n{Tables(kept, seeds).text()}\n\n"
        DOCS.write_text(before + MARKS[0] + tables + MARKS[1] + after)
        return
    missing = [spec for spec in grid(seeds) if spec.key not in kept]
    if only_list:
        for spec in missing:
            print(spec.key)
        return
    results.parent.mkdir(parents=True, exist_ok=True)
    for number, spec in enumerate(missing[: rows or None]):
        row = measure(spec)
        if not math.isfinite(row["eval_loss"]):
            print(f"not finite: {spec.key}", file=sys.stderr)
        line = json.dumps(row)
        with results.open("a") as file:
            file.write(line + "\n")
        print(line, flush=True)
        print(f"{number + 1} of {len(missing)}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
