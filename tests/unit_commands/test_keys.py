"""`fsl-node keys`, as it is typed."""

import json
import shlex

import pytest

from fsl_async import cli
from fsl_transport.zmq.curve import KeyPair


@pytest.fixture(autouse=True)
def _keys(tmp_path, monkeypatch):
    monkeypatch.setenv("FSL_KEYS", str(tmp_path / "keys"))


def told(capsys, *words):
    code = cli.main(["keys", *words])
    out, err = capsys.readouterr()
    return code, out, err


def test_new_prints_the_line_that_lets_it_in(capsys):
    """What is printed is pasted into a shell at the server, whatever characters the key has."""
    code, out, _ = told(capsys, "new")
    assert code == 0
    words = shlex.split(out.splitlines()[-1])
    public = words[words.index("trust") + 1]
    assert words[-2] == "--name"
    assert told(capsys, "pub") == (0, f"{public}\n", "")
    assert told(capsys, *words[words.index("trust") :])[0] == 0
    assert public in told(capsys, "list")[1]
    code, _, err = told(capsys, "new")
    assert code == 2
    assert "exists already" in err


def test_trust_list_revoke(capsys):
    """The life of a key on the list, by key and by label, for programs as well."""
    key, other = "-" + "a" * 39, KeyPair.new().public
    assert told(capsys, "list")[1].startswith("nobody is let in yet")
    assert told(capsys, "trust", key, "--name", "site-a", "--names", "a,b")[0] == 0
    assert told(capsys, "trust", other, "--name", "r", "--json")[0] == 0
    assert json.loads(told(capsys, "list", "--json")[1])["keys"] == [
        {"key": key, "label": "site-a", "names": ["a", "b"]},
        {"key": other, "label": "r", "names": []},
    ]
    assert told(capsys, "revoke", key)[0] == 0
    made = json.loads(told(capsys, "revoke", "r", "--json")[1])
    assert made["revoked"]["key"] == other
    assert json.loads(told(capsys, "list", "--json")[1])["keys"] == []
    code, _, err = told(capsys, "revoke", "r")
    assert code == 2
    assert "neither a key nor a label" in err


@pytest.mark.parametrize(
    ("words", "problem"),
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
def test_mistakes_are_one_line(capsys, monkeypatch, words, problem):
    """Exit code 2 and what to do."""
    monkeypatch.setenv("FSL_NODE_CALLED_AS", "fsl-node")
    code, _, err = told(capsys, *words)
    assert code == 2
    assert err.count("\n") == 1
    assert problem in err
