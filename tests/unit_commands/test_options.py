"""Numbers as options, and options that set a setting under a shorter name."""

import importlib

import click
import pytest

from fsl_async import cli
from fsl_async.commands import COMMANDS
from fsl_async.commands.options import Finite, overrides_of


def options(command, names=()):
    """(names of the command, option) of each float option of `command` and its subcommands."""
    for name, below in getattr(command, "commands", {}).items():
        yield from options(below, (*names, name))
    for one in command.params:
        if isinstance(one.type, click.types.FloatParamType):
            yield " ".join((*names, one.opts[0])), one


def all_options():
    found = list(options(cli.node))
    for name in COMMANDS:
        module = importlib.import_module(f"fsl_async.commands.{name}")
        found += options(module.command, (name,))
    return found


def test_every_float_option_is_finite():
    """`--grace nan` was a deadline that never came, `sim --hours nan` an empty run."""
    found = all_options()
    assert len(found) >= 10
    assert [names for names, one in found if not isinstance(one.type, Finite)] == []


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "1e999"])
def test_infinite_numbers_are_refused(text, capsys):
    """The error must be one line with exit code 2, before anything starts."""
    assert cli.main(["--role", "client", "--grace", text, "127.0.0.1:7100"]) == 2
    assert "--grace" in capsys.readouterr().err
    assert cli.main(["sim", "--hours", text]) == 2
    assert "--hours" in capsys.readouterr().err


def test_only_given_options_override():
    """An option that is left out must not hide the file's setting."""
    chosen = {"run.name": ("--name", 'a"b'), "train.threads": ("--threads", None)}
    assert overrides_of(chosen) == (['run.name="a\\"b"'], {"run.name": "--name"})


@pytest.mark.parametrize("role", [("ps",), ("server", "--with-ps")])
def test_a_wrong_option_is_named_as_it_was_typed(role, capsys):
    """A user who typed --name must not have to find out that it is run.name in a file."""
    assert cli.main(["--role", *role, "--name", "a b", "--dry-run"]) == 2
    assert capsys.readouterr().err.startswith("error: --name: must be 1 to 64")
