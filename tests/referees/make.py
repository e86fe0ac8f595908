# ruff: noqa: T201 - its lines are what it is for
"""Referees: what must stay equal while the code behind it is rebuilt. This makes them again.

    python tests/referees/make.py runs     directories/, runs.json
    python tests/referees/make.py sim      sim.json

A referee that has to change is a decision, with a line in the ADR that makes it. `driver.py` is
the only file here that follows the interfaces of machine, shell and store.

directories/KIND.tar.xz, runs.json: a run directory that an older process left is opened, and the
next two versions, and the vectors of the last one, have the recorded digests. Each has two:

    run/       ended in order, with momentum and residual, a delta acknowledged, one half sent, one
               in quarantine; in groups with the cut of a global round
    killed/    killed after version 3's rename and before its ledger line. No checkpoint after
               version 0 is whole (in groups: 2), so a start replays the later ones from the spool;
               where versions go from disk to disk (rounds, split), only the line is missing

A client of several ranks sends the frames of one client: its directory is that of `clock`.
`split` is the parameter server's of split learning, `split_server` the other one's: checkpoints and
ledger, in killed/ with a staged checkpoint, a line torn and two uploads trained since.

Digests are equal on all processors (docs/adr/0137): versions are fp32 additions and products value
by value in a fixed order, norms decide nothing (`kinds.ALWAYS`), and deltas are integers over 2048.
bank factors by LAPACK in float64, whose last bits differ; the result is rounded to fp32, and the
singular values of these deltas are apart. They held with OpenBLAS's kernels for Prescott, Nehalem,
Sandybridge, Haswell, Zen, SkylakeX and Cooperlake, which give different bits of an SVD, with NumPy
without AVX, and with the codec in NumPy.

sim.json: the same command gives the same simulated run. The counts hold whatever events are called;
the hash of all events and effects changes with their names and their members. Where it has to, the
counts are compared by hand, and both are recorded again.

Referees elsewhere:

    tests/vectors       frames of the codec, written and read byte for byte with each implementation
                        here, native and NumPy: unit_codecs/test_codec_vectors.py,
                        test_golden_frames_are_written_and_read_unchanged, and unit_codecs/
                        test_native_process.py, test_golden_vectors_on_the_path_that_the_variable_
                        chooses. Again: python tests/unit_codecs/test_codec_vectors.py
    crash points        python tests/unit_crash/all_crash_points.py: every effect and every disk
                        call, 20,324 runs, about 40 minutes of one core (docs/FAULTS.md)
    benchmarks/results/referees.jsonl
                        python benchmarks/quality.py --summary, and, on a quiet machine,
                        python benchmarks/sync.py --clients 6 --format uniform \
                            --parameters 100000000 --rounds 5
"""

import argparse
import io
import json
import tarfile
import tempfile
from pathlib import Path

import driver
from kinds import BLOCK, CHUNK, KINDS, LAST, LEFT

from fsl_async.config import settings
from fsl_async.store.model import manifest

HERE = Path(__file__).resolve().parent

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
    manifest.CHUNK_VALUES, settings.BLOCK_VALUES = CHUNK, BLOCK
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
    """Write JSON, one line for each kind or command."""
    lines = (f"{json.dumps(name)}: {json.dumps(one)}" for name, one in value.items())
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("runs", "sim"))
    make_runs() if parser.parse_args().what == "runs" else make_sim()
