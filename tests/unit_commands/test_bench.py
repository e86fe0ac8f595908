"""`fsl-node bench`, `demo --net` and `compare --net` need a clone, and report its absence."""

import pytest

from fsl_async import cli
from fsl_async import errors as clone
from fsl_async.errors import UsageError
from fsl_async.tools.demo.places import net_of

ALL = [
    ["bench", "codec", "--quick"],
    ["bench", "transport", "--help"],
    ["demo", "--net", "dsl"],
    ["demo", "split", "--net", "dsl"],
]


@pytest.mark.parametrize("words", ALL, ids=" ".join)
def test_a_wheel_has_no_laboratory(words, capsys, monkeypatch, tmp_path):
    """A wheel has no benchmarks/: one line and exit code 2, before anything is started."""
    monkeypatch.setattr(clone, "BENCHMARKS", tmp_path)
    assert cli.main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert "needs benchmarks/ of a clone of the repository" in err


def test_the_group_lists_its_benchmarks(capsys, monkeypatch, tmp_path):
    """Also where they are missing; in a clone each has its own help."""
    with monkeypatch.context() as wheel:
        wheel.setattr(clone, "BENCHMARKS", tmp_path)
        assert cli.main(["bench", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "codec" in shown
    assert "transport" in shown
    for name, option in (("codec", "--megabytes"), ("transport", "--stripes")):
        assert cli.main(["bench", name, "--help"]) == 0
        assert option in capsys.readouterr().out


def test_a_wheel_compares_over_proxies(monkeypatch, tmp_path):
    """RATE,DELAY needs no laboratory; a profile does."""
    monkeypatch.setattr(clone, "BENCHMARKS", tmp_path)
    assert "45 ms each way" in net_of("200mbit,45ms").words
    with pytest.raises(UsageError, match="needs benchmarks/ of a clone"):
        net_of("dsl")
