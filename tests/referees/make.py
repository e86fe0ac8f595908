# ruff: noqa: T201 - its lines are what it is for
"""Referees: what must stay equal while the code behind it is rebuilt. This makes them again.

    python tests/referees/make.py runs|sim

| referee | guards | made again by |
|---|---|---|
| `directories/KIND.tar.xz`, `runs.json` | A run directory that an earlier release left opens, and the next two versions have the digests that they would have had. `run/` ended in order, with a delta acknowledged, one half sent, one in quarantine, momentum and residual; `killed/` ended after the newest version's rename, without its ledger line, and without a whole checkpoint after version 0, so a start replays three versions from the spool. `directories/split_server.tar.xz`: the same of a split server's checkpoints and ledger. | `make.py runs` |
| `sim.json` | The same seed gives the same simulated run: a hash of every event and effect, and counts that do not depend on their names. | `make.py sim` |
| `tests/vectors` | Frames of the codec, written and read byte for byte: `test_golden_frames_are_written_and_read_unchanged` with the native code or NumPy, whichever is in use, and `test_the_golden_vectors_again_without_native_code`. | `python tests/unit_codecs/test_codec_vectors.py` |
| `tests/unit_crash/all_crash_points.py` | Nothing acknowledged is lost at any effect or disk call. | nothing is recorded |
| `benchmarks/results/referees.jsonl` | Time, bytes and memory of a sync, and the quality summary. | its rows name their commands |

A client of several ranks sends the frames of one client, so its directory is that of `clock`.
Directories are made in a fixed order of disk calls and with fixed clocks. A referee that has to
change is a decision, with a line in the ADR that makes it.

Digests are equal on all processors (docs/adr/0137): versions are sums in a fixed order, value by
value, and deltas are integers over 2048. Rules that merge products use LAPACK in float64, whose
last bits differ; the result is rounded to fp32, and no singular value of these deltas is near zero
or another one, so that a rounding would have to fall within 1e-15 of the middle of two numbers.
"""

import argparse
import io
import json
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import driver
from kinds import CHUNK, KINDS, LAST, LEFT

from fsl_async.store import manifest

RUNS, RUNS_JSON, SIM_JSON = HERE / "directories", HERE / "runs.json", HERE / "sim.json"
SPLIT_LEFT, SPLIT_LAST = 5, 8
"""Uploads of the split server when its directory was left, and at the end."""


def pack(folder, name):
    """Write the folder as directories/NAME.tar.xz, without times and owners."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:xz", preset=9) as archive:
        for path in sorted(folder.rglob("*")):
            info = archive.gettarinfo(path, str(path.relative_to(folder)))
            info.uid = info.gid = info.mtime = 0
            info.uname = info.gname = ""
            with path.open("rb") if path.is_file() else io.BytesIO() as file:
                archive.addfile(info, file if path.is_file() else None)
    RUNS.mkdir(exist_ok=True)
    (RUNS / f"{name}.tar.xz").write_bytes(content.getvalue())


def unpack(name, folder):
    """Unpack directories/NAME.tar.xz into a folder."""
    with tarfile.open(RUNS / f"{name}.tar.xz") as archive:
        archive.extractall(folder, filter="data")


def make_run(kind, folder):
    """Make the directories of one kind below `folder`; return the digests they must lead to."""
    server, _, _ = driver.play(folder / "run", kind, LEFT)
    server.leave_pending()
    server.close()
    try:
        driver.play(folder / "killed", kind, LEFT, driver.Deadly())
    except SystemExit:
        pack(folder, kind.name)
    unpack(kind.name, folder / "again")  # the killed store holds the lock of its own folder
    return {one: go_on(kind, folder / "again" / one) for one in ("run", "killed")}


def go_on(kind, run_dir):
    """Go on with a directory to version LAST; return what was found and reached."""
    server, found, digests = driver.play(run_dir, kind, LAST)
    return {"found": found, "versions": digests, "vectors": driver.ended(server, run_dir)}


def make_split_server(folder):
    """Make the directories of a split server; return what starts must find."""
    driver.play_split_server(folder / "run", SPLIT_LEFT)
    driver.play_split_server(folder / "killed", SPLIT_LEFT + 1, kills=True)
    pack(folder, "split_server")
    unpack("split_server", folder / "again")
    return {one: go_on_split(folder / "again" / one) for one in ("run", "killed")}


def go_on_split(folder):
    """Go on with a split server's directory; return what two starts found."""
    return [driver.play_split_server(folder, SPLIT_LAST), driver.play_split_server(folder, 0)]


def make_runs():
    """Make all directories, and runs.json."""
    manifest.CHUNK_VALUES = CHUNK
    found = {}
    for name in (*KINDS, "split_server"):
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            made = make_run(KINDS[name], root) if name in KINDS else make_split_server(root)
            found[name] = made
        print(name, (RUNS / f"{name}.tar.xz").stat().st_size, "bytes")
    write(RUNS_JSON, found)


def make_sim():
    """Simulate the runs of sim.json again, and write what they gave."""
    found = {}
    for arguments in json.loads(SIM_JSON.read_text()):
        trace, counts = driver.simulate(arguments)
        found[arguments] = {"trace": trace, "counts": counts}
        print(arguments, trace)
    write(SIM_JSON, found)


def write(path, value):
    """Write JSON, short lists on one line."""
    path.write_text(json.dumps(value, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("runs", "sim"))
    make_runs() if parser.parse_args().what == "runs" else make_sim()
