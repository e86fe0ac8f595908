"""The store's interface: versions, deltas, refusals."""

import json
import math
import struct
import tracemalloc

import numpy as np
import pytest
from deltas import delta_of, merged_of, noise

from fsl_async.roles.sync.delta import DeltaKey
from fsl_async.store.disk.chunk_files import digest_of
from fsl_async.store.errors import FrameRefused, StoreError
from fsl_async.store.model.manifest import CHUNK_VALUES, Manifest
from fsl_async.store.rules.outer import OPTIMIZERS, Average
from fsl_async.store.store import Store
from fsl_codecs import CodecSpec, decode_into, encode, info

SMALL = Manifest.from_shapes([("w.weight", (10, 5)), ("w.scale", ()), ("w.bias", (9,))])
FP32 = CodecSpec(format="fp32")


def frames_of(manifest, vector, spec=FP32):
    spans = (manifest.chunk_range(index) for index in range(manifest.chunks))
    return [encode(vector[start:stop], spec) for start, stop in spans]


def key(name="a", base=0, sequence=1):
    return DeltaKey(name, 1, base, sequence)


# --- versions ---


def test_version_0_equals_the_published_weights(run):
    """The publishing client trains on: its own weights are version 0 to the bit."""
    committed = run.start()
    weights = noise(SMALL, 0)
    assert (committed.version, committed.digest) == (0, digest_of(weights))
    assert np.array_equal(run.weights(0), weights)
    assert not run.store.has_update(0)


def test_the_weights_open_as_safetensors(run):
    """Other tools can read the checkpoint; the test parses the published layout."""
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
def test_clients_that_apply_the_updates_hold_the_same_weights(make_run, optimizer, down):
    """Decode and one fp32 add give every node the digest that the ps announced."""
    run = make_run(codec_down=CodecSpec(format=down), outer=OPTIMIZERS[optimizer]())
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
        record = run.store.records[-1]
        assert record.update_norm == pytest.approx(float(np.linalg.norm(sent)), rel=1e-5)
        assert record.update_chunks == SMALL.chunks
    coded = [len(run.store.read_update(4, index)) for index in range(SMALL.chunks)]
    assert committed.bytes_update == sum(coded)
    run.close()


def test_several_chunks_of_production_size(make_run):
    """The production chunk size, with a shorter last chunk."""
    manifest = Manifest.from_shapes([("w", (CHUNK_VALUES, 2)), ("b", (77,))])
    run = make_run(manifest=manifest, outer=Average())
    run.start()
    run.round(1, "a")
    delta = noise(manifest, 100)
    assert info(run.store.read_update(1, 2)).values == 77
    np.testing.assert_allclose(run.weights(1), noise(manifest, 0) - delta, atol=0.3)
    with pytest.raises(IndexError):
        run.store.read_update(1, 3)
    run.close()


def test_the_record_of_a_version_is_the_audit_trail(run):
    """Version v's clients, work, staleness and weights: a result is checked by these."""
    run.start()
    first = run.round(1, "a", "b")
    (_, record) = run.store.records
    assert (record.version, record.digest) == (1, first.digest)
    assert record.parent == digest_of(noise(SMALL, 0))
    assert record.tokens_total == run.store.tokens_total == 20
    entry = record.merged[1]
    assert (entry.key, entry.delta.tokens, entry.delta.steps) == (key("b"), 10, 2)
    assert (entry.staleness, entry.weight) == (0, 10.0)
    assert entry.norm == pytest.approx(float(np.linalg.norm(noise(SMALL, 101))))
    run.open()
    assert run.store.records[1] == record


def test_old_versions_and_their_deltas_are_removed(run):
    """A run of a month must not fill the disk; what a rollback may need stays."""
    run.start()
    for version in range(1, 6):
        run.round(version, "a")
    assert [record.version for record in run.store.records] == [3, 4, 5]
    assert [run.store.has_update(v) for v in range(7)] == [False] * 3 + [True] * 3 + [False]
    assert run.store.read_update(2, 0) is None
    assert run.store.read_full(2, 0) is None
    spooled = sorted(path.name for path in (run.root / "spool").iterdir())
    assert spooled == ["a@1@3@4.frames", "a@1@4@5.frames"]


def test_mapped_vectors_take_no_memory(make_run):
    """The model may barely fit on the ps's machine."""
    manifest = Manifest.from_shapes([("w", (20 * CHUNK_VALUES,))])
    bf16 = CodecSpec(format="bf16", entropy=False)
    run = make_run(manifest=manifest, codec_down=bf16, resident=False)
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
    assert spooling < 1.5 * vector_bytes  # includes the test's own vector of zeros
    assert committing < 1.5 * vector_bytes


# --- what the store refuses ---


def test_nothing_works_before_recover(run_root):
    """Before `recover` the store has no record of what was acknowledged."""
    store = Store(run_root / "run")
    with pytest.raises(StoreError, match="call recover first"):
        store.run.lease("a", 1)


def test_a_running_run_refuses_initial_weights(run):
    """A fresh node's weights never replace those of a running run."""
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
    """Every node starts from version 0; a wrong or lossy one is refused."""
    run.open()
    run.store.begin_initial(SMALL)
    with pytest.raises(FrameRefused, match=words):
        run.store.write_initial(index, frame)
    with pytest.raises(StoreError, match="send the rest"):
        run.store.finish_initial()


def test_publishing_can_start_over(run):
    """The first client may be preempted while it publishes; another one starts over."""
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
    ("version", "scale", "given", "words"),
    [
        (2, 0.1, {}, "cannot be next"),
        (0, 0.1, {}, "cannot be next"),
        (1, math.nan, {}, "scale nan"),
        (1, 0.1, {"tokens": 11}, "with 10 tokens, not 11"),
        (1, 0.1, {"weight": -2.0}, "has the weight -2.0"),
    ],
)
def test_a_commit_that_does_not_match_is_refused(run, version, scale, given, words):
    """The record lists exactly what was merged."""
    run.start()
    run.send(key(), noise(SMALL, 1))
    with pytest.raises(StoreError, match=words):
        run.store.commit(version, [merged_of(key(), **given)], scale)
    run.store.commit(1, [merged_of(key())], 0.1)


def test_only_what_is_pending_is_merged(run):
    """Unknown deltas, excluded ones, repeated ones or none at all make no version."""
    run.start()
    for seed, name in enumerate("abx"):
        run.send(key(name), noise(SMALL, seed))
    run.store.run.quarantine(key("x"), "odd")
    one, other, excluded, unknown = (merged_of(key(name)) for name in "abxc")
    for merged in ([], [one, one], [one, other, one]):
        with pytest.raises(StoreError, match="no delta, or one of them twice"):
            run.store.commit(1, merged, 1.0)
    for wrong in (excluded, unknown):
        with pytest.raises(StoreError, match="is not pending"):
            run.store.commit(1, [one, wrong], 1.0)
    for weight in (math.nan, math.inf, 1e39, -1.0):
        with pytest.raises(StoreError, match="has the weight"):
            run.store.commit(1, [one, merged_of(key("b"), weight)], 1.0)
    run.store.commit(1, [other], 1.0)
    assert [one.key for one in run.open().pending] == [key("a")], "it waits for the next version"


def test_a_step_that_overflows_makes_no_version(run):
    """A version that contains infinity would reach every client at once."""
    run.start()
    large = np.full(SMALL.values, 1e18, dtype=np.float32)
    run.send(key("a"), large)
    with pytest.raises(StoreError, match=r"not finite in tensor 'w\.weight'"):
        run.store.commit(1, [merged_of(key("a"))], 1e30)
    assert run.store.version == 0
    run.store.run.quarantine(key("a"), "norm")
    run.round(1, "b")
    assert run.store.version == 1


def test_a_huge_norm_is_quarantined(run):
    """A finite delta may overflow with a large weight, in this commit and after every restart."""
    run.start()
    huge = np.full(SMALL.values, 3e38, dtype=np.float32)
    result = run.send(key("a"), huge)
    assert result.problem
    assert "has diverged" in result.problem
    run.round(1, "b")
    assert run.store.version == 1


def test_a_client_has_one_unfinished_delta(run):
    """A client that is preempted in mid-upload again and again must not fill the disk."""
    run.start()
    for sequence in range(1, 6):
        run.store.spool_begin(delta_of(key("a", sequence)))
    assert len(list((run.store._run_dir / "spool").iterdir())) == 1


def test_versions_being_fetched_are_kept(run):
    """A full version may take longer to send than keep_versions last; updates come after it."""
    run.start()
    run.store.keep_from(1)
    for version in range(1, 8):
        run.round(version, "a")
    assert all(run.store.has_update(version) for version in range(1, 8))
    run.store.keep_from(None)
    run.round(8, "a")
    assert not run.store.has_update(1)


def test_a_requested_shard_is_leased_when_it_is_free(run):
    """The ps announced the index to the client before it was written down."""
    run.start()
    assert run.store.run.lease("a", 4, 2) == 2
    assert run.store.run.lease("b", 4, 2) == 0
    assert run.store.run.lease("a", 4, 3) == 2


def test_a_provisional_lease_can_be_taken_over(run):
    """A provisional lease survives a restart, and another client can take the shard on request."""
    run.start()
    assert run.store.run.lease("a", 2, 0, provisional=True) == 0
    assert run.store.run.lease("b", 2) == 1
    assert run.store.run.lease("c", 2) is None
    recovered = run.open()
    assert (recovered.leases, recovered.provisional) == ({"a": 0, "b": 1}, {"a"})
    assert run.store.run.lease("c", 2, 0, provisional=True) == 0
    assert run.store.run.lease("c", 2) == 0, "for good"
    assert run.store.run.lease("d", 2, 0) is None
    recovered = run.open()
    assert (recovered.leases, recovered.provisional) == ({"c": 0, "b": 1}, frozenset())


# --- other facts ---


def test_a_shard_stays_with_its_client(run):
    """Two clients on one shard would count the same data twice, also after a restart of the ps."""
    run.open()
    assert [run.store.run.lease(name, 2) for name in ("a", "b", "c", "a")] == [0, 1, None, 0]
    assert run.open().leases == {"a": 0, "b": 1}
    assert run.store.run.lease("c", 3) == 2
    assert run.store.run.lease("b", 1) is None


def test_names_and_incarnations_survive_a_restart(run):
    """After a restart the ps still has the run's name and each client's newest incarnation."""
    run.open()
    assert run.store.run.start_run("first") == "first"
    assert run.store.run.start_run("second") == "first"
    for incarnation in (5, 9, 7):
        run.store.run.record_incarnation("a", incarnation)
    recovered = run.open()
    assert (recovered.run, recovered.incarnations) == ("first", {"a": 9})
