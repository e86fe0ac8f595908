"""Damaged files of a running ps: found before use, and repaired to the bit or reported.

Simulated disks lose unsynced bytes, and never alter synced ones: no run of `unit_crash` has this.
"""

import numpy as np
import pytest
from deltas import merged_of

from fsl_async.observe.ledger_audit import audit_run
from fsl_async.roles.sync.delta import DeltaKey
from fsl_async.store.aggregation import rule_named
from fsl_async.store.delta_kind import FullWeights
from fsl_async.store.errors import CheckpointDamaged, Damaged, DeltaDamaged, LedgerLost, StoreError
from fsl_async.store.manifest import Manifest
from fsl_async.store.outer import OuterSettings
from fsl_async.store.records import file_name
from fsl_codecs import CodecSpec, decode

FLAT = ["weights.safetensors", "momentum.safetensors", "residual.safetensors"]
OTHERS = "recomputed from the version before and the deltas that it merged"


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


@pytest.mark.parametrize("file", FLAT)
@pytest.mark.parametrize("place", [-5, 2, "gone", "shorter"])
def test_damage_does_not_change_the_next_version(make_twins, file, place):
    """Regression: 3.6e36 in damaged weights went into the next version and to every client."""
    intact, damaged = make_twins()
    path = folder(damaged, 2) / file
    if place == "gone":
        path.unlink()
    elif place == "shorter":
        path.write_bytes(path.read_bytes()[:-4])
    else:
        flip(path, place)
    expected, made = intact.round(3, "a", "b"), damaged.round(3, "a", "b")
    assert made == expected
    assert contents(damaged, 3) == contents(intact, 3)
    if place == 2:  # the header: no value is read from it; the next start detects the damage
        assert damaged.reported == []
    else:
        assert damaged.reported == [line for line in damaged.reported if line.endswith(OTHERS)]
        assert len(damaged.reported) == 1
        assert damaged.reported[0].startswith(f"version 2 was damaged: {file} ")
        assert contents(damaged, 2) == contents(intact, 2)


@pytest.mark.parametrize(
    "options",
    [
        {"threads": 2},
        {"codec_down": CodecSpec(format="fp32")},
        {"outer": OuterSettings("average")},
        {"outer": OuterSettings("average"), "kind": FullWeights()},
        {"rule": rule_named("median", 0)},
    ],
    ids=["threads", "lossless", "average", "full", "median"],
)
def test_a_repair_is_the_same_step_with_any_settings(make_twins, options):
    """A recomputed file counts only if its digests are those of the damaged one."""
    intact, damaged = make_twins(clients=("a", "b", "c"), **options)
    flip(folder(damaged, 2) / FLAT[0])
    assert damaged.round(3, "a", "b", "c") == intact.round(3, "a", "b", "c")
    assert len(damaged.reported) == 1


def test_several_damaged_files_are_repaired(make_twins):
    """A bad disk often damages several files."""
    intact, damaged = make_twins()
    for file in FLAT:
        flip(folder(damaged, 2) / file)
    assert damaged.round(3, "a", "b") == intact.round(3, "a", "b")
    assert len(damaged.reported) == 3


def test_weights_are_recomputed_from_the_update(make_twins):
    """Every client computes them this way, buffers too, with the same digest."""
    intact, damaged = make_twins(manifest=MODEL)
    for spooled in (damaged.root / "spool").iterdir():
        spooled.unlink()
    flip(folder(damaged, 2) / FLAT[0])
    assert np.array_equal(damaged.weights(2), intact.weights(2))
    (line,) = damaged.reported
    assert line.endswith("it was recomputed from the version before and update.bin")


@pytest.mark.parametrize("file", FLAT)
def test_beyond_repair_no_version_is_made(make_twins, file):
    """Neither deltas nor the version before are intact: the line names the version to return to."""
    _, damaged = make_twins()
    flip(folder(damaged, 2) / file)
    flip(folder(damaged, 1) / FLAT[0])
    delta = key("a", 2, 3)
    damaged.send(delta, np.ones(damaged.manifest.values, np.float32))
    for _ in range(2):
        with pytest.raises(
            CheckpointDamaged, match=rf"version 2 is damaged: {file} .*--from-version 0"
        ):
            damaged.store.commit(3, [merged_of(delta)], 1.0)
    assert damaged.store.version == 2
    assert not folder(damaged, 3).exists()
    assert damaged.reported == []


def test_a_version_is_recomputed_with_its_recorded_step(make_twins):
    """The operator may have changed the momentum since; with "growing" it changes by itself."""
    _, damaged = make_twins(outer=OuterSettings("nesterov", 0.7, 0.9))
    damaged.settings = type(damaged.settings)(outer=OuterSettings("growing", momentum=0.8))
    damaged.open()
    expected = contents(damaged, 2)
    flip(folder(damaged, 2) / "momentum.safetensors")
    damaged.round(3, "a")
    assert contents(damaged, 2) == expected


def test_a_damaged_mean_is_recomputed_or_begins_again(make_twins):
    """No client depends on it: it must not stop a run."""
    intact, damaged = make_twins()
    flip(folder(damaged, 2) / "mean.safetensors")
    assert damaged.round(3, "a", "b") == intact.round(3, "a", "b")
    assert damaged.reported[-1].endswith("the deltas that it merged")
    flip(folder(damaged, 3) / "mean.safetensors")
    for spooled in (damaged.root / "spool").iterdir():
        spooled.unlink()
    assert damaged.round(4, "a", "b") == intact.round(4, "a", "b")
    assert damaged.reported[-1].endswith("the mean of versions begins again there")
    assert contents(damaged, 4)["mean.safetensors"] != contents(intact, 4)["mean.safetensors"]
    flip(folder(damaged, 4) / "mean.safetensors")
    flip(folder(damaged, 3) / FLAT[0])
    damaged.open()
    assert damaged.store.version == 4
    assert any("the mean of versions begins again there" in line for line in damaged.store.notices)
    assert np.array_equal(damaged.weights(4), intact.weights(4))


def test_another_codec_repairs_nothing(make_twins):
    """Another format loses other values, so the residual is another one."""
    _, damaged = make_twins(codec_down=CodecSpec("e4m3"))
    damaged.settings = type(damaged.settings)(codec_down=CodecSpec("e5m2"))
    damaged.open()
    flip(folder(damaged, 2) / "residual.safetensors")
    before = contents(damaged, 2)
    with pytest.raises(CheckpointDamaged, match="version 2 is damaged: residual"):
        damaged.round(3, "a")
    assert contents(damaged, 2) == before, "a result that differs replaces nothing"


@pytest.mark.parametrize("place", [10, -5, 20])
def test_a_damaged_update_is_recomputed_or_not_sent(make_twins, place):
    """Regression: a frame with one wrong bit raised in a loop callback, and the run stalled."""
    intact, damaged = make_twins()
    expected_frames = [
        intact.store.read_update(2, index) for index in range(intact.manifest.chunks)
    ]
    flip(folder(damaged, 2) / "update.bin", place)
    assert [
        damaged.store.read_update(2, index) for index in range(damaged.manifest.chunks)
    ] == expected_frames
    (line,) = damaged.reported
    assert line.startswith("version 2 was damaged: update.bin ")
    flip(folder(damaged, 2) / "update.bin", place)
    (damaged.root / "spool" / file_name(key("a", 1, 2))).unlink()
    damaged.store._parts.kept._update_places.clear()
    assert damaged.store.read_update(2, 0) is None
    assert not damaged.store.has_update(2)
    assert damaged.reported[-1].endswith("clients get that version in full")
    assert damaged.round(3, "a", "b") == intact.round(3, "a", "b")


def test_an_older_version_beyond_repair_is_not_served(make_twins):
    """A client that was disconnected can fetch the newest version instead."""
    _, damaged = make_twins()
    flip(folder(damaged, 1) / FLAT[0])
    flip(folder(damaged, 0) / FLAT[0])
    assert damaged.store.read_full(1, 0) is None
    assert damaged.reported[-1].endswith("it is not served any more")
    with pytest.raises(IndexError):
        damaged.store.read_full(2, 99)
    assert len(decode(damaged.store.read_full(2, 0))) == damaged.manifest.values


def test_a_version_can_be_verified_while_the_run_goes_on(make_twins):
    """When digests differ, the ps must check whether its own files are at fault."""
    _, damaged = make_twins()
    assert damaged.store.verify(2)
    assert not damaged.store.verify(9)
    flip(folder(damaged, 2) / FLAT[1])
    assert not damaged.store.verify(2)
    assert len(damaged.reported) == 1
    assert damaged.store.verify(2)
    flip(folder(damaged, 2) / FLAT[1])
    flip(folder(damaged, 1) / FLAT[1])
    with pytest.raises(CheckpointDamaged):
        damaged.store.verify(2)


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
        patched.setattr("fsl_async.store.recovery.Checkpoints.rename_void", killed)
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
