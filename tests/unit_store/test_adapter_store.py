"""A store whose run merges adapters by products: the same bits after crashes, and no drift."""

import numpy as np
import pytest
from adapter_runs import (
    EQUAL,
    FP32,
    PRODUCT_RULES,
    RANK,
    RANKS,
    SHAPES,
    TOKENS,
    Full,
    parts,
    ranks_of,
)
from attrs import evolve
from deltas import merged_of

from fsl_async.roles.sync.delta import Delta, DeltaKey
from fsl_async.store.deltas.spool import file_name
from fsl_async.store.disk.chunk_files import digest_of
from fsl_async.store.errors import ManifestError
from fsl_async.store.model.manifest import Manifest
from fsl_async.store.rules.adapters import RULES
from fsl_async.store.rules.outer import Growing
from fsl_async.store.versions.checkpoint import OWED, WEIGHTS
from fsl_codecs import encode

CHUNK = 64
"""Modules that begin and end within chunks, and lie across several."""


def test_a_site_of_gradients_cannot_pass_for_one_of_losses(tuning):
    """Averaged within an order of its own, it would weigh as much as all others together."""
    digests = []
    for name, reported in (("honest", 1.0), ("lying", 0.0)):
        made = tuning(name=name)
        made.start()
        keys = [DeltaKey(client, 1, 0, 1) for client in "ab"]
        for key, order in zip(keys, (1.0, reported), strict=True):
            made.send(key, made.delta(1, key.client, RANK), order=order)
        digests.append(made.merge(keys).digest)
    assert digests[0] == digests[1]


@pytest.mark.parametrize("rule", PRODUCT_RULES)
def test_a_round_is_the_closed_form(tuning, rule):
    """Of factors, patches, and tensors that are trained whole, without loss in coding."""
    made = tuning(rule, codec_down=FP32)
    made.start()
    ranks = ranks_of(rule)
    for version in (1, 2):
        base = made.vectors.named[WEIGHTS].copy()
        # What the version before could not fit into the rank is paid back.
        owed = made.vectors.named[OWED] if RULES[rule].keeps_owed else 0 * base
        wanted = made.products(owed)
        head = 0.0
        total = sum(TOKENS.values())
        for client, rank in ranks.items():
            weights = base - made.delta(version, client, rank)
            for name, product in made.products(weights, rank).items():
                wanted[name] += TOKENS[client] / total * product
            head += TOKENS[client] / total * parts(made.manifest, weights)["head.weight"]
        made.round(ranks)
        after = made.vectors.named[WEIGHTS]
        assert np.allclose(parts(made.manifest, after)["head.weight"], head, atol=1e-6)
        if rule == "hetlora":
            continue
        for name, product in made.products(after).items():
            u, s, vt = np.linalg.svd(wanted[name])
            if not RULES[rule].has_patch:
                wanted[name] = (u[:, :RANK] * s[:RANK]) @ vt[:RANK]
            assert np.allclose(product, wanted[name], atol=2e-6)


@pytest.mark.parametrize("rule", PRODUCT_RULES)
def test_a_start_replays_what_no_checkpoint_has(tuning, rule):
    """Weights, residual and what is owed, to the bit; the next version shows all of them."""
    through, killed = tuning(rule, "through"), tuning(rule, "killed")
    for made, disk in ((through, None), (killed, Full())):
        made.start()
        made.run.open(disk)
        for _ in range(3):
            made.round(ranks_of(rule))
    assert not (killed.run.root / "checkpoints" / "v00000003" / WEIGHTS).exists()
    killed.run.open()
    assert killed.run.store.notices == []
    assert killed.store.digest == through.store.digest == digest_of(killed.run.weights(3))
    assert killed.vectors.named.keys() == through.vectors.named.keys()
    for name, vector in killed.vectors.named.items():
        assert np.array_equal(vector, through.vectors.named[name]), name
    assert killed.round(ranks_of(rule)).digest == through.round(ranks_of(rule)).digest


@pytest.mark.parametrize("rule", PRODUCT_RULES)
def test_the_order_of_arrival_changes_nothing(tuning, rule):
    """Not a bit. Without coding, what fedsvd owes is rounding alone, which any change shows."""
    one, other = (tuning(rule, name, codec_down=FP32) for name in ("one", "other"))
    for made in (one, other):
        made.start()
    for order in ("abcd", "dbac", "cdba"):
        one.round(ranks_of(rule))
        assert other.round(ranks_of(rule), order).digest == one.store.digest
    for name, vector in one.vectors.named.items():
        assert np.array_equal(vector, other.vectors.named[name]), name


def drift(made, rounds):
    """Error of the products after each round, relative to the exact sum of what sites learned."""
    exact = made.products(made.vectors.named[WEIGHTS])
    found = []
    total = sum(TOKENS.values())
    for version in range(1, rounds + 1):
        base = made.vectors.named[WEIGHTS].copy()
        before = made.products(base)
        for client in EQUAL:
            learned = made.products(base - learn(made, version, client))
            for name in SHAPES:
                exact[name] = exact[name] + TOKENS[client] / total * (learned[name] - before[name])
        keys = [DeltaKey(name, 1, version - 1, version) for name in EQUAL]
        for key in keys:
            made.send(key, learn(made, version, key.client))
        made.merge(keys)
        after = made.products(made.vectors.named[WEIGHTS])
        error = sum(np.sum((after[name] - exact[name]) ** 2) for name in SHAPES)
        size = sum(np.sum(exact[name] ** 2) for name in SHAPES)
        found.append(np.sqrt(error / size))
    return found


def learn(made, version, client):
    """A step of gradient descent, by both factors, towards a target of the bank's rank.

    The target moves, so that the bank must turn.
    """
    own = np.random.default_rng([51, ord(client)]).standard_normal(made.manifest.values)
    turn = [np.random.default_rng([52, number]).standard_normal(len(own)) for number in (1, 2)]
    angle = 0.05 * version
    aim = 0.4 * (np.cos(angle) * turn[0] + np.sin(angle) * turn[1] + 0.02 * own)
    aim, delta = parts(made.manifest, aim), np.zeros(made.manifest.values, np.float32)
    held, moved = (parts(made.manifest, one) for one in (made.vectors.named[WEIGHTS], delta))
    for name in SHAPES:
        first, second = f"{name}.lora_A", f"{name}.lora_B"
        a, b = held[first].astype(np.float64), held[second].astype(np.float64)
        gap = b.T @ a - aim[second].T @ aim[first]
        moved[second][:] = 0.1 * (a @ gap.T)
        moved[first][:] = 0.1 * (b @ gap)
    return delta


def test_coding_error_is_fed_back_and_does_not_add_up(tuning, monkeypatch):
    """Against an exact account in double precision, over 40 versions in new bases each."""
    made = tuning()
    made.start()
    errors = drift(made, 40)
    assert max(errors[15:]) < 0.012
    assert np.mean(errors[25:]) < 1.5 * np.mean(errors[10:25])
    # Without what coding has kept back and what is owed, the same run drifts.
    blind = tuning(name="blind")
    blind.start()
    monkeypatch.setattr("fsl_async.store.rules.adapters.base.Current.debts", [])
    drifted = drift(blind, 40)
    assert drifted[-1] > 5 * errors[-1]


@pytest.mark.parametrize("rule", PRODUCT_RULES)
def test_a_clipped_delta_counts_as_a_shorter_one(tuning, rule):
    """Before products are formed, head included; a start repeats it by the version's record."""
    clipped, shorter = (tuning(rule, name) for name in ("clipped", "shorter"))
    keys = [DeltaKey(name, 1, 0, 1) for name in "bc"]
    for made, size, clip in ((clipped, 1.0, 0.25), (shorter, 0.25, 1.0)):
        made.start()
        made.run.open(Full())
        made.send(keys[0], made.delta(1, "b"))
        made.send(keys[1], size * made.delta(1, "c"))
        members = [merged_of(key, float(TOKENS[key.client]), tokens=TOKENS[key.client])
                   for key in keys]  # fmt: skip
        members[1] = evolve(members[1], clip=clip)
        made.store.commit(1, members, 1 / 50)
    assert clipped.store.digest == shorter.store.digest
    assert [one.clip for one in clipped.store.records[-1].merged] == [1.0, 0.25]
    vectors = {name: vector.copy() for name, vector in clipped.vectors.named.items()}
    clipped.run.open()
    assert clipped.run.store.notices == []
    for name, vector in clipped.vectors.named.items():
        assert np.array_equal(vector, vectors[name]), name


def test_a_delta_of_an_older_version_is_left_out(tuning):
    """It was accepted in time and stored too late: it is in another basis. A replay agrees."""
    one, other = tuning(name="one"), tuning(name="other")
    for made in (one, other):
        made.start()
        made.run.open(Full())
        made.round(RANKS)
    late = DeltaKey("a", 1, 0, 2)
    one.send(late, one.delta(9, "a"))
    fresh = [DeltaKey(name, 1, 1, 3) for name in "bd"]
    for key in fresh:
        for made in (one, other):
            made.send(key, made.delta(2, key.client))
    assert one.merge([late, *fresh]).late == (late,)
    assert other.merge(fresh).late == ()
    assert one.store.digest == other.store.digest
    assert [merged.weight for merged in one.store.records[-1].merged] == [0.0, 30.0, 40.0]
    before = one.vectors.named[OWED].copy()
    one.run.close()
    (one.run.root / "spool" / file_name(late)).unlink()
    one.run.open()
    assert one.store.notices == []
    assert np.array_equal(one.vectors.named[OWED], before)
    # Alone, it changes nothing but what is owed from before.
    later = DeltaKey("a", 1, 0, 4)
    one.send(later, one.delta(9, "a"))
    one.merge([later])
    assert one.store.version == 3


def test_a_rollback_takes_back_what_is_owed(tuning):
    """The run goes on as if the later version had not been."""
    one, other = tuning(name="one"), tuning(name="other")
    for made in (one, other):
        made.start()
        for _ in range(2):
            made.round(RANKS)
            made.store.finish_snapshot()
    keys = [DeltaKey(name, 1, 2, 3) for name in RANKS]
    for key in keys:
        one.send(key, one.delta(8, key.client))
    one.merge(keys)
    recovered = one.run.open(from_version=2)
    assert {delta.key for delta in recovered.pending} == set(keys)
    for key in keys:
        one.store.run.quarantine(key, "the reason for the rollback")
    again = [DeltaKey(name, 1, 2, 4) for name in RANKS]
    for made in (one, other):
        for key in again:
            made.send(key, made.delta(3, key.client))
        made.merge(again)
    assert one.store.digest == other.store.digest
    assert np.array_equal(one.vectors.named[OWED], other.vectors.named[OWED])


def test_a_lost_delta_loses_what_is_owed_and_no_version(tuning):
    """The coded change gives the weights."""
    made = tuning()
    made.start()
    made.run.open(Full())
    for _ in range(2):
        made.round(RANKS)
    digest = made.store.digest
    made.run.close()
    max((made.run.root / "spool").iterdir()).unlink()
    made.run.open()
    assert any("begin again" in line for line in made.store.notices)
    assert digest_of(made.run.weights(2)) == digest
    assert not made.vectors.named[OWED].any()
    assert made.round(RANKS).version == 3


def test_ranks_count(tuning):
    """Rows beyond the reported rank are no part of flexlora's sites; nonsense means all rows."""
    digests = {}
    for name, rank in {"two": 2, "more": 99, "four": RANK, "none": None, "below": -3}.items():
        made = tuning("flexlora", name)
        made.start()
        for version in (1, 2):
            key = DeltaKey("d", 1, version - 1, version)
            one = Delta(
                key, made.store.digest, 40, 2, 1, {}, {} if rank is None else {"rank": rank}
            )
            made.store.spool_begin(one)
            values = made.delta(version, "d")
            for index in range(made.manifest.chunks):
                start, stop = made.manifest.chunk_range(index)
                made.store.spool_write(key, index, encode(values[start:stop], FP32))
            made.store.spool_finish(key)
            made.merge([key])
        digests[name] = made.store.digest
    assert digests["more"] == digests["four"] == digests["none"]
    assert len({digests["two"], digests["four"], digests["below"]}) == 3


@pytest.mark.parametrize("rule", ["bank", "hetlora"])
def test_the_record_has_the_norms_of_products(tuning, rule):
    """Of each site's change, over all modules."""
    made = tuning(rule, codec_down=FP32)
    made.start()
    made.round(RANKS)
    base = made.vectors.named[WEIGHTS].copy()
    made.round(RANKS)
    record = made.store.records[-1]
    assert record.rule == rule
    assert record.cosine is None
    assert record.mean_share == 0.0
    for one in record.merged:
        rank = RANKS[one.key.client]
        moved = made.products(base - made.delta(2, one.key.client, rank), rank)
        before = made.products(base, rank)
        wanted = sum(np.sum((moved[name] - before[name]) ** 2) for name in SHAPES)
        assert one.product_norm == pytest.approx(np.sqrt(wanted), rel=1e-5)
    made.store.finish_snapshot()
    made.run.open()
    assert made.store.records[-1] == record


def test_rules_that_are_means_are_the_ordinary_mean(tuning):
    """To the bit, momentum included."""
    plain = tuning("fedit", "fedit", outer=Growing())
    other = tuning("fedit", "mean", outer=Growing())
    object.__setattr__(other.run.settings, "adapters", None)
    for made in (plain, other):
        made.start()
        for _ in range(3):
            made.round(EQUAL)
    assert plain.store.digest == other.store.digest
    assert plain.store.records[-1].rule == "mean"


def test_other_tensors_are_refused(tuning):
    """Before any of them is stored."""
    made = tuning(manifest=Manifest.from_shapes([("w", (3, 4))]))
    made.run.open()
    with pytest.raises(ManifestError, match="no tensor is an adapter"):
        made.store.begin_initial(made.manifest)


@pytest.mark.parametrize(
    "names", [["head.weight"], ["q.lora_A.default.weight", "q.lora_B.default.weight"]]
)
def test_a_mean_takes_any_tensors(tuning, names):
    """A head alone (tune.targets = none), and adapters that a script has made, by peft's names."""
    made = tuning("fedit", manifest=Manifest.from_shapes([(name, (3, 4)) for name in names]))
    made.run.open()
    made.store.begin_initial(made.manifest)
    half = Manifest.from_shapes([("q.lora_B", (3, 4)), ("q.lora_A", (3, 4))])
    with pytest.raises(ManifestError, match="is not followed by its"):
        made.store.begin_initial(half)
