"""Figures in README.md against their measurements."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("clients", [2, 4])
def test_the_loss_at_equal_tokens_matches_its_measurement(clients):
    """The limits in README.md must match the table in docs/BENCHMARKS.md."""
    text = (ROOT / "docs" / "BENCHMARKS.md").read_text()
    table = text.partition("### Clients, formats and periods")[2].partition("###")[0]
    rows = re.findall(rf"^\| {clients} \|.*\| \+([0-9.]+) ±", table, re.MULTILINE)
    worst, best = max(map(float, rows)), min(map(float, rows))
    limits = (ROOT / "README.md").read_text().partition("## Limits")[2].partition("\n## ")[0]
    stated = re.search(rf"\+(\d+) to \+(\d+) % with {clients}\b", limits)
    assert stated is not None
    assert (int(stated[1]), int(stated[2])) == (int(best), round(worst))
    assert "benchmarks/quality.py" in limits
    assert "outer.optimizer" in limits
