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
