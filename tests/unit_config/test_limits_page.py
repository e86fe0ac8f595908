"""docs/LIMITS.md against the settings that it names."""

import re
from pathlib import Path

import attrs

from fsl_async.config.load import load
from fsl_async.config.settings import TABLES
from fsl_transport import TransportSettings
from fsl_transport.settings import Rate

PAGE = (Path(__file__).parents[2] / "docs" / "LIMITS.md").read_text()
DEFAULTS = {one.name: one.default for one in attrs.fields(TransportSettings)}


def shown(value):
    """The forms in which the page writes a number."""
    if isinstance(value, Rate):
        both = zip(shown(value.per_s), shown(value.burst), strict=True)
        return [f"{per_s}, {burst}" for per_s, burst in both]
    units = {"KiB": 10, "MiB": 20, "GiB": 30}
    sizes = [f"{value / (1 << bits):g} {unit}" for unit, bits in units.items()]
    return [f"{value:,.0f}", *sizes]


def rows():
    """The names of transport settings on the page, each with its line."""
    for line in PAGE.splitlines():
        for name in re.findall(r"`([a-z_]+)`", line):
            if name in DEFAULTS and line.startswith("|"):
                yield name, line


def test_defaults_are_those_of_the_transport():
    """A limit that was raised in the code once stayed on the page."""
    found = dict(rows())
    assert len(found) >= 14
    wrong = [
        name
        for name, line in found.items()
        if not any(
            re.search(rf"(^|[^\d,.]){re.escape(form)}", line) for form in shown(DEFAULTS[name])
        )
    ]
    assert wrong == []


def test_the_settings_that_it_names_exist():
    """A renamed setting would be looked for in vain."""
    for name in re.findall(r"`([a-z]+\.[a-z_]+)`", PAGE):
        table, _, key = name.partition(".")
        assert table in TABLES, name
        assert hasattr(getattr(load(None), table), key) or key in {"", "clip_"}, name
