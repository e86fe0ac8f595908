"""Options that are settings with a shorter name."""

import pytest

from fsl_async.cli import main
from fsl_async.commands.overrides import overrides_of


def test_only_what_was_given_overrides():
    """An option that is left out must not hide the file's setting."""
    chosen = {"run.name": ("--name", 'a"b'), "train.threads": ("--threads", None)}
    assert overrides_of(chosen) == (['run.name="a\\"b"'], {"run.name": "--name"})


@pytest.mark.parametrize("role", [("ps",), ("server", "--with-ps")])
def test_a_wrong_option_is_named_as_it_was_typed(role, capsys):
    """Nobody who typed --name should have to find out that it is run.name in a file."""
    assert main(["--role", *role, "--name", "a b", "--dry-run"]) == 2
    assert capsys.readouterr().err.startswith("error: --name: must be 1 to 64")
