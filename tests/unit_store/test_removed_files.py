"""Files of a run directory that another program removes or changes while the run goes on."""

import shutil

import numpy as np
import pytest
from deltas import delta_of, merged_of

from fsl_async.observe.ledger_audit import audit_run
from fsl_async.roles.sync.delta import DeltaKey
from fsl_async.store.deltas.spool import file_name
from fsl_async.store.errors import DeltaDamaged, StoreError

A, B = DeltaKey("a", 1, 0, 1), DeltaKey("b", 1, 0, 1)


@pytest.fixture
def started(make_run):
    """A function that starts a run whose lines are in `lines` and whose end is in `ends`."""

    def start(name="run", **options):
        run = make_run(name, **options)
        run.start()
        run.lines, run.ends = [], []
        run.store.report, run.store.gone = run.lines.append, run.ends.append
        return run

    return start


def vector(run, value):
    return np.full(run.manifest.values, value, np.float32)


def run_frame(run, value):
    from fsl_codecs import CodecSpec, encode

    return encode(vector(run, value), CodecSpec(format="fp32"))


def test_an_interrupted_delta_starts_over_without_its_file(started):
    """Its next chunk would be appended to a file that is not there, at each offer again."""
    run = started()
    delta = delta_of(A, 10, base_digest=run.store.digest, number=1)
    run.store.spool_begin(delta)
    run.store.spool_write(A, 0, run_frame(run, 1.0))
    shutil.rmtree(run.root / "spool")
    run.store.spool_begin(delta)
    assert run.store.spool_next_chunk(A) == 0
    run.store.spool_write(A, 0, run_frame(run, 1.0))
    run.store.spool_finish(A)
    assert run.lines == ["spool/ was removed while the run went on, and is created again"]


@pytest.mark.parametrize("how", ["removed", "emptied", "replaced"])
def test_deltas_whose_files_are_gone_are_lost(started, how):
    """One line says so at once. The next start records them as lost, once, and goes on."""
    run = started()
    run.send(A, vector(run, 1.0))
    spool = run.root / "spool"
    if how == "emptied":
        (spool / file_name(A)).unlink()
    else:
        shutil.rmtree(spool)
    if how == "replaced":
        spool.mkdir()
    run.send(B, vector(run, 2.0))
    assert [path.name for path in spool.iterdir()] == [file_name(B)]
    (line,) = run.lines
    assert ("spool/ was removed" in line) == (how == "removed")
    assert "files of 1 acknowledged delta, a/1/0/1 first, were removed and cannot be" in line
    assert line.endswith("they are lost, and no version can be made before the next start")
    assert run.store.unsaved() in line
    merged = [merged_of(key, 10.0, tokens=10) for key in (A, B)]
    with pytest.raises(DeltaDamaged, match="on record as lost"):
        run.store.commit(1, merged, 1 / 20)
    recovered = run.open()
    assert recovered.lost == ("acknowledged delta a/1/0/1 is lost: its spool file is missing",)
    assert [one.key for one in recovered.pending] == [B]
    assert run.open().lost == (), "it is on record"
    (run.root / "journal.jsonl").touch()
    audit = audit_run(run.root)
    assert (audit.lost, audit.quarantined, audit.pending) == (("a/1/0/1",), 0, 1)


@pytest.mark.parametrize("how", ["renamed", "removed", "emptied ledger", "another ledger"])
def test_without_its_directory_or_ledger_a_run_ends(started, how):
    """What is written now would be lost. No other line hides the cause."""
    run = started()
    run.send(A, vector(run, 1.0))
    ledger = run.root / "ledger.jsonl"
    if how == "renamed":
        run.root.rename(run.root.with_name("elsewhere"))
    elif how == "removed":
        shutil.rmtree(run.root)
    elif how == "emptied ledger":
        ledger.write_bytes(b"")
    else:
        copy = ledger.read_bytes()
        ledger.unlink()
        ledger.write_bytes(copy)
    what = ledger if "ledger" in how else run.root
    words = f"^{what} was removed, replaced or emptied while the run went on"
    for act in (
        lambda: run.store.spool_begin(delta_of(B, 10, number=1)),
        lambda: run.store.commit(1, [merged_of(A, 10.0, tokens=10)], 0.1),
        lambda: run.store.run.record_incarnation("a", 7),
        run.store.unsaved,
    ):
        run.ends.clear()
        with pytest.raises(StoreError, match=words):
            act()
        assert [one.startswith(str(what)) for one in run.ends] == [True]
    assert run.lines == []
    assert run.store.version == 0


def test_a_removed_quarantine_is_created_again(started):
    """Else no file would ever leave the spool again, and each version would report it."""
    run = started()
    run.send(A, vector(run, 1.0))
    shutil.rmtree(run.root / "quarantine")
    run.store.run.quarantine(A, "by hand")
    assert [path.name for path in (run.root / "quarantine").iterdir()] == [file_name(A)]
    assert not [*(run.root / "spool").iterdir()]


def test_the_newest_deltas_are_the_last_ones_also_after_a_restart(started):
    """Medians have the newest delta of each client, which is the last that a start hands over."""
    run = started()
    for version, value in ((1, 1.0), (2, 3.0)):
        key = DeltaKey("a", 1, version - 1, version)
        run.send(key, vector(run, value))
        run.store.commit(version, [merged_of(key, 10.0, tokens=10)], 1 / 10)
    assert [one.key.base for one in run.open().usual] == [0, 1]
