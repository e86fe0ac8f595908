"""Aggregation rules: the papers' formulas in NumPy, the same bits after a crash, and the record."""

import itertools
import json

import numpy as np
import pytest
from attrs import evolve
from deltas import merged_of

from fsl_async.roles.sync.delta import DeltaKey, Score
from fsl_async.store.errors import StoreError
from fsl_async.store.model.manifest import Manifest
from fsl_async.store.rules.aggregation import RULES, Rule, rule_named
from fsl_async.store.rules.outer import Average
from fsl_codecs import CodecSpec

CHUNK = 32
"""Several chunks, the last one shorter."""

MODEL = Manifest.from_shapes([("w", (11, 9)), ("b", (7,))])
PLAIN = {"outer": Average(), "codec_down": CodecSpec(format="fp32")}
ROBUST = sorted(name for name, rule in RULES.items() if rule.by_rows and not rule.reuses)
NAMES = ("a", "b", "c", "d", "e", "f")


def deltas(count=6, seed=3):
    return np.random.default_rng(seed).standard_normal((count, MODEL.values)).astype(np.float32)


# --- the formulas, one coordinate or one pair at a time, in double precision ---


def trimmed(rows, f):
    return np.array([np.mean(np.sort(column)[f : len(column) - f]) for column in rows.T])


def median(rows, f):
    return np.array([np.median(column) for column in rows.T])


def multi_krum(rows, f):
    n = len(rows)
    scores = []
    for i in range(n):
        distances = sorted(np.sum((rows[i] - rows[j]) ** 2) for j in range(n) if j != i)
        scores.append(sum(distances[: n - f - 2]))
    best = sorted(range(n), key=lambda i: (scores[i], i))[: n - f - 2]
    return np.mean(rows[best], axis=0)


FORMULAS = {"trimmed": trimmed, "median": median, "multi-krum": multi_krum}


def started(make_run, name, f=1, run="run", **changes):
    made = make_run(run, MODEL, rule=rule_named(name, f), **{**PLAIN, **changes})
    made.start()
    return made


def merge(run, keys, weights=None):
    weights = weights or dict.fromkeys(keys, 1.0)
    merged = [merged_of(key, weights[key]) for key in keys]
    return run.store.commit(run.store.version + 1, merged, 1 / len(keys))


@pytest.mark.parametrize(("name", "f", "count"), [
    ("trimmed", 1, 6), ("trimmed", 2, 5), ("trimmed", 0, 3),
    ("median", 1, 5), ("median", 1, 6), ("median", 0, 1),
    ("multi-krum", 1, 6), ("multi-krum", 1, 5), ("multi-krum", 0, 4),
])  # fmt: skip
def test_a_rule_equals_its_formula(make_run, name, f, count):
    """The result through spool, chunks and outer step equals the definition."""
    run = started(make_run, name, f)
    rows = deltas(count)
    rows[0] *= -10
    keys = [DeltaKey(client, 1, 0, 1) for client in NAMES[:count]]
    for key, row in zip(keys, rows, strict=True):
        run.send(key, row)
    before = run.weights(0)
    merge(run, keys)
    expected = FORMULAS[name](rows.astype(np.float64), f)
    np.testing.assert_allclose(before - run.weights(1), expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("name", ROBUST)
def test_the_order_of_arrival_changes_no_bit(make_run, name):
    """Recovery lists deltas in another order than they arrived; the version is the same."""
    rows = deltas(5)
    digests = set()
    for number, order in enumerate(itertools.islice(itertools.permutations(range(5)), 0, 120, 17)):
        run = started(make_run, name, run=f"run-{number}")
        keys = [DeltaKey(NAMES[index], 1, 0, 1) for index in order]
        for key, index in zip(keys, order, strict=True):
            run.send(key, rows[index])
        digests.add(merge(run, keys).digest)
        run.close()
    assert len(digests) == 1


def test_two_deltas_of_one_client_are_one_row(make_run):
    """A client that sends twice has one vote: the median of (1, 2), 3.5 and 9 is 3.5."""
    run = started(make_run, "median")
    parts = {
        DeltaKey("a", 1, 0, 1): 1,
        DeltaKey("a", 1, 0, 2): 2,
        DeltaKey("b", 1, 0, 1): 3.5,
        DeltaKey("c", 1, 0, 1): 9,
    }
    for key, value in parts.items():
        run.send(key, np.full(MODEL.values, value, np.float32))
    before = run.weights(0)
    merge(run, list(parts))
    np.testing.assert_allclose(before - run.weights(1), 3.5, atol=1e-6)


@pytest.mark.parametrize("name", ["median", "mean"])
def test_a_delta_that_an_evaluator_refused_is_no_row(make_run, name):
    """Of 1, 2, 3 and a refused 1e6 the median and the mean are 2."""
    run = started(make_run, name)
    sent = {"a": 1, "b": 2, "c": 3, "d": 1e6}
    values = {DeltaKey(client, 1, 0, 1): value for client, value in sent.items()}
    for key, value in values.items():
        run.send(key, np.full(MODEL.values, value, np.float32))
    before = run.weights(0)
    *others, last = values
    score = Score("judge", 1.0, 9.0, refused=True)
    merged = [*map(merged_of, others), evolve(merged_of(last, 0.0), score=score)]
    run.store.commit(1, merged, 1 / len(others))
    np.testing.assert_allclose(before - run.weights(1), 2.0, atol=1e-6)
    assert run.store.records[-1].merged[-1].score == score
    assert run.store.verify(1)


def test_weights_are_discounts(make_run):
    """A stale or clipped delta counts as a smaller one, as with the mean."""
    run = started(make_run, "trimmed", 0)
    keys = [DeltaKey(client, 1, 0, 1) for client in "ab"]
    for key in keys:
        run.send(key, np.ones(MODEL.values, np.float32))
    before = run.weights(0)
    merge(run, keys, dict(zip(keys, (1.0, 0.5), strict=True)))
    np.testing.assert_allclose(before - run.weights(1), 0.75, atol=1e-6)


def test_the_ledger_lists_the_selected_deltas(make_run):
    """A version made by multi-Krum lists all deltas as merged; rejected ones have weight 0."""
    run = started(make_run, "multi-krum")
    rows = deltas(5)
    rows[3] += 100
    keys = [DeltaKey(client, 1, 0, 1) for client in NAMES[:5]]
    for key, row in zip(keys, rows, strict=True):
        run.send(key, row)
    merge(run, keys)
    record = run.store.records[-1]
    used = {entry.key.client for entry in record.merged if entry.weight}
    assert record.rule == "multi-krum"
    assert len(record.merged) == 5
    assert len(used) == 2
    assert "d" not in used
    line = json.loads((run.root / "ledger.jsonl").read_text().splitlines()[-1])
    assert (line["fact"], line["rule"]) == ("version", "multi-krum")
    recovered = run.open()
    assert {recovered.settled[key] for key in keys} == {"merged"}


@pytest.mark.parametrize("name", ROBUST)
def test_too_few_clients_make_no_version(make_run, name):
    """A rule needs enough clients; the deltas stay, and one more client makes the version."""
    run = started(make_run, name)
    least = rule_named(name, 1).least
    keys = [DeltaKey(client, 1, 0, 1) for client in NAMES[:least]]
    rows = deltas(least)
    for key, row in zip(keys, rows, strict=True):
        run.send(key, row)
    merged = [merged_of(key) for key in keys]
    with pytest.raises(StoreError, match=f"needs deltas of {least} clients, there are {least - 1}"):
        run.store.commit(1, merged[:-1], 1.0)
    assert run.store.commit(1, merged, 1.0).version == 1


@pytest.mark.parametrize("name", ROBUST)
def test_a_crash_at_any_call_of_a_merge_changes_no_bit(make_run, name):
    """After a crash in a merge each acknowledged delta is merged once, with the same digest."""
    run = started(make_run, name)
    keys = [DeltaKey(client, 1, 0, 1) for client in NAMES[:5]]
    for key, row in zip(keys, deltas(5), strict=True):
        run.send(key, row)

    def play(files):
        run.open(files)
        files.faults.at += len(files.faults.calls)
        merge(run, keys)

    digests = []
    for recovered in run.deaths(play):
        pending = [delta.key for delta in reversed(recovered.pending)]
        merged = [key for key, known in recovered.settled.items() if known == "merged"]
        assert sorted([*pending, *merged]) == keys
        digests.append(merge(run, pending).digest if pending else recovered.digest)
        assert len([r for r in run.store.records if r.merged]) == 1
    assert len(digests) > 10
    assert len(set(digests)) == 1


def test_an_unknown_rule_gets_the_list():
    """After a typing error the message lists the rules."""
    with pytest.raises(ValueError, match="mean, trimmed, median, multi-krum"):
        rule_named("krumm")


# --- quarantine ---


def test_a_held_delta_can_be_released(make_run):
    """It stays excluded, with its reason, over restarts; once released it is merged once."""
    run = started(make_run, "mean")
    a, b = DeltaKey("a", 1, 0, 1), DeltaKey("b", 1, 0, 1)
    run.send(a, deltas()[0])
    run.send(b, deltas()[1])
    run.store.run.quarantine(b, "its norm", held=True)
    recovered = run.open()
    assert [delta.key for delta in recovered.pending] == [a]
    assert [delta.key for delta in recovered.held] == [b]
    assert recovered.settled == {b: "quarantined"}
    run.store.run.release(b)
    assert run.store.known(b) == "accepted"
    with pytest.raises(StoreError, match="not held"):
        run.store.run.release(b)
    run.commit(a, b)
    recovered = run.open()
    assert recovered.settled == {a: "merged", b: "merged"}
    assert [delta.key for delta in recovered.usual] == [a, b]
    assert not recovered.held


def test_a_delta_that_is_not_held_is_not_released(make_run):
    """Only held deltas can be released."""
    run = started(make_run, "mean")
    key = DeltaKey("a", 1, 0, 1)
    run.send(key, deltas()[0])
    run.store.run.quarantine(key, "by hand")
    with pytest.raises(StoreError, match="not held"):
        run.store.run.release(key)


def test_a_crash_during_a_release_loses_nothing(make_run):
    """At every call: the delta is held or pending, never neither, and its file matches that."""
    run = started(make_run, "mean")
    key = DeltaKey("a", 1, 0, 1)
    run.send(key, deltas()[0])
    run.store.run.quarantine(key, "its norm", held=True)

    def play(files):
        run.open(files)
        files.faults.at += len(files.faults.calls)
        run.store.run.release(key)

    tries = 0
    for recovered in run.deaths(play):
        held, pending = [d.key for d in recovered.held], [d.key for d in recovered.pending]
        assert held + pending == [key]
        if held:
            run.store.run.release(key)
        run.commit(key)
        tries += 1
    assert tries > 3


class MedianOfBiases(Rule):
    """The mean, but of biases the median."""

    name = "median of biases"

    def combine(self, rows, clients, parts):
        """See `Rule.combine`."""
        out = rows.mean(axis=0)
        for part in parts:
            if part.tensor.name == "b":
                out[part.place] = np.median(rows[:, part.place], axis=0)
        return out


def test_a_rule_may_treat_tensors_differently(make_run):
    """Rules for adapters, or for a head, need to know which tensor a value belongs to."""
    run = make_run("run", MODEL, rule=MedianOfBiases(), **PLAIN)
    run.start()
    rows = deltas(3)
    keys = [DeltaKey(client, 1, 0, 1) for client in "abc"]
    for key, row in zip(keys, rows, strict=True):
        run.send(key, row)
    before = run.weights(0)
    merge(run, keys)
    moved = before - run.weights(1)
    np.testing.assert_allclose(moved[:-7], rows[:, :-7].mean(axis=0), rtol=0, atol=2e-6)
    np.testing.assert_allclose(moved[-7:], np.median(rows[:, -7:], axis=0), rtol=0, atol=2e-6)
