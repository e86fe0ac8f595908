"""Runs without rounds by nodes in one process, over real sockets: sites that come as they like."""

import importlib.util
import json

import pytest
from node_runs import STEPS, TUNED, config_of, play, write_data

from fsl_async.commands.status_report import NodeStatus, facts
from fsl_async.observe.ledger_audit import LEDGER, audit_run, read_ledger

pytestmark = [
    pytest.mark.skipif(not importlib.util.find_spec("peft"), reason="needs the extra hf"),
    pytest.mark.usefixtures("one_thread"),
]
VERSIONS = 6
BUFFER = {
    **TUNED,
    "sync.trigger": "buffer",
    "sync.every_s": 2.0,
    "sync.buffer": 2,
    "run.rounds": VERSIONS,
    "codec.down": "fp32",
}
del BUFFER["sync.quorum"]
OWN = {**BUFFER, "sync.pace": "own"}
LABELS = {"tune.objective": "classify", "tune.labels": "bad,good"}


def merged_in(run_dir):
    """The entries of each version after the first, by the ledger: new ones, and used again."""
    made = [one for one in read_ledger(run_dir / LEDGER)[0] if one["fact"] == "version"]
    return [(one["merged"], one.get("reused", [])) for one in made if one["version"]]


@pytest.fixture
def run(tmp_path, base):
    """Run three sites to the end; return the run's directory."""

    def run(settings):
        data = write_data(tmp_path, a=6, b=6, c=6)
        if settings.get("tune.objective") == "classify":
            for path in data.values():
                texts = [json.loads(line) for line in path.read_text().splitlines()]
                rows = [one | {"label": number % 2} for number, one in enumerate(texts)]
                path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        clients = {name: {"data": str(path), "base": str(base)} for name, path in data.items()}
        play(config_of(settings, 3), tmp_path / "run", clients)
        return tmp_path / "run"

    return run


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({**BUFFER, "sync.local_steps": STEPS}, id="buffer"),
        pytest.param(OWN, id="own pace"),
        pytest.param({**OWN, "tune.rule": "ffa", "sync.weighting": "arrivals"}, id="ffa"),
        pytest.param({**OWN, "outer.aggregation": "latest"}, id="latest"),
        pytest.param({**OWN, "outer.aggregation": "latest", "tune.rule": "ffa"}, id="latest, ffa"),
        pytest.param(
            {**OWN, **LABELS, "outer.aggregation": "latest", "tune.targets": "none"}, id="head"
        ),
    ],
)
def test_sites_tune_without_rounds(run, settings):
    """Nothing is lost or merged twice, and status tells how much each site has of the versions."""
    run_dir = run(settings)
    audit = audit_run(run_dir)
    assert (audit.lost, audit.doubled, audit.problems) == ((), (), ())
    versions = merged_in(run_dir)
    assert len(versions) >= VERSIONS
    status = NodeStatus(run_dir)
    found = facts(status, status.state.node.last_t)
    shares = found["shares"]
    assert sum(one["arrivals"] for one in shares.values()) == pytest.approx(1.0, abs=0.001)
    assert sum(one["weight"] for one in shares.values()) == pytest.approx(1.0, abs=0.001)
