"""The benchmark of the links runs. No number is judged."""

import importlib.util
from pathlib import Path


def test_a_row_of_a_profile(lab, monkeypatch):
    """Its rows are limits for other benchmarks' numbers, so they name backend and link."""
    path = Path(__file__).parents[2] / "benchmarks" / "netlab.py"
    spec = importlib.util.spec_from_file_location("netlab_benchmark", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "_iperf3", lambda *_: None)  # not installed on every machine
    row = module.measure(lab, "dsl", 0.3)
    assert row["backend"] == lab.backend
    assert row["rate_mbit"] == 10
    assert row["cubic_1"] > 0
    assert "| dsl |" in module.table([row])
