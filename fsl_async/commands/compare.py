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
from fsl_async.commands.options import Finite, Options, Setting, Whole, Words, option, takes
from fsl_async.commands.output import Output, encoded
from fsl_async.config.rules import is_own
from fsl_async.config.settings_tuning import AdapterRuleName
from fsl_async.config.site_policy import Order
from fsl_async.errors import UsageError
from fsl_async.roles.phrasing import counted
from fsl_async.roles.split.methods import names_of
from fsl_async.tools.compare.choices import Choices, parse_names, parse_numbers

if TYPE_CHECKING:
    from fsl_async.tools.compare.runner import Comparison

_COUNT = Whole(1, 1 << 30)


class CompareOptions(Options):
    """The options of `fsl-node compare`. Those of `Choices` have its fields' names."""

    methods: str = option(
        f"{', '.join(names_of())}. With --base: {', '.join(get_args(AdapterRuleName))}.",
        metavar="A,B,...", required=True,
    )  # fmt: skip
    data: tuple[str, ...] = option(
        "Images or other labeled samples with a test part; or text. With --base records as of"
        " --role client, once for each site.",
        metavar="PATH", required=True,
    )  # fmt: skip
    base: Path | None = option(
        "Tune this base model by rules of federated LoRA, and beside them on all records in one"
        " process, and at each site alone.",
        metavar="MODEL_DIR",
    )
    ranks: str | None = option(
        "With --base: the rank of each site's adapters, where the rule allows unequal ones.",
        metavar="A,B,...",
    )
    orders: str | None = option(
        "With --base: the order of each site's steps, first or zeroth.", metavar="A,B,..."
    )
    columns: str | None = option(
        "With --base: columns of the records by name, as of --role client.",
        metavar="NAME=COLUMN,...",
    )
    held_out: str | None = option(
        "With --base: records that versions are scored on. [default: what sites hold out,"
        " together]",
        metavar="PATH", name="--eval",
    )  # fmt: skip
    score_every: int | None = option(
        "Score every so-manieth round, and the last.  [default: 1]", Whole(1), "ROUNDS"
    )
    sets: tuple[str, ...] = option(
        "A setting of the runs that no option makes, such as split.cut=layer2,"
        " split.preset=published-fsl-sage or, with --base, tune.objective=classify.",
        Setting(), "TABLE.KEY=VALUE", name="--set",
    )  # fmt: skip
    seeds: str = option("Repeat everything for each seed.", metavar="A,B,...", default="")
    model: str | None = option(
        "small-cnn, resnet18; for text gpt-0.5m, gpt-1m, ...; or your own, FILE.py:FUNCTION."
        " [default: small-cnn]",
        metavar="NAME",
    )
    auxiliary: str | None = option(
        "Auxiliary model: linear, blocks:N or FILE.py:FUNCTION. [default: blocks:1]"
    )
    optimizer: str | None = option(
        "Of both parts of a cut model. [default: adamw]", Words("adamw", "adam", "sgd")
    )
    batch: str | None = option("Samples in a step. [default: 32; with --base 16]")
    learning_rate: str | None = option("[default: 0.001]")
    weight_decay: str | None = option("[default: 0.0001]")
    format: str | None = option(
        "Number format of activations and gradients. [default: bf16]",
        Words("fp32", "bf16", "e4m3", "e5m2", "uniform"),
    )
    clients: int | None = option("[default: 4]", Whole(1, 64))
    rounds: int | None = option("[default: 10]", _COUNT)
    target_accuracy: float | None = option(
        "Accuracy on the held-out set. [default: 0.5; with --base none]",
        Finite(0, 1, min_open=True), "A",
    )  # fmt: skip
    target_loss: float | None = option(
        "With --base and tune.objective = lm: the loss down to which, instead.",
        Finite(0, min_open=True), "L",
    )  # fmt: skip
    stops_at_target: bool = option("End a method's run at the target.", name="--stop-at-target")
    alpha: float | None = option(
        "Divide by Dirichlet(alpha) over classes. [default: IID]", Finite(0, min_open=True)
    )
    seed: int | None = option("[default: 0]", Whole(0, 2**62))
    net: str | None = option(
        "Links between clients and servers: a profile of the network laboratory, with changes if"
        " needed (transatlantic:loss=0%; needs root), or a rate and one-way delay like"
        " 200mbit,45ms.",
        metavar="PROFILE[:KEY=VALUE]|RATE,DELAY",
    )
    json_path: Path | None = option(
        "Write one JSON object for each method.", metavar="FILE", name="--json"
    )
    png_path: Path | None = option(
        "Draw accuracy, or loss, against bytes, rounds and seconds.", metavar="FILE", name="--png"
    )
    out: Path | None = option(
        "Directory of the runs. [default: runs/compare-DATE-TIME]", metavar="DIR"
    )


_OWN = ("methods", "data", "base", "seeds", "net", "json_path", "png_path", "out")
"""Options that are no field of `Choices`, and no setting."""


@click.command("compare")
@takes(CompareOptions)
def command(options: CompareOptions) -> None:
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

    json_path, png_path = options.json_path, options.png_path
    choices = _choices(options)
    all_seeds = tuple(dict.fromkeys(parse_numbers("--seeds", options.seeds))) or (choices.seed,)
    between = net_of(options.net, choices.names)
    if png_path is not None:
        from fsl_async.tools.compare.table import check_plot

        check_plot(png_path)
        _check_writable("--png", png_path)
    if json_path is not None:
        _check_writable("--json", json_path)
    comparison = _comparison(choices)
    comparison.check()
    folder = _make_folder(options.out)
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


def _choices(options: CompareOptions) -> Choices:
    """Read the options of one kind of comparison. Raises UsageError and ConfigError."""
    from fsl_async.tools.compare.tune import METHODS, TuningChoices, is_tuning

    methods, data, base = options.methods, options.data, options.base
    given = {name: one for name, one in vars(options).items() if one and name not in _OWN}
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
    fields = attrs.fields_dict(kind)
    found = {name: value for name, value in given.items() if name in fields}
    for name, value in given.items():
        if name not in fields:
            option = f"--{name.replace('_', '-')}"
            keys = [key for key, one in kind.OPTIONS.items() if one == option]
            if not keys:
                declared = CompareOptions.declared()[name]
                raise UsageError(f"{declared.name or option} {otherwise}")
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
