"""Numbers as options, and options that set a setting under a shorter name."""

import importlib
from pathlib import Path

import click
import pytest

from fsl_async import cli
from fsl_async.commands import COMMANDS, node
from fsl_async.commands.options import (
    Finite,
    Whole,
    WithJson,
    argument,
    option,
    range_words,
    takes,
)


def options(command, kind, names=()):
    """(names of the command, option) of each option of `command` and its subcommands whose type is
    `kind`.
    """
    for name, below in getattr(command, "commands", {}).items():
        yield from options(below, kind, (*names, name))
    for one in command.params:
        if isinstance(one.type, kind):
            yield " ".join((*names, one.opts[0])), one


def all_options(kind):
    found = list(options(node.node, kind))
    for name in COMMANDS:
        module = importlib.import_module(f"fsl_async.commands.{name}")
        found += options(module.command, kind, (name,))
    return found


def test_every_float_option_is_finite():
    """`--grace nan` was a deadline that never came, `sim --hours nan` an empty run."""
    found = all_options(click.types.FloatParamType)
    assert len(found) >= 10
    assert [names for names, one in found if not isinstance(one.type, Finite)] == []


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "1e999"])
def test_infinite_numbers_are_refused(text, capsys):
    """The error must be one line with exit code 2, before anything starts."""
    assert cli.main(["--role", "client", "--grace", text, "127.0.0.1:7100"]) == 2
    assert "--grace" in capsys.readouterr().err
    assert cli.main(["sim", "--hours", text]) == 2
    assert "--hours" in capsys.readouterr().err


def test_ranges_are_in_words():
    """Help had `[default: 0.5; x<=None]`, and limits of 19 digits that no number comes near."""
    assert range_words(None, None) == ""
    assert range_words(1, 4096) == "1 to 4,096"
    assert range_words(0, None) == "at least 0"
    assert range_words(0, 3600.0, low_open=True) == "above 0 and at most 3,600"
    assert range_words(0.1, 0.5) == "0.1 to 0.5"
    assert range_words(None, 5) == "at most 5"
    assert (range_words(0, 2**62, full=False), range_words(0, 10**10)) == (
        "at least 0",
        "0 to 10,000,000,000",
    )


def test_help_has_no_formula_and_no_endless_number():
    """Each numeric option of each command shows its range in words."""
    found = all_options(click.types.FloatParamType) + all_options(click.types.IntParamType)
    assert len(found) >= 40
    for names, one in found:
        assert isinstance(one.type, Finite | Whole), names
        text = " ".join(one.get_help_record(click.Context(node.node)))
        assert "<" not in text, names
        assert not any(len(word) > 9 and word.isdecimal() for word in text.split()), text


@pytest.mark.parametrize(
    ("option", "text", "words"),
    [
        ("--clients", "65", "65 is outside the range: 1 to 64"),
        ("--target-loss", "0", "0.0 is outside the range: above 0"),
        ("--rounds", "2000000000", "2000000000 is outside the range: 1 to 1,073,741,824"),
    ],
)
def test_a_number_out_of_range_gets_the_whole_range(option, text, words, capsys):
    """What help leaves out, the error names."""
    assert cli.main(["compare", "--methods", "sl", "--data", "x", option, text]) == 2
    assert words in capsys.readouterr().err


def test_each_option_is_in_one_section_of_help(capsys):
    """All of them were in one list, and which role takes which was in the text of some."""
    listed = [name for names in node.SECTIONS.values() for name in names]
    assert sorted(listed) == sorted(one.name for one in node.node.params if one.name != "address")
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    for title in ("every role", "ps, client and server", "client and server", "client", "relay"):
        assert f"\nOptions of {title}:\n" in text
    of_client = text.partition("\nOptions of client:\n")[2].partition("\n\n")[0]
    assert "--ranks" in of_client
    assert "--listen" not in of_client


@pytest.mark.parametrize("roles", [one for one in node.SECTIONS if len(one.split()) < 4])
def test_other_roles_refuse_the_options_of_a_section(roles, capsys):
    """What help says is what holds."""
    params = {one.name: one for one in node.node.params}
    for role in {"ps", "client", "server", "relay"} - set(roles.split()):
        for name in node.SECTIONS[roles]:
            option = params[name]
            given = [option.opts[0], *([] if option.is_flag else ["1"])]
            assert cli.main(["--role", role, *given, "127.0.0.1:7100"]) == 2, (role, given)
            assert option.opts[0] in capsys.readouterr().err


class Declared(WithJson):
    """Options as a command declares them; without evaluated annotations, as in a module."""

    __annotations__ = {"place": "Path", "names": "tuple[str, ...]", "is_on": "bool"}
    place = argument()
    names = option("Repeatable.", name="--name")
    is_on = option()
    count: "int" = option("How many.", Whole(1), default=3)


def test_the_fields_of_one_object_are_a_commands_options():
    """Name, kind and number follow from the field, and the default is in help."""
    taken = []
    command = click.Command("c", params=Declared.parameters())
    command.callback = takes(Declared)(taken.append)
    command.main(["--name", "a", "x", "--is-on", "--name", "b"], standalone_mode=False)
    command.main(["y", "--count", "5", "--json"], standalone_mode=False)
    first, second = taken
    assert (first.place, first.names, first.is_on) == (Path("x"), ("a", "b"), True)
    assert (first.count, first.as_json) == (3, False)
    assert (second.place, second.names, second.is_on) == (Path("y"), (), False)
    assert (second.count, second.as_json) == (5, True)
    with pytest.raises(click.UsageError, match="at least 1"):
        command.main(["x", "--count", "0"], standalone_mode=False)
    records = [one.get_help_record(click.Context(command)) for one in command.params]
    assert [one for one in records if one and "default" in one[1]] == [
        ("--count INTEGER", "How many.  [default: 3; at least 1]")
    ]
