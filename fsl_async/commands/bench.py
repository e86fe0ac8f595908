"""`fsl-node bench`: benchmarks that users can repeat on their own machines, in a clone."""

from __future__ import annotations

import importlib

import click

from fsl_async.errors import need_benchmarks

SCRIPTS = {
    "codec": "Speed, size and error of the codec, on tensors of a training of seconds.",
    "transport": "Chunks from one process to another, beside a plain TCP stream.",
}


class Scripts(click.Group):
    """Commands that are scripts in benchmarks/, imported when they are called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return their names, without importing them."""
        return list(SCRIPTS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one script. Raises UsageError where there is no clone."""
        if cmd_name not in SCRIPTS:
            return None
        need_benchmarks(f"bench {cmd_name}")
        command: click.Command = importlib.import_module(cmd_name).main
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list, without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(SCRIPTS.items()))


@click.group("bench", cls=Scripts)
def command() -> None:
    """Measure what this machine does; see docs/BENCHMARKS.md for how to read it.

    Needs a clone of the repository. Every benchmark takes --json: one JSON object for each row.
    """
