"""What is no number for any option: click takes nan for one that lies in every range."""

import importlib

import click
import pytest

from fsl_async import cli
from fsl_async.commands import COMMANDS
from fsl_async.commands.numbers import Finite


def options(command, words=()):
    """(words of the command, option) of it and all below it that take a float."""
    for name, below in getattr(command, "commands", {}).items():
        yield from options(below, (*words, name))
    for one in command.params:
        if isinstance(one.type, click.types.FloatParamType):
            yield " ".join((*words, one.opts[0])), one


def everything():
    found = list(options(cli.node))
    for name in COMMANDS:
        module = importlib.import_module(f"fsl_async.commands.{name}")
        found += options(module.command, (name,))
    return found


def test_every_option_that_takes_a_number_takes_finite_ones():
    """`--grace nan` was a deadline that never comes, `chaos --faults-per-hour nan` a bug, `sim --hours nan` a run of nothing."""
    found = everything()
    assert len(found) >= 10
    assert [words for words, one in found if not isinstance(one.type, Finite)] == []


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "1e999"])
def test_what_is_not_finite_is_said(text, capsys):
    """One line, exit code 2, before anything is done."""
    assert cli.main(["--role", "client", "--grace", text, "127.0.0.1:7100"]) == 2
    assert "--grace" in capsys.readouterr().err
    assert cli.main(["sim", "--hours", text]) == 2
    assert "--hours" in capsys.readouterr().err
