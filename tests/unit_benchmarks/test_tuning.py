"""benchmarks/tuning.py: which rows it runs, and their summary. It trains only by hand."""

import importlib
from pathlib import Path

import pytest

pytest.importorskip("peft", reason="needs the extra hf")
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def tuning(monkeypatch):
    """The script."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("tuning")


def test_every_row_is_another_and_rules_of_mixed_ranks_allow_them(tuning):
    """A row that is found under another's key would never run."""
    from fsl_async.store.adapters import RULES

    found = list(tuning.specs(tuning.Size()))
    assert len({spec.key for spec in found}) == len(found)
    assert set(RULES) <= {spec.name for spec in found}
    for spec in found:
        setting = tuning.SETTINGS_OF[spec.setting]
        if setting.ranks and setting.method(spec.name) in RULES:
            assert RULES[setting.method(spec.name)].unequal_ranks


def test_the_summary_has_means_over_seeds(tuning):
    """0.70 and 0.80 are 0.75 with a deviation of sqrt(2 x 0.05^2) = 0.071."""
    rows = {
        str(seed): {
            "setting": "deep",
            "name": "fedit",
            "accuracy": accuracy,
            "loss": 0.5,
            "ps_memory_bytes": 70_000_000,
            "site_round_bytes": {"coded": {"adapters up": 1500.0, "adapters down": 500.0}},
        }
        for seed, accuracy in enumerate((0.7, 0.8))
    }
    (line,) = tuning.summary(rows)[1:]
    words = ["deep", "fedit", "2", "0.750", "±", "0.071", "0.500", "1.5", "0.5", "70"]
    assert line.split() == words


def test_clips_are_of_norms_by_a_power_of_the_steps(tuning):
    """By hand: 8 at 4 x the steps is 4 by sqrt(steps), above 1.5 x 2; by the steps it is 2."""
    assert tuning  # its folder is on the path now
    cost = importlib.import_module("clip_cost")
    norms, steps = [2.0, 2.0, 8.0], [1, 1, 4]
    assert cost.factors(norms, steps, 0.5) == [1.0, 1.0, 0.75]
    assert cost.factors(norms, steps, 1.0) == [1.0, 1.0, 1.0]
    assert cost.factors([2.0, 8.0], [1, 1], 0.5) == [1.0, 0.375], "of two the smaller counts"
    seen = [(norms, steps), ([2.0, 2.0, 2.0], steps)]
    assert cost.counts(seen, 0.5) == [0, 0, 1]
    (first, *_) = cost.exponents([([8.0, 2.0, 2.0], [4, 1, 1])])
    assert first == 1.0
