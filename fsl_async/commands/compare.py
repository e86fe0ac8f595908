"""`fsl-node compare`: one real run of each of several methods of split learning."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fsl_async.commands.client import check_data
from fsl_async.commands.options import Finite
from fsl_async.commands.output import Output, encoded
from fsl_async.errors import UsageError
from fsl_async.roles.split.methods import ALIGNED, AUXILIARY, names_of

if TYPE_CHECKING:
    from fsl_async.tools.compare.choices import Choices
    from fsl_async.tools.compare.outcome import Outcome

_COUNT = click.IntRange(1, 1 << 30)
_FORMATS = click.Choice(["fp32", "bf16", "e4m3", "e5m2", "uniform"])
_FILE = click.Path(path_type=Path)


@click.command("compare")
@click.option(
    "--methods", required=True, metavar="A,B,...",
    help=f"{', '.join(names_of())}.",
)  # fmt: skip
@click.option(
    "--data",
    required=True,
    metavar="PATH",
    help="Images or other labeled samples with a test part; or text.",
)
@click.option(
    "--model", default="small-cnn", show_default=True, metavar="NAME",
    help="small-cnn, resnet18; for text gpt-0.5m, gpt-1m, ...",
)  # fmt: skip
@click.option("--sizes", default="", metavar="A=B,...", help="Sizes of the model, like width=32.")
@click.option("--cut", default="", metavar="WHERE", help="The cut layer; default: the model's.")
@click.option(
    "--auxiliary",
    default="blocks:1",
    show_default=True,
    help=f"{AUXILIARY}: linear | blocks:N | FILE.py:FUNCTION",
)
@click.option("--clients", default=4, show_default=True, type=click.IntRange(1, 64))
@click.option("--rounds", default=10, show_default=True, type=_COUNT)
@click.option(
    "--target-accuracy", "target", default=0.5, show_default=True, type=Finite(), metavar="A",
    help="Accuracy on the held-out set, 0 to 1.",
)  # fmt: skip
@click.option("--stop-at-target", is_flag=True, help="End a method's run at the target.")
@click.option("--batch", default=32, show_default=True, type=_COUNT)
@click.option(
    "--samples", default=0, type=click.IntRange(0, 1 << 40),
    help="Of a client in a round. [default: all it has, once]",
)  # fmt: skip
@click.option("--learning-rate", default=1e-3, show_default=True, type=Finite())
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
    type=_COUNT,
    help=f"{ALIGNED}: rounds from one alignment to the next.",
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
    type=click.IntRange(1, 64),
    help="Uploads of a client in flight at most.",
)
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0, 2**62))
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
    data: str,
    target: float,
    stop_at_target: bool,
    alpha: float | None,
    number_format: str,
    net: str | None,
    json_path: Path | None,
    png_path: Path | None,
    out: Path | None,
    **more: object,
) -> None:
    """Train with each method on the same data, from the same weights, and compare the costs.

    Real nodes on this machine: a parameter server, a split server and clients, over sockets. After
    each round the joined model is scored on the data's test part; training and clock pause
    meanwhile. Bytes are those that the streams carried, both directions, all clients, the first
    download included.
    """
    from fsl_async.tools.compare.choices import Choices, parse_methods
    from fsl_async.tools.compare.places import net_of

    choices = Choices(
        methods=parse_methods(methods),
        data=str(check_data(data)),
        target=target,
        stops_at_target=stop_at_target,
        alpha=alpha or 0.0,
        up=number_format,
        down=number_format,
        **more,  # type: ignore[arg-type]
    )
    between = net_of(net, choices.names)
    if png_path is not None:
        from fsl_async.tools.compare.plot import check_plot

        check_plot(png_path)
        _check_writable("--png", png_path)
    if json_path is not None:
        _check_writable("--json", json_path)
    from fsl_async.process.stopper import Stopper, stop_on_signals
    from fsl_async.tools.compare.comparison import Comparison
    from fsl_async.tools.compare.outcome import row
    from fsl_async.tools.compare.problem import check
    from fsl_async.tools.compare.table import lines

    for method in choices.methods:
        check(choices, method)
    folder = _make_folder(out)
    output = Output()
    output.say(
        f"{', '.join(choices.methods)}: {choices.clients} clients, {between.words}; files: {folder}"
    )
    outcomes: list[Outcome] = []
    stopper = Stopper()
    with stop_on_signals(stopper):
        comparison = Comparison(choices, folder, between.make, say=output.say, stop=stopper)
        for method in choices.methods:
            outcomes.append(comparison.run(method))
            found = encoded(row(outcomes[-1], choices.as_dict())) + "\n"
            for path in (folder / "compare.jsonl", json_path):
                if path is not None:
                    with path.open("w" if len(outcomes) == 1 else "a") as file:
                        file.write(found)
    output.say("")
    for line in lines(outcomes):
        output.say(line)
    if png_path is not None:
        from fsl_async.tools.compare.plot import draw

        draw(outcomes, png_path, _title(choices, between.words))
        output.say(f"picture: {png_path}")


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
