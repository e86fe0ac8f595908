"""docs/BEHAVIORS.md names a test for each behavior."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_each_behavior_has_its_test():
    """A test that is deleted or renamed takes its line along."""
    text = (ROOT / "docs/BEHAVIORS.md").read_text()
    lines = [line for line in text.splitlines() if line.startswith("- ")]
    named = re.findall(r"^- .+ - `(\S+)::(\w+)`$", text, re.MULTILINE)
    assert len(named) == len(lines) > 100
    for path, name in named:
        tree = ast.parse((ROOT / "tests" / path).read_text())
        assert name in {getattr(node, "name", "") for node in ast.walk(tree)}, f"{path}::{name}"


def test_each_line_of_the_table_of_modules_has_its_test():
    """A promise about what is exchanged must not outlive the test that holds it."""
    page = (ROOT / "docs" / "guides" / "your-own-script.md").read_text()
    rows = [line for line in page.splitlines() if re.match(r"\| .* \| .* \| .* \|$", line)]
    rows = rows[[row.startswith("| in the model |") for row in rows].index(True) + 1 :]
    named = [re.search(r"`(test_\w+)` \|$", row) for row in rows]
    assert len(named) > 10
    files = [*ROOT.glob("tests/unit_learn/**/test_*.py"), *ROOT.glob("tests/unit_store/test_*.py")]
    text = "\n".join(one.read_text() for one in files)
    there = set(re.findall(r"^def (test_\w+)", text, re.MULTILINE))
    assert [row for row, found in zip(rows, named, strict=True) if not found] == []
    assert {found[1] for found in named if found} - there == set()
