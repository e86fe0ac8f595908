"""Benchmark scripts run to their end with tiny sizes; docs/BENCHMARKS.md names those not run here.

Times are not judged.
"""

import importlib
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def rows_of(*command: str) -> list[dict[str, object]]:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=BENCHMARKS,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_sync_measures_a_real_server():
    """The light clients follow the protocol: a change that breaks them fails here."""
    (row,) = rows_of("sync.py", "--smoke")
    assert row["clients"] == 3
    assert row["sync_s"] > 0
    assert row["peak_above_start_over_model"] > 0
    assert 6 < row["bits_up"] < 7


@pytest.mark.sweep
def test_peers_of_a_sync_move_their_bytes():
    """Every peer in processes of its own; Flower only where it is installed."""
    rows = {row["peer"]: row for row in rows_of("sync_peers.py", "--smoke")}
    assert set(rows) == {"gloo", "flower", "copy"}
    measured = [row for row in rows.values() if "skipped" not in row]
    assert len(measured) >= 2
    assert all(row["sync_s"] > 0 and len(row["sync_s_each"]) == 1 for row in measured)
    assert rows["gloo"]["bytes_up"] == 4 * 300_000
    assert rows["gloo"]["server_peak_mb"] is None
    assert rows["copy"]["bytes_down"] == round(300_000 * 5.62 / 8)
    assert rows["copy"]["peak_above_start_over_model"] > 0


@pytest.mark.sweep
def test_one_delta_is_counted_on_both_loops():
    """It starts both nodes through their production functions, whose arguments change."""
    rows = rows_of("one_delta.py", "--rounds", "1")
    assert [row["side"] for row in rows] == ["parameter server", "client"]
    assert all(row["hops"] < row["calls"] < row["all"] for row in rows)


@pytest.mark.sweep
def test_quality_trains_in_all_modes():
    """Every kind of row ends in a finite loss; the last is of two groups."""
    found = rows_of("quality.py", "--smoke")
    clients, _, _, grouped = found
    assert all(math.isfinite(row["eval_loss"]) for row in found)
    assert grouped["rounds"] == 2
    assert clients["rounds"] == 2
    assert clients["bits_up"] > 0


@pytest.mark.sweep
def test_asynchronous_trains_with_and_without_rounds():
    """A short row of a way that waits and of one that does not; the last two have churn."""
    for way in ("waits", "buffer", "anarchic", "latest"):
        (row,) = rows_of("asynchronous.py", "--quick", "--way", way, "--steps", "120")
        assert math.isfinite(row["eval_loss"])
        assert row["versions"] > 1
        assert row["tokens"] >= 120 * 4 * 64


@pytest.mark.sweep
def test_one_client_that_averages_trains_as_one_process():
    """Nothing of the machinery costs quality: schedule, snapshot, outer step, rebase."""
    (row,) = rows_of("quality.py", "--check")
    assert abs(row["difference"]) < 1e-3


@pytest.mark.sweep
def test_quality_prints_its_tables_and_its_summary():
    """The tables in the docs are printed from stored rows, without a run."""
    (row,) = rows_of("quality.py", "--summary")
    assert {"k2_percent", "k4_percent", "k8_percent", "rows_of_other_code"} <= set(row)
    done = subprocess.run(
        [sys.executable, "quality.py", "--table"],
        cwd=BENCHMARKS,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "Defaults against data parallel" in done.stdout


@pytest.mark.sweep
def test_loop_lag_measures_beside_training():
    """It takes the loop from a client's runtime: a change of the runtime that breaks it fails
    here.
    """
    (row,) = rows_of("loop_lag.py", "--smoke")
    assert row["steps"] > 0
    assert row["lag_max_ms"] >= row["lag_median_ms"] >= 0


@pytest.mark.sweep
def test_cut_bits_measures_every_format_at_every_cut():
    """The planner's constants come from this benchmark."""
    rows = rows_of("cut_bits.py", "--steps", "1", "--batch", "1")
    assert len(rows) == 3 * 3 * 5
    assert all(0 < row["bits_per_value"] < 33 for row in rows)


@pytest.mark.sweep
def test_lockstep_is_one_process_to_the_bit():
    """The difference to one process is judged: it is not a time, and must not grow."""
    (row,) = rows_of(
        "lockstep.py", "--methods", "fsl-sage", "--models", "gpt", "--optimizers", "adamw"
    )
    assert row["difference"] <= 1e-6
    assert row["weights"] > 100_000
    assert row["fp32_average"] > 0, "the comparison shows a rounding"


@pytest.mark.slow
def test_ledger_start_reads_few_lines_with_a_state():
    """It writes a run directory by hand, which must stay one that a store opens."""
    whole, state = rows_of("ledger_start.py", "--smoke")
    assert (whole["start"], whole["version"]) == ("all lines", 60)
    assert state["start"] == "state"
    assert state["version"] > 60
    assert whole["notices"] == state["notices"] == []
    grown = state["ledger_bytes"] - whole["ledger_bytes"]
    assert 1.0 < grown / whole["state_bytes"] <= 2.0


@pytest.mark.sweep
def test_stripe_memory_opens_all_stripes():
    """Each client has two connections, and those of its other stripes."""
    rows = rows_of(
        "stripe_memory.py", "--stripes", "1,5", "--clients", "2", "--mib", "1", "--quiet", "0"
    )
    assert [row["connections"] for row in rows] == [4, 12, 4, 12]
    assert [row["curve"] for row in rows] == [False, False, True, True]
    assert all(row["listener_most"] > 0 for row in rows)


def tiny_images(folder: Path) -> None:
    """Make a CIFAR folder of a few images whose class is their brightness."""
    folder.mkdir()
    for name, count in (("data_batch_1.bin", 24), ("test_batch.bin", 12)):
        labels = [number % 2 for number in range(count)]
        pixels = [bytes([60 + 120 * label]) * 3072 for label in labels]
        records = (bytes([one]) + image for one, image in zip(labels, pixels, strict=True))
        (folder / name).write_bytes(b"".join(records))


@pytest.mark.sweep
def test_split_methods_measures_a_row_and_prints_its_table(tmp_path, monkeypatch):
    """A row is a real comparison, on gray copies in MNIST's files; tables are printed from rows
    without a run.
    """
    tiny_images(tmp_path / "color")
    gray, rows = tmp_path / "gray", tmp_path / "rows.jsonl"
    script = "split_methods.py"
    assert not rows_of(script, "gray", "--data", str(tmp_path / "color"), "--into", str(gray))
    asked = ["--data", str(gray), "--name", "tiny", "--target", "0.01", "--results", str(rows)]
    (row,) = rows_of(script, "methods", *asked, "--rounds", "1", "--rows", "1")
    assert row["method"] == "splitfed-v1"
    assert row["reached"]["round"] == 1
    # 24 images, 7x7 places of 32 channels at the cut, bf16
    assert row["reached"]["payload"]["gradients down"] == 24 * 7 * 7 * 32 * 2
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    assert "| SplitFed V1, true gradients | 1 |" in importlib.import_module("split_tables").text_of(
        [row]
    )


@pytest.mark.sweep
def test_split_server_memory_measures_a_real_server():
    """The counted model is built from the split server's parts: a renamed part fails here."""
    (row,) = rows_of("split_server_memory.py", "--smoke", "--methods", "fsl-sage", "--clients", "1")
    assert row["kept_buffer"] == 64 * (4 * 4 * 16 * 16 + 8)
    assert row["grown"] > row["kept"] > 0


@pytest.mark.slow
def test_one_peer_attacks_a_real_server(script, monkeypatch):
    """The attacker and the honest clients follow the protocol to the end of a run; a rule that
    leaves the attacker out differs from one that does not.
    """
    one_peer = script("one_peer")
    monkeypatch.setattr(one_peer, "ROUNDS", 2)
    monkeypatch.setattr(one_peer, "FLOOD", 3)
    hit = one_peer.measure("flood, growing", "mean, guards off")
    kept = one_peer.measure("first round x 1e6", "trimmed")
    assert (hit["versions"], kept["versions"]) == (2, 2)
    assert 0 < hit["share"] < 1
    assert kept["moved"] < 10
    assert kept["accuracy"] > 0.5
    assert hit["settings"] != kept["settings"]


def test_one_peer_counts_clips_and_shares(script):
    """The ledger's weights tell honest deltas that were clipped; the table names them."""
    one_peer = script("one_peer")
    deltas = [("client-00/1/0/1", 32.0), ("client-01/1/0/1", 16.0), ("client-02/1/0/1", 16.0)]
    merged = [{"key": key, "weight": weight} for key, weight in deltas]
    facts = [
        {"fact": "version", "version": 0, "merged": []},
        {"fact": "version", "version": 1, "merged": merged},
        {"fact": "quarantined", "key": "client-02/1/0/2"},
    ]
    found = one_peer.counted(facts, usual=32.0)
    assert found == {
        "versions": 1,
        "share": 0.25,
        "honest_clipped": 1,
        "honest_quarantined": 0,
        "hostile_quarantined": 1,
    }
    rule = one_peer.GUARDED
    row = {"rule": rule, "accuracy": 0.8, "end": "ended", **found, "versions": one_peer.ROUNDS}
    honest = {**row, "attack": "none", "moved": 2.0, "honest_clipped": 0, "warnings": {}}
    hit = {**row, "attack": "x 1e6", "moved": 6e6, "warnings": {"clipped #": 5}}
    text = "\n".join(one_peer.table([honest, hit]))
    assert "| x 1e6 |  | 0.80, moved 3e6 x, 1 honest deltas clipped |" in text
    assert "| x 1e6 | clipped # (5) |" in text


@pytest.mark.sweep
def test_robust_trains_and_counts(monkeypatch):
    """A round with a liar, under the mean and under a robust rule; and a row of the costs."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    robust = importlib.import_module("robust")
    rows = [robust.measure(robust.Spec(rule, "x -10", 0), 1) for rule in ("mean", "median")]
    assert not any(row["problem"] for row in rows)
    assert rows[0]["loss"] > rows[1]["loss"] > 0
    assert {row["cost"] for row in robust.cost(5, 20_000)} == set(robust.RULES)


@pytest.mark.sweep
def test_a_storm_hits_and_reports():
    """Processes, links, faults and the audit: a changed command line that the storm looks for fails
    here.
    """
    sizes = ("--clients", "2", "--calm", "6", "--storm", "6", "--every", "1.5")
    row, summary = rows_of("storm.py", *sizes, "--faults-per-hour", "3600", "--seeds", "2")
    assert summary["faults"] == [row["faults"]]
    assert row["complaints"] == []
    assert row["faults"] >= 1
    assert row["clients"] == 2
    assert row["calm_tokens_per_s"] > 0


def test_storms_are_summed_up_without_missing_numbers(monkeypatch):
    """A short storm may have no sync; median and worst of the others stay true."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    storm = importlib.import_module("storm")
    rows = [
        {
            "seed": seed,
            "faults": seed,
            "throughput": rate,
            "participation": share,
            "back": {"median_s": back},
        }
        for seed, rate, share, back in (
            (1, 0.9, None, 4.0),
            (2, 0.8, 0.5, None),
            (3, 1.0, 0.75, 2.0),
        )
    ]
    summary = storm.summed_up(rows)
    assert summary["throughput"] == {"median": 0.9, "worst": 0.8}
    assert summary["participation"] == {"median": 0.625, "worst": 0.5}
    assert summary["back_s"] == {"median": 3.0, "worst": 4.0}
    assert storm.summed_up([{**rows[0], "back": {"median_s": None}}])["back_s"] is None


@pytest.fixture
def script(monkeypatch):
    """Return a function: name -> the module of that benchmark."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


def test_peers_that_cannot_give_a_reason(script, tmp_path):
    """A row without figures is not an error; a model may be too large for one message."""
    peers = script("sync_peers")
    size = peers.Size(1, 1000, 2, 5.62, sys.executable, tmp_path)
    assert "one rank" in peers.measure("gloo", size, small=True)["skipped"]
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no flwr >&2; exit 1\n")
    python.chmod(0o755)
    size = peers.Size(1, 600_000_000, 2, 5.62, str(python), tmp_path)
    assert peers.cannot("flower", size) == "no flwr"
    python.write_text("#!/bin/sh\n")
    assert "2147483647" in peers.cannot("flower", size)
    size = peers.Size(10**6, 500_000_000, 2, 5.62, str(python), tmp_path)
    assert "GB of memory" in peers.cannot("flower", size)


def test_the_figure_of_syncs_shows_its_rows(script, tmp_path):
    """Medians, ranges and the computed panel; of two rows the last counts, a skipped one never."""
    figure = script("sync_figure")
    ours = {"bench": "sync", "format": "e4m3", "bits_up": 6.5, "bits_down": 5.5}
    peer = {"bench": "sync_peer", "peer": "gloo", "bytes_up": 400, "bytes_down": 400}
    rows = [
        {**peer, "clients": 6, "parameters": 100, "sync_s_each": [1.0]},
        {**ours, "clients": 6, "parameters": 400, "sync_s_each": [9.0]},
        {**ours, "clients": 6, "parameters": 100, "sync_s_each": [1.0, 4.0, 2.0]},
        {**ours, "clients": 6, "parameters": 400, "sync_s_each": [8.0]},
        {**ours, "clients": 24, "parameters": 100, "sync_s_each": [30.0]},
        {"bench": "sync_peer", "peer": "flower", "skipped": "why"},
        {"bench": "limits"},
    ]
    six, _, gloo = series = figure.series_of(rows)
    assert [one.label for one in series] == [
        "fsl-async e4m3, 6 clients", "fsl-async e4m3, 24 clients", "gloo, 6 clients",
    ]  # fmt: skip
    assert six.points == (
        figure.Point(100, 2.0, 1.0, 4.0, 12.0), figure.Point(400, 8.0, 8.0, 8.0, 12.0),
    )  # fmt: skip
    assert gloo.points[0].line_bits == 32, "a ring sends and receives at once"
    assert figure.comparable(series) == [six, gloo]
    # 12 bits a value at 12 Mbit/s are a microsecond; the server takes 0.02 s a value.
    assert six.largest_model(12) == pytest.approx(60 / (0.02 + 1e-6))
    assert figure.spread([0.5, 0.5, 1.0], 0.25) == [0.375, 0.625, 1.0]
    assert figure.spread([0.9, 0.95], 0.25) == [0.75, 1.0]
    path = tmp_path / "sync.png"
    figure.draw(series, path)
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_relay_measures_with_and_without_one():
    """Plain and encrypted, each with and without a relay: the ratio needs both."""
    rows = rows_of("relay.py", "--mib", "1", "--rounds", "1")
    assert [(row["curve"], row["relays"]) for row in rows] == [
        (False, 0), (False, 1), (True, 0), (True, 1),
    ]  # fmt: skip
    assert all(row["bytes_per_s"] > 0 and row["round_trip_us"] > 0 for row in rows)


@pytest.mark.slow
def test_streaming_sends_what_it_codes():
    """A process of its own sends."""
    (row,) = rows_of("streaming.py", "--values", "0.6", "--format", "uniform", "--rounds", "1")
    assert row["values"] > 600_000
    assert row["coded_mb"] > 0.4
    assert row["streamed_s"] > 0


@pytest.mark.sweep
def test_attackers_of_a_real_server(script):
    """A replay, which needs a recorded honest client: the attacker is another process, and its
    problem is in the row.
    """
    row = script("under_attack").measure("replayed", 20_000, 1, warm_s=0.1)
    assert (row["problem"], row["lost_sessions"]) == ("", 0)
    assert row["steps"] > 0
    assert row["attacked_s"] > 0


def test_limits_are_numbers(script, tmp_path):
    """Every limit that other tables refer to."""
    row = script("limits").measure(tmp_path, small=True)
    assert set(row) == {"memcpy_gb_s", "disk_fsync_gb_s", "socket_gb_s"}
    assert all(number > 0 for number in row.values())


@pytest.mark.sweep
def test_codec_measures_beside_others():
    """A row of each kind; peers only where they are installed; codes are torch's casts."""
    rows = rows_of("codec.py", "--smoke", "--json")
    kinds = {row["row"] for row in rows}
    # NumPy's codec has one thread.
    assert kinds | {"threads"} == {
        "machine", "tensor", "fused", "entropy_stage", "peer", "threads", "summary",
    }  # fmt: skip
    tensors = [row for row in rows if row["row"] == "tensor"]
    assert {row["bit_exact"] for row in tensors if row["format"] == "uniform"} == {None}
    assert {row["bit_exact"] for row in tensors if row["format"] != "uniform"} == {True}
    assert all(0 < row["entropy_bits"] < row["bits_per_value"] * 1.05 for row in tensors)
    assert all(row["round_trip"] for row in rows if row["row"] == "entropy_stage")
    assert all(row["fused_over_passes"] > 0 for row in rows if row["row"] == "fused")
    summaries = {row["what"]: row for row in rows if row["row"] == "summary"}
    assert summaries["size over order-0 entropy, %"]["ratio"] > 0


@pytest.mark.slow
def test_transport_measures_beside_others():
    """Bare pyzmq is always installed; another process moves the chunks."""
    words = ("--chunks", "64", "--rounds", "1", "--seconds", "0.2", "--warm", "0.05")
    machine, ours, theirs = rows_of("transport.py", *words, "--others", "pyzmq", "--json")
    assert machine["not_installed"] == []
    assert (ours["way"], theirs["way"]) == ("fsl", "pyzmq")
    assert ours["over_pyzmq"] > 0
