"""Bytes and waits of split learning: formats at the cut, FSL-SAGE against SplitFed V1, long links.

    python benchmarks/split_methods.py methods --data PATH --name cifar10-small --target 0.38
    python benchmarks/split_methods.py formats --data PATH --name cifar10-small --target 0.45
    python benchmarks/split_methods.py idle --data PATH --name cifar10-small
        run what is missing in benchmarks/results/split_methods.jsonl, then stop;
        --rows 1 after one row, --list prints what is missing
    python benchmarks/split_methods.py tables
        print the tables of docs/BENCHMARKS.md from the rows; --docs writes them there

Every row is a run of `fsl-node compare`: real nodes as processes, real sockets on loopback, the
codec, the stores (kept rows are from when nodes were threads of one process). The joined model is
scored after each round on the data's test part, while no client trains. Bytes are those that the
streams carried, both directions, all clients, the first download included.

"methods" compares true gradients (SplitFed V1), FSL-SAGE, and FSL-SAGE whose auxiliary models are
never aligned, behind pool2, at the published learning rate. "idle" puts the proxy of
`fsl_async.tools.proxy` between clients and servers (no loss); a client's idle share is the time its
training thread waits for the network, of its time from the first batch to the end of the last
round. Run "idle" alone on the machine.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import torch
from split_grid import Spec, Task, formats_grid, idle_grid, methods_grid, read_rows
from split_tables import text_of

from fsl_async.process.stopper import Stopper
from fsl_async.tools.compare.split import SplitComparison
from fsl_async.tools.demo.places import net_of
from fsl_async.tools.demo.scenario import Stage

RESULTS = Path(__file__).parent / "results" / "split_methods.jsonl"
DOCS = Path(__file__).parents[1] / "docs" / "BENCHMARKS.md"
MARKS = ("<!-- split_methods.py tables --docs -->\n", "<!-- end of split_methods.py -->\n")


def measure(spec: Spec, path: str) -> dict[str, Any]:
    """Run one row."""
    torch.set_num_threads(1)
    begun = time.perf_counter()
    choices = spec.choices(path)
    with tempfile.TemporaryDirectory(prefix="split-methods-") as folder:
        stage = Stage(
            lambda text: print(text, file=sys.stderr, flush=True),
            Stopper(),
            net_of(spec.net or None, choices.names).make,
        )
        outcome = SplitComparison(choices).play(spec.method, Path(folder), stage)
    found = outcome.row({**spec.values, "data": spec.data})
    return {
        **found,
        "bench": "split_methods",
        "kind": spec.kind,
        "net": spec.net,
        "key": spec.key,
        "wall_s": round(time.perf_counter() - begun, 1),
    }


@click.group()
def main() -> None:
    """Bytes and waits of split learning."""


def _grid(kind: str, task: Task) -> list[Spec]:
    if kind == "methods":
        return list(methods_grid(task))
    return list(formats_grid(task) if kind == "formats" else idle_grid(task.data))


def _command(kind: str) -> Any:
    @main.command(kind)
    @click.option("--data", required=True, help="A data set with a test part.")
    @click.option("--name", required=True, help="Its name in the tables.")
    @click.option("--target", default=0.5, type=float, help="Accuracy to reach.")
    @click.option("--rounds", default=12, help="Rounds of a run.")
    @click.option("--results", type=click.Path(path_type=Path), default=RESULTS)
    @click.option("--rows", "limit", default=0, help="Stop after this many rows; 0 = all.")
    @click.option("--list", "only_list", is_flag=True, help="Print what is missing.")
    def run(
        *,
        data: str,
        name: str,
        target: float,
        rounds: int,
        results: Path,
        limit: int,
        only_list: bool,
    ) -> None:
        task, done = Task(name, target, rounds), 0
        while True:
            kept = read_rows(results)
            missing = [spec for spec in _grid(kind, task) if spec.key not in kept]
            if only_list:
                for spec in missing:
                    print(spec.method, spec.seed, dict(spec.more))
            if only_list or not missing or (limit and done >= limit):
                return
            line = json.dumps(measure(missing[0], data))
            results.parent.mkdir(parents=True, exist_ok=True)
            with results.open("a") as file:
                file.write(line + "\n")
            print(line, flush=True)
            done += 1

    return run


for _kind in ("methods", "formats", "idle"):
    _command(_kind)


@main.command("tables")
@click.option("--results", type=click.Path(path_type=Path), default=RESULTS)
@click.option("--docs", is_flag=True, help="Write them into docs/BENCHMARKS.md.")
def tables(*, results: Path, docs: bool) -> None:
    """Print the tables."""
    text = text_of(list(read_rows(results).values()))
    if not docs:
        print(text)
        return
    before, _, rest = DOCS.read_text().partition(MARKS[0])
    after = rest.partition(MARKS[1])[2]
    DOCS.write_text(before + MARKS[0] + f"\n{text}\n\n" + MARKS[1] + after)


if __name__ == "__main__":
    main()
