"""Figures in README.md against the rows that they come from."""

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_price_of_training_together_is_that_of_the_rows():
    """New rows or other defaults must not leave an old figure there, or a figure without rows."""
    done = subprocess.run(
        [sys.executable, "quality.py", "--summary"],
        cwd=ROOT / "benchmarks",
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    found = json.loads(done.stdout)
    assert found["rows_of_other_code"] == 0, "measure the goals again: quality.py goals"
    limits = (ROOT / "README.md").read_text().partition("## Limits")[2].partition("\n## ")[0]
    pattern = r"([\d.]+) % higher with 2 clients, ([\d.]+) % with 4 and\s+([\d.]+) % with 8"
    stated = re.search(pattern, limits)
    assert stated is not None
    assert [float(one) for one in stated.groups()] == [
        round(found[f"k{count}_percent"], 1) for count in (2, 4, 8)
    ]
