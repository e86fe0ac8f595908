"""Checks an operator's own rules: each result of a call, and the class by a trial. Pure.

A check takes the object, the result of a call and its arguments; it returns what is wrong with the
result, or nothing. A trial takes the class and the run's settings with which it is made, and
returns what is wrong with it, or nothing: the same arguments must give the same bits, because
versions are made again after a crash.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from attrs import frozen

from fsl_async.config.settings import AirConfig
from fsl_async.store.model.manifest import Manifest
from fsl_async.store.rules.adapters import RULES, AdapterRule, Current, Draw, Factors, Merged, Site
from fsl_async.store.rules.aggregation import RowClient, Rule
from fsl_async.store.rules.air import Channel
from fsl_async.store.rules.outer import OuterOptimizer, OuterStep

_SHAPES = [("probe.weight", (64, 40)), ("probe.bias", (40,))]
_VECTORS = ("weights", "residual", "mean", "owed")
"""Vectors that the store itself keeps."""
_SHARED = "returns memory that it uses again, and it runs in several threads at once"
_CLIENT_FACTS = (
    "exchanges_a", "by_rounds", "unequal_ranks", "keeps_tail", "changes_basis", "has_patch",
    "merges_products", "is_linear", "trains_a", "trains_b",
)  # fmt: skip
"""Attributes of a built-in rule of adapters that clients read."""


@frozen
class Kind:
    """A kind of rule. calls: the checks by method."""

    base: type[Any]
    calls: Mapping[str, Callable[..., str]]
    trial: Callable[..., str]


def vector_problem(result: Any, values: int) -> str:
    """Say why a result is not float32 (values,) and finite; empty: it is."""
    if not isinstance(result, np.ndarray):
        return f"it returns {type(result).__name__}, not an array"
    if result.dtype != np.float32 or result.shape != (values,):
        return f"it returns {result.dtype} {result.shape}, not float32 ({values},)"
    return "" if np.isfinite(result).all() else "its result is not finite"


def combined(_: Rule, result: Any, rows: Any, *_more: Any) -> str:
    """Check the result of `Rule.combine`."""
    return vector_problem(result, rows.shape[1])


def chosen(_: Rule, result: Any, distances: Any) -> str:
    """Check the result of `Rule.choose`."""
    fits = isinstance(result, np.ndarray) and result.dtype == bool
    if not fits or result.shape != (len(distances),) or not result.any():
        return f"it must return bool ({len(distances)},), with a row that is used"
    return ""


def merged(rule: AdapterRule, result: Any, current: Current, *_more: Any) -> str:
    """Check the result of `AdapterRule.merge`."""
    if not isinstance(result, Merged):
        return f"it returns {type(result).__name__}, not Merged"
    wanted = {"patch": rule.has_patch, "owed": rule.keeps_owed}
    for name, is_wanted in wanted.items():
        if (getattr(result, name) is not None) != is_wanted:
            return f"the rule must {'' if is_wanted else 'not '}return {name}"
    shapes = current.factors.a.shape, current.factors.b.shape
    for factors in (result.factors, result.owed):
        if factors is None:
            continue
        if (factors.a.shape, factors.b.shape) != shapes:
            return f"its factors are {factors.a.shape} and {factors.b.shape}, not {shapes}"
        if not (np.isfinite(factors.a).all() and np.isfinite(factors.b).all()):
            return "its factors are not finite"
    return ""


def numbered(_: OuterOptimizer, result: Any, *_more: Any) -> str:
    """Check the result of `OuterOptimizer.numbers`."""
    fits = isinstance(result, OuterStep)
    if not fits or not math.isfinite(result.learning_rate + result.momentum):
        return f"it returns {result!r:.80}, not an OuterStep of finite numbers"
    return ""


def stepped(optimizer: OuterOptimizer, result: Any, average: Any, state: Any, *_more: Any) -> str:
    """Check the result of `OuterOptimizer.step`, and the vectors that it has changed."""
    if problem := vector_problem(result, len(average)):
        return problem
    is_wrong = [name for name in optimizer.vectors if not np.isfinite(state[name]).all()]
    return f"state[{is_wrong[0]!r}] is not finite" if is_wrong else ""


def begun(_: Channel, result: Any, _seed: int, _version: int, sites: Sequence[str]) -> str:
    """Check the result of `Channel.begin`."""
    fits = isinstance(result, np.ndarray) and result.dtype == bool and result.shape == (len(sites),)
    return "" if fits else f"it must return bool ({len(sites)},)"


def received(_: Channel, result: Any, vectors: Any) -> str:
    """Check the result of `Channel.transmit`."""
    return vector_problem(result, vectors.shape[1])


def try_channel(channel: type[Channel]) -> str:
    """Try a channel on random vectors of two sites, with the default settings."""
    made, vectors = channel(AirConfig()), _noise(2, 2600)
    sends = made.begin(0, 1, ("a", "b"))
    if sends.any():
        made.transmit(vectors[sends])
    return "" if math.isfinite(made.power) else "power must be a finite number"


def try_rule(rule: type[Rule], byzantine: int = 0) -> str:
    """Try an aggregation rule on random rows; clients send no metrics."""
    if not rule.by_rows or rule.reuses:
        return "by_rows must be true, and reuses false: it gets one row of each client"
    made = rule(byzantine)
    if type(made.least) is not int or made.least < 1:
        return f"least must be a whole number from 1, got {made.least!r}"
    manifest = Manifest.from_shapes(_SHAPES)
    parts = manifest.parts(0)
    for count in (made.least, made.least + 2):
        rows = _noise(count, manifest.values)
        clients = tuple(RowClient(f"c{one}", 1.0, 100, 10, 0, {}) for one in range(count))
        distances = np.square(rows[:, None, :40] - rows[None, :, :40]).sum(axis=2, dtype=float)
        found, results = [], []
        for one in (made, made, rule(byzantine)):
            used = one.choose(distances.copy()) if one.needs_distances else np.ones(count, bool)
            few = tuple(client for client, is_used in zip(clients, used, strict=True) if is_used)
            results.append(one.combine(rows[used], few, parts))
            found.append(results[-1].tobytes())
        if len(set(found)) > 1:
            return "combine gives other values for the same rows"
        if np.shares_memory(results[0], results[1]):
            return f"combine {_SHARED}"
    return ""


def try_optimizer(
    optimizer: type[OuterOptimizer], learning_rate: float = 0.7, momentum: float = 0.9
) -> str:
    """Try an outer optimizer on two random averages, three times."""
    first, averages = optimizer(learning_rate, momentum), _noise(2, 2600)
    if not isinstance(first.vectors, tuple) or len(set(first.vectors)) != len(first.vectors):
        return "vectors must be a tuple of different names"
    for name in first.vectors:
        if not re.fullmatch(r"[a-z_]{1,32}", str(name)) or name in _VECTORS:
            return f"vectors: {name!r} must be letters a-z and _, and none of {', '.join(_VECTORS)}"
    found, problem, steps = set(), "", []
    for one in (first, first, optimizer(learning_rate, momentum)):
        held = {name: np.zeros(2600, np.float32) for name in one.vectors}
        state, bits = dict(held), b""
        for version, average in enumerate(averages, 1):
            steps.append(one.step(average.copy(), state, one.numbers(version, 1.0, 50.0)))
            bits += steps[-1].tobytes()
        if state.keys() != held.keys() or any(state[name] is not held[name] for name in held):
            problem = "step must change the vectors of state in place"
        found.add(bits + b"".join(vector.tobytes() for vector in held.values()))
    if len(found) > 1:
        return "step gives other values for the same average and state"
    if not problem and np.shares_memory(steps[0], steps[1]) and not first.vectors:
        problem = f"step {_SHARED}"
    return problem


def try_adapter_rule(rule: type[AdapterRule]) -> str:
    """Try a rule of adapters on random factors."""
    base = next((one for one in RULES.values() if issubclass(rule, one)), None)
    if base is None or not base.merges_products:
        able = ", ".join(one.__name__ for one in RULES.values() if one.merges_products)
        return f"it must derive from a built-in rule that merges products: {able}"
    changed = [one for one in _CLIENT_FACTS if getattr(rule, one) != getattr(base, one)]
    if changed:
        return f"{changed[0]} is what clients train by, and must be that of {base.__name__}"
    noise = _noise(3, 4 * (24 + 32)).astype(np.float64)
    factors = [Factors(one[:96].reshape(4, 24), one[96:].reshape(4, 32)) for one in noise]
    sites = [Site(0.5, 4, one) for one in factors[1:]]
    found = [_bits(rule().merge(Current(factors[0]), sites, 2.0, Draw(7, 1, 0))) for _ in "ab"]
    return "" if found[0] == found[1] else "merge gives other factors for the same sites"


def _bits(merged: Merged) -> Sequence[bytes]:
    some = (merged.factors, merged.patch, merged.owed)
    return [one.tobytes() for part in some if part is not None for one in (part.a, part.b)]


def _noise(rows: int, values: int) -> Any:
    return np.random.default_rng(7).standard_normal((rows, values)).astype(np.float32)


KINDS: dict[str, Kind] = {
    "outer.aggregation": Kind(Rule, {"combine": combined, "choose": chosen}, try_rule),
    "outer.optimizer": Kind(OuterOptimizer, {"numbers": numbered, "step": stepped}, try_optimizer),
    "outer.channel": Kind(Channel, {"begin": begun, "transmit": received}, try_channel),
    "tune.merge": Kind(AdapterRule, {"merge": merged}, try_adapter_rule),
}
"""By setting."""
