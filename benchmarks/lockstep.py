"""The largest relative difference of any weight between a lockstep run over sockets and one
process.

    python benchmarks/lockstep.py > benchmarks/results/lockstep.jsonl     two minutes on one core
    python benchmarks/lockstep.py --table

Runs every method for three rounds with three clients in threads over real sockets on loopback (fp32
at the cut), with a parameter server, a split server, spool, checkpoints and codec, in mode
lockstep. Beside it the same run is written in plain torch (`Plain`): its own loops, optimizers,
buffers, alignment and averages. Only the layers, the initial weights and the batches are shared
with the code under test.

`difference` is max |found - wanted| / |wanted| over all weights of the client-side model, the
server-side model, and auxiliary models, however close to zero they are; `at` is where. `weights` is
the number compared, `differ` the number that are not bit-equal. Averages are in float64 in both;
`fp32_average` is the difference to a plain run that averages in fp32, as most simulations do: the
error of that alone. The limit is 1e-5, the aim 1e-6.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import struct
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from node_threads import play
from torch import Tensor, nn

from fsl_async.config.load import load
from fsl_async.config.settings import Config
from fsl_async.learn.client.buffers import ModelWeights
from fsl_async.learn.data.facts import described, facts_of
from fsl_async.learn.split import build
from fsl_async.learn.split.server_disk import ServerDisk
from fsl_async.learn.split.task import open_samples
from fsl_async.roles.split.methods import method_of
from fsl_async.tools.versions import load_last

METHODS = ("sl", "splitfed-v1", "splitfed-v2", "cse-fsl", "fsl-sage", "fedavg")
RESULTS = Path(__file__).parent / "results" / "lockstep.jsonl"
NAMES = ("a", "b", "c")
ROUNDS, EVERY, PASSES, BUFFER, BATCH = 3, 2, 3, 12, 5


# --- the run ------------------------------------------------------------------------------------


def configured(method: str, model: str, optimizer: str, folder: Path) -> Config:
    """A run of three batches per client and round, the last one smaller."""
    sets: dict[str, Any] = {
        "split.method": method,
        "split.mode": "lockstep",
        "split.optimizer": optimizer,
        "split.up": "fp32",
        "split.down": "fp32",
        "split.samples": 13,
        "split.upload_every": EVERY,
        "split.align_every": EVERY,
        "split.align_passes": PASSES,
        "split.buffer_samples": BUFFER,
        "split.listen": "tcp://127.0.0.1:0",
        "listen.address": "tcp://127.0.0.1:0",
        "sync.clients": len(NAMES),
        "sync.min_clients": len(NAMES),
        "run.rounds": ROUNDS * (len(NAMES) if method == "sl" else 1),
        "data.holdout": 0.0,
        "data.path": str(_data(model, folder)),
        "train.batch": BATCH,
        "train.learning_rate": 0.05 if optimizer == "sgd" else 2e-3,
        "train.threads": 1,
        "train.device": "cpu",
    }
    if model == "cnn":
        sets |= {"model.family": "small-cnn", "split.auxiliary": "linear"}
    else:
        sets |= {"model.layers": 3, "model.width": 32, "model.heads": 2, "model.context": 16}
    return load(None, [f"{key}={json.dumps(value)}" for key, value in sets.items()])


def _data(model: str, folder: Path) -> Path:
    rng = np.random.default_rng(0)
    if model == "gpt":
        (folder / "text.txt").write_bytes(bytes(rng.integers(97, 117, 8000, dtype=np.uint8)))
        return folder / "text.txt"
    (folder / "images").mkdir()
    values = {
        "images-idx3": rng.integers(0, 256, (300, 16, 16)),
        "labels-idx1": np.arange(300) % 10,
    }
    for name, found in values.items():
        head = struct.pack(f">HBB{found.ndim}I", 0, 8, found.ndim, *found.shape)
        (folder / "images" / f"train-{name}-ubyte").write_bytes(
            head + found.astype(np.uint8).tobytes()
        )
    return folder / "images"


# --- the same, written out ----------------------------------------------------------------------


def loss_of(outputs: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy."""
    return nn.functional.cross_entropy(outputs.reshape(-1, outputs.shape[-1]), labels.reshape(-1))


def floats(module: nn.Module) -> dict[str, Tensor]:
    """The tensors that are averaged."""
    return {k: v for k, v in module.state_dict().items() if v.is_floating_point()}


class Plain:
    """One method in plain torch modules.

    `front` at clients, `back` at the split server (None: fedavg), `net` the auxiliary model.
    """

    def __init__(  # noqa: PLR0917
        self,
        method: str,
        config: Config,
        front: nn.Module,
        back: nn.Module | None,
        net: nn.Module | None,
        kind: torch.dtype,
        sites: Sequence[str] = NAMES,
    ) -> None:
        self.method, self.config, self.kind, self.sites = method, config, kind, sites
        self.fronts = {site: copy.deepcopy(front).train() for site in self.sites}
        self.backs = {site: copy.deepcopy(back).train() for site in self.sites} if back else {}
        self.nets = {site: copy.deepcopy(net).train() for site in self.sites} if net else {}
        self.one: Any = copy.deepcopy(back).train() if back else None
        self.steps = {
            id(m): self._optimizer(m) for m in (*self.fronts.values(), *self.backs.values())
        }
        if self.one is not None:
            self.steps[id(self.one)] = self._optimizer(self.one)
        for found in self.nets.values():
            split, train = config.split, config.train
            rate = split.align_rate if method == "fsl-sage" else train.learning_rate
            betas = (0.9, 0.999) if method == "fsl-sage" else (0.9, 0.95)
            self.steps[id(found)] = torch.optim.Adam(found.parameters(), lr=rate, betas=betas)
        self.buffers: dict[str, list[tuple[Tensor, Tensor]]] = {site: [] for site in self.sites}
        self.last: str | None = None

    def _optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        train = self.config.train
        if self.config.split.optimizer == "sgd":
            return torch.optim.SGD(
                module.parameters(), lr=train.learning_rate, weight_decay=train.weight_decay
            )
        return torch.optim.AdamW(
            module.parameters(),
            lr=train.learning_rate,
            betas=(0.9, 0.95),
            weight_decay=train.weight_decay,
        )

    def _step(self, *modules: nn.Module) -> None:
        for module in modules:
            self.steps[id(module)].step()
            self.steps[id(module)].zero_grad()

    def round(self, number: int, batches: Mapping[str, Sequence[Any]]) -> None:
        """One round of all clients, one after another."""
        for site in self.sites:
            if self.method == "sl" and self.last is not None:
                self.fronts[site].load_state_dict(floats(self.fronts[self.last]), strict=False)
            for step, batch in enumerate(batches[site]):
                self._batch(site, number, step, batch)
            self.last = site
        groups = {
            "sl": [],
            "splitfed-v1": [self.fronts, self.backs],
            "cse-fsl": [self.fronts, self.nets],
        }
        for group in groups.get(self.method, [self.fronts]):
            mean = self._average(
                [floats(module) for module in group.values()],
                [sum(len(b.labels) for b in batches[site]) for site in self.sites],
            )
            for module in group.values():
                module.load_state_dict(mean, strict=False)

    def _average(self, states: list[dict[str, Tensor]], shares: list[int]) -> dict[str, Tensor]:
        found = {}
        for name in states[0]:
            parts = [
                share * state[name].to(self.kind)
                for share, state in zip(shares, states, strict=True)
            ]
            found[name] = (sum(parts[1:], parts[0]) / sum(shares)).float()
        return found

    def _batch(self, site: str, number: int, step: int, batch: Any) -> None:
        front, x, y = self.fronts[site], batch.inputs, batch.labels
        z = front(x)
        if self.method == "fedavg":
            loss_of(z, y).backward()
            self._step(front)
        elif self.method in {"sl", "splitfed-v1", "splitfed-v2"}:
            back = self.backs[site] if self.method == "splitfed-v1" else self.one
            loss_of(back(z), y).backward()
            self._step(back, front)
        else:
            sent = z.detach()
            if step % self.config.split.upload_every == 0:
                loss_of(self.one(sent), y).backward()
                self._step(self.one)
                self.buffers[site].append((sent, y))
                del self.buffers[site][: -self.config.split.buffer_samples]
            if self.method == "cse-fsl":
                loss_of(self.nets[site](z), y).backward()
                self._step(self.nets[site], front)
                return
            if step == 0 and number % self.config.split.align_every == 0:
                self._align(site)
            with unmoved(self.nets[site]):
                loss_of(self.nets[site](z), y).backward()
            self.steps[id(self.nets[site])].zero_grad()
            self._step(front)

    def _align(self, site: str) -> None:
        net, one, chosen = self.nets[site], self.one, self.config.split
        kept, size = chosen.buffer_samples, chosen.align_batch or self.config.train.batch
        zs = torch.cat([z for z, _ in self.buffers[site]])[-kept:].split(size)
        ys = torch.cat([y for _, y in self.buffers[site]])[-kept:].split(size)
        pairs = [(z.clone().requires_grad_(), y) for z, y in zip(zs, ys, strict=True)]
        with (
            torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
            unmoved(one),
            unmoved(net),
        ):
            wanted = [torch.autograd.grad(loss_of(one(z), y), z)[0] for z, y in pairs]
            for _ in range(chosen.align_passes):
                for (z, y), target in zip(pairs, wanted, strict=True):
                    guess = torch.autograd.grad(loss_of(net(z), y), z, create_graph=True)[0]
                    net.zero_grad()
                    ((guess - target) ** 2).sum().backward()
                    self._step(net)


@contextlib.contextmanager
def unmoved(module: nn.Module) -> Any:
    """Keep the statistics of batch norm as they are, though it runs in training mode."""
    kept = {name: value.clone() for name, value in module.named_buffers()}
    yield
    with torch.no_grad():
        for name, value in module.named_buffers():
            value.copy_(kept[name])


# --- the comparison -----------------------------------------------------------------------------


def found_by(config: Config, folder: Path) -> dict[str, np.ndarray]:
    """All weights at the run's end, from the files of both servers."""
    parts = build.build_parts(config, at_client=False)
    method = method_of(config.split)
    half = build.client_part(method, parts.model, build.client_options(config), parts.auxiliary)
    body: nn.Module = half.part("client")
    if config.split.method == "cse-fsl":
        body = nn.ModuleDict({"client": body, "auxiliary": half.part("auxiliary")})
    alone = config.split.method == "fedavg"
    load_last(folder if alone else folder / "ps", ModelWeights(body))
    found = {f"x_c {name}": value.numpy() for name, value in floats(half.part("client")).items()}
    if config.split.method == "cse-fsl":
        found |= {f"x_a {k}": v.numpy() for k, v in floats(half.part("auxiliary")).items()}
    if alone:
        return found
    disk = ServerDisk(folder / "server")
    state = disk.recover()
    common = {
        k.removeprefix("server/"): v
        for k, v in (state.common or {}).items()
        if k.startswith("server/")
    }
    found |= {f"x_s {k}": v.numpy() for k, v in common.items() if v.is_floating_point()}
    clients = dict(state.clients)
    for site in NAMES if config.split.method == "fsl-sage" else ():
        prefix = "alignment/auxiliary/"
        kept = clients[site]
        found |= {
            f"x_a of {site} {k.removeprefix(prefix)}": v.numpy()
            for k, v in kept.items()
            if k.startswith(prefix) and v.is_floating_point()
        }
    disk.close()
    return found


def wanted_by(config: Config, kind: torch.dtype) -> list[np.ndarray]:
    """The same by plain torch, in the same order."""
    parts, method = build.build_parts(config, at_client=False), config.split.method
    plain = Plain(method, config, parts.model.client, parts.model.server, parts.auxiliary, kind)
    facts = facts_of(config)
    opened = {site: open_samples(config, facts, (n, len(NAMES))) for n, site in enumerate(NAMES)}
    for number in range(ROUNDS):
        # In sequential split learning every turn is its own round.
        turns = {
            site: number * len(NAMES) + n if method == "sl" else number
            for n, site in enumerate(NAMES)
        }
        plain.round(number, {site: list(opened[site].round(turns[site])) for site in NAMES})
    ends: list[nn.Module] = [plain.fronts[NAMES[-1]]]
    if method == "cse-fsl":
        ends.append(plain.nets[NAMES[-1]])
    if method != "fedavg":
        one = plain.backs[NAMES[0]] if method == "splitfed-v1" else plain.one
        assert one is not None
        ends.append(one)
    if method == "fsl-sage":
        ends += plain.nets.values()
    return [value.numpy() for module in ends for value in floats(module).values()]


def compared(found: Mapping[str, np.ndarray], wanted: Sequence[np.ndarray]) -> dict[str, Any]:
    """The largest relative difference of any weight, and where."""
    worst, at, differ, count = 0.0, "", 0, 0
    for (name, value), right in zip(found.items(), wanted, strict=True):
        a, b = value.astype(np.float64), right.astype(np.float64)
        if a.shape != b.shape:
            raise RuntimeError(f"{name} has shape {a.shape}, not {b.shape}")
        with np.errstate(divide="ignore", invalid="ignore"):
            apart = np.where(a == b, 0.0, np.abs(a - b) / np.abs(b))
        differ, count = differ + int((a != b).sum()), count + a.size
        if apart.max() > worst:
            place = np.unravel_index(int(apart.argmax()), apart.shape)
            worst, at = float(apart.max()), f"{name}{[int(each) for each in place]}"
    return {"difference": float(f"{worst:.3g}"), "at": at, "differ": differ, "weights": count}


def row(method: str, model: str, optimizer: str) -> dict[str, Any]:
    """One run over sockets, and the same in one process."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = configured(method, model, optimizer, folder)
        (folder / "run").mkdir()
        split = method != "fedavg"
        play(config, folder / "run", NAMES, with_split_server=split, limit_s=120)
        complete = described(config)
        found = found_by(complete, folder / "run")
        exact = compared(found, wanted_by(complete, torch.float64))
        rounded = compared(found, wanted_by(complete, torch.float32))
    named = {"bench": "lockstep", "method": method, "model": model, "optimizer": optimizer}
    return {**named, **exact, "fp32_average": rounded["difference"]}


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The table for docs/BENCHMARKS.md."""
    made = [
        (
            "| method | model | optimizer | weights | not equal to the bit | largest relative "
            "difference | at | if averages are summed in fp32 |"
        ),
        "| --- | --- | --- | ---: | ---: | ---: | --- | ---: |",
    ]
    return made + [
        f"| {r['method']} | {r['model']} | {r['optimizer']} | {r['weights']:,} | {r['differ']} | "
        f"{r['difference']:.2g} |"
        f" {r['at'] or '-'} | {r['fp32_average']:.2g} |"
        for r in rows
    ]


def main() -> None:
    """Print the rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--models", default="cnn,gpt")
    parser.add_argument("--optimizers", default="sgd,adamw")
    parser.add_argument("--table", action="store_true", help="print the kept rows as a table")
    options = parser.parse_args()
    if options.table:
        print("\n".join(table([json.loads(line) for line in RESULTS.read_text().splitlines()])))
        return
    torch.set_num_threads(1)
    for model in options.models.split(","):
        for optimizer in options.optimizers.split(","):
            for method in options.methods.split(","):
                print(json.dumps(row(method, model, optimizer)), flush=True)


if __name__ == "__main__":
    main()
