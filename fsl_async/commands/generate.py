"""`fsl-node generate RUN_OR_EXPORT --prompt TEXT`: what a model writes."""

from __future__ import annotations

from pathlib import Path

import click

from fsl_async.commands.options import Finite, RunDir, Whole
from fsl_async.commands.output import Output
from fsl_async.errors import RunDirError, UsageError


@click.command("generate")
@click.argument("source", metavar="RUN_OR_EXPORT", type=RunDir())
@click.option("--prompt", required=True, metavar="TEXT", help="What the model goes on from.")
@click.option(
    "--base", type=click.Path(path_type=Path), metavar="MODEL",
    help="The base model of adapters: a Hugging Face folder or a GGUF file.",
)  # fmt: skip
@click.option(
    "--tokens", type=Whole(1, 1 << 20), default=128, show_default=True,
    help="Write at most this many.",
)  # fmt: skip
@click.option(
    "--version", type=Whole(min=0), metavar="N",
    help="Of a run: use version N. [default: the newest one]",
)  # fmt: skip
@click.option(
    "--temperature", type=Finite(0.0, 100.0), default=0.7, show_default=True,
    metavar="T", help="0 takes the likeliest token each time; higher ones vary more.",
)  # fmt: skip
@click.option(
    "--seed", type=Whole(0, (1 << 63) - 1), default=0, show_default=True, metavar="S",
    help="Of the choice of tokens.",
)  # fmt: skip
@click.option("--raw", is_flag=True, help="Write on after the prompt, without a chat format.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    *,
    source: Path,
    prompt: str,
    base: Path | None,
    tokens: int,
    version: int | None,
    temperature: float,
    seed: int,
    raw: bool,
    as_json: bool,
) -> None:
    """Print what a model writes, as it writes.

    RUN_OR_EXPORT is the run directory of a parameter server, running or not, whose run tuned a base
    model (give --base) or trained the built-in GPT; or a folder that fsl-node export wrote. Where
    the tokenizer has a chat format, the prompt is a user's message.
    """
    from fsl_async.observe.node_folders import with_ledger

    try:
        run_dir = with_ledger(source)
    except RunDirError:
        run_dir = None
    if run_dir is None and version is not None:
        raise UsageError(f"{source} is no run directory: leave out --version")
    from fsl_async.tools.generation import Sampling, from_export, from_run

    output = Output(as_json=as_json)
    writer, of = from_export(source, base) if run_dir is None else from_run(run_dir, version, base)
    found = []
    try:
        for piece in writer.pieces(prompt, Sampling(tokens, temperature, seed), raw=raw):
            found.append(piece)
            output.part(piece)
    except KeyboardInterrupt:
        pass
    if output.as_json:
        output.result({"of": of, "prompt": prompt, "text": "".join(found)})
    else:
        output.part("\n")
