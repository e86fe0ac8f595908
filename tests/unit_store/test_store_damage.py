"""Damage to the files of a running server: found before it is used, repaired to the bit, or the end
of the run with a line that helps.
"""

import numpy as np
import pytest
from deltas import merged_of

from fsl_async.observe.ledger_audit import audit_run
from fsl_async.roles.sync.delta import DeltaKey
from fsl_async.store.aggregation import rule_named
from fsl_async.store.delta_kind import FullWeights
from fsl_async.store.errors import CheckpointDamaged, Damaged, DeltaDamaged, LedgerLost, StoreError
from fsl_async.store.outer import OuterSettings
from fsl_async.store.records import file_name
from fsl_codecs import CodecSpec, decode

FLAT = ["weights.safetensors", "momentum.safetensors", "residual.safetensors"]
OTHERS = "recomputed from the version before and the deltas that it merged"


def key(name="a", base=0, sequence=1):
    return DeltaKey(name, 1, base, sequence)


def folder(run, version):
    return run.root / f"checkpoints/v{version:08d}"


def flip(path, place=-5):
    """One bit, as a disk or a cable does it."""
    data = bytearray(path.read_bytes())
    data[place] ^= 0x40
    path.write_bytes(data)


def contents(run, version):
    return {path.name: path.read_bytes() for path in folder(run, version).iterdir()}


@pytest.fixture
def make_twins(make_run):
    """Two runs of the same deltas up to a version, one of which will be damaged; `told` takes its
    lines.
    """

    def make(versions=2, clients=("a", "b"), **options):
        made = []
        for name in ("sound", "hurt"):
            run = make_run(name, **options)
            run.start()
            run.told = []
            run.store.report = run.told.append
            for version in range(1, versions + 1):
                run.round(version, *clients)
            made.append(run)
        return made

    return make


@pytest.mark.parametrize("file", FLAT)
@pytest.mark.parametrize("place", [-5, 2, "gone", "shorter"])
def test_the_next_version_is_the_same_as_without_the_damage(make_twins, file, place):
    """It was made from the damaged bytes: 3.6e36 in the weights, and every client adopted that."""
    sound, hurt = make_twins()
    path = folder(hurt, 2) / file
    if place == "gone":
        path.unlink()
    elif place == "shorter":
        path.write_bytes(path.read_bytes()[:-4])
    else:
        flip(path, place)
    expected, made = sound.round(3, "a", "b"), hurt.round(3, "a", "b")
    assert made == expected
    assert contents(hurt, 3) == contents(sound, 3)
    if place == 2:  # the header: no value is read from it; the next start finds it
        assert hurt.told == []
    else:
        assert hurt.told == [line for line in hurt.told if line.endswith(OTHERS)]
        assert len(hurt.told) == 1
        assert hurt.told[0].startswith(f"version 2 was damaged: {file} ")
        assert contents(hurt, 2) == contents(sound, 2)


@pytest.mark.parametrize(
    "options",
    [
        {"threads": 2},
        {"codec_down": CodecSpec(format="fp32")},
        {"outer": OuterSettings("average")},
        {"outer": OuterSettings("average"), "kind": FullWeights()},
        {"rule": rule_named("median", 0)},
    ],
    ids=["threads", "lossless", "average", "whole", "median"],
)
def test_a_repair_is_the_same_step_with_any_settings(make_twins, options):
    """What is made again counts only when its digests are those of the damaged file."""
    sound, hurt = make_twins(clients=("a", "b", "c"), **options)
    flip(folder(hurt, 2) / FLAT[0])
    assert hurt.round(3, "a", "b", "c") == sound.round(3, "a", "b", "c")
    assert len(hurt.told) == 1


def test_several_damaged_files_are_repaired_one_after_the_other(make_twins):
    """A bad block seldom comes alone."""
    sound, hurt = make_twins()
    for file in FLAT:
        flip(folder(hurt, 2) / file)
    assert hurt.round(3, "a", "b") == sound.round(3, "a", "b")
    assert len(hurt.told) == 3


def test_weights_follow_from_the_update_where_the_deltas_are_gone(make_twins):
    """Every client makes them so, and theirs have the same digest."""
    sound, hurt = make_twins()
    for spooled in (hurt.root / "spool").iterdir():
        spooled.unlink()
    flip(folder(hurt, 2) / FLAT[0])
    assert np.array_equal(hurt.weights(2), sound.weights(2))
    (line,) = hurt.told
    assert line.endswith("it was recomputed from the version before and update.bin")


@pytest.mark.parametrize("file", FLAT)
def test_beyond_repair_no_version_is_made(make_twins, file):
    """Neither the deltas nor the version before are as they were: one line says where to go back
    to, as often as it is tried.
    """
    _, hurt = make_twins()
    flip(folder(hurt, 2) / file)
    flip(folder(hurt, 1) / FLAT[0])
    delta = key("a", 2, 3)
    hurt.send(delta, np.ones(hurt.manifest.values, np.float32))
    hurt.store.accumulate(delta, 1.0)
    for _ in range(2):
        with pytest.raises(
            CheckpointDamaged, match=rf"version 2 is damaged: {file} .*--from-version 0"
        ):
            hurt.store.commit(3, [merged_of(delta)], 1.0)
    assert hurt.store.version == 2
    assert not folder(hurt, 3).exists()
    assert hurt.told == []


def test_other_settings_repair_nothing(make_twins):
    """Momentum by another coefficient is other momentum."""
    _, hurt = make_twins(outer=OuterSettings("nesterov", 0.7, 0.9))
    hurt.settings = type(hurt.settings)(outer=OuterSettings("nesterov", 0.7, 0.8))
    hurt.open()
    flip(folder(hurt, 2) / "momentum.safetensors")
    before = contents(hurt, 2)
    with pytest.raises(CheckpointDamaged, match="version 2 is damaged: momentum"):
        hurt.round(3, "a")
    assert contents(hurt, 2) == before, "what is not the same is not put back"


@pytest.mark.parametrize("place", [10, -5, 20])
def test_a_damaged_update_is_made_again_or_not_sent(make_twins, place):
    """A frame with one wrong bit raised in a callback of the loop, and the run stood still."""
    sound, hurt = make_twins()
    whole = [sound.store.read_update(2, index) for index in range(sound.manifest.chunks)]
    flip(folder(hurt, 2) / "update.bin", place)
    assert [hurt.store.read_update(2, index) for index in range(hurt.manifest.chunks)] == whole
    (line,) = hurt.told
    assert line.startswith("version 2 was damaged: update.bin ")
    flip(folder(hurt, 2) / "update.bin", place)
    (hurt.root / "spool" / file_name(key("a", 1, 2))).unlink()
    hurt.store._parts.kept._update_places.clear()
    assert hurt.store.read_update(2, 0) is None
    assert not hurt.store.has_update(2)
    assert hurt.told[-1].endswith("clients get that version in full")
    assert hurt.round(3, "a", "b") == sound.round(3, "a", "b")


def test_an_older_version_beyond_repair_is_not_served(make_twins):
    """A client that was away fetches it: the newest one serves as well."""
    _, hurt = make_twins()
    flip(folder(hurt, 1) / FLAT[0])
    flip(folder(hurt, 0) / FLAT[0])
    assert hurt.store.read_full(1, 0) is None
    assert hurt.told[-1].endswith("it is not served any more")
    with pytest.raises(IndexError):
        hurt.store.read_full(2, 99)
    assert len(decode(hurt.store.read_full(2, 0))) == hurt.manifest.values


def test_a_version_can_be_verified_while_the_run_goes_on(make_twins):
    """When digests differ, the server must know whether its own files are at fault."""
    _, hurt = make_twins()
    assert hurt.store.verify(2)
    assert not hurt.store.verify(9)
    flip(folder(hurt, 2) / FLAT[1])
    assert not hurt.store.verify(2)
    assert len(hurt.told) == 1
    assert hurt.store.verify(2)
    flip(folder(hurt, 2) / FLAT[1])
    flip(folder(hurt, 1) / FLAT[1])
    with pytest.raises(CheckpointDamaged):
        hurt.store.verify(2)


@pytest.mark.parametrize("rule", ["mean", "median"])
def test_a_damaged_delta_ends_the_run_and_not_the_next_start(make_run, rule):
    """It was tried again for ever, with the advice to make room."""
    run = make_run(rule=rule_named(rule, 0))
    run.start()
    merged = [merged_of(key(name)) for name in "abc"]
    for seed, one in enumerate(merged):
        run.send(one.key, np.full(run.manifest.values, seed + 1.0, np.float32))
        run.store.accumulate(one.key, 1.0)
    flip(run.root / "spool" / file_name(key("b")))
    run.store._sum.remove(key("c"))  # so that the sum is made anew
    if rule == "median":
        run.store._sum.add(key("c"), 1.0)
    wanted = merged if rule == "median" else merged[:2]
    with pytest.raises(DeltaDamaged, match=r"delta b/1/0/1 .*start again") as caught:
        run.store.commit(1, wanted, 1.0)
    assert isinstance(caught.value, Damaged)
    recovered = run.open()
    assert [delta.key.client for delta in recovered.pending] == ["a", "c"]
    assert recovered.settled == {key("b"): "quarantined"}


# --- a ledger that is gone ---


def lose(path, how):
    if how == "gone":
        path.unlink()
    else:
        path.write_bytes({"empty": b"", "torn": b'{"at":1', "zeros": bytes(100)}[how])


@pytest.mark.parametrize("how", ["gone", "empty", "torn", "zeros"])
def test_a_run_whose_ledger_is_gone_does_not_start(make_twins, how):
    """It started, and an acknowledged delta that waited was dropped without a word."""
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
def test_without_its_ledger_a_run_goes_on_from_a_version_that_is_named(make_twins, target):
    """What was acknowledged is set aside, not dropped, and what is in a version is not merged
    again.
    """
    sound, run = make_twins()
    spooled = {path.name for path in (run.root / "spool").iterdir()}
    run.close()
    lose(run.root / "ledger.jsonl", "gone")
    with pytest.raises(StoreError, match="no version 9 to fall back to"):
        run.open(from_version=9)
    recovered = run.open(from_version=target)
    expected = sound.store.records[target].digest
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


def test_a_crash_while_the_ledger_is_renewed_is_finished_by_the_next_start(make_twins, monkeypatch):
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


def test_an_older_ledger_from_a_backup_drops_nothing_without_a_word(make_twins):
    """Its missing versions are written from their manifests; a delta that only the lost lines knew
    was deleted.
    """
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


def test_a_ledger_older_than_all_that_is_kept_is_said_to_be_that(make_twins):
    """No version is damaged; the line said that version 0 was."""
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
