"""What README.md promises, against what it is about."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("clients", [2, 4])
def test_the_loss_at_equal_tokens_is_said_as_it_was_measured(clients):
    """Nobody should have to find out in a table of another file what training together costs."""
    text = (ROOT / "docs" / "BENCHMARKS.md").read_text()
    table = text.partition("### Clients, formats and periods")[2].partition("###")[0]
    rows = re.findall(rf"^\| {clients} \|.*\| \+([0-9.]+) ±", table, re.MULTILINE)
    worst, best = max(map(float, rows)), min(map(float, rows))
    limits = (ROOT / "README.md").read_text().partition("## Limits")[2].partition("\n## ")[0]
    said = re.search(rf"\+(\d+) to \+(\d+) % with {clients}\b", limits)
    assert said is not None
    assert (int(said[1]), int(said[2])) == (int(best), round(worst))
    assert "benchmarks/quality.py" in limits
    assert "outer.optimizer" in limits
