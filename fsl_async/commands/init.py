"""`fsl-node init [PATH]`: write a commented configuration file, or print it."""

from __future__ import annotations

import os
from pathlib import Path

import click

from fsl_async.commands.output import Output
from fsl_async.errors import UsageError
from fsl_async.process.program import program

_FORCE = "--force"


@click.command("init")
@click.argument("path", type=click.Path(path_type=Path), default=Path("fsl.toml"))
@click.option("--short", is_flag=True, help="Write only the settings that most runs change.")
@click.option(_FORCE, is_flag=True, help="Overwrite an existing file.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(path: Path, *, short: bool, force: bool, as_json: bool) -> None:
    """Write a commented configuration to PATH (default fsl.toml; - prints it)."""
    from fsl_async.config.load import Config, short_toml, to_toml

    text, output = (short_toml if short else to_toml)(Config()), Output(as_json=as_json)
    if str(path) == "-":
        if as_json:
            output.result({"path": "-", "text": text})
        else:
            output.say(*text.rstrip("\n").split("\n"))
        return
    write(path, text, force=force)
    if as_json:
        output.result({"path": str(path)})
    else:
        output.say(f"wrote {path}; start with: {program()} --role ps --config {path}")


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
            f"{path} exists already; {_FORCE} overwrites it, or give another path"
        ) from None
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from None
    finally:
        part.unlink(missing_ok=True)
