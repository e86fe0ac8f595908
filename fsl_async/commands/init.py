"""`fsl-node init [PATH]`: write a commented configuration file, or print it."""

from __future__ import annotations

import os
from pathlib import Path

import click

from fsl_async.commands.options import WithJson, argument, option, takes
from fsl_async.commands.output import Output
from fsl_async.errors import UsageError, program


class InitOptions(WithJson):
    """The options of `fsl-node init`."""

    path: Path = argument(default=Path("fsl.toml"))
    short: bool = option("Write only the settings that most runs change.")
    force: bool = option("Overwrite an existing file.")


@click.command("init")
@takes(InitOptions)
def command(options: InitOptions) -> None:
    """Write a commented configuration to PATH (default fsl.toml; - prints it)."""
    from fsl_async.config.load import short_toml, to_toml
    from fsl_async.config.settings import Config

    path, output = options.path, Output(as_json=options.as_json)
    text = (short_toml if options.short else to_toml)(Config())
    if str(path) == "-":
        output.answer({"path": "-", "text": text}, *text.rstrip("\n").split("\n"))
        return
    write(path, text, force=options.force)
    start = f"{program()} --role ps --config {path}"
    output.answer({"path": str(path)}, f"wrote {path}; start with: {start}")


def write(path: Path, text: str, *, force: bool) -> None:
    """Write a file completely or not at all.

    Raises UsageError for an existing file, unless `force`.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("x", encoding="utf-8") as file:
            file.write(text)
        if force:
            part.replace(path)
        else:
            os.link(part, path)  # unlike a rename, it fails for an existing name
    except FileExistsError:
        raise UsageError(
            f"{path} exists already; --force overwrites it, or give another path"
        ) from None
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from None
    finally:
        part.unlink(missing_ok=True)
