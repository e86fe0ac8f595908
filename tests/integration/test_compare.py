"""`fsl-node compare` as a process: its output for people and for programs."""

import importlib.util
import json
import os
import struct
import subprocess
import sys

import numpy as np
import pytest

UNIT_S = float(os.environ.get("FSL_TEST_TIME_UNIT", "3"))
FSL_NODE = [sys.executable, "-m", "fsl_async.cli"]


def write_idx(path, values):
    head = struct.pack(">HBB", 0, 8, values.ndim) + struct.pack(f">{values.ndim}I", *values.shape)
    path.write_bytes(head + values.astype(np.uint8).tobytes())


@pytest.fixture
def images(tmp_path):
    """Two classes that are easy to separate: dark and bright."""
    folder = tmp_path / "images"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for stem, count in (("train", 64), ("t10k", 32)):
        labels = np.arange(count) % 2
        values = rng.integers(0, 60, (count, 8, 8)) + 180 * labels[:, None, None]
        write_idx(folder / f"{stem}-images-idx3-ubyte", values)
        write_idx(folder / f"{stem}-labels-idx1-ubyte", labels)
    return folder


def compare(tmp_path, *more):
    return subprocess.run(
        [*FSL_NODE, "compare", *map(str, more)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120 * UNIT_S,
        check=False,
    )


@pytest.mark.slow
def test_two_methods_with_table_rows_and_picture(tmp_path, images):
    """Over a link with a delay the command must print progress, table, rows and picture."""
    rows, picture = tmp_path / "rows.jsonl", tmp_path / "x.png"
    done = compare(
        tmp_path, "--methods", "fsl-sage,fedavg", "--data", images, "--set", "model.sizes=width=4",
        "--batch", 16, "--learning-rate", 0.01, "--clients", 2, "--rounds", 12,
        "--target-accuracy", 0.7, "--stop-at-target", "--set", "split.upload_every=1",
        "--net", "100mbit,5ms", "--json", rows, "--png", picture, "--out", tmp_path / "out",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr + done.stdout
    lines = done.stdout.splitlines()
    assert lines[0].startswith("fsl-sage, fedavg: 2 clients, a proxy in this process: 100 Mbit/s")
    assert lines[1].startswith("fsl-sage: round 1 of 12, accuracy ")
    assert max(map(len, lines[lines.index("") :])) <= max(80, len(f"picture: {picture}"))
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    assert [row["method"] for row in found] == ["fsl-sage", "fedavg"]
    assert found[1]["reached"]["accuracy"] >= 0.7
    # The next round may have begun when the server receives the stop.
    assert found[1]["rounds"] <= found[1]["reached"]["round"] + 1
    assert found[0]["points"][-1]["coded"]["activations up"] > 0
    assert (tmp_path / "out" / "compare.jsonl").read_text() == rows.read_text()
    assert picture.read_bytes().startswith(b"\x89PNG")


FEDERATED = (
    "--set", "tune.objective=classify", "--set", 'tune.labels="no,yes"', "--set", "tune.steps=6",
    "--set", "tune.context=16", "--set", "train.warmup_steps=0", "--set", "train.device=cpu",
)  # fmt: skip


@pytest.mark.sweep
@pytest.mark.skipif(not importlib.util.find_spec("peft"), reason="needs the extra hf")
def test_two_rules_of_tuning_with_training_alone(tmp_path):
    """Sites of unequal ranks and labels: rules, one process on all records, and each site alone."""
    from tiny_base import write_bert

    base, rows, picture = write_bert(tmp_path / "base"), tmp_path / "rows.jsonl", tmp_path / "x.png"
    sites = []
    for name, labels in (("a", "nnny"), ("b", "yyyn"), ("e", "ny")):
        sites.append(tmp_path / f"{name}.jsonl")
        texts = {"n": ("zzzz zz", "no"), "y": ("aaaa aa", "yes")}
        lines = [
            json.dumps(dict(zip(("text", "label"), texts[one], strict=True))) for one in labels
        ]
        sites[-1].write_text("\n".join(lines * 6) + "\n")
    done = compare(
        tmp_path, "--methods", "fedit,bank", "--base", base, "--data", sites[0], "--data",
        sites[1], "--eval", sites[2], "--ranks", "2,4", "--batch", 4, "--rounds", 4,
        "--learning-rate", 0.01, "--target-accuracy", 0.9, "--net", "100mbit,5ms", "--json", rows,
        "--png", picture, "--out", tmp_path / "out", *FEDERATED,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr + done.stdout
    assert not done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("fedit, bank: 2 clients, a proxy in this process: 100 Mbit/s")
    assert lines[1].startswith("fedit: round 1 of 4, accuracy ")
    shown = lines[lines.index("") :]
    assert [line.split()[:2] for line in shown[2:6]] == [
        ["fedit", "4"], ["bank", "2-4"], ["pooled", "4"], ["local", "4"],
    ]  # fmt: skip
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    assert [row["method"] for row in found] == ["fedit", "bank", "pooled", "local"]
    for row in found[:3]:
        assert row["accuracy"] >= 0.9, row["method"]
    up = [row["site_round_bytes"]["coded"]["adapters up"] for row in found[:2]]
    assert 0 < up[1] < up[0]  # rows that a site does not train are zeros, which cost little
    assert found[0]["reached"]["round"] <= 4
    assert len(found[3]["alone"]) == 2
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "out" / "compare.jsonl").read_text() == rows.read_text()
