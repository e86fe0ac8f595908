"""`fsl-node bench codec`: its pure parts, its fields in a tiny run, and what it reads. Speeds are never looked at."""

import itertools
import json
import time

import attrs
import numpy as np
import pytest
import torch

from fsl_async import cli
from fsl_async.errors import UsageError
from fsl_async.tools.bench import codec, codec_peers
from fsl_async.tools.bench.codec_exact import CodeCounter, entropy_bits, expected
from fsl_async.tools.bench.codec_files import read_values
from fsl_async.tools.bench.codec_fused import VARIANTS, FusedVariants
from fsl_async.tools.bench.codec_stage import NumpyStage, stages
from fsl_async.tools.bench.codec_summary import TARGETS, Target, summary, verdict
from fsl_async.tools.bench.codec_table import aligned, cell, tables
from fsl_async.tools.bench.codec_tensors import NAMES, TrainingSettings, spread_out, trained_tensors
from fsl_async.tools.bench.limits import MemoryLimits, core_probe
from fsl_async.tools.bench.timing import CoreProbe, Rounds, in_turns
from fsl_codecs import CodecSpec, decode, encode
from fsl_codecs.dispatch import choice

TINY = TrainingSettings(preset="0.5m", steps_before=2, steps_between=1, steps_of_delta=1, batch=1)


@pytest.fixture(autouse=True)
def _threads():
    """Other tests of the process count on torch's number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    assert torch.get_num_threads() == 1
    torch.set_num_threads(before)


def test_entropy_of_known_distributions():
    """Everything about size is measured against this number."""
    assert entropy_bits(np.array([5, 5, 5, 5])) == pytest.approx(2.0)
    assert entropy_bits(np.array([7, 0, 0])) == 0.0
    assert entropy_bits(np.array([0, 0])) == 0.0
    assert entropy_bits(np.array([2, 1, 1])) == pytest.approx(1.5)


def test_symbols_are_counted_over_all_pieces():
    """The entropy is that of the whole tensor, not the mean of its pieces'."""
    counter = CodeCounter("e4m3")
    for symbol in (0, 1, 2, 3):
        counter.add(np.full(10, symbol, np.uint8))
    assert counter.entropy_bits == pytest.approx(2.0)
    planes = CodeCounter("fp32")
    planes.add(
        np.array([0, 0x80000000], np.uint32)
    )  # signs stand in the lowest byte of the rotated word
    assert planes.entropy_bits == pytest.approx(1.0)


@pytest.mark.parametrize("number_format", ["fp32", "bf16", "e4m3", "e5m2"])
@pytest.mark.parametrize("count", [131072, 130, 1])
def test_the_codec_gives_what_torch_casts(number_format, count):
    """Otherwise `bit_exact` would compare with something else than the documented codes."""
    values = np.random.default_rng(0).normal(0, 3, count).astype(np.float32)
    values[:: 7 + count // 50] = 0
    spec = CodecSpec(format=number_format)
    want = expected(values, spec).values
    decoded = decode(encode(values, spec))
    if count > 1:
        assert (want.view(np.uint32) == decoded.view(np.uint32)).all()


def test_uniform_codes_are_those_of_the_format():
    """Torch has no cast for them, so only their entropy is compared."""
    values = np.random.default_rng(0).normal(0, 3, 20000).astype(np.float32)
    want = expected(values, CodecSpec(format="uniform"))
    assert want.values is None
    assert abs(int(np.median(want.codes)) - 128) <= 1


def test_every_action_is_timed_in_every_round():
    """A ratio compares neighbours in time; an action left out of a round would shift all that follow."""
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
    """Tells rates from a list, the last one for ever; 4 is the fastest."""

    def __init__(self, rates):
        self.rates, self.fastest = rates, 4.0

    def rate(self):
        """The next one."""
        return self.rates.pop(0) if len(self.rates) > 1 else self.rates[0]


def test_rounds_that_a_neighbour_disturbed_do_not_count():
    """Chosen by the probe around the round, whatever the round took; or a lucky slow neighbour would choose the figures."""
    calls = iter(range(100))
    # Each round asks before its one action and after it: the second round is slowed in its middle, the first before it began.
    probe = StagedProbe([2.0, 4.0, 4.0, 2.1, 3.9, 4.0])
    rounds = in_turns({"a": lambda: next(calls)}, 2, 0.0, probe=probe, patience_s=60.0)
    assert (rounds.count, rounds.left_out, rounds.undisturbed_share) == (2, 2, 1.0)
    assert next(calls) == 1 + 4
    assert rounds.core_rate == 3.95


def test_a_core_that_is_never_quiet_is_said_to_be_so():
    """Patience ends; figures of a disturbed core must not look like others."""
    rounds = in_turns({"a": lambda: None}, 3, 10.0, probe=StagedProbe([1.0, 2.0]), patience_s=0.0)
    assert (rounds.count, rounds.undisturbed_share, rounds.core_rate) == (3, 0.0, 2.0)
    hurried = in_turns({"a": lambda: None}, 3, 0.0, probe=StagedProbe([2.0]), patience_s=0.001)
    assert hurried.undisturbed_share == 0.0
    assert hurried.count <= 3


@pytest.mark.skipif(core_probe() is None, reason="no native codec")
def test_the_probe_runs_a_loop_of_single_cycles():
    """A compiler that drops the loop, or one that makes it wait for memory, would call every core free or none."""
    assert 0.3 < core_probe().fastest < 12.0  # 10^9 a second


def test_two_threads_copy_as_much_as_one():
    """A half that is left out would make a second core look like four."""
    limits = MemoryLimits(1001)
    for copy in limits.copies().values():
        limits._source[:] = np.arange(1001)
        limits._target[:] = -1.0
        copy()
        assert np.array_equal(limits._target, limits._source)


def test_ratios_are_medians_of_the_rounds():
    """One disturbed round must not move the result, nor a drift that hits both sides."""
    rounds = Rounds({"ours": (1.0, 2.0, 9.0), "theirs": (2.0, 4.0, 9.0)})
    assert rounds.ratio("ours", "theirs") == 2.0
    assert rounds.gb_s("ours", 4_000_000_000) == 2.0
    assert rounds.spread("theirs") == 1.75
    assert (rounds.ratio("ours", "none"), rounds.gb_s("none", 1), rounds.spread("none")) == (
        None,
        None,
        None,
    )


@pytest.mark.parametrize(
    ("reached", "lower_is_better", "words"),
    [
        (2.0, False, "aim"),
        (1.5, False, "must"),
        (0.99, False, "missed"),
        (None, False, "not measured"),
        (0.4, True, "aim"),
        (1.2, True, "must"),
        (1.3, True, "missed"),
    ],
)
def test_verdicts(reached, lower_is_better, words):
    """Sizes are better when smaller, everything else when larger."""
    must, aim = (1.2, 0.5) if lower_is_better else (1.0, 2.0)
    target = Target("x", "f", lambda _: True, must, aim, lower_is_better)
    assert verdict(target, reached) == words


def test_the_summary_is_of_the_sent_tensor_and_shows_the_worst():
    """A target counts for pseudo-gradients; another tensor that misses it must not be hidden."""
    rows = [
        {"row": "tensor", "tensor": name, "format": "e4m3", "encode_over_memcpy": ratio,
         "over_entropy_percent": size}
        for name, ratio, size in (("pseudo_gradients", 1.1, 0.4), ("gelu", 0.7, 1.4))
    ]  # fmt: skip
    rows.append({"row": "tensor", "tensor": "gelu", "format": "fp32", "encode_over_memcpy": 0.1})
    made = {row["what"]: row for row in summary(rows)}
    assert len(made) == len(TARGETS)
    encode_row = made["encode into a reused chunk buffer / memcpy"]
    assert (encode_row["ratio"], encode_row["met"]) == (1.1, "aim")
    assert (encode_row["worst"], encode_row["worst_tensor"]) == (0.7, "gelu")
    assert encode_row["worst_met"] == "missed"
    assert made["size over order-0 entropy, %"]["worst"] == 1.4
    assert made["two threads / one, encode"]["met"] == "not measured"


def test_tables_are_aligned():
    """People read columns."""
    lines = aligned((("name", "n"), ("GB/s", "g")), [{"n": "long name", "g": 1.5}, {"n": "b"}])
    assert lines == ["name       GB/s", "long name  1.50", "b             -"]
    marked = aligned((("n", "n"),), [{"n": "x"}], markdown=True)
    assert marked == ["| n |", "| --- |", "| x |"]
    assert [cell(value) for value in (None, True, False, 0.01234, 0.0, 7, "x")] == [
        "-", "yes", "NO", "0.0123", "0.00", "7", "x",
    ]  # fmt: skip


def test_a_longer_vector_has_every_value_and_another_order():
    """Further passes over a short file may not be the same bytes in the same order."""
    values = np.arange(3 * 4096 + 5, dtype=np.float32)
    longer = spread_out(values, 3 * values.size)
    again = longer[values.size : 2 * values.size]
    assert (longer[: values.size] == values).all()
    assert (again != values).any()
    assert (np.sort(again) == values).all()
    assert (spread_out(values, 10) == values[:10]).all()


def test_tensors_of_a_short_training_are_what_they_say():
    """Each kind is filled with finite values, and none repeats within the vector."""
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
    """A file with this header."""
    text = json.dumps(header).encode() if isinstance(header, dict) else header
    path.write_bytes(len(text).to_bytes(8, "little") + text + content)
    return path


def test_tensors_of_a_file_are_read_in_the_order_of_its_bytes(tmp_path):
    """All three number formats that fp32 holds; what it does not hold, and NaN, is left out."""
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
    """What users point --tensors at may be anything."""
    path = safetensors_file(tmp_path / "x", header)
    with pytest.raises(UsageError, match=words):
        read_values(path, 10)


@pytest.mark.parametrize("number_format", codec.STAGE_FORMATS)
def test_the_entropy_stage_alone_gives_its_codes_back(number_format):
    """Also where the sample shows less than there is."""
    values = np.random.default_rng(0).normal(0, 3, 131072).astype(np.float32)
    values[70_000:70_100] *= 1000
    codes = expected(values, CodecSpec(format=number_format)).codes
    for stage in (*stages(codes, number_format), NumpyStage(codes, number_format)):
        stage.encode()
        stage.decode()
        assert (stage.decoded == codes).all(), stage.path
        assert len(stage.payload) < codes.size


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_is_done_in_one_pass_is_what_the_passes_do(variant):
    """Otherwise one would be measured against another's work."""
    values = np.random.default_rng(1).standard_normal(3000, np.float32)
    results = []
    for name in (variant, f"{variant}, passes"):
        variants = FusedVariants(choice().chosen, values, CodecSpec("e4m3", chunk_values=1024))
        variants.buffer[:] = bytes(len(variants.buffer))
        actions = variants.actions()
        actions[name]()
        actions[name]()  # the second time with what the first one left
        rests = [*variants.residuals, *variants.narrow_outs]
        results.append((bytes(variants.buffer), *(rest.tobytes() for rest in rests)))
    assert results[0] == results[1]
    assert any(map(any, results[0]))


def test_limits_can_be_measured():
    """Whether native or not, each loop runs and has its field."""
    limits = MemoryLimits(1 << 16)
    rounds = in_turns(limits.actions(), 2, 1.0)
    fields = limits.fields(rounds)
    assert {"memcpy_gb_s", "read_gb_s", "stream_store_gb_s", "add_gb_s"} <= fields.keys()
    assert fields["memcpy_gb_s"] > 0
    assert fields["limits_measured_with"] in {"native", "numpy"}


def test_a_tiny_run_has_all_rows_and_fields(monkeypatch):
    """The rows are kept and compared over months; a field that goes missing is noticed here. Peers count as not installed."""
    monkeypatch.setattr(codec_peers, "installed", lambda _: None)
    monkeypatch.setattr("fsl_async.tools.bench.codec_stage.installed", lambda _: None)
    settings = codec.CodecBenchSettings(
        megabytes=0.5, repeats=1, limit_s=0.0, stage_calls=1, training=TINY
    )
    rows = list(codec.run(settings, lambda _: None))
    kinds = [row["row"] for row in rows]
    assert kinds[0] == "machine"
    assert kinds[-len(TARGETS) :] == ["summary"] * len(TARGETS)
    by_tensor = [row for row in rows if row["row"] == "tensor"]
    assert {(row["tensor"], row["format"]) for row in by_tensor} == {
        (tensor, number_format) for tensor in NAMES for number_format in codec.FORMATS
    }
    for row in by_tensor:
        assert row["bit_exact"] is (None if row["format"] == "uniform" else True), row
        assert 0 < row["entropy_bits"] < row["bits_per_value"] * 1.05
        assert sum(row["chunks"].values()) == 1
        assert row["load_1m"] >= 0
        assert row["relative_l2"] < {"fp32": 1e-9, "bf16": 0.003, "e5m2": 0.07}.get(row["format"], 0.04)  # fmt: skip
    fused = [row for row in rows if row["row"] == "fused"]
    assert {(row["format"], row["variant"]) for row in fused} == set(
        itertools.product(codec.FUSED_FORMATS, VARIANTS)
    )
    assert all(row["fused_over_passes"] > 0 and row["fused_over_plain"] > 0 for row in fused)
    peers = [row for row in rows if row["row"] == "peer"]
    assert {row["note"] for row in peers} == {"not installed: pip install 'fsl-async[bench]'"}
    assert all(row["round_trip"] for row in rows if row["row"] == "entropy_stage")
    json.dumps(rows)
    assert "Against the targets" in tables(rows)


def test_options_that_cannot_be_are_one_line(capsys, tmp_path):
    """Before anything is trained."""
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
    """`fsl-node bench` is a group, so that there can be more of them."""
    assert cli.main(["bench", "--help"]) == 0
    assert "codec" in capsys.readouterr().out
    assert cli.main(["bench", "codec", "--help"]) == 0
    assert "--megabytes" in capsys.readouterr().out
