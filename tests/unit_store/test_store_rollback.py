"""The store under damage, unconfirmed versions and rollbacks: simulated runs have none of them."""

import numpy as np
import pytest
from deltas import merged_of, noise
from safetensors.numpy import load_file

from fsl_async.files.files import Files
from fsl_async.roles.sync.delta import DeltaKey
from fsl_async.roles.sync.progress import Decay, RunLimits, RunPosition
from fsl_async.store.errors import CheckpointDamaged, StoreError
from fsl_async.store.model.manifest import Manifest
from fsl_async.store.rules.outer import mean_share
from fsl_async.store.store import Store
from fsl_async.store.versions.checkpoint import MEAN

SMALL = Manifest.from_shapes([("w.weight", (10, 5)), ("w.scale", ()), ("w.bias", (9,))])


class NoNewNames(Files):
    """A disk that, while `broken`, cannot make the names of versions durable."""

    broken = False

    def sync_directory(self, path):
        """Fail for the folder of versions."""
        if self.broken and path.name == "checkpoints":
            raise OSError(5, "Input/output error")


class FullForTheLedger(Files):
    """A disk that, while `broken`, has space for everything but ledger lines."""

    broken = False

    def write(self, descriptor, data, offset):
        """Fail for ledger lines."""
        if self.broken and bytes(data[:5]) == b'{"at"':
            raise OSError(28, "No space left on device")
        super().write(descriptor, data, offset)


def key(name="a", base=0, sequence=1):
    return DeltaKey(name, 1, base, sequence)


# --- unconfirmed versions ---


def test_an_unconfirmed_version_is_removed(run):
    """Its folder would count after a crash, so it is removed before other facts are recorded."""
    run.start()
    disk = NoNewNames()
    run.open(files=disk)
    run.send(key("a"), noise(SMALL, 1))
    disk.broken = True
    with pytest.raises(StoreError, match="cannot write version 1"):
        run.commit(key("a"))
    with pytest.raises(StoreError, match="cannot quarantine"):
        run.store.run.quarantine(key("a"), "too large")
    disk.broken = False
    run.store.run.quarantine(key("a"), "too large")
    recovered = run.open()
    assert recovered.version == 0
    assert recovered.settled == {key("a"): "quarantined"}
    assert run.round(1, "b").version == 1


@pytest.mark.parametrize("crash", [False, True])
def test_versions_without_a_ledger_line_are_kept(make_run, crash):
    """Until its ledger line is written, only the version's folder says what it merged."""
    run = make_run(keep_versions=1)
    run.start()
    disk = FullForTheLedger()
    run.open(files=disk)
    for name in "abc":
        run.send(key(name), noise(SMALL, 1))
    disk.broken = True
    assert "is tried again" in run.commit(key("a")).notice
    digest = run.commit(key("b")).digest
    if crash:
        run.store._parts.run.ledger.close()
        run.store = None
    else:
        disk.broken = False
        assert not run.commit(key("c")).notice
    recovered = run.open()
    assert {key("a"), key("b")} <= recovered.settled.keys()
    assert [delta.key for delta in recovered.pending] == ([key("c")] if crash else [])
    assert len(run.store.notices) == (2 if crash else 0)
    assert not crash or recovered.digest == digest
    run.close()
    assert [p.name for p in (run.root / "checkpoints").iterdir()] == [f"v0000000{3 - crash}"]


def test_a_crash_after_a_rollback_keeps_the_new_lineage(run):
    """The second version 2 differs from the first, whose digest the ledger holds."""
    run.start()
    run.round(1, "a")
    first = run.round(2, "a", "b").digest
    disk = FullForTheLedger()
    run.open(files=disk, from_version=1)
    disk.broken = True
    second = run.commit(key("b", 1, 2)).digest
    assert second != first
    run.store._parts.run.ledger.close()
    run.store = None
    recovered = run.open()
    assert (recovered.version, recovered.digest) == (2, second)
    assert [delta.key for delta in recovered.pending] == [key("a", 1, 2)]


# --- damage and rollback ---


def test_versions_that_a_rollback_made_void_are_known_by_digest(run):
    """Clients may hold them; with another digest they are of a copy that is not on record."""
    run.start()
    digests = {version: run.round(version, "a").digest for version in (1, 2, 3)}
    recovered = run.open(from_version=1)
    assert recovered.void == {2: digests[2], 3: digests[3]}
    assert run.round(2, "b").version == 2
    assert run.open().void == recovered.void


def alter(path, change):
    """Alter a file."""
    data = bytearray(path.read_bytes())
    places = {"first byte": 0, "middle": len(data) // 2, "last byte": len(data) - 3}
    if change in places:
        data[places[change]] ^= 1
    elif change == "shorter":
        del data[-4:]
    else:
        data += b"{}"
    if change == "gone":
        path.unlink()
    else:
        path.write_bytes(data)


@pytest.mark.parametrize(
    "change", ["first byte", "middle", "last byte", "shorter", "longer", "gone"]
)
def test_a_damaged_record_is_named(run, change):
    """The message must name the version to return to."""
    run.start()
    for version in (1, 2):
        run.round(version, "a")
    run.close()
    alter(run.root / "checkpoints/v00000002/manifest.json", change)
    with pytest.raises(CheckpointDamaged, match=r"manifest\.json") as caught:
        run.open()
    assert (caught.value.version, caught.value.file) == (2, "manifest.json")
    assert caught.value.previous_version == 1
    assert "\n" not in str(caught.value)
    recovered = run.open(from_version=1)
    assert recovered.version == 1
    assert [delta.key for delta in recovered.pending] == [key("a", 1, 2)]


def test_a_damaged_previous_version_is_not_recommended(run):
    """The recommended version must be intact."""
    run.start()
    for version in (1, 2):
        run.round(version, "a")
    run.close()
    for version in (1, 2):
        (run.root / f"checkpoints/v0000000{version}/weights.safetensors").unlink()
        (run.root / f"checkpoints/v0000000{version}/update.bin").unlink()
    for spooled in (run.root / "spool").iterdir():
        spooled.unlink()
    with pytest.raises(CheckpointDamaged) as caught:
        run.open()
    assert caught.value.previous_version == 0
    (run.root / "checkpoints/v00000000/weights.safetensors").unlink()
    with pytest.raises(CheckpointDamaged, match="no older version is intact") as caught:
        run.open()
    assert caught.value.previous_version is None


def test_a_missing_version_is_detected(run):
    """The ledger lists version 2; continuing silently from version 1 would fork the run."""
    run.start()
    for version in (1, 2):
        run.round(version, "a")
    run.close()
    (run.root / "checkpoints/v00000002").rename(run.root / "elsewhere")
    with pytest.raises(CheckpointDamaged, match="version 2 is damaged") as caught:
        run.open()
    assert caught.value.previous_version == 1


def test_a_version_of_another_run_is_detected(run, make_run):
    """Two runs of one model have the same file names; another run's version must be rejected."""
    run.start()
    run.round(1, "a")
    run.close()
    other = make_run("other")
    other.start(seed=9)
    other.round(1, "a")
    other.close()
    (run.root / "checkpoints/v00000001").rename(other.root / "old")
    (other.root / "checkpoints/v00000001").rename(run.root / "checkpoints/v00000001")
    with pytest.raises(CheckpointDamaged, match="another lineage"):
        run.open()


def test_a_rollback_makes_deltas_pending_again(run):
    """A rollback costs time, not work: the same deltas lead to the same weights."""
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
    assert recovered.settled == dict.fromkeys([key("a", 0, 1), key("b", 0, 1)], "merged")
    void = [p.name for p in (run.root / "checkpoints").iterdir() if "rolled" in p.name]
    assert sorted(void) == ["rolled-back-1-v00000002", "rolled-back-1-v00000003"]
    again = [run.commit(key("a", v - 1, v), key("b", v - 1, v)).digest for v in (2, 3)]
    assert again == digests[1:]
    assert run.open().digest == digests[2]


def test_a_rollback_to_the_newest_version_changes_nothing(run):
    """An operator who leaves the option in place must not roll back again and again."""
    run.start()
    run.round(1, "a")
    run.open(from_version=1)
    assert run.store.notices == []
    with pytest.raises(StoreError, match="no version 7 to fall back to; there is 0, 1"):
        run.open(from_version=7)


def test_a_delta_lost_in_a_rollback_is_unknown_again(run):
    """A delta without a file may be sent again, so its key must not stay merged."""
    run.start()
    run.round(1, "a")
    run.round(2, "a")
    (run.root / "spool/a@1@1@2.frames").unlink()
    recovered = run.open(from_version=1)
    assert recovered.pending == ()
    assert run.store.known(key("a", 1, 2)) is None
    assert "1 delta is gone" in run.store.notices[-1]


def test_the_error_for_a_lost_manifest_says_what_to_do(run):
    """Without the list of tensors the weights are numbers without names."""
    run.start()
    run.close()
    path = run.root / "manifest.json"
    data = path.read_bytes()
    path.write_bytes(data.replace(b"w.bias", b"w.BIAS"))
    with pytest.raises(StoreError, match="does not match its checksum"):
        run.open()
    path.unlink()
    with pytest.raises(StoreError, match="is missing; restore it"):
        run.open()


def test_a_decay_outlives_the_process_and_not_a_rollback(make_run):
    """A rollback may go back to before it."""
    run = make_run()
    run.start()
    for version in (1, 2):
        run.round(version, "a")
    decay = Decay(0.4, RunLimits(rounds=5, seconds=9.5), RunLimits(tokens=100))
    run.store.run.record_decay(decay)
    run.close()
    store = Store(run.root)
    assert store.recover().decay == decay
    store.close()
    store = Store(run.root, from_version=1)
    assert store.recover().decay is None
    store.close()


def test_only_a_run_without_a_planned_end_keeps_a_mean(make_run):
    """With an end the last version is the best one, and a mean costs a model of disk."""
    run = make_run()
    run.start()
    run.round(1, "a")
    assert (run.root / "checkpoints" / "v00000001" / MEAN).exists()
    delta = key("a", 1, 2)
    run.send(delta, noise(run.manifest, 5))
    run.store.commit(2, [merged_of(delta)], 1.0, RunPosition(is_planned=True, progress=0.1))
    assert not (run.root / "checkpoints" / "v00000002" / MEAN).exists()


def test_the_mean_of_versions_is_in_its_file(make_run):
    """Against the definition; the safetensors library opens it as it does the weights."""
    run = make_run()
    run.start()
    expected = run.weights(0)
    for version in (1, 2, 3):
        run.round(version, "a", "b")
        expected += (run.weights(version) - expected) * np.float32(mean_share(version))
    tensors = load_file(run.root / "checkpoints" / "v00000003" / MEAN)
    found = np.concatenate([tensors[one.name].ravel() for one in run.manifest.tensors])
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


def test_a_version_records_the_momentum_of_its_rounds_length(make_run):
    """Two steps a delta: s^2 / (s^2 + 25) is below what the version's number would allow."""
    run = make_run()
    run.start()
    for version in (1, 2, 3):
        run.round(version, "a", "b")
    assert run.store.records[-1].momentum == pytest.approx(4 / 29)
