"""Commands that are called as from a shell, for their output with --json."""

import json

from click.testing import CliRunner


def printed(command, *arguments):
    """Return what the command prints; raises the command's exceptions."""
    found = CliRunner().invoke(
        command, [*map(str, arguments)], catch_exceptions=False, standalone_mode=False
    )
    if found.exception:
        raise found.exception
    return found.stdout


def ask(command, *arguments):
    """Return the objects that the command prints with --json."""
    return [json.loads(line) for line in printed(command, *arguments, "--json").splitlines()]
