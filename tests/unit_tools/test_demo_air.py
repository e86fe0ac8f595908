"""`demo air`: its task simulated with kills, the digital channel, and what the demo reports."""

import json

import numpy as np
import pytest

import fsl_async
from fsl_async.config.settings import AirConfig
from fsl_async.observe.ledger_audit import Audit, audit_run
from fsl_async.process.stopper import Stopper
from fsl_async.tools.chaos.report import Recovery
from fsl_async.tools.demo import air, air_task
from fsl_async.tools.demo.scenario import Choices, Played, Stage

VALUES = 2 * air_task.FEATURES + 2


def simulated(run_dir, **more):
    """Simulate the task over the air with five sites."""
    chosen = Choices(rounds=6)
    settings = {**air.settings_of(chosen, 5, "air", 20), "run.rounds": 6}
    del settings["sync.clients"]
    return fsl_async.simulate(
        air_task.train, clients=5, settings=settings, step_seconds=3600, run_dir=run_dir,
        log=lambda _: None, seed=3, **more,
    )  # fmt: skip


def test_kills_of_clients_and_the_parameter_server_lose_nothing(tmp_path):
    """A bad week with power cuts: what the channel delivered is on disk before its version is."""
    storm = simulated(tmp_path / "storm", faults="storm")
    assert storm.faults["server killed"] > 1
    audit = audit_run(tmp_path / "storm")
    assert audit.is_clean
    assert storm.points[-1].version == 6
    assert audit.channel_uses >= 6 * VALUES


def test_the_same_seed_gives_the_same_versions(tmp_path):
    """Gains and noise follow from the seed alone."""
    one, other = (simulated(tmp_path / name) for name in "ab")
    assert one.digests == other.digests
    assert audit_run(tmp_path / "a").channel_uses == 6 * VALUES


@pytest.mark.parametrize(("snr_db", "carried"), [(0, 0.5 / 2.2), (20, 3.33 / 2.2)])
def test_the_digital_channel_carries_what_the_capacity_lets_through(snr_db, carried):
    """At 0 dB half a bit in a use, for all sites together."""
    channel = air_task.Digital(AirConfig(snr_db=snr_db))
    assert channel.begin(1, 2, ["a", "b", "c"]).all()
    signs = np.ones((3, 20_000), np.float32)  # no value of a coded one is zero
    signs *= np.array([[1], [10], [100]], np.float32)
    found = channel.transmit(signs)
    assert (found != 0).mean() == pytest.approx(min(1, carried), rel=0.01)
    if carried < 1:  # a value is of one site
        ones = np.round(found / 3).astype(int)
        assert [round((ones == size).mean(), 2) for size in (1, 10, 100)] == [0.08] * 3
    noise = np.random.default_rng(0).standard_normal(20_000).astype(np.float32)
    bits = 8 * len(air_task.encode(noise, channel.coding)) / noise.size
    assert bits == pytest.approx(channel.bits, rel=0.1)


@pytest.fixture
def played(tmp_path):
    """A demo in which all went well."""
    found = Played(air.air(Choices(rounds=4, run_dir=tmp_path)))
    found.faults = [Recovery("kill", "client-2", 10.0, detected=13.0, resumed=14.0, back=20.0)]
    found.state.ps.version = 4
    found.audit = Audit(4, 6, 600, 6, 0, 0, (), (), (), channel_uses=8200)
    return found


@pytest.mark.parametrize(
    ("analog", "uses", "problem"),
    [(0.75, 8200, None), (0.6, 8200, "digital was ahead"), (0.75, 0, "no version came over")],
)
def test_the_table_and_what_is_wrong(played, monkeypatch, analog, uses, problem):
    """Users compare at the same channel uses; a demo in which nothing was sent has failed."""
    rows = {air.AIR: [0.74, analog, 0.75], air.DIGITAL: [0.65, 0.7, 0.7], air.NONE: [0.76] * 3}
    monkeypatch.setattr(air, "measured", lambda *_: rows)
    played.audit = Audit(4, 6, 600, 6, 0, 0, (), (), (), channel_uses=uses)
    found = air.conclude(played, Stage(lambda _: None, Stopper()))
    assert [problem in one for one in found.problems] == ([True] if problem else [])
    assert any(line.startswith("over the air") and "0.740" in line for line in found.lines)
    json.dumps(found.summary)
