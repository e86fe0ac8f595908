"""`fsl-node compare`: one real run of each of several methods of split learning, or of several
rules of federated fine-tuning.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import attrs
import click
from click.core import ParameterSource

from fsl_async.commands.client import check_base, check_columns, check_data, check_task
from fsl_async.commands.options import Finite, Setting, Whole
from fsl_async.commands.output import Output, encoded
from fsl_async.config.rules import is_own
from fsl_async.config.settings_training import SplitOptimizer
from fsl_async.config.settings_tuning import AdapterRuleName
from fsl_async.errors import UsageError
from fsl_async.roles.phrasing import counted
from fsl_async.roles.split.methods import ALIGNED, AUXILIARY, names_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from fsl_async.process.stopper import Stopper
    from fsl_async.tools.compare.choices import Choices
    from fsl_async.tools.compare.outcome import Outcome
    from fsl_async.tools.compare.places import Loopback
    from fsl_async.tools.compare.tuning.outcome import Result

_COUNT = Whole(1, 1 << 30)
_FORMATS = click.Choice(["fp32", "bf16", "e4m3", "e5m2", "uniform"])
_FILE = click.Path(path_type=Path)


@click.command("compare")
@click.option(
    "--methods", required=True, metavar="A,B,...",
    help=f"{', '.join(names_of())}. With --base: {', '.join(get_args(AdapterRuleName))}.",
)  # fmt: skip
@click.option(
    "--data",
    required=True,
    multiple=True,
    metavar="PATH",
    help="Images or other labeled samples with a test part; or text. With --base records as of"
    " --role client, once for each site.",
)
@click.option(
    "--base", type=_FILE, metavar="MODEL_DIR",
    help="Tune this base model by rules of federated LoRA, and beside them on all records in one"
    " process, and at each site alone.",
)  # fmt: skip
@click.option(
    "--ranks", default="", metavar="A,B,...",
    help="With --base: the rank of each site's adapters, where the rule allows unequal ones.",
)  # fmt: skip
@click.option(
    "--orders", default="", metavar="A,B,...",
    help="With --base: the order of each site's steps, first or zeroth.",
)  # fmt: skip
@click.option(
    "--columns", metavar="NAME=COLUMN,...",
    help="With --base: columns of the records by name, as of --role client.",
)  # fmt: skip
@click.option(
    "--eval", "held_out", metavar="PATH",
    help="With --base: records that versions are scored on. [default: what sites hold out,"
    " together]",
)  # fmt: skip
@click.option(
    "--score-every", type=Whole(1), metavar="ROUNDS",
    help="With --base: score every so-manieth version, and the last.  [default: 1]",
)  # fmt: skip
@click.option(
    "--set", "sets", multiple=True, type=Setting(), metavar="TABLE.KEY=VALUE",
    help="A setting of the runs that no option makes, such as split.align_batch=256,"
    " split.preset=published-fsl-sage or, with --base, tune.objective=classify.",
)  # fmt: skip
@click.option(
    "--seeds", default="", metavar="A,B,...", help="With --base: repeat everything for each seed."
)
@click.option(
    "--model", default="small-cnn", show_default=True, metavar="NAME",
    help="small-cnn, resnet18; for text gpt-0.5m, gpt-1m, ...; or your own, FILE.py:FUNCTION.",
)  # fmt: skip
@click.option("--sizes", default="", metavar="A=B,...", help="Sizes of the model, like width=32.")
@click.option("--cut", default="", metavar="WHERE", help="The cut layer; default: the model's.")
@click.option(
    "--auxiliary",
    default="blocks:1",
    show_default=True,
    help=f"{AUXILIARY}: linear | blocks:N | FILE.py:FUNCTION",
)
@click.option("--clients", default=4, show_default=True, type=Whole(1, 64))
@click.option("--rounds", default=10, show_default=True, type=_COUNT)
@click.option(
    "--target-accuracy", "target", type=Finite(), metavar="A",
    help="Accuracy on the held-out set, 0 to 1. [default: 0.5; with --base none]",
)  # fmt: skip
@click.option(
    "--target-loss", type=Finite(0, min_open=True), metavar="L",
    help="With --base and tune.objective = lm: the loss down to which, instead.",
)  # fmt: skip
@click.option("--stop-at-target", is_flag=True, help="End a method's run at the target.")
@click.option("--batch", type=_COUNT, help="[default: 32; with --base 16]")
@click.option(
    "--samples", default=0, type=Whole(0, 1 << 40),
    help="Of a client in a round. [default: all it has, once]",
)  # fmt: skip
@click.option("--learning-rate", default=1e-3, show_default=True, type=Finite())
@click.option(
    "--optimizer", default="adamw", show_default=True, type=click.Choice(get_args(SplitOptimizer)),
    help="Of both parts.",
)  # fmt: skip
@click.option("--weight-decay", default=1e-4, show_default=True, type=Finite(0))
@click.option(
    "--upload-every",
    default=5,
    show_default=True,
    type=_COUNT,
    help=f"{AUXILIARY}: steps from one upload to the next.",
)
@click.option(
    "--align-every",
    default=2,
    show_default=True,
    type=Whole(0, 1 << 30),
    help=f"{ALIGNED}: rounds from one alignment to the next; 0 = never.",
)
@click.option(
    "--align-passes",
    default=20,
    show_default=True,
    type=_COUNT,
    help=f"{ALIGNED}: passes over the buffer per alignment.",
)
@click.option("--align-rate", default=3e-3, show_default=True, type=Finite())
@click.option(
    "--buffer-samples",
    default=256,
    show_default=True,
    type=_COUNT,
    help=f"{ALIGNED}: newest samples kept of each client.",
)
@click.option(
    "--alpha",
    type=Finite(0, min_open=True),
    help="Divide by Dirichlet(alpha) over classes. [default: IID]",
)
@click.option(
    "--format",
    "number_format",
    default="bf16",
    show_default=True,
    type=_FORMATS,
    help="Number format of activations and gradients.",
)
@click.option("--mode", default="free", show_default=True, type=click.Choice(["free", "lockstep"]))
@click.option(
    "--in-flight",
    default=2,
    show_default=True,
    type=Whole(1, 64),
    help="Uploads of a client in flight at most.",
)
@click.option("--seed", default=0, show_default=True, type=Whole(0, 2**62))
@click.option(
    "--net",
    metavar="PROFILE[:KEY=VALUE]|RATE,DELAY",
    help="Links between clients and servers: a profile of the network laboratory, with changes if"
    " needed (transatlantic:loss=0%; needs root), or a rate and one-way delay like 200mbit,45ms.",
)
@click.option(
    "--json", "json_path", type=_FILE, metavar="FILE", help="Write one JSON object for each method."
)
@click.option(
    "--png",
    "png_path",
    type=_FILE,
    metavar="FILE",
    help="Draw accuracy against bytes, rounds and seconds.",
)
@click.option(
    "--out",
    type=_FILE,
    metavar="DIR",
    help="Directory of the runs. [default: runs/compare-DATE-TIME]",
)
def command(
    *,
    methods: str,
    data: tuple[str, ...],
    base: Path | None,
    ranks: str,
    orders: str,
    columns: str | None,
    held_out: str | None,
    score_every: int | None,
    sets: tuple[str, ...],
    seeds: str,
    net: str | None,
    json_path: Path | None,
    png_path: Path | None,
    out: Path | None,
    **more: Any,
) -> None:
    """Train with each method on the same data, from the same weights, and compare the costs.

    Real nodes on this machine: a parameter server, a split server and clients, over sockets. After
    each round the joined model is scored on the data's test part; training and clock pause
    meanwhile. Bytes are those that the streams carried, both directions, all clients, the first
    download included.

    With --base, rules of federated LoRA instead: a client for each --data, and beside them training
    on all records in one process, and at each site alone. Bytes are those of a site in a round.
    """
    from fsl_async.tools.compare.places import net_of
    from fsl_async.tools.compare.tuning.choices import is_tuning

    kind: Any
    if is_tuning(methods) or base is not None:
        _check_kind(_SPLIT_ONLY, "is of split learning, and --base tunes a model")
        kind = _Tuning(
            methods,
            data,
            base=base,
            ranks=ranks,
            orders=orders,
            columns=columns,
            held_out=held_out,
            score_every=score_every,
            sets=sets,
            seeds=seeds,
            **more,
        )
    else:
        _check_kind(_TUNING_ONLY, "needs --base MODEL_DIR, and methods like fedit,bank")
        kind = _Split(methods, data, sets=sets, **more)
    between = net_of(net, kind.choices.names)
    if png_path is not None:
        from fsl_async.tools.compare.plot import check_plot

        check_plot(png_path)
        _check_writable("--png", png_path)
    if json_path is not None:
        _check_writable("--json", json_path)
    from fsl_async.process.stopper import Stopper, stop_on_signals

    kind.check()
    folder = _make_folder(out)
    output = Output()
    clients = counted(len(kind.choices.names), "client")
    output.say(f"{', '.join(kind.choices.methods)}: {clients}, {between.words}; files: {folder}")
    found: list[Any] = []
    stopper = Stopper()
    with stop_on_signals(stopper):
        for one, row in kind.results(folder, between.make, output.say, stopper):
            found.append(one)
            for path in (folder / "compare.jsonl", json_path):
                if path is not None:
                    with path.open("w" if len(found) == 1 else "a") as file:
                        file.write(encoded(row) + "\n")
    output.say("")
    for line in kind.lines(found):
        output.say(line)
    if png_path is not None:
        kind.draw(found, png_path, between.words)
        output.say(f"picture: {png_path}")


_TUNING_ONLY = {
    "ranks": "--ranks", "orders": "--orders", "columns": "--columns", "held_out": "--eval",
    "score_every": "--score-every", "seeds": "--seeds", "target_loss": "--target-loss",
}  # fmt: skip
_SPLIT_ONLY = {
    name: f"--{name.replace('_', '-')}"
    for name in (
        "model", "sizes", "cut", "auxiliary", "clients", "samples", "upload_every", "align_every",
        "align_passes", "align_rate", "buffer_samples", "alpha", "mode", "in_flight",
        "optimizer", "weight_decay",
    )
} | {"number_format": "--format"}  # fmt: skip


def _check_kind(others: Mapping[str, str], words: str) -> None:
    """Raise UsageError for an option of the other kind of comparison."""
    context = click.get_current_context()
    for name, option in others.items():
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise UsageError(f"{option} {words}")


def _given_options() -> tuple[str, ...]:
    """Return the options of the command line that are given."""
    context = click.get_current_context()
    return tuple(
        option.opts[0]
        for option in context.command.params
        if context.get_parameter_source(str(option.name)) is ParameterSource.COMMANDLINE
    )


def _own_code(value: str, option: str) -> str:
    """Return FILE.py:FUNCTION with an absolute path, anything else as it is."""
    return check_task(value, option) if is_own(value) else value


class _Split:
    """A comparison of methods of split learning."""

    def __init__(
        self,
        methods: str,
        data: tuple[str, ...],
        *,
        target: float | None,
        target_loss: float | None,
        stop_at_target: bool,
        alpha: float | None,
        number_format: str,
        batch: int | None,
        model: str,
        auxiliary: str,
        **more: Any,
    ) -> None:
        from fsl_async.tools.compare.choices import Choices, parse_methods

        del target_loss
        names = parse_methods(methods)
        if len(data) > 1:
            raise UsageError("--data: give one; methods of split learning divide it among clients")
        self.choices = Choices(
            methods=names,
            data=str(check_data(data[0])),
            target=0.5 if target is None else target,
            stops_at_target=stop_at_target,
            alpha=alpha or 0.0,
            up=number_format,
            down=number_format,
            batch=batch or 32,
            given=_given_options(),
            model=_own_code(model, "--model"),
            auxiliary=_own_code(auxiliary, "--auxiliary"),
            **more,
        )

    def check(self) -> None:
        """Raise what would end a run."""
        from fsl_async.tools.compare.problem import check

        for method in self.choices.methods:
            check(self.choices, method)

    def results(
        self,
        folder: Path,
        places: Callable[[], Loopback],
        say: Callable[[str], None],
        stop: Stopper,
    ) -> Iterator[tuple[Outcome, dict[str, Any]]]:
        """Run all; each with its row."""
        from fsl_async.tools.compare.comparison import Comparison
        from fsl_async.tools.compare.outcome import row
        from fsl_async.tools.compare.problem import used

        comparison = Comparison(self.choices, folder, places, say=say, stop=stop)
        for method in self.choices.methods:
            found = comparison.run(method)
            yield found, row(found, used(self.choices, method))

    def lines(self, found: list[Outcome]) -> list[str]:
        """The table."""
        from fsl_async.tools.compare.table import lines

        return lines(found)

    def draw(self, found: list[Outcome], path: Path, net: str) -> None:
        """The picture."""
        from fsl_async.tools.compare.plot import draw

        draw(found, path, _title(self.choices, net))


class _Tuning:
    """A comparison of rules of federated fine-tuning."""

    def __init__(
        self,
        methods: str,
        data: tuple[str, ...],
        *,
        base: Path | None,
        ranks: str,
        orders: str,
        columns: str | None,
        held_out: str | None,
        score_every: int | None,
        sets: tuple[str, ...],
        seeds: str,
        **more: Any,
    ) -> None:
        from fsl_async.tools.compare.tuning.choices import (
            TuningChoices,
            parse_methods,
            parse_numbers,
            parse_orders,
        )

        names = parse_methods(methods)
        if base is None:
            raise UsageError(f"--methods {names[0]}: needs --base MODEL_DIR")
        self._seeds = parse_numbers("--seeds", seeds) or (more["seed"],)
        self.choices = TuningChoices(
            methods=names,
            base=str(check_base(base)),
            data=tuple(str(check_data(one)) for one in data),
            ranks=parse_numbers("--ranks", ranks),
            orders=parse_orders(orders),
            columns=check_columns(columns, has_base=True),
            held_out="" if held_out is None else str(check_data(held_out)),
            rounds=more["rounds"],
            score_every=score_every or 1,
            target_accuracy=more["target"] or 0.0,
            target_loss=more["target_loss"] or 0.0,
            stops_at_target=more["stop_at_target"],
            batch=more["batch"] or 16,
            learning_rate=more["learning_rate"],
            seed=self._seeds[0],
            sets=sets,
        )

    def check(self) -> None:
        """Raise what would end a run."""
        from fsl_async.tools.compare.tuning.records import load_records
        from fsl_async.tools.compare.tuning.scores import TunedModel

        self._records = load_records(self.choices)
        for method in self.choices.methods:
            TunedModel(self.choices.config(method), self.choices.base, method)

    def results(
        self,
        folder: Path,
        places: Callable[[], Loopback],
        say: Callable[[str], None],
        stop: Stopper,
    ) -> Iterator[tuple[Result, dict[str, Any]]]:
        """Run all, for each seed; each with its row."""
        from fsl_async.tools.compare.tuning.outcome import row
        from fsl_async.tools.compare.tuning.runs import TuningComparison

        for site, records in zip(self.choices.names, self._records.trained, strict=True):
            say(f"{site}: {records.summary}")
        for seed in self._seeds:
            choices = attrs.evolve(self.choices, seed=seed)
            mine = folder if len(self._seeds) == 1 else folder / f"seed-{seed}"
            if mine != folder:
                say(f"seed {seed}")
            comparison = TuningComparison(choices, self._records, mine, places, say=say, stop=stop)
            for found in comparison.results():
                yield found, row(found, choices.as_dict())

    def lines(self, found: list[Result]) -> list[str]:
        """The table."""
        from fsl_async.tools.compare.tuning.outcome import lines

        return lines(found)

    def draw(self, found: list[Result], path: Path, net: str) -> None:
        """The picture."""
        from fsl_async.tools.compare.tuning.pictures import draw

        sites = counted(len(self.choices.data), "site")
        draw(found, path, f"{Path(self.choices.base).name}, {sites}, {net}")


def _check_writable(option: str, path: Path) -> None:
    """Raise UsageError, before training, where the file cannot be written."""
    if not path.parent.is_dir():
        raise UsageError(f"{option} {path}: there is no directory {path.parent}")
    if path.is_dir():
        raise UsageError(f"{option} {path}: is a directory; name a file in it")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UsageError(f"{option} {path}: cannot be written")


def _title(choices: Choices, net: str) -> str:
    data = Path(choices.data).name or choices.data
    return f"{choices.model} on {data}, {choices.clients} clients, {choices.up} at the cut, {net}"


def _make_folder(out: Path | None) -> Path:
    folder = out or Path("runs") / time.strftime("compare-%Y%m%d-%H%M%S")
    if out is not None and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"--out {out} exists already: give a new directory")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out {folder}: {error.strerror}") from None
    return folder
