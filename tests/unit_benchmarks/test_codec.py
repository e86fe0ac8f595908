"""benchmarks/codec.py: how it chooses rounds, and its rows in a tiny run; no speeds."""

from codec_tensors import NAMES

from fsl_async import cli


def test_a_tiny_run_has_a_row_for_each_tensor(capsys, tmp_path):
    """The command of a clone trains, measures, prints tables, and keeps its rows."""
    kept = tmp_path / "rows.jsonl"
    assert cli.main(["bench", "codec", "--smoke", "--save", str(kept)]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in NAMES)
    assert kept.read_text().count('"row": "tensor"') == 5 * len(NAMES)


def test_options_that_cannot_be_are_one_line(capsys, tmp_path):
    """They are refused before any training."""
    for args, words in (
        (["--tensors", str(tmp_path / "no")], "does not exist"),
        (["--path", "mmx"], "mmx"),
        (["--megabytes", "0"], "range"),
    ):
        assert cli.main(["bench", "codec", *args]) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert words in err
