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

from fsl_async.commands.client import check_base, check_columns, check_data, check_task
from fsl_async.commands.options import Finite, Setting, Whole, Words
from fsl_async.commands.output import Output, encoded
from fsl_async.config.load import setting_choices
from fsl_async.config.rules import is_own
from fsl_async.config.settings import TABLES
from fsl_async.config.settings_tuning import AdapterRuleName
from fsl_async.config.site_policy import Order
from fsl_async.errors import UsageError
from fsl_async.roles.phrasing import counted
from fsl_async.roles.split.methods import names_of
from fsl_async.tools.compare.choices import (
    SPLIT_DEFAULTS,
    SPLIT_SETTINGS,
    Choices,
    parse_names,
    parse_numbers,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from fsl_async.tools.compare.runner import Comparison

    Command = Callable[..., None]

_COUNT = Whole(1, 1 << 30)
_FILE = click.Path(path_type=Path)


def settings_of_split(command: Command) -> Command:
    """Add the options that give a setting of split learning under a shorter name."""
    choices = setting_choices()
    for key, option in reversed(list(SPLIT_SETTINGS.items())):
        table, _, name = key.partition(".")
        field = attrs.fields_dict(TABLES[table])[name]
        if table == "train" or option == "--format":
            continue  # they have lines of their own
        default = SPLIT_DEFAULTS.get(key, field.default)
        shown = "" if default == "" else f" [default: {default}]"
        kind = Words(*choices[key]) if choices[key] else None
        add = click.option(option, type=kind, help=f"{field.metadata['help']}.{shown}")
        command = add(command)
    return command


@click.command("compare")
@click.option(
    "--methods", required=True, metavar="A,B,...",
    help=f"{', '.join(names_of())}. With --base: {', '.join(get_args(AdapterRuleName))}.",
)  # fmt: skip
@click.option(
    "--data", required=True, multiple=True, metavar="PATH",
    help="Images or other labeled samples with a test part; or text. With --base records as of"
    " --role client, once for each site.",
)  # fmt: skip
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
    help="Score every so-manieth round, and the last.  [default: 1]",
)  # fmt: skip
@click.option(
    "--set", "sets", multiple=True, type=Setting(), metavar="TABLE.KEY=VALUE",
    help="A setting of the runs that no option makes, such as split.align_batch=256,"
    " split.preset=published-fsl-sage or, with --base, tune.objective=classify.",
)  # fmt: skip
@click.option("--seeds", default="", metavar="A,B,...", help="Repeat everything for each seed.")
@click.option(
    "--model", metavar="NAME",
    help="small-cnn, resnet18; for text gpt-0.5m, gpt-1m, ...; or your own, FILE.py:FUNCTION."
    " [default: small-cnn]",
)  # fmt: skip
@settings_of_split
@click.option("--batch", help="Samples in a step. [default: 32; with --base 16]")
@click.option("--learning-rate", help="[default: 0.001]")
@click.option("--weight-decay", help="[default: 0.0001]")
@click.option(
    "--format", type=Words("fp32", "bf16", "e4m3", "e5m2", "uniform"),
    help="Number format of activations and gradients. [default: bf16]",
)  # fmt: skip
@click.option("--clients", type=Whole(1, 64), help="[default: 4]")
@click.option("--rounds", type=_COUNT, help="[default: 10]")
@click.option(
    "--target-accuracy", type=Finite(0, 1, min_open=True), metavar="A",
    help="Accuracy on the held-out set. [default: 0.5; with --base none]",
)  # fmt: skip
@click.option(
    "--target-loss", type=Finite(0, min_open=True), metavar="L",
    help="With --base and tune.objective = lm: the loss down to which, instead.",
)  # fmt: skip
@click.option(
    "--stop-at-target", "stops_at_target", is_flag=True, help="End a method's run at the target."
)
@click.option(
    "--alpha", type=Finite(0, min_open=True),
    help="Divide by Dirichlet(alpha) over classes. [default: IID]",
)  # fmt: skip
@click.option("--seed", type=Whole(0, 2**62), help="[default: 0]")
@click.option(
    "--net", metavar="PROFILE[:KEY=VALUE]|RATE,DELAY",
    help="Links between clients and servers: a profile of the network laboratory, with changes if"
    " needed (transatlantic:loss=0%; needs root), or a rate and one-way delay like 200mbit,45ms.",
)  # fmt: skip
@click.option(
    "--json", "json_path", type=_FILE, metavar="FILE", help="Write one JSON object for each method."
)
@click.option(
    "--png", "png_path", type=_FILE, metavar="FILE",
    help="Draw accuracy, or loss, against bytes, rounds and seconds.",
)  # fmt: skip
@click.option(
    "--out", type=_FILE, metavar="DIR",
    help="Directory of the runs. [default: runs/compare-DATE-TIME]",
)  # fmt: skip
def command(
    *,
    methods: str,
    data: tuple[str, ...],
    base: Path | None,
    net: str | None,
    json_path: Path | None,
    png_path: Path | None,
    out: Path | None,
    seeds: str,
    **options: Any,
) -> None:
    """Train with each method on the same data, from the same weights, and compare the costs.

    Real nodes on this machine, each a process: a parameter server, a split server and clients, over
    sockets. After each round the joined model is scored on the data's test part; training and clock
    pause meanwhile. Bytes are those that the streams carried, both directions, all clients, the
    first download included.

    With --base, rules of federated LoRA instead: a client for each --data, and beside them training
    on all records in one process, and at each site alone.
    """
    from fsl_async.process.stopper import Stopper, stop_on_signals
    from fsl_async.tools.compare.table import lines
    from fsl_async.tools.demo.places import net_of
    from fsl_async.tools.demo.scenario import Stage

    given = {name: value for name, value in options.items() if value not in {None, "", ()}}
    choices = _choices(methods, data, base, given)
    all_seeds = tuple(dict.fromkeys(parse_numbers("--seeds", seeds))) or (choices.seed,)
    between = net_of(net, choices.names)
    if png_path is not None:
        from fsl_async.tools.compare.table import check_plot

        check_plot(png_path)
        _check_writable("--png", png_path)
    if json_path is not None:
        _check_writable("--json", json_path)
    comparison = _comparison(choices)
    comparison.check()
    folder = _make_folder(out)
    output = Output()
    clients = counted(len(choices.names), "client")
    output.say(f"{', '.join(choices.methods)}: {clients}, {between.words}; files: {folder}")
    stage, found = Stage(output.say, Stopper(), between.make), []
    with stop_on_signals(stage.stop):
        for seed in all_seeds:
            comparison.choices = attrs.evolve(choices, seed=seed)
            mine = folder if len(all_seeds) == 1 else folder / f"seed-{seed}"
            if mine != folder:
                output.say(f"seed {seed}")
            for outcome in comparison.outcomes(mine, stage):
                found.append(outcome)
                row = encoded(comparison.row(outcome)) + "\n"
                for path in filter(None, (folder / "compare.jsonl", json_path)):
                    with path.open("w" if len(found) == 1 else "a") as file:
                        file.write(row)
    output.say("")
    for line in lines(found):
        output.say(line)
    if png_path is not None:
        from fsl_async.tools.compare.table import draw

        used = choices.used(choices.run(choices.methods[0]))
        trained = Path(used.get("base") or used["model"]).name
        data_name = Path(choices.data[0]).name if len(choices.data) == 1 else "own records"
        draw(found, png_path, f"{trained} on {data_name}, {clients}, {between.words}")
        output.say(f"picture: {png_path}")


def _choices(
    methods: str, data: tuple[str, ...], base: Path | None, given: dict[str, Any]
) -> Choices:
    """Read the options of one kind of comparison. Raises UsageError and ConfigError."""
    from fsl_async.tools.compare.tune import METHODS, TuningChoices, is_tuning

    tunes = is_tuning(methods)
    if base is None and not tunes:
        from fsl_async.tools.compare.split import SplitChoices

        for name in ("model", "auxiliary"):
            if is_own(given.get(name, "")):
                given[name] = check_task(given[name], f"--{name}")
        words = "needs --base MODEL_DIR, and methods like fedit,bank"
        found = tuple(dict.fromkeys(parse_names("--methods", methods, names_of())))
        paths = tuple(map(check_data, data))
        return SplitChoices(methods=found, data=paths, **_fields(SplitChoices, given, words))
    found = tuple(dict.fromkeys(parse_names("--methods", methods, METHODS)))
    if base is None:
        raise UsageError(f"--methods {found[0]}: needs --base MODEL_DIR")
    for name, read in (
        ("ranks", lambda text: parse_numbers("--ranks", text)),
        ("orders", lambda text: parse_names("--orders", text, get_args(Order))),
        ("columns", lambda text: check_columns(text, has_base=True)),
        ("held_out", check_data),
    ):
        if name in given:
            given[name] = read(given[name])
    fields = _fields(TuningChoices, given, "is of split learning, and --base tunes a model")
    model, paths = str(check_base(base)), tuple(map(check_data, data))
    return TuningChoices(methods=found, base=model, data=paths, **fields)


def _comparison(choices: Choices) -> Comparison:
    from fsl_async.tools.compare.tune import TuningChoices

    if isinstance(choices, TuningChoices):
        from fsl_async.tools.compare.alone import TuningComparison

        return TuningComparison(choices)
    from fsl_async.tools.compare.split import SplitComparison

    return SplitComparison(choices)


def _fields(kind: type[Choices], given: dict[str, Any], otherwise: str) -> dict[str, Any]:
    """Return the fields of `kind` that the options decide.

    Raises UsageError for an option of the other kind of comparison.
    """
    options = {param.name: param.opts[0] for param in click.get_current_context().command.params}
    fields = attrs.fields_dict(kind)
    found = {name: value for name, value in given.items() if name in fields}
    for name, value in given.items():
        if name not in fields:
            keys = [key for key, option in kind.OPTIONS.items() if option == options[name]]
            if not keys:
                raise UsageError(f"{options[name]} {otherwise}")
            found.setdefault("settings", {}).update(dict.fromkeys(keys, value))
    return found


def _check_writable(option: str, path: Path) -> None:
    """Raise UsageError, before training, where the file cannot be written."""
    if not path.parent.is_dir():
        raise UsageError(f"{option} {path}: there is no directory {path.parent}")
    if path.is_dir():
        raise UsageError(f"{option} {path}: is a directory; name a file in it")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UsageError(f"{option} {path}: cannot be written")


def _make_folder(out: Path | None) -> Path:
    folder = out or Path("runs") / time.strftime("compare-%Y%m%d-%H%M%S")
    if out is not None and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"--out {out} exists already: give a new directory")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out {folder}: {error.strerror}") from None
    return folder
