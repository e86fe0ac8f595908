"""The table of rules in docs/TUNING.md has what the code does."""

from pathlib import Path

from fsl_async.config.settings_tuning import BASIS_RULES, PRODUCT_RULES, ROUND_RULES
from fsl_async.store.rules.adapters import RULES

PAGE = Path(__file__).parents[2] / "docs" / "TUNING.md"


def _yes(value):
    return "yes" if value else "no"


def test_the_page_lists_every_rule_as_it_is():
    """A user chooses by this table."""
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in rows]
    found = {cells[0].strip("`"): cells[1:] for cells in table if len(cells) == 8}
    assert found == {
        name: [
            rule.summary,
            rule.source,
            _yes(rule.by_rounds),
            _yes(rule.unequal_ranks),
            _yes(rule.changes_basis),
            _yes(not rule.by_rounds),
            _yes(rule.is_linear),
        ]
        for name, rule in RULES.items()
    }


def test_the_configuration_knows_which_rules_need_rounds():
    """It cannot import the rules, so it names them again."""
    for known, wanted in (
        (ROUND_RULES, "by_rounds"),
        (PRODUCT_RULES, "merges_products"),
        (BASIS_RULES, "changes_basis"),
    ):
        assert {name for name, rule in RULES.items() if getattr(rule, wanted)} == set(known)
