"""Runs of zeroth order: scalars in, scalars down, and the same bits however a version is made."""

import errno
import json

import numpy as np
import pytest
from attrs import evolve
from deltas import delta_of, merged_of

from fsl_async.files.files import Files
from fsl_async.roles.sync.delta import DeltaKey
from fsl_async.store.deltas.delta_kind import Dense, Mixed, Seeds
from fsl_async.store.deltas.seed_step import Directions, SeedStep, keys_of
from fsl_async.store.disk.chunk_files import FrameWriter, digest_of
from fsl_async.store.errors import FrameRefused, StoreError
from fsl_async.store.model.manifest import Manifest
from fsl_async.store.rules.aggregation import rule_named
from fsl_async.store.rules.outer import Average
from fsl_async.store.versions.checkpoint import WEIGHTS, Checkpoints
from fsl_codecs import (
    CodecSpec,
    add_signs,
    decode,
    decode_seeds,
    direction_keys,
    encode,
    encode_seeds,
)

CHUNK = 64
MANIFEST = Manifest.from_shapes([("layer.weight", (20, 8)), ("layer.bias", (9,))])
SHAPE = (2, 3)
RUN = Directions(seed=2**62 - 5, steps=2, probes=3, rate=1e-2)
AVERAGE = Average()


def scalars_of(seed):
    return np.random.default_rng(seed).standard_normal(SHAPE).astype(np.float32)


def signs(number):
    """The directions of a round as vectors of +1 and -1, float64 (K * P, values)."""
    found = []
    for key in direction_keys(RUN.seed, number, 1, *SHAPE):
        one = np.zeros(MANIFEST.values, np.float32)
        add_signs(one, 0, key[None], np.ones(1, np.float32))
        found.append(one)
    return np.array(found, np.float64)


def stepped(weights, number, mean):
    """The version after round `number`, by plain fp32 additions."""
    new = weights.copy()
    for sign, g in zip(signs(number), np.ravel(mean), strict=True):
        step = np.float32(-RUN.rate * float(g) / RUN.probes)
        new += sign.astype(np.float32) * step  # times one is exact
    return new


def settings_of(**options):
    return {"kind": Seeds(RUN), "outer": AVERAGE, "history": 1000, "keep_versions": 2, **options}


def seeds_run(make_run, name="run", **options):
    run = make_run(name, MANIFEST, **settings_of(**options))
    run.start()
    return run


def key_of(name, base, sequence=None):
    return DeltaKey(name, 1, base, base + 1 if sequence is None else sequence)


def send(run, key, scalars, tokens=10, number=None):
    one = delta_of(key, tokens, base_digest=run.store.digest, number=key.base)
    assert run.store.spool_begin(one) is None
    frame = encode_seeds(key.base if number is None else number, scalars[None])
    run.store.spool_write(key, 0, frame)
    return run.store.spool_finish(key)


def commit(run, weights):
    members = [merged_of(key, weight) for key, weight in weights.items()]
    return run.store.commit(run.store.version + 1, members, 1 / sum(weights.values()))


def one_round(run, names="ab"):
    base = run.store.version
    keys = [key_of(name, base) for name in names]
    for number, key in enumerate(keys):
        send(run, key, scalars_of(100 * base + number))
    return commit(run, {key: 10.0 * (1 + i) for i, key in enumerate(keys)})


def mean_of(base, count=2):
    weights = [10.0 * (1 + i) for i in range(count)]
    total = sum(w * scalars_of(100 * base + i).astype(np.float64) for i, w in enumerate(weights))
    return total / sum(weights)


def test_a_version_is_the_steps_of_the_mean_scalars(make_run):
    run = seeds_run(make_run)
    weights = run.weights(0)
    for base in range(3):
        made = one_round(run)
        weights = stepped(weights, base, mean_of(base))
        assert run.weights(base + 1).tobytes() == weights.tobytes()
        assert made.digest == digest_of(weights)
        assert made.bytes_update == 24 + 4 * 6


def test_a_delta_takes_one_frame_and_its_norm_is_that_of_its_vector(make_run):
    run = seeds_run(make_run)
    stored = send(run, key_of("a", 0), scalars_of(1)).stored
    assert stored.bytes == 8 + 4 + 24 + 24
    vector = signs(0).T @ (RUN.rate / RUN.probes * scalars_of(1).ravel().astype(np.float64))
    exact = float(np.linalg.norm(vector))
    # Products of different directions: about 1 / sqrt(169).
    assert stored.norm == pytest.approx(exact, rel=0.25)
    closed = np.sqrt(MANIFEST.values) * RUN.rate / RUN.probes * np.linalg.norm(scalars_of(1))
    assert stored.norm == pytest.approx(closed, rel=1e-6)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_scalars_that_are_not_finite_are_quarantined(make_run, value):
    run = seeds_run(make_run)
    bad = scalars_of(3)
    bad[1, 2] = value
    result = send(run, key_of("bad", 0), bad)
    assert result.problem == "it holds NaN or infinity"
    send(run, key_of("good", 0), scalars_of(4))
    base = run.weights(0)
    commit(run, {key_of("good", 0): 10.0})
    expected = stepped(base, 0, scalars_of(4).astype(np.float64))
    assert run.weights(1).tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    ("frame", "text"),
    [
        (encode_seeds(0, scalars_of(0)[None, :1]), "1 x 3"),
        (encode_seeds(0, np.zeros((2, *SHAPE), np.float32)), "2 rounds"),
        (encode_seeds(1, scalars_of(0)[None]), "round 1"),
        (encode_seeds(0, scalars_of(0)[None])[:-1], "cannot be decoded"),
        (encode(np.zeros(CHUNK, np.float32), CodecSpec("fp32")), "cannot be decoded"),
    ],
)
def test_frames_of_another_shape_or_round_are_refused(make_run, frame, text):
    run = seeds_run(make_run)
    key = key_of("a", 0)
    run.store.spool_begin(delta_of(key, base_digest=run.store.digest))
    with pytest.raises(FrameRefused, match=text):
        run.store.spool_write(key, 0, frame)
    run.store.spool_write(key, 0, encode_seeds(0, scalars_of(0)[None]))
    with pytest.raises(FrameRefused):
        run.store.spool_write(key, 1, encode_seeds(0, scalars_of(0)[None]))


def to_the_end(run):
    """Complete a scenario of three rounds wherever it stands; returns the digests by version.

    An offer of a known delta is answered, as the machine does.
    """
    book = run.store._open.run.book
    while run.store.version < 3:
        base = run.store.version
        keys = [key_of(name, base) for name in "ab"]
        for number, key in enumerate(keys):
            if book.known(key) is None:
                send(run, key, scalars_of(100 * base + number))
        commit(run, {key: 10.0 * (1 + i) for i, key in enumerate(keys)})
    return run.store.digest


@pytest.mark.parametrize("power", [None, "all"])
def test_a_crash_at_any_call_gives_the_same_digests(make_run, power):
    """The history of scalars too, and no delta is merged twice."""
    options = {"snapshot_thread": False}
    calm = seeds_run(make_run, "calm", **options)
    digest, history = to_the_end(calm), calm.store.read_seeds(0, 3)
    weights = calm.weights(3).tobytes()
    run = seeds_run(make_run, **options)

    def play(files):
        run.open(files)
        to_the_end(run)

    tries = 0
    for _ in run.deaths(play, range(1, 400, 11), powers=(power,)):
        assert to_the_end(run) == digest
        assert run.store.read_seeds(0, 3) == history
        assert run.weights(3).tobytes() == weights
        merged = [one["key"] for line in run.facts() for one in line.get("merged", ())]
        assert len(merged) == len(set(merged)) == 6
        tries += 1
    assert tries > 7


def test_the_ledger_alone_is_the_full_history(make_run):
    run = seeds_run(make_run)
    weights = run.weights(0)
    for _ in range(5):
        one_round(run)
    lines = [json.loads(line) for line in (run.root / "ledger.jsonl").read_text().splitlines()]
    for line in lines:
        if line["fact"] == "version" and line["version"]:
            step = SeedStep.from_json(line["seeds"])
            assert step.round == line["version"] - 1
            add_signs(weights, 0, *keys_of([step]))
            assert digest_of(weights) == line["digest"]
    assert digest_of(weights) == run.store.digest


def test_300_missed_versions_are_one_frame_of_less_than_10_kb(make_run):
    few = Seeds(Directions(RUN.seed, 1, 5, RUN.rate))
    run = make_run("one", MANIFEST, **settings_of(kind=few, history=300))
    run.start()
    weights, generator = run.weights(0), np.random.default_rng(0)
    for base in range(301):
        send(run, key_of("a", base), generator.standard_normal((1, 5)).astype(np.float32))
        commit(run, {key_of("a", base): 10.0})
        if not base:
            weights = run.weights(1)
    frame = run.store.read_seeds(1, run.store.version)
    assert len(frame) == 24 + 300 * 20 == 6024
    found = decode_seeds(frame)
    assert found.first == 1
    keys = direction_keys(RUN.seed, 1, 300, 1, 5)
    add_signs(weights, 0, keys, found.scalars.ravel())
    assert digest_of(weights) == run.store.digest
    assert run.store.read_seeds(0, run.store.version) is None, "the history is bounded"
    assert run.store.read_seeds(301, run.store.version) is None, "nothing is missing"
    run.open()
    assert run.store.read_seeds(1, run.store.version) == frame


def test_a_rollback_forgets_the_steps_after_it(make_run):
    run = seeds_run(make_run, keep_versions=4)
    for _ in range(3):
        one_round(run)
    run.close()
    run.open(from_version=2)
    weights = run.weights(2)
    assert run.store.read_seeds(2, run.store.version) is None
    assert len(run.store.read_seeds(0, run.store.version)) == 24 + 2 * 24
    commit(run, {key_of(name, 2): 10.0 for name in "ab"})
    assert run.store.version == 3
    steps = run.store._open.run.book.seeds_between(2, 3)
    add_signs(weights, 0, *keys_of(steps))
    assert digest_of(weights) == run.store.digest


def test_scalars_of_an_older_round_enter_without_weight(make_run):
    """They came while their version was made: the directions of this round are others."""
    run = seeds_run(make_run)
    late, first = key_of("late", 0), key_of("a", 0)
    send(run, first, scalars_of(1))
    send(run, late, scalars_of(2))
    commit(run, {first: 10.0})
    on_time = key_of("b", 1)
    send(run, on_time, scalars_of(3))
    weights = run.weights(1)
    commit(run, {late: 0.0, on_time: 10.0})
    assert run.weights(2).tobytes() == stepped(weights, 1, scalars_of(3)).tobytes()
    merged = run.store.records[-1].merged
    assert {one.key: one.weight for one in merged} == {late: 0.0, on_time: 10.0}
    later = key_of("late", 1)
    send(run, later, scalars_of(4))
    commit(run, dict.fromkeys((later,), 1.0))
    assert run.weights(3).tobytes() == run.weights(2).tobytes(), "no scalars of this round"


def test_scalars_that_a_full_disk_did_not_take_are_taken_when_they_come_again(
    make_run, monkeypatch
):
    """The frame that was not written is not the only frame of its delta."""
    run = seeds_run(make_run)

    def full(self, frame):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(FrameWriter, "append", full)
        with pytest.raises(StoreError, match="No space left"):
            send(run, key_of("a", 0), scalars_of(1))
    assert send(run, key_of("a", 0), scalars_of(1)).problem is None


@pytest.mark.parametrize(
    ("rule", "count"), [("median", 3), ("median", 4), ("trimmed", 5), ("multi-krum", 6)]
)
def test_robust_rules_act_on_scalars(make_run, rule, count):
    run = seeds_run(make_run, rule=rule_named(rule))
    rows = [scalars_of(i) for i in range(count)]
    rows[1] = np.full(SHAPE, 1e6, np.float32)
    keys = [key_of(f"c{i}", 0) for i in range(count)]
    for key, row in zip(keys, rows, strict=True):
        send(run, key, row)
    base = run.weights(0)
    commit(run, dict.fromkeys(keys, 1.0))
    if rule == "median":
        mean = np.median(np.array(rows, np.float64), axis=0)
    elif rule == "trimmed":
        mean = np.sort(np.array(rows, np.float64), axis=0)[1:-1].mean(axis=0)
    else:
        used = [i for i, one in enumerate(run.store.records[-1].merged) if one.weight]
        assert 1 not in used
        assert len(used) == count - 3
        mean = np.mean([rows[i].astype(np.float64) for i in used], axis=0)
    expected = stepped(base, 0, mean)
    assert np.abs(run.weights(1) - expected).max() < 1e-6
    digest = run.store.digest
    assert run.open().digest == digest


def test_a_damaged_version_is_repaired_from_its_record(make_run):
    run = seeds_run(make_run, keep_versions=3)
    for _ in range(2):
        one_round(run)
    weights = run.weights(2)
    path = Checkpoints(Files(), run.root).path(2) / WEIGHTS
    run.close()
    for spooled in (run.root / "spool").iterdir():
        spooled.unlink()
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.write_bytes(data)
    run.open()
    assert run.weights(2).tobytes() == weights.tobytes()
    assert run.store.notices


def test_scalars_of_a_diverged_client_are_quarantined(make_run):
    run = seeds_run(make_run)
    result = send(run, key_of("a", 0), np.full(SHAPE, 1e30, np.float32))
    assert "diverged" in result.problem


# --- deltas of both orders in one run ---


def dense_of(seed):
    return np.random.default_rng(1000 + seed).standard_normal(MANIFEST.values).astype(np.float32)


def mixed_run(make_run, name="mixed", **options):
    given = {"kind": Mixed(RUN), "outer": AVERAGE, "codec_down": CodecSpec("fp32"), **options}
    run = make_run(name, MANIFEST, **given)
    run.start()
    return run


def vector_of(number, scalars):
    return signs(number).T @ (RUN.rate / RUN.probes * scalars.ravel().astype(np.float64))


def test_each_order_is_averaged_within_itself_then_they_are_added(make_run):
    run = mixed_run(make_run)
    names = {"f1": 10.0, "z1": 70.0, "f2": 30.0, "z2": 20.0}
    keys = {key_of(name, 0): weight for name, weight in names.items()}
    base = run.weights(0)
    for i, key in enumerate(keys):
        if key.client.startswith("z"):
            assert send(run, key, scalars_of(i)).stored.bytes == 60
        else:
            run.send(key, dense_of(i))
    commit(run, keys)
    first = (10 * dense_of(0).astype(np.float64) + 30 * dense_of(2)) / 40
    zeroth = (70 * vector_of(0, scalars_of(1)) + 20 * vector_of(0, scalars_of(3))) / 90
    assert np.abs(run.weights(1) - (base - first - zeroth)).max() < 1e-5
    digest = run.store.digest
    assert run.open().digest == digest
    assert digest_of(run.weights(1)) == digest


def test_a_clipped_delta_that_is_alone_in_its_order_stays_short(make_run):
    """Its order is divided by weights without the clip, here and where the version is made again.

    Else one client that sends scalars to a run of adapters moves it by any length.
    """
    run = mixed_run(make_run)
    base, clip = run.weights(0), 1e-3
    liar, honest = key_of("liar", 0), [key_of("a", 0), key_of("b", 0)]
    send(run, liar, scalars_of(1) / np.float32(clip))
    for i, key in enumerate(honest):
        run.send(key, dense_of(i))
    merged = [merged_of(key, weight=10.0) for key in honest]
    merged.insert(0, evolve(merged_of(liar, weight=10.0 * clip), clip=clip))
    run.store.commit(1, merged, 1 / 30)
    wanted = (dense_of(0).astype(np.float64) + dense_of(1)) / 2 + vector_of(0, scalars_of(1))
    assert np.abs(run.weights(1) - (base - wanted)).max() < 1e-5
    digest = run.store.digest
    assert run.open().digest == digest
    assert digest_of(run.weights(1)) == digest


def test_where_all_are_dense_the_bits_are_those_of_a_dense_run(make_run):
    digests = []
    for kind in (Dense(), Mixed(RUN)):
        run = mixed_run(make_run, kind.name, kind=kind)
        keys = {key_of(name, 0): 10.0 for name in "abc"}
        for i, key in enumerate(keys):
            run.send(key, dense_of(i))
        digests.append(commit(run, keys).digest)
    assert digests[0] == digests[1]


def test_only_seeds_in_a_mixed_run(make_run):
    run = mixed_run(make_run)
    base = run.weights(0)
    send(run, key_of("z", 0), scalars_of(5))
    commit(run, {key_of("z", 0): 7.0})
    assert np.abs(run.weights(1) - (base - vector_of(0, scalars_of(5)))).max() < 1e-6


def test_the_order_of_a_delta_follows_from_its_frames(make_run):
    """An evaluator tries what is dense: a client cannot send scalars as if they were, nor hide."""
    run = mixed_run(make_run)
    z, f = key_of("z", 0), key_of("f", 0)
    send(run, z, scalars_of(5))
    dense = delta_of(f, base_digest=run.store.digest)
    run.store.spool_begin(evolve(dense, facts={"order": 0.0}))
    frames = [dense_of(0)[slice(*MANIFEST.chunk_range(n))] for n in range(MANIFEST.chunks)]
    for number, values in enumerate(frames):
        run.store.spool_write(f, number, encode(values, CodecSpec("fp32")))
    run.store.spool_finish(f)
    assert {one.key: one.delta.facts for one in run.open().pending} == {
        z: {"order": 0.0}, f: {"order": 1.0},
    }  # fmt: skip


def test_a_dense_delta_that_ends_early_is_not_taken_for_seeds(make_run):
    run = mixed_run(make_run)
    key = key_of("f", 0)
    run.store.spool_begin(delta_of(key, base_digest=run.store.digest))
    run.store.spool_write(key, 0, encode(np.zeros(CHUNK, np.float32), CodecSpec("fp32")))
    with pytest.raises(StoreError, match="1 of 3 chunks"):
        run.store.spool_finish(key)
    assert len(decode(run.store.read_full(0, 0))) == CHUNK
