"""Quality at equal tokens: synchronizing clients against synchronous data parallel.

    python benchmarks/quality.py              run what is missing in results/quality.jsonl
    python benchmarks/quality.py goals        run one experiment (`quality_grid.EXPERIMENTS`)
    python benchmarks/quality.py --list       print what would be run, one JSON object a line
    python benchmarks/quality.py --summary    the goals, from the rows: {"k2_percent": ...}
    python benchmarks/quality.py --docs       write two tables into docs/BENCHMARKS.md
    python benchmarks/quality.py --plot DIR   draw quality.svg

Every row trains the built-in GPT on the source of Python's standard library and reports the loss on
held-out text, after the same number of tokens in all: 9,600 batches of 4 windows, for 0.115 M
parameters. A row takes one to three minutes of one core.

The reference is synchronous data parallel: the gradients of the same clients' batches, averaged at
each step, with the same inner optimizer and schedule and its best of several peak rates. "alone" is
one process that takes the same batches in sequence, so with more steps. Defaults were chosen on
seeds 0 to 2; goals are reported on seeds 3 to 5. `quality_run` says what is real in a row.

A row is identified by what it measured (`spec`); rows in the results file are not run again. Each
carries a digest of the code that decides it, and --summary counts the rows of other code.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import attrs
import click
from quality_grid import EXPERIMENTS, grid
from quality_run import check, measure
from quality_spec import Spec, read_rows
from quality_tables import IN_DOCS, plot, summary, tables

RESULTS = Path(__file__).parent / "results" / "quality.jsonl"
DOCS = Path(__file__).parents[1] / "docs" / "BENCHMARKS.md"
MARKS = ("<!-- quality.py --docs -->\n", "<!-- end -->\n")


@click.command()
@click.argument("experiments", nargs=-1, type=click.Choice(list(EXPERIMENTS)))
@click.option("--results", type=click.Path(path_type=Path), default=RESULTS, show_default=True)
@click.option("--seed", "seeds", multiple=True, type=int, help="Instead of an experiment's own.")
@click.option("--jobs", default=1, show_default=True, help="Rows at a time, each with one core.")
@click.option("--rows", default=0, help="Stop after this many rows; 0 = all that are missing.")
@click.option("--list", "only_list", is_flag=True, help="Print what is missing, run nothing.")
@click.option("--table", is_flag=True, help="Print the markdown tables, run nothing.")
@click.option("--summary", "only_summary", is_flag=True, help="Print the goals, run nothing.")
@click.option("--json", "_", is_flag=True, expose_value=False, help="Rows are JSON anyway.")
@click.option("--docs", is_flag=True, help="Write two tables into docs/BENCHMARKS.md.")
@click.option("--plot", "folder", type=click.Path(path_type=Path), help="Draw, run nothing.")
@click.option("--check", "only_check", is_flag=True, help="Check that one client equals alone.")
@click.option("--smoke", is_flag=True, help="Four tiny rows on standard output, nothing kept.")
def main(
    *,
    experiments: tuple[str, ...],
    results: Path,
    seeds: tuple[int, ...],
    jobs: int,
    rows: int,
    folder: Path | None,
    only_list: bool,
    table: bool,
    only_summary: bool,
    docs: bool,
    only_check: bool,
    smoke: bool,
) -> None:
    """Compare losses at equal tokens."""
    if only_check:
        print(json.dumps(check()))
        return
    if smoke:
        tiny = Spec(seed=0, steps=(1, 1), total_steps=4, batch=2)
        grouped = attrs.evolve(tiny, steps=(1, 1, 1, 1), total_steps=8, groups=2, global_every=1)
        others = [attrs.evolve(tiny, mode=mode) for mode in ("parallel", "alone")]
        for spec in (tiny, *others, grouped):
            print(json.dumps(measure(spec)))
        return
    kept = read_rows(results)
    if table:
        print(tables(kept))
    elif only_summary:
        print(json.dumps(summary(kept)))
    elif docs:
        before, _, rest = DOCS.read_text().partition(MARKS[0])
        after = rest.partition(MARKS[1])[2]
        DOCS.write_text(before + MARKS[0] + f"\n{tables(kept, IN_DOCS)}\n\n" + MARKS[1] + after)
    elif folder is not None:
        for path in plot(kept, folder):
            print(path)
    else:
        missing = [spec for spec in grid(experiments, seeds) if spec.key not in kept]
        if only_list:
            for spec in missing:
                print(spec.key)
        else:
            run(missing[: rows or None], results, jobs)


def run(missing: list[Spec], results: Path, jobs: int) -> None:
    """Measure rows, append them to the results and print them."""
    results.parent.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        measured = [pool.submit(measure, spec) for spec in missing]
        for number, done in enumerate(as_completed(measured), start=1):
            row = done.result()
            if not math.isfinite(row["eval_loss"]):
                print(f"not finite: {row['spec']}", file=sys.stderr)
            line = json.dumps(row)
            with results.open("a") as file:
                file.write(line + "\n")
            print(line, flush=True)
            print(f"{number} of {len(missing)}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
