"""Number formats at the cut, in live runs.

Each direction has its own, and its errors are recorded.
"""

import json

import pytest
from click.testing import CliRunner

from fsl_async.commands import status

ERRORS = {"fp32": (0.0, 0.0), "bf16": (5e-4, 3e-3), "e4m3": (5e-3, 5e-2), "uniform": (5e-3, 5e-2)}
"""Relative root mean square, at least and at most."""


@pytest.mark.parametrize(
    ("up", "down"),
    [
        ("e4m3", "fp32"),
        ("bf16", "uniform"),
        *(
            pytest.param(*one, marks=pytest.mark.sweep)
            for one in (("uniform", "bf16"), ("fp32", "e4m3"))
        ),
    ],
)
def test_each_direction_has_its_own_format(nodes, configured, text, up, down):
    """A run uses its format in each direction, and an operator sees the coding errors."""
    config = configured(
        "split.method=splitfed-v2",
        f"split.up={up}",
        f"split.down={down}",
        f"data.path={text}",
        "run.rounds=3",
        "model.width=64",
    )
    run = nodes(config)
    bytes_of = {"fp32": 4, "bf16": 2, "e4m3": 1, "uniform": 1}
    values = 2 * 3 * 10 * 16 * 64
    shown = CliRunner().invoke(status.command, [str(run.run_dir), "--json"], standalone_mode=False)
    found = json.loads(shown.output)
    server = found["split_server"]["traffic"]
    for name, chosen in (("activations up", up), ("gradients down", down)):
        scales = {"fp32": 0, "bf16": 0, "e4m3": 1, "uniform": 1.25}[chosen] * values / 64
        assert server["payload"][name] == pytest.approx(
            values * bytes_of[chosen] + scales, rel=0.01
        )
        least, most = ERRORS[chosen]
        assert least <= server["error"][name] <= most
    assert found["split_server"]["uploads"]["trained"] == 18
    assert found["split_server"]["uploads"]["problems"] == []
    models = found["traffic"]["payload"]
    weights = run.summaries["site-a"].traffic["payload"]["client model up"]
    assert models["client model up"] >= weights
    assert models["client model down"] == sum(
        run.summaries[name].traffic["payload"]["client model down"] for name in run.names
    )
    text_shown = (
        CliRunner().invoke(status.command, [str(run.run_dir)], standalone_mode=False).output
    )
    for words in (
        "bytes of the parameter server",
        "bytes of the split server",
        "sockets down",
        "18 trained",
    ):
        assert words in text_shown
    alone = CliRunner().invoke(status.command, [str(run.run_dir / "server")], standalone_mode=False)
    assert "split server (splitfed-v2): ended" in alone.output
