"""Arriving deltas: order, resumption, refusal, quarantine, and restarts."""

import math
from pathlib import Path

import numpy as np
import pytest
from attrs import evolve
from deltas import delta_of, merged_of

from fsl_async.files.memory_files import Faults, MemoryDisk, MemoryFiles
from fsl_async.roles.sync.delta import DeltaKey
from fsl_async.store.book.records import recordable
from fsl_async.store.deltas.delta_kind import Dense
from fsl_async.store.deltas.spool import Spool, file_name, key_of_file
from fsl_async.store.disk.chunk_files import FrameWriter, frame_places, read_frame
from fsl_async.store.errors import DeltaDamaged, FrameRefused, StoreError
from fsl_async.store.model import manifest as manifest_module
from fsl_async.store.model.manifest import Manifest
from fsl_async.store.settings import StoreSettings
from fsl_async.store.store import Store
from fsl_async.store.versions.checkpoint import WEIGHTS
from fsl_codecs import CodecSpec, decode, encode

MANIFEST = Manifest.from_shapes([("w", (50,))])
CHUNK = 20
KEY = DeltaKey("site-a.gpu_0", 17, 0, 1)
DELTA = delta_of(KEY, base_digest="d", number=4, metrics={"loss": 1.5})
UP = CodecSpec(format="e5m2")


@pytest.fixture
def store(run_root, monkeypatch):
    monkeypatch.setattr(manifest_module, "CHUNK_VALUES", CHUNK)
    store = Store(run_root / "run", StoreSettings(codec_down=CodecSpec(format="fp32")))
    store.recover()
    store.begin_initial(MANIFEST)
    for index, frame in enumerate(frames(np.zeros(50, dtype=np.float32), CodecSpec())):
        store.write_initial(index, frame)
    store.finish_initial()
    yield store
    store.close()


def frames(vector, spec=UP):
    return [encode(vector[start : start + CHUNK], spec) for start in range(0, len(vector), CHUNK)]


def delta(seed=0):
    return np.random.default_rng(seed).standard_normal(50).astype(np.float32)


def send(store, key=KEY, vector=None):
    assert store.spool_begin(evolve(DELTA, key=key)) is None
    for index, frame in enumerate(frames(delta() if vector is None else vector)):
        store.spool_write(key, index, frame)
    return store.spool_finish(key)


def moved_by(store, *merged):
    """Return how far version 1 of these deltas moved the weights of version 0."""
    before = store._open.newest.vectors.named[WEIGHTS].copy()
    store.commit(1, merged, 1.0)
    return store._open.newest.vectors.named[WEIGHTS] - before


def spooled(store):
    return sorted(path.name for path in (store._run_dir / "spool").iterdir())


def test_a_delta_is_acknowledged_with_its_norm(store):
    """The norm guard uses this norm, so it must be that of the decoded values."""
    result = send(store)
    arrived = np.concatenate([decode(frame) for frame in frames(delta())])
    stored = result.stored
    assert stored.norm == pytest.approx(float(np.linalg.norm(arrived.astype(np.float64))))
    assert result.problem is None
    path = store._run_dir / "spool" / "site-a.gpu_0@17@0@1.frames"
    assert stored.bytes == path.stat().st_size
    assert store.known(KEY) == "accepted"


def test_a_known_key_gets_the_same_answer(store):
    """A client that missed the acknowledgement asks again; the delta is stored and merged once."""
    assert store.known(KEY) is None
    send(store)
    assert store.spool_begin(DELTA) == "accepted"
    store.commit(1, [merged_of(KEY)], 1.0)
    assert store.spool_begin(DELTA) == "merged"
    store.recover()
    assert store.spool_begin(DELTA) == "merged"


def test_an_interrupted_delta_resumes(store):
    """At 10 Mbit/s one lost session must not restart an hour's upload."""
    parts = frames(delta())
    store.spool_begin(DELTA)
    store.spool_write(KEY, 0, parts[0])
    assert store.spool_begin(DELTA) is None
    assert store.spool_next_chunk(KEY) == 1
    store.spool_write(KEY, 0, b"ignored: it is there already")
    for index in (1, 2):
        store.spool_write(KEY, index, parts[index])
    assert store.spool_finish(KEY).problem is None
    assert store.spool_next_chunk(KEY) == 0


def test_other_metadata_under_the_same_key_starts_over(store):
    """Chunks of different attempts must not be combined."""
    store.spool_begin(DELTA)
    store.spool_write(KEY, 0, frames(delta(1))[0])
    store.spool_begin(evolve(DELTA, tokens=11))
    assert store.spool_next_chunk(KEY) == 0


def test_starting_over_on_a_full_disk_forgets_the_first_try():
    """The file was emptied before the disk failed: its old chunks must not count."""
    files = MemoryFiles(MemoryDisk(), Faults(6, "error"))
    files.make_directory(Path("/spool"))
    spool = Spool(files, Path("/"), Dense())
    spool.begin(DELTA)
    spool.write(KEY, 0, frames(delta())[:1], Manifest.from_shapes([("w", (CHUNK,))]))
    with pytest.raises(OSError, match="No space"):
        spool.begin(evolve(DELTA, tokens=11))
    assert spool.next_chunk(KEY) == 0


@pytest.mark.parametrize(
    ("index", "frame", "words"),
    [
        (1, frames(delta())[1], "came before chunk 0"),
        (0, frames(delta())[2], "10 values, expected 20"),
        (0, frames(delta())[0][:-1], "cannot be decoded"),
        (0, b"", "cannot be decoded"),
    ],
)
def test_a_bad_frame_is_the_peers_fault(store, index, frame, words):
    """A peer's bad bytes cost the peer its session, and leave the delta as it was."""
    store.spool_begin(DELTA)
    with pytest.raises(FrameRefused, match=words):
        store.spool_write(KEY, index, frame)
    assert store.spool_next_chunk(KEY) == 0
    with pytest.raises(StoreError, match="0 of 3 chunks"):
        store.spool_finish(KEY)
    for position, good in enumerate(frames(delta())):
        store.spool_write(KEY, position, good)
    with pytest.raises(FrameRefused, match="3 is past the last of 3 chunks"):
        store.spool_write(KEY, 3, frames(delta())[0])
    assert store.spool_finish(KEY).problem is None


@pytest.mark.parametrize("client", ["../../etc/passwd", "a@b", "", "x" * 65, "a/b", "\u00e9"])
def test_no_client_name_becomes_a_path(store, client):
    """A peer's name is untrusted until it has been checked."""
    with pytest.raises(FrameRefused, match="cannot be a file name here"):
        store.spool_begin(delta_of(DeltaKey(client, 1, 0, 1)))


def test_keys_are_read_from_file_names():
    """Recovery reads keys from file names."""
    assert key_of_file(file_name(KEY)) == KEY
    for name in ("ledger.jsonl", "a@1@2.frames", "a@x@2@3.frames", "a@1@2@3.frames.new"):
        assert key_of_file(name) is None


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_delta_that_is_not_finite_is_quarantined(store, bad):
    """One NaN in the sum would be a NaN in every client's weights."""
    bad_delta = delta()
    bad_delta[45] = bad
    result = send(store, vector=bad_delta)
    assert result.problem == "it holds NaN or infinity"
    assert spooled(store) == []
    assert (store._run_dir / "quarantine" / file_name(KEY)).is_file()
    assert store.spool_begin(DELTA) == "quarantined"
    with pytest.raises(StoreError, match="not pending"):
        store.commit(1, [merged_of(KEY)], 1.0)
    assert store.recover().settled == {KEY: "quarantined"}


@pytest.mark.parametrize("limit", ["MOST_OF_CLIENT", "MOST_FILES", "MOST_BYTES"])
def test_the_quarantine_keeps_the_newest_files_only(store, monkeypatch, limit):
    """A client that diverged may send for days; the ledger has the reasons, and is small."""
    bad = np.full(50, np.nan, np.float32)
    keys = [DeltaKey("a", 1, 0, sequence) for sequence in range(1, 7)]
    send(store, keys[0])
    store.run.quarantine(keys[0], "its norm", held=True)
    send(store, keys[1], bad)
    size = (store._run_dir / "quarantine" / file_name(keys[1])).stat().st_size
    monkeypatch.setattr(
        f"fsl_async.store.deltas.spool.{limit}", 2 * size if "BYTES" in limit else 2
    )
    for key in keys[2:]:
        assert send(store, key, bad).problem == "it holds NaN or infinity"
    left = sorted(path.name for path in (store._run_dir / "quarantine").iterdir())
    assert left == [file_name(key) for key in (keys[0], *keys[4:])]
    store.recover()
    assert [store.known(key) for key in keys] == ["quarantined"] * 6
    store.run.release(keys[0])
    assert spooled(store) == [file_name(keys[0])]


def test_a_pending_delta_can_be_quarantined(store):
    """An outlier may be detected only once others have arrived; the sum must not contain it."""
    other = DeltaKey("b", 1, 0, 1)
    send(store)
    send(store, other, delta(1))
    store.run.quarantine(KEY, "norm 99 times the median")
    with pytest.raises(StoreError, match="not pending"):
        store.commit(1, [merged_of(KEY), merged_of(other)], 1.0)
    assert store.spool_begin(DELTA) == "quarantined"
    with pytest.raises(StoreError, match="not pending"):
        store.run.quarantine(KEY, "again")
    assert store.recover().settled == {KEY: "quarantined"}


@pytest.mark.parametrize("how", ["altered", "away"])
def test_an_unreadable_delta_is_in_no_version(store, how):
    """An error is better than half of a delta without a trace, and a later commit is right."""
    other, path = DeltaKey("b", 1, 0, 1), store._run_dir / "spool" / file_name(KEY)
    send(store, other, delta(1))
    send(store, KEY)
    if how == "altered":
        data = bytearray(path.read_bytes())
        data[-2] ^= 0xFF
        path.write_bytes(data)
    else:
        path.rename(path.with_suffix(".away"))
    for _ in range(2):
        with pytest.raises(DeltaDamaged, match=f"delta {KEY.text} cannot be read back"):
            store.commit(1, [merged_of(other, 3.0), merged_of(KEY)], 1.0)
    decoded = np.concatenate([decode(frame) for frame in frames(delta(1))])
    moved = moved_by(store, merged_of(other, 3.0))
    assert moved == pytest.approx(-3.0 * decoded, rel=1e-5)


@pytest.mark.parametrize("change", ["flip", "gone"])
def test_a_damaged_pending_delta_is_recorded(store, change):
    """If the disk loses an acknowledged delta, this is reported, and the run goes on."""
    send(store)
    path = store._run_dir / "spool" / file_name(KEY)
    if change == "gone":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-1] + b"\0")
    recovered = store.recover()
    assert recovered.pending == ()
    assert recovered.settled == {KEY: "quarantined"}
    (line,) = recovered.lost
    assert line.startswith(f"acknowledged delta {KEY.text} is lost: its spool file")
    assert store.recover().lost == ()


def test_the_rest_of_a_failed_write_is_cut_off():
    """A chunk may be sent again in a shorter coding; the rest of the failed write is cut off."""
    files = MemoryFiles(MemoryDisk(), Faults(3, "error"))
    writer = FrameWriter(files, Path("/part"))
    with pytest.raises(OSError, match="No space"):
        writer.append(b"x" * 100)
    writer.append(b"short")
    writer.sync()
    (place,) = frame_places(files, writer.path, 1)
    assert read_frame(files, writer.path, place) == b"short"


def test_metrics_are_limited():
    """Metrics come from a peer and go into a synced line."""
    many = {f"metric {number}" * 20: float(number) for number in range(100)}
    clean = recordable(delta_of(KEY, metrics=many)).metrics
    assert len(clean) <= 64
    assert max(map(len, clean)) == 64
    odd = recordable(delta_of(KEY, metrics={"a": math.nan, "b": "text", "c": 2})).metrics
    assert odd == {"a": None, "b": None, "c": 2.0}


@pytest.mark.parametrize("wrong", [{"tokens": -1}, {"steps": -1}, {"tokens": 1.5}])
def test_invalid_counts_are_refused(wrong):
    """Tokens are the clock of the run; a negative count would turn it back."""
    with pytest.raises(StoreError, match="whole numbers, not negative"):
        recordable(delta_of(KEY, **wrong))
