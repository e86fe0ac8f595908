"""`fsl-node keys` on the command line."""

import json
import shlex

import pytest

from fsl_async import cli
from fsl_transport.zmq.curve import KeyPair


@pytest.fixture(autouse=True)
def _keys(tmp_path, monkeypatch):
    monkeypatch.setenv("FSL_KEYS", str(tmp_path / "keys"))


def keys(capsys, *arguments):
    code = cli.main(["keys", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_new_prints_the_command_that_trusts_it(capsys):
    """Users paste the line into a shell, so it must be quoted for any key."""
    code, out, _ = keys(capsys, "new")
    assert code == 0
    argv = shlex.split(out.splitlines()[-1])
    public = argv[argv.index("trust") + 1]
    assert argv[-2] == "--name"
    assert keys(capsys, "pub") == (0, f"{public}\n", "")
    assert keys(capsys, *argv[argv.index("trust") :])[0] == 0
    assert public in keys(capsys, "list")[1]
    code, _, err = keys(capsys, "new")
    assert code == 2
    assert "exists already" in err


def test_trust_list_revoke(capsys):
    """Keys must be listed and revoked by key and by label, also with --json."""
    key, other = "-" + "a" * 39, KeyPair.new().public
    assert keys(capsys, "list")[1].startswith("no key is trusted yet")
    assert keys(capsys, "trust", key, "--name", "site-a", "--names", "a,b")[0] == 0
    assert keys(capsys, "trust", other, "--name", "r", "--json")[0] == 0
    assert json.loads(keys(capsys, "list", "--json")[1])["keys"] == [
        {"key": key, "label": "site-a", "names": ["a", "b"]},
        {"key": other, "label": "r", "names": []},
    ]
    assert keys(capsys, "revoke", key)[0] == 0
    made = json.loads(keys(capsys, "revoke", "r", "--json")[1])
    assert made["revoked"]["key"] == other
    assert json.loads(keys(capsys, "list", "--json")[1])["keys"] == []
    code, _, err = keys(capsys, "revoke", "r")
    assert code == 2
    assert "neither a key nor a label" in err


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["pub"], "run fsl-node keys new"),
        (["trust", "abc", "--name", "a"], "'abc' is no public key"),
        (["trust", "# " + "a" * 40, "--name", "a"], "give one key and one label"),
        (["trust", "a" * 40, "--name", "a\n" + "b" * 40 + " b"], "give one key and one label"),
        (["trust", "a" * 40, "--name", "a names=b"], "give one key and one label"),
        (["trust", "a" * 40], "missing option '--name'"),
        (["trust", "a" * 40, "--name", "a b"], "is not understood"),
        (["trust", "a" * 40, "--name", "a", "--names", "x,/"], "'/' in names= is no client's name"),
        (["revoke"], "missing argument"),
        (["new", "x"], "unexpected extra argument"),
    ],
)
def test_mistakes_are_one_line(capsys, monkeypatch, arguments, problem):
    """Each mistake must be one line with exit code 2."""
    monkeypatch.setenv("FSL_NODE_CALLED_AS", "fsl-node")
    code, _, err = keys(capsys, *arguments)
    assert code == 2
    assert err.count("\n") == 1
    assert problem in err
