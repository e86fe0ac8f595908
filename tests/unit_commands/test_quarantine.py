"""`fsl-node quarantine` takes an accepted delta out of a stopped run."""

import numpy as np
import pytest
from asking import ask
from deltas import delta_of, merged_of

from fsl_async.commands.quarantine import command
from fsl_async.errors import RunDirError, UsageError
from fsl_async.roles.sync.delta import DeltaKey
from fsl_async.store.model.manifest import Manifest
from fsl_async.store.store import Store
from fsl_codecs import CodecSpec, encode

MODEL = Manifest.from_shapes([("w", (7,))])
KEYS = [DeltaKey(name, 1, 0, 1) for name in ("good", "odd")]


@pytest.fixture
def run_dir(tmp_path):
    """A stopped run at version 0 with two accepted deltas."""
    store = Store(tmp_path / "run")
    store.recover()
    frame = encode(np.ones(7, np.float32), CodecSpec(format="fp32"))
    store.begin_initial(MODEL)
    store.write_initial(0, frame)
    digest = store.finish_initial().digest
    for key in KEYS:
        store.spool_begin(delta_of(key, base_digest=digest))
        store.spool_write(key, 0, frame)
        store.spool_finish(key)
    store.close()
    return tmp_path / "run"


def quarantine(*arguments):
    """Return the object that the command prints."""
    return ask(command, *arguments)[-1]


def test_a_delta_is_taken_out(run_dir):
    """After the next start the delta must not be merged, and the ledger must have the reason."""
    listed = quarantine(run_dir)["pending"]
    assert [row["delta"] for row in listed] == ["good/1/0/1", "odd/1/0/1"]
    assert quarantine(run_dir, "odd/1/0/1", "--reason", "outlier")["quarantined"] == ["odd/1/0/1"]
    assert [path.name for path in (run_dir / "quarantine").iterdir()] == ["odd@1@0@1.frames"]
    store = Store(run_dir)
    recovered = store.recover()
    assert [delta.key for delta in recovered.pending] == KEYS[:1]
    assert store.known(KEYS[1]) == "quarantined"
    store.close()
    assert "outlier" in (run_dir / "ledger.jsonl").read_text()


def test_all_deltas_of_a_client_are_taken_out(run_dir):
    """With those merged after a version, if the run goes back to it: in one line of the ledger."""
    assert quarantine(run_dir, "--client", "good")["quarantined"] == ["good/1/0/1"]
    store = Store(run_dir)
    store.recover()
    store.commit(1, [merged_of(KEYS[1], 10.0)], 0.1)
    store.close()
    lines = (run_dir / "ledger.jsonl").read_text().count("\n")
    found = quarantine(run_dir, "--client", "odd", "--from-version", 0)
    assert found["quarantined"] == [KEYS[1].text]
    assert found["notices"] == [
        (
            "rolled back from version 1 to 0: 0 deltas are pending again, 0 deltas are gone,"
            " 1 delta is quarantined"
        )
    ]
    assert (run_dir / "ledger.jsonl").read_text().count("\n") == lines + 1
    assert len([*(run_dir / "quarantine").iterdir()]) == 2
    recovered = (store := Store(run_dir)).recover()
    store.close()
    assert (recovered.version, recovered.pending) == (0, ())
    assert set(recovered.settled.values()) == {"quarantined"}


def test_mistakes_change_nothing(run_dir, tmp_path):
    """Each mistake must be one line, and the ledger must stay as it is."""
    before = (run_dir / "ledger.jsonl").read_bytes()
    with pytest.raises(RunDirError, match="waits to be merged"):
        quarantine(run_dir, "nobody/1/0/1")
    for wrong in (["odd"], ["--client", "nobody"], ["--client", "odd", "--client", "nobody"]):
        with pytest.raises(RunDirError, match="waits to be merged"):
            quarantine(run_dir, *wrong)
    for wrong in (["--from-version", 0], ["odd/1/0/1", "--client", "odd"]):
        with pytest.raises(UsageError, match="give DELTA or --client NAME"):
            quarantine(run_dir, *wrong)
    with pytest.raises(RunDirError, match="there is no version 3 to fall back to; there is 0"):
        quarantine(run_dir, "--client", "odd", "--from-version", 3)
    with pytest.raises(RunDirError, match="no ledger"):
        quarantine(tmp_path, "odd/1/0/1")
    store = Store(run_dir)
    store.recover()
    with pytest.raises(RunDirError, match="another process uses"):
        quarantine(run_dir, "odd/1/0/1")
    store.close()
    assert (run_dir / "ledger.jsonl").read_bytes() == before
