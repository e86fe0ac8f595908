"""Global rounds in the store: cuts, results, decisions, adoption.

Also crashes at each call to the disk, where simulated groups die at random ones.
"""

import shutil

import numpy as np
import pytest
from deltas import noise

from fsl_async.files.files import Files
from fsl_async.roles.groups.events import Decision
from fsl_async.roles.sync.delta import DeltaKey
from fsl_async.store.disk.chunk_files import digest_of
from fsl_async.store.errors import StoreError
from fsl_async.store.model.manifest import Manifest
from fsl_async.store.rules.outer import Nesterov
from fsl_codecs import CodecSpec, decode, encode

CHUNK = 32
"""Two chunks per vector, so that every loop over chunks is a loop."""

LOSSY = CodecSpec(format="e4m3", entropy=False)
NESTEROV = Nesterov(0.7, 0.9)


def values_of(path, skip, files=None):
    return np.frombuffer((files or Files()).read_whole(path, 1 << 20), "<f4", offset=skip)


def reduce(jobs, shares, files=None):
    """What helpers do, in NumPy: write the sum of each job; return the sum."""
    files = files or Files()
    total = np.float32(0.0)
    skip = jobs[0]["skip"]
    for job, share in zip(jobs, shares, strict=True):
        gained = values_of(job["base"], skip, files) - values_of(job["cut"], skip, files)
        part = np.float32(share) * gained
        if job["residual"] is not None:
            part = part - values_of(job["residual"], skip, files)
        total = total + part
    for job in jobs:
        files.write_whole(
            job["out"], files.read_whole(job["base"], 1 << 20)[:skip] + total.tobytes()
        )
    return total


def coded(change, spec):
    """What a client gets of a change, in chunks of the fixture."""
    chunks = [change[at : at + 32] for at in range(0, len(change), 32)]
    return np.concatenate([decode(encode(np.ascontiguousarray(one), spec)) for one in chunks])


def joined(first, other):
    """Let a new group begin with the weights of another."""
    state = first.store.groups.state
    groups = other.store.groups
    groups.open()
    groups.use_model(first.store.manifest)
    send_global(first, other, state.decided)
    return other.store.adopt_global(state.decided, counted=False)


def send_global(first, other, decided):
    groups = other.store.groups
    groups.receive(decided)
    for index in range(first.store.manifest.chunks):
        groups.write_chunk(
            index, first.store.groups.read_chunk(index, first.store.groups.state.decided)
        )
    groups.finish_receiving()


def two_groups(make_run, **options):
    first, other = make_run("first", **options), make_run("other", **options)
    first.start()
    first.store.groups.open(coordinates=True)
    first.store.groups.begin()
    other.open()
    joined(first, other)
    return first, other


def test_a_coordinator_restored_from_before_g_0_begins_another_run(make_run):
    """Members must not take its G_0 for that of the run whose global weights they hold."""
    first = make_run("first")
    first.start()
    first.close()
    shutil.copytree(first.root, first.root.with_name("backup"))
    names = set()
    for name in ("first", "backup"):
        run = make_run(name)
        run.open()
        run.store.groups.open(coordinates=True)
        names.add(run.store.groups.begin().run)
        run.close()
    assert len(names) == 2


def decide(groups, number, attempt, shares, spec=LOSSY, *, has_residual=None):
    """A whole attempt, with its decision at the first group; returns the weights and digest."""
    cuts = {name: run.store.groups.take_cut(number) for name, run in groups.items()}
    first = next(iter(groups.values())).store.groups
    first.keep_attempt(number, attempt)
    jobs = [run.store.groups.begin_result(attempt) for run in groups.values()]
    assert has_residual in (None, jobs[0]["residual"] is not None)
    total = reduce(jobs, shares)
    base = values_of(jobs[0]["base"], jobs[0]["skip"])
    (digest,) = {run.store.groups.finish_result(attempt, spec) for run in groups.values()}
    made = base + coded(-total, spec)
    tokens = {name: (cut.begin, cut.end) for name, cut in cuts.items()}
    first.keep_decision(number + 1, attempt, digest, tokens)
    assert digest == digest_of(made)
    return made, digest


def adopt(run, number, attempt, digest, *, counted=True, keeps_momentum=True):
    decision = Decision(number, attempt, digest, run.store.groups.state.adopted.run)
    return run.store.adopt_global(decision, counted=counted, keeps_momentum=keeps_momentum)


def test_a_new_group_begins_with_the_weights_of_the_run(make_run):
    """It has the same version 0, and never publishes its own."""
    first, other = two_groups(make_run)
    assert other.store.version == 0
    assert other.store.digest == first.store.digest
    assert other.open().version == 0
    assert other.store.groups.state.adopted.round == 0
    with pytest.raises(StoreError, match="never replaced"):
        other.store.begin_initial(other.manifest)


def test_groups_that_merged_nothing_since_their_cut_hold_the_same_bits(make_run):
    """Momentum is the group's, the coding error begins again, and the next rounds go on."""
    options = {"codec_down": LOSSY, "outer": NESTEROV}
    first, other = two_groups(make_run, **options)
    first.round(1, "a", "b")
    other.round(1, "c")
    made, digest = decide({"first": first, "other": other}, 0, 1, [2 / 3, 1 / 3])
    for run in (first, other):
        adopt(run, 1, 1, digest)
        assert run.store.digest == digest
        assert (run.weights(2) == made).all()
        assert run.store.tokens_total > 0
        (record,) = [one for one in run.store.records if one.version == 2]
        assert record.groups.round == 1
        assert not run.store.has_update(2), "it does not lead from version 1"
    first.round(3, "a")
    digests = first.store.digest
    first.open()
    assert first.store.digest == digests
    assert not first.store.notices
    state = first.store.groups.state
    assert (state.adopted.round, state.adopted.digest, state.cut) == (1, digest, None)
    assert state.counted == {"first": 0, "other": 0}


def updates(run, version):
    return [run.store.groups.read_update(version, i) for i in range(run.manifest.chunks)]


def test_global_weights_lead_to_the_next_ones_by_one_coded_update(make_run):
    """The same frames at all groups; what coding has lost is in the next round's sum."""
    first, other = two_groups(make_run, codec_down=LOSSY)
    before, gained, version = first.weights(0), np.zeros(first.manifest.values), 0
    for number in range(3):
        for run, name in ((first, "a"), (other, "c")):
            run.round(version + 1, name)
        reached = [run.weights(version + 1) for run in (first, other)]
        gained += np.mean([one.astype(np.float64) - before for one in reached], axis=0)
        attempt, from_ = 2 * number + 1, first.store.groups.state.adopted.digest
        _, digest = decide_again({"first": first, "other": other}, number, attempt)
        version += 2
        for run in (first, other):
            made = adopt(run, number + 1, attempt, digest)
            assert (made.made_of, made.global_base) == ("global", from_)
            assert run.store.groups.has_update(version)
        assert updates(first, version) == updates(other, version)
        assert sum(map(len, updates(first, version))) < first.manifest.values * 4
        sent = np.concatenate([decode(frame) for frame in updates(first, version)])
        assert (before + sent == first.weights(version)).all(), "as a client adds it"
        before = first.weights(version)
    (lost,) = (first.root / "global").glob("residual-*")
    assert not list((other.root / "global").glob("residual-*")), "the coordinator's alone"
    lost = np.fromfile(lost, "<f4")[-first.manifest.values :]
    assert np.abs(lost).max() > 0.0
    assert np.allclose(before + lost, two_groups_began(first) + gained, atol=1e-5)
    found = other.open()
    other.store.groups.open()
    assert (found.global_version, found.global_base) == (version, from_)
    assert (found.global_versions, found.newest_global) == (3, (2, 4, 6))
    assert updates(other, version) == updates(first, version)
    assert other.store.groups.read_update(version - 2, 0) is None, "only the newest is kept"
    with pytest.raises(IndexError):
        other.store.groups.read_update(version, 99)


def two_groups_began(run):
    return noise(run.manifest, 0)


def decide_again(groups, number, attempt):
    return decide(groups, number, attempt, [0.5, 0.5], has_residual=number > 0)


def test_buffers_of_global_weights_are_the_mean_of_the_groups_as_they_are(make_run):
    """Coded with the weights' step, a small variance became negative."""
    model = Manifest.from_shapes([("w", (50,))], [("var", (8,))])
    first, other = two_groups(make_run, manifest=model, codec_down=LOSSY)
    first.round(1, "a", "b")
    other.round(1, "c")
    cuts = [run.weights(1)[50:] for run in (first, other)]
    groups = [run.store.groups for run in (first, other)]
    (cut, _) = (one.take_cut(0) for one in groups)
    groups[0].keep_attempt(0, 1)
    reduce([one.begin_result(1) for one in groups], [0.5, 0.5])
    (digest,) = {one.finish_result(1, LOSSY) for one in groups}
    groups[0].keep_decision(1, 1, digest, {"first": (cut.begin, cut.end)})
    other.round(2, "c")  # merged on: its weights keep what they gained, its buffers do not
    for run, version in ((first, 2), (other, 3)):
        adopt(run, 1, 1, digest)
        np.testing.assert_allclose(run.weights(version)[50:], sum(cuts) / 2, atol=1e-6)
    frame = first.store.groups.read_update(2, 2)
    assert np.array_equal(decode(frame), first.weights(2)[50:]), "clients take them as they are"


def test_a_lost_residual_costs_only_what_it_held(make_run):
    """The coordinator goes on without, and all groups still hold the same bits."""
    first, other = two_groups(make_run, codec_down=LOSSY)
    for number in range(2):
        for run, name in ((first, "a"), (other, "c")):
            run.round(2 * number + 1, name)
        _, digest = decide({"first": first, "other": other}, number, number + 1, [0.5, 0.5])
        for run in (first, other):
            adopt(run, number + 1, number + 1, digest)
        (lost,) = (first.root / "global").glob("residual-*")
        lost.write_bytes(b"torn")
    assert first.store.digest == other.store.digest


@pytest.mark.parametrize("late", [False, True])
def test_there_is_an_update_only_for_clients_that_can_use_it(make_run, late):
    """Not for a group that merged on, nor for one that got the weights of others."""
    first, other = two_groups(make_run)
    for run, name in ((first, "a"), (other, "c")):
        run.round(1, name)
    _, digest = decide({"first": first, "other": other}, 0, 1, [0.5, 0.5])
    if late:
        other.round(2, "d")
    else:
        (update,) = (other.root / "global").glob("update-*")
        update.unlink()
    made = adopt(other, 1, 1, digest)
    assert (made.made_of, made.global_base) == ("late" if late else "global", "")
    assert not other.store.groups.has_update(made.version)
    assert other.store.groups.read_update(made.version, 0) is None
    assert other.open().global_version == (-1 if late else 2)


@pytest.mark.parametrize("keeps", [False, True])
def test_momentum_is_kept_or_begins_again(make_run, keeps):
    """Over an adoption, a restart, and into the next step; without a file it is zeros."""
    more = {"snapshot_thread": False, "snapshot_every": 1}
    first, other = two_groups(make_run, outer=NESTEROV, **more)

    def momentum(run, version):
        path = run.root / f"checkpoints/v{version:08d}/momentum.safetensors"
        return np.fromfile(path, "<f4")[-run.manifest.values :] if path.exists() else None

    for run in (first, other):
        run.round(1, "a")
    _, digest = decide({"first": first, "other": other}, 0, 1, [0.5, 0.5])
    for run in (first, other):
        before = momentum(run, 1)
        assert np.abs(before).max() > 0.0
        adopt(run, 1, 1, digest, keeps_momentum=keeps)
        adopted = momentum(run, 2)
        assert np.array_equal(adopted, before) if keeps else adopted is None
        if run is other:
            run.open()
        run.round(3, "a")
        gained = noise(run.manifest, 300)
        assert np.allclose(momentum(run, 3), gained + np.float32(0.9 * keeps) * before, atol=1e-5)


def test_a_cut_is_taken_once(make_run):
    """Every attempt of a round has the same one, also after a restart and more versions."""
    first, _ = two_groups(make_run)
    first.round(1, "a")
    cut = first.store.groups.take_cut(0)
    first.round(2, "a")
    assert first.store.groups.take_cut(0) == cut
    first.open()
    assert first.store.groups.state.cut == cut
    assert first.store.groups.take_cut(0) == cut
    with pytest.raises(StoreError, match="not in global round 1"):
        first.store.groups.take_cut(1)


def test_other_weights_than_decided_are_not_kept(make_run):
    """A member's stream is checked by the digest of the decision."""
    first, other = two_groups(make_run)
    groups = other.store.groups
    groups.receive(Decision(5, 9, "0" * 32, ""))
    for index in range(first.store.manifest.chunks):
        groups.write_chunk(
            index, first.store.groups.read_chunk(index, first.store.groups.state.decided)
        )
    with pytest.raises(StoreError, match="another digest"):
        groups.finish_receiving()
    names = [path.name for path in (other.root / "global").iterdir()]
    assert names == ["g00000000.00000000.safetensors"]


def test_a_result_that_was_altered_is_not_adopted(make_run):
    """The digest is compared before the version exists; the run goes on."""
    first, other = two_groups(make_run)
    first.round(1, "a")
    other.round(1, "c")
    _, digest = decide({"first": first, "other": other}, 0, 1, [0.5, 0.5])
    (path,) = (first.root / "global").glob("g00000001.*")
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    with pytest.raises(StoreError, match="altered"):
        adopt(first, 1, 1, digest)
    assert first.store.version == 1
    first.round(2, "b")


def test_a_rollback_stops_at_the_newest_global_weights(make_run):
    """What was merged before may be in the weights of other groups."""
    first, other = two_groups(make_run, keep_versions=5)
    first.round(1, "a")
    other.round(1, "c")
    _, digest = decide({"first": first, "other": other}, 0, 1, [0.5, 0.5])
    adopt(first, 1, 1, digest)
    first.round(3, "a")
    with pytest.raises(StoreError, match="--from-version 2"):
        first.open(from_version=1)
    assert first.open(from_version=2).version == 2


def test_the_lost_ledger_of_a_group_ends_it(make_run):
    """Other groups may count what it merged, and only the ledger had which of it."""
    _, other = two_groups(make_run)
    other.round(1, "c")
    other.close()
    (other.root / "ledger.jsonl").unlink()
    for version in (None, 1):
        with pytest.raises(StoreError, match="may start with an empty run directory"):
            other.open(from_version=version)


def test_an_older_copy_of_a_groups_ledger_is_refused(make_run):
    """Without the line of the cut its tokens would be counted in two global rounds."""
    first, other = two_groups(make_run)
    for run, name in ((first, "a"), (other, "c")):
        run.round(1, name)
    old = (other.root / "ledger.jsonl").read_bytes()
    _, digest = decide({"first": first, "other": other}, 0, 1, [0.5, 0.5])
    adopt(other, 1, 1, digest)
    other.close()
    (other.root / "ledger.jsonl").write_bytes(old)
    with pytest.raises(StoreError, match="lacks lines about global round 1, of which version 2"):
        other.open()


def test_a_run_does_not_go_back_behind_a_cut(make_run):
    """What it held then may be in a decided round: undone here, it would count all the same."""
    first, other = two_groups(make_run)
    for run, name in ((first, "a"), (other, "c")):
        run.round(1, name)
    decide({"first": first, "other": other}, 0, 1, [0.5, 0.5])
    other.round(2, "d")
    with pytest.raises(StoreError, match="goes back to that one at most: --from-version 1"):
        other.open(from_version=0)
    other.open(from_version=1)
    assert other.store.version == 1


# --- crashes ---


def drive(run, files, *, late):
    """A group's part in two rounds, from whatever state a crash left; returns the end."""
    store = run.store

    def version_of(number, name):
        key = DeltaKey(name, 1, number - 1, number)
        if store.known(key) is None:
            run.send(key, np.full(run.manifest.values, number + 0.1, np.float32))
        if store.version < number:
            run.commit(key)

    if store.version < 0:
        store.run.start_run("run")
        run.publish()
    groups = store.groups
    groups.open(coordinates=True)
    if groups.state.adopted is None:
        groups.begin()
    version_of(1, "a")
    if groups.state.adopted.round == 0:
        groups.take_cut(0)
        if late:
            version_of(2, "b")
        if groups.state.decided.round == 0:
            attempt = groups.state.attempt + 1
            groups.keep_attempt(0, attempt)
            reduce([groups.begin_result(attempt)], [0.5], files)
            digest = groups.finish_result(attempt, LOSSY)
            groups.keep_decision(1, attempt, digest, {"a": (0, 10)})
        decided = groups.state.decided
        adopt(run, 1, decided.attempt, decided.digest)
    version_of(4 if late else 3, "c")
    end = store.groups.state
    folder = run.root / "global"
    kinds = [
        (name.split("-")[0], files.read_whole(folder / name, 1 << 20))
        for name in files.names(folder)
        if name.startswith(("update-", "residual-"))
    ]
    return store.digest, end.adopted.digest, end.adopted.round, end.cut, store.tokens_total, *kinds


WAYS = [("after", None), ("after", "all"), ("torn", None), ("error", None)]


def check_crashes(make_run, calls, way, *, late):
    mode, power = way
    options = {"snapshot_thread": False, "codec_down": LOSSY}
    run, ends = make_run(**options), []

    def play(files):
        run.open(files)
        ends.append(drive(run, files, late=late))

    deaths = run.deaths(play, calls, mode=mode, powers=(power,))
    ends.extend(drive(run, run.files, late=late) for _ in deaths)
    assert len(set(ends)) == 1
    return len(ends)


@pytest.mark.parametrize("way", WAYS)
def test_a_crash_at_a_call_changes_no_outcome(make_run, way):
    """Killed, without power, or with a full disk: the same end to the bit."""
    begin = 1 + WAYS.index(way)
    assert check_crashes(make_run, range(begin, 10_000, 11), way, late=bool(begin % 2)) > 10


@pytest.mark.sweep
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_a_crash_at_any_call_changes_no_outcome(make_run, way, late):
    """The same for every call."""
    assert check_crashes(make_run, range(1, 10_000), way, late=late) > 100
