"""`fsl-node generate RUN_OR_EXPORT --prompt TEXT`: what a model writes."""

from __future__ import annotations

from pathlib import Path

import click

from fsl_async.commands.options import Finite, RunDir, Whole, WithJson, argument, option, takes
from fsl_async.commands.output import Output
from fsl_async.errors import RunDirError, UsageError


class GenerateOptions(WithJson):
    """The options of `fsl-node generate`."""

    source: Path = argument(RunDir(), metavar="RUN_OR_EXPORT")
    prompt: str = option("What the model goes on from.", metavar="TEXT", required=True)
    base: Path | None = option(
        "The base model of adapters: a Hugging Face folder or a GGUF file.", metavar="MODEL"
    )
    tokens: int = option("Write at most this many.", Whole(1, 1 << 20), default=128)
    version: int | None = option(
        "Of a run: use version N. [default: the newest one]", Whole(min=0), "N"
    )
    temperature: float = option(
        "0 takes the likeliest token each time; higher ones vary more.",
        Finite(0.0, 100.0), "T", default=0.7,
    )  # fmt: skip
    seed: int = option("Of the choice of tokens.", Whole(0, (1 << 63) - 1), "S", default=0)
    raw: bool = option("Write on after the prompt, without a chat format.")


@click.command("generate")
@takes(GenerateOptions)
def command(options: GenerateOptions) -> None:
    """Print what a model writes, as it writes.

    RUN_OR_EXPORT is the run directory of a parameter server, running or not, whose run tuned a base
    model (give --base) or trained the built-in GPT; or a folder that fsl-node export wrote. Where
    the tokenizer has a chat format, the prompt is a user's message.
    """
    from fsl_async.observe.node_folders import with_ledger

    source, version, base = options.source, options.version, options.base
    try:
        run_dir = with_ledger(source)
    except RunDirError:
        run_dir = None
    if run_dir is None and version is not None:
        raise UsageError(f"{source} is no run directory: leave out --version")
    from fsl_async.tools.generation import Sampling, from_export, from_run

    output = Output(as_json=options.as_json)
    writer, of = from_export(source, base) if run_dir is None else from_run(run_dir, version, base)
    found = []
    try:
        sampling = Sampling(options.tokens, options.temperature, options.seed)
        for piece in writer.pieces(options.prompt, sampling, raw=options.raw):
            found.append(piece)
            output.part(piece)
    except KeyboardInterrupt:
        pass
    if output.as_json:
        output.result({"of": of, "prompt": options.prompt, "text": "".join(found)})
    else:
        output.part("\n")
