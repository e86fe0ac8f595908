"""benchmarks/codec.py: how it chooses rounds, and its rows in a tiny run; no speeds."""

import numpy as np
import pytest
from codec_tensors import NAMES, read_values

from fsl_async import cli
from fsl_async.errors import UsageError


def test_tensors_of_a_file(tmp_path):
    """All formats that fp32 holds are read; other types and NaN are left out."""
    files = pytest.importorskip("safetensors.torch", reason="needs the extra bench or hf")
    import torch

    path = tmp_path / "x.safetensors"
    tensors = {
        "a": torch.tensor([1, np.nan, 2]),
        "b": torch.tensor([3], dtype=torch.float16),
        "c": torch.tensor([4], dtype=torch.bfloat16),
        "d": torch.tensor([5, 6], dtype=torch.uint8),
    }
    files.save_file(tensors, path)
    assert sorted(read_values(path, 100)) == [1, 2, 3, 4]
    assert read_values(path, 3).size <= 3
    path.write_bytes(b"none")
    with pytest.raises(UsageError, match="not a safetensors file"):
        read_values(path, 10)


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
