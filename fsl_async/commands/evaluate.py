"""`fsl-node evaluate RUN_DIR`: the loss of a run's versions on held-out data."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from fsl_async.commands.options import Options, RunDir, Whole, Words, argument, option, takes
from fsl_async.commands.output import Output
from fsl_async.errors import RunDirError, UsageError
from fsl_async.roles.phrasing import figure

_POLL_S = 1.0


class EvaluateOptions(Options):
    """The options of `fsl-node evaluate`."""

    run_dir: Path = argument(RunDir())
    follow: bool = option("Evaluate each new version until the run ends.")
    version: int | None = option("Evaluate version N.", Whole(min=0), "N")
    mean: bool = option("Evaluate the mean of late versions as well.")
    data: str | None = option(
        "Text, of which the last part counts; with --base records.", Words(files=True), "PATH"
    )
    base: Path | None = option("The base model of a run that tunes one.", metavar="MODEL")
    columns: str | None = option(
        "With --base: columns of --data, as at clients.", metavar="NAME=COLUMN,..."
    )
    tokenizer: str | None = option(
        "The tokenizer of a run that has one, as at its clients.", metavar="PATH"
    )
    limit_bytes: int = option(
        "Evaluate on at most this much of the held-out text.",
        Whole(min=1), name="--bytes", default=1 << 17,
    )  # fmt: skip
    task: str | None = option(
        "Your own: takes weights by name.", Words(files=True), "FILE.py:FUNCTION"
    )
    threads: int = option("torch's threads here.", Whole(1, 4096), default=1)
    as_json: bool = option("Print one JSON object a version.", name="--json")


@click.command("evaluate")
@takes(EvaluateOptions)
def command(options: EvaluateOptions) -> None:
    """Evaluate the newest version of the run in RUN_DIR on held-out data.

    Reads the checkpoints of a parameter server, running or not, and adds each result to
    RUN_DIR/evaluations.jsonl, which fsl-node status shows. For the built-in model give the --data
    of the clients: the last data.holdout of it is evaluated on; without --data, of the built-in
    text. For a run that tunes a base model give --base, and as --data records that no client trains
    on: all of them count. For other models give --task: a function that takes a dict of tensors and
    returns {"loss": nats a token}.
    """
    from fsl_async.commands.client import check_columns
    from fsl_async.observe.node_folders import with_ledger

    version, base = options.version, options.base
    if options.follow and version is not None:
        raise UsageError("give --follow or --version, not both")
    run_dir = with_ledger(options.run_dir)
    output = Output(as_json=options.as_json)
    import torch

    from fsl_async.tools.versions import VersionEvaluator

    torch.set_num_threads(options.threads)
    evaluator = VersionEvaluator(
        run_dir,
        data=options.data,
        limit_bytes=options.limit_bytes,
        own=options.task,
        base=base,
        columns=check_columns(options.columns, has_base=base is not None),
        tokenizer=options.tokenizer,
    )
    kinds = ("weights", "mean") if options.mean else ("weights",)

    output.say(f"evaluates on {evaluator.summary or evaluator.data}")

    def evaluated(number: int) -> bool:
        # Both are read before either is measured: the parameter server removes old versions.
        loaded = [evaluator.load(number, of) for of in kinds]
        for one in loaded:
            if one is not None:
                _show(output, evaluator.evaluate(one))
        if options.mean and loaded[0] is not None and loaded[1] is None:
            record = loaded[0].record
            why = "the run has a planned end" if record.progress is not None else "not kept"
            output.say(f"version {number} has no mean: {why if number else 'it is the first one'}")
        return loaded[0] is not None

    if options.follow:
        _follow(run_dir, evaluator, evaluated)
        return
    have = evaluator.versions()
    chosen = version if version is not None else have[-1]
    if chosen not in have or not evaluated(chosen):
        raise RunDirError(f"{run_dir} does not keep version {chosen}; it has {have}")


def _follow(run_dir: Path, evaluator: Any, evaluated: Any) -> None:
    """Evaluate the newest version whenever there is one, until the parameter server has ended."""
    from fsl_async.commands.status_report import NodeStatus

    status, seen = NodeStatus(run_dir), -1
    try:
        while True:
            status.read()
            ended = status.state.node.ended_at is not None
            newest = evaluator.versions()[-1]
            if newest > seen:
                evaluated(newest)
                seen = newest
            elif ended:
                return
            else:
                time.sleep(_POLL_S)
    except KeyboardInterrupt:
        pass


def _show(output: Output, row: dict[str, Any]) -> None:
    if output.as_json:
        output.result(row)
        return
    shown = {name: value for name, value in row.items() if isinstance(value, float)}
    figures = ", ".join(
        f"{name.replace('_', ' ')} {figure(value, 4)}" for name, value in shown.items()
    )
    if row["loss"] is None:
        figures = "the loss is not finite"
    of = "" if row["of"] == "weights" else f", {row['of']} of late versions"
    output.say(f"version {row['version']}{of}, {row['tokens']:,} tokens: {figures}")
