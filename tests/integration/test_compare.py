"""`fsl-node compare` as a process: its output for people and for programs."""

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
