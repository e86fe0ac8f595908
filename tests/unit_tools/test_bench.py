"""`fsl-node bench codec`: its pure parts, its fields in a tiny run, and what it reads; no
speeds.
"""

import itertools
import json
import time

import attrs
import numpy as np
import pytest
import torch

from fsl_async import cli
from fsl_async.errors import UsageError
from fsl_async.tools.bench import codec
from fsl_async.tools.bench.codec_files import read_values
from fsl_async.tools.bench.codec_tensors import NAMES, TrainingSettings, spread_out, trained_tensors
from fsl_async.tools.bench.limits import MemoryLimits, core_probe
from fsl_async.tools.bench.tables import aligned, cell, codec_tables
from fsl_async.tools.bench.timing import CoreProbe, Rounds, in_turns

TINY = TrainingSettings(preset="0.5m", steps_before=2, steps_between=1, steps_of_delta=1, batch=1)


@pytest.fixture(autouse=True)
def _threads():
    """Other tests of the process count on torch's number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    assert torch.get_num_threads() == 1
    torch.set_num_threads(before)


def test_every_action_is_timed_in_every_round():
    """A ratio compares neighbors in time; an action left out of a round would shift all that
    follow.
    """
    called = []
    rounds = in_turns(
        {"a": lambda: called.append("a"), "b": lambda: called.append("b")}, repeats=3, limit_s=9.0
    )
    assert "".join(called) == "ab" * 4
    assert rounds.count == 3
    assert in_turns({"a": lambda: None}, repeats=9, limit_s=0.0).count == 1
    slept = in_turns({"a": lambda: time.sleep(0.05)}, 1, 1.0, by_wall_clock=True)
    assert slept.seconds["a"][0] >= 0.05
    assert slept.waited_share > 0.5


class StagedProbe(CoreProbe):
    """A probe with given rates, the last one without end; 4 is the fastest."""

    def __init__(self, rates):
        self.rates, self.fastest = rates, 4.0

    def rate(self):
        """Return the next rate."""
        return self.rates.pop(0) if len(self.rates) > 1 else self.rates[0]


def test_disturbed_rounds_do_not_count():
    """The probe around a round decides, not the round's time, which would select for lucky
    rounds.
    """
    calls = iter(range(100))
    # Each round asks before its one action and after it: the second round is slowed in its middle,
    # the first before it began.
    probe = StagedProbe([2.0, 4.0, 4.0, 2.1, 3.9, 4.0])
    rounds = in_turns({"a": lambda: next(calls)}, 2, 0.0, probe=probe, patience_s=60.0)
    assert (rounds.count, rounds.left_out, rounds.undisturbed_share) == (2, 2, 1.0)
    assert next(calls) == 1 + 4
    assert rounds.core_rate == 3.95


def test_a_core_that_is_never_quiet_is_reported():
    """When patience ends, the row says that the figures were disturbed."""
    rounds = in_turns({"a": lambda: None}, 3, 10.0, probe=StagedProbe([1.0, 2.0]), patience_s=0.0)
    assert (rounds.count, rounds.undisturbed_share, rounds.core_rate) == (3, 0.0, 2.0)
    hurried = in_turns({"a": lambda: None}, 3, 0.0, probe=StagedProbe([2.0]), patience_s=0.001)
    assert hurried.undisturbed_share == 0.0
    assert hurried.count <= 3


@pytest.mark.skipif(core_probe() is None, reason="no native codec")
def test_the_probe_runs_a_loop_of_single_cycles():
    """A compiler that drops the loop, or makes it wait for memory, would give useless rates."""
    assert 0.3 < core_probe().fastest < 12.0  # 10^9 a second


def test_several_threads_copy_as_much_as_one():
    """No part is left out, so a speedup is real."""
    limits = MemoryLimits(1001)
    for threads in (1, 2, 3):
        limits._source[:] = np.arange(1001)
        limits._target[:] = -1.0
        limits.copy_by(threads)()
        assert np.array_equal(limits._target, limits._source)


def test_ratios_are_medians_of_the_rounds():
    """Neither one disturbed round nor a drift of both sides moves the ratio."""
    rounds = Rounds({"ours": (1.0, 2.0, 9.0), "theirs": (2.0, 4.0, 9.0)})
    assert rounds.ratio("ours", "theirs") == 2.0
    assert rounds.gb_s("ours", 4_000_000_000) == 2.0
    assert rounds.spread("theirs") == 1.75
    assert (rounds.ratio("ours", "none"), rounds.gb_s("none", 1), rounds.spread("none")) == (
        None,
        None,
        None,
    )


def test_tables_are_aligned():
    """Columns are aligned."""
    lines = aligned((("name", "n"), ("GB/s", "g")), [{"n": "long name", "g": 1.5}, {"n": "b"}])
    assert lines == ["name       GB/s", "long name  1.50", "b             -"]
    marked = aligned((("n", "n"),), [{"n": "x"}], markdown=True)
    assert marked == ["| n |", "| --- |", "| x |"]
    assert [cell(value) for value in (None, True, False, 0.01234, 0.0, 7, "x")] == [
        "-", "yes", "NO", "0.0123", "0.00", "7", "x",
    ]  # fmt: skip


def test_a_longer_vector_has_every_value_and_another_order():
    """Further passes over a short file have another order of bytes."""
    values = np.arange(3 * 4096 + 5, dtype=np.float32)
    longer = spread_out(values, 3 * values.size)
    again = longer[values.size : 2 * values.size]
    assert (longer[: values.size] == values).all()
    assert (again != values).any()
    assert (np.sort(again) == values).all()
    assert (spread_out(values, 10) == values[:10]).all()


def test_tensors_of_a_short_training_are_what_they_say():
    """Each kind has finite values, and none repeats within the vector."""
    values = 480_000  # more than the model has parameters
    said = []
    tensors = trained_tensors(values, attrs.evolve(TINY, batch=4), said.append)
    assert set(tensors) == set(NAMES)
    for name, vector in tensors.items():
        assert np.isfinite(vector).all(), name
        assert np.unique(vector).size > values // 20, name
    assert tensors["gelu"].min() > -0.18  # nothing below the minimum of GELU
    assert tensors["weights"].std() > 3 * tensors["pseudo_gradients"].std()


def safetensors_file(path, header, content=b""):
    """Make a file with this header."""
    text = json.dumps(header).encode() if isinstance(header, dict) else header
    path.write_bytes(len(text).to_bytes(8, "little") + text + content)
    return path


def test_tensors_of_a_file_are_read_in_the_order_of_its_bytes(tmp_path):
    """All three formats that fp32 holds are read; other types and NaN are left out."""
    content = np.array([1, np.nan, 2], "<f4").tobytes() + np.array([3], "<f2").tobytes()
    content += (np.array([4], "<f4").view("<u4") >> 16).astype("<u2").tobytes() + b"\1\2"
    header = {
        "__metadata__": {"format": "pt"},
        "b": {"dtype": "F16", "shape": [1], "data_offsets": [12, 14]},
        "a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]},
        "c": {"dtype": "BF16", "shape": [1], "data_offsets": [14, 16]},
        "d": {"dtype": "U8", "shape": [2], "data_offsets": [16, 18]},
    }
    path = safetensors_file(tmp_path / "x.safetensors", header, content)
    assert read_values(path, 100).tolist() == [1, 2, 3, 4]
    assert read_values(path, 3).tolist() == [1, 2]


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ({"a": {"dtype": "F32", "data_offsets": [0, 400]}}, "lies outside"),
        ({"a": {"dtype": "F32"}}, "data_offsets"),
        ({"a": 3}, "not a safetensors file"),
        (b"not json", "not a safetensors file"),
        ({}, "no F32, BF16 or F16 values"),
    ],
)
def test_a_file_that_is_none_is_one_line(tmp_path, header, words):
    """A file given to --tensors may be anything."""
    path = safetensors_file(tmp_path / "x", header)
    with pytest.raises(UsageError, match=words):
        read_values(path, 10)


def test_limits_can_be_measured():
    """Whether native or not, each loop runs and has its field."""
    limits = MemoryLimits(1 << 16)
    rounds = in_turns(limits.actions(), 2, 1.0)
    fields = limits.fields(rounds)
    assert {"memcpy_gb_s", "read_gb_s", "stream_store_gb_s", "add_gb_s"} <= fields.keys()
    assert fields["memcpy_gb_s"] > 0
    assert fields["limits_measured_with"] in {"native", "numpy"}


@pytest.mark.parametrize("cores", [2, 3])
def test_a_tiny_run_has_all_rows_and_fields(monkeypatch, cores):
    """Rows are kept and compared over months: a missing field fails here."""
    monkeypatch.setattr("fsl_async.tools.bench.codec_rows.cores", lambda: cores)
    settings = codec.CodecBenchSettings(
        megabytes=1.5, repeats=1, limit_s=0.0, training=TINY, formats=("fp32", "uniform")
    )
    rows = list(codec.run(settings, lambda _: None))
    measured = set(itertools.product(NAMES, settings.formats))
    assert rows[0]["row"] == "machine"
    by_tensor = [row for row in rows if row["row"] == "tensor"]
    assert by_tensor[0]["tensor"] == codec.HEADLINE_TENSOR
    assert {(row["tensor"], row["format"]) for row in by_tensor} == measured
    for row in by_tensor:
        assert row["ratio_to_fp32"] == pytest.approx(32 / row["bits_per_value"], rel=0.001)
        assert sum(row["chunks"].values()) == 3
        assert row["relative_l2"] < {"fp32": 1e-9}.get(row["format"], 0.04)
        assert row["encode_over_memcpy"] > 0
        assert row["load_1m"] >= 0
    json.dumps(rows)
    if rows[0]["implementation"] == codec.NUMPY:
        return
    threads = [row for row in rows if row["row"] == "threads"]
    assert {(row["tensor"], row["format"]) for row in threads} == measured
    for row in threads:
        assert row["decode_two_over_one"] > 0
        assert row["all_threads"] == cores
        assert (row.get("memcpy_all_gb_s", 0) > 0) is (cores > 2)
    assert ("all" in codec_tables(rows).split()) is (cores > 2)


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


def test_the_group_lists_its_benchmarks(capsys):
    """`fsl-node bench` is a group of commands."""
    assert cli.main(["bench", "--help"]) == 0
    assert "codec" in capsys.readouterr().out
    assert cli.main(["bench", "codec", "--help"]) == 0
    assert "--megabytes" in capsys.readouterr().out
