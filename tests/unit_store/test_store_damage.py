"""Damaged files of a ps: found before use, and made again to the bit or reported.

Simulated disks lose unsynced bytes, and never alter synced ones: no run of `unit_crash` has this.
"""

import numpy as np
import pytest
from attrs import evolve
from deltas import merged_of

from fsl_async.observe.ledger_audit import audit_run
from fsl_async.roles.sync.delta import DeltaKey
from fsl_async.store.deltas.delta_kind import FullWeights
from fsl_async.store.deltas.spool import file_name
from fsl_async.store.errors import CheckpointDamaged, Damaged, DeltaDamaged, LedgerLost, StoreError
from fsl_async.store.model.manifest import Manifest
from fsl_async.store.rules.aggregation import rule_named
from fsl_async.store.rules.outer import Average, Growing, Nesterov
from fsl_codecs import CodecSpec, decode

FLAT = ["weights.safetensors", "momentum.safetensors", "residual.safetensors"]


MODEL = Manifest.from_shapes([("w.weight", (10, 5)), ("w.bias", (9,))], [("var", (7,))])


def key(name="a", base=0, sequence=1):
    return DeltaKey(name, 1, base, sequence)


def folder(run, version):
    return run.root / f"checkpoints/v{version:08d}"


def flip(path, place=-5):
    """Flip one bit, as a disk or a cable may."""
    data = bytearray(path.read_bytes())
    data[place] ^= 0x40
    path.write_bytes(data)


def contents(run, version):
    return {path.name: path.read_bytes() for path in folder(run, version).iterdir()}


@pytest.fixture
def make_twins(make_run):
    """Two runs of the same deltas, one to be damaged; `reported` collects its lines."""

    def make(versions=2, clients=("a", "b"), **options):
        made = []
        for name in ("intact", "damaged"):
            run = make_run(name, **options)
            run.start()
            run.reported = []
            run.store.report = run.reported.append
            for version in range(1, versions + 1):
                run.round(version, *clients)
            made.append(run)
        return made

    return make


def damage(path, place):
    """Alter one bit, remove the file or cut its end off."""
    if place == "gone":
        path.unlink()
    elif place == "shorter":
        path.write_bytes(path.read_bytes()[:-4])
    else:
        flip(path, place)


@pytest.mark.parametrize("file", FLAT)
@pytest.mark.parametrize("place", [-5, 2, "gone", "shorter"])
def test_a_damaged_vector_is_made_again_from_the_version_before(make_twins, file, place):
    """Regression: 3.6e36 in damaged weights went into the next version and to every client."""
    intact, damaged = make_twins()
    damage(folder(damaged, 2) / file, place)
    damaged.open()
    (line,) = damaged.store.notices
    assert line.startswith(f"version 2 cannot be made from version 2: {file} ")
    assert contents(damaged, 2) == contents(intact, 2), "the snapshot is written again"
    assert damaged.round(3, "a", "b") == intact.round(3, "a", "b")
    assert contents(damaged, 3) == contents(intact, 3)


@pytest.mark.parametrize(
    "options",
    [
        {"threads": 2},
        {"codec_down": CodecSpec(format="fp32")},
        {"outer": Average()},
        {"outer": Average(), "kind": FullWeights()},
        {"rule": rule_named("median", 0)},
        {"resident": False},
    ],
    ids=["threads", "lossless", "average", "full", "median", "mapped"],
)
def test_a_version_is_made_again_with_any_settings(make_twins, options):
    """By the same loop over the same deltas."""
    intact, damaged = make_twins(clients=("a", "b", "c"), **options)
    flip(folder(damaged, 2) / FLAT[0])
    flip(folder(damaged, 1) / FLAT[0])
    damaged.open()
    assert len(damaged.store.notices) == 2
    assert damaged.round(3, "a", "b", "c") == intact.round(3, "a", "b", "c")


def test_damage_while_the_run_goes_on_changes_no_version(make_twins):
    """The vectors are in memory; when digests differ, the parameter server reads what it has."""
    intact, damaged = make_twins()
    assert damaged.store.verify(2)
    assert not damaged.store.verify(9)
    for file in FLAT:
        flip(folder(damaged, 2) / file)
    assert not damaged.store.verify(2)
    assert len(damaged.reported) == len(FLAT)
    assert contents(damaged, 2) == contents(intact, 2)
    assert damaged.store.verify(2)
    assert damaged.round(3, "a", "b") == intact.round(3, "a", "b")


def test_a_damaged_record_is_written_again_while_the_run_goes_on(make_twins):
    """Regression: the next start found it, and could only go back."""
    intact, damaged = make_twins()
    damaged.store.finish_snapshot()
    flip(folder(damaged, 2) / "manifest.json")
    assert not damaged.store.verify(2)
    assert damaged.store.verify(2)
    assert contents(damaged, 2) == contents(intact, 2)


def test_without_weights_no_version_is_made(make_twins):
    """The line names the version to return to."""
    _, damaged = make_twins()
    for version in (2, 1):
        flip(folder(damaged, version) / FLAT[0])
    for spooled in (damaged.root / "spool").iterdir():
        spooled.unlink()
    flip(folder(damaged, 1) / "update.bin")
    for _ in range(2):
        with pytest.raises(
            CheckpointDamaged, match=r"version 2 is damaged: weights.* --from-version 0"
        ):
            damaged.open()


@pytest.mark.parametrize("file", [*FLAT[1:], "mean.safetensors"])
def test_a_vector_that_cannot_be_made_again_begins_at_zero(make_twins, file):
    """No client depends on it: it must not stop a run."""
    intact, damaged = make_twins(manifest=MODEL)
    for spooled in (damaged.root / "spool").iterdir():
        spooled.unlink()
    flip(folder(damaged, 2) / file)
    damaged.open()
    assert damaged.store.notices[-1].endswith("it begins again at zero")
    assert damaged.store.digest == intact.store.digest
    assert np.array_equal(damaged.weights(2), intact.weights(2))
    assert damaged.round(3, "a", "b").version == 3


def test_weights_are_made_again_from_the_update(make_twins):
    """Every client computes them this way, buffers too, with the same digest."""
    intact, damaged = make_twins(manifest=MODEL)
    for spooled in (damaged.root / "spool").iterdir():
        spooled.unlink()
    flip(folder(damaged, 2) / FLAT[0])
    damaged.open()
    assert np.array_equal(damaged.weights(2), intact.weights(2))
    assert damaged.store.notices[-1].endswith("momentum and coding error begin again at zero")


def test_a_version_is_made_again_with_its_recorded_step(make_twins):
    """The operator may have changed momentum and codec since."""
    _, damaged = make_twins(outer=Nesterov(0.7, 0.9), codec_down=CodecSpec("e4m3"))
    expected = contents(damaged, 2)
    damaged.settings = evolve(
        damaged.settings, outer=Growing(momentum=0.8), codec_down=CodecSpec("e5m2")
    )
    flip(folder(damaged, 2) / "momentum.safetensors")
    damaged.open()
    assert contents(damaged, 2) == expected


@pytest.mark.parametrize("place", [10, -5, 20])
def test_a_damaged_update_is_not_sent(make_twins, place):
    """Regression: a frame with one wrong bit raised in a loop callback, and the run stalled."""
    intact, damaged = make_twins()
    damaged.open()
    damaged.store.report = damaged.reported.append
    assert damaged.store.read_update(2, 0) == intact.store.read_update(2, 0)
    damaged.store._parts.run.kept._update_places.clear()
    flip(folder(damaged, 2) / "update.bin", place)
    assert damaged.store.read_update(2, 0) is None
    assert not damaged.store.has_update(2)
    (line,) = damaged.reported
    assert line.startswith("version 2 was damaged: update.bin ")
    assert line.endswith("clients get that version in full")
    damaged.open()
    (line,) = damaged.store.notices
    assert line.endswith("clients get that version in full")
    assert damaged.round(3, "a", "b") == intact.round(3, "a", "b")


def test_an_older_version_that_is_damaged_is_not_served(make_twins):
    """A client that was disconnected can fetch the newest version instead."""
    _, damaged = make_twins()
    flip(folder(damaged, 1) / FLAT[0])
    assert damaged.store.read_full(1, 0) is None
    assert damaged.reported[-1].endswith("it is not served in full any more")
    with pytest.raises(IndexError):
        damaged.store.read_full(2, 99)
    assert len(decode(damaged.store.read_full(2, 0))) == damaged.manifest.values


@pytest.mark.parametrize("rule", ["mean", "median"])
def test_a_damaged_delta_does_not_prevent_a_restart(make_run, rule):
    """Regression: it was retried forever, with the advice to free disk space."""
    run = make_run(rule=rule_named(rule, 0))
    run.start()
    merged = [merged_of(key(name)) for name in "abc"]
    for seed, one in enumerate(merged):
        run.send(one.key, np.full(run.manifest.values, seed + 1.0, np.float32))
    flip(run.root / "spool" / file_name(key("b")))
    with pytest.raises(DeltaDamaged, match=r"delta b/1/0/1 .*start again") as caught:
        run.store.commit(1, merged, 1.0)  # with other weights than those in the sum
    assert isinstance(caught.value, Damaged)
    recovered = run.open()
    assert [delta.key.client for delta in recovered.pending] == ["a", "c"]
    assert recovered.settled == {key("b"): "quarantined"}


# --- a lost ledger ---


def lose(path, how):
    if how == "gone":
        path.unlink()
    else:
        path.write_bytes({"empty": b"", "torn": b'{"at":1', "zeros": bytes(100)}[how])


@pytest.mark.parametrize("how", ["gone", "empty", "torn", "zeros"])
def test_a_run_without_its_ledger_does_not_start(make_twins, how):
    """Regression: it started, and dropped an acknowledged pending delta silently."""
    _, run = make_twins()
    run.send(key("a", 2, 3), np.ones(run.manifest.values, np.float32))
    run.close()
    ledger = run.root / "ledger.jsonl"
    lose(ledger, how)
    before = ledger.read_bytes() if ledger.exists() else None
    for _ in range(2):
        words = (
            r"missing or empty, and there are versions 0, 1, 2 and 5 deltas in the spool; "
            r".*--from-version 2 "
        )
        with pytest.raises(LedgerLost, match=words):
            run.open()
        assert (ledger.read_bytes() if ledger.exists() else None) == before
    assert len(list((run.root / "spool").iterdir())) == 5


@pytest.mark.parametrize("target", [2, 1])
def test_a_run_without_its_ledger_continues_from_a_given_version(make_twins, target):
    """Spooled deltas are quarantined, not dropped; what a version contains is not merged again."""
    intact, run = make_twins()
    spooled = {path.name for path in (run.root / "spool").iterdir()}
    run.close()
    lose(run.root / "ledger.jsonl", "gone")
    with pytest.raises(StoreError, match="no version 9 to fall back to"):
        run.open(from_version=9)
    recovered = run.open(from_version=target)
    expected = intact.store.records[target].digest
    assert (recovered.version, recovered.digest) == (target, expected)
    assert recovered.pending == ()
    merged = {key(name, base, base + 1) for name in "ab" for base in range(target)}
    assert recovered.settled == dict.fromkeys(merged, "merged")
    assert {path.name for path in (run.root / "quarantine").iterdir()} == spooled
    (line,) = [one for one in run.store.notices if "ledger" in one]
    assert line.endswith("4 deltas of the spool, acknowledged or not, moved to quarantine")
    run.round(target + 1, "a", "b")
    assert run.open().version == target + 1
    assert run.store.records[-1].generation == 1
    audit = audit_run(run.root)
    assert audit.complaints() == []


def test_the_next_start_finishes_an_interrupted_renewal(make_twins, monkeypatch):
    """Versions above the chosen one must not come back."""
    _, run = make_twins(versions=3)
    run.close()
    lose(run.root / "ledger.jsonl", "gone")

    def killed(*_):
        raise SystemExit("killed")

    with monkeypatch.context() as patched:
        patched.setattr("fsl_async.store.versions.checkpoint.Checkpoints.rename_void", killed)
        with pytest.raises(SystemExit):
            run.open(from_version=1)
    run.store = None
    recovered = run.open()
    assert recovered.version == 1
    assert not folder(run, 2).exists()
    assert run.round(2, "a").version == 2


def test_an_older_ledger_drops_nothing_silently(make_twins):
    """Missing version lines are written from manifests; regression: other deltas were deleted."""
    _, run = make_twins()
    pending = key("a", 2, 3)
    run.send(pending, np.ones(run.manifest.values, np.float32))
    run.close()
    ledger = run.root / "ledger.jsonl"
    lines = ledger.read_bytes().splitlines(keepends=True)
    first = next(n for n, line in enumerate(lines) if b'"version":1' in line)
    ledger.write_bytes(b"".join(lines[:first]))
    recovered = run.open()
    assert recovered.version == 2
    (line,) = [one for one in run.store.notices if pending.text in one]
    assert line == f"delta {pending.text} is in no line of the ledger; moved to quarantine"
    assert [path.name for path in (run.root / "quarantine").iterdir()] == ["a@1@2@3.frames"]


def test_a_ledger_older_than_all_versions_is_reported(make_twins):
    """Regression: no version is damaged, but the line said that version 0 was."""
    _, run = make_twins()
    for version in range(3, 7):
        run.round(version, "a")
    run.close()
    ledger = run.root / "ledger.jsonl"
    lines = ledger.read_bytes().splitlines(keepends=True)
    first = next(n for n, line in enumerate(lines) if b'"version":1' in line)
    ledger.write_bytes(b"".join(lines[:first]))
    with pytest.raises(StoreError, match=r"ends at version 0, .*start with --from-version 6"):
        run.open()
