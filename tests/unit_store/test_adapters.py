"""Rules of federated LoRA against closed forms, computed densely in double precision."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsl_async.config.settings_tuning import AdapterRuleName, TuneConfig
from fsl_async.store.errors import ManifestError
from fsl_async.store.model.manifest import Manifest
from fsl_async.store.rules.adapters import (
    RULES,
    Current,
    Draw,
    Factors,
    Site,
    adapter_modules,
    adapter_rule_named,
)
from fsl_async.store.rules.adapters.products import best, difference, norm

IN, OUT, RANK, SCALE = 24, 17, 6, 2.0
WEIGHTS = (0.5, 0.3, 0.2)
DRAW = Draw(seed=5, version=3, module=1)
NOTHING = Factors(np.zeros((RANK, IN)), np.zeros((RANK, OUT)))


def random(seed, rows=RANK, size=1.0, columns=IN, outputs=OUT):
    rng = np.random.default_rng(seed)
    a, b = rng.standard_normal((rows, columns)), rng.standard_normal((rows, outputs))
    return Factors(size * a, size * b)


def dense(factors):
    """B A, as a layer adds it to its weight."""
    return factors.b.T @ factors.a


def sites_of(start, *, ranks=(RANK,) * 3, size=0.1, trains_a=True, trains_b=True, seed=1):
    """Sites that moved their first rows from `start`."""
    made = []
    for number, (weight, rank) in enumerate(zip(WEIGHTS, ranks, strict=True)):
        move = random(100 * seed + number, size=size)
        a, b = start.a.copy(), start.b.copy()
        a[:rank] += trains_a * move.a[:rank]
        b[:rank] += trains_b * move.b[:rank]
        made.append(Site(weight, rank, Factors(a, b)))
    return made


def mean_product(sites, *, held=False):
    parts = (site.held if held else site.factors for site in sites)
    return sum(weight * dense(part) for weight, part in zip(WEIGHTS, parts, strict=True))


def merged(name, current, sites, scale=SCALE):
    return RULES[name]().merge(current, sites, scale, DRAW)


def close(one, other, within=1e-6):
    return np.linalg.norm(one - other) <= within * max(1e-300, np.linalg.norm(other))


def best_dense(matrix, rank):
    u, s, vt = np.linalg.svd(matrix, full_matrices=False)
    return (u[:, :rank] * s[:rank]) @ vt[:rank], s


# --- the registry ---


def test_the_settings_name_every_rule():
    """A rule outside of the configuration, or one that does not exist, is a mistake."""
    assert list(RULES) == list(AdapterRuleName.__args__)
    with pytest.raises(ValueError, match="there are fedit, ffa"):
        adapter_rule_named("lora")
    for name, rule in RULES.items():
        assert rule.by_rounds == TuneConfig(method="lora", rule=name).by_rounds
        assert rule.summary
        assert rule.source
        assert "merge" in vars(rule) or not rule.merges_products


def test_what_sites_train():
    """RoLoRA trains in turns; ffa and fedsvd B alone; all others both."""
    for name, rule in RULES.items():
        trained = [(rule().trains_a(version), rule().trains_b(version)) for version in (0, 1)]
        wanted = {
            "rolora": [(False, True), (True, False)],
            "ffa": [(False, True)] * 2,
            "fedsvd": [(False, True)] * 2,
        }
        assert trained == wanted.get(name, [(True, True)] * 2)


# --- exact rules ---


@pytest.mark.parametrize(("name", "trains"), [
    ("ffa", {"trains_a": False}),
    ("rolora", {"trains_a": False}),
    ("rolora", {"trains_b": False}),
    ("fedsvd", {"trains_a": False}),
])  # fmt: skip
def test_where_one_factor_is_common_the_product_is_exact(name, trains):
    """The product is linear in the other."""
    start = random(0)
    sites = sites_of(start, **trains)
    assert close(dense(merged(name, Current(start), sites).factors), mean_product(sites))


def test_fedex_is_exact_by_its_patch():
    """Factors as in fedit, and the patch gets scale times what they miss."""
    start = random(0)
    sites = sites_of(start)
    made = merged("fedex", Current(start), sites)
    plain = merged("fedit", Current(start), sites).factors
    assert np.array_equal(made.factors.a, plain.a)
    assert np.array_equal(made.factors.b, plain.b)
    total = dense(made.patch) + SCALE * dense(made.factors)
    assert close(total, SCALE * mean_product(sites))


def test_flora_is_exact_by_its_patch_and_starts_anew():
    """Ranks may differ; A is the draw of run, version and module, and B is zero."""
    start = Factors(random(0).a, np.zeros((RANK, OUT)))
    sites = sites_of(start, ranks=(2, 4, RANK))
    made = merged("flora", Current(start), sites)
    assert close(dense(made.patch), SCALE * mean_product(sites, held=True))
    assert np.array_equal(made.factors.a, DRAW.a(RANK, IN).astype(np.float64))
    assert not made.factors.b.any()


def test_draws_are_uniform_and_differ():
    """By seed, version and module; the values are those of this release for ever."""
    one = Draw(1, 0, 0).a(200, 300)
    assert one.dtype == np.float32
    assert abs(one).max() <= 1 / np.sqrt(300)
    assert abs(one.mean()) < 5e-4
    assert one.var() == pytest.approx(1 / (3 * 300), rel=0.02)
    others = [Draw(2, 0, 0), Draw(1, 1, 0), Draw(1, 0, 1)]
    for other in others:
        assert abs(np.corrcoef(one.ravel(), other.a(200, 300).ravel())[0, 1]) < 0.02
    words = np.random.Philox(key=[1, 0]).random_raw(2)
    assert one[0, :2] == pytest.approx((words / 2.0**63 - 1.0) / np.sqrt(300), abs=1e-7)


# --- rules that cut ---


def test_bank_is_the_best_approximation_of_its_rank():
    """The singular values are those of the dense matrix, and the rest is owed."""
    start = random(0)
    owed = random(9, size=0.05)
    sites = sites_of(start, ranks=(2, 4, RANK), size=0.5)
    made = merged("bank", Current(start, owed=owed), sites)
    wanted = mean_product(sites) + dense(owed)
    cut, values = best_dense(wanted, RANK)
    assert np.allclose(np.linalg.svd(dense(made.factors))[1][:RANK], values[:RANK], rtol=1e-6)
    assert close(dense(made.factors), cut)
    assert close(dense(made.owed), best_dense(wanted - cut, RANK)[0])
    assert np.allclose(made.factors.a @ made.factors.a.T, np.eye(RANK))


@pytest.mark.parametrize("name", ["bank", "flexlora", "fedsvd"])
def test_directions_keep_the_sign_that_clients_hold(name):
    """A flip would be the largest change of all, and so would be its coding error."""
    start = merged(name, Current(random(0)), [Site(1.0, RANK, random(0))]).factors
    flipped = Factors(start.a * [[-1.0]], start.b * [[-1.0]])
    for held in (start, flipped):
        made = merged(name, Current(held), [Site(1.0, RANK, start)]).factors
        assert close(made.a, held.a)
        assert close(made.b, held.b)


def test_bank_of_one_site_is_that_site():
    """And so is fedit's, to the bit."""
    start = random(0)
    trained = sites_of(start)[0].factors
    alone = [Site(1.0, RANK, trained)]
    assert close(dense(merged("bank", Current(start), alone).factors), dense(trained))
    plain = merged("fedit", Current(start), alone).factors
    assert np.array_equal(plain.a, trained.a)
    assert np.array_equal(plain.b, trained.b)


def test_a_direction_that_a_bank_site_does_not_train_is_not_shrunk():
    """With flexlora the same sites lose it by their weight."""
    start = Factors(np.eye(RANK, IN), np.diag(np.arange(RANK, 0.0, -1.0)) @ np.eye(RANK, OUT))
    still = [Site(weight, 2, start) for weight in WEIGHTS]
    kept = merged("bank", Current(start), still).factors
    assert close(dense(kept), dense(start))
    lost = merged("flexlora", Current(start), still).factors
    assert np.linalg.norm(lost.b, axis=1) == pytest.approx([6, 5, 0, 0, 0, 0], abs=1e-12)


def test_flexlora_is_the_svd_of_the_mean_of_what_sites_hold():
    """With equal ranks it is the bank without what is owed."""
    start = random(0)
    sites = sites_of(start, ranks=(2, 4, RANK), size=0.5)
    made = merged("flexlora", Current(start), sites)
    assert close(dense(made.factors), best_dense(mean_product(sites, held=True), RANK)[0])
    assert made.owed is None
    equal = sites_of(start, size=0.5)
    one, other = (merged(name, Current(start), equal).factors for name in ("flexlora", "bank"))
    assert close(dense(one), dense(other))


def test_hetlora_weighs_by_the_norm_of_the_product():
    """Rows beyond a site's rank count as zeros."""
    start = random(0)
    sites = sites_of(start, ranks=(2, 4, RANK), size=0.5)
    norms = np.array([np.linalg.norm(dense(site.held)) for site in sites]) * WEIGHTS
    made = merged("hetlora", Current(start), sites).factors
    a = np.zeros((RANK, IN))
    for weight, site in zip(norms / norms.sum(), sites, strict=True):
        a[: site.rank] += weight * site.factors.a[: site.rank]
    assert close(made.a, a)
    still = [Site(weight, RANK, Factors(start.a, 0 * start.b)) for weight in WEIGHTS]
    assert close(merged("hetlora", Current(start), still).factors.a, start.a)


@pytest.mark.parametrize(
    ("others", "share"), [((1.0, 3.0, 2.0, 9e6), 3.75 / 9.75), ((2.0, 9e6), 0.6)]
)
def test_hetlora_limits_what_a_long_product_weighs(others, share):
    """To 1.5 x the median norm, with two sites the smaller one; else the last would have it all."""
    start = Factors(np.ones((1, 1)), np.ones((1, 1)))
    sites = [Site(0.5, 1, Factors(np.ones((1, 1)), np.full((1, 1), b))) for b in others]
    last = sites.pop()
    sites.append(Site(0.5, 1, Factors(2 * last.factors.a, last.factors.b / 2)))
    made = merged("hetlora", Current(start), sites).factors
    assert close(made.a, np.array([[1.0 + share]]))  # the mean of 1, and of 2 with that share


@pytest.mark.parametrize("name", ["bank", "flexlora", "fedsvd"])
@pytest.mark.parametrize(("columns", "outputs"), [(IN, OUT), (IN, 2), (4, OUT), (4, 3)])
def test_directions_without_a_singular_value_stay_trainable(name, columns, outputs):
    """A is orthonormal there too, as far as its width allows: B has a gradient."""
    start = random(0, columns=columns, outputs=outputs)
    start.b[1:] = 0.0
    made = merged(name, Current(start), [Site(1.0, 1, start)]).factors
    wanted = np.zeros(RANK)
    wanted[: min(RANK, columns)] = 1.0
    assert np.allclose(made.a @ made.a.T, np.diag(wanted), atol=1e-12)
    assert not np.allclose(made.b[0], 0.0)
    assert np.allclose(made.b[1:], 0.0, atol=1e-12)
    assert close(dense(made), dense(start))


# --- error feedback ---


@pytest.mark.parametrize("name", sorted(name for name, rule in RULES.items() if rule.keeps_owed))
def test_what_coding_keeps_back_is_in_the_next_product(name):
    """Of product rules that keep what does not fit: nothing is lost."""
    start, unsent = random(0), random(8, size=0.01)
    sites = sites_of(start, trains_a=RULES[name]().trains_a(0))
    made = merged(name, Current(start, unsent), sites)
    lost = dense(start + unsent) - dense(start)
    wanted = mean_product(sites) + lost
    assert close(dense(made.factors) + dense(made.owed), best_dense(wanted, 2 * RANK)[0])


@pytest.mark.parametrize("name", ["fedex", "flora"])
def test_what_coding_keeps_back_is_in_the_patch(name):
    """Exact rules stay exact over coded versions."""
    start, unsent = random(0), random(8, size=0.01)
    sites = sites_of(start)
    made = merged(name, Current(start, unsent), sites)
    lost = dense(start + unsent) - dense(start)
    total = dense(made.patch) + SCALE * dense(made.factors)
    assert close(total, SCALE * (mean_product(sites) + lost))


_LAST = np.eye(RANK)[:, -1:]


def errors(*, feedback, rounds=40):
    """Error of the bank's product against the sum of all that sites learned, after each round.

    Sites learn a small step in one direction each time, under noise that fills the rank of the bank
    and that the next round takes back.
    """
    rows = np.linalg.qr(np.random.default_rng(5).standard_normal((IN, IN)))[0][: RANK + 1]
    columns = np.linalg.qr(np.random.default_rng(6).standard_normal((OUT, OUT)))[0][: RANK + 1]
    current, owed, exact, found = NOTHING, None, np.zeros((OUT, IN)), []
    for number in range(rounds):
        sizes = np.r_[np.full(RANK, (-1.0) ** number), 0.03]
        learned = Factors(rows, sizes[:, None] * columns)
        # Three sites whose mean is the current product and what was learned.
        held = [current, learned.first(RANK), Factors(rows[1:], learned.b[1:] * _LAST)]
        sites = [Site(1 / 3, RANK, Factors(one.a, 3.0 * one.b)) for one in held]
        made = merged("bank", Current(current, owed=owed), sites)
        current, owed = made.factors, made.owed if feedback else None
        exact += dense(learned)
        found.append(np.linalg.norm(dense(current) - exact))
    return found


def test_error_feedback_keeps_what_a_cut_loses():
    """It comes back when there is room; without feedback it is gone, and the error grows."""
    with_feedback, without = errors(feedback=True), errors(feedback=False)
    assert max(with_feedback[1::2]) < 1e-12
    assert max(with_feedback) < 1.0 + 1e-9, "no direction is cut that is larger than those kept"
    assert without[1::2] == pytest.approx([0.03 * number for number in range(1, 40, 2)])


# --- products ---


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 9), st.integers(1, 9), st.integers(1, 12), st.integers(1, 7),
    st.integers(0, 2**32),
)  # fmt: skip
def test_best_of_any_shape(columns, outputs, rows, rank, seed):
    """More rows than features, more rank than either: the dense SVD agrees."""
    product = random(seed, rows=rows, columns=columns, outputs=outputs)
    kept, rest = best(product, rank)
    assert kept.a.shape == rest.a.shape == (rank, columns)
    assert kept.b.shape == rest.b.shape == (rank, outputs)
    matrix = dense(product)
    cut, _ = best_dense(matrix, rank)
    assert np.allclose(dense(kept), cut, atol=1e-9)
    assert np.allclose(dense(rest), best_dense(matrix - cut, rank)[0], atol=1e-9)
    assert norm(product) == pytest.approx(np.linalg.norm(matrix))


def test_small_differences_keep_their_digits():
    """Of products that agree in nine."""
    start = random(0)
    moved = start + random(1, size=1e-9)
    wanted = dense(random(1)) * 0
    wanted = random(1).b.T @ start.a + start.b.T @ random(1).a
    assert close(dense(difference(moved, start)), 1e-9 * wanted)
    assert norm(difference(moved, start)) == pytest.approx(1e-9 * np.linalg.norm(wanted))


@pytest.mark.parametrize("name", ["bank", "flexlora"])
def test_a_site_changes_the_rows_that_count_for_it(name):
    """The norm of its change is that of the difference of its products."""
    start = random(0)
    site = sites_of(start, ranks=(2, 4, RANK))[0]
    found = RULES[name]().site_norm(site, Current(start))
    assert found == pytest.approx(np.linalg.norm(dense(site.held) - dense(start.first(2))))


# --- the layout ---


def layout_of(*shapes, rule=None):
    return adapter_modules(Manifest.from_shapes(shapes), rule and RULES[rule]())


PAIR = (("m.q.lora_A", (4, 9)), ("m.q.lora_B", (4, 7)))


def test_modules_and_full_tensors():
    """In the order of the manifest."""
    layout = layout_of(
        *PAIR, ("m.v.lora_A", (4, 3)), ("m.v.lora_B", (4, 2)), ("head.weight", (2, 7)),
        ("m.q.patch", (7, 9)), ("m.v.patch", (2, 3)), rule="fedex",
    )  # fmt: skip
    assert [(one.name, one.index, one.patch.shape) for one in layout.modules] == [
        ("m.q", 0, (7, 9)), ("m.v", 1, (2, 3)),
    ]  # fmt: skip
    assert layout.rank == 4
    assert [one.name for one in layout.full] == ["head.weight"]
    assert layout_of(("m.q.lora_B", (4, 7)), rule="ffa").modules[0].a is None


@pytest.mark.parametrize(("shapes", "rule", "words"), [
    ([("w", (3,))], None, "no tensor is an adapter"),
    ([PAIR[0], ("w", (3,)), PAIR[1]], None, "'m.q.lora_A' is not followed by its .lora_B"),
    ([*PAIR, ("m.v.lora_A", (4, 3))], None, "'m.v.lora_A' is not followed by its .lora_B"),
    ([PAIR[0], ("m.q.lora_B", (3, 7))], None, "'m.q.lora_A' has rank 4, and 'm.q.lora_B' 3"),
    ([PAIR[0], ("m.q.lora_B", (28,))], None, "'m.q.lora_B' is 28; a factor has rank x features"),
    ([PAIR[0], ("m.q.lora_B", (4, 0))], None, "'m.q.lora_B' is 4x0"),
    ([*PAIR, ("m.v.lora_A", (2, 3)), ("m.v.lora_B", (2, 2))], None, "a run has one"),
    ([("m.q.patch", (7, 9)), *PAIR], "fedex", "'m.q.patch' comes before factors"),
    ([*PAIR, ("m.q.patch", (9, 7))], "fedex", "is 9x7; its factors make 7x9"),
    (PAIR, "fedex", "module 'm.q' has no .patch, and rule fedex needs one"),
    ([*PAIR, ("m.q.patch", (7, 9))], "bank", "has a .patch, and rule bank has none"),
    (PAIR, "ffa", "has a .lora_A, and rule ffa has none"),
    (PAIR[1:], "bank", "has no .lora_A, and rule bank needs one"),
])  # fmt: skip
def test_other_layouts_are_refused(shapes, rule, words):
    """By the name of the first wrong tensor."""
    with pytest.raises(ManifestError, match=words.replace(".", r"\.")):
        layout_of(*shapes, rule=rule)
