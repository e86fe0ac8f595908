# ruff: noqa: D102 - the shorthands of Run say what they do
"""The store as its caller sees it: versions, deltas, refusals, fallbacks."""

import json
import math
import struct
import tracemalloc

import numpy as np
import pytest

from fsl_async.events import DeltaKey
from fsl_async.learn.errors import CheckpointDamaged, FrameRefused, StoreError
from fsl_async.learn.files import Files
from fsl_async.learn.manifest import CHUNK_VALUES, Manifest, digest_of
from fsl_async.learn.outer import OuterSettings
from fsl_async.learn.records import DeltaMeta, MergedDelta, StoreSettings
from fsl_async.learn.store import Store
from fsl_codecs import CodecSpec, decode, decode_into, encode, info

SMALL = Manifest.from_shapes([("w.weight", (10, 5)), ("w.scale", ()), ("w.bias", (9,))])
FP32 = CodecSpec(format="fp32")


class Quiet(Files):
    """A disk that does not wait for the hardware."""

    def sync(self, descriptor):
        """Do nothing."""


class NoNewNames(Quiet):
    """A disk that, while `broken`, cannot make the names of versions durable."""

    broken = False

    def sync_directory(self, path):
        if self.broken and path.name == "checkpoints":
            raise OSError(5, "Input/output error")


class FullForTheLedger(Quiet):
    """A disk that, while `broken`, has room for everything but ledger lines."""

    broken = False

    def write(self, descriptor, data, offset):
        if self.broken and bytes(data[:5]) == b'{"at"':
            raise OSError(28, "No space left on device")
        super().write(descriptor, data, offset)


def noise(manifest, seed):
    return np.random.default_rng(seed).standard_normal(manifest.values).astype(np.float32)


def frames_of(manifest, vector, spec=FP32):
    spans = (manifest.chunk_range(index) for index in range(manifest.chunks))
    return [encode(vector[start:stop], spec) for start, stop in spans]


class Run:
    """A store with shorthands."""

    def __init__(self, root, manifest=SMALL, **options):
        self.root = root
        self.manifest = manifest
        self.settings = StoreSettings(**options)
        self.store = None

    def open(self, **options):
        self.close()
        self.store = Store(self.root, self.settings, files=Quiet(), **options)
        return self.store.recover()

    def close(self):
        if self.store is not None:
            self.store.close()
        self.store = None

    def start(self, seed=0):
        self.open()
        self.store.begin_initial(self.manifest)
        for index, frame in enumerate(frames_of(self.manifest, noise(self.manifest, seed))):
            self.store.write_initial(index, frame)
        return self.store.finish_initial()

    def send(self, key, vector, tokens=10, spec=FP32):
        meta = DeltaMeta(tokens=tokens, steps=2, base_digest=self.store.digest, round=1)
        assert self.store.spool_begin(key, meta) is None
        for index, frame in enumerate(frames_of(self.manifest, vector, spec)):
            self.store.spool_write(key, index, frame)
        return self.store.spool_finish(key)

    def commit(self, *keys, tokens=10):
        for key in keys:
            self.store.accumulate(key, float(tokens))
        merged = [MergedDelta(key, float(tokens), 0, tokens) for key in keys]
        return self.store.commit(self.store.version + 1, merged, 1 / (tokens * len(keys)))

    def round(self, version, *names):
        keys = [DeltaKey(name, 1, version - 1, version) for name in names]
        for position, key in enumerate(keys):
            self.send(key, noise(self.manifest, 100 * version + position))
        return self.commit(*keys)

    def weights(self, version):
        chunks = [self.store.read_full(version, i) for i in range(self.manifest.chunks)]
        return np.concatenate([decode(chunk) for chunk in chunks])


@pytest.fixture
def run(run_root):
    run = Run(run_root / "run")
    yield run
    run.close()


def key(name="a", base=0, sequence=1):
    return DeltaKey(name, 1, base, sequence)


# --- versions -------------------------------------------------------------------------------------------------


def test_version_0_is_what_was_published(run):
    """The publishing client trains on: its own weights must be version 0 to the bit."""
    committed = run.start()
    weights = noise(SMALL, 0)
    assert (committed.version, committed.digest) == (0, digest_of(weights))
    assert np.array_equal(run.weights(0), weights)
    assert not run.store.has_update(0)


def test_the_weights_open_as_safetensors(run):
    """A user takes the checkpoint to other tools; here it is read by the published layout alone."""
    run.start()
    data = (run.root / "checkpoints/v00000000/weights.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    assert data[8:9] == b"{"
    assert (8 + length) % 8 == 0
    assert header.pop("__metadata__") == {"format": "pt"}
    spans = sorted(entry["data_offsets"] for entry in header.values())
    assert spans[0][0] == 0
    assert [end for _, end in spans[:-1]] == [begin for begin, _ in spans[1:]]
    assert 8 + length + spans[-1][1] == len(data)
    flat = noise(SMALL, 0)
    for tensor in SMALL.tensors:
        entry = header[tensor.name]
        begin, end = entry["data_offsets"]
        values = np.frombuffer(data[8 + length + begin : 8 + length + end], dtype="<f4")
        assert entry["dtype"] == "F32"
        assert tuple(entry["shape"]) == tensor.shape
        assert np.array_equal(values, flat[tensor.offset : tensor.offset + tensor.values])


@pytest.mark.parametrize("optimizer", ["nesterov", "average"])
@pytest.mark.parametrize("down", ["fp32", "bf16", "e4m3"])
def test_clients_that_apply_the_updates_hold_the_same_weights(run_root, optimizer, down):
    """The heart of a run: decode, one fp32 add, and every node has the digest that the server announced."""
    run = Run(
        run_root / "run",
        codec_down=CodecSpec(format=down),
        outer=OuterSettings(optimizer=optimizer),
    )
    run.start()
    theta = noise(SMALL, 0)
    for version in range(1, 5):
        committed = run.round(version, "a", "b")
        sent = np.zeros_like(theta)
        for index in range(SMALL.chunks):
            start, stop = SMALL.chunk_range(index)
            decode_into(run.store.read_update(version, index), sent[start:stop])
        theta += sent
        assert digest_of(theta) == committed.digest == run.store.digest
        assert committed.update_norm == pytest.approx(float(np.linalg.norm(sent)), rel=1e-5)
        assert committed.update_chunks == SMALL.chunks
    coded = [len(run.store.read_update(4, index)) for index in range(SMALL.chunks)]
    assert committed.update_bytes == sum(coded)
    run.close()


def test_several_real_chunks_go_through(run_root):
    """The production chunk size, with a last chunk that is shorter."""
    manifest = Manifest.from_shapes([("w", (CHUNK_VALUES, 2)), ("b", (77,))])
    run = Run(run_root / "run", manifest, outer=OuterSettings(optimizer="average"))
    run.start()
    run.round(1, "a")
    delta = noise(manifest, 100)
    assert info(run.store.read_update(1, 2)).values == 77
    np.testing.assert_allclose(run.weights(1), noise(manifest, 0) - delta, atol=0.3)
    with pytest.raises(IndexError):
        run.store.read_update(1, 3)
    run.close()


def test_the_record_of_a_version_is_the_audit_trail(run):
    """Who made version v, with how much work, how stale, and what it weighed: without this no result can be checked."""
    run.start()
    first = run.round(1, "a", "b")
    (_, record) = run.store.records
    assert (record.version, record.digest) == (1, first.digest)
    assert record.parent == digest_of(noise(SMALL, 0))
    assert record.tokens_total == run.store.tokens_total == 20
    entry = record.merged[1]
    assert (entry.client, entry.base, entry.tokens, entry.steps) == ("b", 0, 10, 2)
    assert (entry.staleness, entry.weight) == (0, 10.0)
    assert entry.norm == pytest.approx(float(np.linalg.norm(noise(SMALL, 101))))
    recovered = run.open()
    assert recovered.records == run.store.records
    assert recovered.records[1] == record


def test_old_versions_and_their_deltas_are_removed(run):
    """A run of a month must not fill the disk; what a fallback may still need must stay."""
    run.start()
    for version in range(1, 6):
        run.round(version, "a")
    assert [record.version for record in run.store.records] == [3, 4, 5]
    assert [run.store.has_update(v) for v in range(7)] == [False] * 3 + [True] * 3 + [False]
    assert run.store.read_update(2, 0) is None
    assert run.store.read_full(2, 0) is None
    spooled = sorted(path.name for path in (run.root / "spool").iterdir())
    assert spooled == ["a@1@3@4.frames", "a@1@4@5.frames"]


def test_memory_is_one_vector(run_root):
    """The server may have to hold a model that barely fits: nothing but the accumulator has the model's size."""
    manifest = Manifest.from_shapes([("w", (20 * CHUNK_VALUES,))])
    bf16 = CodecSpec(format="bf16", entropy=False)
    run = Run(run_root / "run", manifest, codec_down=bf16)
    run.start()
    vector_bytes = 4 * manifest.values
    tracemalloc.start()
    run.send(key(), np.zeros(manifest.values, dtype=np.float32), spec=bf16)
    _, spooling = tracemalloc.get_traced_memory()
    tracemalloc.reset_peak()
    run.commit(key())
    _, committing = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    run.close()
    assert spooling < 1.5 * vector_bytes  # the test's own zeros are one vector
    assert committing < 2.0 * vector_bytes


# --- what the store refuses -----------------------------------------------------------------------------------


def test_nothing_works_before_recover(run_root):
    """A store that was not recovered does not know what was acknowledged."""
    store = Store(run_root / "run")
    with pytest.raises(StoreError, match="call recover first"):
        store.lease("a", 1)


def test_a_running_run_takes_no_fresh_weights(run):
    """A fresh node's weights must never become the truth of a running run."""
    run.start()
    with pytest.raises(StoreError, match="never replaced"):
        run.store.begin_initial(SMALL)


@pytest.mark.parametrize(
    ("index", "frame", "words"),
    [
        (1, encode(noise(SMALL, 0), FP32), "came before 0"),
        (0, encode(noise(SMALL, 0)[:-1], FP32), "59 values, expected 60"),
        (0, encode(noise(SMALL, 0), CodecSpec(format="bf16")), "coded in bf16"),
        (0, b"nonsense", "cannot be decoded"),
        (0, encode(np.full(60, np.nan, dtype=np.float32), FP32), "NaN or infinity in tensor"),
    ],
)
def test_bad_initial_frames_are_refused(run, index, frame, words):
    """Version 0 is what everyone starts from; a wrong or lossy one must not get in."""
    run.open()
    run.store.begin_initial(SMALL)
    with pytest.raises(FrameRefused, match=words):
        run.store.write_initial(index, frame)
    with pytest.raises(StoreError, match="send the rest"):
        run.store.finish_initial()


def test_publishing_can_start_over(run):
    """The first client may be preempted while it publishes; another one begins again with its own weights."""
    run.open()
    run.store.begin_initial(SMALL)
    run.store.write_initial(0, frames_of(SMALL, noise(SMALL, 5))[0])
    assert run.store.initial_next_chunk() == 1
    run.store.begin_initial(SMALL)
    assert run.store.initial_next_chunk() == 0
    run.store.abort_initial()
    with pytest.raises(StoreError, match="was not begun"):
        run.store.write_initial(0, b"")
    assert run.start(seed=6).digest == digest_of(noise(SMALL, 6))


@pytest.mark.parametrize(
    ("version", "scale", "merged", "words"),
    [
        (2, 0.1, (1.0, 10), "cannot be next"),
        (0, 0.1, (1.0, 10), "cannot be next"),
        (1, math.nan, (1.0, 10), "scale nan"),
        (1, 0.1, (1.0, 11), "with 10 tokens, not 11"),
        (1, 0.1, (2.0, 10), "other weights"),
    ],
)
def test_a_commit_that_does_not_match_is_refused(run, version, scale, merged, words):
    """What the record says was merged must be what was merged."""
    run.start()
    run.send(key(), noise(SMALL, 1))
    run.store.accumulate(key(), 1.0)
    with pytest.raises(StoreError, match=words):
        run.store.commit(version, [MergedDelta(key(), merged[0], 0, merged[1])], scale)
    run.store.commit(1, [MergedDelta(key(), 1.0, 0, 10)], 0.1)


def test_only_what_was_accumulated_is_merged(run):
    """Neither more nor fewer deltas, none twice, and none at all is no version."""
    run.start()
    run.send(key("a"), noise(SMALL, 1))
    run.send(key("b"), noise(SMALL, 2))
    run.store.accumulate(key("a"), 1.0)
    one, other = MergedDelta(key("a"), 1.0, 0, 10), MergedDelta(key("b"), 1.0, 0, 10)
    for merged in ([], [one, other], [other], [one, one]):
        with pytest.raises(StoreError, match="in the accumulator"):
            run.store.commit(1, merged, 1.0)
    with pytest.raises(StoreError, match="already"):
        run.store.accumulate(key("a"), 1.0)
    with pytest.raises(StoreError, match="not pending"):
        run.store.accumulate(key("c"), 1.0)
    for weight in (math.nan, math.inf, -1.0):
        with pytest.raises(StoreError, match="not negative"):
            run.store.accumulate(key("b"), weight)
    assert run.store.accumulated == {key("a"): 1.0}


def test_a_step_that_overflows_makes_no_version(run):
    """One version with infinity in it would spread to every client at once."""
    run.start()
    huge = np.full(SMALL.values, 3e38, dtype=np.float32)
    run.send(key("a"), huge)
    run.store.accumulate(key("a"), 1.0)
    with pytest.raises(StoreError, match=r"not finite in tensor 'w\.weight'"):
        run.store.commit(1, [MergedDelta(key("a"), 1.0, 0, 10)], 100.0)
    assert run.store.version == 0
    run.store.quarantine(key("a"), "norm")
    run.round(1, "b")
    assert run.store.version == 1


def test_a_version_that_may_not_last_is_taken_back(run):
    """Its folder would count after a crash; nothing may be recorded that contradicts it before it is gone."""
    run.start()
    run.close()
    disk = NoNewNames()
    run.store = Store(run.root, run.settings, files=disk)
    run.store.recover()
    run.send(key("a"), noise(SMALL, 1))
    disk.broken = True
    with pytest.raises(StoreError, match="cannot write version 1"):
        run.commit(key("a"))
    with pytest.raises(StoreError, match="cannot quarantine"):
        run.store.quarantine(key("a"), "too large")
    disk.broken = False
    run.store.quarantine(key("a"), "too large")
    recovered = run.open()
    assert recovered.version == 0
    assert recovered.settled == {key("a"): "quarantined"}
    assert run.round(1, "b").version == 1


@pytest.mark.parametrize("crash", [False, True])
def test_versions_that_the_ledger_does_not_know_yet_are_kept(run_root, crash):
    """A version exists by its folder; until the ledger has its line, that folder is the only record of what it merged."""
    run = Run(run_root / "run", keep_versions=1)
    run.start()
    run.close()
    disk = FullForTheLedger()
    run.store = Store(run.root, run.settings, files=disk)
    run.store.recover()
    for name in "abc":
        run.send(key(name), noise(SMALL, 1))
    disk.broken = True
    assert "is tried again" in run.commit(key("a")).notice
    digest = run.commit(key("b")).digest
    if crash:
        run.store._run.ledger.close()
        run.store = None
    else:
        disk.broken = False
        assert run.commit(key("c")).notice is None
    recovered = run.open()
    assert recovered.merged_keys >= {key("a"), key("b")}
    assert [delta.key for delta in recovered.pending] == ([key("c")] if crash else [])
    assert len(recovered.notices) == (2 if crash else 0)
    assert not crash or recovered.digest == digest
    run.close()
    assert [p.name for p in (run.root / "checkpoints").iterdir()] == [f"v0000000{3 - crash}"]


def test_a_crash_after_a_fallback_keeps_the_new_lineage(run):
    """The second version 2 differs from the first; recovery must not hold it against what the ledger says of the first."""
    run.start()
    run.round(1, "a")
    first = run.round(2, "a", "b").digest
    run.close()
    disk = FullForTheLedger()
    run.store = Store(run.root, run.settings, from_version=1, files=disk)
    run.store.recover()
    disk.broken = True
    second = run.commit(key("b", 1, 2)).digest
    assert second != first
    run.store._run.ledger.close()
    run.store = None
    recovered = run.open()
    assert (recovered.version, recovered.digest) == (2, second)
    assert [delta.key for delta in recovered.pending] == [key("a", 1, 2)]


# --- other facts ----------------------------------------------------------------------------------------------


def test_a_shard_stays_with_its_client(run):
    """Two clients on one shard would count the same data twice, also after a restart of the server."""
    run.open()
    assert [run.store.lease(name, 2) for name in ("a", "b", "c", "a")] == [0, 1, None, 0]
    assert run.open().leases == {"a": 0, "b": 1}
    assert run.store.lease("c", 3) == 2
    assert run.store.lease("b", 1) is None


def test_names_and_lives_are_remembered(run):
    """A restarted server must still know the run and tell a ghost from the newest life of a client."""
    run.open()
    assert run.store.start_run("first") == "first"
    assert run.store.start_run("second") == "first"
    for incarnation in (5, 9, 7):
        run.store.record_incarnation("a", incarnation)
    recovered = run.open()
    assert (recovered.run, recovered.incarnations) == ("first", {"a": 9})


# --- damage and fallback --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "file",
    [
        "weights.safetensors",
        "momentum.safetensors",
        "residual.safetensors",
        "update.bin",
        "manifest.json",
    ],
)
@pytest.mark.parametrize("harm", ["first byte", "middle", "last byte", "shorter", "longer", "gone"])
def test_damage_to_any_file_is_named(run, file, harm):
    """A server that trains on from a damaged file poisons every client; the message must say where to go back to."""
    run.start()
    for version in (1, 2):
        run.round(version, "a")
    run.close()
    path = run.root / "checkpoints/v00000002" / file
    data = bytearray(path.read_bytes())
    places = {"first byte": 0, "middle": len(data) // 2, "last byte": len(data) - 3}
    if harm in places:
        data[places[harm]] ^= 1
    elif harm == "shorter":
        del data[-4:]
    else:
        data += b"{}"
    if harm == "gone":
        path.unlink()
    else:
        path.write_bytes(data)
    with pytest.raises(CheckpointDamaged, match=file) as caught:
        run.open()
    assert (caught.value.version, caught.value.file) == (2, file)
    assert caught.value.previous_version == 1
    assert "\n" not in str(caught.value)
    recovered = run.open(from_version=1)
    assert recovered.version == 1
    assert [delta.key for delta in recovered.pending] == [key("a", 1, 2)]


def test_a_damaged_previous_version_is_not_recommended(run):
    """Advice that leads into the next error is worse than none."""
    run.start()
    for version in (1, 2):
        run.round(version, "a")
    run.close()
    for version in (1, 2):
        (run.root / f"checkpoints/v0000000{version}/update.bin").unlink()
    with pytest.raises(CheckpointDamaged) as caught:
        run.open()
    assert caught.value.previous_version == 0
    (run.root / "checkpoints/v00000000/weights.safetensors").unlink()
    with pytest.raises(CheckpointDamaged, match="no older version is intact") as caught:
        run.open()
    assert caught.value.previous_version is None


def test_a_version_that_vanished_is_noticed(run):
    """The ledger knows version 2; a server that silently went on from version 1 would fork the run."""
    run.start()
    for version in (1, 2):
        run.round(version, "a")
    run.close()
    (run.root / "checkpoints/v00000002").rename(run.root / "elsewhere")
    with pytest.raises(CheckpointDamaged, match="version 2 is damaged") as caught:
        run.open()
    assert caught.value.previous_version == 1


def test_a_version_of_another_run_is_noticed(run, run_root):
    """Two runs of one model have the same file names; a mixed-up copy must not pass for this run's version."""
    run.start()
    run.round(1, "a")
    run.close()
    other = Run(run_root / "other")
    other.start(seed=9)
    other.round(1, "a")
    other.close()
    (run.root / "checkpoints/v00000001").rename(run_root / "old")
    (other.root / "checkpoints/v00000001").rename(run.root / "checkpoints/v00000001")
    with pytest.raises(CheckpointDamaged, match="another lineage"):
        run.open()


def test_a_fallback_merges_again_what_it_took_back(run):
    """Falling back must cost time, not work: the same deltas lead to the same weights."""
    run.start()
    digests = [run.round(version, "a", "b").digest for version in (1, 2, 3)]
    recovered = run.open(from_version=1)
    assert (recovered.version, recovered.digest) == (1, digests[0])
    assert recovered.tokens_total == 20
    assert [delta.key.text for delta in recovered.pending] == [
        "a/1/1/2",
        "b/1/1/2",
        "a/1/2/3",
        "b/1/2/3",
    ]
    assert recovered.merged_keys == {key("a", 0, 1), key("b", 0, 1)}
    aside = [p.name for p in (run.root / "checkpoints").iterdir() if "rolled" in p.name]
    assert sorted(aside) == ["rolled-back-1-v00000002", "rolled-back-1-v00000003"]
    again = [run.commit(key("a", v - 1, v), key("b", v - 1, v)).digest for v in (2, 3)]
    assert again == digests[1:]
    assert run.open().digest == digests[2]


def test_a_fallback_twice_in_a_row_works(run):
    """Names of what was moved aside must not collide, nor the second lineage be taken for the first."""
    run.start()
    for version in (1, 2):
        run.round(version, "a")
    for generation in (1, 2):
        recovered = run.open(from_version=1)
        assert len(recovered.pending) == 1
        run.commit(key("a", 1, 2))
        assert (run.root / f"checkpoints/rolled-back-{generation}-v00000002").is_dir()
    assert run.open().version == 2


def test_a_fallback_to_the_newest_is_nothing(run):
    """An operator who leaves the option in place must not roll back again and again."""
    run.start()
    run.round(1, "a")
    recovered = run.open(from_version=1)
    assert recovered.notices == ()
    with pytest.raises(StoreError, match="no version 7 to fall back to; there is 0, 1"):
        run.open(from_version=7)


def test_a_lost_spool_file_after_a_fallback_is_forgotten(run):
    """A delta whose file is gone may come again from its client, so its key must not stay merged."""
    run.start()
    run.round(1, "a")
    run.round(2, "a")
    (run.root / "spool/a@1@1@2.frames").unlink()
    recovered = run.open(from_version=1)
    assert recovered.pending == ()
    assert run.store.known(key("a", 1, 2)) is None
    assert "1 are gone" in recovered.notices[-1]


def test_a_lost_manifest_says_what_to_do(run):
    """Without the list of tensors the weights are numbers without names."""
    run.start()
    run.close()
    path = run.root / "manifest.json"
    data = path.read_bytes()
    path.write_bytes(data.replace(b"w.bias", b"w.BIAS"))
    with pytest.raises(StoreError, match="does not match its checksum"):
        run.open()
    path.unlink()
    with pytest.raises(StoreError, match="is missing; put it back"):
        run.open()
