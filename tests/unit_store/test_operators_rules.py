"""The operator's own rules in a real store: the examples, crashes, and errors that lose nothing."""

from pathlib import Path

import numpy as np
import pytest
from deltas import merged_of

from fsl_async.nodes.ps.own_rules import own_rule
from fsl_async.roles.sync.delta import DeltaKey
from fsl_async.store.errors import RuleFailed
from fsl_async.store.model.manifest import Manifest
from fsl_async.store.rules.outer import Average, OuterOptimizer
from fsl_async.store.versions.checkpoint import RESIDUAL, flat_name
from fsl_codecs import CodecSpec

CHUNK = 32
MODEL = Manifest.from_shapes([("w", (11, 9)), ("b", (7,))])
PLAIN = {"outer": Average(), "codec_down": CodecSpec(format="fp32")}
EXAMPLES = Path(__file__).parents[2] / "examples" / "rules"
NAMES = ("a", "b", "c", "d", "e")

FAILING = """\
import numpy as np
from fsl_async.store.rules.adapters import HetLoRA, Merged
from fsl_async.store.rules.aggregation import Rule
from fsl_async.store.rules.adapters.products import Factors
from fsl_async.store.rules.outer import OuterOptimizer

def spoiled(values):
    if not PATH.exists():
        return values
    kind = PATH.read_text()
    if kind == "raise":
        raise ValueError("two\\nlines")
    if kind == "nan":
        return values * np.float32("nan")
    if kind == "dtype":
        return values.astype(np.int64)
    return values[:-1]

class Mean(Rule):
    def combine(self, rows, clients, parts):
        return spoiled(rows.mean(axis=0))

class Descent(OuterOptimizer):
    vectors = ("sum",)
    def step(self, average, state, numbers):
        state["sum"] += average
        return spoiled(-average)

class Merge(HetLoRA):
    def merge(self, current, sites, scale, draw):
        merged = super().merge(current, sites, scale, draw)
        return Merged(Factors(spoiled(merged.factors.a), merged.factors.b))
"""


def example(name, **given):
    return own_rule("outer.aggregation", str(EXAMPLES / name))(**given)


def deltas(count, seed=3):
    return np.random.default_rng(seed).standard_normal((count, MODEL.values)).astype(np.float32)


def send(run, rows, metrics=None):
    version = run.store.version
    keys = [DeltaKey(name, 1, version, version + 1) for name in NAMES[: len(rows)]]
    for number, (key, row) in enumerate(zip(keys, rows, strict=True)):
        run.send(key, row, metrics=metrics[number] if metrics else None)
    return keys


def merge(run, keys):
    merged = [merged_of(key, 1.0, staleness=0, tokens=10) for key in keys]
    return run.store.commit(run.store.version + 1, merged, 1.0 / len(keys))


def test_the_geometric_median_resists_a_poisoned_client(make_run):
    """It minimizes the sum of distances in each chunk; the mean follows the attacker."""
    run = make_run("run", MODEL, rule=example("geometric_median.py:GeometricMedian"), **PLAIN)
    run.start()
    rows = deltas(5) * 0.1 + 1.0
    rows[2] = -1000.0
    before = run.weights(0)
    merge(run, send(run, rows))
    moved = (before - run.weights(1)).astype(np.float64)
    assert np.abs(moved - 1.0).max() < 0.4
    assert np.abs(rows.mean(axis=0) - 1.0).max() > 100.0

    def cost(point, part):
        return sum(np.linalg.norm(row[part] - point[part]) for row in rows.astype(np.float64))

    noise = np.random.default_rng(5).standard_normal((50, MODEL.values)) * 0.01
    for start in range(0, MODEL.values, CHUNK):
        part = slice(start, start + CHUNK)
        least = cost(moved, part)
        assert all(least <= cost(moved + one, part) + 1e-4 for one in noise)


def test_clients_weigh_by_the_metric_that_they_send_also_after_a_crash(make_run):
    """A replay gives a rule the metrics again: the coding error of the next version has them."""
    metrics = [{"loss": 1.0}, {"loss": 4.0}, {"loss": float("nan")}, {"other": 9.0}]
    shares = np.array([1.0, 4.0, 2.5, 2.5]) / 10.0
    lossy = CodecSpec("uniform", block_values=16, chunk_values=64, step_log2=14)
    digests = []
    for crashes in (False, True):
        rule = example("by_metric.py:ByLoss")
        options = {"rule": rule, "snapshot_thread": False}
        run = make_run(f"run-{crashes}", MODEL, **PLAIN | {"codec_down": lossy} | options)
        run.start()
        rows, before = deltas(4), run.weights(0)
        merge(run, send(run, rows, metrics))
        np.testing.assert_allclose(before - run.weights(1), shares @ rows, rtol=0, atol=0.05)
        if crashes:
            (run.root / "checkpoints" / "v00000001" / RESIDUAL).unlink()
            run.open()
            assert run.store.notices
            assert not any("begin again" in line for line in run.store.notices)
        digests.append(merge(run, send(run, deltas(4, 9), metrics)).digest)
    assert digests[0] == digests[1]


def fedyogi(deltas, rate, beta_1, beta_2=0.99, tau=1e-3):
    """Return x_0 - x_T by algorithm 2 of arXiv:2003.00295, one coordinate after another."""
    moved = np.zeros(deltas.shape[1])
    for coordinate, changes in enumerate(deltas.T.astype(np.float64)):
        m, v = 0.0, tau**2
        for change in changes:
            delta = -change  # the paper's: trained minus base
            m = beta_1 * m + (1 - beta_1) * delta
            v = v - (1 - beta_2) * delta**2 * np.sign(v - delta**2)
            moved[coordinate] -= rate * m / (np.sqrt(v) + tau)
    return moved


def test_fedyogi_is_that_of_its_paper_through_a_crash(make_run):
    """Its two vectors are kept, saved, and made again with the versions that have no checkpoint."""
    optimizer = own_rule("outer.optimizer", str(EXAMPLES / "fedyogi.py:FedYogi"))
    run = make_run("run", MODEL, **PLAIN | {"outer": optimizer(0.05, 0.8)}, snapshot_thread=False)
    run.start()
    start, averages = run.weights(0), []
    for version in range(1, 5):
        rows = deltas(3, seed=version) * 0.1 * version
        averages.append(rows.mean(axis=0))
        merge(run, send(run, rows))
        if version in (2, 3):
            run.close()
            for vector in ("first", "second"):
                (run.root / "checkpoints" / f"v0000000{version}" / flat_name(vector)).unlink()
            run.open()
            assert run.store.notices
            assert not any("begin again" in line for line in run.store.notices)
    expected = fedyogi(np.array(averages), 0.05, 0.8)
    np.testing.assert_allclose(start - run.weights(4), expected, rtol=2e-4, atol=2e-6)
    assert run.store.records[-1].rule == f"mean, {optimizer.name}"


RAISED = r"failing.py:13: in spoiled: ValueError: two; lines"
RESULT = r"failing.py:(21|26|31): in \w+.\w+: it"


KEYS = {"Mean": ("outer.aggregation", "rule"), "Descent": ("outer.optimizer", "outer")}


@pytest.mark.parametrize(
    ("what", "kind", "words"),
    [
        ("Mean", "raise", RAISED),
        ("Mean", "nan", RESULT + "s result is not finite"),
        ("Mean", "dtype", RESULT + r" returns int64 \(32,\), not float32"),
        ("Mean", "shape", RESULT + r" returns float32 \(31,\), not float32 \(32,\)"),
        ("Descent", "raise", RAISED),
        ("Descent", "nan", RESULT + "s result is not finite"),
        ("Descent", "dtype", RESULT + r" returns int64 \(32,\), not float32"),
        ("Merge", "raise", RAISED),
        ("Merge", "nan", RESULT + "s factors are not finite"),
        ("Merge", "shape", RESULT + r"s factors are \(3, 11\) and \(4, 9\), not"),
    ],
)
def test_a_rule_that_fails_makes_no_version_and_loses_nothing(  # noqa: PLR0917
    make_run, tuning, tmp_path, what, kind, words
):
    """Its deltas stay pending, over a restart too; the repaired rule merges them."""
    spoil, path = tmp_path / "spoil", tmp_path / "failing.py"
    path.write_text(f"from pathlib import Path; PATH = Path({str(spoil)!r})\n" + FAILING)
    if what != "Merge":
        key, place = KEYS[what]
        rule = own_rule(key, f"{path}:{what}")()
        run = make_run("run", MODEL, **PLAIN | {place: rule})
        run.start()
        keys = send(run, deltas(3))
    else:
        made = tuning("hetlora")
        run = made.run
        run.settings = type(run.settings)(
            resident=True, outer=Average(), adapters=own_rule("tune.merge", f"{path}:{what}")()
        )
        made.start()
        keys = [DeltaKey(name, 1, 0, 1) for name in "ab"]
        for key in keys:
            made.send(key, made.delta(1, key.client))
    spoil.write_text(kind)
    for _ in range(2):
        with pytest.raises(RuleFailed, match=words) as caught:
            merge(run, keys)
        assert "\n" not in str(caught.value)
        assert run.store.version == 0
    recovered = run.open()
    assert [one.key for one in recovered.pending] == keys
    spoil.unlink()
    assert merge(run, keys).version == 1


class ItsVector(OuterOptimizer):
    """Heavy-ball momentum that returns its vector itself."""

    name = "its-vector"
    vectors = ("velocity",)

    def step(self, average, state, numbers):
        """See `OuterOptimizer.step`."""
        state["velocity"] *= np.float32(0.5)
        state["velocity"] -= average
        return state["velocity"]


class ACopy(ItsVector):
    """The same, with a copy."""

    def step(self, average, state, numbers):
        """See `OuterOptimizer.step`."""
        return super().step(average, state, numbers).copy()


def test_an_optimizer_may_return_its_vector(make_run):
    """Regression: the coding error of the downlink was added to it."""
    made = []
    for outer in (ItsVector(), ACopy()):
        run = make_run(outer.name + type(outer).__name__, MODEL, outer=outer)
        run.start()
        for version in (1, 2, 3):
            run.round(version, "a", "b")
        made.append(run.store.digest)
    assert made[0] == made[1]
